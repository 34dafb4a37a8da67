//! HTTP/3 of servers: what they announce in Alt-Svc (RFC 7838), and where it did not work.
//!
//! Each server has one entry:
//!
//! ```text
//!             announced                       failed
//!   UNKNOWN ------------> ANNOUNCED --------------------------> BROKEN
//!    ^   |                 |  ^  ^                               |  |
//!    |   |   failed        |  |  +----- the time is over --------+  |
//!    |   +-----------------|--|------------------------------------>+
//!    |                     |  +-- announced again (a new port, a new time)
//!    +---------------------+
//!      clear, another protocol only, or the time of the announcement is over
//! ```
//!
//! A server that failed again after that time is left alone twice as long. One success forgets the failures. The table is
//! bounded: the entry whose time ends first makes room.

use super::fields::{Fields, is_token, split_outside_quotes, trim};
use super::h3::ALPN;
use crate::flow::{Destination, Host};
use crate::policy::Http3;
use crate::time::Instant;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most servers in a table.
pub const SERVERS_MAX: usize = 4096;
/// How long an announcement counts that names no time (RFC 7838 Sec. 3.1).
const AGE_DEFAULT_S: u64 = 24 * 3600;
/// The longest time that an announcement counts.
const AGE_MAX_S: u64 = 30 * 24 * 3600;
/// How long a server is left alone after the first failure.
pub const BROKEN: Duration = Duration::from_secs(5 * 60);
/// The longest time that it is left alone.
const BROKEN_MAX: Duration = Duration::from_secs(24 * 3600);
/// Most members of a field that are read.
const MEMBERS_MAX: usize = 32;

/// What a server says about its HTTP/3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announced {
    /// Nothing that is known here. It replaces what the server has said before.
    Nothing,
    /// HTTP/3 at this port of the same host, for this time.
    Port {
        /// The port.
        port: u16,
        /// The time from the response on.
        lifetime: Duration,
    },
}

impl Announced {
    /// Reads Alt-Svc. `host` is the server's, and `fields` are those of its response. `None`: it says nothing.
    ///
    /// The first usable member counts. An alternative on another host is not used: no rule has decided about that host.
    pub fn read(fields: &Fields, host: &Host) -> Option<Self> {
        if !fields.has("alt-svc") {
            return None;
        }
        let spent = fields.first("age").and_then(number).unwrap_or(0);
        let mut members = fields.members("alt-svc").take(MEMBERS_MAX);
        let found = members.find_map(|member| {
            let (port, lifetime_s) = alternative(member, host)?;
            let lifetime = Duration::from_secs(lifetime_s.min(AGE_MAX_S).saturating_sub(spent));
            (!lifetime.is_zero()).then_some(Self::Port { port, lifetime })
        });
        Some(found.unwrap_or(Self::Nothing))
    }
}

/// Reads one member: `h3="host:port"; ma=seconds`. Returns the port and the lifetime in seconds. `None`: it is another protocol
/// or host, or malformed.
fn alternative(member: &[u8], host: &Host) -> Option<(u16, u64)> {
    let mut parts = split_outside_quotes(member, b';').map(trim);
    let (protocol, authority) = pair(parts.next()?)?;
    if protocol != ALPN {
        return None;
    }
    let authority = authority.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let authority = std::str::from_utf8(authority).ok()?;
    let port = match authority.strip_prefix(':') {
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => port.parse().ok()?,
        Some(_) => return None,
        None => {
            let to: Destination = authority.parse().ok()?;
            (to.host == *host && to.zone == 0).then_some(to.port)?
        }
    };
    let mut lifetime_s = AGE_DEFAULT_S;
    for part in parts {
        let (name, value) = pair(part)?;
        if name == b"ma" {
            let value =
                value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value);
            lifetime_s = number(value)?;
        }
    }
    (port != 0).then_some((port, lifetime_s))
}

fn pair(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|byte| *byte == b'=')?;
    let (name, value) = (text.get(..at)?, text.get(at + 1..)?);
    (is_token(name) && !value.is_empty()).then_some((name, value))
}

