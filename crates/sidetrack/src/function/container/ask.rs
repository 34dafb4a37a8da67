//! The messages between `up` and the containers' process: one connection for all, and one for each container.

use crate::rights::DataUser;
use serde::{Deserialize, Serialize};
use sidetrack_common::containers::{Limited, Order};
use std::path::PathBuf;

/// A request to the containers' process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Find the container engine, at this socket if one is named, and remove containers that ended processes left.
    Begin {
        /// The engine's socket.
        engine: Option<PathBuf>,
        /// The user that the process becomes.
        user: Option<DataUser>,
    },
    /// Start this container. One end of a connection is attached. The container runs until the other end closes.
    Start(Box<Order>),
}

/// The answer to [`Ask::Begin`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Begun {
    /// It is ready.
    Ready {
        /// The engine's socket.
        engine: PathBuf,
        /// The name and version that the engine reports.
        version: String,
        /// The names of removed containers, which an ended process had left.
        removed: Vec<String>,
    },
    /// It cannot work, for this reason.
    Failed(String),
}

/// A request about one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Want {
    /// This number of sockets of its network, at most [`SOCKETS_MAX`].
    Sockets(u16),
    /// A listener in its network, on all of 127.0.0.0/8 except the container's own ports.
    Listener,
    /// The CPU time that it has used.
    Cpu,
    /// Other limits from now on. There is no answer.
    Limit(Limited),
    /// The reason why it has ended.
    Why,
}

/// Most sockets of one answer.
pub(super) const SOCKETS_MAX: u16 = 48;

/// A message about one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Told {
    /// It runs. A descriptor that becomes readable at its end is attached, and sockets after it.
    Started {
        /// Its name at the engine.
        name: String,
    },
    /// It could not be started.
    Failed(String),
    /// Sockets are attached.
    Sockets,
    /// A listener is attached.
    Listener,
    /// The CPU time that it has used, microseconds. `None`: not known.
    Cpu(Option<u64>),
    /// How it ended, with the last lines that it wrote.
    Ended(String),
}
