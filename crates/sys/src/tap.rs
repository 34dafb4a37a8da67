//! TAP interfaces (the kernel's Documentation/networking/tuntap.rst): an Ethernet interface whose other end is a file
//! descriptor of ours. The laboratory's links are made of them.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

/// Bytes of the header before each frame: `struct virtio_net_hdr` in host byte order (virtio 1.2, 5.1.6; legacy
/// layout, which is what the kernel speaks on a TAP unless told otherwise).
pub const VNET_HEADER_BYTES: usize = 10;
/// The longest frame there can be with its header: 64 KiB of IP packet and an Ethernet header with two VLAN tags.
pub const LONGEST_FRAME_BYTES: usize = VNET_HEADER_BYTES + 22 + 65_535;

const DEVICE: &str = "/dev/net/tun";

/// One TAP interface with GSO; it goes with this value, also by SIGKILL.
#[derive(Debug)]
pub struct Tap(File);

impl Tap {
    /// Makes the interface `name` (1 to 15 bytes) in the network namespace of the calling thread. Needs CAP_NET_ADMIN
    /// there. Frames come with unfinished checksums and TCP super-frames uncut, as a [`VNET_HEADER_BYTES`] header says.
    ///
    /// # Errors
    /// `InvalidInput` if the name is none; `NotFound` if the kernel has no TUN/TAP; `PermissionDenied`;
    /// `ResourceBusy` if the name is taken.
    pub fn create(name: &str) -> io::Result<Self> {
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', '\0', ' ', ':']) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an interface name has 1 to 15 bytes"));
        }
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
        let file =
            file.map_err(|error| io::Error::new(error.kind(), format!("cannot open {DEVICE}: {error}")))?;
        attach(&file, name)?;
        Ok(Self(file))
    }

    /// Takes one frame with its header; `None` if none waits. `buffer` should hold [`LONGEST_FRAME_BYTES`]: a longer
    /// frame is cut off.
    ///
    /// # Errors
    /// What read(2) says, such as `EIO`-class errors when the interface is being removed.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.0).read(buffer) {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Hands one frame with its header to the kernel, as if it had come over a wire.
    ///
    /// # Errors
    /// `InvalidInput` if the header contradicts the frame; `EIO` while the interface is down.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        (&self.0).write(frame).map(|_| ())
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn attach(file: &File, name: &str) -> io::Result<()> {
    // SAFETY: `ifreq` is plain integers and a union of such; all zero bytes are a value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which lives across the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result < 0 {
        let error = io::Error::last_os_error();
        return Err(io::Error::new(error.kind(), format!("cannot make the interface {name}: {error}")));
    }
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_before_the_kernel_sees_them() {
        for bad in ["", "a-name-of-sixteen", "a/b", "a:b"] {
            assert_eq!(Tap::create(bad).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{bad:?}");
        }
    }

    #[test]
    fn what_the_kernel_sends_into_it_is_read() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                crate::netns::unshare_net().unwrap();
                let tap = Tap::create("tap-test").unwrap();
                assert_eq!(Tap::create("tap-test").unwrap_err().kind(), io::ErrorKind::ResourceBusy);
                assert!(tap.send(&[0; 60]).is_err(), "it is down");
                crate::route::link_up("tap-test").unwrap();
                let mut buffer = vec![0; LONGEST_FRAME_BYTES];
                let mut poll = [rustix::event::PollFd::new(&tap, rustix::event::PollFlags::IN)];
                // An interface that comes up reports its multicast groups (MLD) by itself.
                rustix::event::poll(&mut poll, Some(&rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 }))
                    .unwrap();
                let length = tap.receive(&mut buffer).unwrap().expect("a frame");
                assert!(length > VNET_HEADER_BYTES + 14);
                assert_eq!(buffer[VNET_HEADER_BYTES + 12..VNET_HEADER_BYTES + 14], [0x86, 0xdd], "IPv6");
            });
            inside.join().unwrap();
        });
    }
}
