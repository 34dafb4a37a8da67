//! `[function.NAME]` as it is written.

use crate::config::{At, List, raw};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// A function. `kind` says what it does, and which of the other keys apply.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Function {
    /// What it does.
    #[schemars(required)]
    pub kind: Option<At<Kind>>,
    /// limit, filter and replace: the direction it works on. Default "both".
    pub direction: Option<At<Direction>>,
    /// limit: bytes per second, 1 to 1000000000000. Required.
    pub bytes_per_second: Option<At<u64>>,
    /// limit: bytes that may pass at once after a pause, 1 to 1000000000000. Default: the bytes of 6 ms, at
    /// least 1460. With the default, no 100 ms carry more than 1.1 times their share, or one segment more.
    pub burst_bytes: Option<At<u64>>,
    /// limit: "flow" gives each flow the bandwidth, "client" shares it among the flows of one client address,
    /// "function" among all flows. Default "flow".
    pub share: Option<At<Share>>,
    /// filter: only flows to these hosts pass; "*.example" means all names below. Default: all hosts.
    pub allow_hosts: Option<List<String>>,
    /// filter: flows to these hosts are denied. Default: none.
    pub deny_hosts: Option<List<String>>,
    /// filter: a flow ends before one of these words has passed completely. Default: none.
    pub deny_words: Option<List<String>>,
    /// filter: compare words without regard to case. Default false.
    pub ignore_case: Option<At<bool>>,
    /// replace: the words, and the text that replaces each.
    pub replace: Option<List<Replacement>>,
    /// branch: the chains that a flow can take. The first arm that fits takes it; if none fits, it goes straight on. All
    /// arms merge behind the branch. Required.
    pub arms: Option<List<Arm>>,
    /// encrypt and decrypt: a file whose first line is the key that both ends share, 64 hexadecimal digits.
    /// Required.
    pub key_file: Option<At<String>>,
    /// wasm: the file of the module, binary or text (WAT). A relative path starts from the folder of this file. Required.
    pub module: Option<At<String>>,
    /// wasm: a text that the module can read as its configuration. Default: empty.
    pub configuration: Option<At<String>>,
    /// wasm: the most instructions of one call, 1000 to 1000000000. Default 10000000.
    pub fuel: Option<At<u64>>,
    /// container: the image, such as "localhost/audit:1". The image must be on this host, or an orchestrator
    /// ships it (docs/control.md): sidetrack never fetches one. Required.
    pub image: Option<At<String>>,
    /// container: a command instead of the image's. Default: the image's.
    pub command: Option<List<String>>,
    /// container: environment variables, { NAME = "value" }. Default: those of the image.
    pub environment: Option<At<BTreeMap<String, At<String>>>>,
    /// container: the protocol that tells it about each flow. Default "socks6".
    pub speaks: Option<At<Speaks>>,
    /// container: the TCP port on which it listens, 1 to 65535. Default 1080.
    pub port: Option<At<u16>>,
    /// container: how flows come back. "destination": the container gets an address of ours as the destination,
    /// a different one for each flow. "link": it gets the flow's own destination, and learns that we are the
    /// next link of its chain (the metadata of socksx; SOCKS6 only). Default: "link" for "socks6+socksx" and
    /// "socks6+socksx010", otherwise "destination".
    pub way_back: Option<At<WayBack>>,
    /// container: how many instances run, 1 to 64. All are started before the first flow. Default 1.
    pub instances: Option<At<u16>>,
    /// container: the fewest instances of a pool that grows and shrinks, instead of `instances`, 1 to 64. Default:
    /// `instances`.
    pub replicas_min: Option<At<u16>>,
    /// container: the most instances of such a pool, `replicas_min` to 64. It grows at once when more flows pass it,
    /// or when its instances use more than 80 per cent of a core. It shrinks by one when fewer have been
    /// enough for `shrink_after_ms`. Default: `replicas_min`.
    pub replicas_max: Option<At<u16>>,
    /// container: the number of flows for which one instance is meant, 1 to 1000000. Default 100.
    pub flows_per_replica: Option<At<u32>>,
    /// container: how long fewer instances have to be enough before one ends, milliseconds, 100 to 86400000. Default
    /// 30000.
    pub shrink_after_ms: Option<At<u64>>,
    /// container: memory of each instance without swap, bytes, 6291456 to 1099511627776. Default 134217728.
    /// wasm: memory of each flow's instance, bytes, 65536 to 1073741824. Default 8388608.
    pub memory_bytes: Option<At<u64>>,
    /// container: processor time of each instance, per cent of one core, 1 to 102400. Default 100.
    pub cpu_percent: Option<At<u32>>,
    /// container: processes and threads of each instance, 1 to 32768. Default 64.
    pub pids: Option<At<u32>>,
    /// container: the user and group of its processes, as numbers "UID:GID", or "root". The user that the image
    /// names is not used. Default "65534:65534" (nobody).
    pub user: Option<At<String>>,
    /// container: the health check. "echo": bytes come out of it unchanged, in both directions. "connect": a
    /// flow through it can be opened (for functions that change bytes). Default "echo".
    pub probe: Option<At<Probe>>,
    /// container: time between two probes, milliseconds, 100 to 3600000. Default 2000.
    pub probe_interval_ms: Option<At<u64>>,
    /// container: time for a probe to get through, and the same time for its bytes, milliseconds, 10 to 60000.
    /// After three failed probes in a row, the container is replaced. Default 1000.
    pub probe_timeout_ms: Option<At<u64>>,
    /// container: time from its start to its first successful probe, milliseconds, 100 to 600000. Default 10000.
    pub start_timeout_ms: Option<At<u64>>,
}

