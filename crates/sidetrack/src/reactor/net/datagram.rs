//! The event loop's interface for quinn: datagram sockets, timers and tasks of this thread. quinn requires
//! values that could move to another thread. These values belong to one loop, and fail outside of it.

use super::super::{CURRENT, Loop, spawn};
use super::{Source, remember};
use crate::reactor::task::Remote;
use quinn::udp::{RecvMeta, Transmit, UdpSocketState};
use quinn::{AsyncTimer, AsyncUdpSocket, Endpoint, Incoming, Runtime, UdpPoller};
use rustix::event::epoll::{self, EventFlags};
use sidetrack_sys::sync::lock;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Instant;
use tokio::sync::watch;

/// This thread's loop, as quinn's runtime.
#[derive(Clone, Copy, Debug)]
pub struct QuicRuntime;

impl Runtime for QuicRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        Box::pin(Timer { at, number: None })
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        spawn(future);
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        Ok(Arc::new(Datagrams::new(socket)?))
    }

    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// From this number of connections on, a new client must prove its address by a Retry (RFC 9000 Sec. 8.1.2).
const UNPROVEN_MAX: usize = 128;

/// What a listener of QUIC waits for.
#[expect(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub enum Arrival {
    /// A client wants a connection.
    Connection(Incoming),
    /// The listener is taken out, or its endpoint is closed.
    Out,
    /// The process stops: flows end first, then the owner of the endpoint closes it.
    Stopping,
}

/// Waits for the next client, until `stop` becomes true or its sender is dropped.
pub async fn arrival(endpoint: &Endpoint, stop: &mut watch::Receiver<bool>) -> Arrival {
    loop {
        tokio::select! {
            biased;
            changed = stop.changed() => match changed {
                Ok(()) if !*stop.borrow() => {}
                Ok(()) => return Arrival::Out,
                Err(_) => return Arrival::Stopping,
            },
            incoming = endpoint.accept() => return incoming.map_or(Arrival::Out, Arrival::Connection),
        }
    }
}

/// Returns the client, unless it must prove its address first, because its endpoint has many connections.
pub fn proven(incoming: Incoming, endpoint: &Endpoint) -> Option<Incoming> {
    if endpoint.open_connections() < UNPROVEN_MAX || !incoming.may_retry() {
        return Some(incoming);
    }
    // This fails only if a Retry is not permitted.
    let _ = incoming.retry();
    None
}

/// A timer that can be set again.
#[derive(Debug)]
struct Timer {
    at: Instant,
    /// Its number in the loop while it waits. It distinguishes timers of the same time.
    number: Option<u64>,
}

impl Timer {
    fn forget(&mut self) {
        if let Some(number) = self.number.take() {
            let forget = |own: &Option<std::rc::Rc<Loop>>| {
                if let Some(own) = own {
                    own.timers.borrow_mut().forget(self.at, number);
                }
            };
            // If the thread is ending, its loop and timers are already gone.
            let _ = CURRENT.try_with(|current| forget(&current.borrow()));
        }
    }
}

impl AsyncTimer for Timer {
    fn reset(mut self: Pin<&mut Self>, at: Instant) {
        self.forget();
        self.at = at;
    }

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.at <= Instant::now() {
            return Poll::Ready(());
        }
        let (at, number) = (self.at, self.number);
        self.number = Some(Loop::current().timers.borrow_mut().wait(at, number, cx.waker()));
        Poll::Pending
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.forget();
    }
}

/// Tasks that wait for room in one socket. The connections of an endpoint share the socket.
#[derive(Debug, Default)]
struct Writers(Mutex<Vec<Waker>>);

