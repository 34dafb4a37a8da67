//! Server handshakes that a program in XDP finishes: user space sends the SYN, the program takes the SYN-ACK
//! and sends the client's first bytes (`struct question` of `bpf/offload.h`).

use super::{BINDING, FLOW, Lending, LendingPart, Lent, LentSide, MSS, STAMP_ADD, STAMP_FIRST};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Offsets in `struct flow`: its question, and what the SYN-ACK said.
pub(super) const QUESTION_OF: usize = 4;
pub(super) const ANSWERED: usize = 8;
pub(super) const NUMBER: usize = 16;

/// Bytes and offsets of `struct question`.
pub(super) const QUESTION: usize = 1024;
pub(super) const BEHIND: usize = 0;
pub(super) const CLOCK: usize = 8;
pub(super) const ACKNOWLEDGES: usize = 12;
pub(super) const SHOWN: usize = 16;
pub(super) const CLIENT_STAMP: usize = 20;
pub(super) const LENGTH: usize = 24;
pub(super) const NEEDS: usize = 28;
/// Offset of `stamps` and `sack`.
#[cfg(test)]
pub(super) const OPTIONS: usize = 30;
pub(super) const SCALE: usize = 32;
pub(super) const FRAME: usize = 36;
/// Bytes of an Ethernet header.
pub(super) const LINK_HEADER: usize = 14;
/// At most this many questions at once, of all workers: 8 MiB.
pub(super) const QUESTIONS_MAX: u32 = 8192;

/// The handshake of a server that is about to get a SYN: what its SYN-ACK has to be, and what is sent to it
/// then.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Monotonic clock minus the worker's time, nanoseconds.
    pub behind_ns: u64,
    /// Time stamps are the worker's time in milliseconds plus this, modulo 2^32.
    pub clock: u32,
    /// The number that the SYN-ACK has to acknowledge.
    pub acknowledges: u32,
    /// The server's initial sequence number as the client sees it.
    pub shown: u32,
    /// Whether the SYN-ACK has to have time stamps; if false, it must not.
    pub timestamps: bool,
    /// The same for SACK.
    pub sack: bool,
    /// The same for window scaling.
    pub window_scale: bool,
    /// Its MSS and its window have to be at least this, bytes.
    pub needs: u16,
    /// The IP packet that is sent to the server then. What depends on the SYN-ACK is zero in it and in its
    /// checksum: the acknowledgement and, if there are time stamps (then the only option), both stamps.
    pub packet: &'a [u8],
}

/// What the SYN-ACK said, as the program read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Its sequence number.
    pub number: u32,
    /// Largest payload that the server accepts: the lesser of its MSS and what was set before, bytes.
    pub mss: u16,
    /// Window scale of the server's windows.
    pub shift: u8,
    /// Its time stamp.
    pub stamp: u32,
    /// Our time stamp clock at that moment; see [`Question::clock`].
    pub clock: u32,
    /// Monotonic clock at that moment, nanoseconds.
    pub at_ns: u64,
}

impl Lending {
    fn write_question(&self, number: u32, [client, server]: &[LentSide; 2], question: &Question<'_>) {
        let at = |word| number as usize * QUESTION + word;
        let Question { behind_ns, clock, acknowledges, shown, needs, packet, .. } = *question;
        let ethertype: [u8; 2] = if server.remote.is_ipv6() { [0x86, 0xdd] } else { [8, 0] };
        let [needs_low, needs_high] = needs.to_ne_bytes();
        let [stamps, sack, scale] = [question.timestamps, question.sack, question.window_scale].map(u8::from);
        self.questions.u64(at(BEHIND)).store(behind_ns, Relaxed);
        for (word, value) in [
            (CLOCK, clock),
            (ACKNOWLEDGES, acknowledges),
            (SHOWN, shown),
            (CLIENT_STAMP, client.numbers.stamp),
            (LENGTH, (packet.len() + LINK_HEADER) as u32),
            (NEEDS, u32::from_ne_bytes([needs_low, needs_high, stamps, sack])),
            (SCALE, u32::from(scale)),
        ] {
            self.questions.u32(at(word)).store(value, Relaxed);
        }
        // The Ethernet header has 14 bytes: two bytes of the packet complete its last word.
        let (first, rest) = packet.split_at(packet.len().min(2));
        let mut header = [0; LINK_HEADER + 2];
        header[..6].copy_from_slice(&server.to);
        header[6..12].copy_from_slice(&server.from);
        header[12..LINK_HEADER].copy_from_slice(&ethertype);
        header[LINK_HEADER..LINK_HEADER + first.len()].copy_from_slice(first);
        let (words, last) = rest.as_chunks::<4>();
        let mut end = [0; 4];
        end[..last.len()].copy_from_slice(last);
        let words = header.as_chunks::<4>().0.iter().chain(words).chain([&end]);
        for (word, bytes) in words.enumerate() {
            self.questions.u32(at(FRAME + word * 4)).store(u32::from_ne_bytes(*bytes), Relaxed);
        }
    }
}

impl LendingPart {
    /// Leaves the handshake of a server that is about to get a SYN to a program in XDP: it takes the SYN-ACK
    /// if that is as in the question, and the connection is offloaded from then on. `None` if there is no
    /// room.
    pub fn ask(&mut self, sides: &[LentSide; 2], question: &Question<'_>) -> Option<Lent> {
        // The packet's last bytes may take one word more.
        if question.packet.len() > QUESTION - FRAME - LINK_HEADER - 4 {
            return None;
        }
        if self.free.is_empty() {
            return None;
        }
        let number = self.free_questions.pop()?;
        self.whole.write_question(number, sides, question);
        self.lend_as(sides, Some(number))
    }

    /// Returns what the SYN-ACK said, if a program has taken it and sent the first bytes. Read this before
    /// anything else of the connection.
    pub fn answered(&mut self, lent: Lent) -> Option<Answered> {
        let at = lent.0 as usize * FLOW;
        let flows = &self.whole.flows;
        while flows.u32(at).load(Acquire) == BINDING {
            std::hint::spin_loop();
        }
        let at_ns = flows.u64(at + ANSWERED).load(Acquire);
        if at_ns == 0 {
            return None;
        }
        let number = flows.u32(at + NUMBER).load(Acquire);
        self.close_question(lent);
        let server = |word| self.whole.read(lent.0, 1, word);
        let [low, high, shift, _] = server(MSS).to_ne_bytes();
        let stamp = server(STAMP_FIRST);
        let clock = stamp.wrapping_add(server(STAMP_ADD));
        Some(Answered { number, mss: u16::from_ne_bytes([low, high]), shift, stamp, clock, at_ns })
    }

    /// Frees the connection's question, if it has one: the program has read it, or the connection was taken
    /// back.
    pub(super) fn close_question(&mut self, lent: Lent) {
        let question = self.whole.flows.u32(lent.0 as usize * FLOW + QUESTION_OF).swap(0, Relaxed);
        self.free_questions.extend(question.checked_sub(1));
    }
}
