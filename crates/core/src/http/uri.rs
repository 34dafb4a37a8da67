//! The target of a request: the resource, its server, and the key under which it is cached.

use super::head::Authority;
use super::message::{MessageError, Method, Request};
use crate::decimal::Digits;
use crate::flow::Destination;
use std::fmt;

/// What a request asks of a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A resource, in absolute form, or in origin form with Host.
    Resource(Resource),
    /// A tunnel (CONNECT).
    Tunnel(Destination),
    /// The proxy itself: `OPTIONS *`.
    Server,
}

/// The scheme of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    /// In clear.
    Http,
    /// Over TLS.
    Https,
}

impl Scheme {
    /// Returns the scheme as in a URL.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    /// Returns the port that applies if none is written.
    pub const fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// One resource: scheme, server, path and query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// The scheme.
    pub scheme: Scheme,
    /// The server, with the default port of the scheme if none was written.
    pub server: Destination,
    /// Path and query as they were written, at least `/`. Or `*` for OPTIONS.
    pub path: Vec<u8>,
}

/// The form in which the resource was named. It shows whether the client treats us as a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `http://host/path`
    Absolute,
    /// `/path`, with Host
    Origin,
}

impl Target {
    /// Parses the target of a request.
    ///
    /// # Errors
    /// Fails if the target does not have a form that its method allows. [`Target::is_foreign`] detects another
    /// scheme.
    pub fn of(request: &Request) -> Result<(Self, Form), MessageError> {
        Self::within(request, Scheme::Http)
    }

    /// As [`Target::of`], for a request that arrived over a connection of this scheme.
    ///
    /// # Errors
    /// As [`Target::of`].
    pub fn within(request: &Request, scheme: Scheme) -> Result<(Self, Form), MessageError> {
        let target = request.target.as_slice();
        if request.method == Method::Connect {
            let authority = Authority::parse(target).map_err(|error| MessageError::BadTarget.or(error))?;
            let port = authority.port.ok_or(MessageError::BadTarget)?;
            return Ok((Self::Tunnel(Destination { host: authority.host, port, zone: 0 }), Form::Absolute));
        }
        if target.contains(&b'#') {
            return Err(MessageError::BadTarget);
        }
        if target == b"*" {
            return match request.method {
                Method::Options => Ok((Self::Server, Form::Origin)),
                _ => Err(MessageError::BadTarget),
            };
        }
        if target.first() == Some(&b'/') {
            let host = request.fields.first("host").filter(|host| !host.is_empty());
            let resource = Resource::new(scheme, host.ok_or(MessageError::BadHost)?, target.to_vec())?;
            return Ok((Self::Resource(resource), Form::Origin));
        }
        Ok((Self::Resource(Resource::parse(target, &request.method)?), Form::Absolute))
    }

    /// Whether a target is an absolute URL whose scheme is neither http nor https (for example ftp): a 501, not a
    /// 400.
    pub fn is_foreign(target: &[u8]) -> bool {
        let scheme = target.windows(3).position(|part| part == b"://").and_then(|end| target.get(..end));
        scheme.is_some_and(|scheme| {
            scheme.first().is_some_and(u8::is_ascii_alphabetic)
                && scheme
                    .iter()
                    .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
                && !scheme.eq_ignore_ascii_case(b"http")
                && !scheme.eq_ignore_ascii_case(b"https")
        })
    }
}

impl Resource {
    /// Returns the URL as people write it: with the port only if it is not the default one.
    pub fn url(&self) -> String {
        format!("{}://{}{}", self.scheme.as_str(), self.host_field(), String::from_utf8_lossy(&self.path))
    }

    /// Returns the URL as servers understand it (RFC 3986 Sec. 6.2.2): unreserved characters decoded, other escapes
    /// in upper case, no dot segments.
    pub fn normal_url(&self) -> String {
        let mut path = Vec::with_capacity(self.path.len());
        // Decode first: escaped dots make dot segments, too.
        normalise(&self.path, &mut path);
        if path.first() == Some(&b'/') {
            path = without_dot_segments(&path);
        }
        format!("{}://{}{}", self.scheme.as_str(), self.host_field(), String::from_utf8_lossy(&path))
    }

    fn new(scheme: Scheme, authority: &[u8], path: Vec<u8>) -> Result<Self, MessageError> {
        let Authority { host, port } =
            Authority::parse(authority).map_err(|error| MessageError::BadHost.or(error))?;
        let server = Destination { host, port: port.unwrap_or(scheme.default_port()), zone: 0 };
        Ok(Self { scheme, server, path })
    }

    /// Parses an absolute http or https URL without a fragment.
    ///
    /// # Errors
    /// Fails if it is not one, or has user information (RFC 9110 Sec. 4.2.4).
    pub fn parse(url: &[u8], method: &Method) -> Result<Self, MessageError> {
        let (scheme, rest) = split_scheme(url).ok_or(MessageError::BadTarget)?;
        let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?')).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(end);
        let path = match rest.first() {
            None if *method == Method::Options => b"*".to_vec(),
            Some(b'/') => rest.to_vec(),
            _ => [b"/", rest].concat(),
        };
        if path.contains(&b'#') {
            return Err(MessageError::BadTarget);
        }
        Self::new(scheme, authority, path).map_err(|error| match error {
            MessageError::BadNumber => error,
            _ => MessageError::BadTarget,
        })
    }

