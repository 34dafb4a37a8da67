//! One round of a worker: the packets that were taken, time-outs, packets of other workers, and new connections, in this
//! order. `sidetrack_core::engine::Schedule` says how much of each.

use super::super::hops;
use super::super::strays::Stray;
use super::Worker;
use crate::live::profile::Stage;
use sidetrack_core::engine::{Ahead, Done, Fate};
use sidetrack_core::time::Instant;

impl Worker {
    /// Handles one batch of packets, and the other work of a round.
    pub(super) fn handle(&mut self, now: Instant, taken: usize) {
        let span = Stage::EnginePackets.enter_with(taken as u64);
        let select = self.engine.callbacks_mut();
        select.now = now;
        select.flows.next_batch();
        // First load what the whole batch needs into the cache, then handle each packet.
        let mut ahead = Ahead::default();
        for frame in 0..taken {
            match self.driver.arrived(frame) {
                Some(arrived) => self.engine.approach(&mut ahead, arrived.packet),
                None => ahead.skip(),
            }
        }
        self.engine.warm(&mut ahead);
        let waiting = self.driver.waiting();
        let round = self.schedule.begin(now, taken, waiting);
        let strangers = ahead.strangers();
        for frame in (0..taken).filter(|frame| !is_set(strangers, *frame)) {
            self.packet(now, frame);
        }
        let mut done = Done { packets: taken - strangers.count_ones() as usize, ..Done::default() };
        done.timers = self.engine.tick_at_most(now, round.timers);
        self.send_own();
        done.merged = self.merge(now, round.merged);
        // They would wait for the bell otherwise.
        self.has_left_over = done.merged == round.merged;
        for frame in (0..taken).filter(|frame| is_set(strangers, *frame)) {
            self.newcomer(now, frame, round.openings, &mut done);
        }
        self.schedule.end(&done);
        drop(span);
        self.end_unreachable(now);
        // Before the flush: the kernel must know the connection when the server answers the first bytes.
        Stage::EngineOffload.time(|| self.offload_early(now));
        Stage::EngineSend.time(|| self.driver.flush());
        Stage::EngineRecords.time(|| self.note_records());
    }

    /// Handles packets that other workers handed over. Returns how many.
    fn merge(&mut self, now: Instant, most: usize) -> usize {
        let mut done = 0;
        while done < most
            && let Some(stray) = self.strays.next()
        {
            self.stray(now, stray);
            done += 1;
        }
        done
    }

    /// Handles a packet that another worker handed over, or that has waited.
    pub(super) fn stray(&mut self, now: Instant, mut stray: Stray) {
        let fate = self.engine.handle(now, &mut stray.packet, stray.hop, stray.checksums);
        if let Fate::Forward { len, hop } = fate {
            self.driver.send(stray.packet.get(..len).unwrap_or_default(), hop);
        }
        self.send_own();
    }

    /// Handles a packet that belonged to no connection when the round began, or sheds it.
    fn newcomer(&mut self, now: Instant, frame: usize, most: usize, done: &mut Done) {
        let Some(arrived) = self.driver.arrived(frame) else { return };
        if self.strays.pass_on(&arrived) {
            done.packets += 1;
        } else if self.engine.knows(arrived.packet) {
            // A packet before it in this batch has begun the connection.
            done.packets += 1;
            self.packet(now, frame);
        } else if done.openings < most {
            done.openings += 1;
            self.packet(now, frame);
        } else {
            done.shed += 1;
        }
    }

    fn packet(&mut self, now: Instant, frame: usize) {
        let Some(arrived) = self.driver.arrived(frame) else { return };
        if self.strays.pass_on(&arrived) {
            return;
        }
        let offload = self.engine.callbacks_mut().offload.as_mut();
        if offload.is_some_and(|offload| offload.holds(&arrived, now)) {
            return;
        }
        // `bound` is read before: if it grows, this packet was the expected SYN-ACK.
        let answering = hops::answering(arrived.packet).map(|server| (server, arrived.hop));
        let before = answering.map(|_| self.engine.counters().bound);
        if let Fate::Forward { len, hop } =
            self.engine.handle(now, arrived.packet, arrived.hop, arrived.checksums)
        {
            self.driver.forward(frame, len, hop);
        }
        if let Some((server, hop)) = answering
            && before.is_some_and(|before| self.engine.counters().bound > before)
        {
            // Only an expected SYN-ACK names the neighbour: any host could send another one.
            self.engine.callbacks_mut().hops.learn(server, hop, now);
        }
        self.send_own();
    }
}

