//! What may be stored (RFC 9111 Sec. 3), in which form, and what an unsafe request makes stale (Sec. 4.4).

use super::super::fields::Fields;
use super::super::message::{Method, Response};
use super::super::uri::Resource;
use super::control::{RequestControl, ResponseControl, Scope};
use super::fresh::{date_of, explicit_lifetime, initial_age, is_heuristic_status, lifetime};
use super::range::ContentRange;
use super::vary::{Selecting, matches, selecting};
use super::{MAX_SECONDS, Rules, UnixSeconds};

/// Why a response is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotStored {
    /// Only answers to GET are.
    Method,
    /// Its status says something about this request only, or is not understood.
    Status,
    /// The request says no-store.
    RequestNoStore,
    /// The response says no-store.
    NoStore,
    /// The response says private.
    Private,
    /// The request was authorised and the response does not say that others may have it.
    Authorization,
    /// It sets a cookie, and does not say that others may have it.
    SetCookie,
    /// Nothing says how long it is good for.
    NoFreshness,
    /// `Vary: *`: no request can be known to match.
    VaryStar,
    /// A part without a range that can be read, or several parts.
    BadRange,
}

/// How much of a representation is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    Whole,
    /// One range of it.
    Part(ContentRange),
}

/// A stored response without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its status; that of the whole representation (200) for a part.
    pub status: u16,
    /// Reason phrase.
    pub reason: Vec<u8>,
    /// Fields, without those of the connection, of the framing, and Age.
    pub fields: Fields,
    /// The request fields it was selected by.
    pub selecting: Selecting,
    /// How much of the representation it has.
    pub extent: Extent,
    /// When the request that brought it, or last confirmed it, was sent.
    pub request_time_s: UnixSeconds,
    /// When the response to that came.
    pub response_time_s: UnixSeconds,
    /// Something says that it may have changed: validate before use.
    pub is_invalid: bool,
    /// The request that brought it told the server who asks: by Cookie, by Authorization, or by its connection.
    pub is_personal: bool,
    pub(super) control: ResponseControl,
    pub(super) date_s: UnixSeconds,
    pub(super) lifetime_s: u64,
    pub(super) initial_age_s: u64,
    /// It says itself for how long it is fresh.
    pub(super) states_freshness: bool,
}

/// Whether the response to this request may be stored, and as what.
///
/// # Errors
/// The first reason against it.
pub fn may_store(
    method: &Method,
    request: &Fields,
    response: &Response,
    rules: &Rules,
) -> Result<Extent, NotStored> {
    let control = ResponseControl::of(&response.fields, rules);
    let status = response.status;
    if *method != Method::Get {
        return Err(NotStored::Method);
    }
    // 304 and 416 answer a condition or a range; 401, 407, 412, 417, 421, 425 and 426 this request alone.
    let for_all = !matches!(status, 100..=199 | 304 | 401 | 407 | 412 | 416 | 417 | 421 | 425 | 426);
    let understood = is_understood(status);
    if !for_all || (control.must_understand && !understood) {
        return Err(NotStored::Status);
    }
    if RequestControl::of(request).no_store {
        return Err(NotStored::RequestNoStore);
    }
    if control.no_store && !(control.must_understand && understood) {
        return Err(NotStored::NoStore);
    }
    if control.private == Scope::All {
        return Err(NotStored::Private);
    }
    if request.has("authorization") && !control.is_shareable() {
        return Err(NotStored::Authorization);
    }
    let keeps_cookie =
        control.public || control.private.names(b"set-cookie") || control.no_cache.names(b"set-cookie");
    if response.fields.has("set-cookie") && !keeps_cookie {
        return Err(NotStored::SetCookie);
    }
    let date_s = date_of(&response.fields, 0);
    let states = control.public || explicit_lifetime(&response.fields, &control, date_s).is_some();
    if !states && !is_heuristic_status(status) {
        return Err(NotStored::NoFreshness);
    }
    if response.fields.members("vary").any(|member| member == b"*") {
        return Err(NotStored::VaryStar);
    }
    if status != 206 {
        return Ok(Extent::Whole);
    }
    let range = response.fields.first("content-range").and_then(ContentRange::parse);
    range.map(Extent::Part).ok_or(NotStored::BadRange)
}

