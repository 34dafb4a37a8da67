//! Accepting the connections of a listener.

use super::{Arrived, Service, Worker};
use crate::carry::Stream;
use crate::intercept::Catches;
use crate::intercept::hold::Claimed;
use crate::reactor::{self, TcpListener, TcpStream};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::sync::watch;

/// How long a listener pauses if the system has no descriptor for the next connection: long enough not to spin, short
/// enough not to be noticed.
const ACCEPT_REST: Duration = Duration::from_millis(10);

/// Most connections that a closing listener still serves: the largest accept queue of a socket.
const WAITING_MAX: usize = 4096;

impl Worker {
    /// Accepts connections until `stop` becomes true or its sender is dropped. Connections in the queue are still served.
    pub async fn accept(
        self: Arc<Self>,
        service: Arc<Service>,
        listener: TcpListener,
        mut stop: watch::Receiver<bool>,
    ) {
        loop {
            let is_told = stop.has_changed().unwrap_or(true);
            let accepted = tokio::select! {
                biased;
                // Accept first: registering for a change and deregistering costs more than checking for one.
                accepted = listener.accept(), if !is_told => accepted,
                changed = stop.changed() => match changed {
                    Ok(()) if !*stop.borrow() => continue,
                    _ => break,
                },
            };
            match accepted {
                Ok((stream, peer)) => self.serve(&service, stream, peer, &stop),
                Err(error) if is_about_the_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(listener = %service.listening.name, %error, "cannot accept; resting");
                    reactor::sleep(ACCEPT_REST).await;
                }
            }
        }
        // The kernel has already answered these clients, and would reset them when the socket closes.
        for _ in 0..WAITING_MAX {
            match poll_fn(|cx| Poll::Ready(listener.poll_accept(cx))).await {
                Poll::Ready(Ok((stream, peer))) => self.serve(&service, stream, peer, &stop),
                Poll::Ready(Err(_)) | Poll::Pending => break,
            }
        }
        // Close the listener before `stop` is dropped: the task that waits for `stop` must find the address free.
        drop(listener);
        drop(stop);
    }

    fn serve(
        self: &Arc<Self>,
        service: &Arc<Service>,
        stream: TcpStream,
        peer: SocketAddr,
        stop: &watch::Receiver<bool>,
    ) {
        let claimed = match &self.shared.hold {
            Some(hold) if service.holds => hold.claim(stream, &service.listening),
            _ => Claimed::Not(stream),
        };
        match claimed {
            Claimed::Given => {}
            Claimed::Not(stream) => self.begin(service, stream, peer, stop),
            Claimed::Asked(asked) => {
                let (worker, service, stop) = (self.clone(), service.clone(), stop.clone());
                reactor::spawn(async move {
                    if let Some(stream) = asked.await.ok().and_then(|socket| TcpStream::new(socket).ok()) {
                        worker.begin(&service, stream, peer, &stop);
                    }
                });
            }
        }
    }

    fn begin(
        self: &Arc<Self>,
        service: &Arc<Service>,
        stream: TcpStream,
        peer: SocketAddr,
        stop: &watch::Receiver<bool>,
    ) {
        let peer = service.listening.client(sidetrack_sys::sockopt::canonical(peer));
        if let Catches::Tunnel(_) = service.listening.catches {
            reactor::spawn(self.clone().accept_tls(service.clone(), stream, peer, stop.clone()));
        } else {
            let arrived = Arrived { stream: Stream::Tcp(stream), peer, held: Vec::new() };
            service.take(self, arrived);
        }
    }
}

/// Whether an error of accept(2) concerns only one connection, which is already gone.
fn is_about_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{
        ConnectionAborted, ConnectionReset, HostUnreachable, Interrupted, NetworkUnreachable,
    };
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionReset | HostUnreachable | Interrupted | NetworkUnreachable
    )
}
