//! One request: the client, the requested resource, and the decision of policy.

use super::Proxy;
use super::answer::Answer;
use super::duplex::Duplex;
use super::har::Kept;
use super::meter::Meter;
use super::open::Inside;
use super::pool::Route;
use super::servers::Secure;
use crate::carry::Failure;
use crate::intercept::Listening;
use crate::live::LiveFlow;
use crate::worker::Worker;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, HostName, Process, Protocol};
use sidetrack_core::http::basic::credentials;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::forward::{self, RequestHop, Stop, Via};
use sidetrack_core::http::framing::{Length, request_length};
use sidetrack_core::http::message::{MessageError, Method, Request, Version};
use sidetrack_core::http::udp;
use sidetrack_core::http::uri::{Form, KeyRules, Resource, Scheme, Target};
use sidetrack_core::placeholder::Guard;
use sidetrack_core::policy::{Action, Carry, Decision, Seen, Url, Verdict};
use sidetrack_core::secret;
use std::borrow::Cow;
use std::net::SocketAddr;
use std::rc::Rc;

/// A request for a server.
#[derive(Debug)]
pub(super) struct Asked {
    /// The head, ready for the server.
    pub request: Request,
    /// How its body is framed.
    pub length: Length,
    /// The hop-by-hop properties of the request.
    pub hop: RequestHop,
    /// The client's version.
    pub version: Version,
    /// The requested resource.
    pub resource: Resource,
    /// The flow.
    pub flow: Flow,
    /// Which connections can serve it.
    pub route: Route,
    /// The server's address, if only the client claims that the host is there.
    pub unproven: Option<Destination>,
    /// The configuration names the server, not the client.
    pub is_configured: bool,
    /// Counting functions that its content passes.
    pub meter: Option<Rc<Meter>>,
    /// The port at which this server is reached by HTTP/3, which the client is told (RFC 7838).
    pub http3_port: Option<u16>,
    /// The secrets of the command, as this request may use them. [`Self::request`] has their placeholders.
    pub guard: Option<Guard>,
    /// Keeps its content and that of the response, for the archive of requests.
    pub kept: Option<Rc<Kept>>,
}

impl Asked {
    /// The same request again, as a flow of its own.
    pub(super) fn again(&self) -> Self {
        Self {
            request: self.request.clone(),
            length: self.length,
            hop: self.hop.clone(),
            version: self.version,
            resource: self.resource.clone(),
            flow: self.flow.clone(),
            route: self.route.clone(),
            unproven: self.unproven.clone(),
            is_configured: self.is_configured,
            // No client waits for a repeated fetch, so bandwidth limits do not apply.
            meter: None,
            http3_port: self.http3_port,
            guard: self.guard.clone(),
            kept: None,
        }
    }

    /// Tells the client that it may use HTTP/3, instead of what the server says about itself. Where TLS with the server is
    /// ours, so is what the server says: the client would leave us by it.
    pub(super) fn announce(&self, fields: &mut Fields) {
        match self.http3_port {
            Some(port) => fields.set("Alt-Svc", format!("h3=\":{port}\"; ma=86400")),
            None if self.route.secure.is_some() => drop(fields.remove("alt-svc")),
            None => {}
        }
    }

    /// The cache key of a resource of this server.
    pub(super) fn key_of(&self, resource: &Resource, rules: &KeyRules) -> Vec<u8> {
        let mut key = resource.key(rules);
        if let Some(address) = &self.unproven {
            // Ordinary keys contain no space, so this key cannot be one of them.
            key.extend_from_slice(format!(" at {address}").as_bytes());
        }
        key
    }
}

/// What a request asks for.
#[derive(Debug)]
pub(super) enum Wish {
    /// A resource.
    Resource(Box<Asked>),
    /// A tunnel. Policy decides when it is made, as for any flow.
    Tunnel {
        /// The destination.
        destination: Destination,
        /// The user, if known.
        user: Option<String>,
    },
    /// A tunnel of datagrams (CONNECT-UDP). Policy decides when it is made.
    Datagrams {
        /// The destination of the datagrams.
        destination: Destination,
        /// The user, if known.
        user: Option<String>,
    },
    /// Answered by us; the length is that of the request's body.
    Answer(Box<Answer>, Length),
}

/// Judges the requests of one connection.
pub(super) struct Desk<'a> {
    /// The worker.
    pub worker: &'a Worker,
    /// The listener.
    pub listening: &'a Listening,
    /// State shared by the listener's connections.
    pub proxy: &'a Proxy,
    /// The client.
    pub peer: SocketAddr,
    /// Its connection.
    pub stream: &'a Duplex,
    /// The one server that all requests are for, if there is one.
    pub inside: Option<&'a Inside>,
    /// The version of the stream that brings the requests, if it is another than theirs.
    pub received: Option<&'static str>,
}

