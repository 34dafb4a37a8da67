//! Functions in containers: started through the container engine (podman, docker), kept warm, and passed by flows.
//!
//! A container has no network but its own loopback. We hold sockets open in it: through one a flow goes in, through
//! another it comes back, at an address that names the flow. So a container can reach nobody but us, nothing of it is on the
//! host, and bytes cannot get past it.
//!
//! | file | does | where |
//! |---|---|---|
//! | `engine.rs` | speaks to the container engine | the containers' process |
//! | `ask.rs` | what the two processes say to each other | |
//! | `process.rs`, `held.rs` | a process of its own that may ask the engine and enter networks: one thread a container | |
//! | `starter.rs` | our end of it | `up` |
//! | `pool.rs`, `keep.rs` | the containers of one function: warm, probed, replaced | a thread of its own |
//! | `instance.rs` | one container as flows see it: sockets into it, and how long it is there | |
//! | `door.rs` | where its flows come back, for one worker | workers |
//! | `passage.rs` | one flow through one container | workers |
//! | `probe.rs`, `trial.rs` | flows of our own through it | the pools' thread, commands |

mod ask;
mod door;
mod engine;
mod held;
mod instance;
mod keep;
mod passage;
mod pool;
mod probe;
mod process;
mod starter;
mod trial;

pub use engine::{Engine, EngineError, Leftover};
pub use instance::{Guest, Instance};
pub use passage::{Intro, Passed, Trouble, pass};
pub use pool::Pool;
pub use probe::Probed;
pub use process::{ARGUMENT, serve};
pub use starter::Containers;
pub use trial::{Led, lead_and_wait, probe_and_wait};
