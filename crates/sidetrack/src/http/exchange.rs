//! One request and its response between client and server. Both bodies are forwarded at the same time.

use super::Proxy;
use super::answer::Answer;
use super::bound::Bound;
use super::buffer::Buffer;
use super::copy::{Outgoing, Progress, Stopped, Tee, copy_body};
use super::duplex::Duplex;
use super::fetch::{Fetched, Interim, Reuse, Way, add_date, bad, knows_interim};
use super::guarded::{of_upload, send_whole, upload_swapping};
use super::har::Told;
use super::pool::Server;
use super::request::{Asked, name_of};
use crate::carry::Failure;
use crate::live::LiveFlow;
use crate::worker::Worker;
use sidetrack_core::flow::{Destination, EndReason, Side};
use sidetrack_core::http::forward::put_length;
use sidetrack_core::http::framing::{Decoder, Length};
use sidetrack_core::http::message::{MessageError, Response, Version};
use sidetrack_core::placeholder::Wiped;
use sidetrack_core::policy::Carry;
use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;

/// Room for a head, and for content small enough to be copied behind it.
pub(super) const HEAD_ROOM: usize = 2048;

/// Is called with the final head before the client gets it; returns whether the content is to be copied.
pub(super) type OnHead<'f> = &'f mut dyn FnMut(&Fetched) -> bool;

/// How serving a request ended.
#[derive(Debug)]
pub(super) struct Outcome {
    /// The end reason in the record.
    pub reason: EndReason,
    /// The same in words: what was asked, and what came.
    pub detail: Option<String>,
    /// What happens to the client's connection.
    pub next: Next,
}

/// What happens to the client's connection.
#[derive(Debug)]
pub(super) enum Next {
    /// It serves another request.
    Again,
    /// It is closed in order.
    Close,
    /// It is reset, so that the client does not take the partial response for complete.
    Reset,
    /// It becomes a tunnel to this destination for this user.
    Tunnel(Destination, Option<String>),
    /// It becomes a tunnel of datagrams to this destination for this user.
    Datagrams(Destination, Option<String>),
    /// It speaks another protocol with the server from now on.
    Upgraded(Box<Server>, Arc<Carry>),
}

impl Outcome {
    /// An outcome.
    pub(super) fn new(reason: EndReason, detail: Option<String>, next: Next) -> Self {
        Self { reason, detail, next }
    }
}

/// A request that is being served.
pub(super) struct Turn<'a> {
    /// State shared by the listener's connections.
    pub proxy: &'a Arc<Proxy>,
    /// The worker.
    pub worker: &'a Arc<Worker>,
    /// The flow's place in the ledger.
    pub live: &'a Arc<LiveFlow>,
    /// The request.
    pub asked: &'a Asked,
    /// The connection to the client.
    pub stream: &'a Duplex,
    /// Bytes that the client sent after the request's head.
    pub buffer: &'a mut Buffer,
    /// What was sent to the client.
    pub told: &'a mut Told,
    /// The server connections that belong to the client's connection.
    pub bound: &'a Bound,
}

/// How the sending of an answer ended.
pub(super) struct Sent {
    /// Which side stopped it, if one did.
    pub stopped: Option<Stopped>,
    /// The client's connection can serve another request.
    pub again: bool,
    /// Only the end of the connection marks the end of the content.
    pub until_close: bool,
    /// The status that was sent.
    pub status: u16,
    /// Bytes sent to the client.
    pub written: u64,
}

/// Completes a head for a client: its framing and its Connection field. Returns the framing and whether another
/// request can follow.
pub(super) fn finish(
    head: &mut Response,
    length: Length,
    version: Version,
    keeps_alive: bool,
) -> (Length, bool) {
    let length = match (length, version) {
        (Length::Chunked | Length::UntilClose, Version::Http10) => Length::UntilClose,
        (Length::UntilClose, Version::Http11) => Length::Chunked,
        (length, _) => length,
    };
    let again = keeps_alive && length != Length::UntilClose;
    put_length(&mut head.fields, length);
    if head.status == 204 {
        head.fields.remove("content-length");
    }
    match (again, version) {
        (false, _) => head.fields.push("Connection", "close"),
        (true, Version::Http10) => head.fields.push("Connection", "keep-alive"),
        (true, Version::Http11) => {}
    }
    (length, again)
}

