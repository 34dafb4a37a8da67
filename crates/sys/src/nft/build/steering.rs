//! All of one node's steering in one table: the kernel path, REDIRECT and TPROXY.

use super::except::canonical;
use super::except::{self, Except};
use super::hold::HoldQueue;
use super::path::{self, KernelPath};
use super::selector::{MarkBits, Origin, Selector, Versions};
use crate::nft::{
    Chain, ChainKind, Family, Field, Hook, InterfaceName, NFPROTO_IPV4, NFPROTO_IPV6, Rule, Set, Statement,
    TCP, Table, UDP, Value, Verdict, priority,
};
use sidetrack_core::flow::Protocol;

/// What a node steers. For each new connection, in this order: what is excepted is left alone, the kernel path takes its own,
/// then TPROXY, then REDIRECT, each list in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steering {
    /// What is never steered.
    pub except: Except,
    /// What the kernel carries by itself.
    pub kernel_paths: Vec<KernelPath>,
    /// What is given to transparent listeners.
    pub tproxies: Vec<TProxy>,
    /// The mark that routing rules turn into local delivery, see [`crate::route::add_mark_rule`]; connections taken by TPROXY
    /// carry it as connection mark too. Needed with `tproxies`.
    pub tproxy_mark: Option<MarkBits>,
    /// Whether answers to our sockets that are bound to a client's address are led to them, also without `tproxies`. It needs
    /// `tproxy_mark` too.
    pub divert_answers: bool,
    /// What all marks of `kernel_paths` have in common: packets of such connections need no look-up of a socket.
    pub kernel_mark: Option<MarkBits>,
    /// What is redirected.
    pub redirects: Vec<Redirect>,
    /// Whether connections of the kernel path that have ended are forgotten within seconds instead of minutes, so that their
    /// records come soon. Needs [`crate::nft::Feature::CtTimeout`].
    pub forget_ended: bool,
    /// The seconds without a datagram after which a flow of UDP on the kernel path is over. `None`: as the system's settings
    /// say. Needs [`crate::nft::Feature::CtTimeout`].
    pub datagram_idle_s: Option<u32>,
}

/// Connections that go to a local listener, which learns their original destination by SO_ORIGINAL_DST.
///
/// The listener must be bound to the unspecified address: connections of this host reach it on loopback, those of other hosts
/// on the address of the interface they come in by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// The listener's port.
    pub port: u16,
    /// Whether it serves IPv4.
    pub v4: bool,
    /// Whether it serves IPv6.
    pub v6: bool,
    /// Which connections of this host's own processes.
    pub local: Vec<Selector>,
    /// Which connections that come from other hosts.
    pub forwarded: Vec<Selector>,
    /// The queue in which the opening segment waits first; `None`: it does not wait.
    pub hold: Option<HoldQueue>,
}

/// Connections, or datagrams, that go to a local IP_TRANSPARENT listener with their addresses untouched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TProxy {
    /// TCP connections, or every datagram of UDP.
    pub protocol: Protocol,
    /// The listener's port.
    pub port: u16,
    /// Whether it serves IPv4.
    pub v4: bool,
    /// Whether it serves IPv6.
    pub v6: bool,
    /// Which connections, or datagrams, of other hosts.
    pub selectors: Vec<Selector>,
    /// Which datagrams of this host's own processes; UDP only. They get
    /// a mark of the listener, which the routing rule of `tproxy_mark` matches, too.
    pub local: Vec<Selector>,
    /// Whether only datagrams of connections that were taken before are taken; UDP only.
    pub only_known: bool,
    /// What happens to connections when no listener is there: `true` drops them, `false` lets them pass unsteered.
    pub drop_without_listener: bool,
    /// The queue in which the opening segment of a TCP connection waits first; `None`: it does not wait.
    pub hold: Option<HoldQueue>,
}

impl Steering {
    /// The table; it replaces the one before in one transaction.
    pub fn table(&self, name: &str) -> Table {
        let mut sets = Vec::new();
        let mut chains = vec![self.spared().chain(&mut sets)];
        chains.extend(self.hold_chains(&mut sets));
        if !self.tproxies.is_empty() {
            // The chain jumped to must exist before the one that jumps.
            chains.push(self.take_chain(&mut sets));
        }
        if self.divert_answers || !self.tproxies.is_empty() {
            chains.push(self.divert_chain(&mut sets));
        }
        chains.extend(self.datagram_chain(&mut sets));
        chains.push(self.nat_chain(Origin::Forwarded, &mut sets));
        chains.push(self.nat_chain(Origin::Local, &mut sets));
        chains.extend(self.masquerade_chain());
        let ended = self.timeout(Protocol::Tcp).map(|_| path::ended());
        let idle = self.timeout(Protocol::Udp).and(self.datagram_idle_s).map(path::idle);
        let timeouts = ended.into_iter().chain(idle).collect();
        Table { timeouts, sets, chains, ..Table::new(Family::Inet, name) }
    }

