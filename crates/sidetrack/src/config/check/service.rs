//! Checks how the packets of an `[[overlay.packets]]` travel, and how flows use the paths of the overlay.

use super::super::{At, List, raw};
use super::Check;
use super::trust::chosen;
use raw::{FlowDissemination, PacketsDissemination, PacketsLink};
use sidetrack_core::carrier::{Carrier, OverlayCarrier};
use sidetrack_core::overlay::service::{Dissemination, HOPS, LinkKind, PATHS, Service, Trust};
use sidetrack_core::overlay::session::Mode;
use std::time::Duration;

/// Longest deadline, milliseconds.
const DEADLINE_MAX_MS: u32 = 10_000;

const fn link_kind(link: &PacketsLink) -> LinkKind {
    match link {
        PacketsLink::Reliable => LinkKind::Reliable,
        PacketsLink::BestEffort => LinkKind::BestEffort,
        PacketsLink::RealTime => LinkKind::RealTime,
    }
}

impl Check<'_> {
    /// Returns the service of these packets. Keys that say nothing together are errors.
    pub(super) fn service(&mut self, packets: &At<raw::Packets>, trust: Trust) -> Service {
        let kind = packets.link.as_deref().map_or(LinkKind::Reliable, link_kind);
        let mut service = Service::new(kind);
        service.dissemination = match packets.dissemination.as_deref() {
            Some(PacketsDissemination::Duplicate) => Dissemination::Duplicate,
            Some(PacketsDissemination::Flood) => Dissemination::Flood,
            Some(PacketsDissemination::Graph) => Dissemination::Graph,
            Some(PacketsDissemination::Shortest) | None => Dissemination::Shortest,
        };
        let is_tolerant = chosen(packets.trust.as_ref(), trust) == Trust::Tolerant;
        if let Some(dissemination) = &packets.dissemination
            && service.dissemination != Dissemination::Shortest
            && kind == LinkKind::Reliable
            && !is_tolerant
        {
            let help =
                "write `link = \"best-effort\"` or \"real-time\"; with \"reliable\", packets take one path";
            self.error(dissemination.span(), "packets on reliable links take the shortest path only", help);
        }
        let is = |wanted| service.dissemination == wanted;
        // Reliable packets among members that lie go over all links.
        let is_bounded = !(kind == LinkKind::Reliable && is_tolerant);
        let (duplicates, floods) = (is(Dissemination::Duplicate), is(Dissemination::Flood) && is_bounded);
        let range = (*PATHS.start()).into()..=(*PATHS.end()).into();
        if let Some(paths) = self.only_with(packets.paths.as_ref(), duplicates, "duplicate", "paths", range) {
            service.paths = u8::try_from(paths).unwrap_or(service.paths);
        }
        let range = (*HOPS.start()).into()..=(*HOPS.end()).into();
        if let Some(hops) = self.only_with(packets.hops.as_ref(), floods, "flood", "hops", range) {
            service.hops = u8::try_from(hops).unwrap_or(service.hops);
        }
        self.service_trust(&packets.into(), trust, &mut service);
        let (has_deadline, range) = (service.spreads() && !service.is_reliable_flood(), 1..=DEADLINE_MAX_MS);
        let deadline =
            self.only_with(packets.deadline_ms.as_ref(), has_deadline, "duplicate", "deadline_ms", range);
        service.deadline = deadline.map(|ms| Duration::from_millis(ms.into()));
        if packets.deadline_ms.is_none() {
            self.needs_deadline(packets.link.as_ref(), service);
        }
        service
    }

    /// Returns the carrier with the dissemination of its rule. Keys that say nothing for this carrier are errors.
    pub(super) fn with_paths(&mut self, carrier: Carrier, rule: &raw::Rule) -> Carrier {
        let is_udp = rule.matcher.protocol.as_deref() == Some(&raw::Protocol::Udp);
        let Carrier::Overlay(overlay) = carrier else {
            self.only_over_the_overlay(rule);
            return carrier;
        };
        if let Some(group) = overlay.node.strip_prefix("group:").filter(|_| !is_udp) {
            let span = rule.carrier.as_ref().map(List::span).unwrap_or_default();
            let help = format!(
                "a connection has one server: write \"overlay:nearest:{group}\", or add `protocol = \"udp\"` to `match`"
            );
            self.error(span, "a connection cannot go to all members of a group", help);
        }
        let mode = match rule.dissemination.as_deref() {
            Some(FlowDissemination::Stripe) => Mode::Stripe,
            Some(FlowDissemination::Duplicate) => Mode::Duplicate,
            _ => Mode::Shortest,
        };
        let range = (*PATHS.start()).into()..=(*PATHS.end()).into();
        let paths = self.only_with(rule.paths.as_ref(), mode != Mode::Shortest, "duplicate", "paths", range);
        let several = paths.and_then(|paths| u8::try_from(paths).ok()).unwrap_or(*PATHS.start());
        let service = self.flow_service(rule, is_udp, several);
        let paths = if mode == Mode::Shortest { 1 } else { several };
        Carrier::Overlay(OverlayCarrier { mode, paths, service, ..overlay })
    }

    /// Reports keys about the overlay in a rule with another carrier.
    fn only_over_the_overlay(&mut self, rule: &raw::Rule) {
        let keys = [
            ("dissemination", rule.dissemination.as_ref().map(At::span)),
            ("paths", rule.paths.as_ref().map(At::span)),
            ("link", rule.link.as_ref().map(At::span)),
            ("hops", rule.hops.as_ref().map(At::span)),
            ("trust", rule.trust.as_ref().map(At::span)),
            ("priority", rule.priority.as_ref().map(At::span)),
            ("deadline_ms", rule.deadline_ms.as_ref().map(At::span)),
        ];
        for (key, span) in keys {
            if let Some(span) = span {
                let help = format!("write `carrier = \"overlay:<node>\"`, or remove `{key}`");
                self.error(span, "only flows over the overlay have paths and links to choose from", help);
            }
        }
    }

    /// Returns how the datagrams of a rule travel.
    fn flow_service(&mut self, rule: &raw::Rule, is_udp: bool, paths: u8) -> Service {
        let kind = rule.link.as_deref().map_or(LinkKind::BestEffort, link_kind);
        let dissemination = match rule.dissemination.as_deref() {
            Some(FlowDissemination::Duplicate) => Dissemination::Duplicate,
            Some(FlowDissemination::Flood) => Dissemination::Flood,
            Some(FlowDissemination::Graph) => Dissemination::Graph,
            Some(FlowDissemination::Shortest | FlowDissemination::Stripe) | None => Dissemination::Shortest,
        };
        let mut service = Service { dissemination, paths, ..Service::new(kind) };
        let of_datagrams = |at: &&At<FlowDissemination>| {
            matches!(***at, FlowDissemination::Flood | FlowDissemination::Graph)
        };
        let of_udp = [
            ("link", rule.link.as_ref().map(At::span)),
            ("deadline_ms", rule.deadline_ms.as_ref().map(At::span)),
            ("trust", rule.trust.as_ref().map(At::span)),
            ("priority", rule.priority.as_ref().map(At::span)),
            ("dissemination", rule.dissemination.as_ref().filter(of_datagrams).map(At::span)),
        ];
        for (key, span) in of_udp {
            if let Some(span) = span.filter(|_| !is_udp) {
                let help = format!("add `protocol = \"udp\"` to `match`, or change `{key}`");
                self.error(span, format!("this value of `{key}` is for datagrams only"), help);
            }
        }
        let of_overlay = if is_udp { self.overlay_trust } else { Trust::Members };
        let is_tolerant = chosen(rule.trust.as_ref(), of_overlay) == Trust::Tolerant;
        if let Some(span) = rule.dissemination.as_ref().map(At::span).filter(|_| is_udp) {
            if rule.dissemination.as_deref() == Some(&FlowDissemination::Stripe) {
                let help = "write \"shortest\", \"duplicate\", \"graph\" or \"flood\"";
                self.error(span.clone(), "datagrams are not striped over several paths", help);
            }
            if kind == LinkKind::Reliable && dissemination != Dissemination::Shortest && !is_tolerant {
                let help = "write `link = \"best-effort\"` or \"real-time\"; with \"reliable\", datagrams take one path";
                self.error(span, "datagrams on reliable links take the shortest path only", help);
            }
        }
        let range = (*HOPS.start()).into()..=(*HOPS.end()).into();
        // Reliable datagrams among members that lie go over all links.
        let is_bounded = !(kind == LinkKind::Reliable && is_tolerant);
        let floods = dissemination == Dissemination::Flood && is_bounded;
        if let Some(hops) = self.only_with(rule.hops.as_ref(), floods, "flood", "hops", range) {
            service.hops = u8::try_from(hops).unwrap_or(service.hops);
        }
        if is_udp {
            self.service_trust(&rule.into(), of_overlay, &mut service);
        }
        let (spreads, range) = (service.spreads() && !service.is_reliable_flood(), 1..=DEADLINE_MAX_MS);
        let deadline = self.only_with(rule.deadline_ms.as_ref(), spreads, "duplicate", "deadline_ms", range);
        service.deadline = deadline.map(|ms| Duration::from_millis(ms.into()));
        self.needs_deadline(rule.link.as_ref(), service);
        service
    }

    /// Reports a real-time link without a deadline.
    fn needs_deadline(&mut self, link: Option<&At<PacketsLink>>, service: Service) {
        if let (Some(link), None, LinkKind::RealTime) = (link, service.deadline, service.kind) {
            let help = "write for how long a packet is of use, for example `deadline_ms = 65`";
            self.error(link.span(), "packets on real-time links need a `deadline_ms`", help);
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
