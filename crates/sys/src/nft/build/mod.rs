//! The tables Sidetrack uses, built from what a person configures.

mod except;
mod hold;
mod packets;
mod path;
mod run;
mod selector;
mod steering;

pub use except::Except;
pub use hold::HoldQueue;
pub use packets::{PacketCatch, Packets};
pub use path::{KernelPath, KernelRoute, NoKernelPath};
pub use run::{
    ANSWERS_MARK, leaving_ours, run_namespace, run_namespace_held, run_namespace_with_datagrams,
    run_namespace_with_datagrams_held, run_namespace_with_servers, run_namespace_with_servers_held,
};
pub use selector::{CgroupMatch, MarkBits, Selector};
pub use steering::{Redirect, Steering, TProxy};

pub(super) use except::destination_fields;
pub(super) use path::empty_server_map;
