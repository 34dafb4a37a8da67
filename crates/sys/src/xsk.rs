//! AF_XDP sockets (the kernel's Documentation/networking/af_xdp.rst): frames of one receive queue of an
//! interface, in memory shared with the kernel and handed over through four rings.
//!
//! Several sockets may share one [`Umem`], so that a frame that came in by one interface can go out by
//! another without a copy.
#![allow(unsafe_code, reason = "works on memory that it shares with the kernel")]

mod ring;

use crate::sockopt::set_int;
use ring::{Consumer, Producer};
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Entries of the fill, transmit and completion rings, a power of two.
pub const RING_ENTRIES: u32 = 2048;
/// Entries of the receive ring, a power of two. A reader that is late loses what exceeds it.
pub const RECEIVE_ENTRIES: u32 = 8192;
/// Bytes that the kernel leaves free in front of a received frame (`XDP_PACKET_HEADROOM`).
pub const HEADROOM: usize = 256;

/// `XDP_MAX_TX_SKB_BUDGET` of <linux/if_xdp.h> (Linux 6.17): the maximum number of frames that one system
/// call sends.
const MAX_TX_SKB_BUDGET: libc::c_int = 9;

/// The size of the frames of a [`Umem`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FrameSize {
    /// 2,048 bytes: enough for Ethernet's usual packets, and twice as many frames fit into caches.
    Half,
    /// 4,096 bytes, the maximum.
    #[default]
    Page,
}

impl FrameSize {
    /// Returns the smallest size with room for packets of this many bytes behind the [`HEADROOM`]; `None` if
    /// they do not fit.
    pub const fn holding(bytes: usize) -> Option<Self> {
        match bytes + HEADROOM {
            0..=2048 => Some(Self::Half),
            2049..=4096 => Some(Self::Page),
            _ => None,
        }
    }

    /// Returns it in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Half => 2048,
            Self::Page => 4096,
        }
    }

    /// Returns the offset of the beginning of the frame that contains an offset.
    pub const fn beginning(self, address: u64) -> u64 {
        address & !(self.bytes() as u64 - 1)
    }
}

/// Whether frames are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copying {
    /// Zero copy where the driver supports it, otherwise copies.
    #[default]
    Auto,
    /// The kernel copies each frame.
    Copy,
    /// The network card reads and writes the frames in place.
    ZeroCopy,
}

/// The place of a frame in its [`Umem`], and its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Descriptor {
    /// Offset of its first byte.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Always 0 here.
    pub options: u32,
}

/// Memory for frames, shared with the kernel.
#[derive(Debug)]
pub struct Umem {
    memory: NonNull<u8>,
    bytes: usize,
    frame: FrameSize,
}

// SAFETY: it is plain memory; who may touch which frame is settled by the rings, each of which has one owner.
unsafe impl Send for Umem {}
// SAFETY: as above; `frame` is unsafe to call for this reason.
unsafe impl Sync for Umem {}

