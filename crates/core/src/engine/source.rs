//! Chooses the address and port that a connection to a server comes from.
//!
//! A port is used once for each server (RFC 9293, Sec. 3.4: a connection is known by all four ends). A free port comes first.
//! When none is left, the port of a connection in TIME-WAIT is taken; then a port that only connections to other servers
//! use. A server may still remember the earlier connection of a port, so the SYN has a later sequence number (RFC 9293, Sec.
//! 3.6.1) and a time stamp that is not older (RFC 6191).

use super::config::Callbacks;
use super::connection::{CLIENT, Hot, SERVER, Source};
use super::machine::Engine;
use super::packet::{Address, Tuple};
use super::seq::Seq;
use super::table::hash;
use crate::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// Connections in TIME-WAIT that are looked at for a port, and ports in use, at most.
const WAITING_TRIES: usize = 16;
const PORT_TRIES: usize = 64;

/// How long the port of an offloaded connection rests: the kernel keeps the old translation for 20 ms.
const OFFLOADED_RESTS: Duration = Duration::from_millis(50);

/// A first sequence number is so far behind the last one of the tuple's earlier connection: more than any window without
/// scale, as Linux does.
const BEHIND: u32 = 65_537;

/// What a connection to a server comes from.
pub(super) struct Chosen {
    /// The server's packets carry these ends.
    pub(super) tuple: Tuple,
    pub(super) source: Source,
    /// The last sequence number of the tuple's earlier connection, if the server may remember it.
    last: Option<Seq>,
}

impl Chosen {
    /// The source that is the client's own address and port.
    pub(super) const fn of_client(tuple: Tuple) -> Self {
        Self { tuple, source: Source::Client, last: None }
    }

    /// The initial sequence number: `isn`, or a later one if the server could take that for one of the earlier connection.
    pub(super) fn first_number(&self, isn: Seq) -> Seq {
        match self.last {
            Some(last) if !isn.after(last) => last + BEHIND,
            _ => isn,
        }
    }
}

impl<C: Callbacks> Engine<C> {
    /// Takes a source for a connection to `server`; none if every port is in use for it.
    #[inline]
    pub(super) fn choose_source(&mut self, now: Instant, server: SocketAddr) -> Option<Chosen> {
        self.free_source(server).or_else(|| self.used_source(now, server))
    }

    #[inline]
    fn free_source(&mut self, server: SocketAddr) -> Option<Chosen> {
        for _ in 0..PORT_TRIES {
            let source = self.ports.take(server.ip().into())?;
            let tuple = tuple(server, source);
            // Connections that share a port are in the index, so a free port may have one to this server.
            if self.shared == 0 || !self.is_used(&tuple) {
                return Some(Chosen { tuple, source: Source::Ours, last: None });
            }
            self.ports.give(source);
        }
        None
    }

    #[inline(never)]
    fn used_source(&mut self, now: Instant, server: SocketAddr) -> Option<Chosen> {
        self.source_in_time_wait(now, server).or_else(|| self.shared_source(server))
    }

    /// Ends the TIME-WAIT of a connection, and takes its port.
    fn source_in_time_wait(&mut self, now: Instant, server: SocketAddr) -> Option<Chosen> {
        let slot = self.longest_waiting_port(now, server)?;
        let hot = self.hot.get(slot)?;
        // Both FINs are acknowledged: this is the next number that the server would take.
        let (before, last) = (hot.tuple[SERVER], Some(hot.leg[SERVER].acked));
        let was_shared = self.cold.get(slot)?.source == Source::Shared;
        self.counters.time_wait_cut += 1;
        self.release(now, slot, None);
        if was_shared {
            self.shared += 1;
            return Some(Chosen { tuple: before, source: Source::Shared, last });
        }
        let chosen = self.free_source(server)?;
        let last = last.filter(|_| chosen.tuple == before);
        Some(Chosen { last, ..chosen })
    }

    /// The connection that has been in TIME-WAIT longest and whose port may be taken.
    fn longest_waiting_port(&self, now: Instant, server: SocketAddr) -> Option<usize> {
        let clock = self.clock(now);
        let mut next = self.wheel.longest_waiting();
        for _ in 0..WAITING_TRIES {
            let entry = next?;
            let slot = entry as usize;
            let (hot, cold) = (self.hot.get(slot)?, self.cold.get(slot)?);
            let rests = if cold.was_lent { OFFLOADED_RESTS } else { Duration::ZERO };
            if hot.lent.is_none()
                && self.fits(now, hot, cold.source, server)
                && hot.active + rests <= now
                && shown_stamp(hot).is_none_or(|stamp| !Seq(stamp).after(Seq(clock)))
            {
                return Some(slot);
            }
            next = self.wheel.waits_after(entry);
        }
        None
    }

    /// Whether the source of a connection in TIME-WAIT will do for a connection to this server.
    fn fits(&self, now: Instant, hot: &Hot, source: Source, server: SocketAddr) -> bool {
        let tuple = &hot.tuple[SERVER];
        if tuple.remote_addr() == server {
            return source != Source::Client;
        }
        // The next connection to that other server will not know the last number: the clock of initial ones has to be past it.
        let isn = super::cookie::isn(self.cookie_key(), tuple, now);
        source == Source::Ours
            && tuple.remote.is_v4() == server.is_ipv4()
            && !hot.leg[SERVER].acked.after(isn)
            && !self.is_used(&self::tuple(server, tuple.source()))
    }

    /// A port that other connections use, none of them to this server.
    fn shared_source(&mut self, server: SocketAddr) -> Option<Chosen> {
        for _ in 0..PORT_TRIES {
            let tuple = tuple(server, self.ports.in_turn(server.ip().into())?);
            if !self.is_used(&tuple) {
                self.shared += 1;
                return Some(Chosen { tuple, source: Source::Shared, last: None });
            }
        }
        None
    }

    /// Whether a connection has these ends, in TIME-WAIT too.
    pub(super) fn is_used(&self, tuple: &Tuple) -> bool {
        self.find(hash(&self.config.seed, tuple), tuple).is_some()
    }
}

/// The last time stamp that the server was shown; none if the connection had none.
fn shown_stamp(hot: &Hot) -> Option<u32> {
    let client = &hot.leg[CLIENT];
    (client.stamps && hot.leg[SERVER].stamps).then(|| client.stamp.wrapping_add(client.stamp_add))
}

fn tuple(server: SocketAddr, (local, port): (Address, u16)) -> Tuple {
    Tuple { remote: server.ip().into(), local, ports: u32::from(server.port()) << 16 | u32::from(port) }
}
