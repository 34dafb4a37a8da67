//! UDP ASSOCIATE of a SOCKS client: a socket that relays its datagrams for as long as its connection lives (RFC 1928 Sec. 6
//! and 7).

use super::association::Associations;
use super::clients::{Associated, Clients};
use super::{config, until};
use crate::carry::Client;
use crate::config::SocksDatagrams;
use crate::intercept::Catches;
use crate::reactor::UdpSocket;
use crate::session::{Asking, Entry};
use crate::worker::Worker;
use sidetrack_core::association::Config;
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::socks::ReplyCode;
use sidetrack_core::socks::server::Reply;
use sidetrack_sys::{sockopt, udp};
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

/// One client may have this part of `limits.max_associations` on one connection.
const SHARE: usize = 4;

/// A client that says nothing for this time is asked whether it is still there; TCP answers for it.
const PROBE_AFTER: Duration = Duration::from_secs(60);
/// Time between two such questions.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Questions without an answer after which the client is gone.
const PROBES: u32 = 6;

/// Serves one association until its connection ends.
pub fn relay(asking: Asking) -> Pin<Box<dyn Future<Output = ()>>> {
    Box::pin(serve(asking))
}

async fn serve(asking: Asking) {
    let Asking { worker, listening, mut client, mut handshake, request, peer, mut entry, session } = asking;
    let Catches::Socks(socks) = &listening.catches else { return };
    let Some(relaying) = socks.udp else { return };
    let opened = open(&client, relaying, &worker);
    let (socket, told) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            let _ = handshake.reply(&mut client, Reply::failed(ReplyCode::GeneralFailure)).await;
            entry.end(EndReason::Internal, Some(format!("cannot receive datagrams: {error}")));
            return client.close_after_answer().await;
        }
    };
    if let Err(refused) = handshake.reply(&mut client, Reply::connected(told)).await {
        return entry.end(refused.0.reason, Some(refused.0.detail));
    }
    entry.live().connected(entry.live().age());
    entry.live().set_deadline(None, EndReason::Idle);
    if let Ok(connection) = client.stream.tcp() {
        let _ = sockopt::set_keepalive(connection, PROBE_AFTER, PROBE_INTERVAL, PROBES);
    }
    let max = worker.config().limits.max_associations.div_ceil(SHARE);
    // All are of one client.
    let table = Config { max, per_client: max, ..config(&worker, relaying.filtering) };
    let ip = peer.ip().to_canonical();
    let associated = Associated {
        ip,
        port: port(&request.destination, ip),
        target: None,
        user: request.user.clone(),
        scratch: Vec::new(),
    };
    let clients = Clients::Associated(associated);
    let mut associations = Associations::new(worker.clone(), listening.clone(), socket, clients, table);
    let reason = watch(&mut client, &entry, &mut associations).await;
    associations.close(reason);
    drop(session);
    entry.end(reason, Some(format!("UDP ASSOCIATE, relayed at {told}")));
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

/// Returns the port that the client has to send from. `None`: it does not say, or what it says is about an address that we
/// do not see, behind a translator.
fn port(announced: &Destination, ip: IpAddr) -> Option<u16> {
    let Host::Ip(said) = announced.host else { return None };
    let is_seen = said.is_unspecified() || said.to_canonical() == ip;
    Some(announced.port).filter(|port| *port != 0 && is_seen)
}

/// Relays until the connection ends or the flow is ended. Returns why.
async fn watch(client: &mut Client, entry: &Entry, associations: &mut Associations) -> EndReason {
    loop {
        let at = associations.deadline();
        tokio::select! {
            biased;
            reason = over(client, entry) => return reason,
            () = poll_fn(|cx| associations.poll(cx)) => {}
            () = until(at) => associations.tick(),
        }
    }
}

/// Waits until the client has closed its connection, or the flow is to be ended.
async fn over(client: &mut Client, entry: &Entry) -> EndReason {
    let closed = async {
        loop {
            // Nothing is asked on this connection any more: bytes on it have no meaning.
            drop(client.take_held());
            match client.read_more().await {
                Ok(0) => return EndReason::Ok,
                Ok(_) => {}
                Err(_) => return EndReason::ClientReset,
            }
        }
    };
    let mut closed = pin!(closed);
    poll_fn(|cx| {
        entry.live().set_waker(cx.waker());
        match entry.live().ending() {
            Some(reason) => Poll::Ready(reason),
            None => closed.as_mut().poll(cx),
        }
    })
    .await
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
