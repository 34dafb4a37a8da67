//! The checked `[wire]`.

use super::Config;
pub use super::raw::OnWireCrash;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::policy::{Carry, FastPathKind, ShuntAfter};
use std::path::PathBuf;

/// Flows of listeners that the kernel takes over from our sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wire {
    /// Flows whose rule does not say when go to the wire after this number of bytes. `None`: they stay.
    pub after_bytes: Option<u64>,
    /// Flows keep their sockets on a machine that cannot do it: the start does not fail.
    pub is_optional: bool,
    /// Most flows on the wire at a time.
    pub flows_max: u32,
    /// Where names keep the flows alive when the process dies.
    pub pins: PinnedAt,
    /// What the next start does with flows of a process that died.
    pub on_crash: OnWireCrash,
}

/// A folder in a file system of type `bpf`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PinnedAt {
    /// One of this network namespace.
    #[default]
    Default,
    /// This one.
    Folder(PathBuf),
    /// None: flows end with the process.
    None,
}

impl Wire {
    /// The default of `flows_max`.
    pub const FLOWS_MAX: u32 = 16_384;

    /// The default of `after_bytes` with `auto`.
    pub const AUTO_BYTES: u64 = 16 << 20;
}

impl Default for Wire {
    fn default() -> Self {
        let (pins, on_crash) = (PinnedAt::default(), OnWireCrash::default());
        Self { after_bytes: None, is_optional: false, flows_max: Self::FLOWS_MAX, pins, on_crash }
    }
}

impl Config {
    /// When flows of listeners that are carried like this go to the wire, if they may.
    pub fn wire_after(&self, carry: &Carry) -> Option<ShuntAfter> {
        let fits = matches!(carry.carrier, Carrier::Direct | Carrier::Hops(_));
        if !fits || carry.chain.is_some() || carry.mptcp {
            return None;
        }
        let wire = Some(FastPathKind::Wire);
        match carry.shunt.filter(|after| [wire, Some(FastPathKind::None)].contains(&after.fast_path)) {
            Some(after) => (after.fast_path == wire).then_some(after),
            None => {
                let bytes = self.wire.as_ref()?.after_bytes?;
                Some(ShuntAfter { bytes, ms: 0, fast_path: wire })
            }
        }
    }
}
