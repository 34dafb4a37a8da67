//! A request through the shared cache: answered from it, validated with the server, or fetched and stored.

use super::Cache;
use super::answer::Answer;
use super::content::Content;
use super::copy::{Outgoing, Spill, Stopped, Tee};
use super::disk::Which;
use super::exchange::{HEAD_ROOM, Next, Outcome, Turn, finish};
use super::fetch::{Fetched, Interim, add_date, knows_interim};
use super::filling::Filling;
use super::pool::Server;
use super::request::name_of;
use super::sending::send_content;
use super::sibling::Question;
use super::store::{Claim, Fetching, Object};
use crate::carry::Failure;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::http::cache::{
    Body, Extent, Forward, Lookup, Ranges, Refreshed, Stored, Trouble, conditions, freshen_by_head,
    invalidated, is_shareable, lookup, may_serve_stale, may_store, may_store_post, refresh, reply,
    reply_first_hand,
};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::Length;
use sidetrack_core::http::message::{Method, Request, Response};
use std::sync::Arc;
use std::time::Duration;

/// How long a request waits for another request that fetches the same response, before it fetches by itself.
const WAIT: Duration = Duration::from_secs(5);

/// Serves a request.
///
/// # Errors
/// Returns the answer of our own if there is no other.
pub(super) async fn serve(turn: &mut Turn<'_>, cache: &Cache) -> Result<Outcome, Box<Answer>> {
    let asked = turn.asked;
    let key = asked.key_of(&asked.resource, &cache.keys);
    if asked.request.method.as_bytes() == b"PURGE" && cache.purge_from.contains(asked.flow.client.ip()) {
        let count = cache.store.purge_behind(Which::Key(key)).await;
        return Err(Box::new(Answer::purged(turn.proxy, count > 0)));
    }
    let mut may_wait = true;
    loop {
        let mut objects = cache.store.find(&key);
        if objects.is_empty() && matches!(asked.request.method, Method::Get | Method::Head) {
            objects = cache.store.load(&key, &cache.rules).await;
        }
        let stored: Vec<&Stored> = objects.iter().map(|object| &object.stored).collect();
        let has_body = asked.length != Length::None;
        let fields = &asked.request.fields;
        let mut cached = Cached { turn, cache, key: &key, objects: &objects };
        match lookup(&asked.request.method, fields, has_body, &stored, super::now_s()) {
            Lookup::Hit { index, refresh } => {
                let Some(object) = objects.get(index) else {
                    return Box::pin(cached.pass(Forward::UriMiss)).await;
                };
                let Ok(_open) = object.content.open().await else {
                    // Its file was removed or replaced: look again.
                    cache.store.forget(&key, object);
                    continue;
                };
                if refresh {
                    super::refresh::behind(cached.turn, cache, &key, object);
                }
                cache.counts.hit();
                return Ok(cached.reply(object, None, "hit").await);
            }
            Lookup::OnlyIfCached => return Err(Box::new(Answer::not_cached(cached.turn.proxy))),
            // Boxed here and below: a hit does not need this room in its future.
            Lookup::Pass { why } => {
                cache.counts.passed();
                return Box::pin(cached.pass(why)).await;
            }
            Lookup::Miss { why } | Lookup::Validate { why, .. }
                if may_wait && is_for_all(fields) && cached.turn.bound.is_empty() =>
            {
                match cache.store.claim(&key) {
                    Claim::Fetch(fetching) => {
                        cache.counts.missed();
                        return Box::pin(cached.fetch(why, Some(fetching))).await;
                    }
                    Claim::Alone => {
                        cache.counts.missed();
                        return Box::pin(cached.fetch(why, None)).await;
                    }
                    Claim::Wait(mut fetching) => {
                        // It ended or was too slow. In both cases look again, but do not wait a second time.
                        let _ = crate::reactor::timeout(WAIT, fetching.changed()).await;
                        may_wait = false;
                    }
                }
            }
            Lookup::Miss { why } | Lookup::Validate { why, .. } => {
                cache.counts.missed();
                return Box::pin(cached.fetch(why, None)).await;
            }
        }
    }
}

