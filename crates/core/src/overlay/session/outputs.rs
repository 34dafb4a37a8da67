//! What one end of a session has to do next.

use super::{Mode, Output, PathSet, Phase, ResetReason, Session, SessionFrame};

impl Session {
    /// Returns the next output. Outputs for a path come only while it is in `ready`: it accepts more. No output is lost in the
    /// meantime.
    pub fn poll(&mut self, ready: PathSet) -> Option<Output> {
        match self.phase {
            Phase::Closed => None,
            Phase::Closing(reason) => {
                self.phase = Phase::Closed;
                Some(Output::Closed(reason))
            }
            Phase::Resetting(reason, _) => self.poll_reset(ready, reason),
            Phase::Open | Phase::ResetByPeer { .. } | Phase::Lingering(_) => self.poll_open(ready),
        }
    }

    fn poll_open(&mut self, ready: PathSet) -> Option<Output> {
        let may_fin = matches!(self.phase, Phase::Open) && self.send.is_confirmed_to_mark();
        if may_fin && self.receive.take_fin() {
            self.settle();
            return Some(Output::Fin);
        }
        // All that follows is sent along a path.
        if !self.has_path() {
            return None;
        }
        // Acknowledgements go before data: credit that waits behind our data would stop the other end.
        if let Some(output) = self.poll_ack(ready) {
            return Some(output);
        }
        if matches!(self.phase, Phase::Open)
            && let Some(output) = self.poll_data(ready)
        {
            self.arm();
            return Some(output);
        }
        if matches!(self.phase, Phase::Lingering(_)) {
            // On every path: one of them may be dead, and it is not known yet.
            let path = self.lanes.take(ready, |lane| &mut lane.done_sent)?;
            self.arm();
            self.settle();
            return Some(Output::Send(path, SessionFrame::Done));
        }
        None
    }

    fn poll_ack(&mut self, ready: PathSet) -> Option<Output> {
        if self.receive.take_due() {
            self.lanes.must_ack();
        }
        let several = self.mode != Mode::Shortest;
        let mut ack = self.receive.ack();
        if several {
            // Nothing is requested again by its place.
            ack.hole_end = 0;
        }
        if let Some(path) = self.lanes.take_ack(ready, ack, self.now, several) {
            self.receive.told(ack);
            return Some(Output::Send(path, SessionFrame::Ack(ack)));
        }
        if !self.tells {
            return None;
        }
        let (path, bytes) = self.lanes.take_arrived(ready, self.now)?;
        Some(Output::Send(path, SessionFrame::Arrived { bytes }))
    }

    fn poll_data(&mut self, ready: PathSet) -> Option<Output> {
        match self.mode {
            Mode::Shortest => {
                let path = self.lanes.up(ready).next()?;
                let output = self.send.poll(path, self.now)?;
                if let Output::SendData { offset, .. } = output {
                    self.lanes.sent(path, offset, self.send.data(offset).len(), self.now);
                }
                Some(output)
            }
            Mode::Stripe => self.poll_stripe(ready),
            Mode::Duplicate => self.poll_copy(ready),
        }
    }

    fn poll_stripe(&mut self, ready: PathSet) -> Option<Output> {
        let free = self.lanes.free(ready);
        // First what all data behind it waits for.
        for path in free.iter().copied() {
            while let Some(offset) = self.lanes.take_overdue(path, self.now) {
                if self.send.has(offset) {
                    return Some(self.send_data(path, offset));
                }
            }
        }
        if let Some(path) = self.lanes.worth(&free)
            && let Some(offset) = self.send.stripe()
        {
            return Some(self.send_data(path, offset));
        }
        let fin = self.send.fin_of_paths()?;
        let path = self.lanes.take_fin(ready, None)?;
        Some(Output::Send(path, fin))
    }

    fn poll_copy(&mut self, ready: PathSet) -> Option<Output> {
        for path in self.lanes.free(ready) {
            let cursor = self.lanes.get_mut(path).map_or(0, |lane| lane.cursor);
            if let Some(offset) = self.send.copy(cursor) {
                return Some(self.send_data(path, offset));
            }
        }
        let fin = self.send.fin_of_paths()?;
        // A path that has not sent all data has its FIN only if the other end has the data from another path.
        let end = self.send.end();
        let path = self.lanes.take_fin(ready, (self.send.acked() < end).then_some(end))?;
        Some(Output::Send(path, fin))
    }

    fn send_data(&mut self, path: u8, offset: u64) -> Output {
        self.lanes.sent(path, offset, self.send.data(offset).len(), self.now);
        Output::SendData { path, offset }
    }

    fn poll_reset(&mut self, ready: PathSet, reason: ResetReason) -> Option<Output> {
        if !self.has_path() {
            return None;
        }
        let path = self.lanes.take(ready, |lane| &mut lane.reset_sent)?;
        if self.config.retransmit.is_none() && self.lanes.all(|lane| lane.reset_sent) {
            self.phase = Phase::Closing(Some(reason));
        }
        self.arm();
        Some(Output::Send(path, SessionFrame::Reset { offset: self.send.sent(), reason }))
    }
}
