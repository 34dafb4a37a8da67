//! Chooses a server: first from the listener's table, as a reverse listener does, then by policy.

use super::decided;
use super::flows::Flows;
use super::hops::Hops;
use super::offload::Offload;
use crate::config::{Choice, Config, EngineListener, Listener, ReverseTarget};
use crate::live::{Decided, profile::Stage};
use arc_swap::ArcSwap;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::engine::{
    Callbacks, ConnectionId, Crowd, Handshake, OffloadId, Opening, Payload, Progress, Reply, Selection, Slot,
    Target, Translation,
};
use sidetrack_core::flow::{Destination, EndReason, Flow, HostName, Process, Side};
use sidetrack_core::function::{FunctionKind, FunctionSpec};
use sidetrack_core::http::{Sniff, sniff};
use sidetrack_core::ldap;
use sidetrack_core::limit::Lack;
use sidetrack_core::policy::{Action, Carry, Decision, Dial, Seen, Verdict};
use sidetrack_core::time::Instant;
use std::net::SocketAddr;
use std::sync::Arc;

/// The callbacks of the engine.
#[derive(Debug)]
pub(super) struct Select {
    listener: Listener,
    engine: EngineListener,
    config: Arc<ArcSwap<Config>>,
    /// The flows.
    pub flows: Flows,
    /// The neighbours that lead to servers.
    pub hops: Hops,
    /// The offloaded connections. None: the kernel takes none.
    pub offload: Option<Offload>,
    /// The connections that the kernel handles from their SYN on. None: it handles none.
    decided: Option<Arc<decided::Shared>>,
    /// The time of the current packet.
    pub now: Instant,
}

/// The server name in the first bytes.
enum Name {
    /// Not known yet: more bytes are needed.
    Unknown,
    /// This name, or no name.
    Known(Option<HostName>),
}

/// Why a flow is refused.
struct Refusal {
    reason: EndReason,
    detail: String,
}

fn name(opening: &Opening<'_>) -> Name {
    match sniff(opening.first) {
        Sniff::Host { name, .. } => Name::Known(Some(name)),
        Sniff::NeedMore if !opening.last => Name::Unknown,
        Sniff::NeedMore | Sniff::None => Name::Known(None),
    }
}

impl Select {
    /// Returns the callbacks for the engine of this listener.
    pub(super) fn new(
        listener: Listener,
        engine: EngineListener,
        config: Arc<ArcSwap<Config>>,
        flows: Flows,
        offload: Option<Offload>,
        decided: Option<Arc<decided::Shared>>,
    ) -> Self {
        Self { listener, engine, config, flows, hops: Hops::default(), offload, decided, now: Instant::ZERO }
    }

    /// Returns the decision of policy. If it needs more bytes, returns how long to wait for them.
    fn decide(&self, config: &Config, opening: &Opening<'_>) -> Result<(Flow, Option<Verdict>), u64> {
        let mut flow = self.flows.flow(opening);
        let mut read = None;
        let chosen = self.chosen(opening).ok_or_else(|| match opening.replied {
            // The client needs time to read the answer and to write its next request.
            true => config.limits.handshake_timeout_ms,
            false => self.patience(config),
        })?;
        if chosen.is_none() && self.engine.target.needs_first_bytes() {
            let Name::Known(found) = name(opening) else { return Err(self.patience(config)) };
            flow.host.clone_from(&found);
            read = Some(found);
        }
        let listed = || self.engine.target.server_for(flow.host.as_ref()).cloned();
        let Some(server) = chosen.map(Destination::from).or_else(listed) else { return Ok((flow, None)) };
        flow.orig_dst = server;
        loop {
            let seen = match &read {
                None => Seen::Nothing,
                Some(name) => Seen::FirstBytes(name.as_ref()),
            };
            match config.policy.decide(&flow, seen) {
                Decision::Verdict(verdict) => return Ok((flow, Some(verdict))),
                Decision::NeedFirstBytes { wait_ms, .. } => {
                    let Name::Known(found) = name(opening) else { return Err(wait_ms) };
                    flow.host.clone_from(&found);
                    read = Some(found);
                }
                // The client is on another host, so its process is unknown.
                Decision::NeedProcess { .. } => flow.process = Some(Process::default()),
            }
        }
    }

