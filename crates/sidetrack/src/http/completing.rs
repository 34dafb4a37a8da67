//! Completes stored parts of a response by fetching the missing bytes (RFC 9111 Sec. 3.3, 3.4).

use super::answer::Answer;
use super::cached::{Cached, forwarded};
use super::content::{Content, End};
use super::copy::{Outgoing, Progress, Spill, Stopped, Tee, copy_body};
use super::exchange::Outcome;
use super::fetch::Fetched;
use super::filling::Filling;
use super::pool::Server;
use super::store::{Fetching, Object};
use sidetrack_core::flow::EndReason;
use sidetrack_core::http::cache::{Body, ContentRange, Forward, Missing, Stored, Trouble, missing, reply};
use sidetrack_core::http::framing::{Decoder, Length};
use std::sync::Arc;

/// Stored parts that can answer a request once the missing bytes have arrived.
pub(super) struct Incomplete {
    objects: Vec<Arc<Object>>,
    missing: Missing,
}

impl Incomplete {
    fn before(&self) -> Option<&Arc<Object>> {
        self.objects.get(self.missing.before?)
    }

    fn behind(&self) -> Option<&Arc<Object>> {
        self.objects.get(self.missing.behind?)
    }

    /// The stored parts before and behind the missing bytes.
    fn parts(&self) -> impl Iterator<Item = &Arc<Object>> {
        self.before().into_iter().chain(self.behind())
    }

    fn stored(&self) -> Vec<&Stored> {
        self.objects.iter().map(|object| &object.stored).collect()
    }
}

impl Cached<'_, '_> {
    /// Returns the stored parts that can be completed to answer the request. Only parts that have fully arrived count: the
    /// length of a part that is still arriving is unknown.
    pub(super) fn incomplete(&self) -> Option<Incomplete> {
        let asked = self.turn.asked;
        if asked.hop.binds || !self.turn.bound.is_empty() {
            return None;
        }
        let objects: Vec<_> =
            self.objects.iter().filter(|object| object.content.end() == End::Whole).cloned().collect();
        let stored: Vec<&Stored> = objects.iter().map(|object| &object.stored).collect();
        let fields = &asked.request.fields;
        let missing = missing(&asked.request.method, fields, &stored)?;
        let length = missing.length(&stored);
        // A result too large for memory could not be cut down to the requested range.
        let is_held = length.is_some_and(|length| length <= self.cache.in_memory_max);
        (is_held || !fields.has("range")).then_some(Incomplete { objects, missing })
    }

    /// Fetches the missing bytes. If the server has another representation now, or does not send what was requested, the
    /// whole response is fetched.
    pub(super) async fn complete(
        &mut self,
        parts: Incomplete,
        fetching: Option<Fetching>,
    ) -> Result<Outcome, Box<Answer>> {
        let mut open = Vec::new();
        for part in parts.parts() {
            let Ok(file) = part.content.open().await else {
                self.cache.store.forget(self.key, part);
                return self.fetch_plain(Forward::Partial, fetching).await;
            };
            open.push(file);
        }
        let mut request = self.turn.asked.request.clone();
        parts.missing.ask(&mut request.fields, &parts.stored());
        let requested_s = super::now_s();
        let (server, fetched) = match self.send(&request).await {
            Ok(fetched) => fetched,
            Err(failure) => return self.stale_or(Trouble::Unreachable, &failure).await,
        };
        if let Some((stored, range)) = self.joined(&parts, (&server, &fetched), requested_s) {
            let length = range.length();
            let joined = Joined { stored, length, parts };
            return match length <= self.cache.in_memory_max {
                true => self.fill(joined, server, fetched, fetching).await,
                false => self.send_along(joined, server, fetched, fetching).await,
            };
        }
        let status = fetched.response.status;
        if status < 500 {
            parts.parts().for_each(|part| self.cache.store.replace(self.key, part, None));
        }
        match status {
            // Not what was requested, or the answer to a condition that the client did not send.
            206 | 304 | 412 | 416 => {
                drop(server);
                self.fetch_plain(Forward::Partial, fetching).await
            }
            _ => self.receive(server, fetched, forwarded(Forward::Partial), requested_s, fetching).await,
        }
    }

    /// The stored form of the parts joined with the arriving bytes, if these are the requested ones.
    fn joined(
        &self,
        parts: &Incomplete,
        (server, fetched): (&Server, &Fetched),
        requested_s: u64,
    ) -> Option<(Stored, ContentRange)> {
        let asked = &self.turn.asked.request.fields;
        let times = (requested_s, super::now_s());
        let said = fetched.response.fields.first("content-range");
        let range = said.and_then(ContentRange::parse)?;
        let is_certain = fetched.length.is_certain
            && fetched.length.length == Length::Exact(range.length())
            && !server.is_bound;
        let stored = (asked, &parts.stored()[..]);
        parts.missing.joined(stored, &fetched.response, times, &self.cache.rules).filter(|_| is_certain)
    }

