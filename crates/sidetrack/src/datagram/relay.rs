//! UDP ASSOCIATE of a SOCKS client: a socket that relays its datagrams for as long as its connection lives (RFC 1928 Sec. 6
//! and 7). A client of version 6 may send them in the connection instead, and is told there what happens to the association.

use super::association::{Associations, LISTENER};
use super::clients::{Associated, Clients};
use super::{ROUNDS, config, until};
use crate::carry::{Client, Failure, Wire};
use crate::config::SocksDatagrams;
use crate::intercept::{Catches, Guest, SharedPort, Taken};
use crate::reactor::UdpSocket;
use crate::session::{Asking, Entry};
use crate::worker::{FlowOfSession, Worker};
use sidetrack_core::association::Config;
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::socks::ReplyCode;
use sidetrack_core::socks::server::{Reply, Version};
use sidetrack_core::socks::v6::{UdpAssociation, UdpMessage};
use sidetrack_sys::{sockopt, udp};
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// One client may have this part of `limits.max_associations` on one connection.
const SHARE: usize = 4;

/// A client that says nothing for this time is asked whether it is still there; TCP answers for it.
const PROBE_AFTER: Duration = Duration::from_secs(60);
/// Time between two such questions.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Questions without an answer after which the client is gone.
const PROBES: u32 = 6;

/// How long a client of version 6 may take for its first datagram. It may send it again until it is told that it has come.
const FIRST_DATAGRAM: Duration = Duration::from_secs(120);

/// Serves one association until its connection ends.
pub fn relay(asking: Asking) -> Pin<Box<dyn Future<Output = ()>>> {
    // Apart: what the beginning needs is gone while the association lives.
    let beginning = Box::pin(begin(asking));
    Box::pin(async move {
        if let Some(relaying) = beginning.await {
            relaying.run().await;
        }
    })
}

/// An association that relays.
struct Relaying {
    client: Client,
    peer: SocketAddr,
    entry: Entry,
    associations: Associations,
    session: Option<FlowOfSession>,
    /// The address that the client was told.
    told: SocketAddr,
}

impl Relaying {
    /// Relays until the association is over.
    async fn run(mut self: Box<Self>) {
        let reason = watch((&mut self.client, self.peer), &self.entry, &mut self.associations).await;
        self.associations.close(reason);
        let Self { mut entry, session, told, .. } = *self;
        drop(session);
        entry.end(reason, Some(format!("UDP ASSOCIATE, relayed at {told}")));
    }
}

