//! The peer of decided connections in XDP: both ends of all connections as an XDP program (`bpf/peer.bpf.c`), because
//! a process is too slow for them. User space begins connections, and begins those again whose frame was lost.

use std::io::IoSlice;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sidetrack_sys::bpf::{Hook, Link, Map, MapKind, MapShape, Object, Program, ProgramKind, monotonic_ns};
use sidetrack_sys::link;
use sidetrack_sys::raw::{PacketSocket, VNET_HEADER_BYTES};

use super::ends::{CLIENT_ADDRESSES, Tally};
use super::segment::{FRAME_MAX, SYN, Segment};
use super::{Report, Spec};
use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, AsRawFd};

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/peer.bpf.o"));

/// Bytes of `struct peer` and of `struct place`, and the offset of the counters.
const PEER: usize = 112;
const PLACE: usize = 24;
const COUNTERS: usize = 40;
/// `VACANT`, `OPENING`.
const VACANT: u32 = 0;
const OPENING: u32 = 1;
/// A connection that has not ended after this time is given up.
const GIVEN_UP_NS: u64 = 1_000_000_000;
const SWEEP_EVERY: Duration = Duration::from_millis(100);
const DRAIN: Duration = Duration::from_secs(2);

/// The client's request.
pub const REQUEST: &str = "ask it";

/// The peer of the two ends' handshakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shakes {
    /// Each other: they use their own sequence numbers, and the handshake's acknowledgement is a separate packet.
    Ends,
    /// The engine: the acknowledgement of the handshake carries the request, so there are six packets towards the
    /// engine.
    Engine,
}

/// The peer, attached to an interface.
#[derive(Debug)]
pub struct KernelPeer {
    spec: Spec,
    own: [u8; 6],
    ports: u32,
    peer: Map,
    places: Map,
    drain: Map,
    socket: PacketSocket,
    stuck: u64,
    _program: Program,
    _link: Link,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counters {
    tally: Tally,
    checked: u64,
    received: u64,
    sent: u64,
}

impl KernelPeer {
    /// Attaches it, in this thread's network namespace. It begins no connection.
    ///
    /// # Errors Missing rights, no such interface, or another program is attached.
    pub fn attach(spec: &Spec, shakes: Shakes) -> Result<Self> {
        let interface = link::interface(&spec.interface)?;
        let own = interface.address.context("no Ethernet")?;
        let map = |kind, name, value_bytes, entries_max| {
            Map::create(MapShape { kind, name, key_bytes: 4, value_bytes, entries_max })
        };
        let peer = map(MapKind::Array, "peer", PEER, 1)?;
        let places = map(MapKind::Array, "places", PLACE, spec.connections)?;
        let drain = map(MapKind::Array, "drain", 4, 1)?;
        let groups = spec.connections.div_ceil(CLIENT_ADDRESSES);
        let ports = 64_000 / groups;
        let word = |ip: Ipv4Addr| u32::from_ne_bytes(ip.octets()).to_ne_bytes();
        let value = [
            &spec.engine[..],
            &own,
            &word(*spec.front.ip()),
            &word(*spec.server.ip()),
            &spec.clients.to_bits().to_ne_bytes(),
            &ports.to_ne_bytes(),
            &spec.front.port().to_ne_bytes(),
            &spec.server.port().to_ne_bytes(),
            &u32::from(shakes == Shakes::Engine).to_ne_bytes(),
            &[0; 4],
            &[0; PEER - COUNTERS],
        ]
        .concat();
        peer.put(&[0; 4], &value)?;
        let object = Object::parse(PROGRAM)?;
        let maps: BTreeMap<_, _> = [("peer", &peer), ("places", &places), ("drain", &drain)]
            .map(|(name, map)| (name, map.as_fd().as_raw_fd()))
            .into();
        let program =
            Program::load("peer", ProgramKind::Xdp, &object.program("xdp/peer", &maps)?, "Dual MIT/GPL")?;
        let attached = program.attach(interface.index, Hook::XdpNative)?;
        let socket = PacketSocket::sender(interface.index)?;
        let spec = spec.clone();
        Ok(Self {
            spec,
            own,
            ports,
            peer,
            places,
            drain,
            socket,
            stuck: 0,
            _program: program,
            _link: attached,
        })
    }

