//! Blocks of pcapng files (draft-ietf-opsawg-pcapng), as Wireshark reads them. All numbers are little-endian.

use std::net::IpAddr;

/// Packets that begin with their IP header (LINKTYPE_RAW).
const LINKTYPE_RAW: u16 = 101;
/// The type of secrets that a TLS key log has: "TLSK".
const TLS_KEY_LOG: u32 = 0x544c_534b;

/// Types of blocks.
const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const NAMES: u32 = 4;
const STATISTICS: u32 = 5;
const PACKET: u32 = 6;
const SECRETS: u32 = 10;

/// Options.
const COMMENT: u16 = 1;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_RESOLUTION: u16 = 9;
const SECTION_APPLICATION: u16 = 4;
const PACKET_FLAGS: u16 = 2;
const PACKET_DROPPED: u16 = 4;
const STATISTICS_RECEIVED: u16 = 4;
const STATISTICS_DROPPED: u16 = 5;

/// Longest value of an option that is written, bytes. Longer text is cut at a character.
const OPTION_MAX: usize = 2048;

/// Longest block that is read, bytes.
const BLOCK_MAX: usize = 16 << 20;

/// Whether a packet came in or went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// It came in by the interface.
    In,
    /// It went out by the interface.
    Out,
}

/// One packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The number of its interface: blocks of [`interface`] are counted from 0.
    pub interface: u32,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Its first bytes, from the IP header on.
    pub data: &'a [u8],
    /// Its length in the network, bytes.
    pub length: u32,
    /// Its direction. `None`: not known.
    pub direction: Option<Direction>,
    /// Packets that were lost between the one before and this one.
    pub dropped: u64,
    /// Comments.
    pub comment: Option<&'a str>,
}

/// Writes one block at the end of a buffer.
struct Block<'a> {
    out: &'a mut Vec<u8>,
    begin: usize,
}

impl<'a> Block<'a> {
    fn begin(out: &'a mut Vec<u8>, kind: u32) -> Self {
        let begin = out.len();
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        Self { out, begin }
    }

    fn u16(&mut self, value: u16) {
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    /// A time, as two halves.
    fn time(&mut self, time_ns: u64) {
        let [a, b, c, d, low @ ..] = time_ns.to_be_bytes();
        self.u32(u32::from_be_bytes([a, b, c, d]));
        self.u32(u32::from_be_bytes(low));
    }

    /// Bytes, filled up to 32 bits.
    fn padded(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
        let missing = bytes.len().next_multiple_of(4) - bytes.len();
        self.out.extend_from_slice(&[0; 3][..missing]);
    }

    fn option(&mut self, code: u16, value: &[u8]) {
        self.u16(code);
        self.u16(u16::try_from(value.len()).unwrap_or(u16::MAX));
        self.padded(value);
    }

    fn text(&mut self, code: u16, text: &str) {
        let end = (0..=text.len().min(OPTION_MAX)).rev().find(|end| text.is_char_boundary(*end));
        self.option(code, &text.as_bytes()[..end.unwrap_or(0)]);
    }

    /// The end of the options, and of the block.
    fn end(mut self, has_options: bool) {
        if has_options {
            self.u32(0);
        }
        let length = u32::try_from(self.out.len() - self.begin + 4).unwrap_or(u32::MAX);
        self.u32(length);
        self.out[self.begin + 4..self.begin + 8].copy_from_slice(&length.to_le_bytes());
    }
}

/// Writes the head of a file: a Section Header Block.
pub fn section(out: &mut Vec<u8>, application: &str) {
    let mut block = Block::begin(out, SECTION);
    block.u32(0x1a2b_3c4d);
    block.u16(1);
    block.u16(0);
    // The length of the section is not known.
    block.u32(u32::MAX);
    block.u32(u32::MAX);
    block.text(SECTION_APPLICATION, application);
    block.end(true);
}

/// Writes an interface of IP packets: an Interface Description Block. Times of its packets are in nanoseconds.
pub fn interface(out: &mut Vec<u8>, name: &str, snap_bytes: u32) {
    let mut block = Block::begin(out, INTERFACE);
    block.u16(LINKTYPE_RAW);
    block.u16(0);
    block.u32(snap_bytes);
    block.text(INTERFACE_NAME, name);
    block.option(INTERFACE_RESOLUTION, &[9]);
    block.end(true);
}

/// Writes a packet: an Enhanced Packet Block.
pub fn packet(out: &mut Vec<u8>, packet: &Packet<'_>) {
    let mut block = Block::begin(out, PACKET);
    block.u32(packet.interface);
    block.time(packet.time_ns);
    block.u32(u32::try_from(packet.data.len()).unwrap_or(u32::MAX));
    block.u32(packet.length);
    block.padded(packet.data);
    let flags = packet.direction.map(|direction| match direction {
        Direction::In => 1_u32,
        Direction::Out => 2,
    });
    flags.inspect(|flags| block.option(PACKET_FLAGS, &flags.to_le_bytes()));
    if packet.dropped > 0 {
        block.option(PACKET_DROPPED, &packet.dropped.to_le_bytes());
    }
    packet.comment.inspect(|comment| block.text(COMMENT, comment));
    block.end(flags.is_some() || packet.dropped > 0 || packet.comment.is_some());
}

/// Writes names of addresses: a Name Resolution Block.
pub fn names<'a>(out: &mut Vec<u8>, names: impl IntoIterator<Item = (IpAddr, &'a str)>) {
    let mut block = Block::begin(out, NAMES);
    for (ip, name) in names {
        let (kind, mut value) = match ip {
            IpAddr::V4(ip) => (1, ip.octets().to_vec()),
            IpAddr::V6(ip) => (2, ip.octets().to_vec()),
        };
        value.extend(name.bytes().filter(|byte| *byte != 0).take(OPTION_MAX));
        value.push(0);
        block.option(kind, &value);
    }
    // The end of the records.
    block.u32(0);
    block.end(false);
}

