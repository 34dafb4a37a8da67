//! The columns of stored flows: which field of a record each one holds, and a record made of a row.

use crate::record::{FlowRecord, Reached, Timestamp};
use sidetrack_core::filter::Property;
use sidetrack_core::flow::{Destination, EndReason, Host, Intercept, Protocol};
use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::time::{Duration, UNIX_EPOCH};

/// The type of a column's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// UTF-8.
    Text,
    /// 64 bits.
    Number,
    /// Milliseconds since 1970.
    Moment,
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(usize)]
pub(super) enum Column {
    Ts,
    Flow,
    Rule,
    Chain,
    Carrier,
    Listener,
    Intercept,
    ClientIp,
    ClientPort,
    OrigDst,
    Dst,
    Port,
    Host,
    Process,
    User,
    BytesUp,
    BytesDown,
    Connect,
    FirstByte,
    Duration,
    Shunted,
    Reason,
    Detail,
    Path,
    Agreement,
    TlsName,
    States,
    Mptcp,
    Protocol,
    PacketsUp,
    PacketsDown,
    Held,
}

impl Column {
    /// All of them, with their names in the file and the type of their values. Names of a later version may follow; none
    /// is removed or renamed.
    pub(super) const ALL: [(Self, &'static str, Kind); 32] = [
        (Self::Ts, "ts", Kind::Moment),
        (Self::Flow, "flow", Kind::Number),
        (Self::Rule, "rule", Kind::Text),
        (Self::Chain, "chain", Kind::Text),
        (Self::Carrier, "carrier", Kind::Text),
        (Self::Listener, "listener", Kind::Text),
        (Self::Intercept, "intercept", Kind::Text),
        (Self::ClientIp, "client_ip", Kind::Text),
        (Self::ClientPort, "client_port", Kind::Number),
        (Self::OrigDst, "orig_dst", Kind::Text),
        (Self::Dst, "dst", Kind::Text),
        (Self::Port, "port", Kind::Number),
        (Self::Host, "host", Kind::Text),
        (Self::Process, "process", Kind::Text),
        (Self::User, "user", Kind::Text),
        (Self::BytesUp, "bytes_up", Kind::Number),
        (Self::BytesDown, "bytes_down", Kind::Number),
        (Self::Connect, "connect_us", Kind::Number),
        (Self::FirstByte, "first_byte_us", Kind::Number),
        (Self::Duration, "duration_us", Kind::Number),
        (Self::Shunted, "shunted", Kind::Number),
        (Self::Reason, "reason", Kind::Text),
        (Self::Detail, "detail", Kind::Text),
        (Self::Path, "path", Kind::Text),
        (Self::Agreement, "agreement", Kind::Text),
        (Self::TlsName, "tls_name", Kind::Text),
        (Self::States, "states", Kind::Text),
        (Self::Mptcp, "mptcp", Kind::Text),
        (Self::Protocol, "protocol", Kind::Text),
        (Self::PacketsUp, "packets_up", Kind::Number),
        (Self::PacketsDown, "packets_down", Kind::Number),
        (Self::Held, "held_us", Kind::Number),
    ];

    /// Its place in [`Column::ALL`].
    pub(super) const fn index(self) -> usize {
        self as usize
    }

    /// Whether the file can tell cheaply that a word does not occur in it.
    pub(super) const fn is_indexed(self) -> bool {
        matches!(
            self,
            Self::Rule
                | Self::Carrier
                | Self::Listener
                | Self::ClientIp
                | Self::Dst
                | Self::Host
                | Self::Process
                | Self::User
                | Self::Reason
                | Self::Protocol
                | Self::Intercept
        )
    }

    /// The columns with a property that filters look at.
    pub(super) const fn of(property: Property) -> &'static [Self] {
        match property {
            Property::Id => &[Self::Flow],
            Property::Client => &[Self::ClientIp, Self::ClientPort],
            Property::Destination => &[Self::OrigDst],
            Property::Host => &[Self::Host],
            Property::Process => &[Self::Process],
            Property::User => &[Self::User],
            Property::Rule => &[Self::Rule],
            Property::Chain => &[Self::Chain],
            Property::Carrier => &[Self::Carrier],
            Property::Listener => &[Self::Listener],
            Property::Intercept => &[Self::Intercept],
            Property::Protocol => &[Self::Protocol],
            Property::Reason => &[Self::Reason],
            Property::BytesUp => &[Self::BytesUp],
            Property::BytesDown => &[Self::BytesDown],
            Property::PacketsUp => &[Self::PacketsUp],
            Property::PacketsDown => &[Self::PacketsDown],
            Property::Age => &[Self::Duration],
            Property::Connect => &[Self::Connect],
            Property::FirstByte => &[Self::FirstByte],
        }
    }

