//! Flows in flight, as the rest of the program sees them, and the record of each.

use crate::live::{Clock, Decided, Ended, Ledger, LiveFlow, Slot};
use sidetrack_core::chain::{Chain, Offered};
use sidetrack_core::engine::{ConnectionId, Opening, Payload, Record, Stamps};
use sidetrack_core::flow::{EndReason, Flow, FlowId, Intercept, Protocol, Side};
use sidetrack_core::function::{ChainSpec, OnDown, Stop};
use sidetrack_core::ldap::BindAnswer;
use sidetrack_core::limit::Lack;
use sidetrack_core::policy::{Action, Verdict};
use sidetrack_core::time::Instant;
use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, SystemTime};

/// Makes the functions that a flow passes.
pub(super) type Chains = Arc<dyn Fn(&ChainSpec, &Flow) -> Result<Chain, Stop> + Send + Sync>;

/// A permit for one flow. It is counted as long as it is held.
pub type Leave = Box<dyn Any + Send>;

/// Decides whether one more flow of this client is allowed; true: another flow leaves for it.
pub(super) type Admit = Arc<dyn Fn(IpAddr, bool) -> Result<Option<Leave>, Lack> + Send + Sync>;

/// The detail of a flow that left.
const LEFT: &str = "its client has the most flows of the engine, and another client found no room";

/// How far the time is advanced for functions that delay bytes: with packets, delayed bytes could not be sent later.
const AT_ONCE: Duration = Duration::from_secs(3600);

/// Returns the number of the next flow.
pub(super) type NextId = Arc<dyn Fn() -> FlowId + Send + Sync>;

/// The flows of one worker.
pub(super) struct Flows {
    ledger: Arc<Ledger>,
    next_id: NextId,
    chains: Chains,
    admit: Admit,
    listener: Arc<str>,
    known: HashMap<ConnectionId, Known, BuildHasherDefault<Spread>>,
    /// What removes the server's answer to a bind that the engine answered itself. It has no entries of ended
    /// connections.
    answers: HashMap<ConnectionId, BindAnswer, BuildHasherDefault<Spread>>,
    waker: Waker,
    clock: Clock,
    /// The wall clock time of this batch of packets.
    wall: SystemTime,
}

/// Spreads the engine's own numbers. Clients cannot choose them, so no secret is needed.
#[derive(Clone, Copy, Debug, Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// A flow for which policy was asked.
struct Known {
    flow: Arc<LiveFlow>,
    /// None if the flow was refused: it is never in flight then.
    slot: Option<Slot>,
    detail: Option<Box<str>>,
    chain: Option<Box<Chain>>,
    _leave: Option<Leave>,
    /// What the rule says about functions that fail.
    on_down: OnDown,
}

/// Runs the payload of one packet through the functions.
fn passed(chain: &mut Chain, now: Instant, from: Side, bytes: &[u8]) -> Result<Payload, Stop> {
    Ok(match chain.handle(now, from, bytes)? {
        Offered::Unchanged => Payload::Keep,
        Offered::Inside => {
            chain.advance(now + AT_ONCE, from)?;
            Payload::Replace(chain.take(from, usize::MAX).to_vec())
        }
    })
}

fn on_down(verdict: Option<&Verdict>) -> OnDown {
    match verdict.map(|verdict| &verdict.action) {
        Some(Action::Carry(carry)) => carry.chain.as_ref().map_or(OnDown::Deny, |chain| chain.on_down),
        _ => OnDown::Deny,
    }
}

