//! Packets past the kernel's own TCP: frames of one interface by packet sockets (packet(7)), and whole IP packets that the
//! kernel routes (raw(7)).
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

mod icmp;

pub use icmp::{IcmpMessage, UnreachableSocket};

use crate::bpf::Program;
use crate::sockopt::set_int;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io::{self, IoSlice};
use std::mem::{size_of, zeroed};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Bytes before each frame: `struct virtio_net_hdr`, as [`crate::tap`] has it.
pub const VNET_HEADER_BYTES: usize = 10;
/// Room for one frame with its header: 64 KiB of IP packet and a link header.
pub const FRAME_ROOM: usize = 66_048;
/// Frames that one call takes from the kernel or gives to it, at most.
pub const BATCH: usize = 32;

/// What the socket's buffer holds while its reader is away, bytes. A wish: the kernel may grant less.
const RECEIVE_BUFFER_BYTES: usize = 16 << 20;

/// What `flags` of the header says of checksums (virtio 1.2, 5.1.6).
const NEEDS_CHECKSUM: u8 = 1;
const CHECKSUM_VALID: u8 = 2;

/// What the kernel knows of the checksum of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameChecksum {
    /// Nothing.
    Unknown,
    /// It is right.
    Valid,
    /// It was never finished: a sender on this machine left that to a network card.
    Partial,
}

/// Frames of one interface.
#[derive(Debug)]
pub struct PacketSocket {
    socket: Socket,
}

/// What has become of frames that passed the filter of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// They were put where the socket takes them from.
    pub come: u32,
    /// There was no room for them.
    pub dropped: u32,
}

/// Frames that were taken, each behind its header.
#[derive(Debug)]
pub struct Frames {
    room: Vec<u8>,
    lengths: [usize; BATCH],
    count: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Self { room: vec![0; BATCH * FRAME_ROOM], lengths: [0; BATCH], count: 0 }
    }
}

impl Frames {
    /// How many there are.
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// A frame with its header before it; empty if there is none of this number.
    pub fn with_header(&self, number: usize) -> &[u8] {
        let length = self.lengths.get(number).copied().unwrap_or(0);
        let start = number * FRAME_ROOM;
        self.room.get(start..start + length).unwrap_or_default()
    }

    /// What is known of its checksum, and the frame behind the header.
    pub fn frame(&mut self, number: usize) -> (FrameChecksum, &mut [u8]) {
        let length = self.lengths.get(number).copied().unwrap_or(0);
        let start = number * FRAME_ROOM;
        let bytes = self.room.get_mut(start..start + length).unwrap_or_default();
        let flags = bytes.first().copied().unwrap_or(0);
        let checksum = match flags {
            flags if flags & NEEDS_CHECKSUM != 0 => FrameChecksum::Partial,
            flags if flags & CHECKSUM_VALID != 0 => FrameChecksum::Valid,
            _ => FrameChecksum::Unknown,
        };
        (checksum, bytes.get_mut(VNET_HEADER_BYTES..).unwrap_or_default())
    }

    /// Makes the header say nothing, so that the frame may be sent with checksums that are finished.
    pub fn clear_header(&mut self, number: usize) {
        let start = number * FRAME_ROOM;
        if let Some(header) = self.room.get_mut(start..start + VNET_HEADER_BYTES) {
            header.fill(0);
        }
    }
}