    /// What is never steered: as configured, but not the listeners whose connections the kernel path takes.
    fn spared(&self) -> Except {
        let mut except = self.except.clone();
        let of_udp = &mut except.datagram_listeners;
        for (protocol, listeners) in [(Protocol::Tcp, &mut except.listeners), (Protocol::Udp, of_udp)] {
            let taken: Vec<_> = self.kernel_paths.iter().flat_map(|path| path.listeners(protocol)).collect();
            listeners.retain(|listener| !taken.contains(&canonical(*listener)));
        }
        except
    }

    /// The name of the time-outs for the kernel paths of this protocol. `None` without such paths.
    fn timeout(&self, protocol: Protocol) -> Option<&'static str> {
        let (name, wanted) = match protocol {
            Protocol::Tcp => (path::ENDED, self.forget_ended),
            Protocol::Udp => (path::DATAGRAMS, self.datagram_idle_s.is_some()),
        };
        let has_paths = || self.kernel_paths.iter().any(|path| path.protocol == protocol);
        (wanted && has_paths()).then_some(name)
    }

    fn nat_chain(&self, origin: Origin, sets: &mut Vec<Set>) -> Chain {
        let (name, hook) = match origin {
            Origin::Local => ("output", Hook::Output),
            Origin::Forwarded => ("prerouting", Hook::Prerouting),
        };
        let mut chain = Chain::base(name, ChainKind::Nat, hook, priority::DSTNAT).with(jump(except::CHAIN));
        for (index, path) in self.kernel_paths.iter().enumerate() {
            let timeout = self.timeout(path.protocol);
            chain.rules.extend(path.nat_rules(&path_name(index), origin, timeout, sets));
        }
        for (index, redirect) in self.redirects.iter().enumerate() {
            chain.rules.extend(redirect.rules(index, origin, sets));
        }
        chain
    }

    /// Before nat: gives packets of connections that have a transparent socket to it, and new ones to chain `take`.
    fn divert_chain(&self, sets: &mut Vec<Set>) -> Chain {
        let mut chain = Chain::base("divert", ChainKind::Filter, Hook::Prerouting, priority::MANGLE);
        let mark = self.tproxy_mark.unwrap_or(MarkBits { value: 0, mask: 0 });
        chain.rules.extend(self.on_kernel_path());
        // Also answers to sockets bound to a client's address. Wildcard sockets are listeners: a mere port number of ours as
        // destination does not make a packet ours.
        chain.rules.push(Rule::new([
            Statement::is(Field::L4Proto, TCP),
            Statement::is(Field::SocketTransparent, Value::Boolean(true)),
            Statement::is(Field::SocketWildcard, Value::Boolean(false)),
            Statement::SetMark { value: mark.value, mask: mark.mask },
            Statement::Verdict(Verdict::Accept),
        ]));
        if self.tproxies.is_empty() {
            return chain;
        }
        // What was marked at output is decided.
        chain.rules.extend(self.local_datagrams().flat_map(|(mark, tproxy)| tproxy.take_local(mark)));
        chain.rules.push(jump(except::CHAIN));
        for (index, path) in self.kernel_paths.iter().enumerate() {
            chain.rules.extend(path.pass_rules(&path_name(index), Origin::Forwarded, sets));
        }
        // The second segment of a handshake answered with a SYN cookie has no socket yet, but its connection is marked.
        let taken =
            [Statement::is(Field::L4Proto, TCP), Statement::mark(Field::CtMark, mark.value, mark.mask)];
        let goto = Statement::Verdict(Verdict::Goto(TAKE.into()));
        chain.rules.push(Rule::new(taken.into_iter().chain([goto.clone()])));
        chain.rules.push(Rule::new([Statement::opens_connection(), goto.clone()]));
        let forwarded = |one: &TProxy| one.protocol == Protocol::Udp && !one.selectors.is_empty();
        if self.tproxies.iter().any(forwarded) {
            // UDP has no connections, so every datagram is looked at.
            chain.rules.push(Rule::new([Statement::is(Field::L4Proto, UDP), goto]));
        }
        chain
    }

    /// The rule that lets packets of connections on the kernel path pass.
    fn on_kernel_path(&self) -> Option<Rule> {
        let kernel = self.kernel_mark.filter(|_| !self.kernel_paths.is_empty())?;
        let theirs = Statement::mark(Field::CtMark, kernel.value, kernel.mask);
        Some(Rule::new([theirs, Statement::Verdict(Verdict::Accept)]))
    }

    fn take_chain(&self, sets: &mut Vec<Set>) -> Chain {
        let mark = self.tproxy_mark.unwrap_or(MarkBits { value: 0, mask: 0 });
        let mut chain = Chain::regular(TAKE);
        for (index, tproxy) in self.tproxies.iter().enumerate() {
            chain.rules.extend(tproxy.rules(index, mark, sets));
        }
        chain
    }

    /// The listeners that get datagrams of this host, each with the mark that leads to it.
    fn local_datagrams(&self) -> impl Iterator<Item = (MarkBits, &TProxy)> {
        let all = self.tproxies.iter().filter(|one| one.protocol == Protocol::Udp && !one.local.is_empty());
        (0..).zip(all).filter_map(|(place, one)| Some((local_mark(self.tproxy_mark?, place)?, one)))
    }

    /// At output: marks datagrams of this host, so that the kernel routes them by the rule of the mark. They come back on `lo`,
    /// where chain `divert` gives them to the listener.
    fn datagram_chain(&self, sets: &mut Vec<Set>) -> Option<Chain> {
        let mut rules = Vec::new();
        for (place, (mark, tproxy)) in self.local_datagrams().enumerate() {
            let connection = self.tproxy_mark.unwrap_or(mark);
            rules.extend(tproxy.mark_local(place, (mark, connection), sets));
        }
        // A server of this host answers its clients: these datagrams begin nothing.
        let is_answer = Statement::is(Field::CtDirection, Value::CtIsAnswer(true));
        let answers =
            Rule::new([Statement::is(Field::L4Proto, UDP), is_answer, Statement::Verdict(Verdict::Accept)]);
        if rules.is_empty() {
            return None;
        }
        let mut chain = Chain::base("datagrams", ChainKind::Route, Hook::Output, priority::MANGLE);
        chain.rules.extend(self.on_kernel_path());
        chain.rules.extend([jump(except::CHAIN), answers]);
        let paths = self.kernel_paths.iter().enumerate().filter(|(_, path)| path.protocol == Protocol::Udp);
        for (index, path) in paths {
            chain.rules.extend(path.pass_rules(&path_name(index), Origin::Local, sets));
        }
        chain.rules.extend(rules);
        Some(chain)
    }

    fn masquerade_chain(&self) -> Option<Chain> {
        let rules: Vec<_> = self.kernel_paths.iter().filter_map(KernelPath::masquerade_rule).collect();
        let chain = Chain::base("postrouting", ChainKind::Nat, Hook::Postrouting, priority::SRCNAT);
        (!rules.is_empty()).then_some(Chain { rules, ..chain })
    }
}