impl fmt::Debug for Flows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flows").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl Flows {
    /// Makes an empty set. `waker` is woken when an operator ends a flow.
    pub(super) fn new(
        listener: Arc<str>,
        ledger: Arc<Ledger>,
        next_id: NextId,
        chains: Chains,
        admit: Admit,
        waker: Waker,
        clock: Clock,
    ) -> Self {
        let (known, wall) = (HashMap::default(), SystemTime::now());
        let answers = HashMap::default();
        Self { ledger, next_id, chains, admit, listener, known, answers, waker, clock, wall }
    }

    /// Begins the next batch of packets: flows that it opens get the current time.
    pub(super) fn next_batch(&mut self) {
        self.wall = SystemTime::now();
    }

    /// Returns a permit for one more flow of this client, to be held as long as the flow lives. `for_one_that_leaves`:
    /// another flow of the engine ends for it.
    ///
    /// # Errors
    /// Returns the limit that is reached.
    pub(super) fn leave(&self, client: IpAddr, for_one_that_leaves: bool) -> Result<Option<Leave>, Lack> {
        (self.admit)(client, for_one_that_leaves)
    }

    /// Notes that a flow is about to end for one of another client.
    pub(super) fn leaving(&mut self, id: ConnectionId) {
        if let Some(known) = self.known.get_mut(&id) {
            known.detail.get_or_insert_with(|| LEFT.into());
        }
    }

    /// Returns the flow as it is before policy is asked.
    pub(super) fn flow(&self, opening: &Opening<'_>) -> Flow {
        Flow {
            protocol: Protocol::Tcp,
            intercept: Intercept::Engine,
            listener: self.listener.clone(),
            client: opening.client,
            orig_dst: opening.local.into(),
            host: None,
            process: None,
            user: None,
        }
    }

    fn live(&self, opened: Instant, now: Instant, decided: Decided) -> LiveFlow {
        let since = self.wall.checked_sub(now.since(opened)).unwrap_or(self.wall);
        let live = LiveFlow::caught((self.next_id)(), since, self.clock.instant(opened));
        live.decide(decided);
        live
    }

    /// Makes the functions that this verdict requires for a flow.
    ///
    /// # Errors
    /// Fails if one of the functions ends the flow at once.
    pub(super) fn chain(&self, flow: &Flow, verdict: &Verdict) -> Result<Option<Box<Chain>>, Stop> {
        let Action::Carry(carry) = &verdict.action else { return Ok(None) };
        let spec = carry.chain.as_ref();
        spec.map(|spec| (self.chains)(spec, flow).map(Box::new)).transpose()
    }

    /// Notes that the engine itself has answered this client's bind; the server's answer will be removed.
    pub(super) fn answered(&mut self, id: ConnectionId, answer: BindAnswer) {
        self.answers.insert(id, answer);
    }

    /// Runs the payload of one packet through the functions. Before that, removes the answer to a bind that the client
    /// already has.
    pub(super) fn payload(&mut self, id: ConnectionId, now: Instant, from: Side, bytes: &[u8]) -> Payload {
        let answer = self.answers.get_mut(&id).filter(|_| from == Side::Server);
        let Some(answer) = answer else { return self.functions(id, now, from, bytes) };
        let left = answer.pass(bytes);
        if answer.is_over() {
            self.answers.remove(&id);
        } else {
            return Payload::Replace(left);
        }
        match self.functions(id, now, from, &left) {
            Payload::Keep if self.known.get(&id).is_some_and(|known| known.chain.is_some()) => {
                Payload::Replace(left)
            }
            Payload::Keep => Payload::Last(left),
            other => other,
        }
    }

    /// Runs the payload of one packet through the functions. If a function fails or panics, the rule decides: the flow
    /// ends, or it continues without functions.
    fn functions(&mut self, id: ConnectionId, now: Instant, from: Side, bytes: &[u8]) -> Payload {
        let Some(known) = self.known.get_mut(&id) else { return Payload::Keep };
        let Some(chain) = &mut known.chain else { return Payload::Keep };
        // The chain is not used again after a panic.
        let stop = match catch_unwind(AssertUnwindSafe(|| passed(chain, now, from, bytes))) {
            Ok(Ok(payload)) => return payload,
            Ok(Err(stop)) => stop,
            Err(_) => Stop::failed("a fault in a function; the log has it"),
        };
        known.chain = None;
        if stop.reason == EndReason::FunctionFailed && known.on_down == OnDown::Skip {
            tracing::warn!(flow = known.flow.id.0, why = %stop.detail, "goes on without its functions");
            return Payload::Keep;
        }
        known.detail = Some(stop.detail.into());
        Payload::Reset(stop.reason)
    }

    /// Adds a flow that policy allowed.
    pub(super) fn carried(
        &mut self,
        opening: &Opening<'_>,
        now: Instant,
        decided: Decided,
        chain: Option<Box<Chain>>,
        leave: Option<Leave>,
    ) {
        let on_down = on_down(decided.verdict.as_ref());
        let flow = Arc::new(self.live(opening.opened, now, decided));
        flow.set_waker(&self.waker);
        let slot = Some(self.ledger.enter(flow.clone()));
        self.known.insert(opening.id, Known { flow, slot, detail: None, chain, on_down, _leave: leave });
    }

    /// Adds a flow that was refused, with the reason in words.
    pub(super) fn refused(&mut self, opening: &Opening<'_>, now: Instant, decided: Decided, detail: String) {
        let flow = Arc::new(self.live(opening.opened, now, decided));
        let detail = Some(detail.into());
        let known = Known { flow, slot: None, detail, chain: None, on_down: OnDown::Deny, _leave: None };
        self.known.insert(opening.id, known);
    }

    /// Writes the record of an ended connection.
    pub(super) fn ended(&mut self, record: &Record) {
        self.answers.remove(&record.id);
        let known = self.known.remove(&record.id).unwrap_or_else(|| {
            // The client left before policy could be asked.
            let flow = Flow {
                protocol: Protocol::Tcp,
                intercept: Intercept::Engine,
                listener: self.listener.clone(),
                client: record.client(),
                orig_dst: record.local().into(),
                host: None,
                process: None,
                user: None,
            };
            let flow = self.live(record.opened, record.closed, Decided::new(flow, None));
            let on_down = OnDown::Deny;
            Known { flow: Arc::new(flow), slot: None, detail: None, chain: None, on_down, _leave: None }
        });
        let duration = record.closed.since(record.opened);
        count(&known.flow, record.client_bytes, record.server_bytes, duration);
        if record.passed_elsewhere {
            known.flow.shunted();
        }
        known.flow.reached(&record.stamps);
        if let Some(connected) = record.connected {
            known.flow.connected(connected.since(record.opened));
        }
        self.end(known, record.reason, duration);
    }

    fn end(&self, known: Known, reason: EndReason, duration: Duration) {
        let ended = Ended { flow: known.flow, reason, detail: known.detail, duration };
        match known.slot {
            Some(slot) => self.ledger.leave(slot, ended),
            None => self.ledger.note(ended),
        }
    }

    /// Updates the bytes of flows in flight.
    pub(super) fn count(&self, traffic: impl Iterator<Item = (ConnectionId, u64, u64)>) {
        for (id, up, down) in traffic {
            if let Some(known) = self.known.get(&id) {
                count(&known.flow, up, down, known.flow.age());
            }
        }
    }

    /// Updates the TCP states of flows in flight.
    pub(super) fn reached(&self, states: impl Iterator<Item = (ConnectionId, Stamps)>) {
        for (id, states) in states {
            if let Some(known) = self.known.get(&id) {
                known.flow.reached(&states);
            }
        }
    }

    /// Marks flows whose packets the kernel forwards by itself.
    pub(super) fn shunted(&self, shunted: impl Iterator<Item = ConnectionId>) {
        shunted.filter_map(|id| self.known.get(&id)).for_each(|known| known.flow.shunted());
    }

    /// Returns the flows that an operator wants to end.
    pub(super) fn unwanted(&self) -> Vec<ConnectionId> {
        let wished = |known: &Known| {
            // A wake consumes the waker, so a new one is set.
            known.flow.set_waker(&self.waker);
            known.flow.ending().is_some()
        };
        self.known.iter().filter(|(_, known)| wished(known)).map(|(id, _)| *id).collect()
    }

    /// Ends all flows now, because their engine is gone.
    pub(super) fn lost(&mut self, detail: &str) {
        self.answers.clear();
        for (_, mut known) in std::mem::take(&mut self.known) {
            known.detail.get_or_insert_with(|| detail.into());
            let duration = known.flow.age();
            self.end(known, EndReason::Internal, duration);
        }
    }
}

