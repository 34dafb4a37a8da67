//! SYN cookies in XDP: what the program needs to answer clients' SYNs. `bpf/answer.h` describes the shared
//! layout.

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

/// What the SYN-ACKs of one worker contain. The cookies are those of `sidetrack_core::engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The secret key of the cookies.
    pub key: [u64; 2],
    /// Time stamps are the worker's time in milliseconds plus this, modulo 2^32.
    pub clock: u32,
    /// Monotonic clock minus the worker's time, nanoseconds.
    pub behind_ns: u64,
    /// The MSS announced to clients by IPv4 and by IPv6, bytes.
    pub mss: [u16; 2],
    /// The window of the SYN-ACK, which is never scaled, bytes.
    pub window: u16,
    /// The window scale of later segments, 0 to 14.
    pub shift: u8,
}

/// The settings of SYN cookies, one for each worker, in memory shared with the program.
#[derive(Debug)]
pub struct Answers {
    cookies: Shared,
}

impl Answers {
    /// Makes settings for this number of workers. No SYN is answered yet.
    ///
    /// # Errors
    /// EPERM without CAP_BPF, ENOMEM.
    pub fn new(workers: u32) -> io::Result<Self> {
        Ok(Self { cookies: Shared::new("cookies", COOKIES, workers.max(1))? })
    }

    pub(super) const fn map(&self) -> &Map {
        self.cookies.map()
    }

    /// Answers this worker's SYNs with these settings from now on. If it is called again, one SYN-ACK may mix
    /// old and new settings.
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

    /// Returns how many of this worker's SYNs the program has answered.
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
