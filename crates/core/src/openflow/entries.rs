//! The state of each entry that was sent to a switch, and the numbers that identify it.

use super::pattern::{Pattern, Protocol};
use crate::shunt::{Both, Cause, Entry, EntryId, Obstacle, Traffic};
use crate::time::Instant;
use std::net::IpAddr;

/// A direction of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

impl Way {
    pub(super) const BOTH: [Self; 2] = [Self::ToServer, Self::ToClient];

    /// Returns this direction alone.
    pub(super) const fn only(self) -> &'static [Self] {
        match self {
            Self::ToServer => &[Self::ToServer],
            Self::ToClient => &[Self::ToClient],
        }
    }
}

/// The content of a flow entry's cookie. 16 bits mark it as ours, 16 bits are the run of the program, 31 bits the
/// entry, and 1 bit the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cookie {
    pub(super) run: u16,
    pub(super) id: EntryId,
    pub(super) way: Way,
}

impl Cookie {
    /// "ST".
    const OURS: u64 = 0x5354 << 48;
    const OURS_MASK: u64 = 0xffff << 48;
    const RUN_MASK: u64 = 0xffff << 32;
    const ENTRY_MASK: u64 = 0xffff_ffff;

    /// The cookie of the entries that forward from port to port ("SP").
    pub(super) const PAIR: u64 = 0x5350 << 48;

    /// Returns the bits and the mask of all entries of flows, of any run.
    pub(super) const fn any() -> (u64, u64) {
        (Self::OURS, Self::OURS_MASK)
    }

    /// Returns the bits and the mask of the entries that forward from port to port.
    pub(super) const fn pairs() -> (u64, u64) {
        (Self::PAIR, u64::MAX)
    }

    /// Returns the bits and the mask of all entries of flows of one run.
    pub(super) const fn any_of(run: u16) -> (u64, u64) {
        (Self::OURS | (run as u64) << 32, Self::OURS_MASK | Self::RUN_MASK)
    }

    /// Returns the cookie as a number. It contains the low 31 bits of the entry's number.
    pub(super) const fn number(self) -> u64 {
        let way = matches!(self.way, Way::ToClient) as u64;
        Self::any_of(self.run).0 | (self.id.0 << 1 & Self::ENTRY_MASK) | way
    }

    /// Decodes a cookie. `None` if it is not ours.
    pub(super) const fn read(number: u64) -> Option<Self> {
        if number & Self::OURS_MASK != Self::OURS {
            return None;
        }
        let way = if number & 1 == 0 { Way::ToServer } else { Way::ToClient };
        let run = ((number & Self::RUN_MASK) >> 32) as u16;
        Some(Self { run, id: EntryId((number & Self::ENTRY_MASK) >> 1), way })
    }
}

/// Identifies an entry of an earlier run: by what it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    in_port: Option<u32>,
    addresses: Option<(IpAddr, IpAddr)>,
    protocol: Option<Protocol>,
    ports: Option<(u16, u16)>,
}

impl Place {
    pub(super) const fn of(pattern: &Pattern) -> Self {
        Self {
            in_port: pattern.in_port,
            addresses: pattern.addresses,
            protocol: pattern.protocol,
            ports: pattern.ports,
        }
    }
}

/// How the end of an entry is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Gone(Cause),
    Failed(Obstacle),
}

/// Why a switch refused an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    For(Obstacle),
    /// It cannot match TCP flags. The entry is sent again without them.
    Flags,
}

/// The state of an entry. Without a barrier, it was not sent since the switch connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Adding { barrier: Option<u32>, error: Option<Refusal> },
    Installed,
    Removing { barrier: Option<u32>, end: End },
}

/// The traffic of one direction.
#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    /// The traffic of entries that were replaced or removed.
    before: Traffic,
    /// The traffic of the present entry.
    now: Traffic,
    /// The present entry was removed, and its last counters are part of `before`.
    gone: bool,
}

/// An entry for both directions of a flow, or for one.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) entry: Entry,
    /// Its directions.
    pub(super) ways: &'static [Way],
    pub(super) state: State,
    /// When its state last changed.
    pub(super) since: Instant,
    /// Its match includes TCP flags.
    pub(super) flags: bool,
    /// The transactions of this entry.
    pub(super) xids: Vec<u32>,
    carried: [Carried; 2],
}

impl Row {
    pub(super) fn new(entry: Entry, ways: &'static [Way], now: Instant) -> Self {
        let state = State::Adding { barrier: None, error: None };
        let carried = [Carried::default(); 2];
        Self { entry, ways, state, since: now, flags: false, xids: Vec::new(), carried }
    }

    const fn carried(&mut self, way: Way) -> &mut Carried {
        let [to_server, to_client] = &mut self.carried;
        match way {
            Way::ToServer => to_server,
            Way::ToClient => to_client,
        }
    }

    /// Forgets all pending requests, because the switch has disconnected.
    pub(super) fn unanswered(&mut self) {
        self.xids.clear();
        match &mut self.state {
            State::Adding { barrier, error } => (*barrier, *error) = (None, None),
            State::Removing { barrier, .. } => *barrier = None,
            State::Installed => {}
        }
    }

    /// Takes counters from a list. Counters that went back are ignored: they are wrong, or another program replaced
    /// the entry.
    pub(super) fn count(&mut self, way: Way, traffic: Traffic) {
        let carried = self.carried(way);
        if !carried.gone && traffic.packets >= carried.now.packets && traffic.bytes >= carried.now.bytes {
            carried.now = traffic;
        }
    }

    /// Takes the counters that a list shows for each direction. Returns whether all directions are there.
    pub(super) fn see(&mut self, mut shown: impl FnMut(Way) -> Option<Traffic>) -> bool {
        let mut is_whole = true;
        for way in self.ways {
            match shown(*way) {
                Some(traffic) => self.count(*way, traffic),
                None => is_whole = false,
            }
        }
        is_whole
    }

    /// Takes the last counters of an entry that was removed.
    pub(super) fn finish(&mut self, way: Way, traffic: Traffic) {
        self.count(way, traffic);
        let carried = self.carried(way);
        carried.before += std::mem::take(&mut carried.now);
        carried.gone = true;
    }

    /// Adds the counters of an older entry that it replaces.
    pub(super) fn inherit(&mut self, way: Way, traffic: Traffic) {
        self.carried(way).before += traffic;
    }

    /// Notes that the entry is sent again, so that its counters start from zero.
    pub(super) fn settle(&mut self) {
        for carried in &mut self.carried {
            carried.before += std::mem::take(&mut carried.now);
            carried.gone = false;
        }
    }

    /// Returns all its traffic.
    pub(super) fn traffic(&self) -> Both {
        let [to_server, to_client] = self.carried.map(|one| {
            let mut all = one.before;
            all += one.now;
            all
        });
        Both { to_server, to_client }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_tell_runs_entries_and_directions_apart() {
        let cookie = Cookie { run: 7, id: EntryId(0x1234), way: Way::ToClient };
        assert_eq!(cookie.number(), 0x5354_0007_0000_2469);
        assert_eq!(Cookie::read(cookie.number()), Some(cookie));
        assert_eq!(Cookie::read(0xdead_beef), None);
        assert_eq!(Cookie::read(Cookie::PAIR), None, "pairs of ports are no flows");
        let (bits, mask) = Cookie::any_of(7);
        assert_eq!(cookie.number() & mask, bits);
        assert_ne!(Cookie { run: 8, ..cookie }.number() & mask, bits, "another run");
    }
}
