//! BPF: maps, programs and the flow table of the shunt's fast path, by bpf(2) itself.
//!
//! Why our own loader: the programs need maps and nothing more of an object file, so what a BPF library brings (type
//! information, relocations against kernel structures, a dozen program types) would be most of the code and none of the use.
//! Every attachment made here goes when its descriptor is closed: nothing is left behind, whatever kills us.

mod answer;
mod engine;
mod flow;
mod load;
mod map;
mod memory;
mod object;
mod offload;
mod plane;
mod program;
mod syscall;
mod table;

pub use answer::{Answer, Answers};
pub use engine::{Own, OwnOn, XdpOn};
pub use flow::{Ended, FlowEntry, FlowKey, FlowState};
pub use load::BpfError;
pub use map::{Map, MapKind, MapShape};
pub use object::{Object, ObjectError};
pub use offload::{Answered, Lending, LendingPart, Lent, LentSide, Numbers, Question, Seen, SeenFin};
pub use plane::{
    Closing, PLANE_CONNECTIONS_MAX, Plane, PlaneCounts, PlaneEnd, PlaneFlow, PlaneKey, PlaneReason,
    PlaneRoute, PlaneSide, PlaneState,
};
pub use program::{Hook, Link, LoadError, Program, ProgramKind, Trial};
pub use table::{FastPath, Forwarding, PORTS_MAX, Port, monotonic_ns};

/// The object that `bpf/shunt.bpf.c` was compiled to.
pub(crate) static SHUNT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shunt.bpf.o"));

/// The object that `bpf/engine.bpf.c` was compiled to.
pub(crate) static ENGINE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/engine.bpf.o"));
