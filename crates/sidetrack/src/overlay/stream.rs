//! What carries one flow to a neighbour, as a stream of frames or of plain bytes: a TLS connection, or a stream of a paced
//! link. Both behave alike for those that use them.

use super::datagrams::Ends;
use super::paced;
use super::secured::{Parked, Secured};
use super::shape::Shaper;
use rustls::Connection;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Decoder, Frame};
use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::net::TcpStream;

thread_local! {
    static PLAINTEXT: RefCell<Box<[u8]>> = RefCell::new(vec![0; 16_384].into_boxed_slice());
}

/// What moves the bytes.
enum Carrier {
    /// A TLS connection over kernel TCP.
    Secured(Secured),
    /// A stream in sealed datagrams.
    Paced(paced::Stream),
}

/// A stream to a neighbour.
pub(super) struct Stream {
    carrier: Carrier,
    decoder: Decoder,
}

/// A TLS connection on its way to another thread.
pub(super) struct ParkedStream {
    parked: Parked,
    decoder: Decoder,
}

impl Stream {
    /// Makes the TLS handshake. Returns the neighbour that the peer's key belongs to.
    ///
    /// # Errors
    /// Returns the error of the socket or of TLS, for example if the key is not pinned.
    pub(super) async fn handshake(tcp: TcpStream, tls: Connection) -> io::Result<(Self, NodeId)> {
        let (secured, peer) = Secured::handshake(tcp, tls).await?;
        Ok((Self::new(Carrier::Secured(secured)), peer))
    }

    /// Returns the stream of a paced link.
    pub(super) fn paced(stream: paced::Stream) -> Self {
        Self::new(Carrier::Paced(stream))
    }

    fn new(carrier: Carrier) -> Self {
        Self { carrier, decoder: Decoder::new() }
    }

    /// Applies this rate limit from now on. A paced link has its own.
    pub(super) fn shape(&mut self, shaper: Arc<Shaper>) {
        if let Carrier::Secured(secured) = &mut self.carrier {
            secured.shape(shaper);
        }
    }

    /// Detaches the connection from this thread.
    ///
    /// # Errors
    /// Returns the runtime's error; `Unsupported` for a stream of a paced link.
    pub(super) fn park(self) -> io::Result<ParkedStream> {
        match self.carrier {
            Carrier::Secured(secured) => Ok(ParkedStream { parked: secured.park()?, decoder: self.decoder }),
            Carrier::Paced(_) => Err(ErrorKind::Unsupported.into()),
        }
    }