    /// The column that holds the words which a filter requires of a property.
    pub(super) const fn of_words(property: Property) -> Option<Self> {
        match property {
            Property::Destination => Some(Self::Dst),
            _ => match Self::of(property) {
                [column, ..] if column.is_indexed() => Some(*column),
                _ => None,
            },
        }
    }
}

/// The value of one column of one flow.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell<'a> {
    /// Not known.
    Null,
    /// A text.
    Text(Cow<'a, str>),
    /// A number, or a time in the unit of its column.
    Number(i64),
}

fn text(value: Option<&str>) -> Cell<'_> {
    value.map_or(Cell::Null, |text| Cell::Text(text.into()))
}

/// Numbers keep their 64 bits; the file says that they have no sign.
fn number(value: u64) -> Cell<'static> {
    Cell::Number(value.cast_signed())
}

fn micros(seconds: f64) -> Cell<'static> {
    // Exact: the seconds of records come from whole microseconds.
    Cell::Number((seconds * 1e6).round() as i64)
}

fn joined<'a>(words: &[Cow<'_, str>]) -> Cell<'a> {
    if words.is_empty() { Cell::Null } else { Cell::Text(words.join(",").into()) }
}

/// The text of an address, with its zone.
fn ip(address: SocketAddr) -> String {
    match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
        address => address.ip().to_string(),
    }
}

