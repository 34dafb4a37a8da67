//! Which responses may be stored (RFC 9111 Sec. 3), their stored form, and what an unsafe request makes invalid (Sec.
//! 4.4).

use super::super::fields::Fields;
use super::super::message::{Method, Response};
use super::super::uri::Resource;
use super::control::{RequestControl, ResponseControl, Scope};
use super::fresh::{date_of, explicit_lifetime, initial_age, is_heuristic_status, lifetime};
use super::range::ContentRange;
use super::vary::{Selecting, matches, selecting};
use super::{MAX_SECONDS, Rules, UnixSeconds};

/// A clock that is adjusted goes back by at most this, seconds. It makes no response younger by more than that.
const ADJUSTED_S: u64 = 5;

/// Why a response is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotStored {
    /// Only answers to GET are stored.
    Method,
    /// Its status applies to this request only, or is not understood.
    Status,
    /// The request says no-store.
    RequestNoStore,
    /// The response says no-store.
    NoStore,
    /// The response says private.
    Private,
    /// The request had Authorization, and the response does not allow shared caches to store it.
    Authorization,
    /// The response sets a cookie, and does not allow shared caches to store it.
    SetCookie,
    /// Nothing states how long the response is fresh.
    NoFreshness,
    /// `Vary: *`: another request can never match.
    VaryStar,
    /// A partial response without a valid Content-Range, or with several parts.
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
    /// Its status. Of a part, the status of the whole representation (200).
    pub status: u16,
    /// Reason phrase.
    pub reason: Vec<u8>,
    /// The fields, without those of the connection and of the framing, and without Age.
    pub fields: Fields,
    /// The request fields it was selected by.
    pub selecting: Selecting,
    /// How much of the representation is stored.
    pub extent: Extent,
    /// When the request was sent that fetched the response or last validated it.
    pub request_time_s: UnixSeconds,
    /// When the response to that request arrived.
    pub response_time_s: UnixSeconds,
    /// The resource may have changed, so the response must be validated before use.
    pub is_invalid: bool,
    /// The request that fetched it identified its user to the server: by Cookie, by Authorization, or by its
    /// connection.
    pub is_personal: bool,
    pub(super) control: ResponseControl,
    pub(super) date_s: UnixSeconds,
    pub(super) lifetime_s: u64,
    pub(super) initial_age_s: u64,
    /// The response states its freshness lifetime.
    pub(super) states_freshness: bool,
}

/// Decides whether the response to this request may be stored, and with which extent.
///
/// # Errors
/// Fails with the first reason against it.
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
    // 304 and 416 answer a condition or a range. 401, 407, 412, 417, 421, 425 and 426 apply to this request alone.
    let for_all = !matches!(status, 100..=199 | 304 | 401 | 407 | 412 | 416 | 417 | 421 | 425 | 426);
    let understood = is_understood(status);
    if !for_all || (control.must_understand && !understood) {
        return Err(NotStored::Status);
    }
    if RequestControl::of(request).no_store {
        return Err(NotStored::RequestNoStore);
    }
    // must-understand overrides no-store if the status is understood (RFC 9111 Sec. 5.2.2.3).
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

/// Whether the response to a POST may be stored as the answer to a later GET. It must state its freshness, and its
/// Content-Location must name the requested resource (RFC 9110 Sec. 9.3.3). All rules for responses to GET apply,
/// too.
pub fn may_store_post(request: &Fields, resource: &Resource, response: &Response, rules: &Rules) -> bool {
    let control = ResponseControl::of(&response.fields, rules);
    let represents = response.fields.first("content-location").and_then(|to| resource.same_origin(to));
    matches!(response.status, 200 | 203)
        && explicit_lifetime(&response.fields, &control, date_of(&response.fields, 0)).is_some()
        && represents.as_ref() == Some(resource)
        && may_store(&Method::Get, request, response, rules) == Ok(Extent::Whole)
}

/// Whether a response to an authenticated request allows shared caches to store it (RFC 9111 Sec. 3.5).
pub fn is_shareable(response: &Response, rules: &Rules) -> bool {
    ResponseControl::of(&response.fields, rules).is_shareable()
}

/// Whether this cache implements the rules of this status (RFC 9110 Sec. 15).
const fn is_understood(status: u16) -> bool {
    matches!(status,
        200..=206 | 300..=303 | 307 | 308 | 400 | 402..=406 | 408..=411 | 413..=415 | 422 | 500..=505)
}

impl Stored {
    /// Makes the stored form of a response. Ask [`may_store`] first. The head is the one that is sent to the client,
    /// so the fields of the previous connection are already removed.
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

