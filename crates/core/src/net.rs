//! Sets of addresses and of ports, for rules and packet filters.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A network in CIDR notation (RFC 4632, RFC 4291 Sec. 2.3). A single address is a /32 or a /128.
///
/// Never contains an IPv4-mapped IPv6 network: it is read as the IPv4 network that it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IpNet {
    address: IpAddr,
    prefix_len: u8,
}

/// Why a text is not a valid network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IpNetError {
    /// The part before `/` is not an address.
    #[error("'{0}' is not a network: write 192.0.2.0/24, 2001:db8::/32 or a single address")]
    BadAddress(String),
    /// The part after `/` is not a prefix length of the family.
    #[error("'/{0}' is not a prefix length: use 0 to {1}")]
    BadPrefix(String, u8),
    /// Bits behind the prefix are set, so the text is ambiguous.
    #[error("{0} has bits set beyond its prefix: write {1} for the network, or {2} for the one address")]
    HostBits(String, Box<IpNet>, IpAddr),
}

impl IpNet {
    /// Returns the network with `prefix_len` bits that contains `address`. A prefix that is too long for the family
    /// is shortened.
    pub fn new(address: IpAddr, prefix_len: u8) -> Self {
        let (address, prefix_len) = match (address, address.to_canonical()) {
            (IpAddr::V6(_), IpAddr::V4(v4)) if prefix_len >= 96 => (IpAddr::V4(v4), prefix_len - 96),
            _ => (address, prefix_len),
        };
        match address {
            IpAddr::V4(v4) => {
                let prefix_len = prefix_len.min(32);
                let mask = u32::MAX.checked_shl(32 - u32::from(prefix_len)).unwrap_or(0);
                Self { address: Ipv4Addr::from(u32::from(v4) & mask).into(), prefix_len }
            }
            IpAddr::V6(v6) => {
                let prefix_len = prefix_len.min(128);
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix_len)).unwrap_or(0);
                Self { address: Ipv6Addr::from(u128::from(v6) & mask).into(), prefix_len }
            }
        }
    }

    /// Returns the first address.
    pub const fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the number of leading bits that are fixed.
    pub const fn prefix_len(&self) -> u8 {
        self.prefix_len
    }

    /// Returns the address of a network that has only one.
    pub const fn single(&self) -> Option<IpAddr> {
        let bits = if self.address.is_ipv4() { 32 } else { 128 };
        if self.prefix_len == bits { Some(self.address) } else { None }
    }

    /// Whether the network contains `ip`. An IPv4-mapped IPv6 address counts as the IPv4 address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        let value = match ip {
            IpAddr::V4(v4) => u128::from(u32::from(v4)),
            IpAddr::V6(v6) => v6.into(),
        };
        let range = self.range();
        ip.is_ipv6() == self.is_v6() && range.first <= value && value <= range.last
    }

    /// Whether it is an IPv6 network.
    pub const fn is_v6(&self) -> bool {
        self.address.is_ipv6()
    }

    fn range(&self) -> Range {
        match self.address {
            IpAddr::V4(v4) => {
                let first = u128::from(u32::from(v4));
                let host = u32::MAX.checked_shr(u32::from(self.prefix_len)).unwrap_or(0);
                Range { first, last: first | u128::from(host) }
            }
            IpAddr::V6(v6) => {
                let first = u128::from(v6);
                Range { first, last: first | u128::MAX.checked_shr(u32::from(self.prefix_len)).unwrap_or(0) }
            }
        }
    }
}

impl From<IpAddr> for IpNet {
    fn from(ip: IpAddr) -> Self {
        Self::new(ip, if ip.is_ipv4() { 32 } else { 128 })
    }
}

impl FromStr for IpNet {
    type Err = IpNetError;

    fn from_str(text: &str) -> Result<Self, IpNetError> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(a, p)| (a, Some(p)));
        let ip: IpAddr = address.parse().map_err(|_| IpNetError::BadAddress(text.to_owned()))?;
        let Some(prefix) = prefix else { return Ok(ip.into()) };
        let most = if ip.is_ipv4() { 32 } else { 128 };
        let bits = prefix
            .parse::<u8>()
            .ok()
            .filter(|bits| *bits <= most && !prefix.starts_with('+'))
            .ok_or_else(|| IpNetError::BadPrefix(prefix.to_owned(), most))?;
        let net = Self::new(ip, bits);
        if net.address != ip.to_canonical() && net.address != ip {
            return Err(IpNetError::HostBits(text.to_owned(), Box::new(net), ip));
        }
        Ok(net)
    }
}