    /// Returns the Host field: the host, and its port if it is not the default one.
    pub fn host_field(&self) -> String {
        let mut field = String::with_capacity(HOST_ROOM);
        self.server.host.write_to(&mut field);
        if self.server.port != self.scheme.default_port() {
            field.push(':');
            Digits::of(self.server.port.into()).push_to(&mut field);
        }
        field
    }

    /// Returns the resource that a response field names (Location, Content-Location) if it has the same origin. The
    /// reference is an absolute URL, a path, or a path relative to this resource (RFC 3986 Sec. 5.2).
    pub fn same_origin(&self, reference: &[u8]) -> Option<Self> {
        let reference = reference.split(|byte| *byte == b'#').next().unwrap_or_default();
        let path = match reference {
            [] => return None,
            [b'/', b'/', rest @ ..] => {
                let url = [self.scheme.as_str().as_bytes(), b"://", rest].concat();
                return self.if_same_origin(Self::parse(&url, &Method::Get).ok()?);
            }
            [b'/', ..] => reference.to_vec(),
            [b'?', ..] => {
                [self.path.split(|byte| *byte == b'?').next().unwrap_or_default(), reference].concat()
            }
            _ if split_scheme(reference).is_some() => {
                return self.if_same_origin(Self::parse(reference, &Method::Get).ok()?);
            }
            _ if Target::is_foreign(reference) => return None,
            _ => {
                let own = self.path.split(|byte| *byte == b'?').next().unwrap_or_default();
                let folder = own.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
                [own.get(..folder).unwrap_or_default(), reference].concat()
            }
        };
        Some(Self { scheme: self.scheme, server: self.server.clone(), path: without_dot_segments(&path) })
    }

    fn if_same_origin(&self, other: Self) -> Option<Self> {
        (self.scheme == other.scheme && self.server == other.server).then_some(other)
    }

    /// Returns the key under which responses are cached. Only spellings that RFC 3986 Sec. 6.2.2 calls equivalent
    /// share a key, apart from what `rules` leave out.
    pub fn key(&self, rules: &KeyRules) -> Vec<u8> {
        // Reserve the memory once, whatever the port and the escapes need.
        let mut key = String::with_capacity(KEY_ROOM + self.path.len());
        key.push_str(self.scheme.as_str());
        key.push_str("://");
        self.server.host.write_to(&mut key);
        key.push(':');
        Digits::of(self.server.port.into()).push_to(&mut key);
        let mut key = key.into_bytes();
        let mut parts = self.path.splitn(2, |byte| *byte == b'?');
        normalise(parts.next().unwrap_or_default(), &mut key);
        let Some(query) = parts.next() else { return key };
        if rules.is_empty() {
            key.push(b'?');
            normalise(query, &mut key);
            return key;
        }
        let mut kept: Vec<Vec<u8>> = Vec::new();
        for parameter in query.split(|byte| *byte == b'&') {
            let mut text = Vec::with_capacity(parameter.len());
            normalise(parameter, &mut text);
            if !rules.ignores(text.split(|byte| *byte == b'=').next().unwrap_or_default()) {
                kept.push(text);
            }
        }
        if rules.sort_query {
            kept.sort();
        }
        if !kept.is_empty() {
            key.push(b'?');
            key.extend_from_slice(&kept.join(&b'&'));
        }
        key
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = String::from_utf8_lossy(&self.path);
        write!(f, "{}://{}{path}", self.scheme.as_str(), self.host_field())
    }
}

/// What is left out of cache keys. The forwarded URL never changes. Default: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyRules {
    /// Query parameters that do not change the resource: names, or prefixes of names with a final `*`.
    pub ignored_parameters: Vec<String>,
    /// Whether the order of query parameters does not matter.
    pub sort_query: bool,
}

impl KeyRules {
    const fn is_empty(&self) -> bool {
        self.ignored_parameters.is_empty() && !self.sort_query
    }

    fn ignores(&self, name: &[u8]) -> bool {
        self.ignored_parameters.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start.as_bytes()),
            None => name == pattern.as_bytes(),
        })
    }
}

/// Room for most hosts with a port, in bytes.
const HOST_ROOM: usize = 48;
/// Room for the scheme, host and port of most keys, in bytes.
const KEY_ROOM: usize = 96;

fn split_scheme(url: &[u8]) -> Option<(Scheme, &[u8])> {
    for (scheme, start) in [(Scheme::Http, &b"http://"[..]), (Scheme::Https, b"https://")] {
        if let Some((head, rest)) = url.split_at_checked(start.len())
            && head.eq_ignore_ascii_case(start)
        {
            return Some((scheme, rest));
        }
    }
    None
}

