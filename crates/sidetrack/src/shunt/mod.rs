//! The shunt at work: conntrack's reports in, entries of a fast path out (NFShunt).
//!
//! | file | does |
//! |---|---|
//! | `engine.rs` | one thread: waits for reports, rules, the fast path and the clock, and feeds `core::shunt` |
//! | `conntrack.rs` | what conntrack says, in the words of `core::shunt`, and what we say to it |
//! | `bpf.rs` | the fast path of BPF, by tc or XDP |
//! | `openflow.rs` | the fast path of a switch, by OpenFlow |
//! | `paths.rs` | several fast paths side by side |
//! | `flowtable.rs` | the fast path of the kernel's own flow tables |
//! | `owners.rs` | the processes behind connections, where a rule asks |
//! | `none.rs` | no fast path: says what would be shunted |
//! | `chaos.rs` | a fast path that fails, forgets and is late, for tests of all the rest |
//! | `process.rs` | all of that in a process of its own, and how it is asked |
//! | `record.rs` | what is told of a flow that was shunted |
//!
//! A fast path does what it is asked in its own time and reports that; nothing here waits for it.

mod bpf;
mod chaos;
mod conntrack;
mod engine;
mod flowtable;
mod none;
mod openflow;
mod owners;
mod paths;
mod process;
mod record;

pub use bpf::{BpfPath, PathKind};
pub use chaos::ChaosPath;
pub use engine::{Engine, EngineError};
pub use openflow::SwitchPath;
pub use process::{ARGUMENT, Ask, Shunter, Told, Which, serve};
pub use record::{Counts, FlowView, ShuntRecord};

use crate::config::ShuntSwitch;
use none::NoPath;
use sidetrack_core::shunt::{Both, Cause, Entry, EntryId, Input, Obstacle, PortNumber};
use sidetrack_sys::bpf::Forwarding;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How often conntrack is told to keep connections whose packets it does not see: a third of the time it then keeps them.
const KEEP_EVERY: Duration = Duration::from_secs(conntrack::KEEP.as_secs() / 3);

/// What the shunt is to do.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The fast paths, one of each kind; the first is for flows of which nothing says another.
    pub paths: Vec<Path>,
    /// How packets get from one port to the other.
    pub forwarding: Forwarding,
    /// The interfaces of the ports that marks name.
    pub ports: BTreeMap<PortNumber, String>,
    /// The program in the kernel believes its entries also while nobody tends it.
    pub keep_when_stalled: bool,
    /// By tc: what leaves by an end of a pair whose other end is in another network namespace is put there at once.
    pub redirect_peer: bool,
    /// What `core::shunt` is told, but for the ports and the first fast path.
    pub core: sidetrack_core::shunt::Config,
}

/// Which fast path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// A program in this host's kernel.
    Bpf(PathKind),
    /// A switch.
    OpenFlow(ShuntSwitch),
    /// A flow table of nftables.
    Flowtable,
    /// None: what would be shunted is shown.
    None,
    /// A program in this host's kernel that fails, forgets and is late as a random number of this seed says: for tests.
    Chaos(PathKind, u64),
}

impl From<PathKind> for Path {
    fn from(kind: PathKind) -> Self {
        Self::Bpf(kind)
    }
}

/// What a fast path reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// It has the entry.
    Installed(EntryId),
    /// It has not taken the entry.
    Failed(EntryId, Obstacle),
    /// What passed until now.
    Counted(EntryId, Both),
    /// The entry is gone, and all that passed.
    Gone(EntryId, Cause, Both),
    /// It can be reached again.
    Back,
}

impl From<Report> for Input<'static> {
    fn from(report: Report) -> Self {
        match report {
            Report::Installed(id) => Self::Installed(id),
            Report::Failed(id, why) => Self::Failed(id, why),
            Report::Counted(id, traffic) => Self::Counted(id, traffic),
            Report::Gone(id, cause, traffic) => Self::Gone(id, cause, traffic),
            Report::Back => Self::PathBack,
        }
    }
}

/// A way for packets around the slow path.
///
/// Every entry that it is asked to install is answered by [`Report::Installed`] or [`Report::Failed`], and every one that
/// was installed by one [`Report::Gone`], asked for or not.
pub trait FastPath: Send {
    /// Asks for an entry.
    fn install(&mut self, entry: &Entry);
    /// Asks it to let go of an entry.
    fn remove(&mut self, id: EntryId, cause: Cause);
    /// The rules have changed: nothing that was allowed before may pass from now on, as far as this can be done at once.
    fn suspend(&mut self);
    /// Does what is due; says for how long it may be left alone.
    ///
    /// # Errors
    /// If it is broken for good.
    fn tend(&mut self) -> io::Result<Duration>;
    /// Looks at what has passed, now.
    ///
    /// # Errors
    /// If it is broken for good.
    fn count(&mut self) -> io::Result<()>;
    /// Does what is to be done at the very end, when every entry is gone.
    fn finish(&mut self) {}
    /// The next report.
    fn report(&mut self) -> Option<Report>;
    /// Whether a RST that reaches conntrack is to be believed: the fast path keeps back those that do not fit, or shows every
    /// one.
    fn judges_resets(&self) -> bool;
    /// The netlink port by which it changes nftables, if it does: its own changes are none of the rules.
    fn own_port(&self) -> Option<u32> {
        None
    }
    /// Descriptors that make it worth tending when they are readable.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
}
