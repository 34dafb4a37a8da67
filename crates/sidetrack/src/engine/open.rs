//! Opens what needs rights: sockets on the interfaces, and programs that tell the engine's packets from others.

use super::bell::Bell;
use super::coalesce::Coalescing;
use super::decided;
use super::driver::Driver;
use super::packet::PacketDriver;
use super::strays::{Ring, Strays};
use super::targets::Targets;
use super::xdp::{self, XdpDriver};
use crate::config::{EngineIo, EngineListener, Listener, ListenerKind};
use sidetrack_core::engine::{Share, Steering};
use sidetrack_sys::bpf::{BpfError, Cookies, DecidedMemory, Hook, OffloadMemory, Own, OwnOn, XdpOn};
use sidetrack_sys::link;
use sidetrack_sys::random;
use sidetrack_sys::raw::{PacketSocket, RoutedSocket, UnreachableSocket};
use sidetrack_sys::xsk::{self, Copying, Umem, XskSocket};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

/// An interface of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// Its link-layer address.
    pub address: [u8; 6],
    /// Largest IP packet it accepts, bytes.
    pub mtu: u32,
}

/// Why an engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// An interface does not exist.
    #[error("listener '{listener}': {error}; `ip link` lists the interfaces")]
    Interface {
        /// The listener.
        listener: Arc<str>,
        /// What the kernel said.
        error: sidetrack_sys::netlink::Error,
    },
    /// An interface has no link-layer address.
    #[error(
        "listener '{listener}': {interface} is not an Ethernet interface, and the engine speaks Ethernet only"
    )]
    NoEthernet {
        /// The listener.
        listener: Arc<str>,
        /// The interface.
        interface: String,
    },
    /// A worker would have no source address and port.
    #[error(
        "listener '{listener}': worker {} of {workers} would have no source for connections to servers; give more \
         `sources`, or more `source_ports` with steering = \"port\"",
        .worker + 1
    )]
    NoShare {
        /// The listener.
        listener: Arc<str>,
        /// The worker, from 0.
        worker: usize,
        /// The number of workers.
        workers: usize,
    },
    /// The kernel rejects the program.
    #[error("listener '{listener}': {error}")]
    Own {
        /// The listener.
        listener: Arc<str>,
        /// The kernel's error.
        error: BpfError,
    },
    /// The interfaces have different numbers of queues.
    #[error(
        "listener '{listener}': {interface} has {count} receive queues where another interface has {first}; a worker takes one \
         of each: set them equal (`ethtool -L {interface} combined {first}`)"
    )]
    Queues {
        /// The listener.
        listener: Arc<str>,
        /// The interface.
        interface: String,
        /// How many queues it has.
        count: u32,
        /// How many queues the first interface has.
        first: u32,
    },
    /// Packets would not fit into AF_XDP's frames.
    #[error(
        "listener '{listener}': {interface} takes packets of {mtu} bytes, and AF_XDP {max} at most: lower its MTU, or use \
         io = \"packet\"",
        max = xdp::MTU_MAX
    )]
    LargeMtu {
        /// The listener.
        listener: Arc<str>,
        /// The interface.
        interface: String,
        /// Its MTU.
        mtu: u32,
    },
    /// A socket could not be made.
    #[error("listener '{listener}': a socket on {interface}: {error}")]
    Socket {
        /// The listener.
        listener: Arc<str>,
        /// The interface.
        interface: String,
        /// What the kernel said.
        error: io::Error,
    },
}

