//! Sets and maps.

use std::net::IpAddr;

use sidetrack_core::net::IpNet;

use super::{DataKind, Value, Verdict};

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

impl From<IpNet> for Span {
    fn from(net: IpNet) -> Self {
        let last = match net.address() {
            IpAddr::V4(first) => {
                let host = u32::MAX.checked_shr(u32::from(net.prefix_len())).unwrap_or(0);
                IpAddr::V4((u32::from(first) | host).into())
            }
            IpAddr::V6(first) => {
                let host = u128::MAX.checked_shr(u32::from(net.prefix_len())).unwrap_or(0);
                IpAddr::V6((u128::from(first) | host).into())
            }
        };
        Self { first: net.address().into(), last: last.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_have_a_first_and_a_last_address() {
        let range = |text: &str| {
            let span = Span::from(text.parse::<IpNet>().expect(text));
            format!("{}-{}", span.first, span.last)
        };
        assert_eq!(range("10.0.0.0/8"), "10.0.0.0-10.255.255.255");
        assert_eq!(range("0.0.0.0/0"), "0.0.0.0-255.255.255.255");
        assert_eq!(range("192.0.2.1"), "192.0.2.1-192.0.2.1");
        assert_eq!(range("2001:db8::1"), "2001:db8::1-2001:db8::1");
        assert_eq!(range("::/0"), "::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff");
    }

    #[test]
    fn spans_that_overlap_or_touch_are_joined() {
        let ports = [(90, 100), (80, 85), (86, 89), (65535, 65535), (7, 7)].map(|(a, b)| Span::ports(a, b));
        let set = Set::of_spans("s", DataKind::Port, ports);
        let keys: Vec<_> = set.elements.iter().map(|e| e.key[0]).collect();
        assert_eq!(keys, [Span::ports(7, 7), Span::ports(80, 100), Span::ports(65535, 65535)]);
    }
}
