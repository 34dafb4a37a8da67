//! Listening to IP multicast on an interface, so that its packets come as far as our packet filter.

use crate::route::interface_index;
use socket2::{Domain, InterfaceIndexOrAddress, Socket, Type};
use std::io;
use std::net::IpAddr;

/// A group address that this host listens to on one interface while the value exists. The network card accepts its packets, and
/// switches send them here.
#[derive(Debug)]
pub struct Listening {
    _socket: Socket,
}

impl Listening {
    /// Joins an address on an interface, in this thread's network namespace. There is one socket for each address: the kernel
    /// limits the addresses of one socket (`net.ipv4.igmp_max_memberships`).
    ///
    /// # Errors
    /// ENODEV if there is no such interface or it has no multicast; EINVAL if the address is not a multicast address.
    pub fn join(address: IpAddr, interface: &str) -> io::Result<Self> {
        let index = interface_index(interface).map_err(io::Error::other)?;
        let socket = |domain| Socket::new(domain, Type::DGRAM.cloexec(), None);
        let _socket = match address {
            IpAddr::V4(address) => {
                let socket = socket(Domain::IPV4)?;
                socket.join_multicast_v4_n(&address, &InterfaceIndexOrAddress::Index(index))?;
                socket
            }
            IpAddr::V6(address) => {
                let socket = socket(Domain::IPV6)?;
                socket.join_multicast_v6(&address, index)?;
                socket
            }
        };
        Ok(Self { _socket })
    }
}
