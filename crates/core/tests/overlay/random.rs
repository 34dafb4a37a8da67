//! A seeded generator, and which seeds a test runs.

/// SplitMix64 (Steele, Lea, Flood 2014): small, and good enough to break things with.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5EED)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// 0 to `n` - 1.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// True in this number of a thousand cases.
    pub(crate) fn permille(&mut self, share: u64) -> bool {
        self.below(1000) < share
    }
}

/// The seeds to run: this number, or what the environment says.
#[allow(clippy::disallowed_methods, reason = "the surroundings choose the seeds, not what a seed does")]
pub(crate) fn seeds(usual: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    match (number("SIDETRACK_SEED"), number("SIDETRACK_SEEDS")) {
        (Some(one), _) => one..one + 1,
        (None, Some(count)) => 0..count,
        (None, None) => 0..usual,
    }
}

/// Runs `test` with every seed, and says which one failed.
pub(crate) fn each_seed(usual: u64, test: impl Fn(u64) + std::panic::RefUnwindSafe) {
    for seed in seeds(usual) {
        if let Err(cause) = std::panic::catch_unwind(|| test(seed)) {
            eprintln!("failed: repeat it with SIDETRACK_SEED={seed}");
            std::panic::resume_unwind(cause);
        }
    }
}
