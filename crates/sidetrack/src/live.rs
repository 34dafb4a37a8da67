//! Running flows. They are shared between the worker that moves a flow's bytes and the threads that inspect or
//! end it.
//!
//! Each worker owns one [`Ledger`]. Only the admin interface and the sweep for time-outs compete for its lock.
//! Byte counts are atomics that only the owning worker writes.

mod afar;
mod batch;
pub mod keys;
mod ledger;
pub mod legs;
mod spared;
mod spread;
mod tally;
mod trace;
mod waiting;
pub mod work;

pub use crate::reactor::profile;
pub use afar::Afar;
pub use batch::{Batch, Past, Texts};
pub use ledger::{Ledger, Slot};
pub use spared::Spared;
pub use spread::Spread;
pub use tally::Tally;
pub use trace::{Step, TcpSeen, Trace};
pub use waiting::{BYTES_MAX, ENDED_MAX};

use crate::reactor::now;
use sidetrack_core::deadlines::Deadlines;
use sidetrack_core::engine::Stamps;
use sidetrack_core::flow::{EndReason, Flow, FlowId, HostName, Side};
use sidetrack_core::policy::{Action, Policy, Verdict};
use sidetrack_sys::sync::lock;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::Waker;
use std::time::{Duration, Instant, SystemTime};

/// What is known about a flow after the policy decided.
#[derive(Clone, Debug)]
pub struct Decided {
    /// The flow as policy saw it.
    pub flow: Flow,
    /// The policy's verdict. `None` if the flow ended before policy was asked.
    pub verdict: Option<Verdict>,
    /// The policy that was asked. It is gone if many others have replaced it since, or if none was asked.
    pub policy: Weak<Policy>,
}

impl Decided {
    /// A flow that policy was not asked about, or not by its rules in order.
    pub const fn new(flow: Flow, verdict: Option<Verdict>) -> Self {
        Self { flow, verdict, policy: Weak::new() }
    }

    /// The same, with the policy that was asked.
    #[must_use]
    pub fn by(self, policy: &Arc<Policy>) -> Self {
        Self { policy: Arc::downgrade(policy), ..self }
    }

    /// The rule that decided. `None` if the default did, or if nothing was decided.
    pub fn rule(&self) -> Option<&Arc<str>> {
        self.verdict.as_ref()?.rule.as_ref()
    }

    /// The agreement's decision, if the rule refers to it.
    pub fn agreement(&self) -> Option<&str> {
        self.verdict.as_ref()?.agreement.as_deref()
    }

    /// The action for the flow, once it is decided.
    pub fn action(&self) -> Option<&Action> {
        Some(&self.verdict.as_ref()?.action)
    }
}

/// The clock that all workers share: nanoseconds since the program began, in the type of the core crate.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts the clock.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// The present time, in the type of the core crate.
    pub fn now(&self) -> sidetrack_core::time::Instant {
        let nanos = u64::try_from(now().saturating_duration_since(self.0).as_nanos()).unwrap_or(u64::MAX);
        sidetrack_core::time::Instant::from_nanos(nanos)
    }

    /// Converts a time of the core crate.
    pub fn instant(&self, at: sidetrack_core::time::Instant) -> Instant {
        self.0 + Duration::from_nanos(at.as_nanos())
    }
}

/// The transport of a flow, if its carrier leaves a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// A stream of a tunnel's QUIC connection.
    Quic,
    /// A TLS connection of a tunnel, if UDP does not get through.
    Tls,
    /// A connection to the server that was opened before the flow came.
    Warm,
    /// A connection to the server, dialled for a flow that another node of the overlay caught.
    Direct,
}

impl Transport {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Quic, Self::Tls, Self::Warm, Self::Direct];

    /// The word in records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tls => "tls",
            Self::Warm => "warm",
            Self::Direct => "direct",
        }
    }
}