/// The chain that gives new connections to transparent listeners (`tproxy` is a word of nft's own).
const TAKE: &str = "take";

pub(super) fn path_name(index: usize) -> String {
    format!("path{}", index + 1)
}

/// The bits that tell which listener gets a datagram of this host.
const LISTENER_BITS: u32 = 0x00ff_ffff;

/// The mark of datagrams of this host for the listener at this place. It replaces the whole mark, as these datagrams do not leave
/// the host. `None`: there are too many.
const fn local_mark(tproxy: MarkBits, place: u32) -> Option<MarkBits> {
    let free = LISTENER_BITS & !tproxy.mask;
    // The place begins with 1: datagrams of other hosts have the bits 0, or those of other programs.
    let number = place + 1;
    if number > free { None } else { Some(MarkBits { value: tproxy.value | number, mask: u32::MAX }) }
}

fn jump(chain: &str) -> Rule {
    Rule::new([Statement::Verdict(Verdict::Jump(chain.into()))])
}

impl Redirect {
    fn rules(&self, index: usize, origin: Origin, sets: &mut Vec<Set>) -> Vec<Rule> {
        let (selectors, word) = match origin {
            Origin::Local => (&self.local, "local"),
            Origin::Forwarded => (&self.forwarded, "forwarded"),
        };
        let mut rules = Vec::new();
        for (place, selector) in (1..).zip(selectors) {
            let name = format!("redirect{}_{word}{place}", index + 1);
            for matches in selector.matches(&name, origin, Versions { v4: self.v4, v6: self.v6 }, sets) {
                let steps = [Statement::opens_connection()].into_iter().chain(matches);
                rules.push(Rule::new(steps.chain([Statement::Redirect { port: self.port }])));
            }
        }
        rules
    }
}

