//! The near end of sessions: flows that this node caught and sends over the overlay.

use super::circuit::LAST_WORDS;
use super::endpoint::{self, Broken, Endpoint, Path};
use super::identity;
use super::pool;
use super::shared::Shared;
use super::stream::Stream;
use crate::carry::{Failure, OverlayOrder};
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::frame::{
    self, Frame, Open, Opened, Refusal, Refused, ResetReason, Resume, SessionFrame, SessionId,
};
use sidetrack_core::overlay::{Keys, NodeId, Signature};
use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

/// How long one attempt to open a path may take: the far end's connect is in it.
const ATTEMPT: Duration = Duration::from_secs(12);

/// How long a session that stands may take to go on over one path before another is tried, at first; twice as long each time nobody
/// has answered. A link that dies on the way is told at once: this is for nodes that say nothing at all. Where a thousand sessions
/// have lost their paths together it must not be short: whoever gives up begins again behind all others.
const RESUME_ATTEMPT: Duration = Duration::from_secs(4);

/// Rests between attempts.
const REST_FIRST: Duration = Duration::from_millis(10);
const REST_MAX: Duration = Duration::from_millis(500);

/// A flow that a worker hands over.
pub struct Request {
    /// What is asked for.
    pub order: OverlayOrder,
    /// Our end of the connection with the worker.
    pub leg: std::net::TcpStream,
    /// Told once the session stands, or why it does not.
    pub reply: oneshot::Sender<Result<SessionId, Failure>>,
}

/// Why an attempt failed.
enum Setback {
    /// Another path, or a later attempt, may do better.
    Passing(String),
    /// As before: nobody has answered in time.
    Late,
    /// It is as the last node says.
    Final(Refusal, String),
}

/// One flow, from the opening to the end.
pub async fn run(shared: Arc<Shared>, request: Request) {
    let Request { order, leg, mut reply } = request;
    let Some(to) = shared.identity.node_named(&order.node) else {
        let detail = format!("the overlay has no node '{}'", order.node);
        let _ = reply.send(Err(Failure::new(EndReason::Unreachable, detail)));
        return;
    };
    let Some(_counted) = shared.sessions.count() else {
        let _ = reply.send(Err(Failure::new(EndReason::Limit, "this node has too many sessions")));
        return;
    };
    let ingress = Ingress { shared: shared.clone(), order, to };
    let opened = tokio::select! {
        opened = ingress.open() => opened,
        // The client left, or its time was up.
        () = reply.closed() => return,
    };
    let (session, path) = match opened {
        Ok(opened) => opened,
        Err(failure) => {
            let _ = reply.send(Err(failure));
            return;
        }
    };
    let Path { stream, cut, peer, answer } = path;
    let asked = Asked { stream: Some(stream), begins: true };
    let Ok(leg) = TcpStream::from_std(leg) else { return };
    if reply.send(Ok(session)).is_err() {
        return;
    }
    let Some(stream) = asked.answered() else { return };
    shared.counters.sessions_opened.fetch_add(1, Relaxed);
    ingress.carry(session, Path { stream, cut, peer, answer }, leg).await;
}

/// A connection on which a path was asked for. Whoever gives it up says so: the far end may have connected to the destination by
/// then, and would keep that up, waiting for a path, as long as a session may be without.
struct Asked {
    stream: Option<Stream>,
    /// The session begins with it.
    begins: bool,
}

impl Asked {
    /// Sends the opening and waits for the answer.
    async fn ask(&mut self, open: Open) -> io::Result<Frame> {
        let stream = self.stream.as_mut().ok_or(ErrorKind::NotConnected)?;
        stream.send(&Frame::Open(Box::new(open))).await?;
        stream.frame().await
    }

    /// It is given up no more.
    fn answered(mut self) -> Option<Stream> {
        self.stream.take()
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let (Some(mut stream), begins) = (self.stream.take(), self.begins) else { return };
        tokio::spawn(timeout(LAST_WORDS, async move {
            let reset = SessionFrame::Reset { offset: 0, reason: ResetReason::Application };
            // A connection that broke has told the other end by that.
            if !begins || stream.send(&Frame::Session(reset)).await.is_ok() {
                stream.close().await;
            }
        }));
    }
}

/// How an attempt begins.
struct Beginning {
    path: frame::Path,
    /// Of the link to the first node on it.
    number: u64,
    /// The connection to that node.
    stream: Stream,
}

struct Ingress {
    shared: Arc<Shared>,
    order: OverlayOrder,
    to: NodeId,
}

impl Ingress {
    /// Opens a session, over one path after the other until one stands or the last node says no.
    async fn open(&self) -> Result<(SessionId, Path), Failure> {
        let mut avoid = BTreeSet::new();
        let mut rest = REST_FIRST;
        loop {
            let session =
                new_session().map_err(|error| Failure::new(EndReason::Internal, error.to_string()))?;
            match self.attempt(session, None, Endpoint::first_window(), &mut avoid, ATTEMPT).await {
                Ok(path) => return Ok((session, path)),
                Err(Setback::Final(reason, detail)) => return Err(failure(reason, &self.order.node, detail)),
                Err(Setback::Passing(detail)) => {
                    tracing::debug!(node = %self.order.node, %detail, "no session yet");
                }
                Err(Setback::Late) => {
                    tracing::debug!(node = %self.order.node, "no answer in time: no session yet");
                }
            }
            sleep(rest).await;
            rest = (rest * 2).min(REST_MAX);
        }
    }

