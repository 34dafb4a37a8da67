//! Connections that the kernel hands over, read as HTTP where they are: requests in clear to port 80, and TLS where it is
//! opened. Everything else is carried as it is, with the bytes that were read.

use super::Proxy;
use super::connection::Connection;
use super::open::{Inside, Opened};
use crate::intercept::{Catches, Listening, redirect};
use crate::reactor::timeout_at;
use crate::session::{Client, Entry, Passage, carry_on};
use crate::worker::{Admission, CROWDED, Place, Worker};
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::http::head::{Head, request_head};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The port on which servers speak HTTP in clear, and clients first.
const HTTP_PORT: u16 = 80;

/// Serves one accepted connection to its end.
pub async fn intercepted(
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    proxy: Arc<Proxy>,
    client: Client,
    peer: SocketAddr,
    admission: Admission,
) {
    let passage = Passage { worker: worker.clone(), listening: listening.clone(), peer, connect: None };
    let untouched = match destination(&worker, &listening, &client, peer) {
        Some(to) => {
            let connection = Connection::new(worker.clone(), listening, proxy, client, peer);
            look(connection, &to, &worker).await
        }
        None => Some((client, Entry::new(&worker))),
    };
    if let Some((client, entry)) = untouched {
        carry_on(passage, client, entry).await;
    }
    drop(admission);
}

/// Where the client wanted to go; none where that is no server of the world's, or has to be read first.
fn destination(
    worker: &Worker,
    listening: &Listening,
    client: &Client,
    peer: SocketAddr,
) -> Option<Destination> {
    if listening.proxy_from.contains(peer.ip()) {
        return None;
    }
    // What fails here fails again where it is recorded.
    let to = redirect::original_destination(client.stream.tcp().ok()?, listening, &worker.clock).ok()?;
    let is_question =
        matches!(&listening.catches, Catches::Run(run) if to.socket_addr() == Some(run.resolver));
    (!is_question).then_some(to)
}

/// Looks into a connection; gives it back if it is to be carried as it is.
async fn look(connection: Connection, to: &Destination, worker: &Arc<Worker>) -> Option<(Client, Entry)> {
    let tap = connection.proxy.tap.clone().filter(|tap| tap.consider(to).is_ok());
    let is_http = tap.is_none() && to.port == HTTP_PORT;
    if tap.is_none() && !is_http {
        return Some((connection.client(), Entry::new(worker)));
    }
    let (may_open, decided) = connection.may_open(to, None);
    let Some(tap) = tap.filter(|_| may_open) else {
        // Each request is a flow of its own: this one is none.
        if !may_open {
            return Some((connection.client(), Entry::new(worker)));
        }
        return match requests(connection, to).await {
            Begins::Requests(requests) => {
                requests.serve_all().await;
                None
            }
            Begins::Otherwise(same) => Some((same.client(), Entry::new(worker))),
            Begins::Crowded(same) => {
                let mut entry = Entry::new(worker);
                entry.live().decide(decided);
                same.client().reset();
                entry.end(EndReason::Limit, Some(CROWDED.to_owned()));
                None
            }
        };
    };
    let mut entry = Entry::new(worker);
    entry.live().decide(decided);
    match connection.open(&tap, to, None).await {
        Opened::Requests(requests, what) => {
            entry.end(EndReason::Ok, Some(what));
            requests.serve_all().await;
            None
        }
        Opened::Untouched(same, why) => {
            entry.note(why);
            Some((same.client(), entry))
        }
        Opened::Over(reason, detail) => {
            entry.end(reason, Some(detail));
            None
        }
    }
}

/// What a connection begins with.
enum Begins {
    /// A request.
    Requests(Connection),
    /// Something else, or nothing in time.
    Otherwise(Connection),
    /// Nothing yet, when more clients came than may wait.
    Crowded(Connection),
}

/// The connection with what its requests have in common, if it begins with one.
async fn requests(mut connection: Connection, to: &Destination) -> Begins {
    let place = Place::enter(&connection.worker);
    let patience = Duration::from_millis(connection.worker.config().limits.handshake_timeout_ms);
    let deadline = Instant::now() + patience;
    loop {
        match request_head(connection.buffer.data()) {
            Head::Request(_) => break,
            Head::Incomplete => {}
            _ => return Begins::Otherwise(connection),
        }
        let reading = timeout_at(deadline, connection.buffer.fill(&connection.stream));
        match Place::while_kept(Some(&place), reading).await {
            Some(Ok(Ok(1..))) => {}
            Some(_) => return Begins::Otherwise(connection),
            None => return Begins::Crowded(connection),
        }
    }
    connection.inside = Some(Inside { destination: to.clone(), user: None, secure: None });
    Begins::Requests(connection)
}