/// Writes lines of a TLS key log: a Decryption Secrets Block. It has to stand before the packets that it decrypts.
pub fn secrets(out: &mut Vec<u8>, lines: &str) {
    let mut block = Block::begin(out, SECRETS);
    block.u32(TLS_KEY_LOG);
    block.u32(u32::try_from(lines.len()).unwrap_or(u32::MAX));
    block.padded(lines.as_bytes());
    block.end(false);
}

/// Writes counts of an interface: an Interface Statistics Block. `received` counts the packets of the capture, `dropped` those
/// that it lacks.
pub fn statistics(out: &mut Vec<u8>, interface: u32, time_ns: u64, (received, dropped): (u64, u64)) {
    let mut block = Block::begin(out, STATISTICS);
    block.u32(interface);
    block.time(time_ns);
    block.option(STATISTICS_RECEIVED, &received.to_le_bytes());
    block.option(STATISTICS_DROPPED, &dropped.to_le_bytes());
    block.end(true);
}

/// A stream of blocks, split into whole blocks as its bytes come.
///
/// ```text
/// waiting --8 bytes--> length known --length bytes--> a block --> waiting
/// ```
#[derive(Debug, Default)]
pub struct Blocks {
    held: Vec<u8>,
    at: usize,
}

/// The bytes are not blocks of a little-endian pcapng file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these bytes are not a pcapng file")]
pub struct NoBlock;

/// One whole block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole<'a> {
    /// All its bytes.
    pub bytes: &'a [u8],
}

