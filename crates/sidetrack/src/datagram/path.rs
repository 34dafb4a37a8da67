//! The paths that the associations of one driver use, and which of them share one.

use crate::carry::datagrams::{Datagrams, Remote};
use crate::carry::{Admitted, Dialing, Failure, Order};
use crate::worker::{Admission, Worker};
use sidetrack_core::association::{Id, MappingId};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, EndReason, Flow};
use sidetrack_core::policy::Carry;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;

/// An association that waits until its path is open.
#[derive(Debug)]
pub(super) struct Waiting {
    pub id: Id,
    pub carry: Arc<Carry>,
    pub remote: Remote,
}

#[derive(Debug)]
pub(super) enum State {
    /// A hop is being asked.
    Opening(Vec<Waiting>),
    Open(Box<dyn Datagrams>),
    /// It is open, and what it has received is being looked at.
    Looked,
}

/// The associations that use a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Users {
    /// All are of this mapping. `None`: all associations of the driver are of one client.
    pub mapping: Option<MappingId>,
    /// The only one: another one may not, because the senders of answers could not be told apart.
    pub only: Option<Id>,
}

/// One path.
#[derive(Debug)]
pub(super) struct Path {
    /// Distinguishes it from earlier ones with the same index.
    serial: u64,
    carrier: Carrier,
    pub users: Users,
    pub state: State,
    pub waker: Waker,
    /// The descriptors that its associations share: those of its first socket, and those for IPv6 servers if they have another one.
    descriptors: [Option<Admission>; 2],
}

/// Names one path, also after it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathId {
    pub index: u32,
    serial: u64,
}

/// All paths of one driver. There are never more than associations.
#[derive(Debug, Default)]
pub(super) struct Paths {
    all: Vec<Option<Path>>,
    free: Vec<u32>,
    /// The paths of each mapping.
    of: BTreeMap<MappingId, Vec<u32>>,
    next_serial: u64,
}

impl Paths {
    /// Returns the shared path of this carrier and mapping.
    pub(super) fn shared(&self, carrier: &Carrier, mapping: Option<MappingId>) -> Option<PathId> {
        let wanted = Users { mapping, only: None };
        let look = |index: u32| {
            let path = self.all.get(index as usize)?.as_ref()?;
            let fits = path.users == wanted && path.carrier == *carrier;
            fits.then_some(PathId { index, serial: path.serial })
        };
        match mapping {
            Some(mapping) => self.of.get(&mapping)?.iter().copied().find_map(look),
            // One client has few paths.
            None => (0..self.all.len()).filter_map(|index| u32::try_from(index).ok()).find_map(look),
        }
    }

    /// Adds a path. `waker` makes the waker for its index.
    pub(super) fn add(
        &mut self,
        carrier: Carrier,
        users: Users,
        state: State,
        waker: impl FnOnce(u32) -> Waker,
    ) -> PathId {
        let index = self.free.pop().unwrap_or_else(|| {
            if self.all.is_empty() {
                // A SOCKS client has one path mostly.
                self.all.reserve_exact(1);
            }
            self.all.push(None);
            u32::try_from(self.all.len() - 1).unwrap_or(u32::MAX)
        });
        self.next_serial += 1;
        let id = PathId { index, serial: self.next_serial };
        if let Some(place) = self.all.get_mut(index as usize) {
            *place = Some(Path {
                serial: id.serial,
                carrier,
                users,
                state,
                waker: waker(index),
                descriptors: [None, None],
            });
        }
        if let Some(mapping) = users.mapping {
            self.of.entry(mapping).or_default().push(index);
        }
        id
    }

    /// Returns a path.
    pub(super) fn get(&mut self, id: PathId) -> Option<&mut Path> {
        self.all.get_mut(id.index as usize)?.as_mut().filter(|path| path.serial == id.serial)
    }

    /// Returns the carrier of a path that is open.
    pub(super) fn carrier_if_open(&self, id: PathId) -> Option<&Carrier> {
        let path = self.all.get(id.index as usize)?.as_ref().filter(|path| path.serial == id.serial)?;
        (!matches!(path.state, State::Opening(_))).then_some(&path.carrier)
    }

    /// Keeps these descriptors for all associations of a path, unless it has those for this kind of servers.
    pub(super) fn keep(&mut self, id: PathId, v6: bool, descriptors: Option<Admission>) {
        let place = self.get(id).and_then(|path| path.descriptors.get_mut(usize::from(v6)));
        if let Some(place) = place.filter(|place| place.is_none()) {
            *place = descriptors;
        }
    }

    /// Whether a path has the descriptors for this kind of servers.
    pub(super) fn keeps(&self, id: PathId, v6: bool) -> bool {
        let path = self.all.get(id.index as usize).and_then(Option::as_ref);
        path.is_some_and(|path| path.serial == id.serial && path.descriptors[usize::from(v6)].is_some())
    }

    /// Returns the path with this index.
    pub(super) fn at(&mut self, index: u32) -> Option<(PathId, &mut Path)> {
        let path = self.all.get_mut(index as usize)?.as_mut()?;
        Some((PathId { index, serial: path.serial }, path))
    }

    /// Closes a path.
    pub(super) fn remove(&mut self, id: PathId) -> Option<Path> {
        let place = self.all.get_mut(id.index as usize)?;
        let path = place.take_if(|path| path.serial == id.serial)?;
        self.free.push(id.index);
        if let Some(mapping) = path.users.mapping
            && let Some(others) = self.of.get_mut(&mapping)
        {
            others.retain(|index| *index != id.index);
            if others.is_empty() {
                self.of.remove(&mapping);
            }
        }
        Some(path)
    }

    /// Closes all paths of a mapping.
    pub(super) fn remove_of(&mut self, mapping: MappingId) {
        for index in self.of.remove(&mapping).unwrap_or_default() {
            if self.all.get_mut(index as usize).and_then(Option::take).is_some() {
                self.free.push(index);
            }
        }
    }

    /// Closes all paths.
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.free.clear();
        self.of.clear();
    }
}

/// What a task for an association has found.
pub(super) enum Found {
    /// The addresses of a server's name.
    Addresses(Id, Arc<Carry>, Result<Vec<std::net::SocketAddr>, Failure>),
    /// The path through hops.
    Path(PathId, Result<Box<dyn Datagrams>, Failure>),
}

/// Returns the order for a path for datagrams to a destination that the gate has admitted. Hops and nodes are from the
/// configuration.
pub(super) fn order<'a>(
    worker: &'a Worker,
    dialing: &'a Dialing,
    carry: &'a Carry,
    flow: &'a Flow,
    destination: Destination,
) -> Order<'a> {
    Order {
        carry,
        destination,
        client: flow.client,
        stack: &[],
        host: flow.host.as_ref(),
        tunnels: &worker.tunnels,
        warm: &worker.warm,
        metadata: Vec::new(),
        gate: None,
        dialing,
        traced: None,
    }
}

/// Tries addresses in their order. Returns what the first one that works gives, or the first failure.
pub(super) fn first_of<T>(
    all: Vec<Admitted>,
    mut attempt: impl FnMut(Admitted) -> Result<T, Failure>,
) -> Result<(T, Admitted), Failure> {
    let mut first = None;
    for to in all {
        match attempt(to) {
            Ok(done) => return Ok((done, to)),
            Err(failure) => drop(first.get_or_insert(failure)),
        }
    }
    Err(first.unwrap_or_else(|| Failure::new(EndReason::Unreachable, "no address to try")))
}
