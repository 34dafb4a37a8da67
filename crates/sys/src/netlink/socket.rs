//! The socket: requests out, answers and events in.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::{Error, Message, Refusal, Requests, flag, kind, messages};

/// Most bytes the kernel puts into one answer (it builds dumps of at most 32 KiB) with room to spare.
const BUFFER_BYTES: usize = 128 * 1024;
/// How long an answer may take. The kernel answers most requests before `send` returns; deleting large nft tables waits for RCU.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// How often a dump that was disturbed by changes is tried again.
const DUMP_ATTEMPTS: usize = 8;

/// The netlink protocol of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Links, addresses, routes, rules.
    Route,
    /// nftables and conntrack.
    Netfilter,
    /// `sock_diag`: look-ups of sockets.
    SockDiag,
    /// What has no protocol of its own: families that are found by name.
    Generic,
}

impl Protocol {
    const fn number(self) -> i32 {
        match self {
            Self::Route => libc::NETLINK_ROUTE,
            Self::Netfilter => libc::NETLINK_NETFILTER,
            Self::SockDiag => libc::NETLINK_SOCK_DIAG,
            Self::Generic => libc::NETLINK_GENERIC,
        }
    }
}

/// What one receive call brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// Messages, to be read with [`messages`].
    Bytes(&'a [u8]),
    /// Nothing is there (non-blocking socket, or the time limit passed).
    Nothing,
    /// The kernel dropped messages (ENOBUFS).
    Overrun,
}

/// A netlink socket. It talks to the network namespace it was opened in, whatever namespace the thread enters later.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<OwnedFd> for Socket {
    /// Takes a bound netlink socket over, as another process hands it on.
    fn from(fd: OwnedFd) -> Self {
        Self { fd, sequence: 1, buffer: vec![0; BUFFER_BYTES] }
    }
}

