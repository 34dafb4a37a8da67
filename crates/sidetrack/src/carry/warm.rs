//! Connections to servers that stand before a flow wants them (`warm` of a rule): a flow that takes one waits for no
//! handshake with its server. Each worker has its own.
//!
//! A rule with `to` has its connections from the start; other destinations are learnt from their first flow, are few,
//! and are forgotten when no flow has come for a while. A connection belongs to one flow: when it breaks the flow
//! ends, and nothing is said again on another.

use super::direct::Wishes;
use super::tunnel::AskDialing;
use super::{Failure, Order, gate, resolve};
use crate::reactor::{self, TcpStream, now, sleep, timeout};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::policy::{Action, Carry, Policy, Warm as Wanted};
use sidetrack_sys::sockopt;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Most destinations of a worker that are learnt from flows.
pub const LEARNT_MAX: usize = 32;

/// A learnt destination to which no flow has gone for so long is forgotten.
const LEARNT_IDLE: Duration = Duration::from_secs(60);

/// How long one attempt to connect may take.
const PATIENCE: Duration = Duration::from_secs(4);

/// After a failure, or a connection that its server closed before a flow had taken it: the first and the longest rest
/// before the next attempt; it doubles in between.
const FIRST_REST: Duration = Duration::from_millis(250);
const LONGEST_REST: Duration = Duration::from_secs(15);

thread_local! {
    /// The destinations of this worker.
    static OPEN: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
    /// The rules in force.
    static POLICY: RefCell<Option<Arc<Policy>>> = const { RefCell::new(None) };
}

/// How many connections all workers together may hold ready: what is set aside for them of the descriptors.
#[derive(Debug)]
pub struct Room {
    left: AtomicUsize,
}

impl Room {
    /// Room for so many.
    pub const fn new(connections: usize) -> Self {
        Self { left: AtomicUsize::new(connections) }
    }

    /// How many connections the rules of a policy could hold ready in so many workers.
    pub fn wanted(policy: &Policy, workers: usize) -> usize {
        let rules = policy.rules().iter().map(|rule| &rule.action).chain([policy.default_action()]);
        let of = |action: &Action| match action {
            Action::Carry(carry) => carry.warm.map_or(0, |warm| {
                let destinations = if carry.to.is_some() { 1 } else { LEARNT_MAX };
                usize::from(warm.ready).saturating_mul(destinations)
            }),
            Action::Deny => 0,
        };
        rules.map(of).fold(0, usize::saturating_add).saturating_mul(workers)
    }

    fn take(self: &Arc<Self>) -> Option<Place> {
        let less = |left: usize| left.checked_sub(1);
        self.left.fetch_update(Relaxed, Relaxed, less).ok().map(|_| Place(self.clone()))
    }
}

/// Leave to hold one connection, given back when dropped.
#[derive(Debug)]
struct Place(Arc<Room>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.left.fetch_add(1, Relaxed);
    }
}

/// The connections of the worker on whose thread it is asked.
pub struct Warm {
    dialing: AskDialing,
    room: Arc<Room>,
}

impl fmt::Debug for Warm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Warm").field("room", &self.room).finish_non_exhaustive()
    }
}

/// Whose connections are the same.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    destination: Destination,
    wanted: Wanted,
    mptcp: bool,
}

impl Key {
    fn of(carry: &Carry, destination: &Destination) -> Option<Self> {
        let wanted = carry.warm.filter(|_| carry.carrier == Carrier::Direct)?;
        Some(Self { destination: destination.clone(), wanted, mptcp: carry.mptcp })
    }
}

impl Warm {
    /// Connections that are dialled so, as many as there is room for.
    pub fn new(dialing: AskDialing, room: Arc<Room>) -> Self {
        Self { dialing, room }
    }

    /// Holds connections to the destinations that rules name, until they are those of `policy`. Those that are named
    /// still are not touched; what was learnt is forgotten, as rules may say something else now.
    pub fn update(&self, policy: &Arc<Policy>) {
        POLICY.set(Some(policy.clone()));
        let mut old = OPEN.take();
        let mut open: Vec<Held> = Vec::new();
        for rule in policy.rules() {
            let Action::Carry(carry) = &rule.action else { continue };
            let Some(key) = carry.to.as_ref().and_then(|to| Key::of(carry, to)) else { continue };
            if open.iter().all(|held| held.pool.key != key) {
                let found = old.iter().position(|held| !held.pool.is_learnt && held.pool.key == key);
                let kept = found.map(|index| old.swap_remove(index));
                open.push(kept.unwrap_or_else(|| self.hold(key, false)));
            }
        }
        OPEN.set(open);
    }

