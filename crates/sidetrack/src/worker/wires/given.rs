//! The wire of a node goes from one process to the one that replaces it, while packets are passed on.
//!
//! ```text
//! old: OURS ----[`Wires::let_go`]-------------> THEIRS (it keeps only flows that are on their way to the wire)
//! new: AWAITED --[`Wires::take_over`]---------> OURS
//! old: THEIRS --the new process cannot go on,
//!              [`Wires::take_over`]-----------> OURS
//! ```
//!
//! In AWAITED and THEIRS no flow goes to the wire: each tries later.

use super::adopt::{Adopting, Adoption};
use super::opened::Opened;
use super::{Stays, Wires};
use crate::config;
use sidetrack_sys::bpf::{BpfError, Pins, WireMemory, WireOn};
use sidetrack_sys::sync::lock;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Time between two looks whether flows have got to the wire.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Which process may change what is in the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Whose {
    /// This one.
    #[default]
    Ours,
    /// Another one, which this one will replace.
    Awaited,
    /// Another one, which has replaced this one.
    Theirs,
}

/// Which process may change what is in the memory, and what this one is changing.
#[derive(Debug, Default)]
pub(super) struct Hand {
    whose: Whose,
    /// Flows of this process that are between their sockets and the wire.
    joining: usize,
    /// Places of flows that it has kept when it let go of the others.
    kept: Vec<u32>,
}

/// A flow that is between its sockets and the wire, until this is dropped.
#[derive(Debug)]
pub struct Joins(Arc<Wires>);

impl Drop for Joins {
    fn drop(&mut self) {
        lock(&self.0.hand).joining -= 1;
    }
}

/// Descriptors of the wire of one process, for another.
#[derive(Debug)]
pub struct Given {
    /// The folder of pins and its lock, if there is one.
    pub pins: Option<(PathBuf, OwnedFd)>,
    /// The maps.
    pub maps: [OwnedFd; 3],
    /// The index of each interface, and its attachments: out, in.
    pub on: Vec<(u32, [OwnedFd; 2])>,
}

/// What a process has left to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LetGo {
    /// The number of flows.
    pub flows: usize,
    /// The places of flows that it keeps.
    pub kept: Vec<u32>,
}

impl Wires {
    /// Returns copies of all descriptors.
    ///
    /// # Errors
    /// EMFILE.
    pub fn given(&self) -> io::Result<Given> {
        let pins = lock(&self.pins);
        let pins = pins.as_ref().map(|pins| Ok::<_, io::Error>((pins.folder().to_owned(), pins.copy()?)));
        let on =
            lock(&self.on).values().map(|on| Ok((on.index(), on.copies()?))).collect::<io::Result<_>>()?;
        Ok(Given { pins: pins.transpose()?, maps: self.memory.copies()?, on })
    }

    /// The wire of a running process, which goes on with it until [`Self::take_over`].
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN.
    pub fn inherit(config: &config::Wire, given: Given) -> Result<Self, BpfError> {
        let Given { pins, maps, on } = given;
        let memory = WireMemory::given(maps).map_err(BpfError::Map)?;
        let on = on.into_iter().map(|(index, links)| WireOn::given(index, links)).collect();
        let pins = pins.map(|(folder, lock)| Pins::given(folder, lock));
        let opened = Opened { memory, pins, on, left: Vec::new() };
        Ok(Self::of(opened, config, Hand { whose: Whose::Awaited, ..Hand::default() }))
    }

    /// Whether another process has the flows, and this one will replace it.
    pub fn is_awaited(&self) -> bool {
        lock(&self.hand).whose == Whose::Awaited
    }

    /// Whether what outlives this process ends with it in order.
    pub fn is_ours(&self) -> bool {
        lock(&self.hand).whose == Whose::Ours
    }

    /// A flow begins to go to the wire.
    pub(super) fn may_join(self: &Arc<Self>) -> Result<Joins, Stays> {
        let mut hand = lock(&self.hand);
        if hand.whose != Whose::Ours {
            return Err(Stays::Upgrade);
        }
        hand.joining += 1;
        drop(hand);
        Ok(Joins(self.clone()))
    }

    /// Leaves the flows to another process, which has descriptors of the memory: they have no record here, and nothing about them
    /// changes. Flows on their way to the wire get there first, within `patience`. This process keeps those that take longer.
    pub fn let_go(self: &Arc<Self>, patience: Duration) -> LetGo {
        lock(&self.hand).whose = Whose::Theirs;
        let until = Instant::now() + patience;
        while lock(&self.hand).joining > 0 && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        // Otherwise a flow could end, and be removed, after the other process has it.
        self.rest();
        let watched = self.take_watched();
        watched.iter().for_each(|wired| wired.let_go());
        let lingering = std::mem::take(&mut *lock(&self.lingering));
        self.flows.fetch_sub((watched.len() + lingering.len()) as u64, Relaxed);
        let mut kept = self.memory.used();
        kept.retain(|place| {
            watched.iter().all(|wired| wired.id().place() != *place)
                && lingering.iter().all(|one| one.id.place() != *place)
        });
        if let Err(error) = self.begin() {
            tracing::error!(%error, "flows that are still on their way to the wire are not looked at");
        }
        lock(&self.hand).kept.clone_from(&kept);
        LetGo { flows: watched.len(), kept }
    }

    /// Goes on with the flows of another process, which has let go of them or is gone. It keeps those in the places `but`.
    ///
    /// # Errors
    /// The system gives no thread to look at them.
    pub fn take_over(self: &Arc<Self>, by: &Adopting<'_>, but: &[u32]) -> io::Result<Adoption> {
        lock(&self.on).retain(|index, on| match self.memory.replace_on(on) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(index, %error, "an interface of the wire is gone");
                false
            }
        });
        self.rest();
        {
            let mut hand = lock(&self.hand);
            let used = self.memory.used();
            let own = std::mem::take(&mut hand.kept).into_iter().filter(|place| used.contains(place));
            let but: Vec<_> = own.chain(but.iter().copied()).collect();
            *lock(&self.left) = self.memory.take_over(&but);
            hand.whose = Whose::Ours;
        }
        // Interfaces that have come meanwhile.
        if let Err(error) = self.attach_to_all() {
            tracing::warn!(%error, "packets of an interface are not passed on by the kernel alone");
        }
        let adoption = self.adopt(by);
        self.begin()?;
        Ok(adoption)
    }
}
