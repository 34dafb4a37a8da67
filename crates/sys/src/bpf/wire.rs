//! Flows on the wire: user space's side of `bpf/wire.h`, which describes the states, the layout and who writes what.

mod back;
mod given;
mod pins;

pub use pins::{PINS, Pins, abandoned_pins, default_pins, end_pinned, pins_obstacle, remove_orphans};

use super::layout::engine::{FIN_ACKED, FIN_SEEN, flow_side};
use super::layout::wires::{
    WIRE_ENDED, WIRE_FINISHED, WIRE_FREE, WIRE_HELD, WIRE_JOINING, WIRE_LEAVING, WIRE_RESET_BY_CLIENT,
    WIRE_RESET_BY_SERVER, WIRE_REUSED, WIRE_WIRED, wire as wire_at, wire_key, wire_more,
};
use super::load::{self, BpfError};
use super::memory::Shared;
use super::offload::{OffloadSide, ends_of, write_side};
use super::{Hook, Link, Map, MapKind, MapShape, Program, ProgramKind, WIRE};
use crate::sync::lock;
use sidetrack_core::engine::Standing;
use sidetrack_core::wire::{NOTE_BYTES, Side};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Mutex, OnceLock};

/// Why a flow has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireEnd {
    /// Both sides have closed, and both FINs are acknowledged.
    Finished,
    /// The client has reset it.
    ClientReset,
    /// The server has reset it.
    ServerReset,
    /// A host began a new connection between the same ends.
    Reused,
}

/// One side of a flow on the wire, as the kernel sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireSeen {
    /// Its numbers so far.
    pub standing: Standing,
    /// `standing.sent` in 64 bits: the upper half counts wraps, and begins at 1.
    pub sent: u64,
    /// Packets that were passed on. A GSO frame that stands for several counts once.
    pub packets: u32,
    /// Packets that could not be passed on.
    pub dropped: u32,
    /// It has sent its FIN.
    pub finished: bool,
    /// Monotonic clock at its last packet, nanoseconds; 0: none.
    pub last_ns: u64,
}

/// The number of a flow on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WireId(u32);

impl WireId {
    /// Its place in the memory, from 0.
    pub const fn place(self) -> u32 {
        self.0
    }
}

/// The memory of all flows on the wire, and the programs that use it. Threads may share it.
#[derive(Debug)]
pub struct WireMemory {
    wires: Shared,
    ends: Map,
    /// What user space knows of each flow, by its number.
    notes: Map,
    free: Mutex<Vec<u32>>,
    /// Out, in: loaded when an interface needs them first.
    programs: OnceLock<[Program; 2]>,
}

/// The programs on one interface, until this is dropped and has no name.
#[derive(Debug)]
pub struct WireOn {
    /// The interface's index.
    index: u32,
    /// Out, in.
    links: [Link; 2],
}

/// A flow that another process has left on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Its number.
    pub id: WireId,
    /// It was not there yet: its sockets have gone with their process, and with them bytes that they had taken.
    pub is_joining: bool,
    /// The ends of packets from each side, the client first: source and destination.
    pub ends: [(SocketAddr, SocketAddr); 2],
    /// Of each side, the sequence number after the last byte that was passed on by user space.
    pub next: [u32; 2],
}

/// Memory for entries is taken one by one (`BPF_F_NO_PREALLOC`).
const ONE_BY_ONE: u32 = 1;

