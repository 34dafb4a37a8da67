//! HTTP dates (RFC 9110 Sec. 5.6.7).

use super::UnixSeconds;

const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAY_S: u64 = 86_400;

/// Reads a date in the preferred form or in one of the two obsolete forms. `None` if it is not a date, or before
/// 1970.
///
/// The syntax is strict, down to single spaces (RFC 9110 Sec. 5.6.7). A date with another time zone or extra spaces
/// is invalid, and the caller treats it as in the past. Only the case of letters is ignored (RFC 9111 Sec. 4.2). A
/// two-digit year is the one nearest to `now_s`, at most 50 years ahead.
pub fn parse_date(text: &[u8], now_s: UnixSeconds) -> Option<UnixSeconds> {
    let text = std::str::from_utf8(text).ok()?;
    match text.split_once(", ") {
        // Sunday, 06-Nov-94 08:49:37 GMT
        Some((day_name, rest)) if rest.as_bytes().get(2) == Some(&b'-') => {
            let [date, time, zone] = words(rest, ' ')?;
            let [day, month, year] = words(date, '-')?;
            let year = number(year, 2).filter(|_| is_day(day_name) && is_gmt(zone))?;
            let (this, _, _) = civil(now_s / DAY_S);
            let century = this - this % 100;
            let year = if century + year > this + 50 { century + year - 100 } else { century + year };
            seconds(year, month, number(day, 2)?, time)
        }
        // Sun, 06 Nov 1994 08:49:37 GMT
        Some((day_name, rest)) => {
            let [day, month, year, time, zone] = words(rest, ' ')?;
            let year = number(year, 4).filter(|_| is_day(day_name) && is_gmt(zone))?;
            seconds(year, month, number(day, 2)?, time)
        }
        // Sun Nov  6 08:49:37 1994
        None => {
            let (day_name, rest) = text.split_once(' ').filter(|(name, _)| is_day(name))?;
            let (month, rest) = rest.split_once(' ').filter(|_| day_name.len() == 3)?;
            // A day of one digit follows a second space.
            let (rest, digits) = rest.strip_prefix(' ').map_or((rest, 2), |rest| (rest, 1));
            let [day, time, year] = words(rest, ' ')?;
            seconds(number(year, 4)?, month, number(day, digits)?, time)
        }
    }
}

/// Splits a text into exactly `N` words. `None` if the number of words differs.
fn words<const N: usize>(text: &str, separator: char) -> Option<[&str; N]> {
    let mut split = text.split(separator);
    let mut found = [""; N];
    for place in &mut found {
        *place = split.next()?;
    }
    split.next().is_none().then_some(found)
}

/// Whether this is the short or long name of any day. The name need not match the date.
fn is_day(name: &str) -> bool {
    let short = name.get(..3).unwrap_or_default();
    let is_known = DAYS.iter().any(|day| day.eq_ignore_ascii_case(short));
    is_known && name.len() <= "Wednesday".len() && name.bytes().all(|byte| byte.is_ascii_alphabetic())
}

fn is_gmt(zone: &str) -> bool {
    zone.eq_ignore_ascii_case("GMT")
}

fn number(text: &str, digits: usize) -> Option<u64> {
    let good = text.len() == digits && digits > 0 && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| good)
}

fn seconds(year: u64, month: &str, day: u64, time: &str) -> Option<UnixSeconds> {
    let month = MONTHS.iter().position(|name| name.eq_ignore_ascii_case(month))? as u64 + 1;
    let mut parts = time.split(':');
    let (hour, minute, second) =
        (number(parts.next()?, 2)?, number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let good = parts.next().is_none() && hour < 24 && minute < 60 && second <= 60 && (1..=31).contains(&day);
    let days = days(year, month, day).filter(|_| good)?;
    Some(days * DAY_S + hour * 3600 + minute * 60 + second)
}

/// Returns the days from 1970-01-01 to a date of the Gregorian calendar. `None` before 1970.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    if year < 1970 {
        return None;
    }
    // Years begin in March here, so that the leap day is the last day of a year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let since_0 = year * 365 + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    since_0.checked_sub(719_468)
}

/// Returns year, month and day of a number of days since 1970-01-01.
const fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, in_era) = (days / 146_097, days % 146_097);
    let year = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year + year / 4 - year / 100);
    let month = (5 * in_year + 2) / 153;
    let day = in_year - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    (year + era * 400, month, day)
}

/// Writes a date in the preferred form.
pub fn format_date(at_s: UnixSeconds) -> String {
    // The format has four digits for the year, so limit it to 9999.
    let at_s = at_s.min(253_402_300_799);
    let (days, rest) = (at_s / DAY_S, at_s % DAY_S);
    let (year, month, day) = civil(days);
    let name = |list: &[&'static str], index: u64| {
        usize::try_from(index).ok().and_then(|index| list.get(index)).copied().unwrap_or_default()
    };
    let (day_name, month) = (name(&DAYS, days % 7), name(&MONTHS, month - 1));
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{day_name}, {day:02} {month} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_forms_are_one_moment() {
        for text in
            ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
        {
            let other_case = [text.to_ascii_lowercase(), text.to_ascii_uppercase()];
            for text in other_case.iter().map(String::as_str).chain([text]) {
                assert_eq!(parse_date(text.as_bytes(), 1_700_000_000), Some(784_111_777), "{text}");
            }
        }
        assert_eq!(format_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(format_date(951_782_400), "Tue, 29 Feb 2000 00:00:00 GMT");
        for bad in [
            "0",
            "-1",
            "",
            "Sun, 06 Nov 1994 08:49:37 PST",
            "Sun, 06 Nov 1994 8:49:37 GMT",
            "Sun, 06 Nov 1960 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 06 Nov 1994 08:49:37 EST",
            "Sun, 06 Nov 1994 08:49:37 +0000",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun,  06 Nov 1994 08:49:37 GMT",
            "Sun, 06  Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994  08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37  GMT",
            "Sun, 06 Nov 1994 08:49:37 GMT GMT",
            "Sun,06 Nov 1994 08:49:37 GMT",
            "Sun 06 Nov 1994 08:49:37 GMT",
            "Sun, 6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 94 08:49:37 GMT",
            "Sun, 06-Nov-1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 UTC",
            "Sunday, 06-Nov-94  08:49:37 GMT",
            "Sunday, 06 - Nov - 94 08:49:37 GMT",
            "Sun Nov 6 08:49:37 1994",
            "Sun Nov   6 08:49:37 1994",
            "Sun Nov  06 08:49:37 1994",
            "Sun Nov  6 08:49:37  1994",
            "Sun Nov  6 08:49:37 1994 GMT",
            "Sun  Nov  6 08:49:37 1994",
            "Sunday Nov  6 08:49:37 1994",
            "Xxx, 06 Nov 1994 08:49:37 GMT",
            ", 06 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parse_date(bad.as_bytes(), 1_700_000_000), None, "{bad}");
        }
    }

    #[test]
    fn every_day_comes_back() {
        for day in (0..80_000).step_by(13) {
            let at = day * DAY_S + day % DAY_S;
            assert_eq!(parse_date(format_date(at).as_bytes(), at), Some(at));
        }
    }
}
