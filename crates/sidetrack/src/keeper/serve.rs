//! The keeper's own side.

use super::{Ask, Told};
use crate::config::Config;
use crate::process;
use crate::steer::{Steer, TABLE};
use anyhow::Context;
use sidetrack_sys::conntrack::{self, Events, Group};
use sidetrack_sys::nft::{Lifetime, OwnError, OwnedTable};
use sidetrack_sys::undo::{Action, Guard};
use sidetrack_sys::{cgroup, process as system, route, scm};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

/// Receive buffer of the conntrack events, bytes: no event was lost at 28,000 connections a second.
const EVENTS_BUFFER: usize = 16 << 20;

/// Serves until the other end closes, then takes everything back.
///
/// # Errors
/// If the connection breaks in any other way.
pub fn keep(end: OwnedFd) -> anyhow::Result<()> {
    // The end of the connection is our only end: an interrupt from a terminal must not come before it.
    system::ignore_stop_signals();
    let guard = Guard::spawn(&[]).context("cannot start the guard that undoes what we do")?;
    let mut state = State { guard, table: None, marks: Vec::new(), orderly: false };
    while let Some(message) = scm::receive(&end)? {
        let (told, events) = match serde_json::from_slice(&message.bytes) {
            Ok(ask) => state.answer(ask),
            Err(error) => (Told::Failed(format!("not a request: {error}")), None),
        };
        let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
        scm::send(&end, &serde_json::to_vec(&told)?, &fds)?;
    }
    state.finish()
}

struct State {
    guard: Guard,
    table: Option<OwnedTable>,
    marks: Vec<route::MarkRule>,
    orderly: bool,
}

impl State {
    fn answer(&mut self, ask: Ask) -> (Told, Option<Events>) {
        match ask {
            Ask::Steer { name, text, bound, first_path } => match self.steer(&name, &text, bound, first_path)
            {
                Ok((warnings, events)) => (Told::Steered { warnings }, events),
                Err(error) => (Told::Failed(format!("{error:#}")), None),
            },
            Ask::Release => {
                self.orderly = true;
                (Told::Steered { warnings: Vec::new() }, None)
            }
            Ask::Owner { local, remote } => {
                let owner = process::on_this_host(local, remote);
                (Told::Owner { pid: owner.pid, name: owner.name, uid: owner.uid }, None)
            }
        }
    }

    fn steer(
        &mut self,
        name: &str,
        text: &str,
        bound: Vec<(String, SocketAddr)>,
        first_path: usize,
    ) -> anyhow::Result<(Vec<String>, Option<Events>)> {
        let config = Config::from_text(name, text).map_err(|error| anyhow::anyhow!("{error}"))?;
        let bound: Vec<_> = bound.into_iter().map(|(name, address)| (name.into(), address)).collect();
        let steer = Steer::new(&config, &bound, first_path, &cgroup::find_match)?;
        let mut warnings = Vec::new();
        for rule in &steer.mark_rules {
            self.add_mark_rule(*rule)?;
        }
        self.install(&steer, &mut warnings)?;
        let events = if steer.paths.is_empty() { None } else { self.events(&mut warnings) };
        Ok((warnings, events))
    }

    fn add_mark_rule(&mut self, rule: route::MarkRule) -> anyhow::Result<()> {
        if self.marks.contains(&rule) {
            return Ok(());
        }
        let interface = route::interface_index("lo")?;
        let (version, table) = (rule.version, rule.table);
        self.guard.add(&Action::RemoveLocalDefault { version, interface, table })?;
        self.guard.add(&Action::RemoveMarkRule(rule))?;
        route::add_local_default_in("lo", version, table)?;
        route::add_mark_rule(&rule)?;
        self.marks.push(rule);
        Ok(())
    }

    fn install(&mut self, steer: &Steer, warnings: &mut Vec<String>) -> anyhow::Result<()> {
        let table = steer.steering.table(TABLE);
        if let Some(owned) = self.table.as_mut().filter(|owned| owned.lifetime() == steer.lifetime) {
            return Ok(owned.replace(&table)?);
        }
        if let Some(owned) = self.table.take() {
            owned.delete()?;
        }
        self.table = Some(match OwnedTable::create(&table, steer.lifetime) {
            Ok(owned) => owned,
            Err(error @ (OwnError::OwnerUnsupported | OwnError::PersistUnsupported)) => {
                warnings.push(error.to_string());
                if steer.lifetime == Lifetime::Socket {
                    self.guard.add(&Action::DeleteTable { family: table.family, name: TABLE.into() })?;
                }
                OwnedTable::create(&table, Lifetime::Namespace)?
            }
            Err(error) => return Err(error.into()),
        });
        Ok(())
    }

    /// Conntrack events with byte counts; without them the kernel's flows have no records, but they flow.
    fn events(&mut self, warnings: &mut Vec<String>) -> Option<Events> {
        match conntrack::enable_accounting() {
            Ok(changed) => {
                for (name, value) in changed {
                    let action = Action::RestoreSetting { name: name.into(), value };
                    if let Err(error) = self.guard.add(&action) {
                        warnings.push(format!("the guard is gone: {error}"));
                    }
                }
            }
            Err(error) => warnings.push(format!("conntrack accounting: {error}; records lack byte counts")),
        }
        let events = Events::open(&[Group::Destroy], EVENTS_BUFFER);
        events
            .map_err(|error| warnings.push(format!("conntrack events: {error}; no records of kernel flows")))
            .ok()
    }

    /// Takes everything back; the guard sees the end of its pipe and does its part. A table that is to outlive a crash
    /// stays unless the end was orderly.
    fn finish(self) -> anyhow::Result<()> {
        match self.table {
            Some(table) if self.orderly || table.lifetime() == Lifetime::Socket => Ok(table.delete()?),
            _ => Ok(()),
        }
    }
}