/// Whether the bit of a frame is set. Later frames than there are bits have none.
fn is_set(bits: u64, frame: usize) -> bool {
    u32::try_from(frame).ok().and_then(|frame| bits.checked_shr(frame)).is_some_and(|rest| rest & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::super::super::driver::{Arrived, Driver};
    use super::super::tests::{segment, worker_with};
    use super::*;
    use sidetrack_core::engine::packet::flags;
    use sidetrack_core::engine::{Checksums, Hop, Load};
    use std::io;
    use std::os::fd::BorrowedFd;
    use std::sync::{Arc, Mutex};

    /// Frames that are there at once, and the packets that were sent.
    #[derive(Debug, Default)]
    struct Line {
        coming: Vec<Vec<u8>>,
        waiting: usize,
        sent: Vec<Vec<u8>>,
    }

    #[derive(Debug)]
    struct Wire {
        line: Arc<Mutex<Line>>,
        taken: Vec<Vec<u8>>,
    }

    impl Driver for Wire {
        fn receive(&mut self) -> io::Result<usize> {
            self.taken = std::mem::take(&mut self.line.lock().unwrap().coming);
            Ok(self.taken.len())
        }

        fn arrived(&mut self, frame: usize) -> Option<Arrived<'_>> {
            let packet = self.taken.get_mut(frame)?;
            Some(Arrived { packet, hop: Hop(1), checksums: Checksums::Verified })
        }

        fn forward(&mut self, _frame: usize, _len: usize, _hop: Hop) {}

        fn send(&mut self, packet: &[u8], _hop: Hop) {
            self.line.lock().unwrap().sent.push(packet.to_vec());
        }

        fn flush(&mut self) {}

        fn waiting(&mut self) -> usize {
            self.line.lock().unwrap().waiting
        }

        fn lost(&self) -> u64 {
            0
        }

        fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
            Vec::new()
        }
    }

    #[test]
    fn under_overload_connections_are_served_first_and_new_ones_are_shed_with_a_count() {
        let line = Arc::new(Mutex::new(Line::default()));
        let (mut worker, ..) = worker_with(Box::new(Wire { line: line.clone(), taken: Vec::new() }));
        let mut us = 1_000_000;
        // A round takes 100 us.
        let mut round = |frames: Vec<Vec<u8>>, waiting: usize| {
            us += 100;
            *line.lock().unwrap() = Line { coming: frames, waiting, sent: Vec::new() };
            let taken = worker.driver.receive().unwrap();
            worker.handle(Instant::from_nanos(us * 1000), taken);
            let sent = std::mem::take(&mut line.lock().unwrap().sent);
            (sent, worker.schedule.load(), *worker.schedule.totals())
        };
        let (sent, ..) = round(vec![segment(4000, flags::SYN, 100, 0)], 0);
        assert_eq!(sent.len(), 1, "a SYN-ACK");
        // The same SYN again is a packet of a connection, which is answered each time, even last of a batch.
        let mut port = 10_000;
        let mut flood = || {
            let syns = (0..50).map(|_| {
                port += 1;
                segment(port, flags::SYN, 7, 0)
            });
            let mut frames: Vec<_> = syns.collect();
            frames.push(segment(4000, flags::SYN, 100, 0));
            frames
        };
        for number in 0..500 {
            let (sent, load, totals) = round(flood(), 100_000);
            let opened = totals.openings - 1;
            // A part of a hash tells: once in many thousand, a new connection counts as a known one.
            let mistaken = totals.packets - (number + 1);
            assert!(mistaken <= 5, "the connection comes first in each round: {totals:?}");
            assert_eq!(opened + totals.shed + mistaken, 50 * (number + 1));
            assert!(sent.len() >= 3, "two new connections are served in any round: {}", sent.len());
            assert_eq!(load, if number < 200 { Load::Calm } else { Load::Overloaded }, "round {number}");
            assert!(number >= 200 || totals.shed == 0, "a burst is served");
        }
        let (_, _, totals) = round(Vec::new(), 0);
        assert!(totals.shed > 12_000, "{totals:?}");
        // Nothing is shed for a second.
        for _ in 0..10_100 {
            round(Vec::new(), 0);
        }
        let (sent, load, after) = round(flood(), 0);
        assert_eq!((sent.len(), load, after.shed), (51, Load::Calm, totals.shed), "it is over");
        worker.count(Instant::from_nanos(9_000_000_000), Instant::ZERO);
        let counts = worker.work.counts();
        assert_eq!((counts.totals, counts.shed()[0]), (after, ("overload", totals.shed)));
        assert_eq!(counts.rounds().map(|(_, rounds)| rounds).sum::<u64>(), 10_603);
    }
}
