//! A TCP listener whose clients are bounded in number and time, so that strangers cannot use up our descriptors. For one more,
//! the oldest client is closed, so that strangers do not keep a scraper out either.

use axum::serve::Listener;
use sidetrack_core::limit::OldestFirst;
use sidetrack_sys::sync::lock;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot::{Receiver, Sender, channel};
use tokio::time::Sleep;

/// Clients at one time; for one more, the oldest is closed.
pub(super) const CLIENTS_MAX: usize = 16;

/// Longest time of one connection. A scrape takes milliseconds.
const CONNECTION_TIME: Duration = Duration::from_secs(30);

/// Pause after a listener could not accept because descriptors ran out.
const PAUSE: Duration = Duration::from_millis(100);

/// The clients of a listener. What is sent to one tells it to leave.
type Clients = Arc<Mutex<OldestFirst<Sender<()>>>>;

/// A listener with at most [`CLIENTS_MAX`] clients.
pub(super) struct Capped {
    listener: TcpListener,
    clients: Clients,
    on_closed: Box<dyn Fn() + Send>,
}

impl Capped {
    /// `on_closed` is called for each client that is closed for another one.
    pub(super) fn new(listener: TcpListener, on_closed: impl Fn() + Send + 'static) -> Self {
        let clients = Arc::new(Mutex::new(OldestFirst::new(CLIENTS_MAX)));
        Self { listener, clients, on_closed: Box::new(on_closed) }
    }

    fn admit(&self, stream: TcpStream) -> CappedStream {
        let (leave, told) = channel();
        let (number, oldest) = lock(&self.clients).enter(leave);
        if let Some(oldest) = oldest {
            // A client that left by itself meanwhile hears nothing.
            let _ = oldest.send(());
            (self.on_closed)();
            tracing::warn!(
                "{CLIENTS_MAX} clients of the metrics address are connected: the oldest is disconnected"
            );
        }
        let time = Box::pin(tokio::time::sleep(CONNECTION_TIME));
        CappedStream { stream, time, told, is_told: false, clients: self.clients.clone(), number }
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
    clients: Clients,
    number: u64,
}

impl Drop for CappedStream {
    fn drop(&mut self) {
        lock(&self.clients).leave(self.number);
    }
}

impl CappedStream {
    fn in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
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
