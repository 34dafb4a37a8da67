//! Single values: networks, ports, users, addresses, destinations, names.

use super::super::{At, List, RunAs, raw, zone};
use super::super::{Problem, nearest};
use super::Check;
use sidetrack_core::flow::{Destination, Host, HostNameError};
use sidetrack_core::net::{IpNet, IpNetError, IpSet, PortSet};
use sidetrack_core::policy::{HostPattern, HostPatternError};
use std::borrow::Cow;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

impl Check<'_> {
    /// Parses networks and `@set`s.
    pub(super) fn networks(&mut self, list: &List<String>) -> IpSet {
        self.not_empty(list);
        let mut nets = Vec::new();
        for item in list.items() {
            nets.extend(self.network_or_set(item));
        }
        nets.into_iter().collect()
    }

    /// Parses one network, or returns the networks of a `@set`.
    pub(super) fn network_or_set(&mut self, item: &At<String>) -> Vec<IpNet> {
        let Some(name) = item.strip_prefix('@') else { return self.network(item).into_iter().collect() };
        if let Some(set) = self.sets.get(name) {
            return set.nets().to_vec();
        }
        self.unknown_set(name, item.span());
        Vec::new()
    }

    /// Parses networks only: a named set cannot contain other sets.
    pub(super) fn plain_networks(&mut self, list: &List<String>) -> IpSet {
        let mut nets = Vec::new();
        for item in list.items() {
            if item.starts_with('@') {
                self.error(item.span(), "a set cannot hold another set", "list the networks themselves");
            } else {
                nets.extend(self.network(item));
            }
        }
        nets.into_iter().collect()
    }

    fn unknown_set(&mut self, name: &str, span: Range<usize>) {
        let help = match nearest(name, self.sets.keys().map(String::as_str)) {
            Some(near) => format!("did you mean \"@{near}\"?"),
            None => format!("write a line `{name} = [\"192.0.2.0/24\"]` below [set]"),
        };
        self.error(span, format!("there is no set '{name}'"), help);
    }

    fn network(&mut self, at: &At<String>) -> Option<IpNet> {
        let error = match at.parse() {
            Ok(net) => return Some(net),
            Err(error) => error,
        };
        let help = match &error {
            IpNetError::BadAddress(text) if self.sets.contains_key(text) => {
                format!("did you mean the set \"@{text}\"?")
            }
            IpNetError::BadAddress(text) if text.contains('%') => {
                "rules match an address on every link: leave out the % and what follows it".to_owned()
            }
            IpNetError::BadAddress(text) if looks_like_a_name(text) => {
                "networks only; a host name goes into `match = { host = … }`".to_owned()
            }
            IpNetError::BadAddress(_) => "such as \"192.0.2.0/24\", \"2001:db8::/32\" or \"@set\"".to_owned(),
            IpNetError::BadPrefix(..) => "such as \"192.0.2.0/24\" or \"2001:db8::/32\"".to_owned(),
            IpNetError::HostBits(_, net, ip) => format!("write \"{net}\" or \"{ip}\""),
        };
        let message = match &error {
            IpNetError::BadAddress(text) => format!("'{text}' is not a network"),
            IpNetError::HostBits(text, ..) => format!("'{text}' has bits set beyond its prefix"),
            IpNetError::BadPrefix(..) => error.to_string(),
        };
        self.error(at.span(), message, help);
        None
    }

    /// Rejects an empty list: it could mean "nothing" or "everything".
    pub(super) fn not_empty<T>(&mut self, list: &List<T>) {
        if list.items().is_empty() {
            let help = "take the key out if it is not to restrict anything";
            self.error(list.span(), "this list is empty: nothing would match", help);
        }
    }

    /// Parses ports and ranges `first-last`.
    pub(super) fn ports(&mut self, list: &List<raw::Number>) -> PortSet {
        self.not_empty(list);
        let mut ranges = Vec::new();
        for item in list.items() {
            match port_range(item) {
                Ok(range) => ranges.push(range),
                Err(message) => {
                    self.error(
                        item.span(),
                        message,
                        "a port is a number from 1 to 65535, a range is \"first-last\"",
                    );
                }
            }
        }
        ranges.into_iter().collect()
    }

    /// Parses user ids and user names.
    pub(super) fn uids(&mut self, list: &List<raw::Number>) -> Vec<u32> {
        self.not_empty(list);
        list.items().iter().filter_map(|item| self.uid(item, item.span())).collect()
    }

    /// Parses one user id or user name.
    pub(super) fn uid(&mut self, user: &raw::Number, span: Range<usize>) -> Option<u32> {
        let uid = match user {
            raw::Number::Number(number) => u32::try_from(*number).ok(),
            raw::Number::Text(name) => match name.parse() {
                Ok(uid) => Some(uid),
                Err(_) => self.surroundings.uid_of(name),
            },
        };
        if uid.is_none() {
            let name = match user {
                raw::Number::Number(number) => number.to_string(),
                raw::Number::Text(name) => name.clone(),
            };
            let help = "`getent passwd` lists the users of this machine; a number is taken as it is";
            self.error(span, format!("there is no user '{name}' on this machine"), help);
        }
        uid
    }

    /// Checks the user that the process switches to.
    pub(super) fn run_as(&mut self, user: Option<&At<String>>) -> RunAs {
        let Some(at) = user else { return RunAs::Default };
        match self.surroundings.uid_of(at) {
            Some(0) => {
                let help =
                    "without `user`, sidetrack becomes an unprivileged user once its sockets are bound";
                self.warning(at.span(), "what clients and servers send is read as root", help);
            }
            Some(_) => {}
            None => {
                let help =
                    "`getent passwd` lists the users of this machine; `useradd --system sidetrack` adds one";
                self.error(at.span(), format!("there is no user '{}' on this machine", at.as_str()), help);
            }
        }
        RunAs::Named(at.as_str().into())
    }

    /// Parses an address and port to listen on.
    pub(super) fn address(&mut self, at: &At<String>) -> Option<SocketAddr> {
        if let Ok(address) = self.numbered(at)?.parse::<SocketAddr>() {
            return Some(canonical(address));
        }
        self.bad_address(at);
        None
    }

    /// Returns a text with the zone of its address, if it has one, as the number of the interface.
    pub(super) fn numbered<'t>(&mut self, at: &'t At<String>) -> Option<Cow<'t, str>> {
        match zone::numbered(at, |name| self.surroundings.interface_index(name)) {
            Ok(text) => Some(text),
            Err(error) => {
                self.error(at.span(), error.to_string(), error.help());
                None
            }
        }
    }

    /// Parses addresses to listen on. `*:port` means both unspecified addresses, `localhost:port` both loopback
    /// addresses.
    pub(super) fn addresses(&mut self, list: &List<String>) -> Vec<SocketAddr> {
        if list.items().is_empty() {
            self.error(
                list.span(),
                "this list is empty",
                "give at least one address, such as \"127.0.0.1:1080\"",
            );
        }
        let mut addresses = Vec::new();
        for item in list.items() {
            match both_families(item) {
                Some(both) => addresses.extend(both),
                None => addresses.extend(self.address(item)),
            }
        }
        addresses
    }

    fn bad_address(&mut self, at: &At<String>) {
        let help = match at.parse::<Destination>() {
            Ok(Destination { host: Host::Name(_), .. }) => {
                "a listener needs an address: names are not resolved here; \"*:port\" stands for every address"
            }
            _ => "such as \"127.0.0.1:1080\", \"[::1]:1080\" or \"*:1080\"",
        };
        self.error(at.span(), format!("'{}' is not an address with a port", at.as_str()), help);
    }

    /// Parses a destination: an address or a name, with a port.
    pub(super) fn destination(&mut self, at: &At<String>) -> Option<Destination> {
        match self.numbered(at)?.parse::<Destination>() {
            Ok(destination) => Some(destination),
            Err(error) => {
                self.error(
                    at.span(),
                    error.to_string(),
                    "such as \"192.0.2.1:80\", \"[2001:db8::1]:80\" or \"db.example.nl:5432\"",
                );
                None
            }
        }
    }

    /// Parses a host pattern.
    pub(super) fn host_pattern(&mut self, text: &str, span: Range<usize>) -> Option<HostPattern> {
        match text.parse::<HostPattern>() {
            Err(HostPatternError::Name(_, HostNameError::Address)) => {
                let help = "an address goes into `match = { to = … }`";
                self.error(span, format!("'{text}' is an address, not a host name"), help);
                None
            }
            Ok(pattern) => Some(pattern),
            Err(error) => {
                let help =
                    "such as \"www.example.nl\", \"*.example.nl\" (all names below) or \"*\" (any name)";
                self.error(span, error.to_string(), help);
                None
            }
        }
    }

    /// Parses host patterns.
    pub(super) fn host_patterns(&mut self, list: &List<String>) -> Vec<HostPattern> {
        self.not_empty(list);
        list.items().iter().filter_map(|item| self.host_pattern(item, item.span())).collect()
    }

    /// Checks a name that the user chose, for a rule or a listener.
    pub(super) fn name(&mut self, at: &At<String>) -> String {
        let fits = |c: char| c.is_alphanumeric() || "-_.:/".contains(c);
        if at.is_empty() || at.len() > NAME_MAX || !at.chars().all(fits) {
            let help = "a name has 1 to 64 letters, digits and - _ . : / (it stands in records and filters)";
            self.error(at.span(), format!("'{}' is not a valid name", at.as_str()), help);
        }
        at.to_string()
    }

    /// Reports names that occur twice; `what` is the kind of thing they name.
    pub(super) fn unique<'n>(&mut self, names: impl Iterator<Item = (&'n str, Range<usize>)>, what: &str) {
        let mut seen: std::collections::BTreeMap<&str, Range<usize>> = std::collections::BTreeMap::new();
        for (name, span) in names {
            if let Some(first) = seen.get(name) {
                let help = match what {
                    "user" => "take one of them out".to_owned(),
                    _ => format!("give each {what} a `name` of its own"),
                };
                let problem = Problem::error(span, format!("there are two {what}s named '{name}'"), help);
                self.problems.push(problem.and(first.clone(), "the first"));
            } else {
                seen.insert(name, span);
            }
        }
    }
}

