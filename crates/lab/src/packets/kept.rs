//! Connections that stay open: each asks, waits for the answer, and asks again after a pause. What they wait says what
//! other connections cost them.

use std::net::{Ipv4Addr, SocketAddrV4};

use serde::{Deserialize, Serialize};

use super::ends::FIRST_PORT;
use super::segment::{ACK, PSH, RST, SYN, Segment};
use crate::load::Histogram;

/// Bytes of a question and of its answer: fewer than the request of other connections has.
pub(super) const QUESTION: u16 = 8;
/// Time between two questions of a connection unless told otherwise, in nanoseconds.
pub(super) const EVERY_NS: u64 = 5_000_000;
/// Time after which a question without an answer is sent again, in nanoseconds: the least of most kernels.
const AGAIN_NS: u64 = 200_000_000;

/// What connections that stay have seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptReport {
    /// Answers.
    pub answered: u64,
    /// Questions that were sent again because no answer came for 200 ms.
    pub repeated: u64,
    /// Connections that were reset.
    pub reset: u64,
    /// Median time from question to answer, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the same.
    pub p99_ns: u64,
    /// 99.9th percentile of the same.
    pub p999_ns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Opening,
    Waiting,
    Resting,
    Gone,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    step: Step,
    /// Next number to send, and next number expected.
    seq: u32,
    ack: u32,
    /// When the question was first sent, or is due while resting.
    since_ns: u64,
    /// When it was last sent.
    sent_ns: u64,
}

/// The clients of these connections. The server needs no state for them.
#[derive(Debug)]
pub(super) struct Kept {
    front: SocketAddrV4,
    address: Ipv4Addr,
    every_ns: u64,
    slots: Vec<Slot>,
    seen: KeptReport,
    times: Histogram,
}

impl Kept {
    /// Makes `count` connections from `address` to `front`, which begin one after the other and ask once in `every_ns`.
    pub(super) fn new(front: SocketAddrV4, address: Ipv4Addr, count: u32, every_ns: u64) -> Self {
        let slot = |number: u32| {
            let since_ns = u64::from(number) * EVERY_NS / u64::from(count.max(1));
            Slot { step: Step::Opening, seq: number << 16, ack: 0, since_ns, sent_ns: 0 }
        };
        let slots = (0..count.min(4096)).map(slot).collect();
        Self { front, address, every_ns, slots, seen: KeptReport::default(), times: Histogram::new() }
    }

    /// Sends what is due.
    pub(super) fn poll(&mut self, now_ns: u64, out: &mut Vec<Segment>) {
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let is_due = match slot.step {
                Step::Gone => false,
                Step::Resting => now_ns >= slot.since_ns,
                Step::Opening if slot.sent_ns == 0 => now_ns >= slot.since_ns,
                Step::Opening | Step::Waiting => now_ns >= slot.sent_ns + AGAIN_NS,
            };
            if !is_due {
                continue;
            }
            let from = SocketAddrV4::new(self.address, FIRST_PORT + number as u16);
            let syn = Segment { from, to: self.front, seq: slot.seq, ack: 0, flags: SYN, payload: 0 };
            let question =
                Segment { seq: slot.seq, ack: slot.ack, flags: ACK | PSH, payload: QUESTION, ..syn };
            match slot.step {
                Step::Resting => (slot.step, slot.since_ns) = (Step::Waiting, now_ns),
                _ => self.seen.repeated += u64::from(slot.sent_ns > 0),
            }
            slot.sent_ns = now_ns;
            out.push(if slot.step == Step::Opening { syn } else { question });
        }
    }

    /// Takes a segment. Returns false if it is not for one of these connections.
    pub(super) fn take(&mut self, now_ns: u64, segment: &Segment) -> bool {
        if *segment.to.ip() != self.address {
            return false;
        }
        let number = segment.to.port().checked_sub(FIRST_PORT).map(usize::from);
        let Some(slot) = number.and_then(|number| self.slots.get_mut(number)) else { return true };
        if segment.flags & RST != 0 {
            self.seen.reset += u64::from(slot.step != Step::Gone);
            slot.step = Step::Gone;
            return true;
        }
        match slot.step {
            Step::Opening if segment.is(SYN | ACK) && segment.ack == slot.seq.wrapping_add(1) => {
                *slot = Slot {
                    step: Step::Resting,
                    seq: segment.ack,
                    ack: segment.end(),
                    since_ns: now_ns,
                    ..*slot
                };
            }
            Step::Waiting if segment.payload == QUESTION && segment.seq == slot.ack => {
                self.seen.answered += 1;
                self.times.record(now_ns.saturating_sub(slot.since_ns));
                let (seq, ack) = (slot.seq.wrapping_add(u32::from(QUESTION)), segment.end());
                *slot =
                    Slot { step: Step::Resting, seq, ack, since_ns: slot.since_ns + self.every_ns, ..*slot };
            }
            _ => {}
        }
        true
    }

    /// Removes what was seen until now.
    pub(super) fn forget(&mut self) {
        self.times.clear();
        self.seen = KeptReport::default();
    }

    /// Returns what was seen.
    pub(super) fn report(&self) -> KeptReport {
        let quantile = |share| self.times.quantile(share);
        KeptReport { p50_ns: quantile(0.5), p99_ns: quantile(0.99), p999_ns: quantile(0.999), ..self.seen }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_asked_again_until_it_is_answered_and_then_the_next() {
        let front = "10.0.0.1:80".parse().unwrap();
        let mut kept = Kept::new(front, "10.78.0.17".parse().unwrap(), 1, EVERY_NS);
        let mut out = Vec::new();
        let mut sent = |kept: &mut Kept, now_ns| {
            out.clear();
            kept.poll(now_ns, &mut out);
            out.clone()
        };
        let syn = sent(&mut kept, 1)[0];
        assert!(syn.is(SYN) && sent(&mut kept, 2).is_empty());
        assert!(kept.take(10, &Segment { seq: 77, ..syn.answer(SYN | ACK) }));
        let question = sent(&mut kept, 10)[0];
        assert_eq!((question.payload, question.ack), (QUESTION, 78));
        assert!(sent(&mut kept, AGAIN_NS).is_empty());
        assert_eq!(sent(&mut kept, 10 + AGAIN_NS), [question]);
        let answer = Segment { payload: QUESTION, ..question.answer(ACK | PSH) };
        assert!(kept.take(110 + AGAIN_NS, &answer) && kept.take(120 + AGAIN_NS, &answer));
        let next = sent(&mut kept, 10 + AGAIN_NS + EVERY_NS)[0];
        assert_eq!((next.seq, next.ack), (question.end(), answer.end()));
        let seen = kept.report();
        assert_eq!((seen.answered, seen.repeated, seen.reset), (1, 1, 0));
        assert!(seen.p99_ns > AGAIN_NS / 2, "from the first time it was asked: {seen:?}");
        assert!(kept.take(0, &next.answer(RST)) && sent(&mut kept, u64::MAX / 2).is_empty());
        assert!(!kept.take(0, &syn), "not to a client");
    }
}
