//! Decides which stored response answers a request (RFC 9111 Sec. 4, 5.2.1; RFC 5861).
//!
//! The state of a stored response is not a field. It follows from the clock, from the directives, and from the mark
//! `is_invalid`:
//!
//! ```text
//!               may_store                 lifetime is over
//!   response --------------> Fresh -----------------------------> Stale
//!                             ^ |                                  | |
//!                             | |  304, or HEAD that agrees        | |
//!                             +-|----------------------------------+ |
//!   304, or HEAD that agrees  | |                                    |
//!                             | |  unsafe request,                   |  unsafe request,
//!                             | |  or HEAD that disagrees            |  or HEAD that disagrees
//!                             | v                                    |
//!                           Invalid <--------------------------------+
//! ```
//!
//! | state | answer to a request |
//! |---|---|
//! | Fresh | the stored response |
//! | Stale, within `stale-while-revalidate` | the stored response, and a refresh in the background |
//! | Stale, later | a validation, or a miss without a validator; if the server fails, the stale response if [`may_serve_stale`] allows it |
//! | Invalid, or `no-cache` | a validation, or a miss without a validator; never the stale response |
//!
//! A new response that may be stored replaces the old one. The caller removes responses when it needs the space.

use super::super::fields::Fields;
use super::super::message::Method;
use super::control::{RequestControl, Scope};
use super::range::{ByteRange, Ranges};
use super::store::{Extent, Stored};
use super::validate::if_range_holds;
use super::weigh::preferences;
use super::{Rules, UnixSeconds};

/// Why a request is sent to the server (RFC 9211 Sec. 2.2, `fwd`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forward {
    /// The cache was not asked.
    Bypass,
    /// A cache never answers this method.
    Method,
    /// Nothing is stored for this URL.
    UriMiss,
    /// The stored responses were selected by other request fields.
    VaryMiss,
    /// The request's directives demand it.
    Request,
    /// The stored response is stale.
    Stale,
    /// The stored response lacks bytes that the request asks for.
    Partial,
}

impl Forward {
    /// Returns the word for Cache-Status.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bypass => "bypass",
            Self::Method => "method",
            Self::UriMiss => "uri-miss",
            Self::VaryMiss => "vary-miss",
            Self::Request => "request",
            Self::Stale => "stale",
            Self::Partial => "partial",
        }
    }
}

/// What to do with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Answer from this stored response.
    Hit {
        /// The index among the stored responses given.
        index: usize,
        /// Fetch a newer response in the background.
        refresh: bool,
    },
    /// Ask the server whether this stored response is still valid.
    Validate {
        /// The index among the stored responses given.
        index: usize,
        /// Why it cannot be served as it is.
        why: Forward,
    },
    /// Ask the server. The answer may be stored.
    Miss {
        /// The reason.
        why: Forward,
    },
    /// Ask the server. The answer is not stored.
    Pass {
        /// The reason.
        why: Forward,
    },
    /// The client accepts only a stored response, and there is none: 504.
    OnlyIfCached,
}

/// How the server failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It answered 500, 502, 503 or 504.
    Error,
    /// The server could not be reached, or the connection broke before the answer.
    Unreachable,
}

/// Decides about a request. `stored` are all responses stored under its key.
pub fn lookup(
    method: &Method,
    request: &Fields,
    has_body: bool,
    stored: &[&Stored],
    now_s: UnixSeconds,
) -> Lookup {
    if !matches!(method, Method::Get | Method::Head) {
        return Lookup::Pass { why: Forward::Method };
    }
    let control = RequestControl::of(request);
    // A precondition on the state of the server must be checked by the server (RFC 9111 Sec. 4.3.2).
    if has_body || request.has("if-match") || request.has("if-unmodified-since") {
        return Lookup::Pass { why: Forward::Bypass };
    }
    let found = select(method, request, stored, now_s).map_or_else(
        |why| if *method == Method::Head { Lookup::Pass { why } } else { Lookup::Miss { why } },
        |index| {
            stored.get(index).map_or(Lookup::Miss { why: Forward::UriMiss }, |best| {
                judge(best, index, (&control, request), now_s)
            })
        },
    );
    // Both directives override what the stored responses allow.
    match found {
        Lookup::Hit { index, .. } if control.only_if_cached => Lookup::Hit { index, refresh: false },
        _ if control.only_if_cached => Lookup::OnlyIfCached,
        // A client that forbids storing the exchange wants the server to answer.
        Lookup::Hit { .. } | Lookup::Validate { .. } | Lookup::Miss { .. } if control.no_store => {
            Lookup::Pass { why: Forward::Request }
        }
        _ => found,
    }
}

