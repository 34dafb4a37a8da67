//! Flows in the format of IPFIX (RFC 7011), which collectors of flows read.
//!
//! | file | does |
//! |---|---|
//! | `report.rs` | what is told of one flow, its template and its data record |
//! | `session.rs` | messages: templates before the records that need them, sequence numbers, sizes |
//!
//! The elements are those of the IANA registry "IPFIX Information Elements". A flow is one record with both directions:
//! the client's is the forward direction, and elements of the server's have the enterprise number of RFC 5103. Only the
//! encoder is here: Sidetrack reads no IPFIX.

mod report;
mod session;

pub use report::{End, Report};
pub use session::{MESSAGE_MAX, MESSAGE_MIN, Message, Session, Settings};
