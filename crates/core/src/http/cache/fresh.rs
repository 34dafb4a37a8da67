//! Freshness lifetime and age of a response (RFC 9111 Sec. 4.2).

use super::super::fields::{Fields, trim};
use super::control::ResponseControl;
use super::date::parse_date;
use super::{MAX_SECONDS, Rules, UnixSeconds};

/// Whether a response with this status may be stored without explicit freshness (RFC 9110 Sec. 15.1).
pub(super) const fn is_heuristic_status(status: u16) -> bool {
    matches!(status, 200 | 203 | 204 | 206 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501)
}

/// Returns when the response was made: its Date, or the time it arrived if Date is missing or invalid.
pub(super) fn date_of(fields: &Fields, response_time_s: UnixSeconds) -> UnixSeconds {
    fields.first("date").and_then(|text| parse_date(text, response_time_s)).unwrap_or(response_time_s)
}

/// Returns the freshness lifetime that the response states, seconds.
pub(super) fn explicit_lifetime(
    fields: &Fields,
    control: &ResponseControl,
    date_s: UnixSeconds,
) -> Option<u64> {
    if let Some(seconds) = control.s_maxage_s.or(control.max_age_s) {
        return Some(seconds);
    }
    if control.is_targeted {
        return None;
    }
    let expires = fields.first("expires")?;
    // An invalid date counts as in the past (RFC 9111 Sec. 5.3).
    Some(parse_date(expires, date_s).map_or(0, |at| at.saturating_sub(date_s)).min(MAX_SECONDS))
}

/// Returns the freshness lifetime in seconds: the stated one, or a tenth of the time since the last change.
pub(super) fn lifetime(
    status: u16,
    fields: &Fields,
    control: &ResponseControl,
    date_s: UnixSeconds,
    rules: &Rules,
) -> u64 {
    if let Some(seconds) = explicit_lifetime(fields, control, date_s) {
        return seconds;
    }
    // A response that sets a cookie is probably made for one user: do not guess a lifetime.
    let guessable = (is_heuristic_status(status) || control.public) && !fields.has("set-cookie");
    let modified = fields.first("last-modified").and_then(|text| parse_date(text, date_s));
    match modified.filter(|_| guessable) {
        Some(modified_s) => (date_s.saturating_sub(modified_s) / 10).min(rules.heuristic_max_s),
        None => 0,
    }
}

/// Returns the age of the response when it arrived, seconds (RFC 9111 Sec. 4.2.3: corrected_initial_age).
pub(super) fn initial_age(
    fields: &Fields,
    date_s: UnixSeconds,
    request_time_s: UnixSeconds,
    response_time_s: UnixSeconds,
) -> u64 {
    let apparent = response_time_s.saturating_sub(date_s);
    let stated = stated_age(fields).saturating_add(response_time_s.saturating_sub(request_time_s));
    apparent.max(stated).min(MAX_SECONDS)
}

/// Reads the Age field: the first member of a list. 0 if that is not a number.
fn stated_age(fields: &Fields) -> u64 {
    let Some(text) = fields.first("age") else { return 0 };
    let digits = trim(text.split(|byte| *byte == b',').next().unwrap_or_default());
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return 0;
    }
    let text = std::str::from_utf8(digits).unwrap_or_default();
    text.parse().unwrap_or(MAX_SECONDS).min(MAX_SECONDS)
}
