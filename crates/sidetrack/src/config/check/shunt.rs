//! `[shunt]`.

use super::super::{At, List, Shunt, ShuntPath, ShuntSwitch, raw};
use super::{Check, wire};
use sidetrack_core::openflow::Version;
use sidetrack_core::policy::{Policy, ShuntAfter};
use sidetrack_core::shunt::{FastPathKind, MarkActions, Meaning, PortNumber, WhenFull};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Longest name of an interface (`IFNAMSIZ` without the NUL).
const INTERFACE_MAX: usize = 15;

impl Check<'_> {
    /// Checks the shunt. Returns `None` if something essential is wrong.
    pub(super) fn shunt(&mut self, at: &At<raw::Shunt>) -> Option<Shunt> {
        let idle = 100..=86_400_000;
        let entries = 16..=1_048_576;
        let idle_ms = |check: &mut Self, key: Option<&At<u64>>| {
            check.number(key, idle.clone(), " milliseconds").unwrap_or(Shunt::IDLE_TIMEOUT_MS)
        };
        let entries_max = self.entries(at.entries_max.as_ref(), entries.clone(), Shunt::ENTRIES_MAX);
        let words = words(at);
        let fast_paths = self.fast_paths(at, &words)?;
        let shunt = Shunt {
            fast_paths,
            bridged: at.forwarding.as_deref() == Some(&raw::Forwarding::Bridged),
            idle_timeout_ms: idle_ms(self, at.idle_timeout_ms.as_ref()),
            block_idle_timeout_ms: idle_ms(self, at.block_idle_timeout_ms.as_ref()),
            entries_max,
            entries_max_per_client: self.entries(
                at.entries_max_per_client.as_ref(),
                1..=1_048_576,
                entries_max,
            ),
            when_full: match at.when_full.as_deref() {
                Some(raw::WhenFull::Wait) => WhenFull::Wait,
                Some(raw::WhenFull::Fastest) | None => WhenFull::Fastest,
            },
            actions: self.mark_actions(at.actions.as_ref(), &words),
            redirect_peer: at.redirect_peer.as_deref().copied().unwrap_or(true),
            keep_when_stalled: self.keep_when_stalled(at),
            rules: None,
            // A switch as the only fast path needs no interfaces here.
            ports: self.shunt_ports(&at.port, words == [FastPathKind::OpenFlow]),
        };
        if at.forwarding.is_none() {
            self.error(
                at.span(),
                "nothing says how this host forwards between the ports of the shunt",
                "write `forwarding = \"bridged\"` or `forwarding = \"routed\"` below [shunt]",
            );
        }
        if at.port.len() < 2 {
            let help = "write [[shunt.port]] with number = 1, interface = \"eth0\", and one more";
            self.error(at.span(), "a shunt has at least two ports", help);
        }
        Some(shunt)
    }

    fn fast_paths(&mut self, at: &At<raw::Shunt>, words: &[FastPathKind]) -> Option<Vec<ShuntPath>> {
        let span = at.fast_path.as_ref().map_or_else(|| at.span(), List::span);
        if words.is_empty() {
            self.error(span.clone(), "there is no fast path in this list", "write fast_path = \"tc\"");
        }
        let twice = |at: usize| words.iter().take(at).any(|before| Some(before) == words.get(at));
        if (0..words.len()).any(twice) {
            self.error(span.clone(), "a fast path is named twice", "name each once");
        }
        if words.contains(&FastPathKind::Wire) {
            let help = "write it in the `shunt` of rules: it is for flows of listeners";
            self.error(span.clone(), "the wire takes no forwarded flows", help);
        }
        if words.contains(&FastPathKind::Xdp) && words.contains(&FastPathKind::XdpGeneric) {
            let help = "take one of them out";
            self.error(span, "an interface has XDP in its driver or behind it, not both", help);
        }
        let bridged = at.forwarding.as_ref().filter(|word| ***word == raw::Forwarding::Bridged);
        if let Some(bridged) = bridged.filter(|_| words.contains(&FastPathKind::Flowtable)) {
            let help = "use fast_path = \"tc\" or \"xdp\", or write `forwarding = \"routed\"`";
            self.error(bridged.span(), "a flow table routes: it does not pass frames of a bridge", help);
        }
        if !words.contains(&FastPathKind::OpenFlow) {
            let of_switch = |port: &At<raw::ShuntPort>| {
                port.fast_port.is_some() || port.slow_port.is_some() || port.switch.is_some()
            };
            let stray = at.port.iter().find(|port| of_switch(port)).map(At::span);
            let switch = at.switch.first().map(At::span);
            if let Some(span) = at.openflow.as_ref().map(At::span).or(switch).or(stray) {
                let help = "write `fast_path = \"openflow\"` below [shunt], or leave this out";
                self.error(span, "this is about a switch, and the fast path is none", help);
            }
        }
        let path = |word: &FastPathKind| match word {
            FastPathKind::Tc => Some(ShuntPath::Tc),
            FastPathKind::Xdp => Some(ShuntPath::Xdp),
            FastPathKind::XdpGeneric => Some(ShuntPath::XdpGeneric),
            FastPathKind::OpenFlow => self.switch(at).map(ShuntPath::OpenFlow),
            FastPathKind::Flowtable => Some(ShuntPath::Flowtable),
            FastPathKind::None => Some(ShuntPath::None),
            FastPathKind::Wire => None,
        };
        words.iter().map(path).collect()
    }

    /// Reports an error if a setting names a fast path that the shunt does not have.
    fn is_configured(&mut self, span: Range<usize>, kind: FastPathKind, configured: &[FastPathKind]) {
        if !configured.contains(&kind) {
            let all: Vec<_> =
                configured.iter().chain([&kind]).map(|kind| format!("\"{}\"", kind.as_str())).collect();
            let help =
                format!("write `fast_path = [{}]` below [shunt], or name another one here", all.join(", "));
            self.error(span, format!("the shunt has no fast path \"{}\"", kind.as_str()), help);
        }
    }

    fn keep_when_stalled(&mut self, at: &At<raw::Shunt>) -> bool {
        let Some(wish) = &at.on_stall else { return false };
        let of_switch = words(at).contains(&FastPathKind::OpenFlow);
        if of_switch && **wish == raw::OnStall::SlowPath {
            let help = "a switch that hears nothing keeps its entries until they stand still: lower `idle_timeout_ms`";
            self.error(wish.span(), "a switch cannot be told to do that", help);
        }
        **wish == raw::OnStall::Keep
    }

    /// Checks when the forwarded flows of a rule are shunted.
    pub(super) fn shunt_after(&mut self, rule: &raw::Rule) -> Option<ShuntAfter> {
        let at = rule.shunt.as_ref()?;
        let bytes = self.number(at.after_bytes.as_ref(), 0..=1 << 50, " bytes").unwrap_or(0);
        let ms = self.number(at.after_ms.as_ref(), 0..=86_400_000, " milliseconds").unwrap_or(0);
        let matcher = &rule.matcher;
        let after = ShuntAfter { bytes, ms, fast_path: at.fast_path.as_deref().copied() };
        if after.fast_path == Some(FastPathKind::Wire) {
            return Some(after);
        }
        let unknown = [
            ("host", matcher.host.is_some()),
            ("listener", matcher.listener.is_some()),
            ("intercept", matcher.intercept.is_some()),
            ("socks_user", matcher.socks_user.is_some()),
        ];
        if let Some((key, _)) = unknown.iter().find(|(_, is_given)| *is_given) {
            let help = "match `from`, `to`, `port`, `process` and `user`, or take `shunt` out";
            self.error(
                at.span(),
                format!("nothing is known of the `{key}` of packets that are passed on"),
                help,
            );
        }
        Some(after)
    }

    /// Gives the shunt the rules that apply to forwarded flows.
    pub(super) fn shunt_rules(
        &mut self,
        rules: &[At<raw::Rule>],
        policy: &Policy,
        shunt: Option<&mut Shunt>,
    ) {
        let of_shunt =
            || rules.iter().filter(|rule| !wire::goes_there(rule)).filter_map(|rule| rule.shunt.as_ref());
        let Some(shunt) = shunt else {
            // "none" may also keep flows of listeners away from the wire.
            let path = |at: &At<raw::RuleShunt>| at.fast_path.as_deref().copied();
            if let Some(at) = of_shunt().find(|at| path(at) != Some(FastPathKind::None)) {
                let help = "write a [shunt] (docs/shunt.md), or take this out";
                self.error(at.span(), "there is no shunt for this", help);
            }
            return;
        };
        shunt.rules = Shunt::rules_of(policy);
        let configured: Vec<_> = shunt.fast_paths.iter().map(ShuntPath::kind).collect();
        for path in of_shunt().filter_map(|at| at.fast_path.as_ref()) {
            self.is_configured(path.span(), **path, &configured);
        }
        let at = of_shunt().next();
        if shunt.actions.rules_number().is_some() {
            self.denied_by_more(rules);
            return;
        }
        let help = "add 3 = \"rules\" to [shunt.actions], or leave [shunt.actions] out";
        if let Some(at) = at {
            self.error(at.span(), "no number in marks leaves flows to the rules", help);
        }
        for rule in rules.iter().filter(|rule| denies(rule)) {
            let what =
                "forwarded flows are not denied by this rule: no number in marks leaves flows to the rules";
            self.warning(rule.span(), what, help);
        }
    }

    /// Warns of rules that deny by something that is not known about forwarded flows.
    fn denied_by_more(&mut self, rules: &[At<raw::Rule>]) {
        for rule in rules.iter().filter(|rule| denies(rule)) {
            let matcher = &rule.matcher;
            let unknown = [
                ("host", matcher.host.is_some()),
                ("host_file", matcher.host_file.is_some()),
                ("host_contains", matcher.host_contains.is_some()),
                ("url", matcher.url.is_some()),
            ];
            if let Some((key, _)) = unknown.iter().find(|(_, is_given)| *is_given) {
                let what = format!("forwarded flows are not denied by this rule: their `{key}` is not known");
                let help = "deny by `from`, `to` and `port` what the shunt's ports must not pass on";
                self.warning(rule.span(), what, help);
            }
        }
    }

    fn switch(&mut self, at: &At<raw::Shunt>) -> Option<ShuntSwitch> {
        let Some(openflow) = &at.openflow else {
            let help = "write [shunt.openflow] with listen = [\"192.0.2.1:6653\"]";
            self.error(at.span(), "nothing says where the switch connects to", help);
            return None;
        };
        if at.forwarding.as_deref() == Some(&raw::Forwarding::Routed) {
            let help = "use fast_path = \"tc\" or \"xdp\", or write `forwarding = \"bridged\"`";
            self.error(at.span(), "a switch does not route: it passes frames on as they are", help);
        }
        let listen = openflow.listen.as_ref().map(|list| self.addresses(list)).unwrap_or_default();
        if openflow.listen.is_none() {
            let help = "such as listen = [\"192.0.2.1:6653\"]";
            self.error(openflow.span(), "nothing says where the switch connects to", help);
        }
        let from = openflow.switch.as_ref().and_then(|text| {
            let address = text.parse().ok();
            if address.is_none() {
                let help = "such as switch = \"192.0.2.2\"";
                self.error(text.span(), format!("'{}' is not an address", text.as_str()), help);
            }
            address
        });
        let members = self.members(at);
        let ports = if members.is_empty() { self.switch_ports(&at.port) } else { BTreeMap::new() };
        let flag = |key: &Option<At<bool>>, default| key.as_deref().copied().unwrap_or(default);
        Some(ShuntSwitch {
            listen,
            from,
            versions: versions(openflow),
            ports,
            clear_at_start: flag(&openflow.delete_flows_on_startup, false),
            clear_at_end: flag(&openflow.delete_flows_on_shutdown, false),
            pairs: flag(&openflow.install_pairs, true),
            master: openflow.role.as_deref() == Some(&raw::Role::Master),
            shared: flag(&openflow.shared, false),
            table: self.table(openflow),
            members,
        })
    }

    /// Returns the table of our entries. Roles and tables need OpenFlow 1.3.
    fn table(&mut self, openflow: &At<raw::OpenFlow>) -> u8 {
        let newer = versions(openflow).contains(&Version::V1_3);
        let master = openflow.role.as_ref().filter(|role| ***role == raw::Role::Master).map(At::span);
        let table = openflow.table.as_ref().filter(|table| ***table != 0).map(At::span);
        if let Some(span) = master.or(table).filter(|_| !newer) {
            let help = "add \"1.3\" to `versions`, or take this out";
            self.error(span, "OpenFlow 1.0 has no roles, and one table only", help);
        }
        let number = self.number(openflow.table.as_ref(), 0..=254, "").unwrap_or(0);
        u8::try_from(number).unwrap_or(0)
    }

    fn entries(
        &mut self,
        at: Option<&At<u32>>,
        range: std::ops::RangeInclusive<u64>,
        default: usize,
    ) -> usize {
        let number = self.number(at, range, " flows").and_then(|number| usize::try_from(number).ok());
        number.unwrap_or(default)
    }

    fn mark_actions(
        &mut self,
        at: Option<&At<BTreeMap<String, At<Meaning>>>>,
        words: &[FastPathKind],
    ) -> MarkActions {
        let Some(at) = at else { return MarkActions::default() };
        let mut actions = MarkActions::none();
        for (number, meaning) in at.iter() {
            if let Meaning::Path(path) = **meaning {
                self.is_configured(meaning.span(), path, words);
            }
            if !number.parse().is_ok_and(|number| actions.set(number, **meaning)) {
                let help = "marks have four bits for the number of an action: 0 to 15";
                self.error(meaning.span(), format!("'{number}' is not the number of an action"), help);
            }
        }
        actions
    }

    fn shunt_ports(&mut self, list: &[At<raw::ShuntPort>], switch: bool) -> BTreeMap<PortNumber, String> {
        let mut ports = BTreeMap::new();
        for port in list {
            if switch && port.number.is_some() && port.interface.is_none() {
                self.number(port.number.as_ref(), 0..=u64::from(PortNumber::COUNT - 1), "");
                continue;
            }
            let (Some(number), Some(interface)) = (&port.number, &port.interface) else {
                let help = "such as number = 1, interface = \"eth0\"";
                self.error(port.span(), "a port of the shunt has a number and an interface", help);
                continue;
            };
            let fits = |c: char| !c.is_whitespace() && c != '/' && c != '"' && !c.is_control();
            if interface.is_empty() || interface.len() > INTERFACE_MAX || !interface.chars().all(fits) {
                let help = "`ip link` lists the interfaces of this host";
                self.error(
                    interface.span(),
                    format!("'{}' is not an interface name", interface.as_str()),
                    help,
                );
            }
            let checked = self.number(Some(number), 0..=u64::from(PortNumber::COUNT - 1), "");
            let checked = checked.and_then(|number| PortNumber::new(u8::try_from(number).ok()?));
            let Some(checked) = checked else { continue };
            let twice = ports.values().any(|name| *name == **interface);
            if twice || ports.insert(checked, interface.to_string()).is_some() {
                let help = "give each port a number and an interface of its own";
                self.error(port.span(), "two ports of the shunt have the same number or interface", help);
            }
        }
        ports
    }
}

/// The configured fast paths, in their order. Default: tc.
fn words(at: &At<raw::Shunt>) -> Vec<FastPathKind> {
    let named = at.fast_path.as_ref().map(|list| list.items().iter().map(|word| **word).collect());
    named.unwrap_or_else(|| vec![FastPathKind::Tc])
}

fn versions(openflow: &raw::OpenFlow) -> BTreeSet<Version> {
    let Some(list) = &openflow.versions else { return Version::ALL.into() };
    let version = |at: &At<raw::OpenFlowVersion>| match **at {
        raw::OpenFlowVersion::V1_0 => Version::V1_0,
        raw::OpenFlowVersion::V1_3 => Version::V1_3,
    };
    list.items().iter().map(version).collect()
}

fn denies(rule: &raw::Rule) -> bool {
    matches!(rule.action.as_deref(), Some(raw::RuleAction::Deny))
}
