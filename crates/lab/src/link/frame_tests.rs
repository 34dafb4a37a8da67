use super::*;

/// A super-frame as Linux passes it to a TAP: `payload` ascending bytes, `size` in each frame.
fn super_frame(is_v6: bool, payload: usize, size: u16, flags: u8, needs_checksum: bool) -> Vec<u8> {
    let mut bytes = vec![u8::from(needs_checksum), if is_v6 { GSO_TCPV6 } else { GSO_TCPV4 }];
    bytes.extend([0, 0]);
    bytes.extend(size.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend([2; 6]);
    bytes.extend([4; 6]);
    let tcp_length = 32 + payload as u16;
    if is_v6 {
        bytes.extend(ETHERTYPE_IPV6);
        bytes.extend([0x60, 0, 0, 0]);
        bytes.extend(tcp_length.to_be_bytes());
        bytes.extend([TCP, 64]);
        bytes.extend(1..=32);
    } else {
        bytes.extend(ETHERTYPE_IPV4);
        bytes.extend([0x45, 0]);
        bytes.extend((20 + tcp_length).to_be_bytes());
        bytes.extend([0xff, 0xfe, 0x40, 0, 64, TCP, 0, 0]);
        bytes.extend([10, 77, 1, 1, 10, 77, 1, 2]);
    }
    bytes.extend([0x12, 0x34, 0, 80, 0xff, 0xff, 0xff, 0x00, 0, 0, 0, 9, 0x80, flags, 1, 0, 0, 0, 0, 0]);
    bytes.extend([1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8]);
    bytes.extend((0..payload).map(|at| at as u8));
    bytes
}

fn frame(bytes: Vec<u8>) -> TapFrame {
    TapFrame::new(bytes, usize::MAX)
}

/// Reads a frame as a receiver does: (sequence, flags, payload), after checking lengths and checksums.
fn received(frame: &TapFrame) -> (u32, u8, Vec<u8>) {
    let bytes = frame.as_bytes();
    let ip = VNET_HEADER_BYTES + ETHERNET_BYTES;
    let is_v6 = bytes[ip] >> 4 == 6;
    let (tcp, length) = if is_v6 {
        (ip + 40, 40 + usize::from(take(bytes, ip + 4).unwrap()))
    } else {
        assert_eq!(fold(sum(0, &bytes[ip..ip + 20])), 0xffff, "the IPv4 header's checksum");
        (ip + 20, usize::from(take(bytes, ip + 2).unwrap()))
    };
    assert_eq!(length, bytes.len() - ip);
    let addresses = if is_v6 { &bytes[ip + 8..ip + 40] } else { &bytes[ip + 12..ip + 20] };
    let pseudo = sum(u32::from(TCP) + (bytes.len() - tcp) as u32, addresses);
    if bytes[0] == NEEDS_CHECKSUM {
        assert_eq!(take(bytes, tcp + 16).unwrap(), fold(pseudo), "the pseudo header's checksum");
    } else {
        assert_eq!(fold(sum(pseudo, &bytes[tcp..])), 0xffff, "TCP's checksum");
    }
    let sequence = u32::from_be_bytes(bytes[tcp + 4..tcp + 8].try_into().unwrap());
    (sequence, bytes[tcp + 13], bytes[tcp + 32..].to_vec())
}

#[test]
fn a_super_frame_counts_as_the_frames_of_a_wire() {
    for is_v6 in [false, true] {
        let whole = frame(super_frame(is_v6, 2500, 1000, PSH, true));
        assert_eq!(whole.wire_frames(), 3);
        let headers = if is_v6 { 86 } else { 66 };
        let sizes: Vec<_> = (0..3).map(|index| whole.wire_bytes(index)).collect();
        assert_eq!(sizes, [headers + 1000, headers + 1000, headers + 500]);
    }
    assert_eq!(frame(super_frame(false, 0, 1000, 0, true)).wire_frames(), 1);
    let mut single = super_frame(false, 500, 1000, 0, true);
    single[1] = 0;
    let single = frame(single);
    assert_eq!((single.wire_frames(), single.wire_bytes(0), single.cut(0..0)), (1, 566, None));
}

#[test]
fn every_cut_is_what_a_network_card_would_send() {
    for (is_v6, needs_checksum) in [(false, true), (false, false), (true, true), (true, false)] {
        let flags = FIN | PSH | CWR | 0x10;
        let whole = frame(super_frame(is_v6, 4321, 1000, flags, needs_checksum));
        let data: Vec<u8> = (0..4321).map(|at| at as u8).collect();
        for start in 0..5 {
            for end in start + 1..=5 {
                if (start, end) == (0, 5) {
                    continue;
                }
                let part = whole.cut(start..end).expect("it can be cut");
                let (sequence, seen, payload) = received(&part);
                assert_eq!(payload, data[start * 1000..(end * 1000).min(4321)], "{start}..{end}");
                assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(start as u32 * 1000));
                assert_eq!(seen & (FIN | PSH) != 0, end == 5, "the last frame only ends");
                assert_eq!(seen & CWR != 0, start == 0, "the first frame only answers a mark");
                assert_eq!(seen & 0x10, 0x10);
                assert_eq!(part.wire_frames(), end - start);
                assert_eq!(part.as_bytes()[1] != 0, end - start > 1, "one frame is no super-frame");
            }
        }
    }
}

#[test]
fn identifications_of_version_4_count_on() {
    let whole = frame(super_frame(false, 3000, 1000, 0, true));
    let ids: Vec<_> = (0..3).map(|at| take(whole.cut(at..at + 1).unwrap().as_bytes(), 28).unwrap()).collect();
    assert_eq!(ids, [0xfffe, 0xffff, 0]);
}

#[test]
fn any_bytes_are_survived() {
    let good = super_frame(false, 3000, 1000, PSH, true);
    for end in 0..120 {
        let cut = frame(good[..end.min(good.len())].to_vec());
        for index in 0..3 {
            let _ = (cut.wire_bytes(index), cut.cut(index..index + 1));
        }
    }
    let mut random = super::super::random::Random::new(11);
    for _ in 0..20_000 {
        let mut bytes =
            if random.happens(0.5) { good.clone() } else { super_frame(true, 900, 100, 0, false) };
        for _ in 0..1 + random.bits() % 4 {
            let at = random.bits() as usize % 90;
            bytes[at] = random.bits() as u8;
        }
        bytes.truncate(random.bits() as usize % (bytes.len() + 1));
        let frame = frame(bytes);
        let count = frame.wire_frames();
        let backwards = Range { start: 7, end: 3 };
        let _ = (frame.wire_bytes(count), frame.cut(0..1), frame.cut(count - 1..count), frame.cut(backwards));
    }
}
