//! `[run]`.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// Settings of `sidetrack run` with this configuration.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// How the command's DNS queries are answered. "name": names go to the proxy, and the host's resolver is
    /// asked only about names that this host resolves anyway. "resolve": the host's resolver is asked about
    /// every name. Default "name".
    pub dns: Option<At<RunDns>>,
}

/// How the command's DNS queries are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunDns {
    /// Names go to the proxy.
    #[default]
    Name,
    /// The host's resolver.
    Resolve,
}

impl Run {
    /// Returns the setting, or its default if the file has none.
    pub(crate) fn dns(&self) -> RunDns {
        self.dns.as_deref().copied().unwrap_or_default()
    }
}
