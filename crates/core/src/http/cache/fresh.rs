//! How long a response is fresh, and how old it is (RFC 9111 Sec. 4.2).

use super::super::fields::{Fields, trim};
use super::control::ResponseControl;
use super::date::parse_date;
use super::{MAX_SECONDS, Rules, UnixSeconds};

/// Statuses that may be kept without anything said about freshness (RFC 9110 Sec. 15.1).
pub const fn is_heuristic_status(status: u16) -> bool {
    matches!(status, 200 | 203 | 204 | 206 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501)
}

/// When the response was made: Date, or the time it came where that says nothing.
pub fn date_of(fields: &Fields, response_time_s: UnixSeconds) -> UnixSeconds {
    fields.first("date").and_then(|text| parse_date(text, response_time_s)).unwrap_or(response_time_s)
}

/// Freshness that the response states itself, seconds.
pub fn explicit_lifetime(fields: &Fields, control: &ResponseControl, date_s: UnixSeconds) -> Option<u64> {
    if let Some(seconds) = control.s_maxage_s.or(control.max_age_s) {
        return Some(seconds);
    }
    if control.is_targeted {
        return None;
    }
    let expires = fields.first("expires")?;
    // Something that is no date is in the past.
    Some(parse_date(expires, date_s).map_or(0, |at| at.saturating_sub(date_s)).min(MAX_SECONDS))
}

/// Freshness in seconds: stated, or a tenth of the time since the last change.
pub fn lifetime(
    status: u16,
    fields: &Fields,
    control: &ResponseControl,
    date_s: UnixSeconds,
    rules: &Rules,
) -> u64 {
    if let Some(seconds) = explicit_lifetime(fields, control, date_s) {
        return seconds;
    }
    // A response made for one user is not guessed about.
    let guessable = (is_heuristic_status(status) || control.public) && !fields.has("set-cookie");
    let modified = fields.first("last-modified").and_then(|text| parse_date(text, date_s));
    match modified.filter(|_| guessable) {
        Some(modified_s) => (date_s.saturating_sub(modified_s) / 10).min(rules.heuristic_max_s),
        None => 0,
    }
}

/// Age of the response when it came, seconds (RFC 9111 Sec. 4.2.3: corrected_initial_age).
pub fn initial_age(
    fields: &Fields,
    date_s: UnixSeconds,
    request_time_s: UnixSeconds,
    response_time_s: UnixSeconds,
) -> u64 {
    let apparent = response_time_s.saturating_sub(date_s);
    let stated = stated_age(fields).saturating_add(response_time_s.saturating_sub(request_time_s));
    apparent.max(stated).min(MAX_SECONDS)
}

/// The Age field: the first member of a list, nothing if that is no number.
fn stated_age(fields: &Fields) -> u64 {
    let Some(text) = fields.first("age") else { return 0 };
    let digits = trim(text.split(|byte| *byte == b',').next().unwrap_or_default());
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return 0;
    }
    let text = std::str::from_utf8(digits).unwrap_or_default();
    text.parse().unwrap_or(MAX_SECONDS).min(MAX_SECONDS)
}
