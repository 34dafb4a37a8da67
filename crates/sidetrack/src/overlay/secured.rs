//! One TLS connection to a neighbour, as a stream of plain bytes.

use super::datagrams::Ends;
use super::records::Records;
use super::shape::Shaper;
use super::tls;
use rustls::Connection;
use sidetrack_core::overlay::NodeId;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// Most plain bytes that wait in the TLS connection until the socket accepts them.
const PENDING_MAX: usize = 65_536;

/// Most bytes of one read from the socket.
const SCRATCH: usize = 65_536;

thread_local! {
    static CIPHERTEXT: RefCell<Box<[u8]>> = RefCell::new(vec![0; SCRATCH].into_boxed_slice());
}

/// A TLS connection to a neighbour.
pub(super) struct Secured {
    tcp: TcpStream,
    /// Boxed: it has more than a kilobyte, and each future that waits for a stream reserves room for several.
    tls: Box<Connection>,
    /// Received ciphertext that is not decrypted yet.
    rest: Vec<u8>,
    rest_start: usize,
    records: Records,
    /// Plain bytes given to TLS since the socket last accepted everything.
    pending: usize,
    /// The rate limit of its link, if it has one.
    shaper: Option<Arc<Shaper>>,
    pause: Option<Pin<Box<Sleep>>>,
}

/// A connection on its way to another thread.
pub(super) struct Parked {
    tcp: std::net::TcpStream,
    tls: Box<Connection>,
    rest: Vec<u8>,
    records: Records,
}

fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

impl Secured {
    fn new(tcp: TcpStream, tls: Box<Connection>) -> Self {
        let (records, rest) = (Records::default(), Vec::new());
        Self { tcp, tls, rest, rest_start: 0, records, pending: 0, shaper: None, pause: None }
    }

    /// Applies this rate limit from now on.
    pub(super) fn shape(&mut self, shaper: Arc<Shaper>) {
        self.shaper = Some(shaper);
    }

