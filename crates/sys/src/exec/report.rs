//! What the child tells the parent between fork and exec, over a `SOCK_SEQPACKET` pair that closes on exec.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::error::Step;
use crate::scm;

/// Longest time between two reports. Set-up takes milliseconds; a stuck file system may hold exec up.
const LIMIT: Duration = Duration::from_secs(60);
/// Most bytes of an error's text.
const MAX_TEXT: usize = 1024;

/// One end.
pub(super) struct Reports(OwnedFd);

/// One message.
#[derive(Debug)]
pub(super) enum Report {
    /// Child: write my id maps.
    MapIds,
    /// Parent: written.
    Mapped,
    /// Child: the network is ready; these are its sockets.
    Ready(Vec<OwnedFd>),
    /// Child: this asks about its calls of connect(2).
    Asks(Option<OwnedFd>),
    /// Child: this finds the owners of sockets in the network.
    Owners(Option<OwnedFd>),
    /// Child: this reads the packets of the network.
    Packets(Option<OwnedFd>),
    /// Child: a step failed, with its errno (0: none).
    Failed { step: Step, errno: i32, text: String },
}

/// The parent's and the child's end.
pub(super) fn pair() -> io::Result<(Reports, Reports)> {
    let (ours, theirs) = scm::pair()?;
    set_socket_timeout(&ours, Timeout::Recv, Some(LIMIT))?;
    Ok((Reports(ours), Reports(theirs)))
}

impl Reports {
    /// Sends one; `fds` go with [`Report::Ready`], [`Report::Asks`], [`Report::Owners`] and [`Report::Packets`] instead of their own.
    pub(super) fn send(&self, report: &Report, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = Vec::new();
        match report {
            Report::MapIds => bytes.push(1),
            Report::Mapped => bytes.push(2),
            Report::Ready(_) => bytes.push(3),
            Report::Asks(_) => bytes.push(5),
            Report::Owners(_) => bytes.push(6),
            Report::Packets(_) => bytes.push(7),
            Report::Failed { step, errno, text } => {
                bytes.push(4);
                bytes.push(step.code());
                bytes.extend(errno.to_ne_bytes());
                bytes.extend(text.bytes().take(MAX_TEXT));
            }
        }
        scm::send(&self.0, &bytes, fds)
    }

    /// Receives one; `None` when the other end is closed.
    pub(super) fn receive(&self) -> io::Result<Option<Report>> {
        let Some(message) = scm::receive(&self.0)? else { return Ok(None) };
        let report = match message.bytes.as_slice() {
            [1] => Report::MapIds,
            [2] => Report::Mapped,
            [3] => Report::Ready(message.fds),
            [6] => Report::Owners(message.fds.into_iter().next()),
            [7] => Report::Packets(message.fds.into_iter().next()),
            [5] => Report::Asks(message.fds.into_iter().next()),
            [4, step, a, b, c, d, text @ ..] => Report::Failed {
                step: Step::from_code(*step),
                errno: i32::from_ne_bytes([*a, *b, *c, *d]),
                text: String::from_utf8_lossy(text).into_owned(),
            },
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        Ok(Some(report))
    }
}