impl TProxy {
    fn rules(&self, index: usize, mark: MarkBits, sets: &mut Vec<Set>) -> Vec<Rule> {
        let mut rules = Vec::new();
        for (place, selector) in (1..).zip(&self.selectors) {
            let name = format!("tproxy{}_{place}", index + 1);
            for v6 in (Versions { v4: self.v4, v6: self.v6 }).single() {
                let versions = Versions { v4: !v6, v6 };
                let way = (Origin::Forwarded, versions);
                for matches in selector.matches_of(self.protocol, &name, way, sets) {
                    rules.extend(self.take(matches, mark, v6));
                }
            }
        }
        rules
    }

    /// The rules that mark datagrams of this host for the listener.
    fn mark_local(
        &self,
        index: usize,
        (mark, connection): (MarkBits, MarkBits),
        sets: &mut Vec<Set>,
    ) -> Vec<Rule> {
        let mut rules = Vec::new();
        let known = Statement::mark(Field::CtMark, connection.value, connection.mask);
        for (place, selector) in (1..).zip(&self.local) {
            let name = format!("datagrams{}_local{place}", index + 1);
            let way = (Origin::Local, Versions { v4: self.v4, v6: self.v6 });
            for matches in selector.matches_of(self.protocol, &name, way, sets) {
                let steps = [Statement::is(Field::L4Proto, UDP)].into_iter().chain(matches);
                let steps = steps.chain(self.only_known.then(|| known.clone()));
                // The first listener that matches gets it.
                let marked = [
                    Statement::SetCtMark { value: connection.value, mask: connection.mask },
                    Statement::SetMark { value: mark.value, mask: mark.mask },
                    Statement::Verdict(Verdict::Accept),
                ];
                rules.push(Rule::new(steps.chain(marked)));
            }
        }
        rules
    }

    /// The rules that give datagrams with this mark to the listener. Without one they are dropped: they are not for this host.
    fn take_local(&self, mark: MarkBits) -> Vec<Rule> {
        let mut rules = Vec::new();
        for v6 in (Versions { v4: self.v4, v6: self.v6 }).single() {
            let version = if v6 { NFPROTO_IPV6 } else { NFPROTO_IPV4 };
            let marked = [
                Statement::is(Field::NfProto, Value::NfProto(version)),
                Statement::is(Field::L4Proto, UDP),
                Statement::is(Field::InputInterface, Value::Interface(InterfaceName::LOOPBACK)),
                Statement::mark(Field::Mark, mark.value, mark.mask),
            ];
            let ends = [
                vec![Statement::TProxy { v6, port: self.port }, Statement::Verdict(Verdict::Accept)],
                vec![Statement::Verdict(Verdict::Drop)],
            ];
            rules.extend(ends.map(|end| Rule::new(marked.iter().cloned().chain(end))));
        }
        rules
    }

    /// Without a listener the tproxy statement ends the rule, so that what stands behind it does not happen.
    fn take(&self, matches: Vec<Statement>, mark: MarkBits, v6: bool) -> Vec<Rule> {
        let is_udp = self.protocol == Protocol::Udp;
        let protocol = if is_udp { UDP } else { TCP };
        let known = Statement::mark(Field::CtMark, mark.value, mark.mask);
        let matches = [Statement::is(Field::L4Proto, protocol)].into_iter().chain(matches);
        let matches: Vec<_> = matches.chain((is_udp && self.only_known).then_some(known)).collect();
        let take = [
            Statement::TProxy { v6, port: self.port },
            Statement::SetMark { value: mark.value, mask: mark.mask },
        ];
        let known = Statement::SetCtMark { value: mark.value, mask: mark.mask };
        let steps = take.into_iter().chain([known, Statement::Verdict(Verdict::Accept)]);
        let taken = Rule::new(matches.iter().cloned().chain(steps));
        let dropped = Rule::new(matches.into_iter().chain([Statement::Verdict(Verdict::Drop)]));
        if self.drop_without_listener { vec![taken, dropped] } else { vec![taken] }
    }
}
