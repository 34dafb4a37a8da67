//! The tunnel's transport where UDP does not get through: TLS 1.3 over TCP, one connection for each flow, with
//! some always ready.
//!
//! A flow takes a ready connection, its request leaves at once, and a new connection replaces it. So flows do
//! not delay each other, and back-pressure, half-close and loss recovery are those of TCP.

use super::{AskDialing, Settings};
use crate::carry::direct::Wishes;
use crate::carry::tunnel::Stream;
use crate::carry::{Admitted, Dialing, Failure};
use crate::reactor::{TcpStream, timeout};
use crate::tls::peer_name;
use rustls::pki_types::ServerName;
use sidetrack_core::flow::EndReason;
use sidetrack_core::tunnel::{Greeting, Parsed};
use sidetrack_sys::sockopt;
use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::sync::{Notify, Semaphore};
use tokio_rustls::{TlsConnector, TlsStream};

/// Number of connections kept ready at first. It doubles each time a flow finds none.
const READY_MIN: usize = 4;

/// Most connections kept ready, per path and worker.
pub const READY_MAX: usize = 64;

/// Most handshakes of one pool at a time. The far side has its own limit, which a burst of flows must not
/// exceed.
const HANDSHAKES_MAX: usize = 32;

/// How long the TCP and TLS handshakes together may take.
const PATIENCE: Duration = Duration::from_secs(4);

/// Unanswered keep-alive probes before a connection counts as lost.
const PROBES: u32 = 3;

/// Most bytes of a greeting. Nothing follows it.
const GREETING_MAX: usize = 1024;

/// The TLS connections of one path that are ready for a flow.
#[derive(Debug)]
pub struct Pool {
    ready: RefCell<Vec<Stream>>,
    target: Cell<usize>,
    taken: Notify,
    dial: Dial,
}

struct Dial {
    settings: Arc<Settings>,
    to: SocketAddr,
    name: ServerName<'static>,
    dialing: AskDialing,
    handshakes: Semaphore,
}

impl std::fmt::Debug for Dial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TLS to {}", self.to)
    }
}

impl Pool {
    /// Creates a pool and opens its first connection.
    ///
    /// # Errors
    /// Says why the connection failed.
    pub async fn connect(
        settings: Arc<Settings>,
        to: SocketAddr,
        name: &str,
        dialing: AskDialing,
    ) -> Result<Self, Failure> {
        let name = ServerName::try_from(name.to_owned())
            .map_err(|error| Failure::new(EndReason::Internal, format!("'{name}': {error}")))?;
        let dial = Dial { settings, to, name, dialing, handshakes: Semaphore::new(HANDSHAKES_MAX) };
        let ready = RefCell::new(vec![dial.connect().await?]);
        Ok(Self { ready, target: Cell::new(READY_MIN), taken: Notify::new(), dial })
    }

    /// The address of the far side.
    pub const fn address(&self) -> SocketAddr {
        self.dial.to
    }

    /// Returns a connection for one flow: a ready one, or a new one if none is ready.
    ///
    /// # Errors
    /// Fails if none was ready and a new one could not be opened.
    pub async fn take(&self) -> Result<Stream, Failure> {
        let found = {
            let mut ready = self.ready.borrow_mut();
            ready.retain_mut(is_alive);
            ready.pop()
        };
        if found.is_none() {
            self.target.set((self.target.get() * 2).min(READY_MAX));
        }
        self.taken.notify_one();
        match found {
            Some(stream) => Ok(stream),
            None => self.dial.connect().await,
        }
    }

