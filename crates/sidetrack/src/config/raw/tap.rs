//! `[tap]`: which TLS is opened, with the consent of those it belongs to.

use super::super::{At, List};
use super::Number;
use schemars::JsonSchema;
use serde::Deserialize;

/// Which TLS connections are opened so that requests in them are seen, decided and cached: those of listeners with
/// `tap = true`, of clients that trust the authority made by `sidetrack ca init`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    /// The folder that `sidetrack ca init` made: root.pem, signing.pem and signing-key.pem.
    #[schemars(required)]
    pub ca: Option<At<String>>,
    /// Hosts whose connections always pass untouched; "*.example" stands for all names below. Default: none.
    pub bypass: Option<List<String>>,
    /// Ports of servers whose connections are opened, numbers or "first-last"; to others they pass untouched. Default
    /// [443].
    pub ports: Option<List<Number>>,
    /// A file with further authorities whose servers are believed, in PEM. Default: those of this system only.
    pub trust: Option<At<String>>,
    /// Names that hide others by Encrypted Client Hello: connections to them pass untouched. Default
    /// ["cloudflare-ech.com"].
    pub cover_names: Option<List<String>>,
    /// A file to which the secrets of all connections that are opened are appended, for Wireshark and others (the NSS
    /// key log format). Default: none.
    pub keylog: Option<At<String>>,
    /// A file into which all requests are written that are served by listeners with `tap = true`, as an HTTP Archive (HAR 1.2) without
    /// content; values of fields such as Authorization and Cookie are masked. One that is there is overwritten. Default: none.
    pub har: Option<At<String>>,
}
