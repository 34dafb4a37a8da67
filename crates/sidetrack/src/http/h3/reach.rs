//! Which requests reach their server by HTTP/3, and when TCP is used instead.
//!
//! ```text
//!   the rule says so, and the server has announced it or is to be asked at once
//!     |                                   no
//!     +---------------------------------------------> TCP
//!     | yes
//!     v
//!   a QUIC connection is open ----------------------> a stream of it
//!     | no: an attempt begins, in a task of its own
//!     v
//!   a connection of TCP is idle --------------------> TCP; later requests find the QUIC connection
//!     | no
//!     v
//!   QUIC is open within HEAD_START -----------------> a stream of it
//!     | no
//!     v
//!   TCP is dialled: works --------------------------> TCP
//!     | fails
//!     v
//!   the attempt ends: QUIC is open -----------------> a stream of it
//!     | no
//!     v
//!   the failure of TCP
//! ```
//!
//! A failed attempt and a connection that dies are remembered for some time ([`sidetrack_core::http::alternative`]). Early data is
//! never sent.

use super::super::buffer::Buffer;
use super::super::fetch::Way;
use super::super::pool::{Route, Server};
use super::super::servers::Secure;
use super::ask::{self, Asking};
use crate::carry::h3::{Goal, Peer, is_nowhere};
use crate::carry::{self, Admitted, Failure, Order, datagrams};
use crate::reactor::{self, timeout};
use crate::worker::Worker;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host};
use sidetrack_core::http::alternative::{Alternatives, Announced};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::policy::{Action, Decision, Http3, Seen, Url};
use sidetrack_sys::sockopt;
use sidetrack_sys::sync::lock;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// How long a request that has no connection waits for QUIC before it dials by TCP, too.
pub(in crate::http) const HEAD_START: Duration = Duration::from_millis(300);
/// How long it waits for QUIC after TCP has failed.
pub(in crate::http) const PATIENCE: Duration = Duration::from_secs(5);

/// The way of one request to its server by HTTP/3.
pub(in crate::http) struct Reach<'w, 'a> {
    way: &'w Way<'a>,
    secure: &'w Secure,
    /// The server as clients name it.
    server: Destination,
    /// Where it is dialled.
    to: Destination,
}

impl<'a> Way<'a> {
    /// Returns the way by HTTP/3 if the request may take it.
    pub(in crate::http) fn by_http3<'w>(&'w self) -> Option<Reach<'w, 'a>> {
        let secure = self.secure_for_http3()?;
        let is_bound = self.binds || self.bound.is_some_and(|bound| !bound.is_empty());
        if secure.is_alone || is_bound || !self.route.is_shared() {
            return None;
        }
        let server = self.server(secure);
        let now = self.progress.clock.now();
        let port = lock(&self.proxy.alternatives).port(now, &server, self.route.carry.http3)?;
        let mut to = self.route.destination.clone();
        if port != server.port {
            if !self.may_use(port) {
                return None;
            }
            to.port = port;
        }
        Some(Reach { way: self, secure, server, to })
    }

    /// TLS with the server, if the rule lets requests reach it by HTTP/3.
    fn secure_for_http3(&self) -> Option<&Secure> {
        let carry = &self.route.carry;
        let is_wanted = carry.http3 != Http3::Never && carry.http3_obstacle().is_none();
        self.route.secure.as_ref().filter(|_| is_wanted)
    }

    /// The server as clients name it: the rule may lead to another address.
    fn server(&self, secure: &Secure) -> Destination {
        Destination { host: secure.host.clone(), port: self.flow.orig_dst.port, zone: 0 }
    }

    /// Whether policy carries a flow to this port of the server by the same rule.
    fn may_use(&self, port: u16) -> bool {
        let orig_dst = Destination { port, ..self.flow.orig_dst.clone() };
        let flow = Flow { orig_dst, ..self.flow.clone() };
        let config = self.worker.config();
        let (host, url) = (flow.host.as_ref(), Url::of(self.resource));
        let seen = match config.policy.asks_url() {
            true => Seen::Request { host, url: &url },
            false => Seen::FirstBytes(host),
        };
        matches!(config.policy.decide(&flow, seen), Decision::Verdict(verdict)
            if matches!(&verdict.action, Action::Carry(carry) if Arc::ptr_eq(carry, &self.route.carry)))
    }

    /// Learns what a response says about HTTP/3. `status` 421 over HTTP/3 says that it is not there for this server (RFC 7838
    /// Sec. 6).
    pub(in crate::http) fn learn(&self, status: u16, fields: &Fields, is_http3: bool) {
        let Some(secure) = self.secure_for_http3() else { return };
        let (server, now) = (self.server(secure), self.progress.clock.now());
        let said = Announced::read(fields, &secure.host);
        let is_misdirected = is_http3 && status == 421;
        if said.is_none() && !is_misdirected {
            return;
        }
        let mut alternatives = lock(&self.proxy.alternatives);
        if let Some(said) = said {
            alternatives.learn(now, &server, said);
        }
        if is_misdirected {
            alternatives.failed(now, &server);
        }
    }
}

