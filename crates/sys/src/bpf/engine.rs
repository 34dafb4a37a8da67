//! Which packets are the packet engine's, as `bpf/engine.bpf.c` asks it in four places.

use super::load::{self, BpfError};
use super::{Answers, ENGINE, Hook, Lending, Link, Map, MapKind, Plane, Program, ProgramKind};
use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// Most addresses with a port where clients connect, and most addresses of our own towards servers.
const ENTRIES_MAX: u32 = 1024;

/// `SCRATCH` of `bpf/whole.bpf.h`.
const SCRATCH: usize = 4096;

/// `SHARED` of `bpf/engine.h`.
const SHARED: u32 = u32::MAX;

/// The engine's addresses and ports, for the programs that look for them.
#[derive(Debug)]
pub struct Own {
    listens: Map,
    sources: Map,
    settings: Map,
    scratches: Map,
    lending: Option<Arc<Lending>>,
    answers: Option<Arc<Answers>>,
    plane: Option<Arc<Plane>>,
}

/// The engine's packets on one interface, kept from the kernel's own TCP until this is dropped.
#[derive(Debug)]
pub struct OwnOn {
    _link: Link,
}

/// The engine's frames on one interface, given to AF_XDP sockets until this is dropped. Frames of a queue without a socket
/// go to the kernel.
#[derive(Debug)]
pub struct XdpOn {
    sockets: Map,
    _program: Program,
    _link: Link,
}

/// An address in 16 bytes, as `bpf/engine.h` has it; none: every address.
fn address(ip: Option<IpAddr>) -> [u8; 16] {
    match ip {
        None => [0; 16],
        Some(IpAddr::V4(ip)) => ip.to_ipv6_mapped().octets(),
        Some(IpAddr::V6(ip)) => Ipv6Addr::octets(&ip),
    }
}

impl Own {
    /// Nobody's packets yet, of an engine with so many workers. `block` is how many source ports each of them owns where
    /// they share addresses.
    ///
    /// # Errors
    /// EPERM without CAP_BPF.
    pub fn new(workers: u32, block: u32) -> Result<Self, BpfError> {
        let own = Self {
            listens: load::map("listens", MapKind::Hash, 20, 4, ENTRIES_MAX)?,
            sources: load::map("sources", MapKind::Hash, 16, 8, ENTRIES_MAX)?,
            settings: load::map("settings", MapKind::Array, 4, 8, 1)?,
            scratches: load::map("scratches", MapKind::PerCpuArray, 4, SCRATCH, 1)?,
            lending: None,
            answers: None,
            plane: None,
        };
        let value = [workers.to_ne_bytes(), block.to_ne_bytes()].concat();
        own.settings.put(&[0; 4], &value).map_err(BpfError::Map)?;
        Ok(own)
    }

    /// Clients connect to this port of this address, or of every address.
    ///
    /// # Errors
    /// E2BIG if there are too many.
    pub fn listen(&self, ip: Option<IpAddr>, port: u16) -> Result<(), BpfError> {
        let key = [&address(ip)[..], &port.to_ne_bytes(), &[0; 2]].concat();
        self.listens.put(&key, &1_u32.to_ne_bytes()).map_err(BpfError::Map)
    }

    /// Connections to servers come from these ports of this address: all of one worker, or a block for each.
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

    /// Has the programs of packet sockets and tc that are loaded from now on pass on the packets of connections that are lent to
    /// them.
    ///
    /// # Errors
    /// What the kernel has against the programs that do that; then the others stay in use.
    pub fn try_lending(&mut self, lending: &Arc<Lending>) -> Result<(), BpfError> {
        self.lending = Some(lending.clone());
        let tried = self.socket_filter().and_then(|_| self.load("tc/rest", ProgramKind::Tc, None));
        if tried.is_err() {
            self.lending = None;
        }
        tried.map(drop)
    }

    /// The same for XDP programs.
    ///
    /// # Errors
    /// As [`Own::try_lending`].
    pub fn try_lending_by_xdp(&mut self, lending: &Arc<Lending>) -> Result<(), BpfError> {
        self.lending = Some(lending.clone());
        let tried = self.try_xdp();
        if tried.is_err() {
            self.lending = None;
        }
        tried
    }

