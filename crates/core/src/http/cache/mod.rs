//! The rules of a shared HTTP cache: RFC 9111 with RFC 5861 (stale), RFC 8246 (immutable) and RFC 9213 (targeted
//! fields). The functions decide over values. They store nothing and have no clock: the caller passes the time as
//! seconds of the wall clock.
//!
//! 1. [`lookup()`] decides which stored response answers a request. Its module has the state diagram of a stored
//!    response.
//! 2. [`may_store`] decides about a response from the server, which becomes a [`Stored`]. A 304 goes to [`refresh`]
//!    instead.
//! 3. [`reply()`] makes the answer to a client from a stored response.
//! 4. [`invalidated`] lists the resources that an unsafe request made invalid.

mod control;
mod date;
mod dictionary;
pub mod file;
mod fresh;
mod lookup;
mod part;
mod range;
mod reply;
mod store;
mod update;
mod validate;
mod vary;
mod weigh;

pub use control::{RequestControl, ResponseControl, Scope};
pub use date::{format_date, parse_date};
pub use lookup::{Forward, Lookup, Trouble, lookup, may_serve_stale};
pub use part::{Missing, combine, missing};
pub use range::{ByteRange, ContentRange, Ranges};
pub use reply::{Body, Reply, reply, reply_first_hand};
pub use store::{Extent, NotStored, Stored, invalidated, is_shareable, may_store, may_store_post};
pub use update::{Refreshed, freshen_by_head, refresh};
pub use validate::conditions;

/// Seconds of the wall clock since 1970.
pub type UnixSeconds = u64;

/// The largest number of seconds. Larger numbers count as this one (RFC 9111 Sec. 1.2.2).
pub const MAX_SECONDS: u64 = 1 << 31;

/// Settings of a cache, besides the directives in messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// The targeted fields (RFC 9213) that replace Cache-Control and Expires. The first one that a response has
    /// counts. Default: `CDN-Cache-Control`.
    pub targets: Vec<String>,
    /// How long past its freshness a response may be served while its server cannot be reached, seconds. It counts if
    /// the response states no limit (RFC 9111 Sec. 4.2.4). Default: 0, never.
    pub stale_if_unreachable_s: u64,
    /// The longest heuristic freshness lifetime, seconds. Default: 604,800 (a week).
    pub heuristic_max_s: u64,
}

impl Default for Rules {
    /// `CDN-Cache-Control` is followed, nothing stale is served while the server is unreachable, and heuristic
    /// freshness is at most a week.
    fn default() -> Self {
        Self {
            targets: vec!["cdn-cache-control".to_owned()],
            stale_if_unreachable_s: 0,
            heuristic_max_s: 7 * 86_400,
        }
    }
}