    /// Returns the server that the first bytes choose, if they choose one. The outer option is none if more bytes are
    /// needed.
    fn chosen(&self, opening: &Opening<'_>) -> Option<Option<SocketAddr>> {
        for (choice, server) in &self.engine.choices {
            match choice.fits(opening.first) {
                Some(true) => return Some(Some(*server)),
                None if !opening.last => return None,
                Some(false) | None => {}
            }
        }
        Some(None)
    }

    /// Returns the answer to an anonymous LDAP bind, if an entry of `choose` needs the request after it.
    fn reply(&mut self, opening: &Opening<'_>) -> Option<Reply> {
        let by_entry = self.engine.choices.iter().any(|(choice, _)| matches!(choice, Choice::LdapDn(_)));
        if !by_entry || opening.replied || opening.last {
            return None;
        }
        let (bytes, answer) = ldap::answer_to_anonymous_bind(opening.first)?;
        let reply = Reply::new(&bytes)?;
        self.flows.answered(opening.id, answer);
        Some(reply)
    }

    /// Returns how long to wait for a name: as with a reverse listener, not long if there is a default.
    fn patience(&self, config: &Config) -> u64 {
        match &self.engine.target {
            ReverseTarget::ByName { default: None, .. } => config.limits.handshake_timeout_ms,
            _ => config.limits.first_bytes_ms,
        }
    }

    fn target(
        &self,
        config: &Config,
        flow: &Flow,
        verdict: &Verdict,
        replied: bool,
    ) -> Result<Target, Refusal> {
        let carry = match &verdict.action {
            Action::Carry(carry) => carry,
            Action::Deny => {
                return Err(Refusal { reason: EndReason::PolicyDenied, detail: verdict.why.to_string() });
            }
        };
        let unsupported = |what: &str| Refusal {
            reason: EndReason::Unsupported,
            detail: format!("{}: the packet engine knows no {what}", verdict.why),
        };
        if let Some(what) = beyond(carry) {
            return Err(unsupported(what));
        }
        let destination = carry.to.as_ref().unwrap_or(&flow.orig_dst);
        let address = destination.unzoned_addr();
        let address = address.ok_or_else(|| unsupported("destination but an address without a zone"))?;
        if self.is_own(address) {
            let detail = format!("{address} is the engine itself");
            return Err(Refusal { reason: EndReason::Loop, detail });
        }
        let limits = &config.limits;
        let inspect = carry.chain.is_some();
        Ok(Target {
            inspect_client: inspect,
            inspect_server: inspect || replied,
            connect_timeout_ms: Some(carry.connect_timeout_ms.unwrap_or(limits.connect_timeout_ms)),
            idle_timeout_ms: Some(carry.idle_timeout_ms.unwrap_or(limits.idle_timeout_ms)),
            lifetime_ms: carry.lifetime_ms.or(limits.lifetime_ms),
            ..Target::new(address, self.hops.to(address.ip(), self.now))
        })
    }

    /// Tells the kernel to handle the next flows of this client from their SYN on, if it may: no limit counts flows, and
    /// no byte of them was or will be inspected. `generation` is that of the rules that decided, or an earlier one.
    fn pass_on(
        &self,
        generation: u32,
        config: &Config,
        opening: &Opening<'_>,
        decided: &Decided,
        target: &Target,
    ) {
        let Some(memory) = &self.decided else { return };
        let limits = &config.limits;
        let looks = target.inspect_client || target.inspect_server || decided.flow.host.is_some();
        let first = opening.first.is_empty() || !self.engine.target.needs_first_bytes();
        if looks || !first || limits.max_flows.is_some() || limits.max_flows_per_client.is_some() {
            return;
        }
        // The decision must be the same without first bytes: rules that need them had to wait.
        let asks = config.policy.decide(&decided.flow, Seen::Nothing);
        if let (Some(verdict), Decision::Verdict(again)) = (&decided.verdict, asks)
            && again == *verdict
        {
            memory.decide(self.now, generation, &decided.flow, opening.local, target, verdict);
        }
    }

    fn is_own(&self, address: SocketAddr) -> bool {
        self.listener.addresses.contains(&address)
    }
}

/// Returns what a rule requires that the engine cannot do without a socket.
fn beyond(carry: &Carry) -> Option<&'static str> {
    [
        (carry.carrier != Carrier::Direct, "carrier but direct"),
        (carry.agreement.is_some(), "data-flow agreement"),
        (
            carry.chain.as_ref().is_some_and(|chain| !chain.functions.iter().all(fits)),
            "function that holds bytes back",
        ),
        (carry.proxy_protocol.is_some(), "PROXY protocol"),
        (carry.keep_client_address, "client's own address towards the server"),
        (carry.dial == Dial::Name, "names to dial"),
        (carry.tfo || carry.mptcp, "TCP Fast Open or Multipath TCP"),
    ]
    .into_iter()
    .find_map(|(asked, what)| asked.then_some(what))
}

