//! The QUIC datagrams of one connection (RFC 9221), each of which belongs to a flow of UDP: its *lane*.
//!
//! One task reads them for all lanes, for as long as there are any: a flow would otherwise be woken by the datagrams of all
//! others. Both ends drop what comes for a lane that is over.

use crate::reactor;
use bytes::Bytes;
use quinn::{Connection, SendDatagramError};
use sidetrack_core::tunnel::datagram;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use tokio::sync::Notify;

/// Most bytes of datagrams that wait for one flow.
const WAITING_MAX: usize = 256 * 1024;

/// Datagrams that a flow takes before other work has its turn.
const ROUND: usize = 64;

/// All lanes of a connection.
pub struct Lanes {
    connection: Connection,
    state: Mutex<State>,
    /// A lane has left.
    left: Notify,
}

#[derive(Default)]
struct State {
    all: BTreeMap<u64, Arc<Mutex<Mailbox>>>,
    next: u64,
    is_read: bool,
}

/// What waits for one flow.
#[derive(Debug, Default)]
struct Mailbox {
    /// Datagrams, with the lengths of their headers.
    waiting: VecDeque<(Bytes, usize)>,
    bytes: usize,
    lost: u64,
    waker: Option<Waker>,
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lanes").finish_non_exhaustive()
    }
}

/// The result of sending a datagram of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is on its way.
    Gone,
    /// It does not fit in a QUIC datagram now, or the peer takes none: the stream may carry it.
    Unfit,
    /// There is no room for it, or the connection is over.
    Lost,
}

impl Lanes {
    /// The lanes of a connection, none yet.
    pub fn new(connection: Connection) -> Arc<Self> {
        Arc::new(Self { connection, state: Mutex::default(), left: Notify::new() })
    }

    /// Opens a lane with a new context.
    pub fn open(self: &Arc<Self>) -> Lane {
        let context = {
            let mut state = lock(&self.state);
            let context = state.next;
            state.next += 1;
            context
        };
        self.enter(context)
    }

    /// Opens the lane of this context, which the peer has chosen. `None`: another flow has it.
    pub fn accept(self: &Arc<Self>, context: u64) -> Option<Lane> {
        let is_taken = lock(&self.state).all.contains_key(&context);
        (!is_taken).then(|| self.enter(context))
    }

    fn enter(self: &Arc<Self>, context: u64) -> Lane {
        let mailbox = Arc::<Mutex<Mailbox>>::default();
        let must_read = {
            let mut state = lock(&self.state);
            state.all.insert(context, mailbox.clone());
            !std::mem::replace(&mut state.is_read, true)
        };
        if must_read {
            reactor::spawn(read(self.clone()));
        }
        Lane { lanes: self.clone(), context, mailbox }
    }

    /// Gives a datagram to its flow.
    fn came(&self, datagram: Bytes) {
        let Some((context, header)) = datagram::context(&datagram) else { return };
        let Some(mailbox) = lock(&self.state).all.get(&context).cloned() else { return };
        let mut mailbox = lock(&mailbox);
        if mailbox.bytes + datagram.len() > WAITING_MAX {
            mailbox.lost += 1;
            return;
        }
        mailbox.bytes += datagram.len();
        mailbox.waiting.push_back((datagram, header));
        if let Some(waker) = mailbox.waker.take() {
            waker.wake();
        }
    }

    /// Whether no lane is left; then the reader has stopped.
    fn stops(&self) -> bool {
        let mut state = lock(&self.state);
        state.is_read = !state.all.is_empty();
        !state.is_read
    }
}

/// Reads the datagrams of a connection until no lane is left, or the connection is lost. It keeps the connection open, so it must
/// not outlive the lanes.
async fn read(lanes: Arc<Lanes>) {
    loop {
        tokio::select! {
            biased;
            () = lanes.left.notified() => {
                if lanes.stops() {
                    return;
                }
            }
            came = lanes.connection.read_datagram() => match came {
                Ok(datagram) => lanes.came(datagram),
                // Each flow learns it by its stream.
                Err(_) => return lock(&lanes.state).is_read = false,
            },
        }
    }
}

/// The datagrams of one flow. On drop, the lane is over.
#[derive(Debug)]
pub struct Lane {
    lanes: Arc<Lanes>,
    context: u64,
    mailbox: Arc<Mutex<Mailbox>>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        lock(&self.lanes.state).all.remove(&self.context);
        self.lanes.left.notify_one();
    }
}

impl Lane {
    /// The context that both ends use for it.
    pub const fn context(&self) -> u64 {
        self.context
    }

    /// Sends a datagram, if its path carries it now.
    pub fn send(&self, payload: &[u8]) -> Sent {
        let connection = &self.lanes.connection;
        let mut bytes = Vec::with_capacity(payload.len() + 8);
        datagram::put(&mut bytes, self.context, payload);
        if connection.max_datagram_size().is_none_or(|most| bytes.len() > most) {
            return Sent::Unfit;
        }
        // quinn would drop older ones instead.
        if connection.datagram_send_buffer_space() < bytes.len() {
            return Sent::Lost;
        }
        match connection.send_datagram(bytes.into()) {
            Ok(()) => Sent::Gone,
            Err(SendDatagramError::ConnectionLost(_)) => Sent::Lost,
            Err(_) => Sent::Unfit,
        }
    }

    /// Passes the payloads of what has come to `take`. Ready: there may be more.
    pub fn poll_receive(&self, cx: &Context<'_>, take: &mut dyn FnMut(&[u8])) -> Poll<()> {
        for _ in 0..ROUND {
            let next = {
                let mut mailbox = lock(&self.mailbox);
                let next = mailbox.waiting.pop_front();
                match &next {
                    Some((datagram, _)) => mailbox.bytes -= datagram.len(),
                    None => mailbox.waker = Some(cx.waker().clone()),
                }
                next
            };
            let Some((datagram, header)) = next else { return Poll::Pending };
            take(datagram.get(header..).unwrap_or_default());
        }
        Poll::Ready(())
    }

    /// Returns how many datagrams had no room since the last call.
    pub fn take_lost(&self) -> u64 {
        std::mem::take(&mut lock(&self.mailbox).lost)
    }
}
