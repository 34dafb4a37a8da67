//! A process of the node that an upgrade leaves as it is: the one that replaces the node goes on with it.

use sidetrack_sys::sync::lock;
use sidetrack_sys::{process, scm};
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus};
use std::sync::Mutex;

/// A process with rights of its own: the keeper, or that of the shunt.
#[derive(Debug)]
pub(crate) enum Started {
    /// It is our child.
    Here(Mutex<Child>),
    /// An earlier process of this node started it, and handed it over. The descriptor becomes readable when it ends.
    Before(OwnedFd),
}

impl Started {
    /// A child of this process.
    pub(crate) const fn here(child: Child) -> Self {
        Self::Here(Mutex::new(child))
    }

    /// A descriptor that becomes readable when it ends.
    pub(crate) fn watch(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Here(child) => process::watch(lock(child).id()),
            Self::Before(process) => process.try_clone(),
        }
    }

    /// Its exit status, if it has ended and is our child.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        match self {
            Self::Here(child) => lock(child).try_wait().ok().flatten(),
            // Only a parent is told.
            Self::Before(_) => None,
        }
    }

    /// Waits for its end.
    pub(crate) fn wait(&self) -> io::Result<()> {
        match self {
            Self::Here(child) => lock(child).wait().map(drop),
            Self::Before(process) => scm::wait(process, None).map(drop),
        }
    }
}
