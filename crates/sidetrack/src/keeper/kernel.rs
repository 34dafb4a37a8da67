//! The changes that the keeper makes in the kernel, and how it undoes them.

use super::KernelFlow;
use super::derive::Work;
use crate::steer::{Path, TABLE};
use anyhow::Context;
use sidetrack_core::flow::Protocol as Transport;
use sidetrack_sys::conntrack::{self, Conntrack, Entry, Events, Group, Only, buffer_bytes};
use sidetrack_sys::netlink::{self, Protocol, Socket};
use sidetrack_sys::nft::{self, Family, Feature, KernelPath, Lifetime, OwnError, OwnedTable, Table};
use sidetrack_sys::route;
use sidetrack_sys::undo::{Action, Guard};
use std::io;
use std::time::{Duration, Instant};

/// How often changes by other programs are repaired and expired conntrack entries are removed.
const TEND_EVERY: Duration = Duration::from_secs(1);

/// `tend` may take at most 1/`TEND_SHARE` of the time: a conntrack table with a million entries takes a while.
const TEND_SHARE: u32 = 50;

/// How long to wait until the keeper of a killed predecessor has undone its changes and released its table.
const HANDOVER: Duration = Duration::from_secs(3);
const HANDOVER_PAUSE: Duration = Duration::from_millis(20);

/// Most flows in one list.
const FLOWS_MAX: usize = 65_536;

/// The interface of the route that makes every address local.
const LOOPBACK: &str = "lo";

/// All changes that were made.
pub(super) struct Kernel {
    guard: Guard,
    /// The actions that undo the changes, in the order of the changes. The guard has the same list.
    undo: Vec<Action>,
    table: Option<OwnedTable>,
    marks: Vec<route::MarkRule>,
    /// Open while the kernel forwards flows without us.
    conntrack: Option<Conntrack>,
    /// The paths of datagrams, whose flows may run: those in force, and equal ones of earlier orders. `None` before the first
    /// order.
    datagrams: Option<Vec<KernelPath>>,
    tend_at: Instant,
}

impl Kernel {
    /// The state before any change.
    pub(super) fn new(guard: Guard) -> Self {
        let (undo, marks) = (Vec::new(), Vec::new());
        Self { guard, undo, table: None, marks, conntrack: None, datagrams: None, tend_at: Instant::now() }
    }

    /// Lets the kernel do this work instead of the previous one.
    pub(super) fn steer(&mut self, mut work: Work) -> anyhow::Result<(Vec<String>, Option<Events>)> {
        let mut warnings = Vec::new();
        // Own the table first: only its owner may steer in this namespace, so nothing else is changed before.
        self.own()?;
        for rule in &work.mark_rules {
            self.add_mark_rule(*rule)?;
        }
        let alone = !work.steering.kernel_paths.is_empty();
        let events = if alone { self.watch_conntrack(&mut work, &mut warnings) } else { None };
        self.install(&work, &mut warnings)?;
        if let Err(error) = self.follow_rules(work.steering.kernel_paths) {
            warnings.push(format!("conntrack: {error}; datagrams of running flows pass by earlier rules"));
        }
        Ok((warnings, events))
    }

    /// Ends the flows of UDP that the kernel forwards by paths which are not in force any more, also those of a predecessor.
    /// UDP has no end of a connection: a client that goes on would keep such a flow for ever.
    fn follow_rules(&mut self, paths: Vec<KernelPath>) -> Result<(), netlink::Error> {
        let mut paths: Vec<_> = paths.into_iter().filter(|path| path.protocol == Transport::Udp).collect();
        let before = self.datagrams.replace(paths.clone());
        if paths.is_empty() && before.as_ref().is_some_and(Vec::is_empty) {
            return Ok(());
        }
        let mut conntrack = Conntrack::open()?;
        let entries = conntrack.list(Some(Path::ANY))?;
        let is_of = |path: &KernelPath, entry: &Entry| entry.mark & path.mark.mask == path.mark.value;
        let goes_on = |old: &KernelPath| {
            paths.iter().any(|new| new.route == old.route && new.mark != old.mark)
                && entries.iter().any(|entry| is_of(old, entry))
        };
        let earlier: Vec<_> = before.into_iter().flatten().filter(goes_on).collect();
        paths.extend(earlier);
        let over = entries.iter().filter(|entry| !paths.iter().any(|path| is_of(path, entry)));
        forget_datagrams(&mut conntrack, over)?;
        self.datagrams = Some(paths);
        Ok(())
    }

