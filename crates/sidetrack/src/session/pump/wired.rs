//! Leads a flow from its two sockets to the wire, beside the copying that goes on meanwhile (ADR 36).
//!
//! ```text
//! WAITING --bytes and time of the rule-----------------> JOINING
//! JOINING --what [`Joining`] says, to its end----------> ON THE WIRE (the task ends; [`Wires`] has the flow)
//! JOINING --given up-----------------------------------> WAITING (later again)
//! any, before the kernel passes packets on --unfit-----> never (the flow stays with its sockets)
//! ```

use super::Pump;
use crate::carry::Wire;
use crate::live::{LiveFlow, Step as Traced};
use crate::reactor::{self, Sleep};
use crate::worker::{Handed, Joins, Stays, Wires};
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::policy::ShuntAfter;
use sidetrack_core::splice;
use sidetrack_core::time::Instant;
use sidetrack_core::wire::{self, Joining, Look, Step};
use sidetrack_sys::bpf::WireId;
use sidetrack_sys::conntrack::{Change, Conntrack, Tuple};
use sidetrack_sys::{repair, route, sockopt};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

/// How long a quiet instant of both sockets is waited for, with small windows.
const PATIENCE: Duration = Duration::from_millis(200);

/// Time until the next attempt; it doubles up to [`AGAIN_MAX`].
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// Time between two looks at sockets that are not quiet.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The window that is offered while a quiet instant is waited for, bytes: the kernel makes the least possible of it.
const SMALL_WINDOW: u32 = 1;

/// `IPPROTO_TCP`.
const TCP: u8 = 6;

/// A flow's way to the wire.
pub struct Wiring {
    wires: Arc<Wires>,
    after: ShuntAfter,
    config: splice::Config,
    stage: Stage,
    timer: Option<Sleep>,
}

enum Stage {
    /// Until its rule's limits are reached. Not before this time.
    Waiting { again: Option<Instant>, pause: Duration },
    /// Both sockets and the kernel have it.
    Joining(Box<Way>),
    /// The kernel has it.
    On(Box<Handed>),
}

struct Way {
    joining: Joining,
    joined: Option<(WireId, [wire::Side; 2])>,
    joins: Option<Joins>,
    /// Sequence numbers after the last byte that was written into each socket, from the joining on.
    written: [u32; 2],
    /// Bytes that were counted when the kernel began.
    before: [u64; 2],
    /// Time between two attempts so far.
    pause: Duration,
    /// Where packets of both sides come from and go to, found before nothing may wait for it.
    ends: [Place; 2],
    /// The changes of routes that these know of.
    routes: u64,
}

/// One side's packets on the interfaces.
#[derive(Clone, Copy)]
struct Place {
    remote: SocketAddr,
    local: SocketAddr,
    egress: Option<u32>,
}

/// What comes of a call.
enum Led {
    /// Go on as before.
    On,
    /// It stays with its sockets for ever.
    Never(Stays),
    /// The kernel has it.
    Wired,
}

impl Wiring {
    /// A flow that goes to the wire when its rule's limits are reached.
    pub fn new(wires: Arc<Wires>, after: ShuntAfter, config: splice::Config) -> Self {
        let stage = Stage::Waiting { again: None, pause: AGAIN };
        Self { wires, after, config, stage, timer: None }
    }

    /// Whether the kernel has the flow.
    pub(super) const fn is_on_wire(&self) -> bool {
        matches!(self.stage, Stage::On(_))
    }

    /// What goes on without the flow's task, if the kernel has the flow.
    pub(super) fn handed(mut self) -> Option<Box<Handed>> {
        match std::mem::replace(&mut self.stage, Stage::Waiting { again: None, pause: AGAIN }) {
            Stage::On(handed) => Some(handed),
            _ => None,
        }
    }

    /// Whether the kernel passes its packets on.
    pub(super) fn is_joined(&self) -> bool {
        match &self.stage {
            Stage::Waiting { .. } => false,
            Stage::Joining(way) => way.joined.is_some(),
            Stage::On(_) => true,
        }
    }

