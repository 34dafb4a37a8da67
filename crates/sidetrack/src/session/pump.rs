//! The driver of [`sidetrack_core::splice`]: one future per flow that moves its bytes.
//!
//! Bytes are read into one buffer per thread and are written from there at once. Only bytes that the other side
//! does not take are stored in the flow, which frees that memory afterwards. An idle flow has no buffer. A
//! direction that has moved [`SPLICE_AFTER`] bytes in large pieces changes to a pipe and `splice(2)`: its bytes
//! no longer pass through user space.

mod apart;
mod ends;
mod through;
mod wired;

pub use apart::Parted;
pub use ends::{Ends, Law};
pub use wired::Wiring;

use super::farewell::Farewell;
use super::lane::Lane;
use super::probe::Probe;
use super::room;
use crate::carry::Wire;
use crate::live::{Clock, LiveFlow, TcpSeen, legs, profile::Stage};
use crate::reactor::TcpStream;
use crate::worker::Handed;
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::splice::{Config, Input, Output, Splice};
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use std::cell::RefCell;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use through::Through;

/// A direction changes to `splice(2)` after this number of bytes in pieces of at least [`SPLICE_LEAST`]. Below
/// this a pipe costs more than the copies it saves (`bench/RESULTS.md`).
pub const SPLICE_AFTER: u64 = 256 * 1024;

/// Smallest piece that counts for [`SPLICE_AFTER`], bytes. For small messages two splices cost more than a read
/// and a write, however many messages a connection carries (`bench/EPI.md`).
pub const SPLICE_LEAST: u64 = 4096;

/// Most bytes of one read, and the size of each thread's buffer.
const SCRATCH: usize = 64 * 1024;

/// A flow that moved fewer bytes, lived for a shorter time and ended well has no measurements of TCP at its end.
const LOOKED_AT_BYTES: u64 = 64 * 1024;
const LOOKED_AT_AGE: Duration = Duration::from_millis(100);

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; SCRATCH].into_boxed_slice());
}

/// How a flow's bytes ended.
#[derive(Debug)]
pub struct Ending {
    /// The end reason.
    pub reason: EndReason,
    /// The error of the socket, if there was one.
    pub error: Option<io::Error>,
    /// The kernel has taken the flow over: it has not ended.
    pub wired: Option<Box<Handed>>,
}

/// Bytes that were just read and are in the thread's buffer.
#[derive(Clone, Copy)]
struct Fresh {
    from: Side,
    start: usize,
    end: usize,
    /// The sender's FIN is known to follow directly, so it can travel with these bytes.
    last: bool,
}

/// Moves the bytes of one flow. Resolves when both sides are closed.
///
/// Both sides have one type of wire. With sockets, the fast path, the compiler makes specialised code;
/// [`crate::carry::Stream`] can be any kind of connection.
pub struct Pump<W: Wire = TcpStream> {
    client: Option<W>,
    server: Option<W>,
    core: Splice,
    /// How many bytes a direction without a pipe may buffer at present.
    limit: u32,
    up: Lane,
    down: Lane,
    live: Arc<LiveFlow>,
    clock: Clock,
    error: Option<io::Error>,
    probe: Probe,
    farewell: Option<Farewell>,
    /// A side whose last bytes were read and which is known to have only its FIN left. It is not read again.
    drained: Option<Side>,
    /// The functions between the two sides, if there are any.
    through: Option<Box<Through>>,
    /// The rules for the end of a side, if a side is a function.
    law: Option<Box<Law>>,
    /// The way to the wire, if it may go there.
    wiring: Option<Box<Wiring>>,
}

