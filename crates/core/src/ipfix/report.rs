//! One report of a flow: its elements, the template that lists them, and the data record.

use crate::flow::Protocol;
use std::net::{IpAddr, SocketAddr};

/// Private enterprise number of elements that describe the reverse direction (RFC 5103 Sec. 6.1).
const REVERSE: u32 = 29_305;

/// The bit that says that an enterprise number follows (RFC 7011 Sec. 3.2).
const ENTERPRISE: u16 = 0x8000;

/// The length that stands for a variable one (RFC 7011 Sec. 3.2).
const VARIABLE: u16 = 0xffff;

/// Longest text, bytes: its length then needs one byte.
const TEXT_MAX: usize = 254;

/// Why a report was made: `flowEndReason` (IANA, element 136).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing moved for the idle time-out.
    Idle,
    /// The flow goes on: this is what moved since the report before.
    Active,
    /// The end of the flow was seen.
    Seen,
    /// It was ended: by a rule, a command or the end of the program.
    Forced,
    /// There was no room for it.
    NoRoom,
}

impl End {
    const fn code(self) -> u8 {
        match self {
            Self::Idle => 1,
            Self::Active => 2,
            Self::Seen => 3,
            Self::Forced => 4,
            Self::NoRoom => 5,
        }
    }
}

/// What is told of one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report<'a> {
    /// The flow's number.
    pub flow: u64,
    /// Its transport protocol.
    pub protocol: Protocol,
    /// The client. `None`: nothing is known about the flow.
    pub client: Option<SocketAddr>,
    /// The server's address, if it is known.
    pub server: Option<IpAddr>,
    /// The server's port.
    pub server_port: u16,
    /// The address that was dialled, if it is not the server's.
    pub dialled: Option<SocketAddr>,
    /// When the report begins: milliseconds since 1970.
    pub start_ms: u64,
    /// When it ends: milliseconds since 1970.
    pub end_ms: u64,
    /// Bytes from client to server, and from server to client, since the report before.
    pub bytes: [u64; 2],
    /// Datagrams in both directions since the report before. `None`: they were not counted.
    pub packets: Option<[u64; 2]>,
    /// Why the report was made.
    pub end: End,
    /// Whether a rule refused the flow.
    pub is_denied: bool,
    /// The host name of the server, or empty.
    pub host: &'a str,
    /// The program of the client, or empty.
    pub process: &'a str,
    /// The user, or empty.
    pub user: &'a str,
    /// Texts without a standard element: rule, carrier, listener, and the reason of the end. They are the elements 1 to 4 of the
    /// enterprise number of the settings, and are left out if there is none.
    pub own: [&'a str; 4],
}

/// The family of an address that a template has, or none.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    None,
    V4,
    V6,
}

impl Family {
    const fn of(ip: Option<IpAddr>) -> Self {
        match ip {
            None => Self::None,
            Some(IpAddr::V4(_)) => Self::V4,
            Some(IpAddr::V6(_)) => Self::V6,
        }
    }

    const fn index(self) -> u16 {
        match self {
            Self::None => 0,
            Self::V4 => 1,
            Self::V6 => 2,
        }
    }
}

/// What the template of a report depends on.
#[derive(Clone, Copy)]
struct Shape {
    client: Family,
    server: Family,
    dialled: Family,
    packets: bool,
}

/// An encoded report, with its template.
pub(super) struct Encoded {
    /// Number of the template.
    pub(super) template: u16,
    /// The template record.
    pub(super) announcement: Vec<u8>,
    /// The data record.
    pub(super) data: Vec<u8>,
}

/// Writes the fields of a template, and counts them.
struct Fields {
    out: Vec<u8>,
    count: u16,
}

impl Fields {
    fn put(&mut self, element: u16, length: u16, enterprise: Option<u32>) {
        let bit = if enterprise.is_some() { ENTERPRISE } else { 0 };
        self.out.extend_from_slice(&(element | bit).to_be_bytes());
        self.out.extend_from_slice(&length.to_be_bytes());
        if let Some(number) = enterprise {
            self.out.extend_from_slice(&number.to_be_bytes());
        }
        self.count += 1;
    }

    fn address(&mut self, family: Family, [v4, v6]: [u16; 2]) {
        match family {
            Family::None => {}
            Family::V4 => self.put(v4, 4, None),
            Family::V6 => self.put(v6, 16, None),
        }
    }
}

impl Shape {
    /// The number of its template: 256 to 309. Numbers below are reserved (RFC 7011 Sec. 3.4.1).
    fn template(self) -> u16 {
        let addresses = (self.client.index() * 3 + self.server.index()) * 3 + self.dialled.index();
        256 + addresses * 2 + u16::from(self.packets)
    }

