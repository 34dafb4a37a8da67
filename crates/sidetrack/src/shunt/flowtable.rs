//! The fast path of the kernel's own flow tables (nftables): conntrack's mark has a bit for the flows that are to be forwarded
//! by it, and a rule adds those with their next packet.
//!
//! The kernel ends an entry by itself: on FIN or RST, which it hands to the slow path, or after half a minute without a packet.
//! It cannot be told to end a single one: the bit is cleared, and the flow table is made anew, without a moment in which
//! the others have none; they take the slow path for a packet each. What passes is added to conntrack's counters, so what a
//! flow had when it was installed is taken from what it has.

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

/// The table, and the flow table in it.
const TABLE: &str = "sidetrack_shunt";
const FLOWTABLE: &str = "shunted";

/// The bit of a connection's mark for which the rule adds it: the one that NFShunt's layout leaves unused.
const OFFLOADED: MarkBits = MarkBits { value: 0x8000_0000, mask: 0x8000_0000 };

/// How often the connections with the bit are looked at.
const SWEEP: Duration = Duration::from_millis(500);

/// Why there is no fast path of a flow table.
#[derive(Debug, thiserror::Error)]
pub enum FlowtableError {
    /// The kernel has none.
    #[error(
        "this kernel has no flow tables (it needs {}): use fast_path = \"tc\" or \"xdp\"",
        Feature::Flowtable.needs()
    )]
    Unsupported,
    /// A port's interface has a name that none can have.
    #[error("port {0}: {1}; name its interface under [[shunt.port]]")]
    Port(PortNumber, String),
    /// The table cannot be ours.
    #[error(transparent)]
    Own(#[from] OwnError),
    /// The kernel refused.
    #[error("the flow table of the shunt: {0}")]
    Kernel(#[from] netlink::Error),
}

/// A flow that has the bit.
#[derive(Clone, Copy, Debug)]
struct Row {
    tuple: Tuple,
    idle: Duration,
    /// What conntrack had counted when it was installed, and has now.
    before: Both,
    now: Both,
    /// When that last changed.
    changed_ns: u64,
}

impl Row {
    fn passed(&self) -> Both {
        self.now.less(self.before)
    }

    /// Notes what conntrack has counted.
    fn counted(&mut self, now: Both, now_ns: u64) {
        if now != self.now {
            (self.now, self.changed_ns) = (now, now_ns);
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct FlowtablePath {
    table: OwnedTable,
    port: u32,
    devices: Vec<InterfaceName>,
    conntrack: Conntrack,
    rows: BTreeMap<EntryId, Row>,
    by_tuple: BTreeMap<Tuple, EntryId>,
    /// The kernel may forward what has no row any more.
    stale: bool,
    /// Nothing is forwarded: the rules have changed, and what they allowed is on its way out.
    suspended: bool,
    swept_ns: u64,
    reports: VecDeque<Report>,
}

impl FlowtablePath {
    /// Makes the flow table between all ports. It goes with this process, in whatever way it ends.
    ///
    /// # Errors
    /// Where the kernel has none, an interface is not there, or is in another flow table.
    pub fn start(settings: &Settings) -> Result<Self, FlowtableError> {
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
        // Bits that a predecessor left are of flows that policy is asked about anew.
        path.clear_strangers()?;
        Ok(path)
    }

    /// Takes the bit from connections that have no row.
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

    /// Sets or clears the bit; says whether there is such a connection.
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
            // It ended meanwhile.
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
        // First the bit: what the rule would add again is not to be forwarded.
        if let Err(error) = self.mark(&row.tuple, false) {
            tracing::error!(%error, flow = %row.tuple, "cannot take a flow from the flow table; it ends when it stands still");
        }
        if let Some(tracked) = self.find(&row.tuple) {
            self.stale |= tracked.status & status::OFFLOAD != 0;
            row.counted(traffic(&tracked), 0);
        }
        self.reports.push_back(Report::Gone(id, cause, row.passed()));
    }

    /// Makes the flow table anew: what is not in it any more takes the slow path from now on.
    fn renew(&mut self) -> io::Result<()> {
        (self.stale, self.suspended) = (false, false);
        self.table.replace(&content(&self.devices)).map_err(io::Error::other)
    }

    /// Looks at what the connections with the bit have counted, and which stand still.
    fn sweep(&mut self, now_ns: u64) -> io::Result<()> {
        let mut seen = BTreeSet::new();
        for tracked in self.conntrack.list(Some(OFFLOADED)).map_err(io::Error::other)? {
            let id = tuple(&tracked).and_then(|tuple| self.by_tuple.get(&tuple)).copied();
            let Some((id, row)) = id.and_then(|id| Some((id, self.rows.get_mut(&id)?))) else {
                // A packet that was under way when its bit was cleared has brought the old mark back.
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
            // The same the other way round; one that ended is reported by conntrack, and removed for that.
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
        if let Err(error) = self.table.replace(&Table::new(Family::Inet, TABLE)) {
            tracing::error!(%error, "cannot take the shunted flows from the flow table, although the rules have changed");
        }
    }

    fn tend(&mut self) -> io::Result<Duration> {
        if self.stale || self.suspended {
            // By now every flow that the old rules allowed has been asked for back, and has no bit.
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

    /// Each is shown to conntrack.
    fn judges_resets(&self) -> bool {
        true
    }

    fn own_port(&self) -> Option<u32> {
        Some(self.port)
    }
}

/// The table: connections with the bit are added by the packet that the rules of this host have let pass.
fn content(devices: &[InterfaceName]) -> Table {
    let flowtable = Flowtable {
        name: FLOWTABLE.to_owned(),
        priority: priority::FILTER,
        devices: devices.to_vec(),
        counter: true,
    };
    let marked = Statement::mark(Field::CtMark, OFFLOADED.value, OFFLOADED.mask);
    // Behind every chain that could drop it.
    let chain = Chain::base("forward", ChainKind::Filter, Hook::Forward, LATE)
        .with(Rule::new([marked, Statement::FlowAdd(FLOWTABLE.to_owned())]));
    Table::new(Family::Inet, TABLE).with_flowtable(flowtable).with_chain(chain)
}

/// Later than whatever filters.
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