impl PacketSocket {
    /// Takes those frames that come in by the interface with this index and that `filter` lets through, in this thread's
    /// network namespace. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// EPERM without the right; ENODEV if there is no such interface.
    pub fn open(index: u32, filter: &Program) -> io::Result<Self> {
        let kind = Type::RAW.nonblocking().cloexec();
        // Without a protocol it gets nothing until it is bound: no frame passes the filter by.
        let socket = Socket::new(Domain::PACKET, kind, None)?;
        set_int(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        set_int(&socket, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
        set_int(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, filter.as_fd().as_raw_fd())?;
        let bytes = libc::c_int::try_from(RECEIVE_BUFFER_BYTES).unwrap_or(libc::c_int::MAX);
        if set_int(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes).is_err() {
            socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        }
        let packets = Self { socket };
        packets.bind(index, libc::ETH_P_ALL as u16)?;
        Ok(packets)
    }

    /// Sends by the interface with this index, past its queueing discipline, and takes nothing from it; in this thread's
    /// network namespace. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// EPERM without the right; ENODEV if there is no such interface.
    pub fn sender(index: u32) -> io::Result<Self> {
        let socket = Socket::new(Domain::PACKET, Type::RAW.nonblocking().cloexec(), None)?;
        set_int(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        set_int(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)?;
        let packets = Self { socket };
        packets.bind(index, 0)?;
        Ok(packets)
    }

    /// Protocol 0: nothing is received.
    fn bind(&self, index: u32, protocol: u16) -> io::Result<()> {
        // SAFETY: `sockaddr_ll` is plain integers; all zero bytes are a value of it.
        let mut address: libc::sockaddr_ll = unsafe { zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol.to_be();
        address.sll_ifindex = index.cast_signed();
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads one `sockaddr_ll`, which lives across the call.
        let bound = unsafe { libc::bind(self.socket.as_raw_fd(), (&raw const address).cast(), length) };
        if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Shares the interface's frames with the other sockets of a group: `choose` says for each frame which of them gets it,
    /// by the order in which they joined. The first of a group says `None`, the others what it was told.
    ///
    /// # Errors
    /// What setsockopt(2) says.
    pub fn join(&self, group: Option<u16>, choose: &Program) -> io::Result<u16> {
        const EBPF: u32 = 7;
        const UNIQUE_ID: u32 = 0x2000;
        let wanted = match group {
            None => (EBPF | UNIQUE_ID) << 16,
            Some(group) => u32::from(group) | EBPF << 16,
        };
        set_int(&self.socket, libc::SOL_PACKET, libc::PACKET_FANOUT, wanted.cast_signed())?;
        let mut value: libc::c_int = 0;
        let mut length = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the kernel writes one integer, whose size `length` says.
        let asked = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_FANOUT,
                (&raw mut value).cast(),
                &raw mut length,
            )
        };
        if asked < 0 {
            return Err(io::Error::last_os_error());
        }
        set_int(&self.socket, libc::SOL_PACKET, libc::PACKET_FANOUT_DATA, choose.as_fd().as_raw_fd())?;
        Ok(value as u16)
    }

    /// What has come since this was asked last (`PACKET_STATISTICS`).
    ///
    /// # Errors
    /// What getsockopt(2) says.
    pub fn counts(&self) -> io::Result<Counts> {
        let mut counts = [0_u32; 2];
        let mut length = size_of_val(&counts) as libc::socklen_t;
        // SAFETY: the kernel writes a `struct tpacket_stats`, two words, whose size `length` says.
        let asked = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                counts.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if asked < 0 {
            return Err(io::Error::last_os_error());
        }
        let [all, dropped] = counts;
        Ok(Counts { come: all.saturating_sub(dropped), dropped })
    }

    /// Takes the frames that wait, [`BATCH`] at most; none may wait.
    ///
    /// # Errors
    /// ENETDOWN when the interface goes down.
    pub fn receive(&self, frames: &mut Frames) -> io::Result<usize> {
        frames.count = 0;
        // SAFETY: `iovec` and `mmsghdr` are plain integers and pointers; all zero bytes are values of them.
        let (mut parts, mut messages): ([libc::iovec; BATCH], [libc::mmsghdr; BATCH]) = unsafe { zeroed() };
        for ((part, message), room) in
            parts.iter_mut().zip(&mut messages).zip(frames.room.chunks_exact_mut(FRAME_ROOM))
        {
            *part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            message.msg_hdr.msg_iov = part;
            message.msg_hdr.msg_iovlen = 1;
        }
        let (fd, count) = (self.socket.as_raw_fd(), BATCH as libc::c_uint);
        // SAFETY: each message has one part, which is room of `frames` that no other code uses during the call.
        let taken = unsafe {
            libc::recvmmsg(fd, messages.as_mut_ptr(), count, libc::MSG_DONTWAIT as _, std::ptr::null_mut())
        };
        let Ok(taken) = usize::try_from(taken) else {
            return match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                error => Err(error),
            };
        };
        for (length, message) in frames.lengths.iter_mut().zip(&messages).take(taken) {
            *length = (message.msg_len as usize).min(FRAME_ROOM);
        }
        frames.count = taken;
        Ok(taken)
    }

    /// Sends frames, each behind its header, [`BATCH`] at most. How many the kernel took; it takes none while its queue is
    /// full.
    ///
    /// # Errors
    /// ENETDOWN when the interface is down; EINVAL or EMSGSIZE if the first frame is none that the interface takes.
    pub fn send(&self, frames: &[IoSlice<'_>]) -> io::Result<usize> {
        // SAFETY: as in `receive`.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { zeroed() };
        for (message, frame) in messages.iter_mut().zip(frames) {
            // `IoSlice` is an `iovec`, as std promises.
            message.msg_hdr.msg_iov = std::ptr::from_ref(frame).cast_mut().cast();
            message.msg_hdr.msg_iovlen = 1;
        }
        let (fd, count) = (self.socket.as_raw_fd(), frames.len().min(BATCH) as libc::c_uint);
        // SAFETY: each message has one part, borrowed until here; sendmmsg(2) only reads through it.
        let sent = unsafe { libc::sendmmsg(fd, messages.as_mut_ptr(), count, libc::MSG_DONTWAIT as _) };
        usize::try_from(sent).or_else(|_| match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS)) => Ok(0),
            error => Err(error),
        })
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends whole IP packets where the kernel's routes lead, and lets it find the neighbour.
#[derive(Debug)]
pub struct RoutedSocket {
    v4: Socket,
    v6: Option<Socket>,
}

impl RoutedSocket {
    /// With this mark on what is sent, in this thread's network namespace. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// EPERM without the right.
    pub fn open(mark: u32) -> io::Result<Self> {
        // IPPROTO_RAW: packets come with their own headers, and none is ever received.
        let open = |domain| {
            let kind = Type::RAW.nonblocking().cloexec();
            let socket = Socket::new(domain, kind, Some(Protocol::from(libc::IPPROTO_RAW)))?;
            set_int(&socket, libc::SOL_SOCKET, libc::SO_MARK, mark.cast_signed())?;
            Ok::<_, io::Error>(socket)
        };
        Ok(Self { v4: open(Domain::IPV4)?, v6: open(Domain::IPV6).ok() })
    }

    /// The descriptors, to hand them to another process.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(&self.v4), self.v6.as_ref()].into_iter().flatten().map(AsFd::as_fd)
    }

    /// Takes over what [`Self::descriptors`] gave; `None` if there is nothing.
    pub fn from_descriptors(mut fds: impl Iterator<Item = OwnedFd>) -> Option<Self> {
        let v4 = fds.next()?.into();
        Some(Self { v4, v6: fds.next().map(Socket::from) })
    }

    /// The same, and packets to IP multicast addresses leave by this interface.
    ///
    /// # Errors
    /// EPERM without the right; an error if there is no such interface.
    pub fn open_on(mark: u32, interface: &str) -> io::Result<Self> {
        let index = crate::route::interface_index(interface).map_err(io::Error::other)?;
        let sockets = Self::open(mark)?;
        // `struct ip_mreqn`: group, local address, interface index.
        let mut request = [0_u8; 12];
        request[8..].copy_from_slice(&index.to_ne_bytes());
        let length = request.len() as libc::socklen_t;
        // SAFETY: the kernel reads the twelve bytes of `request`, which lives across the call.
        let set = unsafe {
            libc::setsockopt(
                sockets.v4.as_raw_fd(),
                libc::IPPROTO_IP,
                libc::IP_MULTICAST_IF,
                request.as_ptr().cast(),
                length,
            )
        };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        if let Some(v6) = &sockets.v6 {
            v6.set_multicast_if_v6(index)?;
        }
        Ok(sockets)
    }

    /// Sends one packet to the address that its header names as well.
    ///
    /// # Errors
    /// ENETUNREACH or EHOSTUNREACH if no route leads there, EMSGSIZE if it does not fit the first link, `WouldBlock`.
    pub fn send(&self, packet: &[u8], to: IpAddr) -> io::Result<()> {
        let socket = match (to, &self.v6) {
            (IpAddr::V4(_), _) => &self.v4,
            (IpAddr::V6(_), Some(socket)) => socket,
            (IpAddr::V6(_), None) => return Err(io::ErrorKind::Unsupported.into()),
        };
        // A port means nothing to raw(7), and for IPv6 has to be 0.
        let to = SockAddr::from(std::net::SocketAddr::new(to, 0));
        socket.send_to(packet, &to).map(drop)
    }
}
