//! The entries of a controller: sending them to the switch, confirmation, refusal, removal, and taking over those of
//! an earlier run.

use super::controller::{Controller, ControllerOutput, PRIORITY_FLOW, Stage};
use super::entries::{Cookie, End, Place, Refusal, Row, State, Way};
use super::message::Request;
use super::pattern::{Pattern, Protocol};
use super::wire::Version;
use super::{Command, FlowMod, Removal};
use crate::shunt::{Both, Cause, Entry, EntryId, Obstacle, Traffic, Transport};
use crate::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// `OFPBRC_IS_SLAVE` of `OFPET_BAD_REQUEST`.
const IS_SLAVE: (u16, u16) = (1, 10);
/// `OFPRRFC_STALE` of `OFPET_ROLE_REQUEST_FAILED`.
const STALE: (u16, u16) = (11, 0);
const DISPLACED: &str = "another controller made itself the master of the switch; this one claims it again when the \
                         switch connects";

impl Controller {
    pub(super) fn install(&mut self, now: Instant, entry: &Entry, ways: &'static [Way]) {
        let id = entry.id;
        if self.stage != Stage::Ready {
            return self.outputs.push_back(ControllerOutput::Failed(id, Obstacle::Unreachable));
        }
        self.rows.insert(id, Row::new(*entry, ways, now));
        self.add(now, id);
    }

    /// Sends the directions of an entry to the switch.
    pub(super) fn add(&mut self, now: Instant, id: EntryId) {
        self.forget(id);
        let Some((entry, ways)) = self.rows.get(&id).map(|row| (row.entry, row.ways)) else { return };
        let mods = match self.flow_mods(&entry, ways, self.flags) {
            Ok(mods) => mods,
            Err(why) => {
                self.rows.remove(&id);
                return self.outputs.push_back(ControllerOutput::Failed(id, why));
            }
        };
        // Take over the counters now: the new entry replaces the old one and starts at zero.
        self.adopt(id, &mods);
        let xids = self.transact(id, mods.iter().map(|(_, change)| *change));
        if let Some(row) = self.rows.get_mut(&id) {
            row.settle();
            row.since = now;
            row.flags = mods.iter().any(|(_, change)| change.pattern.established);
            row.state = State::Adding { barrier: xids.last().copied(), error: None };
            row.xids = xids;
        }
    }

    /// Sends changes and a barrier. Returns their transaction ids; the last one is that of the barrier.
    fn transact(&mut self, id: EntryId, mods: impl Iterator<Item = FlowMod>) -> Vec<u32> {
        let mut xids: Vec<_> = mods.map(|change| self.change(change)).collect();
        xids.push(self.send(&Request::Barrier));
        self.xids.extend(xids.iter().map(|xid| (*xid, id)));
        xids
    }

    pub(super) fn remove(&mut self, now: Instant, id: EntryId, end: End) {
        let Some(row) = self.rows.get(&id) else { return };
        if matches!(row.state, State::Removing { barrier: Some(_), .. }) {
            return;
        }
        let (entry, ways, flags) = (row.entry, row.ways, row.flags);
        self.forget(id);
        let mut xids = Vec::new();
        if self.stage == Stage::Ready
            && let Ok(mods) = self.flow_mods(&entry, ways, flags)
        {
            let mods = mods.iter();
            let mods = mods.map(|(_, change)| delete(Command::DeleteStrict, change.pattern, change.priority));
            xids = self.transact(id, mods);
        }
        if let Some(row) = self.rows.get_mut(&id) {
            row.since = now;
            row.state = State::Removing { barrier: xids.last().copied(), end };
            row.xids = xids;
        }
    }

