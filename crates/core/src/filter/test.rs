//! One comparison: a field, an operator and values, checked when the filter is parsed.

use super::error::{FilterError, nearest};
use super::needs::{Property, Required};
use super::value;
use super::{FlowFacts, glob};
use crate::flow::{EndReason, Host, Intercept, Protocol};
use crate::net::{IpNet, IpNetError};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

/// An operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Eq,
    Ne,
    Fits,
    FitsNot,
    Lt,
    Le,
    Gt,
    Ge,
    In,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    Process,
    User,
    Rule,
    Chain,
    Carrier,
    Listener,
    Intercept,
    Protocol,
    Reason,
    State,
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Src,
    Dst,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Id,
    Port,
    ClientPort,
    Bytes,
    Up,
    Down,
    Packets,
    PacketsUp,
    PacketsDown,
    Age,
    Connect,
    FirstByte,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Word(Word),
    Address(Address),
    Number(Number),
}

/// The names of the fields, with the alternative names that records use.
const FIELDS: [(&str, Field); 32] = [
    ("proc", Field::Word(Word::Process)),
    ("process", Field::Word(Word::Process)),
    ("user", Field::Word(Word::User)),
    ("rule", Field::Word(Word::Rule)),
    ("chain", Field::Word(Word::Chain)),
    ("carrier", Field::Word(Word::Carrier)),
    ("listener", Field::Word(Word::Listener)),
    ("intercept", Field::Word(Word::Intercept)),
    ("protocol", Field::Word(Word::Protocol)),
    ("reason", Field::Word(Word::Reason)),
    ("state", Field::Word(Word::State)),
    ("host", Field::Word(Word::Host)),
    ("src", Field::Address(Address::Src)),
    ("client", Field::Address(Address::Src)),
    ("dst", Field::Address(Address::Dst)),
    ("orig_dst", Field::Address(Address::Dst)),
    ("id", Field::Number(Number::Id)),
    ("flow", Field::Number(Number::Id)),
    ("port", Field::Number(Number::Port)),
    ("dport", Field::Number(Number::Port)),
    ("sport", Field::Number(Number::ClientPort)),
    ("bytes", Field::Number(Number::Bytes)),
    ("up", Field::Number(Number::Up)),
    ("bytes_up", Field::Number(Number::Up)),
    ("down", Field::Number(Number::Down)),
    ("bytes_down", Field::Number(Number::Down)),
    ("packets", Field::Number(Number::Packets)),
    ("packets_up", Field::Number(Number::PacketsUp)),
    ("packets_down", Field::Number(Number::PacketsDown)),
    ("age", Field::Number(Number::Age)),
    ("connect", Field::Number(Number::Connect)),
    ("first_byte", Field::Number(Number::FirstByte)),
];

/// The address to compare with.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AddressWant {
    Net(IpNet),
    /// A name, or a pattern for one, in lower case.
    Pattern(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Want {
    Words(Word, Vec<String>),
    Patterns(Word, Vec<String>),
    Addresses(Address, Vec<AddressWant>),
    Ranges(Number, Vec<RangeInclusive<u64>>),
}

/// One comparison. An unknown property satisfies neither it nor its negation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Test {
    want: Want,
    negated: bool,
}

/// Returns the field with this name. Fails with a suggestion if there is none.
pub(super) fn field(name: &str, at: Range<usize>) -> Result<Field, FilterError> {
    let found = FIELDS.iter().find(|(known, _)| *known == name);
    found.map(|(_, field)| *field).ok_or_else(|| unknown_field(name, at))
}

type Spanned<T> = (T, Range<usize>);

impl Test {
    /// Checks that field, operator and values fit together.
    pub(super) fn new(
        (name, field): (&str, Field),
        (op, op_at): Spanned<Op>,
        values: &[Spanned<String>],
    ) -> Result<Self, FilterError> {
        let does_not_go = |ops: &str| {
            FilterError::new(op_at.clone(), format!("'{name}' cannot be compared like this: it takes {ops}"))
        };
        let want = match (field, op) {
            (Field::Word(word), Op::Eq | Op::Ne | Op::In) => Want::Words(word, words(word, values)?),
            (Field::Word(word), Op::Fits | Op::FitsNot) => {
                Want::Patterns(word, values.iter().map(|(text, _)| folded(word, text)).collect())
            }
            (Field::Word(_), _) => return Err(does_not_go("== != ~ !~ in")),
            (Field::Address(_), Op::Lt | Op::Le | Op::Gt | Op::Ge) => {
                return Err(does_not_go("== != in ~ !~"));
            }
            (Field::Address(address), _) => Want::Addresses(address, addresses(op, values)?),
            (Field::Number(_), Op::Fits | Op::FitsNot) => return Err(does_not_go("== != < <= > >= in")),
            (Field::Number(number), _) => Want::Ranges(number, ranges(number, op, values)?),
        };
        Ok(Self { want, negated: matches!(op, Op::Ne | Op::FitsNot) })
    }

