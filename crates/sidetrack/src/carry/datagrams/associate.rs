//! Hops for datagrams. Each hop carries them for as long as a connection to it lives, which passes through the hops before it.
//!
//! A SOCKS hop relays them from a port of its own (RFC 1928 Sec. 7, SOCKS6 draft). A datagram has one header for each such hop,
//! in the hop's version: the first hop takes off the first one and sends the rest to the second hop's relay, as it would send it
//! to a server. A hop of version 6 names each association by an id, which it tells in its connection after the reply.
//!
//! A hop of kind `http` takes them in its connection ([`super::capsules`]), for one destination: the relay of the SOCKS hop
//! behind it, or the server. So only the last such hop counts. The hops before it carry its connection, and see no datagram.

use super::capsules::{self, ToHop};
use super::{Came, Datagrams, Lost, Remote, lost, receive, unbound, with_scratch};
use crate::carry::{Carried, Failure, Order, Stream, Wire, gate, hop_name, hops, resolve};
use crate::reactor::UdpSocket;
use sidetrack_core::association::Dropped;
use sidetrack_core::carrier::{Hop, HopProtocol};
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::socks::v5::udp::{Datagram, HeaderError, put_header};
use sidetrack_core::socks::v6::{UdpDatagram, UdpMessage, begin_datagram, end_datagram};
use sidetrack_sys::udp::batch::Batch;
use sidetrack_sys::{sockopt, udp};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::{Context, Poll};

/// Reads of a hop's connection before other work has its turn. A SOCKS hop has nothing to send there.
const CONTROL_READS: usize = 4;

/// A path through SOCKS hops.
#[derive(Debug)]
struct Through {
    /// How datagrams get to the first SOCKS hop's relay.
    entry: Way,
    /// The header for each hop.
    headers: Vec<Header>,
    /// The relays of the hops after the first.
    further: Vec<Destination>,
    /// The connection to each hop, with the hop's name.
    controls: Vec<(Stream, String)>,
}

/// The header that a hop takes off.
#[derive(Clone, Copy, Debug)]
enum Header {
    V5,
    /// With the id of the association.
    V6(u64),
}

/// How datagrams get to one relay.
#[derive(Debug)]
enum Way {
    /// By a socket that is connected to it.
    Socket(UdpSocket, SocketAddr),
    /// By the connection to a hop of kind `http`.
    Capsules(ToHop),
}

/// Asks each hop to carry datagrams.
///
/// # Errors
/// Fails if a hop cannot be reached or refuses. The failure names the hop.
pub(super) async fn associate(order: &Order<'_>, hops: &[Hop]) -> Result<Box<dyn Datagrams>, Failure> {
    let http = hops.iter().rposition(|hop| hop.protocol.is_http());
    let socks = http.map_or(0, |at| at + 1);
    let mut controls = Vec::with_capacity(hops.len());
    let (mut relays, mut headers) = (Vec::with_capacity(hops.len()), Vec::with_capacity(hops.len()));
    for (index, hop) in hops.iter().enumerate().skip(socks) {
        let name = hop_name(index, hops);
        let mut carried = hops::associate(order, hops, index).await?;
        headers.push(match hop.protocol {
            HopProtocol::Socks6(_) => Header::V6(announced(&mut carried, &name).await?),
            _ => Header::V5,
        });
        let bound = carried.bound.ok_or_else(|| {
            Failure::new(EndReason::HopFailed, format!("{name}: it did not say where it relays datagrams"))
        })?;
        let peer = if index == 0 { carried.stream.tcp().and_then(sockopt::peer_address).ok() } else { None };
        relays.push(relay(bound, hop, peer));
        controls.push((carried.stream, name));
    }
    let mut relays = relays.into_iter();
    let entry = match (http, relays.next()) {
        (Some(at), None) => return Ok(Box::new(capsules::open(order, hops, at, &order.destination).await?)),
        (Some(at), Some(first)) => Way::Capsules(capsules::open(order, hops, at, &first).await?),
        (None, Some(first)) => {
            let opened = open(order, &first).await;
            let (socket, relay) = opened.map_err(|failure| Failure {
                detail: format!("{}: its relay: {}", hop_name(0, hops), failure.detail),
                ..failure
            })?;
            Way::Socket(socket, relay)
        }
        (None, None) => return Err(Failure::new(EndReason::Internal, "a carrier without hops")),
    };
    let further = relays.collect();
    Ok(Box::new(Through { entry, headers, further, controls }))
}

/// Reads the message in which a hop of version 6 announces the association. Returns its id.
async fn announced(carried: &mut Carried, name: &str) -> Result<u64, Failure> {
    let failed = |why: String| Failure::new(EndReason::HopFailed, format!("{name}: {why}"));
    let mut came = std::mem::take(&mut carried.early);
    loop {
        match UdpMessage::decode_stream(&came) {
            Ok(Some((UdpMessage::Init { id }, _))) => return Ok(id),
            Ok(Some(_)) => return Err(failed("it did not announce the association first".to_owned())),
            Ok(None) => {}
            Err(error) => return Err(failed(error.to_string())),
        }
        let mut buffer = [0; 64];
        let read = poll_fn(|cx| carried.stream.poll_recv(cx, &mut buffer)).await;
        match read.map_err(|error| failed(format!("waiting for the association: {error}")))? {
            0 => return Err(failed("it has ended the association".to_owned())),
            count => came.extend_from_slice(&buffer[..count]),
        }
    }
}