/// Returns the index of the stored response that a request selects.
fn select(
    method: &Method,
    request: &Fields,
    stored: &[&Stored],
    now_s: UnixSeconds,
) -> Result<usize, Forward> {
    let range = request.first("range");
    let matching = || stored.iter().enumerate().filter(|(_, one)| one.is_selected_by(request));
    let usable = matching().filter(|(_, one)| match one.extent {
        Extent::Whole => true,
        Extent::Part(part) => {
            *method == Method::Get
                && if_range_holds(request, one)
                && range.and_then(Ranges::parse).is_some_and(|ranges| ranges.lie_within(part))
        }
    });
    let usable: Vec<(usize, &Stored)> = usable.map(|(index, one)| (index, *one)).collect();
    match best_of(&usable, request, now_s) {
        Some(index) => Ok(index),
        None if matching().next().is_some() => Err(Forward::Partial),
        None if stored.is_empty() => Err(Forward::UriMiss),
        None => Err(Forward::VaryMiss),
    }
}

/// Returns the best of several stored responses that a request selects (RFC 9111 Sec. 4.1). A fresh one is better
/// than a stale one. Then the weights of the request's Accept fields decide. Then a response with selecting fields is
/// better than one without, and at last the newest is best.
fn best_of(usable: &[(usize, &Stored)], request: &Fields, now_s: UnixSeconds) -> Option<usize> {
    // Nearly always there is only one.
    if let [] | [_] = usable {
        return usable.first().map(|(index, _)| *index);
    }
    let selected: Vec<&Stored> = usable.iter().map(|(_, one)| *one).collect();
    let ranked = usable.iter().zip(preferences(request, &selected));
    let best = ranked.max_by_key(|((_, one), preference)| {
        let is_fresh = !one.is_invalid && one.ttl_s(now_s) > 0;
        (is_fresh, *preference, !one.selecting.is_empty(), one.date_s, one.response_time_s)
    });
    best.map(|((index, _), _)| *index)
}

/// Decides whether the selected response can be served as it is.
fn judge(
    best: &Stored,
    index: usize,
    (request, fields): (&RequestControl, &Fields),
    now_s: UnixSeconds,
) -> Lookup {
    let hit = |refresh| Lookup::Hit { index, refresh };
    let ask = |why| match best.has_validator() && best.extent == Extent::Whole {
        true => Lookup::Validate { index, why },
        false => Lookup::Miss { why },
    };
    let age_s = best.age_s(now_s);
    // With whole seconds, a response that has just arrived cannot be told from one of a second ago. So no stored
    // response has age 0 for sure.
    let too_old = request.max_age_s.is_some_and(|most| age_s > most || most == 0);
    let left_s = best.ttl_s(now_s);
    let too_short =
        request.min_fresh_s.is_some_and(|least| left_s < i64::try_from(least).unwrap_or(i64::MAX));
    // The request comes first: it may demand a validation even of a fresh response.
    if request.no_cache || (too_old && request.max_stale_s.is_none()) {
        return ask(Forward::Request);
    }
    // Then the response: it may forbid its use without validation, even while it is fresh.
    if best.is_invalid || best.control.no_cache == Scope::All {
        return ask(Forward::Stale);
    }
    if left_s > 0 {
        return if too_short { ask(Forward::Request) } else { hit(false) };
    }
    // From here on the response is stale. First check what forbids to serve it, then what allows it.
    let stale_s = u64::try_from(-left_s).unwrap_or(0);
    if best.forbids_stale_to(fields) || too_short {
        return ask(Forward::Stale);
    }
    if request.max_stale_s.is_some_and(|most| stale_s <= most) {
        return hit(false);
    }
    if best.control.stale_while_revalidate_s.is_some_and(|most| stale_s < most) {
        return hit(true);
    }
    ask(Forward::Stale)
}

/// Whether the selected response may be served stale because the server has failed (RFC 5861 Sec. 4, RFC 9111 Sec.
/// 4.2.4).
pub fn may_serve_stale(
    stored: &Stored,
    request: &Fields,
    trouble: Trouble,
    now_s: UnixSeconds,
    rules: &Rules,
) -> bool {
    let control = RequestControl::of(request);
    if stored.forbids_stale_to(request) || stored.is_invalid || control.no_cache {
        return false;
    }
    if control.max_age_s.is_some_and(|most| stored.age_s(now_s) > most) {
        return false;
    }
    let stale_s = u64::try_from(-stored.ttl_s(now_s)).unwrap_or(0);
    let said = stored.control.stale_if_error_s.max(control.stale_if_error_s);
    let most = match (said, trouble) {
        (Some(most), _) => most,
        (None, Trouble::Unreachable) if rules.stale_if_unreachable_s > 0 => rules.stale_if_unreachable_s,
        (None, _) => return false,
    };
    stale_s <= most
}

impl Ranges {
    /// Whether all ranges are inside this part of a representation.
    pub fn lie_within(&self, part: super::ContentRange) -> bool {
        let inside = |range: &ByteRange| match (*range, part.total) {
            (ByteRange::From { first, last: Some(last) }, _) if last <= part.last => first >= part.first,
            (range, Some(total)) => {
                range.resolve(total).is_some_and(|(first, last)| first >= part.first && last <= part.last)
            }
            _ => false,
        };
        self.0.iter().all(inside)
    }
}