/// True if a function can work on one packet at a time. One that delays bytes or changes their framing cannot.
fn fits(function: &Arc<FunctionSpec>) -> bool {
    let by_packet = |kind: &FunctionKind| {
        matches!(
            kind,
            FunctionKind::Count | FunctionKind::Filter(_) | FunctionKind::Replace(_) | FunctionKind::Wasm(_)
        )
    };
    function.kind.all(&by_packet)
}

impl Callbacks for Select {
    fn select(&mut self, opening: &Opening<'_>) -> Selection {
        let _span = Stage::EnginePolicy.enter();
        // Read before the rules: if a reload comes in between, the programs ignore the decision.
        let generation = self.decided.as_ref().map_or(0, |decided| decided.generation());
        let config = self.config.load_full();
        let (flow, verdict) = match self.decide(&config, opening) {
            Ok(decided) => decided,
            Err(wait_ms) => {
                return self.reply(opening).map_or(Selection::Wait { wait_ms }, Selection::Reply);
            }
        };
        let target = match &verdict {
            Some(verdict) => self.target(&config, &flow, verdict, opening.replied),
            None => {
                let what = flow
                    .host
                    .as_ref()
                    .map_or_else(|| "no name in the first bytes".to_owned(), |name| format!("'{name}'"));
                let detail = format!("{what}: no server in the listener's 'names', and it has no 'default'");
                Err(Refusal { reason: EndReason::BadRequest, detail })
            }
        };
        let chain = match (&target, &verdict) {
            (Ok(_), Some(verdict)) => self.flows.chain(&flow, verdict),
            _ => Ok(None),
        };
        let target = match &chain {
            Ok(_) => target,
            Err(stop) => Err(Refusal { reason: stop.reason, detail: stop.detail.clone() }),
        };
        let has_left = opening.crowd == Crowd::HasLeft;
        let admitted = match target {
            Ok(target) => match self.flows.leave(opening.client.ip(), has_left) {
                Ok(leave) => Ok((target, leave)),
                Err(Lack::Room(_)) if opening.crowd == Crowd::Unknown => return Selection::Crowded,
                Err(Lack::Room(detail) | Lack::Share(detail) | Lack::Memory(detail)) => {
                    Err(Refusal { reason: EndReason::Limit, detail })
                }
            },
            Err(refusal) => Err(refusal),
        };
        let decided = Decided::new(flow, verdict).by(&config.policy);
        match admitted {
            Ok((target, leave)) => {
                self.pass_on(generation, &config, opening, &decided, &target);
                self.flows.carried(opening, self.now, decided, chain.unwrap_or_default(), leave);
                Selection::Server(target)
            }
            Err(refusal) => {
                self.flows.refused(opening, self.now, decided, refusal.detail);
                Selection::Refuse(refusal.reason)
            }
        }
    }

    fn leaving(&mut self, id: ConnectionId) {
        self.flows.leaving(id);
    }

    fn payload(&mut self, id: ConnectionId, from: Side, bytes: &[u8]) -> Payload {
        self.flows.payload(id, self.now, from, bytes)
    }

    fn plain(&mut self, slot: Slot) {
        if let Some(offload) = &mut self.offload {
            offload.offer(slot);
        }
    }

    fn delivering(&mut self, slot: Slot) {
        if let Some(offload) = &mut self.offload {
            offload.offer_early(slot);
        }
    }

    fn offload_handshake(
        &mut self,
        slot: Slot,
        sides: &[Translation; 2],
        handshake: &Handshake<'_>,
    ) -> Option<OffloadId> {
        self.offload.as_mut()?.offload_handshake(slot, sides, handshake)
    }

    fn progress(&mut self, offloaded: OffloadId) -> Option<Progress> {
        self.offload.as_mut()?.progress(offloaded, self.now)
    }

    fn closing(&mut self, offloaded: OffloadId) {
        if let Some(offload) = &mut self.offload {
            offload.take_back(offloaded, self.now);
        }
    }

    fn ended(&mut self, offloaded: OffloadId) {
        if let Some(offload) = &mut self.offload {
            offload.ended(offloaded, self.now);
        }
    }
}
