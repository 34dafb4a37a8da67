//! One UDP association of version 6, at the proxy: which way its datagrams come, and when the client is told so.
//!
//! ```text
//!                 first datagram, by UDP or in the connection: Confirm
//!   AWAITED ------------------------------------------------------------> FIXED(way)
//!      |                                                                    |
//!      | datagram with another id: dropped                                  | datagram of this way: passes
//!      v                                                                    | any other: dropped silently
//!   AWAITED                                                                 v
//!                                                                         FIXED(way)
//! ```
//!
//! A datagram without payload to address and port zero only fixes the way: a client that serves others sends it before it
//! has a destination. Nothing is sent to the client before the way is fixed.

use super::udp::{UdpDatagram, UdpMessage};
use crate::association::Dropped;
use crate::flow::{Destination, Host};
use std::net::SocketAddr;

/// How the client's datagrams come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By UDP, from this address.
    Datagrams(SocketAddr),
    /// In the connection of the request.
    Connection,
}

/// A datagram of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken<'a> {
    /// The client has to be told that its first datagram has come: send [`UdpAssociation::confirm`].
    pub is_first: bool,
    /// The destination. `None`: the datagram has only fixed the way.
    pub remote: Option<Destination>,
    /// The payload.
    pub payload: &'a [u8],
}

/// One association.
#[derive(Clone, Debug)]
pub struct UdpAssociation {
    id: u64,
    way: Option<Way>,
}

impl UdpAssociation {
    /// Makes an association. `id` must be hard to guess.
    pub const fn new(id: u64) -> Self {
        Self { id, way: None }
    }

    /// Returns the message that announces the association, to be sent in the connection after the Operation Reply.
    pub fn init(&self) -> Vec<u8> {
        message(&UdpMessage::Init { id: self.id })
    }

    /// Returns the message that tells that the first datagram has come, to be sent in the connection.
    pub fn confirm(&self) -> Vec<u8> {
        message(&UdpMessage::Confirm { id: self.id })
    }

    /// Returns the id.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Returns the way of the datagrams, once it is fixed.
    pub const fn way(&self) -> Option<Way> {
        self.way
    }

    /// Takes the bytes of one datagram, or of one message of the connection.
    ///
    /// # Errors
    /// Fails if it must be dropped: it is malformed, of another association, or did not come the fixed way.
    pub fn take<'a>(&mut self, way: Way, bytes: &'a [u8]) -> Result<Taken<'a>, Dropped> {
        let datagram = UdpDatagram::parse(bytes).ok_or(Dropped::Malformed)?;
        if datagram.id != self.id {
            return Err(Dropped::Unknown);
        }
        let is_first = self.way.is_none();
        if *self.way.get_or_insert(way) != way {
            return Err(Dropped::Stranger);
        }
        let UdpDatagram { remote, payload, .. } = datagram;
        let is_nowhere = matches!(remote.host, Host::Ip(ip) if ip.is_unspecified()) && remote.port == 0;
        Ok(Taken { is_first, remote: Some(remote).filter(|_| !is_nowhere), payload })
    }
}

/// Messages without a payload always have a length that fits.
fn message(message: &UdpMessage) -> Vec<u8> {
    message.encode().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::udp::{begin_datagram, end_datagram};
    use super::*;

    fn datagram(id: u64, to: &str, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let address = to.parse::<SocketAddr>().map(Destination::from).ok();
        let to = address.unwrap_or_else(|| to.parse().expect("a destination"));
        let start = begin_datagram(&mut out, id, &to);
        out.extend_from_slice(payload);
        assert!(end_datagram(&mut out, start));
        out
    }

    #[test]
    fn every_sequence_of_events_fixes_one_way_and_confirms_once() {
        let ways = [
            Way::Datagrams("192.0.2.1:4000".parse().expect("an address")),
            Way::Datagrams("192.0.2.1:4001".parse().expect("an address")),
            Way::Connection,
        ];
        let whole = datagram(7, "203.0.113.5:53", b"hi");
        let (probe, other) = (datagram(7, "0.0.0.0:0", b""), datagram(8, "203.0.113.5:53", b"hi"));
        let cut = &whole[..whole.len() - 1];
        let kinds: [&[u8]; 4] = [&whole, &probe, &other, cut];
        let count = ways.len() * kinds.len();
        for sequence in 0..count.pow(4) {
            let (mut association, mut fixed) = (UdpAssociation::new(7), None);
            for step in 0..4 {
                let event = sequence / count.pow(step) % count;
                let (way, kind) = (ways[event % ways.len()], event / ways.len());
                let taken = association.take(way, kinds[kind]);
                let expected = match kind {
                    2 => Err(Dropped::Unknown),
                    3 => Err(Dropped::Malformed),
                    _ if fixed.is_some_and(|fixed| fixed != way) => Err(Dropped::Stranger),
                    kind => Ok(Taken {
                        is_first: fixed.is_none(),
                        remote: (kind == 0).then(|| "203.0.113.5:53".parse().expect("a destination")),
                        payload: if kind == 0 { b"hi" } else { b"" },
                    }),
                };
                assert_eq!(taken, expected);
                if taken.is_ok() {
                    fixed = Some(way);
                }
                assert_eq!(association.way(), fixed);
            }
        }
    }

    #[test]
    fn a_datagram_is_read_as_it_is_written_and_not_if_it_is_cut() {
        for to in ["203.0.113.5:53", "[2001:db8::1]:53", "name.example:53"] {
            let bytes = datagram(7, to, b"payload");
            let read = UdpDatagram::parse(&bytes).expect("it is whole");
            assert_eq!((read.id, read.remote.to_string().as_str(), read.payload), (7, to, &b"payload"[..]));
            for length in 0..bytes.len() {
                assert_eq!(UdpDatagram::parse(&bytes[..length]), None);
            }
            let padded = [&bytes[..], b"padding"].concat();
            assert_eq!(UdpDatagram::parse(&padded), Some(read));
        }
        let mut long = datagram(7, "203.0.113.5:53", b"");
        long.resize(65_536, 0);
        assert!(!end_datagram(&mut long, 0), "the length field cannot hold it");
    }
}
