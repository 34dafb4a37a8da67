//! The connection of one side of a flow: a kernel socket, a stream inside a tunnel, TLS over either, or memory.

use super::memory::{Cutter, Memory};
use super::tls::Tls;
use super::tunnel;
use crate::reactor::TcpStream;
use sidetrack_sys::{repair, sockopt};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What the pump needs from each side. Implemented for sockets, so that the compiler can specialise that case,
/// and for [`Stream`].
pub trait Wire: Sized + Unpin {
    /// Reads as soon as bytes are available; 0 is the end of the stream.
    fn poll_recv(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>>;

    /// Writes as soon as there is room.
    fn poll_send(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;

    /// Like [`Wire::poll_send`], if the end follows at once and may travel with these bytes.
    fn poll_send_more(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(cx, bytes)
    }

    /// Whether the peer's FIN or reset is known to follow the unread bytes.
    fn has_ended(&self) -> bool {
        false
    }

    /// Whether the unread bytes are known to end in order, with FIN and not with a reset.
    fn ends_in_order(&self) -> bool {
        false
    }

    /// Sends FIN or its equivalent.
    ///
    /// # Errors
    /// Fails as `shutdown(2)` does.
    fn finish(&mut self, cx: &mut Context<'_>) -> io::Result<()>;

    /// The socket, if the bytes on it are the flow's own and may be moved inside the kernel.
    fn socket(&self) -> Option<&TcpStream>;

    /// Takes the error of a side that is gone. Works while the side is neither read nor written.
    fn take_error(&mut self) -> Option<io::Error>;

    /// Bytes that were written and that a reset would discard.
    fn unsent_bytes(&self) -> u32;

    /// Continues sending bytes that this side still buffers. Called when its task wakes.
    fn tend(&mut self, cx: &mut Context<'_>);

    /// Closes it without a packet: its peer is not told ([`sidetrack_sys::repair::forget`]).
    ///
    /// # Errors
    /// It is not a socket; EPERM without CAP_NET_ADMIN.
    fn forget(self) -> io::Result<()>;

    /// Closes it, with a reset or in order. Remaining bytes are sent by the kernel or another task.
    fn close(self, reset: bool);
}

impl Wire for TcpStream {
    #[inline]
    fn poll_recv(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        Self::poll_recv(self, cx, buffer)
    }

    #[inline]
    fn poll_send(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Self::poll_send(self, cx, bytes)
    }

    #[inline]
    fn poll_send_more(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Self::poll_send_more(self, cx, bytes)
    }

    #[inline]
    fn has_ended(&self) -> bool {
        Self::has_ended(self)
    }

    #[inline]
    fn ends_in_order(&self) -> bool {
        Self::has_ended(self) && !self.has_failed()
    }

    fn finish(&mut self, _: &mut Context<'_>) -> io::Result<()> {
        self.shutdown_write()
    }

    #[inline]
    fn socket(&self) -> Option<&TcpStream> {
        Some(self)
    }

    fn take_error(&mut self) -> Option<io::Error> {
        TcpStream::take_error(self).ok().flatten()
    }

    fn unsent_bytes(&self) -> u32 {
        sockopt::tcp_info(self).map_or(0, |info| info.unsent_bytes)
    }

    #[inline]
    fn tend(&mut self, _: &mut Context<'_>) {}

    fn forget(self) -> io::Result<()> {
        repair::forget(self.into_std()?)
    }

    fn close(mut self, reset: bool) {
        if reset {
            self.reset_on_close();
        }
    }
}

/// One side of a flow, of any kind.
#[derive(Debug)]
pub enum Stream {
    /// A socket.
    Tcp(TcpStream),
    /// A stream inside a tunnel.
    Tunnel(Box<tunnel::Stream>),
    /// TLS that ends in this process.
    Tls(Box<Tls>),
    /// A connection in memory. Another task of this process has the other end.
    Memory(Memory),
}

impl Stream {
    /// Whether it is a socket that uses Multipath TCP.
    pub fn speaks_multipath(&self) -> bool {
        matches!(self, Self::Tcp(stream) if sockopt::speaks_mptcp(stream))
    }

    /// The socket, if it is one.
    ///
    /// # Errors
    /// Fails if it is not a socket.
    pub fn tcp(&self) -> io::Result<&TcpStream> {
        match self {
            Self::Tcp(stream) => Ok(stream),
            Self::Tunnel(_) | Self::Tls(_) | Self::Memory(_) => Err(not_a_socket()),
        }
    }

    /// Like [`Stream::tcp`], for reading and writing.
    ///
    /// # Errors
    /// Fails if it is not a socket.
    pub fn tcp_mut(&mut self) -> io::Result<&mut TcpStream> {
        match self {
            Self::Tcp(stream) => Ok(stream),
            Self::Tunnel(_) | Self::Tls(_) | Self::Memory(_) => Err(not_a_socket()),
        }
    }

    /// The socket below all layers, if there is one. Its addresses are those of the connection.
    ///
    /// # Errors
    /// Fails if there is none.
    pub fn bottom(&self) -> io::Result<&TcpStream> {
        match self {
            Self::Tls(tls) => tls.below().bottom(),
            stream => stream.tcp(),
        }
    }

    /// What cuts it, if it is a connection in memory.
    pub fn cutter(&self) -> Option<Cutter> {
        match self {
            Self::Memory(memory) => Some(memory.cutter()),
            Self::Tcp(_) | Self::Tunnel(_) | Self::Tls(_) => None,
        }
    }

    /// The local address, if it has its own.
    ///
    /// # Errors
    /// Fails if it is not a socket, or as getsockname(2) does.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        sockopt::local_address(self.bottom()?)
    }

    /// Writes the slices in order, as far as there is room.
    ///
    /// # Errors
    /// Fails as the stream does.
    pub fn poll_send_slices(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(stream) => stream.poll_send_slices(cx, slices),
            Self::Tls(tls) => tls.poll_send_slices(cx, slices),
            stream @ (Self::Tunnel(_) | Self::Memory(_)) => {
                match slices.iter().find(|slice| !slice.is_empty()) {
                    Some(first) => stream.poll_send(cx, first),
                    None => Poll::Ready(Ok(0)),
                }
            }
        }
    }

    /// Waits until the peer has reset or abandoned the connection. Works while the stream is not read.
    pub async fn lost(&self) {
        match self {
            Self::Tcp(socket) => {
                socket.failed().await;
            }
            Self::Tunnel(stream) => stream.lost().await,
            Self::Tls(tls) => Box::pin(tls.below().lost()).await,
            // The end of a connection in memory is noticed by reading.
            Self::Memory(_) => std::future::pending().await,
        }
    }
}

fn not_a_socket() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "a stream inside a tunnel is not a socket")
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(stream)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tunnel(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(tls) => {
                let read = ready!(tls.poll_recv(cx, buffer.initialize_unfilled()))?;
                buffer.advance(read);
                Poll::Ready(Ok(()))
            }
            Self::Memory(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tunnel(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(tls) => tls.poll_send_slices(cx, &[IoSlice::new(bytes)]),
            Self::Memory(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tunnel(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(tls) => tls.poll_flush(cx),
            Self::Memory(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tunnel(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(tls) => tls.poll_shutdown(cx),
            Self::Memory(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

impl Wire for Stream {
    fn poll_recv(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(stream) => TcpStream::poll_recv(stream, cx, buffer),
            Self::Tunnel(stream) => {
                let mut buffer = ReadBuf::new(buffer);
                Pin::new(stream).poll_read(cx, &mut buffer).map_ok(|()| buffer.filled().len())
            }
            Self::Tls(tls) => tls.poll_recv(cx, buffer),
            Self::Memory(stream) => {
                let mut buffer = ReadBuf::new(buffer);
                Pin::new(stream).poll_read(cx, &mut buffer).map_ok(|()| buffer.filled().len())
            }
        }
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(stream) => TcpStream::poll_send(stream, cx, bytes),
            Self::Tunnel(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(tls) => tls.poll_send_slices(cx, &[IoSlice::new(bytes)]),
            Self::Memory(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_send_more(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(stream) => TcpStream::poll_send_more(stream, cx, bytes),
            Self::Tunnel(_) | Self::Tls(_) | Self::Memory(_) => self.poll_send(cx, bytes),
        }
    }

    fn has_ended(&self) -> bool {
        self.tcp().is_ok_and(Wire::has_ended)
    }

    fn ends_in_order(&self) -> bool {
        self.tcp().is_ok_and(Wire::ends_in_order)
    }

    fn finish(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown_write(),
            // `tend` does what is not possible at once.
            Self::Tunnel(stream) => match Pin::new(stream).poll_shutdown(cx) {
                Poll::Ready(done) => done,
                Poll::Pending => Ok(()),
            },
            Self::Tls(tls) => tls.finish(cx),
            Self::Memory(stream) => match Pin::new(stream).poll_shutdown(cx) {
                Poll::Ready(done) => done,
                Poll::Pending => Ok(()),
            },
        }
    }

    fn socket(&self) -> Option<&TcpStream> {
        self.tcp().ok()
    }

    fn take_error(&mut self) -> Option<io::Error> {
        match self {
            Self::Tcp(stream) => Wire::take_error(stream),
            Self::Tunnel(stream) => stream.take_error(),
            Self::Tls(tls) => tls.take_error(),
            Self::Memory(_) => None,
        }
    }

    fn unsent_bytes(&self) -> u32 {
        match self {
            Self::Tcp(stream) => stream.unsent_bytes(),
            Self::Tunnel(stream) => stream.unsent_bytes(),
            Self::Tls(tls) => tls.unsent_bytes(),
            Self::Memory(_) => 0,
        }
    }

    fn tend(&mut self, cx: &mut Context<'_>) {
        match self {
            Self::Tcp(_) | Self::Memory(_) => {}
            Self::Tunnel(stream) => stream.tend(cx),
            Self::Tls(tls) => tls.tend(cx),
        }
    }

    fn forget(self) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => Wire::forget(socket),
            Self::Tunnel(_) | Self::Tls(_) | Self::Memory(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn close(self, reset: bool) {
        match self {
            Self::Tcp(stream) => stream.close(reset),
            Self::Tunnel(stream) => stream.close(reset),
            Self::Tls(tls) => tls.close(reset),
            Self::Memory(stream) => {
                if reset {
                    stream.cutter().cut();
                }
            }
        }
    }
}