    /// Notes how to undo a change. Call it before the change is made.
    fn note(&mut self, action: Action) -> io::Result<()> {
        self.undo.push(action);
        let added = self.undo.last().map(|action| self.guard.add(action));
        if added.is_some_and(|added| added.is_err()) {
            tracing::warn!("the guard process was gone; another one takes its place");
            self.guard = Guard::spawn(&self.undo)?;
        }
        Ok(())
    }

    fn forget(&mut self, action: &Action) {
        self.undo.retain(|other| other != action);
        // If the guard is gone, the next note detects that.
        let _ = self.guard.remove(action);
    }

    /// Takes over the table of a predecessor, or creates an empty one.
    fn own(&mut self) -> anyhow::Result<()> {
        if self.table.is_some() {
            return Ok(());
        }
        let until = Instant::now() + HANDOVER;
        let adopted = loop {
            match OwnedTable::adopt(Family::Inet, TABLE) {
                Err(OwnError::OwnedByAnother { .. }) if Instant::now() < until => {
                    std::thread::sleep(HANDOVER_PAUSE);
                }
                adopted => break adopted,
            }
        };
        let empty = Table::new(Family::Inet, TABLE);
        self.table = Some(match adopted {
            Ok(table) => {
                tracing::info!("taking over the rules that kept traffic blocked");
                table
            }
            Err(OwnError::NoOrphan { .. }) => match OwnedTable::create(&empty, Lifetime::Socket) {
                Err(OwnError::OwnerUnsupported) => OwnedTable::create(&empty, Lifetime::Namespace)?,
                made => made?,
            },
            Err(error) => return Err(error.into()),
        });
        Ok(())
    }

    fn install(&mut self, work: &Work, warnings: &mut Vec<String>) -> anyhow::Result<()> {
        let content = work.steering.table(TABLE);
        let table = self.table.as_mut().context("no table")?;
        if table.lifetime() == Lifetime::Namespace {
            table.replace(&content)?;
        } else {
            match table.replace_as(&content, work.lifetime) {
                Err(OwnError::PersistUnsupported) => table.replace_as(&content, Lifetime::Namespace)?,
                done => done?,
            }
        }
        let unowned = table.lifetime() == Lifetime::Namespace;
        if unowned {
            warnings.push(
                "this kernel cannot tie our nftables table to our process (Linux 5.12, for on_crash = \"closed\" \
                 6.9): another program's 'nft flush ruleset' removes it"
                    .into(),
            );
        }
        let delete = Action::DeleteTable { family: Family::Inet, name: TABLE.into() };
        self.forget(&delete);
        if unowned && work.lifetime == Lifetime::Socket {
            self.note(delete)?;
        }
        Ok(())
    }

    fn add_mark_rule(&mut self, rule: route::MarkRule) -> anyhow::Result<()> {
        if self.marks.contains(&rule) {
            return Ok(());
        }
        let interface = route::interface_index(LOOPBACK)?;
        let (version, table) = (rule.version, rule.table);
        // Note both ways to undo before the changes: a crash in between leaves nothing behind.
        self.note(Action::RemoveLocalDefault { version, interface, table })?;
        self.note(Action::RemoveMarkRule(rule))?;
        route::add_local_default_in(LOOPBACK, version, table)?;
        route::add_mark_rule(&rule)?;
        self.marks.push(rule);
        Ok(())
    }

