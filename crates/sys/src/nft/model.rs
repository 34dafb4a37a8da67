//! Tables, chains, rules and sets as values: what [`super::compile`] turns into netlink and [`super::render`] into nft syntax.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use super::{Field, Value};
use crate::nft::field::DataKind;

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
    /// Sets and maps.
    pub sets: Vec<Set>,
    /// Chains.
    pub chains: Vec<Chain>,
}

impl Table {
    /// An empty table.
    pub fn new(family: Family, name: impl Into<String>) -> Self {
        Self { family, name: name.into(), sets: Vec::new(), chains: Vec::new() }
    }

    /// The table with this set.
    #[must_use]
    pub fn with_set(mut self, set: Set) -> Self {
        self.sets.push(set);
        self
    }

    /// The table with this chain.
    #[must_use]
    pub fn with_chain(mut self, chain: Chain) -> Self {
        self.chains.push(chain);
        self
    }
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
    AnyOf(u32),
    /// The bits under the mask are equal to the value.
    Masked {
        /// The bits looked at.
        mask: u32,
        /// What they must be.
        value: u32,
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

/// A set, or a map if it has data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// The name, 1 to 255 bytes.
    pub name: String,
    /// The key: one kind, or several for a concatenation.
    pub key: Vec<DataKind>,
    /// Whether elements are ranges.
    pub interval: bool,
    /// What a map gives for a key; `None` makes it a set.
    pub data: Option<MapData>,
    /// The elements.
    pub elements: Vec<Element>,
}

impl Set {
    /// A set of single values.
    pub fn of(name: impl Into<String>, kind: DataKind, values: impl IntoIterator<Item = Value>) -> Self {
        let elements = values.into_iter().map(|value| Element::set(vec![Span::one(value)])).collect();
        Self { name: name.into(), key: vec![kind], interval: false, data: None, elements }
    }

    /// A set of ranges; overlapping and neighbouring ones are joined.
    pub fn of_spans(name: impl Into<String>, kind: DataKind, spans: impl IntoIterator<Item = Span>) -> Self {
        let elements =
            joined(spans.into_iter().collect()).into_iter().map(|s| Element::set(vec![s])).collect();
        Self { name: name.into(), key: vec![kind], interval: true, data: None, elements }
    }
}

/// Sorts spans and joins those that overlap or touch.
fn joined(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut result: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match result.last_mut() {
            Some(last) if last.last.successor().is_none_or(|next| next >= span.first) => {
                last.last = last.last.max(span.last);
            }
            _ => result.push(span),
        }
    }
    result
}

/// Kind of data of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapData {
    /// Verdicts.
    Verdict,
    /// Values, concatenated if several.
    Values(Vec<DataKind>),
}

/// An element of a set or map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// One span for each part of the key.
    pub key: Vec<Span>,
    /// The data, for maps.
    pub data: Option<ElementData>,
}

impl Element {
    /// An element of a set.
    pub fn set(key: Vec<Span>) -> Self {
        Self { key, data: None }
    }
}

/// What an element of a map maps to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementData {
    /// A verdict.
    Verdict(Verdict),
    /// Values.
    Values(Vec<Value>),
}

/// An inclusive range of values of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// The lowest.
    pub first: Value,
    /// The highest; not below `first`.
    pub last: Value,
}

impl Span {
    /// A single value.
    pub const fn one(value: Value) -> Self {
        Self { first: value, last: value }
    }

    /// Ports from `first` to `last`, both included.
    pub const fn ports(first: u16, last: u16) -> Self {
        Self { first: Value::Port(first), last: Value::Port(last) }
    }
}

impl From<Prefix> for Span {
    fn from(prefix: Prefix) -> Self {
        Self { first: prefix.first().into(), last: prefix.last().into() }
    }
}

/// An address prefix (CIDR block): the address has no bits behind the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    address: IpAddr,
    length: u8,
}

/// A prefix length that does not fit the address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("/{length} does not fit {address}: an IPv4 prefix has at most 32 bits, an IPv6 one at most 128")]
pub struct PrefixError {
    address: IpAddr,
    length: u8,
}

