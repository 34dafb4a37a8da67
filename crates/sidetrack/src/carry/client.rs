//! The client's side while the path is being set up: its socket and the bytes it has sent so far.

use super::{FirstBytes, Stream, Wire};
use crate::live::{LiveFlow, legs};
use crate::reactor::{TcpStream, timeout_at};
use sidetrack_core::flow::{HostName, Side};
use sidetrack_core::http::{Sniff, sniff};
use std::future::{Future, poll_fn};
use std::io;
use std::mem::MaybeUninit;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

/// Most bytes buffered from a client whose path is not set up yet. A ClientHello or request head has at most 16
/// KiB; further bytes wait in the kernel.
pub const HELD_MAX: usize = 16 * 1024;

/// Most bytes of one read.
const READ_MAX: usize = 4096;

/// How long a rejected client may take to read the answer before the socket is closed.
const REFUSAL_LINGER: Duration = Duration::from_millis(500);

/// The result of looking at the first bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sniffed {
    /// They name this host.
    Name(HostName),
    /// They name no host, whatever follows.
    Nameless,
    /// Not enough bytes came in time.
    TimedOut,
    /// The client sent FIN or a reset before they named a host.
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

/// A client: its connection and the bytes read so far.
#[derive(Debug)]
pub struct Client {
    /// The connection to the client.
    pub stream: Stream,
    held: Vec<u8>,
    /// Whether a read failed. The socket reports an error only once; a later read would look like an orderly
    /// end.
    broken: AtomicBool,
}

impl Client {
    /// Tells a capture that a flow uses this connection.
    pub fn note_leg(&self, flow: &LiveFlow) {
        if legs::are_wanted() {
            let _ = self.stream.bottom().map(|socket| legs::note(flow, Side::Client, socket));
        }
    }

    /// A client that was just accepted.
    pub fn new(stream: impl Into<Stream>) -> Self {
        Self { stream: stream.into(), held: Vec::new(), broken: AtomicBool::new(false) }
    }

    /// The name in the certificate of the tunnel's near side, if the client comes out of a tunnel.
    pub fn peer(&self) -> Option<&str> {
        match &self.stream {
            Stream::Tunnel(stream) => Some(stream.peer()),
            Stream::Tcp(_) | Stream::Tls(_) | Stream::Memory(_) => None,
        }
    }

    /// Puts bytes for the server before the buffered ones.
    pub fn put_first(&mut self, bytes: Vec<u8>) {
        if self.held.is_empty() {
            self.held = bytes;
        } else if !bytes.is_empty() {
            self.held.splice(..0, bytes);
        }
    }

    /// Puts bytes for the server after the buffered ones.
    pub fn put_last(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Bytes that were read and not taken yet.
    pub fn held(&self) -> &[u8] {
        &self.held
    }

    /// Whether the buffer is full, so that no more is read.
    pub fn is_full(&self) -> bool {
        self.held.len() >= HELD_MAX
    }

    /// Takes the buffered bytes.
    pub fn take_held(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// Reads into the buffer and waits for at least one byte. 0: no more bytes come, or the buffer is full.
    ///
    /// # Errors
    /// Fails as the socket does.
    pub async fn read_more(&mut self) -> io::Result<usize> {
        let room = HELD_MAX.saturating_sub(self.held.len()).min(READ_MAX);
        if room == 0 {
            return Ok(0);
        }
        poll_fn(|cx| {
            // The buffer is in this closure, so that it is on the stack and not part of each flow's future.
            let mut buffer = [0; READ_MAX];
            let n = ready!(self.stream.poll_recv(cx, &mut buffer[..room]))?;
            self.held.extend_from_slice(&buffer[..n]);
            Poll::Ready(Ok(n))
        })
        .await
        .inspect_err(|_| self.broken.store(true, Relaxed))
    }

    /// Splits the client: one part notices that the client is gone, the other has its bytes.
    pub fn split(&mut self) -> (Presence<'_>, Incoming<'_>) {
        let Self { stream, held, broken } = self;
        (Presence { stream, broken }, Incoming { socket: stream.tcp().ok(), held, broken, ended: false })
    }

    /// Whether the client has reset the connection, as far as reads have noticed.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Relaxed)
    }

    /// Waits at most `wait` until the first bytes name a host, or cannot name one.
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

    /// Waits at most `wait` for any first bytes.
    pub async fn wait_for_bytes(&mut self, wait: Duration) {
        if self.held.is_empty() && !wait.is_zero() {
            // Silence and a broken socket mean the same here: there are no bytes to send along.
            let _ = timeout_at(Instant::now() + wait, self.read_more()).await;
        }
    }

    /// Reads bytes that have already arrived, without waiting. Dialling with bytes at hand saves a packet.
    pub fn read_at_hand(&mut self) {
        let (_, mut incoming) = self.split();
        incoming.held();
    }

    /// Writes all of an answer.
    ///
    /// # Errors
    /// Fails as the socket does.
    pub async fn answer(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Writes all of an answer that is followed by another one soon, so that both may travel in one packet.
    ///
    /// # Errors
    /// Fails as the socket does.
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

    /// Closes after a rejecting answer. Gives the client time to read it: closing with unread bytes sends a
    /// reset, which would overtake the answer.
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

    /// Closes with a reset, so that a denied connection does not look like one that was accepted and then
    /// closed.
    pub fn reset(self) {
        self.stream.close(true);
    }
}

/// Notices that a client is gone while its path is being set up.
#[derive(Debug)]
pub struct Presence<'a> {
    stream: &'a Stream,
    broken: &'a AtomicBool,
}

impl Presence<'_> {
    /// Waits until the client resets the connection. A FIN does not count: the client's bytes and the answer
    /// still matter.
    pub async fn lost(self) {
        let mut error = pin!(self.stream.lost());
        poll_fn(|cx| {
            // A concurrent read may have taken the error before the socket reports it here.
            let is_broken = self.broken.load(Relaxed);
            if is_broken { Poll::Ready(()) } else { error.as_mut().poll(cx) }
        })
        .await;
    }
}

/// The bytes of a client whose path is being set up.
#[derive(Debug)]
pub struct Incoming<'a> {
    /// `None` inside a tunnel: bytes that came with the request are buffered, and more are read after the
    /// set-up.
    socket: Option<&'a TcpStream>,
    held: &'a mut Vec<u8>,
    broken: &'a AtomicBool,
    ended: bool,
}

impl Incoming<'_> {
    /// Stops reading from the client: the buffered bytes are all there is.
    pub const fn settle(&mut self) {
        self.socket = None;
    }
}

impl FirstBytes for Incoming<'_> {
    fn held(&mut self) -> &[u8] {
        if let Some(socket) = self.socket.filter(|socket| socket.may_read()) {
            // WouldBlock is normal. Any other error is remembered and ends the set-up.
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

/// Reads available bytes into the buffer, as far as it has room.
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
