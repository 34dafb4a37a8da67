//! One client connection: its requests are served one after the other. Each is a flow with its own record.

use super::answer::Answer;
use super::bound::Bound;
use super::buffer::Buffer;
use super::copy::write_all;
use super::duplex::Duplex;
use super::exchange::{Next, Outcome, Turn, finish};
use super::har::{Har, Told};
use super::open::Inside;
use super::request::{Desk, Wish};
use super::{Proxy, cached, h2};
use crate::carry::{Client, Wire};
use crate::intercept::{Listening, proxy_header};
use crate::live::profile::Stage;
use crate::reactor::{now, timeout, timeout_at};
use crate::session::{Admitted, Entry, Watched, undecided, upgraded};
use crate::worker::{Admission, CROWDED, Idle, Place, Worker};
use sidetrack_core::flow::{EndReason, Process, Side};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::forward;
use sidetrack_core::http::framing::Length;
use sidetrack_core::http::message::{MessageError, Method, Request, Response, Scan, Sender, Version};
use sidetrack_core::http::sibling;
use sidetrack_core::http::uri::{Resource, Scheme};
use std::future::poll_fn;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// How long a connection may be idle between requests.
const IDLE: Duration = Duration::from_secs(75);

/// The first bytes of a client that speaks HTTP/2 (RFC 9113 Sec. 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The detail in the record of an incomplete request.
const HALF: &str = "the client left before its request was complete";

/// One client connection.
pub(super) struct Connection {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The listener that accepted it.
    pub listening: Arc<Listening>,
    /// State shared by the listener's connections.
    pub proxy: Arc<Proxy>,
    /// The client's address.
    pub peer: SocketAddr,
    /// The stream to the client.
    pub stream: Duplex,
    /// Bytes from the client that are not used yet.
    pub buffer: Buffer,
    /// The one server that all requests are for; `None`: each request names its own.
    pub inside: Option<Inside>,
    /// The process behind it, if it was looked up before its first request.
    pub process: Option<Process>,
    /// The client speaks HTTP/2 from now on.
    pub is_multiplexed: bool,
    /// The client speaks Multipath TCP.
    pub is_multipath: bool,
    /// The version of the stream that brings the requests, if it is another than theirs: "2.0" or "3.0".
    pub received: Option<&'static str>,
    /// What was sent to the client for the current request.
    pub told: Told,
    /// The server connections that belong to this client connection.
    pub bound: Bound,
    /// Its place among the flows, if it has one of its own. A tunnel may outlive its task.
    pub admission: Option<Arc<Admission>>,
}

/// What arrived when a request was expected.
enum Came {
    Request(Request),
    /// The client speaks HTTP/2.
    Multiplexed,
    Broken(MessageError),
    /// The client reset, or closed before the first byte of a request.
    Gone,
    /// The client closed in the middle of a request head.
    Ended,
    /// No complete request arrived in time.
    Late,
    /// The request was given up early, because new connections needed the room.
    Crowded,
}

/// Properties of the request that determine how its answer is framed.
struct Asker {
    version: Version,
    is_head: bool,
    keeps_alive: bool,
}

/// Serves one accepted connection to its end.
pub(super) async fn serve(
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    proxy: Arc<Proxy>,
    Admitted { client, peer, admission }: Admitted,
) {
    let admission = Arc::new(admission);
    if let Some(connection) = open(worker, listening, proxy, client, peer).await
        && let Some(mut connection) = Box::pin(connection.secured()).await
    {
        connection.admission = Some(admission.clone());
        connection.serve_all().await;
    }
    drop(admission);
}

/// Turns a sibling's question into a request that accepts only a stored response.
fn sibling_asks(resource: Resource) -> Request {
    let fields =
        Fields::from([("Host", resource.host_field().as_str()), ("Cache-Control", "only-if-cached")]);
    let start = format!("{}://{}", resource.scheme.as_str(), resource.host_field());
    let target = [start.as_bytes(), &resource.path].concat();
    Request { method: Method::Get, target, version: Version::Http11, fields }
}

