//! The wire of a process: flows that the kernel has taken over from our sockets (ADR 36, ADR 37, `docs/wire.md`).

mod adopt;
mod back;
mod given;
mod noted;
mod opened;
mod watch;
mod wired;

pub use adopt::{Adopting, Adoption};
pub use back::{Obstacle, Returned};
pub use given::{Given, Joins, LetGo};
pub use wired::{Handed, Wired};

use crate::config::{self, OnWireCrash};
use back::Leaving;
use given::Hand;
use noted::Kind;
use opened::Opened;
use sidetrack_core::wire::{Freezes, Side, Unfit};
use sidetrack_sys::bpf::{Adopted, BpfError, Pins, WireId, WireMemory, WireOn, default_pins};
use sidetrack_sys::link;
use sidetrack_sys::route::Changes;
use sidetrack_sys::sync::lock;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use watch::Watch;

/// How long packets of an ended flow are still passed on: the last acknowledgement may be lost, and its FIN is sent again.
const LINGERS: Duration = Duration::from_secs(2);

/// Time between two looks for changes of routes.
const ROUTES: Duration = Duration::from_millis(500);

/// Why a flow stays with its sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// What its sides are like.
    Unfit(Unfit),
    /// The kernel translates the addresses of one side, by rules that are not ours.
    Translated,
    /// An interface to one side takes no program.
    Interface,
    /// There are as many flows on the wire as may be.
    Full,
    /// Its sockets were never quiet.
    Busy,
    /// The kernel has refused a step.
    Refused,
    /// Another process of this node has the wire, while one replaces the other.
    Upgrade,
}

impl Stays {
    /// All reasons.
    pub const ALL: [Self; 11] = [
        Self::Unfit(Unfit::Closing),
        Self::Unfit(Unfit::ThisHost),
        Self::Unfit(Unfit::IpVersions),
        Self::Unfit(Unfit::Options),
        Self::Unfit(Unfit::Segments),
        Self::Translated,
        Self::Interface,
        Self::Full,
        Self::Busy,
        Self::Refused,
        Self::Upgrade,
    ];

    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unfit(Unfit::Closing) => "closing",
            Self::Unfit(Unfit::ThisHost) => "this_host",
            Self::Unfit(Unfit::IpVersions) => "ip_versions",
            Self::Unfit(Unfit::Options) => "tcp_options",
            Self::Unfit(Unfit::Segments) => "segments",
            Self::Translated => "translated",
            Self::Interface => "interface",
            Self::Full => "full",
            Self::Busy => "busy",
            Self::Refused => "refused",
            Self::Upgrade => "upgrade",
        }
    }

    fn index(self) -> usize {
        Self::ALL.iter().position(|other| *other == self).unwrap_or(Self::ALL.len() - 1)
    }

    /// Whether it may be different later.
    pub const fn passes(self) -> bool {
        matches!(self, Self::Full | Self::Busy | Self::Upgrade)
    }
}

/// What the metrics show of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WiresSeen {
    /// Flows that are there now.
    pub flows: u64,
    /// Flows that went there since the start.
    pub taken: u64,
    /// Flows of an earlier process that it went on with.
    pub adopted: u64,
    /// Flows that came back into two sockets.
    pub back: u64,
    /// Flows that stayed with their sockets since the start, in the order of [`Stays::ALL`].
    pub stayed: [u64; Stays::ALL.len()],
    /// How long hand-overs have frozen their flows ([`Wires::froze`]).
    pub freezes: Freezes,
}

/// A flow that has ended, and whose packets are still passed on.
#[derive(Debug)]
struct Lingering {
    until: Instant,
    id: WireId,
    _port: Option<OwnedFd>,
}

/// Changes of routes that flows have to know of.
#[derive(Debug)]
struct Routes {
    changes: Option<Changes>,
    looked: Instant,
    /// Counts them.
    count: u64,
}

