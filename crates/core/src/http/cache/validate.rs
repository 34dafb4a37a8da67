//! Validation: conditional requests to the server, and conditions in requests of clients (RFC 9110 Sec. 13, RFC 9111
//! Sec. 4.3).

use super::super::fields::Fields;
use super::UnixSeconds;
use super::date::parse_date;
use super::store::Stored;

/// The condition fields of a request.
pub(super) const CONDITIONS: [&str; 5] =
    ["if-none-match", "if-modified-since", "if-range", "if-match", "if-unmodified-since"];

/// Makes a request conditional on `best`, with the tags of all responses stored under its key. The client's own
/// conditions and range are removed: this cache applies them to the answer of the server.
pub fn conditions(request: &mut Fields, best: &Stored, all: &[&Stored]) {
    request.retain(|name, _| {
        let ours =
            CONDITIONS.iter().chain(&["range"]).any(|other| name.eq_ignore_ascii_case(other.as_bytes()));
        !ours
    });
    let mut tags: Vec<&[u8]> = Vec::new();
    for tag in std::iter::once(best).chain(all.iter().copied()).filter_map(|one| one.fields.first("etag")) {
        if !tags.contains(&tag) {
            tags.push(tag);
        }
    }
    if !tags.is_empty() {
        request.push("If-None-Match", tags.join(&b", "[..]));
    }
    if let Some(modified) = best.fields.first("last-modified") {
        request.push("If-Modified-Since", modified);
    }
}

/// Whether a client's condition shows that it already has this response: 304 (RFC 9110 Sec. 13.2.2).
pub(super) fn is_not_modified(request: &Fields, stored: &Stored, now_s: UnixSeconds) -> bool {
    if request.has("if-none-match") {
        let own = stored.fields.first("etag");
        return request
            .members("if-none-match")
            .any(|tag| tag == b"*" || own.is_some_and(|own| weak_equal(tag, own)));
    }
    // A repeated If-Modified-Since is ignored (RFC 9110 Sec. 13.1.3).
    let mut lines = request.all("if-modified-since");
    let (Some(since), None) = (lines.next(), lines.next()) else { return false };
    let Some(since_s) = parse_date(since, now_s) else { return false };
    let modified = stored.fields.first("last-modified");
    // Without a Last-Modified date, use the time when the response was made (RFC 9111 Sec. 4.3.2).
    modified.and_then(|text| parse_date(text, now_s)).unwrap_or(stored.date_s) <= since_s
}

/// Compares two entity tags weakly (RFC 9110 Sec. 8.8.3.2).
pub(super) fn weak_equal(one: &[u8], other: &[u8]) -> bool {
    fn opaque(tag: &[u8]) -> &[u8] {
        tag.strip_prefix(b"W/").unwrap_or(tag)
    }
    opaque(one) == opaque(other)
}

/// Whether the Range of the request applies to this response: there is no If-Range, or it names this representation
/// by a strong validator (RFC 9110 Sec. 13.1.5).
pub(super) fn if_range_holds(request: &Fields, stored: &Stored) -> bool {
    match request.first("if-range") {
        None => true,
        Some(tag) if tag.starts_with(b"\"") => stored.strong_tag() == Some(tag),
        Some(tag) if tag.starts_with(b"W/") => false,
        Some(date) => stored.fields.first("last-modified") == Some(date),
    }
}
