//! The driver of [`sidetrack_core::splice`]: one future per flow that moves its bytes.
//!
//! What is read lands in one buffer per thread and is written from there at once; only what the other side does not
//! take is kept, in memory that the flow gives back when it is gone. An idle flow holds no buffer. A direction that
//! has carried [`SPLICE_AFTER`] bytes in pieces worth it changes to a pipe and `splice(2)`: its bytes no longer pass through
//! user space.

mod ends;
mod through;

pub use ends::{Ends, Law};

use super::farewell::Farewell;
use super::lane::Lane;
use super::probe::Probe;
use crate::carry::Wire;
use crate::live::{Clock, LiveFlow};
use crate::reactor::TcpStream;
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
use through::Through;

/// Bytes of a direction, carried in pieces of at least [`SPLICE_LEAST`], after which it changes to `splice(2)`. Below this a
/// pipe costs more than the copies it saves (`bench/RESULTS.md`).
pub const SPLICE_AFTER: u64 = 256 * 1024;

/// Least bytes of a piece that counts for [`SPLICE_AFTER`]. Two splices cost more than a read and a write of a small message,
/// however many of them a connection that stays open carries (`bench/EPI.md`).
pub const SPLICE_LEAST: u64 = 4096;

/// Most bytes one read takes, and the size of the buffer of each thread.
const SCRATCH: usize = 64 * 1024;

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; SCRATCH].into_boxed_slice());
}

/// How the moving of bytes ended.
#[derive(Debug)]
pub struct Ending {
    /// The one reason.
    pub reason: EndReason,
    /// What the socket said, where it said something.
    pub error: Option<io::Error>,
}

/// Bytes that were just read and lie in the thread's buffer.
#[derive(Clone, Copy)]
struct Fresh {
    from: Side,
    start: usize,
    end: usize,
    /// The sender's FIN is known to come right behind: it can travel with these bytes.
    last: bool,
}

/// One flow's bytes in motion. Resolves when both sides are closed.
///
/// One kind of wire for both sides: sockets, the fast path, of which the compiler makes code of its own; or
/// [`crate::carry::Stream`], which is anything.
pub struct Pump<W: Wire = TcpStream> {
    client: Option<W>,
    server: Option<W>,
    core: Splice,
    up: Lane,
    down: Lane,
    live: Arc<LiveFlow>,
    clock: Clock,
    error: Option<io::Error>,
    probe: Probe,
    farewell: Option<Farewell>,
    /// The side whose last bytes were read, with its FIN known to be all that is left: it need not be asked again.
    drained: Option<Side>,
    /// The functions between the two sides, for flows that pass some.
    through: Option<Box<Through>>,
    /// What the end of a side means where one of the sides is a function.
    law: Option<Box<Law>>,
}