/// The shapes of the maps.
fn shapes(flows_max: u32) -> [MapShape; 3] {
    let flows_max = flows_max.clamp(1, 1 << 20);
    let shape = |kind, name, key_bytes, value_bytes, entries_max| MapShape {
        kind,
        name,
        key_bytes,
        value_bytes,
        entries_max,
    };
    [
        shape(MapKind::Array, "wires", 4, wire_at::SIZE, flows_max),
        shape(MapKind::Hash, "wire_ends", wire_key::SIZE, 4, flows_max * 2),
        shape(MapKind::Hash, "wire_notes", 4, NOTE_BYTES, flows_max),
    ]
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn key(remote: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let key = [octets(remote.ip()), octets(local.ip())].concat();
    let ports = [remote.port().to_ne_bytes(), local.port().to_ne_bytes()].concat();
    debug_assert_eq!(key.len() + ports.len(), wire_key::SIZE, "as in wire.h");
    [key, ports].concat()
}

impl WireMemory {
    /// Makes room for `flows_max` flows, 1 to 2^20.
    ///
    /// # Errors
    /// EPERM without CAP_BPF, ENOMEM.
    pub fn new(flows_max: u32) -> Result<Self, BpfError> {
        let [wires, ends, notes] = shapes(flows_max);
        Ok(Self {
            wires: Shared::new(wires.name, wires.value_bytes, wires.entries_max).map_err(BpfError::Map)?,
            ends: Map::create(ends).map_err(BpfError::Map)?,
            notes: Map::create_with(notes, ONE_BY_ONE).map_err(BpfError::Map)?,
            free: Mutex::new((0..wires.entries_max).rev().collect()),
            programs: OnceLock::new(),
        })
    }

    /// Attaches the programs to the interface with this index, in this thread's network namespace. Packets of flows on the wire
    /// that come in there are passed on.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN, and for the first interface without CAP_BPF; EINVAL before Linux 6.6.
    pub fn attach(&self, index: u32) -> Result<WireOn, BpfError> {
        let [out, into] = self.programs()?;
        let attach = |program: &Program, hook| {
            program.attach(index, hook).map_err(|source| BpfError::Attach { index, hook, source })
        };
        Ok(WireOn { index, links: [attach(out, Hook::TcxEgress)?, attach(into, Hook::TcxIngress)?] })
    }

    /// Loads the program for packets that come in, for trials.
    ///
    /// # Errors
    /// The kernel's reason to refuse it.
    pub fn program(&self) -> Result<Program, BpfError> {
        self.load("tc/wire")
    }

    /// The same for packets that go out.
    ///
    /// # Errors
    /// The kernel's reason to refuse it.
    pub fn program_out(&self) -> Result<Program, BpfError> {
        self.load("tc/wire_out")
    }

    fn programs(&self) -> Result<&[Program; 2], BpfError> {
        if let Some(programs) = self.programs.get() {
            return Ok(programs);
        }
        let programs = [self.load("tc/wire_out")?, self.load("tc/wire")?];
        Ok(self.programs.get_or_init(|| programs))
    }

    fn load(&self, name: &str) -> Result<Program, BpfError> {
        load::program(WIRE, name, ProgramKind::Tc, &[self.wires.map(), &self.ends])
    }

    /// Lets the memory outlive this process, by names in this folder. It ends when they are removed.
    ///
    /// # Errors
    /// EEXIST if something is there.
    pub fn pin(&self, pins: &Pins) -> io::Result<()> {
        let folder = pins.of_format();
        std::fs::create_dir(&folder)?;
        for map in [self.wires.map(), &self.ends, &self.notes] {
            map.pin(&folder.join(map.shape().name))?;
        }
        Ok(())
    }

    /// Takes over what another process has left in this folder: the memory, the programs on interfaces, and the flows. The
    /// programs are replaced by those of this process.
    ///
    /// # Errors
    /// `NotFound` if nothing is there; `InvalidData` if it has another shape; EPERM without CAP_BPF.
    pub fn adopt(pins: &Pins) -> io::Result<(Self, Vec<WireOn>, Vec<Adopted>)> {
        let folder = pins.of_format();
        let [wires, ends, notes] = shapes(1).map(|shape| Map::pinned(&folder.join(shape.name), shape));
        let memory = Self {
            wires: Shared::of(wires?)?,
            ends: ends?,
            notes: notes?,
            free: Mutex::default(),
            programs: OnceLock::new(),
        };
        let mut on = Vec::new();
        for entry in std::fs::read_dir(&folder)? {
            let path = folder.join(entry?.file_name());
            let Some(("out", index)) = pins::interface_of(&path) else { continue };
            let beside = folder.join(format!("in-{index}"));
            match [&path, &beside].map(|path| Link::pinned(path)) {
                [Ok(out), Ok(into)] if out.interface().is_ok_and(|at| at == index) => {
                    let programs = memory.programs().map_err(io::Error::other)?;
                    out.replace(&programs[0])?;
                    into.replace(&programs[1])?;
                    on.push(WireOn { index, links: [out, into] });
                }
                // The interface is gone.
                _ => [path, beside].iter().for_each(|path| drop(std::fs::remove_file(path))),
            }
        }
        let found = memory.found(&[]);
        Ok((memory, on, found))
    }

    /// The flows that are there; the other places are free. Another process still has those in the places `but`.
    fn found(&self, but: &[u32]) -> Vec<Adopted> {
        let mut found = Vec::new();
        lock(&self.free).clear();
        for number in (0..self.wires.map().shape().entries_max).rev() {
            let id = WireId(number);
            match self.wires.u32(Self::at(id) + wire_at::STATE).load(Acquire) {
                _ if but.contains(&number) => {}
                WIRE_FREE => lock(&self.free).push(number),
                // Its sockets have ended with their process, and have told their peers.
                WIRE_LEAVING => drop(self.remove(id)),
                WIRE_HELD => {
                    self.go_on(id);
                    found.push(self.adopted(id, false));
                }
                state => found.push(self.adopted(id, state == WIRE_JOINING)),
            }
        }
        found
    }

    fn adopted(&self, id: WireId, is_joining: bool) -> Adopted {
        let next = [0, 1].map(|side| self.wires.u32(Self::more(id, side) + wire_more::NEXT).load(Relaxed));
        Adopted { id, is_joining, ends: self.ends(id), next }
    }

    /// Stores what user space knows of a flow.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn note(&self, id: WireId, note: &[u8; NOTE_BYTES]) -> io::Result<()> {
        self.notes.put(&id.0.to_ne_bytes(), note)
    }

    /// Returns what was stored of a flow, if something was.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn noted(&self, id: WireId) -> io::Result<Option<Vec<u8>>> {
        self.notes.look_up(&id.0.to_ne_bytes())
    }

    /// Forgets what was stored of a flow.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn forget_note(&self, id: WireId) -> io::Result<()> {
        self.notes.remove(&id.0.to_ne_bytes()).map(drop)
    }

    /// The ends of packets from each side, the client first: source and destination.
    pub fn ends(&self, id: WireId) -> [(SocketAddr, SocketAddr); 2] {
        [0, 1].map(|side| ends_of(&self.wires, Self::side(id, side)))
    }

    /// The index of the interface towards a side.
    pub fn egress(&self, id: WireId, side: usize) -> u32 {
        self.wires.u32(Self::side(id, side) + flow_side::EGRESS).load(Acquire)
    }

    const fn at(id: WireId) -> usize {
        id.0 as usize * wire_at::SIZE
    }

    const fn side(id: WireId, side: usize) -> usize {
        Self::at(id) + wire_at::SIDE + side * flow_side::SIZE
    }

    const fn more(id: WireId, side: usize) -> usize {
        Self::at(id) + wire_at::MORE + side * wire_more::SIZE
    }

    /// Passes packets of both sides (client, server) on from now on, while both sockets go on; `None` if there is no room.
    ///
    /// # Errors
    /// EEXIST if there is a flow between these ends.
    pub fn join(&self, sides: &[Side; 2]) -> Result<Option<WireId>, BpfError> {
        let Some(number) = lock(&self.free).pop() else { return Ok(None) };
        let id = WireId(number);
        let [client, server] = sides;
        for (side, own, other) in [(0, client, server), (1, server, client)] {
            let offloaded = [own, other].map(offload_side);
            write_side(&self.wires, Self::side(id, side), &offloaded[0], &offloaded[1]);
            for (word, value) in [
                // What still lies between the sockets is written after this, and waits then.
                (wire_more::AWAITS, 1),
                (wire_more::LIMIT, own.written),
                (wire_more::EXPECTS, own.expects),
                (wire_more::CLOCK, own.clock),
                (wire_more::STAMPED, 0),
                (wire_more::DROPPED, 0),
                (wire_more::NEXT, own.next),
            ] {
                self.wires.u32(Self::more(id, side) + word).store(value, Relaxed);
            }
        }
        self.wires.u32(Self::at(id) + wire_at::WHY).store(0, Relaxed);
        self.wires.u32(Self::at(id) + wire_at::AGREED).store(back::agreed(client.options), Relaxed);
        self.wires.u32(Self::at(id) + wire_at::STATE).store(WIRE_JOINING, Release);
        for (side, own) in [(0, client), (1, server)] {
            let entry = (number << 1 | side).to_ne_bytes();
            if let Err(error) = self.ends.insert(&key(own.remote, own.local), &entry) {
                if side == 1 {
                    let _ = self.ends.remove(&key(client.remote, client.local));
                }
                self.wires.u32(Self::at(id) + wire_at::STATE).store(WIRE_FREE, Release);
                lock(&self.free).push(number);
                return Err(BpfError::Map(error));
            }
        }
        Ok(Some(id))
    }

    /// No byte of this side comes to our socket any more: it expects this number next.
    pub fn expects(&self, id: WireId, side: usize, expects: u32) {
        self.wires.u32(Self::more(id, side) + wire_more::EXPECTS).store(expects, Release);
        let sent = self.wires.u64(Self::side(id, side) + flow_side::SENT);
        let ahead = |old: u64| old + u64::from(expects.wrapping_sub(old as u32));
        let is_ahead = |old: u64| expects.wrapping_sub(old as u32).cast_signed() > 0;
        // It fails if the program is ahead, which is fine.
        let _ = sent.fetch_update(AcqRel, Acquire, |old| is_ahead(old).then(|| ahead(old)));
    }

    /// This side's FIN came to our socket, and user space has passed it on: `number` comes after it. Call it once per side, after
    /// [`Self::expects`].
    pub fn finished(&self, id: WireId, side: usize, number: u32) {
        let word = |side, word| self.wires.u32(Self::side(id, side) + word);
        word(side, flow_side::FIN).store(number, Relaxed);
        word(side, flow_side::FINS).fetch_or(FIN_SEEN, AcqRel);
        // The program has not known it, if the other side has acknowledged it before.
        let of_other = word(side ^ 1, flow_side::ACKNOWLEDGED).load(Acquire);
        let acknowledged = of_other.wrapping_sub(word(side, flow_side::ADD).load(Relaxed));
        if acknowledged.wrapping_sub(number).cast_signed() < 0 {
            return;
        }
        word(side, flow_side::FINS).fetch_or(FIN_ACKED, AcqRel);
        if word(side ^ 1, flow_side::FINS).fetch_or(0, AcqRel) & FIN_ACKED != 0 {
            let of_flow = |word| self.wires.u32(Self::at(id) + word);
            if of_flow(wire_at::WHY).compare_exchange(0, WIRE_FINISHED, AcqRel, Relaxed).is_ok() {
                of_flow(wire_at::STATE).store(WIRE_ENDED, Release);
            }
        }
    }

    /// Our socket towards this side has no acknowledgement to wait for any more.
    pub fn settled(&self, id: WireId, side: usize) {
        self.wires.u32(Self::more(id, side) + wire_more::AWAITS).store(0, Release);
    }

    /// A packet came late to a socket: both get copies again. False if the flow has ended already.
    pub fn unsettled(&self, id: WireId) -> bool {
        for side in [0, 1] {
            self.wires.u32(Self::more(id, side) + wire_more::AWAITS).store(1, Release);
        }
        let state = self.wires.u32(Self::at(id) + wire_at::STATE);
        state.compare_exchange(WIRE_WIRED, WIRE_JOINING, Release, Relaxed).is_ok()
            || state.load(Relaxed) == WIRE_JOINING
    }

    /// Both sockets owe nothing any more: no copy goes to them from now on. Close them some milliseconds later: a copy may be
    /// on its way. False if the flow has ended already, which changes nothing about that.
    pub fn wired(&self, id: WireId) -> bool {
        let state = self.wires.u32(Self::at(id) + wire_at::STATE);
        state.compare_exchange(WIRE_JOINING, WIRE_WIRED, Release, Relaxed).is_ok()
    }

    /// Why it has ended, if it has.
    pub fn ended(&self, id: WireId) -> Option<WireEnd> {
        let word = |word| self.wires.u32(Self::at(id) + word).load(Acquire);
        if word(wire_at::STATE) != WIRE_ENDED {
            return None;
        }
        match word(wire_at::WHY) {
            WIRE_FINISHED => Some(WireEnd::Finished),
            WIRE_RESET_BY_CLIENT => Some(WireEnd::ClientReset),
            WIRE_RESET_BY_SERVER => Some(WireEnd::ServerReset),
            WIRE_REUSED => Some(WireEnd::Reused),
            _ => None,
        }
    }

    /// Returns the state of both sides, the client first.
    pub fn look(&self, id: WireId) -> [WireSeen; 2] {
        [0, 1].map(|side| {
            let word = |word| self.wires.u32(Self::side(id, side) + word).load(Acquire);
            let double = |word| self.wires.u64(Self::side(id, side) + word).load(Acquire);
            let (fins, sent) = (word(flow_side::FINS), double(flow_side::SENT));
            WireSeen {
                standing: Standing {
                    sent: sent as u32,
                    acknowledged: word(flow_side::ACKNOWLEDGED),
                    edge: word(flow_side::EDGE),
                    stamp: word(flow_side::STAMP),
                },
                sent,
                packets: word(flow_side::PACKETS),
                dropped: self.wires.u32(Self::more(id, side) + wire_more::DROPPED).load(Acquire),
                finished: fins & FIN_SEEN != 0,
                last_ns: double(flow_side::LAST_NS),
            }
        })
    }

    /// Packets for this side leave by the interface with this index from now on.
    pub fn leads(&self, id: WireId, side: usize, egress: u32) {
        self.wires.u32(Self::side(id, side) + flow_side::EGRESS).store(egress, Release);
    }

    /// Removes the flow. Packets that come after it meet the kernel's own TCP, which resets them.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn remove(&self, id: WireId) -> Result<(), BpfError> {
        for side in [0, 1] {
            let (remote, local) = ends_of(&self.wires, Self::side(id, side));
            self.ends.remove(&key(remote, local)).map_err(BpfError::Map)?;
        }
        self.notes.remove(&id.0.to_ne_bytes()).map_err(BpfError::Map)?;
        self.wires.u32(Self::at(id) + wire_at::STATE).store(WIRE_FREE, Release);
        lock(&self.free).push(id.0);
        Ok(())
    }
}

impl WireOn {
    /// The interface's index.
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Lets the programs outlive this process, by names in this folder.
    ///
    /// # Errors
    /// EEXIST if those of an interface with this index are there; `NotFound` if the memory is not there.
    pub fn pin(&self, pins: &Pins) -> io::Result<()> {
        for (hook, link) in ["out", "in"].into_iter().zip(&self.links) {
            let path = pins.of_format().join(format!("{hook}-{}", self.index));
            // One of an interface that is gone: its index may be used again.
            let _ = std::fs::remove_file(&path);
            link.pin(&path)?;
        }
        Ok(())
    }
}

fn offload_side(side: &Side) -> OffloadSide {
    OffloadSide {
        remote: side.remote,
        local: side.local,
        add: side.add,
        stamp_add: 0,
        stamp_first: 0,
        egress: side.egress,
        to: [0; 6],
        from: [0; 6],
        mss: side.mss,
        shift: side.shift,
        shown_shift: side.shown_shift,
        finished: false,
        standing: Standing { sent: side.expects, acknowledged: side.acknowledged, edge: side.edge, stamp: 0 },
    }
}