/// The part of Cache-Status that says why a request went to the server.
pub(super) fn forwarded(why: Forward) -> String {
    ["fwd=", why.as_str()].concat()
}

/// Whether the response to this request may also serve another waiting request.
fn is_for_all(request: &Fields) -> bool {
    // Every fetched request comes here: compare lengths first, and walk the fields only once.
    let is_of_one = |name: &[u8]| match name.len() {
        5 => name.eq_ignore_ascii_case(b"range"),
        7 => name.eq_ignore_ascii_case(b"upgrade"),
        13 => name.eq_ignore_ascii_case(b"authorization") || name.eq_ignore_ascii_case(b"if-none-match"),
        17 => name.eq_ignore_ascii_case(b"if-modified-since"),
        _ => false,
    };
    !request.iter().any(|(name, _)| is_of_one(name))
}

/// Returns the stored fields with the cookies of a 304. They are for the requesting client only and are not stored.
fn with_cookies(stored: &Stored, response: &Response) -> Option<Fields> {
    if !response.fields.has("set-cookie") || stored.fields.has("set-cookie") {
        return None;
    }
    let mut fields = stored.fields.clone();
    for cookie in response.fields.all("set-cookie") {
        fields.push("Set-Cookie", cookie);
    }
    Some(fields)
}

/// A request, and the responses stored under its key.
pub(super) struct Cached<'t, 'a> {
    /// The request.
    pub(super) turn: &'t mut Turn<'a>,
    /// The cache.
    pub(super) cache: &'t Cache,
    /// The request's key.
    pub(super) key: &'t [u8],
    /// The responses stored under it.
    pub(super) objects: &'t [Arc<Object>],
}

impl Cached<'_, '_> {
    pub(super) fn status(&self, rest: &str) -> String {
        [&self.turn.proxy.pseudonym, "; ", rest].concat()
    }

    /// Forwards the request past the cache. The response may still update or invalidate stored responses.
    async fn pass(&mut self, why: Forward) -> Result<Outcome, Box<Answer>> {
        let status = self.status(&forwarded(why));
        let requested_s = super::now_s();
        let (asked, cache) = (self.turn.asked, self.cache);
        let (mut ok_head, mut made) = (None, None);
        let is_for_others = !asked.hop.binds && self.turn.bound.is_empty();
        // Invalidate before the client has its answer: a later request must not get the old response.
        let mut on_head = |fetched: &Fetched| {
            let head = &fetched.response;
            for resource in invalidated(&asked.request.method, &asked.resource, head) {
                cache.store.invalidate(&asked.key_of(&resource, &cache.keys));
            }
            if asked.request.method == Method::Head && head.status == 200 {
                ok_head = Some(head.clone());
            }
            let request = &asked.request;
            let is_kept = request.method == Method::Post
                && is_for_others
                && fetched.length.is_certain
                && may_store_post(&request.fields, &asked.resource, head, &cache.rules);
            made = is_kept.then(|| head.clone());
            is_kept
        };
        let mut tee = Tee::new(cache.in_memory_max, None);
        let outcome = self.turn.pass(Some(status), &mut on_head, Some(&mut tee)).await?;
        if let Some(head) = made.filter(|_| outcome.reason == EndReason::Ok && !tee.is_over) {
            let times = (requested_s, super::now_s());
            let stored = Stored::new(&asked.request.fields, &head, Extent::Whole, times, &cache.rules);
            let content = Arc::new(Content::whole(tee.bytes));
            cache.store.insert(self.key, Arc::new(Object { stored, content }));
        }
        if let Some(head) = ok_head {
            self.freshen(&head, requested_s);
        }
        Ok(outcome)
    }

    /// Updates the responses stored for GET from the answer to a HEAD request.
    fn freshen(&self, head: &Response, requested_s: u64) {
        let request = &self.turn.asked.request.fields;
        for object in self.objects.iter().filter(|object| object.stored.is_selected_by(request)) {
            let mut stored = object.stored.clone();
            let times = (requested_s, super::now_s());
            let length = match stored.extent {
                Extent::Whole => Some(object.content.length),
                Extent::Part(part) => part.total,
            };
            // Without a total length, the answer may describe another representation than the stored part.
            let Some(length) = length else { continue };
            freshen_by_head(&mut stored, head, length, times, &self.cache.rules);
            let new = Arc::new(Object { stored, content: object.content.clone() });
            self.cache.store.replace(self.key, object, Some(new));
        }
    }