impl fmt::Display for IpNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = if self.is_v6() { 128 } else { 32 };
        if self.prefix_len == most {
            self.address.fmt(f)
        } else {
            write!(f, "{}/{}", self.address, self.prefix_len)
        }
    }
}

/// Returns the IPv4 address that translators and relays derive from an IPv6 address: NAT64 (RFC 6052 Sec. 2.1, RFC
/// 8215), 6to4 (RFC 3056), IPv4-compatible (RFC 4291 Sec. 2.5.5.1).
///
/// A rule about IPv4 networks must check it, too: `64:ff9b::7f00:1` may lead to 127.0.0.1.
pub fn embedded_v4(ip: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(ip) = ip else { return None };
    let [a, b, c, d, e, f, g, h] = ip.segments();
    let of = |high: u16, low: u16| Some(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)));
    match (a, b, c, d, e, f) {
        (0x64, 0xff9b, 0, 0, 0, 0) | (0x64, 0xff9b, 1, ..) => of(g, h),
        (0x2002, ..) => of(b, c),
        // `::` and `::1` are IPv6 addresses themselves.
        (0, 0, 0, 0, 0, 0) if g != 0 => of(g, h),
        _ => None,
    }
}

/// Numbers from `first` to `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Range {
    first: u128,
    last: u128,
}

/// Sorts ranges, and joins those that overlap or touch, so that a lookup is one binary search.
fn joined(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut out: Vec<Range> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.first <= last.last.saturating_add(1) => last.last = last.last.max(range.last),
            _ => out.push(range),
        }
    }
    out
}

fn holds(ranges: &[Range], value: u128) -> bool {
    let after = ranges.partition_point(|range| range.first <= value);
    after.checked_sub(1).and_then(|index| ranges.get(index)).is_some_and(|range| value <= range.last)
}

fn covers(outer: &[Range], inner: &[Range]) -> bool {
    inner.iter().all(|small| outer.iter().any(|big| big.first <= small.first && small.last <= big.last))
}

fn overlap(a: &[Range], b: &[Range]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.first <= y.last && y.first <= x.last))
}

/// Returns the numbers that are in both. `a` and `b` are joined.
fn intersection(a: &[Range], b: &[Range]) -> Vec<Range> {
    let both = |x: &Range| {
        let x = *x;
        b.iter().filter_map(move |y| {
            let (first, last) = (x.first.max(y.first), x.last.min(y.last));
            (first <= last).then_some(Range { first, last })
        })
    };
    a.iter().flat_map(both).collect()
}

/// Returns the numbers that are in `a` but not in `b`. Both are joined.
fn difference(a: &[Range], b: &[Range]) -> Vec<Range> {
    let mut left = a.to_vec();
    for hole in b {
        let cut = |range: Range| {
            let before = (range.first < hole.first)
                .then(|| Range { first: range.first, last: range.last.min(hole.first.saturating_sub(1)) });
            let after = (range.last > hole.last)
                .then(|| Range { first: range.first.max(hole.last.saturating_add(1)), last: range.last });
            before.into_iter().chain(after)
        };
        left = left.into_iter().flat_map(cut).collect();
    }
    left
}

/// Returns the fewest networks that together form these ranges.
fn nets_of(ranges: &[Range], v6: bool) -> Vec<IpNet> {
    let bits = if v6 { 128 } else { 32 };
    let mut nets = Vec::new();
    for range in ranges {
        let mut first = range.first;
        loop {
            // The largest block that begins here and ends within the range.
            let aligned = first.trailing_zeros().min(bits);
            let fits = (0..=aligned).rev().find(|size| last_of(first, *size) <= range.last).unwrap_or(0);
            let address = if v6 {
                Ipv6Addr::from(first).into()
            } else {
                Ipv4Addr::from(u32::try_from(first).unwrap_or(u32::MAX)).into()
            };
            nets.push(IpNet { address, prefix_len: u8::try_from(bits - fits).unwrap_or(u8::MAX) });
            let last = last_of(first, fits);
            if last >= range.last {
                break;
            }
            first = last + 1;
        }
    }
    nets
}

/// Returns the last number of the block of 2^`size` numbers that begins at `first`.
fn last_of(first: u128, size: u32) -> u128 {
    first | 1_u128.checked_shl(size).map_or(u128::MAX, |length| length - 1)
}

/// A set of networks of both families. A lookup costs one binary search, and allocates no memory.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct IpSet {
    nets: Vec<IpNet>,
    v4: Vec<Range>,
    v6: Vec<Range>,
}

