//! Clients whose datagrams were captured on their way to any destination: each answer has to leave from the address that the
//! client has asked, which is another host's.

use super::association::Associations;
use super::clients::Clients;
use crate::carry::Failure;
use crate::intercept::{Catches, Listening, redirect};
use sidetrack_core::association::{Dropped, Id, Input};
use sidetrack_core::flow::{Destination, EndReason, Flow, Intercept};
use sidetrack_core::icmp::Unreachable;
use sidetrack_core::limit::TokenBucket;
use sidetrack_core::policy::{Decision, Seen, Verdict};
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use sidetrack_sys::udp::answers::AnswerSockets;
use sidetrack_sys::udp::batch::{Batch, Target};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::Arc;

/// Port of DNS.
const DNS: u16 = 53;

/// Most ICMP errors of one worker to captured clients, for each listener. Further ones are left out.
const ERRORS_PER_SECOND: u32 = 1000;

/// The state of captured clients.
#[derive(Debug)]
pub(super) struct Captured {
    /// Sends answers.
    pub answers: Arc<AnswerSockets>,
    /// The destination of the datagram that is looked at now.
    pub asked: Option<SocketAddr>,
    /// Whether the clients are programs of this host.
    is_here: bool,
    /// The errors that may be sent (RFC 1812 Sec. 4.3.2.8).
    errors: RefCell<TokenBucket>,
}

impl Captured {
    /// Makes the state for a listener. `None`: it has no way to answer.
    pub(super) fn new(listening: &Listening, now: Instant) -> Option<Self> {
        let is_here = !matches!(listening.catches, Catches::Tproxy);
        let errors = TokenBucket::new(ERRORS_PER_SECOND, ERRORS_PER_SECOND, now).into();
        Some(Self { answers: listening.answers.clone()?, asked: None, is_here, errors })
    }
}

impl Associations {
    /// Takes the datagrams of a message to any destination.
    pub(super) fn take_captured(&mut self, batch: &Batch, now: Instant, at: usize) {
        let ((Some(from), _), Some(asked)) = (batch.addresses(at), batch.original(at)) else { return };
        if redirect::is_own(asked, &self.listening) {
            // No rule has led it here: passed on, it would come back for ever.
            self.dropped[Dropped::Stranger as usize] += batch.datagrams(at).count() as u64;
            return;
        }
        let client = self.listening.client(sockopt::canonical(from));
        let (destination, target) = (Destination::from(asked), Target { to: from, from: Some(asked.ip()) });
        if let Clients::Captured(captured) = &mut self.clients {
            captured.asked = Some(asked);
        }
        let mut passed = None;
        for payload in batch.datagrams(at) {
            let input = Input::FromClient { client, destination: &destination, bytes: payload.len() };
            let refused = self.dropped[Dropped::Refused as usize];
            self.table.handle(now, input);
            if let Some(id) = self.outputs(Some(payload), target) {
                self.forward_one(id, payload);
                passed = Some(id);
            }
            if self.dropped[Dropped::Refused as usize] > refused {
                self.tell(self.refusal(None), (asked, from), payload.len());
            }
        }
        if let Some(id) = passed {
            self.count(id);
        }
    }

    /// Returns the error for a client whose datagrams are refused. A program of this host finds a closed port, so that it does not
    /// wait. Another host learns that a router forbids it.
    pub(super) fn refusal(&self, reason: Option<EndReason>) -> Unreachable {
        match (&self.clients, reason.and_then(Unreachable::of_reason)) {
            (_, Some(said)) => said,
            (Clients::Captured(Captured { is_here: false, .. }), None) => Unreachable::Prohibited,
            (_, None) => Unreachable::Port,
        }
    }