/// What carried a flow, if its carrier leaves a choice: `quic 203.0.113.5:4433`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The transport.
    pub transport: Transport,
    /// The address it leads to: the tunnel's far side, or the server.
    pub address: SocketAddr,
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.transport.as_str(), self.address)
    }
}

/// Which sides of a flow use Multipath TCP (RFC 8684).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Multipath {
    /// The client's side.
    pub client: bool,
    /// The server's side, or that of the first hop.
    pub server: bool,
}

impl Multipath {
    /// The names of these sides, client first.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        [self.client.then_some("client"), self.server.then_some("server")].into_iter().flatten()
    }
}

/// One running flow.
#[derive(Debug)]
pub struct LiveFlow {
    /// Its number, unique in this process.
    pub id: FlowId,
    /// When it was captured (wall clock, for people).
    pub since: SystemTime,
    /// When it was captured (for durations).
    pub opened: Instant,
    decided: Mutex<Option<Arc<Decided>>>,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
    packets_up: AtomicU64,
    packets_down: AtomicU64,
    /// Bytes of our own that go to the server before the client's. They are not payload and not counted.
    preface: AtomicU64,
    connect_us: AtomicU64,
    first_byte_us: AtomicU64,
    sniff_us: AtomicU64,
    held_us: AtomicU64,
    /// Set once.
    taken: OnceLock<Taken>,
    /// Set once.
    greeted: OnceLock<HostName>,
    shunted: AtomicBool,
    /// Multipath TCP towards the client, and towards the server.
    multipath: [AtomicBool; 2],
    trace: Mutex<Trace>,
    /// The admin interface waits for what TCP measures at both sides.
    tcp_wanted: AtomicBool,
    /// TCP states of both sides with their times, for flows of the packet engine.
    states: Mutex<Option<Box<Stamps>>>,
    /// Milliseconds from `opened` to the last moved byte.
    active_ms: AtomicU64,
    /// When the owner must be woken, on the workers' clock.
    deadline: AtomicU64,
    due_reason: AtomicU8,
    /// When the sweep checks it next. May be later than the deadline only until `looks` is updated.
    look: AtomicU64,
    /// The ledger's schedule of checks, and the flow's index in it.
    looks: OnceLock<(Arc<Mutex<Deadlines>>, u32)>,
    /// 0, or 1 + the index in [`EndReason::ALL`] of the reason with which another thread ends it.
    ending: AtomicU8,
    waker: Mutex<Option<Waker>>,
    /// Whether another process wants it: the wish waits, or its owner has not answered yet.
    elsewhere: [AtomicBool; 2],
}

const UNSET: u64 = u64::MAX;

/// Time until an owner that was woken because of its deadline is woken again, if it has not reacted.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

fn code_of(reason: EndReason) -> u8 {
    let index = EndReason::ALL.iter().position(|other| *other == reason).unwrap_or(0);
    u8::try_from(index + 1).unwrap_or(u8::MAX)
}

fn reason_of(code: u8) -> Option<EndReason> {
    EndReason::ALL.get(usize::from(code).checked_sub(1)?).copied()
}

impl LiveFlow {
    /// A flow that was just captured.
    pub fn new(id: FlowId) -> Self {
        Self::caught(id, SystemTime::now(), now())
    }

    /// A flow that was captured at this time.
    pub fn caught(id: FlowId, since: SystemTime, opened: Instant) -> Self {
        Self {
            id,
            since,
            opened,
            decided: Mutex::new(None),
            bytes_up: AtomicU64::new(0),
            bytes_down: AtomicU64::new(0),
            packets_up: AtomicU64::new(0),
            packets_down: AtomicU64::new(0),
            preface: AtomicU64::new(0),
            connect_us: AtomicU64::new(UNSET),
            first_byte_us: AtomicU64::new(UNSET),
            sniff_us: AtomicU64::new(UNSET),
            held_us: AtomicU64::new(UNSET),
            taken: OnceLock::new(),
            greeted: OnceLock::new(),
            shunted: AtomicBool::new(false),
            multipath: [AtomicBool::new(false), AtomicBool::new(false)],
            trace: Mutex::default(),
            tcp_wanted: AtomicBool::new(false),
            states: Mutex::new(None),
            active_ms: AtomicU64::new(0),
            deadline: AtomicU64::new(UNSET),
            due_reason: AtomicU8::new(0),
            look: AtomicU64::new(UNSET),
            looks: OnceLock::new(),
            ending: AtomicU8::new(0),
            waker: Mutex::new(None),
            elsewhere: [AtomicBool::new(false), AtomicBool::new(false)],
        }
    }

