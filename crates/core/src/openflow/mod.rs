//! OpenFlow 1.0 (wire version 0x01) and 1.3 (0x04): the messages a shunt needs of a switch.
//!
//! | file | does |
//! |---|---|
//! | `wire.rs` | headers, and cutting a stream of bytes into messages |
//! | `pattern.rs` | what an entry matches: the 40 bytes of 1.0 and the OXM fields of 1.3 |
//! | `flow.rs` | entries: adding, removing, their ends and their counts |
//! | `message.rs` | all messages, read and written |
//!
//! Sources: OpenFlow Switch Specification 1.0.0 (December 2009) and 1.3.5 (March 2015), ONF; the TCP flags under 1.3 are
//! those of Nicira's extension (NXM), which Open vSwitch understands since 2.1. What is not needed is skipped by its
//! length, so that a switch may say more than we know.

mod flow;
mod message;
mod pattern;
mod wire;

pub use flow::{Command, FlowCounts, FlowMod, FlowRemoved, Removal};
pub use message::{Features, Message, Request, read, write};
pub use pattern::{Pattern, Protocol, Unsayable};
pub use wire::{Decoder, Frame, MESSAGE_MAX, Malformed, Version};
