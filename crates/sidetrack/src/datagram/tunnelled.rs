//! CONNECT-UDP of a client of HTTP (RFC 9298): one flow, whose datagrams are capsules in the client's connection. A flow of UDP
//! that comes through a tunnel from another Sidetrack is served in the same way, and has QUIC datagrams beside its stream.
//!
//! The client is answered once the way to the server is open, so that a refusal has a status. From then on:
//!
//! | event | the flow ends with |
//! |---|---|
//! | the client closes between two capsules | `ok` |
//! | it closes within one, or sends what is not a capsule | `bad_request` |
//! | its connection is cut | `client_reset` |
//! | no datagram for the idle time | `idle`, or the reason of the last ICMP error if no datagram came after it |
//! | the path to the server is over | the path's reason |
//!
//! Whatever ends it, the client's connection is closed: the client learns it at once.

use super::association::BATCH;
use super::path::{first_of, order};
use super::{ROUNDS, until};
use crate::carry::datagrams::{Came, Capsules, Datagrams, Over, Remote, associate, connect, failure};
use crate::carry::{Failure, Gate, Order, Stream, resolve};
use crate::config::Config;
use crate::function;
use crate::live::{Decided, LiveFlow, profile::Stage};
use crate::reactor::UdpSocket;
use crate::session::{AskingTunnel, Connect, NearSide, Watched, undecided};
use crate::worker::{Admission, Worker};
use sidetrack_core::association::Dropped;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{EndReason, Flow, Host, Process, Protocol, Side};
use sidetrack_core::http::message::Response;
use sidetrack_core::http::udp::switching;
use sidetrack_core::policy::{Action, Carry, Decision, Resolve, Seen};
use sidetrack_core::socks::v6::Metadata;
use sidetrack_core::time::Instant;
use sidetrack_core::tunnel::Reply;
use sidetrack_sys::sockopt;
use sidetrack_sys::udp::batch::Batch;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Serves one such client until its tunnel ends.
pub fn tunnelled(asking: AskingTunnel) -> Pin<Box<dyn Future<Output = ()>>> {
    Box::pin(serve(asking))
}

async fn serve(asking: AskingTunnel) {
    let AskingTunnel { worker, listening, mut client, connect, peer, mut entry, near } = asking;
    let is_near_side = near.is_some();
    let NearSide { host, metadata, lane } = near.map_or_else(NearSide::nothing, |near| *near);
    let Connect { destination, user, refusals, .. } = connect;
    let host = match &destination.host {
        Host::Name(name) => Some(name.clone()),
        Host::Ip(_) => host,
    };
    // Processes are not looked up by UDP sockets: rules that ask for one do not match.
    let process = Some(Process::default());
    let orig_dst = destination.clone();
    let protocol = Protocol::Udp;
    let flow = Flow { protocol, orig_dst, host, user, process, ..undecided(&listening, peer).flow };
    let config = worker.config();
    // A stream of HTTP/2 has no place among the flows yet.
    let is_stream = matches!(client.stream, Stream::Memory(_));
    let is_own = || peer.ip().is_loopback() || sockopt::is_of_this_host(peer.ip());
    let admission = is_stream.then(|| Admission::ask(&worker, peer.ip(), is_own)).transpose();
    let opened = match &admission {
        Ok(_) => {
            let opening = pin!(open(&worker, entry.live(), &flow, metadata));
            Watched::new(Stage::Dial, opening, entry.live(), worker.clock).await
        }
        Err(detail) => {
            entry.live().decide(Decided::new(flow.clone(), None));
            Ok(Err(Failure::new(EndReason::Limit, detail.clone())))
        }
    };
    let late = |reason| {
        let is_late = reason == EndReason::ConnectTimeout;
        let detail =
            if is_late { "the way to the server was not open in time" } else { "it was ended meanwhile" };
        Failure::new(reason, detail)
    };
    let (server, carry, functions) = match opened.unwrap_or_else(|reason| Err(late(reason))) {
        Ok(opened) => opened,
        Err(failure) => {
            // An error means that the client is gone; the flow has its reason.
            let _ = client.answer(&refusals.page(&destination, &failure)).await;
            entry.end(failure.reason, Some(failure.detail));
            return client.close_after_answer().await;
        }
    };
    if let Err(error) = client.answer(&established(is_near_side)).await {
        return entry.end(EndReason::ClientGone, Some(format!("the client left: {error}")));
    }
    entry.live().connected(entry.live().age());
    entry.live().set_deadline(None, EndReason::Idle);
    let held = client.take_held();
    let limits = worker.config().limits;
    let idle = Duration::from_millis(carry.idle_timeout_ms.unwrap_or(limits.udp_idle_timeout_ms));
    let lifetime = carry.lifetime_ms.or(limits.lifetime_ms).map(Duration::from_millis);
    let now = worker.clock.now();
    let mut tunnel = Tunnel {
        capsules: Capsules::new(client.stream, &held, lane),
        server,
        flow,
        config,
        functions,
        packets: [0; 2],
        moved: now,
        trouble: None,
        dropped: [0; Dropped::ALL.len()],
    };
    let ending = tunnel.run(&worker, entry.live(), idle, lifetime.map(|lifetime| now + lifetime)).await;
    tunnel.capsules.close(ending.reason == EndReason::BadRequest);
    entry.end(ending.reason, Some(ending.detail).filter(|detail| !detail.is_empty()));
}

