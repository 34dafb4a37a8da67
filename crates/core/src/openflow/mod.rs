//! OpenFlow 1.0 (wire version 0x01) and 1.3 (0x04): the messages that a shunt needs to control a switch.
//!
//! | file | does |
//! |---|---|
//! | `wire.rs` | headers; splits a byte stream into messages |
//! | `pattern.rs` | what an entry matches: the 40 bytes of 1.0 and the OXM fields of 1.3 |
//! | `flow.rs` | entries: adding and removing them, their ends and their counters |
//! | `message.rs` | encodes and decodes all messages |
//! | `controller.rs` | the controller of one switch: handshake, lists and counters, reconciliation |
//! | `installing.rs` | the entries of a switch: sent, confirmed, refused, removed |
//! | `network.rs` | several switches: the entries of a flow along its path |
//! | `entries.rs` | the state of each entry, and the cookies that identify entries |
//!
//! Sources: OpenFlow Switch Specification 1.0.0 (December 2009) and 1.3.5 (March 2015), ONF. TCP flags under 1.3 use
//! Nicira's extension (NXM), which Open vSwitch supports since 2.1. Fields that are not needed are skipped by their
//! length, so a switch may send more than this module knows.

mod controller;
mod entries;
mod flow;
mod installing;
mod message;
mod network;
mod pattern;
mod wire;

pub use controller::{
    Controller, ControllerConfig, ControllerInput, ControllerOutput, PRIORITY_FLOW, PRIORITY_PAIR,
    SwitchPorts,
};
pub use entries::Way;
pub use flow::{Command, FlowCounts, FlowMod, FlowRemoved, Removal};
pub use message::{Features, Message, Request, read, write};
pub use network::{Member, Network};
pub use pattern::{Pattern, Protocol, Unsayable};
pub use wire::{Decoder, Frame, MESSAGE_MAX, Malformed, Version};
