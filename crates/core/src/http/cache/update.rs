//! How a response to a validation or to HEAD changes stored responses (RFC 9111 Sec. 3.2, 4.3.4, 4.3.5).

use super::super::fields::Fields;
use super::super::message::Response;
use super::store::Stored;
use super::validate::weak_equal;
use super::{Rules, UnixSeconds};

/// The result of a 304.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refreshed {
    /// These stored responses are valid, and were updated.
    Updated(Vec<usize>),
    /// The 304 matches none of them: repeat the request without conditions.
    Unknown,
}

/// Handles a 304: updates the stored responses that it confirms.
pub fn refresh(
    stored: &mut [&mut Stored],
    response: &Response,
    times: (UnixSeconds, UnixSeconds),
    rules: &Rules,
) -> Refreshed {
    let about = subjects(stored, &response.fields);
    for index in &about {
        if let Some(one) = stored.get_mut(*index) {
            update(one, &response.fields, times, rules);
        }
    }
    if about.is_empty() { Refreshed::Unknown } else { Refreshed::Updated(about) }
}

/// Returns the indexes of the stored responses that a 304 confirms.
fn subjects(stored: &[&mut Stored], fields: &Fields) -> Vec<usize> {
    let newest = |indexes: Vec<usize>| {
        let date = |index: &usize| stored.get(*index).map(|one| (one.date_s, one.response_time_s));
        indexes.into_iter().max_by_key(date).into_iter().collect::<Vec<_>>()
    };
    let having = |good: &dyn Fn(&Stored) -> bool| -> Vec<usize> {
        stored.iter().enumerate().filter(|(_, one)| good(one)).map(|(index, _)| index).collect()
    };
    if let Some(tag) = fields.first("etag") {
        if tag.starts_with(b"\"") {
            let strong = having(&|one| one.fields.first("etag") == Some(tag));
            if !strong.is_empty() {
                return strong;
            }
        }
        let same = having(&|one| one.fields.first("etag").is_some_and(|own| weak_equal(own, tag)));
        return newest(same);
    }
    if let Some(modified) = fields.first("last-modified") {
        return newest(having(&|one| one.fields.first("last-modified") == Some(modified)));
    }
    // Without a validator, the 304 can only confirm the one stored response that was asked about.
    match stored {
        [_] => vec![0],
        _ => Vec::new(),
    }
}

/// Fields that describe how the stored bytes are encoded. A 304 cannot change them.
const OF_THE_BYTES: [&str; 3] = ["content-encoding", "content-length", "transfer-encoding"];

/// Updates a stored response with the fields of a newer one (RFC 9111 Sec. 3.2).
pub(super) fn update(stored: &mut Stored, fields: &Fields, times: (UnixSeconds, UnixSeconds), rules: &Rules) {
    let kept = |name: &[u8]| OF_THE_BYTES.iter().any(|other| name.eq_ignore_ascii_case(other.as_bytes()));
    let names: Vec<&[u8]> = fields.iter().map(|(name, _)| name).filter(|name| !kept(name)).collect();
    // The age is counted anew from this answer, so the old Age and Date go.
    let stale = [&b"age"[..], b"date"];
    stored.fields.retain(|name, _| !names.iter().chain(&stale).any(|other| name.eq_ignore_ascii_case(other)));
    for (name, value) in fields.iter().filter(|(name, _)| !kept(name)) {
        stored.fields.push(name, value);
    }
    (stored.request_time_s, stored.response_time_s) = times;
    stored.is_invalid = false;
    stored.settle(rules);
}

/// Handles a 200 to HEAD. Updates a stored response that agrees with it; marks one that does not agree as invalid.
/// `length` is the number of bytes of the stored content.
pub fn freshen_by_head(
    stored: &mut Stored,
    response: &Response,
    length: u64,
    times: (UnixSeconds, UnixSeconds),
    rules: &Rules,
) {
    let agrees = |name: &str| match (response.fields.first(name), stored.fields.first(name)) {
        (Some(new), Some(old)) => new == old,
        (None, _) => true,
        (Some(_), None) => false,
    };
    let said = response.fields.first("content-length");
    let same_length = said.is_none_or(|said| said == length.to_string().as_bytes());
    if agrees("etag") && agrees("last-modified") && same_length {
        update(stored, &response.fields, times, rules);
    } else {
        stored.is_invalid = true;
    }
}
