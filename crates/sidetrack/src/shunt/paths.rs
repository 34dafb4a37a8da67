//! Several fast paths side by side: each entry says which is to have it.

use super::flowtable::FlowtablePath;
use super::{BpfPath, ChaosPath, EngineError, FastPath, NoPath, Path, Report, Settings, SwitchPath};
use sidetrack_core::shunt::{Cause, Entry, EntryId, FastPathKind, Obstacle, PortNumber};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How long nothing at all may be due.
const NOTHING_DUE: Duration = Duration::from_secs(1);

/// The fast paths of a configuration.
pub struct Paths {
    paths: BTreeMap<FastPathKind, Box<dyn FastPath>>,
    /// Which one has an entry, or is to have it.
    entries: BTreeMap<EntryId, FastPathKind>,
    /// Of entries for a fast path that is not there.
    refused: VecDeque<Report>,
}

impl Path {
    /// Its kind; of one that fails, that of the one inside.
    pub const fn kind(&self) -> FastPathKind {
        match self {
            Self::Bpf(kind) | Self::Chaos(kind, _) => kind.kind(),
            Self::OpenFlow(_) => FastPathKind::OpenFlow,
            Self::Flowtable => FastPathKind::Flowtable,
            Self::None => FastPathKind::None,
        }
    }

    /// The ports that it can lead flows between.
    fn ports(&self, settings: &Settings) -> BTreeSet<PortNumber> {
        match self {
            Self::Bpf(_) | Self::Chaos(..) | Self::Flowtable | Self::None => {
                settings.ports.keys().copied().collect()
            }
            Self::OpenFlow(switch) => switch.ports.keys().copied().collect(),
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
    /// Starts all that the settings name.
    ///
    /// # Errors
    /// Of the first that cannot be started.
    pub fn start(settings: &Settings) -> Result<Self, EngineError> {
        let mut paths = BTreeMap::new();
        for path in &settings.paths {
            paths.insert(path.kind(), path.start(settings)?);
        }
        Ok(Self { paths, entries: BTreeMap::new(), refused: VecDeque::new() })
    }

    /// The ports that one of the settings' fast paths knows; one that does not refuses the entry.
    pub fn ports(settings: &Settings) -> BTreeSet<PortNumber> {
        settings.paths.iter().flat_map(|path| path.ports(settings)).collect()
    }

    /// Asks for an entry.
    pub fn install(&mut self, entry: &Entry) {
        match self.paths.get_mut(&entry.path) {
            Some(path) => {
                self.entries.insert(entry.id, entry.path);
                path.install(entry);
            }
            None => self.refused.push_back(Report::Failed(entry.id, Obstacle::Unreachable)),
        }
    }

    /// Asks the one that has an entry to let go of it.
    pub fn remove(&mut self, id: EntryId, cause: Cause) {
        if let Some(path) = self.entries.get(&id).and_then(|kind| self.paths.get_mut(kind)) {
            path.remove(id, cause);
        }
    }

    /// The rules have changed.
    pub fn suspend(&mut self) {
        self.paths.values_mut().for_each(|path| path.suspend());
    }

    /// Does what is due; says for how long all may be left alone.
    ///
    /// # Errors
    /// If one is broken for good.
    pub fn tend(&mut self) -> io::Result<Duration> {
        self.paths.values_mut().try_fold(NOTHING_DUE, |least, path| Ok(least.min(path.tend()?)))
    }

    /// Looks at what has passed, now.
    ///
    /// # Errors
    /// If one is broken for good.
    pub fn count(&mut self) -> io::Result<()> {
        self.paths.values_mut().try_for_each(|path| path.count())
    }

    /// Does what is to be done at the very end.
    pub fn finish(&mut self) {
        self.paths.values_mut().for_each(|path| path.finish());
    }

    /// The next report.
    pub fn report(&mut self) -> Option<Report> {
        let first = self.refused.pop_front();
        let report = first.or_else(|| self.paths.values_mut().find_map(|path| path.report()))?;
        if let Report::Failed(id, _) | Report::Gone(id, ..) = report {
            self.entries.remove(&id);
        }
        Some(report)
    }

    /// Whether a RST of a flow that this one has is to be believed when it reaches conntrack.
    pub fn judges_resets(&self, kind: FastPathKind) -> bool {
        self.paths.get(&kind).is_some_and(|path| path.judges_resets())
    }

    /// The netlink ports by which they change nftables.
    pub fn own_ports(&self) -> Vec<u32> {
        self.paths.values().filter_map(|path| path.own_port()).collect()
    }

    /// Descriptors that make it worth tending when they are readable.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.paths.values().flat_map(|path| path.descriptors())
    }
}
