//! What a filter looks at, and what a flow must have to match: a store of many flows reads no more than that.

use super::test::Test;
use super::{Filter, Node};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// A property of a flow, as [`FlowFacts`](super::FlowFacts) has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Property {
    /// `id`.
    Id,
    /// `client`: address and port.
    Client,
    /// `dst`: address or name, and port.
    Destination,
    /// `host`.
    Host,
    /// `process`.
    Process,
    /// `user`.
    User,
    /// `rule`.
    Rule,
    /// `chain`.
    Chain,
    /// `carrier`.
    Carrier,
    /// `listener`.
    Listener,
    /// `intercept`.
    Intercept,
    /// `protocol`.
    Protocol,
    /// `reason`.
    Reason,
    /// `bytes_up`.
    BytesUp,
    /// `bytes_down`.
    BytesDown,
    /// `packets_up`.
    PacketsUp,
    /// `packets_down`.
    PacketsDown,
    /// `age`, microseconds.
    Age,
    /// `connect`, microseconds.
    Connect,
    /// `first_byte`, microseconds.
    FirstByte,
}

/// A condition that every flow fulfils which the filter matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Required {
    /// The property is known, and one of these words. An address is one without its port; an IPv4 address also stands here
    /// as the IPv6 address that it is mapped to.
    Words(Property, Vec<String>),
    /// The property is known, and in one of these ranges.
    Ranges(Property, Vec<RangeInclusive<u64>>),
}

impl Filter {
    /// Returns the properties that decide whether the filter matches.
    pub fn looks_at(&self) -> BTreeSet<Property> {
        let mut found = BTreeSet::new();
        self.root.tests(&mut |test| test.looks_at(&mut found));
        found
    }

    /// Returns conditions that every matching flow fulfils. A flow that fulfils all of them need not match.
    pub fn required(&self) -> Vec<Required> {
        let mut found = Vec::new();
        self.root.required(&mut found);
        found
    }
}

impl Node {
    fn tests(&self, each: &mut impl FnMut(&Test)) {
        match self {
            Self::All(nodes) | Self::Any(nodes) => nodes.iter().for_each(|node| node.tests(each)),
            Self::Not(node) => node.tests(each),
            Self::Test(test) => each(test),
        }
    }

    fn required(&self, found: &mut Vec<Required>) {
        match self {
            Self::All(nodes) => nodes.iter().for_each(|node| node.required(found)),
            Self::Test(test) => found.extend(test.required()),
            Self::Any(_) | Self::Not(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn required(text: &str) -> Vec<Required> {
        Filter::parse(text).expect(text).required()
    }

    fn words(property: Property, words: &[&str]) -> Required {
        Required::Words(property, words.iter().map(|word| (*word).to_owned()).collect())
    }

    #[test]
    fn only_what_every_match_fulfils_is_required() {
        assert_eq!(
            required("proc == curl and host in [a.example, B.example]"),
            [words(Property::Process, &["curl"]), words(Property::Host, &["a.example", "b.example"])]
        );
        assert_eq!(
            required("dst == 10.0.0.1 and id == 7"),
            [
                words(Property::Destination, &["10.0.0.1", "::ffff:10.0.0.1"]),
                Required::Ranges(Property::Id, vec![7..=7])
            ]
        );
        assert_eq!(required("src in [2001:db8::1]"), [words(Property::Client, &["2001:db8::1"])]);
        assert_eq!(required("dst == web.example"), [words(Property::Destination, &["web.example"])]);
        assert_eq!(required("up >= 5"), [Required::Ranges(Property::BytesUp, vec![5..=u64::MAX])]);
        for open in [
            "",
            "proc == a or proc == b",
            "not proc == a",
            "proc != a",
            "host ~ \"*.example\"",
            "dst in 10.0.0.0/8",
            "dst != 10.0.0.1",
            "id != 7",
            // A sum, and a word that follows from another property.
            "bytes > 5",
            "state == live",
        ] {
            assert_eq!(required(open), [], "{open}");
        }
    }

    #[test]
    fn all_properties_of_all_branches_are_looked_at() {
        let looks = |text: &str| Filter::parse(text).expect(text).looks_at().into_iter().collect::<Vec<_>>();
        assert_eq!(looks(""), []);
        assert_eq!(
            looks("not (proc == a or host ~ \"b*\") and bytes > 1 and state == live"),
            [
                Property::Destination,
                Property::Host,
                Property::Process,
                Property::Reason,
                Property::BytesUp,
                Property::BytesDown
            ]
        );
        assert_eq!(looks("sport == 1 and port == 2"), [Property::Client, Property::Destination]);
    }
}
