//! The number in the opening of a path: which path of the session it is, and how the session uses its paths.
//!
//! | bits | content |
//! |---|---|
//! | 31, 30 | the mode: 0 shortest, 1 stripe, 2 duplicate |
//! | 29 to 27 | the number of the path, below [`PATHS_MAX`]; 0 with mode 0 |
//! | 26 to 0 | counts the openings of this path, from 1 |
//!
//! So the number of a session with one path is what it was before there were several.

use super::{Mode, PATHS_MAX};

const NUMBER_BITS: u32 = 27;
const NUMBER_MAX: u32 = (1 << NUMBER_BITS) - 1;

/// An attempt to open a path of a session that is open already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// How the session uses its paths.
    pub mode: Mode,
    /// The path.
    pub path: u8,
    /// Counts the openings of the path, from 1 to 134,217,727.
    pub number: u32,
}

impl Attempt {
    /// Returns the number for an opening.
    pub fn to_bits(self) -> u32 {
        let mode = match self.mode {
            Mode::Shortest => 0,
            Mode::Stripe => 1,
            Mode::Duplicate => 2,
        };
        (mode << 30) | (u32::from(self.path & 7) << NUMBER_BITS) | self.number.min(NUMBER_MAX)
    }

    /// Returns the attempt that an opening names. `None`: there is no such path or mode, or the number is 0.
    pub fn from_bits(bits: u32) -> Option<Self> {
        let mode = [Mode::Shortest, Mode::Stripe, Mode::Duplicate].get((bits >> 30) as usize).copied()?;
        let path = u8::try_from((bits >> NUMBER_BITS) & 7).ok()?;
        let number = bits & NUMBER_MAX;
        let fits = path < PATHS_MAX && (path == 0 || mode != Mode::Shortest) && number > 0;
        fits.then_some(Self { mode, path, number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_name_path_and_mode_and_one_path_counts_as_before() {
        let one = Attempt { mode: Mode::Shortest, path: 0, number: 3 };
        assert_eq!((one.to_bits(), Attempt::from_bits(3)), (3, Some(one)));
        let striped = Attempt { mode: Mode::Stripe, path: 1, number: 2 };
        assert_eq!((striped.to_bits(), Attempt::from_bits(0x4800_0002)), (0x4800_0002, Some(striped)));
        let copied = Attempt { mode: Mode::Duplicate, path: 4, number: NUMBER_MAX };
        assert_eq!(Attempt::from_bits(copied.to_bits()), Some(copied));
        assert_eq!(copied.to_bits(), 0xA7FF_FFFF);
        // No number, a path of a session with one path, a sixth path, a fourth mode.
        for bits in [0, 0x4000_0000, 0x0800_0001, 0x6800_0001, 0xC000_0001] {
            assert_eq!(Attempt::from_bits(bits), None, "{bits:#x}");
        }
    }
}
