//! One end of a session: an application's socket on one side, and on the other one or several paths that may change.

use super::circuit::LAST_WORDS;
use super::lanes::Usage;
use super::shared::Shared;
use super::stream::Stream;
use crate::live::LiveFlow;
use sidetrack_core::overlay::frame::{DATA_MAX, Frame, Opened, ResetReason, SessionFrame, SessionId};
use sidetrack_core::overlay::session::{
    Config, Input, Mode, Output, PATHS_MAX, PathSet, Session, StateError,
};
use sidetrack_core::overlay::{Keys, NodeId, Signature};
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use socket2::SockRef;
use std::cell::RefCell;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep, timeout};

/// How often we check whether the application's kernel has accepted all data.
const LOOK_AGAIN: Duration = Duration::from_millis(3);

/// Most rounds before other tasks of this thread have their turn.
const ROUNDS: usize = 16;

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; DATA_MAX].into_boxed_slice());
}

/// A working path.
pub(super) struct Path {
    /// Its number in the session, and how the session uses its paths.
    pub lane: Lane,
    /// The connection to the first node on it.
    pub stream: Stream,
    /// Resolves when the link to that node is down.
    pub cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// The next byte that the other end expects, and the limit up to which we may send.
    pub peer: (u64, u64),
    /// Set if the other end waits for the answer that the session is open.
    pub answer: Option<SessionId>,
}

/// A path's place in its session.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    /// The number of the path, below [`PATHS_MAX`].
    pub number: u8,
    /// How the session uses its paths.
    pub mode: Mode,
    /// Tells this path from an earlier one with its number.
    pub serial: u64,
}

/// Why a session was reset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Broken {
    /// The reason that the other end was told, or has told us.
    pub reason: ResetReason,
    /// The application on this side reset its connection, or has ended.
    pub is_here: bool,
}

/// How the task of an end has ended.
pub(super) enum Ended {
    /// The session is over, or why it was reset.
    Over(Result<(), Broken>),
    /// The session goes on in another process: the state of its end, and the application's socket.
    Left(Vec<u8>, std::net::TcpStream),
}

/// One end of a session.
pub(super) struct Endpoint {
    shared: Arc<Shared>,
    /// Counts the bytes, and shows the wish to end the flow; none if a worker does that.
    live: Option<Arc<LiveFlow>>,
    is_broken_here: bool,
    session: Session,
    application: TcpStream,
    /// By number.
    lanes: Vec<Option<Path>>,
    paths: mpsc::Receiver<Path>,
    /// Gets what the session does with its paths, if it uses several.
    usage: Option<Arc<Usage>>,
    /// Gets the next byte expected and the credit when a path is needed. None at the far end, which cannot ask for paths.
    wants: Option<mpsc::Sender<(u64, u64)>>,
    asked: bool,
    timer: Pin<Box<Sleep>>,
}

impl Endpoint {
    /// Returns an end without a path; paths come through `paths`.
    pub(super) fn new(
        shared: Arc<Shared>,
        application: TcpStream,
        paths: mpsc::Receiver<Path>,
        wants: Option<mpsc::Sender<(u64, u64)>>,
    ) -> Self {
        let session = Session::new(Config::default(), shared.clock.now());
        let timer = Box::pin(sleep(Duration::ZERO));
        let (live, usage, lanes, asked, is_broken_here) = (None, None, Vec::new(), false, false);
        Self { shared, live, is_broken_here, session, application, lanes, paths, usage, wants, asked, timer }
    }

    /// Makes it use several paths. `usage` gets what it does with them.
    pub(super) fn over_paths(self, usage: Arc<Usage>) -> Self {
        let session = Session::with_mode(Config::default(), usage.mode, self.shared.clock.now());
        Self { session, usage: Some(usage), ..self }
    }

