//! `[log]`.

use super::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// What Sidetrack says about itself, on standard error.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// "text" is for people, "json" one JSON object per line. Default: $SIDETRACK_LOG_FORMAT, else "text".
    pub format: Option<At<LogFormat>>,
}

/// How lines of the log look.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}