    /// Runs the job of its specification.
    ///
    /// # Errors An error of bpf(2) or of the socket.
    pub fn run(&mut self, on_window: impl FnOnce(), on_drain: impl FnOnce()) -> Result<Report> {
        self.until(Duration::from_millis(self.spec.warmup_ms), false)?;
        on_window();
        let (begin, before) = (Instant::now(), self.counters()?);
        self.until(Duration::from_millis(self.spec.window_ms), false)?;
        let after = self.counters()?;
        let window_ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        on_drain();
        self.drain.put(&[0; 4], &1_u32.to_ne_bytes())?;
        self.until(DRAIN, true)?;
        let mut end = self.counters()?;
        end.tally.stuck = self.stuck;
        Ok(Report {
            completed: after.tally.completed - before.tally.completed,
            received: after.received - before.received,
            sent: after.sent - before.sent,
            window_ns,
            whole: end.tally,
            checked: end.checked,
            open: self.open()?,
            ..Report::default()
        })
    }

    fn until(&mut self, limit: Duration, drains: bool) -> Result<()> {
        let end = Instant::now() + limit;
        while Instant::now() < end && !(drains && self.open()? == 0) {
            if !drains {
                self.sweep()?;
            }
            std::thread::sleep(SWEEP_EVERY.min(limit));
        }
        Ok(())
    }

    fn place(&self, number: u32) -> Result<(u32, u32, u64)> {
        let value = self.places.look_up(&number.to_ne_bytes())?.context("a place")?;
        let word = |at: usize| {
            value.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
        };
        let since = value.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes);
        Ok((word(0), word(4), since))
    }

    fn open(&self) -> Result<u64> {
        let mut open = 0;
        for number in 0..self.spec.connections {
            open += u64::from(self.place(number)?.1 != VACANT);
        }
        Ok(open)
    }

    /// Begins connections in vacant and stuck slots.
    fn sweep(&mut self) -> Result<()> {
        let now = monotonic_ns();
        for number in 0..self.spec.connections {
            let (turn, step, since) = self.place(number)?;
            if step != VACANT && now.saturating_sub(since) < GIVEN_UP_NS {
                continue;
            }
            self.stuck += u64::from(step != VACANT);
            let turn = turn.wrapping_add(1);
            let value =
                [&turn.to_ne_bytes()[..], &OPENING.to_ne_bytes(), &now.to_ne_bytes(), &[0; 8]].concat();
            self.places.put(&number.to_ne_bytes(), &value)?;
            let port = 1024 + number / CLIENT_ADDRESSES * self.ports + turn % self.ports;
            let ip = Ipv4Addr::from_bits(self.spec.clients.to_bits() + number % CLIENT_ADDRESSES);
            let segment = Segment {
                from: SocketAddrV4::new(ip, u16::try_from(port)?),
                to: self.spec.front,
                seq: number << 16 | (turn & 0x7ff) << 5,
                ack: 0,
                flags: SYN,
                payload: 0,
            };
            let mut frame = [0; FRAME_MAX];
            segment.write(&mut frame, self.spec.engine, self.own);
            let frame = [&[0; VNET_HEADER_BYTES][..], &frame].concat();
            self.socket.send(&[IoSlice::new(&frame)]).context("a SYN")?;
            if number % 64 == 63 {
                // The queue of a veth is short, so only some are begun at a time.
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(())
    }

    fn counters(&self) -> Result<Counters> {
        let value = self.peer.look_up(&[0; 4])?.context("the counters")?;
        ensure!(value.len() == PEER, "counters of another size");
        let count = |number: usize| {
            let at = COUNTERS + number * 8;
            value.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
        };
        let tally = Tally {
            opened: count(0),
            completed: count(1),
            server_closed: count(2),
            reset: count(3),
            unexpected: count(4),
            corrupt: count(5),
            stuck: 0,
        };
        Ok(Counters { tally, checked: count(6), received: count(7), sent: count(8) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_programs() {
        let section = Object::parse(PROGRAM).unwrap().section("layout").unwrap();
        let found: Vec<usize> =
            section.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word) as usize).collect();
        assert_eq!(found, [PEER, PLACE, COUNTERS]);
    }
}
