//! `[function.NAME]` as it is written.

use crate::config::{At, List};
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
    /// limit, filter and replace: the direction it is about. Default "both".
    pub direction: Option<At<Direction>>,
    /// limit: bytes a second, 1 to 1000000000000. Required.
    pub bytes_per_second: Option<At<u64>>,
    /// limit: bytes that may move at once after a pause, 1 to 1000000000000. Default: those of 6 ms,
    /// at least 1460: no tenth of a second then has more than 1.1 of its bytes, or one segment more.
    pub burst_bytes: Option<At<u64>>,
    /// limit: "flow" gives each flow the bandwidth, "client" shares it among the flows of one client address, "function"
    /// among all. Default "flow".
    pub share: Option<At<Share>>,
    /// filter: only flows to these hosts pass; "*.example" stands for all names below. Default: no such list.
    pub allow_hosts: Option<List<String>>,
    /// filter: flows to these hosts are refused. Default: none.
    pub deny_hosts: Option<List<String>>,
    /// filter: a flow ends before one of these words has passed as a whole. Default: none.
    pub deny_words: Option<List<String>>,
    /// filter: whether words are compared without regard to case. Default false.
    pub ignore_case: Option<At<bool>>,
    /// replace: the words and what takes their place.
    pub replace: Option<List<Replacement>>,
    /// encrypt and decrypt: a file whose first line is the key that both ends share, 64 hexadecimal digits. Required.
    pub key_file: Option<At<String>>,
    /// container: the image, such as "localhost/audit:1". It is there already, or is shipped by an orchestrator
    /// (docs/control.md): nothing is ever fetched. Required.
    pub image: Option<At<String>>,
    /// container: a command in place of the image's. Default: the image's.
    pub command: Option<List<String>>,
    /// container: variables of its environment, { NAME = "value" }. Default: those of the image.
    pub environment: Option<At<BTreeMap<String, At<String>>>>,
    /// container: the protocol in which it is told about flows. Default "socks6".
    pub speaks: Option<At<Speaks>>,
    /// container: the TCP port on which it listens, 1 to 65535. Default 1080.
    pub port: Option<At<u16>>,
    /// container: how flows come back. "destination": it is told an address of ours, another for each flow, as the
    /// destination. "link": it is told the flow's own destination, and that we are the next link of its chain (the metadata
    /// of socksx; SOCKS6 only). Default: "link" for "socks6+socksx" and "socks6+socksx010", else "destination".
    pub way_back: Option<At<WayBack>>,
    /// container: how many of it run, 1 to 64; all are started before the first flow comes. Default 1.
    pub instances: Option<At<u16>>,
    /// container: memory of each, bytes, 6291456 to 1099511627776; none of it is swap. Default 134217728.
    pub memory_bytes: Option<At<u64>>,
    /// container: processor time of each, per cent of one core, 1 to 102400. Default 100.
    pub cpu_percent: Option<At<u32>>,
    /// container: processes and threads of each, 1 to 32768. Default 64.
    pub pids: Option<At<u32>>,
    /// container: the user and group that its processes run as, as numbers "UID:GID", or "root". The image's own user is not
    /// asked for. Default "65534:65534" (nobody).
    pub user: Option<At<String>>,
    /// container: what shows that it is well. "echo": bytes come out of it as they went in, both ways; "connect": a flow
    /// through it can be made (for functions that change bytes). Default "echo".
    pub probe: Option<At<Probe>>,
    /// container: time from one probe to the next, milliseconds, 100 to 3600000. Default 2000.
    pub probe_interval_ms: Option<At<u64>>,
    /// container: time for a probe to get through, and for its bytes again, milliseconds, 10 to 60000. Three bad ones in a
    /// row, and the container is replaced. Default 1000.
    pub probe_timeout_ms: Option<At<u64>>,
    /// container: time from its start to its first good probe, milliseconds, 100 to 600000. Default 10000.
    pub start_timeout_ms: Option<At<u64>>,
}

/// The protocol in which a container is told about flows.
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
    /// To the address that it is told as the destination.
    Destination,
    /// To us as the next link of its chain.
    Link,
}

/// What shows that a container is well.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Probe {
    /// Bytes come out as they went in.
    Echo,
    /// A flow can be made.
    Connect,
}

/// A word and what takes its place.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Replacement {
    /// What is looked for, 1 to 1024 bytes.
    #[schemars(required)]
    pub find: Option<String>,
    /// What takes its place, at most 1024 bytes.
    #[schemars(required)]
    pub with: Option<String>,
}

/// What a function does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Counts flows and bytes.
    Count,
    /// Holds flows to a bandwidth.
    Limit,
    /// Ends flows by host name and by words in their bytes.
    Filter,
    /// Replaces words in the bytes.
    Replace,
    /// Encrypts what the client sends and decrypts the answers: the end near the client.
    Encrypt,
    /// The other end of `encrypt`, near the server.
    Decrypt,
    /// Whatever an image does that speaks a protocol of proxies.
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

/// Who shares a bandwidth.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// Each flow has its own.
    Flow,
    /// The flows of one client address together.
    Client,
    /// All flows together.
    Function,
}
