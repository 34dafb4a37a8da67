//! The packet engine at work: `core::engine` between the interfaces it takes packets from and the policy it asks
//! (ProxyEngine). Each worker is a thread with its own connections, ports, sockets and ledger; they share nothing.
//!
//! | file | does |
//! |---|---|
//! | `open.rs` | what needs rights: sockets, programs on interfaces |
//! | `driver.rs`, `packet.rs`, `xdp.rs` | takes frames and sends them: packet sockets, AF_XDP |
//! | `strays.rs`, `bell.rs` | what workers tell each other |
//! | `offload.rs`, `joining.rs` | connections that the kernel translates by itself; how it takes them over |
//! | `decided.rs`, `reset.rs` | connections that the kernel carries from their SYN on |
//! | `hops.rs` | neighbours: who they are, and which of them leads to a server |
//! | `select.rs` | asks policy for a server |
//! | `flows.rs` | flows in flight and their records |
//! | `targets.rs` | which interfaces send frames that XDP redirects to them |
//! | `surroundings.rs` | what it is told of the node |
//! | `worker.rs` | the thread |

mod bell;
mod coalesce;
mod decided;
mod driver;
mod flows;
mod hops;
mod joining;
mod offload;
mod open;
mod packet;
mod reset;
mod select;
mod strays;
mod surroundings;
mod targets;
mod worker;
mod xdp;

pub use driver::{Arrived, Driver};
pub use flows::Leave;
pub use open::{OpenError, Opened};
pub use surroundings::Surroundings;
pub use worker::Engines;
