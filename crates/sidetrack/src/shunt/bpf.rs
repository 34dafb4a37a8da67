//! The BPF fast path: an entry is two rows of a map, one for each direction.

use super::{FastPath, Report, Settings};
use sidetrack_core::shunt::{Both, Cause, Entry, EntryId, FastPathKind, Obstacle, PortNumber, Traffic};
use sidetrack_sys::bpf::{
    self, BpfError, Ended, FlowEntry, FlowKey, FlowState, Hook, ProgramKind, monotonic_ns,
};
use sidetrack_sys::link::{self, Interface};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

/// How often the map is checked.
const SWEEP: Duration = Duration::from_millis(250);

/// How long the program uses its entries without a sign of life from us: several checks, so that a busy moment does not
/// empty the fast path.
const ALIVE: Duration = Duration::from_secs(3);

/// E2BIG: the map is full.
const FULL: i32 = 7;

/// The kinds of BPF fast paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// tc: works on every interface, with packets of any size; needs Linux 6.6.
    Tc,
    /// XDP in the driver: works on hardware interfaces.
    Xdp,
    /// XDP behind the driver: works on every interface, but is slow; only for experiments.
    XdpGeneric,
}

impl PathKind {
    /// Returns the kind among all fast paths.
    pub const fn kind(self) -> FastPathKind {
        match self {
            Self::Tc => FastPathKind::Tc,
            Self::Xdp => FastPathKind::Xdp,
            Self::XdpGeneric => FastPathKind::XdpGeneric,
        }
    }

    const fn program(self) -> ProgramKind {
        match self {
            Self::Tc => ProgramKind::Tc,
            Self::Xdp | Self::XdpGeneric => ProgramKind::Xdp,
        }
    }

    const fn hook(self) -> Hook {
        match self {
            Self::Tc => Hook::TcxIngress,
            Self::Xdp => Hook::XdpNative,
            Self::XdpGeneric => Hook::XdpGeneric,
        }
    }
}

/// Why the BPF fast path cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BpfPathError {
    /// A port's interface does not exist.
    #[error("port {0}: {1}; name its interface under [[shunt.port]]")]
    Port(PortNumber, sidetrack_sys::netlink::Error),
    /// The kernel rejects the program.
    #[error(transparent)]
    Kernel(#[from] BpfError),
    /// The settings could not be written.
    #[error("cannot start the fast path: {0}")]
    Settings(#[source] io::Error),
}

/// The two rows of an entry, one for each direction.
#[derive(Clone, Copy, Debug)]
struct Rows {
    to_server: FlowKey,
    to_client: FlowKey,
    idle: Duration,
}

/// The state in the map of an entry's two directions.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    to_server: Option<FlowState>,
    to_client: Option<FlowState>,
}

/// The fast path: its program, its map, and the entries that we put into the map.
#[derive(Debug)]
pub struct BpfPath {
    table: bpf::FastPath,
    ports: BTreeMap<PortNumber, (String, Interface)>,
    rows: BTreeMap<EntryId, Rows>,
    generation: u32,
    swept_ns: u64,
    /// How long the program uses its entries without a sign of life. None: for ever.
    alive: Option<Duration>,
    /// The program may put packets directly into the network namespace of a veth pair's other end.
    redirect_peer: bool,
    reports: VecDeque<Report>,
}

