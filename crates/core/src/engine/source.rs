//! Chooses the address and port that a connection to a server comes from.
//!
//! A port is used once for each server (RFC 9293, Sec. 3.4: all four ends identify a connection). The engine takes a free
//! port first. If none is left, it takes the port of a connection in TIME-WAIT; then a port that only connections to
//! other servers use. A server may still remember the earlier connection of a port. So the SYN has a later sequence
//! number (RFC 9293, Sec. 3.6.1) and a time stamp that is not older (RFC 6191).

use super::config::Callbacks;
use super::connection::{Hot, Source};
use super::machine::Engine;
use super::packet::{Address, Tuple};
use super::seq::Seq;
use super::slot::Slot;
use super::table::hash;
use crate::flow::Side;
use crate::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// Most connections in TIME-WAIT, and most ports, that are tried.
const WAITING_TRIES: usize = 16;
const PORT_TRIES: usize = 64;

/// How long the port of an offloaded connection stays unused: the kernel keeps the old translation for 20 ms.
const OFFLOADED_RESTS: Duration = Duration::from_millis(50);

/// Distance of a first sequence number from the last one of the tuple's earlier connection: more than any unscaled
/// window, as in Linux.
const BEHIND: u32 = 65_537;

/// The source of a connection to a server.
pub(super) struct Chosen {
    /// The ends as they appear in the server's packets.
    pub(super) tuple: Tuple,
    pub(super) source: Source,
    /// The last sequence number of the tuple's earlier connection, if the server may remember it.
    last: Option<Seq>,
}

impl Chosen {
    /// Returns the client's own address and port as the source.
    pub(super) const fn of_client(tuple: Tuple) -> Self {
        Self { tuple, source: Source::Client, last: None }
    }

    /// Returns the initial sequence number: `isn`, or a later one if the server could mistake `isn` for the earlier
    /// connection.
    pub(super) fn first_number(&self, isn: Seq) -> Seq {
        match self.last {
            Some(last) if !isn.after(last) => last + BEHIND,
            _ => isn,
        }
    }
}

impl<C: Callbacks> Engine<C> {
    /// Takes a source for a connection to `server`; none if all ports are in use for it.
    #[inline]
    pub(super) fn choose_source(&mut self, now: Instant, server: SocketAddr) -> Option<Chosen> {
        self.free_source(server).or_else(|| self.used_source(now, server))
    }

    #[inline]
    fn free_source(&mut self, server: SocketAddr) -> Option<Chosen> {
        for _ in 0..PORT_TRIES {
            let source = self.ports.take(server.ip().into())?;
            let tuple = tuple(server, source);
            // Connections that share a port are in the index, so a free port may already have a connection to this
            // server.
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
        let hot = self.tables.hot.at(slot);
        // Both FINs are acknowledged: this is the next number that the server would accept.
        let (before, last) = (hot.tuple[Side::Server], Some(hot.leg[Side::Server].acked));
        let was_shared = self.tables.cold.at(slot).source == Source::Shared;
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

    /// Returns the connection that has been in TIME-WAIT longest and whose port may be taken.
    fn longest_waiting_port(&self, now: Instant, server: SocketAddr) -> Option<Slot> {
        let clock = self.clock(now);
        let mut next = self.wheel.longest_waiting();
        for _ in 0..WAITING_TRIES {
            let slot = next?;
            let (hot, cold) = (self.tables.hot.at(slot), self.tables.cold.at(slot));
            let rests = if cold.was_offloaded { OFFLOADED_RESTS } else { Duration::ZERO };
            if hot.offloaded.is_none()
                && self.fits(now, hot, cold.source, server)
                && hot.active + rests <= now
                && shown_stamp(hot).is_none_or(|stamp| !Seq(stamp).after(Seq(clock)))
            {
                return Some(slot);
            }
            next = self.wheel.waits_after(slot);
        }
        None
    }

    /// True if the source of a connection in TIME-WAIT can be used for a connection to this server.
    fn fits(&self, now: Instant, hot: &Hot, source: Source, server: SocketAddr) -> bool {
        let tuple = &hot.tuple[Side::Server];
        if tuple.remote_addr() == server {
            return source != Source::Client;
        }
        // The next connection to the other server will not know the last number, so the clock of initial numbers must be
        // past it.
        let isn = super::cookie::isn(self.cookie_key(), tuple, now);
        source == Source::Ours
            && tuple.remote.is_v4() == server.is_ipv4()
            && !hot.leg[Side::Server].acked.after(isn)
            && !self.is_used(&self::tuple(server, tuple.source()))
    }

    /// Returns a port that other connections use, none of them to this server.
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

    /// True if a connection has these ends, also one in TIME-WAIT.
    pub(super) fn is_used(&self, tuple: &Tuple) -> bool {
        self.find(hash(&self.config.seed, tuple), tuple).is_some()
    }
}

/// Returns the last time stamp sent to the server; none if the connection had none.
fn shown_stamp(hot: &Hot) -> Option<u32> {
    let client = &hot.leg[Side::Client];
    (client.stamps && hot.leg[Side::Server].stamps).then(|| client.stamp.wrapping_add(client.stamp_add))
}

fn tuple(server: SocketAddr, (local, port): (Address, u16)) -> Tuple {
    Tuple { remote: server.ip().into(), local, ports: u32::from(server.port()) << 16 | u32::from(port) }
}