    /// Continues with the state of another process.
    ///
    /// # Errors
    /// Returns what is wrong with the state.
    pub(super) fn with_state(self, state: &[u8]) -> Result<Self, StateError> {
        let session = Session::from_bytes(state, Config::default(), self.shared.clock.now())?;
        Ok(Self { session, ..self })
    }

    /// Adds a flow of ours: it counts the bytes, and may ask for the end.
    pub(super) fn of_flow(self, live: Option<Arc<LiveFlow>>) -> Self {
        Self { live, ..self }
    }

    /// Returns the credit that the opening announces to the other end.
    pub(super) fn first_window() -> u32 {
        Config::default().window_bytes
    }

    /// Moves the bytes until the session is over and both applications have seen its end, or until all sessions leave this
    /// process.
    pub(super) async fn run(mut self) -> Ended {
        // If this task is dropped, the application must see a reset, not an orderly end.
        let _ = sockopt::reset_on_close(&self.application);
        let shared = self.shared.clone();
        let mut leaves = std::pin::pin!(shared.sessions.all_leave());
        let end = std::future::poll_fn(|cx| match leaves.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => self.poll(cx).map(Some),
        })
        .await;
        let Some(end) = end else { return self.leave() };
        for path in self.lanes.drain(..).flatten() {
            tokio::spawn(timeout(LAST_WORDS, path.stream.close()));
        }
        self.over(end)
    }

    /// Ends with this reason.
    fn over(&self, end: Option<ResetReason>) -> Ended {
        Ended::Over(match end {
            None => {
                let _ = SockRef::from(&self.application).set_linger(None);
                Ok(())
            }
            Some(reason) => Err(Broken { reason, is_here: self.is_broken_here }),
        })
    }

    /// Takes the session apart, for another process. Frames that were not sent are sent again there.
    fn leave(mut self) -> Ended {
        let Some(state) = self.session.to_bytes(self.now()) else {
            // It has ended at this moment.
            let end = std::iter::from_fn(|| self.session.poll(PathSet::default()));
            let end = end.filter_map(|output| match output {
                Output::Closed(reason) => Some(reason),
                _ => None,
            });
            let end = end.last().unwrap_or(Some(ResetReason::Ended));
            return self.over(end);
        };
        match self.application.into_std() {
            Ok(application) => Ended::Left(state, application),
            Err(error) => {
                tracing::error!(%error, "the socket of a session cannot move");
                Ended::Over(Err(Broken { reason: ResetReason::Ended, is_here: self.is_broken_here }))
            }
        }
    }

    /// Resets the session if an operator ends its flow (`flows kill`).
    fn end_if_asked(&mut self, cx: &Context<'_>) {
        let Some(live) = &self.live else { return };
        // The waker is set before the check, so that a wish in between wakes us.
        live.set_waker(cx.waker());
        if live.ending().is_some() {
            self.tell(Input::Reset(ResetReason::Ended));
        }
    }

    /// Handles a broken connection of the application.
    fn break_here(&mut self) {
        self.is_broken_here = true;
        self.tell(Input::Reset(ResetReason::Application));
    }

    fn count(&self, up: usize, down: usize) {
        let Some(live) = &self.live else { return };
        let age = live.age();
        if down > 0 {
            live.first_byte(age);
        }
        live.count(up as u64, down as u64);
        live.touch(age);
    }

    fn tell(&mut self, input: Input) {
        self.session.handle(self.shared.clock.now(), input);
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<ResetReason>> {
        self.session.set_memory_max(self.shared.sessions.share_bytes());
        self.end_if_asked(cx);
        for _ in 0..ROUNDS {
            self.tell(Input::Tick);
            let mut moved = self.take_path(cx);
            for number in 0..self.lanes.len() {
                moved |= self.read_path(number, cx);
            }
            moved |= self.write_application(cx);
            moved |= self.read_application(cx);
            self.confirm();
            match self.do_outputs(cx) {
                Poll::Ready(reason) => return Poll::Ready(reason),
                Poll::Pending => {}
            }
            self.ask_for_path();
            if !moved && !self.arm(cx) {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Sets the timer. Returns true if it has expired already.
    fn arm(&mut self, cx: &mut Context<'_>) -> bool {
        let now = self.shared.clock.now();
        let look = self.session.wants_confirmation().then(|| now + LOOK_AGAIN);
        let Some(at) = self.session.deadline().into_iter().chain(look).min() else { return false };
        self.timer.as_mut().reset(tokio::time::Instant::now() + at.since(now));
        self.timer.as_mut().poll(cx).is_ready() && at <= self.now()
    }

    fn now(&self) -> Instant {
        self.shared.clock.now()
    }

    fn take_path(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(Some(mut path)) = self.paths.poll_recv(cx) else { return false };
        let Lane { number, mode, .. } = path.lane;
        if number >= PATHS_MAX {
            return true;
        }
        self.tell(Input::Mode(mode));
        self.lanes.resize_with(self.lanes.len().max(usize::from(number) + 1), || None);
        self.lose_path(number.into());
        if let Some(session) = path.answer {
            let (next, limit) = self.session.expects();
            let window_bytes = u32::try_from(limit.saturating_sub(next)).unwrap_or(u32::MAX);
            let opened = Opened { session, next, window_bytes, signature: Signature::NONE };
            let signature = self.shared.identity.sign(&opened.signed_bytes());
            if path.stream.write_frame(&Frame::Opened(Opened { signature, ..opened })).is_err() {
                return true;
            }
        }
        let (next, limit) = path.peer;
        self.lanes[usize::from(number)] = Some(path);
        self.asked = false;
        self.tell(Input::PathUp { path: number, next, limit });
        true
    }

    fn lose_path(&mut self, number: usize) {
        let lost = self.lanes.get_mut(number).and_then(Option::take);
        if let Some(Path { lane, .. }) = lost {
            self.tell(Input::PathDown(lane.number));
            if let Some(usage) = &self.usage {
                usage.lost(lane);
            }
        }
    }

    /// Lets those that open its paths know what this end expects.
    pub(super) fn note_expected(&self) {
        if let Some(usage) = &self.usage {
            usage.set_expected(self.session.expects());
        }
    }

    fn ask_for_path(&mut self) {
        self.note_expected();
        if let Some(wants) = &self.wants
            && !self.asked
            && self.session.wants_path()
        {
            self.asked = wants.try_send(self.session.expects()).is_ok();
        }
    }

    fn read_path(&mut self, number: usize, cx: &mut Context<'_>) -> bool {
        let Some(Some(path)) = self.lanes.get_mut(number) else { return false };
        if path.cut.as_mut().poll(cx).is_ready() {
            self.lose_path(number);
            return true;
        }
        let lane = path.lane.number;
        match path.stream.poll_frame(cx) {
            Poll::Pending => return false,
            Poll::Ready(Ok(Some(Frame::Session(frame)))) => self.tell(Input::Frame(lane, frame)),
            // Other frames are invalid here, and an end of the stream is the end of the path.
            Poll::Ready(_) => self.lose_path(number),
        }
        true
    }

    fn write_application(&mut self, cx: &mut Context<'_>) -> bool {
        let bytes = self.session.deliverable();
        if bytes.is_empty() {
            return false;
        }
        match Pin::new(&mut self.application).poll_write(cx, bytes) {
            Poll::Pending => return false,
            Poll::Ready(Ok(n)) => {
                self.count(n, 0);
                self.tell(Input::Written(n));
            }
            Poll::Ready(Err(_)) => self.break_here(),
        }
        true
    }

    fn read_application(&mut self, cx: &mut Context<'_>) -> bool {
        let room = self.session.room().min(DATA_MAX);
        if room == 0 {
            return false;
        }
        let read = SCRATCH.with_borrow_mut(|scratch| {
            loop {
                match self.application.poll_read_ready(cx) {
                    Poll::Pending => return None,
                    Poll::Ready(Err(error)) => return Some(Err(error)),
                    Poll::Ready(Ok(())) => {}
                }
                match self.application.try_read(&mut scratch[..room]) {
                    Ok(n) => return Some(Ok(scratch[..n].to_vec())),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Some(Err(error)),
                }
            }
        });
        match read {
            None => return false,
            Some(Ok(bytes)) if bytes.is_empty() => self.tell(Input::Eof),
            Some(Ok(bytes)) => {
                self.count(0, bytes.len());
                self.tell(Input::Read(bytes));
            }
            Some(Err(_)) => self.break_here(),
        }
        true
    }

    /// Checks whether the application's kernel has accepted all that was written.
    fn confirm(&mut self) {
        if self.session.wants_confirmation()
            && sockopt::tcp_info(&self.application)
                .is_ok_and(|info| info.unsent_bytes == 0 && info.unacked_segments == 0)
        {
            self.tell(Input::Confirmed(self.session.delivered()));
        }
    }

    fn do_outputs(&mut self, cx: &mut Context<'_>) -> Poll<Option<ResetReason>> {
        loop {
            let ready = self.ready(cx);
            let Some(output) = self.session.poll(ready) else { break };
            let (path, sent) = match output {
                Output::Send(path, frame) => (path, self.send(path, &Frame::Session(frame))),
                Output::SendData { path, offset } => (path, self.send_data(path, offset)),
                Output::Fin => {
                    // This never blocks. If the application has ended, reading shows it.
                    let _ = Pin::new(&mut self.application).poll_shutdown(cx);
                    continue;
                }
                Output::Closed(reason) => return Poll::Ready(reason),
            };
            if sent.is_err() {
                self.lose_path(path.into());
            }
        }
        for number in 0..self.lanes.len() {
            if let Some(Some(path)) = self.lanes.get_mut(number)
                && let Poll::Ready(Err(_)) = path.stream.poll_flush(cx)
            {
                self.lose_path(number);
            }
        }
        Poll::Pending
    }

    /// Returns the paths that accept more. Paths that broke are removed.
    fn ready(&mut self, cx: &mut Context<'_>) -> PathSet {
        let mut ready = PathSet::default();
        for number in 0..self.lanes.len() {
            let Some(Some(path)) = self.lanes.get_mut(number) else { continue };
            match path.stream.poll_ready(cx) {
                Poll::Ready(Ok(())) => ready = ready.with(path.lane.number),
                Poll::Ready(Err(_)) => self.lose_path(number),
                Poll::Pending => {}
            }
        }
        ready
    }

    fn send(&mut self, path: u8, frame: &Frame) -> io::Result<()> {
        let path = self.lanes.get_mut(usize::from(path)).and_then(Option::as_mut);
        path.map_or(Ok(()), |path| path.stream.write_frame(frame))
    }

    fn send_data(&mut self, path: u8, offset: u64) -> io::Result<()> {
        let bytes = self.session.data(offset);
        let at = self.lanes.get_mut(usize::from(path)).and_then(Option::as_mut);
        let Some(at) = at.filter(|_| !bytes.is_empty()) else { return Ok(()) };
        if let Some(usage) = &self.usage {
            usage.sent(path, bytes.len());
        }
        at.stream.write(&SessionFrame::data_header(offset, bytes.len()), bytes)
    }
}

/// Returns a path over this link.
pub(super) fn path(
    shared: &Arc<Shared>,
    stream: Stream,
    link: (NodeId, u64),
    peer: (u64, u64),
    answer: Option<SessionId>,
) -> Path {
    let (shared, ends) = (shared.clone(), stream.ends());
    let cut = Box::pin(async move { shared.connection_is_cut(link.0, link.1, ends).await });
    Path { lane: Lane::default(), stream, cut, peer, answer }
}
