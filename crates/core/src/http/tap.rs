//! Decides which TLS connections are intercepted (their content is read, with their owners' consent), and which pass
//! untouched. It uses the first bytes, the configuration, and what was learnt of clients and servers that
//! interception would break.

use super::sni::{ClientHello, Hello};
use crate::flow::{Host, HostName};
use crate::net::PortSet;
use crate::policy::HostPattern;
use crate::time::Instant;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// Application protocols that can be intercepted (RFC 7301).
const READABLE: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The configuration of interception.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapRules {
    /// Hosts whose connections are never intercepted.
    pub bypass: Vec<HostPattern>,
    /// Server ports whose connections are intercepted.
    pub ports: PortSet,
    /// Public names of providers. Encrypted Client Hello (RFC 9849) hides other names behind them.
    pub cover_names: Vec<HostPattern>,
    /// If some are named, connections to all other hosts are not intercepted.
    pub only: Option<Vec<Host>>,
}

impl TapRules {
    /// The public name of the provider that serves most hosts with Encrypted Client Hello.
    pub const COVER_NAME: &str = "cloudflare-ech.com";
}

impl Default for TapRules {
    fn default() -> Self {
        let cover: Option<HostPattern> = Self::COVER_NAME.parse().ok();
        Self {
            bypass: Vec::new(),
            ports: [(443, 443)].into_iter().collect(),
            cover_names: cover.into_iter().collect(),
            only: None,
        }
    }
}

/// Why a connection passes untouched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untouched {
    /// Its port is not one of the intercepted ports.
    Port,
    /// Its host is on the bypass list.
    Bypass,
    /// Its host is not one of those whose connections are intercepted.
    NotListed,
    /// It does not begin with a ClientHello.
    NotTls,
    /// The host is not known.
    Nameless,
    /// The real host is encrypted. The readable name is a cover name.
    Encrypted,
    /// It offers application protocols, but HTTP is not among them.
    Protocol,
    /// The authority may not sign for its host.
    NotAllowed,
    /// This client has rejected our certificate for this host, because it knows the real one.
    Pinned,
    /// This host asks clients for certificates.
    ClientCertificate,
}

impl fmt::Display for Untouched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Port => "its port is not intercepted",
            Self::Bypass => "its host is on the bypass list",
            Self::NotListed => "its host is not one that is intercepted",
            Self::NotTls => "it is not TLS",
            Self::Nameless => "its host is not known",
            Self::Encrypted => "its host is encrypted (ECH)",
            Self::Protocol => "it does not carry HTTP",
            Self::NotAllowed => "the authority may not sign for its host",
            Self::Pinned => "the client has refused our certificate for this host",
            Self::ClientCertificate => "the host asks for client certificates",
        })
    }
}

impl TapRules {
    /// Decides what can be decided before the client has sent anything. `asked` is the requested server.
    ///
    /// # Errors
    /// Fails with the reason why the connection passes untouched.
    pub fn consider(&self, asked: Option<&Host>, port: u16) -> Result<(), Untouched> {
        if !self.ports.contains(port) {
            return Err(Untouched::Port);
        }
        match asked {
            Some(Host::Name(name)) if matches(&self.bypass, name) => Err(Untouched::Bypass),
            // An address may be that of a name, which the first bytes tell.
            Some(host @ Host::Name(_)) if !self.is_listed(host) => Err(Untouched::NotListed),
            _ => Ok(()),
        }
    }

    /// Returns the host that a connection is intercepted for. `asked` is the server that the client requested, by
    /// name or by address. It tells a cover name from the random extension that browsers send to every host.
    ///
    /// # Errors
    /// Fails with the reason why the connection passes untouched.
    pub fn choose(&self, asked: &Host, hello: &ClientHello) -> Result<Host, Untouched> {
        let ClientHello::Hello(hello) = hello else { return Err(Untouched::NotTls) };
        let host = match (&hello.server_name, asked) {
            (Some(name), Host::Name(asked)) if hello.ech && name != asked => {
                return Err(Untouched::Encrypted);
            }
            (Some(name), _) if hello.ech && matches(&self.cover_names, name) => {
                return Err(Untouched::Encrypted);
            }
            (Some(name), _) => Host::Name(name.clone()),
            (None, _) if hello.ech => return Err(Untouched::Encrypted),
            (None, asked) => asked.clone(),
        };
        if let Host::Name(name) = &host
            && matches(&self.bypass, name)
        {
            return Err(Untouched::Bypass);
        }
        if !self.is_listed(&host) {
            return Err(Untouched::NotListed);
        }
        if is_readable(hello) { Ok(host) } else { Err(Untouched::Protocol) }
    }
}