    /// Completes in memory: other requests read along while the missing bytes arrive.
    async fn fill(
        &mut self,
        Joined { stored, length, parts }: Joined,
        mut server: Server,
        fetched: Fetched,
        fetching: Option<Fetching>,
    ) -> Result<Outcome, Box<Answer>> {
        let (before, behind) = (all_of(parts.before()).await, all_of(parts.behind()).await);
        let (Some(before), Some(behind)) = (before, behind) else {
            parts.parts().for_each(|part| self.cache.store.replace(self.key, part, None));
            drop(server);
            return self.fetch_plain(Forward::Partial, fetching).await;
        };
        let content = Content::coming(length);
        before.iter().for_each(|piece| content.push(piece));
        let object = Arc::new(Object { stored, content: Arc::new(content) });
        let used = parts.parts().cloned().collect();
        // Store first, then give up the right to fetch: requests that waited must find the object and read along.
        let filling = Filling::begin(self.cache, self.key, &object).completing(used, behind);
        drop(fetching);
        let progress = self.turn.progress();
        let (filled, outcome) = tokio::join!(
            filling.run(&mut server, fetched.length.length, progress),
            self.reply(&object, None, NOTE)
        );
        if filled && fetched.keeps_alive {
            self.turn.put(server);
        }
        Ok(outcome)
    }

    /// Too large for memory: stored and arriving bytes are sent in their order, while a copy goes to the disk.
    async fn send_along(
        &mut self,
        Joined { stored, length, parts }: Joined,
        mut server: Server,
        fetched: Fetched,
        fetching: Option<Fetching>,
    ) -> Result<Outcome, Box<Answer>> {
        let request = (&self.turn.asked.request.method, &self.turn.asked.request.fields);
        let answer = reply(&stored, request, Some(length), "", super::now_s());
        let mut opening = self.opening(answer.head, &Body::All, &stored, NOTE);
        let mut out = opening.outgoing(self.turn);
        let (store, key) = (self.cache.store.clone(), self.key.to_vec());
        let (copied, most) = (stored.clone(), self.cache.object_max);
        let spill: Spill = Box::new(move || store.fill(&key, &copied, most));
        let mut tee = Tee::new(self.cache.in_memory_max, Some(spill));
        let progress = self.turn.progress();
        let sent = send_parts(&parts, (&mut server, &fetched), &mut out, &mut tee, progress).await;
        if sent.is_ok() && fetched.keeps_alive {
            self.turn.put(server);
        }
        let old = parts.before().map_or(0, |part| part.content.length);
        let kept = match sent {
            Ok(()) => Some(stored),
            // A copy that is not longer than the stored part is useless.
            Err(_) if tee.taken() > old => stored.cut(tee.taken(), length),
            Err(_) => None,
        };
        let obsolete: Vec<Stored> = match sent {
            Ok(()) => parts.parts().map(|part| part.stored.clone()).collect(),
            Err(_) => parts.before().map(|part| part.stored.clone()).into_iter().collect(),
        };
        let is_kept = self.keep_copy(tee, kept, &obsolete);
        let outcome = self.ended(sent.err(), NOTE, opening.ends);
        if let Some(fetching) = fetching.filter(|_| !(is_kept && outcome.reason == EndReason::Ok)) {
            fetching.not_shared();
        }
        Ok(outcome)
    }
}

/// The Cache-Status of a completed response.
const NOTE: &str = "fwd=partial; fwd-status=206; stored";

/// Parts joined with the arriving bytes, as they will be stored.
struct Joined {
    stored: Stored,
    length: u64,
    parts: Incomplete,
}

/// Returns the bytes of a part: empty without a part, `None` if they cannot be read.
async fn all_of(part: Option<&Arc<Object>>) -> Option<Vec<Arc<[u8]>>> {
    match part {
        Some(part) => part.content.all().await,
        None => Some(Vec::new()),
    }
}

async fn send_parts(
    parts: &Incomplete,
    (server, fetched): (&mut Server, &Fetched),
    out: &mut Outgoing<'_>,
    tee: &mut Tee,
    progress: Progress<'_>,
) -> Result<(), Stopped> {
    send_part(parts.before(), out, tee, progress).await?;
    let Server { stream, buffer, .. } = server;
    let mut decoder = Decoder::new(fetched.length.length);
    copy_body((stream, buffer), &mut decoder, out, Some(tee), progress).await?;
    send_part(parts.behind(), out, tee, progress).await?;
    out.flush().await.map_err(Stopped::Sink)
}

async fn send_part(
    part: Option<&Arc<Object>>,
    out: &mut Outgoing<'_>,
    tee: &mut Tee,
    progress: Progress<'_>,
) -> Result<(), Stopped> {
    let Some(part) = part else { return Ok(()) };
    let mut index = 0;
    loop {
        let (pieces, end) = part.content.pieces(index, 16).await;
        index += pieces.len();
        for piece in &pieces {
            tee.push(piece).await;
            out.push(piece).await.map_err(Stopped::Sink)?;
            progress.mark();
        }
        match end {
            End::Cut => return Err(Stopped::Source("what was stored cannot be read".to_owned())),
            End::Whole if pieces.len() < 16 => return Ok(()),
            _ => {}
        }
    }
}