/// Reads the PROXY protocol header if the peer must send one.
async fn open(
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    proxy: Arc<Proxy>,
    mut client: Client,
    mut peer: SocketAddr,
) -> Option<Connection> {
    if listening.proxy_from.contains(peer.ip()) {
        let wait = Duration::from_millis(worker.config().limits.handshake_timeout_ms);
        let read = timeout(wait, proxy_header::read(&mut client, peer)).await;
        peer = match read {
            Ok(Ok(peer)) => peer,
            failed => {
                let mut entry = Entry::new(&worker);
                entry.live().decide(undecided(&listening, peer));
                client.reset();
                let late = (EndReason::HandshakeTimeout, "no PROXY protocol header came in time".to_owned());
                let (reason, detail) = match failed {
                    Ok(Err(failure)) => (failure.reason, failure.detail),
                    _ => late,
                };
                entry.end(reason, Some(detail));
                return None;
            }
        };
    }
    Some(Connection::new(worker, listening, proxy, client, peer))
}

impl Connection {
    /// Returns the connection of a client that is expected to speak HTTP.
    pub(super) fn new(
        worker: Arc<Worker>,
        listening: Arc<Listening>,
        proxy: Arc<Proxy>,
        mut client: Client,
        peer: SocketAddr,
    ) -> Self {
        let buffer = Buffer::holding(client.take_held());
        let is_multipath = listening.mptcp && client.stream.speaks_multipath();
        let stream = Duplex::from(client.stream);
        Self {
            worker,
            listening,
            proxy,
            peer,
            stream,
            buffer,
            inside: None,
            process: None,
            is_multiplexed: false,
            is_multipath,
            received: None,
            told: Told::default(),
            bound: Bound::default(),
            admission: None,
        }
    }

    /// Serves requests until the connection ends.
    pub(super) async fn serve_all(self) {
        let mut connection = self;
        if connection.is_multiplexed {
            return connection.serve_streams().await;
        }
        // A stream of HTTP/2 brings its request at once and uses no descriptor, so it needs no place.
        let mut place = (!connection.stream.is_memory()).then(|| Place::enter(&connection.worker));
        loop {
            let came = connection.next(place.as_ref()).await;
            place = None;
            match connection.serve_one(came).await {
                Some(same) if same.is_multiplexed => return same.serve_streams().await,
                Some(same) => connection = same,
                None => break,
            }
        }
    }

    /// Serves the requests that arrive by HTTP/2.
    async fn serve_streams(self) {
        // Boxed: HTTP/1 connections need no room for it in their future.
        Box::pin(h2::accept::serve(self)).await;
    }

    /// Whether the bytes so far are the beginning of HTTP/2 without TLS, or may become it (RFC 9113 Sec. 3.3 and 3.4). Only
    /// a proxy takes it, for tunnels of datagrams.
    fn may_be_multiplexed(&self) -> bool {
        let data = self.buffer.data();
        let is_proxy = self.inside.is_none() && self.proxy.settings.to.is_none() && !self.stream.is_memory();
        is_proxy && !data.is_empty() && PREFACE.starts_with(&data[..data.len().min(PREFACE.len())])
    }

    /// Waits for the next request head.
    async fn next(&mut self, first: Option<&Place>) -> Came {
        self.buffer.release();
        let patience = Duration::from_millis(self.worker.config().limits.handshake_timeout_ms);
        if self.buffer.is_empty() {
            let readable = poll_fn(|cx| self.stream.poll_read_ready(cx));
            let came = match first {
                Some(place) => match Place::while_kept(Some(place), timeout(patience, readable)).await {
                    Some(Ok(())) => Idle::Over(()),
                    Some(Err(_)) => Idle::Late,
                    None => Idle::Lost,
                },
                // An HTTP/2 stream uses no descriptor: its connection, not the stream, is closed to make room.
                None => {
                    Place::while_idle((!self.stream.is_memory()).then_some(&*self.worker), IDLE, readable)
                        .await
                }
            };
            match came {
                Idle::Over(()) => {}
                Idle::Late => return Came::Late,
                Idle::Lost => return Came::Crowded,
            }
        }
        let deadline = now() + patience;
        let mut scan = Scan::default();
        loop {
            let may_be_multiplexed = first.is_some() && self.may_be_multiplexed();
            if may_be_multiplexed && self.buffer.data().len() >= PREFACE.len() {
                return Came::Multiplexed;
            }
            match scan.advance(self.buffer.data(), Sender::Client) {
                // The beginning of HTTP/2 looks like a head.
                _ if may_be_multiplexed => {}
                Ok(Some(length)) => {
                    let head = self.buffer.data().get(..length).unwrap_or_default();
                    let parsed = sibling::question(head)
                        .map_or_else(|| Request::parse(head), |question| question.map(sibling_asks));
                    self.buffer.consume(length);
                    return parsed.map_or_else(Came::Broken, Came::Request);
                }
                Ok(None) => {}
                Err(error) => return Came::Broken(error),
            }
            match Place::while_kept(first, timeout_at(deadline, self.buffer.fill(&self.stream))).await {
                Some(Ok(Ok(1..))) => {}
                Some(Ok(Ok(0))) if !self.buffer.is_empty() => return Came::Ended,
                Some(Ok(_)) => return Came::Gone,
                Some(Err(_)) => return Came::Late,
                None => return Came::Crowded,
            }
        }
    }