impl Desk<'_> {
    /// Our end of the client's connection.
    fn local(&self) -> SocketAddr {
        self.stream.local_addr().unwrap_or(self.listening.address)
    }

    /// The process behind a flow of this connection.
    fn owner(&self, flow: &Flow) -> Process {
        self.worker.owners().of(flow, self.stream.ends(self.peer, self.listening.address))
    }

    /// Determines what a request asks for and whether policy allows it.
    pub(super) fn judge(&self, request: Request, live: &LiveFlow) -> Wish {
        let length = match request_length(&request) {
            Ok(length) => length,
            Err(error) => return Wish::Answer(Box::new(Answer::broken(self.proxy, error)), Length::None),
        };
        self.wish(request, length, live).unwrap_or_else(|answer| Wish::Answer(answer, length))
    }

    fn wish(&self, request: Request, length: Length, live: &LiveFlow) -> Result<Wish, Box<Answer>> {
        let scheme = self.inside.map_or(Scheme::Http, Inside::scheme);
        let (target, form) =
            Target::within(&request, scheme).map_err(|error| self.no_target(&request, error))?;
        if let Some(inside) = self.inside {
            return self.wish_inside(inside, (request, length), target, live);
        }
        let is_own = form == Form::Origin && self.proxy.settings.to.is_none();
        if is_own && matches!(request.target.as_slice(), b"/proxy.pac" | b"/wpad.dat") {
            return Err(Box::new(Answer::pac(self.local())));
        }
        let user = self.user(&request)?;
        match target {
            Target::Tunnel(destination) => Ok(Wish::Tunnel { destination, user }),
            Target::Server => Err(Box::new(Answer::here(&request))),
            Target::Resource(resource) if self.asks_for_datagrams(&request, &resource, form) => {
                self.datagrams(&resource, length, user)
            }
            Target::Resource(_) if is_own => Err(self.refused(
                400,
                "this is a proxy: ask it for a whole URL (http://host/path), or set it as the proxy of your program",
            )),
            Target::Resource(resource) if form == Form::Absolute && resource.scheme.as_str() == "https" => {
                if request.fields.has_member("cache-control", "only-if-cached") {
                    // For example a sibling's question. Content from TLS must not be sent in plain text.
                    return Err(Box::new(Answer::not_cached(self.proxy)));
                }
                let why = "https is carried in a tunnel: ask for it with CONNECT";
                Err(self.not_served(why))
            }
            Target::Resource(resource) => {
                let speaks_for_server = form == Form::Origin && self.proxy.settings.http3;
                let http3_port = speaks_for_server.then_some(self.listening.address.port());
                let mut wish = self.asked(request, length, resource, user, live)?;
                if let Wish::Resource(asked) = &mut wish {
                    asked.http3_port = http3_port;
                }
                Ok(wish)
            }
        }
    }

    /// Whether a request is CONNECT-UDP to us, and not to a server behind us. RFC 9298 Sec. 3.2 writes the whole URL of the
    /// proxy, which is an https one.
    fn asks_for_datagrams(&self, request: &Request, resource: &Resource, form: Form) -> bool {
        let is_ours = form == Form::Origin || resource.scheme == Scheme::Https;
        is_ours
            && self.proxy.settings.to.is_none()
            && udp::is_asked(request)
            && resource.path.starts_with(udp::PREFIX.as_bytes())
    }

    /// Reads where the datagrams of CONNECT-UDP go.
    fn datagrams(
        &self,
        resource: &Resource,
        length: Length,
        user: Option<String>,
    ) -> Result<Wish, Box<Answer>> {
        if !matches!(length, Length::None | Length::Exact(0)) {
            return Err(self.refused(400, "a request for a tunnel of datagrams has no content"));
        }
        match udp::target(&resource.path) {
            Ok(destination) => Ok(Wish::Datagrams { destination, user }),
            Err(error) => Err(self.refused(400, &error.to_string())),
        }
    }

    /// A request on a connection that was made for one server.
    fn wish_inside(
        &self,
        inside: &Inside,
        (request, length): (Request, Length),
        target: Target,
        live: &LiveFlow,
    ) -> Result<Wish, Box<Answer>> {
        let Target::Resource(resource) = target else {
            return match target {
                Target::Server => Err(Box::new(Answer::here(&request))),
                _ => Err(self.not_served("a tunnel is asked of a proxy, and this connection is to a server")),
            };
        };
        // The certificate was verified for one name only: other names need their own connections.
        let is_other = inside.secure.as_ref().is_some_and(|secure| {
            resource.server.host != secure.host || resource.server.port != inside.destination.port
        });
        if is_other || resource.scheme != inside.scheme() {
            let why = "the request is for another server than the connection: use a connection of its own";
            return Err(self.refused(421, why));
        }
        self.asked(request, length, resource, inside.user.clone(), live)
    }

    fn no_target(&self, request: &Request, error: MessageError) -> Box<Answer> {
        if Target::is_foreign(&request.target) {
            return self.not_served("only http is carried this way");
        }
        Box::new(Answer::broken(self.proxy, error))
    }

    fn not_served(&self, why: &str) -> Box<Answer> {
        Box::new(Answer::refused(self.proxy, 501, EndReason::Unsupported, why))
    }

    fn refused(&self, status: u16, why: &str) -> Box<Answer> {
        Box::new(Answer::refused(self.proxy, status, EndReason::BadRequest, why))
    }

    /// Authenticates the user, if the listener asks for one (RFC 7617).
    fn user(&self, request: &Request) -> Result<Option<String>, Box<Answer>> {
        let users = &self.proxy.settings.users;
        if users.is_empty() {
            return Ok(None);
        }
        let challenge = |why| Box::new(Answer::challenge(self.proxy, why));
        let Some(value) = request.fields.first("proxy-authorization") else {
            return Err(challenge("this proxy asks for a user name and a password"));
        };
        let why = "user name and password have to come by method Basic";
        let (user, password) = credentials(value).ok_or_else(|| challenge(why))?;
        match secret::account(users, user.as_bytes(), password.as_bytes()) {
            Some(_) => Ok(Some(user)),
            None => Err(challenge("user name or password is wrong")),
        }
    }

    fn asked(
        &self,
        mut request: Request,
        length: Length,
        resource: Resource,
        user: Option<String>,
        live: &LiveFlow,
    ) -> Result<Wish, Box<Answer>> {
        let mut flow = self.flow(&resource, user);
        let verdict = self.decide(&mut flow, Some(&resource));
        let config = self.worker.config();
        let verdict = self.worker.judge(&config, live, &flow, verdict);
        if config.policy.asks_url() {
            live.traced(|trace| trace.url = Some(resource.url().into()));
        }
        let carry = match verdict.action {
            Action::Carry(carry) => carry,
            Action::Deny => {
                return Err(Box::new(Answer::denied(self.proxy, &resource.host_field(), &verdict.why)));
            }
        };
        let meter = self.meter(&carry, &flow)?;
        let version = request.version;
        let before = matches!(request.method, Method::Trace | Method::Options).then(|| request.clone());
        let via = Via { pseudonym: &self.proxy.pseudonym, received: self.received };
        let hop = forward::request(&mut request, &resource, length, via).map_err(|stop| match stop {
            Stop::Here => Box::new(Answer::here(before.as_ref().unwrap_or(&request))),
            Stop::Loop => {
                let why = "the request came through this proxy before";
                Box::new(Answer::refused(self.proxy, 502, EndReason::Loop, why))
            }
            Stop::UnknownExpectation => self.refused(417, "the request expects what no proxy knows"),
        })?;
        let guard = self.guard(&request, &resource)?;
        let destination = carry.destination(&flow);
        // An HTTP/2 connection is shared, so upgrades and connection authentication need one of their own.
        let is_alone = hop.upgrade.is_some() || hop.needs_own_connection;
        let secure = self.inside.map_or(self.proxy.secure.as_ref(), |inside| inside.secure.as_ref());
        let secure = secure.map(|secure| Secure { is_alone, ..secure.clone() });
        let unproven = self.unproven(&resource);
        let route = Route { carry, destination, secure };
        let is_configured = self.inside.is_none() && self.proxy.settings.to.is_some();
        let asked = Asked {
            request,
            length,
            hop,
            version,
            resource,
            flow,
            route,
            unproven,
            is_configured,
            meter,
            http3_port: None,
            guard,
            kept: None,
        };
        Ok(Wish::Resource(Box::new(asked)))
    }

    /// Returns what the request does with the secrets of the command, if it has some.
    fn guard(&self, request: &Request, resource: &Resource) -> Result<Option<Guard>, Box<Answer>> {
        let Some(secrets) = self.proxy.tap.as_ref().and_then(|tap| tap.secrets()) else { return Ok(None) };
        let is_verified = self.inside.is_some_and(|inside| inside.secure.is_some());
        let guard = Guard::new(secrets, is_verified.then_some(&resource.server));
        match guard.check(request) {
            Ok(()) => Ok(Some(guard)),
            Err(misplaced) => Err(Box::new(Answer::misplaced(self.proxy, &guard.why(misplaced)))),
        }
    }

    /// The functions of a rule, if they only count. Other functions cannot be applied to requests, and no flow may bypass
    /// its functions.
    fn meter(&self, carry: &Carry, flow: &Flow) -> Result<Option<Rc<Meter>>, Box<Answer>> {
        let Some(spec) = &carry.chain else { return Ok(None) };
        let chain = self.worker.functions().chain(spec, flow).map_err(|stop| {
            let failure = Failure::new(stop.reason, stop.detail);
            Box::new(Answer::failed(self.proxy, &flow.orig_dst.to_string(), &failure))
        })?;
        Meter::new(chain).map(|meter| Some(Rc::new(meter))).ok_or_else(|| {
            let why = "the rule leads its flows through functions that see bytes, which requests of an http listener \
                       cannot pass: ask by CONNECT, or use another kind of listener";
            Box::new(Answer::refused(self.proxy, 501, EndReason::FunctionFailed, why))
        })
    }

    fn flow(&self, resource: &Resource, user: Option<String>) -> Flow {
        let fixed = self.inside.map(|inside| &inside.destination).or(self.proxy.settings.to.as_ref());
        let flow = self.flow_to(fixed.unwrap_or(&resource.server).clone(), user);
        let process = self.inside.and_then(|inside| inside.process.clone());
        Flow { host: name(&resource.server.host).cloned(), process, ..flow }
    }

    /// A flow to a server whose host name is not known otherwise.
    pub(super) fn flow_to(&self, orig_dst: Destination, user: Option<String>) -> Flow {
        Flow {
            protocol: Protocol::Tcp,
            intercept: self.listening.catches.intercept(),
            listener: self.listening.name.clone(),
            client: self.peer,
            host: Some(&orig_dst.host).and_then(name).cloned(),
            orig_dst,
            process: None,
            user,
        }
    }

    /// The destination, if only the client claims that the host is at this address. Responses from there must not be stored
    /// for other clients.
    fn unproven(&self, resource: &Resource) -> Option<Destination> {
        let inside = self.inside.filter(|inside| inside.secure.is_none())?;
        (inside.destination.host != resource.server.host).then(|| inside.destination.clone())
    }

    /// Lets policy decide about a request, or about a connection before its first request. The process is looked up only
    /// if a rule needs it.
    pub(super) fn decide(&self, flow: &mut Flow, resource: Option<&Resource>) -> Verdict {
        let config = self.worker.config();
        let name = flow.host.clone();
        let url = resource.filter(|_| config.policy.asks_url()).map(Url::of);
        let seen = match &url {
            Some(url) => Seen::Request { host: name.as_ref(), url },
            None => Seen::FirstBytes(name.as_ref()),
        };
        loop {
            match config.policy.decide(flow, seen) {
                Decision::Verdict(verdict) => {
                    let asks = self.listening.names_programs() || config.policy.asks_process_of_addresses();
                    if asks && flow.process.is_none() {
                        flow.process = Some(self.owner(flow));
                    }
                    return verdict;
                }
                // This is asked only once: afterwards the flow has the answer.
                Decision::NeedProcess { .. } if flow.process.is_none() => {
                    flow.process = Some(self.owner(flow));
                }
                Decision::NeedProcess { .. } | Decision::NeedFirstBytes { .. } => {
                    return Verdict {
                        rule: None,
                        index: None,
                        action: Action::Deny,
                        why: "a rule asks for what a request cannot tell".into(),
                        agreement: None,
                    };
                }
            }
        }
    }
}

const fn name(host: &Host) -> Option<&HostName> {
    match host {
        Host::Name(name) => Some(name),
        Host::Ip(_) => None,
    }
}

/// The name of a request in records: method and URL without the query, which may hold secrets. The texts in `said`
/// follow, each after a space. The capacity is exact, because records are kept.
pub(super) fn name_of(asked: &Asked, said: &[&str]) -> String {
    let Asked { request, resource, .. } = asked;
    let path = resource.path.split(|byte| *byte == b'?').next().unwrap_or_default();
    let (method, path) = (String::from_utf8_lossy(request.method.as_bytes()), String::from_utf8_lossy(path));
    // The head is already rewritten for the server and has the host.
    let host = request.fields.first("host").and_then(|host| std::str::from_utf8(host).ok());
    let host = host.map_or_else(|| Cow::Owned(resource.host_field()), Cow::Borrowed);
    let start = [&*method, " ", resource.scheme.as_str(), "://", &host, &path];
    let length: usize = start.iter().chain(said).map(|piece| piece.len()).sum();
    let mut name = String::with_capacity(length + said.len());
    for piece in start {
        name.push_str(piece);
    }
    for piece in said {
        name.push(' ');
        name.push_str(piece);
    }
    name
}
