//! The packet filter's part of the shunt, as text: rules that number the ports, ask the policy once for each connection, and
//! keep the answer in the connection's mark. The administrator's own rules stay as they are; policy goes into one chain.

use super::{ForwardLine, Mark, MarkActions, PortNumber, ShuntAction};
use crate::net::{IpNet, IpSet};
use std::fmt::Write as _;

/// The bits of a mark that say the ingress, the egress and the decision.
const INGRESS: u32 = Mark::INGRESS_KNOWN | 0x0f00_0000;
const EGRESS: u32 = Mark::EGRESS_KNOWN | 0x00f0_0000;
const DECISION: u32 = Mark::DECIDED | 0x000f_0000;

/// What the rules are made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSet<'a> {
    /// Ports and the names of their interfaces.
    pub ports: &'a [(PortNumber, &'a str)],
    /// The ports are those of a bridge; else the host routes between them.
    pub bridged: bool,
    /// The meaning of the numbers of actions.
    pub actions: MarkActions,
    /// Flows that the chain of the policy says nothing of are left to our own rules.
    pub own_rules: bool,
    /// Flows that our own rules deny by their addresses: dropped from the first packet on.
    pub lines: &'a [ForwardLine],
}

/// Examples for numbers that name a fast path: their destination port is this and the number.
const FIRST_BY_PATH: u16 = 5000;

const fn decided(number: u8) -> u32 {
    Mark::DECIDED | (number as u32) << 16
}

fn ingress(port: PortNumber) -> u32 {
    Mark::INGRESS_KNOWN | u32::from(port.number()) << 24
}

fn egress(port: PortNumber) -> u32 {
    Mark::EGRESS_KNOWN | u32::from(port.number()) << 20
}

