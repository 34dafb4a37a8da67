//! A flow whose packets the kernel passes on: it has no socket and no task any more. User space reads its counts, ends it, and
//! writes its record.
//!
//! ```text
//! PASSED ON --both hosts close, or one resets---------------> LINGERING (packets are still passed on) --2 s--> removed
//! PASSED ON --killed, idle, lifetime, the end of the node---> both hosts get a RST, removed
//! PASSED ON --SIGKILL---------------------------------------> passed on without a process, until `Wires::adopt`
//! ```

use super::Wires;
use super::given::Joins;
use super::noted::{Bounds, Kind, put_together};
use super::watch::now;
use crate::live::{Afar, Ended, Ledger, LiveFlow, Slot};
use sidetrack_core::flow::{EndReason, FlowId};
use sidetrack_core::splice;
use sidetrack_core::time::Instant;
use sidetrack_core::wire::Note;
use sidetrack_sys::bpf::{WireEnd, WireId};
use sidetrack_sys::sync::lock;
use sidetrack_sys::{repair, route};
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Wake, Waker};
use std::time::Duration;

/// Time between two looks at a flow: at first, and at most. It doubles while nothing moves.
const SOON: Duration = Duration::from_millis(50);
const LATER: Duration = Duration::from_secs(1);

/// The sides: client, server.
const SERVER: usize = 1;

/// A flow that its task hands over: the kernel has it.
#[derive(Debug)]
pub struct Handed {
    wires: Arc<Wires>,
    id: WireId,
    base: [u64; 2],
    bounds: Bounds,
    routes: u64,
    /// Until it is among the flows that are looked at.
    _joins: Option<Joins>,
}

/// A flow on the wire.
pub struct Wired {
    wires: Arc<Wires>,
    id: WireId,
    number: FlowId,
    base: [u64; 2],
    /// When it was captured.
    opened: Instant,
    kind: Arc<Kind>,
    rest: Mutex<Rest>,
}

/// What changes.
#[derive(Debug)]
pub(super) struct Rest {
    /// Where it is among the running flows. `None`: it is over, or has come back.
    pub home: Option<(Arc<Ledger>, Slot)>,
    /// Keeps our port towards the server from new connections.
    pub port: Option<OwnedFd>,
    /// What is given back at its end.
    pub kept: Vec<Box<dyn Any + Send>>,
    pub bytes: [u64; 2],
    pub active: Instant,
    pause: Duration,
    /// The changes of routes that it knows of.
    routes: u64,
    pub ending: Option<EndReason>,
}

impl fmt::Debug for Wired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wired").field("number", &self.number).field("id", &self.id).finish_non_exhaustive()
    }
}

impl Handed {
    /// A flow that the kernel has from now on.
    pub fn new(
        wires: Arc<Wires>,
        (id, joins): (WireId, Option<Joins>),
        base: [u64; 2],
        config: &splice::Config,
    ) -> Self {
        wires.taken.fetch_add(1, Relaxed);
        let bounds = Bounds { idle: config.idle, lifetime: config.lifetime };
        let routes = wires.route_changes();
        Self { wires, id, base, bounds, routes, _joins: joins }
    }

    /// The interfaces that its packets leave by were found after this number of changes of routes.
    #[must_use]
    pub const fn knowing(mut self, routes: u64) -> Self {
        self.routes = routes;
        self
    }