/// Returns the answer that the way to the server is open.
fn established(is_near_side: bool) -> Vec<u8> {
    if is_near_side {
        // It has no field that could be too long.
        return Reply::Connected { bound: None }.encode().unwrap_or_default();
    }
    let mut answer = Vec::new();
    Response::new(101, switching()).write_to(&mut answer);
    answer
}

/// How datagrams get to the server.
#[derive(Debug)]
enum Server {
    /// By a socket that is connected to it, so that the kernel drops the datagrams of all others.
    Own(UdpSocket, SocketAddr),
    /// By a path through hops or the overlay.
    Path(Box<dyn Datagrams>, Remote),
}

/// Decides, and opens the way to the server.
async fn open(
    worker: &Worker,
    live: &LiveFlow,
    flow: &Flow,
    metadata: Vec<Metadata>,
) -> Result<(Server, Arc<Carry>, Option<Box<function::Datagrams>>), Failure> {
    let config = worker.config();
    let Decision::Verdict(verdict) = config.policy.decide(flow, Seen::FirstBytes(None)) else {
        // Both are known, so the rules ask for nothing more.
        return Err(Failure::new(EndReason::Internal, "the rules ask for more than a datagram shows"));
    };
    let verdict = worker.judge(&config, live, flow, verdict);
    let carry = match &verdict.action {
        Action::Deny => return Err(Failure::new(EndReason::PolicyDenied, &*verdict.why)),
        Action::Carry(carry) => carry.clone(),
    };
    if let Some(why) = carry.udp_obstacle() {
        return Err(Failure::new(EndReason::Unsupported, why));
    }
    let made = worker.functions().datagrams(carry.chain.as_deref(), flow);
    let functions = made.map_err(|stop| Failure::new(stop.reason, stop.detail))?;
    let limit = carry.connect_timeout_ms.unwrap_or(config.limits.connect_timeout_ms);
    let deadline = worker.clock.now() + Duration::from_millis(limit);
    live.set_deadline(Some(deadline), EndReason::ConnectTimeout);
    let server = reach(worker, &config, (flow, metadata), &carry).await?;
    if let Server::Path(path, _) = &server {
        live.carried_by(path.taken());
    }
    Ok((server, carry, functions))
}