impl BpfPath {
    /// Loads the program and attaches it to every port.
    ///
    /// # Errors
    /// Fails without CAP_BPF and CAP_NET_ADMIN, on kernels without the hook, or if an interface does not exist.
    pub fn start(kind: PathKind, settings: &Settings) -> Result<Self, BpfPathError> {
        let entries = u32::try_from(settings.core.entries_max * 2).unwrap_or(u32::MAX);
        let mut table = bpf::FastPath::new(kind.program(), settings.forwarding, entries)?;
        let mut ports = BTreeMap::new();
        for (number, name) in &settings.ports {
            let interface = link::interface(name).map_err(|error| BpfPathError::Port(*number, error))?;
            table.attach(interface.index, kind.hook())?;
            ports.insert(*number, (name.clone(), interface));
        }
        let path = Self {
            table,
            ports,
            rows: BTreeMap::new(),
            generation: 1,
            swept_ns: 0,
            alive: (!settings.keep_when_stalled).then_some(ALIVE),
            redirect_peer: settings.redirect_peer && kind == PathKind::Tc,
            reports: VecDeque::new(),
        };
        path.stay_alive().map_err(BpfPathError::Settings)?;
        Ok(path)
    }

    fn stay_alive(&self) -> io::Result<()> {
        let alive = self.alive.and_then(|alive| u64::try_from(alive.as_nanos()).ok()).unwrap_or(u64::MAX);
        self.table.set(self.generation, monotonic_ns().saturating_add(alive))
    }

    fn rows(&self, entry: &Entry) -> Option<Rows> {
        let (_, client_port) = self.ports.get(&entry.client_port)?;
        let (_, server_port) = self.ports.get(&entry.server_port)?;
        let to_server = FlowKey {
            ingress: client_port.index,
            source: entry.tuple.client(),
            destination: entry.tuple.server(),
            protocol: entry.tuple.transport.number(),
        };
        Some(Rows { to_server, to_client: to_server.reverse(server_port.index), idle: entry.idle })
    }

    fn try_install(&self, entry: &Entry, rows: &Rows) -> io::Result<()> {
        let row = |port: PortNumber| {
            let interface = self.ports.get(&port).map(|(_, interface)| interface);
            FlowEntry {
                egress: interface.filter(|_| !entry.block).map(|interface| interface.index),
                mtu: interface.map_or(0, |interface| interface.mtu),
                idle: entry.idle,
                generation: self.generation,
                redirect_peer: self.redirect_peer && interface.is_some_and(|port| port.peer_elsewhere),
                installed_as: entry.id.0,
            }
        };
        self.table.install(&rows.to_server, row(entry.server_port))?;
        self.table.install(&rows.to_client, row(entry.client_port)).inspect_err(|_| {
            // Install both rows or none: with one row, half of the connection would bypass all checks.
            let _ = self.table.take(&rows.to_server);
        })
    }

    fn take(&mut self, id: EntryId, cause: Cause) {
        let Some(rows) = self.rows.remove(&id) else { return };
        let take = |key| {
            self.table.take(key).unwrap_or_else(|error| {
                tracing::error!(%error, "cannot remove an entry of the fast path; it ends with its idle time");
                None
            })
        };
        let seen = Seen { to_server: take(&rows.to_server), to_client: take(&rows.to_client) };
        self.reports.push_back(Report::Gone(id, cause, seen.traffic()));
    }

    /// Reads the map: reports what passed, and removes entries that are over.
    fn sweep(&mut self, now_ns: u64) -> io::Result<()> {
        let mut seen: BTreeMap<EntryId, Seen> = BTreeMap::new();
        let rows = &self.rows;
        self.table.for_each(|key, state| {
            let id = EntryId(state.installed_as);
            let Some(rows) = rows.get(&id) else { return };
            let seen = seen.entry(id).or_default();
            if key == rows.to_server {
                seen.to_server = Some(state);
            } else {
                seen.to_client = Some(state);
            }
        })?;
        for (id, seen) in seen {
            let idle = self.rows.get(&id).map_or(Duration::ZERO, |rows| rows.idle);
            match seen.over(now_ns, idle) {
                Some(cause) => self.take(id, cause),
                None => self.reports.push_back(Report::Counted(id, seen.traffic())),
            }
        }
        Ok(())
    }

