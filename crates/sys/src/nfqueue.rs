//! Packets that netfilter rules hand to user space (`NFQUEUE`): read whole, answered with a verdict each.
//! Message layout: linux/netfilter/nfnetlink_queue.h. Reading works with the socket alone; every verdict needs CAP_NET_ADMIN
//! at the moment it is sent.

mod hold;

pub use hold::{HOLD_NUMBERS, HeldSegment, HoldQueues, HoldSockets};

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::netlink::{Error, Protocol, Received, Requests, Socket, attributes, messages};

const SUBSYSTEM: u16 = 3;
const PACKET: u16 = SUBSYSTEM << 8;
const VERDICT: u16 = (SUBSYSTEM << 8) | 1;
const CONFIG: u16 = (SUBSYSTEM << 8) | 2;

/// Most bytes of a packet that are copied (`NFQA_CFG_PARAMS`, the kernel's bound).
const COPY_BYTES: u32 = 65_531;

/// Bytes of the receive buffer: some thousand packets of the usual size.
const RECEIVE_BUFFER_BYTES: usize = 8 * 1024 * 1024;

/// What is to happen to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is gone: user space carries it in another way.
    Drop,
    /// It goes on as if it had not been queued.
    Accept,
}

/// What one look brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// Packets that were given to the caller.
    pub packets: u64,
    /// Packets too large to be copied whole; they were dropped.
    pub truncated: u64,
    /// Whether the kernel dropped packets because they were not read in time.
    pub overrun: bool,
}

/// One queue of one network namespace.
#[derive(Debug)]
pub struct Queue {
    socket: Socket,
    number: u16,
}

/// A packet that waits for its verdict.
struct Waiting<'a> {
    id: u32,
    /// Where netfilter has it (`NF_INET_*`).
    hook: u8,
    payload: &'a [u8],
    is_whole: bool,
}

impl Queue {
    /// Takes the first free queue of these numbers. It holds `packets_max` packets; what comes on top passes as if there were
    /// no queue (`fail_open`), or is dropped. [`Queue::read`] waits no longer than `patience`.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN, EBUSY if all are taken, or the kernel has no NFQUEUE.
    pub fn open(
        numbers: RangeInclusive<u16>,
        packets_max: u32,
        fail_open: bool,
        patience: Duration,
    ) -> Result<Self, Error> {
        let mut socket = Socket::open(Protocol::Netfilter)?;
        socket.set_receive_buffer(RECEIVE_BUFFER_BYTES);
        let mut numbers = numbers.peekable();
        let number = loop {
            let Some(number) = numbers.next() else {
                return Err(Error::Socket {
                    doing: "choose a queue on",
                    source: std::io::ErrorKind::InvalidInput.into(),
                });
            };
            match socket.transact(&bind(number)) {
                Ok(()) => break number,
                Err(error) if numbers.peek().is_none() => return Err(error),
                // Another process has it (EBUSY, on older kernels EPERM).
                Err(_) => {}
            }
        };
        socket.transact(&settings(number, COPY_BYTES, packets_max, fail_open))?;
        socket.set_receive_limit(patience)?;
        Ok(Self { socket, number })
    }

    /// A queue that another process has opened: its socket, and its number. Only one process reads it at a time.
    pub fn given(socket: OwnedFd, number: u16) -> Self {
        Self { socket: socket.into(), number }
    }

