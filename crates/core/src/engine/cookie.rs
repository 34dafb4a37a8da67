//! Initial sequence numbers (RFC 6528) and SYN cookies (RFC 4987, section 3.6).
//!
//! A cookie is an initial sequence number that holds the state of a handshake: five bits of time, three for the client's
//! MSS, and 24 bits of a keyed hash. Window scale and SACK do not fit. They travel in the low bits of the time stamp, as
//! in Linux; a client without time stamps gets neither.

use super::narrow::{length, low_half};
use super::options::Offer;
use super::packet::Tuple;
use super::seq::Seq;
use super::siphash::{Key, siphash24};
use crate::time::Instant;

/// The MSS values that a cookie can hold; the client's value is rounded down to one of them.
const MSS: [u16; 8] = [536, 1220, 1300, 1360, 1400, 1440, 1448, 1460];
/// Length of a cookie's time step, seconds. A cookie is valid in its own step and the next.
const STEP_SECONDS: u64 = 64;
/// Bits of a time stamp that hold options.
const STAMP_BITS: u32 = 6;
/// The shift that means "no window scale".
const NO_SHIFT: u32 = 0xf;

/// What a program needs to answer SYNs for the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookies {
    /// The secret key of the cookies.
    pub key: Key,
    /// The offset of the time stamp clock: a stamp is the engine's time in milliseconds plus this, modulo 2^32.
    pub clock: u32,
    /// The MSS announced to clients, for IPv4 and for IPv6, bytes.
    pub mss: [u16; 2],
    /// The first window announced, not scaled, bytes.
    pub window: u16,
    /// The shift of later windows, 0 to 14.
    pub window_shift: u8,
}

/// Returns an initial sequence number. It rises by one every 4 us for each tuple, and outsiders cannot predict it (RFC
/// 6528).
#[inline]
pub(super) fn isn(key: Key, tuple: &Tuple, now: Instant) -> Seq {
    let clock = low_half(now.as_nanos() >> 12);
    Seq(low_half(hashed(key, tuple, 0)).wrapping_add(clock))
}

#[inline]
fn hashed(key: Key, tuple: &Tuple, salt: u64) -> u64 {
    let [r0, r1] = tuple.remote.0;
    let [l0, l1] = tuple.local.0;
    let ports = u64::from(tuple.ports) | salt << 32;
    if tuple.remote.is_v4() && tuple.local.is_v4() {
        // Both addresses fit into one word. The hash counts its words, so no IPv6 tuple has the same input.
        return siphash24(key, &[r1 << 32 | (l1 & 0xffff_ffff), ports]);
    }
    siphash24(key, &[r0, r1, l0, l1, ports])
}

fn step(now: Instant) -> u32 {
    (now.as_nanos() / (STEP_SECONDS * 1_000_000_000)) as u32
}

fn mac(key: Key, tuple: &Tuple, client: Seq, step: u32, index: u32) -> u32 {
    let salt = (1 << 31) | (u64::from(step & 0x1f) << 3) | u64::from(index);
    let hash = hashed(key, tuple, salt) ^ siphash24(key, &[u64::from(client.0), salt]);
    (hash >> 40) as u32
}

/// Returns the cookie for a SYN with this sequence number, and the time stamp to send. The stamp is `clock_ms` with its
/// low bits replaced.
pub(super) fn make(
    key: Key,
    tuple: &Tuple,
    client: Seq,
    offer: &Offer,
    now: Instant,
    clock_ms: u32,
) -> (Seq, u32) {
    let wanted = offer.mss.unwrap_or(536);
    let index = MSS.iter().rposition(|mss| *mss <= wanted).unwrap_or(0);
    let index = length(index);
    let step = step(now);
    let cookie = (step & 0x1f) << 27 | index << 24 | mac(key, tuple, client, step, index);
    let shift = offer.window_scale.map_or(NO_SHIFT, u32::from);
    let bits = shift | u32::from(offer.sack) << 4;
    let stamp = (clock_ms >> STAMP_BITS << STAMP_BITS) | bits;
    // The stamp must not lie in the future: the client would reject the next one as old (RFC 7323, section 5).
    let stamp = if stamp > clock_ms { stamp.wrapping_sub(1 << STAMP_BITS) } else { stamp };
    (Seq(cookie), stamp)
}

