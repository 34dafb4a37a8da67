//! A session whose client still waits for the answer to its SYN: the path is made first, then the connection is accepted.

use super::Entry;
use super::carrying::{Passage, carry_on};
use super::setup::{self, Asker, Caught, Setup, Stop};
use crate::carry::{Carried, Client, Failure, Memory, Stream, Wire};
use crate::intercept::hold::Held;
use crate::intercept::socks::Handshake;
use crate::intercept::{Catches, Listening, redirect};
use crate::live::profile::Stage;
use crate::process::Owners;
use crate::reactor;
use crate::worker::{Admission, Worker};
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::hold::Answer;
use sidetrack_core::policy::{Action, Decision, Seen};
use sidetrack_core::socks::ReplyCode;
use sidetrack_core::socks::server::Reply;
use sidetrack_sys::sockopt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// How long an accepted connection may take to come to its session, ms: the last step of the handshake with the client.
const CLAIM_MS: u64 = 5_000;

/// Room of the connection in memory that takes the client's place until it is there.
const NO_ROOM: usize = 1;

/// Decides about a held connection, in a task of its own on this worker's thread: it is accepted early, or a session begins.
pub fn serve_held(worker: Arc<Worker>, held: Held) {
    let listening = held.listening.clone();
    if !is_faithful(&worker, &listening, &held) {
        return held.early();
    }
    let peer = listening.client(held.client);
    let is_own = || peer.ip().is_loopback() || sockopt::is_of_this_host(held.client.ip());
    let admission = match Admission::ask(&worker, peer.ip(), is_own) {
        Ok(admission) => admission,
        Err(detail) => return shed(&worker, &listening, &held, peer, detail),
    };
    let entry = Entry::new(&worker);
    held.belongs_to(entry.live());
    // The client's place is empty until its connection is accepted.
    let (near, far) = Memory::pair(NO_ROOM);
    let client = Client::new(Stream::Memory(near));
    let held = Rc::new(held);
    let passage = Passage { worker, listening, peer, connect: None, held: Some(held), relays: None };
    let mut carrying = carry_on(passage, client, entry);
    reactor::spawn(async move {
        let wired = (&mut carrying).await;
        drop(far);
        super::keep(wired, admission);
    });
}

/// Whether the client of this connection gets the far side's answer. The session asks policy again, with the same result.
fn is_faithful(worker: &Worker, listening: &Listening, held: &Held) -> bool {
    if let Catches::Run(run) = &listening.catches
        && run.resolver == held.server
    {
        return false;
    }
    let Ok(destination) = redirect::captured(held.server, listening, &worker.clock) else { return false };
    let mut flow = setup::undecided(listening, listening.client(held.client)).flow;
    if let Host::Name(name) = &destination.host {
        flow.host = Some(name.clone());
    }
    flow.orig_dst = destination;
    let config = worker.config();
    loop {
        match config.policy.decide(&flow, Seen::Nothing) {
            Decision::Verdict(verdict) => {
                return match &verdict.action {
                    Action::Deny => true,
                    Action::Carry(carry) => carry.is_faithful(flow.intercept),
                };
            }
            // The first bytes come after the connection is accepted.
            Decision::NeedFirstBytes { .. } => return false,
            Decision::NeedProcess { .. } if flow.process.is_some() => return false,
            Decision::NeedProcess { .. } => {
                let owners: &Owners = worker.owners();
                flow.process = Some(owners.of(&flow, held.ends()));
            }
        }
    }
}

/// Refuses a connection because of a limit. It still gets its record.
fn shed(worker: &Arc<Worker>, listening: &Listening, held: &Held, peer: SocketAddr, detail: String) {
    tracing::warn!(listener = %listening.name, client = %peer, %detail, "a connection is refused");
    let mut entry = Entry::new(worker);
    entry.live().decide(setup::undecided(listening, peer));
    held.refuse(Answer::Reset);
    entry.end(EndReason::Limit, Some(detail));
}

