//! Cooperative caching (Heigh performance proxy, Sec. 2.5): caches ask each other before they ask the server.
//!
//! The message is `CACHEREQ` of that document, which shows it in several spellings. This module reads all of them and
//! sends one. The document leaves some points open, and this module decides them as follows:
//!
//! - The answer is an HTTP/1.1 response: the stored one with its Age, or a 504 if nothing fresh is stored.
//! - The connection stays open, and questions and answers alternate.
//! - A cache that is asked does not ask further caches.
//! - Only `http://` resources are asked for, because content that came over TLS is not sent in clear.

use super::fields::trim;
use super::head::Authority;
use super::message::{MessageError, Method};
use super::uri::{Resource, Scheme};
use crate::flow::Destination;
use crate::time::Instant;
use std::time::Duration;

/// The first word of the message.
const WORD: &[u8] = b"CACHEREQ";

/// Parses a head as the question of a sibling. `None` if it is not one.
///
/// Accepts `CACHEREQ URL`, `CACHEREQ [URL]` and `CACHEREQ[URL]`, with or without an HTTP version behind it. Accepts
/// `Host: host:port` with or without brackets, and with white space before the colon. Host must name the host of the
/// URL. Its port is ignored, because the document's own example has port 80 for an https URL.
///
/// # Errors
/// Fails if it is a malformed question.
pub fn question(head: &[u8]) -> Option<Result<Resource, MessageError>> {
    let rest = head.strip_prefix(WORD)?;
    matches!(rest.first(), Some(b' ' | b'[')).then(|| read(rest))
}

fn read(rest: &[u8]) -> Result<Resource, MessageError> {
    let mut lines = rest.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let target = trim(lines.next().unwrap_or_default());
    let target =
        [&b" HTTP/1.1"[..], b" HTTP/1.0"].iter().find_map(|end| target.strip_suffix(*end)).unwrap_or(target);
    let target = unbracketed(trim(target));
    if target.iter().any(|byte| matches!(byte, b' ' | b'\t')) {
        return Err(MessageError::BadTarget);
    }
    let resource = Resource::parse(target, &Method::Get)?;
    let mut hosts = lines.filter_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let (name, value) = line.split_at(colon);
        trim(name).eq_ignore_ascii_case(b"host").then(|| value.get(1..).unwrap_or_default())
    });
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(MessageError::BadHost) };
    let spaceless: Vec<u8> =
        unbracketed(trim(host)).iter().copied().filter(|byte| !matches!(byte, b' ' | b'\t')).collect();
    let host = Authority::parse(&spaceless).map_err(|_| MessageError::BadHost)?.host;
    if host == resource.server.host { Ok(resource) } else { Err(MessageError::BadHost) }
}

/// Removes brackets around the whole text. The brackets of an IPv6 address inside stay.
fn unbracketed(text: &[u8]) -> &[u8] {
    match text {
        // `[2001:db8::1]:80` also begins with a bracket, but does not end with one.
        [b'[', inside @ .., b']'] if !is_v6(text) => trim(inside),
        _ => text,
    }
}

fn is_v6(text: &[u8]) -> bool {
    let inside = text.strip_prefix(b"[").and_then(|text| text.strip_suffix(b"]"));
    inside
        .and_then(|text| std::str::from_utf8(text).ok())
        .is_some_and(|text| text.parse::<std::net::Ipv6Addr>().is_ok())
}

/// Encodes the question for a resource. `None` if the resource must not be requested in clear.
pub fn write_question(resource: &Resource) -> Option<Vec<u8>> {
    (resource.scheme == Scheme::Http).then(|| {
        let host = resource.host_field();
        let end = format!("\r\nHost: {}\r\n\r\n", resource.server);
        [b"CACHEREQ http://", host.as_bytes(), &resource.path, end.as_bytes()].concat()
    })
}

/// A line of a siblings file that does not name a sibling.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: '{text}' is not [host:port]")]
pub struct SiblingError {
    /// The line number, from 1.
    pub line: usize,
    /// The text of the line.
    pub text: String,
}

/// Parses a siblings file: one `[host:port]` per line, with or without the brackets. A port may have leading zeros,
/// as in the document. Empty lines and lines that begin with `#` are skipped.
///
/// # Errors
/// Fails at the first line that does not name a sibling.
pub fn siblings(text: &str) -> Result<Vec<Destination>, SiblingError> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(line, text)| sibling(text).ok_or_else(|| SiblingError { line, text: text.to_owned() }))
        .collect()
}

/// Parses one sibling, in either spelling.
pub fn sibling(text: &str) -> Option<Destination> {
    let inside = std::str::from_utf8(unbracketed(text.as_bytes())).ok()?;
    let (host, port) = inside.rsplit_once(':')?;
    let port = port.trim().trim_start_matches('0');
    format!("{}:{port}", host.trim()).parse().ok()
}

/// How a sibling has answered so far, and how long to wait for it: at most [`Patience::MAX`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patience {
    /// The smoothed response time.
    smoothed: Option<Duration>,
    silences: u32,
    /// The sibling is not asked until then.
    until: Instant,
    pause: Duration,
}

impl Patience {
    /// The longest wait for a sibling. It limits the cost of a dead or slow one.
    pub const MAX: Duration = Duration::from_millis(20);
    /// After this number of time-outs in a row, the sibling is not asked for a while.
    pub const SILENCES: u32 = 3;
    /// The first pause. It doubles with each further time-out.
    pub const PAUSE: Duration = Duration::from_secs(1);
    /// The longest pause.
    pub const PAUSE_MAX: Duration = Duration::from_secs(30);

