//! The smallest program on the path of packets: a lower bound for every engine that uses the same means.
//!
//! It replaces one address and port with another, in both directions, and updates the two checksums. It knows no
//! connections, keeps no records and has no time-outs: client and server negotiate everything else between
//! themselves. Either an XDP program does it (`bpf/least.bpf.c`), or a process with an AF_XDP socket.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use sidetrack_sys::bpf::{Hook, Link, Map, MapKind, MapShape, Object, Program, ProgramKind};
use sidetrack_sys::link::{self, Interface};
use sidetrack_sys::xsk::Descriptor;

use super::rings::{BATCH, Rings};
use crate::launch::Placement;
use crate::service::Service;
use crate::topology::Node;

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/least.bpf.o"));

/// Bytes of `struct way` and of `struct least`.
const WAY: usize = 28;
const LEAST: usize = 2 * WAY;
/// Offsets of addresses, ports and checksums in a frame, for IPv4 without options.
const FROM: usize = 26;
const TO: usize = 30;
const FROM_PORT: usize = 34;
const TO_PORT: usize = 36;
const IP_CHECKSUM: usize = 24;
const TCP_CHECKSUM: usize = 50;
/// Number of bytes that are read.
const HEADERS: usize = 54;
/// The line it writes once it is on the path.
const READY: &str = "ready";

/// The means by which frames are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum By {
    /// A program in the driver.
    Kernel,
    /// A process with AF_XDP; both sides are the same interface.
    Process,
}

/// One side of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// The interface on that side.
    pub interface: String,
    /// The link-layer address of the receiver of its frames.
    pub neighbour: [u8; 6],
}

/// The job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Least {
    /// The means.
    pub by: By,
    /// The side of the clients.
    pub clients: Side,
    /// The side of the server.
    pub servers: Side,
    /// The address that clients connect to.
    pub front: SocketAddrV4,
    /// The address that replaces it.
    pub server: SocketAddrV4,
}

/// One direction of frames.
#[derive(Debug, Clone, Copy)]
struct Way {
    neighbour: [u8; 6],
    own: [u8; 6],
    /// The interface to send by; 0: the interface where they arrived.
    egress: u32,
    from: SocketAddrV4,
    to: SocketAddrV4,
}

impl Least {
    /// Starts it in a node with this placement; its log goes into the folder. It is on the path when this returns.
    ///
    /// # Errors The interfaces do not accept a program.
    pub fn start(&self, node: &Node, placement: &Placement, folder: &Path) -> Result<Service> {
        let mut command = node.command_at(&node.launcher().to_string_lossy(), placement);
        command.arg("least").arg(serde_json::to_string(self)?);
        let mut service = Service::start("least", command, folder)?;
        service.wait_said(READY)?;
        Ok(service)
    }

    /// Returns the link-layer address of a node's interface.
    ///
    /// # Errors The interface does not exist, or is not Ethernet.
    pub fn address(node: &Node, interface: &str) -> Result<[u8; 6]> {
        node.enter(|| link::interface(interface)?.address.context("no Ethernet"))
    }

    /// `sidetrack-lab least SPEC`: runs until it is ended.
    ///
    /// # Errors The specification is invalid, or the interfaces do not accept a program.
    pub fn main(spec: &str) -> Result<()> {
        let least: Self = serde_json::from_str(spec).context("the specification is not valid")?;
        let sides = [&least.clients, &least.servers];
        let found = sides.map(|side| link::interface(&side.interface));
        let [clients, servers] = found;
        let (clients, servers) = (clients?, servers?);
        let ways = least.ways(&clients, &servers)?;
        match least.by {
            By::Kernel => by_kernel(&ways, &clients, &servers),
            By::Process => least.by_process(&ways, &clients),
        }
    }

    /// Towards clients, towards the server.
    fn ways(&self, clients: &Interface, servers: &Interface) -> Result<[Way; 2]> {
        let same = clients.index == servers.index;
        let way = |side: &Side, interface: &Interface, from, to| -> Result<Way> {
            let own = interface.address.with_context(|| format!("{} is no Ethernet", side.interface))?;
            let egress = if same { 0 } else { interface.index };
            Ok(Way { neighbour: side.neighbour, own, egress, from, to })
        };
        let back = way(&self.clients, clients, self.server, self.front)?;
        Ok([back, way(&self.servers, servers, self.front, self.server)?])
    }