impl<W: Wire> Pump<W> {
    /// Both sides stand; `early_up` was read from the client and `early_down` from the server before.
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
        }
    }

    /// The same with functions between the two sides, if there are any. What was read before has passed them already.
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
        let wire = match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        };
        wire.as_mut().expect("wires live until Close, after which the core asks for nothing")
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
        for side in self.probe.take(now) {
            if let Some(error) = self.wire(side).take_error() {
                self.lost(now, side, error);
            }
        }
        if let Some(late) = self.farewell.filter(|farewell| farewell.is_late(now)) {
            self.core.handle(now, Input::End(late.reason()));
        }
        self.core.handle(now, Input::Woken);
        self.advance_functions(now);
        if let Some(reason) = self.live.ending() {
            self.core.handle(now, Input::End(reason));
        }
        if self.core.deadline().is_some_and(|deadline| deadline <= now) {
            self.core.handle(now, Input::Tick);
        }
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
            self.core.handle(now, input);
        }
        self.stash(&mut fresh, scratch);
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

    /// Waits until the words of the side that is gone have left the kernel, too; then the other side is reset.
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

    /// Notes that this side takes nothing more. What it said before may still wait to be read: its own end comes then.
    fn lost(&mut self, now: Instant, side: Side, error: io::Error) {
        self.error.get_or_insert(error);
        match &self.farewell {
            None => self.farewell = Some(Farewell::new(side, now)),
            Some(first) if first.gone == side => {}
            // Nobody is left to tell.
            Some(first) => self.core.handle(now, Input::End(first.reason())),
        }
        if self.core.has_ended(side) {
            self.core.handle(now, Input::Failed(side));
        }
    }

    /// Drops what is held for a side that is gone.
    fn swallow(&mut self, side: Side, held: u32, fresh: &mut Option<Fresh>) -> Input {
        let from = side.other();
        *fresh = fresh.filter(|bytes| bytes.from != from);
        *self.lane(from) = Lane::default();
        Input::Written(side, held)
    }

    /// Whether no readiness of this side would wake us.
    fn is_unread(&self, side: Side) -> bool {
        let lane = match side {
            Side::Client => &self.up,
            Side::Server => &self.down,
        };
        // A pipe without room stops the reading before the core's limit does.
        !self.core.waits_to_read(side) || (lane.is_piped() && self.core.held(side) > 0)
    }

    /// Keeps what could not be written before the thread's buffer is used for something else.
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

    /// As [`Self::poll_wire`], but a side of which only its FIN was left is not asked again.
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

    /// Whether the end of this side, which is an end in order as far as the flow goes, comes right behind these `n` bytes; notes
    /// that it need not be asked again then.
    fn is_last(&mut self, side: Side, n: usize, max: u32) -> bool {
        // Of a pipe that has no room, little is read although more is there.
        let is_all = n < SCRATCH.min(max as usize) && !self.lane(side).is_piped();
        let last = is_all && self.wire(side).has_ended() && self.would_end_in_order(side);
        if last && self.wire(side).ends_in_order() {
            self.drained = Some(side);
        }
        last
    }

    /// Bytes came from this side, the last ones maybe: into the pipe, or to be written from the thread's buffer.
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
            // An answer that ends with its first bytes needed no acknowledgement of its own ([`Self::expect_answer`]); of
            // a longer one the server may hold the rest back for it.
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
        let wire = match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        };
        let wire = wire.as_mut().expect("wires live until Close");
        let lane = match side {
            Side::Client => &mut self.up,
            Side::Server => &mut self.down,
        };
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
        let wire = match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        };
        let wire = wire.as_mut().expect("wires live until Close");
        let lane = match from {
            Side::Client => &mut self.up,
            Side::Server => &mut self.down,
        };
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

    /// The client speaks first: what the server answers need not be acknowledged piece by piece. A connection that was
    /// dialled with bytes at hand does so by itself; here the client waited until its path stood (SOCKS).
    fn expect_answer(&mut self) {
        if let Some(socket) = self.wire(Side::Server).socket() {
            // A wish: without it some packets more.
            let _ = sockopt::set_tcp_ack_with_data(socket);
        }
    }

    fn fin(&mut self, cx: &mut Context<'_>, side: Side) -> Input {
        match self.wire(side).finish(cx) {
            Err(error) if error.kind() != ErrorKind::NotConnected || self.hands_to_function(side) => {
                self.failed(side, error)
            }
            // What is left of it to do, a wire does when it is tended.
            _ => match self.hand_end(side) {
                Ok(()) => Input::FinSent(side),
                Err(error) => self.failed(side, error),
            },
        }
    }

    /// Reading has come to the end of what this side said before it was gone.
    fn failed(&mut self, side: Side, error: io::Error) -> Input {
        self.error.get_or_insert(error);
        self.farewell.get_or_insert(Farewell::new(side, self.clock.now()));
        Input::Failed(side)
    }

    /// A side whose path lost the options of Multipath TCP spoke plain TCP in the end.
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

    fn close(&mut self, reset: bool) {
        for wire in [self.client.take(), self.server.take()].into_iter().flatten() {
            wire.close(reset);
        }
    }
}

impl<W: Wire> Drop for Pump<W> {
    /// A flow that is dropped before its end, as at the end of the process, has no orderly end.
    fn drop(&mut self) {
        self.close(true);
    }
}

impl<W: Wire> Future for Pump<W> {
    type Output = Ending;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ending> {
        let this = self.get_mut();
        this.live.set_waker(cx.waker());
        let (reason, reset) = ready!(BUFFER.with_borrow_mut(|scratch| this.run(cx, scratch)));
        let cut = if reset { None } else { this.hand_last_end(cx).err() };
        this.look_at_protocols();
        this.close(reset || cut.is_some());
        Poll::Ready(match cut {
            Some(error) => Ending { reason: EndReason::ClientReset, error: Some(error) },
            None => Ending { reason, error: this.error.take() },
        })
    }
}
