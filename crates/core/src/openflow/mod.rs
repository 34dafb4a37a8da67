//! OpenFlow 1.0 (wire version 0x01) and 1.3 (0x04): the messages a shunt needs of a switch.
//!
//! | file | does |
//! |---|---|
//! | `wire.rs` | headers, and cutting a stream of bytes into messages |
//! | `pattern.rs` | what an entry matches: the 40 bytes of 1.0 and the OXM fields of 1.3 |
//! | `flow.rs` | entries: adding, removing, their ends and their counts |
//! | `message.rs` | all messages, read and written |
//! | `controller.rs` | our side of one switch: greeting, lists and counts, reconciliation |
//! | `installing.rs` | its entries: said, confirmed, refused, taken back |
//! | `entries.rs` | what is known of each entry, and the cookies that name them |
//!
//! Sources: OpenFlow Switch Specification 1.0.0 (December 2009) and 1.3.5 (March 2015), ONF; the TCP flags under 1.3 are
//! those of Nicira's extension (NXM), which Open vSwitch understands since 2.1. What is not needed is skipped by its
//! length, so that a switch may say more than we know.

mod controller;
mod entries;
mod flow;
mod installing;
mod message;
mod pattern;
mod wire;

pub use controller::{
    Controller, ControllerConfig, ControllerInput, ControllerOutput, PRIORITY_FLOW, PRIORITY_PAIR,
    SwitchPorts,
};
pub use flow::{Command, FlowCounts, FlowMod, FlowRemoved, Removal};
pub use message::{Features, Message, Request, read, write};
pub use pattern::{Pattern, Protocol, Unsayable};
pub use wire::{Decoder, Frame, MESSAGE_MAX, Malformed, Version};