    /// Sets how many packets it holds, and what becomes of those on top, as [`Queue::open`] does.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn set(&mut self, packets_max: u32, fail_open: bool) -> Result<(), Error> {
        self.socket.transact(&settings(self.number, COPY_BYTES, packets_max, fail_open))
    }

    /// The number rules name it by.
    pub const fn number(&self) -> u16 {
        self.number
    }

    /// Waits for packets, gives each to `decide` and tells the kernel its verdict.
    ///
    /// # Errors
    /// Only if the socket fails, or the right to give verdicts is gone.
    pub fn read(&mut self, mut decide: impl FnMut(&[u8]) -> Verdict) -> Result<Read, Error> {
        let mut read = Read::default();
        let mut verdicts = Vec::new();
        match self.socket.receive()? {
            Received::Nothing => return Ok(read),
            Received::Overrun => {
                read.overrun = true;
                return Ok(read);
            }
            Received::Bytes(bytes) => {
                for message in messages(bytes).map_while(Result::ok).filter(|message| message.kind == PACKET)
                {
                    let Some(waiting) = waiting(message.after(4)) else { continue };
                    let verdict = if waiting.is_whole {
                        read.packets += 1;
                        decide(waiting.payload)
                    } else {
                        read.truncated += 1;
                        Verdict::Drop
                    };
                    verdicts.push((waiting.id, verdict));
                }
            }
        }
        if !verdicts.is_empty() {
            self.socket.send(&answers(self.number, &verdicts))?;
        }
        Ok(read)
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// `struct nfgenmsg` for this queue.
const fn header(number: u16) -> [u8; 4] {
    let [high, low] = number.to_be_bytes();
    [0, 0, high, low]
}

fn bind(number: u16) -> Requests {
    const BIND: u8 = 1;
    let mut requests = Requests::new();
    let asked = format!("take packet queue {number}");
    let at = requests.push(asked, CONFIG, 0, &header(number), |w| w.bytes(1, &[BIND, 0, 0, 0]));
    requests.acknowledge(at);
    requests
}

fn settings(number: u16, copy_bytes: u32, packets_max: u32, fail_open: bool) -> Requests {
    const COPY_PACKET: u8 = 2;
    const FAIL_OPEN: u32 = 1;
    let mut requests = Requests::new();
    let asked = format!("set packet queue {number} up");
    let at = requests.push(asked, CONFIG, 0, &header(number), |w| {
        let [a, b, c, d] = copy_bytes.to_be_bytes();
        w.bytes(2, &[a, b, c, d, COPY_PACKET]);
        w.u32_be(3, packets_max);
        w.u32_be(4, FAIL_OPEN);
        w.u32_be(5, if fail_open { FAIL_OPEN } else { 0 });
    });
    requests.acknowledge(at);
    requests
}

/// The verdicts in one call; without acknowledgements: a packet that is gone meanwhile needs none.
fn answers(number: u16, verdicts: &[(u32, Verdict)]) -> Requests {
    let mut requests = Requests::new();
    for (id, verdict) in verdicts {
        requests.push("give a packet its verdict", VERDICT, 0, &header(number), |w| {
            let word: u32 = if *verdict == Verdict::Accept { 1 } else { 0 };
            w.bytes(2, &[word.to_be_bytes(), id.to_be_bytes()].concat());
        });
    }
    requests
}

fn waiting(bytes: &[u8]) -> Option<Waiting<'_>> {
    let (mut id, mut hook, mut payload, mut is_whole) = (None, 0, &[][..], true);
    for attribute in attributes(bytes) {
        match attribute.kind {
            1 => {
                id = attribute.payload.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
                hook = attribute.payload.get(6).copied().unwrap_or(0);
            }
            10 => payload = attribute.payload,
            // `NFQA_CAP_LEN` is there only where less than all was copied.
            11 => is_whole = false,
            _ => {}
        }
    }
    Some(Waiting { id: id?, hook, payload, is_whole })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_read_and_its_verdict_names_it() {
        // NFQA_PACKET_HDR: id 7, IPv4, hook 3; NFQA_PAYLOAD: three bytes.
        let bytes = [
            11, 0, 1, 0, 0, 0, 0, 7, 8, 0, 3, 0, //
            7, 0, 10, 0, 0xaa, 0xbb, 0xcc, 0,
        ];
        let packet = waiting(&bytes).expect("a packet");
        assert_eq!((packet.id, packet.payload, packet.is_whole), (7, &[0xaa, 0xbb, 0xcc][..], true));
        for length in 0..8 {
            assert!(waiting(&bytes[..length]).is_none(), "{length} bytes hold no id");
        }
        let cut = [&bytes[..], &[8, 0, 11, 0, 0, 1, 0, 0]].concat();
        assert!(!waiting(&cut).expect("a packet").is_whole);
        let requests = answers(0x5d01, &[(7, Verdict::Accept)]).to_bytes(9).expect("small");
        assert_eq!(requests[4..6], VERDICT.to_ne_bytes());
        assert_eq!(requests[16..], [0, 0, 0x5d, 1, 12, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0, 7]);
    }
}
