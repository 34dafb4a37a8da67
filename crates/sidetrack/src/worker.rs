//! A worker: one thread with a single-threaded runtime, its own sockets on every listener's port (`SO_REUSEPORT`) and its
//! own ledger. On the data path, workers share only the snapshot of the configuration and the budget of descriptors.

mod accept;
mod admission;
mod far;
mod memory;
mod moved;
mod waiting;
mod wires;

pub use admission::Admission;
pub use far::WAITING_MAX as FAR_WAITING_MAX;
pub use memory::{Memory, MemorySeen};
pub use moved::{Exit, Moved, MovedDatagrams, Resting};
use sidetrack_sys::sync::lock;
use waiting::Places;
pub use waiting::{CROWDED, Idle, Place};
pub use wires::{
    Adopting, Adoption, Given, Handed, Joins, LetGo, Obstacle, Returned, Stays, Wired, Wires, WiresSeen,
};

use crate::agreement::InForce;
use crate::carry::tunnel::{AskDialing, Tunnels};
use crate::carry::warm::{Room, Warm};
use crate::carry::{Dialing, Failure, Stream};
use crate::config::Config;
use crate::function::Library;
use crate::intercept::Listening;
use crate::intercept::hold::Hold;
use crate::live::{Clock, Decided, Ledger, LiveFlow, Step};
use crate::process::Owners;
use crate::reactor;
use arc_swap::ArcSwap;
use sidetrack_core::association::Dropped;
use sidetrack_core::flow::{EndReason, Flow, FlowId};
use sidetrack_core::limit::{Budget, SourceLimit};
use sidetrack_core::policy::Verdict;
use sidetrack_core::socks::v6::{SessionId, SessionLimits, SessionTable};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often a worker checks for flows whose deadline has passed.
const SWEEP: Duration = Duration::from_millis(100);

/// Most client addresses that `limits.max_flows_per_client` counts at the same time.
const SOURCES_MAX: usize = 65_536;

/// Without `limits.max_flows_per_client`, one client may have 1/`CLIENT_SHARE` of all flows.
const CLIENT_SHARE: u64 = 2;

/// Without `limits.max_handshakes`, 1/`HANDSHAKE_SHARE` of all flows may be in their handshakes.
const HANDSHAKE_SHARE: u64 = 4;

/// Warm connections that are allowed if none were reserved, because no rule needed any at the start. The descriptors
/// reserved for other uses than flows suffice for them.
pub const WARM_MIN: usize = 16;

/// State shared by all workers of a process.
#[derive(Debug)]
pub struct Shared {
    /// The configuration in force.
    pub config: Arc<ArcSwap<Config>>,
    /// How connections are dialled.
    pub dialing: ArcSwap<Dialing>,
    /// Finds the processes of local connections.
    pub owners: Owners,
    /// The functions that rules apply to flows.
    pub functions: Library,
    /// The data-flow agreement in force.
    pub agreement: ArcSwap<InForce>,
    budget: Mutex<Budget>,
    per_client: Mutex<SourceLimit>,
    /// `limits.max_flows_per_client` is set, and so applies to every client.
    is_client_bound: bool,
    handshakes: Arc<Places>,
    /// Connections that are idle between requests.
    idle: Arc<Places>,
    /// QUIC handshakes that were ended to make room for others.
    quic_left: AtomicU64,
    /// Datagrams that were not passed on, in the order of [`Dropped::ALL`].
    dropped: [AtomicU64; Dropped::ALL.len()],
    /// Whether no new flow begins, because the process is told to stop.
    leaving: AtomicBool,
    next_flow: AtomicU64,
    warm_room: Arc<Room>,
    /// Sessions and tokens of SOCKS6 clients.
    pub sessions: Arc<Mutex<SessionTable>>,
    /// Connections that are accepted only when the far side has accepted.
    hold: Option<Arc<Hold>>,
    /// Flows that the kernel has taken over.
    wires: Option<Arc<Wires>>,
    clock: Clock,
    /// Where flows go when another process takes over.
    exit: Exit,
    memory: Memory,
    resting: Resting,
}

