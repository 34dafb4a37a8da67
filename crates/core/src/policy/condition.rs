//! The conditions of a rule.

use super::decide::Seen;
use super::host_list::HostList;
use super::url::UrlPattern;
use crate::flow::{Flow, Host, HostName, HostNameError, Intercept, Protocol};
use crate::net::{IpSet, PortSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Conditions that must all hold. A match without conditions matches every flow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    conditions: Vec<Condition>,
}

/// One condition; a list inside it holds alternatives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The client's address is in the set.
    From(IpSet),
    /// The destination's address is in the set. A destination that is known by name only is not in any set.
    To(IpSet),
    /// The destination's port is in the set.
    Port(PortSet),
    /// One of these listeners caught the flow.
    Listener(Vec<Arc<str>>),
    /// The flow was caught in one of these ways.
    Intercept(Vec<Intercept>),
    /// The flow has this transport protocol.
    Protocol(Protocol),
    /// One of these users authenticated at our SOCKS listener.
    SocksUser(Vec<Box<str>>),
    /// The base name of the executable is one of these; local flows only.
    Process(Vec<Box<str>>),
    /// The user id that owns the client's socket is one of these; local flows only.
    Uid(Vec<u32>),
    /// The host name matches one of these patterns. If it is unknown, it is looked for in the first bytes.
    Host(Vec<HostPattern>),
    /// The destination is a name that the client asked for and that matches one of these patterns. A name that the first
    /// bytes claim does not count. Only the lists of `run` make this condition.
    AskedName(Vec<HostPattern>),
    /// The host name is in one of these lists. If it is unknown, it is looked for as for [`Condition::Host`].
    HostFile(Vec<HostFile>),
    /// The host name contains one of these words, in lower case. If it is unknown, it is looked for as for
    /// [`Condition::Host`].
    HostContains(Vec<Box<str>>),
    /// The URL matches one of these patterns, in which `*` stands for any text and `?` for one character. It applies
    /// only to requests whose URL is visible, not to encrypted traffic that is not intercepted. The normalised URL is
    /// compared (RFC 3986 Sec. 6.2.2). A rule that denies also compares the URL as it was written.
    Url(Vec<UrlPattern>),
}

/// A list of hosts, and the file that it was read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFile {
    /// The file, as the configuration names it.
    pub path: Box<str>,
    /// The content of the file.
    pub list: Arc<HostList>,
}

/// Whether a condition holds, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Truth {
    Holds,
    Fails,
    NeedsProcess,
    NeedsFirstBytes,
}

/// Returns the host name that rules see: the flow's name, otherwise the name in the destination, otherwise the name
/// in the first bytes.
fn known_host<'a>(flow: &'a Flow, seen: Seen<'a>) -> Option<&'a HostName> {
    let destination = match &flow.orig_dst.host {
        Host::Name(name) => Some(name),
        Host::Ip(_) => None,
    };
    flow.host.as_ref().or(destination).or(match seen {
        Seen::FirstBytes(name) | Seen::Request { host: name, .. } => name,
        Seen::Nothing => None,
    })
}

