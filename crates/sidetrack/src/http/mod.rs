//! The HTTP stage behind an `http` listener: requests in absolute form (or, where the listener stands for a server, in
//! origin form), CONNECT, kept-alive connections on both sides, and a shared cache.
//!
//! One task for each client connection. Every request is a flow: it is asked of policy, carried as the verdict says,
//! and leaves one record. CONNECT and upgrades go on as any flow does, in [`crate::session`].

mod answer;
mod bound;
mod buffer;
mod cached;
mod completing;
mod connection;
mod content;
mod disk;
mod duplex;
mod exchange;
mod fetch;
mod filling;
mod h2;
mod har;
mod htcp;
mod intercepted;
mod keylog;
mod meter;
mod open;
mod pool;
mod refresh;
mod relay;
mod request;
mod sending;
pub mod sheet;
mod sibling;
mod store;
mod tap;

pub use answer::refusal;
pub use connection::serve;
pub use content::Content;
pub use disk::{DiskState, Which};
pub use intercepted::intercepted;
pub use pool::tend;
pub use store::{Listed, Object, Store};
pub use tap::Tap;

use crate::config::{CacheSettings, DiskSettings, HttpListener};
use anyhow::Context;
use disk::Disk;
use htcp::Htcp;
use sibling::Siblings;
use sidetrack_core::http::cache::Rules;
use sidetrack_core::http::message::Method;
use sidetrack_core::http::uri::{KeyRules, Resource};
use sidetrack_core::net::IpSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// What all connections of one `http` listener share.
#[derive(Debug)]
pub struct Proxy {
    /// Our name in Via, Cache-Status and Proxy-Status: no two processes have the same, so that a loop is seen.
    pub pseudonym: String,
    /// What the file says.
    pub settings: HttpListener,
    /// The cache, if there is one.
    pub cache: Option<Cache>,
    /// What opens TLS connections, if any are opened.
    pub tap: Option<Arc<Tap>>,
}

/// A shared cache and what it is set to.
#[derive(Debug)]
pub struct Cache {
    /// What is stored.
    pub store: Arc<Store>,
    /// What the decisions are set to.
    pub rules: Rules,
    /// What is left out of keys.
    pub keys: KeyRules,
    /// Most bytes of one response's content.
    pub object_max: u64,
    /// Most bytes of one response's content that are held in memory while it comes in.
    pub in_memory_max: u64,
    /// Why there is no disk although one was asked for.
    pub disk_trouble: Option<String>,
    /// Who is asked before the server is.
    pub siblings: Siblings,
    /// What asks siblings of other makers, and answers them.
    pub htcp: Option<Arc<Htcp>>,
    /// Whose PURGE requests are followed.
    pub purge_from: IpSet,
}

impl Proxy {
    /// The state of a listener that starts.
    ///
    /// # Errors
    /// TLS connections are to be opened, and cannot be; or there is no socket for siblings.
    pub fn start(settings: HttpListener) -> anyhow::Result<Arc<Self>> {
        let random: [u8; 4] = sidetrack_sys::random::bytes();
        let pseudonym = format!("sidetrack-{:08x}", u32::from_be_bytes(random));
        let cache = settings.cache.as_ref().map(Cache::new).transpose()?;
        let tap = settings.tap.clone().map(Tap::new).transpose()?.map(Arc::new);
        let htcp = cache.as_ref().and_then(|cache| cache.htcp.clone());
        let proxy = Arc::new(Self { pseudonym, settings, cache, tap });
        if let Some(htcp) = htcp {
            htcp.start(Arc::downgrade(&proxy))?;
        }
        Ok(proxy)
    }
}

impl Cache {
    fn new(settings: &CacheSettings) -> anyhow::Result<Self> {
        let htcp = settings.htcp.as_ref().map(|htcp| {
            Htcp::bind(htcp).with_context(|| format!("htcp: cannot receive datagrams on {}", htcp.address))
        });
        let (htcp, by_htcp) = htcp.transpose()?.unzip();
        let disk = settings.disk.as_ref().map(|disk| open_disk(disk, &settings.rules)).transpose();
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
            disk_trouble,
        })
    }

    /// What a URL, or the beginning of one, is in keys; `None` if it is no URL.
    pub fn key_of(&self, url: &str) -> Option<Vec<u8>> {
        Resource::parse(url.as_bytes(), &Method::Get).ok().map(|resource| resource.key(&self.keys))
    }
}

/// Where there is a disk, a response has at most this part of the memory.
const IN_MEMORY_PART: u64 = 8;

/// The store on disk. Without one the cache is as good as its memory: no reason to serve nobody.
fn open_disk(settings: &DiskSettings, rules: &Rules) -> Result<Arc<Disk>, String> {
    Disk::open(&settings.folder, settings.bytes, rules).map_err(|error| {
        let folder = settings.folder.display();
        tracing::error!(
            "the cache keeps nothing on disk: {folder}: {error}; make it a folder that this user may write to and no other \
             sidetrack uses, or name another one (`disk`), and restart"
        );
        error.to_string()
    })
}

/// The wall clock in seconds, as caches count it.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
