//! Checks what the overlay does among members that lie: `trust`, `[[overlay.topology]]`, and the keys that belong to them.

use super::super::{At, List, OverlayEdge, OverlayNode, raw};
use super::Check;
use raw::OverlayTrust;
use sidetrack_core::overlay::frame::PRIORITIES;
use sidetrack_core::overlay::service::{Dissemination, HOPS, LinkKind, Service, Trust};
use std::ops::Range;

/// The rate of intrusion-tolerant packets on a link if the file names none, Mb/s.
const RATE_MBIT: u32 = 100;

/// Highest rate of a link, Mb/s.
const RATE_MAX_MBIT: u32 = 100_000;

/// The highest cost that a link can have at least, µs.
const LEAST_MAX_US: u32 = 60_000_000;

fn trust(said: OverlayTrust) -> Trust {
    match said {
        OverlayTrust::Members => Trust::Members,
        OverlayTrust::IntrusionTolerant => Trust::Tolerant,
    }
}

/// Returns the trust that an entry names, or else that of the overlay.
pub(super) fn chosen(said: Option<&At<OverlayTrust>>, of_overlay: Trust) -> Trust {
    said.map_or(of_overlay, |said| trust(**said))
}

/// What a table says about its packets, as far as trust depends on it.
pub(super) struct Keys<'a> {
    /// The place of the table.
    pub table: Range<usize>,
    /// The places of keys.
    pub link: Option<Range<usize>>,
    /// See [`Keys::link`].
    pub dissemination: Option<Range<usize>>,
    /// The trust.
    pub trust: Option<&'a At<OverlayTrust>>,
    /// The priority.
    pub priority: Option<&'a At<u8>>,
}

impl<'a> From<&'a At<raw::Packets>> for Keys<'a> {
    fn from(packets: &'a At<raw::Packets>) -> Self {
        let (link, dissemination) =
            (packets.link.as_ref().map(At::span), packets.dissemination.as_ref().map(At::span));
        let (trust, priority) = (packets.trust.as_ref(), packets.priority.as_ref());
        Self { table: packets.span(), link, dissemination, trust, priority }
    }
}

impl<'a> From<&'a raw::Rule> for Keys<'a> {
    fn from(rule: &'a raw::Rule) -> Self {
        let (link, dissemination) =
            (rule.link.as_ref().map(At::span), rule.dissemination.as_ref().map(At::span));
        let (trust, priority) = (rule.trust.as_ref(), rule.priority.as_ref());
        let table = rule.carrier.as_ref().map(List::span).unwrap_or_default();
        Self { table, link, dissemination, trust, priority }
    }
}

impl Keys<'_> {
    fn span(&self) -> Range<usize> {
        self.trust.map_or_else(|| self.table.clone(), At::span)
    }
}

impl Check<'_> {
    /// Returns the trust of the whole overlay. If it is intrusion-tolerant, the file must say which links may exist.
    pub(super) fn overlay_trust(&mut self, overlay: &raw::Overlay) -> Trust {
        let Some(said) = &overlay.trust else { return Trust::default() };
        let trust = trust(**said);
        if trust == Trust::Tolerant && overlay.topology.is_empty() {
            let help = "write an [[overlay.topology]] for each link: otherwise two nodes that lie can announce a link \
                        between them that costs nothing";
            self.error(said.span(), "an intrusion-tolerant overlay does not say which links it has", help);
        }
        trust
    }

    /// Returns the rate of intrusion-tolerant packets on each link, bits per second.
    pub(super) fn tolerant_rate(&mut self, overlay: &raw::Overlay) -> u64 {
        let mut mbit = RATE_MBIT;
        if let Some(said) = &overlay.tolerant_rate_mbit {
            if (1..=RATE_MAX_MBIT).contains(&**said) {
                mbit = **said;
            } else {
                let help = format!("write a number from 1 to {RATE_MAX_MBIT}");
                self.error(said.span(), format!("`tolerant_rate_mbit` cannot be {}", **said), help);
            }
        }
        u64::from(mbit) * 1_000_000
    }

    /// Returns the links that nodes may announce.
    pub(super) fn overlay_topology(
        &mut self,
        overlay: &raw::Overlay,
        nodes: &[OverlayNode],
    ) -> Vec<OverlayEdge> {
        overlay.topology.iter().filter_map(|link| self.overlay_edge(link, nodes)).collect()
    }

    fn overlay_edge(&mut self, link: &At<raw::OverlayEdge>, nodes: &[OverlayNode]) -> Option<OverlayEdge> {
        const HELP: &str = "write `ends = [\"a\", \"b\"]`: the names of two nodes";
        let named = link.ends.as_ref().map(|ends| ends.items());
        let Some([one, other]) = named else {
            self.error(link.span(), "a link has two ends", HELP);
            return None;
        };
        let ends = [self.overlay_node(one, nodes)?, self.overlay_node(other, nodes)?];
        if ends[0] == ends[1] {
            self.error(other.span(), "the two ends of a link are the same node", HELP);
            return None;
        }
        let mut least_us = 1;
        if let Some(least) = &link.least_us {
            if (1..=LEAST_MAX_US).contains(&**least) {
                least_us = **least;
            } else {
                let help = format!("write a number of µs from 1 to {LEAST_MAX_US}");
                self.error(least.span(), format!("`least_us` cannot be {}", **least), help);
            }
        }
        Some(OverlayEdge { ends, least_us })
    }

    /// Sets the trust of a service, and the keys that depend on it.
    pub(super) fn service_trust(&mut self, keys: &Keys<'_>, of_overlay: Trust, service: &mut Service) {
        service.trust = chosen(keys.trust, of_overlay);
        let is_tolerant = service.trust == Trust::Tolerant;
        if is_tolerant && service.kind == LinkKind::RealTime {
            let span = keys.link.clone().unwrap_or_else(|| keys.table.clone());
            let help = "write `link = \"best-effort\"` or \"reliable\", or `trust = \"members\"`";
            self.error(span, "intrusion-tolerant packets do not travel over real-time links", help);
        }
        if is_tolerant && service.kind == LinkKind::Reliable {
            self.reliable_flood(keys, service);
            return;
        }
        let Some(priority) = keys.priority else { return };
        if !is_tolerant {
            let help = "write `trust = \"intrusion-tolerant\"`, or remove `priority`";
            self.error(priority.span(), "`priority` has no meaning with this trust", help);
        } else if PRIORITIES.contains(&**priority) {
            service.priority = **priority;
        } else {
            let help = format!("write a number from {} to {}", PRIORITIES.start(), PRIORITIES.end());
            self.error(priority.span(), format!("`priority` cannot be {}", **priority), help);
        }
    }

    /// Checks the keys of packets that all arrive among members that lie.
    fn reliable_flood(&mut self, keys: &Keys<'_>, service: &mut Service) {
        if service.dissemination != Dissemination::Flood {
            let span = keys.dissemination.clone().unwrap_or_else(|| keys.span());
            let help = "write `dissemination = \"flood\"`, or `link = \"best-effort\"`";
            self.error(span, "reliable packets among members that lie are flooded", help);
        }
        service.hops = *HOPS.end();
        if let Some(priority) = keys.priority {
            let help = "write `link = \"best-effort\"`, or remove `priority`";
            self.error(
                priority.span(),
                "`priority` has no meaning for packets that all arrive in order",
                help,
            );
        }
    }
}