/// Longest name of a rule or listener, bytes.
const NAME_MAX: usize = 64;

/// Turns an IPv4-mapped IPv6 address into the IPv4 address.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip.is_ipv4() => SocketAddr::new(ip, address.port()),
        _ => address,
    }
}

fn looks_like_a_name(text: &str) -> bool {
    let letters = text.chars().any(|c| c.is_ascii_alphabetic());
    letters && text.contains('.') && !text.contains('/') && text.parse::<HostPattern>().is_ok()
}

fn both_families(text: &str) -> Option<[SocketAddr; 2]> {
    let (host, port) = text.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    match host {
        "*" => Some([(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()]),
        "localhost" => Some([(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()]),
        _ => None,
    }
}

fn port_range(number: &raw::Number) -> Result<(u16, u16), String> {
    let one = |text: &str| text.trim().parse().ok().filter(|port: &u16| *port != 0);
    match number {
        raw::Number::Number(number) => match u16::try_from(*number) {
            Ok(port) if port != 0 => Ok((port, port)),
            _ => Err(format!("{number} is not a port")),
        },
        raw::Number::Text(text) => {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            match (one(first), one(last)) {
                (Some(first), Some(last)) if first <= last => Ok((first, last)),
                (Some(first), Some(last)) => Err(format!("the range {first}-{last} ends before it begins")),
                _ => Err(format!("'{text}' is neither a port nor a range of ports")),
            }
        }
    }
}
