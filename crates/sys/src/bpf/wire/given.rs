//! The memory of the wire in two processes: a running one gives descriptors of it to the one that replaces it.
//!
//! Both may read it. Only one of them may change it: until [`WireMemory::take_over`] the process that has given it.

use super::super::{Link, Map};
use super::pins::FORMAT_NUMBER;
use super::{Adopted, Shared, WIRE_FREE, WireMemory, WireOn, shapes, wire_at};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Mutex, OnceLock};

impl WireMemory {
    /// The number of the format of maps and programs. Processes with different ones cannot share them.
    pub const FORMAT: u32 = FORMAT_NUMBER;

    /// Returns copies of the descriptors of its maps.
    ///
    /// # Errors
    /// EMFILE.
    pub fn copies(&self) -> io::Result<[OwnedFd; 3]> {
        let copy = |map: &Map| map.as_fd().try_clone_to_owned();
        Ok([copy(self.wires.map())?, copy(&self.ends)?, copy(&self.notes)?])
    }

    /// Opens the memory of another process by these descriptors, and loads the programs. No place in it is free before
    /// [`Self::take_over`].
    ///
    /// # Errors
    /// `InvalidData` if it has another shape; EPERM without CAP_BPF.
    pub fn given(maps: [OwnedFd; 3]) -> io::Result<Self> {
        let [wires, ends, notes] = shapes(1);
        let [of_wires, of_ends, of_notes] = maps;
        let memory = Self {
            wires: Shared::of(Map::given(of_wires, wires)?)?,
            ends: Map::given(of_ends, ends)?,
            notes: Map::given(of_notes, notes)?,
            free: Mutex::default(),
            programs: OnceLock::new(),
        };
        memory.programs().map_err(io::Error::other)?;
        Ok(memory)
    }

    /// Goes on with the memory: the other process changes nothing in it any more, except flows in the places `but`. Returns the
    /// flows that are there now.
    pub fn take_over(&self, but: &[u32]) -> Vec<Adopted> {
        self.found(but)
    }

    /// The places that have a flow.
    pub fn used(&self) -> Vec<u32> {
        let is_used = |number: &u32| {
            let at = *number as usize * wire_at::SIZE + wire_at::STATE;
            self.wires.u32(at).load(Acquire) != WIRE_FREE
        };
        (0..self.wires.map().shape().entries_max).filter(is_used).collect()
    }

    /// Lets the programs of this memory pass packets on an interface, instead of those of another process. No packet passes in
    /// between.
    ///
    /// # Errors
    /// ENOLINK if the interface is gone.
    pub fn replace_on(&self, on: &WireOn) -> io::Result<()> {
        let programs = self.programs().map_err(io::Error::other)?;
        on.links.iter().zip(programs).try_for_each(|(link, program)| link.replace(program))
    }
}

impl WireOn {
    /// Returns copies of the descriptors of its attachments: out, in.
    ///
    /// # Errors
    /// EMFILE.
    pub fn copies(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([self.links[0].copy()?, self.links[1].copy()?])
    }

    /// The programs of another process on the interface with this index.
    pub fn given(index: u32, links: [OwnedFd; 2]) -> Self {
        Self { index, links: links.map(Link::given) }
    }
}