impl Whole<'_> {
    /// Whether it is a packet.
    pub fn is_packet(&self) -> bool {
        u32_at(self.bytes, 0) == Some(PACKET)
    }

    /// The packets that the capture has and lacks, if it is a block of [`statistics`].
    pub fn counts(&self) -> Option<(u64, u64)> {
        (u32_at(self.bytes, 0)? == STATISTICS).then_some(())?;
        let u64_at = |at: usize| Some(u64::from_le_bytes(self.bytes.get(at..at + 8)?.try_into().ok()?));
        Some((u64_at(24)?, u64_at(36)?))
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl Blocks {
    /// Adds bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.drain(..self.at);
        self.at = 0;
        self.held.extend_from_slice(bytes);
    }

    /// Returns the next whole block.
    ///
    /// # Errors
    /// Fails if what comes next is not a block.
    pub fn whole(&mut self) -> Result<Option<Whole<'_>>, NoBlock> {
        let rest = self.held.get(self.at..).unwrap_or_default();
        let Some(length) = u32_at(rest, 4) else { return Ok(None) };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if !(12..=BLOCK_MAX).contains(&length) || length % 4 != 0 {
            return Err(NoBlock);
        }
        let Some(bytes) = rest.get(..length) else { return Ok(None) };
        if u32_at(bytes, length - 4) != u32_at(bytes, 4) {
            return Err(NoBlock);
        }
        self.at += length;
        Ok(Some(Whole { bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes
            .chunks(4)
            .map(|word| word.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + " ")
            .collect()
    }

    fn file() -> Vec<u8> {
        let mut out = Vec::new();
        section(&mut out, "st");
        interface(&mut out, "lo", 65535);
        names(&mut out, [([127, 0, 0, 1].into(), "a.b")]);
        secrets(&mut out, "X 1 2\n");
        let first = Packet {
            interface: 0,
            time_ns: 0x1_0000_0002,
            data: b"hello",
            length: 6,
            direction: Some(Direction::Out),
            dropped: 3,
            comment: Some("é"),
        };
        packet(&mut out, &first);
        statistics(&mut out, 0, 5, (1, 2));
        out
    }

    #[test]
    fn blocks_have_the_bytes_of_the_draft() {
        let expected = [
            // Section Header Block (draft-ietf-opsawg-pcapng Sec. 4.1) with shb_userappl.
            "0a0d0d0a 28000000 4d3c2b1a 01000000 ffffffff ffffffff 04000200 73740000 00000000 28000000 ",
            // Interface Description Block (Sec. 4.2) with if_name and if_tsresol.
            "01000000 28000000 65000000 ffff0000 02000200 6c6f0000 09000100 09000000 00000000 28000000 ",
            // Name Resolution Block (Sec. 4.5) with one address of IPv4.
            "04000000 1c000000 01000800 7f000001 612e6200 00000000 1c000000 ",
            // Decryption Secrets Block (Sec. 4.7).
            "0a000000 1c000000 4b534c54 06000000 58203120 320a0000 1c000000 ",
            // Enhanced Packet Block (Sec. 4.3) with epb_flags, epb_dropcount and opt_comment.
            "06000000 48000000 00000000 01000000 02000000 05000000 06000000 68656c6c 6f000000 02000400 02000000 \
             04000800 03000000 00000000 01000200 c3a90000 00000000 48000000 ",
            // Interface Statistics Block (Sec. 4.6) with isb_ifrecv and isb_ifdrop.
            "05000000 34000000 00000000 00000000 05000000 04000800 01000000 00000000 05000800 02000000 00000000 \
             00000000 34000000 ",
        ];
        assert_eq!(hex(&file()), expected.concat());
    }

    #[test]
    fn a_stream_is_split_wherever_it_is_cut() {
        let file = file();
        for cut in 0..file.len() {
            let (mut blocks, mut whole, mut counts) = (Blocks::default(), Vec::new(), Vec::new());
            for part in [&file[..cut], &file[cut..]] {
                blocks.push(part);
                while let Some(block) = blocks.whole().unwrap() {
                    whole.extend_from_slice(block.bytes);
                    counts.extend(block.counts());
                }
            }
            assert_eq!((whole, counts), (file.clone(), vec![(1, 2)]), "cut at {cut}");
        }
    }

    #[test]
    fn what_is_no_block_is_an_error() {
        for wrong in [&[0_u8; 12][..], b"HTTP/1.1 200 OK", &[1, 0, 0, 0, 12, 0, 0, 0, 16, 0, 0, 0]] {
            let mut blocks = Blocks::default();
            blocks.push(wrong);
            assert_eq!(blocks.whole(), Err(NoBlock));
        }
    }

    #[test]
    fn long_and_hostile_text_is_cut_at_a_character() {
        let mut out = Vec::new();
        let name = "é".repeat(OPTION_MAX);
        interface(&mut out, &name, 1);
        names(&mut out, [([1, 2, 3, 4].into(), "a\0b")]);
        let mut blocks = Blocks::default();
        blocks.push(&out);
        let block = blocks.whole().unwrap().unwrap().bytes.to_vec();
        assert_eq!(block.len(), 16 + 4 + OPTION_MAX + 8 + 4 + 4);
        assert!(blocks.whole().unwrap().is_some());
    }
}
