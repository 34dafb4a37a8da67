//! Hops for datagrams. Each hop carries them for as long as a connection to it lives, which passes through the hops before it.
//!
//! A SOCKS hop relays them from a port of its own (RFC 1928 Sec. 7). A datagram has one header for each such hop: the first hop
//! takes off the first one and sends the rest to the second hop's relay, as it would send it to a server.
//!
//! A hop of kind `http` takes them in its connection ([`super::capsules`]), for one destination: the relay of the SOCKS hop
//! behind it, or the server. So only the last such hop counts. The hops before it carry its connection, and see no datagram.

use super::capsules::{self, ToHop};
use super::{Came, Datagrams, Lost, Remote, lost, receive, unbound};
use crate::carry::{Failure, Order, Stream, Wire, gate, hop_name, hops, resolve};
use crate::reactor::UdpSocket;
use sidetrack_core::association::Dropped;
use sidetrack_core::carrier::{Hop, HopProtocol};
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::socks::v5::udp::{Datagram, HeaderError, put_header};
use sidetrack_sys::udp::batch::Batch;
use sidetrack_sys::{sockopt, udp};
use std::net::SocketAddr;
use std::task::{Context, Poll};

/// Reads of a hop's connection before other work has its turn. A SOCKS hop has nothing to send there.
const CONTROL_READS: usize = 4;

/// A path through SOCKS hops.
#[derive(Debug)]
struct Through {
    /// How datagrams get to the first SOCKS hop's relay.
    entry: Way,
    /// The relays of the hops after it.
    further: Vec<Destination>,
    /// The connection to each hop, with the hop's name.
    controls: Vec<(Stream, String)>,
    scratch: Vec<u8>,
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
    let http = hops.iter().rposition(|hop| hop.protocol == HopProtocol::Http);
    let socks = http.map_or(0, |at| at + 1);
    let mut controls = Vec::with_capacity(hops.len());
    let mut relays = Vec::with_capacity(hops.len());
    for (index, hop) in hops.iter().enumerate().skip(socks) {
        let name = hop_name(index, hops);
        let carried = hops::associate(order, hops, index).await?;
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
    Ok(Box::new(Through { entry, further: relays.collect(), controls, scratch: Vec::new() }))
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

impl Datagrams for Through {
    fn send(&mut self, to: &Remote, payload: &[u8]) -> Result<(), Lost> {
        self.scratch.clear();
        for relay in &self.further {
            put_header(&mut self.scratch, relay);
        }
        put_header(&mut self.scratch, &to.destination());
        self.scratch.extend_from_slice(payload);
        match &mut self.entry {
            Way::Socket(socket, relay) => {
                socket.send_one(&self.scratch, None).map_err(|error| lost(&error, *relay))
            }
            Way::Capsules(capsules) => capsules.send(&self.scratch),
        }
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
        let Self { entry, further, .. } = self;
        let (socket, relay) = match entry {
            Way::Socket(socket, relay) => (socket, relay),
            Way::Capsules(capsules) => {
                return capsules.poll_receive(cx, &mut |datagram| take(unwrapped(datagram, further)));
            }
        };
        let ready = receive(socket, cx, batch, |came| match came {
            Ok((batch, count)) => {
                for datagram in (0..count).flat_map(|at| batch.datagrams(at)) {
                    take(unwrapped(datagram, further));
                }
            }
            // It is about the first hop's relay, so about all destinations. Nothing ends by it: the hop's connection tells.
            Err(error) => take(Came::Error { to: None, failure: super::failure(&error, *relay) }),
        });
        ready.map(Ok)
    }
}

/// Takes off the headers of all hops.
fn unwrapped<'a>(mut datagram: &'a [u8], further: &[Destination]) -> Came<'a> {
    for relay in further {
        match Datagram::parse(datagram) {
            Ok(inner) if is_from(&inner.remote, relay) => datagram = inner.payload,
            Ok(_) => return Came::Dropped(Dropped::Filtered),
            Err(error) => return dropped(error),
        }
    }
    match Datagram::parse(datagram) {
        Ok(Datagram { remote, payload }) => match remote.socket_addr() {
            Some(from) => Came::Datagram { from: Some(sockopt::canonical(from)), payload },
            None => Came::Dropped(Dropped::Malformed),
        },
        Err(error) => dropped(error),
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
        let wrap = |all: &[&str], payload: &[u8]| {
            let mut bytes = Vec::new();
            all.iter().for_each(|text| put_header(&mut bytes, &to(text)));
            bytes.extend_from_slice(payload);
            bytes
        };
        let good = wrap(&["192.0.2.2:1081", "198.51.100.9:1082", "203.0.113.5:53"], b"answer");
        let Came::Datagram { from, payload } = unwrapped(&good, &further) else { panic!("it is whole") };
        assert_eq!((from, payload), ("203.0.113.5:53".parse().ok(), &b"answer"[..]));
        let forged = wrap(&["192.0.2.66:1081", "198.51.100.9:1082", "203.0.113.5:53"], b"answer");
        assert!(matches!(unwrapped(&forged, &further), Came::Dropped(Dropped::Filtered)));
        let named = wrap(&["192.0.2.2:1081", "198.51.100.9:1082", "server.example:53"], b"");
        assert!(matches!(unwrapped(&named, &further), Came::Dropped(Dropped::Malformed)));
        for length in 0..good.len() - b"answer".len() {
            assert!(matches!(unwrapped(&good[..length], &further), Came::Dropped(Dropped::Malformed)));
        }
        let mut fragment = good;
        fragment[2] = 1;
        assert!(matches!(unwrapped(&fragment, &further), Came::Dropped(Dropped::Fragment)));
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
