//! TLS over any stream, as a side of a flow: the server's end towards clients whose connections are intercepted,
//! and the client's end towards their servers. The task that owns it reads, encrypts and writes in its own
//! calls.

use super::Failure;
use super::stream::{Stream, Wire};
use crate::tls::{Roots, server_name};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use sidetrack_core::carrier::Hop;
use sidetrack_core::flow::{EndReason, Host};
use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

/// Most bytes that wait to be sent, and most bytes that are encrypted in one call.
const BUFFERED_MAX: usize = 256 * 1024;

/// A TLS connection over a stream.
#[derive(Debug)]
pub struct Tls {
    stream: Stream,
    connection: Connection,
    /// Bytes of the peer that were read before.
    held: Vec<u8>,
    /// Bytes that were taken from the caller and are not all sent yet. The caller gets this number when they
    /// are.
    accepted: usize,
    ending: Ending,
}

/// The state of the end of our direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    No,
    /// close_notify is being sent.
    Begun,
    /// FIN was sent too.
    Done,
}

/// The stream below, in the form that rustls reads and writes.
struct Below<'a, 'b>(&'a mut Stream, &'a mut Context<'b>);

impl Read for Below<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        blocking(self.0.poll_recv(self.1, buffer))
    }
}

impl Write for Below<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        blocking(self.0.poll_send(self.1, bytes))
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        blocking(self.0.poll_send_slices(self.1, slices))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn blocking<T>(poll: Poll<io::Result<T>>) -> io::Result<T> {
    match poll {
        Poll::Ready(result) => result,
        Poll::Pending => Err(ErrorKind::WouldBlock.into()),
    }
}

impl Tls {
    /// Creates the server's end; `held` are bytes of the client that were already read.
    ///
    /// # Errors
    /// Fails if rustls rejects the configuration.
    pub fn server(stream: Stream, config: Arc<ServerConfig>, held: Vec<u8>) -> io::Result<Self> {
        let connection = ServerConnection::new(config).map_err(io::Error::other)?;
        Ok(Self::new(stream, connection.into(), held))
    }

    /// Creates the client's end, to the server with this name.
    ///
    /// # Errors
    /// Fails if rustls rejects the configuration.
    pub fn client(
        stream: Stream,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        held: Vec<u8>,
    ) -> io::Result<Self> {
        let connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
        Ok(Self::new(stream, connection.into(), held))
    }

    fn new(stream: Stream, mut connection: Connection, held: Vec<u8>) -> Self {
        connection.set_buffer_limit(Some(BUFFERED_MAX));
        Self { stream, connection, held, accepted: 0, ending: Ending::No }
    }

    /// Performs the handshake. Its last bytes are sent together with the first data.
    ///
    /// # Errors
    /// Fails with a [`rustls::Error`], which [`reason`] extracts, or with an error of the stream.
    pub async fn handshake(&mut self) -> io::Result<()> {
        poll_fn(|cx| {
            while self.connection.is_handshaking() {
                ready!(self.poll_flush(cx))?;
                if self.connection.is_handshaking() {
                    ready!(self.fill(cx))?;
                }
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// The negotiated application protocol (ALPN, RFC 7301).
    pub fn protocol(&self) -> Option<&[u8]> {
        self.connection.alpn_protocol()
    }

    /// The stream below.
    pub const fn below(&self) -> &Stream {
        &self.stream
    }

    /// Whether the peer has sent anything that we have understood.
    pub fn has_heard(&self) -> bool {
        self.connection.protocol_version().is_some()
    }

    /// Reads and processes records. [`Self::poll_recv`] reports the end of the stream.
    fn fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let read = if self.held.is_empty() {
            self.connection.read_tls(&mut Below(&mut self.stream, cx))
        } else {
            let mut held = self.held.as_slice();
            let read = self.connection.read_tls(&mut held);
            let left = held.len();
            self.held.drain(..self.held.len() - left);
            if left == 0 {
                // Free the buffer: an idle connection should not keep it.
                self.held = Vec::new();
            }
            read
        };
        let ended = match read {
            Ok(n) => n == 0,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Poll::Pending,
            Err(error) => return Poll::Ready(Err(error)),
        };
        if let Err(error) = self.connection.process_new_packets() {
            // Send the alert to the peer, if possible.
            let _ = self.poll_flush(cx);
            return Poll::Ready(Err(io::Error::new(ErrorKind::InvalidData, error)));
        }
        if ended && self.connection.is_handshaking() {
            return Poll::Ready(Err(ErrorKind::UnexpectedEof.into()));
        }
        Poll::Ready(Ok(()))
    }

    /// Writes encrypted bytes.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Below(&mut self.stream, cx)) {
                Ok(0) => return Poll::Ready(Err(ErrorKind::WriteZero.into())),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads as soon as bytes are available; 0 is close_notify. An end without close_notify is an error, because
    /// bytes may be missing.
    pub(super) fn poll_recv(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        self.tend(cx);
        loop {
            match self.connection.reader().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
            ready!(self.fill(cx))?;
        }
    }

    /// Takes bytes. Returns their number when they are sent.
    pub(super) fn poll_send_slices(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.accepted == 0 {
            ready!(self.poll_flush(cx))?;
            self.accepted = self.connection.writer().write_vectored(slices)?;
        }
        ready!(self.poll_flush(cx))?;
        Poll::Ready(Ok(std::mem::take(&mut self.accepted)))
    }

    /// Ends our direction. What cannot be sent at once is sent by [`Self::tend`].
    pub(super) fn finish(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.ending == Ending::No {
            self.connection.send_close_notify();
            self.ending = Ending::Begun;
        }
        match self.poll_end(cx) {
            Poll::Ready(done) => done,
            Poll::Pending => Ok(()),
        }
    }

    /// Like [`Self::finish`], but ready when everything is sent.
    pub(super) fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.finish(cx)?;
        self.poll_end(cx)
    }

    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.ending == Ending::Begun {
            ready!(self.poll_flush(cx))?;
            self.stream.finish(cx)?;
            self.ending = Ending::Done;
        }
        Poll::Ready(Ok(()))
    }

    /// See [`Wire::tend`].
    pub(super) fn tend(&mut self, cx: &mut Context<'_>) {
        self.stream.tend(cx);
        // An error here returns in the next read or write, which reports it.
        let _ = if self.ending == Ending::Begun { self.poll_end(cx) } else { self.poll_flush(cx) };
    }

    /// See [`Wire::take_error`].
    pub(super) fn take_error(&mut self) -> Option<io::Error> {
        Wire::take_error(&mut self.stream)
    }

    /// See [`Wire::unsent_bytes`].
    pub(super) fn unsent_bytes(&self) -> u32 {
        self.stream.unsent_bytes().saturating_add(self.connection.wants_write().into())
    }

    /// See [`Wire::close`]. An orderly close sends close_notify, if there is room for it.
    pub(super) fn close(mut self, reset: bool) {
        if !reset {
            // A peer that does not get close_notify assumes that bytes are missing. We cannot prevent that here.
            let _ = self.finish(&mut Context::from_waker(Waker::noop()));
        }
        self.stream.close(reset);
    }
}

/// TLS with one server, for flows whose clients do not use TLS.
#[derive(Debug)]
pub struct ToServer {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    host: Host,
}

impl ToServer {
    /// TLS with this host. `None` if no certificate can have this name.
    pub fn new(config: ClientConfig, host: Host) -> Option<Self> {
        let name = server_name(&host)?;
        Some(Self { config: Arc::new(config), name, host })
    }

