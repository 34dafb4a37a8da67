//! `[shunt]`.

use super::super::{At, Shunt, ShuntPath, raw};
use super::Check;
use sidetrack_core::shunt::{MarkActions, PortNumber, ShuntAction};
use std::collections::BTreeMap;

/// Longest name of an interface (`IFNAMSIZ` less its NUL).
const INTERFACE_MAX: usize = 15;

impl Check<'_> {
    /// The shunt; none if something essential is wrong with it.
    pub(super) fn shunt(&mut self, at: &At<raw::Shunt>) -> Option<Shunt> {
        let idle = 100..=86_400_000;
        let entries = 16..=1_048_576;
        let idle_ms = |check: &mut Self, key: Option<&At<u64>>| {
            check.number(key, idle.clone(), " milliseconds").unwrap_or(Shunt::IDLE_TIMEOUT_MS)
        };
        let entries_max = self.entries(at.entries_max.as_ref(), entries.clone(), Shunt::ENTRIES_MAX);
        let shunt = Shunt {
            fast_path: match at.fast_path.as_deref() {
                None | Some(raw::FastPath::Tc) => ShuntPath::Tc,
                Some(raw::FastPath::Xdp) => ShuntPath::Xdp,
                Some(raw::FastPath::XdpGeneric) => ShuntPath::XdpGeneric,
            },
            bridged: at.forwarding.as_deref() == Some(&raw::Forwarding::Bridged),
            idle_timeout_ms: idle_ms(self, at.idle_timeout_ms.as_ref()),
            block_idle_timeout_ms: idle_ms(self, at.block_idle_timeout_ms.as_ref()),
            entries_max,
            entries_max_per_client: self.entries(
                at.entries_max_per_client.as_ref(),
                1..=1_048_576,
                entries_max,
            ),
            actions: self.mark_actions(at.actions.as_ref()),
            ports: self.shunt_ports(&at.port),
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

    fn entries(
        &mut self,
        at: Option<&At<u32>>,
        range: std::ops::RangeInclusive<u64>,
        default: usize,
    ) -> usize {
        let number = self.number(at, range, " flows").and_then(|number| usize::try_from(number).ok());
        number.unwrap_or(default)
    }

    fn mark_actions(&mut self, at: Option<&At<BTreeMap<String, At<raw::ShuntAction>>>>) -> MarkActions {
        let Some(at) = at else { return MarkActions::default() };
        let mut actions = MarkActions::none();
        for (number, action) in at.iter() {
            let meaning = match **action {
                raw::ShuntAction::Ignore => ShuntAction::Ignore,
                raw::ShuntAction::Shunt => ShuntAction::Shunt,
                raw::ShuntAction::Block => ShuntAction::Block,
            };
            if !number.parse().is_ok_and(|number| actions.set(number, meaning)) {
                let help = "marks have four bits for the number of an action: 0 to 15";
                self.error(action.span(), format!("'{number}' is no number of an action"), help);
            }
        }
        actions
    }

    fn shunt_ports(&mut self, list: &[At<raw::ShuntPort>]) -> BTreeMap<PortNumber, String> {
        let mut ports = BTreeMap::new();
        for port in list {
            let (Some(number), Some(interface)) = (&port.number, &port.interface) else {
                let help = "such as number = 1, interface = \"eth0\"";
                self.error(port.span(), "a port of the shunt has a number and an interface", help);
                continue;
            };
            let fits = |c: char| !c.is_whitespace() && c != '/' && c != '"' && !c.is_control();
            if interface.is_empty() || interface.len() > INTERFACE_MAX || !interface.chars().all(fits) {
                let help = "`ip link` lists the interfaces of this host";
                self.error(interface.span(), format!("'{}' is no interface", interface.as_str()), help);
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