    /// Waits until the rate limit allows more.
    fn poll_allowed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let wait = self.shaper.as_ref().map_or(Duration::ZERO, |shaper| shaper.wait(Duration::ZERO));
            if wait.is_zero() {
                return Poll::Ready(());
            }
            self.pause = Some(Box::pin(sleep(wait)));
        }
    }

    /// Makes the TLS handshake. Returns the neighbour that the peer's key belongs to.
    ///
    /// # Errors
    /// Returns the error of the socket or of TLS, for example if the key is not pinned.
    pub(super) async fn handshake(tcp: TcpStream, mut tls: Connection) -> io::Result<(Self, NodeId)> {
        // `PENDING_MAX` is the limit; with a second limit in TLS, a write could be cut.
        tls.set_buffer_limit(None);
        let mut stream = Self::new(tcp, Box::new(tls));
        poll_fn(|cx| {
            while stream.tls.is_handshaking() {
                ready!(stream.poll_flush(cx))?;
                // At an end in the middle of a handshake, TLS only sees no bytes: without this check the loop would spin.
                if stream.tls.is_handshaking() && !ready!(stream.poll_fill(cx))? {
                    return Poll::Ready(Err(ErrorKind::UnexpectedEof.into()));
                }
            }
            stream.poll_flush(cx)
        })
        .await?;
        let peer = tls::peer(&stream.tls).ok_or_else(|| io::Error::other("the neighbour showed no key"))?;
        Ok((stream, peer))
    }

    /// Detaches the stream from this thread.
    ///
    /// # Errors
    /// Returns the runtime's error.
    pub(super) fn park(self) -> io::Result<Parked> {
        let rest = self.rest[self.rest_start..].to_vec();
        let Self { tcp, tls, records, .. } = self;
        Ok(Parked { tcp: tcp.into_std()?, tls, rest, records })
    }

    /// Reads ciphertext from the socket and decrypts some of it. Returns false at the end of the socket's stream.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if self.rest_start < self.rest.len() {
            let mut part = &self.rest[self.rest_start..];
            let before = part.len();
            feed(&mut self.tls, &mut part)?;
            self.rest_start += before - part.len();
            if self.rest_start == self.rest.len() {
                (self.rest, self.rest_start) = (Vec::new(), 0);
            }
            return Poll::Ready(Ok(true));
        }
        CIPHERTEXT.with_borrow_mut(|scratch| {
            let mut buffer = ReadBuf::new(scratch);
            ready!(Pin::new(&mut self.tcp).poll_read(cx, &mut buffer))?;
            let came = buffer.filled();
            if came.is_empty() {
                // TLS must see the end: an end without `close_notify` is a cut connection.
                self.tls.read_tls(&mut &*came)?;
                return Poll::Ready(Ok(false));
            }
            self.records.came(&self.tcp, came)?;
            let mut part = came;
            feed(&mut self.tls, &mut part)?;
            self.rest.extend_from_slice(part);
            Poll::Ready(Ok(true))
        })
    }

    /// Reads plain bytes. Returns 0 if the neighbour has ended the stream.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            match self.tls.reader().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
            ready!(self.poll_fill(cx))?;
        }
    }

    /// Waits until more may be written.
    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.pending < PENDING_MAX { Poll::Ready(Ok(())) } else { self.poll_flush(cx) }
    }

    /// Encrypts bytes. Call [`Secured::poll_ready`] before, and [`Secured::poll_flush`] some time after.
    ///
    /// # Errors
    /// Returns the error of TLS.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<()> {
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        let written = self.tls.writer().write_vectored(&parts)?;
        self.pending += head.len() + body.len();
        if written < head.len() + body.len() {
            return Err(io::Error::other("TLS took a part only"));
        }
        Ok(())
    }

    /// Gives all encrypted bytes to the socket.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.tls.wants_write() {
            ready!(self.poll_allowed(cx));
            match self.tls.write_tls(&mut Socket(&self.tcp)) {
                Ok(n) => {
                    if let Some(shaper) = &self.shaper {
                        shaper.spend(n);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => ready!(self.tcp.poll_write_ready(cx))?,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        self.pending = 0;
        Poll::Ready(Ok(()))
    }

    /// Returns a secret that only both ends of this connection know from its handshake (RFC 8446 Sec. 7.5).
    ///
    /// # Errors
    /// Returns the error of TLS.
    pub(super) fn exported<const N: usize>(&self, label: &[u8]) -> io::Result<[u8; N]> {
        self.tls.export_keying_material([0; N], label, None).map_err(broken)
    }

    /// Returns our address and the neighbour's address. `None`: the connection has ended.
    pub(super) fn ends(&self) -> Option<Ends> {
        let ip = |address: io::Result<SocketAddr>| Some(address.ok()?.ip().to_canonical());
        ip(self.tcp.local_addr()).zip(ip(self.tcp.peer_addr()))
    }

    /// Returns a copy of the socket, for queries about its state.
    ///
    /// # Errors
    /// Fails if there is no descriptor left.
    pub(super) fn watched(&self) -> io::Result<OwnedFd> {
        self.tcp.as_fd().try_clone_to_owned()
    }

    /// Sends `close_notify`, and closes the connection.
    pub(super) async fn close(mut self) {
        self.tls.send_close_notify();
        // An error means that the neighbour is gone and does not need it.
        let _ = poll_fn(|cx| self.poll_flush(cx)).await;
    }
}

impl Parked {
    /// Attaches the stream to this thread.
    ///
    /// # Errors
    /// Returns the runtime's error.
    pub(super) fn unpark(self) -> io::Result<Secured> {
        let Self { tcp, tls, rest, records } = self;
        Ok(Secured { rest, records, ..Secured::new(TcpStream::from_std(tcp)?, tls) })
    }
}

/// Decrypts until there is something to read or `part` is empty.
fn feed(tls: &mut Connection, part: &mut &[u8]) -> io::Result<()> {
    while !part.is_empty() {
        tls.read_tls(part)?;
        let state = tls.process_new_packets().map_err(broken)?;
        if state.plaintext_bytes_to_read() > 0 {
            break;
        }
    }
    Ok(())
}

/// Lets TLS write to the socket.
struct Socket<'a>(&'a TcpStream);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
    use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

    /// Returns a server's end that waits for a handshake, and the first bytes of a client.
    fn ends() -> (Connection, Vec<u8>) {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let signed = rcgen::generate_simple_self_signed(["node.example".to_owned()]).expect("a certificate");
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der()));
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![CertificateDer::from(signed.cert.der().to_vec())], key)
            .expect("a key");
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = "node.example".try_into().expect("a name");
        let mut client = ClientConnection::new(Arc::new(client), name).expect("a client");
        let mut hello = Vec::new();
        client.write_tls(&mut hello).expect("memory");
        (ServerConnection::new(Arc::new(server)).expect("a server").into(), hello)
    }

    #[test]
    fn an_end_in_the_middle_of_a_handshake_is_an_error_at_every_byte() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a listener");
            let address = listener.local_addr().expect("an address");
            let length = ends().1.len();
            for cut in 0..=length {
                let (server, hello) = ends();
                let mut client = std::net::TcpStream::connect(address).expect("connected");
                let (tcp, _) = listener.accept().await.expect("accepted");
                client.write_all(&hello[..cut.min(hello.len())]).expect("sent");
                client.shutdown(std::net::Shutdown::Write).expect("shut down");
                let ended =
                    tokio::time::timeout(Duration::from_secs(60), Secured::handshake(tcp, server)).await;
                let error = ended.expect("it does not wait for ever").err().expect("no handshake");
                assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{cut}");
            }
        });
    }
}
