//! Queues of opening segments: each waits until a verdict is given, in any order and from another thread's decision.
//! One socket has several queues, one for each listener whose connections are held.

use super::{PACKET, Read, Verdict, answers, bind, settings, waiting};
use crate::netlink::{Error, Protocol, Received, Socket, messages};
use crate::raw::RoutedSocket;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes of a segment that are copied: the longest IPv4 and TCP headers, with room to spare.
const HEAD_BYTES: u32 = 160;

/// `NF_INET_LOCAL_OUT`: a socket of this host sends it, and still knows it.
const LOCAL_OUT: u8 = 3;

/// A segment that waits for its verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldSegment<'a> {
    /// The queue.
    pub queue: u16,
    /// Its number in the queue.
    pub id: u32,
    /// Whether a socket of this host sends it: while it waits, that socket cannot send it again.
    pub is_local: bool,
    /// Its headers.
    pub head: &'a [u8],
}

/// Bytes of the receive buffer: thousands of opening segments.
const RECEIVE_BUFFER_BYTES: usize = 8 * 1024 * 1024;

/// The numbers of the queues that hold opening segments.
pub const HOLD_NUMBERS: RangeInclusive<u16> = 24_064..=24_127;

/// Queues of opening segments.
#[derive(Debug)]
pub struct HoldQueues {
    socket: Socket,
    numbers: Vec<u16>,
}

impl HoldQueues {
    /// Takes `count` free queues of these numbers, or fewer if others have the rest. Each holds `packets_max` segments; what
    /// comes on top passes (`fail_open`) or is dropped.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN, EBUSY if all are taken, or the kernel has no NFQUEUE.
    pub fn open(
        range: RangeInclusive<u16>,
        count: usize,
        packets_max: u32,
        fail_open: bool,
    ) -> Result<Self, Error> {
        let mut socket = Socket::open(Protocol::Netfilter)?;
        socket.set_receive_buffer(RECEIVE_BUFFER_BYTES);
        let mut numbers = Vec::new();
        let mut refused = None;
        for number in range {
            if numbers.len() == count {
                break;
            }
            match socket.transact(&bind(number)) {
                Ok(()) => numbers.push(number),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if numbers.is_empty() => return Err(error),
            _ => {}
        }
        for number in &numbers {
            socket.transact(&settings(*number, HEAD_BYTES, packets_max, fail_open))?;
        }
        socket.set_nonblocking()?;
        Ok(Self { socket, numbers })
    }

    /// The numbers that rules name them by.
    pub fn numbers(&self) -> &[u16] {
        &self.numbers
    }

    /// Reads what has come, without waiting, and gives each segment to `take`.
    ///
    /// # Errors
    /// Only if the socket fails.
    pub fn read(&mut self, mut take: impl FnMut(HeldSegment<'_>)) -> Result<Read, Error> {
        let mut read = Read::default();
        loop {
            match self.socket.receive()? {
                Received::Nothing => return Ok(read),
                Received::Overrun => read.overrun = true,
                Received::Bytes(bytes) => {
                    let packets = messages(bytes).map_while(Result::ok);
                    for message in packets.filter(|message| message.kind == PACKET) {
                        let number = message.payload.get(2..4).and_then(|bytes| bytes.first_chunk());
                        let (Some(number), Some(waiting)) = (number, waiting(message.after(4))) else {
                            continue;
                        };
                        read.packets += 1;
                        let (queue, is_local) = (u16::from_be_bytes(*number), waiting.hook == LOCAL_OUT);
                        take(HeldSegment { queue, id: waiting.id, is_local, head: waiting.payload });
                    }
                }
            }
        }
    }

    /// Tells the kernel the verdicts: queue, number in it, verdict. Needs CAP_NET_ADMIN in the queues' network namespace.
    ///
    /// # Errors
    /// Only if the socket fails. A segment that is gone meanwhile needs no verdict.
    pub fn answer(&mut self, verdicts: &[(u16, u32, Verdict)]) -> Result<(), Error> {
        for same in verdicts.chunk_by(|a, b| a.0 == b.0) {
            let Some((number, ..)) = same.first() else { continue };
            let pairs: Vec<_> = same.iter().map(|(_, id, verdict)| (*id, *verdict)).collect();
            self.socket.send(&answers(*number, &pairs))?;
        }
        Ok(())
    }
}

impl AsFd for HoldQueues {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The queues, and the socket that answers clients.
#[derive(Debug)]
pub struct HoldSockets {
    /// The queues.
    pub queues: HoldQueues,
    /// Sends answers with a source address that is not ours.
    pub answers: RoutedSocket,
}

impl HoldSockets {
    /// Opens both in this thread's network namespace. Answers carry this mark.
    ///
    /// # Errors
    /// Which of the two the kernel refuses.
    pub fn open(
        range: RangeInclusive<u16>,
        count: usize,
        (packets_max, fail_open): (u32, bool),
        mark: u32,
    ) -> Result<Self, Error> {
        let queues = HoldQueues::open(range, count, packets_max, fail_open)?;
        let answers = RoutedSocket::open(mark)
            .map_err(|source| Error::Socket { doing: "open a raw socket beside", source })?;
        Ok(Self { queues, answers })
    }

    /// The descriptors, to hand them to another process.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.queues.as_fd()).chain(self.answers.descriptors()).collect()
    }

    /// Takes over what [`Self::descriptors`] gave, with the same numbers. `None` if descriptors are missing.
    pub fn from_descriptors(fds: Vec<OwnedFd>, numbers: Vec<u16>) -> Option<Self> {
        let mut fds = fds.into_iter();
        let queues = HoldQueues { socket: Socket::from(fds.next()?), numbers };
        Some(Self { queues, answers: RoutedSocket::from_descriptors(fds)? })
    }
}
