//! Siblings of other vendors, by HTCP: we ask them whether they have a resource, and answer their questions. One socket
//! serves both, and one thread reads it.

use super::Proxy;
use crate::config::HtcpSettings;
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::http::cache::{Lookup, lookup};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::htcp::{MAX_BYTES, Message, Test, parse, write_answer, write_nop, write_test};
use sidetrack_core::http::message::{Method, Request, Scan, Sender};
use sidetrack_core::http::uri::{Resource, Scheme};
use sidetrack_core::net::IpSet;
use sidetrack_sys::sync::lock;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// How often the thread checks whether its listener still exists.
const LOOK: Duration = Duration::from_millis(500);
/// How often it checks whether it may read again.
const LOOK_WHILE_RESTING: Duration = Duration::from_millis(20);
/// Most questions that wait for an answer. Beyond that no question is sent.
const WAITING_MAX: usize = 4096;

/// Siblings that are asked by HTCP: the HTTP address and the HTCP address of each.
pub(super) type Siblings = Vec<(Destination, SocketAddr)>;

/// The HTCP socket of a cache.
#[derive(Debug)]
pub struct Htcp {
    socket: UdpSocket,
    from: IpSet,
    /// The siblings that we ask; they may ask us, too.
    siblings: Vec<SocketAddr>,
    /// Another process reads the socket.
    rests: AtomicBool,
    waiting: Mutex<HashMap<(SocketAddr, u32), oneshot::Sender<bool>>>,
}

/// A pending question; it is removed when its caller stops waiting.
struct Asked<'a>(&'a Htcp, (SocketAddr, u32));

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        lock(&self.0.waiting).remove(&self.1);
    }
}

/// Resolves the address of a sibling, once.
fn address(of: &Destination) -> io::Result<SocketAddr> {
    match &of.host {
        Host::Ip(ip) => Ok((*ip, of.port).into()),
        Host::Name(name) => {
            (name.as_str(), of.port).to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound.into())
        }
    }
}