/// Opens the association and answers the client. `None`: it was refused.
async fn begin(asking: Asking) -> Option<Box<Relaying>> {
    let Asking { worker, listening, mut client, mut handshake, request, peer, mut entry, session } = asking;
    let Catches::Socks(socks) = &listening.catches else { return None };
    let relaying = socks.udp?;
    // A number that cannot be guessed: it is all that tells the client's datagrams from others.
    let v6 = (request.version == Version::V6)
        .then(|| UdpAssociation::new(u64::from_be_bytes(sidetrack_sys::random::bytes())));
    let ip = peer.ip().to_canonical();
    let guest = Guest {
        ip,
        // The address in a request of version 6 is one of ours.
        port: if v6.is_some() { None } else { port(&request.destination, ip) },
        user: request.user.clone(),
        number: v6.as_ref().map(UdpAssociation::id),
    };
    let opened = match &socks.shared {
        Some(shared) => {
            open_shared(&client, (relaying, listening.address.port()), &worker, (shared, guest.clone()))
        }
        None => open(&client, relaying, &worker)
            .map(|(socket, told)| (socket, told, None))
            .map_err(|error| Failure::new(EndReason::Internal, format!("cannot receive datagrams: {error}"))),
    };
    let (socket, told, seat) = match opened {
        Ok(opened) => opened,
        Err(failure) => {
            let _ = handshake.reply(&mut client, Reply::failed(ReplyCode::GeneralFailure)).await;
            entry.end(failure.reason, Some(failure.detail));
            client.close_after_answer().await;
            return None;
        }
    };
    if let Err(refused) = handshake.reply(&mut client, Reply::connected(told)).await {
        entry.end(refused.0.reason, Some(refused.0.detail));
        return None;
    }
    entry.live().connected(entry.live().age());
    entry.live().set_deadline(None, EndReason::Idle);
    if let Ok(connection) = client.stream.tcp() {
        let _ = sockopt::set_keepalive(connection, PROBE_AFTER, PROBE_INTERVAL, PROBES);
    }
    let max = worker.config().limits.max_associations.div_ceil(SHARE);
    // All are of one client.
    let table = Config { max, per_client: max, ..config(&worker, relaying.filtering) };
    let associated = Associated {
        ip,
        port: guest.port,
        local: client
            .stream
            .local_address()
            .ok()
            .filter(|_| seat.is_some())
            .map(|local| SocketAddr::new(local.ip().to_canonical(), listening.address.port())),
        target: None,
        user: guest.user,
        in_connection: v6.as_ref().map(UdpAssociation::init).unwrap_or_default(),
        v6,
        seat,
    };
    let clients = Clients::Associated(associated);
    let associations = Associations::new(worker.clone(), listening.clone(), socket, clients, table);
    Some(Box::new(Relaying { client, peer, entry, associations, session, told }))
}

/// Opens the socket that relays, on the address that the client has connected to. Returns it with the address that the
/// client is told.
fn open(client: &Client, relaying: SocksDatagrams, worker: &Worker) -> io::Result<(UdpSocket, SocketAddr)> {
    let mut address = sockopt::canonical(client.stream.local_address()?);
    address.set_port(0);
    let socket = udp::bind_family(address)?;
    if let Some(mark) = worker.dialing().mark {
        sockopt::set_mark(&socket, mark)?;
    }
    udp::batch::receive_trains(&socket);
    let bound = socket.local_addr()?;
    let told: IpAddr = relaying.advertise.unwrap_or_else(|| bound.ip());
    Ok((UdpSocket::new(socket)?, SocketAddr::new(told, bound.port())))
}

/// Takes a place at the port that clients share. Returns a socket with what the client is told, and the place.
fn open_shared(
    client: &Client,
    (relaying, port): (SocksDatagrams, u16),
    worker: &Worker,
    (shared, guest): (&Arc<SharedPort>, Guest),
) -> Result<(UdpSocket, SocketAddr, Option<Taken>), Failure> {
    let internal =
        |error: io::Error| Failure::new(EndReason::Internal, format!("cannot receive datagrams: {error}"));
    let mut local = sockopt::canonical(client.stream.local_address().map_err(internal)?);
    local.set_port(port);
    let known = guest.port.map(|port| SocketAddr::new(guest.ip, port));
    let seat = shared.take(guest).map_err(|why| {
        let detail = format!("clients of a shared UDP port are told apart by their address and port: {why}");
        Failure::new(EndReason::Unsupported, detail)
    })?;
    let socket = match known {
        Some(known) => connected(local, known, worker),
        // It hears no sender. The client's first datagram comes to the listener's socket.
        None => {
            udp::bind_family(if local.is_ipv4() { NOBODY_V4 } else { NOBODY_V6 }).and_then(UdpSocket::new)
        }
    };
    let told = SocketAddr::new(relaying.advertise.unwrap_or_else(|| local.ip()), port);
    Ok((socket.map_err(internal)?, told, Some(seat)))
}

/// A free port of loopback.
const NOBODY_V4: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// The same of IPv6.
const NOBODY_V6: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0);

