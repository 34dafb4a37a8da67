//! `[tap]`: which TLS connections are intercepted, with their owners' consent.

use super::super::{At, List};
use super::Number;
use schemars::JsonSchema;
use serde::Deserialize;

/// Which TLS connections are intercepted, so that requests in them are seen, decided and cached. Applies to
/// listeners with `tap = true`, for clients that trust the authority made by `sidetrack ca init`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tap {
    /// The folder made by `sidetrack ca init`, with root.pem, signing.pem and signing-key.pem.
    #[schemars(required)]
    pub ca: Option<At<String>>,
    /// Hosts whose connections always pass unchanged; "*.example" means all names below. Default: none.
    pub bypass: Option<List<String>>,
    /// Server ports whose connections are intercepted, numbers or "first-last". Connections to other ports pass
    /// unchanged. Default [443].
    pub ports: Option<List<Number>>,
    /// A PEM file with more certificates to trust for servers. The certificate of an authority (CA:TRUE) is trusted with
    /// all that the authority signs, any other one only for itself. Default: only the authorities of this system.
    pub trust: Option<At<String>>,
    /// Servers whose certificates are not verified, by name or address, such as ["dev.example", "127.0.0.1"]: anyone on
    /// the path can pose as them. Default: none.
    pub unverified_hosts: Option<List<String>>,
    /// Public names that hide the real name by Encrypted Client Hello; connections to them pass unchanged.
    /// Default ["cloudflare-ech.com"].
    pub cover_names: Option<List<String>>,
    /// A file to which the secrets of all intercepted connections are appended, for Wireshark and similar tools
    /// (NSS key log format). Default: none.
    pub keylog: Option<At<String>>,
    /// A file for all requests that listeners with `tap = true` serve, as an HTTP Archive (HAR 1.2). Values of fields
    /// such as Authorization and Cookie are masked. An existing file is overwritten. Default: none.
    pub har: Option<At<String>>,
    /// Most bytes of the content of each request and of each response that the file of `har` has, 0 to 67108864 (64 MiB). It
    /// may have passwords. Default 0: no content.
    pub har_bodies_max_bytes: Option<At<u64>>,
}
