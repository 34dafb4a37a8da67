//! The keeper: a small process that keeps the rights.
//!
//! `sidetrack up` starts itself again as `sidetrack keeper`, connected by one socket pair. It gives up its own rights before
//! it reads a peer's first byte. The keeper answers a closed list of requests ([`Ask`]). It never sees a configuration and
//! reads no file that a request names: it is told networks, ports, users and cgroups ([`Order`]). It steers only to
//! listeners whose descriptors were sent along, which proves that they listen in its own network namespace.
//!
//! When its socket closes, for whatever reason, it undoes everything and ends. Its nftables table disappears with its
//! netlink socket, even after SIGKILL; a guard process undoes the rest. Once a second it restores the routing that other
//! programs removed. Nothing else of ours can be removed by them.

mod derive;
mod flow;
mod kernel;
mod order;
mod serve;

pub use derive::{Proved, Work};
pub use flow::{KernelFlow, KernelFlowKey};
pub use order::{
    Alone, Interface, LISTENERS_MAX, NAMES_MAX, Nets, Order, PARTS_MAX, Ports, RANGES_MAX, Redirected,
    Selected, Transparent,
};
pub use serve::{REQUEST_MAX, keep};

use crate::process::ClientSocket;
use crate::rights::DataUser;
use crate::started::Started;
use crate::wire;
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::Process;
use sidetrack_sys::conntrack::Events;
use sidetrack_sys::sync::lock;
use sidetrack_sys::{process, scm};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;

/// The argument that makes the program a keeper.
pub const ARGUMENT: &str = "keeper";

/// The requests to the keeper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Become this user. Sent before all other requests.
    Become(DataUser),
    /// Sent once, before later requests: it limits them.
    Begin(Begin),
    /// The attached descriptors are listeners. They are added to those sent before, for the next order.
    Listeners,
    /// Let the kernel do this instead of what it did before.
    Steer(Order),
    /// Return the flows that the kernel forwards without us.
    Flows,
    /// An orderly end follows: undo everything, also the rules that would stay after a crash.
    Release,
    /// Return the owner of this socket.
    Owner(ClientSocket),
}

/// The limits of later requests. They are sent before a peer's byte is read, and only once: an attacker who takes over the
/// main process later cannot widen them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begin {
    /// Orders may leave rules that keep traffic blocked after a crash.
    pub closed: bool,
    /// Owners of sockets may be requested, which needs CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH.
    pub owners: bool,
}

/// The keeper's answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// The keeper waits for orders.
    Begun,
    /// The descriptors are listeners in this network namespace.
    Listening,
    /// Done. With kernel paths, a descriptor is attached to which conntrack reports the ends of flows.
    Steered {
        /// What was not possible as requested, in words.
        warnings: Vec<String>,
    },
    /// The flows.
    Flows(Vec<KernelFlow>),
    /// Everything will be undone when the connection ends.
    Released,
    /// The owner, as far as known.
    Owner {
        /// Process id.
        pid: Option<u32>,
        /// Base name of the executable.
        name: Option<String>,
        /// User id.
        uid: Option<u32>,
        /// It is on this host, and something of it was not found.
        is_hidden: bool,
    },
    /// The request failed, and nothing has changed.
    Failed(String),
}

/// Why the keeper did not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// The keeper gave this reason.
    #[error("{0}")]
    Refused(String),
    /// The keeper is gone, and so are the rules.
    #[error("the keeper process is gone ({0}), and with it all rules in the kernel: restart sidetrack")]
    Gone(io::Error),
}

/// The answer to a second [`Ask::Begin`].
const SAID_BEFORE: &str = "what may be asked for was said before, and does not change";

/// Our end of the connection to the keeper.
#[derive(Debug)]
pub struct Keeper {
    end: Mutex<OwnedFd>,
    process: Started,
}

/// The version of [`Ask`], [`Order`] and [`Told`]: a keeper that another version of the program has started is taken over only if
/// it is the same.
pub const PROTOCOL: u32 = 2;

