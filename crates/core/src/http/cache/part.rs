//! Incomplete responses: requests the missing bytes, and combines the parts (RFC 9111 Sec. 3.3, 3.4; RFC 9110 Sec.
//! 15.3.7.3). Parts are combined only if they have the same strong validator.

use super::super::fields::Fields;
use super::super::message::{Method, Response};
use super::date::parse_date;
use super::range::{ContentRange, Ranges};
use super::store::{Extent, Stored, may_store};
use super::update::update;
use super::validate::if_range_holds;
use super::{Rules, UnixSeconds};

/// A Last-Modified date is a strong validator only if the response was made at least this much later, seconds (RFC
/// 9110 Sec. 8.8.2.2).
const SETTLED_S: u64 = 60;

/// A validator that changes with each byte of a representation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strong<'a> {
    /// An ETag without `W/`.
    Tag(&'a [u8]),
    /// The Last-Modified date of a response without ETag.
    Date(&'a [u8]),
}

impl Strong<'_> {
    const fn text(&self) -> &[u8] {
        match self {
            Self::Tag(text) | Self::Date(text) => text,
        }
    }
}

impl Stored {
    /// Returns its strong validator. A response with a weak tag has none, whatever its date is (RFC 9110 Sec.
    /// 13.1.5).
    fn strong_validator(&self) -> Option<Strong<'_>> {
        if self.fields.has("etag") {
            return self.strong_tag().map(Strong::Tag);
        }
        let text = self.fields.first("last-modified")?;
        let modified_s = parse_date(text, self.date_s)?;
        (self.date_s >= modified_s.saturating_add(SETTLED_S)).then_some(Strong::Date(text))
    }

    /// Returns the stored form of a response whose transfer was cut after `held` bytes. `length` is the number of
    /// bytes that it should have had. `None` if the rest could never be added.
    #[must_use]
    pub fn cut(&self, held: u64, length: u64) -> Option<Self> {
        let good = self.status == 200 && (1..length).contains(&held) && self.strong_validator().is_some();
        let range = match self.extent {
            Extent::Whole => ContentRange { first: 0, last: held.checked_sub(1)?, total: Some(length) },
            Extent::Part(part) => {
                ContentRange { last: part.first.checked_add(held)?.checked_sub(1)?, ..part }
            }
        };
        good.then(|| self.with_range(range))
    }

    /// Whether both are parts of the same representation: one strong validator, the same selecting fields, one
    /// content coding.
    fn is_same_representation(&self, other: &Self) -> bool {
        let (own, others) = (self.strong_validator(), other.strong_validator());
        own.is_some() && own == others && self.is_same_variant(other)
    }
}

/// Combines two stored parts of one representation that touch or overlap. In the overlap, the bytes of the newer part
/// count. `None` if they cannot be combined.
pub fn combine(newer: &Stored, older: &Stored, rules: &Rules) -> Option<Stored> {
    let (Extent::Part(a), Extent::Part(b)) = (newer.extent, older.extent) else { return None };
    let totals_agree = a.total.zip(b.total).is_none_or(|(a, b)| a == b);
    let touch = a.first <= b.last.saturating_add(1) && b.first <= a.last.saturating_add(1);
    let range =
        ContentRange { first: a.first.min(b.first), last: a.last.max(b.last), total: a.total.or(b.total) };
    let belong = newer.is_same_representation(older) && totals_agree && touch;
    belong.then(|| joined(older, &newer.fields, (newer.request_time_s, newer.response_time_s), rules)).map(
        |stored| Stored { is_personal: newer.is_personal || older.is_personal, ..stored.with_range(range) },
    )
}

/// Updates a part with the fields of a newer part of the same representation.
fn joined(older: &Stored, newer: &Fields, times: (UnixSeconds, UnixSeconds), rules: &Rules) -> Stored {
    let mut stored = older.clone();
    update(&mut stored, newer, times, rules);
    stored
}

/// The bytes that stored parts lack to answer a request, if one range request can fetch them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The stored part that ends where the missing bytes begin.
    pub before: Option<usize>,
    /// The stored part that begins where the missing bytes end.
    pub behind: Option<usize>,
    /// First missing byte.
    pub first: u64,
    /// Last missing byte. `None`: all bytes up to the end.
    last: Option<u64>,
    /// Length of the whole representation, if it is known.
    total: Option<u64>,
}

/// Returns the bytes that are missing to answer a request. `stored` are all responses stored under its key. `None` if
/// the stored parts do not help, or if the original request should be sent unchanged.
pub fn missing(method: &Method, request: &Fields, stored: &[&Stored]) -> Option<Missing> {
    // The server answers a condition without content, and an authorised answer may be for its user alone.
    let others = ["if-none-match", "if-modified-since", "if-match", "if-unmodified-since", "authorization"];
    if *method != Method::Get || others.iter().any(|name| request.has(name)) {
        return None;
    }
    let mut newest: Vec<&Stored> = stored.iter().copied().filter(|one| one.is_selected_by(request)).collect();
    newest.sort_by_key(|one| std::cmp::Reverse((one.response_time_s, one.date_s)));
    newest.iter().find_map(|one| missing_of(one, request, stored))
}