    /// Serves what arrived; returns the connection if it serves another request.
    async fn serve_one(mut self, came: Came) -> Option<Self> {
        if matches!(came, Came::Multiplexed) {
            return Some(Self { is_multiplexed: true, ..self });
        }
        if self.buffer.is_empty() && matches!(came, Came::Gone | Came::Late | Came::Crowded) {
            // No request arrived: no flow and no record.
            self.client().stream.close(false);
            return None;
        }
        let mut entry = Entry::new(&self.worker);
        let live = entry.live().clone();
        live.speaks_multipath(Side::Client, self.is_multipath);
        self.stream.note_leg(&live, Side::Client);
        self.told = Told::of(self.received.filter(|_| self.stream.is_memory()));
        let clock = self.worker.clock;
        let outcome = {
            let work = pin!(self.respond(came, &live));
            Watched::new(Stage::Http, work, &live, clock).await
        };
        let outcome = match outcome {
            Ok(outcome) => outcome,
            // Boxed here and below: code that ends a connection needs no room in the future that serves.
            Err(reason) => Box::pin(self.interrupted(reason)).await,
        };
        if live.decided().is_none() {
            live.decide(undecided(&self.listening, self.peer));
        }
        if let Some((har, scheme)) = self.har() {
            har.add(scheme, &mut self.told, &live);
        }
        match outcome.next {
            Next::Again => {
                entry.end(outcome.reason, outcome.detail);
                return Some(self);
            }
            Next::Close => {
                entry.end(outcome.reason, outcome.detail);
                Box::pin(self.client().close_after_answer()).await;
            }
            Next::Reset => {
                self.client().reset();
                entry.end(outcome.reason, outcome.detail);
            }
            Next::Tunnel(destination, user) => {
                return Box::pin(self.tunnel(destination, user, entry)).await;
            }
            Next::Datagrams(destination, user) => self.datagrams(destination, user, entry).await,
            Next::Upgraded(server, carry) => {
                let (worker, listening) = (self.worker.clone(), self.listening.clone());
                let ((stream, peeked), mut buffer) = (server.stream.into_stream(), server.buffer);
                let early = [buffer.take(), peeked].concat();
                Box::pin(upgraded(&worker, &listening, self.client(), (stream, early), &carry, entry)).await;
            }
        }
        None
    }

    /// The HAR archive, if requests are archived, and the scheme of this connection's requests.
    fn har(&self) -> Option<(Arc<Har>, Scheme)> {
        let har = self.proxy.tap.as_ref()?.har()?;
        Some((har.clone(), self.inside.as_ref().map_or(Scheme::Http, Inside::scheme)))
    }

    /// Turns it into a [`Client`], with the bytes that arrived and are not used yet.
    pub(super) fn client(mut self) -> Client {
        let held = self.buffer.take();
        let (stream, peeked) = self.stream.into_stream();
        let mut client = Client::new(stream);
        client.put_last(&held);
        client.put_last(&peeked);
        client
    }

    async fn respond(&mut self, came: Came, live: &Arc<crate::live::LiveFlow>) -> Outcome {
        let broken = Asker { version: Version::Http11, is_head: false, keeps_alive: false };
        let refused = |status, reason, why: &str| Answer::refused(&self.proxy, status, reason, why);
        let answer = match came {
            Came::Request(request) => return self.respond_to(request, live).await,
            Came::Multiplexed => return Outcome::new(EndReason::Internal, None, Next::Close),
            Came::Gone => {
                return Outcome::new(EndReason::ClientGone, Some(HALF.to_owned()), Next::Close);
            }
            Came::Broken(error) => Answer::broken(&self.proxy, error),
            // The client may still read (RFC 9112 Sec. 8).
            Came::Ended => refused(400, EndReason::ClientGone, HALF),
            Came::Crowded => refused(503, EndReason::Limit, CROWDED),
            Came::Late => refused(408, EndReason::HandshakeTimeout, "the request did not come in time"),
        };
        self.answer(answer, Length::None, broken).await
    }