    /// The stored response that the request selects, even if it is stale.
    fn candidate(&self) -> Option<&Arc<Object>> {
        let request = &self.turn.asked.request.fields;
        let whole = self.objects.iter().filter(|object| object.stored.extent == Extent::Whole);
        whole
            .filter(|object| object.stored.is_selected_by(request))
            .max_by_key(|object| (object.stored.response_time_s, !object.stored.selecting.is_empty()))
    }

    /// Validates the stored response with the server if it has a validator; otherwise fetches a new one.
    async fn fetch(&mut self, why: Forward, fetching: Option<Fetching>) -> Result<Outcome, Box<Answer>> {
        let best =
            self.candidate().filter(|best| best.stored.has_validator() && why != Forward::Partial).cloned();
        let Some(best) = best else {
            return match self.incomplete().filter(|_| why == Forward::Partial) {
                Some(parts) => Box::pin(self.complete(parts, fetching)).await,
                None => self.fetch_plain(why, fetching).await,
            };
        };
        let mut request = self.turn.asked.request.clone();
        let stored: Vec<&Stored> = self.objects.iter().map(|object| &object.stored).collect();
        conditions(&mut request.fields, &best.stored, &stored);
        let requested_s = super::now_s();
        let (server, fetched) = match self.send(&request).await {
            Ok(fetched) => fetched,
            Err(failure) => return self.stale_or(Trouble::Unreachable, &failure).await,
        };
        match fetched.response.status {
            304 => {
                if fetched.keeps_alive {
                    self.turn.put(server);
                }
                let Some(object) = self.updated(&fetched.response, requested_s) else {
                    return self.fetch_plain(why, fetching).await;
                };
                let Ok(_open) = object.content.open().await else {
                    return self.fetch_plain(why, fetching).await;
                };
                drop(fetching);
                let note = format!("hit; detail=validated; fwd={}", why.as_str());
                let own = with_cookies(&object.stored, &fetched.response);
                Ok(self.reply(&object, own.as_ref(), &note).await)
            }
            _ => self.receive(server, fetched, forwarded(why), requested_s, fetching).await,
        }
    }

    /// Fetches a new response with the client's own request.
    pub(super) async fn fetch_plain(
        &mut self,
        why: Forward,
        fetching: Option<Fetching>,
    ) -> Result<Outcome, Box<Answer>> {
        let requested_s = super::now_s();
        if let Some((server, fetched)) = self.ask_siblings(why).await {
            let note = format!("fwd={}; detail=sibling", why.as_str());
            return self.receive(server, fetched, note, requested_s, fetching).await;
        }
        let request = &self.turn.asked.request;
        match self.send(request).await {
            Ok((server, fetched)) => {
                self.receive(server, fetched, forwarded(why), requested_s, fetching).await
            }
            Err(failure) => self.stale_or(Trouble::Unreachable, &failure).await,
        }
    }

    /// Asks the siblings for a response that is not stored here, if an answer to any client would do.
    async fn ask_siblings(&self, why: Forward) -> Option<(Server, Fetched)> {
        let asked = self.turn.asked;
        let may = why == Forward::UriMiss
            && asked.request.method == Method::Get
            && asked.unproven.is_none()
            && is_for_all(&asked.request.fields)
            && self.turn.bound.is_empty();
        let cache = may.then_some(self.cache)?;
        let question = Question {
            worker: self.turn.worker,
            flow: &asked.flow,
            resource: &asked.resource,
            fields: &asked.request.fields,
            htcp: cache.htcp.as_deref(),
        };
        cache.siblings.ask(&question, &self.turn.proxy.pseudonym).await
    }

    /// Sends a request without a body to the server.
    pub(super) async fn send(&mut self, request: &Request) -> Result<(Server, Fetched), Failure> {
        let way = self.turn.way();
        let client = knows_interim(self.turn.asked.version).then_some(self.turn.stream);
        way.fetch(request, Interim { client }).await
    }

