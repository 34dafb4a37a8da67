//! The HTTP stage behind an `http` listener: requests in absolute form (or, where the listener stands for a server, in
//! origin form), CONNECT, kept-alive connections on both sides, and a shared cache.
//!
//! Each client connection has one task. Every request is a flow: policy decides about it, it is forwarded as the verdict
//! says, and it leaves one record. CONNECT and upgrades go on like any other flow, in [`crate::session`].

mod answer;
mod bound;
mod buffer;
mod cached;
mod completing;
mod connection;
mod content;
mod copy;
mod disk;
mod duplex;
mod exchange;
mod fetch;
mod filling;
mod guarded;
mod h2;
mod h3;
mod har;
mod htcp;
mod intercepted;
mod keylog;
mod meter;
mod open;
mod own;
mod pool;
mod refresh;
mod request;
mod sending;
mod servers;
pub mod sheet;
mod sibling;
mod store;
mod tap;

pub use content::Content;
pub use disk::{DiskState, Which};
pub use own::Secured;
pub use pool::tend;
pub use store::{Listed, Object, Store};
pub use tap::Tap;

use crate::config::{CacheSettings, DiskSettings, HttpListener};
use crate::intercept::{Catches, Listening};
use crate::reactor;
use crate::session;
use crate::worker::{Arrived, Worker};
use anyhow::Context;
use disk::Disk;
use htcp::Htcp;
use servers::Secure;
use sibling::Siblings;
use sidetrack_core::http::alternative::Alternatives;
use sidetrack_core::http::cache::Rules;
use sidetrack_core::http::message::Method;
use sidetrack_core::http::uri::{KeyRules, Resource};
use sidetrack_core::net::IpSet;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// State that all connections of one `http` listener share.
#[derive(Debug)]
pub struct Proxy {
    /// Our name in Via, Cache-Status and Proxy-Status. It differs between processes, so that a proxy detects a loop.
    pub pseudonym: String,
    /// The listener's configuration.
    pub settings: HttpListener,
    /// The cache, if there is one.
    pub cache: Option<Cache>,
    /// Intercepts TLS connections, if the configuration says so.
    pub tap: Option<Arc<Tap>>,
    /// Serves clients that ask for a tunnel of datagrams.
    pub datagrams: session::Tunnel,
    /// TLS with clients of the listener itself, if it has a certificate.
    pub secured: Option<Secured>,
    /// TLS with the server of a reverse proxy, if the configuration says so.
    secure: Option<Secure>,
    /// What servers have said about their HTTP/3.
    alternatives: Arc<Mutex<Alternatives>>,
}

/// A shared cache and its settings.
#[derive(Debug)]
pub struct Cache {
    /// The stored responses.
    pub store: Arc<Store>,
    /// Settings of the caching decisions.
    pub rules: Rules,
    /// Parts of URLs that are left out of keys.
    pub keys: KeyRules,
    /// Most bytes of one response's content.
    pub object_max: u64,
    /// Most bytes of one response's content that are held in memory while it comes in.
    pub in_memory_max: u64,
    /// Why the cache works without its disk although one is configured.
    pub disk_trouble: Option<String>,
    /// Sibling caches that are asked before the server is.
    pub siblings: Siblings,
    /// Asks siblings by HTCP and answers their questions.
    pub htcp: Option<Arc<Htcp>>,
    /// Clients whose PURGE requests are obeyed.
    pub purge_from: IpSet,
    /// Counts of requests.
    pub counts: Counts,
}

/// Counts of the requests of a cache since the start, by their result.
#[derive(Debug, Default)]
pub struct Counts([AtomicU64; 3]);

impl Counts {
    fn count(&self, at: usize) {
        if let Some(counter) = self.0.get(at) {
            counter.fetch_add(1, Relaxed);
        }
    }

    /// One was answered from the cache alone.
    pub(crate) fn hit(&self) {
        self.count(0);
    }

    /// One was asked of the server or of a sibling.
    pub(crate) fn missed(&self) {
        self.count(1);
    }

    /// One was not for the cache.
    pub(crate) fn passed(&self) {
        self.count(2);
    }

    /// Returns how many were answered from the cache, asked of the server, and not for the cache.
    pub fn read(&self) -> [u64; 3] {
        self.0.each_ref().map(|counter| counter.load(Relaxed))
    }
}

/// What an earlier process of this node leaves to a listener.
#[derive(Debug, Default)]
pub struct Before {
    /// The socket by which its cache asks siblings.
    pub htcp: Option<UdpSocket>,
    /// There is such a process: clients wait, so nothing slow is waited for.
    pub is_there: bool,
}

