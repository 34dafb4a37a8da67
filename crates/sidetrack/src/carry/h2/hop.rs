//! A proxy that is reached by TLS: CONNECT and CONNECT-UDP as streams of a shared connection if it speaks HTTP/2 (RFC 9113 Sec. 8.5,
//! RFC 8441, RFC 9298), otherwise in a connection of HTTP/1.1 for each flow.
//!
//! Each stream is a connection in memory that speaks HTTP/1.1, as with a proxy of kind `http`. A task translates the request and its
//! answer. Bytes and capsules pass unchanged.

use super::{ALPN, Cut, NoAnswer, Requests, STREAMS_MAX, answered, begin, failed, headers, tunnel};
use crate::carry::shared::{self, Opened, PIPE_BYTES, Pool, Shared, Way};
use crate::carry::{Failure, Memory, Order, Stream, hop_name, hops};
use crate::reactor::{self, sleep, timeout};
use h2::ext::Protocol;
use h2::{Ping, PingPong, Reason};
use http::{Method, Uri, Version};
use sidetrack_core::carrier::{Hop, HopProtocol};
use sidetrack_core::flow::EndReason;
use sidetrack_core::http::connect::Kind;
use sidetrack_core::http::message::{self, Request};
use sidetrack_core::http::udp;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::Notify;

/// The word for ALPN of HTTP/1.1.
const HTTP_1: &[u8] = b"http/1.1";
/// The time between two signs of life of a connection.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The time without an answer to a PING after which the hop counts as dead.
const DEAD_AFTER: Duration = Duration::from_secs(20);
/// How long a connection may have no streams.
const IDLE: Duration = Duration::from_secs(75);

thread_local! {
    /// The connections of this worker.
    static KEPT: Pool<Peer> = const { Pool::new() };
}

/// A connection to a hop that speaks HTTP/2.
#[derive(Debug)]
struct Peer {
    requests: Requests,
    /// How many streams we have open.
    streams: Cell<usize>,
    /// When the last of them ended.
    idle_since: Cell<Instant>,
    /// No stream may be added: the hop has refused one, or is idle for too long.
    is_leaving: Cell<bool>,
}

impl Shared for Peer {
    fn is_open(&self) -> bool {
        !self.is_leaving.get() && self.requests.is_open()
    }

    fn has_room(&self) -> bool {
        self.streams.get() < self.requests.streams_max().min(STREAMS_MAX as usize)
    }
}

/// The place of one stream on a connection.
struct Place(Rc<Peer>);

impl Place {
    fn take(peer: Rc<Peer>) -> Self {
        peer.streams.set(peer.streams.get() + 1);
        Self(peer)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get() - 1);
        self.0.idle_since.set(Instant::now());
    }
}

/// How a stream has ended that had no answer.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What happened.
    pub why: String,
    /// The request was not processed, or nothing depends on it: it may be sent again on another connection.
    pub is_repeatable: bool,
}

/// Tells how a stream has ended that had no answer. `None`: it had one, or the connection is not shared.
pub type Trial = Rc<RefCell<Option<Ended>>>;

/// Returns a connection to the hop with this index, which takes one request of HTTP/1.1: CONNECT, or the upgrade of CONNECT-UDP. The
/// hops before it lead there.
///
/// # Errors
/// The hop cannot be reached, or its certificate is not trusted.
pub async fn dial(
    order: &Order<'_>,
    (hops, index): (&[Hop], usize),
    kind: Kind,
) -> Result<(Stream, Trial), Failure> {
    let alone = || async { Ok(Stream::Tls(Box::new(hops::secured(order, (hops, index), &[HTTP_1]).await?))) };
    if !is_shareable(order, hops.get(..=index).unwrap_or_default()) {
        return Ok((alone().await?, Trial::default()));
    }
    let way = Way::new(order, hops.get(..=index).unwrap_or_default());
    let peer = match Pool::obtain(&KEPT, &way, || connect(order, (hops, index))).await? {
        Opened::Own(stream) => return Ok((stream, Trial::default())),
        Opened::Shared(peer) => peer,
    };
    if kind == Kind::Datagrams && !peer.requests.is_extended_connect_protocol_enabled() {
        let stream = alone().await.map_err(|failure: Failure| {
            let why =
                "it carries no UDP over HTTP/2 (no Extended CONNECT, RFC 8441), and not by HTTP/1.1 either";
            Failure { detail: format!("{}; {why}", failure.detail), ..failure }
        })?;
        return Ok((stream, Trial::default()));
    }
    let (ours, other) = Memory::pair(PIPE_BYTES);
    let (place, trial) = (Place::take(peer), Trial::default());
    let told = trial.clone();
    reactor::spawn(async move { serve(&place, ours, &told).await });
    Ok((Stream::Memory(other), trial))
}