impl Htcp {
    /// Binds the socket, unless an earlier process of this node has `taken` one, and resolves the siblings; returns those that
    /// resolve, with their HTTP addresses. Blocks.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn bind(settings: &HtcpSettings, taken: Option<UdpSocket>) -> io::Result<(Arc<Self>, Siblings)> {
        let socket = taken.map_or_else(|| sidetrack_sys::udp::bind_shared(settings.address), Ok)?;
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(LOOK))?;
        let mut found = Vec::new();
        for sibling in &settings.siblings {
            match address(&sibling.htcp) {
                Ok(at) => found.push((sibling.http.clone(), at)),
                Err(error) => tracing::warn!(sibling = %sibling.htcp, %error, "is not asked by HTCP"),
            }
        }
        let siblings = found.iter().map(|(_, at)| *at).collect();
        let (from, waiting) = (settings.from.clone(), Mutex::default());
        Ok((Arc::new(Self { socket, from, siblings, rests: AtomicBool::new(false), waiting }), found))
    }

    /// A copy of the socket, with its address.
    ///
    /// # Errors
    /// All descriptors are in use.
    pub fn copy(&self) -> io::Result<(SocketAddr, UdpSocket)> {
        Ok((self.socket.local_addr()?, self.socket.try_clone()?))
    }

    /// Reads nothing any more, or again. A datagram that comes at this instant may still be answered here.
    pub fn rest(&self, rests: bool) {
        self.rests.store(rests, Relaxed);
    }

    /// Starts the thread that reads the socket. It ends with the proxy.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn start(self: Arc<Self>, proxy: Weak<Proxy>) -> io::Result<()> {
        let serve = move || {
            let mut bytes = [0; MAX_BYTES];
            while proxy.strong_count() > 0 {
                if self.rests.load(Relaxed) {
                    std::thread::park_timeout(LOOK_WHILE_RESTING);
                    continue;
                }
                // A timeout, or an ICMP error for a datagram that was sent: the socket itself is fine.
                let Ok((length, peer)) = self.socket.recv_from(&mut bytes) else { continue };
                let answer = self.answer(bytes.get(..length).unwrap_or_default(), peer, &proxy);
                if let Some(answer) = answer {
                    // If it cannot be sent, the asker sees no answer.
                    let _ = self.send(&answer, peer);
                }
            }
        };
        std::thread::Builder::new().name("cache-htcp".to_owned()).spawn(serve).map(|_| ())
    }

    fn answer(&self, bytes: &[u8], peer: SocketAddr, proxy: &Weak<Proxy>) -> Option<Vec<u8>> {
        // The port must match, too: otherwise any program on the sibling's host could ask.
        if !self.siblings.contains(&peer) && !self.from.contains(peer.ip()) {
            return None;
        }
        match parse(bytes)? {
            Message::Nop { id } => write_nop(id),
            Message::Answer { id, has } => {
                if let Some(asker) = lock(&self.waiting).remove(&(peer, id)) {
                    let _ = asker.send(has);
                }
                None
            }
            Message::Test(test) if test.wants_answer => write_answer(test.id, proxy.upgrade()?.age_of(&test)),
            Message::Test(_) | Message::Other => None,
        }
    }

    /// Sends without blocking; gives up if the socket is full.
    fn send(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        rustix::net::sendto(&self.socket, datagram, rustix::net::SendFlags::DONTWAIT, &to)?;
        Ok(())
    }

    /// Asks a sibling; returns whether it has the resource. The caller sets the timeout.
    pub async fn ask(&self, to: SocketAddr, uri: &[u8], fields: &[u8]) -> io::Result<bool> {
        // The id is random: a host that does not see the question cannot forge an answer.
        let id = u32::from_be_bytes(sidetrack_sys::random::bytes());
        let Some(question) = write_test(id, uri, fields) else { return Ok(false) };
        // Register the question before sending it: the thread may receive the answer at once.
        let (sender, answered) = oneshot::channel();
        {
            let mut waiting = lock(&self.waiting);
            if waiting.len() >= WAITING_MAX || waiting.contains_key(&(to, id)) {
                return Ok(false);
            }
            waiting.insert((to, id), sender);
        }
        let _asked = Asked(self, (to, id));
        self.send(&question, to)?;
        answered.await.map_err(|_| io::ErrorKind::Interrupted.into())
    }
}

impl Proxy {
    /// Returns the age in seconds of a fresh stored response to a question, or `None`. A response that is on disk only is
    /// reported without a check: the asker finds out when it fetches it with only-if-cached.
    fn age_of(&self, test: &Test<'_>) -> Option<u64> {
        let cache = self.cache.as_ref()?;
        let resource = Resource::parse(test.uri, &Method::Get).ok()?;
        if test.method != b"GET" || resource.scheme != Scheme::Http {
            return None;
        }
        let key = resource.key(&cache.keys);
        let objects = cache.store.find(&key);
        if objects.is_empty() {
            return cache.store.is_on_disk(&key).then_some(0);
        }
        let stored: Vec<_> = objects.iter().map(|object| &object.stored).collect();
        let now_s = super::now_s();
        match lookup(&Method::Get, &fields_of(test)?, false, &stored, now_s) {
            Lookup::Hit { index, refresh: false } => stored.get(index).map(|stored| stored.age_s(now_s)),
            _ => None,
        }
    }
}

/// Parses the field lines of a question.
fn fields_of(test: &Test<'_>) -> Option<Fields> {
    let head =
        [&b"GET / HTTP/1.1\r\nHost: h\r\n"[..], without_host(test.fields).as_slice(), b"\r\n"].concat();
    let length = Scan::default().advance(&head, Sender::Client).ok()??;
    Some(Request::parse(head.get(..length)?).ok()?.fields)
}

/// Removes Host from the lines, because a head may have only one.
fn without_host(lines: &[u8]) -> Vec<u8> {
    let is_host = |line: &[u8]| line.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"host:"));
    let lines = lines.split_inclusive(|byte| *byte == b'\n').filter(|line| !is_host(line) && line.len() > 2);
    lines.flatten().copied().collect()
}