/// The protocol that tells a container about a flow.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
pub enum Speaks {
    /// RFC 1928.
    #[serde(rename = "socks5")]
    Socks5,
    /// The SOCKS6 draft.
    #[serde(rename = "socks6")]
    Socks6,
    /// The layout of socksx from 0.1.1 on.
    #[serde(rename = "socks6+socksx")]
    Socksx,
    /// The layout of socksx 0.1.0.
    #[serde(rename = "socks6+socksx010")]
    Socksx010,
    /// A PROXY protocol header of version 2.
    #[serde(rename = "proxy-v2")]
    ProxyV2,
}

/// How flows come back from a container.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WayBack {
    /// To the address that it gets as the destination.
    Destination,
    /// To us, as the next link of its chain.
    Link,
}

/// The health check of a container.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Probe {
    /// Bytes come out unchanged.
    Echo,
    /// A flow can be opened.
    Connect,
}

/// A word and its replacement.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Replacement {
    /// The word to look for, 1 to 1024 bytes.
    #[schemars(required)]
    pub find: Option<String>,
    /// Its replacement, at most 1024 bytes.
    #[schemars(required)]
    pub with: Option<String>,
}

/// One arm of a branch.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    /// Its name, unique in the branch. Required.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// Conditions that must all hold, as in a rule: `from`, `to`, `port`, `host`, `host_file`, `host_contains`,
    /// `intercept`, `socks_user`. A host name that is not known is looked for in the first bytes. Default: none.
    #[serde(rename = "match")]
    pub matcher: Option<At<raw::Match>>,
    /// The client's first bytes begin with one of these texts, each 1 to 64 bytes. Default: any bytes.
    pub prefix: Option<List<String>>,
    /// The functions of the arm, in order from the client to the server. An empty list: the flow goes straight on.
    /// Required.
    #[schemars(required)]
    pub chain: Option<List<String>>,
}

/// What a function does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Counts flows and bytes.
    Count,
    /// Limits the bandwidth of flows.
    Limit,
    /// Ends flows by host name and by words in their bytes.
    Filter,
    /// Replaces words in the bytes.
    Replace,
    /// Encrypts the bytes of the client and decrypts the answers: the end near the client.
    Encrypt,
    /// The other end of `encrypt`, near the server.
    Decrypt,
    /// A module in WebAssembly with the interface of proxy-wasm.
    Wasm,
    /// Leads each flow through one of several chains, which merge behind it.
    Branch,
    /// The program of an image that speaks a proxy protocol.
    Container,
}

/// A direction of a flow.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From client to server.
    Up,
    /// From server to client.
    Down,
    /// Both.
    Both,
}

/// Which flows share a bandwidth.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// Each flow has the full bandwidth.
    Flow,
    /// All flows of one client address together.
    Client,
    /// All flows together.
    Function,
}
