//! What two nodes say to each other about flows of UDP, within a session between them ([`Reserved::Udp`]).
//!
//! The node that caught a datagram asks the other one to open an association. Its number stands for the client and the
//! destination from then on, so a datagram carries five bytes besides its payload. Orders and answers travel in the session.
//! Datagrams travel as packets of the overlay, after the id of the session, or in the session while packets do not arrive.
//!
//! | message | body, after the number of the association (4 bytes) |
//! |---|---|
//! | 1 open | path (4), kind of links (1), dissemination (1), paths (1), hops (1), deadline in µs (4, 0: none), client, host, destination |
//! | 2 opened | the server's address |
//! | 3 refused | refusal (1), text |
//! | 4 datagram | payload |
//! | 5 error | refusal (1) |
//! | 6 close | |
//!
//! Associations with the same path send from one port of the delivering node, as RFC 4787 REQ-1 demands for one client.
//!
//! [`Reserved::Udp`]: crate::overlay::reserved::Reserved::Udp

use super::body::words;
use super::wire::{Put, Reader};
use super::{DETAIL_MAX, Dissemination, FrameError, LinkKind, Refusal};
use crate::flow::{Destination, HostName};
use crate::overlay::service::{HOPS, PATHS, Service};
use std::net::SocketAddr;
use std::time::Duration;

/// Bytes ahead of the payload of a datagram.
pub const DATAGRAM_HEADER_BYTES: usize = 5;

/// Most bytes of a message: the longest payload of UDP over IPv4 and its header.
pub const RELAYED_MAX: usize = 65_507 + DATAGRAM_HEADER_BYTES;

const OPEN: u8 = 1;
const OPENED: u8 = 2;
const REFUSED: u8 = 3;
const DATAGRAM: u8 = 4;
const ERROR: u8 = 5;
const CLOSE: u8 = 6;

/// An order to open an association.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUdp {
    /// Associations of one client have the same number here if they are to share a port.
    pub path: u32,
    /// How datagrams travel, in both directions. The delivering node answers with the same service.
    pub service: Service,
    /// The client.
    pub client: SocketAddr,
    /// The host name, if known.
    pub host: Option<HostName>,
    /// The destination.
    pub destination: Destination,
}

/// What a message says about its association.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Relayed<'a> {
    /// To the delivering node: open it.
    Open(Box<OpenUdp>),
    /// To the node that asked: it is open. Datagrams go to this address.
    Opened(SocketAddr),
    /// To the node that asked: it is not opened, or it is over.
    Refused(Refusal, String),
    /// In both directions: a datagram. The payload may be empty.
    Datagram(&'a [u8]),
    /// To the node that asked: a datagram of this association met an error, such as an ICMP error.
    Error(Refusal),
    /// To the delivering node: it is over.
    Close,
}

impl<'a> Relayed<'a> {
    /// Returns the message about the association with this number.
    pub fn to_bytes(&self, number: u32) -> Vec<u8> {
        let mut out = Vec::new();
        let mut begin = |kind: u8| {
            out.put_u8(kind);
            out.put_u32(number);
        };
        match self {
            Self::Open(open) => {
                begin(OPEN);
                open.put(&mut out);
            }
            Self::Opened(remote) => {
                begin(OPENED);
                out.put_socket_addr(*remote);
            }
            Self::Refused(reason, detail) => {
                begin(REFUSED);
                out.put_u8(reason.code());
                out.put(words(detail).as_bytes());
            }
            Self::Datagram(payload) => {
                begin(DATAGRAM);
                out.put(payload);
            }
            Self::Error(reason) => {
                begin(ERROR);
                out.put_u8(reason.code());
            }
            Self::Close => begin(CLOSE),
        }
        out
    }

    /// Reads a message and the number of its association.
    ///
    /// # Errors
    /// Returns the field that is wrong. The message is dropped; later ones stay valid.
    pub fn parse(bytes: &'a [u8]) -> Result<(u32, Self), FrameError> {
        let mut reader = Reader(bytes);
        let (kind, number) = (reader.u8()?, reader.u32()?);
        let said = match kind {
            OPEN => Self::Open(Box::new(OpenUdp::read(&mut reader)?)),
            OPENED => Self::Opened(reader.socket_addr()?),
            REFUSED => {
                let reason = Refusal::read(&mut reader)?;
                let detail = std::str::from_utf8(reader.rest()).ok();
                let detail = detail.filter(|text| text.len() <= DETAIL_MAX);
                Self::Refused(reason, detail.ok_or(FrameError::BadValue("detail"))?.to_owned())
            }
            DATAGRAM => Self::Datagram(reader.rest()),
            ERROR => Self::Error(Refusal::read(&mut reader)?),
            CLOSE => Self::Close,
            other => return Err(FrameError::UnknownType(other)),
        };
        match reader.0.len() {
            0 => Ok((number, said)),
            left => Err(FrameError::TrailingBytes(left)),
        }
    }
}