    /// Moves the flow's bytes, and finds it a new path whenever it lost one.
    async fn carry(&self, session: SessionId, first: Path, leg: TcpStream) {
        let (paths, arriving) = mpsc::channel(1);
        let (wants, mut wanted) = mpsc::channel(1);
        let _ = paths.send(first).await;
        let end = Endpoint::new(self.shared.clone(), leg, arriving, Some(wants)).run();
        let renew = async {
            let mut attempts = 0;
            while let Some((next, limit)) = wanted.recv().await {
                let window = u32::try_from(limit.saturating_sub(next)).unwrap_or(u32::MAX);
                match self.resume(session, next, window, &mut attempts).await {
                    Some(path) => {
                        // The receiver lives as long as the end that we race.
                        let _ = paths.send(path).await;
                    }
                    None => return,
                }
            }
        };
        let ended = tokio::select! {
            ended = end => ended,
            () = renew => Err(Broken { reason: ResetReason::PathLost, is_here: false }),
        };
        let Self { order, .. } = self;
        tracing::debug!(node = %order.node, destination = %order.destination, ?ended, "session ended");
    }

    /// A new path for a session that stands; none: the far end knows it no more. The session itself ends when this
    /// takes too long.
    async fn resume(&self, session: SessionId, next: u64, window: u32, attempts: &mut u32) -> Option<Path> {
        let mut avoid = BTreeSet::new();
        let (mut rest, mut patience) = (REST_FIRST, RESUME_ATTEMPT);
        loop {
            *attempts = attempts.saturating_add(1);
            let resume = Resume { attempt: *attempts, next };
            match self.attempt(session, Some(resume), window, &mut avoid, patience).await {
                Ok(path) => {
                    self.shared.counters.sessions_resumed.fetch_add(1, Relaxed);
                    return Some(path);
                }
                Err(Setback::Final(reason, detail)) => {
                    tracing::info!(node = %self.order.node, ?reason, %detail, "a session cannot go on");
                    return None;
                }
                Err(Setback::Passing(detail)) => {
                    tracing::debug!(node = %self.order.node, %detail, "no new path yet");
                }
                Err(Setback::Late) => {
                    tracing::debug!(node = %self.order.node, ?patience, "no answer in time: no new path yet");
                    patience *= 2;
                }
            }
            sleep(rest).await;
            rest = (rest * 2).min(REST_MAX);
        }
    }

    /// One attempt over the best path that passes none of `avoid`. A path that fails has its nodes avoided next time;
    /// when nothing is left, all are tried again.
    async fn attempt(
        &self,
        session: SessionId,
        resume: Option<Resume>,
        window_bytes: u32,
        avoid: &mut BTreeSet<NodeId>,
        patience: Duration,
    ) -> Result<Path, Setback> {
        let mut path = None;
        let result = timeout(patience, async {
            let begin = self.begin(avoid, &mut path).await?;
            self.ask(session, resume, window_bytes, begin).await
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

    /// The best path that passes none of `avoid`, and a connection to its first node. `tried` is that path, even if nothing comes
    /// of it.
    async fn begin(
        &self,
        avoid: &BTreeSet<NodeId>,
        tried: &mut Option<frame::Path>,
    ) -> Result<Beginning, Setback> {
        let shared = &self.shared;
        loop {
            let route = shared.graph.load().route(shared.identity.own(), self.to, avoid);
            let path = route.ok_or_else(|| passing(format!("no path to {}", self.order.node)))?.path;
            let first = path.nodes()[1];
            *tried = Some(path.clone());
            let number = shared.link(first).ok_or_else(|| passing("the first link is down"))?;
            let stream = pool::take(shared, first).await.map_err(Setback::Passing)?;
            if shared.graph.load().has(&path) {
                return Ok(Beginning { path, number, stream });
            }
            // The path has died while we waited. Others may have use for what was waited for.
            shared.pool.put_back(first, stream);
        }
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
                // Nobody waits for us.
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
            // Only the last node knows about the destination and the session.
            Refusal::NoLink => Setback::Passing(detail),
            _ if refused.by != self.to => Setback::Passing(detail),
            reason => Setback::Final(reason, detail),
        }
    }

    /// Whether the last node says that this session stands.
    fn is_signed(&self, opened: &Opened, session: SessionId) -> bool {
        let identity = &self.shared.identity;
        opened.session == session && identity.verify(self.to, &opened.signed_bytes(), &opened.signature)
    }
}

fn passing(detail: impl Into<String>) -> Setback {
    Setback::Passing(detail.into())
}

fn new_session() -> anyhow::Result<SessionId> {
    let mut id = [0; 16];
    identity::random(&mut id)?;
    Ok(SessionId(id))
}

fn failure(reason: Refusal, node: &str, detail: String) -> Failure {
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
