//! Several fast paths side by side: each entry names the one that should have it.

use super::flowtable::FlowtablePath;
use super::{BpfPath, ChaosPath, EngineError, FastPath, NoPath, Path, Report, Settings, SwitchPath};
use sidetrack_core::shunt::{Cause, Entry, EntryId, FastPathKind, Obstacle, PortNumber};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Longest time until the next call when nothing is due.
const NOTHING_DUE: Duration = Duration::from_secs(1);

/// The fast paths of a configuration.
pub(super) struct Paths {
    paths: BTreeMap<FastPathKind, Box<dyn FastPath>>,
    /// The fast path that has an entry, or was asked for it.
    entries: BTreeMap<EntryId, FastPathKind>,
    /// Reports for entries whose fast path does not exist.
    refused: VecDeque<Report>,
}

impl Path {
    /// Returns its kind; for a chaos path, the kind of the wrapped one.
    pub const fn kind(&self) -> FastPathKind {
        match self {
            Self::Bpf(kind) | Self::Chaos(kind, _) => kind.kind(),
            Self::OpenFlow(_) => FastPathKind::OpenFlow,
            Self::Flowtable => FastPathKind::Flowtable,
            Self::None => FastPathKind::None,
        }
    }

    /// Returns the ports that it can forward flows between.
    fn ports(&self, settings: &Settings) -> BTreeSet<PortNumber> {
        match self {
            Self::Bpf(_) | Self::Chaos(..) | Self::Flowtable | Self::None => {
                settings.ports.keys().copied().collect()
            }
            Self::OpenFlow(switch) => switch.all_ports().collect(),
        }
    }

    fn start(&self, settings: &Settings) -> Result<Box<dyn FastPath>, EngineError> {
        Ok(match self {
            Self::Bpf(kind) => Box::new(BpfPath::start(*kind, settings)?),
            Self::OpenFlow(switch) => Box::new(SwitchPath::start(switch)?),
            Self::Flowtable => Box::new(FlowtablePath::start(settings)?),
            Self::None => Box::new(NoPath::default()),
            Self::Chaos(kind, seed) => Box::new(ChaosPath::new(BpfPath::start(*kind, settings)?, *seed)),
        })
    }
}

impl Paths {
    /// Starts all fast paths in the settings.
    ///
    /// # Errors
    /// Returns the error of the first one that cannot start.
    pub(super) fn start(settings: &Settings) -> Result<Self, EngineError> {
        let mut paths = BTreeMap::new();
        for path in &settings.paths {
            paths.insert(path.kind(), path.start(settings)?);
        }
        Ok(Self { paths, entries: BTreeMap::new(), refused: VecDeque::new() })
    }

    /// Returns the ports that at least one of the fast paths knows. A fast path that does not know a port rejects the
    /// entry.
    pub(super) fn ports(settings: &Settings) -> BTreeSet<PortNumber> {
        settings.paths.iter().flat_map(|path| path.ports(settings)).collect()
    }

    /// Requests an entry.
    pub(super) fn install(&mut self, entry: &Entry) {
        match self.paths.get_mut(&entry.path) {
            Some(path) => {
                self.entries.insert(entry.id, entry.path);
                path.install(entry);
            }
            None => self.refused.push_back(Report::Failed(entry.id, Obstacle::Unreachable)),
        }
    }

    /// Requests the removal of an entry from the fast path that has it.
    pub(super) fn remove(&mut self, id: EntryId, cause: Cause) {
        if let Some(path) = self.entries.get(&id).and_then(|kind| self.paths.get_mut(kind)) {
            path.remove(id, cause);
        }
    }

    /// Suspends all fast paths, because the rules have changed.
    pub(super) fn suspend(&mut self) {
        self.paths.values_mut().for_each(|path| path.suspend());
    }

    /// Handles what is due. Returns the time until the next call is needed.
    ///
    /// # Errors
    /// Fails if one of them cannot continue.
    pub(super) fn tend(&mut self) -> io::Result<Duration> {
        self.paths.values_mut().try_fold(NOTHING_DUE, |least, path| Ok(least.min(path.tend()?)))
    }

    /// Reads what has passed until now.
    ///
    /// # Errors
    /// Fails if one of them cannot continue.
    pub(super) fn count(&mut self) -> io::Result<()> {
        self.paths.values_mut().try_for_each(|path| path.count())
    }

    /// Does the last work of all fast paths.
    pub(super) fn finish(&mut self) {
        self.paths.values_mut().for_each(|path| path.finish());
    }

    /// Returns the next report.
    pub(super) fn report(&mut self) -> Option<Report> {
        let first = self.refused.pop_front();
        let report = first.or_else(|| self.paths.values_mut().find_map(|path| path.report()))?;
        if let Report::Failed(id, _) | Report::Gone(id, ..) = report {
            self.entries.remove(&id);
        }
        Some(report)
    }

    /// True if conntrack can accept every RST that reaches it from a flow of this fast path.
    pub(super) fn judges_resets(&self, kind: FastPathKind) -> bool {
        self.paths.get(&kind).is_some_and(|path| path.judges_resets())
    }

    /// Returns the netlink ports through which they change nftables.
    pub(super) fn own_ports(&self) -> Vec<u32> {
        self.paths.values().filter_map(|path| path.own_port()).collect()
    }

    /// Returns descriptors; when one is readable, [`Paths::tend`] should be called.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.paths.values().flat_map(|path| path.descriptors())
    }
}
