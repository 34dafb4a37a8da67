//! Warm connections (`warm` of a rule): they are opened to servers before a flow needs them, so that the flow
//! waits for no handshake. Each worker has its own.
//!
//! For a rule with `to`, connections are opened from the start. Other destinations are learnt from their first
//! flow, limited in number, and forgotten when no flow comes for a while. A connection belongs to one flow: if
//! it breaks the flow ends, and nothing is sent again on another.

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

/// Most destinations that a worker learns from flows.
pub const LEARNT_MAX: usize = 32;

/// A learnt destination without a flow for this time is forgotten.
const LEARNT_IDLE: Duration = Duration::from_secs(60);

/// How long one attempt to connect may take.
const PATIENCE: Duration = Duration::from_secs(4);

/// First and longest pause before the next attempt, after a failure or after the server closed an unused
/// connection. The pause doubles in between.
const FIRST_REST: Duration = Duration::from_millis(250);
const LONGEST_REST: Duration = Duration::from_secs(15);

thread_local! {
    /// The destinations of this worker.
    static OPEN: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
    /// The rules in force.
    static POLICY: RefCell<Option<Arc<Policy>>> = const { RefCell::new(None) };
}

/// How many warm connections all workers together may open: the descriptors reserved for them.
#[derive(Debug)]
pub struct Room {
    left: AtomicUsize,
}

impl Room {
    /// Room for this number of connections.
    pub const fn new(connections: usize) -> Self {
        Self { left: AtomicUsize::new(connections) }
    }

    /// Returns how many warm connections the rules of a policy could need with this number of workers.
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

/// The right to hold one connection, returned when dropped.
#[derive(Debug)]
struct Place(Arc<Room>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.left.fetch_add(1, Relaxed);
    }
}

/// Access to the warm connections of the calling thread's worker.
pub struct Warm {
    dialing: AskDialing,
    room: Arc<Room>,
}

impl fmt::Debug for Warm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Warm").field("room", &self.room).finish_non_exhaustive()
    }
}

/// Flows with the same key can share connections.
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
    /// Warm connections that are dialled with these settings, as many as there is room for.
    pub fn new(dialing: AskDialing, room: Arc<Room>) -> Self {
        Self { dialing, room }
    }

    /// Opens connections to the destinations that rules name, and closes others, according to `policy`.
    /// Unchanged destinations are not touched. Learnt ones are forgotten, because the rules may say something
    /// else now.
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

    /// Takes a ready connection for this flow, with the server's address, if its rule has warm connections and
    /// one is ready.
    pub fn take(&self, order: &Order<'_>) -> Option<(TcpStream, SocketAddr)> {
        // Stack options must be in force from the SYN on, so such a flow dials by itself.
        let key = Key::of(order.carry, &order.destination).filter(|_| order.stack.is_empty())?;
        find(&key)?.take(order)
    }

    /// Called when a flow has dialled its server successfully: if its rule has `warm`, connections for later
    /// flows are opened. Failed flows do not lead here, so servers that do not exist are not learnt.
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

    /// Closes all warm connections.
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
                // Nothing is ever sent on this channel: it ends with its sender.
                _ = stopped.changed() => {}
            }
        });
        Held { pool, _stop: stop }
    }
}

fn find(key: &Key) -> Option<Rc<Pool>> {
    OPEN.with_borrow(|open| open.iter().find(|held| held.pool.key == *key).map(|held| held.pool.clone()))
}

/// One destination while it is in use.
struct Held {
    pool: Rc<Pool>,
    /// Dropping it stops the task that opens connections.
    _stop: watch::Sender<()>,
}

/// The connections to one destination.
struct Pool {
    key: Key,
    is_learnt: bool,
    /// Ordered by age, the oldest first.
    ready: RefCell<Vec<Idle>>,
    /// The number of connections being opened.
    coming: Cell<usize>,
    last_flow: Cell<Instant>,
    rest: Cell<Duration>,
    rest_until: Cell<Option<Instant>>,
    has_complained: Cell<bool>,
    /// Notified when there may be work before the next check.
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
            // Take the youngest. If fewer are needed, the others expire.
            let Some(idle) = self.ready.borrow_mut().pop() else { break None };
            // Check what the kernel knows and the loop has not reported yet, and listeners added after the
            // connect.
            if idle.stream.stands() && !order.dialing.is_own(idle.address) {
                if order.admit_one(idle.address).is_err() {
                    // Other flows may use it. This flow gets its reason when it dials by itself.
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

    /// Keeps the wanted number ready, until it is stopped or a learnt destination has had no flow for a while.
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

    /// Closes connections that have waited too long.
    fn expire(&self) {
        let (now, limit) = (now(), self.idle_limit());
        let mut ready = self.ready.borrow_mut();
        let before = ready.len();
        ready.retain(|idle| idle.since + limit > now);
        if ready.len() < before {
            // The server accepted an idle connection for the whole time, so it works well.
            self.recover();
        }
    }

    /// When to check next if nothing happens before.
    fn next_look(&self) -> Instant {
        let expiry = self.ready.borrow().iter().map(|idle| idle.since + self.idle_limit()).min();
        let learnt = self.is_learnt.then(|| self.last_flow.get() + LEARNT_IDLE);
        let next = [expiry, learnt, self.rest_until.get()].into_iter().flatten().min();
        // No expiry and no pause pending: there was no room for a connection. Check again later.
        next.unwrap_or_else(|| now() + LONGEST_REST)
    }

    /// Drops connections that the server has ended. Ready if there was one.
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

    /// Starts to open missing connections.
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
            // A client chose this name, and there is no flow to ask the policy about: the name may resolve to
            // another address now.
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

    /// Pauses before the next attempt, longer each time in a row.
    fn set_back(&self, why: &str) {
        if self.rest_until.get().is_some_and(|until| until > now()) {
            return;
        }
        let rest = self.rest.get();
        self.rest_until.set(Some(now() + rest));
        self.rest.set((rest * 2).min(LONGEST_REST));
        if !self.has_complained.replace(true) {
            tracing::warn!(server = %self.key.destination, why, "cannot keep warm connections ready");
        }
    }

    /// Resets the pause: connecting to this server works.
    fn recover(&self) {
        self.rest.set(FIRST_REST);
        self.rest_until.set(None);
        self.has_complained.set(false);
    }
}
