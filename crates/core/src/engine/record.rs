//! Session records of fixed size: roles, addresses, counts, states with times, and the reason (ProxyEngine,
//! `detailed_records`).

use super::config::ConnectionId;
use super::packet::Tuple;
use super::slot::Pair;
use crate::flow::{EndReason, Side};
use crate::time::Instant;
use std::fmt;
use std::net::SocketAddr;

/// The TCP state of a side, as far as the packets show it (RFC 9293, section 3.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// The server was not chosen yet.
    #[default]
    Listen,
    /// The client sent SYN.
    SynSent,
    /// The engine sent a SYN to the server.
    SynReceived,
    /// The handshake is done.
    Established,
    /// The side sent FIN first.
    FinWait1,
    /// Its FIN was acknowledged.
    FinWait2,
    /// The side has acknowledged the other side's FIN and not sent its own.
    CloseWait,
    /// Both sent FIN before either was acknowledged.
    Closing,
    /// The side sent FIN last.
    LastAck,
    /// Both FINs were acknowledged and this side was the first to close.
    TimeWait,
    /// Nothing more will come from this side.
    Closed,
}

impl State {
    /// All states, in the order of their numbers.
    const ALL: [Self; 11] = [
        Self::Listen,
        Self::SynSent,
        Self::SynReceived,
        Self::Established,
        Self::FinWait1,
        Self::FinWait2,
        Self::CloseWait,
        Self::Closing,
        Self::LastAck,
        Self::TimeWait,
        Self::Closed,
    ];

    /// Returns the name as in RFC 9293.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Listen => "LISTEN",
            Self::SynSent => "SYN-SENT",
            Self::SynReceived => "SYN-RECEIVED",
            Self::Established => "ESTABLISHED",
            Self::FinWait1 => "FIN-WAIT-1",
            Self::FinWait2 => "FIN-WAIT-2",
            Self::CloseWait => "CLOSE-WAIT",
            Self::Closing => "CLOSING",
            Self::LastAck => "LAST-ACK",
            Self::TimeWait => "TIME-WAIT",
            Self::Closed => "CLOSED",
        }
    }

    /// Returns the state after this side's FIN was seen.
    #[must_use]
    #[inline]
    pub const fn fin_sent(self) -> Self {
        match self {
            Self::Established => Self::FinWait1,
            Self::CloseWait => Self::LastAck,
            other => other,
        }
    }

    /// Returns the state after the other side acknowledged this side's FIN.
    #[must_use]
    #[inline]
    pub const fn fin_acknowledged(self) -> Self {
        match self {
            Self::FinWait1 => Self::FinWait2,
            Self::Closing => Self::TimeWait,
            Self::LastAck => Self::Closed,
            other => other,
        }
    }

    /// Returns the state after this side acknowledged the other side's FIN.
    #[must_use]
    #[inline]
    pub const fn other_fin_acknowledged(self) -> Self {
        match self {
            Self::Established => Self::CloseWait,
            Self::FinWait1 => Self::Closing,
            Self::FinWait2 => Self::TimeWait,
            other => other,
        }
    }

    /// True if this side has closed, and both sides have acknowledged each other's FIN.
    #[inline]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::TimeWait | Self::Closed)
    }
}

/// The time at which a side reached a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Which side.
    pub side: Side,
    /// The state.
    pub state: State,
    /// Time after the record's `opened`, microseconds, exact to 2 us (at most 71 minutes).
    pub after_us: u32,
}

/// The state changes of a session in order. No order of packets makes more than [`Stamps::MAX`].
///
/// It is small because every connection has one: times in steps of 1,024 ns, side and state in one byte.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Stamps {
    after: [u32; Self::MAX],
    what: [u8; Self::MAX],
    len: u8,
}

/// The bit that marks the server.
const SERVER_BIT: u8 = 0x80;

impl Stamps {
    /// A client has at most five states, a server six, and a reset may close each of them in addition.
    pub const MAX: usize = 13;

