//! The measured rows: no proxy, the paper's proxies, and ours in every role.

use super::paper::{self, Model, Overheads};

/// A row of the tables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// Name in the tables.
    pub name: &'static str,
    /// Name among [`crate::peers`].
    pub peer: &'static str,
    /// The round trips of a request.
    pub model: Model,
    /// The paper's figures for it.
    pub paper: Overheads,
    /// Whether `wrk` measures it; `wrk` cannot speak SOCKS itself.
    pub has_rate: bool,
    /// Whether set-up times are measured.
    pub has_times: bool,
}

const fn row(name: &'static str, peer: &'static str, model: Model, paper: Overheads) -> Row {
    Row { name, peer, model, paper, has_rate: true, has_times: true }
}

/// The row that all others are compared with.
pub(super) const NO_PROXY: &str = "no proxy";
/// The paper's reverse proxy.
pub(super) const NGINX: &str = "nginx";
/// Our reverse proxy.
pub(super) const OUR_REVERSE: &str = "ours, reverse";
/// Our redirector and proxy, the request in the first flight.
pub(super) const OUR_SOCKS6_DATA: &str = "ours, SOCKS6 with data";
/// Our redirector and proxy, as the paper's SOCKS6.
pub(super) const OUR_SOCKS6: &str = "ours, SOCKS6";
/// Our redirector and far side, joined by a QUIC connection that is open before the first request.
pub(super) const OUR_TUNNEL: &str = "ours, tunnel";
/// The same if UDP is blocked.
pub(super) const OUR_TUNNEL_TLS: &str = "ours, tunnel over TLS";
/// The kernel path: the kernel rewrites addresses.
pub(super) const OUR_KERNEL_PATH: &str = "ours, kernel path";
/// The paper's redirector and proxy.
pub(super) const SOCKSX: [&str; 2] = ["socksx SOCKS5", "socksx SOCKS6"];
/// dante behind Debian's redirector, redsocks.
pub(super) const DANTE_PAIR: &str = "redsocks and dante";
/// Relays that open one connection to the server for each of the client's.
pub(super) const RELAYS: [&str; 3] = ["nginx stream", "HAProxy", "HAProxy splice"];

/// The limits: the smallest programs that could do the same, and the kernel alone. No relay can be cheaper. In this
/// order: the limit of our reverse proxy, of our redirector with its proxy, and of our kernel path.
pub(super) const LIMITS: [&str; 3] = ["limit: bare relay", "limit: bare pair", "limit: nft DNAT"];

/// The rows in the order of the tables.
pub(super) const ROWS: &[Row] = &[
    row(NO_PROXY, "direct", Model::NO_PROXY, paper::NONE),
    row(NGINX, "nginx http, close", Model::proxied(2, 2), paper::NGINX),
    Row {
        has_rate: false,
        ..row("dante, httping's SOCKS5", "dante S5", Model::proxied(4, 2), paper::SOCKS5)
    },
    row(SOCKSX[0], "socksx 0.1.0 pair S5", Model::proxied(4, 2), paper::SOCKS5),
    row(SOCKSX[1], "socksx 0.1.0 pair S6", Model::proxied(3, 2), paper::SOCKS6),
    Row { has_times: false, ..row(DANTE_PAIR, "redsocks + dante", Model::proxied(4, 2), paper::NONE) },
    Row { has_times: false, ..row(RELAYS[0], "nginx stream", Model::proxied(2, 2), paper::NONE) },
    Row { has_times: false, ..row(RELAYS[1], "HAProxy tcp", Model::proxied(2, 2), paper::NONE) },
    Row { has_times: false, ..row(RELAYS[2], "HAProxy splice", Model::proxied(2, 2), paper::NONE) },
    row(OUR_REVERSE, "ours reverse", Model::proxied(2, 2), paper::NGINX),
    row("ours, SOCKS5", "ours pair S5", Model::proxied(4, 2), paper::SOCKS5),
    // Our redirector sends the client's bytes behind the request, and does not wait for the reply.
    row(OUR_SOCKS6, "ours pair S6, no data", Model::proxied(2, 2), paper::SOCKS6),
    row(OUR_SOCKS6_DATA, "ours pair S6", Model::proxied(2, 2), paper::SOCKS6),
    // The near side answers connect beside the client; destination and request are one flight to the far side.
    row(OUR_TUNNEL, "ours tunnel", Model::proxied(1, 2), paper::NONE),
    Row { has_rate: false, ..row(OUR_TUNNEL_TLS, "ours tunnel, TLS", Model::proxied(1, 2), paper::NONE) },
    row(OUR_KERNEL_PATH, "ours kernel path", Model::proxied(2, 2), paper::NONE),
    Row { has_times: false, ..row(LIMITS[0], "bare reverse", Model::proxied(2, 2), paper::NONE) },
    Row { has_times: false, ..row(LIMITS[1], "bare pair S6", Model::proxied(2, 2), paper::NONE) },
    Row { has_times: false, ..row(LIMITS[2], "nft DNAT", Model::proxied(2, 2), paper::NONE) },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers;

    #[test]
    fn every_row_is_a_peer_and_names_are_unique() {
        for (at, row) in ROWS.iter().enumerate() {
            assert!(peers::find(row.peer).is_some(), "{}", row.peer);
            assert!(ROWS.iter().skip(at + 1).all(|other| other.name != row.name), "{}", row.name);
        }
        for name in SOCKSX.iter().chain(&RELAYS).chain(&LIMITS).chain(&[
            DANTE_PAIR,
            OUR_REVERSE,
            OUR_SOCKS6,
            NGINX,
            OUR_TUNNEL,
        ]) {
            assert!(ROWS.iter().any(|row| row.name == *name), "{name}");
        }
    }
}
