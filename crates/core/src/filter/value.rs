//! Values: numbers, sizes and times as people write them.

use std::ops::RangeInclusive;

/// Reads `443` or `8000-8100`.
pub(super) fn number_or_range(text: &str) -> Option<RangeInclusive<u64>> {
    match text.split_once('-') {
        Some((from, to)) => {
            let (from, to) = (from.parse().ok()?, to.parse().ok()?);
            (from <= to).then_some(from..=to)
        }
        None => text.parse().ok().map(|number| number..=number),
    }
}

const SIZES: [(&str, u64); 13] = [
    ("B", 1),
    ("k", 1_000),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("K", 1 << 10),
    ("M", 1 << 20),
];

/// Reads a size in bytes: `1500`, `64KiB`, `1.5MB`.
pub(super) fn size(text: &str) -> Option<u64> {
    let (number, unit) = split_unit(text);
    if unit.is_empty() { number.parse().ok() } else { scaled(number, unit, &SIZES) }
}

const TIMES: [(&str, u64); 8] = [
    ("us", 1),
    ("ms", 1_000),
    ("s", 1_000_000),
    ("m", 60_000_000),
    ("min", 60_000_000),
    ("h", 3_600_000_000),
    ("d", 86_400_000_000),
    ("w", 604_800_000_000),
];

/// Reads a time in microseconds: `250ms`, `1.5s`, `5m`. The unit is required.
pub(super) fn time_us(text: &str) -> Option<u64> {
    let (number, unit) = split_unit(text);
    scaled(number, unit, &TIMES)
}

fn split_unit(text: &str) -> (&str, &str) {
    let digits = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    text.split_at(digits)
}

/// Multiplies a decimal number by its unit, in exact integer arithmetic, so that `1.1kB` is 1100 and not 1099.
fn scaled(number: &str, unit: &str, units: &[(&str, u64)]) -> Option<u64> {
    let scale = units.iter().find(|(name, _)| *name == unit)?.1;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if fraction.is_empty() || fraction.len() > 9 {
        return None;
    }
    let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale)
        / 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let whole = u128::from(whole.parse::<u64>().ok()?) * u128::from(scale);
    u64::try_from(whole + part).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times() {
        assert_eq!(size("0"), Some(0));
        assert_eq!(size("1MiB"), Some(1 << 20));
        assert_eq!(size("1.1kB"), Some(1_100));
        assert_eq!(size("20000000TB"), None, "more than 64 bits");
        assert_eq!(time_us("10s"), Some(10_000_000));
        assert_eq!(time_us("1.5m"), Some(90_000_000));
        for bad in ["", "s", "10", "1.s", ".5s", "1.2.3s", "-1s", "1x", "1.0000000001s"] {
            assert_eq!(time_us(bad), None, "{bad}");
        }
    }
}
