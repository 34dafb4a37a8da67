//! The near end of sessions: flows that this node caught and sends over the overlay.

use super::circuit::LAST_WORDS;
use super::endpoint::{self, Broken, Ended, Endpoint, Path};
use super::identity;
use super::lanes;
use super::moved::{End, MovedSession, Rest};
use super::nearest;
use super::pool;
use super::shared::Shared;
use super::stream::Stream;
use crate::carry::{Failure, OverlayOrder};
use crate::live::Spread;
use sidetrack_core::carrier::OverlayCarrier;
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::frame::{
    self, Features, Frame, Open, Opened, Refusal, Refused, ResetReason, Resume, SessionFrame, SessionId,
};
use sidetrack_core::overlay::reserved::Reserved;
use sidetrack_core::overlay::session::Mode;
use sidetrack_core::overlay::{Keys, NodeId, Signature};
use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

/// Longest attempt to open a path; it includes the far end's connect.
pub(super) const ATTEMPT: Duration = Duration::from_secs(12);

/// First time limit for continuing an open session over one path, before another path is tried. It doubles each time when
/// there is no answer. A link that dies is reported at once, so this limit is only for nodes that do not answer at all.
/// It must not be short: if a thousand sessions lose their paths together, a session that gives up starts again after all
/// others.
const RESUME_ATTEMPT: Duration = Duration::from_secs(4);

/// The shortest and longest wait between attempts.
pub(super) const REST_FIRST: Duration = Duration::from_millis(10);
pub(super) const REST_MAX: Duration = Duration::from_millis(500);

/// A flow that a worker hands over.
pub(super) struct Request {
    /// The destination and the node that delivers.
    pub order: OverlayOrder,
    /// Our end of the connection with the worker.
    pub leg: std::net::TcpStream,
    /// Counts what a flow over several paths does with them.
    pub spread: Option<Arc<Spread>>,
    /// Gets the result: the session is open, or why it is not.
    pub reply: oneshot::Sender<Result<SessionId, Failure>>,
}

/// Opens a session of this node itself, to something inside the overlay at another node. Returns its stream and its id.
///
/// # Errors
/// Returns why the node is not reached, or why it refuses.
pub(super) async fn open_reserved(
    what: Reserved,
    node: &Arc<str>,
    requests: &mpsc::Sender<Request>,
) -> Result<(TcpStream, SessionId), Failure> {
    let broken =
        |error: io::Error| Failure::new(EndReason::Limit, format!("a socket to the overlay: {error}"));
    let stopping = || Failure::new(EndReason::Shutdown, "the overlay is stopping");
    let (near, leg) = super::pair().map_err(broken)?;
    let (reply, answer) = oneshot::channel();
    let destination = what
        .destination()
        .ok_or_else(|| Failure::new(EndReason::Internal, "a reserved name is not a name"))?;
    let client = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let order =
        OverlayOrder { carrier: OverlayCarrier::one_path(node.clone()), destination, client, host: None };
    requests.send(Request { order, leg, spread: None, reply }).await.map_err(|_| stopping())?;
    let session = answer.await.map_err(|_| stopping())??;
    Ok((TcpStream::from_std(near).map_err(broken)?, session))
}

/// Why an attempt failed.
pub(super) enum Setback {
    /// Temporary: another path, or a later attempt, may succeed.
    Passing(String),
    /// Temporary, like `Passing`: there was no answer in time.
    Late,
    /// The last node has decided.
    Final(Refusal, String),
}

/// Handles one flow, from the opening to the end.
pub(super) async fn run(shared: Arc<Shared>, request: Request) {
    let Request { order, leg, spread, mut reply } = request;
    let Some(_counted) = shared.sessions.count() else {
        let _ = reply.send(Err(Failure::new(EndReason::Limit, "this node has too many sessions")));
        return;
    };
    let opened = tokio::select! {
        opened = nearest::open(&shared, &order) => opened,
        // The client left, or the time for the path is over.
        () = reply.closed() => return,
        // The flow is asked for again where the overlay goes to.
        () = shared.sessions.all_leave() => return,
    };
    let (ingress, session, path) = match opened {
        Ok((ingress, session, path)) => (Arc::new(ingress), session, path),
        Err(failure) => {
            let _ = reply.send(Err(failure));
            return;
        }
    };
    let (Path { lane, stream, cut, peer, answer }, route) = path;
    // If the worker is gone by now, dropping `asked` tells the far end.
    let asked = Asked { stream: Some(stream), begins: true };
    let Ok(leg) = TcpStream::from_std(leg) else { return };
    if reply.send(Ok(session)).is_err() {
        return;
    }
    let Some(stream) = asked.answered() else { return };
    shared.counters.sessions_opened.fetch_add(1, Relaxed);
    let path = Path { lane, stream, cut, peer, answer };
    if ingress.mode() == Mode::Shortest {
        ingress.carry(session, path, leg).await;
    } else {
        let begin = lanes::Begin::First(Box::new(path), route);
        lanes::carry(ingress, session, begin, (leg, spread.unwrap_or_default())).await;
    }
}

