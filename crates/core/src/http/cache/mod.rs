//! What a shared cache may do with a response: RFC 9111 as decisions over values, with RFC 5861 (stale), RFC 8246
//! (immutable) and RFC 9213 (targeted fields). It stores nothing itself and knows no clock: times are seconds of the
//! wall clock, given by the caller.
//!
//! The order of use: [`lookup`] says what stored responses are good for a request; a response from the server is
//! asked [`may_store`] and becomes a [`Stored`], or, if it is a 304, goes through [`refresh`]; [`reply`] makes the
//! answer to a client out of a stored response; [`invalidated`] names what an unsafe request made stale.

mod checksum;
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

/// Seconds since 1970 on the wall clock.
pub type UnixSeconds = u64;

/// Largest number of seconds that is told apart; more means this (RFC 9111 Sec. 1.2.2).
pub const MAX_SECONDS: u64 = 1 << 31;

/// What a cache is set to, beyond what messages say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Targeted fields (RFC 9213) that take the place of Cache-Control and Expires, the first that is there first.
    pub targets: Vec<String>,
    /// How long past its freshness a response may be served while its server cannot be reached, seconds, where the
    /// response does not say (RFC 9111 Sec. 4.2.4).
    pub stale_if_unreachable_s: u64,
    /// Longest heuristic freshness, seconds.
    pub heuristic_max_s: u64,
}

impl Default for Rules {
    /// `CDN-Cache-Control` is followed; nothing stale while the server is away; a week of heuristics.
    fn default() -> Self {
        Self {
            targets: vec!["cdn-cache-control".to_owned()],
            stale_if_unreachable_s: 0,
            heuristic_max_s: 7 * 86_400,
        }
    }
}
