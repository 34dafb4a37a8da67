//! Cache directives of requests and responses (RFC 9111 Sec. 5.2, RFC 5861, RFC 8246, RFC 9213).

use super::super::fields::{Fields, is_token, members};
use super::dictionary::{self, Value};
use super::{MAX_SECONDS, Rules};

/// What a directive covers that may have a list of field names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The directive is not there.
    #[default]
    Nothing,
    /// The whole response.
    All,
    /// These fields, in lower case.
    Fields(Vec<Vec<u8>>),
}

/// Directives of a response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseControl {
    /// The response must not be stored.
    pub no_store: bool,
    /// The response may be reused only after validation.
    pub no_cache: Scope,
    /// Shared caches must not store it.
    pub private: Scope,
    /// The response may be stored although another rule forbids it.
    pub public: bool,
    /// A stale response must not be served.
    pub must_revalidate: bool,
    /// The same, for shared caches only.
    pub proxy_revalidate: bool,
    /// The response may be stored only if the cache understands its status; no-store is then ignored.
    pub must_understand: bool,
    /// Freshness lifetime, seconds. A value that is not a number counts as 0.
    pub max_age_s: Option<u64>,
    /// The same, for shared caches only.
    pub s_maxage_s: Option<u64>,
    /// The response may be served stale for this time past its freshness while a new one is fetched, seconds.
    pub stale_while_revalidate_s: Option<u64>,
    /// The response may be served stale instead of an error for this time past its freshness, seconds.
    pub stale_if_error_s: Option<u64>,
    /// The directives came in a targeted field, so Expires is ignored.
    pub is_targeted: bool,
}

/// Directives of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestControl {
    /// The cache must validate before it reuses a response.
    pub no_cache: bool,
    /// Nothing of this exchange may be stored.
    pub no_store: bool,
    /// The client wants a stored response or an error (504).
    pub only_if_cached: bool,
    /// The greatest age that the client accepts, seconds.
    pub max_age_s: Option<u64>,
    /// The client wants a response that stays fresh for at least this time, seconds.
    pub min_fresh_s: Option<u64>,
    /// The client accepts a response that is stale for at most this time, seconds. [`MAX_SECONDS`] means any time.
    pub max_stale_s: Option<u64>,
    /// The client accepts a stale response instead of an error for this time past its freshness, seconds.
    pub stale_if_error_s: Option<u64>,
}

impl ResponseControl {
    /// Reads the directives that apply to a response: those of the first targeted field that is present and valid,
    /// otherwise those of Cache-Control.
    pub fn of(fields: &Fields, rules: &Rules) -> Self {
        rules.targets.iter().find_map(|target| Self::targeted(fields, target)).unwrap_or_else(|| {
            let mut control = Self::default();
            for member in fields.members("cache-control") {
                let (name, value) = split(member);
                control.take(&name, value);
            }
            control
        })
    }

    fn take(&mut self, name: &[u8], value: Option<&[u8]>) {
        match name {
            b"no-store" => self.no_store = true,
            b"no-cache" => self.no_cache.add(value),
            b"private" => self.private.add(value),
            b"public" => self.public = true,
            b"must-revalidate" => self.must_revalidate = true,
            b"proxy-revalidate" => self.proxy_revalidate = true,
            b"must-understand" => self.must_understand = true,
            b"max-age" => first(&mut self.max_age_s, seconds(value).unwrap_or(0)),
            b"s-maxage" => first(&mut self.s_maxage_s, seconds(value).unwrap_or(0)),
            b"stale-while-revalidate" => {
                first(&mut self.stale_while_revalidate_s, seconds(value).unwrap_or(0));
            }
            b"stale-if-error" => first(&mut self.stale_if_error_s, seconds(value).unwrap_or(0)),
            _ => {}
        }
    }

    /// Reads a targeted field, a Dictionary (RFC 9213 Sec. 2.1). `None` if it is absent, empty, or not valid.
    fn targeted(fields: &Fields, name: &str) -> Option<Self> {
        let text = fields.joined(name)?;
        let members = dictionary::parse(&text).filter(|members| !members.is_empty())?;
        let mut control = Self { is_targeted: true, ..Self::default() };
        for (name, value) in members {
            let seconds = match value {
                Value::Integer(seconds) => Some(u64::try_from(seconds).unwrap_or(0).min(MAX_SECONDS)),
                _ => None,
            };
            let is_set = value != Value::Boolean(false);
            match name {
                // A directive whose value is not a number is ignored (RFC 9213 Sec. 2.1).
                "max-age" => control.max_age_s = seconds,
                "s-maxage" => control.s_maxage_s = seconds,
                "stale-while-revalidate" => control.stale_while_revalidate_s = seconds,
                "stale-if-error" => control.stale_if_error_s = seconds,
                name if is_set => control.take(name.as_bytes(), None),
                _ => {}
            }
        }
        Some(control)
    }

