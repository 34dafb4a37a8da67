//! Loads programs from the objects that clang made, and the errors on the way.

use super::{Hook, LoadError, Map, MapKind, MapShape, Object, ObjectError, Program, ProgramKind};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The licence of everything in `bpf/`, in the kernel's words.
const LICENSE: &str = "Dual MIT/GPL";

/// Why a set of programs and maps could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum BpfError {
    /// The object was built wrong.
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// A program was refused.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A map could not be made or written.
    #[error("a BPF map: {0}")]
    Map(#[source] io::Error),
    /// A program could not be attached.
    #[error("the interface with index {index} takes no program on {hook:?}: {source}")]
    Attach {
        /// The interface.
        index: u32,
        /// The hook.
        hook: Hook,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Creates an empty map with the name that the programs use.
pub(super) fn map(
    name: &'static str,
    kind: MapKind,
    key_bytes: usize,
    value_bytes: usize,
    entries_max: u32,
) -> Result<Map, BpfError> {
    Map::create(MapShape { kind, name, key_bytes, value_bytes, entries_max }).map_err(BpfError::Map)
}

/// Loads the program of this section, which may use these maps.
pub(super) fn program(
    object: &[u8],
    section: &str,
    kind: ProgramKind,
    maps: &[&Map],
) -> Result<Program, BpfError> {
    let maps: BTreeMap<_, _> = maps.iter().map(|map| (map.shape().name, map.as_fd().as_raw_fd())).collect();
    let code = Object::parse(object)?.program(section, &maps)?;
    Ok(Program::load(section, kind, &code, LICENSE)?)
}
