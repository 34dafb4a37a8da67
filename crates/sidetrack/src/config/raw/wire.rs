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
    /// `shunt = { fast_path = "none" }` in a rule keeps its flows away. Default: only rules say it; with `auto`, 16 MiB.
    pub after_bytes: Option<At<u64>>,
    /// Large flows of rules without `shunt` go to the wire where this machine can do it: with root, from Linux 6.6 on. Elsewhere
    /// they keep their sockets, and the log says why. It needs a restart. Default false: a machine that cannot do it is an error.
    pub auto: Option<At<bool>>,
    /// Most flows on the wire at a time, 16 to 262144. Further flows stay with our sockets. Default 16384.
    pub flows_max: Option<At<u32>>,
    /// What the next start does with flows that a killed process has left in the kernel: "keep" goes on with those that the rules
    /// still carry in the same way; "end" resets them at both hosts. Each gets its record. Until that start the kernel passes
    /// their packets on. Default "keep".
    pub on_crash: Option<At<OnWireCrash>>,
    /// The folder where names keep the flows alive when the process is killed. It is in a file system of type bpf, and one process
    /// uses it at a time. "none": flows end with the process, and their hosts get a reset when they send. Default
    /// "/sys/fs/bpf/sidetrack/net-N", with the number N of the network namespace; the file system is mounted if it is missing.
    pub pins: Option<At<String>>,
}

/// What the next start does with flows that a killed process has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnWireCrash {
    /// It goes on with them.
    #[default]
    Keep,
    /// It resets them.
    End,
}
