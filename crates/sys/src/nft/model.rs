//! Tables, chains, rules and sets as values: what [`super::compile`] turns into netlink and [`super::render`] into nft syntax.

use std::fmt;

use super::{Field, InterfaceName, Set, TimeoutPolicy, Value};

/// The family of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4 and IPv6 (nat chains in it need Linux 5.2).
    Inet,
    /// IPv4.
    Ip,
    /// IPv6.
    Ip6,
}

impl Family {
    /// `nfgen_family`.
    pub const fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Ip => super::NFPROTO_IPV4,
            Self::Ip6 => super::NFPROTO_IPV6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
        })
    }
}

/// One table with everything in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The family.
    pub family: Family,
    /// The name, 1 to 255 bytes.
    pub name: String,
    /// Conntrack time-outs.
    pub timeouts: Vec<TimeoutPolicy>,
    /// Sets and maps.
    pub sets: Vec<Set>,
    /// Flow tables.
    pub flowtables: Vec<Flowtable>,
    /// Chains.
    pub chains: Vec<Chain>,
}

impl Table {
    /// An empty table.
    pub fn new(family: Family, name: impl Into<String>) -> Self {
        let (timeouts, sets, flowtables, chains) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { family, name: name.into(), timeouts, sets, flowtables, chains }
    }

    /// Whether one of its rules makes the kernel track connections.
    pub(super) fn tracks(&self) -> bool {
        let rules = self.chains.iter().flat_map(|chain| &chain.rules);
        rules.flat_map(|rule| &rule.statements).any(|statement| match statement {
            Statement::SetCtMark { .. }
            | Statement::SetCtEvents(_)
            | Statement::SetCtTimeout(_)
            | Statement::Redirect { .. }
            | Statement::DnatMap { .. }
            | Statement::Masquerade
            | Statement::FlowAdd(_) => true,
            Statement::Match(fields, _) => {
                fields.iter().any(|field| matches!(field, Field::CtState | Field::CtMark))
            }
            _ => false,
        })
    }

    /// The table with these conntrack time-outs.
    #[must_use]
    pub fn with_timeouts(mut self, policy: TimeoutPolicy) -> Self {
        self.timeouts.push(policy);
        self
    }

    /// The table with this set.
    #[must_use]
    pub fn with_set(mut self, set: Set) -> Self {
        self.sets.push(set);
        self
    }

    /// The table with this flow table.
    #[must_use]
    pub fn with_flowtable(mut self, flowtable: Flowtable) -> Self {
        self.flowtables.push(flowtable);
        self
    }

    /// The table with every set and map under a longer name.
    #[must_use]
    pub(super) fn with_set_suffix(mut self, suffix: &str) -> Self {
        self.sets.iter_mut().for_each(|set| set.name.push_str(suffix));
        let rules = self.chains.iter_mut().flat_map(|chain| &mut chain.rules);
        for statement in rules.flat_map(|rule| &mut rule.statements) {
            match statement {
                Statement::Match(_, Test::In(set) | Test::NotIn(set))
                | Statement::DnatMap { map: set, .. }
                | Statement::VerdictMap(_, set) => set.push_str(suffix),
                _ => {}
            }
        }
        self
    }

    /// The table with this chain.
    #[must_use]
    pub fn with_chain(mut self, chain: Chain) -> Self {
        self.chains.push(chain);
        self
    }
}

/// A flow table: connections that a rule adds ([`Statement::FlowAdd`]) are forwarded between its devices at ingress, before
/// prerouting, for as long as packets come. A FIN, a RST or half a minute of silence ends that, and so does the end of the
/// table; nothing takes a single connection out. Linux 4.16; counted by conntrack since 5.7.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flowtable {
    /// The name, 1 to 255 bytes.
    pub name: String,
    /// The place among other users of the ingress hook: lower runs earlier.
    pub priority: i32,
    /// The devices, each of which may be in one flow table only.
    pub devices: Vec<InterfaceName>,
    /// What passes is added to the counters of conntrack.
    pub counter: bool,
}

/// A chain: a base chain if it has a hook, else one to jump to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The name, 1 to 255 bytes.
    pub name: String,
    /// Where the kernel enters it by itself.
    pub base: Option<Base>,
    /// The rules, in order.
    pub rules: Vec<Rule>,
}

impl Chain {
    /// A chain that rules jump to.
    pub fn regular(name: impl Into<String>) -> Self {
        Self { name: name.into(), base: None, rules: Vec::new() }
    }

    /// A base chain with policy accept.
    pub fn base(name: impl Into<String>, kind: ChainKind, hook: Hook, priority: i32) -> Self {
        let base = Base { kind, hook, priority, policy: Policy::Accept };
        Self { name: name.into(), base: Some(base), rules: Vec::new() }
    }

    /// The chain with this rule at its end.
    #[must_use]
    pub fn with(mut self, rule: Rule) -> Self {
        self.rules.push(rule);
        self
    }
}

/// Where and how the kernel enters a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// The chain's type.
    pub kind: ChainKind,
    /// The hook.
    pub hook: Hook,
    /// The place among other chains of the hook: lower runs earlier. See [`super::priority`].
    pub priority: i32,
    /// What happens to packets that reach the end.
    pub policy: Policy,
}