/// One worker's part of an engine, ready to run.
#[derive(Debug)]
pub(super) struct Part {
    /// The listener.
    pub listener: Listener,
    /// The addresses and ports that connections to servers come from.
    pub share: Share,
    /// Largest packet that every interface accepts, bytes.
    pub mtu: u16,
    /// The driver that moves its frames.
    pub driver: Box<dyn Driver>,
    /// The channels to the other workers.
    pub strays: Strays,
    /// The interfaces, in the order of the driver.
    pub interfaces: Vec<Interface>,
    /// With XDP: which interfaces send frames that the programs redirect to them.
    pub targets: Option<Arc<Targets>>,
    /// The maps of all workers' offloaded connections, and this worker's number.
    pub offload: Option<(Arc<OffloadMemory>, u32)>,
    /// The maps with which XDP answers SYNs, and this worker's number.
    pub cookies: Option<(Arc<Cookies>, u32)>,
    /// The connections that the kernel handles from their SYN on; the first worker manages them.
    pub decided: Option<Arc<decided::Shared>>,
    /// Reports which servers cannot be reached. None: only time-outs show it.
    pub unreachable: Option<UnreachableSocket>,
    /// Whether this is the first worker.
    pub is_first: bool,
    /// Wakes the worker.
    pub bell: Arc<Bell>,
}

/// Values that work as long as they live. Most of them keep the engine's packets from the kernel's own TCP.
#[derive(Debug)]
#[expect(dead_code, reason = "they work by being there")]
pub(super) enum Kept {
    /// The engine's packets go to packet sockets only.
    Packet(OwnOn),
    /// The engine's packets go to AF_XDP sockets.
    Xdp(XdpOn),
    /// Frames collect in the interfaces first.
    Gathering(Coalescing),
}

/// Engines whose packets are already directed to their sockets, but not yet read.
#[derive(Debug, Default)]
pub struct Opened {
    pub(super) parts: Vec<Part>,
    pub(super) kept: Vec<Kept>,
    /// The interfaces and how long frames may collect in each.
    gathering: Vec<(Interface, Duration)>,
}

/// A listener that is being opened.
struct Opening<'a> {
    listener: &'a Listener,
    interfaces: Vec<Interface>,
    own: Own,
    offload: Option<Arc<OffloadMemory>>,
    cookies: Option<Arc<Cookies>>,
    mark: u32,
}

impl Opened {
    /// Opens what the engines among the listeners need. `workers` is the default number of workers. `mark` is set on
    /// packets that the kernel routes.
    ///
    /// # Errors
    /// Returns the listener, and what is missing.
    pub fn new(listeners: &[Listener], workers: usize, mark: u32) -> Result<Self, OpenError> {
        let mut opened = Self::default();
        for listener in listeners {
            if let ListenerKind::Engine(engine) = &listener.kind {
                opened.add(listener, engine, workers, mark)?;
            }
        }
        opened.coalesce();
        Ok(opened)
    }

    /// Lets frames collect where the configuration says so. If that fails, each frame is handled at once.
    fn coalesce(&mut self) {
        match Coalescing::new(&self.gathering) {
            Ok(coalescing) => self.kept.extend(coalescing.map(Kept::Gathering)),
            Err(error) => tracing::warn!(%error, "frames do not gather for the packet engine"),
        }
    }

