//! The set-up of a path: interceptor, policy and carrier in this order, then the answer to the client.

use super::containers::{Way, offered};
use super::near::{self, AskedDatagrams};
use super::{held, hello};
use crate::carry::{Carried, Client, Failure, Gate, Order, Stream, Wire, stack};
use crate::config::{Config, Limits};
use crate::dns;
use crate::intercept::hold::Held;
use crate::intercept::socks::{Asked, Handshake, Refused};
use crate::intercept::{Catches, Listening, RunCatch, SocksCatch, proxy_header, reverse, tunnel};
use crate::live::{Decided, LiveFlow, Step, profile::Stage};
use crate::worker::{CROWDED, FlowOfSession, Place, Worker};
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, HostName, Process, Side};
use sidetrack_core::policy::{Action, Carry, Decision, ProxyVersion, Seen, Verdict};
use sidetrack_core::socks::server::{Reply, Request};
use sidetrack_core::socks::v6::{Leg, Metadata};
use sidetrack_core::socks::{Command, ReplyCode};
use sidetrack_core::splice;
use sidetrack_sys::sockopt::Ends;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How the set-up of a path ended.
pub(super) enum SetupEnd {
    /// The path is set up.
    Ready(Ready),
    /// The client got an answer in its own protocol. Its connection is closed in order.
    Answered(EndReason, Option<String>),
    /// The client's connection must be reset.
    Failed(Failure),
    /// The client, at this address, asks for UDP ASSOCIATE.
    Associate(Box<Handshake>, Box<Request>, SocketAddr),
    /// The near side of a tunnel asks for a flow of UDP.
    Datagrams(Box<AskedDatagrams>),
}

/// A path that is set up.
pub(super) struct Ready {
    /// The connection to the server or the first hop.
    pub server: Stream,
    /// Bytes that the server has already sent.
    pub early: Vec<u8>,
    /// The limits of the flow.
    pub config: splice::Config,
    /// The functions on the way. All bytes read so far have passed through them.
    pub way: Way,
    /// The SOCKS6 session it is part of, which stays in use until the flow ends.
    pub session: Option<FlowOfSession>,
}

/// What the record says of a flow that no policy decided.
pub fn undecided(listening: &Listening, peer: SocketAddr) -> Decided {
    let flow = Flow {
        protocol: listening.protocol,
        intercept: listening.catches.intercept(),
        listener: listening.name.clone(),
        client: peer,
        orig_dst: listening.address.into(),
        host: None,
        process: None,
        user: None,
    };
    Decided::new(flow, None)
}

/// A path during its set-up.
pub(super) struct Setup<'a> {
    pub(super) worker: &'a Worker,
    pub(super) listening: &'a Listening,
    pub(super) live: &'a Arc<LiveFlow>,
    peer: SocketAddr,
    pub(super) config: Arc<Config>,
    connect: Option<Connect>,
    pub(super) held: Option<Rc<Held>>,
}

/// Writes answers to CONNECT requests that fail: the stage that read the request.
pub trait Refusals: Send + Sync {
    /// Returns the whole answer for a destination that cannot be reached. The connection is closed after it.
    fn page(&self, destination: &Destination, failure: &Failure) -> Vec<u8>;
}

/// An HTTP CONNECT request of the client; its head was read before.
#[derive(Clone)]
pub struct Connect {
    /// The destination.
    pub destination: Destination,
    /// The authenticated user, if authentication is required.
    pub user: Option<String>,
    /// Writes the answer if the path cannot be set up.
    pub refusals: Arc<dyn Refusals>,
    /// The client already got the answer that the tunnel is established.
    pub is_established: bool,
}

/// The answer that establishes a tunnel (RFC 9110 Sec. 9.3.6).
pub const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// The result of the interceptor.
pub(super) struct Caught {
    pub(super) flow: Flow,
    /// Whether the first bytes were read for the name, and that name.
    sniffed: Option<Option<HostName>>,
    /// The client's protocol for the answer.
    pub(super) asker: Asker,
    /// Whether to check the client's TLS hello.
    looks_at_hello: bool,
}

