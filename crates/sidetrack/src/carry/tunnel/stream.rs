//! One flow inside a tunnel: a stream of a QUIC connection, or its own TLS connection.
//!
//! A FIN becomes the transport's own end of a direction (QUIC's FIN, TLS's close_notify). A reset must not
//! overtake the bytes before it, as QUIC's RESET_STREAM would. So a reset becomes a FIN of one direction
//! together with STOP_SENDING of the other, with the code [`RESET`]. A peer that reads the end of a stream and
//! finds its way back stopped with that code reports a reset.

use super::lanes::Lanes;
use crate::carry::Wire;
use crate::reactor::{self, TcpStream};
use quinn::{ReadError, RecvStream, SendStream, StoppedError, VarInt, WriteError};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::TlsStream;

/// Application error code of a reset.
pub const RESET: VarInt = VarInt::from_u32(1);

/// Application error code of a flow of UDP that has ended in good order: its end wants no more of the stream.
const ENDED: VarInt = VarInt::from_u32(2);

/// How long the last bytes and the end of a TLS connection may take after its flow has ended.
const FAREWELL: Duration = Duration::from_secs(10);

/// One side of a flow inside a tunnel.
#[derive(Debug)]
pub struct Stream {
    lane: Lane,
    /// The name in the peer's certificate.
    peer: Arc<str>,
    /// The datagrams of the connection. `None`: it is not QUIC.
    lanes: Option<Arc<Lanes>>,
}

#[derive(Debug)]
enum Lane {
    Quic(Quic),
    Tls(Box<Tls>),
}

impl Stream {
    /// A stream of a QUIC connection with this peer.
    pub fn quic(streams: (SendStream, RecvStream), peer: Arc<str>, lanes: Arc<Lanes>) -> Self {
        let (send, recv) = streams;
        Self { lane: Lane::Quic(Quic { send, recv, ended: false }), peer, lanes: Some(lanes) }
    }

    /// A TLS connection with this peer.
    pub fn tls(stream: TlsStream<TcpStream>, peer: Arc<str>) -> Self {
        let tls = Tls { stream, unflushed: false, shutdown: Shutdown::No, ended: false };
        Self { lane: Lane::Tls(Box::new(tls)), peer, lanes: None }
    }

    /// The name in the peer's certificate.
    pub fn peer(&self) -> &Arc<str> {
        &self.peer
    }

    /// The datagrams of its connection. `None`: the connection carries none.
    pub const fn lanes(&self) -> Option<&Arc<Lanes>> {
        self.lanes.as_ref()
    }

