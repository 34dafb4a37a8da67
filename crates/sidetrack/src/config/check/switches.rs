//! The switches of `[shunt]`: one, or several with links between them.

use super::super::{At, SwitchMember, raw};
use super::Check;
use sidetrack_core::openflow::SwitchPorts;
use sidetrack_core::shunt::PortNumber;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};

/// `OFPPP_MAX` of OpenFlow 1.3. In 1.0 ports end at 0xff00, which the controller checks once the version is known.
const PORTS: RangeInclusive<u64> = 1..=0xffff_ff00;

/// Ports of a switch that have a purpose.
type Taken = Vec<(u64, Range<usize>)>;

impl Check<'_> {
    /// Returns the ports of the only switch.
    pub(super) fn switch_ports(&mut self, list: &[At<raw::ShuntPort>]) -> BTreeMap<PortNumber, SwitchPorts> {
        if let Some(at) = list.iter().find_map(|port| port.switch.as_ref()) {
            let help = "write [[shunt.switch]] with name = and address =, or take this out";
            self.error(at.span(), "there are no several switches to choose from", help);
        }
        self.ports_of(list.iter(), &mut Taken::new())
    }

    fn ports_of<'a>(
        &mut self,
        list: impl Iterator<Item = &'a At<raw::ShuntPort>>,
        taken: &mut Taken,
    ) -> BTreeMap<PortNumber, SwitchPorts> {
        let mut ports = BTreeMap::new();
        for port in list {
            let (Some(fast), Some(slow)) = (&port.fast_port, &port.slow_port) else {
                let help = "such as fast_port = 49, slow_port = 10";
                self.error(
                    port.span(),
                    "a port has two places on the switch: where the hosts are, and here",
                    help,
                );
                continue;
            };
            for key in [fast, slow] {
                self.take(key, taken);
            }
            let number = port.number.as_deref().and_then(|number| u8::try_from(*number).ok());
            if let Some(number) = number.and_then(PortNumber::new) {
                ports.insert(number, SwitchPorts { fast: **fast, slow: **slow });
            }
        }
        ports
    }

    /// Notes that a port of a switch has a purpose. Reports an error if it has one already.
    fn take(&mut self, key: &At<u32>, taken: &mut Taken) {
        let Some(number) = self.number(Some(key), PORTS, "") else { return };
        if taken.iter().any(|(other, _)| *other == number) {
            let help = "each port of the switch is fast or slow for one port of the shunt, or leads to one other switch";
            self.error(key.span(), format!("the switch's port {number} is named twice"), help);
        }
        taken.push((number, key.span()));
    }

    /// Checks `[[shunt.switch]]`. Returns an empty list if there are none.
    pub(super) fn members(&mut self, at: &At<raw::Shunt>) -> Vec<SwitchMember> {
        let Some(first) = at.switch.first() else { return Vec::new() };
        if let Some(single) = at.openflow.as_ref().and_then(|openflow| openflow.switch.as_ref()) {
            let help = "each [[shunt.switch]] has its own address: take this out";
            self.error(single.span(), "this is the address of an only switch", help);
        }
        let names: Vec<&str> =
            at.switch.iter().map(|switch| switch.name.as_ref().map_or("", |name| name.as_str())).collect();
        for port in at.port.iter() {
            match &port.switch {
                Some(name) if names.contains(&name.as_str()) => {}
                Some(name) => self.no_such_switch(name, &names),
                None => {
                    let help = format!("such as switch = \"{}\"", names.first().unwrap_or(&"left"));
                    self.error(port.span(), "nothing says which switch has this port", help);
                }
            }
        }
        let mut members = Vec::new();
        let mut addresses = BTreeSet::new();
        for switch in &at.switch {
            members.extend(self.member(switch, &at.port, &names, &mut addresses));
        }
        if members.len() == at.switch.len() && !is_tree(&members) {
            let help = "link them so that one path leads from each switch to each other one, and give each link at both ends";
            self.error(first.span(), "the links of the switches do not form a tree", help);
        }
        members
    }

    fn no_such_switch(&mut self, name: &At<String>, names: &[&str]) {
        let help = format!("the switches are: {}", names.join(", "));
        self.error(name.span(), format!("there is no switch '{}'", name.as_str()), help);
    }

    fn member(
        &mut self,
        switch: &At<raw::Switch>,
        ports: &[At<raw::ShuntPort>],
        names: &[&str],
        addresses: &mut BTreeSet<IpAddr>,
    ) -> Option<SwitchMember> {
        let (Some(name), Some(address)) = (&switch.name, &switch.address) else {
            let help = "such as name = \"left\", address = \"192.0.2.2\"";
            self.error(switch.span(), "a switch has a name and an address", help);
            return None;
        };
        if name.is_empty() || names.iter().filter(|other| **other == name.as_str()).count() > 1 {
            self.error(name.span(), "a switch has a name of its own", "give each switch another name");
        }
        let parsed: Option<IpAddr> = address.parse().ok();
        match parsed {
            None => {
                let help = "such as address = \"192.0.2.2\"";
                self.error(address.span(), format!("'{}' is not an address", address.as_str()), help);
            }
            Some(parsed) if !addresses.insert(parsed) => {
                let help = "the address tells the switches apart: give each its own";
                self.error(address.span(), "two switches have this address", help);
            }
            Some(_) => {}
        }
        let mut taken = Taken::new();
        let own = ports.iter().filter(|port| port.switch.as_deref() == Some(&**name));
        let ports = self.ports_of(own, &mut taken);
        let mut links = Vec::new();
        for link in &switch.links {
            let (Some(to), Some(port)) = (&link.to, &link.port) else {
                let help = "such as { to = \"right\", port = 20 }";
                self.error(link.span(), "a link names the other switch and the port that leads there", help);
                continue;
            };
            self.take(port, &mut taken);
            match names.iter().position(|other| *other == to.as_str()) {
                Some(at) => links.push((at, **port)),
                None => self.no_such_switch(to, names),
            }
        }
        Some(SwitchMember { name: name.to_string(), address: parsed?, ports, links })
    }
}