impl<W: Wire> Pump<W> {
    /// Starts with both sides connected. `early_up` was read from the client before, `early_down` from the
    /// server.
    pub fn new(
        (client, server): (W, W),
        (early_up, early_down): (Vec<u8>, Vec<u8>),
        config: Config,
        live: Arc<LiveFlow>,
        clock: Clock,
    ) -> Self {
        let now = clock.now();
        let mut core = Splice::new(config, now);
        core.handle(now, Input::Bound);
        for (side, bytes) in [(Side::Client, &early_up), (Side::Server, &early_down)] {
            if !bytes.is_empty() {
                core.handle(now, Input::Read(side, u32::try_from(bytes.len()).unwrap_or(u32::MAX)));
            }
        }
        if !early_down.is_empty() {
            live.first_byte(live.age());
        }
        let (up, down) = (Lane::holding(early_up), Lane::holding(early_down));
        let (client, server, probe) = (Some(client), Some(server), Probe::default());
        Self {
            client,
            server,
            core,
            limit: config.limit,
            up,
            down,
            live,
            clock,
            error: None,
            probe,
            farewell: None,
            drained: None,
            through: None,
            law: None,
            wiring: None,
        }
    }

    /// Adds functions between the two sides. Bytes that were read before must have passed through them.
    pub fn through(mut self, chain: Option<Box<Chain>>) -> Self {
        self.through = chain.map(|chain| Box::new(Through::new(chain)));
        self
    }

    fn lane(&mut self, from: Side) -> &mut Lane {
        match from {
            Side::Client => &mut self.up,
            Side::Server => &mut self.down,
        }
    }

    fn wire(&mut self, side: Side) -> &mut W {
        self.parts(side, side).0
    }

