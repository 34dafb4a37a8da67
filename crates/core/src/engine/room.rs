//! Room for clients with few connections: which connection of the client with the most leaves for one of theirs.
//!
//! A client that fills the table, or all the flows that are allowed, must not keep others out. Only connections that are
//! still in a handshake or idle leave, the oldest first.

use super::config::{Callbacks, ConnectionId};
use super::connection::Phase;
use super::machine::Engine;
use super::slot::Slot;
use crate::flow::{EndReason, Side};
use crate::limit::source_key;
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

/// A connection without packets for this time is idle.
const IDLE: Duration = Duration::from_secs(1);
/// Most connections that one look at the table chooses.
const CHOSEN_MAX: usize = 64;
/// The least time between two looks. Each look reads the whole table, and clients can cause it.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long the result of a look is used.
const USED_FOR: Duration = Duration::from_millis(100);

/// A connection as the choice sees it.
#[derive(Clone, Copy, Debug)]
struct Standing {
    slot: Slot,
    id: ConnectionId,
    client: IpAddr,
    active: Instant,
    /// It may leave now.
    may_leave: bool,
}

/// Chooses connections to leave, with the result of the last look at the table.
#[derive(Debug, Default)]
pub(super) struct Room {
    looked: Option<Instant>,
    /// The connections of each client at the last look, and those that have left or come since.
    counts: BTreeMap<IpAddr, u32>,
    biggest: Option<IpAddr>,
    /// The most connections of any other client.
    second: u32,
    /// Connections of the client with the most that may leave, the oldest first.
    chosen: VecDeque<(Slot, ConnectionId)>,
}

impl Room {
    fn wants_look(&self, now: Instant) -> bool {
        let age = self.looked.map(|at| now.since(at));
        age.is_none_or(|age| age >= USED_FOR || self.chosen.is_empty() && age >= LOOK_EVERY)
    }

    /// Counts the connections of every client, and chooses the oldest of the client with the most.
    fn look(&mut self, now: Instant, all: impl Iterator<Item = Standing> + Clone) {
        self.looked = Some(now);
        self.counts.clear();
        for standing in all.clone() {
            *self.counts.entry(source_key(standing.client)).or_default() += 1;
        }
        self.biggest = self.counts.iter().max_by_key(|(_, count)| **count).map(|(client, _)| *client);
        let others = self.counts.iter().filter(|(client, _)| Some(**client) != self.biggest);
        self.second = others.map(|(_, count)| *count).max().unwrap_or(0);
        let may_leave = all.filter(|one| one.may_leave && Some(source_key(one.client)) == self.biggest);
        let mut found: Vec<_> = may_leave.map(|one| (one.active, one.slot, one.id)).collect();
        if found.len() > CHOSEN_MAX {
            found.select_nth_unstable(CHOSEN_MAX - 1);
            found.truncate(CHOSEN_MAX);
        }
        found.sort_unstable();
        self.chosen = found.into_iter().map(|(_, slot, id)| (slot, id)).collect();
    }

    /// Returns the connection to leave for one more of this client. None if the client would then have as many as the
    /// client with the most, or if none may leave.
    fn next(&mut self, client: IpAddr) -> Option<(Slot, ConnectionId)> {
        let count = |client: &IpAddr| self.counts.get(client).copied().unwrap_or(0);
        let most = count(&self.biggest?);
        // Two more than this client has: otherwise the two would push out each other's connections in turn.
        if most < count(&source_key(client)) + 2 {
            return None;
        }
        if most < self.second {
            // Another client has the most by now: the next look finds its connections.
            self.chosen.clear();
        }
        self.chosen.pop_front()
    }

    /// Notes that a connection of the client with the most has left for one of this client.
    fn has_left_for(&mut self, client: IpAddr) {
        if let Some(count) = self.biggest.and_then(|biggest| self.counts.get_mut(&biggest)) {
            *count = count.saturating_sub(1);
        }
        let count = self.counts.entry(source_key(client)).or_default();
        *count += 1;
        // The newcomers of one look may come to have more than the client that makes room for them.
        self.second = self.second.max(*count);
    }
}

/// What there is no room in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The table: every connection takes a slot.
    Table,
    /// The flows that [`Callbacks::select`] allows: connections that have a server.
    Flows,
}

/// The phases in which a connection takes room.
const fn counts_in(full: Full, phase: Phase) -> bool {
    match phase {
        Phase::Free | Phase::TimeWait => false,
        Phase::Opening | Phase::Deciding => matches!(full, Full::Table),
        Phase::Connecting | Phase::Bound => true,
    }
}

impl<C: Callbacks> Engine<C> {
    /// Ends a connection of the client with the most, if this client has fewer. Returns whether one has left.
    pub(super) fn make_room(&mut self, now: Instant, client: IpAddr, full: Full) -> bool {
        let mut room = std::mem::take(&mut self.rooms[full as usize]);
        let has_left = self.leave_for(now, client, full, &mut room);
        self.rooms[full as usize] = room;
        has_left
    }

