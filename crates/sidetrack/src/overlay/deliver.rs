//! The delivering end of sessions: checks a flow that another node caught, and connects it to its destination.
//!
//! A flow is delivered if an entry of `[[overlay.deliver]]` allows its address and no deny rule of this node matches it. Both
//! are checked with the address that the name resolved to, and exactly that address is dialled.

use super::bench;
use super::circuit::refuse;
use super::delivered::Delivered;
use super::endpoint::{self, Ended, Endpoint, Lane, Path};
use super::moved::{End, MovedSession, Rest};
use super::packets;
use super::sessions::Resumed;
use super::shared::Shared;
use super::stream::Stream;
use super::udp;
use crate::carry::{Admitted, Failure, gate, resolve};
use crate::config::Deliver;
use sidetrack_core::flow::{Destination, EndReason, Flow, Intercept, Process, Protocol};
use sidetrack_core::overlay::frame::{Open, Refusal, Resume, SessionId};
use sidetrack_core::overlay::reserved::Reserved;
use sidetrack_core::overlay::session::Attempt;
use sidetrack_core::overlay::{Keys, NodeId};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Time to resolve and connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The name by which rules know delivered flows (`listener`).
const LISTENER: &str = "overlay";

/// Serves the opening of a session that ends at this node.
pub(super) async fn deliver(shared: Arc<Shared>, stream: Stream, from: NodeId, open: Box<Open>) {
    let origin = open.path.first();
    // The signature first: the rules below decide by the origin, which a relay could forge.
    if !shared.identity.verify(origin, &open.signed_bytes(), &open.signature) {
        return refuse(
            &shared,
            stream,
            Refusal::BadRequest,
            "the opening is not signed by the node that asks",
        )
        .await;
    }
    let Some(number) = shared.link(from) else { return };
    if let Some(resume) = open.resume {
        return go_on(&shared, stream, (from, number), &open, resume).await;
    }
    let from_name = shared.identity.name(origin);
    // Packets and measurements end inside the overlay: they are not flows.
    let is_flow = Reserved::of(&open.destination).is_none();
    let asked = asked(&from_name, &open);
    let mut record = is_flow.then(|| Delivered::begin(&shared, asked));
    let counted = shared.sessions.count();
    let application = match &counted {
        Some(_) => tokio::select! {
            application = destination(&shared, origin, &open) => application,
            // The other end asks again when this node has links again.
            () = shared.sessions.all_leave() => return record.into_iter().for_each(Delivered::forget),
        },
        None => Err(Failure::new(EndReason::Limit, "this node has too many sessions")),
    };
    let application = match application {
        Ok(application) => application,
        Err(failure) => {
            if let Some(record) = &mut record {
                record.failed(&failure);
            }
            let Failure { reason, detail, .. } = failure;
            return refuse(&shared, stream, refusal(reason), detail).await;
        }
    };
    if let Some(record) = &record {
        record.connected(application.peer_addr().ok());
    }
    let (sender, paths) = mpsc::channel(1);
    if !shared.sessions.enter(open.session, origin, sender.clone()) {
        let detail = "there was a session of this number before";
        if let Some(record) = &mut record {
            record.failed(&Failure::new(EndReason::BadRequest, detail));
        }
        return refuse(&shared, stream, Refusal::BadRequest, detail).await;
    }
    shared.counters.sessions_delivered.fetch_add(1, Relaxed);
    let peer = (0, u64::from(open.window_bytes));
    let _ = sender.send(endpoint::path(&shared, stream, (from, number), peer, Some(open.session))).await;
    drop(sender);
    let live = record.as_ref().map(|record| record.live().clone());
    let end = Endpoint::new(shared.clone(), application, paths, None).of_flow(live);
    let (destination, client) = (&open.destination, &open.client);
    tracing::debug!(from = %from_name, %destination, %client, "session begins");
    ended(&shared, (open.session, origin), end.run().await, record);
}