    /// Reads plain bytes. Returns 0 if the neighbour has ended the stream.
    fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        match &mut self.carrier {
            Carrier::Secured(secured) => secured.poll_read(cx, buffer),
            Carrier::Paced(paced) => paced.poll_read(cx, buffer),
        }
    }

    /// Waits until more may be written.
    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.carrier {
            Carrier::Secured(secured) => secured.poll_ready(cx),
            Carrier::Paced(paced) => paced.poll_ready(cx),
        }
    }

    /// Writes bytes. Call [`Stream::poll_ready`] before, and [`Stream::poll_flush`] some time after.
    ///
    /// # Errors
    /// Returns the error of TLS, or `BrokenPipe` if the paced link is down.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<()> {
        match &mut self.carrier {
            Carrier::Secured(secured) => secured.write(head, body),
            Carrier::Paced(paced) => paced.write(head, body),
        }
    }

    /// Gives all written bytes to the socket or to the paced link.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.carrier {
            Carrier::Secured(secured) => secured.poll_flush(cx),
            Carrier::Paced(paced) => paced.poll_flush(cx),
        }
    }

    /// Writes a frame.
    ///
    /// # Errors
    /// Returns the error of [`Stream::write`].
    pub(super) fn write_frame(&mut self, frame: &Frame) -> io::Result<()> {
        self.write(&frame.to_bytes(), &[])
    }

    /// Returns the next frame; none if the neighbour has ended the stream.
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Frame>>> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) => return Poll::Ready(Ok(Some(frame))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(io::Error::new(ErrorKind::InvalidData, error))),
            }
            let ended = PLAINTEXT.with_borrow_mut(|scratch| {
                let n = ready!(self.poll_read(cx, scratch))?;
                self.decoder.push(&scratch[..n]);
                Poll::Ready(io::Result::Ok(n == 0))
            });
            if ready!(ended)? {
                return Poll::Ready(Ok(None));
            }
        }
    }

    /// Returns the next frame.
    ///
    /// # Errors
    /// Returns the error of the carrier, `InvalidData` for an invalid frame, `UnexpectedEof` at the end.
    pub(super) async fn frame(&mut self) -> io::Result<Frame> {
        let frame = poll_fn(|cx| self.poll_frame(cx)).await?;
        frame.ok_or_else(|| io::Error::new(ErrorKind::UnexpectedEof, "the neighbour ended the connection"))
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// Returns the error of the carrier.
    pub(super) async fn send(&mut self, frame: &Frame) -> io::Result<()> {
        self.write_frame(frame)?;
        poll_fn(|cx| self.poll_flush(cx)).await
    }

    /// Returns the bytes that came after the frames that were taken.
    pub(super) fn take_rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.decoder).into_rest()
    }

    /// Moves available bytes from this stream to `to`. Returns how many; fails with `UnexpectedEof` if this stream has
    /// ended.
    pub(super) fn poll_pass(&mut self, cx: &mut Context<'_>, to: &mut Self) -> Poll<io::Result<u64>> {
        let mut passed = 0;
        PLAINTEXT.with_borrow_mut(|scratch| {
            // The number of rounds is limited, so that other tasks of this thread have their turn.
            for _ in 0..16 {
                ready!(to.poll_ready(cx))?;
                match self.poll_read(cx, scratch)? {
                    Poll::Ready(0) => return Poll::Ready(Err(ErrorKind::UnexpectedEof.into())),
                    Poll::Ready(n) => {
                        to.write(&scratch[..n], &[])?;
                        passed += n as u64;
                    }
                    Poll::Pending => {
                        let _ = to.poll_flush(cx)?;
                        return if passed > 0 { Poll::Ready(Ok(passed)) } else { Poll::Pending };
                    }
                }
            }
            let _ = to.poll_flush(cx)?;
            Poll::Ready(Ok(passed))
        })
    }

    /// Returns a secret that only both ends of this connection know from its handshake (RFC 8446 Sec. 7.5).
    ///
    /// # Errors
    /// Returns the error of TLS; `Unsupported` for a stream of a paced link.
    pub(super) fn exported<const N: usize>(&self, label: &[u8]) -> io::Result<[u8; N]> {
        match &self.carrier {
            Carrier::Secured(secured) => secured.exported(label),
            Carrier::Paced(_) => Err(ErrorKind::Unsupported.into()),
        }
    }

    /// Returns our address and the neighbour's address. `None`: it is a stream of a paced link, or the connection has ended.
    pub(super) fn ends(&self) -> Option<Ends> {
        match &self.carrier {
            Carrier::Secured(secured) => secured.ends(),
            Carrier::Paced(_) => None,
        }
    }

    /// Returns a copy of the socket, for queries about its state.
    ///
    /// # Errors
    /// Fails if there is no descriptor left; `Unsupported` for a stream of a paced link.
    pub(super) fn watched(&self) -> io::Result<OwnedFd> {
        match &self.carrier {
            Carrier::Secured(secured) => secured.watched(),
            Carrier::Paced(_) => Err(ErrorKind::Unsupported.into()),
        }
    }

    /// Ends the stream in order: what was written still arrives.
    pub(super) async fn close(self) {
        match self.carrier {
            Carrier::Secured(secured) => secured.close().await,
            Carrier::Paced(paced) => paced.close().await,
        }
    }
}

impl ParkedStream {
    /// Attaches the connection to this thread.
    ///
    /// # Errors
    /// Returns the runtime's error.
    pub(super) fn unpark(self) -> io::Result<Stream> {
        Ok(Stream { carrier: Carrier::Secured(self.parked.unpark()?), decoder: self.decoder })
    }
}
