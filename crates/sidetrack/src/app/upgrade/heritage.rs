//! What a new process has got from the one that it replaces, until it uses it.

use super::channel::Came;
use super::parts::{GoPart, KeeperPart, ListenerPart, OverlayPart, ShuntPart, WindowPart};
use super::{shunted, wires};
use crate::config::{Config, Listener, ListenerKind};
use crate::keeper::{Begin, Keeper, PROTOCOL};
use crate::overlay::{self, QueueSockets};
use crate::shunt::Shunter;
use crate::worker::Given;
use anyhow::{Context, bail, ensure};
use sidetrack_core::flow::Protocol;
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::sync::lock;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Mutex;

/// Where the new process goes on.
pub(crate) struct Go {
    /// The number of the next flow.
    pub next_flow: u64,
    /// The number of the next path of the kernel.
    pub first_path: usize,
    /// The metrics of the old process, as text.
    pub metrics: String,
    /// Records that the old process still writes.
    pub from_old: OwnedFd,
    /// For records that the new process writes after it has given everything back.
    pub to_old: OwnedFd,
    /// Associations of UDP, until they wait for their sockets.
    pub associations: Mutex<Vec<Came>>,
    /// What addresses of the resolver represent.
    pub names: Vec<Came>,
    /// Paths that services asked for, until they are open here.
    pub paths: Mutex<Vec<Came>>,
    /// Numbers of the shunt's flows.
    pub shunted: Vec<Came>,
}

/// What moves with the listeners, and comes back with them.
#[derive(Default)]
pub(super) struct State {
    pub associations: Vec<Came>,
    pub names: Vec<Came>,
    pub paths: Vec<Came>,
    pub shunted: Vec<Came>,
}

impl State {
    /// The kinds of its parts.
    pub(super) const KINDS: [Kind; 4] = [Kind::Association, Kind::Names, Kind::Path, Kind::Shunted];

    /// Sorts its parts.
    pub(super) fn of(all: Vec<Came>) -> Self {
        let mut state = Self::default();
        for came in all {
            match came.kind {
                Kind::Names => state.names.push(came),
                Kind::Path => state.paths.push(came),
                Kind::Shunted => state.shunted.push(came),
                _ => state.associations.push(came),
            }
        }
        state
    }
}

impl Go {
    /// `state`: parts that came before.
    pub(super) fn read(came: Came, state: Vec<Came>) -> anyhow::Result<Self> {
        let GoPart { next_flow, first_path, metrics } = came.body()?;
        let [from_old, to_old] =
            <[OwnedFd; 2]>::try_from(came.fds).ok().context("the pipes of the records are missing")?;
        Ok(Self::new(GoPart { next_flow, first_path, metrics }, [from_old, to_old], state))
    }

    fn new(part: GoPart, [from_old, to_old]: [OwnedFd; 2], state: Vec<Came>) -> Self {
        let GoPart { next_flow, first_path, metrics } = part;
        let State { associations, names, paths, shunted } = State::of(state);
        let (paths, associations) = (Mutex::new(paths), Mutex::new(associations));
        Self { next_flow, first_path, metrics, from_old, to_old, associations, names, paths, shunted }
    }

    /// Goes on from these numbers without the old process, which was killed after its offer.
    pub(super) fn alone(numbers: GoPart, state: Vec<Came>) -> anyhow::Result<Self> {
        // Their other ends are closed at once: no record comes, and none is given back.
        let from_old = std::io::pipe()?.0.into();
        let to_old = std::io::pipe()?.1.into();
        Ok(Self::new(numbers, [from_old, to_old], state))
    }
}

/// Sockets and the keeper.
#[derive(Default)]
pub struct Heritage {
    listeners: Mutex<Vec<(ListenerPart, Vec<OwnedFd>)>>,
    windows: Mutex<Vec<(WindowPart, OwnedFd)>>,
    keeper: Mutex<Option<(KeeperPart, [OwnedFd; 2])>>,
    wire: Mutex<Option<Given>>,
    shunt: Mutex<Option<(ShuntPart, [OwnedFd; 2])>>,
    overlay: Mutex<overlay::Given>,
    numbers: Mutex<Option<GoPart>>,
}

