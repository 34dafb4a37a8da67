//! BPF by bpf(2) itself: maps, programs, the shunt's flow table, and the packet engine's offloaded and
//! decided connections.
//!
//! Why this has its own loader: the programs need their code and maps out of an object file and nothing more.
//! What a BPF library brings besides (type information, relocations against kernel structures, a dozen
//! program types) would be most of the code and would not be used. An attachment made here ends when its
//! descriptor is closed, however the process ends. Only what has a name ([`Pins`]) outlives it.

mod attached;
mod cookies;
mod decided;
mod engine;
mod flow;
mod layout;
mod load;
mod map;
mod memory;
mod object;
mod offload;
mod pin;
mod program;
mod syscall;
mod table;
mod wire;

pub use attached::attached;
pub use cookies::{CookieSettings, Cookies};
pub use decided::{
    Closing, DECIDED_MAX, DecidedCounts, DecidedEnd, DecidedFlow, DecidedKey, DecidedMemory, DecidedReason,
    DecidedRoute, DecidedSide, DecidedState,
};
pub use engine::{Own, OwnOn, XdpOn};
pub use flow::{Ended, FlowEntry, FlowKey, FlowState};
pub use load::BpfError;
pub use map::{Map, MapKind, MapShape};
pub use object::{Object, ObjectError};
pub use offload::{OffloadMemory, OffloadPart, OffloadSide, Offloaded, Seen};
pub use program::{Hook, Link, LoadError, Program, ProgramKind, Trial};
pub use table::{FastPath, Forwarding, PORTS_MAX, Port, monotonic_ns};
pub use wire::{
    Adopted, PINS, Pins, WireEnd, WireId, WireMemory, WireOn, WireSeen, abandoned_pins, default_pins,
    end_pinned, pins_obstacle, remove_orphans,
};

/// The object file compiled from `bpf/shunt.bpf.c`.
pub(crate) static SHUNT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shunt.bpf.o"));

/// The object file compiled from `bpf/engine.bpf.c`.
pub(crate) static ENGINE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/engine.bpf.o"));

/// The object file compiled from `bpf/wire.bpf.c`.
pub(crate) static WIRE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wire.bpf.o"));
