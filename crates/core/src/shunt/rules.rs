//! The rules of the packet filter for the shunt, as text. They number the ports, ask the policy once for each
//! connection, and store the answer in the connection's mark. They do not change the administrator's own rules. The
//! policy has its own chain.

use super::{ForwardLine, Mark, MarkActions, PortNumber, ShuntAction};
use crate::net::{IpNet, IpSet};
use std::fmt::Write as _;

/// The bits of a mark for the ingress, the egress and the decision.
const INGRESS: u32 = Mark::INGRESS_KNOWN | 0x0f00_0000;
const EGRESS: u32 = Mark::EGRESS_KNOWN | 0x00f0_0000;
const DECISION: u32 = Mark::DECIDED | 0x000f_0000;

/// The parameters of the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSet<'a> {
    /// Ports and the names of their interfaces.
    pub ports: &'a [(PortNumber, &'a str)],
    /// The ports belong to a bridge. Otherwise the host routes between them.
    pub bridged: bool,
    /// The meaning of the numbers of actions.
    pub actions: MarkActions,
    /// Flows that the policy chain does not decide about are left to our own rules.
    pub own_rules: bool,
    /// Flows that our own rules deny by their addresses. They are dropped from the first packet on.
    pub lines: &'a [ForwardLine],
}

/// Examples use this destination port plus the number that names a fast path.
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
    /// Returns the bits that a policy rule sets for an action. `None` if no number means this action.
    pub fn decision(&self, action: ShuntAction) -> Option<u32> {
        self.actions.number(action).map(decided)
    }

    /// Returns the bits that leave a flow to our own rules, if there are any. Only packets of the client set them: a
    /// policy that needs the server's port has not seen it when the first answer arrives.
    fn left_to_own_rules(&self) -> Option<u32> {
        let number = self.actions.rules_number().filter(|_| self.own_rules)?;
        Some(decided(number))
    }

    /// Returns the rules for `nft -f`: one table, which replaces an earlier one of this program. The administrator
    /// fills the chain `shunt_policy`.
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
        // Packets of a known connection get the stored mark, so the decision is made once.
        let _ = writeln!(text, "\t\tct mark and {:#010x} != 0 meta mark set ct mark", Mark::INGRESS_KNOWN);
        self.nft_drop_blocked(&mut text);
        text += "\t}\n\n\tchain postrouting {\n\t\ttype filter hook postrouting priority mangle;\n";
        let known = Mark::INGRESS_KNOWN | Mark::EGRESS_KNOWN;
        if !self.bridged {
            for (port, name) in self.ports {
                self.nft_egress(&mut text, *port, name);
            }
        }
        // Decide only if both ports are known: first our own deny lines, then the chain of the administrator.
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

    /// Drops packets whose mark says that they are blocked, with or without an entry of the fast path. It does so
    /// only before routing. The packet that the policy decided about must pass, because otherwise conntrack would not
    /// report the new mark.
    fn nft_drop_blocked(&self, text: &mut String) {
        if let Some((mark, mask)) = self.blocked() {
            let _ = writeln!(text, "\t\tct mark and {mask:#010x} == {mark:#010x} drop");
        }
    }

    /// Returns the bits of a complete mark that decides to block, and the mask to compare.
    fn blocked(&self) -> Option<(u32, u32)> {
        let bits = self.decision(ShuntAction::Block)?;
        Some((bits | Mark::COMPLETE, DECISION | Mark::COMPLETE))
    }

    /// Appends our own rules that depend on addresses and ports only, for the original direction of a connection.
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

    /// Numbers the ports of a bridge. Only the bridge family knows them by name. A mark carries the number to the
    /// `inet` family, where conntrack is.
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

    /// Appends a rule that numbers the egress of a connection's first packet.
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

    /// Returns the rules for `iptables-restore --noflush` and `ip6tables-restore --noflush`, as in NFShunt. The
    /// administrator fills the chain `SHUNT_POLICY`.
    pub fn iptables(&self) -> String {
        let mut text = String::from("*mangle\n");
        for chain in ["PRE", "POST", "IN", "OUT", "POLICY", "RULES"] {
            let _ = writeln!(text, ":SHUNT_{chain} - [0:0]");
        }
        if !self.lines.is_empty() {
            text += ":SHUNT_BLOCK - [0:0]\n";
        }
        text += "-A PREROUTING -j SHUNT_PRE\n-A POSTROUTING -j SHUNT_POST\n";
        // Restore the stored mark first: all rules below look at it.
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

    /// As for nft, but with one line for each combination, because there are no sets. A dropped packet is marked
    /// first, in two steps.
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

    /// Returns examples: the port, the bits to set, and a comment.
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

/// The address family of a line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Both,
    V4,
    V6,
}

impl Family {
    /// Returns the families that need a line. A rule without addresses needs one line for both.
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

    /// Returns the networks of a set that belong to this family. `None` without a set.
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

    /// iptables-restore and ip6tables-restore skip lines of the other family.
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

/// Returns the ports of a line for iptables, for both protocols.
fn ports_of(line: &ForwardLine) -> Vec<String> {
    let Some(set) = &line.matches.port else { return vec![String::new()] };
    let one = |(from, to)| ["tcp", "udp"].map(|word| format!(" -p {word} --dport {}", range(from, to, ':')));
    set.ranges().flat_map(one).collect()
}

/// Turns a rule's name into an nft comment, which has no escapes.
fn comment(name: &str) -> String {
    name.chars().filter(|c| !c.is_control() && *c != '"' && *c != '\\').take(100).collect()
}
