//! Makes the answer to a client from a stored response (RFC 9111 Sec. 4; RFC 9110 Sec. 13, 14).

use super::super::fields::Fields;
use super::super::message::{Method, Response, Version, reason_phrase};
use super::range::{ContentRange, Ranges};
use super::store::{Extent, Stored};
use super::validate::{if_range_holds, is_not_modified};
use super::{Scope, UnixSeconds};

/// The content of an answer. Positions count in the whole representation, also if only a part is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// No content: HEAD, 304, 416.
    None,
    /// The whole stored content.
    All,
    /// The first and the last byte of one range.
    Range(u64, u64),
    /// Several ranges, each with the text before it, and then the text behind the last one.
    Multipart(Vec<(Vec<u8>, u64, u64)>, Vec<u8>),
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The head, with Age, and with Content-Length if it is known.
    pub head: Response,
    /// The content.
    pub body: Body,
}

/// Fields that a 304 does not repeat, because they describe content (RFC 9110 Sec. 15.4.5).
const NOT_IN_304: [&str; 5] =
    ["content-encoding", "content-language", "content-length", "content-range", "content-type"];

/// Makes the answer to a request from the stored response that `lookup` chose. `total` is the length of the
/// whole representation. It is `None` while the content still arrives and its length is unknown; then no ranges are
/// served. `boundary` separates several ranges, and must not occur in the content.
pub fn reply(
    stored: &Stored,
    (method, request): (&Method, &Fields),
    total: Option<u64>,
    boundary: &str,
    now_s: UnixSeconds,
) -> Reply {
    // Leave room for the fields that are added later: Age, Content-Length, Cache-Status and those of the connection.
    let mut fields = stored.fields.clone_with_room(192, 4);
    if let Scope::Fields(_) = &stored.control.no_cache {
        fields.retain(|name, _| !stored.control.no_cache.names(name));
    }
    fields.set_number("Age", stored.age_s(now_s));
    answer(stored, fields, (method, request), total, boundary)
}

/// Makes the answer to the request that fetched this response. The answer has all fields as they were received, also
/// those that are not stored or not reused, and no Age of this cache.
pub fn reply_first_hand(
    stored: &Stored,
    received: &Fields,
    request: (&Method, &Fields),
    total: Option<u64>,
    boundary: &str,
) -> Reply {
    answer(stored, received.clone(), request, total, boundary)
}

/// Applies the conditions and ranges of a request to a response with these fields.
fn answer(
    stored: &Stored,
    mut fields: Fields,
    (method, request): (&Method, &Fields),
    total: Option<u64>,
    boundary: &str,
) -> Reply {
    let is_success = (200..300).contains(&stored.status);
    if is_success && is_not_modified(request, stored, stored.response_time_s) {
        fields.retain(|name, _| !NOT_IN_304.iter().any(|other| name.eq_ignore_ascii_case(other.as_bytes())));
        return Reply { head: Response::new(304, fields), body: Body::None };
    }
    // Conditions come before ranges (RFC 9110 Sec. 13.2.2).
    let range = request
        .first("range")
        .filter(|_| *method == Method::Get && stored.status == 200 && if_range_holds(request, stored));
    let known = match stored.extent {
        Extent::Whole => total,
        Extent::Part(part) => part.total,
    };
    if let Some(ranges) = range.and_then(Ranges::parse)
        && let Some(reply) = ranged(stored, &ranges, known, &fields, boundary)
    {
        return reply;
    }
    if let Some(total) = known {
        fields.set_number("Content-Length", total);
    }
    let (status, reason) = (stored.status, stored.reason.clone());
    let head = Response { status, reason, version: Version::Http11, fields };
    Reply { head, body: if *method == Method::Head { Body::None } else { Body::All } }
}

/// Makes a 206 or a 416. `None` if the range is to be ignored.
fn ranged(
    stored: &Stored,
    ranges: &Ranges,
    total: Option<u64>,
    fields: &Fields,
    boundary: &str,
) -> Option<Reply> {
    let mut fields = fields.clone();
    let resolved = match (total, stored.extent) {
        (Some(total), _) => ranges.resolve(total),
        // Of a part of unknown total length, only ranges with both ends can be served.
        (None, Extent::Part(part)) => ranges.resolve(part.last.saturating_add(1)),
        (None, Extent::Whole) => return None,
    };
    let part = |(first, last)| ContentRange { first, last, total };
    match resolved[..] {
        [] => {
            fields.retain(|name, _| {
                !NOT_IN_304.iter().any(|other| name.eq_ignore_ascii_case(other.as_bytes()))
            });
            fields.set("Content-Range", format!("bytes */{}", total?));
            fields.set("Content-Length", "0");
            Some(Reply { head: Response::new(416, fields), body: Body::None })
        }
        [(first, last)] => {
            let range = part((first, last));
            fields.set("Content-Range", range.to_string());
            fields.set("Content-Length", range.length().to_string());
            let head = Response { reason: reason_phrase(206).into(), ..Response::new(206, fields) };
            Some(Reply { head, body: Body::Range(first, last) })
        }
        ref many => {
            let kind = fields.first("content-type").map(<[u8]>::to_vec);
            let mut parts = Vec::new();
            let mut length = 0;
            for (first, last) in many.iter().copied() {
                let lead = if parts.is_empty() { "" } else { "\r\n" };
                let mut text = format!("{lead}--{boundary}\r\n").into_bytes();
                if let Some(kind) = &kind {
                    super::super::fields::write_field(&mut text, b"Content-Type", kind);
                }
                let range = part((first, last));
                text.extend_from_slice(format!("Content-Range: {range}\r\n\r\n").as_bytes());
                length += text.len() as u64 + range.length();
                parts.push((text, first, last));
            }
            let end = format!("\r\n--{boundary}--\r\n").into_bytes();
            // Each part has its own Content-Range.
            fields.remove("content-range");
            fields.set("Content-Type", format!("multipart/byteranges; boundary={boundary}"));
            fields.set("Content-Length", (length + end.len() as u64).to_string());
            Some(Reply { head: Response::new(206, fields), body: Body::Multipart(parts, end) })
        }
    }
}