/// Continues a session that began in another process of this node. It has no path, and asks for one at once.
pub(super) async fn run_again(shared: Arc<Shared>, order: OverlayOrder, rest: Rest) {
    let Rest { id, peer, attempts, spread, state, socket } = rest;
    let Some(_counted) = shared.sessions.count() else { return };
    let Ok(leg) = TcpStream::from_std(socket) else { return };
    let ingress = Arc::new(Ingress { shared: shared.clone(), order, to: peer });
    // The mode of the state counts: what the far node can do may not be known yet.
    if ingress.order.carrier.mode != Mode::Shortest && attempts.len() > 1 {
        let begin = lanes::Begin::Again(state, attempts);
        return lanes::carry(ingress, id, begin, (leg, spread.unwrap_or_default())).await;
    }
    let (paths, arriving) = mpsc::channel(1);
    let (wants, wanted) = mpsc::channel(1);
    match Endpoint::new(shared.clone(), leg, arriving, Some(wants)).with_state(&state) {
        Ok(end) => {
            let attempts = attempts.first().copied().unwrap_or_default();
            ingress.carry_with(id, (end, paths, wanted), attempts).await;
        }
        Err(error) => tracing::error!(%error, "a session of the other process is lost"),
    }
}

/// A connection on which a path was requested. If the request is dropped, the far end is told. It may have connected to
/// the destination by then. It would otherwise keep that connection, and wait for a path as long as a session may be
/// without one.
struct Asked {
    stream: Option<Stream>,
    /// The session begins with this request.
    begins: bool,
}

impl Asked {
    /// Sends the opening and waits for the answer.
    async fn ask(&mut self, open: Open) -> io::Result<Frame> {
        let stream = self.stream.as_mut().ok_or(ErrorKind::NotConnected)?;
        stream.send(&Frame::Open(Box::new(open))).await?;
        stream.frame().await
    }

    /// Returns the stream: the request was answered, so nothing is sent on drop.
    fn answered(mut self) -> Option<Stream> {
        self.stream.take()
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let (Some(mut stream), begins) = (self.stream.take(), self.begins) else { return };
        tokio::spawn(timeout(LAST_WORDS, async move {
            let reset = SessionFrame::Reset { offset: 0, reason: ResetReason::Application };
            // If the connection is broken, the other end knows already.
            if !begins || stream.send(&Frame::Session(reset)).await.is_ok() {
                stream.close().await;
            }
        }));
    }
}

/// The path and the connection of an attempt.
struct Beginning {
    path: frame::Path,
    /// The number of the link to the first node.
    number: u64,
    /// The connection to that node.
    stream: Stream,
}

/// The near end of one session, to open paths for it.
pub(super) struct Ingress {
    pub shared: Arc<Shared>,
    pub order: OverlayOrder,
    /// The node that delivers: it stays the same for the whole session.
    pub to: NodeId,
}

impl Ingress {
    /// Moves the flow's bytes, beginning on this path.
    async fn carry(&self, session: SessionId, first: Path, leg: TcpStream) {
        let (paths, arriving) = mpsc::channel(1);
        let (wants, wanted) = mpsc::channel(1);
        let _ = paths.send(first).await;
        let end = Endpoint::new(self.shared.clone(), leg, arriving, Some(wants));
        self.carry_with(session, (end, paths, wanted), 0).await;
    }

    /// Moves the flow's bytes, and finds a new path each time it has lost one. `attempts`: how often that was tried before.
    async fn carry_with(
        &self,
        session: SessionId,
        (end, paths, mut wanted): (Endpoint, mpsc::Sender<Path>, mpsc::Receiver<(u64, u64)>),
        attempts: u32,
    ) {
        let attempts = AtomicU32::new(attempts);
        let renew = async {
            while let Some((next, limit)) = wanted.recv().await {
                let window = u32::try_from(limit.saturating_sub(next)).unwrap_or(u32::MAX);
                match self.resume(session, next, window, &attempts).await {
                    Some(path) => {
                        // The receiver lives as long as `end`, which runs beside this.
                        let _ = paths.send(path).await;
                    }
                    None => return,
                }
            }
        };
        let ended = tokio::select! {
            ended = end.run() => ended,
            () = renew => Ended::Over(Err(Broken { reason: ResetReason::PathLost, is_here: false })),
        };
        self.ended(session, ended, (vec![attempts.into_inner()], None));
    }