    /// The template record (RFC 7011 Sec. 3.4.1). The order of its fields is that of [`Report::fixed`] and [`Report::texts`].
    fn announcement(self, enterprise: Option<u32>) -> Vec<u8> {
        let mut fields = Fields { out: Vec::with_capacity(192), count: 0 };
        // flowId, flowStartMilliseconds, flowEndMilliseconds.
        [148, 152, 153].into_iter().for_each(|element| fields.put(element, 8, None));
        // protocolIdentifier, flowEndReason, firewallEvent, biflowDirection.
        [4, 136, 233, 239].into_iter().for_each(|element| fields.put(element, 1, None));
        if self.client != Family::None {
            // sourceIPv4Address or sourceIPv6Address, sourceTransportPort, destinationTransportPort.
            fields.address(self.client, [8, 27]);
            [7, 11].into_iter().for_each(|element| fields.put(element, 2, None));
        }
        // destinationIPv4Address, destinationIPv6Address.
        fields.address(self.server, [12, 28]);
        if self.dialled != Family::None {
            // postNATDestinationIPv4Address or -IPv6Address, postNAPTDestinationTransportPort.
            fields.address(self.dialled, [226, 282]);
            fields.put(228, 2, None);
        }
        // octetDeltaCount, and packetDeltaCount.
        let counts = if self.packets { &[1, 2][..] } else { &[1] };
        for element in counts {
            fields.put(*element, 8, None);
            fields.put(*element, 8, Some(REVERSE));
        }
        // httpRequestHost, applicationName, userName.
        [460, 96, 371].into_iter().for_each(|element| fields.put(element, VARIABLE, None));
        if enterprise.is_some() {
            [1, 2, 3, 4].into_iter().for_each(|element| fields.put(element, VARIABLE, enterprise));
        }
        let head = [self.template().to_be_bytes(), fields.count.to_be_bytes()].concat();
        [head, fields.out].concat()
    }
}

fn put_ip(out: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => out.extend_from_slice(&ip.octets()),
        IpAddr::V6(ip) => out.extend_from_slice(&ip.octets()),
    }
}

/// Appends a text of variable length (RFC 7011 Sec. 7), cut after a whole character.
fn put_text(out: &mut Vec<u8>, text: &str, most: usize) {
    let most = most.min(TEXT_MAX).min(text.len());
    let end = (0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let text = text.get(..end).unwrap_or_default();
    out.push(u8::try_from(text.len()).unwrap_or(0));
    out.extend_from_slice(text.as_bytes());
}

impl Report<'_> {
    fn shape(&self) -> Shape {
        Shape {
            client: Family::of(self.client.map(|client| client.ip())),
            server: Family::of(self.server),
            dialled: Family::of(self.dialled.map(|dialled| dialled.ip())),
            packets: self.packets.is_some(),
        }
    }

    /// The elements of fixed length.
    fn fixed(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        for number in [self.flow, self.start_ms, self.end_ms] {
            out.extend_from_slice(&number.to_be_bytes());
        }
        let event = match (self.is_denied, self.end) {
            (true, _) => 3,
            (false, End::Active) => 5,
            (false, _) => 2,
        };
        // The direction is that of the initiator.
        out.extend_from_slice(&[self.protocol.number(), self.end.code(), event, 1]);
        if let Some(client) = self.client {
            put_ip(&mut out, client.ip());
            out.extend_from_slice(&client.port().to_be_bytes());
            out.extend_from_slice(&self.server_port.to_be_bytes());
        }
        if let Some(server) = self.server {
            put_ip(&mut out, server);
        }
        if let Some(dialled) = self.dialled {
            put_ip(&mut out, dialled.ip());
            out.extend_from_slice(&dialled.port().to_be_bytes());
        }
        for number in self.bytes.into_iter().chain(self.packets.into_iter().flatten()) {
            out.extend_from_slice(&number.to_be_bytes());
        }
        out
    }

    /// The texts, in their order.
    fn texts(&self, enterprise: Option<u32>) -> impl Iterator<Item = &str> {
        let own = self.own.into_iter().filter(move |_| enterprise.is_some());
        [self.host, self.process, self.user].into_iter().chain(own)
    }

    /// Encodes the report and its template. Both fit into `room` bytes together; texts are cut for that, all at the same length.
    pub(super) fn encode(&self, enterprise: Option<u32>, room: usize) -> Encoded {
        let shape = self.shape();
        let (announcement, mut data) = (shape.announcement(enterprise), self.fixed());
        let left = room.saturating_sub(announcement.len() + data.len());
        let most = (left / self.texts(enterprise).count().max(1)).saturating_sub(1);
        for text in self.texts(enterprise) {
            put_text(&mut data, text, most);
        }
        Encoded { template: shape.template(), announcement, data }
    }
}
