//! `[[listen]]` of kind http, and its cache.

use super::super::{At, CacheSettings, HttpListener, List, raw};
use super::Check;
use sidetrack_core::flow::Destination;
use sidetrack_core::http::cache::Rules;
use sidetrack_core::http::fields::is_token;
use sidetrack_core::http::sibling::{sibling, siblings};
use sidetrack_core::http::uri::KeyRules;
use std::ops::RangeInclusive;

/// Sizes a cache may be set to: a MiB to a TiB.
const SIZES: RangeInclusive<u64> = 1 << 20..=1 << 40;

/// Most siblings of a cache: each miss asks them all.
const SIBLINGS_MAX: usize = 16;

impl Check<'_> {
    pub(super) fn http(&mut self, listen: &raw::Listen) -> HttpListener {
        HttpListener {
            users: listen.users.as_ref().map(|users| self.logins(users)).unwrap_or_default(),
            to: listen.to.as_ref().and_then(|to| self.destination(to)),
            cache: listen.cache.as_ref().map(|cache| self.cache(cache)),
            tap: self.tap_of(listen),
        }
    }

    /// How requests in connections that the kernel hands over are served, if anything is to be done with them.
    pub(super) fn http_inside(&mut self, listen: &raw::Listen) -> Option<HttpListener> {
        let is_wanted = listen.cache.is_some() || listen.tap.as_deref().copied().unwrap_or(false);
        is_wanted.then(|| HttpListener {
            users: Vec::new(),
            to: None,
            cache: listen.cache.as_ref().map(|cache| self.cache(cache)),
            tap: self.tap_of(listen),
        })
    }

    fn cache(&mut self, cache: &raw::Cache) -> CacheSettings {
        let memory_bytes = self.size(cache.memory_bytes.as_ref(), SIZES, CacheSettings::MEMORY_BYTES);
        let object_bytes = self.size(cache.object_bytes.as_ref(), 0..=memory_bytes, {
            CacheSettings::OBJECT_BYTES.min(memory_bytes)
        });
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
        CacheSettings { memory_bytes, object_bytes, rules, keys, siblings }
    }

    /// Other caches, of the list and of the file.
    fn siblings(&mut self, cache: &raw::Cache) -> Vec<Destination> {
        let mut found = Vec::new();
        for item in cache.siblings.iter().flat_map(List::items) {
            match sibling(item) {
                Some(sibling) => found.push(sibling),
                None => {
                    let message = format!("'{}' is no sibling", item.as_str());
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

    /// Names of fields, in lower case; an empty list is allowed and means none.
    fn targets(&mut self, list: Option<&List<String>>) -> Option<Vec<String>> {
        let items = list?.items();
        for name in items.iter().filter(|name| !is_token(name.as_bytes())) {
            let help = "write it as in the response: \"CDN-Cache-Control\"";
            self.error(name.span(), format!("'{}' is no name of a field", name.as_str()), help);
        }
        Some(items.iter().map(|name| name.to_ascii_lowercase()).collect())
    }
}
