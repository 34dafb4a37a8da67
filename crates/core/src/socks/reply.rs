//! Reply codes, one list for both versions (RFC 1928 Sec. 6; draft-12, "Operation Replies").

use crate::flow::EndReason;
use std::fmt;

/// The answer of a proxy to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplyCode {
    /// 0: succeeded.
    Succeeded,
    /// 1: a failure without a code of its own.
    GeneralFailure,
    /// 2: not allowed by a rule.
    NotAllowed,
    /// 3: there is no route.
    NetworkUnreachable,
    /// 4: the host does not answer, or its name has no address.
    HostUnreachable,
    /// 5: the destination refused the connection.
    ConnectionRefused,
    /// 6: the TTL expired. In version 5, which has no code for a time-out, it also means: timed out.
    TtlExpired,
    /// 7: the command is not supported.
    CommandNotSupported,
    /// 8: the address type is not supported.
    AddressTypeNotSupported,
    /// 9: the attempt timed out (version 6 only).
    TimedOut,
    /// Any other byte, as received.
    Other(u8),
}

impl ReplyCode {
    /// Reads the code byte of either version.
    pub const fn from_wire(byte: u8) -> Self {
        match byte {
            0 => Self::Succeeded,
            1 => Self::GeneralFailure,
            2 => Self::NotAllowed,
            3 => Self::NetworkUnreachable,
            4 => Self::HostUnreachable,
            5 => Self::ConnectionRefused,
            6 => Self::TtlExpired,
            7 => Self::CommandNotSupported,
            8 => Self::AddressTypeNotSupported,
            9 => Self::TimedOut,
            other => Self::Other(other),
        }
    }

    /// Returns the code byte of version 6.
    pub const fn v6(self) -> u8 {
        match self {
            Self::Succeeded => 0,
            Self::GeneralFailure => 1,
            Self::NotAllowed => 2,
            Self::NetworkUnreachable => 3,
            Self::HostUnreachable => 4,
            Self::ConnectionRefused => 5,
            Self::TtlExpired => 6,
            Self::CommandNotSupported => 7,
            Self::AddressTypeNotSupported => 8,
            Self::TimedOut => 9,
            Self::Other(byte) => byte,
        }
    }

    /// Returns the code byte of version 5. A time-out is 6 there, as in most servers.
    pub const fn v5(self) -> u8 {
        match self {
            Self::TimedOut => Self::TtlExpired.v6(),
            other => other.v6(),
        }
    }

    /// Returns the meaning of the code in words, also for Tor's codes (0xf0 to 0xf7).
    pub const fn text(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::GeneralFailure => "general failure",
            Self::NotAllowed => "not allowed by its rules",
            Self::NetworkUnreachable => "network unreachable",
            Self::HostUnreachable => "host unreachable",
            Self::ConnectionRefused => "connection refused",
            Self::TtlExpired => "TTL expired or timed out",
            Self::CommandNotSupported => "command not supported",
            Self::AddressTypeNotSupported => "address type not supported",
            Self::TimedOut => "connection attempt timed out",
            Self::Other(0xf0) => "onion service descriptor not found",
            Self::Other(0xf1) => "onion service descriptor is invalid",
            Self::Other(0xf2) => "onion service introduction failed",
            Self::Other(0xf3) => "onion service rendezvous failed",
            Self::Other(0xf4) => "onion service wants client authorization",
            Self::Other(0xf5) => "onion service refused the client authorization",
            Self::Other(0xf6) => "onion service address is invalid",
            Self::Other(0xf7) => "onion service introduction timed out",
            Self::Other(_) => "code without a meaning in RFC 1928 or the SOCKS6 draft",
        }
    }

    /// Returns the end reason of a flow whose hop answered with this code.
    pub const fn end_reason(self) -> EndReason {
        match self {
            Self::Succeeded => EndReason::Ok,
            Self::NetworkUnreachable | Self::HostUnreachable => EndReason::Unreachable,
            Self::ConnectionRefused => EndReason::Refused,
            Self::TtlExpired | Self::TimedOut => EndReason::ConnectTimeout,
            // If a hop refuses a rule, command or address type, the hop has failed. The reasons for policy and client
            // errors are reserved for decisions of this node.
            _ => EndReason::HopFailed,
        }
    }

    /// Returns the answer of our server if a flow could not be made for this reason.
    pub const fn from_end_reason(reason: EndReason) -> Self {
        match reason {
            EndReason::Ok => Self::Succeeded,
            EndReason::PolicyDenied | EndReason::FunctionRefused | EndReason::Loop => Self::NotAllowed,
            EndReason::Unreachable | EndReason::Dns => Self::HostUnreachable,
            EndReason::Refused => Self::ConnectionRefused,
            EndReason::ConnectTimeout | EndReason::Idle | EndReason::Lifetime => Self::TimedOut,
            EndReason::Unsupported => Self::CommandNotSupported,
            _ => Self::GeneralFailure,
        }
    }
}

impl fmt::Display for ReplyCode {
    /// For example `connection refused (code 5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.text(), self.v6())
    }
}
