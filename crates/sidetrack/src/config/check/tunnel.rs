//! `[[tunnel]]`, and the keys that a tunnel listener shares with it.

use super::super::nearest;
use super::super::{At, List, Listener, Transport, Tunnel, raw};
use super::Check;
use crate::tls::{Mutual, Peer, Trust};
use sidetrack_core::flow::{Destination, HostName, Protocol};
use sidetrack_core::tunnel::ALPN;
use std::ops::Range;
use std::sync::Arc;

/// Most addresses of one tunnel. Each worker holds a connection to each of them.
const PATHS_MAX: usize = 8;

/// The keys of both ends of a tunnel: the own identity, and how the peer is checked.
struct Keys<'a> {
    identity: Option<&'a At<String>>,
    ca: Option<&'a At<String>>,
    pins: Option<&'a List<String>>,
}

impl Check<'_> {
    /// Checks the tunnels. Wrong ones are left out.
    pub(super) fn tunnels(
        &mut self,
        tunnels: &[At<raw::Tunnel>],
        listeners: &[Option<Listener>],
    ) -> Vec<Arc<Tunnel>> {
        let named =
            tunnels.iter().filter_map(|tunnel| tunnel.name.as_ref()).map(|name| (name.as_str(), name.span()));
        self.unique(named, "tunnel");
        let checked = tunnels.iter().map(|tunnel| self.tunnel(tunnel, listeners)).collect::<Vec<_>>();
        checked.into_iter().flatten().map(Arc::new).collect()
    }

    fn tunnel(&mut self, raw: &At<raw::Tunnel>, listeners: &[Option<Listener>]) -> Option<Tunnel> {
        let name: Option<Arc<str>> = raw.name.as_ref().map(|name| self.name(name).into());
        match &name {
            Some(name) => self.tunnels.push(name.clone()),
            None => {
                let help = "write `name = \"…\"`: rules say `carrier = \"tunnel:<name>\"`";
                self.error(raw.span(), "this tunnel lacks a name", help);
            }
        }
        let paths = self.paths(raw, listeners);
        let keys = Keys { identity: raw.identity.as_ref(), ca: raw.ca.as_ref(), pins: raw.pins.as_ref() };
        let mutual = self.mutual(&keys, raw.span());
        if let (Some(at), None) = (&raw.server_name, &raw.ca) {
            let help = "with `pins` the key alone says who it is: take it out";
            self.error(at.span(), "`server_name` goes with `ca`", help);
        }
        let server_name = raw.server_name.as_ref().and_then(|at| match at.parse::<HostName>() {
            Ok(name) => Some(name),
            Err(error) => {
                self.error(at.span(), error.to_string(), "such as \"proxy.example\"");
                None
            }
        });
        let keepalive_ms = self.number(raw.keepalive_ms.as_ref(), 100..=60_000, " milliseconds");
        let lost_after_ms = self.number(raw.lost_after_ms.as_ref(), 500..=600_000, " milliseconds");
        let (keepalive_ms, lost_after_ms) =
            (keepalive_ms.unwrap_or(Tunnel::KEEPALIVE_MS), lost_after_ms.unwrap_or(Tunnel::LOST_AFTER_MS));
        if lost_after_ms <= keepalive_ms {
            let span = raw.lost_after_ms.as_ref().or(raw.keepalive_ms.as_ref()).map_or(raw.span(), At::span);
            let message =
                format!("a path with a sign of life every {keepalive_ms} ms would be lost in between");
            self.error(span, message, "let `lost_after_ms` be two or three times `keepalive_ms`");
        }
        let transport = match raw.transport.as_deref() {
            None | Some(raw::Transport::Auto) => Transport::Auto,
            Some(raw::Transport::Quic) => Transport::Quic,
            Some(raw::Transport::Tls) => Transport::Tls,
        };
        Some(Tunnel {
            name: name?,
            paths: Some(paths).filter(|paths| !paths.is_empty())?,
            server_name,
            mutual: mutual?,
            transport,
            keepalive_ms,
            lost_after_ms,
        })
    }

    fn paths(&mut self, raw: &At<raw::Tunnel>, listeners: &[Option<Listener>]) -> Vec<Destination> {
        let Some(addresses) = &raw.address else {
            let help = "write `address = \"host:port\"`: where the far side listens";
            self.error(raw.span(), "this tunnel lacks an address", help);
            return Vec::new();
        };
        if addresses.items().is_empty() || addresses.items().len() > PATHS_MAX {
            let help = format!("give 1 to {PATHS_MAX} addresses of the far side");
            self.error(addresses.span(), format!("a tunnel with {} paths", addresses.items().len()), help);
        }
        let mut paths = Vec::new();
        for at in addresses.items() {
            if let Some(path) = self.destination(at) {
                self.loop_to((&path, Protocol::Tcp), at.span(), listeners);
                paths.push(path);
            }
        }
        paths
    }

    /// Checks the keys of a tunnel listener.
    pub(super) fn far_side(&mut self, listen: &At<raw::Listen>) -> Option<Mutual> {
        let keys =
            Keys { identity: listen.identity.as_ref(), ca: listen.ca.as_ref(), pins: listen.pins.as_ref() };
        self.mutual(&keys, listen.span())
    }

    fn mutual(&mut self, keys: &Keys<'_>, span: Range<usize>) -> Option<Mutual> {
        let trust = self.trust(keys, span.clone());
        let Some(identity) = keys.identity else {
            let help = "`sidetrack tunnel key --name NAME` makes one: write `identity = \"NAME.pem\"`";
            self.error(
                span,
                "a tunnel needs an `identity`, the file with this host's certificate and key",
                help,
            );
            return None;
        };
        let pem = self.secret_lines(identity, identity.span())?.join("\n");
        match Mutual::new(&pem, trust?, ALPN) {
            Ok(mutual) => Some(mutual),
            Err(error) => {
                let message = format!("'{}': {error}", identity.as_str());
                self.error(identity.span(), message, "`sidetrack tunnel key --name NAME` makes one");
                None
            }
        }
    }

    fn trust(&mut self, keys: &Keys<'_>, span: Range<usize>) -> Option<Trust> {
        match (keys.ca, keys.pins) {
            (Some(ca), None) => match self.surroundings.secret_file(ca) {
                Ok(file) => Some(Trust::Authority(file.text.into())),
                Err(error) => {
                    let help = "a relative path starts from the folder of this file";
                    self.error(ca.span(), format!("cannot read '{}': {error}", ca.as_str()), help);
                    None
                }
            },
            (None, Some(pins)) => {
                if pins.items().is_empty() {
                    self.error(pins.span(), "this list is empty: no peer would be trusted", "add a pin");
                }
                let mut read = Vec::new();
                for at in pins.items() {
                    match at.parse::<Peer>() {
                        Ok(peer) => read.push(peer),
                        Err(error) => {
                            let message = format!("'{}' is not a pin", at.as_str());
                            self.error(at.span(), message, error.to_string());
                        }
                    }
                }
                Some(Trust::Peers(read))
            }
            (Some(ca), Some(_)) => {
                self.error(ca.span(), "`ca` and `pins` exclude each other", "take one of them out");
                None
            }
            (None, None) => {
                let help = "write `pins = [\"sha256//…\"]` with what `sidetrack tunnel pin` prints at the other end, or \
                            `ca = \"ca.pem\"`";
                self.error(span, "nothing says which peer to trust", help);
                None
            }
        }
    }

    /// Returns a tunnel by name. Reports an error if there is none.
    pub(super) fn tunnel_named(&mut self, name: &str, span: Range<usize>) -> Option<Arc<str>> {
        if let Some(found) = self.tunnels.iter().find(|tunnel| ***tunnel == *name) {
            return Some(found.clone());
        }
        let help = match nearest(name, self.tunnels.iter().map(|name| &**name)) {
            Some(near) => format!("did you mean \"tunnel:{near}\"?"),
            None if self.tunnels.is_empty() => "there is no [[tunnel]] in this file".to_owned(),
            None => format!("the tunnels are: {}", self.tunnels.join(", ")),
        };
        self.error(span, format!("there is no tunnel '{name}'"), help);
        None
    }
}