/// Returns what is missing of the representation that a stored part belongs to.
fn missing_of(one: &Stored, request: &Fields, stored: &[&Stored]) -> Option<Missing> {
    let mut same = stored.iter().filter(|other| other.is_same_representation(one));
    let total = part_of(one)?.total.or_else(|| same.find_map(|other| part_of(other)?.total));
    let (first, last) = wanted(one, request, total)?;
    let parts = || {
        let same = stored.iter().enumerate().filter(|(_, other)| other.is_same_representation(one));
        let known = same.filter_map(|(index, other)| Some((index, part_of(other)?)));
        known.filter(move |(_, part)| part.total.zip(total).is_none_or(|(a, b)| a == b))
    };
    let has = |part: &ContentRange, byte: u64| (part.first..=part.last).contains(&byte);
    let before = parts().filter(|(_, part)| has(part, first)).max_by_key(|(_, part)| part.last);
    let behind =
        last.and_then(|last| parts().filter(|(_, part)| has(part, last)).min_by_key(|(_, part)| part.first));
    let begin = before.map_or(Some(first), |(_, part)| part.last.checked_add(1))?;
    let end = behind.map_or(Some(last), |(_, part)| part.first.checked_sub(1).map(Some))?;
    let is_some = before.is_some() || behind.is_some();
    let lacks = end.is_none_or(|end| begin <= end);
    let (before, behind) = (before.map(|(index, _)| index), behind.map(|(index, _)| index));
    (is_some && lacks).then_some(Missing { before, behind, first: begin, last: end, total })
}

fn part_of(stored: &Stored) -> Option<ContentRange> {
    match stored.extent {
        Extent::Part(part) => Some(part),
        Extent::Whole => None,
    }
}

/// Returns the first and last byte that a request wants of the representation of this part.
fn wanted(one: &Stored, request: &Fields, total: Option<u64>) -> Option<(u64, Option<u64>)> {
    match request.first("range") {
        None => Some((0, total.and_then(|total| total.checked_sub(1)))),
        Some(range) => {
            let ranges = Ranges::parse(range).filter(|_| if_range_holds(request, one))?;
            match (&ranges.0[..], &ranges.resolve(total?)[..]) {
                ([_], &[(first, last)]) => Some((first, Some(last))),
                _ => None,
            }
        }
    }
}

impl Missing {
    /// Returns the stored parts on both sides of the missing bytes.
    fn parts<'a>(&self, stored: &[&'a Stored]) -> impl Iterator<Item = &'a Stored> {
        [self.before, self.behind].into_iter().flatten().filter_map(|index| stored.get(index).copied())
    }

    /// Returns the number of bytes that the parts and the missing bytes have together, if it is known.
    pub fn length(&self, stored: &[&Stored]) -> Option<u64> {
        let part =
            |index: Option<usize>| index.and_then(|index| stored.get(index)).and_then(|one| part_of(one));
        let first = part(self.before).map_or(self.first, |part| part.first);
        let last = part(self.behind).map(|part| part.last).or(self.last)?;
        Some(last.saturating_sub(first).saturating_add(1))
    }

    /// Changes a request so that it asks for the missing bytes alone, on the condition that the representation has
    /// not changed.
    pub fn ask(&self, request: &mut Fields, stored: &[&Stored]) {
        request.remove("if-range");
        let end = self.last.filter(|last| Some(last.saturating_add(1)) != self.total);
        let end = end.map(|end| end.to_string()).unwrap_or_default();
        request.set("Range", format!("bytes={}-{end}", self.first));
        if let Some(validator) = self.parts(stored).next().and_then(Stored::strong_validator) {
            request.push("If-Range", validator.text());
        }
    }

    /// Combines the stored parts with the response to [`Self::ask`]. Returns the stored form and the range that it
    /// has. `None` if the response does not have exactly the missing bytes of the same representation, or must not be
    /// stored.
    pub fn joined(
        &self,
        (asked, stored): (&Fields, &[&Stored]),
        response: &Response,
        times: (UnixSeconds, UnixSeconds),
        rules: &Rules,
    ) -> Option<(Stored, ContentRange)> {
        let is_multipart = response
            .fields
            .first("content-type")
            .and_then(|kind| kind.get(..10))
            .is_some_and(|kind| kind.eq_ignore_ascii_case(b"multipart/"));
        let says_twice = response.fields.all("content-range").nth(1).is_some();
        // Only one range can be joined. Several parts, or two Content-Range fields, are ambiguous.
        if response.status != 206 || is_multipart || says_twice {
            return None;
        }
        let Ok(Extent::Part(range)) = may_store(&Method::Get, asked, response, rules) else { return None };
        let total = self.total.or(range.total)?;
        let is_asked = range.first == self.first
            && range.total.is_none_or(|said| said == total)
            && range.last == self.last.unwrap_or(total.checked_sub(1)?);
        let new = Stored::new(asked, response, Extent::Part(range), times, rules);
        let is_same = |one: &Stored| {
            let coding = new.fields.first("content-encoding");
            let is_same_coding = coding.is_none() || coding == one.fields.first("content-encoding");
            // A response to If-Range need not repeat Vary.
            let is_same_variant = !new.fields.has("vary") || new.is_same_variant(one);
            new.strong_validator() == one.strong_validator() && is_same_coding && is_same_variant
        };
        if !is_asked || !self.parts(stored).all(is_same) {
            return None;
        }
        let base = self.parts(stored).max_by_key(|one| (one.response_time_s, one.date_s))?;
        let part =
            |index: Option<usize>| index.and_then(|index| stored.get(index)).and_then(|one| part_of(one));
        let whole = ContentRange {
            first: part(self.before).map_or(range.first, |part| part.first),
            last: part(self.behind).map_or(range.last, |part| part.last),
            total: Some(total),
        };
        let is_personal = new.is_personal || self.parts(stored).any(|one| one.is_personal);
        let joined = joined(base, &response.fields, times, rules);
        Some((Stored { is_personal, ..joined.with_range(whole) }, whole))
    }
}