impl<'a> Turn<'a> {
    /// The flow's progress.
    pub(super) fn progress(&self) -> Progress<'a> {
        Progress::of(self.worker, self.live, &self.asked.route)
    }

    /// The way to the request's server.
    pub(super) fn way(&self) -> Way<'a> {
        Way {
            worker: self.worker,
            route: &self.asked.route,
            flow: &self.asked.flow,
            resource: &self.asked.resource,
            is_configured: self.asked.is_configured,
            progress: self.progress(),
            proxy: self.proxy,
            bound: Some(self.bound),
            binds: self.asked.hop.binds,
            by_quic: Cell::default(),
            guard: self.asked.guard.as_ref(),
        }
    }

    /// Keeps an idle connection: for this client alone if it is bound, otherwise in the pool.
    pub(super) fn put(&self, server: Server) {
        if server.is_bound {
            self.bound.put(&self.asked.route, server);
        } else {
            self.asked.route.put(server);
        }
    }

    /// The page for a failure.
    pub(super) fn failed(&self, failure: &Failure) -> Box<Answer> {
        Box::new(Answer::failed(self.proxy, &self.asked.resource.host_field(), failure))
    }

    /// Serves the request past any cache. `status` becomes the Cache-Status field. `on_head` is called with the final head
    /// before the client gets it, and returns whether the content is copied into `tee`.
    ///
    /// # Errors
    /// Returns the answer of our own if the server gave none.
    pub(super) async fn pass(
        &mut self,
        status: Option<String>,
        on_head: OnHead<'_>,
        tee: Option<&mut Tee>,
    ) -> Result<Outcome, Box<Answer>> {
        if self.asked.length != Length::None {
            // Boxed: most requests have no body.
            return Box::pin(self.exchange(status, on_head, tee)).await;
        }
        let way = self.way();
        let client = knows_interim(self.asked.version).then_some(self.stream);
        let fetched = way.fetch(&self.asked.request, Interim { client }).await;
        let (server, mut fetched) = fetched.map_err(|failure| self.failed(&failure))?;
        let is_copied = on_head(&fetched);
        push_status(&mut fetched.response, status);
        self.send(server, fetched, tee.filter(|_| is_copied)).await
    }

    /// Forwards the server's response, and then keeps its connection.
    ///
    /// # Errors
    /// As [`Self::after`].
    pub(super) async fn send(
        &mut self,
        mut server: Server,
        mut fetched: Fetched,
        tee: Option<&mut Tee>,
    ) -> Result<Outcome, Box<Answer>> {
        let progress = self.progress();
        let sent = {
            let Server { stream, buffer, .. } = &mut server;
            self.told.pass(&fetched);
            deliver(self.asked, progress, &mut fetched, (stream, buffer), self.stream, tee).await
        };
        self.after(server, &fetched, sent, true)
    }

    /// Decides what happens to both connections.
    ///
    /// # Errors
    /// Returns an answer of our own if the server's content is malformed and nothing of it was sent yet.
    pub(super) fn after(
        &mut self,
        server: Server,
        fetched: &Fetched,
        sent: Sent,
        uploaded: bool,
    ) -> Result<Outcome, Box<Answer>> {
        if let (Some(Stopped::Broken(error)), 0) = (&sent.stopped, sent.written) {
            self.told.take_back();
            return Err(self.failed(&bad(&error.to_string())));
        }
        Ok(self.outcome(server, fetched, sent, uploaded))
    }

    fn outcome(&self, server: Server, fetched: &Fetched, sent: Sent, uploaded: bool) -> Outcome {
        let said = name_of(self.asked, &[&sent.status.to_string()]);
        let is_upgrade = fetched.response.status == 101;
        match sent.stopped {
            None if is_upgrade && self.asked.hop.upgrade.is_some() => {
                let next = Next::Upgraded(Box::new(server), self.asked.route.carry.clone());
                Outcome::new(EndReason::Ok, Some(said), next)
            }
            None => {
                if fetched.keeps_alive && uploaded && fetched.length.length != Length::UntilClose {
                    self.put(server);
                }
                let next = if sent.again && uploaded { Next::Again } else { Next::Close };
                Outcome::new(EndReason::Ok, Some(said), next)
            }
            Some(Stopped::Sink(error)) => {
                let detail = format!("{said}, the client left: {error}");
                Outcome::new(EndReason::ClientGone, Some(detail), Next::Close)
            }
            Some(source) => {
                let next = if sent.until_close { Next::Reset } else { Next::Close };
                let detail = format!("{said}, cut: {source}");
                Outcome::new(EndReason::ServerReset, Some(detail), next)
            }
        }
    }

    /// A request with a body.
    async fn exchange(
        &mut self,
        status: Option<String>,
        on_head: OnHead<'_>,
        tee: Option<&mut Tee>,
    ) -> Result<Outcome, Box<Answer>> {
        let whole = match self.whole().await {
            Ok(whole) => whole,
            Err(unanswered) => return self.unanswered(unanswered),
        };
        let way = self.way();
        let mut server = way.connect(Reuse::Checked).await.map_err(|failure| self.failed(&failure))?;
        let both = {
            let client = (self.stream, &mut *self.buffer, &mut *self.told);
            both(&way, self.asked, (client, whole), &mut server, (status, on_head, tee)).await
        };
        match both {
            Ok((fetched, sent, uploaded)) => {
                server.is_bound |= way.binds || fetched.binds;
                self.after(server, &fetched, sent, uploaded)
            }
            Err(unanswered) => self.unanswered(unanswered),
        }
    }

    /// What happens without an answer of the server.
    fn unanswered(&self, unanswered: Unanswered) -> Result<Outcome, Box<Answer>> {
        match unanswered {
            Unanswered::Server(failure) => Err(self.failed(&failure)),
            Unanswered::Client(why) => {
                let next = if self.told.is_begun { Next::Reset } else { Next::Close };
                Ok(Outcome::new(EndReason::ClientGone, Some(why), next))
            }
            Unanswered::Ended(why) if self.told.is_begun => {
                Ok(Outcome::new(EndReason::ClientGone, Some(why), Next::Reset))
            }
            // The client may still read: it is told what was wrong (RFC 9112 Sec. 8).
            Unanswered::Ended(why) => {
                Err(Box::new(Answer::refused(self.proxy, 400, EndReason::ClientGone, &why)))
            }
            Unanswered::Broken(error) if self.told.is_begun => {
                Ok(Outcome::new(EndReason::BadRequest, Some(error.to_string()), Next::Reset))
            }
            Unanswered::Broken(error) => Err(Box::new(Answer::broken(self.proxy, error))),
            Unanswered::Misplaced(why) if self.told.is_begun => {
                Ok(Outcome::new(EndReason::SecretRefused, Some(why), Next::Reset))
            }
            Unanswered::Misplaced(why) => Err(Box::new(Answer::misplaced(self.proxy, &why))),
        }
    }
}