    /// Waits until the peer has abandoned the stream. Works while the stream is not read.
    pub async fn lost(&self) {
        match &self.lane {
            // `None` only comes for finished streams, and this one is not finished while a task waits here.
            Lane::Quic(quic) => drop(quic.send.stopped().await),
            Lane::Tls(tls) => tls.stream.get_ref().0.failed().await,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.get_mut().lane {
            Lane::Quic(quic) => quic.poll_read(cx, buffer),
            Lane::Tls(tls) => tls.poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().lane {
            Lane::Quic(quic) => Pin::new(&mut quic.send).poll_write(cx, bytes).map_err(write_error),
            Lane::Tls(tls) => tls.poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().lane {
            Lane::Quic(_) => Poll::Ready(Ok(())),
            Lane::Tls(tls) => Pin::new(&mut tls.stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().lane {
            Lane::Quic(quic) => {
                // A stopped stream is closed already; the reader of it gets the error.
                let _ = quic.send.finish();
                Poll::Ready(Ok(()))
            }
            Lane::Tls(tls) => tls.poll_shutdown(cx),
        }
    }
}

impl Stream {
    /// See [`Wire::take_error`].
    pub fn take_error(&mut self) -> Option<io::Error> {
        match &mut self.lane {
            Lane::Quic(quic) => quic.stopped(),
            Lane::Tls(tls) => Wire::take_error(tls.socket_mut()),
        }
    }

    /// See [`Wire::unsent_bytes`]. A QUIC connection keeps sending for closed streams.
    pub fn unsent_bytes(&self) -> u32 {
        match &self.lane {
            Lane::Quic(_) => 0,
            Lane::Tls(tls) => tls.stream.get_ref().0.unsent_bytes().saturating_add(tls.unflushed.into()),
        }
    }

    /// See [`Wire::tend`].
    pub fn tend(&mut self, cx: &mut Context<'_>) {
        if let Lane::Tls(tls) = &mut self.lane {
            tls.tend(cx);
        }
    }

    /// Ends the stream of a flow of UDP in good order. No direction can end alone.
    pub fn end(self) {
        match self.lane {
            Lane::Quic(mut quic) => {
                // Each call fails only if its direction is over.
                let _ = quic.send.finish();
                let _ = quic.recv.stop(ENDED);
            }
            Lane::Tls(tls) => tls.close(),
        }
    }

    /// See [`Wire::close`].
    pub fn close(self, reset: bool) {
        match self.lane {
            // Dropping sends what is left and then FIN.
            Lane::Quic(quic) if !reset => drop(quic),
            Lane::Quic(quic) => quic.reset(),
            Lane::Tls(tls) if reset => tls.stream.into_inner_socket().close(true),
            Lane::Tls(tls) => tls.close(),
        }
    }
}

#[derive(Debug)]
struct Quic {
    send: SendStream,
    recv: RecvStream,
    /// Whether the peer has finished its direction.
    ended: bool,
}

impl Quic {
    fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.ended {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(self.recv.poll_read_buf(cx, buffer)).map_err(read_error)?;
        if buffer.filled().len() == before && buffer.remaining() > 0 {
            self.ended = true;
            if let Some(error) = self.stopped() {
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns an error if the peer has abandoned the stream, or if the connection is lost.
    fn stopped(&self) -> Option<io::Error> {
        match pin!(self.send.stopped()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(Some(ENDED))) => None,
            Poll::Ready(Ok(Some(code))) => Some(reset_by_peer(code)),
            Poll::Ready(Err(StoppedError::ConnectionLost(error))) => Some(lost(&error)),
            Poll::Ready(Ok(None) | Err(StoppedError::ZeroRttRejected)) | Poll::Pending => None,
        }
    }

    fn reset(mut self) {
        // Each call fails only if its direction is over, and then there is nothing to reset in it.
        if self.ended {
            // The peer's direction is over, so only a reset of ours still tells the peer.
            let _ = self.send.reset(RESET);
        } else {
            let _ = self.recv.stop(RESET);
            let _ = self.send.finish();
        }
    }
}

#[derive(Debug)]
struct Tls {
    stream: TlsStream<TcpStream>,
    /// Whether rustls holds bytes that the socket has not accepted yet.
    unflushed: bool,
    shutdown: Shutdown,
    ended: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shutdown {
    No,
    Begun,
    Done,
}

impl Tls {
    fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.ended {
            return Poll::Ready(Ok(()));
        }
        self.tend(cx);
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        self.ended = read.is_ok() && buffer.filled().len() == before && buffer.remaining() > 0;
        Poll::Ready(read.map_err(truncated))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes))?;
        self.unflushed = Pin::new(&mut self.stream).poll_flush(cx)?.is_pending();
        Poll::Ready(Ok(written))
    }

    /// Begins the end of our direction. What cannot be sent at once is sent by [`Tls::tend`].
    fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shutdown = match Pin::new(&mut self.stream).poll_shutdown(cx)? {
            Poll::Ready(()) => Shutdown::Done,
            Poll::Pending => Shutdown::Begun,
        };
        Poll::Ready(Ok(()))
    }

    fn tend(&mut self, cx: &mut Context<'_>) {
        // An error here returns in the next read or write, which reports it.
        if self.shutdown == Shutdown::Begun {
            let _ = self.poll_shutdown(cx);
        } else if self.unflushed
            && let Poll::Ready(Ok(())) = Pin::new(&mut self.stream).poll_flush(cx)
        {
            self.unflushed = false;
        }
    }

    fn socket_mut(&mut self) -> &mut TcpStream {
        self.stream.get_mut().0
    }

    fn close(mut self: Box<Self>) {
        if self.shutdown == Shutdown::Done {
            return;
        }
        reactor::spawn(async move {
            // A peer that is too slow to take the last bytes gets a reset.
            if !matches!(reactor::timeout(FAREWELL, self.stream.shutdown()).await, Ok(Ok(()))) {
                self.socket_mut().reset_on_close();
            }
        });
    }
}

/// The socket below a TLS connection.
trait IntoSocket {
    fn into_inner_socket(self) -> TcpStream;
}

impl IntoSocket for TlsStream<TcpStream> {
    fn into_inner_socket(self) -> TcpStream {
        match self {
            Self::Client(stream) => stream.into_inner().0,
            Self::Server(stream) => stream.into_inner().0,
        }
    }
}

/// Turns an end without close_notify into a reset: the peer did not make it, so bytes may be missing.
fn truncated(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::UnexpectedEof {
        io::Error::new(ErrorKind::ConnectionReset, "the tunnel's TLS connection ended without close_notify")
    } else {
        error
    }
}

fn reset_by_peer(code: VarInt) -> io::Error {
    let words =
        if code == RESET { "reset by the other side of the tunnel" } else { "given up by the other end" };
    io::Error::new(ErrorKind::ConnectionReset, words)
}

/// The error for a stream whose connection was lost.
pub fn lost(error: &quinn::ConnectionError) -> io::Error {
    io::Error::new(ErrorKind::ConnectionAborted, format!("the tunnel's connection is lost: {error}"))
}

fn read_error(error: ReadError) -> io::Error {
    match error {
        ReadError::Reset(code) => reset_by_peer(code),
        ReadError::ConnectionLost(error) => lost(&error),
        other => io::Error::other(other),
    }
}

fn write_error(error: WriteError) -> io::Error {
    match error {
        WriteError::Stopped(code) => reset_by_peer(code),
        WriteError::ConnectionLost(error) => lost(&error),
        other => io::Error::other(other),
    }
}