    /// Makes a value for a sibling that was not asked yet.
    pub const fn new() -> Self {
        Self { smoothed: None, silences: 0, until: Instant::ZERO, pause: Self::PAUSE }
    }

    /// Returns how long to wait for the sibling now. `None`: do not ask it. The first request after a pause tries the
    /// sibling again.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        if now < self.until {
            return None;
        }
        let usual = self.smoothed.map_or(Self::MAX, |smoothed| smoothed * 2 + Duration::from_millis(4));
        Some(usual.min(Self::MAX))
    }

    /// Notes that the sibling has answered after this time.
    pub fn answered(&mut self, after: Duration) {
        self.smoothed = Some(self.smoothed.map_or(after, |smoothed| (smoothed * 7 + after) / 8));
        (self.silences, self.pause) = (0, Self::PAUSE);
    }

    /// Notes that the sibling has not answered in time, or could not be reached.
    pub fn silent(&mut self, now: Instant) {
        self.silences = self.silences.saturating_add(1);
        if self.silences >= Self::SILENCES {
            self.until = now + self.pause;
            self.pause = (self.pause * 2).min(Self::PAUSE_MAX);
        }
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_the_seed_is_read() {
        for text in [
            "CACHEREQ http://www.cs.tufts.edu/x?y\r\nHost: www.cs.tufts.edu:80\r\n\r\n",
            "CACHEREQ [http://www.cs.tufts.edu/x?y]\r\nHost: [www.cs.tufts.edu:80]\r\n\r\n",
            "CACHEREQ[http://www.cs.tufts.edu/x?y]\r\nHost : [www.cs.tufts.edu : 80]\r\n\r\n",
            "CACHEREQ http://www.cs.tufts.edu/x?y HTTP/1.1\r\nhost: www.cs.tufts.edu\r\n\r\n",
        ] {
            let read = question(text.as_bytes()).unwrap().unwrap();
            assert_eq!(read.to_string(), "http://www.cs.tufts.edu/x?y", "{text}");
        }
        // The document's own example: https with port 80.
        let text = b"CACHEREQ https://www.google.com/\r\nHost: www.google.com:80\r\n\r\n";
        assert_eq!(question(text).unwrap().unwrap().to_string(), "https://www.google.com/");
        let v6 = b"CACHEREQ [http://[2001:db8::1]:8080/]\r\nHost: [2001:db8::1]:8080\r\n\r\n";
        assert_eq!(question(v6).unwrap().unwrap().server.port, 8080);
    }

    #[test]
    fn what_is_no_question_is_left_to_others_and_a_broken_one_is_refused() {
        for text in ["GET http://h/ HTTP/1.1\r\n\r\n", "CACHEREQUEST x\r\n\r\n", "", "CACHEREQ"] {
            assert!(question(text.as_bytes()).is_none(), "{text}");
        }
        for text in [
            "CACHEREQ \r\nHost: h\r\n\r\n",
            "CACHEREQ /x\r\nHost: h\r\n\r\n",
            "CACHEREQ http://h/\r\n\r\n",
            "CACHEREQ http://h/\r\nHost: other\r\n\r\n",
            "CACHEREQ http://h/\r\nHost: h\r\nHost: h\r\n\r\n",
            "CACHEREQ [http://h/\r\nHost: h\r\n\r\n",
            "CACHEREQ http://u@h/\r\nHost: h\r\n\r\n",
            "CACHEREQ http://h/a b\r\nHost: h\r\n\r\n",
        ] {
            assert!(question(text.as_bytes()).unwrap().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_sent_is_read_back() {
        for url in ["http://web.example/a?b", "http://web.example:8080/", "http://[2001:db8::1]/"] {
            let resource = Resource::parse(url.as_bytes(), &Method::Get).unwrap();
            let sent = write_question(&resource).unwrap();
            assert_eq!(question(&sent).unwrap().unwrap(), resource, "{url}");
        }
        let secret = Resource::parse(b"https://web.example/", &Method::Get).unwrap();
        assert_eq!(write_question(&secret), None);
    }

    #[test]
    fn the_file_of_the_seed_is_read() {
        let text =
            "[localhost:8080]\n[localhost:9150]\n[localhost:0909]\n\n# more\n[[::1]:81]\nb.example:82\n";
        let read: Vec<_> = siblings(text).unwrap().iter().map(Destination::to_string).collect();
        assert_eq!(read, ["localhost:8080", "localhost:9150", "localhost:909", "[::1]:81", "b.example:82"]);
        for (text, line) in [("[a:1]\n[b]\n", 2), ("[a:0]", 1), ("[a:70000]", 1), ("x", 1)] {
            assert_eq!(siblings(text).unwrap_err().line, line, "{text}");
        }
    }

    #[test]
    fn a_silent_sibling_is_left_alone_for_longer_and_longer() {
        let (mut patience, mut now) = (Patience::new(), Instant::from_millis(1));
        assert_eq!(patience.wait(now), Some(Patience::MAX));
        patience.answered(Duration::from_millis(1));
        assert_eq!(patience.wait(now), Some(Duration::from_millis(6)));
        patience.answered(Duration::from_secs(9));
        assert_eq!(patience.wait(now), Some(Patience::MAX), "never longer");
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            while patience.wait(now).is_some() {
                patience.silent(now);
            }
            let later = now + Duration::from_secs(seconds);
            assert_eq!(patience.wait(Instant::from_nanos(later.as_nanos() - 1)), None);
            assert!(patience.wait(later).is_some(), "one probe after {seconds} s");
            now = later;
        }
        patience.answered(Duration::from_millis(1));
        patience.silent(now);
        assert!(patience.wait(now).is_some(), "one silence is none");
    }
}