impl Condition {
    /// Returns the key of `match` in the configuration.
    pub const fn key(&self) -> &'static str {
        match self {
            Self::From(_) => "from",
            Self::To(_) => "to",
            Self::Port(_) => "port",
            Self::Listener(_) => "listener",
            Self::Intercept(_) => "intercept",
            Self::Protocol(_) => "protocol",
            Self::SocksUser(_) => "socks_user",
            Self::Process(_) => "process",
            Self::Uid(_) => "user",
            Self::Host(_) => "host",
            Self::AskedName(_) => "name",
            Self::HostFile(_) => "host_file",
            Self::HostContains(_) => "host_contains",
            Self::Url(_) => "url",
        }
    }

    /// Returns the cost of checking. Cheap conditions come first. Those that need the process, and then those that
    /// need the first bytes, come last.
    const fn cost(&self) -> u8 {
        match self {
            Self::Listener(_) | Self::Intercept(_) | Self::Protocol(_) => 0,
            Self::Port(_) => 1,
            Self::From(_) | Self::To(_) | Self::AskedName(_) => 2,
            Self::SocksUser(_) => 3,
            Self::Process(_) | Self::Uid(_) => 4,
            Self::Host(_) | Self::HostFile(_) | Self::HostContains(_) => 5,
            Self::Url(_) => 6,
        }
    }

    /// Whether this condition holds for every flow for which `other` holds.
    fn covers(&self, other: &Self) -> bool {
        fn within<T: PartialEq>(outer: &[T], inner: &[T]) -> bool {
            inner.iter().all(|item| outer.contains(item))
        }
        match (self, other) {
            (Self::From(outer), Self::From(inner)) | (Self::To(outer), Self::To(inner)) => {
                outer.covers(inner)
            }
            (Self::Port(outer), Self::Port(inner)) => outer.covers(inner),
            (Self::Listener(outer), Self::Listener(inner)) => within(outer, inner),
            (Self::Intercept(outer), Self::Intercept(inner)) => within(outer, inner),
            (Self::Protocol(outer), Self::Protocol(inner)) => outer == inner,
            (Self::SocksUser(outer), Self::SocksUser(inner))
            | (Self::Process(outer), Self::Process(inner)) => within(outer, inner),
            (Self::Uid(outer), Self::Uid(inner)) => within(outer, inner),
            (Self::Host(outer) | Self::AskedName(outer), Self::AskedName(inner))
            | (Self::Host(outer), Self::Host(inner)) => {
                inner.iter().all(|one| outer.iter().any(|pattern| pattern.covers(one)))
            }
            (Self::HostFile(outer), Self::HostFile(inner)) => within(outer, inner),
            (Self::HostContains(outer), Self::HostContains(inner)) => {
                inner.iter().all(|one| outer.iter().any(|word| one.contains(&**word)))
            }
            (Self::Url(outer), Self::Url(inner)) => within(outer, inner),
            _ => false,
        }
    }

    pub(super) fn holds(&self, flow: &Flow, seen: Seen<'_>, denies: bool) -> Truth {
        let known = match self {
            Self::From(set) => set.contains(flow.client.ip()),
            Self::To(set) => matches!(flow.orig_dst.host, Host::Ip(ip) if set.contains(ip)),
            Self::Port(set) => set.contains(flow.orig_dst.port),
            Self::Listener(names) => names.contains(&flow.listener),
            Self::Intercept(kinds) => kinds.contains(&flow.intercept),
            Self::Protocol(protocol) => *protocol == flow.protocol,
            Self::SocksUser(users) => {
                flow.user.as_deref().is_some_and(|user| users.iter().any(|one| **one == *user))
            }
            Self::Process(names) => match &flow.process {
                None => return Truth::NeedsProcess,
                Some(process) => match process.name.as_deref() {
                    Some(name) => names.iter().any(|one| **one == *name),
                    None => denies && process.is_hidden,
                },
            },
            Self::Uid(uids) => match &flow.process {
                None => return Truth::NeedsProcess,
                Some(process) => match process.uid {
                    Some(uid) => uids.contains(&uid),
                    None => denies && process.is_hidden,
                },
            },
            Self::AskedName(_) => match &flow.orig_dst.host {
                Host::Name(name) => self.names(name),
                Host::Ip(_) => false,
            },
            Self::Host(_) | Self::HostFile(_) | Self::HostContains(_) => match known_host(flow, seen) {
                Some(host) => self.names(host),
                None if matches!(seen, Seen::Nothing) => return Truth::NeedsFirstBytes,
                None => false,
            },
            Self::Url(patterns) => match seen {
                Seen::Request { url, .. } => patterns.iter().any(|pattern| pattern.fits(url, denies)),
                Seen::Nothing | Seen::FirstBytes(_) => false,
            },
        };
        if known { Truth::Holds } else { Truth::Fails }
    }

    /// Whether a condition on host names holds for this host.
    pub(super) fn names(&self, host: &HostName) -> bool {
        match self {
            Self::Host(patterns) | Self::AskedName(patterns) => {
                patterns.iter().any(|pattern| pattern.matches(host))
            }
            Self::HostFile(files) => files.iter().any(|file| file.list.contains(host)),
            Self::HostContains(words) => contains(host, words),
            _ => false,
        }
    }
}

