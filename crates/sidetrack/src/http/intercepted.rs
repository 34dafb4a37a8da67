//! Redirected connections that are read as HTTP: plain requests to port 80, and TLS that is intercepted. Every other
//! connection is forwarded unchanged, with the bytes that were read.

use super::Proxy;
use super::connection::Connection;
use super::open::{Inside, Opened};
use crate::carry::Client;
use crate::intercept::{Catches, Listening, redirect};
use crate::reactor::timeout_at;
use crate::session::{Admitted, Entry, Passage, carry_on, keep};
use crate::worker::{CROWDED, Place, Worker};
use sidetrack_core::flow::{Destination, EndReason, Side};
use sidetrack_core::http::head::{Head, request_head};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The port of plain HTTP, where the client speaks first.
const HTTP_PORT: u16 = 80;

/// Serves one accepted connection to its end.
pub(super) async fn intercepted(
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    proxy: Arc<Proxy>,
    Admitted { client, peer, admission }: Admitted,
) {
    let passage = Passage {
        worker: worker.clone(),
        listening: listening.clone(),
        peer,
        connect: None,
        held: None,
        relays: None,
    };
    let admission = Arc::new(admission);
    let untouched = match destination(&worker, &listening, &client, peer) {
        Some(to) => {
            let mut connection = Connection::new(worker.clone(), listening, proxy, client, peer);
            connection.admission = Some(admission.clone());
            look(connection, &to, &worker).await
        }
        None => Some((client, Entry::new(&worker))),
    };
    if let Some((client, entry)) = untouched {
        let wired = carry_on(passage, client, entry).await;
        return keep(wired, admission);
    }
    drop(admission);
}

/// The original destination. `None` if it is our own resolver, or if a PROXY protocol header must be read first.
fn destination(
    worker: &Worker,
    listening: &Listening,
    client: &Client,
    peer: SocketAddr,
) -> Option<Destination> {
    if listening.proxy_from.contains(peer.ip()) {
        return None;
    }
    // An error here occurs again in `carry_on`, which records it.
    let to = redirect::original_destination(client.stream.tcp().ok()?, listening, &worker.clock).ok()?;
    let is_question =
        matches!(&listening.catches, Catches::Run(run) if to.socket_addr() == Some(run.resolver));
    (!is_question).then_some(to)
}

/// Inspects a connection; returns it if it is to be forwarded unchanged.
async fn look(mut connection: Connection, to: &Destination, worker: &Arc<Worker>) -> Option<(Client, Entry)> {
    let tap = connection.proxy.tap.clone().filter(|tap| tap.consider(to).is_ok());
    let is_http = tap.is_none() && to.port == HTTP_PORT;
    if tap.is_none() && !is_http {
        return Some((connection.client(), Entry::new(worker)));
    }
    let (may_open, decided) = connection.may_open(to, None);
    connection.process.clone_from(&decided.flow.process);
    let Some(tap) = tap.filter(|_| may_open) else {
        // Each request is a flow of its own, so the connection gets no entry here.
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
    connection.stream.note_leg(entry.live(), Side::Client);
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

/// The beginning of a connection.
enum Begins {
    /// A request.
    Requests(Connection),
    /// Something else, or nothing within the timeout.
    Otherwise(Connection),
    /// Nothing yet, and its place was needed for new clients.
    Crowded(Connection),
}

/// Reads the beginning of a connection; if it is a request, prepares the connection for requests.
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
    let process = connection.process.take();
    connection.inside = Some(Inside { destination: to.clone(), user: None, process, secure: None });
    Begins::Requests(connection)
}
