//! The checked `[wire]`.

use super::Config;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::policy::{Carry, FastPathKind, ShuntAfter};

/// Flows of listeners that the kernel takes over from our sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    /// Flows whose rule does not say when go to the wire after this number of bytes. `None`: they stay.
    pub after_bytes: Option<u64>,
    /// Most flows on the wire at a time.
    pub flows_max: u32,
}

impl Wire {
    /// The default of `flows_max`.
    pub const FLOWS_MAX: u32 = 16_384;
}

impl Default for Wire {
    fn default() -> Self {
        Self { after_bytes: None, flows_max: Self::FLOWS_MAX }
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
                let bytes = self.wire?.after_bytes?;
                Some(ShuntAfter { bytes, ms: 0, fast_path: wire })
            }
        }
    }
}