/// Whether a host name contains one of these words. International words are searched in the Unicode form of the name.
fn contains(host: &HostName, words: &[Box<str>]) -> bool {
    if words.iter().any(|word| host.as_str().contains(&**word)) {
        return true;
    }
    let mut international = words.iter().filter(|word| !word.is_ascii()).peekable();
    international.peek().is_some()
        && host.to_unicode().is_some_and(|written| international.any(|word| written.contains(&**word)))
}

impl Match {
    /// Makes a match of all `conditions`.
    pub fn new(mut conditions: Vec<Condition>) -> Self {
        conditions.sort_by_key(Condition::cost);
        Self { conditions }
    }

    /// Returns the conditions, cheapest first.
    pub fn conditions(&self) -> &[Condition] {
        &self.conditions
    }

    /// Whether this match covers every flow that `other` matches, as far as the conditions alone show.
    pub fn covers(&self, other: &Self) -> bool {
        self.conditions.iter().all(|outer| other.conditions.iter().any(|inner| outer.covers(inner)))
    }

    /// Returns whether a flow fits, before any of its bytes are known. `None` if that depends on the host name in its
    /// first bytes: then [`Match::fits_host`] says so. Unknown processes fit no condition.
    pub fn fits(&self, flow: &Flow) -> Option<bool> {
        match self.first_obstacle(flow, Seen::Nothing, false) {
            None => Some(true),
            Some((_, Truth::NeedsFirstBytes)) => None,
            Some(_) => Some(false),
        }
    }

    /// Returns whether a flow fits whose first bytes named this host, or none, if [`Match::fits`] left that open.
    pub fn fits_host(&self, host: Option<&HostName>) -> bool {
        let by_host = |condition: &&Condition| {
            matches!(condition, Condition::Host(_) | Condition::HostFile(_) | Condition::HostContains(_))
        };
        let mut all = self.conditions.iter().filter(by_host);
        all.all(|condition| host.is_some_and(|host| condition.names(host)))
    }

    /// Returns the first condition that does not certainly hold, and its state. A condition that fails comes before
    /// one that lacks knowledge: do not wait for bytes that cannot change the answer.
    pub(super) fn first_obstacle(
        &self,
        flow: &Flow,
        seen: Seen<'_>,
        denies: bool,
    ) -> Option<(&Condition, Truth)> {
        let mut lacking = None;
        for condition in &self.conditions {
            match condition.holds(flow, seen, denies) {
                Truth::Holds => {}
                Truth::Fails => return Some((condition, Truth::Fails)),
                truth => lacking = lacking.or(Some((condition, truth))),
            }
        }
        lacking
    }
}

/// A host name, or all names below one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostPattern {
    /// This name.
    Exact(HostName),
    /// `*.example.nl`: every name below, at any depth, but not `example.nl` itself. Stored as `.example.nl`.
    Below(Box<str>),
    /// `*`: every flow whose host name is known.
    Any,
}

/// Why a text is not a valid host pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostPatternError {
    /// A star is not the whole first label.
    #[error(
        "'{0}' is not a host pattern: a star replaces only whole labels at the front, as in *.example.nl"
    )]
    Star(String),
    /// The rest of the pattern is not a host name.
    #[error("'{0}' is not a host pattern: {1}")]
    Name(String, HostNameError),
}