    /// The task of a session has ended. `attempts`: the latest attempts to open its paths.
    pub(super) fn ended(
        &self,
        session: SessionId,
        ended: Ended,
        (attempts, spread): (Vec<u32>, Option<Arc<Spread>>),
    ) {
        let Self { order, .. } = self;
        match ended {
            Ended::Over(ended) => {
                tracing::debug!(node = %order.carrier.node, destination = %order.destination, ?ended, "session ended");
            }
            // What ends inside the overlay begins anew.
            Ended::Left(..) if Reserved::of(&order.destination).is_some() => {}
            Ended::Left(state, socket) => self.shared.sessions.put_moved(MovedSession {
                id: session,
                peer: self.to,
                attempts,
                end: End::Near(order.clone()),
                spread,
                state,
                socket,
            }),
        }
    }

    /// Returns a new path for an open session; none if the far end no longer knows the session. The session itself ends
    /// if this takes too long.
    async fn resume(&self, session: SessionId, next: u64, window: u32, attempts: &AtomicU32) -> Option<Path> {
        let mut avoid = BTreeSet::new();
        let (mut rest, mut patience) = (REST_FIRST, RESUME_ATTEMPT);
        loop {
            let attempt = attempts.load(Relaxed).saturating_add(1);
            attempts.store(attempt, Relaxed);
            let resume = Resume { attempt, next };
            match self.attempt(session, Some(resume), window, &mut avoid, patience).await {
                Ok((path, _)) => {
                    self.shared.counters.sessions_resumed.fetch_add(1, Relaxed);
                    return Some(path);
                }
                Err(Setback::Final(reason, detail)) => {
                    tracing::info!(node = %self.node(), ?reason, %detail, "a session cannot go on");
                    return None;
                }
                Err(Setback::Passing(detail)) => {
                    tracing::debug!(node = %self.node(), %detail, "no new path yet");
                }
                Err(Setback::Late) => {
                    tracing::debug!(node = %self.node(), ?patience, "no answer in time: no new path yet");
                    patience *= 2;
                }
            }
            sleep(rest).await;
            rest = (rest * 2).min(REST_MAX);
        }
    }

    /// Makes one attempt over the best path that has none of the relays in `avoid`. If it fails, its relays are avoided
    /// next time. When there is no such path, all are tried again.
    pub(super) async fn attempt(
        &self,
        session: SessionId,
        resume: Option<Resume>,
        window_bytes: u32,
        avoid: &mut BTreeSet<NodeId>,
        patience: Duration,
    ) -> Result<(Path, frame::Path), Setback> {
        let mut path = None;
        let result = timeout(patience, async {
            let begin = self.begin(avoid, &mut path).await?;
            let route = begin.path.clone();
            Ok((self.ask(session, resume, window_bytes, begin).await?, route))
        });
        let result = result.await.unwrap_or(Err(Setback::Late));
        if matches!(result, Err(Setback::Passing(_) | Setback::Late)) {
            match path {
                Some(path) => avoid.extend(path.relays()),
                None => avoid.clear(),
            }
        }
        result
    }

    /// Returns the best path that has no node of `avoid`, and a connection to its first node. `tried` gets that path,
    /// even if the attempt fails.
    async fn begin(
        &self,
        avoid: &BTreeSet<NodeId>,
        tried: &mut Option<frame::Path>,
    ) -> Result<Beginning, Setback> {
        loop {
            let path = self.first_path(avoid);
            let path = path.ok_or_else(|| passing(format!("no path to {}", self.node())))?;
            *tried = Some(path.clone());
            if let Some(begin) = self.connection(path).await? {
                return Ok(begin);
            }
        }
    }

    /// Returns the path that a session begins with: one of those that it will use, so that it need not move.
    fn first_path(&self, avoid: &BTreeSet<NodeId>) -> Option<frame::Path> {
        let (graph, own) = (self.shared.graph.load(), self.shared.identity.own());
        let several = match self.mode() {
            Mode::Shortest => None,
            _ => graph.flow_paths(own, self.to, self.order.carrier.paths, avoid).into_iter().next(),
        };
        several.or_else(|| Some(graph.route(own, self.to, avoid)?.path))
    }

