//! Captures (draft-ietf-opsawg-pcap) of raw IP packets, with nanoseconds.

/// Nanoseconds, in this machine-independent order of bytes.
const MAGIC: [u8; 4] = [0xa1, 0xb2, 0x3c, 0x4d];
/// Packets begin with their IP header.
const LINKTYPE_RAW: u32 = 101;
const SNAPLEN: u32 = 65_535;
const FILE_HEADER: usize = 24;
const PACKET_HEADER: usize = 16;

/// A packet and when it came, in nanoseconds.
pub(crate) type Captured = (u64, Vec<u8>);

/// The file of these packets.
pub(crate) fn write(packets: &[Captured]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend([0, 2, 0, 4]);
    file.extend([0; 8]);
    file.extend(SNAPLEN.to_be_bytes());
    file.extend(LINKTYPE_RAW.to_be_bytes());
    for (at, packet) in packets {
        let length = u32::try_from(packet.len()).expect("a packet");
        let (seconds, nanos) = ((at / 1_000_000_000) as u32, (at % 1_000_000_000) as u32);
        for word in [seconds, nanos, length, length] {
            file.extend(word.to_be_bytes());
        }
        file.extend(packet);
    }
    file
}

/// The packets of a file as [`write`] makes it.
pub(crate) fn read(file: &[u8]) -> Result<Vec<Captured>, String> {
    let word = |at: usize| {
        let bytes = file.get(at..at + 4).ok_or_else(|| format!("cut off at byte {at}"))?;
        Ok::<_, String>(u32::from_be_bytes(bytes.try_into().expect("four")))
    };
    if file.get(..4) != Some(&MAGIC) || word(20)? != LINKTYPE_RAW {
        return Err("no capture of raw IP packets with nanoseconds, the high byte first".into());
    }
    let (mut packets, mut at) = (Vec::new(), FILE_HEADER);
    while at < file.len() {
        let time = u64::from(word(at)?) * 1_000_000_000 + u64::from(word(at + 4)?);
        let (start, length) = (at + PACKET_HEADER, word(at + 8)? as usize);
        let packet = file.get(start..start + length).ok_or_else(|| format!("cut off at byte {start}"))?;
        packets.push((time, packet.to_vec()));
        at = start + length;
    }
    Ok(packets)
}

#[test]
fn a_capture_gives_back_what_was_written_and_a_cut_one_says_where() {
    let packets = vec![(1_000_000_007, vec![0x45, 1, 2]), (5_000_000_000, Vec::new())];
    let file = write(&packets);
    assert_eq!(read(&file).as_ref(), Ok(&packets));
    for cut in 0..file.len() {
        let whole = [FILE_HEADER, FILE_HEADER + PACKET_HEADER + 3].contains(&cut);
        assert_eq!(read(&file[..cut]).is_ok(), whole, "{cut} bytes");
    }
}
