//! The caches of a node's listeners, for the admin interface.

use crate::admin::{CacheRequests, CacheScope, CacheStatus, CachedResource, DiskStatus, MemoryStatus};
use crate::http::{Cache, Proxy, Which};
use std::sync::Arc;

/// A listener's name, and the proxy that handles its requests.
pub(super) type Named = (Arc<str>, Arc<Proxy>);

/// Returns the state of each cache.
pub(super) fn status(proxies: &[Named]) -> Vec<CacheStatus> {
    with_caches(proxies).map(|(name, proxy, cache)| one(name, proxy, cache)).collect()
}

fn with_caches(proxies: &[Named]) -> impl Iterator<Item = (&str, &Proxy, &Cache)> {
    proxies.iter().filter_map(|(name, proxy)| Some((&**name, &**proxy, proxy.cache.as_ref()?)))
}

fn one(name: &str, proxy: &Proxy, cache: &Cache) -> CacheStatus {
    let (resources, bytes, capacity_bytes) = cache.store.memory();
    let settings = proxy.settings.cache.as_ref().and_then(|cache| cache.disk.as_ref());
    let disk = settings.map(|settings| {
        let folder = settings.folder.display().to_string();
        match cache.store.disk() {
            Some(state) => DiskStatus {
                folder,
                resources: state.keys,
                files: state.files,
                bytes: state.bytes,
                capacity_bytes: state.capacity,
                scanned: state.is_scanned,
                broken: state.broken,
                trouble: state.trouble,
                unwritten: state.unwritten,
            },
            None => DiskStatus {
                folder,
                resources: 0,
                files: 0,
                bytes: 0,
                capacity_bytes: settings.bytes,
                scanned: false,
                broken: 0,
                trouble: cache.disk_trouble.clone(),
                unwritten: 0,
            },
        }
    });
    let memory = MemoryStatus { resources, bytes, capacity_bytes };
    let [hits, misses, passed] = cache.counts.read();
    let requests = CacheRequests { hits, misses, passed };
    CacheStatus { listener: name.to_owned(), memory, disk, requests }
}

/// Returns stored resources of one listener or of all, at most `most` for each.
///
/// # Errors
/// Fails if there is no such listener, or if the URL is not valid.
pub(super) fn list(
    proxies: &[Named],
    listener: Option<&str>,
    scope: &CacheScope,
    most: usize,
) -> Result<Vec<CachedResource>, String> {
    let mut found = Vec::new();
    for (name, cache) in chosen(proxies, listener)? {
        let start = match which(cache, scope)?.into_iter().next() {
            Some(Which::Prefix(start) | Which::Key(start)) => start,
            None => continue,
        };
        found.extend(cache.store.list(&start, most).into_iter().map(|listed| CachedResource {
            listener: name.to_owned(),
            key: String::from_utf8_lossy(&listed.key).into_owned(),
            memory_bytes: listed.memory_bytes,
            disk_bytes: listed.disk_bytes,
        }));
    }
    Ok(found)
}

/// Removes stored resources. Returns their number.
///
/// # Errors
/// Fails as [`list`] does.
pub(super) fn purge(proxies: &[Named], listener: Option<&str>, scope: &CacheScope) -> Result<usize, String> {
    let mut count = 0;
    for (_, cache) in chosen(proxies, listener)? {
        for which in which(cache, scope)? {
            count += cache.store.purge(&which);
        }
    }
    Ok(count)
}

fn chosen<'a>(proxies: &'a [Named], listener: Option<&str>) -> Result<Vec<(&'a str, &'a Cache)>, String> {
    let all = with_caches(proxies).map(|(name, _, cache)| (name, cache));
    let found: Vec<_> = all.filter(|(name, _)| listener.is_none_or(|wanted| wanted == *name)).collect();
    match listener {
        Some(name) if found.is_empty() => Err(format!("no listener '{name}' has a cache")),
        _ => Ok(found),
    }
}

/// Returns the keys of a scope.
fn which(cache: &Cache, scope: &CacheScope) -> Result<Vec<Which>, String> {
    let key = |url: &str| cache.key_of(url).ok_or_else(|| format!("'{url}' is not a URL of a resource"));
    Ok(match scope {
        CacheScope::All => vec![Which::Prefix(Vec::new())],
        CacheScope::Prefix(start) => vec![Which::Prefix(key(start)?)],
        CacheScope::Url(url) => {
            let key = key(url)?;
            // Also the copies for a single address: they were stored apart because only the client named the
            // host.
            let unproven = [&key[..], b" at "].concat();
            vec![Which::Key(key), Which::Prefix(unproven)]
        }
    })
}