fn matches(patterns: &[HostPattern], name: &HostName) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

impl TapRules {
    fn is_listed(&self, host: &Host) -> bool {
        self.only.as_ref().is_none_or(|only| only.contains(host))
    }
}

/// A hello without ALPN counts as HTTP/1.1, as servers treat it.
fn is_readable(hello: &Hello) -> bool {
    hello.alpn.is_empty() || hello.alpn.iter().any(|offered| READABLE.contains(&offered.as_slice()))
}

/// What was learnt of clients and servers that interception would break. The number of entries is limited, and
/// entries expire.
#[derive(Clone, Debug, Default)]
pub struct Learnt {
    /// By host, and by client if the entry is about one client.
    known: BTreeMap<(Host, Option<IpAddr>), Note>,
}

#[derive(Clone, Copy, Debug)]
struct Note {
    since: Instant,
    refusals: u32,
}

impl Learnt {
    /// After this number of refusals in a row, the client will not accept our certificate. A single one may be a
    /// user's "cancel".
    pub const REFUSALS: u32 = 2;
    /// How long an entry holds: 1 hour.
    pub const HOLDS: Duration = Duration::from_secs(3600);
    /// Most entries at a time. When there are more, the oldest is removed.
    pub const MAX: usize = 4096;

    /// Notes that a client has rejected our certificate for a host, or closed the connection right after it. Returns
    /// whether connections of this client to this host pass untouched from now on.
    pub fn refused(&mut self, now: Instant, client: IpAddr, host: &Host) -> bool {
        let note = self.note(now, (host.clone(), Some(client)));
        note.refusals = note.refusals.saturating_add(1);
        note.refusals >= Self::REFUSALS
    }

    /// Notes that a client has accepted our certificate for a host.
    pub fn accepted(&mut self, client: IpAddr, host: &Host) {
        // Build the key only if there is an entry to remove.
        if !self.known.is_empty() {
            self.known.remove(&(host.clone(), Some(client)));
        }
    }

    /// Notes that a host has requested a client certificate from us.
    pub fn wants_certificate(&mut self, now: Instant, host: &Host) {
        self.note(now, (host.clone(), None)).since = now;
    }

    /// Returns why a connection of this client to this host must not be intercepted. `None` if it may be.
    pub fn why(&self, now: Instant, client: IpAddr, host: &Host) -> Option<Untouched> {
        if self.known.is_empty() {
            return None;
        }
        let holds = |note: &&Note| now.since(note.since) < Self::HOLDS;
        if self.known.get(&(host.clone(), None)).filter(holds).is_some() {
            return Some(Untouched::ClientCertificate);
        }
        let pinned = self.known.get(&(host.clone(), Some(client))).filter(holds);
        pinned.filter(|note| note.refusals >= Self::REFUSALS).map(|_| Untouched::Pinned)
    }