/// The protocol in which the client expects an answer about the set-up.
pub(super) enum Asker {
    /// None: the client is not aware of us.
    Nobody,
    /// SOCKS: the handshake that waits for its reply, and the request.
    Socks(Handshake, Box<Request>),
    /// HTTP CONNECT.
    Connect(Connect),
    /// The near side of a tunnel, with this metadata.
    Tunnel(Vec<Metadata>),
}

pub(super) enum Stop {
    Failed(Failure),
    Answered(EndReason, Option<String>),
    Associate(Box<Handshake>, Box<Request>, SocketAddr),
    Datagrams(Box<AskedDatagrams>),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Refused> for Stop {
    fn from(Refused(failure): Refused) -> Self {
        Self::Answered(failure.reason, Some(failure.detail))
    }
}

impl<'a> Setup<'a> {
    /// The set-up for a connection that was just accepted.
    pub(super) fn new(
        worker: &'a Worker,
        listening: &'a Listening,
        live: &'a Arc<LiveFlow>,
        peer: SocketAddr,
        connect: Option<Connect>,
    ) -> Self {
        Self { worker, listening, live, peer, config: worker.config(), connect, held: None }
    }

    /// The client's connection waits until it is accepted.
    pub(super) fn holding(self, held: Option<Rc<Held>>) -> Self {
        Self { held, ..self }
    }

    /// Runs the set-up.
    pub(super) async fn run(self, client: &mut Client) -> SetupEnd {
        if self.listening.speaks_first() {
            // The client may take long for its handshake: show the flow meanwhile.
            self.live.decide(undecided(self.listening, self.peer));
        }
        match self.make(client).await {
            Ok(ready) => SetupEnd::Ready(ready),
            Err(Stop::Failed(failure)) => SetupEnd::Failed(failure),
            Err(Stop::Answered(reason, detail)) => SetupEnd::Answered(reason, detail),
            Err(Stop::Associate(handshake, request, peer)) => SetupEnd::Associate(handshake, request, peer),
            Err(Stop::Datagrams(asked)) => SetupEnd::Datagrams(asked),
        }
    }

    async fn make(&self, client: &mut Client) -> Result<Ready, Stop> {
        let limits = &self.config.limits;
        self.due(limits.handshake_timeout_ms, EndReason::HandshakeTimeout);
        let (mut caught, verdict) = self.waited(client).await?;
        let verdict = self.worker.judge(&self.config, self.live, &caught.flow, verdict);
        client.note_leg(self.live);
        let mut way = Way::default();
        self.look_at_hello(&mut caught, client);
        let guard = self.hello_guard(&caught.flow, &verdict, caught.looks_at_hello);
        let carried = match &verdict.action {
            Action::Deny => Err(Failure::new(EndReason::PolicyDenied, &*verdict.why)),
            Action::Carry(carry) => {
                self.due(
                    carry.connect_timeout_ms.unwrap_or(limits.connect_timeout_ms),
                    EndReason::ConnectTimeout,
                );
                let asking = (&caught.flow, &mut caught.asker, caught.looks_at_hello);
                match self.dialing(pin!(self.reach(carry, asking, client, &mut way, guard.as_ref()))).await {
                    Ok(carried) => carried.map(|carried| (carry, carried)),
                    // The client may expect an answer in its own protocol: `refuse` sends it.
                    Err(late) if late.reason == EndReason::ConnectTimeout => Err(late),
                    Err(ended) => return Err(Stop::Failed(ended)),
                }
            }
        };
        let carried = carried.and_then(|(carry, carried)| Ok((carry, self.answered(carried, &mut way)?)));
        let (carry, mut carried) = match carried {
            Ok(done) => done,
            Err(failure) => return Err(self.refused(caught.asker, client, failure).await),
        };
        self.accept_held(client, &mut carried).await?;
        self.live.connected(self.live.age());
        // Computed only if the client gets it: it is a system call.
        let bound = || {
            let named = carried.bound.as_ref().and_then(Destination::socket_addr);
            named.or_else(|| carried.stream.local_address().ok())
        };
        let mut session = None;
        match &mut caught.asker {
            Asker::Nobody => {}
            Asker::Connect(connect) if connect.is_established => {}
            Asker::Connect(_) => client.answer(ESTABLISHED).await.map_err(|_| gone())?,
            Asker::Socks(handshake, request) => {
                let asked = stack::about(&request.stack, Leg::Client);
                let mut done =
                    client.stream.tcp().map_or_else(|_| Vec::new(), |socket| stack::set(socket, &asked));
                done.extend_from_slice(&carried.stack);
                let reply =
                    Reply { code: ReplyCode::Succeeded, bound: bound(), stack: done, metadata: Vec::new() };
                handshake.reply(client, reply).await?;
                session = request.session.take().map(|session| self.worker.flow_of(session));
            }
            Asker::Tunnel(_) => tunnel::connected(client, bound()).await?,
        }
        let config = bounds(&self.config.limits, carry);
        if let Some(guard) = &guard {
            self.due(carry.idle_timeout_ms.unwrap_or(limits.idle_timeout_ms), EndReason::Idle);
            // Boxed, so that flows without this check do not reserve room for it.
            let mut waits = Box::pin(guard.wait(client, &mut carried));
            let greeted = self.watched(Stage::Intercept, waits.as_mut()).await;
            drop(waits);
            if let Err(failure) = greeted.and_then(|greeted| greeted) {
                carried.stream.close(true);
                return Err(Stop::Failed(failure));
            }
        }
        Ok(Ready { server: carried.stream, early: carried.early, config, way, session })
    }

