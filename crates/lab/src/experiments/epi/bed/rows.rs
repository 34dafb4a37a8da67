//! The rows of a test bed, and what runs on the proxy's host for each.

use std::net::SocketAddr;

use anyhow::Result;

use super::SIDETRACK;
use crate::bed::{Host, Remote};
use crate::experiments::epi::paper::Model;
use crate::load::Via;

/// What a row does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// The client dials the server.
    Direct,
    /// nginx of the proxy's host, as in the paper.
    Nginx,
    /// Our port that leads to the server.
    Reverse,
    /// Our SOCKS listener, and a client that speaks SOCKS.
    Socks,
    /// Our SOCKS listener, and an unmodified client under `sidetrack run`.
    Run,
}

/// A row of the tables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub name: &'static str,
    pub way: Way,
    /// The protocol of the load generator.
    pub via: Via,
    pub model: Model,
}

const fn row(name: &'static str, way: Way, via: Via, model: Model) -> Row {
    Row { name, way, via, model }
}

/// The row that all others are compared with.
pub(super) const NO_PROXY: &str = "no proxy";

pub(super) const ROWS: &[Row] = &[
    row(NO_PROXY, Way::Direct, Via::Plain, Model::NO_PROXY),
    row("nginx", Way::Nginx, Via::Plain, Model::proxied(2, 2)),
    row("ours, reverse", Way::Reverse, Via::Plain, Model::proxied(2, 2)),
    row("ours, SOCKS5", Way::Socks, Via::Socks5, Model::proxied(4, 2)),
    row("ours, SOCKS6", Way::Socks, Via::Socks6Draft { initial_data: false }, Model::proxied(3, 2)),
    row("ours, SOCKS6 with data", Way::Socks, Via::Socks6Draft { initial_data: true }, Model::proxied(2, 2)),
    // `run` answers connect beside the client, and sends request and data in one flight.
    row("ours, unmodified client", Way::Run, Via::Plain, Model::proxied(2, 2)),
];

/// Returns the names of all rows as a list.
pub(super) fn names() -> String {
    ROWS.iter().map(|row| row.name).collect::<Vec<_>>().join("; ")
}

impl Row {
    /// Returns true if one of these words is in its name, or if there are none. The row without a proxy is always chosen.
    pub(super) fn is_chosen(&self, only: &[String]) -> bool {
        only.is_empty()
            || (self.name == NO_PROXY
                && ROWS.iter().any(|row| only.iter().any(|word| row.name.contains(word))))
            || only.iter().any(|word| self.name.contains(word))
    }

    /// Starts its program on the proxy's host.
    pub(super) fn start(
        &self,
        proxy: &Host,
        relay: SocketAddr,
        server: SocketAddr,
    ) -> Result<Option<Remote>> {
        match self.way {
            Way::Direct => Ok(None),
            Way::Nginx => {
                proxy.require("nginx")?;
                proxy.write("nginx.conf", &nginx(proxy.folder(), relay, server))?;
                let config = format!("{}/nginx.conf", proxy.folder());
                proxy.start("nginx", &["nginx", "-e", "stderr", "-c", &config]).map(Some)
            }
            Way::Reverse => {
                let listener = format!("kind = \"reverse\"\naddress = \"{relay}\"\nto = \"{server}\"");
                ours(proxy, &listener, server).map(Some)
            }
            Way::Socks | Way::Run => {
                ours(proxy, &format!("kind = \"socks\"\naddress = \"{relay}\""), server).map(Some)
            }
        }
    }
}

/// Starts our program. Its rule admits only the server, so that no other host can use the proxy meanwhile.
fn ours(proxy: &Host, listener: &str, server: SocketAddr) -> Result<Remote> {
    let config = format!(
        "version = 1\ndefault = \"deny\"\n[admin]\nsocket = \"none\"\n[record]\nto = \"none\"\n[[listen]]\n{listener}\n\
         [[rule]]\nname = \"bed\"\nmatch = {{ to = \"{}\", port = {} }}\ncarrier = \"direct\"\nkernel = \"never\"\n",
        server.ip(),
        server.port()
    );
    proxy.write("sidetrack.toml", &config)?;
    proxy.start(SIDETRACK, &[&format!("./{SIDETRACK}"), "up", "-c", "sidetrack.toml"])
}

/// The paper's nginx: one worker, a new connection to the server for each request.
fn nginx(folder: &str, relay: SocketAddr, server: SocketAddr) -> String {
    format!(
        "daemon off; user root; worker_processes 1; pid {folder}/nginx.pid; error_log stderr warn;
events {{ worker_connections 1000; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 3600;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen {relay};
    location / {{ proxy_pass http://{server}; proxy_set_header Connection close; }} }}
}}
"
    )
}