    fn add(
        &mut self,
        listener: &Listener,
        engine: &EngineListener,
        workers: usize,
        mark: u32,
    ) -> Result<(), OpenError> {
        let name = &listener.name;
        let interfaces = interfaces(name, engine)?;
        let workers = match engine.io {
            EngineIo::Packet => workers,
            EngineIo::Xdp => queues(name, &interfaces)?,
        };
        let whole = engine;
        let engine = &without_decided(engine);
        let shares = shares(name, engine, workers)?;
        let own = own(&listener.addresses, engine, &shares);
        let own = own.map_err(|error| OpenError::Own { listener: name.clone(), error })?;
        let mtu = interfaces.iter().map(|interface| interface.mtu).min().unwrap_or(1500);
        let mut opening = Opening { listener, interfaces, own, offload: None, cookies: None, mark };
        let (mut decided, targets) = (None, opening.targets(engine));
        opening.offload(engine, workers);
        opening.answer_by_cookies(engine, workers);
        let drivers = match engine.io {
            EngineIo::Packet => opening.packet(workers, &mut self.kept)?,
            EngineIo::Xdp => {
                decided = opening.decide(whole, engine, targets.as_ref());
                opening.xdp(workers, &mut self.kept)?
            }
        };
        self.gathering
            .extend(opening.interfaces.iter().map(|interface| (interface.clone(), engine.coalesce)));
        let failed = |error| opening.socket_error("any interface", error);
        let bells = (0..workers).map(|_| Bell::new().map(Arc::new)).collect::<Result<Vec<_>, _>>();
        let bells = bells.map_err(failed)?;
        let rings: Vec<Ring> = bells
            .iter()
            .map(|bell| {
                let bell = bell.clone();
                Arc::new(move || bell.ring()) as Ring
            })
            .collect();
        let strays = Strays::between(shares.clone(), &rings);
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        for (worker, (((share, driver), strays), bell)) in
            (0_u32..).zip(shares.into_iter().zip(drivers).zip(strays).zip(bells))
        {
            let offload = opening.offload.clone().map(|all| (all, worker));
            let cookies = opening.cookies.clone().map(|all| (all, worker));
            let (listener, interfaces) = (listener.clone(), opening.interfaces.clone());
            let (decided, is_first) = (decided.clone(), worker == 0);
            let unreachable = Some(UnreachableSocket::open().map_err(failed)?);
            self.parts.push(Part {
                listener,
                share,
                mtu,
                driver,
                strays,
                interfaces,
                targets: targets.clone(),
                offload,
                cookies,
                decided,
                unreachable,
                is_first,
                bell,
            });
        }
        Ok(())
    }
}