impl Shared {
    /// Whether memory is short.
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Lets no new flow of UDP begin.
    pub fn leave(&self) {
        self.leaving.store(true, Relaxed);
    }

    /// Where flows go when another process takes over.
    pub const fn exit(&self) -> &Exit {
        &self.exit
    }

    /// Lets flows begin again after [`Shared::leave`].
    pub fn stay(&self) {
        self.leaving.store(false, Relaxed);
    }

    /// The state of a new process with this configuration and budget.
    pub fn new(
        config: Arc<ArcSwap<Config>>,
        dialing: Dialing,
        owners: Owners,
        budget: Budget,
        clock: Clock,
    ) -> Self {
        let limits = config.load().limits;
        let count = |flows: u64| usize::try_from(flows).unwrap_or(usize::MAX);
        let flows = budget.flows().max;
        let per_client = match limits.max_flows_per_client {
            Some(most) => SourceLimit::new(most, SOURCES_MAX),
            // Every counted client has a flow, so the table needs no more entries than there are flows.
            None => SourceLimit::new(
                u32::try_from(flows.div_ceil(CLIENT_SHARE)).unwrap_or(u32::MAX),
                count(flows),
            ),
        };
        let handshakes = limits.max_handshakes.map_or(flows / HANDSHAKE_SHARE, u64::from);
        Self {
            config,
            dialing: ArcSwap::from_pointee(dialing),
            owners,
            functions: Library::new(clock),
            agreement: ArcSwap::default(),
            budget: Mutex::new(budget),
            per_client: Mutex::new(per_client),
            is_client_bound: limits.max_flows_per_client.is_some(),
            handshakes: Places::new(count(handshakes)),
            // Unlimited: idle connections are closed when others need the room.
            idle: Places::new(usize::MAX),
            quic_left: AtomicU64::new(0),
            dropped: Default::default(),
            leaving: AtomicBool::new(false),
            next_flow: AtomicU64::new(1),
            warm_room: Arc::new(Room::new(WARM_MIN)),
            sessions: Arc::new(Mutex::new(SessionTable::new(
                SessionLimits::default(),
                sidetrack_sys::random::bytes(),
            ))),
            hold: None,
            wires: None,
            clock,
            exit: Exit::default(),
            memory: Memory::default(),
            resting: Resting::default(),
        }
    }

    /// Some connections are held until the far side has accepted.
    #[must_use]
    pub fn with_hold(self, hold: Option<Arc<Hold>>) -> Self {
        Self { hold, ..self }
    }

    /// The connections that are held.
    pub const fn hold(&self) -> Option<&Arc<Hold>> {
        self.hold.as_ref()
    }

    /// The kernel may take flows over.
    #[must_use]
    pub fn with_wires(self, wires: Option<Arc<Wires>>) -> Self {
        Self { wires, ..self }
    }

    /// The flows that the kernel has taken over, if it may.
    pub const fn wires(&self) -> Option<&Arc<Wires>> {
        self.wires.as_ref()
    }

    /// Reserves descriptors for this number of warm connections; at least [`WARM_MIN`] may be used.
    #[must_use]
    pub fn with_warm(mut self, connections: usize) -> Self {
        self.warm_room = Arc::new(Room::new(connections.max(WARM_MIN)));
        self
    }

    /// The number of pipes for `splice(2)` that are reserved for all workers together.
    pub fn pipes(&self) -> usize {
        let pipes = lock(&self.budget).pipes();
        usize::try_from(pipes).unwrap_or(usize::MAX)
    }

    /// The clock of all workers.
    pub const fn clock(&self) -> Clock {
        self.clock
    }

    /// Returns how many connections were closed to make room for others since the start: before the end of their handshake or
    /// first request, and while idle between requests.
    pub fn closed_for_others(&self) -> (u64, u64) {
        (self.handshakes.left() + self.quic_left.load(Relaxed), self.idle.left())
    }