    /// What checks the client's TLS hello before its bytes move. Where there are functions, or secrets to search for, stages among
    /// them check it.
    fn hello_guard<'b>(&'b self, flow: &'b Flow, verdict: &Verdict, looks: bool) -> Option<hello::Guard<'b>> {
        let is_plain = matches!(&verdict.action, Action::Carry(carry) if carry.chain.is_none());
        let is_searched = self.listening.secrets().is_some();
        (is_plain && looks && !is_searched).then(|| hello::Guard::new(&self.config.policy, flow, self.live))
    }

    /// Runs the interceptor. Meanwhile the client takes a place among those that have not finished their
    /// handshake.
    async fn waited(&self, client: &mut Client) -> Result<(Caught, Verdict), Stop> {
        let place = self.listening.speaks_first().then(|| Place::enter(self.worker));
        let kept = pin!(Place::while_kept(place.as_ref(), self.catch(client)));
        self.watched(Stage::Intercept, kept)
            .await?
            .unwrap_or_else(|| Err(Failure::new(EndReason::Limit, CROWDED).into()))
    }

    async fn catch(&self, client: &mut Client) -> Result<(Caught, Verdict), Stop> {
        let mut caught = self.intercept(client).await?;
        let verdict = self.decide(&mut caught, client).await;
        // A held client would wait for this: its program is found when it has its answer, or right before.
        if self.listening.names_programs() && caught.flow.process.is_none() && self.held.is_none() {
            caught.flow.process = Some(self.owner(&caught.flow, client));
        }
        Ok((caught, verdict))
    }

    /// Returns the local process behind the flow.
    fn owner(&self, flow: &Flow, client: &Client) -> Process {
        let ends = match &self.held {
            Some(held) => held.ends(),
            None => Ends::of(client.stream.bottom().ok(), self.peer, self.listening.address),
        };
        self.worker.owners().of(flow, ends)
    }

    pub(super) fn due(&self, after_ms: u64, reason: EndReason) {
        let deadline = self.worker.clock.now() + Duration::from_millis(after_ms);
        self.live.set_deadline(Some(deadline), reason);
    }

