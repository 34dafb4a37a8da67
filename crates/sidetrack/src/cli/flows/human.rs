//! Formats numbers and texts for people.

/// Formats bytes with about three digits: `999 B`, `1.2 kB`, `345 MB` (powers of 1000).
pub(in crate::cli) fn bytes(bytes: u64) -> String {
    if bytes < 1_000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut unit = "";
    for next in ["kB", "MB", "GB", "TB", "PB", "EB"] {
        value /= 1_000.0;
        unit = next;
        // A value that would be rounded up to 1000 gets the next unit.
        if value < 999.5 {
            break;
        }
    }
    if value < 99.95 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// Formats a time in at most two units: `0.3 ms`, `41 ms`, `1.5 s`, `3m12s`, `2h05m`, `4d03h`.
pub(in crate::cli) fn time(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0 if seconds < 0.001 => format!("{:.1} ms", seconds.max(0.0) * 1e3),
        0 if seconds < 0.9995 => format!("{:.0} ms", seconds * 1e3),
        0..60 => format!("{seconds:.1} s"),
        60..3_600 => format!("{}m{:02}s", whole / 60, whole % 60),
        3_600..86_400 => format!("{}h{:02}m", whole / 3_600, whole / 60 % 60),
        _ => format!("{}d{:02}h", whole / 86_400, whole / 3_600 % 24),
    }
}

/// Returns foreign text (process and user names) without characters that move the cursor or colour the terminal.
pub(in crate::cli) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() || is_format(c) { '\u{fffd}' } else { c }).collect()
}

/// Returns true for marks that are invisible or change the direction of text.
const fn is_format(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_people_read() {
        let sizes = [0, 999, 1_000, 12_345, 99_949, 99_950, 345_678, 999_499, 999_500, 1 << 40, u64::MAX];
        let texts = sizes.map(bytes).join(", ");
        assert_eq!(
            texts,
            "0 B, 999 B, 1.0 kB, 12.3 kB, 99.9 kB, 100 kB, 346 kB, 999 kB, 1.0 MB, 1.1 TB, 18.4 EB"
        );
    }

    #[test]
    fn times_people_read() {
        let times = [0.0, 0.0003, 0.041, 0.9994, 0.9996, 1.5, 59.94, 60.0, 192.0, 7_500.0, 356_400.0];
        let texts = times.map(time).join(", ");
        assert_eq!(texts, "0.0 ms, 0.3 ms, 41 ms, 999 ms, 1.0 s, 1.5 s, 59.9 s, 1m00s, 3m12s, 2h05m, 4d03h");
    }

    #[test]
    fn names_cannot_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\n\u{202e}c"), "a\u{fffd}[31mb\u{fffd}\u{fffd}c");
    }
}