impl Socket {
    /// Opens and binds a socket (blocking, close-on-exec, extended acknowledgements on).
    ///
    /// # Errors
    /// If the kernel has no such protocol or the process no file descriptor left.
    pub fn open(protocol: Protocol) -> Result<Self, Error> {
        // SAFETY: no pointers; the result is checked.
        let raw =
            unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol.number()) };
        if raw < 0 {
            return Err(Error::Socket { doing: "open", source: io::Error::last_os_error() });
        }
        // SAFETY: `raw` was just opened and no other code owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let socket = Self::from(fd);
        socket.bind()?;
        // Both only improve error texts; kernels before 4.12 lack them.
        let _ = socket.set_option(libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, 1);
        let _ = socket.set_option(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, 1);
        socket.set_receive_limit(ANSWER_LIMIT)?;
        Ok(socket)
    }

    /// Sends all requests in one call and waits for the acknowledgements they ask for.
    ///
    /// # Errors
    /// The first refusal, or a failure of the socket.
    pub fn transact(&mut self, requests: &Requests) -> Result<(), Error> {
        let first = self.send(requests)?;
        let mut missing = requests.acknowledged();
        let mut refused = None;
        while missing > 0 && refused.is_none() {
            let mut batch = Verdicts::default();
            self.receive_answer(|message| batch.take(message, first, requests))?;
            missing = missing.saturating_sub(batch.acknowledged);
            refused = refused.or(batch.refused);
        }
        // A refused batch may have more answers queued; nothing of them may meet the next exchange.
        self.drain();
        refused.map_or(Ok(()), |refusal| Err(refusal.into()))
    }

    /// Sends one request without the DUMP flag and gives its single answer to `read`.
    ///
    /// # Errors
    /// The kernel's refusal (ENOENT if there is no such thing), or a failure of the socket.
    pub fn ask<T>(
        &mut self,
        request: &Requests,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let first = self.send(request)?;
        let mut answer: Option<Result<Option<T>, Error>> = None;
        while answer.is_none() {
            self.receive_answer(|message| {
                if message.sequence != first || answer.is_some() {
                    return;
                }
                answer = Some(if message.kind == kind::ERROR {
                    verdict_error(message, request).map(|()| None)
                } else {
                    Ok(read(message))
                });
            })?;
        }
        self.drain();
        answer.unwrap_or(Ok(None))
    }

    /// Sends one dump request (the flag is added by the caller) and collects what `read` makes of each entry.
    /// A dump that changes disturbed is tried again a few times.
    ///
    /// # Errors
    /// The kernel's refusal, [`Error::Unstable`], or a failure of the socket.
    pub fn dump<T>(
        &mut self,
        request: &Requests,
        mut read: impl FnMut(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        for _ in 0..DUMP_ATTEMPTS {
            let mut found = Vec::new();
            if self.dump_once(request, |message| found.extend(read(message)))? {
                return Ok(found);
            }
        }
        Err(Error::Unstable)
    }

    /// Whether the dump was undisturbed.
    fn dump_once(&mut self, request: &Requests, mut read: impl FnMut(&Message<'_>)) -> Result<bool, Error> {
        let first = self.send(request)?;
        let mut end: Option<Result<(), Error>> = None;
        let mut stable = true;
        while end.is_none() {
            self.receive_answer(|message| {
                if message.sequence != first || end.is_some() {
                    return;
                }
                stable &= message.flags & flag::DUMP_INTERRUPTED == 0;
                match message.kind {
                    kind::DONE | kind::ERROR => end = Some(verdict_error(message, request)),
                    kind::NOOP => {}
                    _ => read(message),
                }
            })?;
        }
        end.unwrap_or(Ok(())).map(|()| stable)
    }

    /// Sends the requests; returns the sequence number of the first.
    pub(crate) fn send(&mut self, requests: &Requests) -> Result<u32, Error> {
        let first = self.sequence;
        self.sequence = first.wrapping_add(u32::try_from(requests.len()).unwrap_or(u32::MAX)).max(1);
        let bytes = requests.to_bytes(first).ok_or(Error::TooLarge)?;
        self.grow_send_buffer(bytes.len());
        let sent = rustix::io::retry_on_intr(|| {
            rustix::net::send(&self.fd, &bytes, rustix::net::SendFlags::empty())
        });
        sent.map_err(|e| Error::Socket { doing: "send on", source: e.into() })?;
        Ok(first)
    }

    /// Waits for one datagram and gives each of its messages to `take`.
    fn receive_answer(&mut self, mut take: impl FnMut(&Message<'_>)) -> Result<(), Error> {
        match self.receive()? {
            Received::Bytes(bytes) => {
                for message in messages(bytes) {
                    take(&message?);
                }
                Ok(())
            }
            Received::Nothing => {
                Err(Error::NoAnswer(u64::try_from(ANSWER_LIMIT.as_millis()).unwrap_or(u64::MAX)))
            }
            Received::Overrun => Err(Error::Overrun),
        }
    }

    /// Receives one datagram from the kernel; datagrams of other processes are dropped unread.
    ///
    /// # Errors
    /// A failure of the socket other than "nothing there" and ENOBUFS.
    pub fn receive(&mut self) -> Result<Received<'_>, Error> {
        self.receive_with(0)
    }

    fn receive_with(&mut self, flags: i32) -> Result<Received<'_>, Error> {
        const FOREIGN_LIMIT: usize = 1000;
        for _ in 0..FOREIGN_LIMIT {
            match self.receive_from(flags) {
                Ok((length, 0)) => {
                    let Some(bytes) = self.buffer.get(..length) else { return Ok(Received::Overrun) };
                    return Ok(Received::Bytes(bytes));
                }
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => return Ok(Received::Nothing),
                    Some(libc::ENOBUFS) => return Ok(Received::Overrun),
                    _ => return Err(Error::Socket { doing: "receive from", source: error }),
                },
            }
        }
        Ok(Received::Nothing)
    }

    /// One `recvfrom`: the length of the datagram (which may exceed the buffer) and the port of its sender (0: the kernel).
    fn receive_from(&mut self, flags: i32) -> io::Result<(usize, u32)> {
        let mut from = netlink_address();
        let mut length = socklen(size_of::<libc::sockaddr_nl>());
        // SAFETY: buffer and address are live, writable and as long as said; the kernel writes at most that much.
        let got = unsafe {
            libc::recvfrom(
                self.fd.as_raw_fd(),
                self.buffer.as_mut_ptr().cast(),
                self.buffer.len(),
                flags | libc::MSG_TRUNC,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        usize::try_from(got).map(|got| (got, from.nl_pid)).map_err(|_| io::Error::last_os_error())
    }

    /// Throws away what is queued.
    fn drain(&mut self) {
        const LIMIT: usize = 10_000;
        for _ in 0..LIMIT {
            if !matches!(self.receive_with(libc::MSG_DONTWAIT), Ok(Received::Bytes(_) | Received::Overrun)) {
                return;
            }
        }
    }

    /// Joins a multicast group by its number.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN for netfilter groups.
    pub fn join(&self, group: u32) -> Result<(), Error> {
        let group = i32::try_from(group).unwrap_or(i32::MAX);
        self.set_option(libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, group)
            .map_err(|source| Error::Socket { doing: "join a group on", source })
    }

    /// Asks for a receive buffer of `bytes`, past the system's limit where we may (SO_RCVBUFFORCE needs CAP_NET_ADMIN of the
    /// initial user namespace), else up to it. Returns what the kernel gave, which counts its own overhead (twice the bytes).
    pub fn set_receive_buffer(&self, bytes: usize) -> usize {
        let wanted = i32::try_from(bytes).unwrap_or(i32::MAX);
        if self.set_option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, wanted).is_err() {
            // The plain option never fails: it clamps to net.core.rmem_max.
            let _ = self.set_option(libc::SOL_SOCKET, libc::SO_RCVBUF, wanted);
        }
        self.receive_buffer()
    }

    /// The size of the receive buffer as the kernel counts it.
    pub fn receive_buffer(&self) -> usize {
        rustix::net::sockopt::socket_recv_buffer_size(&self.fd).unwrap_or(0)
    }

    /// Makes `receive` return at once when nothing is there.
    ///
    /// # Errors
    /// If fcntl fails.
    pub fn set_nonblocking(&self) -> Result<(), Error> {
        rustix::io::ioctl_fionbio(&self.fd, true)
            .map_err(|e| Error::Socket { doing: "make non-blocking", source: e.into() })
    }

    pub(crate) fn set_receive_limit(&self, limit: Duration) -> Result<(), Error> {
        rustix::net::sockopt::set_socket_timeout(&self.fd, rustix::net::sockopt::Timeout::Recv, Some(limit))
            .map_err(|e| Error::Socket { doing: "set the time limit of", source: e.into() })
    }

    /// One transaction is one datagram, so the send buffer must hold it whole.
    fn grow_send_buffer(&self, bytes: usize) {
        let wanted = i32::try_from(bytes.saturating_mul(2)).unwrap_or(i32::MAX);
        let have = rustix::net::sockopt::socket_send_buffer_size(&self.fd).unwrap_or(0);
        if have >= bytes.saturating_mul(2) {
            return;
        }
        if self.set_option(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, wanted).is_err() {
            // If the system's limit is too low, send says EMSGSIZE.
            let _ = self.set_option(libc::SOL_SOCKET, libc::SO_SNDBUF, wanted);
        }
    }

    fn bind(&self) -> Result<(), Error> {
        let address = netlink_address();
        // SAFETY: a live sockaddr_nl and its true size.
        let bound = unsafe {
            libc::bind(
                self.fd.as_raw_fd(),
                (&raw const address).cast(),
                socklen(size_of::<libc::sockaddr_nl>()),
            )
        };
        if bound < 0 {
            return Err(Error::Socket { doing: "bind", source: io::Error::last_os_error() });
        }
        Ok(())
    }

    /// Lets the kernel run a classic BPF program over each message before it queues it here.
    ///
    /// # Errors
    /// If the descriptor is not a program, or the kernel has no memory for it.
    pub(crate) fn filter(&self, program: &[libc::sock_filter]) -> Result<(), Error> {
        let program = libc::sock_fprog {
            len: u16::try_from(program.len()).unwrap_or(u16::MAX),
            filter: program.as_ptr().cast_mut(),
        };
        // SAFETY: the option value is a live sock_fprog whose instructions are live; the kernel copies them and writes nothing.
        let set = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                socklen(size_of::<libc::sock_fprog>()),
            )
        };
        let failed = || Error::Socket { doing: "filter the messages of", source: io::Error::last_os_error() };
        if set < 0 { Err(failed()) } else { Ok(()) }
    }

    fn set_option(&self, level: i32, name: i32, value: i32) -> io::Result<()> {
        // SAFETY: the option value is a live int of the size given.
        let set = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                socklen(size_of::<i32>()),
            )
        };
        if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// A netlink address with every field 0: the kernel chooses the port when binding.