/// Continues a session that began in another process of this node. It waits for a path.
pub(super) async fn deliver_again(shared: Arc<Shared>, record: Box<Delivered>, rest: Rest) {
    let Rest { id, peer, attempts, state, socket, .. } = rest;
    let (sender, paths) = mpsc::channel(1);
    shared.sessions.enter_again((id, peer), sender, &attempts);
    let counted = shared.sessions.count();
    let live = Some(record.live().clone());
    let end = TcpStream::from_std(socket).map_err(anyhow::Error::from).and_then(|application| {
        anyhow::ensure!(counted.is_some(), "this node has too many sessions");
        Ok(Endpoint::new(shared.clone(), application, paths, None).of_flow(live).with_state(&state)?)
    });
    match end {
        Ok(end) => ended(&shared, (id, peer), end.run().await, Some(*record)),
        Err(error) => {
            tracing::error!("a session of the other process is lost: {error:#}");
            shared.sessions.leave(id);
        }
    }
}

/// The task of a delivered session has ended.
fn ended(shared: &Shared, (session, origin): (SessionId, NodeId), ended: Ended, record: Option<Delivered>) {
    let ended = match ended {
        Ended::Over(ended) => ended,
        Ended::Left(state, socket) => {
            // It stays among the live ones: its other end must not hear that it is over. What ends inside the overlay has no
            // record, and begins anew.
            if let Some(record) = record {
                let (attempts, end) = (shared.sessions.attempts(session), End::Far(Box::new(record)));
                let moved =
                    MovedSession { id: session, peer: origin, attempts, end, spread: None, state, socket };
                shared.sessions.put_moved(moved);
            }
            return;
        }
    };
    shared.sessions.leave(session);
    if let Some(mut record) = record {
        record.ended(ended);
    }
    tracing::debug!(from = %shared.identity.name(origin), ?ended, "session delivered");
}

/// Gives an open session a new path over this link.
async fn go_on(shared: &Arc<Shared>, stream: Stream, link: (NodeId, u64), open: &Open, resume: Resume) {
    let Resume { attempt, next } = resume;
    let Some(named) = Attempt::from_bits(attempt) else {
        return refuse(shared, stream, Refusal::BadRequest, "there is no such path of a session").await;
    };
    match shared.sessions.resume_when_here(open.session, open.path.first(), named).await {
        Resumed::On(paths) => {
            shared.counters.sessions_resumed.fetch_add(1, Relaxed);
            let peer = (next, next.saturating_add(u64::from(open.window_bytes)));
            let lane = Lane { number: named.path, mode: named.mode, serial: attempt.into() };
            let path = endpoint::path(shared, stream, link, peer, Some(open.session));
            let path = Path { lane, ..path };
            // If the session ends at this moment, the path ends with it.
            let _ = paths.send(path).await;
        }
        // The session already has the path of a later attempt, which this one would replace.
        Resumed::Overtaken => tracing::debug!(attempt, "an attempt to go on came too late"),
        Resumed::Unknown => {
            let detail = "the session is over, or never was";
            refuse(shared, stream, Refusal::UnknownSession, detail).await;
        }
    }
}

/// Returns a connection to what the session leads to: our own handler of packets or measurements, or the destination.
async fn destination(shared: &Arc<Shared>, origin: NodeId, open: &Open) -> Result<TcpStream, Failure> {
    let Some(reserved) = Reserved::of(&open.destination) else {
        return connect(shared, origin, open).await;
    };
    let broken = |error: io::Error| Failure::new(EndReason::Limit, format!("a socket for packets: {error}"));
    let (near, leg) = super::pair().map_err(broken)?;
    let near = TcpStream::from_std(near).map_err(broken)?;
    match reserved {
        Reserved::Packets => {
            let Some(interception) = shared.packets.clone() else {
                return Err(Failure::new(EndReason::PolicyDenied, "this node has no [[overlay.packets]]"));
            };
            tokio::spawn(packets::receive(shared.clone(), interception, origin, open.session, near));
        }
        Reserved::Udp => {
            if shared.deliver.is_empty() {
                let detail = "this node delivers nothing: it has no [[overlay.deliver]]";
                return Err(Failure::new(EndReason::PolicyDenied, detail));
            }
            tokio::spawn(udp::receive(shared.clone(), origin, open.session, near));
        }
        Reserved::Bench => {
            let Ok(leave) = shared.benches.clone().try_acquire_owned() else {
                return Err(Failure::new(EndReason::Limit, "this node is measured by others"));
            };
            tokio::spawn(bench::sink(near, leave));
        }
    }
    TcpStream::from_std(leg).map_err(broken)
}