    pub(super) fn barrier(&mut self, now: Instant, xid: u32) {
        let Some(id) = self.xids.get(&xid).copied() else { return };
        let Some(row) = self.rows.get_mut(&id) else { return };
        match row.state {
            State::Adding { barrier: Some(wanted), error: None } if wanted == xid => {
                row.state = State::Installed;
                self.outputs.push_back(ControllerOutput::Installed(id));
            }
            State::Adding { barrier: Some(wanted), error: Some(Refusal::Flags) } if wanted == xid => {
                return self.add(now, id);
            }
            State::Adding { barrier: Some(wanted), error: Some(Refusal::For(why)) } if wanted == xid => {
                // The switch may have accepted the other direction, so remove both.
                return self.remove(now, id, End::Failed(why));
            }
            State::Removing { barrier: Some(wanted), end } if wanted == xid => {
                let traffic = row.traffic();
                self.outputs.push_back(match end {
                    End::Gone(cause) => ControllerOutput::Gone(id, cause, traffic),
                    End::Failed(why) if traffic == Both::default() => ControllerOutput::Failed(id, why),
                    // Half of the entry has carried traffic, which must be counted.
                    End::Failed(_) => ControllerOutput::Gone(id, Cause::Unconfirmed, traffic),
                });
                self.forget(id);
                self.rows.remove(&id);
                return;
            }
            _ => return,
        }
        self.forget(id);
    }

    /// Forgets the transactions of an entry.
    fn forget(&mut self, id: EntryId) {
        let old = self.rows.get_mut(&id).map(|row| std::mem::take(&mut row.xids)).unwrap_or_default();
        for xid in old {
            self.xids.remove(&xid);
        }
    }

    pub(super) fn error(&mut self, xid: u32, kind: u16, code: u16) {
        if self.version == Version::V1_3 && self.config.master.is_some() {
            match (kind, code) {
                // The list that follows the next connection shows what the switch has.
                IS_SLAVE => {
                    return self.close(DISPLACED.into());
                }
                STALE => {
                    return self.outputs.push_back(ControllerOutput::Note(
                        "the switch does not make this controller its master: that of another is newer"
                            .into(),
                    ));
                }
                _ => {}
            }
        }
        let id = self.xids.get(&xid);
        let Some(row) = id.and_then(|id| self.rows.get_mut(id)) else {
            return self.outputs.push_back(ControllerOutput::Note(format!(
                "the switch refused something that was no entry of a flow: OpenFlow error {kind},{code}"
            )));
        };
        let State::Adding { error, .. } = &mut row.state else { return };
        let bad_match = self.version == Version::V1_3 && kind == 4;
        if bad_match && self.flags {
            self.flags = false;
            self.outputs.push_back(ControllerOutput::Note(
                "the switch does not match TCP flags: it does not see connections end, only stand still"
                    .into(),
            ));
        }
        *error = Some(match () {
            () if bad_match && row.flags => Refusal::Flags,
            () if is_full(self.version, kind, code) => Refusal::For(Obstacle::Full),
            () => Refusal::For(Obstacle::Refused),
        });
    }

    pub(super) fn removed(&mut self, now: Instant, cookie: u64, why: Removal, traffic: Traffic) {
        let Some(cookie) = Cookie::read(cookie).filter(|cookie| cookie.run == self.config.run) else {
            return;
        };
        let Some(row) = self.rows.get_mut(&cookie.id) else { return };
        row.finish(cookie.way, traffic);
        if matches!(row.state, State::Installed | State::Adding { .. }) {
            let cause = match why {
                Removal::Idle => Cause::Idle,
                Removal::Evicted => Cause::Evicted,
                _ => Cause::Lost,
            };
            // Remove both directions together: with only one direction left, the end of the connection would not be
            // seen.
            self.remove(now, cookie.id, End::Gone(cause));
        }
    }

    pub(super) fn delete_orphans(&mut self) {
        for (_, old) in std::mem::take(&mut self.orphans) {
            let change = match self.version {
                Version::V1_0 => delete(Command::DeleteStrict, old.pattern, old.priority),
                // Delete it by its cookie: it may match more than this program can read.
                Version::V1_3 => FlowMod {
                    cookie: old.cookie,
                    cookie_mask: u64::MAX,
                    ..delete(Command::Delete, Pattern::default(), 0)
                },
            };
            self.change(change);
        }
    }