/// Returns where a hop relays datagrams. A hop that does not name an address means the one that it was reached at.
fn relay(bound: Destination, hop: &Hop, peer: Option<SocketAddr>) -> Destination {
    match bound.host {
        Host::Ip(ip) if ip.is_unspecified() => {
            let host =
                peer.map_or_else(|| hop.address.host.clone(), |peer| Host::Ip(peer.ip().to_canonical()));
            Destination { host, ..bound }
        }
        _ => bound,
    }
}

async fn open(order: &Order<'_>, relay: &Destination) -> Result<(UdpSocket, SocketAddr), Failure> {
    let addresses = resolve(relay).await?;
    let mut first = None;
    for to in gate::configured(addresses) {
        let opened = || -> std::io::Result<UdpSocket> {
            let socket = unbound(order.dialing, to.address())?;
            udp::batch::receive_trains(&socket);
            gate::start_datagrams(&socket, to)?;
            UdpSocket::new(socket.into())
        };
        match opened() {
            Ok(socket) => return Ok((socket, to.address())),
            Err(error) => drop(first.get_or_insert(super::failure(&error, to.address()))),
        }
    }
    Err(first.unwrap_or_else(|| Failure::new(EndReason::Unreachable, "no address to try")))
}

/// Longest payload of UDP over IPv4, in bytes.
const LONGEST_V4: usize = 65_507;
/// The same over IPv6.
const LONGEST_V6: usize = 65_527;

impl Through {
    /// Whether a hop has ended its connection.
    fn ended(&mut self, cx: &mut Context<'_>) -> Option<Failure> {
        for (stream, name) in &mut self.controls {
            for _ in 0..CONTROL_READS {
                let mut buffer = [0; 512];
                let why = match stream.poll_recv(cx, &mut buffer) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(0)) => "it has ended the association".to_owned(),
                    Poll::Ready(Ok(_)) => continue,
                    Poll::Ready(Err(error)) => format!("it has ended the association: {error}"),
                };
                return Some(Failure::new(EndReason::HopFailed, format!("{name}: {why}")));
            }
        }
        None
    }
}

impl Through {
    /// Sends a datagram behind the headers of all hops, which are written into `scratch`.
    fn send_with(
        &mut self,
        (scratch, begun): (&mut Vec<u8>, &mut Vec<usize>),
        to: &Remote,
        payload: &[u8],
    ) -> Result<(), Lost> {
        let Self { headers, further, .. } = self;
        let last = to.destination();
        for (header, to) in headers.iter().zip(further.iter().chain([&last])) {
            match header {
                Header::V5 => put_header(scratch, to),
                Header::V6(id) => begun.push(begin_datagram(scratch, *id, to)),
            }
        }
        scratch.extend_from_slice(payload);
        let longest = match &self.entry {
            Way::Socket(_, SocketAddr::V6(_)) => LONGEST_V6,
            _ => LONGEST_V4,
        };
        let fits_bytes = longest.saturating_sub(scratch.len() - payload.len());
        if !begun.iter().all(|start| end_datagram(scratch, *start)) {
            let failure = Failure::new(EndReason::Unreachable, "the datagram is too long for its headers");
            return Err(Lost { why: Dropped::TooLong, failure, fits_bytes: Some(fits_bytes) });
        }
        match &mut self.entry {
            Way::Socket(socket, relay) => {
                let fits_bytes = Some(fits_bytes);
                let sent = socket.send_one(scratch, None);
                sent.map_err(|error| Lost { fits_bytes, ..lost(&error, *relay) })
            }
            Way::Capsules(capsules) => capsules.send(scratch),
        }
    }
}

impl Datagrams for Through {
    fn send(&mut self, to: &Remote, payload: &[u8]) -> Result<(), Lost> {
        with_scratch(|scratch, begun| self.send_with((scratch, begun), to, payload))
    }

    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        take: &mut dyn FnMut(Came<'_>),
    ) -> Poll<Result<(), Failure>> {
        if let Some(failure) = self.ended(cx) {
            return Poll::Ready(Err(failure));
        }
        let Self { entry, headers, further, .. } = self;
        let (socket, relay) = match entry {
            Way::Socket(socket, relay) => (socket, relay),
            Way::Capsules(capsules) => {
                return capsules
                    .poll_receive(cx, &mut |datagram| take(unwrapped(datagram, headers, further)));
            }
        };
        let ready = receive(socket, cx, batch, |came| match came {
            Ok((batch, count)) => {
                for datagram in (0..count).flat_map(|at| batch.datagrams(at)) {
                    take(unwrapped(datagram, headers, further));
                }
            }
            // It is about the first hop's relay, so about all destinations. Nothing ends by it: the hop's connection tells.
            Err(error) => take(Came::Error { to: None, failure: super::failure(&error, *relay), said: None }),
        });
        ready.map(Ok)
    }
}