    async fn intercept(&self, client: &mut Client) -> Result<Caught, Stop> {
        let listening = self.listening;
        let mut peer = self.peer;
        // For CONNECT, this header was read before the request.
        if self.connect.is_none() && listening.proxy_from.contains(peer.ip()) {
            peer = proxy_header::read(client, peer).await?;
        }
        let flow = undecided(listening, peer).flow;
        let mut caught = Caught { flow, sniffed: None, asker: Asker::Nobody, looks_at_hello: false };
        match &listening.catches {
            Catches::Run(_) | Catches::Redirect | Catches::Tproxy => {
                caught.flow.orig_dst = self.captured(client)?;
                if let Catches::Run(run) = &listening.catches
                    && caught.flow.orig_dst.socket_addr() == Some(run.resolver)
                {
                    return Err(self.resolve(run, client).await);
                }
            }
            Catches::Reverse(target) => {
                let limits = &self.config.limits;
                let wait = Duration::from_millis(limits.first_bytes_ms);
                let patience = Duration::from_millis(limits.handshake_timeout_ms);
                let before = Instant::now();
                let (server, name) = reverse::server(target, client, wait, patience).await?;
                if target.needs_first_bytes() {
                    self.live.sniffed(before.elapsed());
                    self.live.step(Step::FirstBytes);
                }
                caught.flow.orig_dst = server;
                caught.sniffed = target.needs_first_bytes().then(|| name.clone());
                caught.flow.host = name;
            }
            Catches::Http => {
                if let Some(connect) = &self.connect {
                    caught.flow.orig_dst = connect.destination.clone();
                    caught.flow.user.clone_from(&connect.user);
                    caught.asker = Asker::Connect(connect.clone());
                }
            }
            Catches::Tunnel(_) => {
                let request = tunnel::request(client).await?;
                if request.datagrams.is_some() {
                    return Err(Stop::Datagrams(Box::new(near::asked(client, request, peer).await?)));
                }
                caught.flow.orig_dst = request.destination;
                caught.flow.host = request.host;
                caught.flow.client = request.client.unwrap_or(peer);
                caught.flow.user = client.peer().map(str::to_owned);
                let metadata = request.metadata.into_iter();
                let metadata = metadata.map(|(key, value)| Metadata { key, value }).collect();
                caught.asker = Asker::Tunnel(metadata);
            }
            Catches::Socks(socks) => {
                let (handshake, request) = self.socks_request(socks, client, peer).await?;
                caught.flow.orig_dst = request.destination.clone();
                caught.flow.user.clone_from(&request.user);
                caught.asker = Asker::Socks(handshake, request);
            }
        }
        self.name_asked(&mut caught, client).await?;
        if let (None, Host::Name(name)) = (&caught.flow.host, &caught.flow.orig_dst.host) {
            caught.flow.host = Some(name.clone());
        }
        Ok(caught)
    }

    /// Reads the request of a SOCKS client, which asks for CONNECT or BIND.
    async fn socks_request(
        &self,
        socks: &SocksCatch,
        client: &mut Client,
        peer: SocketAddr,
    ) -> Result<(Handshake, Box<Request>), Stop> {
        let (config, sessions) = (socks.server.clone(), self.worker.sessions.clone());
        let mut handshake = Handshake::new(config, sessions, self.worker.clock, peer.ip());
        match handshake.request(client).await? {
            Asked::Nothing => Err(Stop::Answered(EndReason::Ok, None)),
            Asked::Request(request) if request.command == Command::UdpAssociate => {
                Err(Stop::Associate(Box::new(handshake), request, peer))
            }
            Asked::Request(mut request) => {
                client.put_first(std::mem::take(&mut request.first_bytes));
                Ok((handshake, request))
            }
        }
    }

    /// Serves a DNS query over TCP that the command sends to our resolver.
    async fn resolve(&self, run: &RunCatch, client: &mut Client) -> Stop {
        self.live.set_deadline(None, EndReason::Idle);
        let clock = self.worker.clock;
        let served = match client.stream.tcp_mut() {
            Ok(socket) => dns::serve_tcp(socket, &*run.answers, move || clock.now()).await,
            Err(error) => Err(error),
        };
        Stop::Answered(EndReason::Ok, served.err().map(|error| error.to_string()))
    }