impl RuleSet<'_> {
    /// The bits that a rule of the policy sets for an action; none if no number means it.
    pub fn decision(&self, action: ShuntAction) -> Option<u32> {
        self.actions.number(action).map(decided)
    }

    /// The bits that leave a flow to our own rules, where there are such. Set by the client's packets alone: a policy that asks
    /// for the server's port has not seen one when the first answer comes.
    fn left_to_own_rules(&self) -> Option<u32> {
        let number = self.actions.rules_number().filter(|_| self.own_rules)?;
        Some(decided(number))
    }

    /// For `nft -f`: a table of ours, which replaces an earlier one of ours. The chain `shunt_policy` is the administrator's to
    /// fill.
    pub fn nft(&self) -> String {
        let mut text = String::new();
        if self.bridged {
            self.nft_ports(&mut text);
        }
        text +=
            "table inet sidetrack_shunt\ndelete table inet sidetrack_shunt\ntable inet sidetrack_shunt {\n";
        text += "\tchain shunt_policy {\n";
        for line in self.nft_examples() {
            let _ = writeln!(text, "\t\t# {line}");
        }
        text += "\t}\n\n";
        self.nft_own_lines(&mut text);
        text += "\tchain prerouting {\n\t\ttype filter hook prerouting priority mangle;\n";
        if !self.bridged {
            for (port, name) in self.ports {
                let _ = writeln!(
                    text,
                    "\t\tiifname \"{name}\" meta mark set meta mark and {:#010x} or {:#010x}",
                    !INGRESS,
                    ingress(*port)
                );
            }
        }
        let _ = writeln!(text, "\t\tct mark and {:#010x} != 0 meta mark set ct mark", Mark::INGRESS_KNOWN);
        self.nft_drop_blocked(&mut text);
        text += "\t}\n\n\tchain postrouting {\n\t\ttype filter hook postrouting priority mangle;\n";
        let known = Mark::INGRESS_KNOWN | Mark::EGRESS_KNOWN;
        if !self.bridged {
            for (port, name) in self.ports {
                self.nft_egress(&mut text, *port, name);
            }
        }
        let _ = writeln!(text, "\t\tmeta mark and {known:#010x} != {known:#010x} return");
        if !self.lines.is_empty() {
            let _ = writeln!(
                text,
                "\t\tmeta mark and {:#010x} == 0 meta l4proto {{ tcp, udp }} ct direction original jump sidetrack_rules",
                Mark::DECIDED
            );
        }
        let _ = writeln!(text, "\t\tmeta mark and {:#010x} == 0 jump shunt_policy", Mark::DECIDED);
        if let Some(bits) = self.left_to_own_rules() {
            let (decided, keep) = (Mark::DECIDED, !DECISION);
            let _ = writeln!(
                text,
                "\t\tmeta mark and {decided:#010x} == 0 meta l4proto {{ tcp, udp }} ct state established,related \
                 ct direction original meta mark set meta mark and {keep:#010x} or {bits:#010x}"
            );
        }
        text += "\t\tct mark set meta mark\n";
        text + "\t}\n}\n"
    }

    /// Drops what the mark says is blocked, whether or not a fast path has an entry for it. Only before routing: the packet
    /// that the policy decided about passes, as otherwise conntrack would not report the new mark.
    fn nft_drop_blocked(&self, text: &mut String) {
        if let Some((mark, mask)) = self.blocked() {
            let _ = writeln!(text, "\t\tct mark and {mask:#010x} == {mark:#010x} drop");
        }
    }

    /// The decision to block in a mark that is complete, and the bits to look at.
    fn blocked(&self) -> Option<(u32, u32)> {
        let bits = self.decision(ShuntAction::Block)?;
        Some((bits | Mark::COMPLETE, DECISION | Mark::COMPLETE))
    }

    /// Our own rules that addresses and ports decide, for a connection's own direction.
    fn nft_own_lines(&self, text: &mut String) {
        if self.lines.is_empty() {
            return;
        }
        *text += "\tchain sidetrack_rules {\n";
        let block = self.decision(ShuntAction::Block).map(|bits| {
            let keep = !DECISION;
            format!("meta mark set meta mark and {keep:#010x} or {bits:#010x} ct mark set meta mark ")
        });
        for line in self.lines {
            let verdict = match line.deny {
                true => format!("{}drop", block.as_deref().unwrap_or_default()),
                false => "return".to_owned(),
            };
            let ports = line.matches.port.as_ref().map(|set| {
                let ranges: Vec<_> = set.ranges().map(|(from, to)| range(from, to, '-')).collect();
                format!("th dport {{ {} }} ", ranges.join(", "))
            });
            for family in Family::of(line) {
                let [from, to] =
                    [("saddr", &line.matches.from), ("daddr", &line.matches.to)].map(|(word, set)| {
                        let nets = family.nets(set.as_ref())?;
                        Some(format!("{} {word} {{ {} }} ", family.nft(), nets.join(", ")))
                    });
                let _ = writeln!(
                    text,
                    "\t\t{}{}{}{verdict} comment \"{}\"",
                    from.unwrap_or_default(),
                    to.unwrap_or_default(),
                    ports.as_deref().unwrap_or_default(),
                    comment(&line.rule)
                );
            }
        }
        *text += "\t}\n\n";
    }

    /// Bridge ports are known by name only in the bridge family; a mark carries the number into `inet`, where conntrack is.
    fn nft_ports(&self, text: &mut String) {
        *text += "table bridge sidetrack_ports\ndelete table bridge sidetrack_ports\ntable bridge sidetrack_ports {\n";
        *text += "\tchain prerouting {\n\t\ttype filter hook prerouting priority -300;\n";
        for (port, name) in self.ports {
            let _ = writeln!(
                text,
                "\t\tiifname \"{name}\" meta mark set meta mark and {:#010x} or {:#010x}",
                !INGRESS,
                ingress(*port)
            );
        }
        *text += "\t}\n\n\tchain postrouting {\n\t\ttype filter hook postrouting priority 0;\n";
        for (port, name) in self.ports {
            self.nft_egress(text, *port, name);
        }
        *text += "\t}\n}\n";
    }

    /// Numbers the egress of a connection's first packet.
    fn nft_egress(&self, text: &mut String, port: PortNumber, name: &str) {
        let known = Mark::INGRESS_KNOWN | Mark::EGRESS_KNOWN;
        let _ = writeln!(
            text,
            "\t\tmeta mark and {known:#010x} == {:#010x} oifname \"{name}\" meta mark set meta mark and {:#010x} or {:#010x}",
            Mark::INGRESS_KNOWN,
            !EGRESS,
            egress(port)
        );
    }

    fn nft_examples(&self) -> Vec<String> {
        let example = |action, what: &str| {
            let bits = self.decision(action)?;
            let keep = !DECISION;
            Some(format!(
                "{what} ct state established,related meta mark set meta mark and {keep:#010x} or {bits:#010x}"
            ))
        };
        let shunt = example(ShuntAction::Shunt, "tcp dport 5000");
        let block = example(ShuntAction::Block, "tcp dport 5666");
        let by_path = self.actions.paths().map(|(number, path)| {
            let (port, keep, bits) = (FIRST_BY_PATH + u16::from(number), !DECISION, decided(number));
            format!(
                "tcp dport {port} ct state established,related meta mark set meta mark and {keep:#010x} or {bits:#010x} comment \
                 \"by {}\"",
                path.as_str()
            )
        });
        shunt.into_iter().chain(by_path).chain(block).collect()
    }

    /// For `iptables-restore --noflush` and `ip6tables-restore --noflush`: as NFShunt's, with the chain `SHUNT_POLICY` to fill.
    pub fn iptables(&self) -> String {
        let mut text = String::from("*mangle\n");
        for chain in ["PRE", "POST", "IN", "OUT", "POLICY", "RULES"] {
            let _ = writeln!(text, ":SHUNT_{chain} - [0:0]");
        }
        if !self.lines.is_empty() {
            text += ":SHUNT_BLOCK - [0:0]\n";
        }
        text += "-A PREROUTING -j SHUNT_PRE\n-A POSTROUTING -j SHUNT_POST\n";
        text += "-A SHUNT_PRE -j CONNMARK --restore-mark\n";
        self.iptables_drop_blocked(&mut text);
        let unknown = |bit: u32| format!("-m mark --mark 0x0/{bit:#x}");
        let _ = writeln!(text, "-A SHUNT_PRE {} -j SHUNT_IN", unknown(Mark::INGRESS_KNOWN));
        let _ = writeln!(text, "-A SHUNT_POST {} -j RETURN", unknown(Mark::INGRESS_KNOWN));
        let _ = writeln!(text, "-A SHUNT_POST {} -j SHUNT_OUT", unknown(Mark::EGRESS_KNOWN));
        self.iptables_own_lines(&mut text, &unknown(Mark::DECIDED));
        let _ = writeln!(text, "-A SHUNT_POST {} -j SHUNT_POLICY", unknown(Mark::DECIDED));
        for protocol in ["tcp", "udp"] {
            if let Some(bits) = self.left_to_own_rules() {
                let _ = writeln!(
                    text,
                    "-A SHUNT_POST -p {protocol} {} -m conntrack --ctstate RELATED,ESTABLISHED --ctdir ORIGINAL -j MARK --set-xmark \
                     {bits:#x}/{DECISION:#x}",
                    unknown(Mark::DECIDED)
                );
            }
        }
        text += "-A SHUNT_POST -j CONNMARK --save-mark\n";
        for (port, name) in self.ports {
            let (inwards, outwards) = if self.bridged {
                (format!("-m physdev --physdev-in {name}"), format!("-m physdev --physdev-out {name}"))
            } else {
                (format!("-i {name}"), format!("-o {name}"))
            };
            let _ = writeln!(
                text,
                "-A SHUNT_IN {inwards} -j MARK --set-xmark {:#x}/{INGRESS:#x}",
                ingress(*port)
            );
            let _ = writeln!(
                text,
                "-A SHUNT_OUT {outwards} -j MARK --set-xmark {:#x}/{EGRESS:#x}",
                egress(*port)
            );
        }
        for (port, bits, comment) in self.iptables_examples() {
            let _ = writeln!(
                text,
                "# -A SHUNT_POLICY -p tcp --dport {port} -m conntrack --ctstate RELATED,ESTABLISHED{comment} -j MARK --set-xmark \
                 {bits:#x}/{DECISION:#x}"
            );
        }
        text + "COMMIT\n"
    }

    fn iptables_drop_blocked(&self, text: &mut String) {
        if let Some((mark, mask)) = self.blocked() {
            let _ = writeln!(text, "-A SHUNT_PRE -m connmark --mark {mark:#x}/{mask:#x} -j DROP");
        }
    }

    /// As with nft, one line for each combination: there are no sets here. What is dropped is marked first, in two steps.
    fn iptables_own_lines(&self, text: &mut String, undecided: &str) {
        if self.lines.is_empty() {
            return;
        }
        let jump = |protocol: &str| {
            format!("-A SHUNT_POST -p {protocol} {undecided} -m conntrack --ctdir ORIGINAL -j SHUNT_RULES\n")
        };
        *text += &jump("tcp");
        *text += &jump("udp");
        let block = self.decision(ShuntAction::Block);
        if let Some(bits) = block {
            let _ = writeln!(text, "-A SHUNT_BLOCK -j MARK --set-xmark {bits:#x}/{DECISION:#x}");
            *text += "-A SHUNT_BLOCK -j CONNMARK --save-mark\n-A SHUNT_BLOCK -j DROP\n";
        }
        for line in self.lines {
            let verdict = match (line.deny, block) {
                (true, Some(_)) => "SHUNT_BLOCK",
                (true, None) => "DROP",
                (false, _) => "RETURN",
            };
            for family in Family::of(line) {
                let nets = |word: &str, set: Option<&IpSet>| match family.nets(set) {
                    Some(nets) => nets.iter().map(|net| format!(" -{word} {net}")).collect(),
                    None => vec![String::new()],
                };
                let (from, to) = (nets("s", line.matches.from.as_ref()), nets("d", line.matches.to.as_ref()));
                for (from, to) in from.iter().flat_map(|from| to.iter().map(move |to| (from, to))) {
                    for ports in ports_of(line) {
                        let word = family.iptables();
                        let _ = writeln!(text, "{word}-A SHUNT_RULES{from}{to}{ports} -j {verdict}");
                    }
                }
            }
        }
    }

    /// Ports, what is to be set for them, and what is to be said of that.
    fn iptables_examples(&self) -> Vec<(u16, u32, String)> {
        let example = |action, port| Some((port, self.decision(action)?, String::new()));
        let by_path = self.actions.paths().map(|(number, path)| {
            let comment = format!(" -m comment --comment \"by {}\"", path.as_str());
            (FIRST_BY_PATH + u16::from(number), decided(number), comment)
        });
        let shunt = example(ShuntAction::Shunt, 5000).into_iter().chain(by_path);
        shunt.chain(example(ShuntAction::Block, 5666)).collect()
    }
}

