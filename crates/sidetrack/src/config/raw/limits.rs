//! `[limits]`.

use super::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// Time-outs and bounds.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Most flows at a time. Default: computed from RLIMIT_NOFILE.
    pub max_flows: Option<At<u32>>,
    /// Most flows at a time of one client address; the addresses of one IPv6 /64 are one client. Default: half of all flows,
    /// for clients on other hosts that do not send the PROXY protocol. With the default, flows of the packet engine and
    /// flows that the kernel forwards do not count.
    pub max_flows_per_client: Option<At<u32>>,
    /// Most connections at a time that have not yet sent their handshake or first request. If one more comes, the one that
    /// waits longest is closed. Default: a quarter of all flows.
    pub max_handshakes: Option<At<u32>>,
    /// Ends a flow after this time without a byte, milliseconds. Default 7440000 (RFC 5382 REQ-5).
    pub idle_timeout_ms: Option<At<u64>>,
    /// Ends a UDP association after this time without a datagram, milliseconds. Default 300000 (RFC 4787 REQ-5).
    pub udp_idle_timeout_ms: Option<At<u64>>,
    /// Most UDP associations at a time of one listener in one worker, 1 to 1000000. If one more comes, the one that is idle
    /// longest ends: one of the same client if this client has half of them. `max_flows` counts them too. Default 16384.
    pub max_associations: Option<At<u32>>,
    /// Ends a flow after this time, milliseconds. Default: never.
    pub lifetime_ms: Option<At<u64>>,
    /// Time to connect to the server, including all handshakes with hops, milliseconds. Default 10000.
    pub connect_timeout_ms: Option<At<u64>>,
    /// Time a client has for its handshake with a listener, milliseconds. Default 10000.
    pub handshake_timeout_ms: Option<At<u64>>,
    /// Longest wait for the first bytes of a flow, if a rule needs the host name, milliseconds, 1 to 100. Default 30.
    pub first_bytes_ms: Option<At<u64>>,
    /// Most bytes buffered for one direction of a flow, 4096 to 16777216. Default 65536.
    pub buffer_bytes: Option<At<u32>>,
    /// Refuses new flows, and lets caches shrink, while more than this share of the memory is used that the control group
    /// allows, percent, 50 to 100. 100: never. Without a limit of the control group it does nothing. Default 85.
    pub memory_percent: Option<At<u64>>,
    /// How long flows may continue after SIGTERM or SIGINT, milliseconds, 0 to 86400000. A second signal ends them at once.
    /// Default 5000.
    pub drain_ms: Option<At<u64>>,
}
