//! Streams of bytes that both ends of a transfer can make from a seed, and the hash that proves them.

use sha2::{Digest, Sha256};

/// A small generator (SplitMix64): the same seed gives the same stream.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The stream of this seed.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).expect("below a usize")
    }

    /// Fills the buffer.
    pub(crate) fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }

    /// This number of bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }
}

/// The seed of a random test: `SIDETRACK_SEED` if it is set, else a new one. Printed, so that a failure can be
/// repeated.
pub(crate) fn seed() -> u64 {
    let fresh = || u64::from_le_bytes(sidetrack_sys::random::bytes());
    let seed = std::env::var("SIDETRACK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(fresh);
    println!("SIDETRACK_SEED={seed}");
    seed
}

/// A hash that is fed as bytes go by.
#[derive(Clone, Default)]
pub(crate) struct Hash(Sha256, u64);

impl Hash {
    /// Takes more bytes.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
        self.1 += bytes.len() as u64;
    }

    /// How many bytes, and their SHA-256.
    pub(crate) fn sum(self) -> (u64, [u8; 32]) {
        (self.1, self.0.finalize().into())
    }
}
