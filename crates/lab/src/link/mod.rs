//! Emulated links: delay, jitter, loss, a rate with a finite queue, duplicates, reordering, down and up. All of it
//! can change while the link runs.
//!
//! [`Network::join`] puts a link between two nodes. It uses `tc netem` on a host in the middle if the kernel has it;
//! otherwise, or on request, our own emulator in user space. Both take the same [`Conditions`]. The decisions of our
//! emulator are a pure state machine ([`direction::Direction`]) on a virtual clock; [`emulator`] feeds it from TAP
//! interfaces.

pub mod conditions;
pub mod direction;
pub mod emulator;
pub mod frame;
pub mod netem;
pub mod random;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use anyhow::{Context, Result, bail};
use sidetrack_sys::tap::Tap;

pub use conditions::{Conditions, Loss, Rate};
pub use direction::Counts;
pub use emulator::{Emulator, Lateness, Way};
use netem::NetemLink;

use crate::topology::{self, Link, Node};

/// Length of a TAP's queue in frames, for times when the thread is busy.
const TAP_QUEUE_FRAMES: &str = "10000";

/// The kind of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Kind {
    /// `netem` if the kernel has it, otherwise `builtin`.
    #[default]
    Auto,
    /// tc-netem(8) on a host in the middle.
    Netem,
    /// Our own emulator, in user space.
    Builtin,
}

impl Kind {
    /// Resolves [`Kind::Auto`] for this kernel.
    ///
    /// # Errors
    /// No node can be made (root is needed).
    pub fn resolved(self, launcher: &Path) -> Result<Self> {
        Ok(match self {
            Self::Auto if netem::is_available(launcher)? => Self::Netem,
            Self::Auto => Self::Builtin,
            chosen => chosen,
        })
    }
}

/// Makes links; all links of one network share a thread.
#[derive(Debug)]
pub struct Network {
    /// Absent: netem.
    emulator: Option<Arc<Emulator>>,
    seed: AtomicU64,
}

/// An emulated link between two nodes; dropping it removes the link.
#[derive(Debug)]
pub struct Wire {
    /// Addresses and the interface's name, the same at both ends.
    pub link: Link,
    medium: Medium,
}

#[derive(Debug)]
enum Medium {
    Builtin { emulator: Arc<Emulator>, number: usize },
    Netem(NetemLink),
}

impl Network {
    /// Makes a network with links of this kind; `seed` decides which frames our own links lose.
    ///
    /// # Errors Not root; or netem was requested and this kernel has none.
    pub fn new(kind: Kind, launcher: &Path, seed: u64) -> Result<Self> {
        let emulator = match kind.resolved(launcher)? {
            Kind::Netem if !netem::is_available(launcher)? => {
                bail!("this kernel has no netem; use links of our own (--links builtin)")
            }
            Kind::Netem => None,
            Kind::Builtin | Kind::Auto => Some(Arc::new(Emulator::start()?)),
        };
        Ok(Self { emulator, seed: AtomicU64::new(seed) })
    }

    /// Returns the kind of its links: `netem` or `builtin`.
    #[must_use]
    pub fn kind(&self) -> Kind {
        if self.emulator.is_some() { Kind::Builtin } else { Kind::Netem }
    }

    /// Joins two nodes with the addresses of [`topology::link`]. `conditions` are for [`Way::Forth`] and
    /// [`Way::Back`].
    ///
    /// # Errors
    /// `ip` or `tc` refuses, or the kernel has no TUN/TAP.
    pub fn join(&self, a: &Node, b: &Node, subnet: u8, conditions: [Conditions; 2]) -> Result<Wire> {
        let Some(emulator) = &self.emulator else {
            let (netem, link) = NetemLink::join(a, b, subnet, conditions)?;
            return Ok(Wire { link, medium: Medium::Netem(netem) });
        };
        let interface = format!("link{subnet}");
        let tap = |node: &Node| {
            let tap = node.enter(|| Ok(Tap::create(&interface)?))?;
            node.run("ip", &["link", "set", "dev", &interface, "txqueuelen", TAP_QUEUE_FRAMES])?;
            Ok::<_, anyhow::Error>(tap)
        };
        let seed = self.seed.load(Relaxed);
        self.seed.store(random::Random::new(seed).bits(), Relaxed);
        let number = emulator.add([tap(a)?, tap(b)?], conditions, seed)?;
        let link = topology::address(a, b, &interface, subnet)?;
        Ok(Wire { link, medium: Medium::Builtin { emulator: Arc::clone(emulator), number } })
    }

    /// Returns how punctual our own links were; `None` with netem.
    ///
    /// # Errors
    /// The emulator has ended.
    pub fn lateness(&self) -> Result<Option<Lateness>> {
        self.emulator.as_ref().map(|emulator| emulator.lateness()).transpose()
    }
}

impl Wire {
    /// Changes one direction while traffic runs.
    ///
    /// # Errors
    /// The emulator has ended, or `tc` refuses.
    pub fn set(&self, way: Way, conditions: Conditions) -> Result<()> {
        match &self.medium {
            Medium::Builtin { emulator, number } => emulator.set(*number, way, conditions),
            Medium::Netem(netem) => netem.set(way, conditions),
        }
    }

    /// Sets both directions to the same conditions.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub fn set_both(&self, conditions: Conditions) -> Result<()> {
        Way::BOTH.into_iter().try_for_each(|way| self.set(way, conditions))
    }

    /// Returns the counts of frames, forth and back; `None` with netem.
    ///
    /// # Errors
    /// The emulator has ended.
    pub fn counts(&self) -> Result<Option<[Counts; 2]>> {
        match &self.medium {
            Medium::Builtin { emulator, number } => emulator.counts(*number).map(Some),
            Medium::Netem(_) => Ok(None),
        }
    }

    /// Returns the frames that an end dropped because the emulator was too slow. A run with any is invalid.
    ///
    /// # Errors
    /// The node is gone.
    pub fn overruns(&self, node: &Node) -> Result<u64> {
        let wanted = format!("{}:", self.link.interface);
        let table = node.run("cat", &["/proc/thread-self/net/dev"])?;
        let line = table.lines().find_map(|line| line.trim().strip_prefix(&wanted).map(str::to_owned));
        // Fields: bytes packets errs drop fifo frame compressed multicast; first for received, then for sent frames.
        let dropped = line.and_then(|line| line.split_whitespace().nth(11)?.parse().ok());
        dropped.with_context(|| format!("{} has no interface {}", node.name(), self.link.interface))
    }
}
