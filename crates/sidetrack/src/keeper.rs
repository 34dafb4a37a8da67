//! The keeper: the small part that keeps the rights.
//!
//! `sidetrack up` starts itself once more as `sidetrack keeper`, over one socket pair, and gives up its own rights before
//! it reads a peer's first byte. The keeper answers a closed list of requests ([`Ask`]). It never sees a configuration and reads
//! no file that a request names: it is told networks, ports, users and cgroups ([`Order`]), and steers only to listeners whose
//! descriptors came along, as proof that they listen in its own network namespace. When its socket closes, however that comes, it takes everything back and ends: its
//! nftables table goes with its netlink socket even after SIGKILL, the rest is undone by a guard process. Once a second it
//! puts back what other programs removed of its routing, which is all of ours that they can remove.

mod derive;
mod flow;
mod kernel;
mod order;
mod serve;
pub(crate) mod wire;

pub use derive::{Proved, Work};
pub use flow::{KernelFlow, KernelFlowKey};
pub use order::{
    Alone, Interface, LISTENERS_MAX, NAMES_MAX, Nets, Order, PARTS_MAX, Ports, RANGES_MAX, Redirected,
    Selected, Transparent,
};
pub use serve::{REQUEST_MAX, keep};

use crate::rights::DataUser;
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::Process;
use sidetrack_sys::conntrack::Events;
use sidetrack_sys::{process, scm};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// The argument that makes the program a keeper.
pub const ARGUMENT: &str = "keeper";

/// What the keeper can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Become this user, before all else.
    Become(DataUser),
    /// The first request, once: what later ones may ask for.
    Begin(Begin),
    /// The descriptors that came along are listeners. They count for the next order, after those sent before.
    Listeners,
    /// Make the kernel do this, instead of what was before.
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

/// What later requests may ask for. It is said before a peer's byte was read, and cannot be said again: an attacker who takes over
/// the main process later cannot widen it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begin {
    /// Orders may leave rules behind that keep traffic blocked after a crash.
    pub closed: bool,
    /// Owners of sockets may be asked for, which takes CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH.
    pub owners: bool,
}

/// What the keeper answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// It waits for orders.
    Begun,
    /// The descriptors are listeners of this network namespace.
    Listening,
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
    /// Starts the keeper, which becomes this user and later does no more than `begin` allows.
    ///
    /// # Errors
    /// What the system says about a new process, or the keeper about its start.
    pub fn start(begin: Begin, user: Option<&DataUser>) -> anyhow::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        let child = process::respawn(ARGUMENT, theirs)?;
        let keeper = Self { end: Mutex::new(ours), child: Mutex::new(child) };
        if let Some(user) = user {
            let end = keeper.end.lock().unwrap_or_else(PoisonError::into_inner);
            wire::send(&*end, &Ask::Become(user.clone()), &[])?;
        }
        match keeper.ask(&Ask::Begin(begin))? {
            (Told::Begun, _) => Ok(keeper),
            (told, _) => Err(unexpected(told).into()),
        }
    }

    /// Steers to these listeners. Gives warnings and, with kernel paths, the events of their ends.
    ///
    /// # Errors
    /// Why nothing has changed.
    pub fn steer(
        &self,
        order: Order,
        listeners: &[BorrowedFd<'_>],
    ) -> Result<(Vec<String>, Option<Events>), KeeperError> {
        // One request after the other: nobody else's listeners may come in between.
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        for some in listeners.chunks(scm::MAX_FDS) {
            match exchange(&end, &Ask::Listeners, some)? {
                (Told::Listening, _) => {}
                (told, _) => return Err(unexpected(told)),
            }
        }
        match exchange(&end, &Ask::Steer(order), &[])? {
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
        exchange(&self.end.lock().unwrap_or_else(PoisonError::into_inner), ask, &[])
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

fn exchange(end: &OwnedFd, ask: &Ask, fds: &[BorrowedFd<'_>]) -> Result<(Told, Vec<OwnedFd>), KeeperError> {
    wire::send(end, ask, fds).map_err(KeeperError::Gone)?;
    let told = wire::receive(end).map_err(KeeperError::Gone)?;
    told.ok_or_else(|| KeeperError::Gone(io::ErrorKind::UnexpectedEof.into()))
}

fn unexpected(told: Told) -> KeeperError {
    match told {
        Told::Failed(what) => KeeperError::Refused(what),
        other => KeeperError::Refused(format!("the keeper answered something else: {other:?}")),
    }
}
