//! The table `[admin]`.

use super::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

/// The admin interface of the running program: its socket, its page and its metrics address.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Admin {
    /// Path of the unix socket of the admin interface, or "none". Default: "/run/sidetrack/admin.sock" for root,
    /// "sidetrack/admin.sock" in $XDG_RUNTIME_DIR for others.
    pub socket: Option<At<String>>,
    /// A TCP address that serves /metrics only, such as "127.0.0.1:9465". Default: none.
    pub metrics: Option<At<String>>,
    /// Host names in requests to `metrics` that are accepted, besides IP addresses and localhost. Other names get status
    /// 421, so that a web page cannot read metrics by DNS rebinding. Default: none.
    pub metrics_hosts: Option<List<String>>,
    /// A TCP address that serves the page and all of the admin interface behind a login, such as "127.0.0.1:9466". Default:
    /// none; the socket serves the page without a login.
    pub page: Option<At<String>>,
    /// The file with the tokens to log in with: a line `admin TOKEN` or `read TOKEN` for each. If it does not exist, the
    /// start makes it, readable by its owner alone. Default: "page-tokens" in the directory of `socket`.
    pub page_tokens: Option<At<String>>,
    /// Host names in requests to `page` that are accepted, besides IP addresses and localhost; a proxy with TLS before it
    /// needs its name here. Default: none.
    pub page_hosts: Option<List<String>>,
    /// The orchestrator whose applications the page shows. Default: none.
    pub orchestrator: Option<At<Orchestrator>>,
}

/// An orchestrator of the control plane (docs/control.md), which is asked for its applications and their steps.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Orchestrator {
    /// Its address, "host:port". Of several, the first that answers is taken.
    #[schemars(required)]
    pub address: Option<List<String>>,
    /// The name in its certificate. Default: the host of the first `address`.
    pub name: Option<At<String>>,
    /// The file with a certificate and its key, which the start reads. If the orchestrator lists its name in `operators`, all
    /// applications are shown, otherwise those of this member.
    #[schemars(required)]
    pub identity: Option<At<String>>,
    /// The file with the authority that signed the orchestrator's certificate.
    #[schemars(required)]
    pub ca: Option<At<String>>,
}
