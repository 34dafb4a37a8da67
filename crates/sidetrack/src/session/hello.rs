//! Checks the server name in a client's TLS hello, where the client has asked for a destination by another name.
//!
//! A client may ask for a host that the rules allow and then send another name in its hello; servers behind one
//! address go by the name in the hello. So where rules match host names, no byte of the client is forwarded
//! before the hello is checked against the policy. If the server sends first, the wait ends: such a server does
//! not speak TLS.
//!
//! A flow without functions waits before its bytes move ([`Guard`]). On a flow that passes functions the bytes have to move
//! first, so two more stages of its chain check them: before the first function, and after the last ([`put_around`]).

use super::containers::{Way, stopped};
use super::setup::gone;
use crate::carry::{Carried, Client, Failure, FirstBytes, HELD_MAX, Incoming, Stream, Wire};
use crate::function::Leg;
use crate::live::LiveFlow;
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, HostName, Side};
use sidetrack_core::function::{Interest, Stage, Step, Stop};
use sidetrack_core::http::sni::{ClientHello, client_hello};
use sidetrack_core::policy::{Action, Decision, Policy, Seen};
use sidetrack_core::time::Instant;
use std::cell::Cell;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Most bytes of one read from the server.
const READ_MAX: usize = 2048;

/// Why a hello that fills all the room is denied.
const TOO_LONG: &str = "the TLS hello is too long for its name to be read";

/// Checks a client's TLS hello before any of its bytes are forwarded.
pub(super) struct Guard<'a> {
    /// The rules.
    pub policy: &'a Policy,
    /// The flow, with the name in the client's request.
    pub flow: &'a Flow,
    /// Its entry in the ledger, for the record.
    pub live: &'a LiveFlow,
    /// Number of bytes that we put before the client's.
    pub preface: Cell<usize>,
}

/// The result of looking at the bytes so far.
enum Look {
    /// They may be forwarded.
    Clear,
    /// They may become a hello.
    More,
    /// They name a host that the policy denies.
    Denied(Failure),
}

/// Checks a client's first bytes. A name that is not the flow's is noted for the record.
fn look(policy: &Policy, flow: &Flow, live: &LiveFlow, bytes: &[u8]) -> Look {
    let denied = |why: String| Look::Denied(Failure::new(EndReason::PolicyDenied, why));
    match client_hello(bytes) {
        ClientHello::Incomplete => Look::More,
        ClientHello::NotTls => Look::Clear,
        ClientHello::Malformed(error) => denied(format!("the name in the TLS hello cannot be read: {error}")),
        ClientHello::Hello(hello) => {
            let Some(name) = hello.server_name.filter(|name| Some(name) != flow.host.as_ref()) else {
                return Look::Clear;
            };
            live.greeted(name.clone());
            match ask(policy, flow, &name) {
                Ok(()) => Look::Clear,
                Err(why) => denied(format!("the TLS hello names '{name}': {why}")),
            }
        }
    }
}

/// Asks the policy about the flow as if the client had asked for this name.
fn ask(policy: &Policy, flow: &Flow, name: &HostName) -> Result<(), String> {
    let host = match &flow.orig_dst.host {
        Host::Name(_) => Host::Name(name.clone()),
        Host::Ip(ip) => Host::Ip(*ip),
    };
    let orig_dst = Destination { host, ..flow.orig_dst };
    let flow = Flow { host: Some(name.clone()), orig_dst, ..flow.clone() };
    match policy.decide(&flow, Seen::FirstBytes(Some(name))) {
        Decision::Verdict(verdict) if matches!(verdict.action, Action::Carry(_)) => Ok(()),
        Decision::Verdict(verdict) => Err(verdict.why.to_string()),
        Decision::NeedProcess { rule } | Decision::NeedFirstBytes { rule, .. } => {
            Err(format!("rule '{rule}' asks for what is not known"))
        }
    }
}

impl<'a> Guard<'a> {
    /// Makes a guard of this flow, without bytes of ours before the client's.
    pub(super) fn new(policy: &'a Policy, flow: &'a Flow, live: &'a LiveFlow) -> Self {
        Self { policy, flow, live, preface: Cell::new(0) }
    }
}

impl Guard<'_> {
    fn look(&self, bytes: &[u8]) -> Look {
        look(self.policy, self.flow, self.live, bytes.get(self.preface.get()..).unwrap_or_default())
    }

    /// Waits until the client's first bytes are not a hello, or are an allowed one, or until the server sends
    /// first.
    ///
    /// # Errors
    /// Fails if the policy denies the name, or if the client is gone.
    pub(super) async fn wait(&self, client: &mut Client, carried: &mut Carried) -> Result<(), Failure> {
        // Bytes that were sent with the request were checked before.
        if carried.sent > 0 || !carried.early.is_empty() {
            return Ok(());
        }
        loop {
            match self.look(client.held()) {
                Look::Clear => return Ok(()),
                Look::Denied(failure) => return Err(failure),
                Look::More => {}
            }
            let Carried { stream, early, .. } = &mut *carried;
            tokio::select! {
                biased;
                read = client.read_more() => match read {
                    Ok(0) if client.is_full() => {
                        return Err(Failure::new(EndReason::PolicyDenied, TOO_LONG));
                    }
                    Ok(0) => return Ok(()),
                    Ok(_) => {}
                    Err(_) => return Err(gone()),
                },
                spoke = poll_fn(|cx| poll_spoke(stream, early, cx)) => return spoke,
            }
        }
    }
}