impl Keeper {
    /// Starts the keeper. It becomes this user, and later allows only what `begin` says.
    ///
    /// # Errors
    /// The process cannot be started, or the keeper reports a failure.
    pub fn start(begin: Begin, user: Option<&DataUser>) -> anyhow::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        let child = process::respawn(ARGUMENT, theirs)?;
        let keeper = Self { end: Mutex::new(ours), process: Started::here(child) };
        if let Some(user) = user {
            let end = lock(&keeper.end);
            // This request has no answer. If it fails, the next request gets none either.
            wire::send(&*end, &Ask::Become(user.clone()), &[])?;
        }
        match keeper.ask(&Ask::Begin(begin))? {
            (Told::Begun, _) => Ok(keeper),
            (told, _) => Err(unexpected(told).into()),
        }
    }

    /// The keeper of an earlier process of this node: the connection to it, and what [`Keeper::watch`] returned there. Only one of
    /// the two processes may use it at a time.
    pub const fn taken(end: OwnedFd, process: OwnedFd) -> Self {
        Self { end: Mutex::new(end), process: Started::Before(process) }
    }

    /// Copies of what [`Keeper::taken`] needs. The keeper ends when all copies of the connection are closed.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn copies(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([lock(&self.end).try_clone()?, self.watch()?])
    }

    /// Leaves out answers to requests of another process, which has used this connection and may have been killed meanwhile.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn settle(&self) -> Result<(), KeeperError> {
        let end = lock(&self.end);
        // It refuses this in words that no other answer has.
        wire::send(&*end, &Ask::Begin(Begin::default()), &[]).map_err(KeeperError::Gone)?;
        loop {
            match wire::receive(&*end).map_err(KeeperError::Gone)? {
                Some((Told::Failed(why), _)) if why == SAID_BEFORE => return Ok(()),
                Some(_) => {}
                None => return Err(KeeperError::Gone(io::ErrorKind::UnexpectedEof.into())),
            }
        }
    }

    /// Steers to these listeners. Returns warnings and, with kernel paths, the events of flows' ends.
    ///
    /// # Errors
    /// Why nothing has changed.
    pub fn steer(
        &self,
        order: Order,
        listeners: &[BorrowedFd<'_>],
    ) -> Result<(Vec<String>, Option<Events>), KeeperError> {
        // Hold the lock for all requests: another thread's listeners must not come in between.
        let end = lock(&self.end);
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

    /// The flows that the kernel forwards without us.
    ///
    /// # Errors
    /// The keeper is gone, or conntrack does not answer it.
    pub fn flows(&self) -> Result<Vec<KernelFlow>, KeeperError> {
        match self.ask(&Ask::Flows)? {
            (Told::Flows(flows), _) => Ok(flows),
            (told, _) => Err(unexpected(told)),
        }
    }

    /// Returns a descriptor that becomes readable when the keeper ends.
    ///
    /// # Errors
    /// As pidfd_open(2).
    pub fn watch(&self) -> io::Result<OwnedFd> {
        self.process.watch()
    }

    /// The keeper's exit status, if it has ended and is our child.
    pub fn ended(&self) -> Option<std::process::ExitStatus> {
        self.process.ended()
    }

    /// The owner of a socket on this host.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn owner(&self, socket: ClientSocket) -> Result<Process, KeeperError> {
        match self.ask(&Ask::Owner(socket))? {
            (Told::Owner { pid, name, uid, is_hidden }, _) => Ok(Process { pid, name, uid, is_hidden }),
            (told, _) => Err(unexpected(told)),
        }
    }

    fn ask(&self, ask: &Ask) -> Result<(Told, Vec<OwnedFd>), KeeperError> {
        exchange(&lock(&self.end), ask, &[])
    }

    /// Lets the keeper undo everything, and waits until it has ended. Requests fail from then on.
    ///
    /// # Errors
    /// As waitpid(2).
    pub fn finish(&self) -> io::Result<()> {
        // Announce the orderly end before closing: otherwise rules that outlive a crash would stay.
        if let Err(error) = self.ask(&Ask::Release) {
            tracing::warn!(%error, "the keeper ended before us");
        }
        scm::close(&*lock(&self.end))?;
        self.process.wait()
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
