//! XXH64, the checksum that detects incompletely written cache files. It does not protect against an attacker: a
//! process that can write the cache's files can also write a valid checksum.

const P1: u64 = 0x9E37_79B1_85EB_CA87;
const P2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const P3: u64 = 0x1656_67B1_9E37_79F9;
const P4: u64 = 0x85EB_CA77_C2B2_AE63;
const P5: u64 = 0x27D4_EB2F_1656_67C5;

/// Returns the checksum of these bytes.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    let (stripes, rest) = bytes.as_chunks::<32>();
    let mut sum = if stripes.is_empty() { P5 } else { of_stripes(stripes) };
    sum = sum.wrapping_add(bytes.len() as u64);
    let (words, rest) = rest.as_chunks::<8>();
    for word in words {
        sum = (sum ^ round(0, u64::from_le_bytes(*word))).rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
    }
    let (halves, rest) = rest.as_chunks::<4>();
    for half in halves {
        let lane = u64::from(u32::from_le_bytes(*half)).wrapping_mul(P1);
        sum = (sum ^ lane).rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
    }
    for byte in rest {
        sum = (sum ^ u64::from(*byte).wrapping_mul(P5)).rotate_left(11).wrapping_mul(P1);
    }
    sum = (sum ^ (sum >> 33)).wrapping_mul(P2);
    sum = (sum ^ (sum >> 29)).wrapping_mul(P3);
    sum ^ (sum >> 32)
}

/// Uses four lanes at a time, so that the processor can do four multiplications in parallel.
fn of_stripes(stripes: &[[u8; 32]]) -> u64 {
    let mut lanes = [P1.wrapping_add(P2), P2, 0, 0_u64.wrapping_sub(P1)];
    for stripe in stripes {
        let (words, _) = stripe.as_chunks::<8>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = round(*lane, u64::from_le_bytes(*word));
        }
    }
    let turns = [1, 7, 12, 18];
    let sum = lanes.iter().zip(turns).fold(0_u64, |sum, (lane, by)| sum.wrapping_add(lane.rotate_left(by)));
    lanes.iter().fold(sum, |sum, lane| (sum ^ round(0, *lane)).wrapping_mul(P1).wrapping_add(P4))
}

const fn round(sum: u64, lane: u64) -> u64 {
    sum.wrapping_add(lane.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1)
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn known_sums() {
        for (text, sum) in [
            ("", 0xEF46_DB37_51D8_E999_u64),
            ("a", 0xD24E_C4F1_A98C_6E5B),
            ("abc", 0x44BC_2CF5_AD77_0999),
            ("Nobody inspects the spammish repetition", 0xFBCE_A83C_8A37_8BF1),
        ] {
            assert_eq!(checksum(text.as_bytes()), sum, "{text:?}");
        }
    }
}