    /// Returns a stale response instead of an error, if there is one and it may be served.
    pub(super) async fn stale_or(
        &mut self,
        trouble: Trouble,
        failure: &Failure,
    ) -> Result<Outcome, Box<Answer>> {
        let Some(object) = self.may_be_stale(trouble) else {
            let mut answer = self.turn.failed(failure);
            if self.candidate().is_some_and(|best| best.stored.must_be_fresh()) {
                // RFC 9111 Sec. 5.2.2.2: the server is unreachable and the stored response must not be served stale.
                answer.head = Response { fields: answer.head.fields, ..Response::new(504, Fields::new()) };
            }
            return Err(answer);
        };
        let Ok(_open) = object.content.open().await else { return Err(self.turn.failed(failure)) };
        Ok(self.reply(&object, None, "hit; detail=stale-if-error").await)
    }

    fn may_be_stale(&self, trouble: Trouble) -> Option<Arc<Object>> {
        let request = &self.turn.asked.request.fields;
        let best = self.candidate()?;
        may_serve_stale(&best.stored, request, trouble, super::now_s(), &self.cache.rules)
            .then(|| best.clone())
    }

    /// Updates the stored responses that a 304 is about; returns the one that answers the request.
    fn updated(&self, head: &Response, requested_s: u64) -> Option<Arc<Object>> {
        let mut stored: Vec<Stored> = self.objects.iter().map(|object| object.stored.clone()).collect();
        let mut places: Vec<&mut Stored> = stored.iter_mut().collect();
        let times = (requested_s, super::now_s());
        let Refreshed::Updated(about) = refresh(&mut places, head, times, &self.cache.rules) else {
            return None;
        };
        let mut found: Option<Arc<Object>> = None;
        for (index, new) in stored.into_iter().enumerate().filter(|(index, _)| about.contains(index)) {
            let old = self.objects.get(index)?;
            let new = Arc::new(Object { stored: new, content: old.content.clone() });
            self.cache.store.replace(self.key, old, Some(new.clone()));
            let is_better =
                found.as_ref().is_none_or(|found| found.stored.response_time_s <= new.stored.response_time_s);
            if is_better && new.stored.extent == Extent::Whole {
                found = Some(new);
            }
        }
        found
    }

    /// Sends a new response, and stores it if it may be stored.
    pub(super) async fn receive(
        &mut self,
        server: Server,
        mut fetched: Fetched,
        from: String,
        requested_s: u64,
        fetching: Option<Fetching>,
    ) -> Result<Outcome, Box<Answer>> {
        let status = fetched.response.status;
        if matches!(status, 500 | 502..=504)
            && let Some(object) = self.may_be_stale(Trouble::Error)
            && let Ok(_open) = object.content.open().await
        {
            drop(server);
            let note = format!("hit; detail=stale-if-error; fwd-status={status}");
            return Ok(self.reply(&object, None, &note).await);
        }
        add_date(&mut fetched.response.fields);
        let request = &self.turn.asked.request;
        let came = status.to_string();
        let keeps = may_store(&request.method, &request.fields, &fetched.response, &self.cache.rules);
        // On an authenticated connection nothing in the request itself says that the answer is personal.
        let is_for_others = !server.is_bound || is_shareable(&fetched.response, &self.cache.rules);
        let extent = keeps
            .ok()
            .filter(|_| is_for_others)
            .filter(|extent| fetched.length.is_certain && fits(request, &fetched, *extent, self.cache));
        let Some(extent) = extent else {
            if request.method == Method::Head && status == 200 {
                self.freshen(&fetched.response, requested_s);
            } else if let Some(old) = self.candidate().filter(|_| status < 500 && status != 304) {
                // A 304 to the client's own condition does not invalidate what is stored.
                self.cache.store.replace(self.key, old, None);
            }
            if let Some(fetching) = fetching {
                fetching.not_shared();
            }
            let note = [&self.turn.proxy.pseudonym, "; ", &from, "; fwd-status=", &came];
            fetched.response.fields.push_pieces("Cache-Status", &note.map(str::as_bytes));
            return self.turn.send(server, fetched, None).await;
        };
        let note = [&from, "; fwd-status=", &came].concat();
        let times = (requested_s, super::now_s());
        let mut stored = Stored::new(&request.fields, &fetched.response, extent, times, &self.cache.rules);
        stored.is_personal |= server.is_bound;
        match fetched.length.length {
            Length::Chunked | Length::UntilClose => {
                self.receive_unmeasured(server, fetched, stored, note, fetching).await
            }
            // Too large for memory, also for other requests that would read along.
            Length::Exact(length) if length > self.cache.in_memory_max => {
                self.receive_unmeasured(server, fetched, stored, note, fetching).await
            }
            Length::Exact(length) => {
                self.receive_measured(server, fetched, (stored, length), note, fetching).await
            }
            Length::None => self.receive_measured(server, fetched, (stored, 0), note, fetching).await,
        }
    }