impl Opening<'_> {
    fn socket_error(&self, interface: &str, error: io::Error) -> OpenError {
        OpenError::Socket { listener: self.listener.name.clone(), interface: interface.to_owned(), error }
    }

    fn own_error(&self, error: BpfError) -> OpenError {
        OpenError::Own { listener: self.listener.name.clone(), error }
    }

    fn routed(&self) -> Result<RoutedSocket, OpenError> {
        RoutedSocket::open(self.mark).map_err(|error| self.socket_error("any interface", error))
    }

    /// Watches the interfaces to which XDP redirects frames.
    fn targets(&self, engine: &EngineListener) -> Option<Arc<Targets>> {
        (engine.io == EngineIo::Xdp).then(|| Arc::new(Targets::new(&self.listener.name, &self.interfaces)))
    }

    /// Creates the maps for offloaded connections. If that fails, user space handles all connections.
    fn offload(&mut self, engine: &EngineListener, workers: usize) {
        if engine.offload_max == 0 {
            return;
        }
        let seed = u64::from_ne_bytes(random::bytes::<8>());
        let workers = u32::try_from(workers).unwrap_or(u32::MAX);
        let made = OffloadMemory::new(engine.offload_max, workers, seed).map_err(BpfError::Map);
        let tried = made.and_then(|offload| {
            let offload = Arc::new(offload);
            let tried = match engine.io {
                EngineIo::Packet => self.own.try_offload(&offload),
                EngineIo::Xdp => self.own.try_offload_by_xdp(&offload),
            };
            tried.map(|()| offload)
        });
        match tried {
            Ok(offload) => self.offload = Some(offload),
            Err(error) => {
                tracing::warn!(listener = %self.listener.name, %error, "the kernel takes no connections of the packet engine");
            }
        }
    }

    /// Lets the program in the driver answer SYNs, if the configuration says so. If that fails, user space answers them.
    fn answer_by_cookies(&mut self, engine: &EngineListener, workers: usize) {
        if !engine.answer_by_xdp {
            return;
        }
        let made = Cookies::new(u32::try_from(workers).unwrap_or(u32::MAX)).map_err(BpfError::Map);
        let tried = made.and_then(|cookies| {
            let cookies = Arc::new(cookies);
            self.own.try_cookies(&cookies).map(|()| cookies)
        });
        match tried {
            Ok(cookies) => self.cookies = Some(cookies),
            Err(error) => {
                tracing::warn!(listener = %self.listener.name, %error, "the kernel cookies no SYNs for the packet engine");
            }
        }
    }

    /// Creates the maps for connections that the kernel handles completely. They use the ports of `whole` that `rest`
    /// does not have. If that fails, user space handles all connections.
    fn decide(
        &mut self,
        whole: &EngineListener,
        rest: &EngineListener,
        targets: Option<&Arc<Targets>>,
    ) -> Option<Arc<decided::Shared>> {
        let (count, targets) = (whole.source_ports.end() - rest.source_ports.end(), targets?);
        if count == 0 {
            return None;
        }
        let first = rest.source_ports.end() + 1;
        let seed = u64::from_ne_bytes(random::bytes::<8>());
        let sources = whole.sources.clone();
        let made = DecidedMemory::new(first, count.into(), seed).and_then(|decided| {
            for (number, interface) in (0_u32..).zip(&self.interfaces) {
                decided.device(number, interface.index)?;
            }
            Ok(decided)
        });
        let tried = made.map_err(BpfError::Map).and_then(|decided| {
            let decided = Arc::new(decided);
            self.own.try_decided(&decided).map(|()| decided)
        });
        match tried {
            Ok(decided) => {
                let (interfaces, targets) = (self.interfaces.clone(), targets.clone());
                Some(Arc::new(decided::Shared::new(decided, interfaces, targets, sources)))
            }
            Err(error) => {
                tracing::warn!(listener = %self.listener.name, %error, "the kernel carries no connections of the packet engine");
                None
            }
        }
    }

    fn packet(&self, workers: usize, kept: &mut Vec<Kept>) -> Result<Vec<Box<dyn Driver>>, OpenError> {
        let own_error = |error| self.own_error(error);
        let filter = self.own.socket_filter().map_err(own_error)?;
        let fanout = self.own.fanout().map_err(own_error)?;
        let mut sockets: Vec<Vec<(Interface, PacketSocket)>> = (0..workers).map(|_| Vec::new()).collect();
        for interface in &self.interfaces {
            let failed = |error| self.socket_error(&interface.name, error);
            let mut group = None;
            for sockets in &mut sockets {
                let socket = PacketSocket::open(interface.index, &filter).map_err(failed)?;
                if workers > 1 {
                    group = Some(socket.join(group, &fanout).map_err(failed)?);
                }
                sockets.push((interface.clone(), socket));
            }
            kept.push(Kept::Packet(self.own.keep_from_kernel(interface.index).map_err(own_error)?));
        }
        sockets
            .into_iter()
            .map(|sockets| Ok(Box::new(PacketDriver::new(sockets, self.routed()?)) as Box<dyn Driver>))
            .collect()
    }

    /// Opens one AF_XDP socket for each queue of each interface. A worker has the same queue of every interface.
    fn xdp(&self, queues: usize, kept: &mut Vec<Kept>) -> Result<Vec<Box<dyn Driver>>, OpenError> {
        let queues = u32::try_from(queues).unwrap_or(u32::MAX);
        let own_error = |error| self.own_error(error);
        let mut programs = Vec::new();
        for interface in &self.interfaces {
            if interface.mtu > xdp::MTU_MAX {
                return Err(OpenError::LargeMtu {
                    listener: self.listener.name.clone(),
                    interface: interface.name.clone(),
                    mtu: interface.mtu,
                });
            }
            programs.push(self.own.take_by_xdp(interface.index, Hook::XdpNative, queues).map_err(own_error)?);
        }
        let mut drivers = Vec::new();
        let mtu = self.interfaces.iter().map(|interface| interface.mtu).max().unwrap_or(xdp::MTU_MAX);
        for queue in 0..queues {
            let umem = Umem::new(xdp::frames(self.interfaces.len()), xdp::frame_size(mtu))
                .map_err(|error| self.socket_error("any interface", error))?;
            let mut sockets: Vec<(Interface, XskSocket)> = Vec::new();
            for (interface, program) in self.interfaces.iter().zip(&programs) {
                let shared = sockets.first().map(|(_, socket)| socket);
                let socket = XskSocket::open(&umem, interface.index, queue, Copying::Auto, shared)
                    .map_err(|error| self.socket_error(&interface.name, error))?;
                program.serve(queue, socket.as_fd()).map_err(own_error)?;
                sockets.push((interface.clone(), socket));
            }
            drivers.push(Box::new(XdpDriver::new(&umem, sockets, self.routed()?)) as Box<dyn Driver>);
        }
        kept.extend(programs.into_iter().map(Kept::Xdp));
        Ok(drivers)
    }
}

