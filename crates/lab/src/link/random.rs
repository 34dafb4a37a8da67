//! A seeded generator: the same seed gives the same losses.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014). Each draw is one addition
/// and a mix; every 64-bit seed is good.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Makes a generator; different seeds give unrelated sequences.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a uniform value from 0 to 1, 1 excluded.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns true with probability `probability`. 0 and 1 draw nothing, so that switching one fault off does not
    /// change the others.
    pub fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && (probability >= 1.0 || self.unit() < probability)
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn the_sequence_is_the_published_one() {
        let mut random = Random::new(1_234_567);
        let drawn: Vec<u64> = (0..3).map(|_| random.bits()).collect();
        assert_eq!(drawn, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn probabilities_come_true() {
        let mut random = Random::new(7);
        let count = (0..100_000).filter(|_| random.happens(0.02)).count();
        // Four standard deviations of a binomial distribution: 4 * sqrt(100,000 * 0.02 * 0.98) = 177.
        assert!((1_823..2_177).contains(&count), "{count}");
        assert!(!random.happens(0.0) && random.happens(1.0));
    }
}
