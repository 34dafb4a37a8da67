//! Connections that an XDP program handles completely, from their SYN on (`bpf/decided.bpf.h`). User space decides about
//! a client's first flow, tells the program how to handle the next ones, and writes the records.

use super::driver::Driver;
use super::hops;
use super::open::Interface;
use super::reset;
use super::targets::Targets;
use crate::config::Config;
use crate::live::{Clock, Decided, Ended, Ledger, LiveFlow, Slot, Tally};
use sidetrack_core::engine::{Hop, Target};
use sidetrack_core::flow::{Destination, EndReason, Flow, FlowId, Intercept, Protocol};
use sidetrack_core::policy::Verdict;
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::{
    Closing, DecidedFlow, DecidedKey, DecidedMemory, DecidedReason, DecidedRoute, DecidedState, monotonic_ns,
};
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::{Duration, SystemTime};

/// How long a decision is valid. After that, the next flow shows which neighbour leads to its server now.
const BELIEVED: Duration = Duration::from_secs(30);
/// Most different decisions that flows may have.
const RULES_MAX: usize = 4096;
/// How long the port of an ended connection stays unused, unless it is needed earlier.
const TIME_WAIT: Duration = Duration::from_secs(1);
/// How long a program may still handle a packet of a connection that user space has ended.
const LINGERS: Duration = Duration::from_millis(20);
/// How often all connections are checked, and from which age on they are shown as flows in flight.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How often user space looks for ended connections: after it found some, while there are connections, and otherwise.
const SOON: Duration = Duration::from_millis(2);
const WHILE_OPEN: Duration = Duration::from_millis(10);
const IDLY: Duration = Duration::from_millis(50);
/// Longest handshake, until the client's last part of it.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The decision that applies to flows of a client.
#[derive(Debug)]
pub(super) struct Rule {
    verdict: Verdict,
    listener: Arc<str>,
    orig_dst: Destination,
    server: SocketAddr,
    connect: Duration,
    idle: Duration,
    lifetime: Option<Duration>,
}

/// The state that all workers of an engine share.
#[derive(Debug)]
pub(super) struct Shared {
    memory: Arc<DecidedMemory>,
    interfaces: Vec<Interface>,
    /// Which interfaces send the frames that the program redirects to them.
    targets: Arc<Targets>,
    sources: Vec<IpAddr>,
    generation: AtomicU32,
    rules: Mutex<Vec<Arc<Rule>>>,
    /// When each decision ends.
    decided: Mutex<BTreeMap<DecidedKey, Instant>>,
}

impl Shared {
    /// Returns the state for these interfaces, with these source addresses towards servers.
    pub(super) fn new(
        memory: Arc<DecidedMemory>,
        interfaces: Vec<Interface>,
        targets: Arc<Targets>,
        sources: Vec<IpAddr>,
    ) -> Self {
        // The first decision needs an answer.
        targets.look(Instant::ZERO);
        let (rules, decided) = (Mutex::default(), Mutex::default());
        Self { memory, interfaces, targets, sources, generation: AtomicU32::new(1), rules, decided }
    }

    /// Returns the maps that the programs use.
    pub(super) fn memory(&self) -> &DecidedMemory {
        &self.memory
    }