/// A number of seconds; one that is too large counts as the largest.
fn number(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digit = |number: u64, byte: &u8| number.saturating_mul(10).saturating_add(u64::from(byte - b'0'));
    Some(text.iter().fold(0, digit))
}

/// What is known about one server.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The port that it has announced, and until when that counts.
    announced: Option<(u16, Instant)>,
    /// Until when it is left alone.
    broken: Option<Instant>,
    /// Failures in a row.
    failures: u32,
}

impl Entry {
    /// When nothing of it counts any more.
    fn end(&self) -> Instant {
        let announced = self.announced.map(|(_, until)| until);
        announced.max(self.broken).unwrap_or(Instant::ZERO)
    }
}

/// What is known about servers, by their addresses as clients name them.
#[derive(Debug, Default)]
pub struct Alternatives {
    servers: BTreeMap<Destination, Entry>,
}

impl Alternatives {
    /// Notes what a server has said about itself.
    pub fn learn(&mut self, now: Instant, server: &Destination, said: Announced) {
        match said {
            Announced::Port { port, lifetime } => {
                self.entry(now, server).announced = Some((port, now + lifetime));
            }
            Announced::Nothing => {
                if let Some(entry) = self.servers.get_mut(server) {
                    entry.announced = None;
                }
            }
        }
    }

    /// Returns the port at which to ask a server by HTTP/3. `None`: it is asked by TCP.
    pub fn port(&self, now: Instant, server: &Destination, when: Http3) -> Option<u16> {
        let entry = self.servers.get(server).copied().unwrap_or_default();
        if when == Http3::Never || entry.broken.is_some_and(|until| now < until) {
            return None;
        }
        let announced = entry.announced.filter(|(_, until)| now < *until).map(|(port, _)| port);
        announced.or_else(|| (when == Http3::First).then_some(server.port))
    }

    /// Notes that a server was not reached by HTTP/3: it is left alone for some time.
    pub fn failed(&mut self, now: Instant, server: &Destination) {
        let entry = self.entry(now, server);
        if entry.broken.is_some_and(|until| now < until) {
            // Several attempts were under way.
            return;
        }
        let times = 1 << entry.failures.min(16);
        entry.failures = entry.failures.saturating_add(1);
        entry.broken = Some(now + BROKEN.saturating_mul(times).min(BROKEN_MAX));
    }

    /// Notes that a server was reached by HTTP/3.
    pub fn worked(&mut self, server: &Destination) {
        if let Some(entry) = self.servers.get_mut(server) {
            (entry.broken, entry.failures) = (None, 0);
        }
    }

    /// Returns the number of servers in the table.
    pub fn len(&self) -> usize {
        self.servers.len()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.servers.is_empty()
    }

    fn entry(&mut self, now: Instant, server: &Destination) -> &mut Entry {
        if self.servers.len() >= SERVERS_MAX && !self.servers.contains_key(server) {
            self.servers.retain(|_, entry| now < entry.end());
            let first =
                self.servers.iter().min_by_key(|(_, entry)| entry.end()).map(|(server, _)| server.clone());
            if let Some(first) = first.filter(|_| self.servers.len() >= SERVERS_MAX) {
                self.servers.remove(&first);
            }
        }
        self.servers.entry(server.clone()).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &str) -> Option<Announced> {
        let host = Host::Name("web.example".parse().unwrap());
        Announced::read(&Fields::from([("Alt-Svc", value)]), &host)
    }

    fn port(port: u16, seconds: u64) -> Option<Announced> {
        Some(Announced::Port { port, lifetime: Duration::from_secs(seconds) })
    }