/// Opens the way that the rule wants.
async fn reach(
    worker: &Worker,
    config: &Config,
    (flow, metadata): (&Flow, Vec<Metadata>),
    carry: &Carry,
) -> Result<Server, Failure> {
    let destination = carry.destination(flow);
    let (name, is_localhost) = match &destination.host {
        Host::Name(name) => (Some(name), name.is_localhost()),
        Host::Ip(_) => (None, false),
    };
    let dialing = worker.dialing();
    let is_direct = carry.carrier == Carrier::Direct;
    let is_far = name.is_some() && !is_direct && carry.resolve != Resolve::Local;
    let admitted = if is_far && !is_localhost {
        Vec::new()
    } else {
        let peer = flow.client.ip();
        let gate = Gate { policy: &config.policy, flow, carry, resource: None, peer, is_configured: false };
        gate.admit_all(name, resolve(&destination).await?)?
    };
    if is_direct {
        let (socket, to) = first_of(admitted, |to| connect(&dialing, to))?;
        return Ok(Server::Own(socket, to.address()));
    }
    let remote = match admitted.into_iter().next() {
        Some(admitted) if !is_far => Remote::Address(admitted),
        _ => Remote::Name(destination),
    };
    let order = Order { metadata, ..order(worker, &dialing, carry, flow, remote.destination()) };
    let path = Box::pin(associate(&order)).await?;
    Ok(Server::Path(path, remote))
}

/// An open tunnel.
#[derive(Debug)]
struct Tunnel {
    capsules: Capsules,
    server: Server,
    flow: Flow,
    /// The configuration by which it was decided.
    config: Arc<Config>,
    functions: Option<Box<function::Datagrams>>,
    /// Datagrams from the client, and to it.
    packets: [u64; 2],
    /// When the last datagram passed.
    moved: Instant,
    /// The last news from the server's side, if it was an ICMP error.
    trouble: Option<EndReason>,
    dropped: [u64; Dropped::ALL.len()],
}

impl Tunnel {
    /// Moves datagrams until the flow ends. Returns why.
    async fn run(
        &mut self,
        worker: &Worker,
        live: &LiveFlow,
        idle: Duration,
        lifetime: Option<Instant>,
    ) -> Failure {
        loop {
            let at = lifetime.map_or(self.moved + idle, |lifetime| lifetime.min(self.moved + idle));
            let over = tokio::select! {
                biased;
                failure = poll_fn(|cx| self.poll(cx, worker, live)) => Some(failure),
                () = until(Some(worker.clock.instant(at))) => None,
            };
            let now = worker.clock.now();
            match over {
                Some(failure) => return failure,
                None if lifetime.is_some_and(|lifetime| now >= lifetime) => {
                    return Failure::new(EndReason::Lifetime, "");
                }
                None if now >= self.moved + idle => {
                    return Failure::new(self.trouble.unwrap_or(EndReason::Idle), "");
                }
                // A datagram came meanwhile.
                None => {}
            }
        }
    }

    /// Moves what there is. Ready: the flow is over.
    fn poll(&mut self, cx: &mut Context<'_>, worker: &Worker, live: &LiveFlow) -> Poll<Failure> {
        live.set_waker(cx.waker());
        if let Some(reason) = live.ending() {
            return Poll::Ready(Failure::new(reason, ""));
        }
        if let Some(failure) = self.denied_now(worker) {
            return Poll::Ready(failure);
        }
        let mut batch = BATCH.take().unwrap_or_default();
        let now = worker.clock.now();
        // The server first: its answers leave with the flush at the beginning of the client's turn.
        let done = match self.poll_server(cx, now, live, &mut batch) {
            Ok(more) => self.poll_client(cx, now, live).map(|other| more || other),
            Err(failure) => Err(failure),
        };
        BATCH.set(Some(batch));
        live.set_packets(self.packets[0], self.packets[1]);
        if self.dropped.iter().any(|dropped| *dropped > 0) {
            worker.drop_datagrams(std::mem::take(&mut self.dropped));
        }
        match done {
            Ok(true) => {
                // Other tasks have their turn before the rest.
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Ok(false) => Poll::Pending,
            Err(failure) => Poll::Ready(failure),
        }
    }

    /// Asks the rules again if the configuration has changed. Returns why the flow ends, if they deny it now.
    fn denied_now(&mut self, worker: &Worker) -> Option<Failure> {
        let config = worker.config();
        if Arc::ptr_eq(&config, &self.config) {
            return None;
        }
        self.config = config;
        match self.config.policy.decide(&self.flow, Seen::FirstBytes(None)) {
            Decision::Verdict(verdict) if verdict.action == Action::Deny => {
                let why = format!("the configuration has changed: {}", verdict.why);
                Some(Failure::new(EndReason::PolicyDenied, why))
            }
            _ => None,
        }
    }

    /// Passes the client's datagrams to the server. Returns whether there may be more.
    fn poll_client(&mut self, cx: &mut Context<'_>, now: Instant, live: &LiveFlow) -> Result<bool, Failure> {
        let Self { capsules, server, functions, packets, moved, trouble, dropped, .. } = self;
        let polled = capsules.poll_receive(cx, &mut |payload| {
            if !passes(functions, now, Side::Client, payload) {
                return dropped[Dropped::Limited as usize] += 1;
            }
            let lost = match server {
                Server::Own(socket, to) => socket.send_one(payload, None).err().map(|error| {
                    let why = if sidetrack_sys::udp::is_too_long(&error) {
                        Dropped::TooLong
                    } else {
                        Dropped::Unsent
                    };
                    (why, failure(&error, *to).reason)
                }),
                Server::Path(path, remote) => {
                    path.send(remote, payload).err().map(|lost| (lost.why, lost.failure.reason))
                }
            };
            (packets[0], *moved) = (packets[0] + 1, now);
            live.count(payload.len() as u64, 0);
            if let Some((why, reason)) = lost {
                dropped[why as usize] += 1;
                *trouble = Some(reason);
            }
        });
        dropped[Dropped::Unsent as usize] += capsules.take_lost();
        match polled {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(())) => Ok(true),
            Poll::Ready(Err(over)) => Err(client_is_over(&over)),
        }
    }