    /// A connection for this flow, with the server's address, if its rule holds any and one stands ready.
    pub fn take(&self, order: &Order<'_>) -> Option<(TcpStream, SocketAddr)> {
        // What a client asks for beyond a connection is done from the SYN on.
        let key = Key::of(order.carry, &order.destination).filter(|_| order.stack.is_empty())?;
        find(&key)?.take(order)
    }

    /// A flow has reached its server by itself: if its rule says so, the next one finds a connection ready. Whoever asks
    /// for servers that are not there teaches nothing.
    pub fn learn(&self, order: &Order<'_>) {
        let Some(key) = Key::of(order.carry, &order.destination).filter(|key| find(key).is_none()) else {
            return;
        };
        let held = self.hold(key, true);
        OPEN.with_borrow_mut(|open| {
            let learnt = open.iter().enumerate().filter(|(_, held)| held.pool.is_learnt);
            if learnt.clone().count() >= LEARNT_MAX
                && let Some((oldest, _)) = learnt.min_by_key(|(_, held)| held.pool.last_flow.get())
            {
                open.swap_remove(oldest);
            }
            open.push(held);
        });
    }

    /// Lets all go.
    pub fn close(&self) {
        drop(OPEN.take());
    }

    fn hold(&self, key: Key, is_learnt: bool) -> Held {
        let pool = Rc::new(Pool {
            key,
            is_learnt,
            ready: RefCell::default(),
            coming: Cell::new(0),
            last_flow: Cell::new(now()),
            rest: Cell::new(FIRST_REST),
            rest_until: Cell::new(None),
            has_complained: Cell::new(false),
            changed: Notify::new(),
            dialing: self.dialing.clone(),
            room: self.room.clone(),
        });
        let (stop, mut stopped) = watch::channel(());
        let own = pool.clone();
        reactor::spawn(async move {
            tokio::select! {
                () = own.keep() => {}
                // Nothing is ever sent: it ends with its sender.
                _ = stopped.changed() => {}
            }
        });
        Held { pool, _stop: stop }
    }
}

fn find(key: &Key) -> Option<Rc<Pool>> {
    OPEN.with_borrow(|open| open.iter().find(|held| held.pool.key == *key).map(|held| held.pool.clone()))
}

/// One destination, for as long as it is wanted.
struct Held {
    pool: Rc<Pool>,
    /// Who keeps it filled goes when it does.
    _stop: watch::Sender<()>,
}

/// The connections to one destination.
struct Pool {
    key: Key,
    is_learnt: bool,
    /// The oldest first.
    ready: RefCell<Vec<Idle>>,
    /// How many are being made.
    coming: Cell<usize>,
    last_flow: Cell<Instant>,
    rest: Cell<Duration>,
    rest_until: Cell<Option<Instant>>,
    has_complained: Cell<bool>,
    /// There may be something to do before its next look.
    changed: Notify,
    dialing: AskDialing,
    room: Arc<Room>,
}

/// One connection that waits for a flow.
struct Idle {
    stream: TcpStream,
    address: SocketAddr,
    since: Instant,
    _place: Place,
}

impl Pool {
    fn take(&self, order: &Order<'_>) -> Option<(TcpStream, SocketAddr)> {
        self.last_flow.set(now());
        let taken = loop {
            // The youngest: the others come to their end by themselves where that many are not needed.
            let Some(idle) = self.ready.borrow_mut().pop() else { break None };
            // What the kernel knows and the loop has not heard yet, and listeners that came after it.
            if idle.stream.stands() && !order.dialing.is_own(idle.address) {
                if order.admit_one(idle.address).is_err() {
                    // It is for others. This flow is told why when it dials by itself.
                    self.ready.borrow_mut().push(idle);
                    break None;
                }
                break Some((idle.stream, idle.address));
            }
        };
        if taken.is_some() {
            self.recover();
        }
        self.changed.notify_one();
        taken
    }

    /// Keeps as many ready as are wanted, until it is stopped or nobody goes there any more.
    async fn keep(self: &Rc<Self>) {
        loop {
            self.expire();
            if self.is_learnt && self.last_flow.get() + LEARNT_IDLE <= now() {
                return OPEN.with_borrow_mut(|open| open.retain(|held| !Rc::ptr_eq(&held.pool, self)));
            }
            self.fill();
            let look = self.next_look().saturating_duration_since(now());
            tokio::select! {
                () = poll_fn(|cx| self.poll_ended(cx)) => {}
                () = self.changed.notified() => {}
                () = sleep(look) => {}
            }
        }
    }

