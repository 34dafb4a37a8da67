//! Records of flows, their history, and captures of their packets.

use super::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// Where records of flows go.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// "stdout", "stderr", "none", or the path of a file (with a "/"). Default "stdout".
    pub to: Option<At<String>>,
    /// Number of ended flows kept in memory for `sidetrack flows`, 0 to 1000000. Default 4096.
    pub recent: Option<At<u32>>,
}

/// Keeps ended flows on disk. `sidetrack up` reads this table; `sidetrack run` does not.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct History {
    /// Folder for the files. No other process may write there.
    pub path: Option<At<String>>,
    /// Most bytes of all files together; the oldest files go first. 16777216 (16 MiB) to 1099511627776 (1 TiB). Default
    /// 1073741824 (1 GiB): about 10 million flows.
    pub max_bytes: Option<At<u64>>,
    /// Time after which flows go, days, 1 to 3650. Default 30.
    pub keep_days: Option<At<u32>>,
    /// Whether the bytes of running flows are kept for each second, for the 256 flows that move most. They take at most a
    /// quarter of `max_bytes`. Default true.
    pub counters: Option<bool>,
}

/// Captures of packets by `sidetrack tap`. `sidetrack up` reads this table; `sidetrack run` does not.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Capture {
    /// Whether packets may be captured by those who may use the admin interface. It needs CAP_NET_RAW at the start. Default: only
    /// with `ring_bytes`.
    pub packets: Option<bool>,
    /// Bytes of the latest packets of flows that are kept in memory, for `sidetrack tap --last`. 0, or 1048576 (1 MiB) to
    /// 17179869184 (16 GiB). Default 0: none are kept.
    pub ring_bytes: Option<At<u64>>,
    /// Bytes of each packet that are kept, 64 to 262144. Default 262144: all. With less, TLS cannot be decrypted.
    pub ring_snap_bytes: Option<At<u32>>,
}
