//! Functions in containers. They are started through the container engine (podman, docker), kept running, and flows pass
//! through them.
//!
//! A container has no network except its own loopback. We hold sockets open in that network: a flow goes in through one
//! of them. It comes back through another, at an address that identifies the flow. So a container can reach only us, it
//! has no port on the host, and bytes cannot bypass it.
//!
//! | file | does | where |
//! |---|---|---|
//! | `crates/common/src/containers.rs` | speaks to the container engine | the containers' process |
//! | `ask.rs` | the messages between the two processes | |
//! | `process.rs`, `held.rs` | a separate process with the rights to use the engine and enter networks: one thread for each container | |
//! | `starter.rs` | our end of the connection to it | `up` |
//! | `pool.rs`, `keep.rs` | the containers of one function: warm, probed, replaced | a thread of its own |
//! | `grow.rs` | how many of them there are | the same thread |
//! | `instance.rs` | one container as flows see it: sockets of its network, and its lifetime | |
//! | `door.rs` | where flows come back, for one worker | workers |
//! | `passage.rs` | one flow through one container | workers |
//! | `probe.rs`, `trial.rs` | flows of our own through it | the pools' thread, commands |

mod ask;
mod door;
mod grow;
mod held;
mod instance;
mod keep;
mod passage;
mod pool;
mod probe;
mod process;
mod starter;
mod trial;

pub use instance::{Guest, Instance};
pub use passage::{Intro, Passed, Trouble, pass};
pub use pool::Pool;
pub use probe::Probed;
pub use process::{ARGUMENT, serve};
pub use sidetrack_common::containers::{Engine, EngineError, Leftover};
pub use starter::Containers;
pub use trial::{Led, lead_and_wait, probe_and_wait};