    #[test]
    fn announcements_are_read() {
        for (value, told) in [
            ("h3=\":443\"", port(443, 86_400)),
            ("h3=\":443\"; ma=3600", port(443, 3600)),
            ("h3=\":443\";ma=\"60\" ; persist=1", port(443, 60)),
            ("h3-29=\":1\", h2=\"alt.example:8000\", h3=\"web.example:8443\"; ma=5", port(8443, 5)),
            ("h3=\"other.example:443\", h3=\":444\"", port(444, 86_400)),
            ("h3=\":443\"; ma=99999999999999999999", port(443, 2_592_000)),
            ("h3=\":443\"; x=\"a;b,c\"; ma=7, h2=\":1\"", port(443, 7)),
        ] {
            assert_eq!(read(value), told, "{value}");
        }
        for nothing in [
            "clear",
            "",
            "h2=\":443\"",
            "h3=:443",
            "h3=\":0\"",
            "h3=\":65536\"",
            "h3=\":+1\"",
            "h3=\"\"",
            "h3=\":443\"; ma=0",
            "h3=\":443\"; ma=x",
            "h3=\":443\"; ma",
            "h3=\"other.example:443\"",
            "H3=\":443\"",
            "h3 = \":443\"",
            "h3=\":443",
        ] {
            assert_eq!(read(nothing), Some(Announced::Nothing), "{nothing}");
        }
        let host = Host::Name("web.example".parse().unwrap());
        assert_eq!(Announced::read(&Fields::new(), &host), None);
        let aged = Fields::from([("Alt-Svc", "h3=\":443\"; ma=60"), ("Age", "50")]);
        assert_eq!(Announced::read(&aged, &host), port(443, 10));
        let old = Fields::from([("Alt-Svc", "h3=\":443\"; ma=60"), ("Age", "60")]);
        assert_eq!(Announced::read(&old, &host), Some(Announced::Nothing));
    }

    fn server(name: &str) -> Destination {
        format!("{name}:443").parse().unwrap()
    }

    #[test]
    fn an_announcement_counts_for_its_time_and_is_taken_back() {
        let (mut table, web) = (Alternatives::default(), server("web.example"));
        let at = |seconds: u64| Instant::from_millis(seconds * 1000);
        let said = read("h3=\":8443\"; ma=60").unwrap();
        assert_eq!(table.port(at(0), &web, Http3::Announced), None);
        assert_eq!(table.port(at(0), &web, Http3::First), Some(443));
        table.learn(at(0), &web, said);
        assert_eq!(table.port(at(59), &web, Http3::Announced), Some(8443));
        assert_eq!(table.port(at(59), &web, Http3::First), Some(8443));
        assert_eq!(table.port(at(59), &web, Http3::Never), None);
        assert_eq!(table.port(at(60), &web, Http3::Announced), None);
        table.learn(at(60), &web, said);
        table.learn(at(61), &web, read("clear").unwrap());
        assert_eq!(table.port(at(61), &web, Http3::Announced), None);
    }

    #[test]
    fn a_server_that_fails_is_left_alone_for_longer_each_time() {
        let (mut table, web) = (Alternatives::default(), server("web.example"));
        let mut now = Instant::ZERO;
        let said = Announced::Port { port: 443, lifetime: Duration::from_secs(AGE_MAX_S) };
        table.learn(now, &web, said);
        for times in [1, 2, 4, 8] {
            table.failed(now, &web);
            table.failed(now, &web);
            // Another announcement does not mend it.
            table.learn(now, &web, said);
            let end = now + BROKEN * times;
            assert_eq!(table.port(end, &web, Http3::Announced), Some(443));
            let before = Instant::from_nanos(end.as_nanos() - 1);
            assert_eq!(table.port(before, &web, Http3::First), None);
            now = end;
        }
        for _ in 0..100 {
            table.failed(now, &web);
            assert_eq!(table.port(now + BROKEN_MAX, &web, Http3::First), Some(443));
            now = now + BROKEN_MAX;
        }
        table.worked(&web);
        table.failed(now, &web);
        assert_eq!(table.port(now, &web, Http3::First), None);
        assert_eq!(table.port(now + BROKEN, &web, Http3::First), Some(443));
    }

    #[test]
    fn the_table_is_bounded_and_what_ends_first_leaves() {
        let mut table = Alternatives::default();
        for at in 0..SERVERS_MAX as u64 + 500 {
            let said = Announced::Port { port: 443, lifetime: Duration::from_secs(1000 + at) };
            table.learn(Instant::ZERO, &server(&format!("s{at}.example")), said);
            assert!(table.len() <= SERVERS_MAX);
        }
        let known = |name: &str| table.port(Instant::ZERO, &server(name), Http3::Announced).is_some();
        assert!(!known("s499.example") && known("s500.example") && known("s4000.example"));
        assert!(!table.is_empty());
    }
}
