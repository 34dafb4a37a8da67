//! A proxy that is reached by HTTP/3: CONNECT and CONNECT-UDP as streams of one shared connection.
//!
//! Each tunnel is a connection in memory that speaks HTTP/1.1, as with a proxy of kind `http`. A task translates: the request and
//! its answer, the bytes of the tunnel, and between capsules and datagrams of QUIC (RFC 9297). One that is too long for those
//! travels as a capsule in the stream.

use super::dial::Goal;
use super::{Broken, Came, Peer, Reading, STREAMS_MAX, id_of, number, pump};
use crate::carry::shared::{self, Opened, PIPE_BYTES, Pool, Shared, Way, request};
use crate::carry::tls::roots;
use crate::carry::{Cutter, Failure, Memory, Order, Stream, datagrams, gate, resolve};
use crate::reactor::{self, sleep};
use quinn::{RecvStream, SendStream};
use sidetrack_core::carrier::Hop;
use sidetrack_core::flow::EndReason;
use sidetrack_core::http::h2::fields;
use sidetrack_core::http::h3::message::{Lines, Message, Request as Asked, put_request};
use sidetrack_core::http::h3::{Code, Error};
use sidetrack_core::http::message::{Method, Request, Sender};
use sidetrack_core::http::udp;
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};

/// Most flows on one connection. What all of them may buffer fits into its window, so that one that is not read stops no other.
const FLOWS_MAX: usize = STREAMS_MAX as usize;
/// How long a connection may have no flows.
const IDLE: Duration = Duration::from_secs(75);
/// How often to look whether a connection has flows.
const LOOK: Duration = Duration::from_secs(25);

thread_local! {
    /// The connections of this worker.
    static KEPT: Pool<Kept> = const { Pool::new() };
}

/// A connection to a hop.
///
/// ```text
///            the peer allows no stream now
///   has room -----------------------------> waits for a stream
///      ^                                            |
///      +--------- a stream, which is spare ---------+
/// ```
#[derive(Debug)]
struct Kept {
    peer: Rc<Peer>,
    /// How many flows it carries.
    flows: Cell<usize>,
    /// The peer allows no further stream. A task waits for one.
    is_waiting: Cell<bool>,
    /// The stream that this task has got.
    spare: RefCell<Option<(SendStream, RecvStream)>>,
    /// When the last flow has ended.
    idle_since: Cell<Instant>,
}

impl Shared for Kept {
    fn is_open(&self) -> bool {
        self.peer.connection().close_reason().is_none() && !self.peer.is_leaving()
    }

    fn has_room(&self) -> bool {
        self.flows.get() < FLOWS_MAX && !self.is_waiting.get()
    }
}

impl Kept {
    fn new(peer: Rc<Peer>) -> Rc<Self> {
        let kept = Rc::new(Self {
            peer,
            flows: Cell::default(),
            is_waiting: Cell::default(),
            spare: RefCell::default(),
            idle_since: Cell::new(Instant::now()),
        });
        reactor::spawn(tend(Rc::downgrade(&kept)));
        kept
    }

    /// Opens a stream, if the peer allows one now. Otherwise this connection has no room until it does.
    ///
    /// # Errors
    /// The connection is lost.
    fn open(self: &Rc<Self>) -> Result<Option<(SendStream, RecvStream)>, Failure> {
        if let Some(spare) = self.spare.take() {
            return Ok(Some(spare));
        }
        let mut opening = pin!(self.peer.connection().open_bi());
        match opening.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(stream)) => Ok(Some(stream)),
            Poll::Ready(Err(error)) => Err(Failure::new(EndReason::HopFailed, format!("QUIC: {error}"))),
            Poll::Pending => {
                self.is_waiting.set(true);
                let kept = self.clone();
                reactor::spawn(async move {
                    // An error means that the connection is over.
                    if let Ok(stream) = kept.peer.connection().open_bi().await {
                        kept.spare.replace(Some(stream));
                        kept.is_waiting.set(false);
                    }
                });
                Ok(None)
            }
        }
    }
}

/// The place of one flow on a connection.
struct Place(Rc<Kept>);

impl Place {
    fn take(kept: Rc<Kept>) -> Self {
        kept.flows.set(kept.flows.get() + 1);
        Self(kept)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.flows.set(self.0.flows.get() - 1);
        self.0.idle_since.set(Instant::now());
    }
}

/// Closes a connection that has had no flows for long.
async fn tend(kept: Weak<Kept>) {
    loop {
        sleep(LOOK).await;
        let Some(kept) = kept.upgrade() else { return };
        if kept.flows.get() == 0 && kept.idle_since.get().elapsed() > IDLE {
            kept.peer.connection().close(number(Code::NoError), b"idle");
            KEPT.with(Pool::tend);
            return;
        }
    }
}

/// Returns a connection in memory to the proxy, which is reached through the hops before it. It takes one request of HTTP/1.1: CONNECT, or the upgrade of CONNECT-UDP.
///
/// # Errors
/// The proxy cannot be reached by HTTP/3.
pub async fn dial(order: &Order<'_>, before: &[Hop], hop: &Hop) -> Result<Stream, Failure> {
    let way = Way::new(order, &[before, std::slice::from_ref(hop)].concat());
    let open = async || Ok(Opened::Shared(Kept::new(connect(order, before, hop).await?)));
    let (place, streams) = loop {
        let kept = match Pool::obtain(&KEPT, &way, open).await? {
            Opened::Shared(kept) => kept,
            Opened::Own(stream) => return Ok(stream),
        };
        // Without one, this connection has no room any more, and another one is found or opened.
        if let Some(streams) = kept.open()? {
            break (Place::take(kept), streams);
        }
    };
    let (ours, other) = Memory::pair(PIPE_BYTES);
    reactor::spawn(async move {
        if let Err(broken) = serve(&place.0.peer, ours, streams).await {
            tracing::debug!(%broken, "a tunnel over HTTP/3 was cut");
        }
    });
    Ok(Stream::Memory(other))
}

