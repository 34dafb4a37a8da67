//! The flows of a shunt, found by address and by place.
//!
//! A flow takes most of the memory, so flows lie close together in chunks. A tree that held them itself would be half
//! empty after addresses that rise. Only an address and a place are rows of the tree.

use super::{Flow, Tuple};
use std::collections::{BTreeMap, BTreeSet};

/// Where a flow lies. Another flow may take the place after it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u32);

/// The flows of a chunk: one for each bit of [`Chunk::used`].
const CHUNK: u32 = 64;

/// Places for some flows. A chunk without flows holds no memory.
#[derive(Clone, Debug, Default)]
struct Chunk {
    used: u64,
    flows: Vec<Option<Flow>>,
}

/// The flows of a shunt.
#[derive(Clone, Debug, Default)]
pub(super) struct Flows {
    places: BTreeMap<Tuple, Place>,
    chunks: Vec<Chunk>,
    /// The chunks that have a free place. The first one is filled first, so that later ones become empty.
    with_room: BTreeSet<u32>,
}

impl Place {
    /// Returns the chunk, and the number within it.
    const fn parts(self) -> (u32, u32) {
        (self.0 / CHUNK, self.0 % CHUNK)
    }
}

/// Returns an index. A place fits: 32 bits are the least that Linux has.
const fn index(number: u32) -> usize {
    number as usize
}

impl Flows {
    /// Returns the flow at a place, if there is one.
    pub(super) fn at(&self, place: Place) -> Option<&Flow> {
        let (chunk, number) = place.parts();
        self.chunks.get(index(chunk))?.flows.get(index(number))?.as_ref()
    }

    /// Returns the place of a flow.
    pub(super) fn place(&self, tuple: &Tuple) -> Option<Place> {
        self.places.get(tuple).copied()
    }

    /// Returns the flow with these addresses.
    pub(super) fn get(&self, tuple: &Tuple) -> Option<&Flow> {
        self.at(self.place(tuple)?)
    }

    /// Returns the flow with these addresses.
    pub(super) fn get_mut(&mut self, tuple: &Tuple) -> Option<&mut Flow> {
        let (chunk, number) = self.place(tuple)?.parts();
        self.chunks.get_mut(index(chunk))?.flows.get_mut(index(number))?.as_mut()
    }

    /// Whether there are no flows.
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns the addresses of all flows, in their order.
    pub(super) fn tuples(&self) -> impl Iterator<Item = &Tuple> {
        self.places.keys()
    }

    /// Returns all flows, in the order of their addresses.
    pub(super) fn values(&self) -> impl Iterator<Item = &Flow> {
        self.places.values().filter_map(|place| self.at(*place))
    }

    /// Returns all flows, in the order of their places.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Flow> {
        self.chunks.iter_mut().flat_map(|chunk| chunk.flows.iter_mut().flatten())
    }

    /// Adds a flow. It replaces the one with the same addresses.
    pub(super) fn insert(&mut self, flow: Flow) {
        self.remove(&flow.tuple);
        let next = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX / CHUNK);
        let number = self.with_room.first().copied().unwrap_or(next);
        if number == next {
            self.chunks.push(Chunk::default());
            self.with_room.insert(number);
        }
        let Some(chunk) = self.chunks.get_mut(index(number)) else { return };
        if chunk.flows.is_empty() {
            chunk.flows.reserve_exact(index(CHUNK));
            chunk.flows.resize(index(CHUNK), None);
        }
        let free = chunk.used.trailing_ones();
        let Some(slot) = chunk.flows.get_mut(index(free)) else { return };
        *slot = Some(flow);
        chunk.used |= 1 << free;
        if chunk.used == u64::MAX {
            self.with_room.remove(&number);
        }
        self.places.insert(flow.tuple, Place(number * CHUNK + free));
    }

    /// Removes the flow with these addresses, and returns it.
    pub(super) fn remove(&mut self, tuple: &Tuple) -> Option<Flow> {
        let (number, within) = self.places.remove(tuple)?.parts();
        let chunk = self.chunks.get_mut(index(number))?;
        let flow = chunk.flows.get_mut(index(within))?.take();
        chunk.used &= !(1 << within);
        if chunk.used == 0 {
            chunk.flows = Vec::new();
        }
        self.with_room.insert(number);
        flow
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shunt::{Connection, Identity, Mark, Transport};
    use crate::time::Instant;
    use proptest::prelude::*;

    fn flow(port: u16, id: u32) -> Flow {
        let (client, server) = (([192, 0, 2, 1], port).into(), ([198, 51, 100, 1], 80).into());
        let connection = Connection {
            tuple: Tuple::new(client, server, Transport::Tcp, 0),
            identity: Identity::new(id, None),
            mark: Mark(0),
            phase: None,
            both_ways: true,
            translated: false,
            inspected: false,
            traffic: None,
        };
        Flow::new(&connection, Instant::ZERO)
    }

    proptest! {
        #[test]
        fn they_are_a_sorted_map_that_lies_close(
            steps in proptest::collection::vec((any::<bool>(), 0u16..300), 0..800),
        ) {
            let (mut flows, mut model) = (Flows::default(), BTreeMap::new());
            for (id, (adds, port)) in (0u32..).zip(steps) {
                let flow = flow(port, id);
                if adds {
                    flows.insert(flow);
                    model.insert(flow.tuple, flow);
                } else {
                    prop_assert_eq!(flows.remove(&flow.tuple), model.remove(&flow.tuple));
                }
                prop_assert_eq!(flows.get(&flow.tuple), model.get(&flow.tuple));
                prop_assert_eq!(flows.get_mut(&flow.tuple).copied(), model.get(&flow.tuple).copied());
            }
            prop_assert!(flows.values().eq(model.values()) && flows.tuples().eq(model.keys()));
            prop_assert_eq!(flows.values_mut().count(), model.len());
            prop_assert!(flows.chunks.iter().all(|chunk| (chunk.used == 0) == chunk.flows.is_empty()));
            prop_assert!(flows.chunks.len() <= 300_usize.div_ceil(index(CHUNK)), "no chunk too many");
        }
    }
}
