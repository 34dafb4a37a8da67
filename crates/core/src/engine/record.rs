//! Session records: what the original writes for each session (roles, addresses, counts, time-stamped states, cause),
//! in one value of fixed size.

use super::config::ConnectionId;
use crate::flow::{EndReason, Side};
use crate::time::Instant;
use std::net::SocketAddr;

/// State of a side's TCP, as far as the packets seen tell (RFC 9293, section 3.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// The server, before it was chosen.
    #[default]
    Listen,
    /// The client sent SYN.
    SynSent,
    /// The server was sent a SYN.
    SynReceived,
    /// The handshake is done.
    Established,
    /// It sent FIN first.
    FinWait1,
    /// Its FIN was acknowledged.
    FinWait2,
    /// It has acknowledged the other side's FIN and not sent its own.
    CloseWait,
    /// Both sent FIN before either was acknowledged.
    Closing,
    /// It sent FIN last.
    LastAck,
    /// Both FINs were acknowledged and it was the first to close.
    TimeWait,
    /// Nothing more will come from it.
    Closed,
}

impl State {
    /// The name as RFC 9293 writes it.
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

    /// After this side's FIN was seen.
    #[must_use]
    pub const fn fin_sent(self) -> Self {
        match self {
            Self::Established => Self::FinWait1,
            Self::CloseWait => Self::LastAck,
            other => other,
        }
    }

    /// After the other side acknowledged this side's FIN.
    #[must_use]
    pub const fn fin_acknowledged(self) -> Self {
        match self {
            Self::FinWait1 => Self::FinWait2,
            Self::Closing => Self::TimeWait,
            Self::LastAck => Self::Closed,
            other => other,
        }
    }

    /// After this side acknowledged the other's FIN.
    #[must_use]
    pub const fn other_fin_acknowledged(self) -> Self {
        match self {
            Self::Established => Self::CloseWait,
            Self::FinWait1 => Self::Closing,
            Self::FinWait2 => Self::TimeWait,
            other => other,
        }
    }

    /// Whether this side sends no data any more and knows that the other has all of it and vice versa.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::TimeWait | Self::Closed)
    }
}

/// A side reached a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Which side.
    pub side: Side,
    /// The state.
    pub state: State,
    /// When, in microseconds after the record's `opened` (saturating at 71 minutes).
    pub after_us: u32,
}

/// The state changes of a session in order. No order of packets makes more than [`Stamps::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamps {
    stamps: [Stamp; Self::MAX],
    len: u8,
}

impl Default for Stamps {
    fn default() -> Self {
        let none = Stamp { side: Side::Client, state: State::Listen, after_us: 0 };
        Self { stamps: [none; Self::MAX], len: 0 }
    }
}

impl Stamps {
    /// A client passes at most five states, a server six, and each may be closed by a reset besides.
    pub const MAX: usize = 13;

    /// The changes so far.
    pub fn as_slice(&self) -> &[Stamp] {
        self.stamps.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// Adds one; past [`Stamps::MAX`] nothing.
    pub(super) fn push(&mut self, stamp: Stamp) {
        if let Some(place) = self.stamps.get_mut(usize::from(self.len)) {
            *place = stamp;
            self.len += 1;
        }
    }
}

/// One session, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The connection.
    pub id: ConnectionId,
    /// The client.
    pub client: SocketAddr,
    /// Where it connected to.
    pub local: SocketAddr,
    /// What the connection to the server came from, if there was one.
    pub source: Option<SocketAddr>,
    /// The server, if one was chosen.
    pub server: Option<SocketAddr>,
    /// The client's SYN, or its cookie.
    pub opened: Instant,
    /// When the server's handshake was done.
    pub connected: Option<Instant>,
    /// The end.
    pub closed: Instant,
    /// Payload the client sent, each byte counted once, before any change.
    pub client_bytes: u64,
    /// Payload the server sent, as above.
    pub server_bytes: u64,
    /// Packets taken from the client.
    pub client_packets: u32,
    /// Packets taken from the server.
    pub server_packets: u32,
    /// Why it ended.
    pub reason: EndReason,
    /// The states of both sides.
    pub stamps: Stamps,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_ways_to_close() {
        let open = State::Established;
        let first = open.fin_sent();
        assert_eq!(first.fin_acknowledged().other_fin_acknowledged(), State::TimeWait, "closes first");
        assert_eq!(first.other_fin_acknowledged().fin_acknowledged(), State::TimeWait, "simultaneously");
        assert_eq!(open.other_fin_acknowledged().fin_sent().fin_acknowledged(), State::Closed, "closes last");
    }
}