/// Whether the response to a POST is stored, as the answer to a later GET: it says for how long it is fresh, and that it
/// represents what was asked for (RFC 9110 Sec. 9.3.3). All that holds for responses to GET holds for it, too.
pub fn may_store_post(request: &Fields, resource: &Resource, response: &Response, rules: &Rules) -> bool {
    let control = ResponseControl::of(&response.fields, rules);
    let represents = response.fields.first("content-location").and_then(|to| resource.same_origin(to));
    matches!(response.status, 200 | 203)
        && explicit_lifetime(&response.fields, &control, date_of(&response.fields, 0)).is_some()
        && represents.as_ref() == Some(resource)
        && may_store(&Method::Get, request, response, rules) == Ok(Extent::Whole)
}

/// Whether the response to an authenticated request says that others may have it (RFC 9111 Sec. 3.5).
pub fn is_shareable(response: &Response, rules: &Rules) -> bool {
    ResponseControl::of(&response.fields, rules).is_shareable()
}

/// Statuses whose meaning for a cache we know and follow (RFC 9110 Sec. 15).
const fn is_understood(status: u16) -> bool {
    matches!(status,
        200..=206 | 300..=303 | 307 | 308 | 400 | 402..=406 | 408..=411 | 413..=415 | 422 | 500..=505)
}

impl Stored {
    /// The form in which a response is kept; ask [`may_store`] first. The head is the one that goes to the client: of
    /// one hop's fields it is free already.
    pub fn new(
        request: &Fields,
        response: &Response,
        extent: Extent,
        (request_time_s, response_time_s): (UnixSeconds, UnixSeconds),
        rules: &Rules,
    ) -> Self {
        let status = if matches!(extent, Extent::Part(_)) { 200 } else { response.status };
        let reason = if status == response.status { response.reason.clone() } else { b"OK".to_vec() };
        let selecting = selecting(&response.fields, request).unwrap_or_default();
        let head = (status, reason, response.fields.clone());
        let stored = Self::restore(head, selecting, extent, (request_time_s, response_time_s), rules);
        Self { is_personal: names_its_user(request), ..stored }
    }

    /// Works out what follows from fields and times, after either changed; also after reading a stored form back.
    pub fn settle(&mut self, rules: &Rules) {
        let control = ResponseControl::of(&self.fields, rules);
        self.date_s = date_of(&self.fields, self.response_time_s);
        self.lifetime_s = lifetime(self.status, &self.fields, &control, self.date_s, rules);
        self.states_freshness = explicit_lifetime(&self.fields, &control, self.date_s).is_some();
        self.initial_age_s =
            initial_age(&self.fields, self.date_s, self.request_time_s, self.response_time_s);
        let private = control.private.clone();
        if !control.public {
            // A 304 may bring one, for the client that asked.
            self.fields.remove("set-cookie");
        }
        // Of a part it is said by the extent; of anything else it has no meaning, and is a field like any other
        // (RFC 9110 Sec. 14.4, RFC 9111 Sec. 3.1).
        let of_a_part = if self.extent == Extent::Whole { "" } else { "content-range" };
        self.fields.retain(|name, _| {
            let framing = ["content-length", "transfer-encoding", "trailer", of_a_part];
            !framing.iter().any(|other| name.eq_ignore_ascii_case(other.as_bytes())) && !private.names(name)
        });
        if !self.fields.has("date") {
            self.fields.push("Date", super::format_date(self.date_s));
        }
        self.control = control;
    }

    /// Reads a form back that was written elsewhere.
    pub fn restore(
        (status, reason, fields): (u16, Vec<u8>, Fields),
        selecting: Selecting,
        extent: Extent,
        (request_time_s, response_time_s): (UnixSeconds, UnixSeconds),
        rules: &Rules,
    ) -> Self {
        let mut stored = Self {
            status,
            reason,
            fields,
            selecting,
            extent,
            request_time_s,
            response_time_s,
            is_invalid: false,
            is_personal: false,
            control: ResponseControl::default(),
            date_s: 0,
            lifetime_s: 0,
            initial_age_s: 0,
            states_freshness: false,
        };
        stored.settle(rules);
        stored
    }