impl Reach<'_, '_> {
    /// Returns a stream of the open connection; `None`: there is none.
    pub(in crate::http) fn at_once(&self) -> Option<Server> {
        let Self { way, server, to, .. } = self;
        let (peer, at_work) = way.route.quic(|address| is_nowhere(address) || way.admits(address))?;
        let address = sockopt::canonical(peer.connection().remote_address());
        way.by_quic.set((!is_nowhere(address)).then_some(address));
        way.progress.mark();
        let used = Destination { port: to.port, ..server.clone() };
        let alternative = (to.port != server.port).then(|| used.to_string().into_bytes());
        let (alternatives, clock, server) =
            (way.proxy.alternatives.clone(), way.progress.clock, server.clone());
        let on_dead = Rc::new(move || lock(&alternatives).failed(clock.now(), &server));
        let stream = ask::connection(Asking { peer, _at_work: at_work, alternative, on_dead });
        // It counts as used before: a request that can be repeated is repeated by TCP.
        Some(Server {
            stream,
            buffer: Buffer::default(),
            address: None,
            is_reused: true,
            home: None,
            is_bound: false,
        })
    }

    /// Starts an attempt, unless one is under way.
    ///
    /// # Errors
    /// No address may be dialled, or the name does not resolve.
    pub(in crate::http) async fn begin(&self) -> Option<()> {
        let Self { way, secure, server, .. } = self;
        if way.route.attempt().is_some() {
            return Some(());
        }
        let target = self.target().await?;
        if way.route.attempt().is_some() {
            return Some(());
        }
        let (sender, receiver) = watch::channel(());
        way.route.put_attempt(receiver);
        let attempt = Attempt {
            route: way.route.clone(),
            target,
            client: way.flow.client,
            worker: way.worker.clone(),
            host: secure.host.clone(),
            tls: secure.http3(),
            server: server.clone(),
            alternatives: way.proxy.alternatives.clone(),
            clock: way.progress.clock,
        };
        reactor::spawn(async move {
            attempt.run().await;
            drop(sender);
        });
        Some(())
    }

    /// Returns where the connection goes. `None`: the name does not resolve, or no address may be dialled.
    async fn target(&self) -> Option<Target> {
        let Self { way, to, .. } = self;
        let config = way.worker.config();
        let gate = way.gate(&config.policy);
        if way.route.carry.carrier == Carrier::Direct {
            let addresses = carry::resolve(to).await.ok()?;
            let name = match &to.host {
                Host::Name(name) => Some(name),
                Host::Ip(_) => None,
            };
            return Some(Target::At(gate.admit_all(name, addresses).ok()?));
        }
        let dialing = way.worker.dialing();
        let order = way.order(to.clone(), Some(gate), &dialing);
        Some(Target::Behind(carry::resolved(&order).await.ok()?))
    }

    /// Waits for the attempt, for this time at most.
    pub(in crate::http) async fn within(&self, time: Duration) -> Option<Server> {
        if let Some(mut attempt) = self.way.route.attempt() {
            // Its sender sends nothing: the wait ends with the attempt.
            let _ = timeout(time, attempt.changed()).await;
        }
        let server = self.at_once()?;
        self.way.progress.live.connected(self.way.progress.live.age());
        Some(server)
    }
}

/// Where a connection goes.
enum Target {
    /// To one of these addresses.
    At(Vec<Admitted>),
    /// To this destination, through the hops or the tunnel of the rule, or over the overlay.
    Behind(Destination),
}

/// An attempt to reach a server by HTTP/3, for all requests that want to.
struct Attempt {
    route: Route,
    target: Target,
    /// The client of the request that began it.
    client: SocketAddr,
    worker: Arc<Worker>,
    host: Host,
    tls: rustls::ClientConfig,
    server: Destination,
    alternatives: Arc<Mutex<Alternatives>>,
    clock: crate::live::Clock,
}

impl Attempt {
    async fn run(self) {
        let Self { route, target, client, worker, host, tls, server, alternatives, clock } = self;
        let dialing = worker.dialing();
        let goal = Goal { host: &host, tls, dialing: &dialing };
        let reached = match target {
            Target::At(addresses) => goal.connect(&addresses).await,
            Target::Behind(to) => {
                let (carry, tunnels, warm) = (&*route.carry, &worker.tunnels, &worker.warm);
                let (destination, metadata) = (to.clone(), Vec::new());
                let (host, stack, dialing) = (None, &[][..], &*dialing);
                let order = Order {
                    carry,
                    destination,
                    client,
                    host,
                    stack,
                    metadata,
                    gate: None,
                    dialing,
                    tunnels,
                    warm,
                    traced: None,
                };
                let late =
                    || Failure::new(EndReason::ConnectTimeout, "the way to the server was not open in time");
                match timeout(PATIENCE, datagrams::associate(&order)).await.unwrap_or_else(|_| Err(late())) {
                    Ok(path) => goal.connect_over(path, &to).await,
                    Err(failure) => Err(failure),
                }
            }
        };
        match reached {
            Ok(peer) => {
                lock(&alternatives).worked(&server);
                route.put_quic(peer);
            }
            Err(failure) => {
                tracing::debug!(%server, %failure, "no HTTP/3");
                if failure.reason != EndReason::Dns {
                    lock(&alternatives).failed(clock.now(), &server);
                }
            }
        }
    }
}

/// Whether requests can be sent on a connection.
pub(in crate::http) fn is_open(peer: &Peer) -> bool {
    peer.connection().close_reason().is_none() && !peer.is_leaving()
}
