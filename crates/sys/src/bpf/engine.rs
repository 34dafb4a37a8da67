//! Tells the programs of `bpf/engine.bpf.c` which packets belong to the packet engine, and loads and attaches
//! them.

use super::layout::engine::{SCRATCH, SHARED, listen_key, settings, source};
use super::load::{self, BpfError};
use super::{Cookies, DecidedMemory, ENGINE, Hook, Link, Map, MapKind, OffloadMemory, Program, ProgramKind};
use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// At most this many addresses with a port to listen on, and at most this many source addresses towards
/// servers.
const ENTRIES_MAX: u32 = 1024;

/// The engine's addresses and ports, in maps that the programs read.
#[derive(Debug)]
pub struct Own {
    listens: Map,
    sources: Map,
    settings: Map,
    scratches: Map,
    offload: Option<Arc<OffloadMemory>>,
    cookies: Option<Arc<Cookies>>,
    decided: Option<Arc<DecidedMemory>>,
}

/// A program that keeps the engine's packets of one interface from the kernel's TCP, until this is dropped.
#[derive(Debug)]
pub struct OwnOn {
    _link: Link,
}

/// A program that hands the engine's frames of one interface to AF_XDP sockets, until this is dropped. Frames
/// of a queue without a socket go to the kernel.
#[derive(Debug)]
pub struct XdpOn {
    sockets: Map,
    _program: Program,
    _link: Link,
}

/// An address in the 16 bytes of `bpf/engine.h`; `None` stands for every address.
fn address(ip: Option<IpAddr>) -> [u8; 16] {
    match ip {
        None => [0; 16],
        Some(IpAddr::V4(ip)) => ip.to_ipv6_mapped().octets(),
        Some(IpAddr::V6(ip)) => Ipv6Addr::octets(&ip),
    }
}

impl Own {
    /// Makes empty maps for an engine with this number of workers: no packet is the engine's yet. `block` is
    /// the number of source ports that each worker owns where workers share addresses.
    ///
    /// # Errors
    /// EPERM without CAP_BPF.
    pub fn new(workers: u32, block: u32) -> Result<Self, BpfError> {
        let own = Self {
            listens: load::map("listens", MapKind::Hash, listen_key::SIZE, 4, ENTRIES_MAX)?,
            sources: load::map("sources", MapKind::Hash, 16, source::SIZE, ENTRIES_MAX)?,
            settings: load::map("settings", MapKind::Array, 4, settings::SIZE, 1)?,
            scratches: load::map("scratches", MapKind::PerCpuArray, 4, SCRATCH as usize, 1)?,
            offload: None,
            cookies: None,
            decided: None,
        };
        let value = [workers.to_ne_bytes(), block.to_ne_bytes()].concat();
        own.settings.put(&[0; 4], &value).map_err(BpfError::Map)?;
        Ok(own)
    }

    /// Adds an address and port to listen on; `None` stands for every address.
    ///
    /// # Errors
    /// E2BIG if there are too many.
    pub fn listen(&self, ip: Option<IpAddr>, port: u16) -> Result<(), BpfError> {
        let key = [&address(ip)[..], &port.to_ne_bytes(), &[0; 2]].concat();
        self.listens.put(&key, &1_u32.to_ne_bytes()).map_err(BpfError::Map)
    }

    /// Adds source ports of an address for connections to servers. They belong to one worker, or each worker
    /// owns a block of them.
    ///
    /// # Errors
    /// E2BIG if there are too many.
    pub fn source(
        &self,
        ip: IpAddr,
        ports: &RangeInclusive<u16>,
        worker: Option<u32>,
    ) -> Result<(), BpfError> {
        let [first, last] = [*ports.start(), *ports.end()].map(u16::to_ne_bytes);
        let value = [&first[..], &last, &worker.unwrap_or(SHARED).to_ne_bytes()].concat();
        self.sources.put(&address(Some(ip)), &value).map_err(BpfError::Map)
    }

    /// Offloads connections by tc: the programs for packet sockets and tc that are loaded from now on forward
    /// the packets of offloaded connections.
    ///
    /// # Errors
    /// The kernel's reason to refuse those programs; the plain programs stay in use then.
    pub fn try_offload(&mut self, offload: &Arc<OffloadMemory>) -> Result<(), BpfError> {
        self.offload = Some(offload.clone());
        let tried = self.socket_filter().and_then(|_| self.load("tc/offload", ProgramKind::Tc, None));
        if tried.is_err() {
            self.offload = None;
        }
        tried.map(drop)
    }

    /// Offloads connections by XDP, likewise.
    ///
    /// # Errors
    /// As [`Own::try_offload`].
    pub fn try_offload_by_xdp(&mut self, offload: &Arc<OffloadMemory>) -> Result<(), BpfError> {
        self.offload = Some(offload.clone());
        let tried = self.try_xdp();
        if tried.is_err() {
            self.offload = None;
        }
        tried
    }

