//! What a node answers about its functions.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The answer of `GET /v1/functions`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Functions {
    /// The functions, by name.
    pub functions: Vec<FunctionCounts>,
}

/// A function with its counts since it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCounts {
    /// Its name.
    pub name: String,
    /// Its kind, as in the configuration.
    pub kind: Cow<'static, str>,
    /// Number of flows through it.
    pub flows: u64,
    /// Bytes from clients to servers. Only a function of kind `count` counts them.
    pub bytes_up: u64,
    /// Bytes from servers to clients. Only a function of kind `count` counts them.
    pub bytes_down: u64,
    /// The state of its containers. `None` for a function without containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub containers: Option<ContainersHealth>,
}

/// The state of a function's containers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainersHealth {
    /// Their image, as the configuration names it.
    #[serde(default)]
    pub image: String,
    /// The wanted number of containers.
    pub wanted: u16,
    /// The number of healthy ones: started, with a successful probe.
    pub well: u16,
    /// How often a started container was given up.
    pub falls: u64,
    /// While fewer are healthy than wanted: why the last one was given up. `None` before the first failure.
    pub trouble: Option<String>,
}
