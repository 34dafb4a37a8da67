//! The direct carrier for UDP: a connected socket for each association, which tells of ICMP errors.

use super::gate::{self, Admitted};
use super::{Dialing, Failure, direct};
use crate::reactor::UdpSocket;
use sidetrack_core::flow::EndReason;
use sidetrack_sys::{sockopt, udp};
use std::io;
use std::net::SocketAddr;

/// Opens a socket whose datagrams go to this address, and that receives only from there.
///
/// # Errors
/// Fails with `loop` if the address is our own listener, otherwise with the reason that fits the system's error.
pub fn connect(dialing: &Dialing, to: Admitted) -> Result<UdpSocket, Failure> {
    let address = to.address();
    if dialing.is_own_datagrams(address) {
        return Err(Failure::new(EndReason::Loop, format!("{address} is our own listener")));
    }
    let opened = || -> io::Result<UdpSocket> {
        let socket = udp::unbound(address)?;
        // Set before the first datagram: our capture rules would lead an unmarked one back to us.
        if let Some(mark) = dialing.mark {
            sockopt::set_mark(&socket, mark)?;
        }
        udp::batch::receive_trains(&socket);
        gate::start_datagrams(&socket, to)?;
        UdpSocket::new(socket.into())
    };
    opened().map_err(|error| failure(&error, address))
}

/// Maps an error of a UDP socket, such as an ICMP error, to an end reason.
pub fn failure(error: &io::Error, to: SocketAddr) -> Failure {
    direct::failure(error, to)
}
