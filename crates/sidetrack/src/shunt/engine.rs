//! The thread that waits for all events of a shunt, and handles them.

use super::bpf::BpfPathError;
use super::conntrack::{
    Endings, WITH_PORTS, ask_again, connection, keep, keep_blocked, mark_decision, original, soon_unseen,
};
use super::flowtable::FlowtableError;
use super::owners::OwnerSearch;
use super::paths::Paths;
use super::record::{Capacity, FlowView, ShuntRecord};
use super::{Path, Settings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_core::shunt::{Connection, FastPathKind, Input, Output, Shunt, ShuntAction, Tuple};
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::monotonic_ns;
use sidetrack_sys::conntrack::{self as system, Change, Conntrack, Event, Events, Group, Only, buffer_bytes};
use sidetrack_sys::netlink;
use sidetrack_sys::nft::RuleChanges;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a fast path may take to remove all entries at the end.
const STOP: Duration = Duration::from_secs(3);

/// Why a shunt cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Conntrack.
    #[error("conntrack: {0}")]
    Conntrack(netlink::Error),
    /// Reports of rule changes.
    #[error("nftables: {0}")]
    Rules(netlink::Error),
    /// Byte counts and time stamps of conntrack.
    #[error("conntrack's accounting cannot be switched on: {0}; load a rule set that uses conntrack first")]
    Accounting(io::Error),
    /// The fast path.
    #[error(transparent)]
    Path(#[from] BpfPathError),
    /// The fast path of a flow table.
    #[error(transparent)]
    Flowtable(#[from] FlowtableError),
    /// Waiting failed, or the fast path broke.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// A running shunt.
pub struct Engine {
    shunt: Shunt,
    events: Events,
    table: Conntrack,
    endings: Endings,
    rules: RuleChanges,
    paths: Paths,
    owners: OwnerSearch,
    /// The netlink ports through which the fast paths change nftables.
    own_ports: Vec<u32>,
    records: Vec<ShuntRecord>,
    /// Settings of conntrack that were changed, with their former values.
    changed: Vec<(&'static str, String)>,
}

fn now() -> Instant {
    Instant::from_nanos(monotonic_ns())
}

impl Engine {
    /// Starts in the network namespace of this thread. It also finds flows that exist already.
    ///
    /// # Errors
    /// Returns what is missing.
    pub fn start(settings: &Settings) -> Result<Self, EngineError> {
        Self::start_then(settings, || Ok(()))
    }

    /// As [`Engine::start`]. Calls `loaded` once the fast paths are there, before it looks at a flow or starts a thread.
    ///
    /// # Errors
    /// Returns what is missing, or the error of `loaded`.
    pub fn start_then(
        settings: &Settings,
        loaded: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, EngineError> {
        // This must precede the first list: a connection that began without accounting has no time stamp.
        let changed = system::enable_accounting().map_err(EngineError::Accounting)?;
        let groups = [Group::New, Group::Update, Group::Destroy];
        // A connection whose mark is cleared must be reported too; the many that never had a mark need not.
        let events = Events::open(&groups, Only::AnyMark, buffer_bytes()).map_err(EngineError::Conntrack)?;
        let rules = RuleChanges::open().map_err(EngineError::Rules)?;
        let table = Conntrack::open().map_err(EngineError::Conntrack)?;
        let paths = Paths::start(settings)?;
        loaded()?;
        let mut core = settings.core.clone();
        core.ports = Paths::ports(settings);
        core.fast_path = settings.paths.first().map_or(FastPathKind::None, Path::kind);
        let shunt = Shunt::new(core, now());
        let (own_ports, records) = (paths.own_ports(), Vec::new());
        let owners = OwnerSearch::new()?;
        let endings = Endings::read();
        let mut engine =
            Self { shunt, events, table, endings, rules, paths, owners, own_ports, records, changed };
        engine.obey()?;
        Ok(engine)
    }

    /// Returns the settings of conntrack that were changed, with their former values.
    pub fn changed(&self) -> &[(&'static str, String)] {
        &self.changed
    }

    /// Returns the flows that concern the fast path.
    pub fn flows(&self) -> Vec<FlowView> {
        // Both clocks are read at one moment, so that the times of the list are consistent.
        let (now, wall) = (now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        let view = |flow| {
            let state = (self.shunt.action(flow), self.shunt.obstacle(flow));
            FlowView::new(flow, self.shunt.rule(flow), state, now, wall)
        };
        self.shunt.flows().map(view).collect()
    }

    /// Returns how full the fast path is.
    pub fn capacity(&self) -> Capacity {
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        Capacity {
            entries: count(self.shunt.entries()),
            entries_max: count(self.shunt.entries_max()),
            waiting: count(self.shunt.waiting()),
            evicted: self.shunt.evicted(),
        }
    }

    /// Updates the counts from conntrack and the fast path, for the next call of [`Engine::flows`].
    ///
    /// # Errors
    /// Like [`Engine::turn`].
    pub fn count(&mut self) -> Result<(), EngineError> {
        self.paths.count()?;
        self.reports()?;
        self.count_slow()?;
        self.obey()
    }

    fn count_slow(&mut self) -> Result<(), EngineError> {
        let entries = self.table.list(Some(WITH_PORTS)).map_err(EngineError::Conntrack)?;
        for connection in entries.iter().filter_map(connection) {
            // Only the counts are used: the list is newer than reports that have not been read yet.
            if let Some(traffic) = connection.traffic {
                self.shunt.handle(now(), Input::SlowCounted(connection.tuple, connection.identity, traffic));
            }
        }
        Ok(())
    }

    /// Returns the records of flows that ended, each once.
    pub fn records(&mut self) -> Vec<ShuntRecord> {
        std::mem::take(&mut self.records)
    }

    /// Waits for an event or until `also` is readable, at most for `patience`, and handles what is due. Returns true if
    /// `also` is readable.
    ///
    /// # Errors
    /// Fails if the shunt cannot continue.
    pub fn turn(&mut self, patience: Duration, also: Option<BorrowedFd<'_>>) -> Result<bool, EngineError> {
        let tend = self.paths.tend()?;
        self.reports()?;
        let due = self.shunt.deadline().map_or(patience, |at| at - now());
        let readable = self.wait(patience.min(tend).min(due), also)?;
        // Rules first: what the old rules allowed must not pass longer than it takes to learn of the change.
        if self.rules.any_but_of(&self.own_ports).map_err(EngineError::Rules)? {
            self.paths.suspend();
            self.tell(Input::RulesChanged)?;
        }
        self.take_events()?;
        for ((tuple, identity), process) in self.owners.answers() {
            self.tell(Input::Owned(tuple, identity, &process))?;
        }
        self.tell(Input::Tick)?;
        Ok(readable)
    }

    fn wait(&self, patience: Duration, also: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        let mut fds: Vec<BorrowedFd<'_>> = vec![self.events.as_fd(), self.rules.as_fd(), self.owners.as_fd()];
        fds.extend(self.paths.descriptors());
        fds.extend(also);
        let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let limit = Timespec {
            tv_sec: patience.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: patience.subsec_nanos().into(),
        };
        match poll(&mut polled, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(also.is_some() && polled.last().is_some_and(|fd| !fd.revents().is_empty()))
    }

    fn take_events(&mut self) -> Result<(), EngineError> {
        let mut batch = Vec::new();
        self.events.read(&mut batch).map_err(EngineError::Conntrack)?;
        for event in batch {
            let told = match event {
                Event::New(entry) | Event::Update(entry) => connection(&entry).map(Input::Connection),
                Event::Destroy(entry) => connection(&entry).map(Input::Ended),
                Event::Overrun => {
                    tracing::warn!("conntrack reports were lost; listing all connections");
                    Some(Input::EventsLost)
                }
            };
            if let Some(input) = told {
                self.tell(input)?;
            }
        }
        Ok(())
    }

    fn reports(&mut self) -> Result<(), EngineError> {
        while let Some(report) = self.paths.report() {
            self.shunt.handle(now(), report.into());
        }
        self.obey()
    }

    /// Gives the core an input, and performs its outputs.
    fn tell(&mut self, input: Input<'_>) -> Result<(), EngineError> {
        self.shunt.handle(now(), input);
        self.obey()
    }

    fn obey(&mut self) -> Result<(), EngineError> {
        while let Some(output) = self.shunt.poll() {
            match output {
                Output::Install(entry) => {
                    if !entry.block {
                        self.change(&entry.tuple, soon_unseen());
                    }
                    self.paths.install(&entry);
                }
                Output::Remove(id, cause) => self.paths.remove(id, cause),
                Output::Keep(tuple, _) => {
                    let path = self.shunt.flow(&tuple).map(|flow| flow.path);
                    let judged = path.is_some_and(|path| self.paths.judges_resets(path));
                    self.change(&tuple, keep(judged));
                    self.unless_over(&tuple);
                }
                Output::KeepBlocked(tuple, _) => self.change(&tuple, keep_blocked()),
                Output::MarkBlocked(tuple, _, number) => self.change(&tuple, mark_decision(number)),
                Output::Ask(tuple, _) => self.change(&tuple, ask_again()),
                Output::List => self.list()?,
                Output::CountSlow => self.count_slow()?,
                Output::Whose(tuple, identity) => self.owners.look_for((tuple, identity)),
                Output::Record(flow) => {
                    self.records.push(ShuntRecord::new(&flow, self.shunt.rule(&flow)));
                }
            }
            while let Some(report) = self.paths.report() {
                self.shunt.handle(now(), report.into());
            }
        }
        Ok(())
    }

    /// Changes a connection in conntrack. If the connection has ended, its report is on the way.
    fn change(&mut self, tuple: &Tuple, change: Change) {
        if let Err(error) = self.table.update(&original(tuple), tuple.zone, change) {
            tracing::warn!(%error, flow = %tuple, "conntrack does not take a change");
        }
    }

    /// Takes back that a connection is kept, if it had ended before: no packet of it comes that would do so.
    fn unless_over(&mut self, tuple: &Tuple) {
        let found = self.table.find(&original(tuple), tuple.zone).ok().flatten();
        let over = found.and_then(|entry| self.endings.over(entry.tcp_state?));
        over.into_iter().for_each(|change| self.change(tuple, change));
    }

    fn list(&mut self) -> Result<(), EngineError> {
        // Reports that came before the list are older than the list.
        let mut old = Vec::new();
        while self.events.read(&mut old).map_err(EngineError::Conntrack)? {
            old.clear();
        }
        let entries = self.table.list(Some(WITH_PORTS)).map_err(EngineError::Conntrack)?;
        let connections: Vec<Connection> = entries.iter().filter_map(connection).collect();
        self.shunt.handle(now(), Input::Listed(&connections));
        Ok(())
    }

    /// Sets an action for a connection, regardless of policy. Returns false if there is no such connection.
    ///
    /// # Errors
    /// Like [`Engine::turn`].
    pub fn pin(&mut self, tuple: &Tuple, action: ShuntAction) -> Result<bool, EngineError> {
        // Looks up one connection: a list walks through the whole table, which takes milliseconds even if it is empty.
        let entry = self.table.find(&original(tuple), tuple.zone).map_err(EngineError::Conntrack)?;
        let entry = entry.filter(|entry| entry.mark & WITH_PORTS.mask == WITH_PORTS.value);
        // A lookup by the addresses of the reply finds the connection too, but it is not this tuple.
        let found = entry.as_ref().and_then(connection).filter(|connection| connection.tuple == *tuple);
        let Some(found) = found else { return Ok(false) };
        self.tell(Input::Pinned(found, action))?;
        Ok(true)
    }

    /// Withdraws an entry or a pinned action, so that policy is asked again. Returns false if there is no such flow.
    ///
    /// # Errors
    /// Like [`Engine::turn`].
    pub fn withdraw(&mut self, tuple: &Tuple) -> Result<bool, EngineError> {
        let known = self.shunt.flow(tuple).is_some();
        self.tell(Input::Withdraw(*tuple))?;
        Ok(known)
    }

    /// Removes every entry. The flows continue on the slow path.
    ///
    /// # Errors
    /// Like [`Engine::turn`].
    pub fn stop(&mut self) -> Result<(), EngineError> {
        self.tell(Input::Shutdown)?;
        let begun = now();
        while !self.shunt.is_empty() && now() - begun < STOP {
            let tend = self.paths.tend()?;
            self.reports()?;
            self.wait(tend.min(STOP), None)?;
        }
        self.paths.finish();
        Ok(())
    }
}