impl Prefix {
    /// The block of `length` leading bits around `address`.
    ///
    /// # Errors
    /// If the length is above 32 (IPv4) or 128 (IPv6).
    pub fn new(address: IpAddr, length: u8) -> Result<Self, PrefixError> {
        if length > width(address) {
            return Err(PrefixError { address, length });
        }
        let bits = to_bits(address) & !host_bits(address, length);
        Ok(Self { address: from_bits(bits, address), length })
    }

    /// The lowest address.
    pub const fn first(self) -> IpAddr {
        self.address
    }

    /// The highest address.
    pub fn last(self) -> IpAddr {
        from_bits(to_bits(self.address) | host_bits(self.address, self.length), self.address)
    }

    /// Leading bits that are fixed.
    pub const fn length(self) -> u8 {
        self.length
    }

    /// Whether it is an IPv6 prefix.
    pub const fn is_v6(self) -> bool {
        self.address.is_ipv6()
    }
}

impl From<IpAddr> for Prefix {
    fn from(address: IpAddr) -> Self {
        Self { address, length: width(address) }
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address prefix: write it like 192.0.2.0/24 or 2001:db8::/32");
        let (address, length) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let length = length.map_or(Ok(width(address)), |l| l.parse().map_err(|_| wrong()))?;
        Self::new(address, length).map_err(|e| e.to_string())
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

const fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn host_bits(address: IpAddr, length: u8) -> u128 {
    let free = u32::from(width(address).saturating_sub(length));
    1u128.checked_shl(free).map_or(u128::MAX, |bit| bit - 1)
}

fn to_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u32::from(v4).into(),
        IpAddr::V6(v6) => v6.into(),
    }
}

/// The address of these bits, in the family of `like`.
fn from_bits(bits: u128, like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::from(u32::try_from(bits).unwrap_or(u32::MAX)).into(),
        IpAddr::V6(_) => Ipv6Addr::from(bits).into(),
    }
}

/// An interface name: 1 to 15 bytes, no NUL, slash or white space (the kernel's `dev_valid_name`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceName([u8; 16]);

impl InterfaceName {
    /// The name with NULs up to 16 bytes.
    pub const fn padded(self) -> [u8; 16] {
        self.0
    }
}

impl FromStr for InterfaceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            |c: char| c == '/' || c == '\0' || c == ':' || c.is_whitespace() || c.is_control() || c == '"';
        if text.is_empty() || text.len() > 15 || text.contains(bad) || text == "." || text == ".." {
            return Err(format!(
                "{text:?} is no interface name: 1 to 15 bytes without slash, colon or space"
            ));
        }
        let mut padded = [0; 16];
        padded.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        Ok(Self(padded))
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        f.write_str(&String::from_utf8_lossy(self.0.get(..end).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_have_a_first_and_a_last_address() {
        let range = |text: &str| {
            let prefix: Prefix = text.parse().expect(text);
            (prefix.first().to_string(), prefix.last().to_string())
        };
        assert_eq!(range("10.1.2.3/8"), ("10.0.0.0".into(), "10.255.255.255".into()));
        assert_eq!(range("0.0.0.0/0"), ("0.0.0.0".into(), "255.255.255.255".into()));
        assert_eq!(range("2001:db8::1"), ("2001:db8::1".into(), "2001:db8::1".into()));
        assert_eq!(range("::/0").1, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
        for bad in ["10.0.0.0/33", "::/129", "10.0.0.0/-1", "x", "10.0.0.0/", "/8"] {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
    }

    #[test]
    fn spans_that_overlap_or_touch_are_joined() {
        let set = Set::of_spans(
            "s",
            DataKind::Port,
            [
                Span::ports(90, 100),
                Span::ports(80, 85),
                Span::ports(86, 89),
                Span::ports(65535, 65535),
                Span::ports(7, 7),
            ],
        );
        let keys: Vec<_> = set.elements.iter().map(|e| e.key[0]).collect();
        assert_eq!(keys, [Span::ports(7, 7), Span::ports(80, 100), Span::ports(65535, 65535)]);
    }

    #[test]
    fn interface_names_are_checked() {
        assert_eq!("veth-a".parse::<InterfaceName>().map(|n| n.to_string()), Ok("veth-a".into()));
        for bad in ["", "sixteen-bytes-xx", "a b", "a/b", "..", "a\"b"] {
            assert!(bad.parse::<InterfaceName>().is_err(), "{bad}");
        }
    }
}
