//! Values that appear in records as text.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A wall-clock time with milliseconds: `2026-11-21T23:07:19.123Z` (RFC 3339, UTC).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(SystemTime);

impl Timestamp {
    /// The time as a standard library value.
    pub const fn system_time(self) -> SystemTime {
        self.0
    }
}

impl From<SystemTime> for Timestamp {
    /// Cuts to milliseconds. A time before 1970 or after 9999, which RFC 3339 cannot express, becomes 1970.
    fn from(time: SystemTime) -> Self {
        const YEAR_10000: Duration = Duration::from_secs(253_402_300_800);
        let since =
            time.duration_since(UNIX_EPOCH).ok().filter(|since| *since < YEAR_10000).unwrap_or_default();
        Self(UNIX_EPOCH + Duration::new(since.as_secs(), since.subsec_millis() * 1_000_000))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_rfc3339_millis(self.0).fmt(f)
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_rfc3339(&text).map(Self::from).map_err(de::Error::custom)
    }
}

/// Serialises `Option<Cow<T>>` as the text of `T`, or null.
pub(super) mod option {
    use super::{Deserialize, Deserializer, FromStr, Serializer, de, fmt};
    use std::borrow::Cow;

    pub(in crate::record) fn serialize<T, S>(
        value: &Option<Cow<'_, T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error>
    where
        T: fmt::Display + Clone,
        S: Serializer,
    {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }

    pub(in crate::record) fn deserialize<'de, 'a, T, D>(
        deserializer: D,
    ) -> Result<Option<Cow<'a, T>>, D::Error>
    where
        T: FromStr<Err: fmt::Display> + Clone,
        D: Deserializer<'de>,
    {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map(Cow::Owned).map_err(de::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_rfc_3339() {
        let moment = UNIX_EPOCH + Duration::from_micros(1_795_302_439_123_999);
        assert_eq!(Timestamp::from(moment).to_string(), "2026-11-21T23:07:19.123Z");
        let leap = UNIX_EPOCH + Duration::from_secs(1_709_164_800);
        assert_eq!(Timestamp::from(leap).to_string(), "2024-02-29T00:00:00.000Z");
    }

    #[test]
    fn a_clock_gone_mad_panics_nobody() {
        let before = UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(Timestamp::from(before).to_string(), "1970-01-01T00:00:00.000Z");
        let after = UNIX_EPOCH + Duration::from_secs(1 << 50);
        assert_eq!(Timestamp::from(after).to_string(), "1970-01-01T00:00:00.000Z");
    }
}
