//! What can go wrong on a netlink socket, in words.

use std::borrow::Cow;
use std::fmt;
use std::io;

/// Bytes that are not a netlink message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Fewer bytes than a message header, or than the header says.
    #[error("a netlink message is cut short")]
    Short,
    /// A length field smaller than the header it belongs to.
    #[error("a netlink length field is smaller than its own header")]
    Length,
}

/// The kernel's no to one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What was asked, as words that fit behind "to": `create table inet sidetrack`.
    pub asked: Cow<'static, str>,
    /// The error number (positive, as in errno.h).
    pub errno: i32,
    /// The kernel's own explanation (extended acknowledgement), if it gave one.
    pub explanation: Option<String>,
}

impl Refusal {
    /// What a person can do about it, if the error number tells.
    pub fn remedy(&self) -> Option<&'static str> {
        match self.errno {
            libc::EPERM | libc::EACCES => Some(
                "this needs CAP_NET_ADMIN in the network namespace: run as root, or use `sidetrack run` without --mode",
            ),
            libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT => {
                Some("this kernel lacks a feature: `sidetrack doctor` names it")
            }
            libc::ENOBUFS | libc::ENOMEM => Some("the kernel has no memory left for it"),
            _ => None,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = io::Error::from_raw_os_error(self.errno);
        write!(f, "the kernel refused to {}: {error}", self.asked)?;
        if let Some(text) = &self.explanation {
            write!(f, " ({text})")?;
        }
        match self.remedy() {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Refusal {}

/// Why a netlink exchange failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on the socket failed.
    #[error("cannot {doing} a netlink socket: {source}")]
    Socket {
        /// The call, as a verb: `open`, `bind`, `send on` ...
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The kernel said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The kernel dropped messages because our receive buffer was full (ENOBUFS): what was missed must be listed anew.
    #[error("the kernel dropped netlink messages: the receive buffer was full")]
    Overrun,
    /// The kernel's answer cannot be read.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// No answer within the time limit of the socket.
    #[error("the kernel gave no answer to a netlink request within {0} ms")]
    NoAnswer(u64),
    /// A list changed while the kernel read it to us, several times in a row.
    #[error("a kernel table kept changing while it was listed; try again")]
    Unstable,
    /// A request needs more bytes than a netlink attribute can hold (65,535).
    #[error("a netlink request is too large for its length field; split it")]
    TooLarge,
}

impl Error {
    /// The error number of a refusal.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused(refusal) => Some(refusal.errno),
            Self::Socket { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}