    /// Tells a captured client that a datagram from its address to the address it has asked does not arrive.
    fn tell(&self, why: Unreachable, (asked, client): (SocketAddr, SocketAddr), payload_bytes: usize) {
        let Clients::Captured(Captured { answers, errors, .. }) = &self.clients else { return };
        if errors.borrow_mut().take(self.worker.clock.now()).is_some() {
            // It may be lost, as any ICMP message.
            let _ = answers.tell(why, asked, client, payload_bytes);
        }
    }

    /// Tells the client of an association.
    pub(super) fn tell_of(&self, id: Id, why: Unreachable, payload_bytes: usize) {
        let Some(association) = self.find(id) else { return };
        if let Some(asked) = association.asked {
            self.tell(why, (asked, association.client.to), payload_bytes);
        }
    }

    /// Tells the client of an association that its datagram is too long for the path, which carries payloads of `fits_bytes`.
    pub(super) fn tell_too_long(&self, id: Id, fits_bytes: usize, payload_bytes: usize) {
        let Some(asked) = self.find(id).and_then(|association| association.asked) else { return };
        self.tell_of(id, Unreachable::too_long(asked.is_ipv4(), fits_bytes), payload_bytes);
    }

    /// Completes the flow of an association: the name that its destination stands for.
    pub(super) fn name(&self, flow: &mut Flow, asked: Option<SocketAddr>) -> Result<(), Failure> {
        let (listening, clock) = (&self.listening, &self.worker.clock);
        flow.orig_dst = match (asked, &listening.catches) {
            (Some(asked), _) => redirect::named(asked, listening, clock)?,
            (None, Catches::Socks(_) | Catches::Http) => {
                redirect::named_destination(flow.orig_dst.clone(), listening, clock)?
            }
            (None, _) => return Ok(()),
        };
        let (Catches::Run(run), Some(asked)) = (&listening.catches, asked) else { return Ok(()) };
        if run.refused.contains(asked.port()) {
            let why = "QUIC is refused, so that the program uses TLS over TCP, which is intercepted";
            return Err(Failure::new(EndReason::Unsupported, why));
        }
        Ok(())
    }

    /// Asks the rules about a flow, and finds its process if a rule or the record needs it. `client`, `asked`: the two ends of
    /// the client's socket. `None`: the rules want to know more.
    pub(super) fn ask_rules(
        &self,
        flow: &mut Flow,
        client: SocketAddr,
        asked: Option<SocketAddr>,
    ) -> Option<Verdict> {
        let policy = self.worker.config().policy.clone();
        if asked.is_none() || self.listening.names_programs() || policy.asks_process_of_addresses() {
            self.find_owner(flow, client, asked);
        }
        loop {
            match policy.decide(flow, Seen::FirstBytes(None)) {
                Decision::Verdict(verdict) => return Some(verdict),
                Decision::NeedProcess { .. } if flow.process.is_none() => {
                    self.find_owner(flow, client, asked);
                }
                // The first bytes and the process are known, so the rules ask for nothing more.
                Decision::NeedProcess { .. } | Decision::NeedFirstBytes { .. } => return None,
            }
        }
    }

    /// Whether the flow is a question of this process itself for the address of a name. The system's resolver sets no mark. If rules
    /// decided, a hop whose name is asked for would have to carry the question.
    pub(super) fn is_our_question(&self, client: SocketAddr, asked: Option<SocketAddr>) -> bool {
        matches!(self.listening.catches, Catches::Redirect)
            && asked.is_some_and(|asked| asked.port() == DNS && self.worker.owners().are_we(client, asked))
    }

    /// Finds the process of a flow. Those of other hosts, and of clients that were not captured, are unknown: rules that ask
    /// for one do not match.
    pub(super) fn find_owner(&self, flow: &mut Flow, client: SocketAddr, asked: Option<SocketAddr>) {
        let asked = asked.filter(|_| matches!(flow.intercept, Intercept::Run | Intercept::Redirect));
        let owner = asked.map(|asked| self.worker.owners().of_datagram(client, asked));
        flow.process = Some(owner.unwrap_or_default());
    }
}