    fn note(&mut self, now: Instant, key: (Host, Option<IpAddr>)) -> &mut Note {
        self.known.retain(|_, note| now.since(note.since) < Self::HOLDS);
        if self.known.len() >= Self::MAX
            && !self.known.contains_key(&key)
            && let Some(oldest) =
                self.known.iter().min_by_key(|(_, note)| note.since).map(|(key, _)| key.clone())
        {
            self.known.remove(&oldest);
        }
        self.known.entry(key).or_insert(Note { since: now, refusals: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> Host {
        text.parse().map(Host::Ip).unwrap_or_else(|_| Host::Name(text.parse().unwrap()))
    }

    fn hello(name: Option<&str>, ech: bool, alpn: &[&str]) -> ClientHello {
        let alpn = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        ClientHello::Hello(Hello { server_name: name.map(|name| name.parse().unwrap()), alpn, ech })
    }

    fn rules() -> TapRules {
        TapRules { bypass: vec!["*.bank.example".parse().unwrap()], ..TapRules::default() }
    }

    #[test]
    fn what_is_opened_and_what_passes() {
        let web = "web.example";
        for (asked, hello, expected) in [
            (web, hello(Some(web), false, &["h2", "http/1.1"]), Ok(host(web))),
            ("192.0.2.1", hello(Some(web), false, &[]), Ok(host(web))),
            ("192.0.2.1", hello(None, false, &[]), Ok(host("192.0.2.1"))),
            (web, hello(None, false, &["http/1.1"]), Ok(host(web))),
            // Browsers send the extension to every host. If the name is the requested one, nothing is hidden.
            (web, hello(Some(web), true, &["h2"]), Ok(host(web))),
            (web, hello(Some("cover.example"), true, &["h2"]), Err(Untouched::Encrypted)),
            ("192.0.2.1", hello(Some("cloudflare-ech.com"), true, &["h2"]), Err(Untouched::Encrypted)),
            ("192.0.2.1", hello(Some("cloudflare-ech.com"), false, &[]), Ok(host("cloudflare-ech.com"))),
            ("192.0.2.1", hello(Some(web), true, &["h2"]), Ok(host(web))),
            ("192.0.2.1", hello(None, true, &["h2"]), Err(Untouched::Encrypted)),
            // Another name without the extension is domain fronting or an alias. The certificate then carries this
            // name.
            (web, hello(Some("other.example"), false, &[]), Ok(host("other.example"))),
            ("192.0.2.1", hello(Some("my.bank.example"), false, &[]), Err(Untouched::Bypass)),
            (web, hello(Some(web), false, &["imap"]), Err(Untouched::Protocol)),
            (web, ClientHello::NotTls, Err(Untouched::NotTls)),
            (web, ClientHello::Incomplete, Err(Untouched::NotTls)),
        ] {
            assert_eq!(rules().choose(&host(asked), &hello), expected, "{asked} {hello:?}");
        }
    }

    #[test]
    fn only_listed_hosts_are_opened_if_some_are_listed() {
        let only =
            TapRules { only: Some(vec![host("web.example"), host("192.0.2.1")]), ..TapRules::default() };
        let (named, other) =
            (hello(Some("web.example"), false, &[]), hello(Some("other.example"), false, &[]));
        assert_eq!(only.consider(Some(&host("web.example")), 443), Ok(()));
        assert_eq!(only.consider(Some(&host("other.example")), 443), Err(Untouched::NotListed));
        // The name comes with the first bytes.
        assert_eq!(only.consider(Some(&host("192.0.2.9")), 443), Ok(()));
        assert_eq!(only.choose(&host("192.0.2.9"), &named), Ok(host("web.example")));
        assert_eq!(only.choose(&host("192.0.2.9"), &other), Err(Untouched::NotListed));
        assert_eq!(only.choose(&host("192.0.2.1"), &hello(None, false, &[])), Ok(host("192.0.2.1")));
    }

    #[test]
    fn ports_and_names_are_considered_before_the_client_speaks() {
        assert_eq!(rules().consider(None, 443), Ok(()));
        assert_eq!(rules().consider(None, 22), Err(Untouched::Port));
        assert_eq!(rules().consider(Some(&host("a.bank.example")), 443), Err(Untouched::Bypass));
        assert_eq!(rules().consider(Some(&host("bank.example")), 443), Ok(()));
    }

    #[test]
    fn two_refusals_pass_that_client_for_an_hour() {
        let (mut learnt, now) = (Learnt::default(), Instant::from_millis(1000));
        let (client, other): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let web = host("web.example");
        assert!(!learnt.refused(now, client, &web));
        learnt.accepted(client, &web);
        assert!(!learnt.refused(now, client, &web), "one that was taken in between starts anew");
        assert_eq!(learnt.why(now, client, &web), None);
        assert!(learnt.refused(now, client, &web));
        assert_eq!(learnt.why(now, client, &web), Some(Untouched::Pinned));
        assert_eq!(learnt.why(now, other, &web), None);
        assert_eq!(learnt.why(now, client, &host("x.example")), None);
        assert_eq!(learnt.why(now + Learnt::HOLDS, client, &web), None);
    }

    #[test]
    fn a_host_that_wants_certificates_is_left_alone_by_all() {
        let (mut learnt, now) = (Learnt::default(), Instant::ZERO);
        learnt.wants_certificate(now, &host("vpn.example"));
        let anybody = [10, 0, 0, 9].into();
        assert_eq!(learnt.why(now, anybody, &host("vpn.example")), Some(Untouched::ClientCertificate));
        assert_eq!(learnt.why(now + Learnt::HOLDS, anybody, &host("vpn.example")), None);
    }

    #[test]
    fn what_is_known_is_bounded_and_the_oldest_goes() {
        let mut learnt = Learnt::default();
        for number in 0..Learnt::MAX as u64 + 10 {
            learnt.wants_certificate(Instant::from_nanos(number), &host(&format!("h{number}.example")));
            assert!(learnt.known.len() <= Learnt::MAX);
        }
        let now = Instant::from_millis(1);
        assert_eq!(learnt.why(now, [1, 1, 1, 1].into(), &host("h9.example")), None);
        assert!(learnt.why(now, [1, 1, 1, 1].into(), &host("h10.example")).is_some());
    }
}