/// Whether the connection can carry other flows, too. It cannot if hops before it are told what only this flow brings, or if the
/// record says what the flow's own connection uses.
fn is_shareable(order: &Order<'_>, hops: &[Hop]) -> bool {
    let is_told = |hop: &Hop| matches!(hop.protocol, HopProtocol::Socks6(_));
    let brings_own = !order.metadata.is_empty() || !order.stack.is_empty();
    !(brings_own && hops.iter().any(is_told)) && hops.first().is_none_or(|hop| !hop.mptcp)
}

/// Opens a connection to a hop, and waits for its settings.
async fn connect(order: &Order<'_>, (hops, index): (&[Hop], usize)) -> Result<Opened<Peer>, Failure> {
    let tls = hops::secured(order, (hops, index), &[ALPN, HTTP_1]).await?;
    if tls.protocol() != Some(ALPN) {
        return Ok(Opened::Own(Stream::Tls(Box::new(tls))));
    }
    let named = |failure: Failure| Failure {
        detail: format!("{}: {}", hop_name(index, hops), failure.detail),
        ..failure
    };
    let (mut connection, requests) = begin(Stream::Tls(Box::new(tls))).await.map_err(named)?;
    let pings = connection.ping_pong();
    let dead = Rc::new(Notify::new());
    let is_dead = dead.clone();
    reactor::spawn(async move {
        tokio::select! {
            // Its streams learn about the end themselves.
            ended = connection => tracing::debug!(?ended, "an HTTP/2 connection to a hop has ended"),
            () = is_dead.notified() => tracing::debug!("a hop of HTTP/2 does not answer"),
        }
    });
    let mut pings = pings.ok_or_else(|| named(Failure::new(EndReason::Internal, "HTTP/2: no PING")))?;
    // The settings come before the answer (RFC 9113 Sec. 3.4).
    pings.ping(Ping::opaque()).await.map_err(|error| named(failed(error)))?;
    let peer = Rc::new(Peer {
        requests,
        streams: Cell::default(),
        idle_since: Cell::new(Instant::now()),
        is_leaving: Cell::default(),
    });
    reactor::spawn(tend(Rc::downgrade(&peer), pings, dead));
    Ok(Opened::Shared(peer))
}

/// Asks a hop for signs of life. One that gives none loses its streams; a connection without streams is closed in time.
async fn tend(peer: Weak<Peer>, mut pings: PingPong, dead: Rc<Notify>) {
    loop {
        sleep(KEEPALIVE).await;
        match peer.upgrade() {
            None => return,
            Some(peer) if peer.streams.get() == 0 && peer.idle_since.get().elapsed() > IDLE => {
                peer.is_leaving.set(true);
                KEPT.with(Pool::tend);
                return;
            }
            Some(_) => {}
        }
        match timeout(DEAD_AFTER, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return,
            Err(_) => return dead.notify_one(),
        }
    }
}

/// Serves one connection in memory to its end.
async fn serve(place: &Place, pipe: Memory, trial: &Trial) {
    let cutter = pipe.cutter();
    let (mut reader, writer) = tokio::io::split(pipe);
    let Ok(Some((request, mut early))) = shared::request(&mut reader).await else { return };
    let is_bytes = request.method == message::Method::Connect;
    let opened = match open(place, &request, (&mut reader, &mut early)).await {
        Ok(opened) => opened,
        Err(ended) => return drop(trial.replace(ended)),
    };
    let (answer, to) = opened;
    if let Err(error) = pass((answer, to), is_bytes, (reader, writer, cutter), early).await {
        tracing::debug!(%error, "the answer of a hop of HTTP/2 was cut");
    }
}