    /// Has the XDP programs that are loaded from now on answer SYNs, but those that carry whole connections.
    ///
    /// # Errors
    /// As [`Own::try_lending`].
    pub fn try_answering(&mut self, answers: &Arc<Answers>) -> Result<(), BpfError> {
        self.answers = Some(answers.clone());
        let tried = self.try_xdp();
        if tried.is_err() {
            self.answers = None;
        }
        tried
    }

    /// Has the XDP programs that are loaded from now on carry whole connections.
    ///
    /// # Errors
    /// What the kernel has against the program that does that; then the other stays in use.
    pub fn try_plane(&mut self, plane: &Arc<Plane>) -> Result<(), BpfError> {
        self.plane = Some(plane.clone());
        let tried = self.try_xdp();
        if tried.is_err() {
            self.plane = None;
        }
        tried
    }

    fn try_xdp(&self) -> Result<(), BpfError> {
        let sockets = load::map("sockets", MapKind::Xsk, 4, 4, 1)?;
        self.xdp_program(&sockets).map(drop)
    }

    /// The program of [`Own::take_by_xdp`], for trials.
    ///
    /// # Errors
    /// What the kernel has against it.
    pub fn xdp_program(&self, sockets: &Map) -> Result<Program, BpfError> {
        let name = match (&self.plane, &self.lending, &self.answers) {
            (None, None, None) => "xdp/own",
            (None, None, Some(_)) => "xdp/own_answer",
            (None, Some(_), None) => "xdp/rest",
            (None, Some(_), Some(_)) => "xdp/rest_answer",
            (Some(_), None, _) => "xdp/plane",
            (Some(_), Some(_), _) => "xdp/both",
        };
        self.load(name, ProgramKind::Xdp, Some(sockets))
    }

    fn load(&self, name: &str, kind: ProgramKind, more: Option<&Map>) -> Result<Program, BpfError> {
        let lent = self.lending.iter().flat_map(|lending| lending.maps());
        let carried = self.plane.iter().flat_map(|plane| plane.maps());
        let maps: Vec<&Map> = [&self.listens, &self.sources, &self.settings, &self.scratches]
            .into_iter()
            .chain(more)
            .chain(lent)
            .chain(carried)
            .chain(self.answers.as_ref().map(|answers| answers.map()))
            .collect();
        load::program(ENGINE, name, kind, &maps)
    }

    /// The filter of a packet socket: the engine's packets only, and of these not what [`Own::keep_from_kernel`] passes on.
    ///
    /// # Errors
    /// What the kernel has against it.
    pub fn socket_filter(&self) -> Result<Program, BpfError> {
        let name = if self.lending.is_some() { "socket/rest" } else { "socket/own" };
        self.load(name, ProgramKind::SocketFilter, None)
    }

    /// Chooses the packet socket of a fanout group: that of the worker whose packet it is.
    ///
    /// # Errors
    /// What the kernel has against it.
    pub fn fanout(&self) -> Result<Program, BpfError> {
        self.load("socket/worker", ProgramKind::SocketFilter, None)
    }

    /// Keeps the engine's packets that come in by the interface with this index from the kernel's own TCP, which would
    /// answer them with resets. Packet sockets still see them. What their filter has left of lent connections is passed on.
    ///
    /// # Errors
    /// EINVAL before Linux 6.6.
    pub fn keep_from_kernel(&self, index: u32) -> Result<OwnOn, BpfError> {
        let name = if self.lending.is_some() { "tc/rest" } else { "tc/own" };
        let program = self.load(name, ProgramKind::Tc, None)?;
        let hook = Hook::TcxIngress;
        let link = program.attach(index, hook).map_err(|source| BpfError::Attach { index, hook, source })?;
        Ok(OwnOn { _link: link })
    }

    /// Takes the engine's frames that come in by the interface with this index, for sockets that [`XdpOn::serve`] names.
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
    /// Gives the frames of this receive queue to a socket that is bound to it.
    ///
    /// # Errors
    /// EINVAL if there is no such queue.
    pub fn serve(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        let fd = socket.as_raw_fd().to_ne_bytes();
        self.sockets.put(&queue.to_ne_bytes(), &fd).map_err(BpfError::Map)
    }
}