    async fn decide(&self, caught: &mut Caught, client: &mut Client) -> Verdict {
        loop {
            let seen = match &caught.sniffed {
                None => Seen::Nothing,
                Some(name) => Seen::FirstBytes(name.as_ref()),
            };
            match Stage::Policy.time(|| self.config.policy.decide(&caught.flow, seen)) {
                Decision::Verdict(verdict) => {
                    let policy = &self.config.policy;
                    if policy.asks_process_of_addresses() && caught.flow.process.is_none() {
                        // A name may resolve to an address for which a rule asks for the process.
                        caught.flow.process = Some(self.owner(&caught.flow, client));
                    }
                    return verdict;
                }
                Decision::NeedFirstBytes { wait_ms, .. } => {
                    let before = Instant::now();
                    let name = client.sniff(Duration::from_millis(wait_ms)).await.name();
                    self.live.sniffed(before.elapsed());
                    self.live.step(Step::FirstBytes);
                    if caught.flow.host.is_none() {
                        caught.flow.host.clone_from(&name);
                    }
                    caught.sniffed = Some(name);
                }
                Decision::NeedProcess { .. } => {
                    caught.flow.process = Some(self.owner(&caught.flow, client));
                }
            }
        }
    }

    /// Decides whether to check the client's TLS hello: the client asked by name, and rules match names. Not checked: flows
    /// inside our own TLS, and clients of a server that the configuration names.
    fn look_at_hello(&self, caught: &mut Caught, client: &Client) {
        let policy = &self.config.policy;
        caught.looks_at_hello = policy.asks_host()
            && caught.flow.host.is_some()
            && caught.sniffed.is_none()
            && !self.has_tls()
            && !matches!(self.listening.catches, Catches::Reverse(_));
        if caught.looks_at_hello && policy.asks_process() && caught.flow.process.is_none() {
            caught.flow.process = Some(self.owner(&caught.flow, client));
        }
    }

    /// The gate that checks the addresses to which the flow's destination resolves.
    fn gate<'b>(&'b self, flow: &'b Flow, carry: &'b Carry) -> Gate<'b> {
        let is_configured = matches!(self.listening.catches, Catches::Reverse(_));
        let (policy, peer) = (&*self.config.policy, self.peer.ip());
        Gate { policy, flow, carry, resource: None, peer, is_configured }
    }

    pub(super) async fn carry(
        &self,
        carry: &Carry,
        (flow, asker, looks_at_hello): (&Flow, &Asker, bool),
        client: &mut Client,
        way: &mut Way,
        guard: Option<&hello::Guard<'_>>,
    ) -> Result<Carried, Failure> {
        let mut legs = Vec::new();
        if carry.chain.is_some() || self.listening.secrets().is_some() {
            // Before anything is dialled, because a function may deny the flow.
            legs = self.route(carry.chain.as_deref(), flow, looks_at_hello, way)?;
        }
        let (asked, metadata): (&[_], _) = match asker {
            Asker::Nobody | Asker::Connect(_) => (&[], Vec::new()),
            Asker::Socks(_, request) => (&request.stack, request.metadata.clone()),
            Asker::Tunnel(metadata) => (&[], metadata.clone()),
        };
        let mut order = Order {
            carry,
            destination: carry.destination(flow),
            client: flow.client,
            stack: &stack::about(asked, Leg::Remote),
            host: flow.host.as_ref(),
            tunnels: &self.worker.tunnels,
            warm: &self.worker.warm,
            metadata,
            gate: Some(self.gate(flow, carry)),
            dialing: &self.worker.dialing(),
            traced: Some(self.live),
        };
        client.wait_for_bytes(Duration::from_millis(carry.initial_data_wait_ms)).await;
        if carry.chain.is_some() || way.chain.is_some() {
            // Later bytes pass the functions after the set-up: carriers do not see them.
            client.read_at_hand();
        }
        if client.is_broken() {
            return Err(gone());
        }
        if let Some(chain) = &mut way.chain {
            self.offer(chain, client)?;
        }
        if !legs.is_empty() {
            // Boxed, so that flows without containers do not reserve room for them.
            Box::pin(self.pass_containers(legs, flow, (client, way), &mut order)).await?;
        }
        if let Some(version) = carry.proxy_protocol {
            let length = self.put_proxy_header(version, flow, client);
            guard.inspect(|guard| guard.preface.set(length));
        }
        // Bytes for our own TLS cannot be sent with a request.
        let inside = self.has_tls().then(|| client.take_held());
        let (presence, incoming) = client.split();
        let mut first = hello::Guarded { incoming, guard };
        if way.has_functions() || inside.is_some() {
            // Bytes that come from now on must pass the functions first, or go into TLS.
            first.incoming.settle();
        }
        let carried = tokio::select! {
            biased;
            carried = self.carried(&order, &mut first) => carried?,
            () = presence.lost() => return Err(gone()),
        };
        client.put_first(inside.unwrap_or_default());
        if client.is_broken() {
            return Err(gone());
        }
        Ok(self.stands(&order, carried, client, way))
    }

    /// Puts a PROXY protocol header with the client's address before all other bytes, and returns its length. Called
    /// after functions and containers have seen the bytes: the header is for the server alone.
    fn put_proxy_header(&self, version: ProxyVersion, flow: &Flow, client: &mut Client) -> usize {
        let server = flow.orig_dst.socket_addr().unwrap_or(self.listening.address);
        let header = proxy_header::write(version, flow, server, self.live.id);
        let length = header.len();
        self.live.put_preface(length as u64);
        client.put_first(header);
        length
    }

    /// Finishes the set-up: client bytes that the carrier has not sent are sent first on the path.
    fn stands(&self, order: &Order<'_>, mut carried: Carried, client: &mut Client, way: &mut Way) -> Carried {
        if order.asks_multipath() {
            self.live.speaks_multipath(Side::Server, carried.stream.speaks_multipath());
        }
        let held = client.take_held();
        let unsent = &held[carried.sent.min(held.len())..];
        match way.joints.last_mut() {
            None => client.put_last(unsent),
            Some(last) => last.held = unsent.to_vec(),
        }
        self.live.count(carried.sent as u64, 0);
        self.live.carried_by(carried.taken);
        way.spread = carried.spread.take();
        carried.early.shrink_to_fit();
        carried
    }

    /// Passes the client's first bytes through the functions, and replaces them by the output.
    fn offer(&self, chain: &mut Chain, client: &mut Client) -> Result<(), Failure> {
        let held = client.take_held();
        let out = offered(chain, self.worker.clock.now(), Side::Client, held)?;
        client.put_last(&out);
        Ok(())
    }

    /// Passes the server's bytes from the set-up through the functions after the last container.
    fn answered(&self, mut carried: Carried, way: &mut Way) -> Result<Carried, Failure> {
        if let Some(chain) = way.last() {
            let early = std::mem::take(&mut carried.early);
            carried.early = offered(chain, self.worker.clock.now(), Side::Server, early)?;
        }
        Ok(carried)
    }
}

