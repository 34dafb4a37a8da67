//! Which interfaces send frames that an XDP program redirects to them (generic netlink, family `netdev`; Linux 6.3).
//!
//! A driver says so with the flag `NETDEV_XDP_ACT_NDO_XMIT` (linux/netdev.h). An end of a veth has the flag while the other end has GRO
//! or an XDP program; without it the kernel drops redirected frames, and no program hears of it.

use crate::napi::{GENERIC_HEADER, family, generic};
use crate::netlink::{Error, Message, Protocol, Requests, Socket, attributes};

const NETDEV_CMD_DEV_GET: u8 = 1;
const IFINDEX: u16 = 1; // NETDEV_A_DEV_IFINDEX
const XDP_FEATURES: u16 = 3; // NETDEV_A_DEV_XDP_FEATURES
const NDO_XMIT: u64 = 4; // NETDEV_XDP_ACT_NDO_XMIT

/// Asks about interfaces of the network namespace in which it was opened.
#[derive(Debug)]
pub struct RedirectTargets {
    socket: Socket,
    family: u16,
}

impl RedirectTargets {
    /// Opens a socket for the questions.
    ///
    /// # Errors
    /// ENOENT before Linux 6.3.
    pub fn open() -> Result<Self, Error> {
        let mut socket = Socket::open(Protocol::Generic)?;
        let family = family(&mut socket)?;
        Ok(Self { socket, family })
    }

    /// Returns whether the interface with this index sends redirected frames now.
    ///
    /// # Errors
    /// ENODEV if it is gone.
    pub fn takes(&mut self, interface: u32) -> Result<bool, Error> {
        let mut request = Requests::new();
        let asked = "read what an interface can do with XDP (Linux 6.3)";
        request.push(asked, self.family, 0, &generic(NETDEV_CMD_DEV_GET), |w| w.u32_ne(IFINDEX, interface));
        let takes = |message: &Message<'_>| {
            let features = attributes(message.after(GENERIC_HEADER)).first(XDP_FEATURES)?;
            features.payload.try_into().ok().map(|bytes| u64::from_ne_bytes(bytes) & NDO_XMIT != 0)
        };
        self.socket.ask(&request, takes)?.ok_or(Error::NoAnswer(0))
    }
}
