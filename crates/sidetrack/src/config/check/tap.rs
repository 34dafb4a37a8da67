//! `[tap]`.

use super::super::tap::{authority, exact_host};
use super::super::{At, Listener, ListenerKind, Tap, raw};
use super::Check;
use crate::tls::Roots;
use sidetrack_core::flow::Host;
use sidetrack_core::http::tap::TapRules;
use sidetrack_core::policy::HostPattern;
use std::sync::Arc;

impl Check<'_> {
    /// Checks which connections are intercepted. Leaves `self.tap` empty if there is no `[tap]` or if it is
    /// wrong.
    pub(super) fn read_tap(&mut self, raw: Option<&At<raw::Tap>>) {
        let Some(raw) = raw else { return };
        self.has_tap = true;
        let Some(ca) = &raw.ca else {
            let help = "`sidetrack ca init --dir ca --name DOMAIN` makes one: write `ca = \"ca\"`";
            self.error(raw.span(), "[tap] needs `ca`, the folder of an authority", help);
            return;
        };
        let signer = match authority(&self.surroundings.resolve(ca)) {
            Ok(signer) => Arc::new(signer),
            Err(error) => return self.error(ca.span(), error.to_string(), error.help()),
        };
        let written = TapRules::default();
        let rules = TapRules {
            bypass: raw.bypass.as_ref().map(|list| self.patterns(list)).unwrap_or_default(),
            ports: raw.ports.as_ref().map_or(written.ports, |ports| self.ports(ports)),
            cover_names: match &raw.cover_names {
                Some(list) => self.patterns(list),
                None => written.cover_names,
            },
            only: None,
        };
        let trust_pem: Option<Arc<str>> = match &raw.trust {
            None => None,
            Some(at) => match std::fs::read_to_string(self.surroundings.resolve(at)) {
                Ok(text) => Some(text.into()),
                Err(error) => {
                    let help = "a relative path starts from the folder of this file";
                    return self.error(at.span(), format!("cannot read '{}': {error}", at.as_str()), help);
                }
            },
        };
        let unverified_hosts =
            raw.unverified_hosts.as_ref().map(|list| self.unverified(list)).unwrap_or_default();
        let roots = match Roots::of_system_and(trust_pem.as_deref()) {
            Ok(roots) => roots.without_verifying(unverified_hosts.iter().cloned()),
            Err(error) => {
                let span = raw.trust.as_ref().map_or(raw.span(), At::span);
                return self.error(span, error.to_string(), "name a file with CERTIFICATEs in PEM");
            }
        };
        let keylog = raw.keylog.as_ref().map(|at| {
            self.warning(
                at.span(),
                "whoever reads this file reads all that was opened",
                "take the key out once you have seen what you were looking for",
            );
            self.surroundings.resolve(at)
        });
        let har = raw.har.as_ref().map(|at| self.surroundings.resolve(at));
        let bodies = raw.har_bodies_max_bytes.as_ref();
        if let Some(at) = bodies.filter(|_| raw.har.is_none()) {
            self.error(at.span(), "there is no file for content", "name it with har = \"./requests.har\"");
        }
        let bodies = self.number(bodies.filter(|at| ***at != 0), 1..=Tap::HAR_BODIES_MAX, " bytes");
        self.tap = Some(Arc::new(Tap {
            signer,
            rules,
            trust_pem,
            unverified_hosts,
            roots,
            keylog,
            har,
            har_bodies_max: bodies.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0),
            secrets: None,
        }));
    }

    fn unverified(&mut self, list: &super::super::List<String>) -> Vec<Host> {
        let mut hosts = Vec::new();
        for at in list.items() {
            match exact_host(at) {
                Ok(host) => hosts.push(host),
                Err(error) => {
                    let help = "write a name such as \"dev.example\" or an address, without port and pattern";
                    self.error(at.span(), error, help);
                }
            }
        }
        if !hosts.is_empty() {
            self.warning(
                list.span(),
                "the certificates of these servers are not verified: anyone on the path can pose as them",
                "name the server's own certificate in `trust` instead",
            );
        }
        hosts
    }

    fn patterns(&mut self, list: &super::super::List<String>) -> Vec<HostPattern> {
        list.items().iter().filter_map(|item| self.host_pattern(item, item.span())).collect()
    }

    /// Returns the settings of TLS interception if this listener intercepts connections.
    pub(super) fn tap_of(&mut self, listen: &raw::Listen) -> Option<Arc<Tap>> {
        let at = listen.tap.as_ref().filter(|tap| ***tap)?;
        if !self.has_tap {
            let help = "write a table [tap] with `ca`, the folder of `sidetrack ca init`";
            self.error(at.span(), "nothing says in whose name connections are opened", help);
        }
        self.tap.clone()
    }

    /// Warns if no listener uses the table: it is probably a mistake.
    pub(super) fn tap_is_used(&mut self, raw: Option<&At<raw::Tap>>, listeners: &[Option<Listener>]) {
        let Some(raw) = raw else { return };
        let is_used = |listener: &Listener| match &listener.kind {
            ListenerKind::Http(http) => http.tap.is_some(),
            ListenerKind::Redirect(redirect) => redirect.http.as_ref().is_some_and(|http| http.tap.is_some()),
            ListenerKind::Tproxy(tproxy) => tproxy.http.as_ref().is_some_and(|http| http.tap.is_some()),
            _ => false,
        };
        // `run --tap` uses the table without a listener.
        let listens = listeners.iter().flatten().next().is_some();
        if listens && self.tap.is_some() && !listeners.iter().flatten().any(is_used) {
            let help = "write `tap = true` at a listener of kind http, redirect or tproxy";
            self.warning(raw.span(), "no listener opens connections", help);
        }
    }
}
