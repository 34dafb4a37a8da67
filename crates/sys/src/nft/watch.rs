//! Notices that another program changed the rules.

use std::os::fd::{AsFd, BorrowedFd};

use crate::netlink::{Error, Malformed, Message, Protocol, Received, Socket, messages};

/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;

/// Receive buffer, bytes: what is lost is a change all the same.
const BUFFER: usize = 1 << 20;

/// Most datagrams one look takes: a rule set of any size is a few dozen.
const DATAGRAMS_MAX: usize = 10_000;

/// A non-blocking socket that hears of every change of nftables in one network namespace, by whatever program (`nft`,
/// `iptables-nft`, `firewalld`); not of `iptables-legacy`, which has no such reports.
#[derive(Debug)]
pub struct RuleChanges {
    socket: Socket,
}

impl AsFd for RuleChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl RuleChanges {
    /// Begins to listen in this thread's network namespace.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN; if the kernel has no nftables.
    pub fn open() -> Result<Self, Error> {
        let socket = Socket::open(Protocol::Netfilter)?;
        socket.set_receive_buffer(BUFFER);
        socket.set_nonblocking()?;
        socket.join(GROUP)?;
        Ok(Self { socket })
    }

    /// Whether anybody but the owners of these netlink ports changed anything since the last look.
    ///
    /// # Errors
    /// Only if the socket itself fails.
    pub fn any_but_of(&mut self, ours: &[u32]) -> Result<bool, Error> {
        // What cannot be read was a change all the same.
        let is_foreign =
            |message: Result<Message<'_>, Malformed>| message.map_or(true, |it| !ours.contains(&it.port));
        let mut any = false;
        for _ in 0..DATAGRAMS_MAX {
            match self.socket.receive()? {
                Received::Nothing => break,
                Received::Bytes(bytes) => any |= ours.is_empty() || messages(bytes).any(is_foreign),
                Received::Overrun => any = true,
            }
        }
        Ok(any)
    }
}
