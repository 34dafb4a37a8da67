//! Siblings of other makers: asked by HTCP whether they have a resource, and answered when they ask. One socket for
//! both, and a thread that reads it.

use super::Proxy;
use crate::config::HtcpSettings;
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::http::cache::{Lookup, lookup};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::htcp::{MAX_BYTES, Message, Test, parse, write_answer, write_nop, write_test};
use sidetrack_core::http::message::{Method, Request, Scan, Sender};
use sidetrack_core::http::uri::{Resource, Scheme};
use sidetrack_core::net::IpSet;
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// How often the thread looks whether its listener still is there.
const LOOK: Duration = Duration::from_millis(500);
/// Most questions that wait for an answer; more are not asked.
const WAITING_MAX: usize = 4096;

/// Siblings that are asked by HTCP: where they serve, and where they are asked.
pub type Siblings = Vec<(Destination, SocketAddr)>;

/// See the module.
#[derive(Debug)]
pub struct Htcp {
    socket: UdpSocket,
    from: IpSet,
    /// Those that are asked, and may ask, too.
    siblings: Vec<SocketAddr>,
    waiting: Mutex<HashMap<(SocketAddr, u32), oneshot::Sender<bool>>>,
}

/// A question that is taken back when nobody waits for it any more.
struct Asked<'a>(&'a Htcp, (SocketAddr, u32));

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

/// The address of a sibling; a name is looked up once.
fn address(of: &Destination) -> io::Result<SocketAddr> {
    match &of.host {
        Host::Ip(ip) => Ok((*ip, of.port).into()),
        Host::Name(name) => {
            (name.as_str(), of.port).to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound.into())
        }
    }
}

impl Htcp {
    /// Binds the socket, and looks the siblings up: those that are found, with where they serve HTTP. Blocks.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn bind(settings: &HtcpSettings) -> io::Result<(Arc<Self>, Siblings)> {
        let socket = sidetrack_sys::udp::bind_shared(settings.address)?;
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
        Ok((Arc::new(Self { socket, from, siblings, waiting }), found))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(SocketAddr, u32), oneshot::Sender<bool>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread that reads the socket, for as long as the proxy is there.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn start(self: Arc<Self>, proxy: Weak<Proxy>) -> io::Result<()> {
        let serve = move || {
            let mut bytes = [0; MAX_BYTES];
            while proxy.strong_count() > 0 {
                // Late, or an ICMP message about something that was sent: neither is about this socket.
                let Ok((length, peer)) = self.socket.recv_from(&mut bytes) else { continue };
                let answer = self.answer(bytes.get(..length).unwrap_or_default(), peer, &proxy);
                if let Some(answer) = answer {
                    // One that cannot be sent is a silence.
                    let _ = self.send(&answer, peer);
                }
            }
        };
        std::thread::Builder::new().name("cache-htcp".to_owned()).spawn(serve).map(|_| ())
    }

    fn answer(&self, bytes: &[u8], peer: SocketAddr, proxy: &Weak<Proxy>) -> Option<Vec<u8>> {
        // Its port, too: any program of that host could ask otherwise.
        if !self.siblings.contains(&peer) && !self.from.contains(peer.ip()) {
            return None;
        }
        match parse(bytes)? {
            Message::Nop { id } => write_nop(id),
            Message::Answer { id, has } => {
                if let Some(asker) = self.lock().remove(&(peer, id)) {
                    let _ = asker.send(has);
                }
                None
            }
            Message::Test(test) if test.wants_answer => write_answer(test.id, proxy.upgrade()?.age_of(&test)),
            Message::Test(_) | Message::Other => None,
        }
    }

    /// Sends now or not at all.
    fn send(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        rustix::net::sendto(&self.socket, datagram, rustix::net::SendFlags::DONTWAIT, &to)?;
        Ok(())
    }

    /// Asks a sibling; whether it has it. The caller says how long it waits.
    pub async fn ask(&self, to: SocketAddr, uri: &[u8], fields: &[u8]) -> io::Result<bool> {
        // A host that does not see the question cannot answer it.
        let id = u32::from_be_bytes(sidetrack_sys::random::bytes());
        let Some(question) = write_test(id, uri, fields) else { return Ok(false) };
        let (sender, answered) = oneshot::channel();
        {
            let mut waiting = self.lock();
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
    /// The age of what is stored for a question, seconds; none if it is not to be had here, or not fresh. Of what is on
    /// disk alone nobody looks whether it is: whoever asked sees when it fetches it with only-if-cached.
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

/// The field lines of a question.
fn fields_of(test: &Test<'_>) -> Option<Fields> {
    let head =
        [&b"GET / HTTP/1.1\r\nHost: h\r\n"[..], without_host(test.fields).as_slice(), b"\r\n"].concat();
    let length = Scan::default().advance(&head, Sender::Client).ok()??;
    Some(Request::parse(head.get(..length)?).ok()?.fields)
}

/// The lines but Host, of which a head has one.
fn without_host(lines: &[u8]) -> Vec<u8> {
    let is_host = |line: &[u8]| line.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"host:"));
    let lines = lines.split_inclusive(|byte| *byte == b'\n').filter(|line| !is_host(line) && line.len() > 2);
    lines.flatten().copied().collect()
}