/// Returns the value of a record in a column.
pub(super) fn cell<'a>(record: &'a FlowRecord<'_>, column: Column) -> Cell<'a> {
    let dst = record.orig_dst.as_deref();
    match column {
        Column::Ts => {
            let since = record.ts.system_time().duration_since(UNIX_EPOCH).unwrap_or_default();
            Cell::Number(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
        }
        Column::Flow => number(record.flow),
        Column::Rule => text(record.rule.as_deref()),
        Column::Chain => joined(&record.chain),
        Column::Carrier => text(record.carrier.as_deref()),
        Column::Listener => text(record.listener.as_deref()),
        Column::Intercept => text(record.intercept.map(Intercept::as_str)),
        Column::ClientIp => record.client.map_or(Cell::Null, |client| Cell::Text(ip(client).into())),
        Column::ClientPort => record.client.map_or(Cell::Null, |client| number(client.port().into())),
        Column::OrigDst => dst.map_or(Cell::Null, |dst| Cell::Text(dst.to_string().into())),
        Column::Dst => match dst.map(|dst| &dst.host) {
            Some(Host::Ip(ip)) => Cell::Text(ip.to_string().into()),
            Some(Host::Name(name)) => Cell::Text(name.as_str().into()),
            None => Cell::Null,
        },
        Column::Port => dst.map_or(Cell::Null, |dst| number(dst.port.into())),
        Column::Host => text(record.host.as_deref()),
        Column::Process => text(record.process.as_deref()),
        Column::User => text(record.user.as_deref()),
        Column::BytesUp => number(record.bytes_up),
        Column::BytesDown => number(record.bytes_down),
        Column::Connect => record.connect_seconds.map_or(Cell::Null, micros),
        Column::FirstByte => record.first_byte_seconds.map_or(Cell::Null, micros),
        Column::Duration => micros(record.duration_seconds),
        Column::Shunted => Cell::Number(record.shunted.into()),
        Column::Reason => text(record.reason.map(EndReason::as_str)),
        Column::Detail => text(record.detail.as_deref()),
        Column::Path => text(record.path.as_deref()),
        Column::Agreement => text(record.agreement.as_deref()),
        Column::TlsName => text(record.tls_name.as_deref()),
        Column::States => record.states.as_ref().map_or(Cell::Null, |states| {
            // States are texts and finite numbers, which JSON can express.
            Cell::Text(serde_json::to_string(states).unwrap_or_default().into())
        }),
        Column::Mptcp => joined(&record.mptcp),
        Column::Protocol => text(record.protocol.map(Protocol::as_str)),
        Column::PacketsUp => record.packets_up.map_or(Cell::Null, number),
        Column::PacketsDown => record.packets_down.map_or(Cell::Null, number),
        Column::Held => record.held_seconds.map_or(Cell::Null, micros),
    }
}

/// One flow of a file.
pub(super) trait Row {
    /// The text in a column.
    fn text(&self, column: Column) -> Option<&str>;
    /// The number in a column.
    fn number(&self, column: Column) -> Option<i64>;
}

/// Returns the reason with this name.
pub(super) fn reason(text: &str) -> Option<EndReason> {
    EndReason::ALL.into_iter().find(|reason| reason.as_str() == text)
}

/// Returns the kind of interception with this name.
pub(super) fn intercept(text: &str) -> Option<Intercept> {
    Intercept::ALL.into_iter().find(|intercept| intercept.as_str() == text)
}

/// Returns the protocol with this name.
pub(super) fn protocol(text: &str) -> Option<Protocol> {
    Protocol::ALL.into_iter().find(|protocol| protocol.as_str() == text)
}

/// Returns the address with this text and port.
pub(super) fn client(text: &str, port: i64) -> Option<SocketAddr> {
    let port = u16::try_from(port).ok()?;
    match text.split_once('%') {
        Some((ip, zone)) => Some(SocketAddrV6::new(ip.parse().ok()?, port, 0, zone.parse().ok()?).into()),
        None => Some(SocketAddr::new(text.parse::<IpAddr>().ok()?, port)),
    }
}

/// Returns the record of a row.
pub(super) fn record(row: &impl Row) -> FlowRecord<'static> {
    let owned = |column| row.text(column).map(|text| Cow::Owned(text.to_owned()));
    let split = |column| match row.text(column) {
        Some(text) => text.split(',').map(|word| Cow::Owned(word.to_owned())).collect(),
        None => Vec::new(),
    };
    let count = |column| row.number(column).map(i64::cast_unsigned);
    let seconds = |column| row.number(column).map(|us| us as f64 / 1e6);
    let since = row.number(Column::Ts).and_then(|ms| u64::try_from(ms).ok()).unwrap_or(0);
    let states = row.text(Column::States);
    FlowRecord {
        ts: Timestamp::from(UNIX_EPOCH + Duration::from_millis(since)),
        flow: count(Column::Flow).unwrap_or(0),
        rule: owned(Column::Rule),
        chain: split(Column::Chain),
        carrier: owned(Column::Carrier),
        listener: owned(Column::Listener),
        intercept: row.text(Column::Intercept).and_then(intercept),
        client: row
            .text(Column::ClientIp)
            .and_then(|text| client(text, row.number(Column::ClientPort).unwrap_or(0))),
        orig_dst: row.text(Column::OrigDst).and_then(|text| text.parse::<Destination>().ok()).map(Cow::Owned),
        host: owned(Column::Host),
        process: owned(Column::Process),
        user: owned(Column::User),
        bytes_up: count(Column::BytesUp).unwrap_or(0),
        bytes_down: count(Column::BytesDown).unwrap_or(0),
        connect_seconds: seconds(Column::Connect),
        first_byte_seconds: seconds(Column::FirstByte),
        duration_seconds: seconds(Column::Duration).unwrap_or(0.0),
        shunted: row.number(Column::Shunted) == Some(1),
        reason: row.text(Column::Reason).and_then(reason),
        detail: owned(Column::Detail),
        path: owned(Column::Path),
        agreement: owned(Column::Agreement),
        tls_name: owned(Column::TlsName),
        states: states.and_then(|text| serde_json::from_str::<Vec<Reached>>(text).ok()),
        mptcp: split(Column::Mptcp),
        protocol: row.text(Column::Protocol).and_then(protocol),
        packets_up: count(Column::PacketsUp),
        packets_down: count(Column::PacketsDown),
        held_seconds: seconds(Column::Held),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_column_stands_at_its_place() {
        for (at, (column, ..)) in Column::ALL.into_iter().enumerate() {
            assert_eq!(column.index(), at);
        }
        let names: std::collections::BTreeSet<_> = Column::ALL.iter().map(|(_, name, _)| *name).collect();
        assert_eq!(names.len(), Column::ALL.len());
    }

    #[test]
    fn an_address_reads_as_it_was_written() {
        for text in ["10.0.0.1:7", "[2001:db8::1]:65535", "[fe80::1%3]:80", "[::ffff:10.0.0.1]:9"] {
            let address: SocketAddr = text.parse().expect(text);
            assert_eq!(client(&ip(address), address.port().into()), Some(address), "{text}");
        }
        assert_eq!(client("10.0.0.1", 65536), None);
        assert_eq!(client("nobody", 1), None);
    }
}
