//! The client's side while the path is being made: its socket and the bytes it has sent so far.

use crate::carry::{FirstBytes, Stream, Wire};
use crate::reactor::{TcpStream, timeout_at};
use sidetrack_core::flow::HostName;
use sidetrack_core::http::{Sniff, sniff};
use std::future::{Future, poll_fn};
use std::io;
use std::mem::MaybeUninit;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

/// Most bytes held of a client whose path does not stand yet (a ClientHello or request head has at most 16 KiB; what
/// is more waits in the kernel).
const HELD_MAX: usize = 16 * 1024;

/// Most bytes one read takes.
const READ_MAX: usize = 4096;

/// How long a refused client may take to read the refusal before the socket is closed under it.
const REFUSAL_LINGER: Duration = Duration::from_millis(500);

/// What the first bytes say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sniffed {
    /// This host.
    Name(HostName),
    /// No host, whatever follows.
    Nameless,
    /// Not enough came in time.
    TimedOut,
    /// The client sent FIN, or is gone, before they said anything.
    Ended,
}

impl Sniffed {
    /// The host, if they name one.
    pub fn name(self) -> Option<HostName> {
        match self {
            Self::Name(name) => Some(name),
            _ => None,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Client {
    /// What its bytes come over.
    pub stream: Stream,
    held: Vec<u8>,
    /// Whether reading has met an error. The socket tells it once; whoever comes later would find an orderly end.
    broken: AtomicBool,
}

impl Client {
    /// A client that was just accepted.
    pub fn new(stream: impl Into<Stream>) -> Self {
        Self { stream: stream.into(), held: Vec::new(), broken: AtomicBool::new(false) }
    }

    /// The name in the certificate of the tunnel's other end, if it comes out of a tunnel.
    pub fn peer(&self) -> Option<&str> {
        match &self.stream {
            Stream::Tunnel(stream) => Some(stream.peer()),
            Stream::Tcp(_) | Stream::Tls(_) | Stream::Memory(_) => None,
        }
    }

    /// Bytes that came and belong to the server, in front of those held.
    pub fn put_first(&mut self, bytes: Vec<u8>) {
        if self.held.is_empty() {
            self.held = bytes;
        } else if !bytes.is_empty() {
            self.held.splice(..0, bytes);
        }
    }

    /// Bytes that came and belong to the server, behind those held.
    pub fn put_last(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Bytes that came and were not taken.
    pub fn held(&self) -> &[u8] {
        &self.held
    }

    /// Whether no more is read before some of it is taken.
    pub fn is_full(&self) -> bool {
        self.held.len() >= HELD_MAX
    }

    /// Takes what is held.
    pub fn take_held(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// Reads what is there into the held bytes, waiting for at least one. 0: nothing more comes.
    ///
    /// # Errors
    /// As the socket says.
    pub async fn read_more(&mut self) -> io::Result<usize> {
        let room = HELD_MAX.saturating_sub(self.held.len()).min(READ_MAX);
        if room == 0 {
            return Ok(0);
        }
        poll_fn(|cx| {
            // Here, so that it is on the stack and not in every flow's future.
            let mut buffer = [0; READ_MAX];
            let n = ready!(self.stream.poll_recv(cx, &mut buffer[..room]))?;
            self.held.extend_from_slice(&buffer[..n]);
            Poll::Ready(Ok(n))
        })
        .await
        .inspect_err(|_| self.broken.store(true, Relaxed))
    }

    /// Who notices that the client is gone, and the bytes that come from it.
    pub fn split(&mut self) -> (Presence<'_>, Incoming<'_>) {
        let Self { stream, held, broken } = self;
        (Presence { stream, broken }, Incoming { socket: stream.tcp().ok(), held, broken, ended: false })
    }

    /// Whether the client has reset the connection, as far as reading has found out.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Relaxed)
    }

    /// Waits, but not longer than `wait`, until the first bytes name a host or cannot.
    pub async fn sniff(&mut self, wait: Duration) -> Sniffed {
        let deadline = Instant::now() + wait;
        loop {
            if !self.held.is_empty() {
                match sniff(&self.held) {
                    Sniff::Host { name, .. } => return Sniffed::Name(name),
                    Sniff::None => return Sniffed::Nameless,
                    Sniff::NeedMore if self.held.len() >= HELD_MAX => return Sniffed::Nameless,
                    Sniff::NeedMore => {}
                }
            }
            match timeout_at(deadline, self.read_more()).await {
                Ok(Ok(n)) if n > 0 => {}
                Ok(_) => return Sniffed::Ended,
                Err(_) => return Sniffed::TimedOut,
            }
        }
    }

    /// Waits, but not longer than `wait`, for any first bytes.
    pub async fn wait_for_bytes(&mut self, wait: Duration) {
        if self.held.is_empty() && !wait.is_zero() {
            // Silence and a broken socket alike mean: nothing to send along.
            let _ = timeout_at(Instant::now() + wait, self.read_more()).await;
        }
    }

    /// Reads what has come already and waits for nothing. A connection that is dialled with bytes at hand costs a packet less.
    pub fn read_at_hand(&mut self) {
        let (_, mut incoming) = self.split();
        incoming.held();
    }

    /// Writes all of an answer.
    ///
    /// # Errors
    /// As the socket says.
    pub async fn answer(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Writes all of an answer that the next one follows soon: both may travel in one packet.
    ///
    /// # Errors
    /// As the socket says.
    pub async fn answer_first(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let sent = match &self.stream {
            Stream::Tcp(socket) => match socket.try_write_more(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                result => result?,
            },
            Stream::Tunnel(_) | Stream::Tls(_) | Stream::Memory(_) => 0,
        };
        self.answer(&bytes[sent..]).await
    }

    /// Closes after an answer that refuses: the client gets time to read it (a close with unread bytes would turn
    /// into a reset that overtakes it).
    pub async fn close_after_answer(mut self) {
        if self.stream.shutdown().await.is_err() {
            return;
        }
        let deadline = Instant::now() + REFUSAL_LINGER;
        for _ in 0..64 {
            self.held.clear();
            match timeout_at(deadline, self.read_more()).await {
                Ok(Ok(n)) if n > 0 => {}
                _ => return,
            }
        }
    }

    /// Closes with a reset: refused must not look like accepted and then closed.
    pub fn reset(self) {
        self.stream.close(true);
    }
}

/// Notices that a client is gone while its path is being made.
#[derive(Debug)]
pub struct Presence<'a> {
    stream: &'a Stream,
    broken: &'a AtomicBool,
}

impl Presence<'_> {
    /// Waits until the client is gone in a way that leaves nobody to carry for: a reset. A FIN is none, its bytes and
    /// the answer still count.
    pub async fn lost(self) {
        let mut error = pin!(self.stream.lost());
        poll_fn(|cx| {
            // Who reads beside us may have taken the error before it was announced.
            let is_broken = self.broken.load(Relaxed);
            if is_broken { Poll::Ready(()) } else { error.as_mut().poll(cx) }
        })
        .await;
    }
}

/// The bytes of a client whose path is being made.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// None inside a tunnel: what came with the request is held, and more is read when the path stands.
    socket: Option<&'a TcpStream>,
    held: &'a mut Vec<u8>,
    broken: &'a AtomicBool,
    ended: bool,
}

impl Incoming<'_> {
    /// Nothing more is read from the client: what is held is all there is.
    pub const fn settle(&mut self) {
        self.socket = None;
    }
}

impl FirstBytes for Incoming<'_> {
    fn held(&mut self) -> &[u8] {
        if let Some(socket) = self.socket.filter(|socket| socket.may_read()) {
            // WouldBlock is an ordinary case; any other error is remembered, and ends the making of the path.
            self.ended |= matches!(try_read_into(socket, self.held, self.broken), Ok(0));
        }
        self.held
    }

    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(socket) = self.socket else { return Poll::Pending };
        loop {
            if self.ended || self.broken.load(Relaxed) || self.held.len() >= HELD_MAX {
                return Poll::Pending;
            }
            let before = self.held.len();
            ready!(socket.poll_read_ready(cx));
            if self.held().len() > before {
                return Poll::Ready(());
            }
        }
    }
}

/// Reads what is there into the held bytes, as far as there is room.
fn try_read_into(stream: &TcpStream, held: &mut Vec<u8>, broken: &AtomicBool) -> io::Result<usize> {
    let room = HELD_MAX.saturating_sub(held.len());
    if room == 0 {
        return Ok(0);
    }
    let mut buffer = [MaybeUninit::uninit(); READ_MAX];
    let bytes = stream.try_recv(&mut buffer[..room.min(READ_MAX)]).inspect_err(|error| {
        if error.kind() != io::ErrorKind::WouldBlock {
            broken.store(true, Relaxed);
        }
    })?;
    held.extend_from_slice(bytes);
    Ok(bytes.len())
}