    /// Keeps connections ready until opening one fails. Returns the failure.
    pub async fn keep(&self) -> Failure {
        let look_again = Duration::from_millis(self.dial.settings.keepalive_ms);
        loop {
            let (missing, target) = {
                let mut ready = self.ready.borrow_mut();
                ready.retain_mut(is_alive);
                let target = self.target.get();
                (target.saturating_sub(ready.len()), target)
            };
            if missing == 0 {
                if timeout(look_again, self.taken.notified()).await.is_err() && target > READY_MIN {
                    // No flow came for a while: keep fewer ready.
                    self.target.set(target - 1);
                    self.ready.borrow_mut().truncate(target - 1);
                }
                continue;
            }
            match self.dial.connect().await {
                Ok(stream) => self.ready.borrow_mut().push(stream),
                Err(failure) => return failure,
            }
        }
    }
}

/// Whether a waiting connection is still open. The far side sends nothing on it, so a successful read means its
/// end.
fn is_alive(stream: &mut Stream) -> bool {
    let mut byte = [0];
    let mut buffer = ReadBuf::new(&mut byte);
    Pin::new(stream).poll_read(&mut Context::from_waker(Waker::noop()), &mut buffer).is_pending()
}

impl Dial {
    async fn connect(&self) -> Result<Stream, Failure> {
        // The semaphore is never closed, so this succeeds in the end.
        let _turn = self.handshakes.acquire().await;
        let dialing = (self.dialing)();
        match timeout(PATIENCE, self.shake(&dialing)).await {
            Ok(done) => done,
            Err(_) => Err(Failure::new(EndReason::ConnectTimeout, format!("TLS to {}: no answer", self.to))),
        }
    }

    async fn shake(&self, dialing: &Dialing) -> Result<Stream, Failure> {
        let wishes = Wishes { speaks_first: true, ..Wishes::default() };
        let (socket, _) = dialing.connect(Admitted::configured(self.to), wishes).await?;
        let failed = |error: io::Error| failure(self.to, &error);
        watch(&socket, self.settings.keepalive_ms, self.settings.lost_after_ms).map_err(failed)?;
        let connector = TlsConnector::from(self.settings.mutual.client());
        let mut stream = connector.connect(self.name.clone(), socket).await.map_err(failed)?;
        let mut bytes = Vec::new();
        loop {
            match Greeting::parse(&bytes) {
                Parsed::Message(_, consumed) if consumed == bytes.len() => break,
                Parsed::Incomplete if bytes.len() < GREETING_MAX => {}
                other => {
                    return Err(Failure::new(EndReason::HopFailed, format!("TLS to {}: {other:?}", self.to)));
                }
            }
            if stream.read_buf(&mut bytes).await.map_err(failed)? == 0 {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        let peer = tls_peer(stream.get_ref().1.peer_certificates());
        Ok(Stream::tls(TlsStream::Client(stream), peer))
    }
}

/// Returns the name in the peer's certificate.
pub fn tls_peer(certificates: Option<&[rustls::pki_types::CertificateDer<'static>]>) -> Arc<str> {
    // Both ends require a certificate, so there is one.
    certificates.and_then(|all| all.first()).map_or_else(|| "?".to_owned(), peer_name).into()
}

/// Makes the kernel notice that the peer is gone, on an idle connection and on one with unacknowledged bytes.
///
/// # Errors
/// Fails as setsockopt(2) does.
pub fn watch(socket: &TcpStream, keepalive_ms: u64, lost_after_ms: u64) -> io::Result<()> {
    let lost_after = Duration::from_millis(lost_after_ms);
    // The kernel's keep-alive has a resolution of one second.
    let idle = Duration::from_millis(keepalive_ms).max(Duration::from_secs(1));
    let interval = (lost_after.saturating_sub(idle) / PROBES).max(Duration::from_secs(1));
    sockopt::set_keepalive(socket, idle, interval, PROBES)?;
    sockopt::set_tcp_user_timeout(socket, Some(lost_after))
}

fn failure(to: SocketAddr, error: &io::Error) -> Failure {
    let is_about_tls = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
    let reason = if is_about_tls { EndReason::AuthFailed } else { EndReason::HopFailed };
    Failure::new(reason, format!("TLS to {to}: {error}"))
}