    /// Takes over the counters of an earlier run's entry for the same flow. Replacing the entry sets its counters to
    /// zero.
    fn adopt(&mut self, id: EntryId, mods: &[(Way, FlowMod)]) {
        for (way, change) in mods {
            let old = self.orphans.remove(&Place::of(&change.pattern));
            if let (Some(old), Some(row)) = (old, self.rows.get_mut(&id)) {
                row.inherit(*way, ip_traffic(old.packets, old.bytes));
            }
        }
    }

    /// Returns the changes for these directions of an entry on this switch.
    fn flow_mods(&self, entry: &Entry, ways: &[Way], flags: bool) -> Result<Vec<(Way, FlowMod)>, Obstacle> {
        // The port of the hosts, or the one that leads to their switch.
        let ports = |number| {
            let own = self.config.ports.get(&number).map(|ports| ports.fast);
            own.or_else(|| self.config.through.get(&number).copied()).ok_or(Obstacle::UnknownPort)
        };
        let (client, server) = (ports(entry.client_port)?, ports(entry.server_port)?);
        // 1.0 does not support IPv6, and cannot exclude fragments of UDP.
        if self.version == Version::V1_0
            && (entry.tuple.client().is_ipv6() || entry.tuple.transport != Transport::Tcp)
        {
            return Err(Obstacle::Unsupported);
        }
        let (from, to) = (entry.tuple.client(), entry.tuple.server());
        let row = |way, in_port: u32, out: u32, source: SocketAddr, destination: SocketAddr| FlowMod {
            command: Command::Add,
            pattern: Pattern {
                in_port: Some(in_port),
                addresses: Some((source.ip(), destination.ip())),
                protocol: Some(match entry.tuple.transport {
                    Transport::Tcp => Protocol::Tcp,
                    Transport::Udp => Protocol::Udp,
                }),
                ports: Some((source.port(), destination.port())),
                untagged: true,
                established: flags && self.version == Version::V1_3 && !entry.block,
            },
            cookie: Cookie { run: self.config.run, id: entry.id, way }.number(),
            cookie_mask: 0,
            priority: PRIORITY_FLOW,
            idle_timeout_s: idle_seconds(entry.idle),
            output: Some(out).filter(|_| !entry.block),
            table: None,
        };
        let row = |way: &Way| match way {
            Way::ToServer => (*way, row(*way, client, server, from, to)),
            Way::ToClient => (*way, row(*way, server, client, to, from)),
        };
        Ok(ways.iter().map(row).collect())
    }
}

/// Makes a change that removes entries.
pub(super) const fn delete(command: Command, pattern: Pattern, priority: u16) -> FlowMod {
    FlowMod {
        command,
        pattern,
        cookie: 0,
        cookie_mask: 0,
        priority,
        idle_timeout_s: 0,
        output: None,
        table: None,
    }
}

/// Whether an error is `OFPFMFC_ALL_TABLES_FULL` or `OFPFMFC_TABLE_FULL`.
const fn is_full(version: Version, kind: u16, code: u16) -> bool {
    match version {
        Version::V1_0 => kind == 3 && code == 0,
        Version::V1_3 => kind == 5 && code == 1,
    }
}

/// Converts to whole seconds. At least 1, because 0 means never.
fn idle_seconds(idle: Duration) -> u16 {
    if idle == Entry::NEVER_IDLE {
        return 0;
    }
    u16::try_from(idle.as_millis().div_ceil(1000).max(1)).unwrap_or(u16::MAX)
}

/// Converts counters of a switch, which counts frames, to IP packets as in conntrack and records. An untagged frame
/// has 14 bytes more.
pub(super) fn ip_traffic(packets: u64, bytes: u64) -> Traffic {
    Traffic { packets, bytes: bytes.saturating_sub(packets.saturating_mul(14)) }
}