    /// Subscribes to conntrack events with byte counts. Without them the kernel still forwards flows, but without records.
    fn watch_conntrack(&mut self, work: &mut Work, warnings: &mut Vec<String>) -> Option<Events> {
        if let Err(error) = self.account() {
            warnings.push(format!("conntrack accounting: {error}; records lack byte counts"));
        }
        let knows = |feature| {
            Socket::open(Protocol::Netfilter).and_then(|mut socket| nft::knows(&mut socket, feature))
        };
        if !knows(Feature::CtTimeout).unwrap_or(false) {
            work.steering.forget_ended = false;
            work.steering.datagram_idle_s = None;
            warnings.push(format!(
                "records of the kernel's flows come two minutes after their end: {} takes {}",
                Feature::CtTimeout,
                Feature::CtTimeout.needs()
            ));
        }
        self.conntrack = Conntrack::open().ok();
        let events = Events::open(&[Group::Destroy], Only::Marked(Path::ANY), buffer_bytes());
        events
            .map_err(|error| warnings.push(format!("conntrack events: {error}; no records of kernel flows")))
            .ok()
    }

    fn account(&mut self) -> io::Result<()> {
        for (name, value) in conntrack::enable_accounting()? {
            self.note(Action::RestoreSetting { name: name.into(), value })?;
        }
        Ok(())
    }

    /// Repairs changes by other programs, and removes expired conntrack entries. Returns how long to wait until the next call;
    /// `None`: no further call is needed.
    pub(super) fn tend(&mut self) -> Option<Duration> {
        if self.marks.is_empty() && self.conntrack.is_none() {
            return None;
        }
        let begun = Instant::now();
        if begun >= self.tend_at {
            for rule in &self.marks {
                if let Err(error) = route::restore_mark_rule(LOOPBACK, rule) {
                    tracing::warn!(%error, "cannot restore the routing that tproxy needs");
                }
            }
            if self.conntrack.is_some() {
                // If it fails, a warning was given at the start.
                let _ = self.account();
            }
            if let Some(error) = self.conntrack.as_mut().and_then(|table| table.evict_expired().err()) {
                tracing::warn!(%error, "cannot look through conntrack");
            }
            self.tend_at = begun + TEND_EVERY.max(begun.elapsed() * TEND_SHARE);
        }
        Some(self.tend_at.saturating_duration_since(Instant::now()))
    }

    /// The flows that the kernel forwards without us, the oldest first.
    pub(super) fn flows(&mut self) -> Result<Vec<KernelFlow>, netlink::Error> {
        let Some(conntrack) = &mut self.conntrack else { return Ok(Vec::new()) };
        let entries = conntrack.list(Some(Path::ANY))?;
        let mut flows: Vec<_> = entries.iter().take(FLOWS_MAX).map(KernelFlow::from).collect();
        flows.sort_by_key(|flow| flow.start_ns);
        Ok(flows)
    }

    /// Undoes all changes. A table that must outlive a crash is deleted only at an orderly end.
    ///
    /// The table is deleted last: a successor waits for it, and must not see half of the changes.
    pub(super) fn take_back(self, orderly: bool) -> anyhow::Result<()> {
        let mut undone = true;
        for action in self.undo.iter().rev() {
            if let Err(error) = action.perform() {
                tracing::error!(%error, "not taken back; 'sidetrack cleanup' tries again");
                undone = false;
            }
        }
        if undone {
            // If the guard was killed, there is nothing to disarm.
            let _ = self.guard.disarm();
        }
        let Some(table) = self.table.filter(|table| orderly || table.lifetime() == Lifetime::Socket) else {
            return Ok(());
        };
        table.delete()?;
        if self.datagrams.is_some_and(|paths| !paths.is_empty()) {
            // If another program translates addresses, the kernel would go on with our translations.
            let mut conntrack = Conntrack::open()?;
            let entries = conntrack.list(Some(Path::ANY))?;
            forget_datagrams(&mut conntrack, entries.iter())?;
        }
        Ok(())
    }
}

/// Ends the flows of UDP among these: the next datagram begins another one, by the rules that are in force.
fn forget_datagrams<'a>(
    conntrack: &mut Conntrack,
    entries: impl Iterator<Item = &'a Entry>,
) -> Result<(), netlink::Error> {
    for entry in entries.filter(|entry| entry.original.protocol == Transport::Udp.number()) {
        conntrack.delete(entry)?;
    }
    Ok(())
}
