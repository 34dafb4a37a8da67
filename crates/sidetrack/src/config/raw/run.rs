//! `[run]`.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// What holds for `sidetrack run` with this configuration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Who answers the command's questions about names: "name" (names travel to the proxy; the host's resolver is asked
    /// only about names that this host resolves anyway) or "resolve" (the host's resolver is asked about every name).
    /// Default "name".
    pub dns: Option<At<RunDns>>,
}

/// Who answers the command's questions about names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunDns {
    /// Names travel to the proxy.
    #[default]
    Name,
    /// The host's resolver.
    Resolve,
}

impl Run {
    /// Who answers, where the file says nothing, too.
    pub(crate) fn dns(&self) -> RunDns {
        self.dns.as_deref().copied().unwrap_or_default()
    }
}
