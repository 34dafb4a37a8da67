//! The shunt's flow table, and the program that looks packets up in it, attached to a set of interfaces.
#![allow(unsafe_code, reason = "works on memory that it shares with the kernel")]

use std::io;

use super::flow::{FLOW, FlowEntry, FlowKey, FlowState, KEY4, KEY6, SETTINGS, Settings};
use super::load::{self, BpfError};
use super::{Hook, Link, Map, MapKind, Program, ProgramKind, SHUNT};

/// At most this many interfaces of one fast path: the mark of the slow path has four bits for their number.
pub const PORTS_MAX: u32 = 16;

/// How packets get from one interface to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    /// Frames go out unchanged.
    Bridged,
    /// Packets are routed: link addresses and TTL are rewritten. The next hop is looked up in the kernel's
    /// tables, again every 10 ms.
    Routed,
}

/// An interface that the fast path is attached to.
#[derive(Debug)]
pub struct Port {
    /// Its index.
    pub index: u32,
    _link: Link,
}

/// A fast path. When it is dropped or its process ends, every packet takes the slow path again.
#[derive(Debug)]
pub struct FastPath {
    flows4: Map,
    flows6: Map,
    settings: Map,
    devices: Map,
    program: Program,
    ports: Vec<Port>,
}

/// Returns the monotonic clock, which the program reads too, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours to write; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned().saturating_mul(1_000_000_000).saturating_add(time.tv_nsec.cast_unsigned())
}

impl FastPath {
    /// Loads the program for tc or XDP with an empty table of at most `entries_max` entries for each IP
    /// version; a flow has two. It is attached to no interface yet, and no packet takes the fast path before
    /// [`FastPath::set`].
    ///
    /// # Errors
    /// Fails without CAP_BPF and CAP_NET_ADMIN, or if the kernel is older than Linux 5.12.
    pub fn new(kind: ProgramKind, forwarding: Forwarding, entries_max: u32) -> Result<Self, BpfError> {
        let flows4 = load::map("flows4", MapKind::Hash, KEY4, FLOW, entries_max)?;
        let flows6 = load::map("flows6", MapKind::Hash, KEY6, FLOW, entries_max)?;
        let settings = load::map("settings", MapKind::Array, 4, SETTINGS, 1)?;
        let devices = load::map("devices", MapKind::DeviceHash, 4, 4, PORTS_MAX)?;
        let name = match (kind, forwarding) {
            (ProgramKind::Tc, Forwarding::Bridged) => "tc/bridge",
            (ProgramKind::Tc, Forwarding::Routed) => "tc/route",
            (_, Forwarding::Bridged) => "xdp/bridge",
            (_, Forwarding::Routed) => "xdp/route",
        };
        let program = load::program(SHUNT, name, kind, &[&flows4, &flows6, &settings, &devices])?;
        Ok(Self { flows4, flows6, settings, devices, program, ports: Vec::new() })
    }

    /// Attaches the program to the interface with this index, in this thread's network namespace.
    ///
    /// # Errors
    /// Fails if the hook is in use or does not exist.
    pub fn attach(&mut self, index: u32, hook: Hook) -> Result<(), BpfError> {
        let attach = |source| BpfError::Attach { index, hook, source };
        let device = index.to_ne_bytes();
        // XDP sends frames to devices in this map; the index belongs to this thread's namespace.
        if hook != Hook::TcxIngress {
            self.devices.put(&device, &device).map_err(attach)?;
        }
        let link = self.program.attach(index, hook).map_err(attach)?;
        self.ports.push(Port { index, _link: link });
        Ok(())
    }

    /// Returns the interfaces that it is attached to.
    pub fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// Returns the program, for trials.
    pub const fn program(&self) -> &Program {
        &self.program
    }

    /// Sets the generation of the rules in force, and the time until which the program may use the table
    /// without hearing from us again.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn set(&self, generation: u32, alive_until_ns: u64) -> io::Result<()> {
        self.settings.put(&0u32.to_ne_bytes(), &Settings { generation, alive_until_ns }.to_bytes())
    }

    fn map(&self, key: &FlowKey) -> io::Result<(&Map, Vec<u8>)> {
        let bytes = key.to_bytes().ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "source and destination are of two IP versions")
        })?;
        Ok((if key.source.is_ipv4() { &self.flows4 } else { &self.flows6 }, bytes))
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// `AlreadyExists`; E2BIG if the table is full.
    pub fn install(&self, key: &FlowKey, entry: FlowEntry) -> io::Result<()> {
        let (map, bytes) = self.map(key)?;
        map.insert(&bytes, &entry.to_bytes(monotonic_ns()))
    }

    /// Removes an entry and returns its last state.
    ///
    /// # Errors
    /// What bpf(2) reports, except that the entry does not exist.
    pub fn take(&self, key: &FlowKey) -> io::Result<Option<FlowState>> {
        let (map, bytes) = self.map(key)?;
        Ok(map.take(&bytes)?.and_then(|value| FlowState::from_bytes(&value)))
    }

    /// Returns the current state of an entry.
    ///
    /// # Errors
    /// What bpf(2) reports, except that the entry does not exist.
    pub fn state(&self, key: &FlowKey) -> io::Result<Option<FlowState>> {
        let (map, bytes) = self.map(key)?;
        Ok(map.look_up(&bytes)?.and_then(|value| FlowState::from_bytes(&value)))
    }

    /// Calls `look` with every entry, in no order.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn for_each(&self, mut look: impl FnMut(FlowKey, FlowState)) -> io::Result<()> {
        for map in [&self.flows4, &self.flows6] {
            map.for_each(|key, value| {
                if let (Some(key), Some(state)) = (FlowKey::from_bytes(key), FlowState::from_bytes(value)) {
                    look(key, state);
                }
            })?;
        }
        Ok(())
    }
}