/// Checks a cookie and returns the options that the handshake agreed on; none if it is not ours. `client` is the sequence
/// number of the SYN, `echo` is the time stamp that the client echoes.
pub(super) fn open(
    key: Key,
    tuple: &Tuple,
    client: Seq,
    cookie: Seq,
    echo: Option<u32>,
    now: Instant,
) -> Option<Offer> {
    let (stamp, index) = (cookie.0 >> 27, cookie.0 >> 24 & 7);
    let current = step(now);
    let made = [current, current.wrapping_sub(1)].into_iter().find(|step| step & 0x1f == stamp)?;
    if mac(key, tuple, client, made, index) != cookie.0 & 0x00ff_ffff {
        return None;
    }
    let mss = MSS.get(index as usize).copied();
    let shift = echo.map_or(NO_SHIFT, |echo| echo & 0xf);
    Some(Offer {
        mss,
        window_scale: u8::try_from(shift).ok().filter(|shift| *shift <= super::options::MAX_WINDOW_SHIFT),
        sack: echo.is_some_and(|echo| echo >> 4 & 1 == 1),
        timestamps: echo.map(|echo| (0, echo)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];

    fn tuple(port: u16) -> Tuple {
        Tuple::new(([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 80).into())
    }

    #[test]
    fn a_cookie_gives_back_what_it_was_made_from() {
        let offer = Offer { mss: Some(1452), window_scale: Some(9), sack: true, timestamps: Some((5, 0)) };
        let now = Instant::from_millis(700_000);
        let (cookie, stamp) = make(KEY, &tuple(1), Seq(77), &offer, now, 123_456);
        assert!(stamp <= 123_456 && stamp > 123_456 - 128);
        let read = open(KEY, &tuple(1), Seq(77), cookie, Some(stamp), now).unwrap();
        assert_eq!((read.mss, read.window_scale, read.sack), (Some(1448), Some(9), true));
        let bare = open(KEY, &tuple(1), Seq(77), cookie, None, now).unwrap();
        assert_eq!((bare.window_scale, bare.sack, bare.timestamps), (None, false, None));
    }

    #[test]
    fn any_change_makes_it_worthless_and_so_does_time() {
        let offer = Offer { mss: Some(1460), ..Offer::default() };
        let now = Instant::from_millis(1_000_000);
        let (cookie, _) = make(KEY, &tuple(1), Seq(77), &offer, now, 0);
        let later = |seconds: u64| Instant::from_millis(1_000_000 + seconds * 1000);
        assert!(open(KEY, &tuple(1), Seq(77), cookie, None, later(60)).is_some());
        assert!(open(KEY, &tuple(1), Seq(77), cookie, None, later(129)).is_none(), "too old");
        assert!(open(KEY, &tuple(2), Seq(77), cookie, None, now).is_none(), "another client");
        assert!(open(KEY, &tuple(1), Seq(78), cookie, None, now).is_none(), "another SYN");
        assert!(open([1, 2], &tuple(1), Seq(77), cookie, None, now).is_none(), "another key");
        for bit in 0..32 {
            assert!(
                open(KEY, &tuple(1), Seq(77), Seq(cookie.0 ^ 1 << bit), None, now).is_none(),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn initial_numbers_differ_by_tuple_and_rise_with_time() {
        let start = isn(KEY, &tuple(1), Instant::ZERO);
        assert_ne!(start, isn(KEY, &tuple(2), Instant::ZERO));
        assert!(isn(KEY, &tuple(1), Instant::from_millis(1)).after(start));
    }
}