/// Type of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Sees every packet.
    Filter,
    /// Sees every packet; a changed mark makes the output hook look up the route again.
    Route,
    /// Sees the first packet of each connection.
    Nat,
}

/// Netfilter hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// Everything that comes in, before routing.
    Prerouting,
    /// For this host.
    Input,
    /// Passing through.
    Forward,
    /// From this host.
    Output,
    /// Everything that leaves, after routing.
    Postrouting,
}

/// Policy of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Let it pass.
    Accept,
    /// Drop it.
    Drop,
}

/// A rule: statements, tried in order; the first match that fails ends the rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The statements.
    pub statements: Vec<Statement>,
}

impl Rule {
    /// A rule of these statements.
    pub fn new(statements: impl IntoIterator<Item = Statement>) -> Self {
        Self { statements: statements.into_iter().collect() }
    }
}

/// One statement of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// Goes on only if the fields (a concatenation if several) pass the test.
    Match(Vec<Field>, Test),
    /// Counts packets and bytes.
    Counter,
    /// Sets the bits `mask` of the packet mark to those of `value`.
    SetMark {
        /// New bits; none outside `mask`.
        value: u32,
        /// The bits to replace.
        mask: u32,
    },
    /// The same for the connection's mark.
    SetCtMark {
        /// New bits; none outside `mask`.
        value: u32,
        /// The bits to replace.
        mask: u32,
    },
    /// Chooses which conntrack events this connection sends: bits of [`super::ct_event`].
    SetCtEvents(u32),
    /// Gives this connection the conntrack time-outs of the [`TimeoutPolicy`] of this name; only for the packet that opens
    /// it.
    SetCtTimeout(String),
    /// Sends the connection to a port of this host (`redirect`); nat chains at prerouting and output.
    Redirect {
        /// The local port.
        port: u16,
    },
    /// Sends the connection elsewhere: the new address, and port, is what the map says for these fields.
    /// A connection that is not in the map goes on with the next rule.
    DnatMap {
        /// The key.
        fields: Vec<Field>,
        /// Name of a map whose data is address . port.
        map: String,
        /// Whether the map holds IPv6 addresses.
        v6: bool,
    },
    /// Gives the packet to a local transparent socket on this port, its addresses untouched.
    TProxy {
        /// Whether for IPv6.
        v6: bool,
        /// The socket's port.
        port: u16,
    },
    /// Rewrites the source to an address of this host; nat chains at postrouting.
    Masquerade,
    /// Answers with a TCP reset.
    RejectWithReset,
    /// Keeps the connection out of conntrack; chains before priority -200.
    NoTrack,
    /// Hands the packet to user space (`queue`, by the target of xtables).
    Queue {
        /// The number of the queue.
        number: u16,
        /// Whether packets pass while no process reads it; otherwise they are dropped.
        bypass: bool,
    },
    /// Has the rest of the connection forwarded by the flow table of this name; forward chains only. Connections that it
    /// cannot forward (not established, with a helper) stay as they are.
    FlowAdd(String),
    /// Does what the verdict map says for these fields.
    VerdictMap(Vec<Field>, String),
    /// Ends the rule so.
    Verdict(Verdict),
}

impl Statement {
    /// `FIELD VALUE`.
    pub fn is(field: Field, value: Value) -> Self {
        Self::Match(vec![field], Test::Is(value))
    }

    /// `FIELD != VALUE`.
    pub fn is_not(field: Field, value: Value) -> Self {
        Self::Match(vec![field], Test::IsNot(value))
    }

    /// `FIELD & MASK == VALUE`, or the plain comparison if the mask has every bit.
    pub fn mark(field: Field, value: u32, mask: u32) -> Self {
        if mask == u32::MAX {
            return Self::is(field, Value::Mark(value));
        }
        Self::Match(vec![field], Test::Masked { mask: Value::Mark(mask), value: Value::Mark(value) })
    }

    /// The segment that opens a connection: SYN without ACK, RST, FIN. A connection that was there before our rules, and
    /// that conntrack picks up in its middle, is not cut by them.
    pub fn opens_connection() -> Self {
        use super::tcp_flag::{ACK, FIN, RST, SYN};
        let mask = Value::TcpFlags(FIN | SYN | RST | ACK);
        Self::Match(vec![Field::TcpFlags], Test::Masked { mask, value: Value::TcpFlags(SYN) })
    }

    /// `FIELD @SET`.
    pub fn is_in(field: Field, set: impl Into<String>) -> Self {
        Self::Match(vec![field], Test::In(set.into()))
    }
}

/// What a match compares its fields with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    /// Equal.
    Is(Value),
    /// Not equal.
    IsNot(Value),
    /// In the set of this name.
    In(String),
    /// Not in the set of this name.
    NotIn(String),
    /// One of these bits is set (`ct state established,related`).
    AnyOf(Value),
    /// The bits under the mask are equal to the value.
    Masked {
        /// The bits looked at.
        mask: Value,
        /// What they must be.
        value: Value,
    },
}

/// How a rule, or an element of a verdict map, ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Let it pass this hook's chains of the same priority level; later base chains still see it.
    Accept,
    /// Drop it.
    Drop,
    /// Go back to the calling chain; in a base chain: to its policy.
    Return,
    /// Go on in a chain and come back.
    Jump(String),
    /// Go on in a chain and do not come back.
    Goto(String),
}
