//! Runs the shunt: reads conntrack's reports, and installs entries of fast paths (NFShunt).
//!
//! | file | does |
//! |---|---|
//! | `engine.rs` | one thread: waits for reports, rules, the fast path and the clock, and feeds `core::shunt` |
//! | `conntrack.rs` | converts between conntrack's types and those of `core::shunt` |
//! | `bpf.rs` | the fast path of BPF, by tc or XDP |
//! | `openflow.rs` | the fast path of a switch, by OpenFlow |
//! | `paths.rs` | several fast paths side by side |
//! | `flowtable.rs` | the fast path of the kernel's own flow tables |
//! | `owners.rs` | the processes behind connections, where a rule asks |
//! | `none.rs` | no fast path: shows what would be shunted |
//! | `chaos.rs` | a fast path that fails, loses entries and is late, for tests of the rest |
//! | `process.rs` | runs the shunt in its own process, and sends requests to it |
//! | `record.rs` | records and views of shunted flows |
//!
//! A fast path handles requests in its own time and reports the results; nothing here waits for it.

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
pub use process::{ARGUMENT, Ask, PROTOCOL, Shunter, Told, Which, serve};
pub use record::{Capacity, Counts, FlowView, ShuntRecord};

use crate::config::ShuntSwitch;
use none::NoPath;
use sidetrack_core::shunt::{Both, Cause, Entry, EntryId, Input, Obstacle, PortNumber};
use sidetrack_sys::bpf::Forwarding;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How often we tell conntrack to keep connections whose packets it does not see: a third of the time it then keeps them.
const KEEP_EVERY: Duration = Duration::from_secs(conntrack::KEEP.as_secs() / 3);

/// The settings of a shunt.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The fast paths, one of each kind. The first is the default.
    pub paths: Vec<Path>,
    /// How packets get from one port to the other.
    pub forwarding: Forwarding,
    /// The interfaces of the ports that marks name.
    pub ports: BTreeMap<PortNumber, String>,
    /// The program in the kernel keeps using its entries when this process no longer checks them.
    pub keep_when_stalled: bool,
    /// With tc: puts packets directly into the network namespace of a veth pair's other end.
    pub redirect_peer: bool,
    /// The settings of `core::shunt`, except the ports and the first fast path.
    pub core: sidetrack_core::shunt::Config,
}

/// The kinds of fast paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// A program in this host's kernel.
    Bpf(PathKind),
    /// A switch.
    OpenFlow(ShuntSwitch),
    /// A flow table of nftables.
    Flowtable,
    /// No fast path: what would be shunted is shown.
    None,
    /// A program in this host's kernel that fails, loses entries and is late at random, with this seed: for tests.
    Chaos(PathKind, u64),
}

impl From<PathKind> for Path {
    fn from(kind: PathKind) -> Self {
        Self::Bpf(kind)
    }
}

/// A report of a fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The entry is installed.
    Installed(EntryId),
    /// The entry was not installed.
    Failed(EntryId, Obstacle),
    /// What has passed until now.
    Counted(EntryId, Both),
    /// The entry is removed; all that passed.
    Gone(EntryId, Cause, Both),
    /// The fast path is reachable again.
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
/// It answers every request to install an entry with [`Report::Installed`] or [`Report::Failed`]. For every installed
/// entry it sends one [`Report::Gone`], requested or not.
pub trait FastPath: Send {
    /// Requests an entry.
    fn install(&mut self, entry: &Entry);
    /// Requests the removal of an entry.
    fn remove(&mut self, id: EntryId, cause: Cause);
    /// Stops everything that was allowed before, because the rules have changed, as far as this is possible at once.
    fn suspend(&mut self);
    /// Handles what is due. Returns the time until the next call is needed.
    ///
    /// # Errors
    /// Fails if the fast path cannot continue.
    fn tend(&mut self) -> io::Result<Duration>;
    /// Reads what has passed until now.
    ///
    /// # Errors
    /// Fails if the fast path cannot continue.
    fn count(&mut self) -> io::Result<()>;
    /// Does the last work, when every entry is removed.
    fn finish(&mut self) {}
    /// Returns the next report.
    fn report(&mut self) -> Option<Report>;
    /// True if conntrack can accept every RST that reaches it: the fast path holds back those that do not fit, or
    /// forwards every RST to conntrack.
    fn judges_resets(&self) -> bool;
    /// Returns the netlink port through which it changes nftables, if it does. These changes do not count as rule
    /// changes.
    fn own_port(&self) -> Option<u32> {
        None
    }
    /// Returns descriptors; when one is readable, [`FastPath::tend`] should be called.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
}
