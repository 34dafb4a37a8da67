//! Sends a request without a body to the server and reads the response head.

use super::Proxy;
use super::bound::Bound;
use super::buffer::Buffer;
use super::copy::{Progress, write_all};
use super::duplex::Duplex;
use super::h2::ask::{self, Requests};
use super::h3::reach::{HEAD_START, PATIENCE, Reach};
use super::pool::{Route, Server};
use crate::carry::{self, Dialing, Failure, FirstBytes, Gate, Order, Stream};
use crate::intercept::proxy_header;
use crate::live::{Step, Taken, Transport};
use crate::worker::Worker;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, Side};
use sidetrack_core::http::auth::response_binds;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::forward::{self, Via, keeps_alive};
use sidetrack_core::http::framing::{ResponseLength, response_length};
use sidetrack_core::http::message::{Request, Response, Scan, Sender, Version};
use sidetrack_core::http::uri::Resource;
use sidetrack_core::placeholder::{Guard, Wiped};
use sidetrack_core::policy::Policy;
use sidetrack_sys::sockopt;
use std::cell::Cell;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Most interim responses per request.
const MAX_INTERIM: usize = 8;

/// Whether an idle connection may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reuse {
    /// If it seems open, without a system call: the request can be repeated.
    Likely,
    /// If a system call confirms that it is open.
    Checked,
    /// No: a new one is made.
    Never,
}

/// Everything that is needed to reach the server of a request.
pub(super) struct Way<'a> {
    /// The worker whose loop this is.
    pub worker: &'a Arc<Worker>,
    /// Which connections can be shared.
    pub route: &'a Route,
    /// The request's flow.
    pub flow: &'a Flow,
    /// The requested resource.
    pub resource: &'a Resource,
    /// The configuration names the server, not the client.
    pub is_configured: bool,
    /// The flow's ledger entry, and the clock.
    pub progress: Progress<'a>,
    /// State shared by the listener's connections.
    pub proxy: &'a Proxy,
    /// The connections that belong to the client; `None` if no client waits for the response.
    pub bound: Option<&'a Bound>,
    /// The request may authenticate the connection.
    pub binds: bool,
    /// The server's address, if the request was sent to it by HTTP/3.
    pub by_quic: Cell<Option<SocketAddr>>,
    /// The secrets of the command, if it has some.
    pub guard: Option<&'a Guard>,
}

/// The final head of a response, ready for the client except for its framing.
#[derive(Debug)]
pub struct Fetched {
    /// The head, without hop-by-hop fields.
    pub response: Response,
    /// How its content is framed.
    pub length: ResponseLength,
    /// The server keeps its connection open after the response.
    pub keeps_alive: bool,
    /// It is part of an authentication of the connection.
    pub binds: bool,
    /// The version of the stream over which it came. `None`: HTTP/1.
    pub stream: Option<&'static str>,
}

/// No first bytes: the request is written after the connection is made.
pub(super) struct NoBytes;

impl FirstBytes for NoBytes {
    fn held(&mut self) -> &[u8] {
        &[]
    }

