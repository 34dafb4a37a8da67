//! `[function.NAME]` as it is written.

use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

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
    /// limit: bytes that may move at once after a pause, 1 to 1000000000000. Default: those of a tenth of a second, at
    /// least 65536.
    pub burst_bytes: Option<At<u64>>,
    /// limit: "flow" gives each flow the bandwidth, "function" shares it among all. Default "flow".
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
    /// All flows together.
    Function,
}