impl IpSet {
    /// Returns the networks that it was made of, sorted, without duplicates.
    pub fn nets(&self) -> &[IpNet] {
        &self.nets
    }

    /// Whether it contains no address.
    pub fn is_empty(&self) -> bool {
        self.nets.is_empty()
    }

    /// Whether it contains `ip`. An IPv4-mapped IPv6 address counts as the IPv4 address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        match ip.to_canonical() {
            IpAddr::V4(v4) => holds(&self.v4, u32::from(v4).into()),
            IpAddr::V6(v6) => holds(&self.v6, v6.into()),
        }
    }

    /// Returns the set of all addresses of both families.
    pub fn all() -> Self {
        let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        any.into_iter().map(|address| IpNet::new(address, 0)).collect()
    }

    fn of_ranges(v4: Vec<Range>, v6: Vec<Range>) -> Self {
        let nets = nets_of(&v4, false).into_iter().chain(nets_of(&v6, true)).collect();
        Self { nets, v4, v6 }
    }

    /// Returns the addresses that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self::of_ranges(intersection(&self.v4, &other.v4), intersection(&self.v6, &other.v6))
    }

    /// Returns the addresses that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        Self::of_ranges(difference(&self.v4, &other.v4), difference(&self.v6, &other.v6))
    }

    /// Whether it contains every address of `other`.
    pub fn covers(&self, other: &Self) -> bool {
        covers(&self.v4, &other.v4) && covers(&self.v6, &other.v6)
    }

    /// Whether it contains every address of a network.
    pub fn covers_net(&self, net: IpNet) -> bool {
        covers(if net.is_v6() { &self.v6 } else { &self.v4 }, &[net.range()])
    }

    /// Whether both sets have a common address.
    pub fn overlaps(&self, other: &Self) -> bool {
        overlap(&self.v4, &other.v4) || overlap(&self.v6, &other.v6)
    }
}

impl FromIterator<IpNet> for IpSet {
    fn from_iter<I: IntoIterator<Item = IpNet>>(nets: I) -> Self {
        let mut nets: Vec<_> = nets.into_iter().collect();
        nets.sort_unstable();
        nets.dedup();
        let of = |v6: bool| joined(nets.iter().filter(|net| net.is_v6() == v6).map(IpNet::range).collect());
        Self { v4: of(false), v6: of(true), nets }
    }
}

impl fmt::Debug for IpSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IpSet({self})")
    }
}

impl fmt::Display for IpSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_list(f, &self.nets)
    }
}

/// A set of TCP ports.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PortSet {
    ranges: Vec<Range>,
}

impl PortSet {
    /// Returns the ports as ascending ranges that neither overlap nor touch, with both ends included.
    pub fn ranges(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        let port = |value: u128| u16::try_from(value).unwrap_or(u16::MAX);
        self.ranges.iter().map(move |range| (port(range.first), port(range.last)))
    }

    /// Whether it contains no port.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether it contains `port`.
    pub fn contains(&self, port: u16) -> bool {
        holds(&self.ranges, port.into())
    }

    /// Returns the set of all ports except 0.
    pub fn all() -> Self {
        [(1, u16::MAX)].into_iter().collect()
    }

    /// Returns the ports that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self { ranges: intersection(&self.ranges, &other.ranges) }
    }

    /// Returns the ports that are not in `other`.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        Self { ranges: difference(&self.ranges, &other.ranges) }
    }

    /// Whether it contains every port of `other`.
    pub fn covers(&self, other: &Self) -> bool {
        covers(&self.ranges, &other.ranges)
    }

    /// Whether both sets have a common port.
    pub fn overlaps(&self, other: &Self) -> bool {
        overlap(&self.ranges, &other.ranges)
    }
}

impl FromIterator<(u16, u16)> for PortSet {
    /// Makes a set of ranges with both ends included. The ends of a range may be swapped.
    fn from_iter<I: IntoIterator<Item = (u16, u16)>>(ranges: I) -> Self {
        let range = |(a, b): (u16, u16)| Range { first: a.min(b).into(), last: a.max(b).into() };
        Self { ranges: joined(ranges.into_iter().map(range).collect()) }
    }
}

impl fmt::Debug for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PortSet({self})")
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |(a, b): (u16, u16)| if a == b { a.to_string() } else { format!("{a}-{b}") };
        write_list(f, &self.ranges().map(text).collect::<Vec<_>>())
    }
}

fn write_list(f: &mut fmt::Formatter<'_>, items: &[impl fmt::Display]) -> fmt::Result {
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            f.write_str(", ")?;
        }
        item.fmt(f)?;
    }
    Ok(())
}
