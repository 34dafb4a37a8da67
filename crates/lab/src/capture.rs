//! A capture of TCP segments by tcpdump, read from its file as it grows.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context, Result, bail};

use crate::topology::Node;

/// A TCP segment that carried something: SYN or payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Sender.
    pub from: IpAddr,
    /// Receiver.
    pub to: IpAddr,
    /// SYN is set (also in SYN+ACK).
    pub is_syn: bool,
    /// What it carried.
    pub payload: Vec<u8>,
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
        let mut command = node.command("tcpdump");
        command
            .args(["--immediate-mode", "-U", "-n", "-s", "0", "-Z", "root", "-i", interface, "-w"])
            .arg(file)
            .arg("tcp");
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

    /// The segments captured so far that carried something, in order.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn segments(&self) -> Result<Vec<Segment>> {
        Ok(parse(&std::fs::read(&self.file)?))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a little-endian pcap file of Ethernet frames (draft-ietf-opsawg-pcap); a cut-off end is left out.
fn parse(file: &[u8]) -> Vec<Segment> {
    const FILE_HEADER_BYTES: usize = 24;
    const RECORD_HEADER_BYTES: usize = 16;
    let mut rest = file.get(FILE_HEADER_BYTES..).unwrap_or_default();
    let mut segments = Vec::new();
    while let Some(length) = rest.get(8..12).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes) {
        let end = RECORD_HEADER_BYTES + length as usize;
        let Some(frame) = rest.get(RECORD_HEADER_BYTES..end) else { break };
        segments.extend(segment(frame).filter(|segment| segment.is_syn || !segment.payload.is_empty()));
        rest = rest.get(end..).unwrap_or_default();
    }
    segments
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
    // The total length leaves Ethernet padding out; super-frames may say 0.
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
    fn a_file_cut_anywhere_gives_what_is_complete() {
        let bytes = file(&[frame(2, b""), frame(24, b"hi")]);
        for end in 0..bytes.len() {
            assert!(parse(&bytes[..end]).len() < 2, "cut at {end}");
        }
    }
}
