//! The fast path of the kernel's own flow tables (nftables). A bit in conntrack's mark selects the flows that the flow
//! table forwards. A rule adds such a flow with its next packet.
//!
//! The kernel ends an entry by itself: on FIN or RST, which goes to the slow path, or after 30 s without a packet. It
//! cannot end a single entry on request. So we clear the bit and replace the flow table. The other flows keep theirs
//! without a gap; each takes the slow path for one packet. The kernel adds the forwarded packets to conntrack's counters.
//! So the traffic of an entry is the present count minus the count at installation.

use super::{FastPath, Report, Settings, conntrack};
use sidetrack_core::shunt::{Both, Cause, Entry, EntryId, Obstacle, PortNumber, Tuple};
use sidetrack_sys::bpf::monotonic_ns;
use sidetrack_sys::conntrack::{Change, Conntrack, Entry as Tracked, status};
use sidetrack_sys::netlink::{self, Protocol, Socket};
use sidetrack_sys::nft::{
    Chain, ChainKind, Family, Feature, Field, Flowtable, Hook, InterfaceName, Lifetime, MarkBits, OwnError,
    OwnedTable, Rule, Statement, Table, knows, priority,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::time::Duration;

/// The names of the table, and of the flow table in it.
const TABLE: &str = "sidetrack_shunt";
const FLOWTABLE: &str = "shunted";

/// The bit of a connection's mark that the rule checks: the one that NFShunt's layout leaves unused.
const OFFLOADED: MarkBits = MarkBits { value: 0x8000_0000, mask: 0x8000_0000 };

/// How often the connections with the bit are checked.
const SWEEP: Duration = Duration::from_millis(500);

/// Why the fast path of a flow table cannot start.
#[derive(Debug, thiserror::Error)]
pub enum FlowtableError {
    /// The kernel has no flow tables.
    #[error(
        "this kernel has no flow tables (it needs {}): use fast_path = \"tc\" or \"xdp\"",
        Feature::Flowtable.needs()
    )]
    Unsupported,
    /// A port's interface has an impossible name.
    #[error("port {0}: {1}; name its interface under [[shunt.port]]")]
    Port(PortNumber, String),
    /// The process cannot own the table.
    #[error(transparent)]
    Own(#[from] OwnError),
    /// The kernel rejected the table.
    #[error("the flow table of the shunt: {0}")]
    Kernel(#[from] netlink::Error),
}

/// A flow that has the bit.
#[derive(Clone, Copy, Debug)]
struct Row {
    tuple: Tuple,
    idle: Duration,
    /// What conntrack had counted at the installation, and what it has counted now.
    before: Both,
    now: Both,
    /// When the count last changed.
    changed_ns: u64,
}

impl Row {
    fn passed(&self) -> Both {
        self.now.less(self.before)
    }

    /// Stores what conntrack has counted.
    fn counted(&mut self, now: Both, now_ns: u64) {
        if now != self.now {
            (self.now, self.changed_ns) = (now, now_ns);
        }
    }
}

/// The fast path: its table, and the flows that have the bit.
#[derive(Debug)]
pub(super) struct FlowtablePath {
    table: OwnedTable,
    port: u32,
    devices: Vec<InterfaceName>,
    conntrack: Conntrack,
    rows: BTreeMap<EntryId, Row>,
    by_tuple: BTreeMap<Tuple, EntryId>,
    /// The kernel may still forward flows that have no row any more.
    stale: bool,
    /// Nothing is forwarded: the rules have changed, and the entries that they allowed are being removed.
    suspended: bool,
    swept_ns: u64,
    reports: VecDeque<Report>,
}

impl FlowtablePath {
    /// Creates the flow table between all ports. The kernel removes it when this process ends, in whatever way.
    ///
    /// # Errors
    /// Fails if the kernel has no flow tables, or an interface does not exist or is in another flow table.
    pub(super) fn start(settings: &Settings) -> Result<Self, FlowtableError> {
        if !knows(&mut Socket::open(Protocol::Netfilter)?, Feature::Flowtable)? {
            return Err(FlowtableError::Unsupported);
        }
        let parse = |(number, name): (&PortNumber, &String)| {
            name.parse().map_err(|error| FlowtableError::Port(*number, error))
        };
        let devices = settings.ports.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        let mut table = OwnedTable::create(&content(&devices), Lifetime::Socket)?;
        let mut path = Self {
            port: table.port()?,
            table,
            devices,
            conntrack: Conntrack::open()?,
            rows: BTreeMap::new(),
            by_tuple: BTreeMap::new(),
            stale: false,
            suspended: false,
            swept_ns: 0,
            reports: VecDeque::new(),
        };
        // Policy is asked again about flows with bits that an earlier process left.
        path.clear_strangers()?;
        Ok(path)
    }

    /// Clears the bit of connections that have no row.
    fn clear_strangers(&mut self) -> Result<(), netlink::Error> {
        for tracked in self.conntrack.list(Some(OFFLOADED))? {
            let known = tuple(&tracked).is_some_and(|tuple| self.by_tuple.contains_key(&tuple));
            if !known {
                self.stale |= tracked.status & status::OFFLOAD != 0;
                self.conntrack.update(&tracked.original, tracked.zone, bit(false))?;
            }
        }
        Ok(())
    }

    /// Sets or clears the bit. Returns false if there is no such connection.
    fn mark(&mut self, tuple: &Tuple, is_set: bool) -> Result<bool, netlink::Error> {
        self.conntrack.update(&conntrack::original(tuple), tuple.zone, bit(is_set))
    }

    fn find(&mut self, tuple: &Tuple) -> Option<Tracked> {
        self.conntrack.find(&conntrack::original(tuple), tuple.zone).ok().flatten()
    }

    fn try_install(&mut self, entry: &Entry) -> Result<(), Obstacle> {
        if entry.block {
            return Err(Obstacle::Unsupported);
        }
        let found = self.find(&entry.tuple).ok_or(Obstacle::Refused)?;
        let before = traffic(&found);
        let row =
            Row { tuple: entry.tuple, idle: entry.idle, before, now: before, changed_ns: monotonic_ns() };
        match self.mark(&entry.tuple, true) {
            Ok(true) => {
                self.rows.insert(entry.id, row);
                self.by_tuple.insert(entry.tuple, entry.id);
                Ok(())
            }
            // The connection has ended in the meantime.
            Ok(false) => Err(Obstacle::Refused),
            Err(error) => {
                tracing::warn!(%error, flow = %entry.tuple, "the flow table refused an entry");
                Err(Obstacle::Refused)
            }
        }
    }

    fn take(&mut self, id: EntryId, cause: Cause) {
        let Some(mut row) = self.rows.remove(&id) else { return };
        self.by_tuple.remove(&row.tuple);
        // Clear the bit first, so that the rule does not add the flow again.
        if let Err(error) = self.mark(&row.tuple, false) {
            tracing::error!(%error, flow = %row.tuple, "cannot take a flow from the flow table; it ends when it stands still");
        }
        if let Some(tracked) = self.find(&row.tuple) {
            self.stale |= tracked.status & status::OFFLOAD != 0;
            row.counted(traffic(&tracked), 0);
        }
        self.reports.push_back(Report::Gone(id, cause, row.passed()));
    }

    /// Replaces the flow table: flows that are not in the new one take the slow path from now on.
    fn renew(&mut self) -> io::Result<()> {
        (self.stale, self.suspended) = (false, false);
        self.table.replace(&content(&self.devices)).map_err(io::Error::other)
    }

    /// Reads what the connections with the bit have counted, and removes idle ones.
    fn sweep(&mut self, now_ns: u64) -> io::Result<()> {
        let mut seen = BTreeSet::new();
        for tracked in self.conntrack.list(Some(OFFLOADED)).map_err(io::Error::other)? {
            let id = tuple(&tracked).and_then(|tuple| self.by_tuple.get(&tuple)).copied();
            let Some((id, row)) = id.and_then(|id| Some((id, self.rows.get_mut(&id)?))) else {
                // A packet that was being handled when the bit was cleared has written the old mark back.
                self.stale |= tracked.status & status::OFFLOAD != 0;
                let _ = self.conntrack.update(&tracked.original, tracked.zone, bit(false));
                continue;
            };
            seen.insert(id);
            row.counted(traffic(&tracked), now_ns);
        }
        let lost: Vec<_> =
            self.rows.iter().filter(|(id, _)| !seen.contains(id)).map(|(id, row)| (*id, row.tuple)).collect();
        for (id, tuple) in lost {
            // The opposite case: such a packet has cleared the bit. If the connection has ended, conntrack reports it.
            if !self.mark(&tuple, true).map_err(io::Error::other)? {
                self.take(id, Cause::Ended);
            }
        }
        let mut idle = Vec::new();
        for (id, row) in &self.rows {
            let stood = Duration::from_nanos(now_ns.saturating_sub(row.changed_ns));
            match stood > row.idle {
                true => idle.push(*id),
                false => self.reports.push_back(Report::Counted(*id, row.passed())),
            }
        }
        idle.into_iter().for_each(|id| self.take(id, Cause::Idle));
        Ok(())
    }
}

impl FastPath for FlowtablePath {
    fn install(&mut self, entry: &Entry) {
        let installed = self.try_install(entry);
        self.reports.push_back(match installed {
            Ok(()) => Report::Installed(entry.id),
            Err(why) => Report::Failed(entry.id, why),
        });
    }

    fn remove(&mut self, id: EntryId, cause: Cause) {
        self.take(id, cause);
    }

    fn suspend(&mut self) {
        self.suspended = true;
        // An empty table: nothing is forwarded until `renew`.
        if let Err(error) = self.table.replace(&Table::new(Family::Inet, TABLE)) {
            tracing::error!(%error, "cannot take the shunted flows from the flow table, although the rules have changed");
        }
    }

    fn tend(&mut self) -> io::Result<Duration> {
        if self.stale || self.suspended {
            // By now the core has removed every flow that the old rules allowed, so none has the bit.
            self.renew()?;
        }
        let now_ns = monotonic_ns();
        let since = Duration::from_nanos(now_ns.saturating_sub(self.swept_ns));
        if since < SWEEP {
            return Ok(SWEEP - since);
        }
        self.swept_ns = now_ns;
        self.sweep(now_ns)?;
        Ok(if self.stale { Duration::ZERO } else { SWEEP })
    }

    fn count(&mut self) -> io::Result<()> {
        self.sweep(monotonic_ns())
    }

    fn report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    /// True: every RST reaches conntrack.
    fn judges_resets(&self) -> bool {
        true
    }

    fn own_port(&self) -> Option<u32> {
        Some(self.port)
    }
}

/// Returns the table. Its rule adds connections with the bit, by packets that the other rules of this host have accepted.
fn content(devices: &[InterfaceName]) -> Table {
    let flowtable = Flowtable {
        name: FLOWTABLE.to_owned(),
        priority: priority::FILTER,
        devices: devices.to_vec(),
        counter: true,
    };
    let marked = Statement::mark(Field::CtMark, OFFLOADED.value, OFFLOADED.mask);
    // After every chain that could drop the packet.
    let chain = Chain::base("forward", ChainKind::Filter, Hook::Forward, LATE)
        .with(Rule::new([marked, Statement::FlowAdd(FLOWTABLE.to_owned())]));
    Table::new(Family::Inet, TABLE).with_flowtable(flowtable).with_chain(chain)
}

/// The priority of the chain: later than all filters.
const LATE: i32 = 1000;

const fn bit(is_set: bool) -> Change {
    let value = if is_set { OFFLOADED.value } else { 0 };
    let mark = Some(MarkBits { value, mask: OFFLOADED.mask });
    Change { mark, liberal: false, forget_acknowledged: false, timeout_s: None }
}

fn tuple(tracked: &Tracked) -> Option<Tuple> {
    conntrack::connection(tracked).map(|connection| connection.tuple)
}

fn traffic(tracked: &Tracked) -> Both {
    conntrack::connection(tracked).and_then(|connection| connection.traffic).unwrap_or_default()
}
