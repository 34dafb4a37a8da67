//! The commands that versions 5 and 6 have in common.

use std::fmt;

/// What a client asks of a proxy. The numbers on the wire are the same in both versions (RFC 1928 Sec. 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Command {
    /// 1: connect to the destination.
    #[default]
    Connect,
    /// 2: listen for one connection that the destination opens.
    Bind,
    /// 3: relay datagrams for as long as this connection lives.
    UdpAssociate,
}

impl Command {
    /// Reads the byte of a request. `None`: it is another command.
    pub const fn from_wire(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Connect),
            2 => Some(Self::Bind),
            3 => Some(Self::UdpAssociate),
            _ => None,
        }
    }

    /// Returns the byte of a request.
    pub const fn wire(self) -> u8 {
        match self {
            Self::Connect => 1,
            Self::Bind => 2,
            Self::UdpAssociate => 3,
        }
    }

    /// Returns the name in the RFC.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connect => "CONNECT",
            Self::Bind => "BIND",
            Self::UdpAssociate => "UDP ASSOCIATE",
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