    /// Returns the generation of the rules in force. The caller must read it before it reads the rules.
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Acquire)
    }

    /// Tells the program to handle the next flows of this client to this address without user space, if it can. The rules
    /// of `generation` made the decision, and the neighbour towards the server must be known.
    pub(super) fn decide(
        &self,
        now: Instant,
        generation: u32,
        flow: &Flow,
        local: SocketAddr,
        target: &Target,
        verdict: &Verdict,
    ) {
        // The program sends to the server's interface and to the client's, which may be any of them.
        if !self.targets.all_take() {
            return;
        }
        let (client, server) = (flow.client.ip(), target.address);
        let source = self.sources.iter().find(|source| source.is_ipv4() == server.is_ipv4());
        let (Some((egress, to)), Some(source)) = (hops::neighbour(target.hop), source) else { return };
        let Some(interface) = self.interfaces.get(egress) else { return };
        // The program does not translate between families.
        if client.is_ipv4() != server.is_ipv4() {
            return;
        }
        let Some(number) = self.number(flow, target, verdict) else { return };
        let key = DecidedKey { client, local };
        let route = DecidedRoute {
            generation,
            number,
            server,
            source: *source,
            egress: u16::try_from(egress).unwrap_or(u16::MAX),
            to,
            from: interface.address,
        };
        // If the map is full, the client's flows stay in user space.
        if self.memory.decide(&key, &route).is_ok() {
            lock(&self.decided).insert(key, now + BELIEVED);
        }
    }

    fn number(&self, flow: &Flow, target: &Target, verdict: &Verdict) -> Option<u32> {
        let ms = |ms: Option<u64>| ms.map(Duration::from_millis);
        let rule = Rule {
            verdict: verdict.clone(),
            listener: flow.listener.clone(),
            orig_dst: flow.orig_dst.clone(),
            server: target.address,
            connect: ms(target.connect_timeout_ms).unwrap_or(HANDSHAKE),
            idle: ms(target.idle_timeout_ms).unwrap_or(Duration::MAX),
            lifetime: ms(target.lifetime_ms),
        };
        let mut rules = lock(&self.rules);
        let same = |other: &Arc<Rule>| {
            (other.verdict == rule.verdict && other.server == rule.server && other.orig_dst == rule.orig_dst)
                && (other.connect, other.idle, other.lifetime) == (rule.connect, rule.idle, rule.lifetime)
        };
        let found = rules.iter().position(same).or_else(|| {
            (rules.len() < RULES_MAX).then(|| {
                rules.push(Arc::new(rule));
                rules.len() - 1
            })
        });
        found.and_then(|number| u32::try_from(number).ok())
    }

    /// Invalidates all decisions.
    fn renew(&self) {
        let generation = self.generation() + 1;
        // The programs get the new number first. They ignore decisions of a worker that still reads the old one.
        self.memory.renew(generation);
        self.generation.store(generation, Release);
    }

    fn rule(&self, number: u32) -> Option<Arc<Rule>> {
        lock(&self.rules).get(number as usize).cloned()
    }

    /// Removes decisions whose time is over; the next flow makes a new one.
    fn forget_old(&self, now: Instant) {
        let mut decided = lock(&self.decided);
        decided.retain(|key, until| *until > now || self.memory.forget(key).is_err());
    }
}

/// A connection that is shown as a flow in flight.
#[derive(Debug)]
struct Known {
    flow: Arc<LiveFlow>,
    slot: Slot,
    rule: Arc<Rule>,
}

/// The connections of one engine that the kernel handles; the first worker owns this.
pub(super) struct Carried {
    shared: Arc<Shared>,
    ledger: Arc<Ledger>,
    next_id: super::flows::NextId,
    waker: Waker,
    config: Arc<Config>,
    /// Whether all interfaces sent redirected frames at the last check.
    all_take: bool,
    /// Offset from our time to the kernel's, nanoseconds.
    monotonic: u64,
    known: BTreeMap<u32, Known>,
    /// Connections that are over, and connections that user space has ended, in this order, each with the time.
    resting: VecDeque<(Instant, Closing)>,
    lingering: VecDeque<(Instant, Closing)>,
    tallies: BTreeMap<(u32, u8), Tally>,
    next: Instant,
    looked: Instant,
}

impl std::fmt::Debug for Carried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Carried").field("known", &self.known.len()).finish_non_exhaustive()
    }
}

const fn reason(reason: DecidedReason) -> EndReason {
    match reason {
        DecidedReason::Ok | DecidedReason::Unused => EndReason::Ok,
        DecidedReason::ClientReset => EndReason::ClientReset,
        DecidedReason::ServerReset => EndReason::ServerReset,
        DecidedReason::Refused => EndReason::Refused,
    }
}

fn between(from_ns: u64, to_ns: u64) -> Duration {
    Duration::from_nanos(to_ns.saturating_sub(from_ns))
}

impl Carried {
    /// Makes an empty set. `waker` is woken when an operator ends a flow.
    pub(super) fn new(
        shared: Arc<Shared>,
        ledger: Arc<Ledger>,
        next_id: super::flows::NextId,
        waker: Waker,
        config: Arc<Config>,
        clock: Clock,
    ) -> Self {
        Self {
            all_take: shared.targets.all_take(),
            shared,
            ledger,
            next_id,
            waker,
            config,
            monotonic: monotonic_ns().saturating_sub(clock.now().as_nanos()),
            known: BTreeMap::new(),
            resting: VecDeque::new(),
            lingering: VecDeque::new(),
            tallies: BTreeMap::new(),
            next: Instant::ZERO,
            looked: Instant::ZERO,
        }
    }

    /// Returns when [`Carried::turn`] is due.
    pub(super) const fn deadline(&self) -> Instant {
        self.next
    }

    /// Handles what the programs did since the last call.
    pub(super) fn turn(&mut self, now: Instant, config: &Arc<Config>, driver: &mut dyn Driver) {
        if now < self.next {
            return;
        }
        self.heed(config);
        let ended = self.reap(now);
        self.rest(now);
        if now >= self.looked + LOOK_EVERY {
            self.looked = now;
            self.look_at_interfaces(now);
            self.shared.forget_old(now);
            self.look(now, driver);
        }
        let memory = self.shared.memory();
        let standing = memory.count() - memory.free().min(memory.count());
        let after = match (ended, standing) {
            (0, 0) => IDLY,
            (0, _) => WHILE_OPEN,
            _ => SOON,
        };
        self.next = now + after;
    }

