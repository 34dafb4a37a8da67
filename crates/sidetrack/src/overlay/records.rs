//! Tracks where TLS records end in the bytes of a socket. A task is not woken for a part of a record, which cannot be
//! decrypted anyway.

use sidetrack_sys::sockopt;
use std::io;
use std::os::fd::AsFd;

/// Length of a record's header, bytes (RFC 8446 Sec. 5.1).
const HEADER: usize = 5;

/// If fewer bytes are missing, a system call is not worth it: about the size of one packet.
const WORTH: usize = 2048;

/// How much of the current record has come, and the low-water mark of the socket.
#[derive(Debug)]
pub(super) struct Records {
    header: [u8; HEADER],
    /// Header bytes that have come.
    headed: usize,
    /// Body bytes that are still missing.
    missing: usize,
    /// The number of bytes from which on the socket is readable.
    low_water: usize,
}

impl Default for Records {
    fn default() -> Self {
        Self { header: [0; HEADER], headed: 0, missing: 0, low_water: 1 }
    }
}

impl Records {
    /// Handles bytes that were read from the socket; they must be all that it had. If a record is incomplete, the socket
    /// becomes readable when the rest is there. Between records, or if little is missing, it is readable at the first
    /// byte.
    ///
    /// # Errors
    /// Returns the error of setsockopt.
    pub(super) fn came(&mut self, socket: impl AsFd, bytes: &[u8]) -> io::Result<()> {
        self.pass(bytes);
        let low_water = if self.missing >= WORTH { self.missing } else { 1 };
        if low_water != self.low_water {
            sockopt::set_receive_low_water(socket, u32::try_from(low_water).unwrap_or(1))?;
            self.low_water = low_water;
        }
        Ok(())
    }

    fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let n = if self.missing > 0 { self.missing } else { HEADER - self.headed }.min(bytes.len());
            let (part, rest) = bytes.split_at(n);
            bytes = rest;
            if self.missing > 0 {
                self.missing -= n;
                continue;
            }
            self.header[self.headed..self.headed + n].copy_from_slice(part);
            self.headed += n;
            if self.headed == HEADER {
                self.headed = 0;
                self.missing = usize::from(u16::from_be_bytes([self.header[3], self.header[4]]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(body: u16) -> Vec<u8> {
        [&[23, 3, 3][..], &body.to_be_bytes(), &vec![0; body.into()]].concat()
    }

    #[test]
    fn what_is_missing_of_a_record_is_known_wherever_reads_end() {
        let stream = [record(16_401), record(0), record(17), record(5000)].concat();
        let ends = [16_406, 16_411, 16_433, 21_438];
        for step in [1, 2, 3, 5, 1448, 4096, 30_000] {
            let (mut records, mut at) = (Records::default(), 0);
            for part in stream.chunks(step) {
                records.pass(part);
                at += part.len();
                let begun = ends.iter().rev().find(|end| **end <= at).copied().unwrap_or(0);
                let end = ends.iter().find(|end| **end > at).copied().unwrap_or(begun);
                let missing = if at - begun < HEADER { 0 } else { end - at };
                assert_eq!(
                    (records.missing, records.headed),
                    (missing, (at - begun) % HEADER * usize::from(missing == 0)),
                    "at {at}"
                );
            }
        }
    }
}
