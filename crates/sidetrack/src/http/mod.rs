//! The HTTP stage behind an `http` listener: requests in absolute form (or, where the listener stands for a server, in
//! origin form), CONNECT, kept-alive connections on both sides, and a shared cache.
//!
//! One task for each client connection. Every request is a flow: it is asked of policy, carried as the verdict says,
//! and leaves one record. CONNECT and upgrades go on as any flow does, in [`crate::session`].

mod answer;
mod buffer;
mod cached;
mod connection;
mod duplex;
mod exchange;
mod fetch;
mod h2;
mod har;
mod intercepted;
mod keylog;
mod meter;
mod open;
mod pool;
mod refresh;
mod relay;
mod request;
mod sibling;
mod store;
mod tap;

pub use answer::refusal;
pub use connection::serve;
pub use intercepted::intercepted;
pub use pool::tend;
pub use store::{Content, Object, Store};
pub use tap::Tap;

use crate::config::{CacheSettings, HttpListener};
use sibling::Siblings;
use sidetrack_core::http::cache::Rules;
use sidetrack_core::http::uri::KeyRules;
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
    /// Who is asked before the server is.
    pub siblings: Siblings,
}

impl Proxy {
    /// The state of a listener that starts.
    ///
    /// # Errors
    /// TLS connections are to be opened, and cannot be.
    pub fn new(settings: HttpListener) -> Result<Self, crate::tls::TlsError> {
        let random: [u8; 4] = sidetrack_sys::random::bytes();
        let pseudonym = format!("sidetrack-{:08x}", u32::from_be_bytes(random));
        let cache = settings.cache.as_ref().map(Cache::new);
        let tap = settings.tap.clone().map(Tap::new).transpose()?.map(Arc::new);
        Ok(Self { pseudonym, settings, cache, tap })
    }
}

impl Cache {
    fn new(settings: &CacheSettings) -> Self {
        Self {
            store: Arc::new(Store::new(settings.memory_bytes)),
            rules: settings.rules.clone(),
            keys: settings.keys.clone(),
            object_max: settings.object_bytes,
            siblings: Siblings::new(&settings.siblings),
        }
    }
}

/// The wall clock in seconds, as caches count it.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
