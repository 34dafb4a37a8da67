//! Idle connections to servers. Each worker has its own pool: it needs no lock, and a connection stays on its event
//! loop.

use super::buffer::Buffer;
use super::copy::STALL;
use super::duplex::Duplex;
use super::h2::ask::Requests;
use super::h3::reach::is_open;
use super::servers::Secure;
use crate::carry::h3::{Peer, number};
use crate::reactor::now;
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::http::h3::Code;
use sidetrack_core::policy::Carry;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Most idle connections of one worker.
const IDLE_MAX: usize = 128;
/// Most idle connections of one worker to one server.
const IDLE_PER_SERVER_MAX: usize = 64;
/// How long a connection may be idle. Common servers close theirs after 60 or 75 s. If we close first, no request is
/// lost.
const IDLE: Duration = Duration::from_secs(50);
/// How often idle connections are checked.
const TEND: Duration = Duration::from_secs(1);

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

/// Identifies connections that can be shared: the same rule and the same server. The rule is compared by its object, so
/// after a reload with other rules no old connection is used.
#[derive(Clone, Debug)]
pub struct Route {
    /// The rule's way to the server.
    pub carry: Arc<Carry>,
    /// The destination.
    pub destination: Destination,
    /// TLS with the server; `None`: plain text.
    pub secure: Option<Secure>,
}

/// A connection to a server.
#[derive(Debug)]
pub struct Server {
    /// The stream to it.
    pub stream: Duplex,
    /// Bytes that arrived and are not used yet.
    pub buffer: Buffer,
    /// Its address, if we resolved its name.
    pub address: Option<SocketAddr>,
    /// It has served a request before.
    pub is_reused: bool,
    /// The route to return it to, if it is not the request's own: a sibling's.
    pub home: Option<Route>,
    /// It may be authenticated for the client whose request it served. It never serves another client.
    pub is_bound: bool,
}

/// The key of a route: the rule, the server, and the host that it has authenticated as.
type Key = (usize, Destination, Option<(Host, bool)>);

#[derive(Default)]
struct Pool {
    /// There are mostly few keys: searching them costs less than hashing one.
    idle: BTreeMap<Key, Vec<Idle>>,
    /// Connections that serve any number of requests at the same time.
    shared: BTreeMap<Key, Shared>,
    /// Connections of HTTP/3, which do the same.
    quic: BTreeMap<Key, Quic>,
    /// Attempts to open one. The sender of each is dropped at its end.
    attempts: BTreeMap<Key, watch::Receiver<()>>,
    count: usize,
    tended: Option<Instant>,
}

/// An HTTP/2 connection.
struct Shared {
    requests: Requests,
    address: Option<SocketAddr>,
    used: Instant,
    /// As in [`Idle`].
    _carry: Arc<Carry>,
}

/// A connection of HTTP/3.
struct Quic {
    peer: Rc<Peer>,
    /// Its count of references is the number of requests under way plus one.
    at_work: Rc<()>,
    used: Instant,
    /// As in [`Idle`].
    _carry: Arc<Carry>,
}

impl Drop for Quic {
    fn drop(&mut self) {
        // Its tasks keep it open. With requests under way, the server closes it.
        if Rc::strong_count(&self.at_work) == 1 {
            self.peer.connection().close(number(Code::NoError), b"");
        }
    }
}

struct Idle {
    stream: Duplex,
    address: Option<SocketAddr>,
    since: Instant,
    /// Keeps the rule's object alive: its address is part of the key and must not be reused for another rule.
    _carry: Arc<Carry>,
}

impl Route {
    fn key(&self) -> Key {
        let host = self.secure.as_ref().map(|secure| (secure.host.clone(), secure.is_alone));
        (Arc::as_ptr(&self.carry).addr(), self.destination.clone(), host)
    }

    /// Whether both lead to the same server by the same rule, for any HTTP version.
    pub fn leads_where(&self, other: &Self) -> bool {
        let host = |route: &Self| route.secure.as_ref().map(|secure| secure.host.clone());
        Arc::ptr_eq(&self.carry, &other.carry)
            && self.destination == other.destination
            && host(self) == host(other)
    }

    /// The idle timeout on this route.
    pub fn stall(&self) -> Duration {
        self.carry.idle_timeout_ms.map_or(STALL, Duration::from_millis)
    }

    /// Whether requests of other clients may use the same connection. Not if the server is told the client's address.
    pub fn is_shared(&self) -> bool {
        !self.carry.keep_client_address && self.carry.proxy_protocol.is_none()
    }

    /// Takes an idle connection that is still open and leads to an admitted address. `is_checked`: make sure by a system call,
    /// for a request that cannot be repeated.
    pub fn take(&self, is_checked: bool, admits: impl Fn(SocketAddr) -> bool) -> Option<Server> {
        if !self.is_shared() {
            return None;
        }
        let key = self.key();
        POOL.with_borrow_mut(|pool| {
            let list = pool.idle.get_mut(&key)?;
            let found = loop {
                let admitted = |idle: &Idle| idle.address.is_none_or(&admits);
                let Some(at) = list.iter().rposition(admitted) else { break None };
                let idle = list.remove(at);
                pool.count -= 1;
                let stands = if is_checked { idle.stream.is_quiet() } else { idle.stream.seems_quiet() };
                if stands {
                    break Some(Server {
                        stream: idle.stream,
                        buffer: Buffer::default(),
                        address: idle.address,
                        is_reused: true,
                        home: None,
                        is_bound: false,
                    });
                }
            };
            // An empty list stays until `tend`: its connection mostly comes back before that.
            found
        })
    }

