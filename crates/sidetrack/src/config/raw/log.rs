//! `[log]`.

use super::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// The log that Sidetrack writes on standard error.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// "text" for people, or "json" for one JSON object per line. Default: $SIDETRACK_LOG_FORMAT, otherwise
    /// "text".
    pub format: Option<At<LogFormat>>,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines of text.
    Text,
    /// One JSON object per line.
    Json,
}