    /// Counts bytes, or a FIN, that were written into a socket.
    pub(super) fn wrote(&mut self, side: Side, bytes: usize) {
        if let Stage::Joining(way) = &mut self.stage
            && way.joined.is_some()
        {
            let at = index(side);
            way.written[at] = way.written[at].wrapping_add(bytes as u32);
        }
    }

    /// Wakes the task at this time.
    fn wake_at(&mut self, cx: &mut Context<'_>, now: Instant, at: Instant) {
        let mut timer = reactor::sleep(at.since(now));
        if Pin::new(&mut timer).poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        self.timer = Some(timer);
    }

    /// Whether the limits of the rule are reached. Otherwise the task is woken when time alone is missing.
    fn is_due(&mut self, cx: &mut Context<'_>, now: Instant, live: &LiveFlow) -> bool {
        let Stage::Waiting { again, .. } = self.stage else { return false };
        let (up, down) = live.bytes();
        if up + down < self.after.bytes {
            return false;
        }
        let due = now + Duration::from_millis(self.after.ms).saturating_sub(live.age());
        let due = again.map_or(due, |again| again.max(due));
        if due > now && self.timer.is_none() {
            self.wake_at(cx, now, due);
        }
        due <= now
    }
}

impl Drop for Wiring {
    fn drop(&mut self) {
        if let Stage::Joining(way) = &self.stage
            && let Some((id, _)) = way.joined
        {
            // Its sockets have an end of their own.
            self.wires.remove(id);
        }
    }
}

const fn index(side: Side) -> usize {
    match side {
        Side::Client => 0,
        Side::Server => 1,
    }
}

const SIDES: [Side; 2] = [Side::Client, Side::Server];

impl<W: Wire> Pump<W> {
    /// Lets it go to the wire when its rule's limits are reached.
    pub fn wiring(mut self, wiring: Option<Box<Wiring>>) -> Self {
        self.wiring = wiring;
        self
    }

    /// Goes on with the way to the wire, after all that can be copied was copied. Returns the end of the flow, if it has ended.
    pub(super) fn lead(&mut self, cx: &mut Context<'_>, now: Instant) -> Option<(EndReason, bool)> {
        let mut wiring = self.wiring.take()?;
        match self.advance(&mut wiring, cx, now) {
            Ok(Led::On) => self.wiring = Some(wiring),
            Ok(Led::Never(why)) => self.stays(&wiring, why),
            Ok(Led::Wired) => {
                self.wiring = Some(wiring);
                return Some((EndReason::Ok, false));
            }
            Err(error) if wiring.is_joined() => {
                tracing::debug!(flow = %self.live.id, %error, "a flow has broken on its way to the wire");
                // Neither its sockets nor the kernel can go on alone.
                self.error.get_or_insert(error);
                return Some((EndReason::ServerReset, true));
            }
            Err(error) => {
                tracing::debug!(flow = %self.live.id, %error, "the kernel has refused a step to the wire");
                self.stays(&wiring, Stays::Refused);
            }
        }
        None
    }

    fn stays(&mut self, wiring: &Wiring, why: Stays) {
        wiring.wires.stays(why);
        self.offer_windows(u32::MAX);
        tracing::debug!(flow = %self.live.id, why = why.as_str(), "a flow stays with its sockets");
    }

