//! Runs the packet engine: connects `core::engine` to the interfaces that it takes packets from, and to the policy
//! (ProxyEngine). Each worker is a thread with its own connections, ports, sockets and ledger; workers share none of
//! these.
//!
//! | file | does |
//! |---|---|
//! | `open.rs` | what needs rights: sockets, programs on interfaces |
//! | `driver.rs`, `packet.rs`, `xdp.rs` | takes frames and sends them: packet sockets, AF_XDP |
//! | `strays.rs`, `bell.rs` | hands packets to other workers, wakes workers |
//! | `offload.rs`, `joining.rs` | connections that the kernel translates by itself; how it takes them over |
//! | `decided.rs`, `reset.rs` | connections that the kernel handles from their SYN on |
//! | `hops.rs` | neighbours, and which of them leads to a server |
//! | `select.rs` | asks policy for a server |
//! | `flows.rs` | flows in flight and their records |
//! | `targets.rs` | which interfaces send frames that XDP redirects to them |
//! | `surroundings.rs` | what the workers need from the rest of the node |
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