fn netlink_address() -> libc::sockaddr_nl {
    // SAFETY: sockaddr_nl is plain data for which all zeroes are valid.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::sa_family_t::try_from(libc::AF_NETLINK).unwrap_or_default();
    address
}

fn socklen(bytes: usize) -> libc::socklen_t {
    libc::socklen_t::try_from(bytes).unwrap_or_default()
}

/// What the answers in one datagram said about our requests.
#[derive(Default)]
struct Verdicts {
    acknowledged: usize,
    refused: Option<Refusal>,
}

impl Verdicts {
    fn take(&mut self, message: &Message<'_>, first: u32, requests: &Requests) {
        let index = usize::try_from(message.sequence.wrapping_sub(first)).unwrap_or(usize::MAX);
        if message.kind != kind::ERROR || index >= requests.len() {
            return;
        }
        match message.verdict() {
            Ok(Some(mut refusal)) => {
                refusal.asked = requests.asked(index);
                self.refused.get_or_insert(refusal);
            }
            Ok(None) => self.acknowledged += 1,
            Err(_) => {}
        }
    }
}

/// The verdict of an ERROR or DONE message as a result.
fn verdict_error(message: &Message<'_>, request: &Requests) -> Result<(), Error> {
    match message.verdict()? {
        Some(mut refusal) => {
            refusal.asked = request.asked(0);
            Err(refusal.into())
        }
        None => Ok(()),
    }
}
