//! A capture of TCP segments by tcpdump, read from its file as it grows.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail};

use crate::topology::Node;

/// A TCP segment with a SYN or payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Sender.
    pub from: IpAddr,
    /// Receiver.
    pub to: IpAddr,
    /// SYN is set (also in SYN+ACK).
    pub is_syn: bool,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// A TCP packet over IPv4 with its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamped {
    /// When it passed, nanoseconds since 1970, to the microsecond.
    pub time_ns: u64,
    /// Source port.
    pub from: u16,
    /// Destination port.
    pub to: u16,
    /// The byte of the IPv4 header that holds DSCP and ECN.
    pub tos: u8,
    /// TCP flags: FIN 1, SYN 2, RST 4.
    pub flags: u8,
}

/// A running tcpdump in a node.
#[derive(Debug)]
pub struct Capture {
    child: Child,
    file: PathBuf,
}

impl Capture {
    /// Starts to capture TCP on an interface; returns once tcpdump listens.
    ///
    /// # Errors
    /// tcpdump is not installed or refuses the interface.
    pub fn start(node: &Node, interface: &str, file: &Path) -> Result<Self> {
        Self::spawn(node, interface, file, &["--immediate-mode", "-s", "0"], "tcp")
    }

    /// Captures the headers of the packets that match `filter`, for [`Self::stamped`]. Whole packets would fill the
    /// kernel's buffer after a few, because each slot holds the longest possible packet. Immediate delivery would
    /// wake this process for each packet. Headers come in blocks, up to a second late, and keep their times.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn headers(node: &Node, interface: &str, file: &Path, filter: &str) -> Result<Self> {
        Self::spawn(node, interface, file, &["-s", "96", "-B", "16384"], filter)
    }

    fn spawn(node: &Node, interface: &str, file: &Path, how: &[&str], filter: &str) -> Result<Self> {
        let mut command = node.command("tcpdump");
        command.args(how).args(["-U", "-n", "-Z", "root", "-i", interface, "-w"]).arg(file).arg(filter);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start tcpdump")?;
        let errors = child.stderr.take().context("tcpdump has no standard error")?;
        let mut said = String::new();
        for line in BufReader::new(errors).lines() {
            let line = line?;
            if line.contains("listening on") {
                return Ok(Self { child, file: file.to_owned() });
            }
            said.push_str(&line);
        }
        bail!("tcpdump on {interface} of {} ended ({}): {said}", node.name(), child.wait()?)
    }

    /// Returns the segments with a SYN or payload that were captured so far, in order.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn segments(&self) -> Result<Vec<Segment>> {
        Ok(parse(&std::fs::read(&self.file)?))
    }

    /// Returns every TCP packet over IPv4 that was captured so far, in order.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn stamped(&self) -> Result<Vec<Stamped>> {
        Ok(stamped(&std::fs::read(&self.file)?))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse(file: &[u8]) -> Vec<Segment> {
    let frames = frames(file).filter_map(|(_, frame)| segment(frame));
    frames.filter(|segment| segment.is_syn || !segment.payload.is_empty()).collect()
}

fn stamped(file: &[u8]) -> Vec<Stamped> {
    frames(file).filter_map(|(time_ns, frame)| stamp(frame, time_ns)).collect()
}

/// Returns the Ethernet frames of a little-endian pcap file (draft-ietf-opsawg-pcap) with their times, nanoseconds
/// since 1970. A truncated last frame is left out.
fn frames(file: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    const FILE_HEADER_BYTES: usize = 24;
    const RECORD_HEADER_BYTES: usize = 16;
    let mut rest = file.get(FILE_HEADER_BYTES..).unwrap_or_default();
    std::iter::from_fn(move || {
        let word = |at: usize| rest.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        let (seconds, micros, length) = (word(0)?, word(4)?, word(8)?);
        let end = RECORD_HEADER_BYTES + length as usize;
        let frame = rest.get(RECORD_HEADER_BYTES..end)?;
        rest = rest.get(end..)?;
        Some(((u64::from(seconds) * 1_000_000 + u64::from(micros)) * 1000, frame))
    })
}

