//! The engine: a TCP proxy at packet level. Two connections, one state, headers rewritten; the server is chosen when
//! the client's first bytes are there (delayed binding), and payload may be looked at and changed on its way.
//!
//! Packets and time go in, packets and session records come out: no I/O, no clock, nothing allocated per packet of an
//! established connection. [`Engine`] has the shape of every protocol core: `handle`, `poll`, `deadline`, and `tick`.
//!
//! | file | does |
//! |---|---|
//! | `packet`, `options`, `checksum`, `seq` | reads headers, checks them, computes checksums |
//! | `table`, `timer`, `ports`, `source` | finds connections, time-outs, sources towards servers |
//! | `open`, `cookie` | the handshake with the client, with state or without |
//! | `bind`, `owned` | holds the first bytes, asks for a server, connects to it, delivers what was held |
//! | `forward` | rewrites packets where they are: nearly all |
//! | `relay`, `edit` | builds them anew: changed payload, other options, resets |
//! | `lend` | lets the kernel translate packets of a connection that needs nobody else |
//! | `ask` | lets the kernel send the first bytes when the server answers |
//! | `ahead` | reads from memory what a batch will need, all at once |
//! | `icmp`, `expire`, `send`, `record` | errors from the network, time-outs, own segments, session records |
//!
//! Who answers for bytes: end hosts do, as in the original, for all that passes; only the first bytes, acknowledged
//! before there was a server, are the engine's own to deliver, and it does so as a TCP sender does.

mod ahead;
mod ask;
mod bind;
pub mod checksum;
mod config;
mod connection;
mod cookie;
mod edit;
mod expire;
mod forward;
mod icmp;
mod lend;
mod machine;
mod open;
pub mod options;
mod outbox;
mod owned;
pub mod packet;
mod ports;
mod record;
mod relay;
mod send;
pub mod seq;
pub mod siphash;
mod source;
mod table;
mod timer;

pub use ahead::Ahead;
pub use ask::{Answered, Asked};
pub use config::{Callbacks, Config, ConnectionId, Hop, Listen, Opening, Payload, Selection, Target};
pub use cookie::Cookies;
pub use lend::{Fin, LentTo, Moved, Progress, Standing, Translation};
pub use machine::{Counters, Drop, Engine, Fate};
pub use packet::Checksums;
pub use ports::{Share, Steering};
pub use record::{Record, Stamp, Stamps, State};
pub use timer::STEP_MS;