/// The wire of this process.
#[derive(Debug)]
pub struct Wires {
    memory: WireMemory,
    /// Where it outlives this process, if it can.
    pins: Mutex<Option<Pins>>,
    on: Mutex<BTreeMap<u32, WireOn>>,
    /// What another process has left, until [`Wires::adopt`].
    left: Mutex<Vec<Adopted>>,
    /// Whether this process may change what is in the memory.
    hand: Mutex<Hand>,
    on_crash: OnWireCrash,
    lingering: Mutex<VecDeque<Lingering>>,
    leaving: Mutex<Vec<Leaving>>,
    routes: Mutex<Routes>,
    watch: Watch,
    kinds: Mutex<Vec<Arc<Kind>>>,
    flows: AtomicU64,
    taken: AtomicU64,
    adopted: AtomicU64,
    back: AtomicU64,
    stayed: [AtomicU64; Stays::ALL.len()],
    freezes: Mutex<Freezes>,
}

impl Wires {
    /// Makes room for flows, or takes over what an earlier process has left, and attaches the programs to all interfaces of this
    /// network namespace that have Ethernet addresses. `user`: who this process becomes, user and group.
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN; EINVAL before Linux 6.6.
    pub fn open(config: &config::Wire, user: Option<(u32, u32)>) -> Result<Self, BpfError> {
        let wires = Self::of(Opened::new(config)?, config, Hand::default());
        wires.attach_to_all()?;
        if let (Some(pins), Some((user, group))) = (&*lock(&wires.pins), user)
            && let Err(error) = pins.give_to(user, group)
        {
            tracing::warn!(%error, "the pins of the wire stay with root: they outlive an orderly stop");
        }
        Ok(wires)
    }

    fn of(opened: Opened, config: &config::Wire, hand: Hand) -> Self {
        Self {
            memory: opened.memory,
            pins: Mutex::new(opened.pins),
            on: Mutex::new(opened.on.into_iter().map(|on| (on.index(), on)).collect()),
            left: Mutex::new(opened.left),
            hand: Mutex::new(hand),
            on_crash: config.on_crash,
            lingering: Mutex::default(),
            leaving: Mutex::default(),
            routes: Mutex::new(Routes { changes: Changes::watch().ok(), looked: Instant::now(), count: 0 }),
            watch: Watch::default(),
            kinds: Mutex::default(),
            flows: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            adopted: AtomicU64::new(0),
            back: AtomicU64::new(0),
            stayed: Default::default(),
            freezes: Mutex::default(),
        }
    }

    fn attach_to_all(&self) -> Result<(), BpfError> {
        let interfaces = link::interfaces().map_err(|error| BpfError::Map(std::io::Error::other(error)))?;
        let fit = interfaces.into_iter().filter(link::Interface::is_ethernet);
        fit.into_iter().try_for_each(|interface| self.attach(interface.index))
    }

    /// Whether an earlier process has left flows at the usual place.
    pub fn are_left() -> bool {
        let folder = default_pins().ok().filter(|folder| folder.exists());
        folder.and_then(|folder| Pins::lock(&folder).ok()).is_some_and(|pins| pins.is_used())
    }

    /// The folder of what outlives this process, by a name that it still reaches when it has given up its rights.
    pub fn pinned_at(&self) -> Option<std::path::PathBuf> {
        lock(&self.pins).as_ref().map(Pins::reachable)
    }

    /// The memory that it shares with the kernel.
    pub const fn memory(&self) -> &WireMemory {
        &self.memory
    }

    fn attach(&self, index: u32) -> Result<(), BpfError> {
        let mut on = lock(&self.on);
        if let Entry::Vacant(place) = on.entry(index) {
            let on = place.insert(self.memory.attach(index)?);
            if let Some(pins) = &*lock(&self.pins)
                && let Err(error) = on.pin(pins)
            {
                tracing::warn!(index, %error, "packets that come by this interface are lost after a crash: cannot pin the programs");
            }
        }
        Ok(())
    }