impl OpenUdp {
    fn put(&self, out: &mut Vec<u8>) {
        let Self { path, service, client, host, destination } = self;
        out.put_u32(*path);
        out.put(&[service.kind.code(), service.dissemination.code(), service.paths, service.hops]);
        out.put_u32(service.budget_us());
        out.put_socket_addr(*client);
        out.put_host_name(host.as_ref());
        out.put_destination(destination);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let path = reader.u32()?;
        let (kind, dissemination) = (LinkKind::read(reader)?, Dissemination::read(reader)?);
        let [paths, hops] = reader.array()?;
        let deadline = Some(reader.u32()?).filter(|us| *us > 0);
        if !PATHS.contains(&paths) || !HOPS.contains(&hops) {
            return Err(FrameError::BadValue("service"));
        }
        let deadline = deadline.map(|us| Duration::from_micros(us.into()));
        let service = Service { dissemination, paths, hops, deadline, ..Service::new(kind) };
        let (client, host) = (reader.socket_addr()?, reader.host_name()?);
        Ok(Self { path, service, client, host, destination: reader.destination()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> OpenUdp {
        OpenUdp {
            path: 9,
            service: Service {
                dissemination: Dissemination::Duplicate,
                paths: 3,
                deadline: Some(Duration::from_millis(65)),
                ..Service::new(LinkKind::RealTime)
            },
            client: "192.0.2.7:4000".parse().expect("an address"),
            host: Some("db.example".parse().expect("a name")),
            destination: "[2001:db8::1]:53".parse().expect("a destination"),
        }
    }

    #[test]
    fn known_bytes() {
        let address: SocketAddr = "192.0.2.9:53".parse().expect("an address");
        let cases = [
            (Relayed::Opened(address), "02 00000007 04 c0000209 0035"),
            (Relayed::Refused(Refusal::Denied, "no".to_owned()), "03 00000007 02 6e6f"),
            (Relayed::Datagram(b"hi"), "04 00000007 6869"),
            (Relayed::Datagram(b""), "04 00000007"),
            (Relayed::Error(Refusal::ConnectionRefused), "05 00000007 03"),
            (Relayed::Close, "06 00000007"),
            (
                Relayed::Open(Box::new(open())),
                "01 00000007 00000009 02 01 03 04 0000fde8 04 c0000207 0fa0 0a 64622e6578616d706c65 \
                 10 20010db8000000000000000000000001 0035",
            ),
        ];
        for (said, known) in cases {
            let bytes = said.to_bytes(7);
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, known.replace(' ', ""));
            assert_eq!(Relayed::parse(&bytes), Ok((7, said)));
        }
    }

    #[test]
    fn cut_anywhere_and_changed_anywhere_it_is_an_error_or_another_message() {
        let whole = Relayed::Open(Box::new(open())).to_bytes(7);
        for length in 0..whole.len() {
            assert!(Relayed::parse(&whole[..length]).is_err(), "{length}");
        }
        let longer = [&whole[..], &[0]].concat();
        assert_eq!(Relayed::parse(&longer), Err(FrameError::TrailingBytes(1)));
        for at in 0..whole.len() {
            for value in 0..=u8::MAX {
                let mut bytes = whole.clone();
                bytes[at] = value;
                if let Ok((number, said)) = Relayed::parse(&bytes) {
                    let again = said.to_bytes(number);
                    // Names are read in any case, and written in lower case.
                    assert_eq!(again.len(), bytes.len());
                    assert_eq!(Relayed::parse(&again), Ok((number, said)));
                }
            }
        }
    }

    #[test]
    fn bad_values_are_named() {
        for (bytes, wrong) in [
            (&[7, 0, 0, 0, 1][..], FrameError::UnknownType(7)),
            (&[6, 0, 0, 0, 1, 0], FrameError::TrailingBytes(1)),
            (&[5, 0, 0, 0, 1, 200], FrameError::BadValue("refusal")),
            (&[3, 0, 0, 0, 1, 2, 0xff], FrameError::BadValue("detail")),
            (&[4, 0, 0], FrameError::Truncated),
        ] {
            assert_eq!(Relayed::parse(bytes), Err(wrong));
        }
        let mut none = Relayed::Open(Box::new(open())).to_bytes(7);
        // One path is not a number of disjoint paths.
        none[11] = 1;
        assert_eq!(Relayed::parse(&none), Err(FrameError::BadValue("service")));
    }
}