/// Whether a socket that is bound to `bound` is the one of an address in the configuration.
fn fits(configured: SocketAddr, bound: SocketAddr) -> bool {
    configured == bound || configured.port() == 0 && configured.ip() == bound.ip()
}

impl Heritage {
    /// Adds a part. Returns false for [`Kind::Offered`], which is the last one.
    pub(super) fn add(&self, came: Came) -> anyhow::Result<bool> {
        match came.kind {
            Kind::Listener => lock(&self.listeners).push((came.body()?, came.fds)),
            Kind::Window => {
                let part = came.body()?;
                let fd = came.fds.into_iter().next().context("a socket of the hand-over is missing")?;
                lock(&self.windows).push((part, fd));
            }
            Kind::Keeper => {
                let part = came.body()?;
                let fds = <[OwnedFd; 2]>::try_from(came.fds).ok();
                *lock(&self.keeper) = Some((part, fds.context("the connection to the keeper is missing")?));
            }
            Kind::Shunt => *lock(&self.shunt) = Some(shunted::came(came)?),
            Kind::Wire => *lock(&self.wire) = Some(wires::memory(came)?),
            Kind::WireOn => {
                let on = wires::on(came)?;
                lock(&self.wire).as_mut().context("programs of the wire without its memory")?.on.push(on);
            }
            Kind::Overlay => {
                let part: OverlayPart = came.body()?;
                let mut fds = came.fds.into_iter();
                let fd = fds.next().context("a socket of the overlay is missing")?;
                let mut given = lock(&self.overlay);
                match part {
                    OverlayPart::Listener(address) => given.listeners.push((address, fd.into())),
                    OverlayPart::Datagrams(address) => given.datagrams.push((address, fd.into())),
                    OverlayPart::Packets(number) => {
                        let table = fds.next().context("the rules that catch packets are missing")?;
                        given.packets = Some(QueueSockets { number, queue: fd, table });
                    }
                    OverlayPart::Door => given.door = Some(fd),
                }
            }
            Kind::Offered => {
                // The release before this one sends nothing beside it.
                *lock(&self.numbers) = came.body::<Option<_>>().ok().flatten();
                return Ok(false);
            }
            Kind::Failed => bail!("{}", came.body::<String>()?),
            other => bail!("the other process has said {other:?} instead of its offer"),
        }
        Ok(true)
    }

    /// Takes the numbers to go on from, if the other process is killed now.
    pub(super) fn numbers(&self) -> Option<GoPart> {
        lock(&self.numbers).take()
    }

    /// Fails if a socket cannot serve the listener of this configuration, or the shunt is another one.
    pub(super) fn check(&self, config: &Config) -> anyhow::Result<()> {
        if let Some((part, _)) = &*lock(&self.shunt) {
            part.check(config)?;
        }
        for listener in &config.listeners {
            for (part, _) in lock(&self.listeners).iter() {
                let is_it = *part.name == *listener.name
                    && listener.addresses.iter().any(|address| fits(*address, part.address));
                let transparent = matches!(listener.kind, ListenerKind::Tproxy(_));
                let differs = part.transparent != transparent || part.mptcp != listener.mptcp;
                ensure!(
                    !is_it || part.protocol == Protocol::Udp || !differs,
                    "listener '{}' has become of another kind, and the sockets on {} cannot change: restart instead of an \
                     upgrade",
                    listener.name,
                    part.address
                );
            }
        }
        Ok(())
    }

    /// Takes the sockets of a listener and address.
    pub fn take(&self, name: &str, address: SocketAddr) -> (Vec<TcpListener>, Vec<UdpSocket>) {
        let mut listeners = lock(&self.listeners);
        let first = listeners.iter().find(|(part, _)| part.name == name && fits(address, part.address));
        // With port 0 two addresses may be alike: each takes the sockets of one.
        let Some(bound) = first.map(|(part, _)| part.address) else { return Default::default() };
        let (mut accept, mut receive) = (Vec::new(), Vec::new());
        let (taken, left): (Vec<_>, Vec<_>) =
            listeners.drain(..).partition(|(part, _)| part.name == name && part.address == bound);
        *listeners = left;
        for (part, fds) in taken {
            match part.protocol {
                Protocol::Tcp => accept.extend(fds.into_iter().map(TcpListener::from)),
                Protocol::Udp => receive.extend(fds.into_iter().map(UdpSocket::from)),
            }
        }
        (accept, receive)
    }

