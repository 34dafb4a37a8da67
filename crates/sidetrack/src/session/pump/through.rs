//! The pump of a flow with functions: its bytes pass the [`Chain`] between reading and writing. The splice core
//! counts the bytes that come out. If all functions of a direction only count, its bytes are moved as for any
//! other flow, also by `splice(2)`.

use super::{Fresh, Pump};
use crate::carry::Wire;
use crate::live::profile::Stage;
use crate::reactor::{Sleep, sleep};
use sidetrack_core::chain::{Chain, OFFER_MAX, Offered};
use sidetrack_core::flow::Side;
use sidetrack_core::function::{FRAMING_MAX, Interest, Stop};
use sidetrack_core::splice::Input;
use sidetrack_core::time::Instant;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The functions of a flow, and the timer for what they wait for. It is finer than the worker's sweep.
pub(super) struct Through {
    chain: Box<Chain>,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Through {
    pub(super) const fn new(chain: Box<Chain>) -> Self {
        Self { chain, timer: None }
    }

    /// Whether no function reads the bytes of this direction.
    fn only_counts(&self, from: Side) -> bool {
        self.chain.interest(from) < Interest::Bytes && self.chain.is_open(from)
    }
}

impl<W: Wire> Pump<W> {
    /// Whether the bytes of this direction may go through a pipe.
    pub(super) fn may_splice(&self, from: Side) -> bool {
        self.through.as_ref().is_none_or(|through| through.only_counts(from))
    }

    /// Lets functions do work that is due, such as releasing bytes held back by a limit.
    pub(super) fn advance_functions(&mut self, now: Instant) {
        let Some(through) = &mut self.through else { return };
        for side in [Side::Client, Side::Server] {
            if let Err(stop) = through.chain.advance(now, side) {
                let input = stopped(&mut self.error, stop);
                return self.core.handle(now, input);
            }
        }
    }

    /// Sets the timer so that the runtime polls this flow at the functions' deadline.
    pub(super) fn arm_functions(&mut self, cx: &mut Context<'_>, now: Instant) {
        let Some(through) = &mut self.through else { return };
        let Some(due) = through.chain.deadline() else {
            through.timer = None;
            return;
        };
        if through.timer.as_ref().is_none_or(|(armed, _)| *armed != due) {
            through.timer = Some((due, Box::pin(sleep(due - now))));
        }
        if let Some((_, timer)) = &mut through.timer
            && timer.as_mut().poll(cx).is_ready()
        {
            through.timer = None;
            cx.waker().wake_by_ref();
        }
    }

    /// Answers the core's request to read from this side, with bytes that come out of the functions.
    pub(super) fn read_through(
        &mut self,
        cx: &mut Context<'_>,
        side: Side,
        max: u32,
        scratch: &mut [u8],
        fresh: &mut Option<Fresh>,
    ) -> Input {
        let now = self.clock.now();
        if let Some(input) = self.take_out(now, side, max) {
            return input;
        }
        let Some(through) = &mut self.through else { return Input::ReadBlocked(side) };
        let counts = through.only_counts(side);
        let most = if counts { through.chain.allowance(now, side) } else { OFFER_MAX };
        let most = u32::try_from(most).unwrap_or(u32::MAX).min(max);
        // An end needs no allowance. Bytes before it wait for allowance in the kernel.
        if most == 0 && self.drained != Some(side) {
            return Input::ReadBlocked(side);
        }
        let n = match self.poll_side(cx, side, most, scratch) {
            Poll::Pending => return Input::ReadBlocked(side),
            Poll::Ready(Ok(0)) if self.is_gone(side) => return Input::Failed(side),
            Poll::Ready(Ok(n)) => n,
            Poll::Ready(Err(error)) => return self.failed(side, error),
        };
        if n == 0
            && let Some(input) = self.judge_end(side)
        {
            return input;
        }
        let Some(through) = &mut self.through else { return Input::ReadBlocked(side) };
        let offered = match n {
            0 => through.chain.end(now, side).map(|()| Offered::Inside),
            n if counts => {
                through.chain.count(now, side, n);
                Ok(Offered::Unchanged)
            }
            n => Stage::Functions.time(|| through.chain.handle(now, side, &scratch[..n])),
        };
        match offered {
            Ok(Offered::Unchanged) => {
                self.wake_other(now, side);
                let last = self.is_last(side, n, most);
                self.came(side, n, last, fresh)
            }
            Ok(Offered::Inside) => {
                self.note_first_byte(side);
                self.wake_other(now, side);
                // Perhaps only the rest of a record is missing: with 0 bytes the core asks again at once.
                self.take_out(now, side, max).unwrap_or(Input::Read(side, 0))
            }
            Err(stop) => stopped(&mut self.error, stop),
        }
    }

    /// Returns the bytes that are ready in the functions, the end of the direction, or that it is blocked there.
    /// `None`: read from the socket.
    fn take_out(&mut self, now: Instant, side: Side, max: u32) -> Option<Input> {
        let through = self.through.as_mut()?;
        let lane = match side {
            Side::Client => &mut self.up,
            Side::Server => &mut self.down,
        };
        // Take the framing that functions added too, even beyond `max`: it is in memory in any case.
        let kept = match through.chain.take_whole(side, (max as usize).saturating_add(FRAMING_MAX)) {
            Some(whole) => lane.keep_whole(whole),
            None => lane.keep(through.chain.take(side, max as usize)),
        };
        if kept > 0 {
            let n = u32::try_from(kept).unwrap_or(u32::MAX);
            // The functions have room again.
            let advanced = through.chain.advance(now, side);
            return Some(
                advanced.map_or_else(|stop| stopped(&mut self.error, stop), |()| Input::Read(side, n)),
            );
        }
        if through.chain.is_over(side) {
            return Some(Input::Eof(side));
        }
        (!through.chain.is_open(side)).then_some(Input::ReadBlocked(side))
    }

    /// Bytes or an end of one side may release the other direction inside the functions.
    fn wake_other(&mut self, now: Instant, side: Side) {
        let Some(through) = &mut self.through else { return };
        let other = side.other();
        if through.chain.is_open(other) || through.chain.is_over(other) {
            return;
        }
        match through.chain.advance(now, other) {
            Ok(()) if through.chain.ready(other) > 0 || through.chain.is_over(other) => {
                self.core.handle(now, Input::Woken);
            }
            Ok(()) => {}
            Err(stop) => {
                let input = stopped(&mut self.error, stop);
                self.core.handle(now, input);
            }
        }
    }
}

/// The input for a function that ends the flow. Its text goes into the record.
fn stopped(error: &mut Option<io::Error>, stop: Stop) -> Input {
    *error = Some(io::Error::other(stop.detail));
    Input::End(stop.reason)
}
