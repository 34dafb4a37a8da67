//! `[wire]`, and rules whose flows go there.

use super::super::{At, PinnedAt, Wire, raw};
use super::Check;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::policy::{Carry, FastPathKind};
use std::path::Path;

/// Whether the flows of this rule go to the wire.
pub(super) fn goes_there(rule: &raw::Rule) -> bool {
    let path = rule.shunt.as_ref().and_then(|shunt| shunt.fast_path.as_deref());
    path == Some(&FastPathKind::Wire)
}

impl Check<'_> {
    /// Checks the wire. `None`: no flow can get there.
    pub(super) fn wire(&mut self, at: Option<&At<raw::Wire>>, rules: &[At<raw::Rule>]) -> Option<Wire> {
        let Some(at) = at else {
            return rules.iter().any(|rule| goes_there(rule)).then(Wire::default);
        };
        let flows_max = self.number(at.flows_max.as_ref(), 16..=262_144, " flows");
        let flows_max = flows_max.and_then(|flows| u32::try_from(flows).ok());
        let is_auto = at.auto.as_ref().is_some_and(|auto| **auto);
        let after_bytes = self.number(at.after_bytes.as_ref(), 1..=1 << 50, " bytes");
        Some(Wire {
            after_bytes: after_bytes.or_else(|| is_auto.then_some(Wire::AUTO_BYTES)),
            // A rule that asks for the wire has to get it.
            is_optional: is_auto && !rules.iter().any(|rule| goes_there(rule)),
            flows_max: flows_max.unwrap_or(Wire::FLOWS_MAX),
            pins: at.pins.as_ref().map(|pins| self.pins(pins)).unwrap_or_default(),
            on_crash: at.on_crash.as_deref().copied().unwrap_or_default(),
        })
    }

    fn pins(&mut self, at: &At<String>) -> PinnedAt {
        if at.as_str() == "none" {
            return PinnedAt::None;
        }
        let folder = Path::new(at.as_str());
        if !folder.is_absolute() {
            let help = "pins = \"/sys/fs/bpf/sidetrack/NAME\", or \"none\"";
            self.error(at.span(), "the folder of the wire's pins is not an absolute path".to_owned(), help);
        }
        PinnedAt::Folder(folder.to_owned())
    }

    /// Reports what keeps the flows of a rule with user space.
    pub(super) fn wire_contradictions(&mut self, rule: &raw::Rule, carry: &Carry) {
        let Some(at) = rule.shunt.as_ref().filter(|_| goes_there(rule)) else { return };
        let why = match &carry.carrier {
            Carrier::Tunnel(_) => Some("flows of a tunnel share its connection"),
            Carrier::Overlay(_) => Some("an overlay has packets of its own"),
            Carrier::Direct | Carrier::Hops(_) if carry.chain.is_some() => {
                Some("the bytes pass functions of its `chain`")
            }
            Carrier::Direct | Carrier::Hops(_) => carry.mptcp.then_some("Multipath TCP has several paths"),
        };
        if let Some(why) = why {
            let help = "take `shunt` out, or what keeps the flows here";
            self.error(at.span(), format!("flows of this rule cannot go to the wire: {why}"), help);
        }
    }
}