/// Reads a frame with TCP over IPv4; anything else is `None`.
fn stamp(frame: &[u8], time_ns: u64) -> Option<Stamped> {
    let packet = frame.get(14..).filter(|_| frame.get(12..14) == Some(&[8, 0][..]))?;
    let header = usize::from(packet.first()? & 15) * 4;
    let tcp = packet.get(header..).filter(|_| packet.get(9) == Some(&6))?;
    let port = |at: usize| big_endian(tcp, at).and_then(|port| u16::try_from(port).ok());
    Some(Stamped { time_ns, from: port(0)?, to: port(2)?, tos: *packet.get(1)?, flags: *tcp.get(13)? })
}

/// Reads an Ethernet frame with TCP over IPv4 or IPv6 without extension headers; anything else is `None`.
fn segment(frame: &[u8]) -> Option<Segment> {
    const TCP: u8 = 6;
    const SYN: u8 = 2;
    let packet = frame.get(14..)?;
    let (from, to, protocol, header, total) = match frame.get(12..14)? {
        [0x08, 0x00] => {
            let address = |at: usize| {
                Some(IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?)))
            };
            let header = usize::from(packet.first()? & 15) * 4;
            (address(12)?, address(16)?, *packet.get(9)?, header, big_endian(packet, 2)?)
        }
        [0x86, 0xdd] => {
            let address = |at: usize| {
                Some(IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?)))
            };
            (address(8)?, address(24)?, *packet.get(6)?, 40, 40 + big_endian(packet, 4)?)
        }
        _ => return None,
    };
    if protocol != TCP {
        return None;
    }
    // The total length excludes Ethernet padding. It may be 0 in super-frames.
    let tcp = packet.get(header..if total == 0 { packet.len() } else { total })?;
    let data = usize::from(*tcp.get(12)? >> 4) * 4;
    Some(Segment { from, to, is_syn: tcp.get(13)? & SYN != 0, payload: tcp.get(data..)?.to_vec() })
}

fn big_endian(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?])))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An Ethernet frame with an IPv4 TCP segment and two bytes of padding.
    fn frame(flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([
            8,
            0,
            0x45,
            0,
            0,
            40 + payload.len() as u8,
            0,
            0,
            0,
            0,
            64,
            6,
            0,
            0,
            10,
            0,
            0,
            1,
            10,
            0,
            0,
            2,
        ]);
        frame.extend([0; 12]);
        frame.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
        frame.extend(payload);
        frame.extend([0, 0]);
        frame
    }

    fn file(frames: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; 24];
        for frame in frames {
            bytes.extend([0; 8]);
            bytes.extend((frame.len() as u32).to_le_bytes());
            bytes.extend((frame.len() as u32).to_le_bytes());
            bytes.extend(frame);
        }
        bytes
    }

    #[test]
    fn pure_acknowledgements_are_left_out_and_padding_is_no_payload() {
        let bytes = file(&[frame(2, b""), frame(16, b""), frame(24, b"hi")]);
        let segments = parse(&bytes);
        assert_eq!(segments.len(), 2);
        assert!(segments[0].is_syn && segments[0].payload.is_empty());
        assert_eq!((segments[1].is_syn, segments[1].payload.as_slice()), (false, &b"hi"[..]));
        assert_eq!(segments[1].from, IpAddr::from([10, 0, 0, 1]));
    }

    #[test]
    fn packets_keep_their_times_and_flags() {
        let mut bytes = file(&[frame(2, b""), frame(17, b"")]);
        bytes[24..28].copy_from_slice(&3_u32.to_le_bytes());
        bytes[28..32].copy_from_slice(&7_u32.to_le_bytes());
        let packets = stamped(&bytes);
        assert_eq!((packets[0].time_ns, packets[0].flags, packets[0].tos), (3_000_007_000, 2, 0));
        assert_eq!((packets.len(), packets[1].flags), (2, 17));
        assert!((0..bytes.len()).all(|end| stamped(&bytes[..end]).len() < 2));
    }

    #[test]
    fn a_file_cut_anywhere_gives_what_is_complete() {
        let bytes = file(&[frame(2, b""), frame(24, b"hi")]);
        for end in 0..bytes.len() {
            assert!(parse(&bytes[..end]).len() < 2, "cut at {end}");
        }
    }
}