    /// Adds the properties that decide whether it holds.
    pub(super) fn looks_at(&self, found: &mut BTreeSet<Property>) {
        match &self.want {
            Want::Words(word, _) | Want::Patterns(word, _) => found.extend(word.properties()),
            Want::Addresses(address, _) => {
                found.insert(address.property());
            }
            Want::Ranges(number, _) => found.extend(number.properties()),
        }
    }

    /// Returns a condition that every flow fulfils for which it holds.
    pub(super) fn required(&self) -> Option<Required> {
        if self.negated {
            return None;
        }
        match &self.want {
            // Stores keep the functions of a chain apart or joined.
            Want::Words(Word::State | Word::Chain, _) | Want::Patterns(..) => None,
            Want::Words(word, words) => Some(Required::Words(*word.properties().first()?, words.clone())),
            Want::Addresses(address, wants) => {
                let words: Option<Vec<_>> = wants.iter().map(AddressWant::words).collect();
                Some(Required::Words(address.property(), words?.concat()))
            }
            Want::Ranges(number, ranges) => match (number, number.properties()) {
                // Both numbers of these are parts of another property.
                (Number::Port | Number::ClientPort, _) => None,
                (_, [property]) => Some(Required::Ranges(*property, ranges.clone())),
                _ => None,
            },
        }
    }

    pub(super) fn matches(&self, flow: &FlowFacts<'_>) -> bool {
        let found = match &self.want {
            Want::Words(word, words) => {
                word.of(flow).map(|text| words.iter().any(|want| word.is(text, |part| want == part)))
            }
            Want::Patterns(word, patterns) => {
                let fits = |pattern: &String, text| word.is(text, |part| glob::fits(pattern, part));
                word.of(flow).map(|text| patterns.iter().any(|pattern| fits(pattern, text)))
            }
            Want::Addresses(address, wants) => {
                address.of(flow).map(|host| wants.iter().any(|want| want.is(&host)))
            }
            Want::Ranges(number, ranges) => {
                number.of(flow).map(|value| ranges.iter().any(|range| range.contains(&value)))
            }
        };
        found.is_some_and(|found| found != self.negated)
    }
}

fn unknown_field(name: &str, at: Range<usize>) -> FilterError {
    let message = match nearest(name, FIELDS.iter().map(|(known, _)| *known)) {
        Some(near) => format!("there is no field '{name}': did you mean '{near}'?"),
        None => format!(
            "there is no field '{name}': there are proc, user, rule, chain, carrier, listener, intercept, protocol, \
             reason, state, host, src, dst, id, port, sport, bytes, up, down, packets, age, connect and first_byte"
        ),
    };
    FilterError::new(at, message)
}

/// Host names are compared in lower case (RFC 4343), all other words unchanged.
fn folded(word: Word, text: &str) -> String {
    if word == Word::Host { text.trim_end_matches('.').to_lowercase() } else { text.to_owned() }
}

/// Returns the words to compare with. If the field has a fixed list of words, they must be on it.
fn words(word: Word, values: &[Spanned<String>]) -> Result<Vec<String>, FilterError> {
    let closed: Vec<&str> = match word {
        Word::Reason => EndReason::ALL.iter().map(|reason| reason.as_str()).collect(),
        Word::Intercept => Intercept::ALL.iter().map(|kind| kind.as_str()).collect(),
        Word::Protocol => Protocol::ALL.iter().map(|protocol| protocol.as_str()).collect(),
        Word::State => vec!["live", "ended"],
        _ => return Ok(values.iter().map(|(text, _)| folded(word, text)).collect()),
    };
    for (text, at) in values {
        if closed.contains(&text.as_str()) {
            continue;
        }
        let message = match nearest(text, closed.iter().copied()) {
            Some(near) => format!("'{text}' is not one of its words: did you mean '{near}'?"),
            None => format!("'{text}' is not one of its words: {}", closed.join(", ")),
        };
        return Err(FilterError::new(at.clone(), message));
    }
    Ok(values.iter().map(|(text, _)| text.clone()).collect())
}