    fn by_process(&self, ways: &[Way; 2], interface: &Interface) -> Result<()> {
        ensure!(ways.iter().all(|way| way.egress == 0), "a process does it on one interface only");
        let mut rings = Rings::open(&self.clients.interface, interface.index)?;
        let sockets = map(MapKind::Xsk, "sockets", 4)?;
        let _attached = attach("xdp/least_socket", &sockets, &[interface.index])?;
        sockets.put(&[0; 4], &rings.as_fd().as_raw_fd().to_ne_bytes())?;
        println!("{READY}");
        let mut taken = [Descriptor::default(); BATCH];
        loop {
            let count = rings.receive(&mut taken);
            for descriptor in taken.iter().take(count) {
                if pass(ways, rings.frame(*descriptor)) {
                    rings.forward(*descriptor);
                } else {
                    rings.let_go(*descriptor);
                }
            }
            rings.flush()?;
            if count == 0 {
                // A signal ends the process anyway.
                let _ = poll(&mut [PollFd::new(&rings, PollFlags::IN)], None);
            }
        }
    }
}

fn by_kernel(ways: &[Way; 2], clients: &Interface, servers: &Interface) -> Result<()> {
    let settings = map(MapKind::Array, "least", LEAST)?;
    settings.put(&[0; 4], &ways.map(|way| way.bytes()).concat())?;
    let mut indices = vec![clients.index, servers.index];
    indices.dedup();
    let _attached = attach("xdp/least", &settings, &indices)?;
    println!("{READY}");
    loop {
        std::thread::park();
    }
}

fn map(kind: MapKind, name: &'static str, value_bytes: usize) -> Result<Map> {
    let shape = MapShape { kind, name, key_bytes: 4, value_bytes, entries_max: 1 };
    Map::create(shape).with_context(|| format!("the map {name}"))
}

/// Attaches the program of a section, with this map, to these interfaces.
fn attach(section: &str, map: &Map, indices: &[u32]) -> Result<(Program, Vec<Link>)> {
    let maps: BTreeMap<_, _> = [(map.shape().name, map.as_fd().as_raw_fd())].into();
    let code = Object::parse(PROGRAM)?.program(section, &maps)?;
    let program = Program::load(section, ProgramKind::Xdp, &code, "Dual MIT/GPL")?;
    let links = indices.iter().map(|index| program.attach(*index, Hook::XdpNative));
    let links = links.collect::<Result<_, _>>().context("no program can be attached")?;
    Ok((program, links))
}

impl Way {
    /// Returns it as `struct way`.
    fn bytes(self) -> Vec<u8> {
        [
            &self.neighbour[..],
            &self.own,
            &self.egress.to_ne_bytes(),
            &self.from.ip().octets(),
            &self.to.ip().octets(),
            &self.from.port().to_be_bytes(),
            &self.to.port().to_be_bytes(),
        ]
        .concat()
    }

    /// Replaces the bytes at these offsets of a frame.
    fn change(&self, frame: &mut [u8; HEADERS], address: usize, port: usize) {
        let [old, new] = [self.from, self.to].map(|end| end.ip().to_bits());
        let addresses = u64::from(!old) + u64::from(new);
        let ports = u64::from(!self.from.port()) + u64::from(self.to.port());
        for (at, change) in [(IP_CHECKSUM, addresses), (TCP_CHECKSUM, addresses + ports)] {
            let before = u16::from_be_bytes([frame[at], frame[at + 1]]);
            let after = !folded(u64::from(!before) + change);
            frame[at..at + 2].copy_from_slice(&after.to_be_bytes());
        }
        frame[address..address + 4].copy_from_slice(&self.to.ip().octets());
        frame[port..port + 2].copy_from_slice(&self.to.port().to_be_bytes());
        frame[..6].copy_from_slice(&self.neighbour);
        frame[6..12].copy_from_slice(&self.own);
    }