/// An answer, and the way to the peer on its stream.
type Answered = (http::Response<h2::RecvStream>, h2::SendStream<bytes::Bytes>);

/// Sends the request and waits for its answer. Bytes of the flow that come meanwhile are added to `early`.
///
/// # Errors
/// There is no answer. `None`: the flow is over.
async fn open(
    place: &Place,
    request: &Request,
    (reader, early): (&mut ReadHalf<Memory>, &mut Vec<u8>),
) -> Result<Answered, Option<Ended>> {
    let odd = || Ended { why: "HTTP/2 cannot express the request".to_owned(), is_repeatable: false };
    let asked = asked(request).ok_or_else(odd)?;
    let has_data = !early.is_empty();
    let ended = |error: NoAnswer| place.0.ended(&error, has_data);
    let mut requests = place.0.requests.clone().ready().await.map_err(|error| ended(error.into()))?;
    let (answer, mut to, watch) = requests.send(asked, false).map_err(|error| ended(error.into()))?;
    let mut answer = std::pin::pin!(answered(answer, &watch));
    loop {
        tokio::select! {
            biased;
            answer = &mut answer => {
                if watch.is_malformed() {
                    to.send_reset(Reason::PROTOCOL_ERROR);
                }
                return Ok((answer.map_err(ended)?, to));
            }
            read = reader.read_buf(early), if early.len() < PIPE_BYTES => {
                if !matches!(read, Ok(1..)) {
                    to.send_reset(Reason::CANCEL);
                    return Err(None);
                }
            }
        }
    }
}

impl Peer {
    /// Says how a request has ended that had no answer. `has_data`: bytes of the flow were to follow it at once.
    fn ended(&self, error: &NoAnswer, has_data: bool) -> Ended {
        let error = match error {
            NoAnswer::Ended(error) => error,
            NoAnswer::Malformed(error) => {
                return Ended { why: format!("its answer is malformed: {error}"), is_repeatable: false };
            }
        };
        let is_refused = error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM);
        if is_refused {
            // It has less room than it says.
            self.is_leaving.set(true);
        }
        let is_lost = error.is_io() || error.is_go_away() && error.is_remote();
        Ended { why: error.to_string(), is_repeatable: is_refused || is_lost && !has_data }
    }
}

/// The request for HTTP/2 (RFC 9113 Sec. 8.5, RFC 9298 Sec. 3.4).
fn asked(request: &Request) -> Option<http::Request<()>> {
    let mut asked = http::Request::new(());
    *asked.method_mut() = Method::CONNECT;
    *asked.version_mut() = Version::HTTP_2;
    let mut fields = headers(&request.fields);
    fields.remove(http::header::HOST);
    *asked.headers_mut() = fields;
    let target = std::str::from_utf8(&request.target).ok()?;
    let uri = Uri::builder();
    *asked.uri_mut() = if request.method == message::Method::Connect {
        uri.authority(target)
    } else {
        asked.extensions_mut().insert(Protocol::from_static(udp::PROTOCOL));
        let host = std::str::from_utf8(request.fields.first("host")?).ok()?;
        uri.scheme("https").authority(host).path_and_query(target)
    }
    .build()
    .ok()?;
    Some(asked)
}

/// Forwards the answer, and then the tunnel, or the text of a refusal.
async fn pass(
    (answer, mut to): Answered,
    is_bytes: bool,
    (reader, mut writer, cutter): (ReadHalf<Memory>, WriteHalf<Memory>, crate::carry::Cutter),
    early: Vec<u8>,
) -> std::io::Result<()> {
    let (parts, mut body) = answer.into_parts();
    let fields = parts.headers.iter().map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes()));
    let (head, is_open) = shared::answer(parts.status.as_u16(), fields, is_bytes);
    writer.write_all(&head).await?;
    if is_open {
        let cut = if is_bytes { Cut::Resets } else { Cut::Ends };
        tunnel((reader, writer, Some(cutter)), early, (body, to), cut).await;
        return Ok(());
    }
    // An error means that the stream is over.
    let _ = to.send_data(bytes::Bytes::new(), true);
    while let Some(data) = body.data().await {
        let data = data.map_err(std::io::Error::other)?;
        writer.write_all(&data).await?;
        let _ = body.flow_control().release_capacity(data.len());
    }
    writer.shutdown().await
}