impl Wake for Writers {
    fn wake(self: Arc<Self>) {
        let waiting = std::mem::take(&mut *lock(&self.0));
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// A UDP socket that is registered in this thread's loop.
#[derive(Debug)]
struct Datagrams {
    socket: UdpSocket,
    state: UdpSocketState,
    index: u32,
    /// Identifies the loop that it belongs to.
    home: Arc<Remote>,
    writers: Arc<Writers>,
}

impl Datagrams {
    fn new(socket: UdpSocket) -> io::Result<Self> {
        let state = UdpSocketState::new((&socket).into())?;
        let own = Loop::current();
        let (index, key) = own.sources.borrow_mut().enter();
        let datagrams = Self { socket, state, index, home: own.remote.clone(), writers: Arc::default() };
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
        epoll::add(&own.epoll, &datagrams.socket, epoll::EventData::new_u64(key), flags)?;
        Ok(datagrams)
    }

    fn with<T>(&self, f: impl FnOnce(&mut Source) -> T) -> io::Result<T> {
        let elsewhere = || io::Error::other("a datagram socket was used outside of the loop it belongs to");
        let own = CURRENT.try_with(|current| current.borrow().clone()).ok().flatten();
        let own = own.filter(|own| Arc::ptr_eq(&own.remote, &self.home)).ok_or_else(elsewhere)?;
        let mut sources = own.sources.borrow_mut();
        Ok(f(sources.at(self.index)))
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        let own = CURRENT.try_with(|current| current.borrow().clone()).ok().flatten();
        if let Some(own) = own.filter(|own| Arc::ptr_eq(&own.remote, &self.home)) {
            own.sources.borrow_mut().leave(self.index);
            // There may be copies of the socket, which keep the interest in its events.
            let _ = epoll::delete(&own.epoll, &self.socket);
        }
    }
}

impl AsyncUdpSocket for Datagrams {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Room(self))
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let sent = self.state.send((&self.socket).into(), transmit);
        if sent.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.with(|source| source.writable = false)?;
        }
        sent
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.with(|source| {
                if source.readable {
                    return Poll::Ready(());
                }
                remember(&mut source.reader, cx.waker());
                Poll::Pending
            })?);
            match self.state.recv((&self.socket).into(), buffers, meta) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.with(|source| source.readable = false)?;
                }
                result => return Poll::Ready(result),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.state.gro_segments()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }
}

/// One connection that waits for room in the socket.
#[derive(Debug)]
struct Room(Arc<Datagrams>);

impl UdpPoller for Room {
    fn poll_writable(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let socket = &self.0;
        let polled = socket.with(|source| {
            if source.writable {
                return Poll::Ready(());
            }
            let mut waiting = lock(&socket.writers.0);
            if !waiting.iter().any(|other| other.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            source.writer.get_or_insert_with(|| Waker::from(socket.writers.clone()));
            Poll::Pending
        });
        match polled {
            Ok(polled) => polled.map(Ok),
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{block_on, timeout};
    use super::*;
    use std::future::poll_fn;
    use std::time::Duration;

    fn bound() -> UdpSocket {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    }

    #[test]
    fn datagrams_wake_who_waits_for_them() {
        block_on(async {
            let socket = QuicRuntime.wrap_udp_socket(bound()).unwrap();
            let to = socket.local_addr().unwrap();
            let sender = std::thread::spawn(move || bound().send_to(b"hello", to).unwrap());
            let mut buffer = [0; 64];
            let mut meta = [RecvMeta::default()];
            let got = poll_fn(|cx| socket.poll_recv(cx, &mut [IoSliceMut::new(&mut buffer)], &mut meta));
            assert_eq!(timeout(Duration::from_secs(60), got).await.unwrap().unwrap(), 1);
            assert_eq!(&buffer[..meta[0].len], b"hello");
            sender.join().unwrap();
            let mut room = socket.create_io_poller();
            poll_fn(|cx| room.as_mut().poll_writable(cx)).await.unwrap();
        })
        .unwrap();
    }

    #[test]
    fn a_socket_of_another_loop_fails_and_does_not_panic() {
        let socket = block_on(async { QuicRuntime.wrap_udp_socket(bound()).unwrap() }).unwrap();
        block_on(async {
            let polled = poll_fn(|cx| {
                socket.poll_recv(cx, &mut [IoSliceMut::new(&mut [0; 8])], &mut [RecvMeta::default()])
            });
            assert!(polled.await.is_err());
        })
        .unwrap();
    }

    #[test]
    fn a_timer_that_was_set_anew_fires_at_its_new_time_only() {
        block_on(async {
            let start = Instant::now();
            let mut timer = QuicRuntime.new_timer(start + Duration::from_secs(600));
            assert!(poll_fn(|cx| Poll::Ready(timer.as_mut().poll(cx))).await.is_pending());
            timer.as_mut().reset(start + Duration::from_millis(20));
            poll_fn(|cx| timer.as_mut().poll(cx)).await;
            assert!(start.elapsed() >= Duration::from_millis(20));
            assert!(Loop::current().timers.borrow().next().is_none());
        })
        .unwrap();
    }
}