    /// Notes the name in the client's TLS hello, if the client had asked by another name.
    pub fn greeted(&self, name: HostName) {
        // The first hello counts. It is checked more than once.
        let _ = self.greeted.set(name);
    }

    /// The name in the client's TLS hello, if the client had asked by another name.
    pub fn tls_name(&self) -> Option<&HostName> {
        self.greeted.get()
    }

    /// What is known about it, once policy has decided.
    pub fn decided(&self) -> Option<Arc<Decided>> {
        lock(&self.decided).clone()
    }

    /// Stores the flow's data and the policy's verdict. A later call replaces the earlier one.
    pub fn decide(&self, decided: Decided) {
        *lock(&self.decided) = Some(Arc::new(decided));
    }

    /// Counts bytes from client to server (`up`) and back, and marks the flow as active.
    pub fn count(&self, up: u64, down: u64) {
        if up > 0 {
            let ours = self.preface.load(Relaxed).min(up);
            if ours > 0 {
                self.preface.store(self.preface.load(Relaxed) - ours, Relaxed);
            }
            self.bytes_up.store(self.bytes_up.load(Relaxed) + up - ours, Relaxed);
        }
        if down > 0 {
            self.bytes_down.store(self.bytes_down.load(Relaxed) + down, Relaxed);
        }
    }

    /// Sets how many of the next bytes towards the server are ours (a PROXY protocol header). They are not
    /// counted.
    pub fn put_preface(&self, bytes: u64) {
        self.preface.store(bytes, Relaxed);
    }