/// Appends a path or query with percent-encoded unreserved bytes decoded, and other hex digits in upper case.
///
/// A `%` that does not begin an escape is kept. A byte behind it is not decoded if that would make an escape: `%%30a`
/// stays as it is, because `%0a` is another resource.
fn normalise(text: &[u8], out: &mut Vec<u8>) {
    if !text.contains(&b'%') {
        return out.extend_from_slice(text);
    }
    let mut rest = text;
    // Up to this length, `out` must not get a decoded hex digit: it would be within two bytes after a lone `%`.
    let mut guarded = 0;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        let decoded = match (byte, after) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        match decoded {
            Some(byte) => {
                rest = after.get(2..).unwrap_or_default();
                let makes_an_escape = byte.is_ascii_hexdigit() && out.len() < guarded;
                if !makes_an_escape
                    && (byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~'))
                {
                    out.push(byte);
                } else {
                    out.push(b'%');
                    out.extend(after.iter().take(2).map(u8::to_ascii_uppercase));
                }
            }
            None => {
                out.push(*byte);
                if *byte == b'%' {
                    guarded = out.len() + 2;
                }
            }
        }
    }
}

/// Returns a text with percent-encoded unreserved characters decoded, and other hex digits in upper case.
pub fn normalised_escapes(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    normalise(text.as_bytes(), &mut out);
    // Only ASCII was added, and only whole escapes were removed.
    String::from_utf8_lossy(&out).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// Removes dot segments (RFC 3986 Sec. 5.2.4) from the path before the query.
fn without_dot_segments(path: &[u8]) -> Vec<u8> {
    let end = path.iter().position(|byte| *byte == b'?').unwrap_or(path.len());
    let (path, query) = path.split_at(end);
    let mut kept: Vec<&[u8]> = Vec::new();
    let mut segments = path.split(|byte| *byte == b'/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let is_last = segments.peek().is_none();
        match segment {
            b"." if is_last => kept.push(b""),
            b"." => {}
            b".." => {
                kept.pop();
                if is_last {
                    kept.push(b"");
                }
            }
            segment => kept.push(segment),
        }
    }
    let mut clean = vec![b'/'];
    clean.extend_from_slice(&kept.join(&b'/'));
    clean.extend_from_slice(query);
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(url: &str) -> Resource {
        Resource::parse(url.as_bytes(), &Method::Get).unwrap()
    }

    #[test]
    fn equal_spellings_have_one_key_and_no_others() {
        let key = |url: &str| String::from_utf8(resource(url).key(&KeyRules::default())).unwrap();
        assert_eq!(key("HTTP://Web.Example/%7ea%2fb"), "http://web.example:80/~a%2Fb");
        assert_eq!(key("http://web.example:80?q"), "http://web.example:80/?q");
        assert_eq!(key("http://web.example/a//b/./c;d"), "http://web.example:80/a//b/./c;d");
        assert_eq!(key("http://[2001:DB8::1]/%zz%"), "http://[2001:db8::1]:80/%zz%");
        // Decoding the digit would turn a lone percent sign into an escape.
        assert_eq!(key("http://a/%%30a"), "http://a:80/%%30a");
        assert_eq!(key("http://a/%3%30"), "http://a:80/%3%30");
        assert_eq!(key("http://a/%%7a%30"), "http://a:80/%z%30");
        assert_eq!(key("http://10.0.200.7:8080/"), "http://10.0.200.7:8080/");
        assert_eq!(resource("http://10.0.200.7:8080/").host_field(), "10.0.200.7:8080");
        assert_eq!(resource("http://[::1]/").host_field(), "[::1]");
        assert_ne!(key("https://a/"), key("http://a/"));
        for bad in ["http:///x", "http://u@h/", "http://h:0/", "ftp://h/", "http://h/#f", "web"] {
            assert!(Resource::parse(bad.as_bytes(), &Method::Get).is_err(), "{bad}");
        }
        assert!(Target::is_foreign(b"ftp://h/") && !Target::is_foreign(b"https://h/"));
    }

    #[test]
    fn rules_leave_parameters_out_of_the_key() {
        let rules = KeyRules { ignored_parameters: vec!["ved".into(), "utm_*".into()], sort_query: true };
        let key = |url: &str| String::from_utf8(resource(url).key(&rules)).unwrap();
        assert_eq!(key("http://g/webhp?sa=X&ved=0ah&hl=en&utm_a=1"), "http://g:80/webhp?hl=en&sa=X");
        assert_eq!(key("http://g/webhp?ved=0ah"), "http://g:80/webhp");
    }

    #[test]
    fn references_lead_to_the_same_origin_or_nowhere() {
        let base = resource("http://web.example/a/b?q");
        for (reference, path) in [
            ("/x", Some("/x")),
            ("c", Some("/a/c")),
            ("../c#f", Some("/c")),
            ("?r", Some("/a/b?r")),
            ("http://web.example:80/y", Some("/y")),
            ("//web.example/z", Some("/z")),
            ("https://web.example/y", None),
            ("http://other.example/y", None),
            ("ftp://web.example/y", None),
            ("", None),
        ] {
            let found = base.same_origin(reference.as_bytes()).map(|r| String::from_utf8(r.path).unwrap());
            assert_eq!(found.as_deref(), path, "{reference}");
        }
    }
}
