//! Lowers the maximum segment size (MSS) in SYNs of packets that the overlay carries whole, so that the segments fit
//! into one datagram of a link. Routers with tunnels do the same. The option is defined in RFC 9293 Sec. 3.7.1.

const TCP: u8 = 6;
const SYN: u8 = 2;
const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_MSS: u8 = 2;

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// Limits the MSS of a TCP SYN so that no packet becomes larger than `packet_max` bytes. Returns true if the MSS was
/// larger before. Other packets and malformed ones stay unchanged.
pub fn clamp(packet: &mut [u8], packet_max: usize) -> bool {
    clamp_option(packet, packet_max).is_some()
}

fn clamp_option(packet: &mut [u8], packet_max: usize) -> Option<()> {
    let start = segment_start(packet)?;
    let most = u16::try_from(packet_max.checked_sub(start + TCP_HEADER)?).unwrap_or(u16::MAX);
    let segment = packet.get_mut(start..)?;
    let flags = *segment.get(13)?;
    let options_end = usize::from(*segment.get(12)? >> 4) * 4;
    if flags & SYN == 0 || most == 0 {
        return None;
    }
    let at = mss_at(segment.get(..options_end)?)?;
    let old = u16::from_be_bytes([*segment.get(at)?, *segment.get(at + 1)?]);
    if old <= most {
        return None;
    }
    segment.get_mut(at..at + 2)?.copy_from_slice(&most.to_be_bytes());
    // An option may start at an odd offset. Then its bytes are in the opposite halves of the summed 16-bit words.
    let (old, new) = if at.is_multiple_of(2) { (old, most) } else { (old.swap_bytes(), most.swap_bytes()) };
    let sum = u16::from_be_bytes([*segment.get(16)?, *segment.get(17)?]);
    segment.get_mut(16..18)?.copy_from_slice(&updated(sum, old, new).to_be_bytes());
    Some(())
}

/// Updates a checksum after one word of the data has changed (RFC 1624, equation 3).
fn updated(sum: u16, old: u16, new: u16) -> u16 {
    let mut total = u32::from(!sum) + u32::from(!old) + u32::from(new);
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !u16::try_from(total).unwrap_or(0)
}

/// Returns where TCP begins in an IP packet. `None` for fragments, and for packets with IPv6 extension headers.
fn segment_start(packet: &[u8]) -> Option<usize> {
    match packet.first()? >> 4 {
        4 => {
            let is_fragment = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x3fff != 0;
            let header = usize::from(packet[0] & 0xf) * 4;
            (*packet.get(9)? == TCP && !is_fragment && header >= 20).then_some(header)
        }
        6 => (*packet.get(6)? == TCP).then_some(40),
        _ => None,
    }
}

/// Returns where the two bytes of the MSS value are in a TCP header with options.
fn mss_at(header: &[u8]) -> Option<usize> {
    let mut at = TCP_HEADER;
    loop {
        match *header.get(at)? {
            OPTION_END => return None,
            OPTION_NOP => at += 1,
            kind => {
                let length = usize::from(*header.get(at + 1)?);
                if kind == OPTION_MSS {
                    return (length == 4 && at + 4 <= header.len()).then_some(at + 2);
                }
                // An option shorter than 2 bytes is malformed; skip 2 bytes so that the loop ends.
                at += length.max(2);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A SYN with these options and a valid checksum.
    fn syn(version: u8, options: &[u8], flags: u8) -> Vec<u8> {
        let offset = u8::try_from((20 + options.len()) / 4).unwrap() << 4;
        let mut segment =
            vec![0x9c, 0x40, 0, 22, 0, 0, 0, 1, 0, 0, 0, 0, offset, flags, 0xff, 0xff, 0, 0, 0, 0];
        segment.extend(options);
        let length = u8::try_from(segment.len()).unwrap();
        let mut packet = match version {
            4 => vec![0x45, 0, 0, 20 + length, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 1, 0, 2, 10, 2, 0, 3],
            _ => {
                let mut header = vec![0x60, 0, 0, 0, 0, length, 6, 64];
                header.extend([0xfd; 32]);
                header
            }
        };
        let start = packet.len();
        packet.extend(segment);
        let sum = checksum(&packet, start);
        packet[start + 16..start + 18].copy_from_slice(&sum.to_be_bytes());
        packet
    }

    /// The checksum over the pseudo header and the segment, whose checksum field stays as it is (RFC 9293 Sec. 3.1).
    fn checksum(packet: &[u8], start: usize) -> u16 {
        let addresses = if start == 20 { &packet[12..20] } else { &packet[8..40] };
        let mut bytes = addresses.to_vec();
        bytes.extend([0, 6, 0, u8::try_from(packet.len() - start).unwrap()]);
        bytes.extend(&packet[start..]);
        let mut total: u32 = bytes
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
            .sum();
        while total > 0xffff {
            total = (total & 0xffff) + (total >> 16);
        }
        !u16::try_from(total).unwrap()
    }

    const MSS: [u8; 4] = [2, 4, 0x05, 0xb4];

    #[test]
    fn a_syn_is_clamped_and_its_checksum_stays_right() {
        for (version, start) in [(4, 20), (6, 40)] {
            for options in [
                &[&MSS[..]].concat()[..],
                &[&[1, 1, 1, 1][..], &MSS].concat(),
                // At an odd offset.
                &[&[1][..], &MSS, &[1, 1, 1]].concat(),
                &[&[8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1][..], &MSS].concat(),
            ] {
                for flags in [2, 0x12] {
                    let mut packet = syn(version, options, flags);
                    assert_eq!(checksum(&packet, start), 0);
                    assert!(!clamp(&mut packet, 1460 + start + 20), "as large as it may be");
                    assert!(clamp(&mut packet, 1400));
                    assert_eq!(checksum(&packet, start), 0, "{options:?}");
                    let at = start + mss_at(&packet[start..]).unwrap();
                    let mss = usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
                    assert_eq!(mss, 1400 - start - 20);
                }
            }
        }
    }

    #[test]
    fn all_else_stays_as_it_is() {
        let before = syn(4, &MSS, 0x10);
        let mut packet = before.clone();
        assert!(!clamp(&mut packet, 1000) && packet == before, "no SYN");
        let before = syn(4, &[1, 1, 1, 0], 2);
        let mut packet = before.clone();
        assert!(!clamp(&mut packet, 1000) && packet == before, "no MSS");
        for version in [4, 6] {
            let whole = syn(version, &[&[3, 3, 7, 1][..], &MSS].concat(), 2);
            for length in 0..whole.len() {
                clamp(&mut whole[..length].to_vec(), 1000);
            }
            // Change any one byte: no panic.
            for at in 0..whole.len() {
                for value in 0..=255 {
                    let mut packet = whole.clone();
                    packet[at] = value;
                    clamp(&mut packet, 1000);
                }
            }
            assert!(!clamp(&mut whole.clone(), 10), "smaller than headers");
        }
    }
}