    fn idle_limit(&self) -> Duration {
        Duration::from_millis(self.key.wanted.idle_ms)
    }

    /// Closes those that have waited too long.
    fn expire(&self) {
        let (now, limit) = (now(), self.idle_limit());
        let mut ready = self.ready.borrow_mut();
        let before = ready.len();
        ready.retain(|idle| idle.since + limit > now);
        if ready.len() < before {
            // This server bears with idle clients for as long as it was asked to.
            self.recover();
        }
    }

    /// When something is to be done without anything happening before.
    fn next_look(&self) -> Instant {
        let expiry = self.ready.borrow().iter().map(|idle| idle.since + self.idle_limit()).min();
        let learnt = self.is_learnt.then(|| self.last_flow.get() + LEARNT_IDLE);
        let next = [expiry, learnt, self.rest_until.get()].into_iter().flatten().min();
        // Nothing is under way or at rest only where there is no room: look again then.
        next.unwrap_or_else(|| now() + LONGEST_REST)
    }

    /// Drops those whose server has ended them; ready if there was one.
    fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut ready = self.ready.borrow_mut();
        let before = ready.len();
        ready.retain(|idle| idle.stream.poll_ended(cx).is_pending());
        if ready.len() == before {
            return Poll::Pending;
        }
        drop(ready);
        self.set_back("the server closed one before a flow came; if it always does, have warm_idle_ms below its time-out");
        Poll::Ready(())
    }

    /// Begins to make what is missing.
    fn fill(self: &Rc<Self>) {
        if self.rest_until.get().is_some_and(|until| until > now()) {
            return;
        }
        self.rest_until.set(None);
        let missing =
            usize::from(self.key.wanted.ready).saturating_sub(self.ready.borrow().len() + self.coming.get());
        for _ in 0..missing {
            let Some(place) = self.room.take() else {
                return self.set_back("all descriptors that are set aside for such connections are in use");
            };
            self.coming.set(self.coming.get() + 1);
            reactor::spawn(self.clone().add(place));
        }
    }

    async fn add(self: Rc<Self>, place: Place) {
        let connected = match timeout(PATIENCE, self.connect()).await {
            Ok(connected) => connected,
            Err(_) => Err(Failure::new(EndReason::ConnectTimeout, "no answer")),
        };
        self.coming.set(self.coming.get() - 1);
        match connected {
            Ok((stream, address)) => {
                let idle = Idle { stream, address, since: now(), _place: place };
                self.ready.borrow_mut().push(idle);
            }
            Err(failure) => self.set_back(&failure.detail),
        }
        self.changed.notify_one();
    }

    async fn connect(&self) -> Result<(TcpStream, SocketAddr), Failure> {
        let addresses = resolve(&self.key.destination).await?;
        let may_change = self.is_learnt && matches!(self.key.destination.host, Host::Name(_));
        let addresses = match POLICY.with_borrow(Clone::clone).filter(|_| may_change) {
            // A client named this destination, and no flow is there to ask for: its name may lead elsewhere by now.
            Some(policy) => gate::for_anybody(&policy, addresses)?,
            None => gate::configured(addresses),
        };
        let dialing = (self.dialing)();
        let wishes = Wishes { mptcp: self.key.mptcp, ..Wishes::default() };
        let (stream, _) = dialing.race(&addresses, wishes).await?;
        let address = sockopt::peer_address(&stream)
            .map_err(|error| Failure::new(EndReason::Internal, error.to_string()))?;
        Ok((stream, sockopt::canonical(address)))
    }

    /// Rests before the next attempt, longer each time in a row.
    fn set_back(&self, why: &str) {
        if self.rest_until.get().is_some_and(|until| until > now()) {
            return;
        }
        let rest = self.rest.get();
        self.rest_until.set(Some(now() + rest));
        self.rest.set((rest * 2).min(LONGEST_REST));
        if !self.has_complained.replace(true) {
            tracing::warn!(server = %self.key.destination, why, "warm connections cannot be held ready");
        }
    }

    /// All is well with this server.
    fn recover(&self) {
        self.rest.set(FIRST_REST);
        self.rest_until.set(None);
        self.has_complained.set(false);
    }
}
