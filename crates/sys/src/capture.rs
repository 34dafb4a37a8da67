//! Copies of the packets of a network, for captures (packet(7), the kernel's Documentation/networking/packet_mmap.rst).
//!
//! A socket is opened while the process has CAP_NET_RAW. It costs nothing until it is read: it waits for a kind of frame that no
//! network has. Reading needs no right. The kernel writes packets into a ring of blocks that it shares with us, and drops what does
//! not fit: a slow reader never delays a packet.
//!
//! ```text
//! idle --read--> the kernel fills a block --its time is over, or it is full--> we read it --> the kernel fills it again
//!      <--drop of the ring--
//! ```
#![allow(unsafe_code, reason = "works on memory that it shares with the kernel")]

use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Bytes of one block of the ring.
const BLOCK_BYTES: usize = 1 << 20;

/// Blocks of the ring: it holds 16 MiB while it is read.
const BLOCKS: usize = 16;

/// The unit in which the kernel checks the sizes of a ring. Packets have any length.
const FRAME_BYTES: usize = 2048;

/// How long the kernel waits with a block that is not full, milliseconds.
const RETIRE_MS: u32 = 20;

/// An EtherType that is free for experiments (IEEE 802, "Local Experimental 1"): a socket that waits for it costs nothing.
const NO_PROTOCOL: u16 = 0x88b5;

/// `ETH_P_ALL` of <linux/if_ether.h>.
const ALL_PROTOCOLS: u16 = 3;

/// `TPACKET_V3` of <linux/if_packet.h>.
const VERSION: libc::c_int = 2;

/// `TP_STATUS_USER`: the block is ours.
const OURS: u32 = 1;

/// Offset of the address in a packet's header: `sizeof(struct tpacket3_hdr)`, which is a multiple of 16.
const ADDRESS_AT: usize = 48;

/// `ARPHRD_LOOPBACK`, and `PACKET_OUTGOING` of <linux/if_packet.h>.
const LOOPBACK: u16 = 772;
const OUTGOING: u8 = 4;

/// A socket that can be read as a ring of packets.
#[derive(Debug)]
pub struct CaptureSocket(OwnedFd);

/// One packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Its bytes from the IP header on.
    pub data: &'a [u8],
    /// Its length in the network, bytes. It may be larger than `data`.
    pub length: u32,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// The number of its interface.
    pub interface: i32,
    /// Whether it went out by the interface.
    pub is_outgoing: bool,
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl CaptureSocket {
    /// Opens one in the network of the calling thread.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_NET_RAW there.
    pub fn open() -> io::Result<Self> {
        // SAFETY: the call takes no memory of ours, and returns a new descriptor.
        let fd = check(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: the descriptor is open, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The same socket, which came as a descriptor.
    pub fn from_descriptor(fd: OwnedFd) -> Self {
        Self(fd)
    }

    fn set<T>(&self, option: libc::c_int, value: &T) -> io::Result<()> {
        let length = libc::socklen_t::try_from(size_of::<T>()).map_err(io::Error::other)?;
        // SAFETY: the pointer and the length are those of `value`, which lives until the call returns.
        let set = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                std::ptr::from_ref(value).cast(),
                length,
            )
        };
        check(set).map(drop)
    }

    fn bind(&self, protocol: u16) -> io::Result<()> {
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: protocol.to_be(),
            sll_ifindex: 0,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
        // SAFETY: the pointer and the length are those of `address`, which lives until the call returns.
        check(unsafe { libc::bind(self.0.as_raw_fd(), std::ptr::from_ref(&address).cast(), length) })
            .map(drop)
    }

    fn size(&self, blocks: usize) -> io::Result<()> {
        let number = |number: usize| u32::try_from(number).map_err(io::Error::other);
        let request = libc::tpacket_req3 {
            tp_block_size: number(if blocks == 0 { 0 } else { BLOCK_BYTES })?,
            tp_block_nr: number(blocks)?,
            tp_frame_size: number(if blocks == 0 { 0 } else { FRAME_BYTES })?,
            tp_frame_nr: number(BLOCK_BYTES / FRAME_BYTES * blocks)?,
            tp_retire_blk_tov: if blocks == 0 { 0 } else { RETIRE_MS },
            tp_sizeof_priv: 0,
            tp_feature_req_word: 0,
        };
        self.set(libc::PACKET_RX_RING, &request)
    }

    /// Lets the kernel write packets from now on, before anybody reads them. [`Self::read`] reads them then.
    ///
    /// # Errors
    /// What setsockopt(2) or bind(2) says.
    pub fn fill(&self) -> io::Result<()> {
        match self.set(libc::PACKET_VERSION, &VERSION) {
            // It has a ring already.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(()),
            set => set?,
        }
        self.size(BLOCKS)?;
        self.bind(ALL_PROTOCOLS)
    }

    /// Lets the kernel write packets from now on, until the ring is dropped. There may be one ring of a socket at a time.
    ///
    /// # Errors
    /// What setsockopt(2), mmap(2) or bind(2) says.
    pub fn read(&self) -> io::Result<Ring> {
        let socket = Self(self.0.try_clone()?);
        socket.fill()?;
        let bytes = BLOCK_BYTES * BLOCKS;
        // SAFETY: a new mapping of the ring that was made above, at an address that the kernel chooses.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                socket.0.as_raw_fd(),
                0,
            )
        };
        let memory = if memory == libc::MAP_FAILED { None } else { NonNull::new(memory.cast()) };
        let Some(memory) = memory else {
            let error = io::Error::last_os_error();
            let _ = socket.bind(NO_PROTOCOL);
            let _ = socket.size(0);
            return Err(error);
        };
        let ring = Ring { socket, memory, next: 0 };
        // The kernel frees no ring that a process has, and a child would keep it until its exec or its end.
        // SAFETY: the whole of the ring's own mapping.
        check(unsafe { libc::madvise(ring.memory.as_ptr().cast(), bytes, libc::MADV_DONTFORK) })?;
        Ok(ring)
    }
}

