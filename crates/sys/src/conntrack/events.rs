//! The event socket.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use super::{Entry, Only, parse_datagram};
use crate::netlink::{Error, Protocol, Received, Socket};

/// Kinds of events one can subscribe to (`NFNLGRP_CONNTRACK_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Group {
    /// New connections.
    New = 1,
    /// Changes.
    Update = 2,
    /// Ends.
    Destroy = 3,
}

/// Something that happened to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It began.
    New(Entry),
    /// It changed.
    Update(Entry),
    /// It ended; the counters are final.
    Destroy(Entry),
    /// Events were lost because they were not read in time.
    Overrun,
}

/// Most datagrams one call of [`Events::read`] takes, so that its caller gets to do other work.
const DATAGRAMS_MAX: usize = 256;

/// A non-blocking socket that receives events of one network namespace. Once open it keeps working without CAP_NET_ADMIN.
#[derive(Debug)]
pub struct Events {
    socket: Socket,
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for Events {
    /// Takes a subscription over that a process with CAP_NET_ADMIN opened and handed on.
    fn from(fd: OwnedFd) -> Self {
        Self { socket: Socket::from(fd) }
    }
}

/// What one event takes of a receive buffer, as the kernel counts it.
const EVENT_BYTES: usize = 1024;

/// A receive buffer that loses no event even if all connections end at once that conntrack may hold: from 16 MiB, which lost
/// nothing at 28,000 connections a second, to 256 MiB. The kernel takes memory only for what is queued.
pub fn buffer_bytes() -> usize {
    let most = crate::sysctl::read("net/netfilter/nf_conntrack_max").ok();
    let most = most.and_then(|text| text.trim().parse::<usize>().ok()).unwrap_or(0);
    most.saturating_mul(EVENT_BYTES).clamp(16 << 20, 256 << 20)
}

impl Events {
    /// Subscribes to the groups, for the events of some connections. The receive buffer is made as large as `receive_buffer_bytes` where we may, see
    /// [`Events::receive_buffer_bytes`] and [`buffer_bytes`].
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn open(groups: &[Group], only: Only, receive_buffer_bytes: usize) -> Result<Self, Error> {
        let socket = Socket::open(Protocol::Netfilter)?;
        // Before the first group is joined: nothing else is queued.
        if let Some(program) = only.program() {
            socket.filter(&program)?;
        }
        socket.set_receive_buffer(receive_buffer_bytes);
        socket.set_nonblocking()?;
        groups.iter().try_for_each(|group| socket.join(*group as u32))?;
        Ok(Self { socket })
    }

    /// The size of the receive buffer as the kernel counts it (twice what fits in).
    pub fn receive_buffer_bytes(&self) -> usize {
        self.socket.receive_buffer()
    }

    /// Takes what is there, without waiting, and adds it to `events`. `true`: there may be more, call again soon.
    ///
    /// # Errors
    /// Only if the socket itself fails; lost events are an [`Event::Overrun`].
    pub fn read(&mut self, events: &mut Vec<Event>) -> Result<bool, Error> {
        for _ in 0..DATAGRAMS_MAX {
            match self.socket.receive()? {
                Received::Bytes(bytes) => events.extend(parse_datagram(bytes)),
                Received::Overrun => events.push(Event::Overrun),
                Received::Nothing => return Ok(false),
            }
        }
        Ok(true)
    }
}