    /// Bytes from client to server, and from server to client, so far.
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes_up.load(Relaxed), self.bytes_down.load(Relaxed))
    }

    /// Sets the numbers of datagrams from client to server, and from server to client.
    pub fn set_packets(&self, up: u64, down: u64) {
        self.packets_up.store(up, Relaxed);
        self.packets_down.store(down, Relaxed);
    }

    /// Datagrams from client to server, and from server to client, so far.
    pub fn packets(&self) -> (u64, u64) {
        (self.packets_up.load(Relaxed), self.packets_down.load(Relaxed))
    }

    /// Notes that bytes moved `after` the capture.
    pub fn touch(&self, after: Duration) {
        self.active_ms.store(u64::try_from(after.as_millis()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Time since the capture.
    pub fn age(&self) -> Duration {
        now().saturating_duration_since(self.opened)
    }

    /// Time since bytes last moved.
    pub fn idle(&self) -> Duration {
        self.age().saturating_sub(Duration::from_millis(self.active_ms.load(Relaxed)))
    }

    /// Notes when the path to the server was set up.
    pub fn connected(&self, after: Duration) {
        self.connect_us.store(u64::try_from(after.as_micros()).unwrap_or(UNSET - 1), Relaxed);
    }

    /// Time until the path to the server was set up.
    pub fn connect_time(&self) -> Option<Duration> {
        Some(self.connect_us.load(Relaxed)).filter(|us| *us != UNSET).map(Duration::from_micros)
    }

    /// Notes the first byte from the server, once.
    pub fn first_byte(&self, after: Duration) {
        if self.first_byte_us.load(Relaxed) == UNSET {
            self.first_byte_us.store(u64::try_from(after.as_micros()).unwrap_or(UNSET - 1), Relaxed);
        }
    }

    /// Time until the first byte from the server.
    pub fn first_byte_time(&self) -> Option<Duration> {
        Some(self.first_byte_us.load(Relaxed)).filter(|us| *us != UNSET).map(Duration::from_micros)
    }

    /// Notes how long the flow waited so that a rule could see its first bytes.
    pub fn sniffed(&self, wait: Duration) {
        self.sniff_us.store(u64::try_from(wait.as_micros()).unwrap_or(UNSET - 1), Relaxed);
    }

    /// Notes how long the client's SYN was held until its answer.
    pub fn held(&self, wait: Duration) {
        self.held_us.store(u64::try_from(wait.as_micros()).unwrap_or(UNSET - 1), Relaxed);
    }

    /// How long the client's SYN was held, if it was.
    pub fn held_wait(&self) -> Option<Duration> {
        Some(self.held_us.load(Relaxed)).filter(|us| *us != UNSET).map(Duration::from_micros)
    }

    /// How long the flow waited for its first bytes, if a rule needed them.
    pub fn sniff_wait(&self) -> Option<Duration> {
        Some(self.sniff_us.load(Relaxed)).filter(|us| *us != UNSET).map(Duration::from_micros)
    }

    /// Notes that a step of the set-up is done.
    pub fn step(&self, step: Step) {
        lock(&self.trace).step(step, self.age());
    }

    /// Changes the decision trace.
    pub fn traced(&self, change: impl FnOnce(&mut Trace)) {
        change(&mut lock(&self.trace));
    }

    /// The decision trace so far.
    pub fn trace(&self) -> Trace {
        lock(&self.trace).clone()
    }

    /// What TCP measured at a side when it was asked last.
    pub fn tcp(&self, side: Side) -> Option<TcpSeen> {
        lock(&self.trace).tcp_of(side)
    }

    /// Asks the owner to note what TCP measures at both sides.
    pub fn want_tcp(&self) {
        self.tcp_wanted.store(true, Relaxed);
        self.wake();
    }

    /// Whether such a wish waits. It is fulfilled with this call, which only the owner makes.
    pub fn takes_wish_for_tcp(&self) -> bool {
        self.tcp_wanted.load(Relaxed) && self.tcp_wanted.swap(false, Relaxed)
    }

    /// Whether the wish waits for its owner.
    pub fn waits_for_tcp(&self) -> bool {
        self.tcp_wanted.load(Relaxed)
    }

    /// Notes what carries the flow, if its carrier leaves a choice. The first call counts.
    pub fn carried_by(&self, taken: Option<Taken>) {
        if let Some(taken) = taken {
            let _ = self.taken.set(taken);
        }
    }

    /// What carries the flow, if its carrier leaves a choice and the path is set up.
    pub fn taken(&self) -> Option<Taken> {
        self.taken.get().copied()
    }

    /// Notes that its bytes bypass Sidetrack through an entry that we installed in the kernel.
    pub fn shunted(&self) {
        self.shunted.store(true, Relaxed);
    }

    /// Whether bytes of it bypassed Sidetrack.
    pub fn was_shunted(&self) -> bool {
        self.shunted.load(Relaxed)
    }

    /// Notes whether a side uses Multipath TCP. A later call replaces the earlier one.
    pub fn speaks_multipath(&self, side: Side, is_used: bool) {
        let [client, server] = &self.multipath;
        let place = if side == Side::Client { client } else { server };
        place.store(is_used, Relaxed);
    }

    /// The sides that use Multipath TCP.
    pub fn multipath(&self) -> Multipath {
        let [client, server] = &self.multipath;
        Multipath { client: client.load(Relaxed), server: server.load(Relaxed) }
    }

    /// Stores the TCP states that both sides have reached so far. A later call replaces the earlier one.
    pub fn reached(&self, states: &Stamps) {
        let mut place = lock(&self.states);
        match &mut *place {
            Some(known) => **known = *states,
            None => *place = Some(Box::new(*states)),
        }
    }

    /// The TCP states that both sides have reached. `None` if the kernel's TCP carries the flow.
    pub fn states(&self) -> Option<Stamps> {
        lock(&self.states).as_deref().copied()
    }

    /// Asks the owner to end the flow for `reason`. The first request counts; returns false for later ones.
    pub fn end(&self, reason: EndReason) -> bool {
        let first = self.ending.compare_exchange(0, code_of(reason), Relaxed, Relaxed).is_ok();
        self.wake();
        first
    }

    /// Wakes the owner.
    pub fn wake(&self) {
        if let Some(waker) = lock(&self.waker).take() {
            waker.wake();
        }
    }

    /// Sets when the sweep wakes the owner, and the end reason if nothing happens before. The sweep may be late
    /// by up to one of its periods.
    pub fn set_deadline(&self, deadline: Option<sidetrack_core::time::Instant>, reason: EndReason) {
        self.due_reason.store(code_of(reason), Relaxed);
        self.deadline.store(deadline.map_or(UNSET, |at| at.as_nanos()), Relaxed);
        self.be_looked_at();
    }

    /// When the owner must be woken, if a deadline is set.
    pub fn deadline(&self) -> Option<sidetrack_core::time::Instant> {
        let at = self.deadline.load(Relaxed);
        (at != UNSET).then(|| sidetrack_core::time::Instant::from_nanos(at))
    }

    /// Makes sure that the sweep checks the flow by its deadline. If the deadline moved to later, nothing is
    /// needed: the sweep comes earlier and sees the new deadline.
    fn be_looked_at(&self) {
        let deadline = self.deadline.load(Relaxed);
        if deadline >= self.look.load(Relaxed) {
            return;
        }
        if let Some((looks, place)) = self.looks.get() {
            lock(looks).by(*place, sidetrack_core::time::Instant::from_nanos(deadline));
            self.look.store(deadline, Relaxed);
        }
    }

    /// Called by the sweep: wakes the owner if the deadline has passed, and returns when to check again.
    fn looked_at(&self, now: sidetrack_core::time::Instant) -> Option<sidetrack_core::time::Instant> {
        let next = if self.overdue(now).is_some() {
            self.wake();
            (now + LOOK_AGAIN).as_nanos()
        } else {
            self.deadline.load(Relaxed)
        };
        self.look.store(next, Relaxed);
        (next != UNSET).then(|| sidetrack_core::time::Instant::from_nanos(next))
    }

    /// The reason of the deadline, if it has passed.
    pub fn overdue(&self, now: sidetrack_core::time::Instant) -> Option<EndReason> {
        let due = self.deadline.load(Relaxed) <= now.as_nanos();
        due.then(|| reason_of(self.due_reason.load(Relaxed))).flatten()
    }

    /// The reason with which another thread wants this flow to end.
    pub fn ending(&self) -> Option<EndReason> {
        reason_of(self.ending.load(Relaxed))
    }

    /// Sets the waker for requests to end the flow.
    pub fn set_waker(&self, waker: &Waker) {
        let mut slot = lock(&self.waker);
        if !slot.as_ref().is_some_and(|old| old.will_wake(waker)) {
            *slot = Some(waker.clone());
        }
    }
}

/// A flow that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The flow, with its final counts.
    pub flow: Arc<LiveFlow>,
    /// The end reason.
    pub reason: EndReason,
    /// Details such as hop, step and code, if there is more than the reason.
    pub detail: Option<Box<str>>,
    /// Time from the capture to the end.
    pub duration: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_to_end_is_kept_once() {
        let flow = LiveFlow::new(FlowId(1));
        assert_eq!(flow.ending(), None);
        assert!(flow.end(EndReason::Killed));
        assert!(!flow.end(EndReason::Idle));
        assert_eq!(flow.ending(), Some(EndReason::Killed));
    }
}