impl Umem {
    /// Makes room for `frames` frames of this size, on huge pages where the kernel has some.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn new(frames: usize, frame: FrameSize) -> io::Result<Arc<Self>> {
        let bytes = frames * frame.bytes();
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever the kernel wants it. Its pages come when a socket registers it.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping just made. An advice only: without huge pages it is as well, a little slower.
        unsafe { libc::madvise(at, bytes, libc::MADV_HUGEPAGE) };
        let memory = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Self { memory, bytes, frame }))
    }

    /// Returns the number of frames it has room for.
    pub const fn frames(&self) -> usize {
        self.bytes / self.frame.bytes()
    }

    /// Returns the size of its frames.
    pub const fn frame_size(&self) -> FrameSize {
        self.frame
    }

    /// Returns the bytes that a descriptor names; an empty slice if they are outside of the memory.
    ///
    /// # Safety
    /// The kernel does not own the frame at the moment, and no other code borrows it.
    #[allow(clippy::mut_from_ref, reason = "the rings say whose a frame is, and the caller keeps to them")]
    unsafe fn frame(&self, descriptor: Descriptor) -> &mut [u8] {
        let (start, length) = (descriptor.address as usize, descriptor.length as usize);
        if start.checked_add(length).is_none_or(|end| end > self.bytes) {
            return &mut [];
        }
        // SAFETY: inside the mapping, which lives as long as `self`; no other code uses it, as the caller says.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(start), length) }
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; sockets that use it hold it, so none is left.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

/// One socket: the frames of one queue.
#[derive(Debug)]
pub struct XskSocket {
    fd: OwnedFd,
    umem: Arc<Umem>,
    fill: Producer<u64>,
    completion: Consumer<u64>,
    receive: Consumer<Descriptor>,
    transmit: Producer<Descriptor>,
}

impl XskSocket {
    /// Opens a socket for one queue of the interface with this index. Its frames lie in `umem`; if another
    /// socket uses that already, pass that one as `shared`. Frames arrive once an XDP program redirects them
    /// here. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// EBUSY if another socket has the queue; EOPNOTSUPP if zero copy is required but not supported; ENOBUFS
    /// if the memory may not be locked.
    pub fn open(
        umem: &Arc<Umem>,
        index: u32,
        queue: u32,
        copying: Copying,
        shared: Option<&Self>,
    ) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no addresses; the result is a new descriptor.
        let fd = unsafe { libc::socket(libc::AF_XDP, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, and no other code owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if shared.is_none() {
            register(&fd, umem)?;
        }
        for (ring, entries) in [
            (libc::XDP_UMEM_FILL_RING, RING_ENTRIES),
            (libc::XDP_UMEM_COMPLETION_RING, RING_ENTRIES),
            (libc::XDP_RX_RING, RECEIVE_ENTRIES),
            (libc::XDP_TX_RING, RING_ENTRIES),
        ] {
            set_int(&fd, libc::SOL_XDP, ring, entries.cast_signed())?;
        }
        // Older kernels do not know this option and send 32 frames a call; `wake` calls again then.
        let _ = set_int(&fd, libc::SOL_XDP, MAX_TX_SKB_BUDGET, RING_ENTRIES.cast_signed());
        let offsets = offsets(&fd)?;
        let socket = Self {
            fill: Producer::map(&fd, &offsets.fr, libc::XDP_UMEM_PGOFF_FILL_RING, RING_ENTRIES)?,
            completion: Consumer::map(&fd, &offsets.cr, libc::XDP_UMEM_PGOFF_COMPLETION_RING, RING_ENTRIES)?,
            receive: Consumer::map(&fd, &offsets.rx, libc::XDP_PGOFF_RX_RING as u64, RECEIVE_ENTRIES)?,
            transmit: Producer::map(&fd, &offsets.tx, libc::XDP_PGOFF_TX_RING as u64, RING_ENTRIES)?,
            umem: umem.clone(),
            fd,
        };
        socket.bind(index, queue, copying, shared)?;
        Ok(socket)
    }

    fn bind(&self, index: u32, queue: u32, copying: Copying, shared: Option<&Self>) -> io::Result<()> {
        // SAFETY: plain integers; all zero bytes are a value of it.
        let mut address: libc::sockaddr_xdp = unsafe { zeroed() };
        address.sxdp_family = libc::AF_XDP as u16;
        address.sxdp_ifindex = index;
        address.sxdp_queue_id = queue;
        address.sxdp_flags = match (copying, shared) {
            (_, Some(_)) => libc::XDP_SHARED_UMEM,
            (Copying::Auto, None) => libc::XDP_USE_NEED_WAKEUP,
            (Copying::Copy, None) => libc::XDP_USE_NEED_WAKEUP | libc::XDP_COPY,
            (Copying::ZeroCopy, None) => libc::XDP_USE_NEED_WAKEUP | libc::XDP_ZEROCOPY,
        };
        if let Some(shared) = shared {
            address.sxdp_shared_umem_fd = shared.fd.as_raw_fd().cast_unsigned();
        }
        let length = size_of::<libc::sockaddr_xdp>() as libc::socklen_t;
        // SAFETY: the kernel reads one `sockaddr_xdp`, which lives across the call.
        let bound = unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const address).cast(), length) };
        if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Gives the kernel empty frames to fill, by the offsets of their beginnings. Returns how many it had
    /// room for.
    pub fn give(&mut self, frames: &[u64]) -> usize {
        self.fill.push(frames.iter().copied())
    }

    /// Takes received frames, as many as fit into `taken`. Returns how many.
    pub fn receive(&mut self, taken: &mut [Descriptor]) -> usize {
        self.receive.pop(taken)
    }

    /// Returns how many received frames wait to be taken.
    pub fn waiting(&self) -> usize {
        self.receive.waiting() as usize
    }

    /// Returns the bytes of a frame that this socket has received, or that the kernel does not own.
    pub fn frame(&mut self, descriptor: Descriptor) -> &mut [u8] {
        // SAFETY: frames are the kernel's between `give` and `receive`, and between `send` and `finished`; those in
        // between are the caller's, who has this socket, and through it the frame, for itself.
        unsafe { self.umem.frame(descriptor) }
    }

    /// Queues frames to be sent. Returns how many there was room for.
    pub fn send(&mut self, frames: &[Descriptor]) -> usize {
        self.transmit.push(frames.iter().copied())
    }

    /// Takes back frames that were sent, by an offset inside of each. Returns how many.
    pub fn finished(&mut self, frames: &mut [u64]) -> usize {
        self.completion.pop(frames)
    }

    /// Returns how many of the given frames the kernel has not begun to fill. Received frames do not count.
    pub fn to_fill(&self) -> usize {
        self.fill.waiting() as usize
    }

    /// Wakes the kernel if frames wait to be sent or filled and it asks to be woken. Where the kernel copies,
    /// all frames have been sent when this returns, unless the interface takes no more.
    ///
    /// # Errors
    /// ENETDOWN if the interface is down, ENXIO if it is gone.
    pub fn wake(&mut self) -> io::Result<()> {
        self.wake_to_send()?;
        if self.fill.wants_wakeup() {
            // SAFETY: nothing is passed.
            let got = unsafe {
                libc::recvfrom(
                    self.fd.as_raw_fd(),
                    std::ptr::null_mut(),
                    0,
                    libc::MSG_DONTWAIT,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                )
            };
            if got < 0 {
                return busy_is_fine(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Calls sendto(2) until all frames are sent: one call sends a limited number and says EAGAIN if more are
    /// left. Stops if a call sends none.
    fn wake_to_send(&self) -> io::Result<()> {
        let mut waiting = self.transmit.waiting();
        while waiting > 0 && self.transmit.wants_wakeup() {
            let fd = self.fd.as_raw_fd();
            // SAFETY: nothing is passed.
            let sent =
                unsafe { libc::sendto(fd, std::ptr::null(), 0, libc::MSG_DONTWAIT, std::ptr::null(), 0) };
            if sent < 0 {
                busy_is_fine(io::Error::last_os_error())?;
            }
            let left = self.transmit.waiting();
            if left >= waiting {
                break;
            }
            waiting = left;
        }
        Ok(())
    }

    /// Returns how many frames for this socket the kernel has dropped since it was opened, because no frame
    /// to fill was left or the receive ring was full.
    ///
    /// # Errors
    /// What getsockopt(2) reports.
    pub fn lost(&self) -> io::Result<u64> {
        // SAFETY: plain integers; all zero bytes are a value of it.
        let mut statistics: libc::xdp_statistics = unsafe { zeroed() };
        get(&self.fd, libc::XDP_STATISTICS, &mut statistics)?;
        Ok(statistics.rx_dropped + statistics.rx_ring_full)
    }

    /// True if the kernel hands frames over without copying them.
    ///
    /// # Errors
    /// What getsockopt(2) reports.
    pub fn zero_copy(&self) -> io::Result<bool> {
        let mut options = libc::xdp_options { flags: 0 };
        get(&self.fd, libc::XDP_OPTIONS, &mut options)?;
        Ok(options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
    }
}

impl AsFd for XskSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns the number of active receive queues of the interface with this name, in this thread's network
/// namespace; 1 if its driver does not say.
pub fn queues(interface: &str) -> u32 {
    const GET_CHANNELS: u32 = 0x3c;
    const RECEIVE: usize = 5;
    const COMBINED: usize = 8;
    // struct ethtool_channels: the command, four maxima, then the current numbers: rx, tx, other, combined.
    let mut channels = [GET_CHANNELS, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: `ifreq` is plain integers and a union of such; all zero bytes are a value of it.
    let mut request: libc::ifreq = unsafe { zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(interface.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_data = channels.as_mut_ptr().cast();
    let Ok(socket) = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None) else {
        return 1;
    };
    // SAFETY: SIOCETHTOOL reads the `ifreq` and reads and writes the nine numbers it points to; both live across the call.
    let asked =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut request) };
    if asked < 0 { 1 } else { (channels[RECEIVE] + channels[COMBINED]).max(1) }
}

/// Treats "busy" and "no room now" as success: the caller wakes the kernel again later.
fn busy_is_fine(error: io::Error) -> io::Result<()> {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::EINTR) => Ok(()),
        _ => Err(error),
    }
}

fn register(fd: &OwnedFd, umem: &Umem) -> io::Result<()> {
    // SAFETY: plain integers; all zero bytes are a value of it.
    let mut registration: libc::xdp_umem_reg = unsafe { zeroed() };
    registration.addr = umem.memory.as_ptr() as u64;
    registration.len = umem.bytes as u64;
    registration.chunk_size = umem.frame.bytes() as u32;
    let length = size_of::<libc::xdp_umem_reg>() as libc::socklen_t;
    // SAFETY: the kernel reads one `xdp_umem_reg`; the memory it names is mapped, and held by every socket that uses it.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_XDP,
            libc::XDP_UMEM_REG,
            (&raw const registration).cast(),
            length,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn offsets(fd: &OwnedFd) -> io::Result<libc::xdp_mmap_offsets> {
    // SAFETY: plain integers; all zero bytes are a value of it.
    let mut offsets: libc::xdp_mmap_offsets = unsafe { zeroed() };
    get(fd, libc::XDP_MMAP_OFFSETS, &mut offsets)?;
    Ok(offsets)
}

fn get<T>(fd: &OwnedFd, name: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `value`, which has that many and is plain integers.
    let got = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_XDP,
            name,
            std::ptr::from_mut(value).cast(),
            &raw mut length,
        )
    };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