/// Connects to the destination, if `[[overlay.deliver]]` and the rules allow one of its addresses.
async fn connect(shared: &Shared, origin: NodeId, open: &Open) -> Result<TcpStream, Failure> {
    let connected = timeout(CONNECT_TIMEOUT, async {
        let addresses = resolve(&open.destination).await?;
        let name = shared.identity.name(origin);
        let allowed = admitted(shared, &name, &asked(&name, open), addresses).inspect_err(|Failure { detail, .. }| {
            tracing::info!(
                from = %name, destination = %open.destination, client = %open.client, "delivery denied: {detail}"
            );
        })?;
        first_that_answers(shared, &allowed).await
    });
    let late = |_| {
        let detail = format!("{} did not answer in time", open.destination);
        Failure::new(EndReason::ConnectTimeout, detail)
    };
    connected.await.map_err(late)?
}

/// Returns the flow that an opening asks for.
fn asked(from: &str, open: &Open) -> Flow {
    let flow = flow(Protocol::Tcp, from, open.client, open.destination.clone());
    Flow { host: open.host.clone(), ..flow }
}

/// Returns the addresses to which the flow may be delivered, in their order.
///
/// # Errors
/// No entry of `[[overlay.deliver]]` allows one of them, or rules deny all of them.
pub(super) fn admitted(
    shared: &Shared,
    from: &str,
    flow: &Flow,
    addresses: Vec<SocketAddr>,
) -> Result<Vec<Admitted>, Failure> {
    // Networks of `never_dial` that no entry names were removed from the entries when the configuration was read.
    let entered = addresses.into_iter().filter(|to| is_allowed(&shared.deliver, from, *to)).collect();
    let admitted = gate::delivered(&shared.config.load().policy, flow, entered)?;
    if admitted.is_empty() {
        let detail = format!("[[overlay.deliver]] lets {from} reach nothing at {}", flow.orig_dst);
        return Err(Failure::new(EndReason::PolicyDenied, detail));
    }
    Ok(admitted)
}

/// Returns a flow of another node in the form that rules see.
pub(super) fn flow(protocol: Protocol, from: &str, client: SocketAddr, to: Destination) -> Flow {
    Flow {
        protocol,
        intercept: Intercept::Tunnel,
        listener: LISTENER.into(),
        client,
        orig_dst: to,
        host: None,
        // Its process runs on another host, so rules that ask for a local process do not match.
        process: Some(Process::default()),
        user: Some(from.to_owned()),
    }
}

/// Connects to the first of these addresses that answers; tries one after the other.
async fn first_that_answers(shared: &Shared, addresses: &[Admitted]) -> Result<TcpStream, Failure> {
    let mut last = Failure::new(EndReason::Unreachable, "no address to try");
    for admitted in addresses {
        let to = admitted.address();
        if shared.dialing.load().is_own(to) {
            return Err(Failure::new(EndReason::Loop, format!("{to} is a listener of this node itself")));
        }
        last = match shared.connect(*admitted, None, false).await {
            Ok(application) => return Ok(application),
            Err(error) => Failure::new(unanswered(&error), format!("connect to {to}: {error}")),
        };
    }
    Err(last)
}

fn unanswered(error: &io::Error) -> EndReason {
    match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => EndReason::Refused,
        ErrorKind::TimedOut => EndReason::ConnectTimeout,
        _ if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS)) => {
            EndReason::Limit
        }
        _ => EndReason::Unreachable,
    }
}

/// True if flows that this node caught may be delivered to this address.
pub(super) fn is_allowed(deliver: &[Deliver], from: &str, to: SocketAddr) -> bool {
    deliver.iter().any(|entry| {
        entry.from.as_ref().is_none_or(|names| names.iter().any(|name| **name == *from))
            && entry.to.contains(to.ip())
            && entry.port.as_ref().is_none_or(|ports| ports.contains(to.port()))
    })
}

/// Returns the reason that is sent to the asking node.
pub(super) const fn refusal(reason: EndReason) -> Refusal {
    match reason {
        EndReason::Refused | EndReason::ServerReset => Refusal::ConnectionRefused,
        EndReason::ConnectTimeout => Refusal::TimedOut,
        EndReason::Dns => Refusal::Dns,
        EndReason::Limit => Refusal::Limit,
        EndReason::Loop | EndReason::PolicyDenied => Refusal::Denied,
        _ => Refusal::Unreachable,
    }
}