    fn leave_for(&mut self, now: Instant, client: IpAddr, full: Full, room: &mut Room) -> bool {
        if room.wants_look(now) {
            let tables = &self.tables;
            let all = tables.hot.places().zip(tables.hot.iter().zip(tables.cold.iter()));
            room.look(
                now,
                all.filter(|(_, (hot, _))| counts_in(full, hot.phase)).map(|(slot, (hot, cold))| Standing {
                    slot,
                    id: cold.id,
                    client: hot.tuple[Side::Client].remote_addr().ip(),
                    active: hot.active,
                    may_leave: hot.phase != Phase::Bound || hot.active + IDLE <= now,
                }),
            );
        }
        while let Some((slot, id)) = room.next(client) {
            // The kernel may have forwarded packets of an offloaded connection since.
            self.catch_up(now, slot);
            let (hot, cold) = (self.tables.hot.at(slot), self.tables.cold.at(slot));
            let may_leave = hot.phase != Phase::Bound || hot.active + IDLE <= now;
            if cold.id != id || !counts_in(full, hot.phase) || !may_leave {
                continue;
            }
            self.counters.left_for_others += 1;
            self.callbacks.leaving(id);
            self.end(now, slot, EndReason::Limit);
            room.has_left_for(client);
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> Instant {
        Instant::from_millis(1_000_000 + ms)
    }

    fn ip(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    /// Connections of these clients, each as old as its place says: the first is the oldest.
    fn standing(clients: &[u8]) -> Vec<Standing> {
        let of = |(slot, client): (u32, &u8)| Standing {
            slot: Slot::of_number(slot),
            id: ConnectionId(u64::from(slot) + 1),
            client: ip(*client),
            active: at(u64::from(slot)),
            may_leave: true,
        };
        (0_u32..).zip(clients).map(of).collect()
    }

    fn looked(clients: &[u8]) -> Room {
        let mut room = Room::default();
        room.look(at(0), standing(clients).into_iter());
        room
    }

    #[test]
    fn the_oldest_of_the_client_with_the_most_leaves_until_all_have_as_many() {
        let mut room = looked(&[2, 1, 1, 2, 1, 1, 1]);
        let mut left = Vec::new();
        while let Some((slot, _)) = room.next(ip(3)) {
            room.has_left_for(ip(3));
            left.push(slot.number());
        }
        // 1 had five and 2 had two: now they have three, two, and the newcomer two.
        assert_eq!(left, [1, 2]);
        assert!(room.next(ip(1)).is_none(), "the client with the most gains nothing");
        assert!(room.next(ip(2)).is_none(), "it has as many as it can get");
    }

    #[test]
    fn one_client_alone_pushes_out_none_of_its_own() {
        assert!(looked(&[1; 10]).next(ip(1)).is_none());
        assert!(looked(&[]).next(ip(1)).is_none());
        assert!(looked(&[1]).next(ip(2)).is_none(), "one each is all there is");
        // An IPv6 client has a whole /64.
        let mut one = standing(&[1, 1, 1]);
        for (number, standing) in (1_u16..).zip(&mut one) {
            standing.client = [0x2001, 0xdb8, 0, 0, 0, 0, 0, number].map(|part: u16| part).into();
        }
        let mut room = Room::default();
        room.look(at(0), one.into_iter());
        assert!(room.next("2001:db8::99".parse().expect("an address")).is_none());
        assert!(room.next("2001:db8:0:1::1".parse().expect("an address")).is_some());
    }

    #[test]
    fn what_is_not_idle_stays_and_looks_are_rare() {
        let mut all = standing(&[1, 1, 1]);
        all[0].may_leave = false;
        let mut room = Room::default();
        assert!(room.wants_look(at(0)));
        room.look(at(0), all.into_iter());
        assert!(!room.wants_look(at(99)), "there is a connection that may leave");
        assert_eq!(room.next(ip(2)).map(|(slot, _)| slot.number()), Some(1));
        assert_eq!(room.next(ip(2)).map(|(slot, _)| slot.number()), Some(2), "the first was of no use");
        assert!(room.next(ip(2)).is_none());
        assert!(!room.wants_look(at(9)) && room.wants_look(at(10)));
    }

    proptest! {
        #[test]
        fn room_is_shared_fairly(clients in proptest::collection::vec(1..5_u8, 0..200), newcomers in proptest::collection::vec(1..8_u8, 0..100)) {
            let mut room = looked(&clients);
            for newcomer in newcomers {
                let before = room.counts.clone();
                let Some((slot, _)) = room.next(ip(newcomer)) else { continue };
                let loser = ip(clients[slot.number() as usize]);
                room.has_left_for(ip(newcomer));
                let count = |counts: &BTreeMap<IpAddr, u32>, client| counts.get(&client).copied().unwrap_or(0);
                prop_assert_ne!(loser, ip(newcomer));
                // The loser still has at least as many as the newcomer.
                prop_assert!(count(&room.counts, loser) >= count(&room.counts, ip(newcomer)));
                // No client had more than the loser.
                prop_assert!(before.values().all(|many| *many <= count(&before, loser)));
            }
        }
    }
}