    /// After a change of the rules, invalidates decisions of the old ones.
    fn heed(&mut self, config: &Arc<Config>) {
        if !Arc::ptr_eq(&self.config, config) {
            self.config = config.clone();
            self.shared.renew();
        }
    }

    /// Invalidates all decisions when an interface begins to drop redirected frames: user space handles the next
    /// connections. Those that the program has already wait until the interface sends them again.
    fn look_at_interfaces(&mut self, now: Instant) {
        self.shared.targets.look(now);
        let before = std::mem::replace(&mut self.all_take, self.shared.targets.all_take());
        if before && !self.all_take {
            self.shared.renew();
        }
    }

    /// Writes the records of ended connections, and returns their number.
    fn reap(&mut self, now: Instant) -> usize {
        let mut room = self.ledger.kept().saturating_sub(self.ledger.ended_waiting());
        let mut count = 0;
        // At most one turn through the table, so that other work is not delayed.
        while count < self.shared.memory().count() as usize
            && let Some(closing) = self.shared.memory().ended()
        {
            count += 1;
            self.resting.push_back((now, closing));
            let known = self.known.remove(&closing.number());
            if known.is_some() || room > 0 {
                room = room.saturating_sub(1);
                let flow = self.shared.memory().look(closing);
                if flow.reason != DecidedReason::Unused {
                    self.record(known, &flow, reason(flow.reason), flow.closed_ns);
                }
            } else {
                self.tally(closing);
            }
        }
        if !self.tallies.is_empty() {
            self.ledger.tally(std::mem::take(&mut self.tallies).into_values());
        }
        count
    }

    /// Counts a connection without a record of its own.
    fn tally(&mut self, closing: Closing) {
        let end = self.shared.memory().end(closing);
        if end.reason == DecidedReason::Unused {
            return;
        }
        let reason = reason(end.reason);
        let key = (end.number, reason as u8);
        if !self.tallies.contains_key(&key) {
            let Some(rule) = self.shared.rule(end.number) else { return };
            let any = SocketAddr::new(rule.server.ip(), 0);
            self.tallies.insert(key, Tally::new(Some(Arc::new(rule.decided(any))), reason));
        }
        let Some(tally) = self.tallies.get_mut(&key) else { return };
        let connected = (end.connected_ns > 0).then(|| between(end.opened_ns, end.connected_ns));
        tally.add(end.bytes, between(end.opened_ns, end.closed_ns), connected);
    }

    fn record(&self, known: Option<Known>, flow: &DecidedFlow, reason: EndReason, closed_ns: u64) {
        let duration = between(flow.opened_ns, closed_ns);
        match known {
            Some(Known { flow: live, slot, .. }) => {
                count(&live, flow);
                self.ledger.leave(slot, Ended { flow: live, reason, detail: None, duration });
            }
            None => {
                let Some(live) = self.live(flow).map(|(live, _)| Arc::new(live)) else { return };
                self.ledger.note(Ended { flow: live, reason, detail: None, duration });
            }
        }
    }

    fn live(&self, flow: &DecidedFlow) -> Option<(LiveFlow, Arc<Rule>)> {
        let rule = self.shared.rule(flow.number)?;
        let id: FlowId = (self.next_id)();
        let mut live = LiveFlow::new(id);
        let age = between(flow.opened_ns, monotonic_ns());
        live.opened = live.opened.checked_sub(age).unwrap_or(live.opened);
        live.since = SystemTime::now().checked_sub(age).unwrap_or(live.since);
        live.decide(rule.decided(flow.client));
        live.shunted();
        count(&live, flow);
        Some((live, rule))
    }

    /// Frees ports that were unused for long enough; earlier if ports are short.
    fn rest(&mut self, now: Instant) {
        let memory = self.shared.memory();
        let mut lacking = (memory.count() / 4).saturating_sub(memory.free());
        while let Some((since, closing)) = self.resting.front() {
            if lacking == 0 && *since + TIME_WAIT > now {
                break;
            }
            memory.release(*closing);
            lacking = lacking.saturating_sub(1);
            self.resting.pop_front();
        }
        while let Some((_, closing)) = self.lingering.front().filter(|(since, _)| *since + LINGERS <= now) {
            memory.release(*closing);
            self.lingering.pop_front();
        }
    }