impl HostPattern {
    /// Whether `host` matches.
    pub fn matches(&self, host: &HostName) -> bool {
        match self {
            Self::Exact(name) => name == host,
            Self::Below(suffix) => {
                host.as_str().len() > suffix.len() && host.as_str().ends_with(suffix.as_ref())
            }
            Self::Any => true,
        }
    }

    /// Whether this pattern matches every name that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Any, _) => true,
            (_, Self::Any) => false,
            (_, Self::Exact(name)) => self.matches(name),
            (Self::Below(outer), Self::Below(inner)) => inner.ends_with(outer.as_ref()),
            (Self::Exact(_), Self::Below(_)) => false,
        }
    }
}

impl FromStr for HostPattern {
    type Err = HostPatternError;

    fn from_str(text: &str) -> Result<Self, HostPatternError> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let below = text.strip_prefix("*.");
        let name = below.unwrap_or(text);
        if name.contains('*') {
            return Err(HostPatternError::Star(text.to_owned()));
        }
        let name: HostName = name.parse().map_err(|error| HostPatternError::Name(text.to_owned(), error))?;
        Ok(if below.is_some() { Self::Below(format!(".{name}").into()) } else { Self::Exact(name) })
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => name.fmt(f),
            Self::Below(suffix) => write!(f, "*{suffix}"),
            Self::Any => f.write_str("*"),
        }
    }
}

impl fmt::Display for Condition {
    /// Writes the condition for `explain`, such as `from 10.0.0.0/8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list<T>(items: &[T], text: impl Fn(&T) -> String) -> String {
            items.iter().map(text).collect::<Vec<_>>().join(", ")
        }
        let value = match self {
            Self::From(set) | Self::To(set) => set.to_string(),
            Self::Port(set) => set.to_string(),
            Self::Listener(names) => list(names, ToString::to_string),
            Self::Intercept(kinds) => list(kinds, |kind| kind.as_str().to_owned()),
            Self::Protocol(protocol) => protocol.as_str().to_owned(),
            Self::SocksUser(names) | Self::Process(names) => list(names, ToString::to_string),
            Self::Uid(uids) => list(uids, ToString::to_string),
            Self::Host(patterns) | Self::AskedName(patterns) => list(patterns, ToString::to_string),
            Self::HostFile(files) => list(files, |file| file.path.to_string()),
            Self::HostContains(words) => list(words, ToString::to_string),
            Self::Url(patterns) => list(patterns, |pattern| pattern.as_str().to_owned()),
        };
        write!(f, "{} {value}", self.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Process;
    use std::net::SocketAddr;

    /// A program of this host must not get past a rule against it by having ended before it is looked for.
    #[test]
    fn a_hidden_process_fits_every_rule_that_denies_and_no_other() {
        let mut flow = Flow {
            protocol: Protocol::Tcp,
            intercept: Intercept::Redirect,
            listener: "lan".into(),
            client: ([192, 0, 2, 1], 9).into(),
            orig_dst: SocketAddr::from(([10, 0, 0, 1], 80)).into(),
            host: None,
            process: None,
            user: None,
        };
        let mut holds = |process: Process, denies: bool| {
            flow.process = Some(process);
            [Condition::Uid(vec![7]), Condition::Process(vec!["curl".into()])]
                .map(|condition| condition.holds(&flow, Seen::Nothing, denies) == Truth::Holds)
        };
        let hidden = || Process { is_hidden: true, ..Process::default() };
        assert_eq!([true, false].map(|denies| holds(hidden(), denies)), [[true; 2], [false; 2]]);
        // What is known of it decides.
        let of_user = |uid| Process { uid: Some(uid), ..hidden() };
        assert_eq!([7, 8].map(|uid| holds(of_user(uid), true)), [[true, true], [false, true]]);
        assert_eq!([7, 8].map(|uid| holds(of_user(uid), false)), [[true, false], [false, false]]);
        // Another host has no process here.
        assert_eq!(holds(Process::default(), true), [false; 2]);
    }
}