    /// Returns a connection to the first node of a path. `None`: the path broke in the meantime.
    async fn connection(&self, path: frame::Path) -> Result<Option<Beginning>, Setback> {
        let shared = &self.shared;
        let first = path.nodes()[1];
        let number = shared.link(first).ok_or_else(|| passing("the first link is down"))?;
        let stream = pool::take(shared, first).await.map_err(Setback::Passing)?;
        if shared.graph.load().has(&path) {
            return Ok(Some(Beginning { path, number, stream }));
        }
        // Another flow may use the connection.
        shared.pool.put_back(first, stream);
        Ok(None)
    }

    /// Opens one of several paths of an open session.
    pub(super) async fn open_path(
        &self,
        session: SessionId,
        resume: Resume,
        window_bytes: u32,
        path: frame::Path,
    ) -> Result<Path, Setback> {
        let attempt = async {
            let begin = self.connection(path).await?.ok_or_else(|| passing("the path broke"))?;
            self.ask(session, Some(resume), window_bytes, begin).await
        };
        timeout(RESUME_ATTEMPT, attempt).await.unwrap_or(Err(Setback::Late))
    }

    /// Returns the name of the node that delivers the flow.
    pub(super) fn node(&self) -> &str {
        &self.order.carrier.node
    }

    /// Returns how the session uses its paths. A far end that knows nothing of several paths gets one.
    pub(super) fn mode(&self) -> Mode {
        let has_paths = self.shared.graph.load().features(self.to) & Features::PATHS != 0;
        if has_paths { self.order.carrier.mode } else { Mode::Shortest }
    }

    async fn ask(
        &self,
        session: SessionId,
        resume: Option<Resume>,
        window_bytes: u32,
        begin: Beginning,
    ) -> Result<Path, Setback> {
        let (shared, Beginning { path, number, stream }) = (&self.shared, begin);
        let first = path.nodes()[1];
        let mut open = Open {
            session,
            path,
            position: 1,
            resume,
            window_bytes,
            destination: self.order.destination.clone(),
            client: self.order.client,
            host: self.order.host.clone(),
            signature: Signature::NONE,
        };
        open.signature = shared.identity.sign(&open.signed_bytes());
        let mut asked = Asked { stream: Some(stream), begins: resume.is_none() };
        let answer = tokio::select! {
            answer = asked.ask(open) => answer,
            () = shared.link_is_down(first, number) => return Err(passing("the first link went down")),
        };
        match answer {
            Ok(Frame::Opened(opened)) if self.is_signed(&opened, session) => {
                let Opened { next, window_bytes, .. } = opened;
                let limit = next.saturating_add(u64::from(window_bytes));
                let stream = asked.answered().ok_or_else(|| passing("the path is gone"))?;
                Ok(endpoint::path(shared, stream, (first, number), (next, limit), None))
            }
            Ok(Frame::Opened(_)) => Err(passing("an answer that the last node did not sign")),
            Ok(Frame::Refused(refused)) => {
                // The far end does not wait for this session.
                asked.begins = false;
                Err(self.refused(refused))
            }
            Ok(other) => Err(passing(format!("{other:?} in the place of an answer"))),
            Err(error) => Err(passing(format!("the path broke: {error}"))),
        }
    }

    fn refused(&self, refused: Refused) -> Setback {
        let detail = format!("{}: {}", self.shared.identity.name(refused.by), refused.detail);
        match refused.reason {
            // Only the last node knows the destination and the session, so other refusals are temporary.
            Refusal::NoLink => Setback::Passing(detail),
            _ if refused.by != self.to => Setback::Passing(detail),
            reason => Setback::Final(reason, detail),
        }
    }

    /// True if the last node has signed that this session is open.
    fn is_signed(&self, opened: &Opened, session: SessionId) -> bool {
        let identity = &self.shared.identity;
        opened.session == session && identity.verify(self.to, &opened.signed_bytes(), &opened.signature)
    }
}

fn passing(detail: impl Into<String>) -> Setback {
    Setback::Passing(detail.into())
}

pub(super) fn new_session() -> anyhow::Result<SessionId> {
    let mut id = [0; 16];
    identity::random(&mut id)?;
    Ok(SessionId(id))
}

pub(super) fn failure(reason: Refusal, node: &str, detail: String) -> Failure {
    let reason = match reason {
        Refusal::Denied => EndReason::PolicyDenied,
        Refusal::ConnectionRefused => EndReason::Refused,
        Refusal::NoLink | Refusal::Unreachable => EndReason::Unreachable,
        Refusal::TimedOut => EndReason::ConnectTimeout,
        Refusal::Dns => EndReason::Dns,
        Refusal::Limit => EndReason::Limit,
        Refusal::BadRequest | Refusal::UnknownSession => EndReason::HopFailed,
    };
    Failure::new(reason, format!("overlay:{node}: {detail}"))
}