/// Opens a connection to a hop.
async fn connect(order: &Order<'_>, before: &[Hop], hop: &Hop) -> Result<Rc<Peer>, Failure> {
    let tls = (*roots(hop.ca_pem.as_ref())?).clone();
    let goal = Goal { host: &hop.address.host, tls, dialing: order.dialing };
    if before.is_empty() {
        return goal.connect(&gate::configured(resolve(&hop.address).await?)).await;
    }
    // The connection is for many flows: the hops before it are told nothing of the first one.
    let order = Order { metadata: Vec::new(), stack: &[], ..order.again(&hop.address) };
    let path = datagrams::through(&order, before).await?;
    goal.connect_over(path, &hop.address).await
}

/// Serves one connection in memory to its end.
async fn serve(
    peer: &Rc<Peer>,
    pipe: Memory,
    (mut send, recv): (SendStream, RecvStream),
) -> Result<(), Broken> {
    let cutter = pipe.cutter();
    let (mut reader, writer) = tokio::io::split(pipe);
    let Ok(Some((request, early))) = request(&mut reader).await else {
        // This fails only if the stream is over.
        let _ = send.reset(number(Code::RequestCancelled));
        return Ok(());
    };
    let mut reading = Reading::new(recv, Message::new(Sender::Server));
    let memory = (reader, writer, cutter);
    let passed = pass(peer, (request, early), memory, (&mut send, &mut reading)).await;
    let code = match &passed {
        Ok(()) => Code::NoError,
        Err(Broken::Protocol(error)) if !error.is_of_stream => {
            peer.abort(*error);
            error.code
        }
        Err(Broken::Protocol(error)) => error.code,
        Err(Broken::Cut(_) | Broken::Gone(_)) => Code::RequestCancelled,
    };
    if passed.is_err() {
        // This fails only if our direction is over.
        let _ = send.reset(number(code));
    }
    reading.stop(code);
    passed
}

fn cut(_: impl Sized) -> Broken {
    Error::of_stream(Code::Connect, "the tunnel was cut").into()
}

/// The request for HTTP/3 (RFC 9114 Sec. 4.4, RFC 9298 Sec. 3.4).
fn asked(request: &Request) -> Asked {
    let of_upgrade = [&b"upgrade"[..], b"host"];
    let lines: Lines = fields(&request.fields)
        .filter(|(name, _)| !of_upgrade.contains(&name.as_slice()))
        .map(|(name, value)| (name, value.to_vec()))
        .collect();
    let host = request.fields.first("host").map(<[u8]>::to_vec);
    let method = b"CONNECT".to_vec();
    if request.method == Method::Connect {
        return Asked { method, authority: Some(request.target.clone()), lines, ..Asked::default() };
    }
    // The target may be a whole URL (RFC 9298 Sec. 3.2).
    let at = request.target.windows(udp::PREFIX.len()).position(|part| part == udp::PREFIX.as_bytes());
    Asked {
        method,
        scheme: Some(b"https".to_vec()),
        authority: host,
        path: Some(request.target.get(at.unwrap_or(0)..).unwrap_or_default().to_vec()),
        protocol: Some(udp::PROTOCOL.as_bytes().to_vec()),
        lines,
    }
}

/// Forwards the request and its answer, and then the tunnel.
async fn pass(
    peer: &Rc<Peer>,
    (request, early): (Request, Vec<u8>),
    (reader, mut writer, cutter): (ReadHalf<Memory>, WriteHalf<Memory>, Cutter),
    (send, reading): (&mut SendStream, &mut Reading),
) -> Result<(), Broken> {
    let is_bytes = request.method == Method::Connect;
    let id = id_of(send.id());
    let datagrams = peer.datagrams(id);
    let mut out = Vec::with_capacity(512);
    put_request(&mut out, &asked(&request));
    send.write_all(&out).await?;
    let is_open = answer(reading, &mut writer, is_bytes).await?;
    if !is_open {
        // This fails only if the stream is over.
        let _ = send.finish();
        return refused(reading, &mut writer).await;
    }
    if is_bytes {
        pump::bytes((reader, writer, Some(cutter)), early, (send, reading)).await
    } else {
        pump::datagrams((reader, writer), early, (peer, id, datagrams), (send, reading)).await
    }
}

/// Forwards the head of the answer. Returns whether the tunnel is open.
async fn answer(
    reading: &mut Reading,
    writer: &mut WriteHalf<Memory>,
    is_bytes: bool,
) -> Result<bool, Broken> {
    loop {
        let Some(Came::Response(status, lines)) = reading.next().await? else { return Err(cut(())) };
        if status < 200 {
            continue;
        }
        let fields = lines.iter().map(|(name, value)| (name.as_slice(), value.as_slice()));
        let (head, is_open) = shared::answer(status, fields, is_bytes);
        writer.write_all(&head).await.map_err(cut)?;
        return Ok(is_open);
    }
}

/// Forwards the text of a refusal.
async fn refused(reading: &mut Reading, writer: &mut WriteHalf<Memory>) -> Result<(), Broken> {
    while let Some(came) = reading.next().await? {
        if let Came::Content(content) = came {
            writer.write_all(&content).await.map_err(cut)?;
        }
    }
    writer.shutdown().await.map_err(cut)
}