/// Returns the number of receive queues, which must be the same for all interfaces.
fn queues(listener: &Arc<str>, interfaces: &[Interface]) -> Result<usize, OpenError> {
    let counts: Vec<_> = interfaces.iter().map(|interface| xsk::queues(&interface.name)).collect();
    let first = counts.first().copied().unwrap_or(1);
    match counts.iter().zip(interfaces).find(|(count, _)| **count != first) {
        None => Ok(first as usize),
        Some((count, interface)) => Err(OpenError::Queues {
            listener: listener.clone(),
            interface: interface.name.clone(),
            count: *count,
            first,
        }),
    }
}

fn interfaces(listener: &Arc<str>, engine: &EngineListener) -> Result<Vec<Interface>, OpenError> {
    let find = |name: &String| {
        let found = link::interface(name)
            .map_err(|error| OpenError::Interface { listener: listener.clone(), error })?;
        let address = found
            .address
            .ok_or_else(|| OpenError::NoEthernet { listener: listener.clone(), interface: name.clone() })?;
        Ok(Interface { name: name.clone(), index: found.index, address, mtu: found.mtu })
    };
    engine.interfaces.iter().map(find).collect()
}

/// Returns the listener without the ports of connections that the kernel handles completely; these are the last ports.
/// There are such connections only if the server is known before any byte of the flow. At least one port is left.
fn without_decided(engine: &EngineListener) -> EngineListener {
    let (first, last) = (*engine.source_ports.start(), *engine.source_ports.end());
    let fixed = engine.choices.is_empty() && !engine.target.needs_first_bytes();
    let count = if fixed && engine.io == EngineIo::Xdp { engine.kernel_connections_max } else { 0 };
    let last = last - count.min(last - first);
    EngineListener { source_ports: first..=last, ..engine.clone() }
}

fn shares(listener: &Arc<str>, engine: &EngineListener, workers: usize) -> Result<Vec<Share>, OpenError> {
    let share = |worker| {
        let share = engine.steering.share(&engine.sources, engine.source_ports.clone(), worker, workers);
        share.ok_or_else(|| OpenError::NoShare { listener: listener.clone(), worker, workers })
    };
    (0..workers).map(share).collect()
}

/// Tells the programs which packets belong to which worker.
fn own(addresses: &[SocketAddr], engine: &EngineListener, shares: &[Share]) -> Result<Own, BpfError> {
    let block = shares.first().map_or(0, |share| share.ports.end() - share.ports.start() + 1);
    let own = Own::new(u32::try_from(shares.len()).unwrap_or(u32::MAX), block.into())?;
    for address in addresses {
        own.listen(Some(address.ip()).filter(|ip| !ip.is_unspecified()), address.port())?;
    }
    for (worker, share) in (0_u32..).zip(shares) {
        for ip in &share.addresses {
            match engine.steering {
                Steering::Ip => own.source(*ip, &share.ports, Some(worker))?,
                Steering::Port => own.source(*ip, &engine.source_ports, None)?,
            }
        }
    }
    Ok(own)
}