    /// Returns the socket of `side`, and the lane of the bytes that come from `from`.
    fn parts(&mut self, side: Side, from: Side) -> (&mut W, &mut Lane) {
        let wire = match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        };
        let lane = match from {
            Side::Client => &mut self.up,
            Side::Server => &mut self.down,
        };
        (wire.as_mut().expect("wires live until Close, after which the core asks for nothing"), lane)
    }

    fn is_socket(&mut self, side: Side) -> bool {
        self.wire(side).socket().is_some()
    }

    /// Does what the core asks until it waits or ends.
    fn run(&mut self, cx: &mut Context<'_>, scratch: &mut [u8]) -> Poll<(EndReason, bool)> {
        let now = self.clock.now();
        for side in [Side::Client, Side::Server] {
            self.wire(side).tend(cx);
        }
        if self.farewell.is_some_and(|farewell| farewell.is_sending()) {
            return self.part(now);
        }
        // A side that is not read reports a reset only when asked ([`Probe`]).
        for side in self.probe.take(now) {
            if let Some(error) = self.wire(side).take_error() {
                self.lost(now, side, error);
            }
        }
        if let Some(late) = self.farewell.filter(|farewell| farewell.is_late(now)) {
            self.core.handle(now, Input::End(late.reason()));
        }
        self.core.handle(now, Input::Woken);
        self.bound(now);
        self.advance_functions(now);
        if let Some(reason) = self.live.ending() {
            self.core.handle(now, Input::End(reason));
        }
        if self.live.takes_wish_for_tcp() {
            self.look_at_tcp();
            self.note_legs();
        }
        if self.core.deadline().is_some_and(|deadline| deadline <= now) {
            self.core.handle(now, Input::Tick);
        }
        // The core asks for one step at a time and learns its result before the next one.
        let mut fresh = None;
        while let Some(output) = self.core.poll() {
            let input = match output {
                Output::Read(side, max) => {
                    self.stash(&mut fresh, scratch);
                    self.read(cx, side, max, scratch, &mut fresh)
                }
                Output::Write(side, held) if self.is_gone(side) => self.swallow(side, held, &mut fresh),
                Output::Write(side, held) => self.write(cx, side, held, scratch, &mut fresh),
                Output::Fin(side) => self.fin(cx, side),
                Output::Close { reason, reset } => match Farewell::gone_for(reason).filter(|_| reset) {
                    Some(gone) if self.live.ending().is_none() => {
                        self.farewell.get_or_insert(Farewell::new(gone, now));
                        return self.part(now);
                    }
                    _ => return Poll::Ready((reason, reset)),
                },
            };
            // The next flow of this thread uses the buffer: store what could not be written.
            self.core.handle(now, input);
        }
        self.stash(&mut fresh, scratch);
        if let Some(end) = self.lead(cx, now) {
            return Poll::Ready(end);
        }
        if self.core.active() == now {
            self.live.touch(self.live.age());
        }
        self.probe.arm(now, self.is_unread(Side::Client), self.is_unread(Side::Server));
        let farewell = self.farewell.map(|farewell| farewell.due(now));
        let deadline = self.core.deadline().into_iter().chain(self.probe.due()).chain(farewell).min();
        self.live.set_deadline(deadline, EndReason::Idle);
        self.arm_functions(cx, now);
        Poll::Pending
    }

    /// Lets both directions buffer less while memory is tight.
    fn bound(&mut self, now: Instant) {
        let limit = room::limit(self.core.config().limit);
        if limit == self.limit {
            return;
        }
        self.limit = limit;
        for side in [Side::Client, Side::Server] {
            if !self.lane(side).is_piped() {
                self.core.handle(now, Input::Limit(side, limit));
            }
        }
    }

    /// Waits until the kernel has sent the last bytes of the side that is gone, then resets the other side.
    fn part(&mut self, now: Instant) -> Poll<(EndReason, bool)> {
        let Some(mut farewell) = self.farewell else { return Poll::Pending };
        let unsent_bytes = self.wire(farewell.gone.other()).unsent_bytes();
        if farewell.is_over(now, unsent_bytes) || self.live.ending().is_some() {
            return Poll::Ready((farewell.reason(), true));
        }
        self.live.set_deadline(Some(farewell.due(now)), EndReason::Idle);
        self.farewell = Some(farewell);
        Poll::Pending
    }

    fn is_gone(&self, side: Side) -> bool {
        self.farewell.is_some_and(|farewell| farewell.gone == side)
    }

    /// Notes that this side takes no more bytes. Bytes that it sent before may still be unread: its end comes
    /// after them.
    fn lost(&mut self, now: Instant, side: Side, error: io::Error) {
        self.error.get_or_insert(error);
        match &self.farewell {
            None => self.farewell = Some(Farewell::new(side, now)),
            Some(first) if first.gone == side => {}
            // Both sides are gone.
            Some(first) => self.core.handle(now, Input::End(first.reason())),
        }
        if self.core.has_ended(side) {
            self.core.handle(now, Input::Failed(side));
        }
    }

    /// Discards the bytes for a side that is gone.
    fn swallow(&mut self, side: Side, held: u32, fresh: &mut Option<Fresh>) -> Input {
        let from = side.other();
        *fresh = fresh.filter(|bytes| bytes.from != from);
        *self.lane(from) = Lane::default();
        Input::Written(side, held)
    }

    /// Whether no readiness of this side would wake the flow.
    fn is_unread(&self, side: Side) -> bool {
        let lane = match side {
            Side::Client => &self.up,
            Side::Server => &self.down,
        };
        // A full pipe stops the reading before the core's limit does.
        !self.core.waits_to_read(side) || (lane.is_piped() && self.core.held(side) > 0)
    }

    /// Stores unwritten bytes before the thread's buffer is used for something else.
    fn stash(&mut self, fresh: &mut Option<Fresh>, scratch: &[u8]) {
        if let Some(bytes) = fresh.take() {
            self.lane(bytes.from).keep(&scratch[bytes.start..bytes.end]);
        }
    }

    fn read(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        max: u32,
        scratch: &mut [u8],
        fresh: &mut Option<Fresh>,
    ) -> Input {
        if self.through.is_some() {
            return self.read_through(cx, side, max, scratch, fresh);
        }
        match self.poll_side(cx, side, max, scratch) {
            Poll::Pending => Input::ReadBlocked(side),
            Poll::Ready(Ok(0)) if self.is_gone(side) => Input::Failed(side),
            Poll::Ready(Ok(0)) => self.judge_end(side).unwrap_or(Input::Eof(side)),
            Poll::Ready(Ok(n)) => {
                let last = self.is_last(side, n, max);
                self.came(side, n, last, fresh)
            }
            Poll::Ready(Err(error)) => self.failed(side, error),
        }
    }

    /// Like [`Self::poll_wire`], but does not read again from a side of which only the FIN was left.
    fn poll_side(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        max: u32,
        scratch: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        if self.drained == Some(side) && !self.is_gone(side) {
            return Poll::Ready(Ok(0));
        }
        self.poll_wire(cx, side, max, scratch)
    }

    /// Whether an orderly end of this side follows these `n` bytes directly. Notes then that the side need not
    /// be read again.
    fn is_last(&mut self, side: Side, n: usize, max: u32) -> bool {
        // With a full pipe a short read does not mean that nothing is left.
        let is_all = n < SCRATCH.min(max as usize) && !self.lane(side).is_piped();
        let last = is_all && self.wire(side).has_ended() && self.would_end_in_order(side);
        if last && self.wire(side).ends_in_order() {
            self.drained = Some(side);
        }
        last
    }

    /// Handles bytes from this side, possibly its last: they are in the pipe, or in the thread's buffer to be
    /// written.
    fn came(&mut self, side: Side, n: usize, last: bool, fresh: &mut Option<Fresh>) -> Input {
        self.note_first_byte(side);
        if !self.lane(side).is_piped() {
            *fresh = Some(Fresh { from: side, start: 0, end: n, last });
        }
        Input::Read(side, u32::try_from(n).unwrap_or(u32::MAX))
    }

    fn note_first_byte(&mut self, side: Side) {
        if side == Side::Server && self.live.first_byte_time().is_none() {
            self.live.first_byte(self.live.age());
            // An answer that fits into its first bytes needs no acknowledgement of its own
            // ([`Self::expect_answer`]). The server may hold back the rest of a longer one until it gets an
            // acknowledgement.
            let wire = self.wire(Side::Server);
            if !wire.has_ended()
                && let Some(socket) = wire.socket()
            {
                let _ = sockopt::set_tcp_ack_at_once(socket);
            }
        }
    }

    /// Reads from a side into its pipe or into the thread's buffer; 0 is the end.
    fn poll_wire(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        max: u32,
        scratch: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let (wire, lane) = self.parts(side, side);
        if lane.is_piped() {
            lane.poll_fill(cx, wire, max as usize)
        } else {
            wire.poll_recv(cx, &mut scratch[..SCRATCH.min(max as usize)])
        }
    }

    fn write(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        held: u32,
        scratch: &[u8],
        fresh: &mut Option<Fresh>,
    ) -> Input {
        let from = side.other();
        if side == Side::Server && fresh.is_some() && self.is_silent() {
            self.expect_answer();
        }
        let (wire, lane) = self.parts(side, from);
        let result = match fresh {
            Some(bytes) if bytes.from == from && lane.is_empty() => {
                let chunk = &scratch[bytes.start..bytes.end];
                let sent =
                    if bytes.last { wire.poll_send_more(cx, chunk) } else { wire.poll_send(cx, chunk) };
                sent.map_ok(|n| {
                    bytes.start += n;
                    n
                })
            }
            _ => lane.poll_drain(cx, wire, held as usize),
        };
        if fresh.is_some_and(|bytes| bytes.start == bytes.end) {
            *fresh = None;
        }
        match result {
            Poll::Pending => Input::WriteBlocked(side),
            Poll::Ready(Ok(n)) => {
                if let Some(wiring) = &mut self.wiring {
                    wiring.wrote(side, n);
                }
                let n64 = n as u64;
                match side {
                    Side::Server => self.live.count(n64, 0),
                    Side::Client => self.live.count(0, n64),
                }
                if fresh.is_none()
                    && self.is_socket(side)
                    && self.is_socket(from)
                    && self.may_splice(from)
                    && let Some(limit) = self.lane(from).moved(n64)
                {
                    self.core.handle(self.clock.now(), Input::Limit(from, limit));
                }
                if let Some(farewell) = &mut self.farewell {
                    farewell.moved(self.clock.now());
                }
                Input::Written(side, u32::try_from(n).unwrap_or(u32::MAX))
            }
            Poll::Ready(Err(error)) => {
                self.lost(self.clock.now(), side, error);
                self.swallow(side, held, fresh)
            }
        }
    }

    /// Whether no byte has moved yet, in either direction.
    fn is_silent(&self) -> bool {
        self.live.first_byte_time().is_none() && self.live.bytes() == (0, 0)
    }

    /// Called when the client sends first: the server's answer need not be acknowledged piece by piece. A
    /// connection dialled with bytes at hand does this by itself; here the client waited until its path was set
    /// up (SOCKS).
    fn expect_answer(&mut self) {
        if let Some(socket) = self.wire(Side::Server).socket() {
            // Best effort: without the option, a few more packets are sent.
            let _ = sockopt::set_tcp_ack_with_data(socket);
        }
    }

    fn fin(&mut self, cx: &mut Context<'_>, side: Side) -> Input {
        match self.wire(side).finish(cx) {
            Err(error) if error.kind() != ErrorKind::NotConnected || self.hands_to_function(side) => {
                self.failed(side, error)
            }
            // The wire finishes its end when it is tended.
            _ => match self.hand_end(side) {
                Ok(()) => {
                    if let Some(wiring) = &mut self.wiring {
                        wiring.wrote(side, 1);
                    }
                    Input::FinSent(side)
                }
                Err(error) => self.failed(side, error),
            },
        }
    }

    /// Handles a failed read: all bytes that this side sent before it was gone are read.
    fn failed(&mut self, side: Side, error: io::Error) -> Input {
        self.error.get_or_insert(error);
        self.farewell.get_or_insert(Farewell::new(side, self.clock.now()));
        Input::Failed(side)
    }

    /// Notes that a side spoke plain TCP in the end, if its path removed the options of Multipath TCP.
    fn look_at_protocols(&self) {
        let multipath = self.live.multipath();
        let sides =
            [(multipath.client, Side::Client, &self.client), (multipath.server, Side::Server, &self.server)];
        for (_, side, wire) in sides.into_iter().filter(|(is_used, ..)| *is_used) {
            if let Some(socket) = wire.as_ref().and_then(W::socket) {
                self.live.speaks_multipath(side, sockopt::speaks_mptcp(socket));
            }
        }
    }

    /// Whether the measurements of TCP are noted at the end. They cost two system calls, and say nothing of a flow that was short
    /// and ended well.
    fn is_worth_a_look(&self, reason: EndReason) -> bool {
        let (up, down) = self.live.bytes();
        reason != EndReason::Ok || up + down >= LOOKED_AT_BYTES || self.live.age() >= LOOKED_AT_AGE
    }

    /// Notes what TCP has measured at both sides, for the decision trace.
    fn look_at_tcp(&self) {
        let after = self.live.age();
        for (side, wire) in [(Side::Client, &self.client), (Side::Server, &self.server)] {
            if let Some(socket) = wire.as_ref().and_then(W::socket)
                && let Ok(info) = sockopt::tcp_info(socket)
            {
                self.live.traced(|trace| trace.tcp_at(side, TcpSeen::new(&info, after)));
            }
        }
    }

    /// Tells a capture which connections the flow has.
    fn note_legs(&self) {
        for (side, wire) in [(Side::Client, &self.client), (Side::Server, &self.server)] {
            wire.as_ref().and_then(W::socket).inspect(|socket| legs::note(&self.live, side, socket));
        }
    }

    fn close(&mut self, reset: bool) {
        for wire in [self.client.take(), self.server.take()].into_iter().flatten() {
            wire.close(reset);
        }
    }
}

impl<W: Wire> Drop for Pump<W> {
    /// Resets both sides of a flow that is dropped before its end, as when the process ends.
    fn drop(&mut self) {
        self.close(true);
    }
}

impl<W: Wire> Future for Pump<W> {
    type Output = Ending;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ending> {
        let _span = Stage::Move.enter();
        let this = self.get_mut();
        this.live.set_waker(cx.waker());
        let (reason, reset) = ready!(BUFFER.with_borrow_mut(|scratch| this.run(cx, scratch)));
        let wired = this.wiring.take_if(|wiring| wiring.is_on_wire()).and_then(|wiring| wiring.handed());
        if wired.is_some() {
            return Poll::Ready(Ending { reason, error: None, wired });
        }
        let cut = if reset { None } else { this.hand_last_end(cx).err() };
        this.look_at_protocols();
        if this.is_worth_a_look(reason) {
            this.look_at_tcp();
        }
        this.close(reset || cut.is_some());
        Poll::Ready(match cut {
            Some(error) => Ending { reason: EndReason::ClientReset, error: Some(error), wired: None },
            None => Ending { reason, error: this.error.take(), wired },
        })
    }
}