    /// The same response with another range of its representation, which may be all of it.
    #[must_use]
    pub fn with_range(&self, range: ContentRange) -> Self {
        let extent = if range.is_whole() { Extent::Whole } else { Extent::Part(range) };
        Self { extent, ..self.clone() }
    }

    /// Its age now, seconds.
    pub fn age_s(&self, now_s: UnixSeconds) -> u64 {
        let resident = now_s.saturating_sub(self.response_time_s);
        self.initial_age_s.saturating_add(resident).min(MAX_SECONDS)
    }

    /// For how long it is fresh, counted from its origin, seconds.
    pub const fn lifetime_s(&self) -> u64 {
        self.lifetime_s
    }

    /// Freshness left, negative when stale, seconds.
    pub fn ttl_s(&self, now_s: UnixSeconds) -> i64 {
        let signed = |seconds| i64::try_from(seconds).unwrap_or(i64::MAX);
        signed(self.lifetime_s) - signed(self.age_s(now_s))
    }

    /// How long it may be of use after it became stale, seconds: as stale, or for its validators.
    pub fn usefulness_s(&self) -> u64 {
        let stale = self.control.stale_while_revalidate_s.max(self.control.stale_if_error_s);
        stale.unwrap_or(0)
    }

    /// Whether its directives forbid to serve it stale.
    pub fn must_be_fresh(&self) -> bool {
        self.control.forbids_stale()
    }

    /// Whether it may not be served stale, whatever the client or a setting would allow.
    pub fn forbids_stale(&self) -> bool {
        let is_of_one = self.is_personal || self.fields.has("set-cookie");
        self.control.forbids_stale() || (is_of_one && !self.states_freshness)
    }

    /// Whether this request may not have it stale, whatever the request or a setting would allow.
    pub(super) fn forbids_stale_to(&self, request: &Fields) -> bool {
        self.forbids_stale() || (!self.states_freshness && names_its_user(request))
    }

    /// Whether it is of any use after this moment: fresh for a while, or good to be validated or served stale.
    pub fn is_worth_keeping(&self) -> bool {
        self.lifetime_s > 0 || self.has_validator() || self.usefulness_s() > 0
    }

    /// Whether a request selects it.
    pub fn is_selected_by(&self, request: &Fields) -> bool {
        matches(&self.selecting, request)
    }

    /// Whether it is told apart from others by the same request fields with the same values.
    pub fn is_same_variant(&self, other: &Self) -> bool {
        self.selecting == other.selecting
    }

    /// Its entity tag, if that is a strong one.
    pub fn strong_tag(&self) -> Option<&[u8]> {
        self.fields.first("etag").filter(|tag| tag.starts_with(b"\""))
    }

    /// Whether the server can be asked if it is still good.
    pub fn has_validator(&self) -> bool {
        self.fields.has("etag") || self.fields.has("last-modified")
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> usize {
        let selecting: usize = self
            .selecting
            .iter()
            .map(|(name, value)| name.len() + value.as_ref().map_or(0, Vec::len) + 64)
            .sum();
        size_of::<Self>() + self.fields.memory_bytes() + self.reason.len() + selecting
    }
}

/// Whether a request tells the server who asks.
fn names_its_user(request: &Fields) -> bool {
    request.has("cookie") || request.has("authorization")
}

/// The resources whose stored responses a request of this method makes invalid once it had this answer: its own, and
/// those of the same origin that the answer names. None for a safe method or an error.
pub fn invalidated(method: &Method, resource: &Resource, response: &Response) -> Vec<Resource> {
    if method.is_safe() || *method == Method::Connect || !(200..400).contains(&response.status) {
        return Vec::new();
    }
    let named = ["location", "content-location"].into_iter();
    let named =
        named.filter_map(|name| response.fields.first(name)).filter_map(|to| resource.same_origin(to));
    std::iter::once(resource.clone()).chain(named).collect()
}
