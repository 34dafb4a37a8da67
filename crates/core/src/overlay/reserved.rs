//! Destinations that an application cannot request. Names under `.invalid` do not exist (RFC 6761 Sec. 6.4), and the
//! overlay's entry nodes refuse these names.

use crate::flow::{Destination, Host, HostName};

/// A destination inside the overlay that is not a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reserved {
    /// The far node's endpoint for whole packets ([`super::packet`]).
    Packets,
    /// For measurements: the far node counts the bytes and discards them.
    Bench,
    /// The far node's endpoint for flows of UDP ([`super::frame::Relayed`]).
    Udp,
}

impl Reserved {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Packets, Self::Bench, Self::Udp];

    const fn name(self) -> &'static str {
        match self {
            Self::Packets => "packets.overlay.invalid",
            Self::Bench => "bench.overlay.invalid",
            Self::Udp => "udp.overlay.invalid",
        }
    }

    /// Returns the destination that a request carries.
    pub fn destination(self) -> Option<Destination> {
        let name = HostName::from_bytes(self.name().as_bytes()).ok()?;
        Some(Destination { host: Host::Name(name), port: 1, zone: 0 })
    }

    /// Returns the reserved destination that this is. `None`: an ordinary destination.
    pub fn of(destination: &Destination) -> Option<Self> {
        let Host::Name(name) = &destination.host else { return None };
        Self::ALL.into_iter().find(|reserved| reserved.name() == name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_known_again_at_any_port_and_nothing_else_is() {
        for reserved in Reserved::ALL {
            let destination = reserved.destination().expect("a name");
            assert_eq!(Reserved::of(&destination), Some(reserved));
            assert_eq!(Reserved::of(&Destination { port: 99, ..destination }), Some(reserved));
        }
        assert_eq!(Reserved::of(&"PACKETS.overlay.invalid:1".parse().unwrap()), Some(Reserved::Packets));
        for other in ["overlay.invalid:1", "x.packets.overlay.invalid:1", "192.0.2.1:1"] {
            assert_eq!(Reserved::of(&other.parse().unwrap()), None);
        }
    }
}