/// Opens a socket on the shared port for the datagrams of this client.
fn connected(local: SocketAddr, client: SocketAddr, worker: &Worker) -> io::Result<UdpSocket> {
    let socket = udp::bind_shared(local)?;
    if let Some(mark) = worker.dialing().mark {
        sockopt::set_mark(&socket, mark)?;
    }
    udp::batch::receive_trains(&socket);
    udp::hear_only(&socket, client)?;
    UdpSocket::new(socket)
}

/// Returns the port that the client has to send from. `None`: it does not say, or what it says is about an address that we
/// do not see, behind a translator.
fn port(announced: &Destination, ip: IpAddr) -> Option<u16> {
    let Host::Ip(said) = announced.host else { return None };
    let is_seen = said.is_unspecified() || said.to_canonical() == ip;
    Some(announced.port).filter(|port| *port != 0 && is_seen)
}

/// Relays until the connection ends or the flow is ended. Returns why.
async fn watch(
    (client, peer): (&mut Client, SocketAddr),
    entry: &Entry,
    associations: &mut Associations,
) -> EndReason {
    let mut connection = Connection { client, peer, came: Vec::new(), deadline: None };
    if matches!(&associations.clients, Clients::Associated(associated) if associated.v6.is_some()) {
        connection.deadline = Some(std::time::Instant::now() + FIRST_DATAGRAM);
    }
    loop {
        let at = [associations.deadline(), connection.deadline].into_iter().flatten().min();
        tokio::select! {
            biased;
            over = poll_fn(|cx| connection.poll(cx, entry, associations)) => {
                if let Some(reason) = over {
                    return reason;
                }
            }
            () = until(at) => {
                associations.tick();
                if connection.is_late(associations) {
                    return EndReason::HandshakeTimeout;
                }
            }
        }
    }
}

/// The client's connection, beside its datagrams.
struct Connection<'a> {
    client: &'a mut Client,
    peer: SocketAddr,
    /// Bytes of a message that is not whole (version 6).
    came: Vec<u8>,
    /// When the first datagram must have come (version 6).
    deadline: Option<std::time::Instant>,
}

impl Associations {
    /// Gives the client a socket of its own on the shared port, unless it has one.
    fn use_socket_for(&mut self, client: SocketAddr) {
        let has_one =
            self.socket.local_address().is_ok_and(|own| own.port() == self.listening.address.port());
        let Clients::Associated(Associated { local: Some(local), port: Some(port), .. }) = &self.clients
        else {
            return;
        };
        if has_one || *port != client.port() {
            return;
        }
        match connected(*local, client, &self.worker) {
            Ok(socket) => {
                self.socket = socket;
                self.ready.notify(LISTENER);
            }
            // Its datagrams still come by the listener's socket, and answers cannot leave.
            Err(error) => tracing::warn!(%error, "cannot open a socket on the shared UDP port"),
        }
    }
}

