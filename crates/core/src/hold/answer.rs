//! What a client is told if its connection cannot be made, and how carriers say it.
//!
//! One list for all carriers. A packet (RST, ICMP) carries it to the client's kernel, whose `connect()` then fails as it would
//! without us. `docs/connect.md` shows the whole table.

use crate::flow::EndReason;
use crate::socks::ReplyCode;

/// The answer to a SYN that is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// RST: nothing listens there. `ECONNREFUSED`.
    Reset,
    /// ICMP: there is no route to the network. `ENETUNREACH`.
    Net,
    /// ICMP: the host does not answer its neighbours. `EHOSTUNREACH`.
    Host,
    /// ICMP: the port is unreachable. `ECONNREFUSED`.
    Port,
    /// ICMP: a rule prohibits it. `EACCES` over IPv6; over IPv4 Linux has `EHOSTUNREACH` for it.
    Admin,
    /// Nothing is sent, to retransmitted SYNs neither. `ETIMEDOUT`, when the client's own patience ends.
    Silent,
}

impl Answer {
    /// All answers.
    pub const ALL: [Self; 6] = [Self::Reset, Self::Net, Self::Host, Self::Port, Self::Admin, Self::Silent];

    /// Returns the word for records, metrics and documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reset => "reset",
            Self::Net => "net_unreachable",
            Self::Host => "host_unreachable",
            Self::Port => "port_unreachable",
            Self::Admin => "prohibited",
            Self::Silent => "silent",
        }
    }

    /// Returns type and code of the ICMP message (RFC 792, RFC 1812; for IPv6 RFC 4443 Sec. 3.1). `None`: it is not a
    /// message.
    pub const fn icmp(self, is_v6: bool) -> Option<(u8, u8)> {
        let (v4, v6) = match self {
            Self::Net => (0, 0),
            Self::Host => (1, 3),
            Self::Port => (3, 4),
            Self::Admin => (13, 1),
            Self::Reset | Self::Silent => return None,
        };
        Some(if is_v6 { (1, v6) } else { (3, v4) })
    }

    /// Returns the answer for a reply code of a SOCKS server (RFC 1928 Sec. 6; draft-12, "Operation Replies"). Version 5 has
    /// one code for an expired TTL and for a time-out.
    pub const fn of_reply(code: ReplyCode, is_v5: bool) -> Self {
        match code {
            ReplyCode::NotAllowed => Self::Admin,
            ReplyCode::NetworkUnreachable => Self::Net,
            ReplyCode::ConnectionRefused => Self::Reset,
            ReplyCode::TimedOut => Self::Silent,
            ReplyCode::TtlExpired if is_v5 => Self::Silent,
            _ => Self::Host,
        }
    }

    /// Returns the answer for the status of an HTTP proxy (RFC 9110 Sec. 15), if its Proxy-Status says nothing more exact.
    pub const fn of_status(status: u16) -> Self {
        match status {
            401 | 403 | 407 | 451 => Self::Admin,
            408 | 504 => Self::Silent,
            _ => Self::Host,
        }
    }

    /// Returns the answer for the end reason of a flow, if the carrier says nothing more exact.
    pub const fn of_end(reason: EndReason) -> Self {
        match reason {
            EndReason::PolicyDenied | EndReason::FunctionRefused => Self::Admin,
            EndReason::ConnectTimeout => Self::Silent,
            EndReason::Unreachable | EndReason::Dns | EndReason::Loop => Self::Host,
            // The way to the destination is broken, not the destination.
            EndReason::HopFailed | EndReason::AuthFailed => Self::Net,
            _ => Self::Reset,
        }
    }

    /// Returns the reply code of our own SOCKS server for it. A server behind another then passes on the same answer.
    pub const fn reply_code(self) -> ReplyCode {
        match self {
            Self::Reset | Self::Port => ReplyCode::ConnectionRefused,
            Self::Net => ReplyCode::NetworkUnreachable,
            Self::Host => ReplyCode::HostUnreachable,
            Self::Admin => ReplyCode::NotAllowed,
            Self::Silent => ReplyCode::TimedOut,
        }
    }
}
