//! `[[listen]]` of kind http, and its cache.

use super::super::{
    At, CacheSettings, DiskSettings, HtcpSettings, HtcpSibling, HttpListener, List, Listener, raw,
};
use super::Check;
use crate::tls::Own;
use sidetrack_core::carrier::{Hop, HopProtocol};
use sidetrack_core::flow::Destination;
use sidetrack_core::http::cache::Rules;
use sidetrack_core::http::fields::is_token;
use sidetrack_core::http::sibling::{sibling, siblings};
use sidetrack_core::http::uri::KeyRules;
use std::ops::RangeInclusive;

/// Allowed sizes of a cache in memory: 1 MiB to 1 TiB.
const SIZES: RangeInclusive<u64> = 1 << 20..=1 << 40;

/// Allowed sizes of a cache on disk: 1 MiB to 1 PiB.
const DISK_SIZES: RangeInclusive<u64> = 1 << 20..=1 << 50;

/// Most siblings of a cache. All of them are asked for each miss.
const SIBLINGS_MAX: usize = 16;

impl Check<'_> {
    pub(super) fn http(&mut self, listen: &raw::Listen) -> HttpListener {
        let own = listen.identity.as_ref().and_then(|identity| self.own(identity));
        let http3 = self.serves_http3(listen);
        let (to, to_secure) = listen.to.as_ref().map(|to| self.http_server(to)).unwrap_or_default();
        HttpListener {
            users: listen.users.as_ref().map(|users| self.logins(users)).unwrap_or_default(),
            to,
            to_secure,
            cache: listen.cache.as_ref().map(|cache| self.cache(cache)),
            tap: self.tap_of(listen),
            own,
            http3,
        }
    }

    /// Reads the server of a reverse proxy: `host:port`, or `https://host:port?ca=FILE` if it speaks TLS.
    fn http_server(&mut self, to: &At<String>) -> (Option<Destination>, Option<Hop>) {
        if !to.contains("://") {
            return (self.destination(to), None);
        }
        let help = "write \"host:port\", \"https://host:port\" or \"https://host:port?ca=FILE\"";
        let text = to.strip_suffix('/').unwrap_or(to);
        let server = match text.parse::<Hop>() {
            Ok(server) => server,
            Err(error) => {
                self.error(to.span(), error.to_string(), help);
                return (None, None);
            }
        };
        let plain: Hop = Hop { ca_file: None, ..server.clone() };
        let is_plain = format!("{plain}").parse::<Hop>().is_ok_and(|other| other == plain);
        if server.protocol != HopProtocol::Https || !is_plain || server.address.zone != 0 {
            self.error(to.span(), "this is not a server of https", help);
            return (None, None);
        }
        let server = self.with_authorities(server, to);
        (server.as_ref().map(|server| server.address.clone()), server)
    }

    /// Reads the certificate that the listener shows.
    fn own(&mut self, identity: &At<String>) -> Option<Own> {
        let pem = self.secret_lines(identity, identity.span())?.join("\n");
        match Own::new(&pem) {
            Ok(own) => Some(own),
            Err(error) => {
                let help = "name a file with the certificate chain and its private key, in PEM";
                self.error(identity.span(), format!("'{}': {error}", identity.as_str()), help);
                None
            }
        }
    }

    /// Whether the listener serves HTTP/3. Reports what is missing for it.
    fn serves_http3(&mut self, listen: &raw::Listen) -> bool {
        let Some(at) = listen.http3.as_ref().filter(|at| ***at) else { return false };
        if listen.identity.is_none() {
            let help =
                "write `identity = \"proxy.pem\"`: a file with the certificate chain and its private key";
            self.error(at.span(), "HTTP/3 is always encrypted: `http3` needs an `identity`", help);
        }
        if listen.accept_proxy_protocol.is_some() {
            let help = "take one of them out: UDP has no PROXY protocol header";
            self.error(at.span(), "`http3` does not go with `accept_proxy_protocol`", help);
        }
        true
    }

    /// Returns the HTTP settings of a capturing listener, if it has a cache or intercepts TLS.
    pub(super) fn http_inside(&mut self, listen: &raw::Listen) -> Option<HttpListener> {
        let is_wanted = listen.cache.is_some() || listen.tap.as_deref().copied().unwrap_or(false);
        is_wanted.then(|| HttpListener {
            users: Vec::new(),
            to: None,
            to_secure: None,
            cache: listen.cache.as_ref().map(|cache| self.cache(cache)),
            tap: self.tap_of(listen),
            own: None,
            http3: false,
        })
    }

    fn cache(&mut self, cache: &raw::Cache) -> CacheSettings {
        let memory_bytes = self.size(cache.memory_bytes.as_ref(), SIZES, CacheSettings::MEMORY_BYTES);
        let disk = self.disk(cache);
        let most = disk.as_ref().map_or(memory_bytes, |disk| disk.bytes.max(memory_bytes));
        let object_bytes =
            self.size(cache.object_bytes.as_ref(), 0..=most, CacheSettings::OBJECT_BYTES.min(most));
        let written = Rules::default();
        let seconds = |at: &Option<At<u64>>, default| at.as_ref().map_or(default, |ms| **ms / 1000);
        let rules = Rules {
            targets: self.targets(cache.targets.as_ref()).unwrap_or(written.targets),
            stale_if_unreachable_s: seconds(&cache.stale_if_unreachable_ms, written.stale_if_unreachable_s),
            heuristic_max_s: seconds(&cache.heuristic_max_ms, written.heuristic_max_s),
        };
        let ignored = cache.ignore_parameters.as_ref().map(|list| {
            self.not_empty(list);
            list.items().iter().map(|name| name.to_string()).collect()
        });
        let keys = KeyRules {
            ignored_parameters: ignored.unwrap_or_default(),
            sort_query: cache.sort_query.as_deref().copied().unwrap_or(false),
        };
        let siblings = self.siblings(cache);
        let purge_from = cache.purge_from.as_ref().map(|nets| self.networks(nets)).unwrap_or_default();
        let htcp = cache.htcp.as_ref().and_then(|htcp| self.htcp(htcp));
        CacheSettings { memory_bytes, object_bytes, rules, keys, siblings, disk, purge_from, htcp }
    }

    fn htcp(&mut self, htcp: &At<raw::Htcp>) -> Option<HtcpSettings> {
        let from = htcp.from.as_ref().map(|nets| self.networks(nets)).unwrap_or_default();
        let mut siblings = Vec::new();
        for sibling in htcp.siblings.iter().flat_map(List::items) {
            let (Some(http), Some(htcp)) = (&sibling.http, &sibling.htcp) else {
                let help = "write { http = \"squid.example:3128\", htcp = \"squid.example:4827\" }";
                self.error(sibling.span(), "this sibling lacks a place", help);
                continue;
            };
            if let (Some(http), Some(htcp)) = (self.destination(http), self.destination(htcp)) {
                siblings.push(HtcpSibling { http, htcp });
            }
        }
        if siblings.len() > SIBLINGS_MAX {
            let message = format!("{} siblings are asked for every miss", siblings.len());
            self.error(htcp.span(), message, format!("name at most {SIBLINGS_MAX}"));
        }
        let Some(address) = &htcp.address else {
            let help = "write `address = \"0.0.0.0:4827\"`: answers come back there, too";
            self.error(htcp.span(), "htcp lacks an address", help);
            return None;
        };
        Some(HtcpSettings { address: self.address(address)?, from, siblings })
    }

    fn disk(&mut self, cache: &raw::Cache) -> Option<DiskSettings> {
        let bytes = self.size(cache.disk_bytes.as_ref(), DISK_SIZES, DiskSettings::BYTES);
        let Some(at) = &cache.disk else {
            if let Some(bytes) = &cache.disk_bytes {
                let help = "name its folder: `disk = \"/var/cache/sidetrack\"`";
                self.error(bytes.span(), "there is no disk whose size this could be", help);
            }
            return None;
        };
        if at.is_empty() {
            self.error(at.span(), "this is not a folder", "write `disk = \"/var/cache/sidetrack\"`");
            return None;
        }
        Some(DiskSettings { folder: self.surroundings.resolve(at), bytes })
    }

    /// Rejects two caches in one folder: they would delete each other's files.
    pub(super) fn disks_apart(&mut self, listens: &[At<raw::Listen>], listeners: &[Option<Listener>]) {
        let mut seen: Vec<&std::path::Path> = Vec::new();
        for (listen, listener) in listens.iter().zip(listeners) {
            let http = listener.as_ref().and_then(|listener| listener.kind.http());
            let disk = http.and_then(|http| http.cache.as_ref()?.disk.as_ref());
            let Some(folder) = disk.map(|disk| disk.folder.as_path()) else { continue };
            if seen.contains(&folder) {
                let span = listen.cache.as_ref().and_then(|cache| cache.disk.as_ref().map(At::span));
                let message = format!("'{}' is another listener's", folder.display());
                self.error(span.unwrap_or(listen.span()), message, "give each cache a folder of its own");
            }
            seen.push(folder);
        }
    }

    /// Reads the other caches, from the list and from the file.
    fn siblings(&mut self, cache: &raw::Cache) -> Vec<Destination> {
        let mut found = Vec::new();
        for item in cache.siblings.iter().flat_map(List::items) {
            match sibling(item) {
                Some(sibling) => found.push(sibling),
                None => {
                    let message = format!("'{}' is not a sibling", item.as_str());
                    self.error(item.span(), message, "write \"host:port\", where its http listener listens");
                }
            }
        }
        if let Some(at) = &cache.siblings_file {
            let help = "a relative path starts from the folder of this file";
            match std::fs::read_to_string(self.surroundings.resolve(at)) {
                Err(error) => self.error(at.span(), format!("cannot read '{}': {error}", at.as_str()), help),
                Ok(text) => match siblings(&text) {
                    Ok(more) => found.extend(more),
                    Err(error) => {
                        let message = format!("'{}', {error}", at.as_str());
                        self.error(at.span(), message, "write [host:port] on each line");
                    }
                },
            }
        }
        if found.len() > SIBLINGS_MAX {
            let span = cache.siblings_file.as_ref().map(At::span);
            let span = span.or(cache.siblings.as_ref().map(List::span)).unwrap_or_default();
            let message = format!("{} siblings are asked for every miss", found.len());
            self.error(span, message, format!("name at most {SIBLINGS_MAX}"));
        }
        found
    }

    fn size(&mut self, given: Option<&At<u64>>, allowed: RangeInclusive<u64>, default: u64) -> u64 {
        let Some(at) = given else { return default };
        if !allowed.contains(at) {
            let help = format!("write a number of bytes from {} to {}", allowed.start(), allowed.end());
            self.error(at.span(), "this size cannot be", help);
        }
        **at
    }

    /// Checks field names and returns them in lower case. An empty list is allowed and means none.
    fn targets(&mut self, list: Option<&List<String>>) -> Option<Vec<String>> {
        let items = list?.items();
        for name in items.iter().filter(|name| !is_token(name.as_bytes())) {
            let help = "write it as in the response: \"CDN-Cache-Control\"";
            self.error(name.span(), format!("'{}' is not a field name", name.as_str()), help);
        }
        Some(items.iter().map(|name| name.to_ascii_lowercase()).collect())
    }
}