/// Whether one path leads from each switch to each other one, and each link has its way back.
fn is_tree(members: &[SwitchMember]) -> bool {
    let links =
        |at: usize| members.get(at).into_iter().flat_map(|member| member.links.iter().map(|(to, _)| *to));
    let ends: Vec<(usize, usize)> =
        (0..members.len()).flat_map(|at| links(at).map(move |to| (at, to))).collect();
    let is_mutual = ends.iter().all(|(from, to)| from != to && ends.contains(&(*to, *from)));
    let mut reached = BTreeSet::from([0]);
    let mut queue = vec![0];
    while let Some(at) = queue.pop() {
        queue.extend(links(at).filter(|to| reached.insert(*to)));
    }
    // A connected graph with one link less than it has nodes is a tree.
    is_mutual && reached.len() == members.len() && ends.len() == 2 * (members.len() - 1)
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, ShuntPath};

    const TWO: &str = r#"version = 1
[shunt]
fast_path = "openflow"
forwarding = "bridged"
[shunt.openflow]
listen = ["192.0.2.1:6653"]
[[shunt.switch]]
name = "left"
address = "192.0.2.2"
links = [{ to = "right", port = 20 }]
[[shunt.switch]]
name = "right"
address = "192.0.2.3"
links = [{ to = "left", port = 21 }]
[[shunt.port]]
number = 1
switch = "left"
fast_port = 49
slow_port = 10
[[shunt.port]]
number = 2
switch = "right"
fast_port = 49
slow_port = 10
"#;

    #[test]
    fn ports_and_links_belong_to_their_switches() {
        let config = Config::from_text("test.toml", TWO).expect("valid");
        let shunt = config.shunt.as_ref().expect("a shunt");
        let [ShuntPath::OpenFlow(switch)] = &shunt.fast_paths[..] else { panic!("{shunt:?}") };
        let members: Vec<_> = switch
            .members
            .iter()
            .map(|one| (one.name.as_str(), one.ports.len(), one.links.clone()))
            .collect();
        assert_eq!(members, [("left", 1, vec![(1, 20)]), ("right", 1, vec![(0, 21)])]);
        assert!(switch.ports.is_empty());
    }

    #[test]
    fn mistakes_are_told() {
        for (from, to, expected) in [
            ("switch = \"right\"\n", "", "nothing says which switch has this port"),
            ("switch = \"right\"", "switch = \"middle\"", "there is no switch 'middle'"),
            ("name = \"right\"", "name = \"left\"", "a switch has a name of its own"),
            ("address = \"192.0.2.3\"", "address = \"192.0.2.2\"", "two switches have this address"),
            ("address = \"192.0.2.3\"", "address = \"right\"", "'right' is not an address"),
            ("address = \"192.0.2.3\"\n", "", "a switch has a name and an address"),
            ("links = [{ to = \"left\", port = 21 }]\n", "", "do not form a tree"),
            ("to = \"left\"", "to = \"right\"", "do not form a tree"),
            ("port = 20", "port = 49", "the switch's port 49 is named twice"),
            ("port = 20", "port = 0", "0 is out of range"),
            ("to = \"right\", ", "", "a link names the other switch"),
            ("listen =", "switch = \"192.0.2.2\"\nlisten =", "the address of an only switch"),
            ("fast_path = \"openflow\"", "fast_path = \"none\"", "this is about a switch"),
        ] {
            assert!(TWO.contains(from), "{from}");
            let error = Config::from_text("test.toml", &TWO.replacen(from, to, 1)).expect_err(to);
            let text = error.render(false);
            assert!(text.contains(expected), "{to}: {text}");
        }
        let single =
            TWO.replace("[[shunt.switch]]\n", "").replace("name = \"left\"\naddress = \"192.0.2.2\"\n", "");
        let single = single.replace("name = \"right\"\naddress = \"192.0.2.3\"\n", "");
        let single = single.lines().filter(|line| !line.starts_with("links")).collect::<Vec<_>>().join("\n");
        let text = Config::from_text("test.toml", &single).expect_err("no switches").render(false);
        assert!(text.contains("there are no several switches"), "{text}");
    }
}
