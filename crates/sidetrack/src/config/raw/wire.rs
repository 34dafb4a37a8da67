//! `[wire]`, as it is written.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// Flows of listeners that the kernel takes over from our sockets (docs/wire.md). A rule says when: { fast_path = "wire" } in its
/// `shunt`. A reload changes `after_bytes` only.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Wire {
    /// Flows of rules without `shunt` go to the wire after this number of bytes, both directions together, 1 to 2^50.
    /// `shunt = { fast_path = "none" }` in a rule keeps its flows away. Default: only rules say it.
    pub after_bytes: Option<At<u64>>,
    /// Most flows on the wire at a time, 16 to 262144. Further flows stay with our sockets. Default 16384.
    pub flows_max: Option<At<u32>>,
}