/// Raises the counts of a flow of this age to these values; they never shrink.
fn count(flow: &LiveFlow, up: u64, down: u64, age: Duration) {
    let before = flow.bytes();
    let (up, down) = (up.saturating_sub(before.0), down.saturating_sub(before.1));
    if up + down > 0 {
        flow.count(up, down);
        flow.touch(age);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::function::{Interest, Stage, Step};

    /// A function that fails at the second packet: by a panic, or by its result.
    struct Failing {
        packets: usize,
        by_fault: bool,
    }

    impl Stage for Failing {
        fn interest(&self, _: Side) -> Interest {
            Interest::Bytes
        }

        fn handle(&mut self, _: Instant, _: Side, bytes: &[u8], _: &mut Vec<u8>) -> Step {
            self.packets += 1;
            if self.packets == 1 {
                return Step::Pass(bytes.len());
            }
            assert!(!self.by_fault, "the fault of the test");
            Step::Stop(Stop::failed("it says so"))
        }
    }

    fn flows() -> Flows {
        let nothing = |_: &ChainSpec, _: &Flow| Chain::new(Vec::new(), Instant::ZERO);
        Flows::new(
            "test".into(),
            Arc::default(),
            Arc::new(|| FlowId(1)),
            Arc::new(nothing),
            Arc::new(|_, _| Ok(None)),
            Waker::noop().clone(),
            Clock::start(),
        )
    }

    fn with(flows: &mut Flows, by_fault: bool, on_down: OnDown) -> ConnectionId {
        let id = ConnectionId(7);
        let stage: Box<dyn Stage> = Box::new(Failing { packets: 0, by_fault });
        let chain = Chain::new(vec![("failing".into(), stage)], Instant::ZERO).expect("begins");
        let flow = Arc::new(LiveFlow::new(FlowId(1)));
        let known =
            Known { flow, slot: None, detail: None, chain: Some(Box::new(chain)), on_down, _leave: None };
        flows.known.insert(id, known);
        id
    }

    #[test]
    fn a_function_that_fails_ends_its_flow_or_is_passed_by_as_the_rule_says() {
        for by_fault in [true, false] {
            for (on_down, wanted) in
                [(OnDown::Deny, Payload::Reset(EndReason::FunctionFailed)), (OnDown::Skip, Payload::Keep)]
            {
                let mut flows = flows();
                let id = with(&mut flows, by_fault, on_down);
                let mut say = |bytes| flows.payload(id, Instant::ZERO, Side::Client, bytes);
                assert_eq!(say(b"first"), Payload::Keep);
                assert_eq!(say(b"second"), wanted, "{by_fault} {on_down:?}");
                assert_eq!(say(b"third"), Payload::Keep, "no function is asked any more");
                let detail = flows.known[&id].detail.as_deref().unwrap_or_default();
                assert_eq!(detail.is_empty(), on_down == OnDown::Skip, "{detail}");
            }
        }
    }
}