    /// Removes entries of ports whose interface went down, disappeared or was replaced.
    fn look_at_ports(&mut self) {
        let mut lost = Vec::new();
        for (name, interface) in self.ports.values() {
            let now = link::interface(name).ok();
            // The link-layer address may change: it is looked up together with the route.
            let same =
                |now: Interface| now.running && now == Interface { address: now.address, ..*interface };
            if !now.is_some_and(same) {
                lost.push(interface.index);
            }
        }
        if lost.is_empty() {
            return;
        }
        let uses =
            |rows: &Rows| lost.contains(&rows.to_server.ingress) || lost.contains(&rows.to_client.ingress);
        let gone: Vec<_> = self.rows.iter().filter(|(_, rows)| uses(rows)).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.take(id, Cause::Lost));
        self.refresh_ports();
    }

    /// Reads the present state of the ports' interfaces. An interface with a new index is another one and has no program.
    fn refresh_ports(&mut self) {
        for (name, interface) in self.ports.values_mut() {
            if let Ok(now) = link::interface(name)
                && now.index == interface.index
            {
                *interface = now;
            }
        }
    }
}

impl Seen {
    fn traffic(&self) -> Both {
        let traffic = |state: &Option<FlowState>| {
            state
                .map_or_else(Traffic::default, |state| Traffic { packets: state.packets, bytes: state.bytes })
        };
        Both { to_server: traffic(&self.to_server), to_client: traffic(&self.to_client) }
    }

    /// Returns why the entry is over, if it is. It is idle when both directions are.
    fn over(&self, now_ns: u64, idle: Duration) -> Option<Cause> {
        let states = [self.to_server, self.to_client];
        let ended = states.iter().flatten().fold(Ended::default(), |all, state| Ended {
            fin: all.fin || state.ended.fin,
            rst: all.rst || state.ended.rst,
            syn: all.syn || state.ended.syn,
            idle: all.idle || state.ended.idle,
        });
        let last = states.iter().flatten().map(|state| state.last_ns).max().unwrap_or(0);
        let stood = Duration::from_nanos(now_ns.saturating_sub(last));
        match ended {
            Ended { rst: true, .. } => Some(Cause::Rst),
            Ended { fin: true, .. } => Some(Cause::Fin),
            Ended { syn: true, .. } => Some(Cause::Syn),
            Ended { idle: true, .. } => Some(Cause::Idle),
            _ => (stood > idle).then_some(Cause::Idle),
        }
    }
}

impl FastPath for BpfPath {
    fn install(&mut self, entry: &Entry) {
        let report = match self.rows(entry) {
            None => Report::Failed(entry.id, Obstacle::UnknownPort),
            Some(rows) => match self.try_install(entry, &rows) {
                Ok(()) => {
                    self.rows.insert(entry.id, rows);
                    Report::Installed(entry.id)
                }
                Err(error) if error.raw_os_error() == Some(FULL) => Report::Failed(entry.id, Obstacle::Full),
                Err(error) => {
                    tracing::warn!(%error, flow = %entry.tuple, "the fast path refused an entry");
                    Report::Failed(entry.id, Obstacle::Refused)
                }
            },
        };
        self.reports.push_back(report);
    }

    fn remove(&mut self, id: EntryId, cause: Cause) {
        self.take(id, cause);
    }

    fn suspend(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if let Err(error) = self.stay_alive() {
            tracing::error!(%error, "cannot tell the fast path that the rules have changed");
        }
    }

    fn tend(&mut self) -> io::Result<Duration> {
        let now_ns = monotonic_ns();
        let since = Duration::from_nanos(now_ns.saturating_sub(self.swept_ns));
        if since < SWEEP {
            return Ok(SWEEP - since);
        }
        self.swept_ns = now_ns;
        self.stay_alive()?;
        self.look_at_ports();
        self.sweep(now_ns)?;
        Ok(SWEEP)
    }

    fn count(&mut self) -> io::Result<()> {
        self.sweep(monotonic_ns())
    }

    fn judges_resets(&self) -> bool {
        true
    }

    fn report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }
}