    /// Returns how many datagrams were not passed on since the start, by the reason.
    pub fn datagrams_dropped(&self) -> impl Iterator<Item = (Dropped, u64)> {
        Dropped::ALL.into_iter().zip(&self.dropped).map(|(why, count)| (why, count.load(Relaxed)))
    }

    /// The number of the next flow.
    pub fn next_flow_id(&self) -> FlowId {
        FlowId(self.next_flow.fetch_add(1, Relaxed))
    }

    /// Flows of an earlier process have numbers up to this one.
    pub fn numbers_begin_after(&self, last: u64) {
        self.number_from(last.saturating_add(1));
    }

    /// The number that the next flow will have.
    pub fn flows_numbered(&self) -> u64 {
        self.next_flow.load(Relaxed)
    }

    /// Numbers flows from here on, if that is further than now.
    pub fn number_from(&self, number: u64) {
        self.next_flow.fetch_max(number, Relaxed);
    }
}

/// A client that has just connected.
#[derive(Debug)]
pub struct Arrived {
    /// The connection to the client.
    pub stream: Stream,
    /// The address of the peer.
    pub peer: SocketAddr,
    /// Bytes that were already read from it.
    pub held: Vec<u8>,
}

/// Serves one client of a listener until its end, in a task of its own.
pub type Serve = Box<dyn Fn(Arc<Worker>, Arc<Listening>, Arrived) + Send + Sync>;

/// A listener, and the stage that serves its clients: it uses workers, so `app` gives it to them.
pub struct Service {
    /// The state that the listener's connections share.
    pub listening: Arc<Listening>,
    /// Serves each client.
    pub serve: Serve,
    /// Whether sessions may wait for its connections.
    pub holds: bool,
}

impl Service {
    fn take(&self, worker: &Arc<Worker>, arrived: Arrived) {
        (self.serve)(worker.clone(), self.listening.clone(), arrived);
    }
}

/// One worker.
#[derive(Debug)]
pub struct Worker {
    /// Its flows.
    pub ledger: Arc<Ledger>,
    /// The clock of all workers.
    pub clock: Clock,
    /// Sessions and tokens of SOCKS6 clients.
    pub sessions: Arc<Mutex<SessionTable>>,
    /// Its tunnels to far sides.
    pub tunnels: Tunnels,
    /// Its warm connections to servers.
    pub warm: Warm,
    /// The far sides of tunnels that it serves.
    far: far::Far,
    shared: Arc<Shared>,
}

impl Worker {
    /// A worker with this ledger.
    pub fn new(shared: Arc<Shared>, ledger: Arc<Ledger>) -> Self {
        let asked = shared.clone();
        let dialing: AskDialing = Arc::new(move || asked.dialing.load_full());
        let tunnels = Tunnels::new(dialing.clone(), shared.config.clone());
        let warm = Warm::new(dialing, shared.warm_room.clone());
        let (clock, sessions) = (shared.clock, shared.sessions.clone());
        Self { ledger, clock, sessions, tunnels, warm, far: far::Far::default(), shared }
    }

    /// The configuration in force.
    pub fn config(&self) -> Arc<Config> {
        self.shared.config.load_full()
    }

    /// How connections are dialled.
    pub fn dialing(&self) -> Arc<Dialing> {
        self.shared.dialing.load_full()
    }

    /// The flows that the kernel has taken over, if it may.
    pub fn wires(&self) -> Option<&Arc<Wires>> {
        self.shared.wires()
    }

    /// Where flows go when another process takes over.
    pub fn exit(&self) -> &Exit {
        self.shared.exit()
    }

    /// Finds the processes of local connections.
    pub fn owners(&self) -> &Owners {
        &self.shared.owners
    }

    /// The functions that rules apply to flows.
    pub fn functions(&self) -> &Library {
        &self.shared.functions
    }