    /// Answers SYNs with cookies in the XDP programs that are loaded from now on, except in those for decided
    /// connections.
    ///
    /// # Errors
    /// As [`Own::try_offload`].
    pub fn try_cookies(&mut self, cookies: &Arc<Cookies>) -> Result<(), BpfError> {
        self.cookies = Some(cookies.clone());
        let tried = self.try_xdp();
        if tried.is_err() {
            self.cookies = None;
        }
        tried
    }

    /// Handles decided connections in the XDP programs that are loaded from now on.
    ///
    /// # Errors
    /// The kernel's reason to refuse that program; the plain program stays in use then.
    pub fn try_decided(&mut self, decided: &Arc<DecidedMemory>) -> Result<(), BpfError> {
        self.decided = Some(decided.clone());
        let tried = self.try_xdp();
        if tried.is_err() {
            self.decided = None;
        }
        tried
    }

    fn try_xdp(&self) -> Result<(), BpfError> {
        let sockets = load::map("sockets", MapKind::Xsk, 4, 4, 1)?;
        self.xdp_program(&sockets).map(drop)
    }

    /// Loads the program of [`Own::take_by_xdp`] without attaching it, for trials.
    ///
    /// # Errors
    /// The kernel's reason to refuse it.
    pub fn xdp_program(&self, sockets: &Map) -> Result<Program, BpfError> {
        let name = match (&self.decided, &self.offload, &self.cookies) {
            (None, None, None) => "xdp/own",
            (None, None, Some(_)) => "xdp/own_cookie",
            (None, Some(_), None) => "xdp/offload",
            (None, Some(_), Some(_)) => "xdp/offload_cookie",
            (Some(_), None, _) => "xdp/decided",
            (Some(_), Some(_), _) => "xdp/both",
        };
        self.load(name, ProgramKind::Xdp, Some(sockets))
    }

    fn load(&self, name: &str, kind: ProgramKind, more: Option<&Map>) -> Result<Program, BpfError> {
        let offload_maps = self.offload.iter().flat_map(|offload| offload.maps());
        let decided_maps = self.decided.iter().flat_map(|decided| decided.maps());
        let maps: Vec<&Map> = [&self.listens, &self.sources, &self.settings, &self.scratches]
            .into_iter()
            .chain(more)
            .chain(offload_maps)
            .chain(decided_maps)
            .chain(self.cookies.as_ref().map(|cookies| cookies.map()))
            .collect();
        load::program(ENGINE, name, kind, &maps)
    }

    /// Loads the filter of a packet socket. It accepts the engine's packets, except those that
    /// [`Own::keep_from_kernel`] forwards.
    ///
    /// # Errors
    /// The kernel's reason to refuse it.
    pub fn socket_filter(&self) -> Result<Program, BpfError> {
        let name = if self.offload.is_some() { "socket/offload" } else { "socket/own" };
        self.load(name, ProgramKind::SocketFilter, None)
    }

    /// Loads the program that chooses a packet's socket in a fanout group: that of the packet's worker.
    ///
    /// # Errors
    /// The kernel's reason to refuse it.
    pub fn fanout(&self) -> Result<Program, BpfError> {
        self.load("socket/worker", ProgramKind::SocketFilter, None)
    }

    /// Keeps the engine's packets that come in by the interface with this index from the kernel's own TCP,
    /// which would answer them with resets. Packet sockets still see them. Forwards packets of offloaded
    /// connections that the sockets' filter has left out.
    ///
    /// # Errors
    /// EINVAL before Linux 6.6.
    pub fn keep_from_kernel(&self, index: u32) -> Result<OwnOn, BpfError> {
        let name = if self.offload.is_some() { "tc/offload" } else { "tc/own" };
        let program = self.load(name, ProgramKind::Tc, None)?;
        let hook = Hook::TcxIngress;
        let link = program.attach(index, hook).map_err(|source| BpfError::Attach { index, hook, source })?;
        Ok(OwnOn { _link: link })
    }

    /// Hands the engine's frames that come in by the interface with this index to the sockets that
    /// [`XdpOn::serve`] names.
    ///
    /// # Errors
    /// EBUSY if another XDP program is there; EOPNOTSUPP if the driver has no XDP: then [`Hook::XdpGeneric`] does it.
    pub fn take_by_xdp(&self, index: u32, hook: Hook, queues: u32) -> Result<XdpOn, BpfError> {
        let sockets = load::map("sockets", MapKind::Xsk, 4, 4, queues)?;
        let program = self.xdp_program(&sockets)?;
        let link = program.attach(index, hook).map_err(|source| BpfError::Attach { index, hook, source })?;
        Ok(XdpOn { sockets, _program: program, _link: link })
    }
}

impl XdpOn {
    /// Hands the frames of this receive queue to a socket that is bound to it.
    ///
    /// # Errors
    /// EINVAL if there is no such queue.
    pub fn serve(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        let fd = socket.as_raw_fd().to_ne_bytes();
        self.sockets.put(&queue.to_ne_bytes(), &fd).map_err(BpfError::Map)
    }
}
