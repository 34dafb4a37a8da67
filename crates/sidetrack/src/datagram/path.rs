//! The paths that the associations of one driver use, and which of them share one.

use crate::carry::Failure;
use crate::carry::datagrams::{Datagrams, Remote};
use sidetrack_core::association::Id;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::policy::Carry;
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

/// One path.
#[derive(Debug)]
pub(super) struct Path {
    /// Distinguishes it from earlier ones with the same index.
    serial: u64,
    carrier: Carrier,
    /// The only association that uses it: another one may not, because the senders of answers could not be told apart.
    pub only: Option<Id>,
    pub state: State,
    pub waker: Waker,
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
    next_serial: u64,
}

impl Paths {
    /// Returns the shared path of this carrier.
    pub(super) fn shared(&self, carrier: &Carrier) -> Option<PathId> {
        self.all.iter().enumerate().find_map(|(index, path)| {
            let path = path.as_ref().filter(|path| path.only.is_none() && path.carrier == *carrier)?;
            Some(PathId { index: u32::try_from(index).ok()?, serial: path.serial })
        })
    }

    /// Adds a path. `waker` makes the waker for its index.
    pub(super) fn add(
        &mut self,
        carrier: Carrier,
        only: Option<Id>,
        state: State,
        waker: impl FnOnce(u32) -> Waker,
    ) -> PathId {
        let index = self.all.iter().position(Option::is_none).unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        self.next_serial += 1;
        let id = PathId { index: u32::try_from(index).unwrap_or(u32::MAX), serial: self.next_serial };
        self.all[index] = Some(Path { serial: id.serial, carrier, only, state, waker: waker(id.index) });
        id
    }

    /// Returns a path.
    pub(super) fn get(&mut self, id: PathId) -> Option<&mut Path> {
        self.all.get_mut(id.index as usize)?.as_mut().filter(|path| path.serial == id.serial)
    }

    /// Returns the path with this index.
    pub(super) fn at(&mut self, index: u32) -> Option<(PathId, &mut Path)> {
        let path = self.all.get_mut(index as usize)?.as_mut()?;
        Some((PathId { index, serial: path.serial }, path))
    }

    /// Closes a path.
    pub(super) fn remove(&mut self, id: PathId) -> Option<Path> {
        let place = self.all.get_mut(id.index as usize)?;
        place.take_if(|path| path.serial == id.serial)
    }

    /// Closes all paths.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }
}

/// What a task for an association has found.
pub(super) enum Found {
    /// The addresses of a server's name.
    Addresses(Id, Arc<Carry>, Result<Vec<std::net::SocketAddr>, Failure>),
    /// The path through hops.
    Path(PathId, Result<Box<dyn Datagrams>, Failure>),
}