    /// Returns the changes so far.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Stamp> + '_ {
        let both = self.after.iter().zip(&self.what).take(usize::from(self.len));
        both.map(|(after, what)| Stamp {
            side: if what & SERVER_BIT == 0 { Side::Client } else { Side::Server },
            state: State::ALL.get(usize::from(what & !SERVER_BIT)).copied().unwrap_or_default(),
            after_us: u32::try_from(u64::from(*after) * 1024 / 1000).unwrap_or(u32::MAX),
        })
    }

    /// Adds a state with the nanoseconds since the SYN; does nothing after [`Stamps::MAX`] of them.
    #[inline]
    pub(super) fn push(&mut self, side: Side, state: State, after_ns: u64) {
        let at = usize::from(self.len);
        if let (Some(place), Some(what)) = (self.after.get_mut(at), self.what.get_mut(at)) {
            // A shift: microseconds would need a division with every packet of a short connection.
            *place = u32::try_from(after_ns >> 10).unwrap_or(u32::MAX);
            *what = state as u8 | if side == Side::Server { SERVER_BIT } else { 0 };
            self.len += 1;
        }
    }

    /// True if there are any; `len` lies in the last cache line of the value.
    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.len > 0
    }

    /// Removes all.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }
}

impl fmt::Debug for Stamps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The record of one ended session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The connection.
    pub id: ConnectionId,
    /// The tuples of received packets of both sides.
    pub(super) tuple: Pair<Tuple>,
    /// True if a server was chosen.
    pub(super) chosen: bool,
    /// Why it ended.
    pub reason: EndReason,
    /// When the client's SYN came, or its cookie.
    pub opened: Instant,
    /// When the server's handshake was done.
    pub connected: Option<Instant>,
    /// When it ended.
    pub closed: Instant,
    /// Payload the client sent, each byte counted once, before any change.
    pub client_bytes: u64,
    /// Payload the server sent, counted in the same way.
    pub server_bytes: u64,
    /// Packets taken from the client.
    pub client_packets: u32,
    /// Packets taken from the server.
    pub server_packets: u32,
    /// The kernel has forwarded packets of it.
    pub passed_elsewhere: bool,
    /// The states of both sides.
    pub stamps: Stamps,
}

impl Record {
    /// Returns the client.
    pub fn client(&self) -> SocketAddr {
        self.tuple[Side::Client].remote_addr()
    }

    /// Returns the address and port that the client connected to.
    pub fn local(&self) -> SocketAddr {
        self.tuple[Side::Client].local_addr()
    }

    /// Returns the source of the connection to the server, if a server was chosen.
    pub fn source(&self) -> Option<SocketAddr> {
        self.chosen.then(|| self.tuple[Side::Server].local_addr())
    }

    /// Returns the server, if one was chosen.
    pub fn server(&self) -> Option<SocketAddr> {
        self.chosen.then(|| self.tuple[Side::Server].remote_addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_three_ways_to_close() {
        let open = State::Established;
        let first = open.fin_sent();
        assert_eq!(first.fin_acknowledged().other_fin_acknowledged(), State::TimeWait, "closes first");
        assert_eq!(first.other_fin_acknowledged().fin_acknowledged(), State::TimeWait, "simultaneously");
        assert_eq!(open.other_fin_acknowledged().fin_sent().fin_acknowledged(), State::Closed, "closes last");
    }

    #[test]
    fn stamps_give_back_what_was_pushed() {
        let mut stamps = Stamps::default();
        let at = |n: usize| Duration::from_micros(n as u64 * 777);
        for (n, state) in State::ALL.into_iter().chain(State::ALL).enumerate() {
            stamps.push(if n % 2 == 0 { Side::Client } else { Side::Server }, state, at(n).as_nanos() as u64);
        }
        let all: Vec<_> = stamps.iter().collect();
        assert_eq!(all.len(), Stamps::MAX, "and no more");
        for (n, stamp) in all.iter().enumerate() {
            assert_eq!(stamp.state, State::ALL[n % State::ALL.len()]);
            assert_eq!(stamp.side, if n % 2 == 0 { Side::Client } else { Side::Server });
            assert!(u128::from(stamp.after_us).abs_diff(at(n).as_micros()) <= 2, "{stamp:?} {n}");
        }
        stamps.clear();
        assert_eq!(stamps.iter().count(), 0);
    }
}
