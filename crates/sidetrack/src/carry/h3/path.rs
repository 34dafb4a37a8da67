//! QUIC over a path of datagrams: to a hop of HTTP/3 behind other hops, which carry its datagrams.
//!
//! quinn wants a socket that could move to another thread, and a path belongs to its event loop. So quinn gets two queues, and a
//! task moves datagrams between them and the path. QUIC keeps its smallest datagrams (1200 bytes): each hop adds a header.

use crate::carry::datagrams::{Came, Datagrams, Remote};
use crate::carry::gate::Admitted;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use sidetrack_core::flow::Destination;
use sidetrack_sys::sync::lock;
use sidetrack_sys::udp::batch::Batch;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// Most datagrams that wait in each direction.
const WAITING_MAX: usize = 256;

/// Stands for a peer whose address only the hops before it know (RFC 6666: it leads nowhere).
const NOWHERE: IpAddr = IpAddr::V6(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1));

/// Whether this stands for a peer whose address is not known here.
pub fn is_nowhere(address: SocketAddr) -> bool {
    address.ip() == NOWHERE
}

/// What waits between quinn and the path.
#[derive(Debug, Default)]
struct Queues {
    to_path: VecDeque<Vec<u8>>,
    to_quic: VecDeque<Vec<u8>>,
    /// The task of the path.
    path: Option<Waker>,
    /// The task that reads for quinn.
    reader: Option<Waker>,
    /// Tasks that wait for room.
    writers: Vec<Waker>,
    /// One of both ends is gone.
    is_over: bool,
}

/// The socket that quinn sees.
#[derive(Debug)]
pub(super) struct PathSocket {
    queues: Arc<Mutex<Queues>>,
    /// The only peer.
    peer: SocketAddr,
}

/// Starts to move datagrams over this path to its only peer. Returns the socket, and the address that stands for the peer.
pub(super) fn socket(path: Box<dyn Datagrams>, to: &Destination) -> (Arc<PathSocket>, SocketAddr) {
    let queues = Arc::new(Mutex::new(Queues::default()));
    let peer = to.socket_addr().unwrap_or_else(|| SocketAddr::new(NOWHERE, to.port));
    let remote = match to.socket_addr() {
        Some(address) => Remote::Address(Admitted::configured(address)),
        None => Remote::Name(to.clone()),
    };
    crate::reactor::spawn(pump(path, remote, queues.clone()));
    (Arc::new(PathSocket { queues, peer }), peer)
}

/// Moves datagrams until one of both ends is gone.
async fn pump(mut path: Box<dyn Datagrams>, remote: Remote, queues: Arc<Mutex<Queues>>) {
    let mut batch = Batch::new();
    poll_fn(|cx| {
        loop {
            let waiting = {
                let mut queues = lock(&queues);
                if queues.is_over {
                    return Poll::Ready(());
                }
                queues.path = Some(cx.waker().clone());
                queues.writers.drain(..).for_each(Waker::wake);
                std::mem::take(&mut queues.to_path)
            };
            for payload in waiting {
                // A datagram may be lost: QUIC notices.
                let _ = path.send(&remote, &payload);
            }
            let mut take = |came: Came<'_>| {
                if let Came::Datagram { payload, .. } = came {
                    let mut queues = lock(&queues);
                    if queues.to_quic.len() < WAITING_MAX {
                        queues.to_quic.push_back(payload.to_vec());
                    }
                }
            };
            let polled = path.poll_receive(cx, &mut batch, &mut take);
            let mut queues = lock(&queues);
            if let Poll::Ready(Err(failure)) = &polled {
                tracing::debug!(%failure, "the way to a hop of HTTP/3 is over");
                queues.is_over = true;
            }
            if (queues.is_over || !queues.to_quic.is_empty())
                && let Some(reader) = queues.reader.take()
            {
                reader.wake();
            }
            match polled {
                Poll::Ready(Err(_)) => return Poll::Ready(()),
                Poll::Ready(Ok(())) => {}
                Poll::Pending if queues.to_path.is_empty() => return Poll::Pending,
                Poll::Pending => {}
            }
        }
    })
    .await;
}

impl Drop for PathSocket {
    fn drop(&mut self) {
        let mut queues = lock(&self.queues);
        queues.is_over = true;
        if let Some(path) = queues.path.take() {
            path.wake();
        }
    }
}

impl AsyncUdpSocket for PathSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Room(self))
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut queues = lock(&self.queues);
        if queues.is_over {
            // The reader tells the end.
            return Ok(());
        }
        if queues.to_path.len() >= WAITING_MAX {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let length = transmit.segment_size.unwrap_or(transmit.contents.len()).max(1);
        queues.to_path.extend(transmit.contents.chunks(length).map(<[u8]>::to_vec));
        if let Some(path) = queues.path.take() {
            path.wake();
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut queues = lock(&self.queues);
        let mut count = 0;
        while let (Some(buffer), Some(meta)) = (buffers.get_mut(count), meta.get_mut(count)) {
            let Some(payload) = queues.to_quic.pop_front() else { break };
            // Longer than QUIC has asked for: lost.
            let Some(room) = buffer.get_mut(..payload.len()) else { continue };
            room.copy_from_slice(&payload);
            let (len, stride) = (payload.len(), payload.len());
            *meta = RecvMeta { addr: self.peer, len, stride, ecn: None, dst_ip: None };
            count += 1;
        }
        if count > 0 {
            return Poll::Ready(Ok(count));
        }
        if queues.is_over {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        queues.reader = Some(cx.waker().clone());
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        // Only its family counts.
        Ok(match self.peer {
            SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        })
    }

    fn may_fragment(&self) -> bool {
        // The path is not searched for longer datagrams.
        true
    }
}

/// Waits for room in the queue to the path.
#[derive(Debug)]
struct Room(Arc<PathSocket>);

impl UdpPoller for Room {
    fn poll_writable(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut queues = lock(&self.0.queues);
        if queues.is_over || queues.to_path.len() < WAITING_MAX {
            return Poll::Ready(Ok(()));
        }
        queues.writers.push(cx.waker().clone());
        Poll::Pending
    }
}
