//! The keeper: the small part that keeps the rights.
//!
//! `sidetrack up` starts itself once more as `sidetrack keeper`, over one socket pair, and gives up its own rights before
//! it reads a peer's first byte. The keeper answers a closed list of requests ([`Ask`]); it cannot be asked for a rule that
//! a configuration could not ask for. When its socket closes, however that comes, it takes everything back and ends: its
//! nftables table goes with its netlink socket even after SIGKILL, the rest is undone by a guard process. Once a second it
//! puts back what other programs removed of its routing, which is all of ours that they can remove.

mod flow;
mod kernel;
mod serve;
pub(crate) mod wire;

pub use flow::{KernelFlow, KernelFlowKey};
pub use serve::keep;

use crate::steer::Forwards;
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::Process;
use sidetrack_sys::conntrack::Events;
use sidetrack_sys::{process, scm};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

/// The argument that makes the program a keeper.
pub const ARGUMENT: &str = "keeper";

/// What the keeper can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Make the kernel do this, in place of what was before.
    Steer(Order),
    /// Which flows does the kernel carry alone now?
    Flows,
    /// The end that follows is orderly: take everything back, also what is to outlive a crash.
    Release,
    /// Who owns the socket with these addresses?
    Owner {
        /// The socket's own address.
        local: SocketAddr,
        /// What it is connected to.
        remote: SocketAddr,
    },
}

/// What the kernel is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The configuration file's name, for relative paths in it.
    pub name: String,
    /// Its text.
    pub text: String,
    /// The addresses its listeners are bound to.
    pub bound: Vec<(String, SocketAddr)>,
    /// The number of the first kernel path.
    pub first_path: usize,
    /// What this host forwards, looked at once: both sides must come to the same paths.
    pub forwards: Forwards,
}

/// What the keeper answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// Done. With kernel paths a descriptor comes along that conntrack reports their ends to.
    Steered {
        /// What was not possible as asked, in words.
        warnings: Vec<String>,
    },
    /// The flows.
    Flows(Vec<KernelFlow>),
    /// Everything will be taken back when the connection ends.
    Released,
    /// The owner, as far as it is known.
    Owner {
        /// Process id.
        pid: Option<u32>,
        /// Base name of the executable.
        name: Option<String>,
        /// User id.
        uid: Option<u32>,
    },
    /// It could not be done; nothing has changed.
    Failed(String),
}

/// Why the keeper did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// It says why.
    #[error("{0}")]
    Refused(String),
    /// It is gone, and with it the rules.
    #[error("the keeper process is gone ({0}), and with it all rules in the kernel: restart sidetrack")]
    Gone(io::Error),
}

/// Our end of the connection to the keeper.
#[derive(Debug)]
pub struct Keeper {
    end: Mutex<OwnedFd>,
    child: Mutex<std::process::Child>,
}

impl Keeper {
    /// Starts the keeper.
    ///
    /// # Errors
    /// What the system says about a new process.
    pub fn start() -> io::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        let child = process::respawn(ARGUMENT, theirs)?;
        Ok(Self { end: Mutex::new(ours), child: Mutex::new(child) })
    }

    /// Steers. Gives warnings and, with kernel paths, the events of their ends.
    ///
    /// # Errors
    /// Why nothing has changed.
    pub fn steer(&self, order: Order) -> Result<(Vec<String>, Option<Events>), KeeperError> {
        match self.ask(&Ask::Steer(order))? {
            (Told::Steered { warnings }, mut fds) => Ok((warnings, fds.pop().map(Events::from))),
            (told, _) => Err(unexpected(told)),
        }
    }

    /// The flows that the kernel carries alone now.
    ///
    /// # Errors
    /// If the keeper is gone, or conntrack does not answer it.
    pub fn flows(&self) -> Result<Vec<KernelFlow>, KeeperError> {
        match self.ask(&Ask::Flows)? {
            (Told::Flows(flows), _) => Ok(flows),
            (told, _) => Err(unexpected(told)),
        }
    }

    /// A descriptor that becomes readable when the keeper has ended.
    ///
    /// # Errors
    /// What pidfd_open(2) says.
    pub fn watch(&self) -> io::Result<OwnedFd> {
        process::watch(self.child.lock().unwrap_or_else(PoisonError::into_inner).id())
    }

    /// How the keeper ended, if it has.
    pub fn ended(&self) -> Option<std::process::ExitStatus> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait().ok().flatten()
    }

    /// Who owns a socket of this host.
    ///
    /// # Errors
    /// If the keeper is gone.
    pub fn owner(&self, local: SocketAddr, remote: SocketAddr) -> Result<Process, KeeperError> {
        match self.ask(&Ask::Owner { local, remote })? {
            (Told::Owner { pid, name, uid }, _) => Ok(Process { pid, name, uid }),
            (told, _) => Err(unexpected(told)),
        }
    }

    fn ask(&self, ask: &Ask) -> Result<(Told, Vec<OwnedFd>), KeeperError> {
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        wire::send(&*end, ask, &[]).map_err(KeeperError::Gone)?;
        let told = wire::receive(&*end).map_err(KeeperError::Gone)?;
        told.ok_or_else(|| KeeperError::Gone(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Lets the keeper take everything back, and waits until it has. Requests fail from then on.
    ///
    /// # Errors
    /// What waitpid(2) says.
    pub fn finish(&self) -> io::Result<()> {
        if let Err(error) = self.ask(&Ask::Release) {
            tracing::warn!(%error, "the keeper ended before us");
        }
        scm::close(&*self.end.lock().unwrap_or_else(PoisonError::into_inner))?;
        self.child.lock().unwrap_or_else(PoisonError::into_inner).wait().map(|_| ())
    }
}

fn unexpected(told: Told) -> KeeperError {
    match told {
        Told::Failed(what) => KeeperError::Refused(what),
        other => KeeperError::Refused(format!("the keeper answered something else: {other:?}")),
    }
}