impl Setup<'_> {
    /// Returns the destination of a connection that the kernel captured.
    pub(super) fn captured(&self, client: &Client) -> Result<Destination, Failure> {
        let (listening, clock) = (self.listening, &self.worker.clock);
        match &self.held {
            Some(held) => redirect::captured(held.server, listening, clock),
            None => {
                let socket = client.stream.tcp().map_err(internal)?;
                redirect::original_destination(socket, listening, clock)
            }
        }
    }

    /// Replaces an address that a client of a proxy has asked for by the name that it represents.
    pub(super) async fn name_asked(&self, caught: &mut Caught, client: &mut Client) -> Result<(), Stop> {
        if !matches!(&self.listening.catches, Catches::Socks(_) | Catches::Http) {
            return Ok(());
        }
        let asked = caught.flow.orig_dst.clone();
        match redirect::named_destination(asked, self.listening, &self.worker.clock) {
            Ok(named) => caught.flow.orig_dst = named,
            Err(failure) => {
                let asker = std::mem::replace(&mut caught.asker, Asker::Nobody);
                return Err(self.refused(asker, client, failure).await);
            }
        }
        Ok(())
    }

    /// Reports that there is no path: to a client that waits for the answer to its SYN, or in the client's own protocol.
    pub(super) async fn refused(&self, asker: Asker, client: &mut Client, failure: Failure) -> Stop {
        self.tell_held(&failure, client).await;
        setup::refuse(asker, client, failure).await
    }

    /// Tells a client that waits for the answer to its SYN why there is no path. If the server had accepted and reset the
    /// connection at once, so does the client's.
    async fn tell_held(&self, failure: &Failure, client: &mut Client) {
        let Some(held) = &self.held else { return };
        self.live.held(self.live.age());
        self.name_program(held);
        if failure.reason != EndReason::ServerReset {
            return held.refuse(failure.told.unwrap_or_else(|| Answer::of_end(failure.reason)));
        }
        self.due(CLAIM_MS, EndReason::ClientGone);
        let mut stands = Box::pin(stand(held, client));
        // A client that has given up meanwhile needs no answer.
        let _ = self.watched(Stage::Dial, stands.as_mut()).await;
    }

    /// Accepts the connection of a client that waits for the answer to its SYN: the path stands.
    pub(super) async fn accept_held(&self, client: &mut Client, carried: &mut Carried) -> Result<(), Stop> {
        let Some(held) = &self.held else { return Ok(()) };
        self.live.held(self.live.age());
        self.due(CLAIM_MS, EndReason::ClientGone);
        let mut stands = Box::pin(stand(held, client));
        let stood = self.watched(Stage::Dial, stands.as_mut()).await.and_then(|stood| stood);
        drop(stands);
        if let Err(failure) = stood {
            let (near, _) = Memory::pair(NO_ROOM);
            std::mem::replace(&mut carried.stream, Stream::Memory(near)).close(true);
            return Err(Stop::Failed(failure));
        }
        self.name_program(held);
        Ok(())
    }

    /// Finds the program of the flow, for listeners that name it. It has a socket until it gets a refusal.
    fn name_program(&self, held: &Held) {
        let Some(decided) = self.live.decided().filter(|_| self.listening.names_programs()) else { return };
        if decided.flow.process.is_none() {
            let mut decided = (*decided).clone();
            let process = self.worker.owners().of(&decided.flow, held.ends());
            decided.flow.process = Some(process);
            self.live.decide(decided);
        }
    }
}

/// Sends the SOCKS reply for a path that was not made, and returns its code. A client that is gone needs none.
pub(super) async fn reply(handshake: &mut Handshake, client: &mut Client, failure: &Failure) -> ReplyCode {
    let code = code_of(failure);
    let _ = handshake.reply(client, Reply::failed(code)).await;
    code
}

fn internal(error: std::io::Error) -> Failure {
    Failure::new(EndReason::Internal, error.to_string())
}

/// The code of a SOCKS reply for a path that was not made. A server that accepted and reset the connection at once has
/// accepted: the client's connection is reset too.
fn code_of(failure: &Failure) -> ReplyCode {
    match (failure.reason, failure.told) {
        (EndReason::ServerReset, _) => ReplyCode::Succeeded,
        (EndReason::Unreachable, Some(told)) => told.reply_code(),
        (reason, _) => ReplyCode::from_end_reason(reason),
    }
}

/// The path stands: accepts the connection, and puts it where the client's place was empty.
async fn stand(held: &Held, client: &mut Client) -> Result<(), Failure> {
    let gone = || Failure::new(EndReason::ClientGone, "the client had given up before the path was made");
    client.stream = Stream::Tcp(held.admit().await.ok_or_else(gone)?);
    Ok(())
}