    /// Returns the requests handle of an open HTTP/2 connection, if there is one.
    pub(crate) fn shared(&self, admits: impl Fn(SocketAddr) -> bool) -> Option<Requests> {
        if !self.is_shared() {
            return None;
        }
        POOL.with_borrow_mut(|pool| {
            let shared = pool.shared.get_mut(&self.key())?;
            if !shared.address.is_none_or(admits) {
                return None;
            }
            shared.used = Instant::now();
            Some(shared.requests.clone())
        })
    }

    /// Like [`Self::shared`], for a WebSocket as a stream of a shared connection, if the server has announced support
    /// (RFC 8441 Sec. 3).
    pub(crate) fn shared_for_websocket(&self, admits: impl Fn(SocketAddr) -> bool) -> Option<Requests> {
        let secure = self.secure.clone().map(|secure| Secure { is_alone: false, ..secure });
        let others = Self { secure, ..self.clone() };
        others.shared(admits).filter(Requests::is_extended_connect_protocol_enabled)
    }

    /// Keeps a connection that serves any number of requests; `None` forgets the known one.
    pub(crate) fn put_shared(&self, requests: Option<(Requests, Option<SocketAddr>)>) {
        POOL.with_borrow_mut(|pool| match requests {
            Some((requests, address)) if self.is_shared() && pool.shared.len() < IDLE_MAX => {
                let (used, carry) = (Instant::now(), self.carry.clone());
                let shared = Shared { requests, address, used, _carry: carry };
                pool.shared.insert(self.key(), shared);
            }
            _ => drop(pool.shared.remove(&self.key())),
        });
    }

    /// Returns the open connection of HTTP/3, if there is one that leads to an admitted address. The second value is held as
    /// long as a request is under way.
    pub(super) fn quic(&self, admits: impl Fn(SocketAddr) -> bool) -> Option<(Rc<Peer>, Rc<()>)> {
        POOL.with_borrow_mut(|pool| {
            let key = self.key();
            pool.quic.retain(|_, quic| is_open(&quic.peer));
            let quic = pool.quic.get_mut(&key)?;
            if !admits(quic.peer.connection().remote_address()) {
                return None;
            }
            quic.used = Instant::now();
            Some((quic.peer.clone(), quic.at_work.clone()))
        })
    }

    /// Keeps a connection of HTTP/3. Where there is no room, it is closed.
    pub(super) fn put_quic(&self, peer: Rc<Peer>) {
        let (at_work, used, carry) = (Rc::new(()), Instant::now(), self.carry.clone());
        let quic = Quic { peer, at_work, used, _carry: carry };
        POOL.with_borrow_mut(|pool| {
            if pool.quic.len() < IDLE_MAX {
                pool.quic.insert(self.key(), quic);
            }
        });
    }

    /// Returns the attempt that is under way to reach the server by HTTP/3.
    pub(super) fn attempt(&self) -> Option<watch::Receiver<()>> {
        POOL.with_borrow(|pool| {
            let attempt = pool.attempts.get(&self.key())?;
            // An error means that its sender is gone.
            attempt.has_changed().is_ok().then(|| attempt.clone())
        })
    }

    /// Notes an attempt.
    pub(super) fn put_attempt(&self, attempt: watch::Receiver<()>) {
        POOL.with_borrow_mut(|pool| {
            pool.attempts.retain(|_, attempt| attempt.has_changed().is_ok());
            pool.attempts.insert(self.key(), attempt);
        });
    }

    /// Keeps an idle connection. One that is bound to a client is closed.
    pub fn put(&self, server: Server) {
        if let Some(home) = &server.home
            && home.key() != self.key()
        {
            let home = home.clone();
            return home.put(Server { home: None, ..server });
        }
        // A stream of HTTP/3 costs nothing, and whether the next request takes it is another question.
        if !self.is_shared() || server.is_bound || !server.buffer.is_empty() || server.stream.is_http3() {
            return;
        }
        let Server { stream, mut buffer, address, .. } = server;
        buffer.release();
        POOL.with_borrow_mut(|pool| {
            if pool.count >= IDLE_MAX {
                return;
            }
            let list = pool.idle.entry(self.key()).or_default();
            if list.len() < IDLE_PER_SERVER_MAX {
                list.push(Idle { stream, address, since: now(), _carry: self.carry.clone() });
                pool.count += 1;
            }
        });
    }
}

/// Closes connections that were idle for too long or were closed by their server. The worker's sweep calls it.
pub fn tend() {
    POOL.with_borrow_mut(|pool| {
        let is_empty = pool.idle.is_empty() && pool.shared.is_empty() && pool.quic.is_empty();
        if is_empty || pool.tended.is_some_and(|at| at.elapsed() < TEND) {
            return;
        }
        pool.tended = Some(Instant::now());
        // A connection with requests under way has other owners, too, and stays open.
        pool.shared.retain(|_, shared| shared.used.elapsed() < IDLE);
        let is_used = |quic: &Quic| quic.used.elapsed() < IDLE || Rc::strong_count(&quic.at_work) > 1;
        pool.quic.retain(|_, quic| is_open(&quic.peer) && is_used(quic));
        for list in pool.idle.values_mut() {
            list.retain(|idle| idle.since.elapsed() < IDLE && idle.stream.is_quiet());
        }
        pool.idle.retain(|_, list| !list.is_empty());
        pool.count = pool.idle.values().map(Vec::len).sum();
    });
}