    /// Passes the server's datagrams to the client. Returns whether there may be more.
    fn poll_server(
        &mut self,
        cx: &mut Context<'_>,
        now: Instant,
        live: &LiveFlow,
        batch: &mut Batch,
    ) -> Result<bool, Failure> {
        let Self { capsules, server, functions, packets, moved, trouble, dropped, .. } = self;
        let mut deliver = |payload: &[u8]| {
            if !passes(functions, now, Side::Server, payload) {
                return Some(Dropped::Limited);
            }
            live.first_byte(live.age());
            (packets[1], *moved) = (packets[1] + 1, now);
            live.count(0, payload.len() as u64);
            capsules.send(payload).err().map(|lost| lost.why)
        };
        match server {
            Server::Own(socket, to) => {
                for _ in 0..ROUNDS {
                    match socket.receive(batch) {
                        Ok(count) => {
                            *trouble = None;
                            for payload in (0..count).flat_map(|at| batch.datagrams(at)) {
                                deliver(payload).into_iter().for_each(|why| dropped[why as usize] += 1);
                            }
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        // Mostly an ICMP error, which ends nothing (RFC 4787 REQ-10).
                        Err(error) => *trouble = Some(failure(&error, *to).reason),
                    }
                }
                Ok(socket.poll_read_ready(cx).is_ready())
            }
            Server::Path(path, _) => {
                let mut refused = None;
                let polled = path.poll_receive(cx, batch, &mut |came| match came {
                    Came::Datagram { payload, .. } => {
                        deliver(payload).into_iter().for_each(|why| dropped[why as usize] += 1);
                        *trouble = None;
                    }
                    Came::Error { failure, .. } => *trouble = Some(failure.reason),
                    Came::Refused { failure, .. } => refused = Some(failure),
                    Came::Dropped(why) => dropped[why as usize] += 1,
                });
                match (refused, polled) {
                    (Some(failure), _) | (None, Poll::Ready(Err(failure))) => Err(failure),
                    (None, Poll::Ready(Ok(()))) => Ok(true),
                    (None, Poll::Pending) => Ok(false),
                }
            }
        }
    }
}

/// Whether a datagram passes the functions of its flow.
fn passes(
    functions: &mut Option<Box<function::Datagrams>>,
    now: Instant,
    from: Side,
    payload: &[u8],
) -> bool {
    functions.as_mut().is_none_or(|functions| functions.passes(now, from, payload.len()))
}

/// Returns the end of a flow whose client has ended its tunnel.
fn client_is_over(over: &Over) -> Failure {
    match over {
        Over::Ended => Failure::new(EndReason::Ok, ""),
        Over::Broken(error) => Failure::new(EndReason::BadRequest, format!("the client: {error}")),
        Over::Cut(error) => Failure::new(EndReason::ClientReset, format!("the client: {error}")),
    }
}