fn addresses(op: Op, values: &[Spanned<String>]) -> Result<Vec<AddressWant>, FilterError> {
    let read = |(text, at): &Spanned<String>| {
        let pattern = || AddressWant::Pattern(text.trim_end_matches('.').to_lowercase());
        if matches!(op, Op::Fits | Op::FitsNot) {
            return Ok(pattern());
        }
        match text.parse::<IpNet>() {
            Ok(net) => return Ok(AddressWant::Net(net)),
            Err(error @ (IpNetError::BadPrefix(..) | IpNetError::HostBits(..))) => {
                return Err(FilterError::new(at.clone(), error.to_string()));
            }
            Err(IpNetError::BadAddress(_)) => {}
        }
        if text.contains(['/', ':', '*', '?']) {
            let message = format!(
                "'{text}' is not an address, network or name: write 10.0.0.1, 10.0.0.0/8, 2001:db8::/32 or db.example; \
                 the port is a separate field (port == 443), patterns go with ~"
            );
            return Err(FilterError::new(at.clone(), message));
        }
        Ok(pattern())
    };
    values.iter().map(read).collect()
}

fn ranges(
    number: Number,
    op: Op,
    values: &[Spanned<String>],
) -> Result<Vec<RangeInclusive<u64>>, FilterError> {
    let read = |(text, at): &Spanned<String>| {
        let range = match number {
            Number::Bytes | Number::Up | Number::Down => value::size(text).map(|size| size..=size),
            Number::Age | Number::Connect | Number::FirstByte => value::time_us(text).map(|time| time..=time),
            _ if op == Op::In => value::number_or_range(text),
            _ => text.parse().ok().map(|number| number..=number),
        };
        let range = range.ok_or_else(|| FilterError::new(at.clone(), number.expected(text)))?;
        Ok(compared(op, range))
    };
    values.iter().map(read).collect()
}

/// Returns the values that are in relation `op` to the value of `range`.
fn compared(op: Op, range: RangeInclusive<u64>) -> RangeInclusive<u64> {
    // An empty range, for "less than 0" and "greater than the maximum".
    #[expect(clippy::reversed_empty_ranges, reason = "matches nothing")]
    const NONE: RangeInclusive<u64> = 1..=0;
    let value = *range.start();
    match op {
        Op::Lt => value.checked_sub(1).map_or(NONE, |below| 0..=below),
        Op::Le => 0..=value,
        Op::Gt => value.checked_add(1).map_or(NONE, |above| above..=u64::MAX),
        Op::Ge => value..=u64::MAX,
        Op::Eq | Op::Ne | Op::In | Op::Fits | Op::FitsNot => range,
    }
}

impl Word {
    /// The properties that decide it, the most important one first.
    fn properties(self) -> &'static [Property] {
        match self {
            Self::Process => &[Property::Process],
            Self::User => &[Property::User],
            Self::Rule => &[Property::Rule],
            Self::Chain => &[Property::Chain],
            Self::Carrier => &[Property::Carrier],
            Self::Listener => &[Property::Listener],
            Self::Intercept => &[Property::Intercept],
            Self::Protocol => &[Property::Protocol],
            Self::Reason | Self::State => &[Property::Reason],
            Self::Host => &[Property::Host, Property::Destination],
        }
    }

    /// Whether a text of a flow fulfils this. A chain does if one of its functions does, or all of its text.
    fn is(self, text: &str, fulfils: impl Fn(&str) -> bool) -> bool {
        fulfils(text) || self == Self::Chain && text.split(',').any(fulfils)
    }

    fn of<'f>(self, flow: &'f FlowFacts<'_>) -> Option<&'f str> {
        match self {
            Self::Process => flow.process,
            Self::User => flow.user,
            Self::Rule => flow.rule,
            Self::Chain => flow.chain.as_deref(),
            Self::Carrier => flow.carrier,
            Self::Listener => flow.listener,
            Self::Intercept => flow.intercept.map(Intercept::as_str),
            Self::Protocol => flow.protocol.map(Protocol::as_str),
            Self::Reason => flow.reason.map(EndReason::as_str),
            Self::State => Some(if flow.reason.is_some() { "ended" } else { "live" }),
            // As in policy, a destination that is a name is a known host name.
            Self::Host => flow.host.or(flow.dst.and_then(|dst| match &dst.host {
                Host::Name(name) => Some(name.as_str()),
                Host::Ip(_) => None,
            })),
        }
    }
}