    /// Shows connections of some age as flows in flight, and ends those whose time is over.
    fn look(&mut self, now: Instant, driver: &mut dyn Driver) {
        let now_ns = now.as_nanos() + self.monotonic;
        for slot in 0..self.shared.memory().count() {
            let Some(standing) = self.shared.memory().standing(slot) else { continue };
            let flow = self.shared.memory().look(standing);
            let age = between(flow.opened_ns, now_ns);
            if age < LOOK_EVERY {
                continue;
            }
            let rule = match self.known.get(&slot) {
                Some(known) => {
                    count(&known.flow, &flow);
                    known.rule.clone()
                }
                None => {
                    let Some((live, rule)) = self.live(&flow) else { continue };
                    let flow = Arc::new(live);
                    flow.set_waker(&self.waker);
                    let entered = self.ledger.enter(flow.clone());
                    self.known.insert(slot, Known { flow, slot: entered, rule: rule.clone() });
                    rule
                }
            };
            let idle = between(self.shared.memory().last_ns(standing), now_ns);
            if let Some(reason) = rule.due(&flow, age, idle) {
                if reason == EndReason::ConnectTimeout {
                    // The server may be reached by another neighbour now.
                    self.shared.forget_client(&flow);
                }
                self.end(now, standing, reason, driver);
            }
        }
    }

    /// Ends the flows that an operator wants to end.
    pub(super) fn end_unwanted(&mut self, now: Instant, driver: &mut dyn Driver) {
        let wished = |known: &Known| {
            // A wake consumes the waker, so a new one is set.
            known.flow.set_waker(&self.waker);
            known.flow.ending()
        };
        let ending: Vec<_> =
            self.known.iter().filter_map(|(slot, known)| Some((*slot, wished(known)?))).collect();
        for (slot, reason) in ending {
            if let Some(standing) = self.shared.memory().standing(slot) {
                self.end(now, standing, reason, driver);
            }
        }
    }

    /// Ends a connection with a reset to both sides, unless it is over already.
    fn end(&mut self, now: Instant, standing: Closing, reason: EndReason, driver: &mut dyn Driver) {
        if !self.shared.memory().kill(standing) {
            return;
        }
        let flow = self.shared.memory().look(standing);
        for (side, resets) in reset::both(&flow).into_iter().enumerate() {
            let side = &flow.sides[side];
            let hop: Hop = hops::hop(side.egress, side.to);
            resets.iter().for_each(|packet| driver.send(packet, hop));
        }
        driver.flush();
        let known = self.known.remove(&standing.number());
        self.record(known, &flow, reason, now.as_nanos() + self.monotonic);
        self.lingering.push_back((now, standing));
    }

    /// Ends all connections. One that has already ended keeps its own reason.
    pub(super) fn stop(&mut self, now: Instant, driver: &mut dyn Driver) {
        self.shared.memory().renew(0);
        self.reap(now);
        for slot in 0..self.shared.memory().count() {
            if let Some(standing) = self.shared.memory().standing(slot) {
                self.end(now, standing, EndReason::Shutdown, driver);
            }
        }
        self.reap(now);
    }
}

impl Shared {
    fn forget_client(&self, flow: &DecidedFlow) {
        let key = DecidedKey { client: flow.client.ip(), local: flow.local };
        lock(&self.decided).remove(&key);
        // An error means that it is not in the map.
        let _ = self.memory.forget(&key);
    }
}

impl Rule {
    fn decided(&self, client: SocketAddr) -> Decided {
        let flow = Flow {
            protocol: Protocol::Tcp,
            intercept: Intercept::Engine,
            listener: self.listener.clone(),
            client,
            orig_dst: self.orig_dst.clone(),
            host: None,
            process: None,
            user: None,
        };
        Decided::new(flow, Some(self.verdict.clone()))
    }

    /// Returns the reason to end a connection now, if there is one.
    fn due(&self, flow: &DecidedFlow, age: Duration, idle: Duration) -> Option<EndReason> {
        match flow.state {
            DecidedState::Syn if age >= self.connect => Some(EndReason::ConnectTimeout),
            DecidedState::SynAck if age >= HANDSHAKE.max(self.connect) => Some(EndReason::ClientGone),
            _ if self.lifetime.is_some_and(|most| age >= most) => Some(EndReason::Lifetime),
            _ if idle >= self.idle => Some(EndReason::Idle),
            _ => None,
        }
    }
}

/// Raises the counts to these values; they never shrink.
fn count(live: &LiveFlow, flow: &DecidedFlow) {
    let (up, down) = live.bytes();
    let [client, server] = flow.sides;
    live.count(client.bytes.saturating_sub(up), server.bytes.saturating_sub(down));
    if flow.connected_ns > 0 {
        live.connected(between(flow.opened_ns, flow.connected_ns));
    }
}
