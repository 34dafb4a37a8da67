//! SYNs that XDP answers with cookies: `bpf/answer.h` says how both sides share what that takes.

use super::Map;
use super::memory::Shared;
use std::io;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Bytes and offsets of `struct cookies`.
const COOKIES: usize = 56;
const ON: usize = 0;
const CLOCK: usize = 4;
const KEY: usize = 8;
const BEHIND: usize = 24;
const MSS: usize = 32;
const WINDOW: usize = 36;
const ANSWERED: usize = 40;

/// What an answer to a SYN takes: the cookies are those of `sidetrack_core::engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The secret that cookies are made with.
    pub key: [u64; 2],
    /// Time stamps are milliseconds of the worker's time and this, modulo 2^32.
    pub clock: u32,
    /// By how much the worker's time is behind the monotonic clock, nanoseconds.
    pub behind_ns: u64,
    /// The MSS that clients are told, by IPv4 and by IPv6, bytes.
    pub mss: [u16; 2],
    /// The first window, not scaled, bytes.
    pub window: u16,
    /// The shift of later ones, 0 to 14.
    pub shift: u8,
}

/// How the SYNs of each worker's clients are answered.
#[derive(Debug)]
pub struct Answers {
    cookies: Shared,
}

impl Answers {
    /// Of so many workers; none is answered yet.
    ///
    /// # Errors
    /// EPERM without CAP_BPF, ENOMEM.
    pub fn new(workers: u32) -> io::Result<Self> {
        Ok(Self { cookies: Shared::new("cookies", COOKIES, workers.max(1))? })
    }

    pub(super) const fn map(&self) -> &Map {
        self.cookies.map()
    }

    /// SYNs that are this worker's are answered so from now on. Called again, a packet may be answered by parts of both.
    pub fn answer(&self, worker: u32, answer: &Answer) {
        let at = |word| worker as usize * COOKIES + word;
        let [low, high] = answer.mss.map(u16::to_ne_bytes);
        let window = answer.window.to_ne_bytes();
        self.cookies.u32(at(CLOCK)).store(answer.clock, Relaxed);
        for (word, value) in [(KEY, answer.key[0]), (KEY + 8, answer.key[1]), (BEHIND, answer.behind_ns)] {
            self.cookies.u64(at(word)).store(value, Relaxed);
        }
        for (word, [a, b], [c, d]) in [(MSS, low, high), (WINDOW, window, [answer.shift, 0])] {
            self.cookies.u32(at(word)).store(u32::from_ne_bytes([a, b, c, d]), Relaxed);
        }
        self.cookies.u32(at(ON)).store(1, Release);
    }

    /// SYNs that were answered for this worker.
    pub fn answered(&self, worker: u32) -> u64 {
        self.cookies.u64(worker as usize * COOKIES + ANSWERED).load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ENGINE, Object};
    use super::*;

    #[test]
    fn the_layout_is_the_programs() {
        let section = Object::parse(ENGINE).unwrap().section("answer_layout").unwrap();
        let found: Vec<usize> =
            section.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word) as usize).collect();
        let expected = [COOKIES, ON, CLOCK, KEY, BEHIND, MSS, MSS + 2, WINDOW, WINDOW + 2, ANSWERED];
        assert_eq!(found, expected);
    }
}