    /// Stores the decision about a flow, after consulting the agreement if the rule requires that. Returns the verdict.
    pub fn judge(&self, config: &Config, live: &LiveFlow, flow: &Flow, verdict: Verdict) -> Verdict {
        if !verdict.asks_agreement() {
            live.decide(Decided::new(flow.clone(), Some(verdict.clone())).by(&config.policy));
            live.step(Step::Decided);
            return verdict;
        }
        loop {
            let in_force = self.shared.agreement.load_full();
            let judged = in_force.judge(config, flow, verdict.clone());
            live.decide(Decided::new(flow.clone(), Some(judged.clone())).by(&config.policy));
            // A change of the agreement checks all flows that are decided by then. Either it sees this flow, or the change is
            // seen here.
            if Arc::ptr_eq(&in_force, &self.shared.agreement.load()) {
                live.step(Step::Decided);
                return judged;
            }
        }
    }

    /// The number of the next flow.
    pub fn next_flow_id(&self) -> FlowId {
        self.shared.next_flow_id()
    }

    /// Fails if no new flow begins, because the process is told to stop. For flows without a connection that could be refused.
    ///
    /// # Errors
    /// With `shutdown`.
    pub fn begins_flows(&self) -> Result<(), Failure> {
        let why = "sidetrack is told to stop";
        if self.shared.leaving.load(Relaxed) { Err(Failure::new(EndReason::Shutdown, why)) } else { Ok(()) }
    }

    /// Adds datagrams that were not passed on, in the order of [`Dropped::ALL`].
    pub fn drop_datagrams(&self, counts: [u64; Dropped::ALL.len()]) {
        for (total, count) in self.shared.dropped.iter().zip(counts) {
            total.fetch_add(count, Relaxed);
        }
    }

    /// Keeps a SOCKS6 session from expiring while one of its flows goes on.
    pub fn flow_of(&self, session: SessionId) -> FlowOfSession {
        lock(&self.sessions).flow_began(&session);
        FlowOfSession { sessions: self.sessions.clone(), clock: self.clock, session }
    }

    /// Wakes overdue flows, and updates tunnels and warm connections after a change of the configuration. `tend` is called each
    /// time, for what other stages keep on this thread. Does not return.
    pub async fn sweep(self: Arc<Self>, tend: fn()) {
        let mut config = self.config();
        self.hold(&config);
        loop {
            reactor::sleep(SWEEP).await;
            self.ledger.wake_due(self.clock.now());
            tend();
            if !Arc::ptr_eq(&config, &self.shared.config.load()) {
                config = self.config();
                self.hold(&config);
            }
        }
    }

    /// Keeps the connections open that this configuration asks for.
    fn hold(&self, config: &Config) {
        self.tunnels.update(&config.tunnels);
        self.warm.update(&config.policy);
    }

    /// Tells the peers of tunnels and warm connections that this worker stops.
    pub async fn part(&self) {
        self.warm.close();
        self.tunnels.close().await;
        self.far.close().await;
    }
}

/// A flow of a SOCKS6 session. On drop, the session's idle time starts again.
#[derive(Debug)]
pub struct FlowOfSession {
    sessions: Arc<Mutex<SessionTable>>,
    clock: Clock,
    session: SessionId,
}

impl Drop for FlowOfSession {
    fn drop(&mut self) {
        let mut sessions = lock(&self.sessions);
        sessions.flow_ended(self.clock.now(), &self.session);
    }
}

#[cfg(test)]
mod tests {
    use super::memory::FEW;
    use super::*;
    use sidetrack_core::limit::Lack;
    use sidetrack_core::pressure;
    use std::net::IpAddr;