    /// Takes the socket of a window.
    pub(in super::super) fn window(
        &self,
        wanted: impl Fn(&WindowPart) -> bool,
    ) -> Option<(WindowPart, OwnedFd)> {
        let mut windows = lock(&self.windows);
        let at = windows.iter().position(|(part, _)| wanted(part))?;
        Some(windows.swap_remove(at))
    }

    /// Takes the shunt, with the name and the text of the configuration file that it was started with.
    pub(in super::super) fn shunt(&self) -> Option<(Shunter, [String; 2])> {
        lock(&self.shunt).take().map(|(part, fds)| part.taken(fds))
    }

    /// Whether the other process has flows on the wire, or room for them.
    pub(in super::super) fn has_wire(&self) -> bool {
        lock(&self.wire).is_some()
    }

    /// Takes the sockets of the overlay. Empty: the other process has none.
    pub(in super::super) fn overlay(&self) -> overlay::Given {
        std::mem::take(&mut lock(&self.overlay))
    }

    /// Takes the memory of flows on the wire.
    pub(in super::super) fn wire(&self) -> Option<Given> {
        lock(&self.wire).take()
    }

    /// Takes the sockets of the resolver at this address.
    pub(in super::super) fn resolver(&self, address: SocketAddr) -> Option<(UdpSocket, TcpListener)> {
        let is = |part: &WindowPart, for_datagrams| matches!(part, WindowPart::Resolver { address: bound, datagrams } if fits(address, *bound) && *datagrams == for_datagrams);
        let (_, datagrams) = self.window(|part| is(part, true))?;
        let (_, listener) = self.window(|part| is(part, false))?;
        Some((datagrams.into(), listener.into()))
    }

    /// Takes the HTCP socket of a cache at this address.
    pub(in super::super) fn htcp(&self, address: SocketAddr) -> Option<UdpSocket> {
        let is = |part: &WindowPart| matches!(part, WindowPart::Htcp(bound) if fits(address, *bound));
        self.window(is).map(|(_, socket)| socket.into())
    }

    /// The listening sockets of one address, as those of another process.
    pub(in super::super) fn of_sockets(name: &str, address: SocketAddr, fds: Vec<OwnedFd>) -> Self {
        let part = ListenerPart {
            name: name.to_owned(),
            address,
            protocol: Protocol::Tcp,
            transparent: false,
            mptcp: false,
        };
        Self { listeners: Mutex::new(vec![(part, fds)]), ..Self::default() }
    }

    /// Takes the TCP listener of the metrics or the page.
    pub(in super::super) fn tcp_window(
        &self,
        address: SocketAddr,
        of: impl Fn(&WindowPart) -> Option<SocketAddr>,
    ) -> Option<TcpListener> {
        let (_, fd) = self.window(|part| of(part).is_some_and(|bound| fits(address, bound)))?;
        Some(fd.into())
    }

    /// Takes the keeper, if there is one, with what it may be asked for, and whether it has changed the kernel.
    pub fn keeper(&self, needs: Begin) -> anyhow::Result<Option<(Keeper, Begin, bool)>> {
        let Some((part, [end, process])) = lock(&self.keeper).take() else { return Ok(None) };
        ensure!(
            part.protocol == PROTOCOL,
            "the keeper, which holds the rights, speaks version {} of its requests and this program version {PROTOCOL}: restart \
             instead of an upgrade",
            part.protocol
        );
        ensure!(
            part.begin.closed || !needs.closed,
            "on_crash = \"closed\" is new: the right to leave rules behind was given up; restart instead of an upgrade"
        );
        ensure!(
            part.begin.owners || !needs.owners,
            "rules that ask for the process or user of a connection are new: the right to look was given up; restart instead of \
             an upgrade"
        );
        Ok(Some((Keeper::taken(end, process), part.begin, part.used)))
    }
}

/// How the sockets of a listener are described.
pub(super) fn described(listener: &Listener, address: SocketAddr, protocol: Protocol) -> ListenerPart {
    ListenerPart {
        name: listener.name.to_string(),
        address,
        protocol,
        transparent: matches!(listener.kind, ListenerKind::Tproxy(_)),
        mptcp: listener.mptcp,
    }
}