    /// Lets the flow go on without its task, in its place among the running flows.
    pub fn go_on(
        self,
        live: &Arc<LiveFlow>,
        (ledger, slot): (&Arc<Ledger>, Slot),
        detail: Option<String>,
    ) -> Arc<Wired> {
        let Self { wires, id, base, bounds, routes, _joins } = self;
        if detail.is_some() {
            wires.note_anew(id, |note| note.detail = detail);
        }
        let kind = Kind::of(live.decided().as_deref(), bounds);
        let opened = Instant::from_nanos(now().as_nanos().saturating_sub(nanos(live.age())));
        let (up, down) = live.bytes();
        let known = Known { number: live.id, base, opened, bytes: [up, down], active: now() };
        let wired = Wired::new(&wires, id, known, kind);
        lock(&wired.rest).routes = routes;
        ledger.go_afar(slot, wired.clone());
        wired.is_at(ledger, slot);
        wires.enter(wired.clone());
        // Who found the flow before may still want to end it.
        wired.listen_to(live);
        wired
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes of the client and of the server so far, by user space and by the kernel.
pub(super) fn bytes(wires: &Wires, id: WireId, base: [u64; 2]) -> [u64; 2] {
    let seen = wires.memory().look(id);
    [0, 1].map(|at| seen[at].sent.wrapping_add(base[at]).saturating_sub(seen[at].finished.into()))
}

/// The same, up to these sequence numbers of the client and of the server: what comes after them is not counted.
pub(super) fn counted(wires: &Wires, (id, base): (WireId, [u64; 2]), up_to: [u32; 2]) -> [u64; 2] {
    let seen = wires.memory().look(id);
    [0, 1].map(|at| {
        let after = (seen[at].sent as u32).wrapping_sub(up_to[at]);
        seen[at].sent.wrapping_sub(after.into()).wrapping_add(base[at])
    })
}

/// What is known of a flow when it begins to be here.
pub(super) struct Known {
    pub number: FlowId,
    pub base: [u64; 2],
    pub opened: Instant,
    pub bytes: [u64; 2],
    pub active: Instant,
}

impl Wired {
    pub(super) fn new(wires: &Arc<Wires>, id: WireId, known: Known, kind: Kind) -> Arc<Self> {
        let [_, (_, local)] = wires.memory().ends(id);
        let Known { number, base, opened, bytes, active } = known;
        let rest = Rest {
            home: None,
            // An address of the client's is not one that other connections of this host get.
            port: repair::keep_port(local).ok(),
            kept: Vec::new(),
            bytes,
            active,
            pause: SOON,
            routes: wires.route_changes(),
            ending: None,
        };
        let (wires, kind) = (wires.clone(), wires.kind(kind));
        Arc::new(Self { wires, id, number, base, opened, kind, rest: Mutex::new(rest) })
    }

    /// It is in this place among the running flows.
    pub(super) fn is_at(&self, ledger: &Arc<Ledger>, slot: Slot) {
        lock(&self.rest).home = Some((ledger.clone(), slot));
    }

    pub(super) const fn number(&self) -> FlowId {
        self.number
    }

    pub(super) const fn wires(&self) -> &Arc<Wires> {
        &self.wires
    }

    pub(super) const fn rest(&self) -> &Mutex<Rest> {
        &self.rest
    }

    pub(super) const fn base(&self) -> [u64; 2] {
        self.base
    }

    pub(super) fn bounds(&self) -> Bounds {
        self.kind.bounds
    }

    pub(super) const fn id(&self) -> WireId {
        self.id
    }

    /// Another process goes on with it: it has no record here.
    pub(super) fn let_go(&self) {
        let mut rest = lock(&self.rest);
        if let Some((ledger, slot)) = rest.home.take() {
            ledger.forget(slot);
        }
        (rest.port, rest.kept) = (None, Vec::new());
    }

    /// Keeps this until the flow is over.
    pub fn keep(&self, what: Box<dyn Any + Send>) {
        let mut rest = lock(&self.rest);
        if rest.home.is_some() {
            rest.kept.reserve_exact(1);
            rest.kept.push(what);
        }
    }

    /// Ends the flow when `live` is ended, which stands for it.
    fn listen_to(self: &Arc<Self>, live: &Arc<LiveFlow>) {
        let wish = Arc::new(Wish { wired: self.clone(), live: Arc::downgrade(live) });
        live.set_waker(&Waker::from(wish.clone()));
        wish.look();
    }

    fn bytes(&self) -> [u64; 2] {
        bytes(&self.wires, self.id, self.base)
    }

    fn age(&self, now: Instant) -> Duration {
        now.since(self.opened)
    }

    /// Takes over the counts. Returns when to look again; `None` if it is over.
    pub(super) fn look(&self, now: Instant) -> Option<Instant> {
        let ended = self.wires.memory().ended(self.id);
        let mut rest = lock(&self.rest);
        rest.home.as_ref()?;
        // Read after the end: nothing is counted later.
        let bytes = self.bytes();
        if bytes == rest.bytes {
            rest.pause = (rest.pause * 2).min(LATER);
        } else {
            if rest.bytes[SERVER] == 0 && bytes[SERVER] > 0 {
                let us = u64::try_from(self.age(now).as_micros()).ok();
                self.wires.note_anew(self.id, |note| note.first_byte_us = note.first_byte_us.or(us));
            }
            (rest.bytes, rest.active, rest.pause) = (bytes, now, SOON);
        }
        if let Some(why) = ended {
            self.over(rest, why);
            return None;
        }
        self.follow_routes(&mut rest);
        let lifetime = self.kind.bounds.lifetime.map(|all| (self.opened + all, EndReason::Lifetime));
        let idle = self.kind.bounds.idle.map(|idle| (rest.active + idle, EndReason::Idle));
        let first = lifetime.into_iter().chain(idle).min_by_key(|(at, _)| *at);
        let due = first.filter(|(at, _)| *at <= now).map(|(_, reason)| reason);
        if let Some(reason) = rest.ending.or(due) {
            drop(rest);
            self.finish(reason);
            return None;
        }
        let again = now + rest.pause;
        Some(first.map_or(again, |(at, _)| again.min(at)))
    }

    /// Lets packets leave by other interfaces, if routes have changed. Without a route they wait for one, as those of sockets do.
    fn follow_routes(&self, rest: &mut Rest) {
        let changes = self.wires.route_changes();
        if changes != std::mem::replace(&mut rest.routes, changes) {
            self.lead();
        }
    }

    /// Lets packets of both sides leave by the interfaces that lead there now. Returns whether all of them lead somewhere.
    pub(super) fn lead(&self) -> bool {
        let ends = self.wires.memory().ends(self.id).into_iter().enumerate();
        ends.fold(true, |all, (at, (remote, local))| {
            let Ok(Some(egress)) = route::way(local.ip(), remote.ip()) else { return false };
            if self.wires.reach(egress).is_err() {
                return false;
            }
            if egress != self.wires.memory().egress(self.id, at) {
                self.wires.memory().leads(self.id, at, egress);
            }
            all
        })
    }

    /// Its hosts have ended it.
    fn over(&self, mut rest: std::sync::MutexGuard<'_, Rest>, why: WireEnd) {
        let (reason, detail) = match why {
            WireEnd::Finished => (EndReason::Ok, None),
            WireEnd::ClientReset => (EndReason::ClientReset, None),
            WireEnd::ServerReset => (EndReason::ServerReset, None),
            WireEnd::Reused => {
                (EndReason::ClientReset, Some("a host began a new connection between the same ends"))
            }
        };
        self.record(&mut rest, reason, detail);
        let port = rest.port.take();
        drop(rest);
        match why {
            WireEnd::Reused => self.wires.remove(self.id),
            _ => self.wires.leave(self.id, port),
        }
        self.wires.forget(self.id);
    }

    /// Ends it: both hosts get a RST.
    pub(super) fn finish(&self, reason: EndReason) {
        self.finish_with(reason, None);
    }

    /// As [`Self::finish`], with a text for the record.
    pub(super) fn finish_with(&self, reason: EndReason, detail: Option<&str>) {
        let mut rest = lock(&self.rest);
        if rest.home.is_none() {
            return;
        }
        rest.bytes = self.bytes();
        self.record(&mut rest, reason, detail);
        // The reset takes the port.
        rest.port = None;
        drop(rest);
        self.wires.cut(self.id);
        self.wires.forget(self.id);
    }

    /// Writes its record, once.
    fn record(&self, rest: &mut Rest, reason: EndReason, detail: Option<&str>) {
        let Some((ledger, slot)) = rest.home.take() else { return };
        let now = now();
        let note = self.wires.noted(self.id);
        let detail = [note.as_ref().and_then(|note| note.detail.as_deref()), detail];
        let detail = detail.into_iter().flatten().map(str::to_owned).reduce(|one, other| one + "; " + &other);
        tracing::debug!(flow = %self.number, %reason, ?detail, "a flow of the wire has ended");
        let Some(flow) = note.map(|note| self.put_together(&note, (rest.bytes, rest.active), now)) else {
            tracing::error!(flow = %self.number, "what was known of a flow of the wire is gone: its record is missing");
            return ledger.forget(slot);
        };
        let detail = detail.map(String::into_boxed_str);
        let ended = Ended { flow: Arc::new(flow), reason, detail, duration: self.age(now) };
        ledger.leave(slot, ended);
        rest.kept = Vec::new();
        // The next process must not write it again.
        if let Err(error) = self.wires.memory().forget_note(self.id) {
            tracing::debug!(flow = %self.number, %error, "cannot forget what is known of a flow");
        }
    }

    pub(super) fn put_together(
        &self,
        note: &Note,
        (bytes, active): ([u64; 2], Instant),
        now: Instant,
    ) -> LiveFlow {
        let flow = put_together(note, &self.kind, self.age(now));
        let [up, down] = bytes;
        flow.count(up, down);
        flow.touch(active.since(self.opened));
        flow
    }
}

impl Afar for Wired {
    fn number(&self) -> FlowId {
        self.number
    }

    fn flow(self: Arc<Self>) -> Option<Arc<LiveFlow>> {
        let note = self.wires.noted(self.id)?;
        let now = now();
        let (bytes, active) = {
            let rest = lock(&self.rest);
            rest.home.as_ref()?;
            let bytes = self.bytes();
            (bytes, if bytes == rest.bytes { rest.active } else { now })
        };
        let flow = Arc::new(self.put_together(&note, (bytes, active), now));
        self.listen_to(&flow);
        Some(flow)
    }
}

/// A wish to end a flow, from one who has put it together.
struct Wish {
    wired: Arc<Wired>,
    live: Weak<LiveFlow>,
}

impl Wish {
    fn look(&self) {
        let Some(live) = self.live.upgrade() else { return };
        // No socket could be asked.
        let _ = live.takes_wish_for_tcp();
        let Some(reason) = live.ending() else { return };
        let agreement = live.decided().and_then(|decided| decided.agreement().map(str::to_owned));
        self.wired
            .wires
            .note_anew(self.wired.id, |note| note.agreement = agreement.or(note.agreement.take()));
        lock(&self.wired.rest).ending.get_or_insert(reason);
        self.wired.wires.look_soon(self.wired.id.place());
    }
}

impl Wake for Wish {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}