    /// Makes sure that the programs are on the interface with this index: it may be newer than this process.
    ///
    /// # Errors
    /// It takes none.
    pub fn reach(&self, index: u32) -> Result<(), Stays> {
        if lock(&self.on).contains_key(&index) {
            return Ok(());
        }
        let found = link::interfaces().unwrap_or_default();
        let is_fit = found.iter().any(|interface| interface.index == index && interface.is_ethernet());
        is_fit.then(|| self.attach(index).ok()).flatten().ok_or(Stays::Interface)
    }

    /// Lets the kernel pass packets of both sides on from now on, while their sockets go on.
    ///
    /// # Errors
    /// There is no room; an earlier flow between the same ends is still there; another process has the wire.
    pub fn join(self: &Arc<Self>, sides: &[Side; 2]) -> Result<(WireId, Joins), Stays> {
        let joins = self.may_join()?;
        self.remove_lingering(Instant::now());
        let joined = match self.memory.join(sides) {
            Ok(None) => {
                // Those that have ended make room.
                self.remove_lingering(Instant::now() + LINGERS);
                self.memory.join(sides)
            }
            joined => joined,
        };
        match joined {
            Ok(Some(id)) => {
                self.flows.fetch_add(1, Relaxed);
                Ok((id, joins))
            }
            Ok(None) => Err(Stays::Full),
            Err(_) => Err(Stays::Refused),
        }
    }

    /// How often interfaces, addresses or routes have changed. It may be late by half a second.
    pub fn route_changes(&self) -> u64 {
        let mut routes = lock(&self.routes);
        if routes.looked.elapsed() >= ROUTES {
            routes.looked = Instant::now();
            // After an error nothing is known: each flow looks again.
            let any = routes.changes.as_mut().is_none_or(|changes| changes.any().unwrap_or(true));
            routes.count += u64::from(any);
        }
        routes.count
    }

    /// A flow was handed over. For this time its packets waited: user space read the numbers of its sockets, and the kernel
    /// did not know them yet.
    pub fn froze(&self, time: Duration) {
        lock(&self.freezes).add(time);
    }

    /// A flow stays with its sockets.
    pub fn stays(&self, why: Stays) {
        if let Some(count) = self.stayed.get(why.index()) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// Removes a flow. Packets that come after it meet the kernel's own TCP.
    pub fn remove(&self, id: WireId) {
        self.flows.fetch_sub(1, Relaxed);
        if let Err(error) = self.memory.remove(id) {
            tracing::warn!(%error, "cannot remove a flow from the wire");
        }
    }

    /// Removes a flow, and resets it at both hosts.
    fn cut(&self, id: WireId) {
        self.flows.fetch_sub(1, Relaxed);
        self.memory.cut(id, |error| tracing::debug!(%error, "cannot reset a flow of the wire"));
    }

    /// Removes a flow that has ended in order, a moment later. Its local port stays taken as long.
    fn leave(&self, id: WireId, port: Option<OwnedFd>) {
        let now = Instant::now();
        self.remove_lingering(now);
        lock(&self.lingering).push_back(Lingering { until: now + LINGERS, id, _port: port });
    }

    /// Removes the flows whose time is over.
    pub fn remove_lingering(&self, now: Instant) {
        loop {
            let first = {
                let mut lingering = lock(&self.lingering);
                let is_over = lingering.front().is_some_and(|first| first.until <= now);
                is_over.then(|| lingering.pop_front()).flatten()
            };
            match first {
                Some(first) => self.remove(first.id),
                None => return,
            }
        }
    }

    /// What the metrics show.
    pub fn seen(&self) -> WiresSeen {
        self.remove_lingering(Instant::now());
        let gone = lock(&self.lingering).len() + lock(&self.leaving).len();
        WiresSeen {
            flows: self.flows.load(Relaxed).saturating_sub(gone as u64),
            taken: self.taken.load(Relaxed),
            adopted: self.adopted.load(Relaxed),
            back: self.back.load(Relaxed),
            stayed: std::array::from_fn(|at| self.stayed[at].load(Relaxed)),
            freezes: *lock(&self.freezes),
        }
    }
}