/// Why a request with a body has no answer.
pub(super) enum Unanswered {
    Server(Failure),
    /// The client left.
    Client(String),
    /// The client closed before its body was complete.
    Ended(String),
    /// The client's body is malformed.
    Broken(MessageError),
    /// The client's body has the placeholder of a secret that its server does not get.
    Misplaced(String),
}

/// Forwards body and response at the same time. A response that arrives before the whole body was sent is forwarded,
/// and the rest of the body is not awaited.
async fn both(
    way: &Way<'_>,
    asked: &Asked,
    ((client, held, told), whole): ((&Duplex, &mut Buffer, &mut Told), Option<Wiped>),
    server: &mut Server,
    (status, on_head, tee): (Option<String>, OnHead<'_>, Option<&mut Tee>),
) -> Result<(Fetched, Sent, bool), Unanswered> {
    let Server { stream, buffer, .. } = server;
    let stream = &*stream;
    let progress = way.progress;
    let mut upload = pin!(async {
        if let Some(whole) = whole {
            return send_whole(way, asked, stream, &whole).await.map_err(Stopped::Sink);
        }
        let mut decoder = Decoder::new(asked.length);
        let head = std::mem::take(&mut *way.head(&asked.request, None));
        let out = Outgoing::new(stream, head, asked.length).counted(progress.live, Side::Client);
        let out = out.swapped(upload_swapping(asked)).kept(asked.kept.as_deref(), Side::Client);
        let mut out = out.metered(asked.meter.as_deref(), Side::Client, progress.clock);
        copy_body((client, held), &mut decoder, &mut out, None, progress).await
    });
    let mut download = pin!(async {
        let interim = Interim { client: knows_interim(asked.version).then_some(client) };
        let mut fetched = way.read_head((stream, &mut *buffer), &asked.request, interim).await?;
        let is_copied = on_head(&fetched);
        push_status(&mut fetched.response, status);
        told.pass(&fetched);
        let from = (stream, &mut *buffer);
        let sent = deliver(asked, progress, &mut fetched, from, client, tee.filter(|_| is_copied)).await;
        Ok((fetched, sent))
    });
    let mut uploaded = None;
    loop {
        tokio::select! {
            biased;
            result = &mut upload, if uploaded.is_none() => match result {
                Ok(()) => uploaded = Some(true),
                Err(stopped) => match of_upload(asked, stopped) {
                    Some(unanswered) => return Err(unanswered),
                    // The server may have answered before it stopped reading.
                    None => uploaded = Some(false),
                },
            },
            result = &mut download => {
                return match result {
                    Ok((fetched, sent)) => Ok((fetched, sent, uploaded == Some(true))),
                    Err(failure) => Err(Unanswered::Server(failure)),
                };
            }
        }
    }
}

/// Sends one response from the server to the client, whose framing may differ.
async fn deliver(
    asked: &Asked,
    progress: Progress<'_>,
    fetched: &mut Fetched,
    from: (&Duplex, &mut Buffer),
    to: &Duplex,
    tee: Option<&mut Tee>,
) -> Sent {
    let status = fetched.response.status;
    let swapping = asked.guard.as_ref().and_then(|guard| guard.down(&fetched.response.fields));
    let swapping = swapping.filter(|_| !matches!(fetched.length.length, Length::None | Length::Exact(0)));
    // What replaces a secret has another length.
    let written = if swapping.is_some() { Length::UntilClose } else { fetched.length.length };
    let (length, again, bytes) = head_for(asked, fetched, written);
    let out = Outgoing::new(to, bytes, length).counted(progress.live, Side::Server).swapped(swapping);
    let out = out.kept(asked.kept.as_deref(), Side::Server);
    let mut out = out.metered(asked.meter.as_deref(), Side::Server, progress.clock);
    let mut decoder = Decoder::new(fetched.length.length);
    let stopped = copy_body(from, &mut decoder, &mut out, tee, progress).await.err();
    let written = out.written;
    Sent { stopped, again, until_close: length == Length::UntilClose, status, written }
}

/// The head for this client, with its framing and whether another request can follow.
fn head_for(asked: &Asked, fetched: &mut Fetched, length: Length) -> (Length, bool, Vec<u8>) {
    // Moved, not copied: the fields are not read after this.
    let Response { status, version, .. } = fetched.response;
    let (reason, fields) =
        (std::mem::take(&mut fetched.response.reason), std::mem::take(&mut fetched.response.fields));
    let mut head = Response { status, reason, version, fields };
    let (length, again) = if head.status == 101 {
        (Length::None, false)
    } else {
        add_date(&mut head.fields);
        asked.announce(&mut head.fields);
        finish(&mut head, length, asked.version, asked.hop.keeps_alive)
    };
    let mut bytes = Vec::with_capacity(HEAD_ROOM);
    head.write_to(&mut bytes);
    (length, again, bytes)
}

/// Adds the Cache-Status of a response that did not come from the cache.
fn push_status(head: &mut Response, status: Option<String>) {
    if let Some(status) = status {
        let came = head.status.to_string();
        head.fields.push_pieces("Cache-Status", &[status.as_bytes(), b"; fwd-status=", came.as_bytes()]);
    }
}