/// Ready when the server has sent something or has ended its direction.
fn poll_spoke(stream: &mut Stream, early: &mut Vec<u8>, cx: &mut Context<'_>) -> Poll<Result<(), Failure>> {
    if let Stream::Tcp(socket) = stream {
        // Only readiness is awaited: the pump reads the bytes, or the error.
        return socket.poll_read_ready(cx).map(Ok);
    }
    let mut buffer = [0; READ_MAX];
    let failed = |error: std::io::Error| Failure::new(EndReason::ServerReset, error.to_string());
    stream
        .poll_recv(cx, &mut buffer)
        .map(|read| read.map(|n| early.extend_from_slice(&buffer[..n])).map_err(failed))
}

/// The first bytes of a client, as far as they may be forwarded.
pub(super) struct Guarded<'a> {
    pub incoming: Incoming<'a>,
    pub guard: Option<&'a Guard<'a>>,
}

impl FirstBytes for Guarded<'_> {
    fn held(&mut self) -> &[u8] {
        let held = self.incoming.held();
        match self.guard.map(|guard| guard.look(held)) {
            None | Some(Look::Clear) => held,
            Some(Look::More | Look::Denied(_)) => &[],
        }
    }

    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.incoming.poll_more(cx)
    }
}

/// The check as a stage among the functions of a flow: it buffers the client's bytes until they may be forwarded.
struct Looking {
    policy: Arc<Policy>,
    flow: Flow,
    live: Arc<LiveFlow>,
    /// Bytes of the client that may become a hello; at most [`HELD_MAX`].
    held: Vec<u8>,
    is_done: bool,
    /// When the server sent first: the buffered bytes may be forwarded since then.
    released: Option<Instant>,
}

impl Looking {
    fn denied(failure: Failure) -> Step {
        Step::Stop(Stop { reason: failure.reason, detail: failure.detail })
    }
}

impl Stage for Looking {
    fn interest(&self, from: Side) -> Interest {
        let waits = !self.is_done || from == Side::Client && !self.held.is_empty();
        if waits { Interest::Bytes } else { Interest::Nothing }
    }

    fn handle(&mut self, now: Instant, from: Side, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        if from == Side::Server && !self.is_done {
            // A server that sends first does not speak TLS.
            (self.is_done, self.released) = (true, Some(now));
        }
        if self.is_done {
            if from == Side::Client {
                out.append(&mut self.held);
            }
            return Step::Pass(bytes.len());
        }
        let taken = bytes.len().min(HELD_MAX - self.held.len());
        self.held.extend_from_slice(&bytes[..taken]);
        match look(&self.policy, &self.flow, &self.live, &self.held) {
            Look::Clear => {
                self.is_done = true;
                out.append(&mut self.held);
            }
            Look::More if self.held.len() == HELD_MAX => {
                return Self::denied(Failure::new(EndReason::PolicyDenied, TOO_LONG));
            }
            Look::More => {}
            Look::Denied(failure) => return Self::denied(failure),
        }
        Step::Taken(taken)
    }

    fn finish(&mut self, _: Instant, from: Side, out: &mut Vec<u8>) -> Result<bool, Stop> {
        // Half a hello names no host.
        if from == Side::Client {
            self.is_done = true;
            out.append(&mut self.held);
        }
        Ok(true)
    }

    fn tick(&mut self, _: Instant, from: Side, out: &mut Vec<u8>) {
        if from == Side::Client {
            out.append(&mut self.held);
        }
    }

    fn deadline(&self, from: Side) -> Option<Instant> {
        self.released.filter(|_| from == Side::Client && !self.held.is_empty())
    }
}

/// Adds a check of the TLS hello before the first function of a flow and after the last. A first function may decrypt the
/// bytes, and a last one may encrypt them.
///
/// # Errors
/// Fails if a function ends the flow at once.
pub(super) fn put_around(
    way: &mut Way,
    legs: &mut [Leg],
    (policy, flow, live): (&Arc<Policy>, &Flow, &Arc<LiveFlow>),
    now: Instant,
) -> Result<(), Failure> {
    let look = || {
        let (policy, flow, live) = (policy.clone(), flow.clone(), live.clone());
        let stage = Looking { policy, flow, live, held: Vec::new(), is_done: false, released: None };
        let stage: Box<dyn Stage> = Box::new(stage);
        Chain::new(vec![("TLS hello".into(), stage)], now)
    };
    let first = match way.chain.take() {
        Some(functions) => look().and_then(|look| look.followed_by(now, *functions)),
        None => look(),
    };
    way.chain = Some(Box::new(first.map_err(stopped)?));
    let last = legs.last_mut().map_or(&mut way.chain, |leg| &mut leg.chain);
    let behind = match last.take() {
        Some(functions) => look().and_then(|look| functions.followed_by(now, look)),
        None => look(),
    };
    *last = Some(Box::new(behind.map_err(stopped)?));
    Ok(())
}