    /// Performs the handshake; `early` are bytes of the server that were already read.
    ///
    /// # Errors
    /// Fails with `certificate` if the server cannot prove its identity, and with `tls_failed` for all other TLS
    /// errors.
    pub async fn shake_hands(&self, stream: Stream, early: Vec<u8>) -> Result<Tls, Failure> {
        let shaken = match Tls::client(stream, self.config.clone(), self.name.clone(), early) {
            Ok(mut tls) => tls.handshake().await.map(|()| tls),
            Err(error) => Err(error),
        };
        shaken.map_err(|error| {
            let why = match reason(&error) {
                Some(rustls::Error::InvalidCertificate(_)) => EndReason::Certificate,
                _ => EndReason::TlsFailed,
            };
            Failure::new(why, format!("TLS with {}: {error}", self.host))
        })
    }
}

/// Most sets of authorities whose configurations are kept.
const KEPT_MAX: usize = 64;

/// A configuration, with the text of its authorities.
type Kept = (Option<Arc<str>>, Arc<ClientConfig>);

thread_local! {
    /// Configurations by the text of their authorities. They keep the sessions with their hops, too.
    static KEPT: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
}

/// Returns the configuration for hops whose certificates these authorities signed. `None`: those of the system.
///
/// # Errors
/// There are no such authorities.
pub fn roots(ca_pem: Option<&Arc<str>>) -> Result<Arc<ClientConfig>, Failure> {
    let found = KEPT.with_borrow(|kept| {
        kept.iter().find(|(pem, _)| pem.as_ref() == ca_pem).map(|(_, config)| config.clone())
    });
    if let Some(config) = found {
        return Ok(config);
    }
    let made = match ca_pem {
        Some(pem) => Roots::of(pem),
        None => Roots::of_system_and(None),
    };
    let failed = |error: crate::tls::TlsError| Failure::new(EndReason::TlsFailed, error.to_string());
    let config = Arc::new(made.and_then(|roots| roots.client()).map_err(failed)?);
    KEPT.with_borrow_mut(|kept| {
        kept.truncate(KEPT_MAX - 1);
        kept.push((ca_pem.cloned(), config.clone()));
    });
    Ok(config)
}

/// Makes TLS with a hop, which then speaks one of these protocols (ALPN). `early` are bytes that were already read.
///
/// # Errors
/// As [`ToServer::shake_hands`].
pub async fn with_hop(
    stream: Stream,
    early: Vec<u8>,
    hop: &Hop,
    protocols: &[&[u8]],
) -> Result<Tls, Failure> {
    let mut config = (*roots(hop.ca_pem.as_ref())?).clone();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let host = hop.address.host.clone();
    let why = format!("no certificate can be for {host}");
    let to = ToServer::new(config, host).ok_or_else(|| Failure::new(EndReason::Certificate, why))?;
    to.shake_hands(stream, early).await
}

/// Returns the rustls error that ended a handshake, if there is one.
pub fn reason(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}