    /// Computes the values that follow from the fields and times. Call it after either has changed, and after a
    /// stored form was decoded.
    pub fn settle(&mut self, rules: &Rules) {
        let control = ResponseControl::of(&self.fields, rules);
        self.date_s = date_of(&self.fields, self.response_time_s);
        self.lifetime_s = lifetime(self.status, &self.fields, &control, self.date_s, rules);
        self.states_freshness = explicit_lifetime(&self.fields, &control, self.date_s).is_some();
        self.initial_age_s =
            initial_age(&self.fields, self.date_s, self.request_time_s, self.response_time_s);
        let private = control.private.clone();
        if !control.public {
            // A 304 may carry Set-Cookie for the client that asked.
            self.fields.remove("set-cookie");
        }
        // Of a part, the extent replaces Content-Range. Otherwise the field has no meaning, and stays like any other
        // field (RFC 9110 Sec. 14.4, RFC 9111 Sec. 3.1).
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

    /// Makes a stored response from its decoded values.
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

    /// Returns the same response with another range of its representation. The range may be the whole.
    #[must_use]
    pub fn with_range(&self, range: ContentRange) -> Self {
        let extent = if range.is_whole() { Extent::Whole } else { Extent::Part(range) };
        Self { extent, ..self.clone() }
    }

    /// Returns its age now, seconds. If the clock has gone back to before it arrived, its age is not known: then it is as old
    /// as can be, and so it is validated before its next use.
    pub fn age_s(&self, now_s: UnixSeconds) -> u64 {
        if now_s.saturating_add(ADJUSTED_S) < self.response_time_s {
            return MAX_SECONDS;
        }
        let resident = now_s.saturating_sub(self.response_time_s);
        self.initial_age_s.saturating_add(resident).min(MAX_SECONDS)
    }

    /// Returns its freshness lifetime, counted from its origin, seconds.
    pub const fn lifetime_s(&self) -> u64 {
        self.lifetime_s
    }

    /// Returns how long it stays fresh, seconds. Negative if it is stale.
    pub fn ttl_s(&self, now_s: UnixSeconds) -> i64 {
        let signed = |seconds| i64::try_from(seconds).unwrap_or(i64::MAX);
        signed(self.lifetime_s) - signed(self.age_s(now_s))
    }

    /// Returns how long it may be served after it became stale, seconds.
    pub fn usefulness_s(&self) -> u64 {
        let stale = self.control.stale_while_revalidate_s.max(self.control.stale_if_error_s);
        stale.unwrap_or(0)
    }

    /// Whether its directives forbid serving it stale.
    pub fn must_be_fresh(&self) -> bool {
        self.control.forbids_stale()
    }

    /// Whether it must not be served stale, whatever the client or a setting allows.
    pub fn forbids_stale(&self) -> bool {
        let is_of_one = self.is_personal || self.fields.has("set-cookie");
        self.control.forbids_stale() || (is_of_one && !self.states_freshness)
    }

    /// Whether it must not be served stale to this request, whatever the request or a setting allows.
    pub(super) fn forbids_stale_to(&self, request: &Fields) -> bool {
        self.forbids_stale() || (!self.states_freshness && names_its_user(request))
    }

    /// Whether it can be of use later: it is fresh for a while, can be validated, or can be served stale.
    pub fn is_worth_keeping(&self) -> bool {
        self.lifetime_s > 0 || self.has_validator() || self.usefulness_s() > 0
    }

    /// Whether a request selects it.
    pub fn is_selected_by(&self, request: &Fields) -> bool {
        matches(&self.selecting, request)
    }

    /// Whether both have the same selecting fields with the same values.
    pub fn is_same_variant(&self, other: &Self) -> bool {
        self.selecting == other.selecting
    }

    /// Returns its entity tag if that is strong.
    pub fn strong_tag(&self) -> Option<&[u8]> {
        self.fields.first("etag").filter(|tag| tag.starts_with(b"\""))
    }

    /// Whether it has a validator, so that the server can confirm it.
    pub fn has_validator(&self) -> bool {
        self.fields.has("etag") || self.fields.has("last-modified")
    }

    /// Returns the bytes of memory that it takes.
    pub fn memory_bytes(&self) -> usize {
        let selecting: usize = self
            .selecting
            .iter()
            .map(|(name, value)| name.len() + value.as_ref().map_or(0, Vec::len) + 64)
            .sum();
        size_of::<Self>() + self.fields.memory_bytes() + self.reason.len() + selecting
    }
}

/// Whether a request identifies its user to the server.
fn names_its_user(request: &Fields) -> bool {
    request.has("cookie") || request.has("authorization")
}

/// Returns the resources whose stored responses become invalid after a request with this method and this response.
/// These are its own resource, and those of the same origin that the response names. Empty for a safe method or an
/// error.
pub fn invalidated(method: &Method, resource: &Resource, response: &Response) -> Vec<Resource> {
    if method.is_safe() || *method == Method::Connect || !(200..400).contains(&response.status) {
        return Vec::new();
    }
    let named = ["location", "content-location"].into_iter();
    let named =
        named.filter_map(|name| response.fields.first(name)).filter_map(|to| resource.same_origin(to));
    std::iter::once(resource.clone()).chain(named).collect()
}