impl Proxy {
    /// Returns the state of a starting listener. `datagrams` serves clients that ask for CONNECT-UDP.
    ///
    /// # Errors
    /// TLS connections cannot be intercepted as configured, or the socket for siblings cannot be opened.
    pub fn start(
        settings: HttpListener,
        datagrams: session::Tunnel,
        before: Before,
    ) -> anyhow::Result<Arc<Self>> {
        let random: [u8; 4] = sidetrack_sys::random::bytes();
        let pseudonym = format!("sidetrack-{:08x}", u32::from_be_bytes(random));
        let cache = settings.cache.as_ref().map(|cache| Cache::new(cache, before)).transpose()?;
        let tap = settings.tap.clone().map(Tap::new).transpose()?.map(Arc::new);
        let secured = Secured::new(&settings)?;
        let secure = settings.to_secure.as_ref().map(Secure::to).transpose()?;
        let htcp = cache.as_ref().and_then(|cache| cache.htcp.clone());
        let alternatives = Arc::default();
        let proxy =
            Arc::new(Self { pseudonym, settings, cache, tap, datagrams, secured, secure, alternatives });
        if let Some(htcp) = htcp {
            htcp.start(Arc::downgrade(&proxy))?;
        }
        Ok(proxy)
    }
}

impl Proxy {
    /// A copy of the socket by which its cache asks siblings, with its address.
    ///
    /// # Errors
    /// All descriptors are in use.
    pub fn htcp_socket(&self) -> std::io::Result<Option<(SocketAddr, UdpSocket)>> {
        self.cache.as_ref().and_then(|cache| cache.htcp.as_ref()).map(|htcp| htcp.copy()).transpose()
    }

    /// Another process may use the cache's folder and the socket for siblings from now on. Waits until files that are being written
    /// are there. Responses in memory are served on.
    pub fn rest(&self) {
        let Some(cache) = &self.cache else { return };
        cache.htcp.iter().for_each(|htcp| htcp.rest(true));
        cache.store.rest();
    }

    /// Goes on where [`Proxy::rest`] has stopped. Files of the other process are found.
    pub fn resume(&self) {
        let Some(cache) = &self.cache else { return };
        cache.store.resume(&cache.rules);
        cache.htcp.iter().for_each(|htcp| htcp.rest(false));
    }

    /// Serves one client of a listener whose requests this proxy handles, until its end, in a task of its own.
    pub fn serve(self: Arc<Self>, worker: Arc<Worker>, listening: Arc<Listening>, arrived: Arrived) {
        let Some(admitted) = session::admit(&worker, &listening, arrived) else { return };
        match listening.catches {
            Catches::Http => reactor::spawn(connection::serve(worker, listening, self, admitted)),
            _ => reactor::spawn(intercepted::intercepted(worker, listening, self, admitted)),
        }
    }
}

impl Cache {
    fn new(settings: &CacheSettings, before: Before) -> anyhow::Result<Self> {
        let Before { htcp: taken, is_there } = before;
        let htcp = settings.htcp.as_ref().map(|htcp| {
            Htcp::bind(htcp, taken)
                .with_context(|| format!("htcp: cannot receive datagrams on {}", htcp.address))
        });
        let (htcp, by_htcp) = htcp.transpose()?.unzip();
        let disk = settings.disk.as_ref().map(|disk| open_disk(disk, &settings.rules, is_there)).transpose();
        let (disk, disk_trouble) = match disk {
            Ok(disk) => (disk, None),
            Err(trouble) => (None, Some(trouble)),
        };
        let in_memory = if disk.is_some() { settings.memory_bytes / IN_MEMORY_PART } else { u64::MAX };
        Ok(Self {
            object_max: if disk.is_some() {
                settings.object_bytes
            } else {
                settings.object_bytes.min(settings.memory_bytes)
            },
            in_memory_max: settings.object_bytes.min(settings.memory_bytes).min(in_memory),
            store: Arc::new(Store::new(settings.memory_bytes, disk)),
            rules: settings.rules.clone(),
            keys: settings.keys.clone(),
            siblings: Siblings::new(&settings.siblings, by_htcp.unwrap_or_default()),
            htcp,
            purge_from: settings.purge_from.clone(),
            counts: Counts::default(),
            disk_trouble,
        })
    }

    /// Returns the key of a URL, or of the beginning of one; `None` if it does not parse.
    pub fn key_of(&self, url: &str) -> Option<Vec<u8>> {
        Resource::parse(url.as_bytes(), &Method::Get).ok().map(|resource| resource.key(&self.keys))
    }
}

/// With a disk, one response may use at most this fraction of the memory.
const IN_MEMORY_PART: u64 = 8;

/// Opens the store on disk. On failure the cache works from memory alone and still serves all clients.
fn open_disk(settings: &DiskSettings, rules: &Rules, is_hurried: bool) -> Result<Arc<Disk>, String> {
    Disk::open(&settings.folder, settings.bytes, rules, is_hurried).map_err(|error| {
        let folder = settings.folder.display();
        tracing::error!(
            "the cache keeps nothing on disk: {folder}: {error}; make it a folder that this user may write to and no other \
             sidetrack uses, or name another one (`disk`), and restart"
        );
        error.to_string()
    })
}

/// Returns the wall clock in seconds, as caches count it.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
