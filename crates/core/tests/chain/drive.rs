//! Drives a chain as a session does: offers, takes, waits for deadlines.

use sidetrack_core::chain::{Chain, OFFER_MAX, Offered};
use sidetrack_core::flow::Side;
use sidetrack_core::function::{Stage, Stop};
use sidetrack_core::time::Instant;
use std::collections::VecDeque;

/// A chain with its clock, and what has come out of it.
pub(crate) struct Driven {
    pub chain: Chain,
    pub now: Instant,
    /// By side the bytes come from.
    pub out: [Vec<u8>; 2],
    /// Most bytes taken at once.
    pub take_max: usize,
}

/// A generator of test data: the same seed, the same run.
pub(crate) fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below.max(1)
    }
}

/// Named stages.
pub(crate) fn stages(stages: Vec<Box<dyn Stage>>) -> Vec<(std::sync::Arc<str>, Box<dyn Stage>)> {
    stages.into_iter().enumerate().map(|(at, stage)| (format!("f{at}").into(), stage)).collect()
}

impl Driven {
    pub(crate) fn new(list: Vec<Box<dyn Stage>>) -> Self {
        let chain = Chain::new(stages(list), Instant::ZERO).unwrap();
        Self { chain, now: Instant::ZERO, out: [Vec::new(), Vec::new()], take_max: usize::MAX }
    }

    /// Takes everything there is; false if nothing came.
    pub(crate) fn drain(&mut self) -> Result<bool, Stop> {
        let mut moved = false;
        for from in [Side::Client, Side::Server] {
            loop {
                self.chain.advance(self.now, from)?;
                let part = self.chain.take(from, self.take_max);
                if part.is_empty() {
                    break;
                }
                self.out[from as usize].extend_from_slice(part);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Offers bytes, waiting for deadlines where that helps; false if it is stuck.
    pub(crate) fn offer(&mut self, from: Side, bytes: &[u8]) -> Result<bool, Stop> {
        for part in bytes.chunks(OFFER_MAX) {
            if !self.until_open(from)? {
                return Ok(false);
            }
            if self.chain.handle(self.now, from, part)? == Offered::Unchanged {
                self.out[from as usize].extend_from_slice(part);
            }
            self.drain()?;
        }
        Ok(true)
    }

    /// Waits for deadlines until bytes may be offered; false if that never comes.
    fn until_open(&mut self, from: Side) -> Result<bool, Stop> {
        while !self.chain.is_open(from) {
            if !self.drain()? {
                let Some(due) = self.chain.deadline() else { return Ok(false) };
                assert!(due > self.now, "a deadline that has passed and was acted upon stays set");
                self.now = due;
            }
        }
        Ok(true)
    }

    /// Ends a side and waits until all is out; false if it never is.
    pub(crate) fn end(&mut self, from: Side) -> Result<bool, Stop> {
        self.chain.end(self.now, from)?;
        self.drain()?;
        while !self.chain.is_over(from) {
            if !self.drain()? {
                let Some(due) = self.chain.deadline() else { return Ok(false) };
                self.now = self.now.max(due);
            }
        }
        Ok(true)
    }
}

/// Cuts bytes into parts of random lengths up to `most`.
pub(crate) fn cut(bytes: &[u8], most: usize, next: &mut impl FnMut(u64) -> u64) -> VecDeque<Vec<u8>> {
    let mut parts = VecDeque::new();
    let mut at = 0;
    while at < bytes.len() {
        let n = 1 + next(most as u64) as usize;
        parts.push_back(bytes[at..(at + n).min(bytes.len())].to_vec());
        at += n;
    }
    parts
}
