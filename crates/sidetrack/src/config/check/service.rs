//! Checks how the packets of an `[[overlay.packets]]` travel, and how flows use the paths of the overlay.

use super::super::{At, raw};
use super::Check;
use raw::{FlowDissemination, PacketsDissemination, PacketsLink};
use sidetrack_core::carrier::{Carrier, OverlayCarrier};
use sidetrack_core::overlay::service::{Dissemination, HOPS, LinkKind, PATHS, Service, Trust};
use sidetrack_core::overlay::session::Mode;
use std::time::Duration;

/// Longest deadline, milliseconds.
const DEADLINE_MAX_MS: u32 = 10_000;

impl Check<'_> {
    /// Returns the service of these packets. Keys that say nothing together are errors.
    pub(super) fn service(&mut self, packets: &At<raw::Packets>, trust: Trust) -> Service {
        let kind = match packets.link.as_deref() {
            Some(PacketsLink::BestEffort) => LinkKind::BestEffort,
            Some(PacketsLink::RealTime) => LinkKind::RealTime,
            Some(PacketsLink::Reliable) | None => LinkKind::Reliable,
        };
        let mut service = Service::new(kind);
        service.dissemination = match packets.dissemination.as_deref() {
            Some(PacketsDissemination::Duplicate) => Dissemination::Duplicate,
            Some(PacketsDissemination::Flood) => Dissemination::Flood,
            Some(PacketsDissemination::Graph) => Dissemination::Graph,
            Some(PacketsDissemination::Shortest) | None => Dissemination::Shortest,
        };
        if let Some(dissemination) = &packets.dissemination
            && service.dissemination != Dissemination::Shortest
            && kind == LinkKind::Reliable
            && !self.is_tolerant(packets, trust)
        {
            let help =
                "write `link = \"best-effort\"` or \"real-time\"; with \"reliable\", packets take one path";
            self.error(dissemination.span(), "packets on reliable links take the shortest path only", help);
        }
        let is = |wanted| service.dissemination == wanted;
        // Reliable packets among members that lie go over all links.
        let is_bounded = !(kind == LinkKind::Reliable && self.is_tolerant(packets, trust));
        let (duplicates, floods) = (is(Dissemination::Duplicate), is(Dissemination::Flood) && is_bounded);
        let range = (*PATHS.start()).into()..=(*PATHS.end()).into();
        if let Some(paths) = self.only_with(packets.paths.as_ref(), duplicates, "duplicate", "paths", range) {
            service.paths = u8::try_from(paths).unwrap_or(service.paths);
        }
        let range = (*HOPS.start()).into()..=(*HOPS.end()).into();
        if let Some(hops) = self.only_with(packets.hops.as_ref(), floods, "flood", "hops", range) {
            service.hops = u8::try_from(hops).unwrap_or(service.hops);
        }
        self.service_trust(packets, trust, &mut service);
        let (has_deadline, range) = (service.spreads() && !service.is_reliable_flood(), 1..=DEADLINE_MAX_MS);
        let deadline =
            self.only_with(packets.deadline_ms.as_ref(), has_deadline, "duplicate", "deadline_ms", range);
        service.deadline = deadline.map(|ms| Duration::from_millis(ms.into()));
        if let (Some(link), None, LinkKind::RealTime) = (&packets.link, &packets.deadline_ms, kind) {
            let help = "write for how long a packet is of use, for example `deadline_ms = 65`";
            self.error(link.span(), "packets on real-time links need a `deadline_ms`", help);
        }
        service
    }

    /// Returns the carrier with the dissemination of its rule. Keys that say nothing for this carrier are errors.
    pub(super) fn with_paths(&mut self, carrier: Carrier, rule: &raw::Rule) -> Carrier {
        let mode = match rule.dissemination.as_deref() {
            Some(FlowDissemination::Stripe) => Mode::Stripe,
            Some(FlowDissemination::Duplicate) => Mode::Duplicate,
            Some(FlowDissemination::Shortest) | None => Mode::Shortest,
        };
        let is_overlay = matches!(carrier, Carrier::Overlay(_));
        if let Some(dissemination) = rule.dissemination.as_ref().filter(|_| !is_overlay) {
            let help = "write `carrier = \"overlay:<node>\"`, or remove `dissemination`";
            let message = "only flows over the overlay have paths to choose from";
            self.error(dissemination.span(), message, help);
        }
        let range = (*PATHS.start()).into()..=(*PATHS.end()).into();
        let paths = self.only_with(rule.paths.as_ref(), mode != Mode::Shortest, "duplicate", "paths", range);
        match carrier {
            Carrier::Overlay(overlay) if mode != Mode::Shortest => {
                let paths = paths.and_then(|paths| u8::try_from(paths).ok()).unwrap_or(*PATHS.start());
                Carrier::Overlay(OverlayCarrier { mode, paths, ..overlay })
            }
            carrier => carrier,
        }
    }

    /// Returns a number that has a meaning only with this dissemination, if it is in its range.
    fn only_with<T: Copy + Into<u32>>(
        &mut self,
        value: Option<&At<T>>,
        has_meaning: bool,
        dissemination: &str,
        key: &str,
        range: std::ops::RangeInclusive<u32>,
    ) -> Option<u32> {
        let value = value?;
        let number: u32 = (**value).into();
        if !has_meaning {
            let help = format!("write `dissemination = \"{dissemination}\"`, or remove `{key}`");
            self.error(value.span(), format!("`{key}` has no meaning with this dissemination"), help);
            return None;
        }
        if !range.contains(&number) {
            let help = format!("write a number from {} to {}", range.start(), range.end());
            self.error(value.span(), format!("`{key}` cannot be {number}"), help);
            return None;
        }
        Some(number)
    }
}