    fn advance(&mut self, wiring: &mut Wiring, cx: &mut Context<'_>, now: Instant) -> io::Result<Led> {
        loop {
            match &mut wiring.stage {
                Stage::Waiting { .. } if self.farewell.is_some() || self.has_an_end() => {
                    return Ok(Led::Never(Stays::Unfit(wire::Unfit::Closing)));
                }
                Stage::Waiting { pause, .. } => {
                    let pause = *pause;
                    if !wiring.is_due(cx, now, &self.live) {
                        return Ok(Led::On);
                    }
                    let routes = wiring.wires.route_changes();
                    let ends = match self.places(&wiring.wires)? {
                        Ok(ends) => ends,
                        Err(why) => return Ok(Led::Never(why)),
                    };
                    self.offer_windows(SMALL_WINDOW);
                    let joining = Joining::new(now, PATIENCE);
                    let (written, before) = ([0; 2], [0; 2]);
                    let way =
                        Way { joining, joined: None, joins: None, written, before, pause, ends, routes };
                    wiring.stage = Stage::Joining(Box::new(way));
                }
                Stage::Joining(_) if self.farewell.is_some() => return Ok(Led::On),
                Stage::Joining(way) => {
                    let begun = std::time::Instant::now();
                    let look = self.look(way, &wiring.wires)?;
                    let step = way.joining.next(now, &look);
                    if let Some(led) = self.step(wiring, (step, begun), cx, now)? {
                        return Ok(led);
                    }
                }
                Stage::On(_) => return Ok(Led::Wired),
            }
        }
    }

    /// Does one step, to which a look has led that began then. `None`: look for the next one at once.
    fn step(
        &mut self,
        wiring: &mut Wiring,
        (step, begun): (Step, std::time::Instant),
        cx: &mut Context<'_>,
        now: Instant,
    ) -> io::Result<Option<Led>> {
        let Stage::Joining(way) = &mut wiring.stage else { return Ok(Some(Led::On)) };
        match step {
            Step::Copy => {
                if way.joined.is_some() {
                    for side in SIDES {
                        self.on_socket(side, |socket| repair::acknowledge(socket))?;
                    }
                }
                wiring.wake_at(cx, now, now + LOOK_AGAIN);
                return Ok(Some(Led::On));
            }
            Step::Join => {
                if let Err(why) = self.join(way, &wiring.wires, now)? {
                    if !why.passes() {
                        return Ok(Some(Led::Never(why)));
                    }
                    self.try_later(wiring, cx, now, why);
                    return Ok(Some(Led::On));
                }
                wiring.wires.froze(begun.elapsed());
            }
            Step::Read => {
                let Some((id, _)) = way.joined else { return Ok(Some(Led::On)) };
                for side in SIDES {
                    let expects = self.on_socket(side, |socket| repair::expects(socket))?;
                    wiring.wires.memory().expects(id, index(side), expects);
                    if self.core.has_ended(side) {
                        wiring.wires.memory().finished(id, index(side), expects);
                    }
                }
                way.joining.owing(way.written);
            }
            Step::Again => {
                if let Some((id, _)) = way.joined {
                    // False if it has ended already: that is seen when its sockets are gone.
                    let _ = wiring.wires.memory().unsettled(id);
                }
            }
            Step::Settled(at) => {
                way.joined.iter().for_each(|(id, _)| wiring.wires.memory().settled(*id, at));
            }
            Step::Wire => {
                if let Some((id, sides)) = &way.joined {
                    let id = *id;
                    // Before the kernel has it alone: from then on it would go on without this process.
                    let base = base(sides, way.before);
                    wiring.wires.note(id, &self.live, base, &wiring.config)?;
                    // False if it has ended already: that is seen when its sockets are gone.
                    let _ = wiring.wires.memory().wired(id);
                }
            }
            Step::Wait(until) => {
                wiring.wake_at(cx, now, until);
                return Ok(Some(Led::On));
            }
            Step::Forget => self.forget(wiring)?,
            Step::GiveUp => {
                self.try_later(wiring, cx, now, Stays::Busy);
                return Ok(Some(Led::On));
            }
        }
        Ok(None)
    }