    /// Content of unknown length, or too large for memory: sent while a copy is made. The complete copy is stored.
    async fn receive_unmeasured(
        &mut self,
        server: Server,
        mut fetched: Fetched,
        stored: Stored,
        note: String,
        fetching: Option<Fetching>,
    ) -> Result<Outcome, Box<Answer>> {
        let status = self.status(&format!("{note}; stored"));
        fetched.response.fields.push("Cache-Status", status);
        let (store, key) = (self.cache.store.clone(), self.key.to_vec());
        let (copied, most) = (stored.clone(), self.cache.object_max);
        let spill: Spill = Box::new(move || store.fill(&key, &copied, most));
        let mut tee = Tee::new(self.cache.in_memory_max, Some(spill));
        let length = fetched.length.length;
        let outcome = self.turn.send(server, fetched, Some(&mut tee)).await;
        let is_whole = outcome.as_ref().is_ok_and(|outcome| outcome.reason == EndReason::Ok);
        let stored = match length {
            _ if is_whole => Some(stored),
            Length::Exact(length) if outcome.is_ok() => stored.cut(tee.taken(), length),
            _ => None,
        };
        let is_kept = self.keep_copy(tee, stored, &[]);
        if let Some(fetching) = fetching.filter(|_| !(is_whole && is_kept)) {
            fetching.not_shared();
        }
        outcome
    }

    /// Stores the copy of a response, and removes the parts whose bytes it contains. Returns whether it was stored.
    pub(super) fn keep_copy(&self, tee: Tee, stored: Option<Stored>, parts: &[Stored]) -> bool {
        let Some(stored) = stored.filter(|_| !tee.is_over) else { return false };
        match tee.fill {
            Some(fill) => fill.finish(stored, parts),
            None => {
                if stored.extent == Extent::Whole {
                    self.cache.store.drop_parts(self.key, &stored);
                }
                let content = Arc::new(Content::whole(tee.bytes));
                self.cache.store.insert(self.key, Arc::new(Object { stored, content }));
            }
        }
        true
    }

    /// Content of known length: other requests read along while it arrives.
    async fn receive_measured(
        &mut self,
        mut server: Server,
        fetched: Fetched,
        (stored, length): (Stored, u64),
        note: String,
        fetching: Option<Fetching>,
    ) -> Result<Outcome, Box<Answer>> {
        let content = Arc::new(Content::coming(length));
        let object = Arc::new(Object { stored, content });
        // Store first, then give up the right to fetch: requests that waited must find the object and read along.
        let filling = Filling::begin(self.cache, self.key, &object);
        drop(fetching);
        let progress = self.turn.progress();
        let note = format!("{note}; stored");
        let (filled, outcome) = tokio::join!(
            filling.run(&mut server, fetched.length.length, progress),
            self.reply(&object, Some(&fetched.response.fields), &note)
        );
        if filled && fetched.keeps_alive {
            self.turn.put(server);
        }
        Ok(outcome)
    }

