//! What the driver of an interface can do, and what of it is switched on (ethtool(8); generic netlink, family `netdev`).
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use crate::napi;
use crate::netlink::Error;
use std::mem::zeroed;
use std::os::fd::AsRawFd;

/// Bits of `enum netdev_xdp_act` (linux/netdev.h).
const BASIC: u64 = 1;
const XSK_ZEROCOPY: u64 = 8;

/// Settings of a driver; none where it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Frames of one connection are put together as they come (GRO).
    pub gro: Option<bool>,
    /// Checksums of frames that come are verified by the card.
    pub rx_checksum: Option<bool>,
    /// Checksums of frames that leave are computed by the card.
    pub tx_checksum: Option<bool>,
}

impl Offloads {
    /// Those of the interface with this name, in this thread's network namespace.
    pub fn of(interface: &str) -> Self {
        const GET_RX_CHECKSUM: u32 = 0x14;
        const GET_TX_CHECKSUM: u32 = 0x16;
        const GET_GRO: u32 = 0x2b;
        Self {
            gro: value(interface, GET_GRO),
            rx_checksum: value(interface, GET_RX_CHECKSUM),
            tx_checksum: value(interface, GET_TX_CHECKSUM),
        }
    }
}

/// What a driver can do for XDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xdp {
    /// It runs programs itself; otherwise only the kernel does, behind it (generic mode).
    pub native: bool,
    /// AF_XDP gets at its frames without copying them.
    pub zero_copy: bool,
}

/// Asks what the driver of an interface can do for XDP. The interface is in this thread's network namespace.
///
/// # Errors
/// ENOENT before Linux 6.3: nothing is known.
pub fn xdp(interface: u32) -> Result<Option<Xdp>, Error> {
    let features = napi::xdp_features(interface)?;
    Ok(features.map(|bits| Xdp { native: bits & BASIC != 0, zero_copy: bits & XSK_ZEROCOPY != 0 }))
}

/// One setting.
fn value(interface: &str, command: u32) -> Option<bool> {
    // struct ethtool_value: the command, then the answer.
    let mut asked = [command, 0];
    // SAFETY: `ifreq` is plain integers and a union of such; all zero bytes are a value of it.
    let mut request: libc::ifreq = unsafe { zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(interface.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_data = asked.as_mut_ptr().cast();
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).ok()?;
    // SAFETY: SIOCETHTOOL reads the `ifreq` and reads and writes the two numbers it points to; both live across the call.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut request) };
    (done >= 0).then_some(asked[1] != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_settings_and_what_is_not_there_has_none() {
        assert!(Offloads::of("lo").gro.is_some());
        assert_eq!(Offloads::of("no-such-link"), Offloads::default());
    }
}