    async fn respond_to(&mut self, request: Request, live: &Arc<crate::live::LiveFlow>) -> Outcome {
        // The inside of an intercepted tunnel is archived by itself; an opaque tunnel has no HTTP to archive.
        if request.method != Method::Connect
            && let Some(kept) = self.har().map(|(har, _)| har.keep())
        {
            (self.told.request, self.told.kept) = (Some(request.clone()), kept);
        }
        let asker = Asker {
            version: request.version,
            is_head: request.method == Method::Head,
            keeps_alive: forward::keeps_alive(request.version, &request.fields),
        };
        let (worker, listening, proxy) = (&*self.worker, &*self.listening, &*self.proxy);
        let inside = self.inside.as_ref();
        let desk = Desk {
            worker,
            listening,
            proxy,
            peer: self.peer,
            stream: &self.stream,
            inside,
            received: self.received,
        };
        match desk.judge(request, live) {
            Wish::Answer(answer, length) => self.answer(*answer, length, asker).await,
            Wish::Tunnel { destination, user } => {
                Outcome::new(EndReason::Ok, None, Next::Tunnel(destination, user))
            }
            Wish::Datagrams { destination, user } => {
                Outcome::new(EndReason::Ok, None, Next::Datagrams(destination, user))
            }
            Wish::Resource(mut asked) => {
                asked.kept.clone_from(&self.told.kept);
                let mut turn = Turn {
                    proxy: &self.proxy,
                    worker: &self.worker,
                    live,
                    asked: &asked,
                    stream: &self.stream,
                    buffer: &mut self.buffer,
                    told: &mut self.told,
                    bound: &self.bound,
                };
                let result = match &proxy.cache {
                    Some(cache) => cached::serve(&mut turn, cache).await,
                    // Mostly a sibling's question. A sibling must not ask others in turn.
                    None if asked.request.fields.has_member("cache-control", "only-if-cached") => {
                        Err(Box::new(Answer::not_cached(proxy)))
                    }
                    None => turn.pass(None, &mut |_| false, None).await,
                };
                match result {
                    Ok(outcome) => outcome,
                    Err(answer) => {
                        let is_empty = matches!(asked.length, Length::None | Length::Exact(0));
                        let body = if is_empty { Length::None } else { Length::UntilClose };
                        self.answer(*answer, body, asker).await
                    }
                }
            }
        }
    }

    /// Sends an answer of our own. The connection ends if the request has an unread body.
    async fn answer(&mut self, answer: Answer, body: Length, asker: Asker) -> Outcome {
        let unread = !matches!(body, Length::None | Length::Exact(0));
        let keeps_alive = asker.keeps_alive && !answer.closes && !unread;
        let mut head: Response = answer.head;
        let length = Length::Exact(answer.content.len() as u64);
        let (_, again) = finish(&mut head, length, asker.version, keeps_alive);
        let mut out = Vec::with_capacity(512 + answer.content.len());
        head.write_to(&mut out);
        if !asker.is_head {
            out.extend_from_slice(&answer.content);
            if let Some(kept) = &self.told.kept {
                kept.push(Side::Server, &answer.content);
            }
        }
        self.told.begin(&head);
        if let Err(error) = write_all(&self.stream, &mut [IoSlice::new(&out)]).await {
            let detail = format!("the client left: {error}");
            return Outcome::new(EndReason::ClientGone, Some(detail), Next::Close);
        }
        Outcome::new(answer.reason, answer.detail, if again { Next::Again } else { Next::Close })
    }

    /// The flow was ended by its deadline or by an operator.
    async fn interrupted(&mut self, reason: EndReason) -> Outcome {
        let what = match reason {
            EndReason::ConnectTimeout => "the path to the server was not made in time",
            EndReason::Idle => "nothing moved for too long",
            EndReason::Lifetime => "it took longer than it may",
            _ => "ended by hand",
        };
        if self.told.is_begun {
            return Outcome::new(reason, Some(what.to_owned()), Next::Reset);
        }
        let failure = crate::carry::Failure::new(reason, what);
        let answer = Answer::failed(&self.proxy, "The answer", &failure);
        let asker = Asker { version: Version::Http11, is_head: false, keeps_alive: false };
        let sending = self.answer(answer, Length::UntilClose, asker);
        match timeout(Duration::from_secs(1), sending).await {
            Ok(outcome) => Outcome { reason, ..outcome },
            Err(_) => Outcome::new(reason, Some(what.to_owned()), Next::Reset),
        }
    }
}
