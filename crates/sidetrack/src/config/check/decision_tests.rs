//! `[[test]]`: decisions that the rules must make, written beside the rules.

use super::super::{At, Listener, Question, raw};
use super::super::{Problem, nearest};
use super::{Check, rules};
use sidetrack_core::carrier::Hop;
use sidetrack_core::flow::{Flow, HostName, Process};
use sidetrack_core::policy::{Action, Explanation, Policy};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// A decision test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionTest {
    /// The flow.
    pub flow: Flow,
    /// The host name in its first bytes.
    pub host: Option<HostName>,
    /// What is expected.
    pub expect: Expectation,
}

/// What a decision test expects; `None` means anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expectation {
    /// The rule that decides, or `default`.
    pub rule: Option<String>,
    /// Whether the flow is carried.
    pub carried: Option<bool>,
    /// The carrier as text, without credentials.
    pub carrier: Option<String>,
}

impl fmt::Display for Expectation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        match self.rule.as_deref() {
            Some("default") => parts.push("no rule to match".to_owned()),
            Some(rule) => parts.push(format!("rule '{rule}'")),
            None => {}
        }
        match self.carried {
            Some(true) => parts.push("it to be carried".to_owned()),
            Some(false) => parts.push("it to be denied".to_owned()),
            None => {}
        }
        parts.extend(self.carrier.as_ref().map(|carrier| format!("carrier {carrier}")));
        f.write_str(&parts.join(" and "))
    }
}

impl DecisionTest {
    /// Returns the policy's decision if it differs from the expected one.
    pub fn failure(&self, policy: &Policy) -> Option<Explanation> {
        let explanation = policy.explain(&self.flow, self.host.as_ref());
        let verdict = &explanation.verdict;
        let rule = verdict.rule.as_deref().unwrap_or("default");
        let carrier = match &verdict.action {
            Action::Deny => None,
            Action::Carry(carry) => Some(carry.carrier.to_string()),
        };
        let holds = self.expect.rule.as_deref().is_none_or(|expected| expected == rule)
            && self.expect.carried.is_none_or(|expected| expected == carrier.is_some())
            && self.expect.carrier.as_ref().is_none_or(|expected| Some(expected) == carrier.as_ref());
        (!holds).then_some(explanation)
    }
}

impl Check<'_> {
    /// Reads and runs the tests.
    pub(super) fn tests(
        &mut self,
        tests: &[At<raw::Test>],
        listeners: &[Option<Listener>],
        policy: &Policy,
    ) -> Vec<DecisionTest> {
        let mut read = Vec::new();
        for raw in tests {
            let (Some(flow), Some(expect)) = (&raw.flow, &raw.expect) else {
                let help = "write `flow = { dst = \"192.0.2.1:80\" }` and `expect = { rule = \"…\" }`";
                self.error(raw.span(), "a test needs `flow` and `expect`", help);
                continue;
            };
            let asked = self.test_flow(flow, listeners);
            let expect_checked = self.expectation(expect, policy);
            let Some(((flow_checked, host), expected)) = asked.zip(expect_checked) else { continue };
            let test = DecisionTest { flow: flow_checked, host, expect: expected };
            if let Some(explanation) = test.failure(policy) {
                let message =
                    format!("expected {}, but the flow is {}", test.expect, explanation.verdict.summary());
                let mut help = String::from("the rules, in order:");
                for line in &explanation.trace {
                    help.push_str(&format!("\n{line}"));
                }
                let problem = Problem::error(expect.span(), message, help);
                self.problems.push(problem.and(flow.span(), "this flow"));
            }
            read.push(test);
        }
        read
    }

    fn test_flow(
        &mut self,
        raw: &At<raw::TestFlow>,
        listeners: &[Option<Listener>],
    ) -> Option<(Flow, Option<HostName>)> {
        let listener = match &raw.listener {
            Some(name) => Some(self.listener_named(name, listeners)?),
            None => match listeners {
                [Some(only)] => Some(only),
                _ => None,
            },
        };
        let host = match &raw.host {
            Some(host) => Some(self.host_name(host)?),
            None => None,
        };
        let orig_dst = match &raw.dst {
            Some(dst) => Some(self.destination(dst)?),
            None => None,
        };
        let uid = match &raw.user {
            Some(user) => Some(self.uid(user, user.span())?),
            None => None,
        };
        let question = Question {
            listener,
            intercept: raw.intercept.as_deref().map(|kind| rules::intercept(*kind)),
            protocol: raw.protocol.as_deref().copied().map(rules::protocol),
            client: self.source(raw.src.as_ref())?,
            orig_dst,
            host,
            process: Process {
                name: raw.process.as_ref().map(|name| name.to_string()),
                uid,
                ..Process::default()
            },
            socks_user: raw.socks_user.as_ref().map(|user| user.to_string()),
        };
        let Some(flow) = question.flow() else {
            let help = "write `dst = \"192.0.2.1:80\"`, or a `host` that the reverse listener knows";
            self.error(raw.span(), "this flow has no destination", help);
            return None;
        };
        Some((flow, question.host))
    }

    fn host_name(&mut self, at: &At<String>) -> Option<HostName> {
        match at.parse() {
            Ok(host) => Some(host),
            Err(error) => {
                let error: sidetrack_core::flow::HostNameError = error;
                self.error(at.span(), error.to_string(), "write a name such as \"www.example.nl\"");
                None
            }
        }
    }

    fn source(&mut self, at: Option<&At<String>>) -> Option<SocketAddr> {
        let Some(at) = at else { return Some((Ipv4Addr::LOCALHOST, 0).into()) };
        let address = self.numbered(at)?.parse::<SocketAddr>().ok();
        let address = address.or_else(|| at.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, 0)));
        if address.is_none() {
            let help = "such as \"192.0.2.1\" or \"[2001:db8::1]:4711\"";
            self.error(at.span(), format!("'{}' is not an address", at.as_str()), help);
        }
        address
    }

    fn expectation(&mut self, raw: &At<raw::Expect>, policy: &Policy) -> Option<Expectation> {
        if raw.rule.is_none() && raw.action.is_none() && raw.carrier.is_none() {
            self.error(raw.span(), "this test expects nothing", "write `expect = { rule = \"…\" }`");
            return None;
        }
        if let Some(rule) = &raw.rule {
            let names = || policy.rules().iter().map(|rule| &*rule.name).chain(["default"]);
            if !names().any(|name| name == rule.as_str()) {
                let help = nearest(rule, names()).map_or_else(
                    || format!("the rules are: {}", names().collect::<Vec<_>>().join(", ")),
                    |near| format!("did you mean \"{near}\"?"),
                );
                self.error(rule.span(), format!("there is no rule '{}'", rule.as_str()), help);
                return None;
            }
        }
        let carrier = match &raw.carrier {
            None => None,
            Some(list) => {
                let mut hops = Vec::new();
                for text in list.items() {
                    let hop = if text.as_str() == "direct" || text.starts_with("tunnel:") {
                        Ok(text.to_string())
                    } else {
                        self.numbered(text)?.parse::<Hop>().map(|hop| hop.to_string())
                    };
                    match hop {
                        Ok(hop) => hops.push(hop),
                        Err(_) => {
                            self.error(
                                text.span(),
                                "this is not a hop",
                                "write it as in the rule's `carrier`",
                            );
                            return None;
                        }
                    }
                }
                Some(hops.join(" -> "))
            }
        };
        Some(Expectation {
            rule: raw.rule.as_ref().map(|rule| rule.to_string()),
            carried: raw.action.as_deref().map(|action| *action == raw::ExpectAction::Carry),
            carrier,
        })
    }
}
