//! SYN cookies in XDP: what the program needs to answer clients' SYNs. `bpf/cookies.h` describes the shared
//! layout.

use super::Map;
use super::layout::engine::cookies as at_cookies;
use super::memory::Shared;
use std::io;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// What the SYN-ACKs of one worker contain. The cookies are those of `sidetrack_core::engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CookieSettings {
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
pub struct Cookies {
    cookies: Shared,
}

impl Cookies {
    /// Makes settings for this number of workers. No SYN is answered yet.
    ///
    /// # Errors
    /// EPERM without CAP_BPF, ENOMEM.
    pub fn new(workers: u32) -> io::Result<Self> {
        Ok(Self { cookies: Shared::new("cookies", at_cookies::SIZE, workers.max(1))? })
    }

    pub(super) const fn map(&self) -> &Map {
        self.cookies.map()
    }

    /// Answers this worker's SYNs with these settings from now on. If it is called again, one SYN-ACK may mix
    /// old and new settings.
    pub fn set(&self, worker: u32, settings: &CookieSettings) {
        let at = |word| worker as usize * at_cookies::SIZE + word;
        let [low, high] = settings.mss.map(u16::to_ne_bytes);
        let window = settings.window.to_ne_bytes();
        self.cookies.u32(at(at_cookies::CLOCK)).store(settings.clock, Relaxed);
        for (word, value) in [
            (at_cookies::KEY, settings.key[0]),
            (at_cookies::KEY + 8, settings.key[1]),
            (at_cookies::BEHIND_NS, settings.behind_ns),
        ] {
            self.cookies.u64(at(word)).store(value, Relaxed);
        }
        for (word, [a, b], [c, d]) in
            [(at_cookies::MSS4, low, high), (at_cookies::WINDOW, window, [settings.shift, 0])]
        {
            self.cookies.u32(at(word)).store(u32::from_ne_bytes([a, b, c, d]), Relaxed);
        }
        self.cookies.u32(at(at_cookies::ON)).store(1, Release);
    }

    /// Returns how many of this worker's SYNs the program has answered.
    pub fn sent(&self, worker: u32) -> u64 {
        self.cookies.u64(worker as usize * at_cookies::SIZE + at_cookies::SENT).load(Relaxed)
    }
}