    fn poll_more(&mut self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

impl Way<'_> {
    /// Returns a connection to the server: an idle one, or a new one.
    ///
    /// # Errors
    /// Why there is no connection.
    pub(super) async fn connect(&self, reuse: Reuse) -> Result<Server, Failure> {
        let server = self.find(reuse).await?;
        server.stream.note_leg(self.progress.live, Side::Server);
        if server.is_reused {
            self.progress.live.step(Step::Reused);
        }
        if carry::asks_multipath(&self.route.carry) {
            let is_used = matches!(&server.stream, Duplex::Tcp(stream) if sockopt::speaks_mptcp(stream));
            self.progress.live.speaks_multipath(Side::Server, is_used);
        }
        Ok(server)
    }

    async fn find(&self, reuse: Reuse) -> Result<Server, Failure> {
        // The bound connection first: the server knows the client by it. Dialling comes last, because it takes a round trip.
        if reuse != Reuse::Never
            && let Some(server) = self.bound.and_then(|bound| bound.take(self.route))
        {
            self.progress.mark();
            return Ok(server);
        }
        let by_http3 = if reuse == Reuse::Never { None } else { self.by_http3() };
        if let Some(reach) = &by_http3 {
            if let Some(server) = reach.at_once() {
                return Ok(server);
            }
            // Without an address there is no attempt, and the way by TCP says why.
            let _ = reach.begin().await;
        }
        if reuse != Reuse::Never
            && let Some(server) = self.route.take(reuse == Reuse::Checked, |address| self.admits(address))
        {
            self.progress.mark();
            return Ok(server);
        }
        if reuse != Reuse::Never
            && let Some(server) = self.stream_of_shared().await
        {
            return Ok(server);
        }
        // Boxed: most requests find an idle connection, and need no room for dialling in their future.
        match by_http3 {
            Some(reach) => Box::pin(self.dial_both(&reach)).await,
            None => Box::pin(self.dial()).await,
        }
    }

    /// A new connection, by HTTP/3 if that is soon there, otherwise by TCP.
    async fn dial_both(&self, reach: &Reach<'_, '_>) -> Result<Server, Failure> {
        if let Some(server) = reach.within(HEAD_START).await {
            return Ok(server);
        }
        match self.dial().await {
            Ok(server) => Ok(server),
            Err(failure) => reach.within(PATIENCE).await.ok_or(failure),
        }
    }

    /// Whether policy lets this flow use an idle connection: the name may have resolved to an address that is denied here.
    pub(super) fn admits(&self, address: SocketAddr) -> bool {
        let name = match &self.route.destination.host {
            Host::Name(name) => Some(name),
            Host::Ip(_) => None,
        };
        self.gate(&self.worker.config().policy).admit(name, address).is_ok()
    }

    pub(super) fn gate<'b>(&'b self, policy: &'b Policy) -> Gate<'b> {
        let (flow, carry, resource) = (self.flow, &*self.route.carry, Some(self.resource));
        Gate { policy, flow, carry, resource, peer: flow.client.ip(), is_configured: self.is_configured }
    }

    /// The order to carry the request's connection to this destination.
    pub(super) fn order<'b>(
        &'b self,
        destination: Destination,
        gate: Option<Gate<'b>>,
        dialing: &'b Dialing,
    ) -> Order<'b> {
        Order {
            carry: &self.route.carry,
            destination,
            client: self.flow.client,
            host: self.flow.host.as_ref(),
            stack: &[],
            metadata: Vec::new(),
            gate,
            dialing,
            tunnels: &self.worker.tunnels,
            warm: &self.worker.warm,
            traced: Some(self.progress.live),
        }
    }

    /// A new connection to the server.
    async fn dial(&self) -> Result<Server, Failure> {
        let carry = &*self.route.carry;
        let config = self.worker.config();
        let limit = carry.connect_timeout_ms.unwrap_or(config.limits.connect_timeout_ms);
        let deadline = self.progress.clock.now() + Duration::from_millis(limit);
        self.progress.live.set_deadline(Some(deadline), EndReason::ConnectTimeout);
        let dialing = self.worker.dialing();
        let order = self.order(self.route.destination.clone(), Some(self.gate(&config.policy)), &dialing);
        let carried = carry::carry(&order, &mut NoBytes).await?;
        self.progress.live.carried_by(carried.taken);
        // Later requests may reuse this connection: policy then checks them against this address.
        let dialled = || sockopt::peer_address(carried.stream.tcp().ok()?).ok();
        let is_direct = carry.carrier == Carrier::Direct;
        let address = carried.leads_to.or_else(|| is_direct.then(dialled).flatten());
        let mut stream = Duplex::from(carried.stream);
        if let Some(version) = carry.proxy_protocol {
            let server = self.flow.orig_dst.socket_addr().unwrap_or(self.flow.client);
            let header = proxy_header::write(version, self.flow, server, self.progress.live.id);
            write_all(&stream, &mut [IoSlice::new(&header)])
                .await
                .map_err(|error| broken(&error.to_string()))?;
        }
        let mut early = carried.early;
        if let Some(secure) = &self.route.secure {
            let (below, peeked) = stream.into_stream();
            early.extend(peeked);
            let tls = secure.shake_hands(below, std::mem::take(&mut early), self.progress.clock).await?;
            self.progress.live.step(Step::ServerSecured);
            stream = if tls.protocol() == Some(b"h2") {
                let requests = ask::begin(Stream::Tls(Box::new(tls))).await?;
                self.route.put_shared(Some((requests.clone(), address)));
                ask::connection(requests)
            } else {
                Duplex::from(Stream::Tls(Box::new(tls)))
            };
        }
        self.progress.live.connected(self.progress.live.age());
        self.progress.mark();
        let buffer = Buffer::holding(early);
        Ok(Server { stream, buffer, address, is_reused: false, home: None, is_bound: false })
    }

    /// Opens another stream on a shared HTTP/2 connection.
    async fn stream_of_shared(&self) -> Option<Server> {
        self.stream_of(self.route.shared(|address| self.admits(address))?).await
    }

    /// The same for a WebSocket request, if the server has announced that it accepts these as streams.
    async fn websocket(&self, request: &Request) -> Option<Server> {
        let asks = request.fields.first("upgrade").is_some_and(|to| to.eq_ignore_ascii_case(b"websocket"));
        if !asks {
            return None;
        }
        self.stream_of(self.route.shared_for_websocket(|address| self.admits(address))?).await
    }

    async fn stream_of(&self, requests: Requests) -> Option<Server> {
        match requests.ready().await {
            Ok(requests) => {
                self.progress.mark();
                let stream = ask::connection(requests);
                let buffer = Buffer::default();
                Some(Server { stream, buffer, address: None, is_reused: true, home: None, is_bound: false })
            }
            Err(_) => {
                self.route.put_shared(None);
                None
            }
        }
    }

    /// Writes the head of a request as the server gets it. `length` is that of its content, if it has changed.
    pub(super) fn head(&self, request: &Request, length: Option<u64>) -> Wiped {
        if let Some(guard) = self.guard {
            return guard.head(request, length);
        }
        let mut head = Wiped::new(Vec::with_capacity(512));
        request.write_to(&mut head);
        head
    }

    /// Sends a request without a body and reads the final head. If an idle connection turns out to be closed, a new one
    /// is made.
    ///
    /// # Errors
    /// The server cannot be reached, breaks off, or does not answer as HTTP.
    pub(super) async fn fetch(
        &self,
        request: &Request,
        client: Interim<'_>,
    ) -> Result<(Server, Fetched), Failure> {
        let head = self.head(request, None);
        let is_repeatable = request.method.is_idempotent();
        let mut reuse = if is_repeatable { Reuse::Likely } else { Reuse::Checked };
        loop {
            let by_stream = match reuse {
                Reuse::Never => None,
                // A request of an authenticated client connection must use the server connection bound to it.
                _ if self.bound.is_some_and(|bound| !bound.is_empty()) => None,
                _ => self.websocket(request).await,
            };
            let mut server = match by_stream {
                Some(server) => server,
                None => self.connect(reuse).await?,
            };
            let sent = write_all(&server.stream, &mut [IoSlice::new(&head)]).await;
            let sent = sent.map_err(|error| broken(&error.to_string()));
            self.progress.live.count(head.len() as u64, 0);
            let read = match sent {
                Ok(()) => {
                    let Server { stream, buffer, .. } = &mut server;
                    self.read_head((stream, buffer), request, client).await
                }
                Err(failure) => Err(failure),
            };
            match read {
                // The server does not know the host there: it is asked where it was found first (RFC 7838 Sec. 6).
                Ok(fetched)
                    if fetched.response.status == 421 && server.stream.is_http3() && is_repeatable =>
                {
                    reuse = Reuse::Never;
                }
                Ok(fetched) => {
                    server.is_bound |= self.binds || fetched.binds;
                    return Ok((server, fetched));
                }
                Err(failure) => {
                    let stale = server.is_reused && failure.reason == EndReason::ServerReset;
                    if !(stale && server.buffer.is_empty() && is_repeatable) {
                        return Err(failure);
                    }
                    reuse = Reuse::Never;
                }
            }
        }
    }

    /// Reads the final head. Interim responses are forwarded to the client as they arrive.
    ///
    /// # Errors
    /// The server breaks off or does not speak HTTP.
    pub(super) async fn read_head(
        &self,
        (from, buffer): (&Duplex, &mut Buffer),
        request: &Request,
        client: Interim<'_>,
    ) -> Result<Fetched, Failure> {
        let stream = from.version();
        let via = Via { pseudonym: &self.proxy.pseudonym, received: stream };
        for _ in 0..=MAX_INTERIM {
            let mut response = self.one_head((from, buffer)).await?;
            if let Some(guard) = self.guard {
                guard.cover(&mut response.fields);
            }
            self.progress.mark();
            let length =
                response_length(&request.method, &response).map_err(|error| bad(&error.to_string()))?;
            let keeps_alive = keeps_alive(response.version, &response.fields) && length.is_certain;
            let binds = response_binds(&response.fields);
            if response.is_interim() {
                forward::response(&mut response, via);
                client.pass(&response).await?;
                continue;
            }
            let switches = response.status == 101;
            if switches && !request.fields.has("upgrade") {
                return Err(bad("it switches protocols, which nobody asked for"));
            }
            let protocol = response.fields.joined("upgrade").map(|value| value.into_owned());
            forward::response(&mut response, via);
            if switches {
                response.fields.push("Connection", "Upgrade");
                response.fields.push("Upgrade", protocol.unwrap_or_default());
            }
            self.learn(response.status, &response.fields, from.is_http3());
            if let Some(address) = self.by_quic.get().filter(|_| from.is_http3()) {
                self.progress.live.carried_by(Some(Taken { transport: Transport::Quic, address }));
            }
            self.progress.live.first_byte(self.progress.live.age());
            return Ok(Fetched { response, length, keeps_alive, binds, stream });
        }
        Err(bad("it sends interim responses without end"))
    }

    async fn one_head(&self, (from, buffer): (&Duplex, &mut Buffer)) -> Result<Response, Failure> {
        let mut scan = Scan::default();
        loop {
            match scan.advance(buffer.data(), Sender::Server) {
                Ok(Some(length)) => {
                    let head = buffer.data().get(..length).unwrap_or_default();
                    let response = Response::parse(head).map_err(|error| bad(&error.to_string()))?;
                    buffer.consume(length);
                    return Ok(response);
                }
                Ok(None) => {}
                Err(error) => return Err(bad(&error.to_string())),
            }
            match buffer.fill(from).await {
                Ok(0) => return Err(broken("it closed the connection before it answered")),
                Ok(_) => {}
                Err(error) => return Err(broken(&error.to_string())),
            }
        }
    }
}

