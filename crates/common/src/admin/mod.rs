//! The client of a node's admin interface, and the answers that more than one crate reads.

mod client;
mod functions;

pub use client::{Back, Client, ClientError, Killed, Lines, Pieces};
pub use functions::{ContainersHealth, FunctionCounts, Functions};

use serde::{Deserialize, Serialize};

/// The body of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What is wrong.
    pub error: String,
    /// What to do about it.
    pub help: String,
}