    /// Whether the response to an authenticated request may be stored (RFC 9111 Sec. 3.5).
    pub const fn is_shareable(&self) -> bool {
        self.public || self.s_maxage_s.is_some() || self.must_revalidate
    }

    /// Whether the response must not be served stale, even if another rule would allow it.
    pub fn forbids_stale(&self) -> bool {
        self.must_revalidate
            || self.proxy_revalidate
            || self.s_maxage_s.is_some()
            || self.no_cache == Scope::All
    }
}

impl RequestControl {
    /// Reads the directives of a request. `Pragma: no-cache` counts if there is no Cache-Control (RFC 9111 Sec. 5.4).
    pub fn of(fields: &Fields) -> Self {
        let mut control = Self::default();
        if !fields.has("cache-control") {
            control.no_cache = fields.has_member("pragma", "no-cache");
            return control;
        }
        for member in fields.members("cache-control") {
            let (name, value) = split(member);
            match name.as_slice() {
                b"no-cache" => control.no_cache = true,
                b"no-store" => control.no_store = true,
                b"only-if-cached" => control.only_if_cached = true,
                b"max-age" => first(&mut control.max_age_s, seconds(value).unwrap_or(0)),
                b"min-fresh" => first(&mut control.min_fresh_s, seconds(value).unwrap_or(MAX_SECONDS)),
                b"max-stale" => {
                    let any = value.is_none().then_some(MAX_SECONDS);
                    first(&mut control.max_stale_s, any.or(seconds(value)).unwrap_or(0));
                }
                b"stale-if-error" => first(&mut control.stale_if_error_s, seconds(value).unwrap_or(0)),
                _ => {}
            }
        }
        control
    }
}

impl Scope {
    fn add(&mut self, value: Option<&[u8]>) {
        let names = value.map(|value| {
            let list = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value);
            members(list).map(<[u8]>::to_ascii_lowercase).collect::<Vec<_>>()
        });
        match (names.filter(|names| !names.is_empty() && names.iter().all(|name| is_token(name))), &mut *self)
        {
            (_, Self::All) => {}
            (Some(names), Self::Fields(held)) => held.extend(names),
            (Some(names), Self::Nothing) => *self = Self::Fields(names),
            // Without a readable list of names, the directive covers the whole response.
            (None, _) => *self = Self::All,
        }
    }

    /// Whether the directive names this field.
    pub fn names(&self, field: &[u8]) -> bool {
        matches!(self, Self::Fields(names) if names.iter().any(|name| name.eq_ignore_ascii_case(field)))
    }
}

/// Splits a directive into its name in lower case and its argument. If there is white space around `=`, the directive
/// keeps its name, but its argument counts as invalid.
fn split(member: &[u8]) -> (Vec<u8>, Option<&[u8]>) {
    match member.iter().position(|byte| *byte == b'=') {
        Some(at) => {
            let (name, value) = member.split_at(at);
            (
                name.trim_ascii_end().to_ascii_lowercase(),
                Some(if name == name.trim_ascii_end() { value.get(1..).unwrap_or_default() } else { b"?" }),
            )
        }
        None => (member.to_ascii_lowercase(), None),
    }
}

/// Reads delta-seconds, with or without quotes (RFC 9111 Sec. 5.2 and 1.2.2).
fn seconds(value: Option<&[u8]>) -> Option<u64> {
    let value = value?;
    let digits = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value);
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let text = std::str::from_utf8(digits).ok()?;
    // A number that is too long counts as the largest one.
    Some(text.parse().unwrap_or(MAX_SECONDS).min(MAX_SECONDS))
}

/// Sets a value once: if a directive is repeated, the first value counts (RFC 9111 Sec. 4.2.1).
fn first(slot: &mut Option<u64>, value: u64) {
    slot.get_or_insert(value);
}
