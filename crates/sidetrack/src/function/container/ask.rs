//! What `up` and the containers' process say to each other: one connection for all, and one for each container.

use crate::rights::DataUser;
use serde::{Deserialize, Serialize};
use sidetrack_core::function::ContainerSpec;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What the containers' process can be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Find the container engine, at this socket if one is named, and remove what others left behind.
    Begin {
        /// The engine's socket.
        engine: Option<PathBuf>,
        /// The user that the process becomes.
        user: Option<DataUser>,
    },
    /// Start this container. One end of a connection comes along, over which it is held: its end is the container's end.
    Start(Box<Order>),
}

/// What it answers to [`Ask::Begin`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Begun {
    /// It is ready.
    Ready {
        /// The engine's socket.
        engine: PathBuf,
        /// What the engine says of itself.
        version: String,
        /// Names of containers that a process which is gone had left.
        removed: Vec<String>,
    },
    /// It cannot work, for this reason.
    Failed(String),
}

/// A container that is to be started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The function's name.
    pub function: String,
    /// The image.
    pub image: String,
    /// In place of the image's command; empty: the image's own.
    pub command: Vec<String>,
    /// Variables.
    pub environment: BTreeMap<String, String>,
    /// The user and group that its processes run as: `UID:GID`.
    pub user: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Per cent of one core.
    pub cpu_percent: u32,
    /// Processes and threads.
    pub pids: u32,
}

impl Order {
    /// What this function asks for.
    pub fn new(function: &str, spec: &ContainerSpec) -> Self {
        Self {
            function: function.to_owned(),
            image: spec.image.to_string(),
            command: spec.command.clone(),
            environment: spec.environment.clone(),
            user: spec.user.to_string(),
            memory_bytes: spec.resources.memory_bytes,
            cpu_percent: spec.resources.cpu_percent,
            pids: spec.resources.pids,
        }
    }
}

/// What can be asked about one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Want {
    /// So many sockets of its network, at most [`SOCKETS_MAX`].
    Sockets(u16),
    /// A listener in its network, on all of 127.0.0.0/8 but the container's own ports.
    Listener,
    /// Why it has ended.
    Why,
}

/// Most sockets of one answer.
pub const SOCKETS_MAX: u16 = 48;

/// What is said of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// It runs. A descriptor that becomes readable at its end comes along, and sockets after it.
    Started {
        /// Its name at the engine.
        name: String,
    },
    /// It could not be started.
    Failed(String),
    /// Sockets come along.
    Sockets,
    /// A listener comes along.
    Listener,
    /// How it ended, with the last of what it wrote.
    Ended(String),
}