/// Takes off the headers of all hops.
fn unwrapped<'a>(mut datagram: &'a [u8], headers: &[Header], further: &[Destination]) -> Came<'a> {
    let mut sender = None;
    for (index, header) in headers.iter().enumerate() {
        let (remote, inner) = match header.taken_off(datagram) {
            Ok(taken) => taken,
            Err(came) => return came,
        };
        datagram = inner;
        match further.get(index) {
            Some(relay) if !is_from(&remote, relay) => return Came::Dropped(Dropped::Filtered),
            Some(_) => {}
            None => sender = remote.socket_addr(),
        }
    }
    match sender {
        Some(from) => Came::Datagram { from: Some(sockopt::canonical(from)), payload: datagram },
        None => Came::Dropped(Dropped::Malformed),
    }
}

impl Header {
    /// Takes the header off a datagram: returns the sender, as the hop saw it, and the rest.
    fn taken_off(self, datagram: &[u8]) -> Result<(Destination, &[u8]), Came<'_>> {
        match self {
            Self::V5 => {
                let Datagram { remote, payload } = Datagram::parse(datagram).map_err(dropped)?;
                Ok((remote, payload))
            }
            Self::V6(id) => match UdpDatagram::parse(datagram) {
                Some(UdpDatagram { id: of, remote, payload }) if of == id => Ok((remote, payload)),
                Some(_) => Err(Came::Dropped(Dropped::Unknown)),
                None => Err(Came::Dropped(Dropped::Malformed)),
            },
        }
    }
}

const fn dropped<'a>(error: HeaderError) -> Came<'a> {
    Came::Dropped(match error {
        HeaderError::Fragment(_) => Dropped::Fragment,
        HeaderError::Short | HeaderError::Address(_) => Dropped::Malformed,
    })
}

/// Whether a datagram that a hop has received is of the next hop's relay. The address of a name is known to the hop alone.
fn is_from(remote: &Destination, relay: &Destination) -> bool {
    remote.port == relay.port && (matches!(relay.host, Host::Name(_)) || remote.host == relay.host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(text: &str) -> Destination {
        text.parse().expect("a destination")
    }

    #[test]
    fn each_header_is_checked_against_its_hop() {
        let further = [to("192.0.2.2:1081"), to("hop.example:1082")];
        for headers in [[Header::V5; 3], [Header::V6(7), Header::V5, Header::V6(9)]] {
            let wrap = |all: &[&str], payload: &[u8]| {
                let (mut bytes, mut begun) = (Vec::new(), Vec::new());
                for (header, text) in headers.iter().zip(all) {
                    match header {
                        Header::V5 => put_header(&mut bytes, &to(text)),
                        Header::V6(id) => begun.push(begin_datagram(&mut bytes, *id, &to(text))),
                    }
                }
                bytes.extend_from_slice(payload);
                assert!(begun.iter().all(|start| end_datagram(&mut bytes, *start)));
                bytes
            };
            let good = wrap(&["192.0.2.2:1081", "198.51.100.9:1082", "203.0.113.5:53"], b"answer");
            let read = |bytes| unwrapped(bytes, &headers, &further);
            let Came::Datagram { from, payload } = read(&good) else { panic!("it is whole") };
            assert_eq!((from, payload), ("203.0.113.5:53".parse().ok(), &b"answer"[..]));
            let forged = wrap(&["192.0.2.66:1081", "198.51.100.9:1082", "203.0.113.5:53"], b"answer");
            assert!(matches!(read(&forged), Came::Dropped(Dropped::Filtered)));
            let named = wrap(&["192.0.2.2:1081", "198.51.100.9:1082", "server.example:53"], b"");
            assert!(matches!(read(&named), Came::Dropped(Dropped::Malformed)));
            for length in 0..good.len() - b"answer".len() {
                assert!(matches!(read(&good[..length]), Came::Dropped(Dropped::Malformed)));
            }
            let mut other = good.clone();
            match headers[0] {
                Header::V5 => other[2] = 1,
                Header::V6(_) => other[11] = 1,
            }
            assert!(matches!(read(&other), Came::Dropped(Dropped::Fragment | Dropped::Unknown)));
        }
    }

    #[test]
    fn a_hop_that_names_no_address_relays_where_it_was_reached() {
        let hop: Hop = "socks5://hop.example:1080".parse().expect("a hop");
        let peer = "192.0.2.7:1080".parse().expect("an address");
        assert_eq!(relay(to("0.0.0.0:4000"), &hop, Some(peer)), to("192.0.2.7:4000"));
        assert_eq!(relay(to("0.0.0.0:4000"), &hop, None), to("hop.example:4000"));
        assert_eq!(relay(to("192.0.2.9:4000"), &hop, Some(peer)), to("192.0.2.9:4000"));
    }
}
