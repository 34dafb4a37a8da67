//! Which connections are accepted before the far side has accepted, and why.

use super::{Config, Listener, ListenerKind};
use serde::Serialize;
use sidetrack_core::flow::{Intercept, Protocol};
use sidetrack_core::policy::{Action, Carry, Connect};
use std::fmt;

/// Connections that are accepted early. Rules that say `connect = "early"` are not among them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Early {
    /// The listener. `None`: `sidetrack run` with this configuration.
    pub listener: Option<String>,
    /// The rules; empty: the default, or whatever the rule is.
    pub rules: Vec<String>,
    /// The reason.
    pub why: &'static str,
}

impl Listener {
    /// Says why no connection of this listener is held until the far side has accepted. `None`: rules decide.
    pub fn early_reason(&self) -> Option<&'static str> {
        let is_caught = matches!(self.kind, ListenerKind::Redirect(_) | ListenerKind::Tproxy(_));
        if !is_caught || self.protocol != Protocol::Tcp {
            Some("its clients do not connect to their servers' addresses over TCP")
        } else if self.kind.http().is_some() {
            Some("each request is a flow of its own (`http`, `tap`)")
        } else if !self.accept_proxy_protocol.is_empty() {
            Some("the client's address stands in the first bytes (`accept_proxy_protocol`)")
        } else {
            None
        }
    }
}

impl Config {
    /// Returns what is accepted early by listeners of the kinds redirect and tproxy.
    pub fn accepted_early(&self) -> Vec<Early> {
        let is_caught = |one: &&Listener| {
            one.protocol == Protocol::Tcp
                && matches!(one.kind, ListenerKind::Redirect(_) | ListenerKind::Tproxy(_))
        };
        let of_listener = |one: &Listener| {
            let listener = Some(one.name.to_string());
            match one.early_reason() {
                Some(why) => vec![Early { listener, rules: Vec::new(), why }],
                None => self.by_rules(one.kind.intercept(), listener),
            }
        };
        self.listeners.iter().filter(is_caught).flat_map(of_listener).collect()
    }

    /// Returns what is accepted early by `sidetrack run` with this configuration.
    pub fn accepted_early_by_run(&self) -> Vec<Early> {
        self.by_rules(Intercept::Run, None)
    }

    /// The rules with a reason; one entry for each reason.
    fn by_rules(&self, intercept: Intercept, listener: Option<String>) -> Vec<Early> {
        let mut found: Vec<Early> = Vec::new();
        let reason = |action: &Action| match action {
            Action::Carry(carry) => reason(carry, intercept),
            Action::Deny => None,
        };
        for rule in self.policy.rules() {
            let Some(why) = reason(&rule.action) else { continue };
            match found.iter_mut().find(|early| early.why == why) {
                Some(early) => early.rules.push(rule.name.to_string()),
                None => {
                    let rules = vec![rule.name.to_string()];
                    found.push(Early { listener: listener.clone(), rules, why });
                }
            }
        }
        if let Some(why) = reason(self.policy.default_action())
            && found.iter().all(|early| early.why != why)
        {
            found.push(Early { listener, rules: Vec::new(), why });
        }
        found
    }
}

fn reason(carry: &Carry, intercept: Intercept) -> Option<&'static str> {
    carry.early_reason(intercept).filter(|_| carry.connect != Connect::Early)
}

impl fmt::Display for Early {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.listener {
            Some(listener) => write!(f, "'{listener}'")?,
            None => f.write_str("under `run`")?,
        }
        if !self.rules.is_empty() {
            write!(f, ", rules {}", self.rules.join(", "))?;
        }
        write!(f, ": {}", self.why)
    }
}