    /// Answers from a stored response. `received` has the fields as they arrived, if the response answers this very
    /// request.
    pub(super) async fn reply(
        &mut self,
        object: &Arc<Object>,
        received: Option<&Fields>,
        note: &str,
    ) -> Outcome {
        let asked = self.turn.asked;
        let now_s = super::now_s();
        let request = (&asked.request.method, &asked.request.fields);
        // Only range requests can need a boundary, and most requests have no range.
        let boundary = match request.1.has("range") {
            true => format!("{:032x}", u128::from_be_bytes(sidetrack_sys::random::bytes())),
            false => String::new(),
        };
        let total = Some(object.content.length);
        let answer = match received {
            None => reply(&object.stored, request, total, &boundary, now_s),
            Some(fields) => reply_first_hand(&object.stored, fields, request, total, &boundary),
        };
        let mut opening = self.opening(answer.head, &answer.body, &object.stored, note);
        let progress = self.turn.progress();
        let mut out = opening.outgoing(self.turn);
        let stopped = send_content(&mut out, object, &answer.body, progress).await.err();
        self.ended(stopped, note, opening.ends)
    }

    /// Builds the head of an answer from stored content.
    pub(super) fn opening(
        &mut self,
        mut head: Response,
        body: &Body,
        stored: &Stored,
        note: &str,
    ) -> Opening {
        let ttl_s = stored.ttl_s(super::now_s()).to_string();
        let status = [&self.turn.proxy.pseudonym, "; ", note, "; ttl=", &ttl_s].map(str::as_bytes);
        head.fields.push_pieces("Cache-Status", &status);
        let length = match body {
            Body::None => Length::None,
            _ => said_length(&head).map_or(Length::Chunked, Length::Exact),
        };
        let asked = self.turn.asked;
        asked.announce(&mut head.fields);
        let (length, again) = finish(&mut head, length, asked.version, asked.hop.keeps_alive);
        let mut bytes = Vec::with_capacity(HEAD_ROOM);
        head.write_to(&mut bytes);
        self.turn.told.begin(&head);
        self.turn.progress().mark();
        Opening { bytes, length, ends: (head.status, again) }
    }

    /// Returns the outcome of an answer from stored content.
    pub(super) fn ended(
        &self,
        stopped: Option<Stopped>,
        note: &str,
        (status, again): (u16, bool),
    ) -> Outcome {
        let said = name_of(self.turn.asked, &[&status.to_string(), note]);
        match stopped {
            None => Outcome::new(EndReason::Ok, Some(said), if again { Next::Again } else { Next::Close }),
            Some(Stopped::Sink(error)) => Outcome::new(
                EndReason::ClientGone,
                Some(format!("{said}, the client left: {error}")),
                Next::Close,
            ),
            Some(source) => {
                Outcome::new(EndReason::ServerReset, Some(format!("{said}, cut: {source}")), Next::Reset)
            }
        }
    }
}

/// A response head ready to be sent.
pub(super) struct Opening {
    bytes: Vec<u8>,
    length: Length,
    /// Its status, and whether another request can follow.
    pub(super) ends: (u16, bool),
}

impl Opening {
    /// The outgoing side to the client; it begins with this head.
    pub(super) fn outgoing<'a>(&mut self, turn: &Turn<'a>) -> Outgoing<'a> {
        let progress = turn.progress();
        let bytes = std::mem::take(&mut self.bytes);
        let out = Outgoing::new(turn.stream, bytes, self.length).counted(progress.live, Side::Server);
        let out = out.kept(turn.asked.kept.as_deref(), Side::Server);
        out.metered(turn.asked.meter.as_deref(), Side::Server, progress.clock)
    }
}

/// Whether a response is small enough. A part must also lie in the requested range and have the length it states.
fn fits(request: &Request, fetched: &Fetched, extent: Extent, cache: &Cache) -> bool {
    match (fetched.length.length, extent) {
        (Length::Exact(length), Extent::Part(part)) => {
            // A range that was not asked for is forwarded but not stored.
            let asked = request.fields.first("range").and_then(Ranges::parse);
            let is_asked =
                asked.is_some_and(|ranges| ranges.lie_within(part)) && !request.fields.has("if-range");
            length == part.length() && length <= cache.object_max && is_asked
        }
        (_, Extent::Part(_)) => false,
        (Length::Exact(length), Extent::Whole) => length <= cache.object_max,
        _ => true,
    }
}

fn said_length(head: &Response) -> Option<u64> {
    std::str::from_utf8(head.fields.first("content-length")?).ok()?.parse().ok()
}