    fn try_later(&self, wiring: &mut Wiring, cx: &mut Context<'_>, now: Instant, why: Stays) {
        let Stage::Joining(way) = &wiring.stage else { return };
        wiring.wires.stays(why);
        let why = why.as_str();
        tracing::debug!(flow = %self.live.id, why, pause = ?way.pause, "a flow goes to the wire later");
        self.offer_windows(u32::MAX);
        let (again, pause) = (now + way.pause, (way.pause * 2).min(AGAIN_MAX));
        wiring.stage = Stage::Waiting { again: Some(again), pause };
        wiring.wake_at(cx, now, again);
    }

    /// Finds where packets of both sides come from and go to, and puts the programs there.
    fn places(&self, wires: &Wires) -> io::Result<Result<[Place; 2], Stays>> {
        let mut places = Vec::with_capacity(2);
        for side in SIDES {
            let place = match self.on_socket(side, |socket| place(side, socket))? {
                Ok(place) => place,
                Err(why) => return Ok(Err(why)),
            };
            if let Some(Err(why)) = place.egress.map(|egress| wires.reach(egress)) {
                return Ok(Err(why));
            }
            places.push(place);
        }
        Ok(places.try_into().map_err(|_| Stays::Refused))
    }

    /// Lets the kernel pass packets on, if the flow is fit for it. They wait meanwhile, so it asks the kernel for nothing that
    /// was known before.
    fn join(&self, way: &mut Way, wires: &Arc<Wires>, now: Instant) -> io::Result<Result<(), Stays>> {
        let routes = wires.route_changes();
        if routes != std::mem::replace(&mut way.routes, routes) {
            match self.places(wires)? {
                Ok(ends) => way.ends = ends,
                Err(why) => return Ok(Err(why)),
            }
        }
        let end = |at: usize, socket: std::os::fd::BorrowedFd<'_>| {
            let Place { remote, local, egress } = way.ends[at];
            // In this order: a FIN that comes in between has a number, and is not among the unread bytes. It is seen then.
            let mut numbers = repair::numbers(socket)?;
            let agreed = repair::agreed(socket)?;
            // What was read and is not written yet comes before what is read next.
            numbers.unread = numbers.unread.saturating_add(self.core.held(SIDES[at]));
            Ok(wire::End { remote, local, egress, agreed, numbers })
        };
        let [client, server] = SIDES.map(|side| self.on_socket(side, |socket| end(index(side), socket)));
        let sides = match wire::sides(&[client?, server?]) {
            Ok(sides) => sides,
            Err(why) => return Ok(Err(Stays::Unfit(why))),
        };
        let (up, down) = self.live.bytes();
        let (id, joins) = match wires.join(&sides) {
            Ok(joined) => joined,
            Err(why) => return Ok(Err(why)),
        };
        way.written = [0, 1].map(|at| sides[at].written);
        way.before = [up, down];
        way.joined = Some((id, sides));
        way.joins = Some(joins);
        way.joining.joined(now);
        Ok(Ok(()))
    }

    /// What is seen of both sockets.
    fn look(&self, way: &Way, wires: &Wires) -> io::Result<Look> {
        let mut look =
            Look { unread: [0; 2], held: [0; 2], unsent: [0; 2], acknowledged: [0; 2], is_over: false };
        for side in SIDES {
            let at = index(side);
            (look.unread[at], look.unsent[at]) = self.on_socket(side, |socket| {
                Ok((repair::unread(socket.as_fd())?, repair::unsent(socket.as_fd())?))
            })?;
            if !self.core.has_ended(side) && self.on_socket(side, |socket| repair::has_fin(socket))? {
                look.unread[at] += 1;
            }
            look.held[at] = self.core.held(side) as usize;
        }
        if let Some((id, _)) = way.joined {
            // Before the numbers, which do not change after it.
            look.is_over = wires.memory().ended(id).is_some();
            look.acknowledged = wires.memory().look(id).map(|side| side.standing.acknowledged);
        }
        Ok(look)
    }

    /// Closes both sockets without a packet.
    fn forget(&mut self, wiring: &mut Wiring) -> io::Result<()> {
        let Stage::Joining(way) = &mut wiring.stage else { return Ok(()) };
        let Some((id, sides)) = way.joined.take() else { return Ok(()) };
        let joins = way.joins.take();
        let base = base(&sides, way.before);
        let wires = &wiring.wires;
        self.look_at_tcp();
        self.live.shunted();
        self.live.step(Traced::Wired);
        if let Err(error) = wires.note(id, &self.live, base, &wiring.config) {
            // What was noted before says nearly the same.
            tracing::debug!(flow = %self.live.id, %error, "cannot note the last steps of a flow of the wire");
        }
        for wire in [self.client.take(), self.server.take()].into_iter().flatten() {
            if let Err(error) = wire.forget() {
                tracing::warn!(flow = %self.live.id, %error, "cannot close a socket without a packet");
            }
        }
        let handed = Handed::new(wires.clone(), (id, joins), base, &wiring.config).knowing(way.routes);
        wiring.stage = Stage::On(Box::new(handed));
        Ok(())
    }

    fn has_an_end(&self) -> bool {
        SIDES.into_iter().any(|side| self.core.has_ended(side))
    }

    pub(super) fn offer_windows(&self, bytes: u32) {
        for side in SIDES {
            // Best effort: without it a quiet instant comes later.
            let _ = self.on_socket(side, |socket| repair::clamp_window(socket, bytes));
        }
    }

    /// Calls `work` with the socket of a side.
    fn on_socket<T>(
        &self,
        side: Side,
        work: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        let wire = match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        };
        match wire.as_ref().and_then(W::socket) {
            Some(socket) => work(socket.as_fd()),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

/// What is added to the kernel's count of sequence numbers of each side to get payload bytes. `before`: bytes of the client and of
/// the server that user space had passed on when the kernel began.
fn base(sides: &[wire::Side; 2], before: [u64; 2]) -> [u64; 2] {
    [0, 1].map(|at| {
        let side = &sides[at];
        let waiting = u64::from(side.expects.wrapping_sub(side.next));
        // The kernel begins to count there: the upper half counts wraps, from 1.
        let first = (1 << 32) | u64::from(side.expects);
        (before[at] + waiting).wrapping_sub(first)
    })
}

/// Where the packets of one socket come from and go to, as they are on the interface.
fn place(side: Side, socket: std::os::fd::BorrowedFd<'_>) -> io::Result<Result<Place, Stays>> {
    let (remote, mut local) = (sockopt::peer_address(socket)?, sockopt::local_address(socket)?);
    if side == Side::Client {
        // The kernel may have redirected it to our listener.
        local = sockopt::original_dst(socket).unwrap_or(local);
    }
    if is_translated(side, remote, local)? {
        return Ok(Err(Stays::Translated));
    }
    let egress = route::way(local.ip(), remote.ip()).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(Ok(Place { remote, local, egress }))
}

/// Whether conntrack changes addresses of this connection in a way that its packets on the interface are not those of the socket.
/// Our own redirection is known: then `local` is what the client has asked for.
///
/// If it does not, conntrack judges the numbers of this connection no longer: what comes to the socket while the kernel passes
/// packets on may tell of bytes that conntrack has not seen. It would not redirect such a packet, and the server would get it.
fn is_translated(side: Side, remote: SocketAddr, local: SocketAddr) -> io::Result<bool> {
    let (source, destination) = if side == Side::Client { (remote, local) } else { (local, remote) };
    let original = Tuple { source, destination, protocol: TCP };
    let failed = |error: sidetrack_sys::netlink::Error| io::Error::other(error.to_string());
    let mut conntrack = Conntrack::open().map_err(failed)?;
    let Some(entry) = conntrack.find(&original, 0).map_err(failed)? else { return Ok(false) };
    let is_source_changed = entry.reply.destination != source;
    if is_source_changed || (side == Side::Server && entry.reply.source != destination) {
        return Ok(true);
    }
    conntrack.update(&original, 0, Change { liberal: true, ..Change::default() }).map_err(failed)?;
    Ok(false)
}