impl Connection<'_> {
    /// Whether the client has asked and then sent nothing for too long.
    fn is_late(&mut self, associations: &Associations) -> bool {
        let is_due = self.deadline.is_some_and(|deadline| deadline <= std::time::Instant::now());
        let Clients::Associated(associated) = &associations.clients else { return false };
        if is_due {
            self.deadline = None;
        }
        is_due && associated.v6.as_ref().is_some_and(|association| association.way().is_none())
    }

    /// Moves datagrams and messages. Ready: the relay is over for this reason, or there was work, which may have changed the
    /// deadline.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        entry: &Entry,
        associations: &mut Associations,
    ) -> Poll<Option<EndReason>> {
        entry.live().set_waker(cx.waker());
        if let Some(reason) = entry.live().ending() {
            return Poll::Ready(Some(reason));
        }
        let has_read = match self.poll_read(cx, associations) {
            Ok(has_read) => has_read,
            Err(reason) => return Poll::Ready(Some(reason)),
        };
        let has_come = poll_shared(cx, associations);
        let has_worked = associations.poll(cx).is_ready() || has_read || has_come;
        match self.poll_write(cx, associations) {
            Err(reason) => Poll::Ready(Some(reason)),
            Ok(()) if has_worked => Poll::Ready(None),
            Ok(()) => Poll::Pending,
        }
    }

    /// Reads what the client sends in the connection. In version 5 its bytes have no meaning. Returns whether there was
    /// something.
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        associations: &mut Associations,
    ) -> Result<bool, EndReason> {
        for round in 0..ROUNDS {
            let mut buffer = [0; 4096];
            let mut read = &buffer[..0];
            let held = self.client.take_held();
            if held.is_empty() {
                match self.client.stream.poll_recv(cx, &mut buffer) {
                    Poll::Pending => return Ok(round > 0),
                    Poll::Ready(Ok(0)) => return Err(EndReason::Ok),
                    Poll::Ready(Ok(count)) => read = &buffer[..count],
                    Poll::Ready(Err(_)) => return Err(EndReason::ClientReset),
                }
            }
            let is_6 =
                matches!(&associations.clients, Clients::Associated(associated) if associated.v6.is_some());
            if is_6 && !self.take(&[&held, read].concat(), associations) {
                return Err(EndReason::BadRequest);
            }
        }
        Ok(true)
    }

    /// Takes the messages in these bytes. Returns false if they are none.
    fn take(&mut self, bytes: &[u8], associations: &mut Associations) -> bool {
        self.came.extend_from_slice(bytes);
        let mut used = 0;
        loop {
            match UdpMessage::decode_stream(&self.came[used..]) {
                Ok(Some((message, length))) => {
                    if matches!(message, UdpMessage::Datagram { .. }) {
                        associations.take_from_connection(self.peer, &self.came[used..used + length]);
                    }
                    used += length;
                }
                Ok(None) => {
                    self.came.drain(..used);
                    return true;
                }
                Err(_) => return false,
            }
        }
    }

    /// Sends what waits for the client.
    fn poll_write(&mut self, cx: &mut Context<'_>, associations: &mut Associations) -> Result<(), EndReason> {
        let Clients::Associated(associated) = &mut associations.clients else { return Ok(()) };
        let mut sent = 0;
        while sent < associated.in_connection.len() {
            match self.client.stream.poll_send(cx, &associated.in_connection[sent..]) {
                Poll::Pending => break,
                Poll::Ready(Ok(count)) => sent += count,
                Poll::Ready(Err(_)) => return Err(EndReason::ClientReset),
            }
        }
        associated.in_connection.drain(..sent);
        if associated.in_connection.is_empty() {
            associated.in_connection = Vec::new();
        }
        Ok(())
    }
}

/// Takes what has come to the port that clients share. The first datagram tells the client's port, and from then on the kernel
/// gives its datagrams to a socket of its own. Returns whether there was something.
fn poll_shared(cx: &Context<'_>, associations: &mut Associations) -> bool {
    let Clients::Associated(associated) = &associations.clients else { return false };
    let Some(seat) = &associated.seat else { return false };
    let came = seat.poll(cx);
    for (from, datagram) in &came {
        associations.take_from_shared(*from, datagram);
        associations.use_socket_for(*from);
    }
    !came.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_counts_if_it_is_about_the_address_that_we_see() {
        let seen = "192.0.2.1".parse().expect("an address");
        let port = |text: &str| {
            let address = text.parse::<SocketAddr>().map(Destination::from);
            port(&address.unwrap_or_else(|_| text.parse().expect("a destination")), seen)
        };
        assert_eq!(port("0.0.0.0:0"), None);
        assert_eq!(port("0.0.0.0:4000"), Some(4000));
        assert_eq!(port("192.0.2.1:4000"), Some(4000));
        assert_eq!(port("[::ffff:192.0.2.1]:4000"), Some(4000));
        assert_eq!(port("10.0.0.7:4000"), None, "behind a translator");
        assert_eq!(port("host.example:4000"), None);
    }
}
