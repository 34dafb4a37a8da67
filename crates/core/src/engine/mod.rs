//! A TCP proxy at packet level (ProxyEngine, "Overview"). It keeps one state for two connections and rewrites headers.
//! The server is chosen when the client's first bytes have come (delayed binding). Callbacks may inspect and change payload.
//!
//! Packets and time go in; packets and session records come out. The engine has no I/O and no clock, and it allocates nothing
//! for a packet of an established connection. [`Engine`] has the shape of every protocol core: `handle`, `poll`, `deadline`, `tick`.
//!
//! The phases of a connection (`connection::Phase`):
//!
//! ```text
//!                 SYN                 handshake done              server chosen
//!   Free ----------------> Opening -----------------> Deciding ------------------> Connecting
//!    ^ \                     |                           |                             |
//!    |  \  ACK with a cookie |                           |                             | SYN-ACK of the server
//!    |   +-----------------------------------------------^                             v
//!    |                       |                           |                           Bound <---> offloaded (`offload`)
//!    |  time-out, reset      |  time-out, reset, refused |   reset, time-out           |
//!    +<----------------------+<--------------------------+<----------------------------+
//!    |                                                                                 | both FINs acknowledged
//!    |        `time_wait_ms` over, port or slot needed, new SYN of the client          v
//!    +<---------------------------------------------------------------------------- TimeWait
//! ```
//!
//! | file | does |
//! |---|---|
//! | `packet`, `options`, `checksum`, `seq` | reads headers, checks them, computes checksums |
//! | `slot`, `narrow` | places of connections and the tables that they index; numbers made smaller |
//! | `table`, `timer`, `ports`, `source` | finds connections, time-outs, sources towards servers |
//! | `open`, `cookie` | the handshake with the client, with state or without |
//! | `bind`, `owned` | holds the first bytes, asks for a server, connects to it, delivers the held bytes |
//! | `reply` | answers a client that waits for an answer before it says which server it wants |
//! | `forward` | rewrites packets in place: nearly all packets |
//! | `rebuild`, `edit` | builds other packets anew: changed payload, other options, resets |
//! | `offload` | offloads connections: the kernel translates the packets of those that need only translation |
//! | `handshake` | offloads the handshake with a server: the kernel handles the SYN-ACK and sends the first bytes |
//! | `room` | chooses the connection that leaves when a client with fewer connections finds no room |
//! | `ahead` | loads what a batch needs from memory in one pass |
//! | `icmp`, `expire`, `send`, `record` | errors from the network, time-outs, own segments, session records |
//!
//! The end hosts deliver all bytes that pass through: they retransmit what is lost, as in ProxyEngine. The engine itself
//! delivers only the first bytes, because it acknowledged them before there was a server. It does so as a TCP sender
//! does.

mod ahead;
mod bind;
pub mod checksum;
mod config;
mod connection;
mod cookie;
mod edit;
mod expire;
mod forward;
mod handshake;
mod icmp;
mod machine;
mod narrow;
mod offload;
mod open;
pub mod options;
mod outbox;
mod owned;
pub mod packet;
mod ports;
mod rebuild;
mod record;
mod reply;
mod room;
mod schedule;
mod send;
pub mod seq;
pub mod siphash;
mod slot;
mod source;
mod table;
mod timer;

pub use ahead::Ahead;
pub use config::{
    Callbacks, Config, ConnectionId, Crowd, Hop, Listen, Opening, Payload, Reply, Selection, Target,
};
pub use cookie::Cookies;
pub use handshake::{Handshake, SynAck};
pub use machine::{Counters, Drop, Engine, Fate};
pub use offload::{Fin, Moved, OffloadId, Progress, Standing, Translation};
pub use packet::Checksums;
pub use ports::{Share, Steering};
pub use record::{Record, Stamp, Stamps, State};
pub use schedule::{BATCH, Done, Load, Round, Schedule, Share as WorkShare, Totals};
pub use slot::{Pair, Slot};
pub use timer::STEP_MS;