/// The addresses that a line of a packet filter is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Both,
    V4,
    V6,
}

impl Family {
    /// Those for which a line is needed: one where no address is asked for.
    fn of(line: &ForwardLine) -> Vec<Self> {
        if line.matches.from.is_none() && line.matches.to.is_none() {
            return vec![Self::Both];
        }
        let has = |family: &Self| {
            let some = |set: Option<&IpSet>| family.nets(set).is_none_or(|nets| !nets.is_empty());
            some(line.matches.from.as_ref()) && some(line.matches.to.as_ref())
        };
        [Self::V4, Self::V6].into_iter().filter(has).collect()
    }

    /// The networks of a set that are of this family; `None` without a set.
    fn nets(self, set: Option<&IpSet>) -> Option<Vec<String>> {
        let fits = |net: &&IpNet| self == Self::Both || net.is_v6() == (self == Self::V6);
        Some(set?.nets().iter().filter(fits).map(ToString::to_string).collect())
    }

    const fn nft(self) -> &'static str {
        match self {
            Self::V6 => "ip6",
            Self::Both | Self::V4 => "ip",
        }
    }

    /// iptables-restore skips lines of the other family.
    const fn iptables(self) -> &'static str {
        match self {
            Self::Both => "",
            Self::V4 => "-4 ",
            Self::V6 => "-6 ",
        }
    }
}

fn range(from: u16, to: u16, between: char) -> String {
    if from == to { from.to_string() } else { format!("{from}{between}{to}") }
}

/// The ports of a line for iptables, for both protocols.
fn ports_of(line: &ForwardLine) -> Vec<String> {
    let Some(set) = &line.matches.port else { return vec![String::new()] };
    let one = |(from, to)| ["tcp", "udp"].map(|word| format!(" -p {word} --dport {}", range(from, to, ':')));
    set.ranges().flat_map(one).collect()
}

/// A rule's name as a comment of nft, which has no escapes.
fn comment(name: &str) -> String {
    name.chars().filter(|c| !c.is_control() && *c != '"' && *c != '\\').take(100).collect()
}