    /// Returns true if this direction changes the frame.
    fn matches(&self, frame: &[u8; HEADERS], address: usize, port: usize) -> bool {
        frame[address..address + 4] == self.from.ip().octets()
            && frame[port..port + 2] == self.from.port().to_be_bytes()
    }
}

fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Changes a frame; returns false if it belongs to neither direction.
fn pass(ways: &[Way; 2], frame: &mut [u8]) -> bool {
    let [to_clients, to_server] = ways;
    let Some(frame) = frame.first_chunk_mut() else { return false };
    if to_clients.matches(frame, FROM, FROM_PORT) {
        to_clients.change(frame, FROM, FROM_PORT);
    } else if to_server.matches(frame, TO, TO_PORT) {
        to_server.change(frame, TO, TO_PORT);
    } else {
        return false;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::segment::{ACK, FRAME_MAX, PSH, Segment, checksums_hold};
    use super::*;

    fn ways() -> [Way; 2] {
        let (front, server) = ("10.77.9.2:80".parse().unwrap(), "10.77.8.1:8080".parse().unwrap());
        let way = |from, to, last| Way { neighbour: [last; 6], own: [9; 6], egress: 0, from, to };
        [way(server, front, 1), way(front, server, 2)]
    }

    fn frame(from: &str, to: &str) -> [u8; FRAME_MAX] {
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        let mut frame = [0; FRAME_MAX];
        Segment { from, to, seq: 5, ack: 7, flags: ACK | PSH, payload: 3 }.write(&mut frame, [7; 6], [8; 6]);
        frame
    }

    fn changed(from: &str, to: &str) -> Option<(Segment, [u8; 12])> {
        let mut frame = frame(from, to);
        pass(&ways(), &mut frame).then(|| {
            assert!(checksums_hold(&frame));
            (Segment::read(&frame).unwrap(), *frame.first_chunk().unwrap())
        })
    }

    #[test]
    fn both_ways_are_changed_and_nothing_else() {
        let (there, link) = changed("10.78.0.3:1024", "10.77.9.2:80").unwrap();
        assert_eq!(
            (there.from.to_string(), there.to.to_string()),
            ("10.78.0.3:1024".into(), "10.77.8.1:8080".into())
        );
        assert_eq!(link, [2, 2, 2, 2, 2, 2, 9, 9, 9, 9, 9, 9]);
        let (back, link) = changed("10.77.8.1:8080", "10.78.0.3:1024").unwrap();
        assert_eq!(
            (back.from.to_string(), back.to.to_string()),
            ("10.77.9.2:80".into(), "10.78.0.3:1024".into())
        );
        assert_eq!((link[0], back.seq, back.ack, back.payload), (1, 5, 7, 3));
        assert_eq!(changed("10.78.0.3:1024", "10.77.9.2:81"), None);
        assert!(!pass(&ways(), &mut [0; HEADERS - 1]));
    }

    #[test]
    fn the_program_does_the_same() {
        let section = Object::parse(PROGRAM).unwrap().section("layout").unwrap();
        let found: Vec<usize> =
            section.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word) as usize).collect();
        assert_eq!(found, [WAY, LEAST]);
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let settings = map(MapKind::Array, "least", LEAST).unwrap();
        settings.put(&[0; 4], &ways().map(|way| way.bytes()).concat()).unwrap();
        let (program, _) = attach("xdp/least", &settings, &[]).unwrap();
        for (from, to) in [("10.78.0.3:1024", "10.77.9.2:80"), ("10.77.8.1:8080", "10.78.0.3:1024")] {
            let (before, mut expected) = (frame(from, to), frame(from, to));
            assert!(pass(&ways(), &mut expected));
            let trial = program.try_on(&before, 1).unwrap();
            assert_eq!((trial.verdict, trial.packet), (3, expected.to_vec()), "XDP_TX");
        }
        let foreign = frame("10.78.0.3:1024", "10.77.9.2:81");
        let trial = program.try_on(&foreign, 1).unwrap();
        assert_eq!((trial.verdict, trial.packet), (2, foreign.to_vec()), "XDP_PASS");
    }
}
