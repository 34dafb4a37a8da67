//! A TCP listener whose clients are bounded in number and time, so that strangers cannot use up our descriptors. For one more,
//! the oldest client is closed, so that strangers do not keep a scraper out either.

use axum::serve::Listener;
use sidetrack_core::limit::OldestFirst;
use sidetrack_sys::sync::lock;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot::{Receiver, Sender, channel};
use tokio::time::Sleep;

/// The bounds of a listener's clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Clients at one time; for one more, the oldest is closed.
    pub(super) most: usize,
    /// Longest time of one connection.
    pub(super) time: Duration,
    /// What they are clients of, for the log.
    pub(super) what: &'static str,
}

/// The bounds of the metrics address. A scrape takes milliseconds.
pub(super) const SCRAPERS: Bounds =
    Bounds { most: 16, time: Duration::from_secs(30), what: "the metrics address" };

/// Time after which the kernel gives up a client that acknowledges nothing.
const SILENT: Duration = Duration::from_secs(60);

/// Pause after a listener could not accept because descriptors ran out.
const PAUSE: Duration = Duration::from_millis(100);

/// The clients of a listener. What is sent to one tells it to leave.
type Clients = Arc<Mutex<OldestFirst<Sender<()>>>>;

/// A client's place in the table of its listener.
#[derive(Clone)]
pub(super) struct Place {
    clients: Clients,
    number: u64,
    is_known: Arc<AtomicBool>,
}

impl Place {
    /// The bounds no longer hold for this client: it has logged in.
    pub(super) fn is_known(&self) {
        if !self.is_known.swap(true, Relaxed) {
            lock(&self.clients).leave(self.number);
        }
    }
}

/// A listener with a bounded number of clients.
pub(super) struct Capped {
    listener: TcpListener,
    bounds: Bounds,
    clients: Clients,
    on_closed: Box<dyn Fn() + Send>,
}

impl Capped {
    /// `on_closed` is called for each client that is closed for another one.
    pub(super) fn new(listener: TcpListener, bounds: Bounds, on_closed: impl Fn() + Send + 'static) -> Self {
        let clients = Arc::new(Mutex::new(OldestFirst::new(bounds.most)));
        Self { listener, bounds, clients, on_closed: Box::new(on_closed) }
    }

    fn admit(&self, stream: TcpStream) -> CappedStream {
        let (leave, told) = channel();
        let (number, oldest) = lock(&self.clients).enter(leave);
        if let Some(oldest) = oldest {
            // A client that left by itself meanwhile hears nothing.
            let _ = oldest.send(());
            (self.on_closed)();
            let Bounds { most, what, .. } = self.bounds;
            tracing::warn!("{most} clients of {what} are connected: the oldest is disconnected");
        }
        // Without it, a client that vanished stays for a quarter of an hour. Fails on no TCP socket.
        let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(SILENT));
        let time = Box::pin(tokio::time::sleep(self.bounds.time));
        let place = Place { clients: self.clients.clone(), number, is_known: Arc::default() };
        CappedStream { stream, time, told, is_told: false, place }
    }
}

impl Listener for Capped {
    type Io = CappedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (CappedStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => return (self.admit(stream), address),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails when its time is over, or when it has to leave for another one.
pub(super) struct CappedStream {
    stream: TcpStream,
    time: Pin<Box<Sleep>>,
    told: Receiver<()>,
    is_told: bool,
    place: Place,
}

impl Drop for CappedStream {
    fn drop(&mut self) {
        lock(&self.place.clients).leave(self.place.number);
    }
}

impl CappedStream {
    /// Its place in the table.
    pub(super) fn place(&self) -> Place {
        self.place.clone()
    }

    fn in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.place.is_known.load(Relaxed) {
            return Ok(());
        }
        if self.time.as_mut().poll(cx).is_ready() {
            return Err(ErrorKind::TimedOut.into());
        }
        // What was told once may not be asked for again.
        self.is_told = self.is_told || Pin::new(&mut self.told).poll(cx).is_ready();
        if self.is_told {
            return Err(ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }
}

impl AsyncRead for CappedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for CappedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.in_time(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
