//! Time-outs and bounds of flows.

use sidetrack_core::policy::Policy;

/// Time-outs and bounds. A rule's own time-outs take precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most flows at a time. `None`: computed from `RLIMIT_NOFILE` at the start.
    pub max_flows: Option<u32>,
    /// Most flows at a time of one client address. `None`: half of all flows, for clients on other hosts.
    pub max_flows_per_client: Option<u32>,
    /// Most connections that have not yet sent their handshake or first request. `None`: a quarter of all flows.
    pub max_handshakes: Option<u32>,
    /// Ends a flow after this time without a byte, milliseconds. Default [`Limits::IDLE_TIMEOUT_MS`].
    pub idle_timeout_ms: u64,
    /// Ends a UDP association after this time without a datagram, milliseconds.
    pub udp_idle_timeout_ms: u64,
    /// Most UDP associations of one listener in one worker.
    pub max_associations: usize,
    /// Ends a flow after this time, milliseconds. `None`: never.
    pub lifetime_ms: Option<u64>,
    /// Time to connect to the server, including all handshakes with hops, milliseconds.
    pub connect_timeout_ms: u64,
    /// Time a client has for its handshake with our listener (SOCKS, PROXY protocol), milliseconds.
    pub handshake_timeout_ms: u64,
    /// Longest wait for the first bytes of a flow, where a rule needs them, milliseconds, 1 to 100.
    pub first_bytes_ms: u64,
    /// Most bytes buffered for one direction of a flow.
    pub buffer_bytes: usize,
    /// The share of the control group's memory from which new flows are refused, in percent. 100: never.
    pub memory_percent: u8,
    /// How long flows may continue after SIGTERM, milliseconds.
    pub drain_ms: u64,
}

impl Limits {
    /// Two hours and four minutes: the shortest idle time that RFC 5382 Sec. 5 (REQ-5) allows a NAT. To a
    /// program that is not aware of it, an interceptor is a NAT. A shorter time cuts idle SSH sessions and
    /// database pools that survive on a direct path. TCP keep-alive (two hours by default) arrives in time.
    pub const IDLE_TIMEOUT_MS: u64 = 7_440_000;
    /// Five minutes, as RFC 4787 Sec. 4.3 (REQ-5) recommends; it forbids less than two.
    pub const UDP_IDLE_TIMEOUT_MS: u64 = 300_000;
    /// As many as a small router has; each needs a descriptor.
    pub const MAX_ASSOCIATIONS: usize = 16_384;
    /// Ten seconds: three SYN retransmissions (1 + 2 + 4 s) and a handshake.
    pub const CONNECT_TIMEOUT_MS: u64 = 10_000;
    /// Ten seconds, the same as the connect time-out.
    pub const HANDSHAKE_TIMEOUT_MS: u64 = 10_000;
    /// 64 KiB for each direction.
    pub const BUFFER_BYTES: usize = 65_536;
    /// The rest is for flows in flight, which go on.
    pub const MEMORY_PERCENT: u8 = 85;
    /// Five seconds: long enough for a request and its answer, short enough for a restart.
    pub const DRAIN_MS: u64 = 5_000;
    /// One day: the longest drain time that can be set.
    pub const DRAIN_MAX_MS: u64 = 86_400_000;
    /// Longest wait for first bytes that can be set, milliseconds. Where the server speaks first, each
    /// connection waits this long.
    pub const FIRST_BYTES_MAX_MS: u64 = 100;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_flows: None,
            max_flows_per_client: None,
            max_handshakes: None,
            idle_timeout_ms: Self::IDLE_TIMEOUT_MS,
            udp_idle_timeout_ms: Self::UDP_IDLE_TIMEOUT_MS,
            max_associations: Self::MAX_ASSOCIATIONS,
            lifetime_ms: None,
            connect_timeout_ms: Self::CONNECT_TIMEOUT_MS,
            handshake_timeout_ms: Self::HANDSHAKE_TIMEOUT_MS,
            first_bytes_ms: Policy::FIRST_BYTES_MS,
            buffer_bytes: Self::BUFFER_BYTES,
            memory_percent: Self::MEMORY_PERCENT,
            drain_ms: Self::DRAIN_MS,
        }
    }
}