/// An address or a name of a flow.
enum FlowHost<'a> {
    Ip(IpAddr),
    Name(&'a str),
}

impl Address {
    fn property(self) -> Property {
        match self {
            Self::Src => Property::Client,
            Self::Dst => Property::Destination,
        }
    }

    fn of<'a>(self, flow: &FlowFacts<'a>) -> Option<FlowHost<'a>> {
        match self {
            Self::Src => flow.client.map(|client| FlowHost::Ip(client.ip().to_canonical())),
            Self::Dst => flow.dst.map(|dst| match &dst.host {
                Host::Ip(ip) => FlowHost::Ip(*ip),
                Host::Name(name) => FlowHost::Name(name.as_str()),
            }),
        }
    }
}

impl AddressWant {
    /// The texts of the hosts that it fits. `None`: there are many.
    fn words(&self) -> Option<Vec<String>> {
        let ip = match self {
            Self::Net(net) => net.single()?,
            Self::Pattern(pattern) if pattern.contains(['*', '?']) => return None,
            Self::Pattern(pattern) => match pattern.parse() {
                Ok(ip) => ip,
                Err(_) => return Some(vec![pattern.clone()]),
            },
        };
        let mapped = match ip {
            IpAddr::V4(v4) => Some(v4.to_ipv6_mapped().to_string()),
            IpAddr::V6(_) => None,
        };
        Some([Some(ip.to_string()), mapped].into_iter().flatten().collect())
    }

    fn is(&self, host: &FlowHost<'_>) -> bool {
        match (self, host) {
            (Self::Net(net), FlowHost::Ip(ip)) => net.contains(*ip),
            (Self::Net(_), FlowHost::Name(_)) => false,
            (Self::Pattern(pattern), FlowHost::Name(name)) => glob::fits(pattern, name),
            (Self::Pattern(pattern), FlowHost::Ip(ip)) => glob::fits(pattern, &ip.to_string()),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Number {
    /// The properties that it is computed from.
    fn properties(self) -> &'static [Property] {
        match self {
            Self::Id => &[Property::Id],
            Self::Port => &[Property::Destination],
            Self::ClientPort => &[Property::Client],
            Self::Bytes => &[Property::BytesUp, Property::BytesDown],
            Self::Up => &[Property::BytesUp],
            Self::Down => &[Property::BytesDown],
            Self::Packets => &[Property::PacketsUp, Property::PacketsDown],
            Self::PacketsUp => &[Property::PacketsUp],
            Self::PacketsDown => &[Property::PacketsDown],
            Self::Age => &[Property::Age],
            Self::Connect => &[Property::Connect],
            Self::FirstByte => &[Property::FirstByte],
        }
    }

    fn of(self, flow: &FlowFacts<'_>) -> Option<u64> {
        match self {
            Self::Id => Some(flow.id),
            Self::Port => flow.dst.map(|dst| dst.port.into()),
            Self::ClientPort => flow.client.map(|client| client.port().into()),
            Self::Bytes => Some(flow.bytes_up.saturating_add(flow.bytes_down)),
            Self::Up => Some(flow.bytes_up),
            Self::Down => Some(flow.bytes_down),
            Self::Packets => Some(flow.packets_up.saturating_add(flow.packets_down)),
            Self::PacketsUp => Some(flow.packets_up),
            Self::PacketsDown => Some(flow.packets_down),
            Self::Age => Some(micros(flow.age)),
            Self::Connect => flow.connect.map(micros),
            Self::FirstByte => flow.first_byte.map(micros),
        }
    }

    fn expected(self, text: &str) -> String {
        match self {
            Self::Id
            | Self::Port
            | Self::ClientPort
            | Self::Packets
            | Self::PacketsUp
            | Self::PacketsDown => {
                format!("'{text}' is not a number: write 443, or with 'in' also 8000-8100")
            }
            Self::Bytes | Self::Up | Self::Down => {
                format!("'{text}' is not a size: write bytes (1500) or a unit (64KiB, 1.5MB)")
            }
            Self::Age | Self::Connect | Self::FirstByte => {
                format!("'{text}' is not a time: write a number and a unit (250ms, 10s, 5m, 1h, 2d)")
            }
        }
    }
}