    fn worker(limits: &str, budget: Budget) -> Worker {
        let config = Config::from_text("test", &format!("version = 1\nlimits = {{ {limits} }}"))
            .expect("a configuration");
        let config = Arc::new(ArcSwap::from_pointee(config));
        let shared = Shared::new(config, Dialing::default(), Owners::Ourselves, budget, Clock::start());
        Worker::new(Arc::new(shared), Arc::default())
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn one_client_has_at_most_half_of_all_flows_unless_it_speaks_for_many() {
        let worker = worker("", Budget::from_nofile(40, 0));
        let ask = |from: &str, is_own| Admission::ask(&worker, ip(from), || is_own);
        let half = usize::try_from(Budget::from_nofile(40, 0).flows().max / 2).unwrap();
        let mut one: Vec<_> =
            (0..half).map(|n| ask(&format!("2001:db8::{n:x}"), false).expect("room")).collect();
        let refused = ask("2001:db8::ffff", false).expect_err("the share of its /64 is taken");
        assert!(refused.contains("2001:db8::ffff") && refused.contains("max_flows_per_client"), "{refused}");
        let others = [ask("2001:db8:0:1::1", false), ask("192.0.2.1", false), ask("2001:db8::1", true)];
        assert!(
            others.iter().all(Result::is_ok),
            "others have room, and so has a client that speaks for many"
        );
        one.pop();
        ask("2001:db8::ffff", false).expect("room again");
    }

    #[test]
    fn an_idle_connection_leaves_for_a_flow_that_has_no_room_and_whose_client_has_a_share() {
        let worker = worker("max_flows_per_client = 2", Budget::from_nofile(1000, 0).at_most(3));
        let ask = |from: &str| Admission::ask(&worker, ip(from), || false);
        let [first, second, other] =
            ["192.0.2.1", "192.0.2.1", "192.0.2.2"].map(|from| ask(from).expect("room"));
        ask("192.0.2.3").expect_err("there is no room, and none is idle");
        let (idle, _) = worker.shared.idle.enter();
        ask("192.0.2.1").expect_err("it has its share");
        assert_eq!(worker.shared.closed_for_others(), (0, 0), "so none leaves for it");
        let third = ask("192.0.2.3").expect("room");
        assert_eq!(worker.shared.closed_for_others(), (0, 1));
        ask("192.0.2.3").expect_err("one leaves once");
        drop((other, idle));
        ask("192.0.2.3").expect_err("what left is not there twice");
        drop((first, second, third));
        let all: Vec<_> = (4..7).map(|n| ask(&format!("192.0.2.{n}")).expect("room again")).collect();
        ask("192.0.2.9").expect_err("no more than before");
        drop(all);
    }

    #[test]
    fn no_flow_begins_while_memory_is_short_and_none_leaves_for_it() {
        let worker = worker("", Budget::from_nofile(1000, 0));
        let ask = || Admission::ask(&worker, ip("192.0.2.1"), || true);
        let few: Vec<_> = (0..FEW).map(|_| ask().expect("room")).collect();
        let (_idle, _) = worker.shared.idle.enter();
        let memory = pressure::Memory { used_bytes: 90 << 20, limit_bytes: 100 << 20 };
        worker.shared.memory().set(memory, true);
        let refused = ask().expect_err("memory is short");
        assert!(refused.starts_with("memory is short: 90 % of the 100 MiB"), "{refused}");
        let datagrams = Admission::of_datagrams(&worker, ip("192.0.2.1"), false);
        assert!(matches!(datagrams, Err(Lack::Memory(_))), "{datagrams:?}");
        let beside = Admission::beside(&worker.shared, ip("192.0.2.1"), true);
        assert!(matches!(beside, Err(Lack::Memory(_))), "{beside:?}");
        assert_eq!((worker.shared.memory().seen().refused, worker.shared.closed_for_others()), (3, (0, 0)));
        worker.shared.memory().set(memory, false);
        ask().expect("there is enough again");
        worker.shared.memory().set(memory, true);
        drop(few);
        ask().expect("a few flows are always served");
    }

    #[test]
    fn a_bound_that_is_written_holds_for_every_client() {
        let worker = worker("max_flows_per_client = 1", Budget::from_nofile(1000, 0));
        let first = Admission::ask(&worker, ip("127.0.0.1"), || true).expect("room");
        Admission::ask(&worker, ip("127.0.0.1"), || true).expect_err("as written");
        drop(first);
        Admission::ask(&worker, ip("127.0.0.1"), || true).expect("room again");
    }
}