impl AsFd for CaptureSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The ring of a socket that is read.
#[derive(Debug)]
pub struct Ring {
    socket: CaptureSocket,
    memory: NonNull<u8>,
    /// The block that the kernel fills next.
    next: usize,
}

// SAFETY: the mapping belongs to this value alone, and may be used by any thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Waits until there are packets, at most this long.
    ///
    /// # Errors
    /// What poll(2) says: the interface or the network is gone.
    pub fn wait(&self, most: Duration) -> io::Result<()> {
        wait(&[self], most)
    }

    fn block(&self, index: usize) -> NonNull<u8> {
        // SAFETY: `index` is below `BLOCKS`, so the result lies in the mapping.
        unsafe { self.memory.add(index * BLOCK_BYTES) }
    }

    /// The word of a block that says whom it belongs to.
    fn status(&self, index: usize) -> &AtomicU32 {
        // SAFETY: offset 8 of a block has a word that both sides only access as a whole; it is aligned, and lives as long as
        // the mapping.
        unsafe { AtomicU32::from_ptr(self.block(index).add(8).cast().as_ptr()) }
    }

    /// Calls `each` with the packets of the blocks that the kernel has filled, the oldest first. A packet over loopback comes
    /// once.
    pub fn take(&mut self, mut each: impl FnMut(Packet<'_>)) {
        // At most one turn: a fast network must not keep the reader here.
        for _ in 0..BLOCKS {
            if self.status(self.next).load(Ordering::Acquire) & OURS == 0 {
                return;
            }
            // SAFETY: the block is ours until its word is given back below: the kernel does not write into it.
            let block = unsafe { std::slice::from_raw_parts(self.block(self.next).as_ptr(), BLOCK_BYTES) };
            packets(block, &mut each);
            self.status(self.next).store(0, Ordering::Release);
            self.next = (self.next + 1) % BLOCKS;
        }
    }

    /// Returns how many packets did not fit into the ring since the last call.
    pub fn take_lost(&self) -> u64 {
        let mut counts = [0_u32; 3];
        let mut length = size_of::<[u32; 3]>() as libc::socklen_t;
        // SAFETY: the pointer and the length are those of `counts`, and of the length itself.
        let got = unsafe {
            libc::getsockopt(
                self.socket.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                counts.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if got < 0 { 0 } else { u64::from(counts[1]) }
    }

    /// Returns the name of an interface of the socket's network.
    pub fn interface_name(&self, index: i32) -> Option<String> {
        /// `struct ifreq` of <linux/if.h>.
        #[repr(C)]
        struct Request {
            name: [u8; 16],
            index: i32,
            rest: [u8; 20],
        }
        let mut request = Request { name: [0; 16], index, rest: [0; 20] };
        // SAFETY: SIOCGIFNAME reads and writes a structure of this size.
        let got = unsafe {
            libc::ioctl(self.socket.0.as_raw_fd(), libc::SIOCGIFNAME as libc::Ioctl, &raw mut request)
        };
        let name = request.name.split(|byte| *byte == 0).next().unwrap_or_default();
        (got == 0).then(|| String::from_utf8_lossy(name).into_owned())
    }
}

impl Drop for Ring {
    /// Frees the memory, and lets the socket wait for nothing again.
    fn drop(&mut self) {
        let _ = self.socket.bind(NO_PROTOCOL);
        // SAFETY: the mapping was made with this length, and nothing refers to it any more.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), BLOCK_BYTES * BLOCKS) };
        let _ = self.socket.size(0);
    }
}

/// Waits until one of these rings has packets, at most this long.
///
/// # Errors
/// What poll(2) says.
pub fn wait(rings: &[&Ring], most: Duration) -> io::Result<()> {
    let mut fds: Vec<_> = rings.iter().map(|ring| PollFd::new(&ring.socket.0, PollFlags::IN)).collect();
    let most = rustix::event::Timespec {
        tv_sec: most.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: most.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&most)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Reads the packets of a block: `struct tpacket_block_desc` with `struct tpacket3_hdr` of <linux/if_packet.h>.
fn packets(block: &[u8], each: &mut impl FnMut(Packet<'_>)) {
    let count = u32_at(block, 12).unwrap_or(0);
    let mut at = u32_at(block, 16).unwrap_or(0) as usize;
    for _ in 0..count {
        let Some((packet, next)) = block.get(at..).and_then(one) else { return };
        packet.into_iter().for_each(&mut *each);
        at += next;
    }
}

/// The first packet, unless it is the second copy of one over loopback; and the offset of the next one.
fn one(bytes: &[u8]) -> Option<(Option<Packet<'_>>, usize)> {
    let next = u32_at(bytes, 0)? as usize;
    let (seconds, nanoseconds) = (u64::from(u32_at(bytes, 4)?), u64::from(u32_at(bytes, 8)?));
    let begin = usize::from(u16_at(bytes, 26)?);
    let data = bytes.get(begin..begin + u32_at(bytes, 12)? as usize)?;
    let is_outgoing = *bytes.get(ADDRESS_AT + 10)? == OUTGOING;
    let is_copy = is_outgoing && u16_at(bytes, ADDRESS_AT + 8)? == LOOPBACK;
    let packet = Packet {
        data,
        length: u32_at(bytes, 16)?,
        time_ns: seconds * 1_000_000_000 + nanoseconds,
        interface: u32_at(bytes, ADDRESS_AT + 4)?.cast_signed(),
        is_outgoing,
    };
    Some(((!is_copy).then_some(packet), next))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    /// Enters a network of its own, and returns two sockets there: what the second one sends comes to the first one.
    fn over_loopback() -> (UdpSocket, UdpSocket) {
        crate::netns::unshare_net().unwrap();
        crate::route::link_up("lo").unwrap();
        let [receiver, sender] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        (receiver, sender)
    }

    /// Sends datagrams over a loopback of its own, and returns those that the ring has, with the number of its interface.
    fn sent_and_seen(ring: &mut Ring, sender: &UdpSocket, count: u8) -> Vec<(u8, i32)> {
        for number in 0..count {
            sender.send(&[number]).unwrap();
        }
        let mut seen = Vec::new();
        for _ in 0..600 {
            ring.wait(Duration::from_millis(100)).unwrap();
            ring.take(|packet| seen.push((*packet.data.last().unwrap(), packet.interface)));
            if seen.len() >= usize::from(count) {
                break;
            }
        }
        seen
    }

    #[test]
    fn packets_are_seen_once_while_the_ring_is_read_and_not_otherwise() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let test = std::thread::spawn(|| {
            let (_receiver, sender) = over_loopback();
            let socket = CaptureSocket::open().unwrap();
            sender.send(&[9]).unwrap();
            for _ in 0..3 {
                let mut ring = socket.read().unwrap();
                let seen = sent_and_seen(&mut ring, &sender, 3);
                assert_eq!(seen.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1, 2]);
                assert_eq!(ring.interface_name(seen[0].1).as_deref(), Some("lo"));
                assert_eq!((ring.interface_name(9999), ring.take_lost()), (None, 0));
                drop(ring);
                sender.send(&[9]).unwrap();
            }
        });
        test.join().unwrap();
    }

    #[test]
    fn a_child_process_keeps_no_ring() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let test = std::thread::spawn(|| {
            let (_receiver, sender) = over_loopback();
            let socket = CaptureSocket::open().unwrap();
            let ring = socket.read().unwrap();
            // SAFETY: the child calls nothing but functions that may be called there (signal-safety(7)), and ends when it is killed.
            let child = unsafe { libc::fork() };
            if child == 0 {
                loop {
                    // SAFETY: it takes nothing.
                    unsafe { libc::pause() };
                }
            }
            assert!(child > 0);
            drop(ring);
            let seen = sent_and_seen(&mut socket.read().unwrap(), &sender, 3);
            // SAFETY: our own child, which was not waited for yet.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
            assert_eq!(seen.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1, 2]);
        });
        test.join().unwrap();
    }

    #[test]
    fn broken_blocks_are_survived() {
        let mut block = vec![0_u8; 256];
        for number in 0..=u8::MAX {
            block.fill(number);
            block[12..16].copy_from_slice(&1000_u32.to_ne_bytes());
            packets(&block, &mut |_| {});
        }
    }
}