/// Where interim responses are sent.
#[derive(Clone, Copy)]
pub(super) struct Interim<'a> {
    /// The client; `None` if it does not know them (HTTP/1.0), or if no client waits.
    pub client: Option<&'a Duplex>,
}

impl Interim<'_> {
    async fn pass(&self, response: &Response) -> Result<(), Failure> {
        let Some(client) = self.client else { return Ok(()) };
        let mut out = Vec::new();
        response.write_to(&mut out);
        let gone = |error| Failure::new(EndReason::ClientGone, format!("the client left: {error}"));
        write_all(client, &mut [IoSlice::new(&out)]).await.map_err(gone)
    }
}

/// Whether interim responses are sent to a client of this version.
pub(super) const fn knows_interim(version: Version) -> bool {
    matches!(version, Version::Http11)
}

/// The server closed or reset the connection.
pub(super) fn broken(what: &str) -> Failure {
    Failure::new(EndReason::ServerReset, format!("the server broke off: {what}"))
}

/// The server's response is malformed.
pub(super) fn bad(what: &str) -> Failure {
    Failure::new(EndReason::HopFailed, format!("the server's answer is not HTTP: {what}"))
}

/// Adds the Date that every response must have (RFC 9110 Sec. 6.6.1), if it is missing.
pub(super) fn add_date(fields: &mut Fields) {
    if !fields.has("date") {
        fields.push("Date", sidetrack_core::http::cache::format_date(super::now_s()));
    }
}