/// The limits of a flow: buffer, idle time, lifetime.
pub(super) fn bounds(limits: &Limits, carry: &Carry) -> splice::Config {
    splice::Config {
        limit: u32::try_from(limits.buffer_bytes).unwrap_or(u32::MAX),
        idle: Some(Duration::from_millis(carry.idle_timeout_ms.unwrap_or(limits.idle_timeout_ms))),
        lifetime: carry.lifetime_ms.or(limits.lifetime_ms).map(Duration::from_millis),
        ..splice::Config::default()
    }
}

/// Reports a failure in the client's own protocol, if it has one.
pub(super) async fn refuse(asker: Asker, client: &mut Client, failure: Failure) -> Stop {
    match asker {
        Asker::Nobody => return Stop::Failed(failure),
        // The client would take an answer for the server's bytes: only a reset is possible.
        Asker::Connect(connect) if connect.is_established => return Stop::Failed(failure),
        // Errors are ignored: a client that is gone needs no answer, and the flow has its end reason.
        Asker::Socks(mut handshake, _) => {
            if held::reply(&mut handshake, client, &failure).await == ReplyCode::Succeeded {
                return Stop::Failed(failure);
            }
        }
        Asker::Connect(connect) => {
            let page = connect.refusals.page(&connect.destination, &failure);
            let _ = client.answer(&page).await;
        }
        Asker::Tunnel(_) => tunnel::refused(client, &failure).await,
    }
    Stop::Answered(failure.reason, Some(failure.detail))
}

pub(super) fn gone() -> Failure {
    Failure::new(EndReason::ClientGone, "the client reset the connection while the path was being made")
}
