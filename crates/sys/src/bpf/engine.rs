//! Which packets are the packet engine's, as `bpf/engine.bpf.c` asks it in four places.

use super::{
    ENGINE, Hook, Link, LoadError, Map, MapKind, MapShape, Object, ObjectError, Program, ProgramKind,
};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The licence of `bpf/engine.bpf.c`, as the kernel wants to hear it.
const LICENSE: &str = "Dual MIT/GPL";

/// Most addresses with a port where clients connect, and most addresses of our own towards servers.
const ENTRIES_MAX: u32 = 1024;

/// `SHARED` of `bpf/engine.h`.
const SHARED: u32 = u32::MAX;

/// Why the kernel is not told which packets are the engine's.
#[derive(Debug, thiserror::Error)]
pub enum OwnError {
    /// The object was built wrong.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A program was refused.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A map could not be made or written.
    #[error("a BPF map: {0}")]
    Map(#[source] io::Error),
    /// A program could not be attached.
    #[error("the interface with index {index} takes no program on {hook:?}: {source}")]
    Attach {
        /// The interface.
        index: u32,
        /// The hook.
        hook: Hook,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The engine's addresses and ports, for the programs that look for them.
#[derive(Debug)]
pub struct Own {
    listens: Map,
    sources: Map,
    settings: Map,
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
    pub fn new(workers: u32, block: u32) -> Result<Self, OwnError> {
        let map = |name, kind, key_bytes, value_bytes, entries_max| {
            Map::create(MapShape { kind, name, key_bytes, value_bytes, entries_max }).map_err(OwnError::Map)
        };
        let own = Self {
            listens: map("listens", MapKind::Hash, 20, 4, ENTRIES_MAX)?,
            sources: map("sources", MapKind::Hash, 16, 8, ENTRIES_MAX)?,
            settings: map("settings", MapKind::Array, 4, 8, 1)?,
        };
        let value = [workers.to_ne_bytes(), block.to_ne_bytes()].concat();
        own.settings.put(&[0; 4], &value).map_err(OwnError::Map)?;
        Ok(own)
    }

    /// Clients connect to this port of this address, or of every address.
    ///
    /// # Errors
    /// E2BIG if there are too many.
    pub fn listen(&self, ip: Option<IpAddr>, port: u16) -> Result<(), OwnError> {
        let key = [&address(ip)[..], &port.to_ne_bytes(), &[0; 2]].concat();
        self.listens.put(&key, &1_u32.to_ne_bytes()).map_err(OwnError::Map)
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
    ) -> Result<(), OwnError> {
        let [first, last] = [*ports.start(), *ports.end()].map(u16::to_ne_bytes);
        let value = [&first[..], &last, &worker.unwrap_or(SHARED).to_ne_bytes()].concat();
        self.sources.put(&address(Some(ip)), &value).map_err(OwnError::Map)
    }

    fn load(&self, name: &str, kind: ProgramKind, more: Option<&Map>) -> Result<Program, OwnError> {
        let maps = [&self.listens, &self.sources, &self.settings].into_iter().chain(more);
        let maps: BTreeMap<_, _> = maps.map(|map| (map.shape().name, AsFd::as_fd(map).as_raw_fd())).collect();
        let code = Object::parse(ENGINE)?.program(name, &maps)?;
        Ok(Program::load(name, kind, &code, LICENSE)?)
    }

    /// The filter of a packet socket: the engine's packets only.
    ///
    /// # Errors
    /// What the kernel has against it.
    pub fn socket_filter(&self) -> Result<Program, OwnError> {
        self.load("socket/own", ProgramKind::SocketFilter, None)
    }

    /// Chooses the packet socket of a fanout group: that of the worker whose packet it is.
    ///
    /// # Errors
    /// What the kernel has against it.
    pub fn fanout(&self) -> Result<Program, OwnError> {
        self.load("socket/worker", ProgramKind::SocketFilter, None)
    }

    /// Keeps the engine's packets that come in by the interface with this index from the kernel's own TCP, which would
    /// answer them with resets. Packet sockets still see them.
    ///
    /// # Errors
    /// EINVAL before Linux 6.6.
    pub fn keep_from_kernel(&self, index: u32) -> Result<OwnOn, OwnError> {
        let program = self.load("tc/own", ProgramKind::Tc, None)?;
        let hook = Hook::TcxIngress;
        let link = program.attach(index, hook).map_err(|source| OwnError::Attach { index, hook, source })?;
        Ok(OwnOn { _link: link })
    }

    /// Takes the engine's frames that come in by the interface with this index, for sockets that [`XdpOn::serve`] names.
    ///
    /// # Errors
    /// EBUSY if another XDP program is there; EOPNOTSUPP if the driver has no XDP: then [`Hook::XdpGeneric`] does it.
    pub fn take_by_xdp(&self, index: u32, hook: Hook, queues: u32) -> Result<XdpOn, OwnError> {
        let shape = MapShape {
            kind: MapKind::Xsk,
            name: "sockets",
            key_bytes: 4,
            value_bytes: 4,
            entries_max: queues,
        };
        let sockets = Map::create(shape).map_err(OwnError::Map)?;
        let program = self.load("xdp/own", ProgramKind::Xdp, Some(&sockets))?;
        let link = program.attach(index, hook).map_err(|source| OwnError::Attach { index, hook, source })?;
        Ok(XdpOn { sockets, _program: program, _link: link })
    }
}

impl XdpOn {
    /// Gives the frames of this receive queue to a socket that is bound to it.
    ///
    /// # Errors
    /// EINVAL if there is no such queue.
    pub fn serve(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), OwnError> {
        let fd = socket.as_raw_fd().to_ne_bytes();
        self.sockets.put(&queue.to_ne_bytes(), &fd).map_err(OwnError::Map)
    }
}
