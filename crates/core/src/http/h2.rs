//! Translates HTTP/2 messages to and from HTTP/1.1 (RFC 9113 Sec. 8.2 to 8.3), so that the same strict parser checks
//! both. The caller has already decoded and checked frames and field compression. This module checks the message.

use super::fields::{Fields, is_token_byte, trim};
use super::head::Authority;
use super::message::{Method, Request, Sender, Version};

/// Fields of one connection: not allowed in HTTP/2 (RFC 9113 Sec. 8.2.2).
const OF_CONNECTIONS: [&str; 6] =
    ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade", "http2-settings"];

/// Paths that a proxy answers itself.
const OF_PROXIES: [&[u8]; 2] = [b"/proxy.pac", b"/wpad.dat"];

/// The port of HTTPS, if an authority names none.
const PORT: u16 = 443;

/// How an HTTP/2 message is malformed (RFC 9113 Sec. 8.1.1): a stream error, nothing of it is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The method is not a token.
    #[error("the method is not a token")]
    Method,
    /// The path does not start with a slash and is not the `*` of OPTIONS; or it has a fragment, white space, control
    /// bytes or bytes beyond ASCII.
    #[error("the path is malformed")]
    Path,
    /// The scheme is not that of the connection.
    #[error("the scheme is another than that of the connection")]
    Scheme,
    /// There is no authority, it has user information, or Host is repeated or contradicts it.
    #[error("the authority is missing or malformed, or Host contradicts it")]
    Authority,
    /// A field of a connection, TE other than trailers, a name that is not a token in lower case, or a value with control
    /// bytes or with white space at its ends.
    #[error("a field is malformed or belongs to a connection")]
    Field,
    /// A pseudo-header field is missing, repeated, unknown, behind other fields, or in a message that must not have it.
    #[error("a pseudo-header field is missing, repeated, unknown or in the wrong place")]
    Pseudo,
    /// The status is not a number of three digits that HTTP/2 allows.
    #[error("the status is malformed")]
    Status,
    /// Trailers do not end their stream.
    #[error("the trailers do not end the stream")]
    Trailers,
    /// The fields are larger than we accept.
    #[error("the fields are too large")]
    TooLong,
    /// The header block was not read, because something before it broke the connection.
    #[error("the connection is broken before this message")]
    Unread,
}

/// The pseudo-header fields of a request.
#[derive(Clone, Copy, Debug)]
pub struct Pseudo<'a> {
    /// `:method`
    pub method: &'a [u8],
    /// `:scheme`, if it is known.
    pub scheme: Option<&'a [u8]>,
    /// `:authority`
    pub authority: Option<&'a [u8]>,
    /// `:path`
    pub path: &'a [u8],
}

/// Makes the HTTP/1.1 head of a request. `has_body`: content follows the head. Without Content-Length it is sent in
/// chunks.
///
/// # Errors
/// Fails if the request is malformed.
pub fn request<'a>(
    pseudo: Pseudo<'_>,
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    has_body: bool,
) -> Result<Request, Malformed> {
    let method = Method::parse(pseudo.method).map_err(|_| Malformed::Method)?;
    if method == Method::Connect {
        return Err(Malformed::Path);
    }
    check_pseudo(&pseudo)?;
    let mut others = Fields::new();
    let (mut host, mut cookies) = (None, Vec::new());
    for (name, value) in fields {
        check_field(name, value, Sender::Client)?;
        match name {
            b"host" if host.is_some() => return Err(Malformed::Authority),
            b"host" => host = Some(value),
            // A client may split Cookie for better compression (RFC 9113 Sec. 8.2.3).
            b"cookie" => cookies.push(value.to_vec()),
            _ => others.push(name, value),
        }
    }
    check_server(pseudo.authority, host)?;
    let mut head = Fields::new();
    head.push("Host", pseudo.authority.or(host).ok_or(Malformed::Authority)?);
    for (name, value) in others.iter() {
        head.push(name, value);
    }
    if !cookies.is_empty() {
        head.push("Cookie", cookies.join(&b"; "[..]));
    }
    if has_body && !head.has("content-length") {
        head.push("Transfer-Encoding", "chunked");
    }
    if head.has_member("te", "trailers") {
        head.push("Connection", "TE");
    }
    Ok(Request { method, target: pseudo.path.to_vec(), version: Version::Http11, fields: head })
}

/// Makes the HTTP/1.1 head of a request to a proxy. `names_server`: the proxy stands for one server, so a request of scheme
/// `https` is for that one and stays in origin form. Every other request gets a whole URL.
///
/// # Errors
/// Fails if the request is malformed.
pub fn proxied<'a>(
    pseudo: Pseudo<'_>,
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    has_body: bool,
    names_server: bool,
) -> Result<Request, Malformed> {
    let scheme = pseudo.scheme.unwrap_or(b"https").to_ascii_lowercase();
    if !matches!(scheme.as_slice(), b"http" | b"https") {
        return Err(Malformed::Scheme);
    }
    let mut request = request(Pseudo { scheme: None, ..pseudo }, fields, has_body)?;
    let is_ours = scheme == b"https" && (names_server || OF_PROXIES.contains(&pseudo.path));
    if !is_ours && pseudo.path != b"*" {
        let host = request.fields.first("host").unwrap_or_default();
        request.target = [&scheme, &b"://"[..], host, pseudo.path].concat();
    }
    Ok(request)
}

/// Makes the HTTP/1.1 head of a CONNECT request (RFC 9113 Sec. 8.5).
///
/// # Errors
/// Fails if the request is malformed.
pub fn connect<'a>(
    authority: &[u8],
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
) -> Result<Request, Malformed> {
    check_server(Some(authority), None)?;
    let mut head = Fields::new();
    head.push("Host", authority);
    for (name, value) in fields {
        check_field(name, value, Sender::Client)?;
        // They describe content, and what follows CONNECT is none.
        if !matches!(name, b"host" | b"content-length") {
            head.push(name, value);
        }
    }
    Ok(Request {
        method: Method::Connect,
        target: authority.to_vec(),
        version: Version::Http11,
        fields: head,
    })
}

/// Makes the HTTP/1.1 head of a request for a WebSocket (RFC 8441 Sec. 5): an upgrade with `key`, because HTTP/2 has
/// no key.
///
/// # Errors
/// Fails if the request is malformed.
pub fn websocket<'a>(
    pseudo: Pseudo<'_>,
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    key: &str,
) -> Result<Request, Malformed> {
    let mut request = request(Pseudo { method: b"GET", ..pseudo }, fields, false)?;
    // Remove a key that the client sent all the same: it must not control the answer.
    request.fields.remove("sec-websocket-key");
    request.fields.push("Connection", "Upgrade");
    request.fields.push("Upgrade", "websocket");
    request.fields.push("Sec-WebSocket-Key", key);
    Ok(request)
}

/// Makes the HTTP/1.1 head of a request for a tunnel of datagrams (RFC 9298 Sec. 3.4): the upgrade of Sec. 3.2.
///
/// # Errors
/// Fails if the request is malformed.
pub fn connect_udp<'a>(
    pseudo: Pseudo<'_>,
    fields: impl Iterator<Item = (&'a [u8], &'a [u8])>,
) -> Result<Request, Malformed> {
    check_pseudo(&pseudo)?;
    // The scheme is that of the proxy's URL, which a connection without TLS may have too.
    let mut request = request(Pseudo { method: b"GET", scheme: None, ..pseudo }, fields, false)?;
    request.fields.push("Connection", "Upgrade");
    request.fields.push("Upgrade", super::udp::PROTOCOL);
    Ok(request)
}

/// Checks the scheme and the path of a request that is not a plain CONNECT (RFC 9113 Sec. 8.3.1). An extended CONNECT may come
/// on a connection without TLS.
pub(super) fn check_pseudo(pseudo: &Pseudo<'_>) -> Result<(), Malformed> {
    let may_be_plain = pseudo.method == b"CONNECT";
    let is_good = |scheme: &[u8]| {
        scheme.eq_ignore_ascii_case(b"https") || may_be_plain && scheme.eq_ignore_ascii_case(b"http")
    };
    if !pseudo.scheme.is_none_or(is_good) {
        return Err(Malformed::Scheme);
    }
    // A fragment is never sent.
    let is_clean = pseudo.path.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'#');
    let fits = pseudo.path.first() == Some(&b'/') || (pseudo.path == b"*" && pseudo.method == b"OPTIONS");
    if is_clean && fits { Ok(()) } else { Err(Malformed::Path) }
}

/// Checks that `:authority` and Host name one server (RFC 9113 Sec. 8.3.1).
pub(super) fn check_server(authority: Option<&[u8]>, host: Option<&[u8]>) -> Result<(), Malformed> {
    let agree = authority.zip(host).is_none_or(|(one, other)| is_same_server(one, other));
    let named = authority.or(host).unwrap_or_default();
    let is_clean = named.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'@');
    if agree && is_clean && !named.is_empty() { Ok(()) } else { Err(Malformed::Authority) }
}

/// Whether two authorities differ in spelling only: in case, or in a default port that is not written.
fn is_same_server(one: &[u8], other: &[u8]) -> bool {
    let parse = |text| Authority::parse(text).ok().map(|read| (read.host, read.port.unwrap_or(PORT)));
    one == other || parse(one).is_some_and(|one| parse(other) == Some(one))
}

/// Checks a field that is not a pseudo-header field (RFC 9113 Sec. 8.2.1 and 8.2.2). White space around the value is
/// malformed, but servers send it, and it does no harm there.
pub(super) fn check_field(name: &[u8], value: &[u8], sender: Sender) -> Result<(), Malformed> {
    let of_connection = OF_CONNECTIONS.iter().any(|other| name == other.as_bytes());
    let other_te = name == b"te" && value != b"trailers";
    let is_name = |byte: &u8| is_token_byte(*byte) && !byte.is_ascii_uppercase();
    let bad_name = name.is_empty() || !name.iter().all(is_name);
    let bad_value = value.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t')
        || (sender == Sender::Client && trim(value).len() != value.len());
    if of_connection || other_te || bad_name || bad_value { Err(Malformed::Field) } else { Ok(()) }
}

/// Returns the fields of an HTTP/1.1 message for HTTP/2, with names in lower case. Leaves out the fields of the
/// connection, and Host, which becomes `:authority`.
pub fn fields(head: &Fields) -> impl Iterator<Item = (Vec<u8>, &[u8])> {
    head.iter().filter_map(|(name, value)| {
        let name = name.to_ascii_lowercase();
        let stays = !OF_CONNECTIONS.iter().any(|other| name == other.as_bytes()) && name != b"host";
        let is_te = name == b"te";
        (stays && (!is_te || value.eq_ignore_ascii_case(b"trailers"))).then_some((name, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(
        path: &str,
        authority: Option<&str>,
        fields: &[(&str, &str)],
        has_body: bool,
    ) -> Result<String, Malformed> {
        let pseudo = Pseudo {
            method: b"GET",
            scheme: None,
            authority: authority.map(str::as_bytes),
            path: path.as_bytes(),
        };
        let fields = fields.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        let mut out = Vec::new();
        request(pseudo, fields, has_body)?.write_to(&mut out);
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_request_becomes_one_of_http_1() {
        let fields = [("cookie", "a=1"), ("accept", "*/*"), ("te", "trailers"), ("cookie", "b=2")];
        assert_eq!(
            pass("/x?y", Some("web.example"), &fields, false).unwrap(),
            "GET /x?y HTTP/1.1\r\nHost: web.example\r\naccept: */*\r\nte: trailers\r\nCookie: a=1; b=2\r\n\
             Connection: TE\r\n\r\n"
        );
        let body = pass("/", None, &[("host", "h")], true).unwrap();
        assert!(
            body.starts_with("GET / HTTP/1.1\r\nHost: h\r\n") && body.contains("Transfer-Encoding: chunked")
        );
        for host in ["h", "H", "h:443", "h:", "h."] {
            let both = pass("/", Some("h"), &[("host", host)], false).unwrap();
            assert_eq!(both, "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "{host}");
        }
        let known = pass("/", Some("h"), &[("host", "h"), ("content-length", "3")], true).unwrap();
        assert_eq!(known, "GET / HTTP/1.1\r\nHost: h\r\ncontent-length: 3\r\n\r\n");
    }

    #[test]
    fn a_request_to_a_proxy_has_a_whole_url_and_one_to_its_server_a_path() {
        let made = |scheme: &[u8], path: &[u8], names_server| {
            let pseudo = Pseudo { method: b"GET", scheme: Some(scheme), authority: Some(b"h:1"), path };
            let request = proxied(pseudo, std::iter::empty(), false, names_server);
            request.map(|request| String::from_utf8(request.target).unwrap())
        };
        assert_eq!(made(b"http", b"/x", false).as_deref(), Ok("http://h:1/x"));
        assert_eq!(made(b"http", b"/x", true).as_deref(), Ok("http://h:1/x"));
        assert_eq!(made(b"https", b"/x", false).as_deref(), Ok("https://h:1/x"));
        assert_eq!(made(b"https", b"/x", true).as_deref(), Ok("/x"));
        assert_eq!(made(b"https", b"/proxy.pac", false).as_deref(), Ok("/proxy.pac"));
        assert_eq!(made(b"ftp", b"/x", false), Err(Malformed::Scheme));
        assert_eq!(made(b"http", b"x", false), Err(Malformed::Path));
    }

    #[test]
    fn a_connect_keeps_its_authority_and_loses_what_describes_content() {
        let fields = [(&b"content-length"[..], &b"3"[..]), (b"proxy-authorization", b"Basic x")];
        let mut out = Vec::new();
        connect(b"h:443", fields.into_iter()).unwrap().write_to(&mut out);
        let expected = "CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\nproxy-authorization: Basic x\r\n\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        for odd in [&b""[..], b"u@h:1", b"h 1", b"h\r\n"] {
            assert_eq!(connect(odd, std::iter::empty()), Err(Malformed::Authority), "{odd:?}");
        }
    }

    #[test]
    fn what_would_be_read_differently_is_malformed() {
        for path in [
            "",
            "x",
            "*",
            "http://h/",
            "/ HTTP/1.1\r\nX: ",
            "/\0",
            "/a b",
            "/\x7f",
            "/ä",
            "/a#b",
            "/#",
            "#",
            "/?a#b",
        ] {
            assert_eq!(pass(path, Some("h"), &[], false), Err(Malformed::Path), "{path:?}");
        }
        assert_eq!(pass("/", None, &[], false), Err(Malformed::Authority));
        for host in ["other", "h:80", "", "h:443:443", "h/"] {
            assert_eq!(pass("/", Some("h"), &[("host", host)], false), Err(Malformed::Authority), "{host:?}");
        }
        assert_eq!(pass("/", None, &[("host", "h"), ("host", "h")], false), Err(Malformed::Authority));
        for authority in ["", "user@h", "h\r\n", "h b", "\u{e4}"] {
            assert_eq!(pass("/", Some(authority), &[], false), Err(Malformed::Authority), "{authority:?}");
        }
        for field in [
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("te", "gzip"),
            ("X-Upper", "1"),
            ("a:b", "1"),
            ("a b", "1"),
            ("", "1"),
            ("x", "a\r\nb: c"),
            ("x", "a\nb"),
            ("x", " a"),
            ("x", "a\t"),
            ("x", "\0"),
            ("x", "\x7f"),
            ("a(b", "1"),
        ] {
            assert_eq!(pass("/", Some("h"), &[field], false), Err(Malformed::Field), "{field:?}");
        }
        for (scheme, is_good) in
            [("https", true), ("HTTPS", true), ("http", false), ("", false), ("ftp", false)]
        {
            let scheme = Some(scheme.as_bytes());
            let pseudo = Pseudo { method: b"GET", scheme, authority: Some(b"h"), path: b"/" };
            let read = request(pseudo, std::iter::empty(), false);
            assert_eq!(read.is_ok(), is_good, "{scheme:?}");
            assert!(is_good || read == Err(Malformed::Scheme));
        }
        let pseudo = Pseudo { method: b"CONNECT", scheme: None, authority: Some(b"h:1"), path: b"/" };
        assert_eq!(request(pseudo, std::iter::empty(), false), Err(Malformed::Path));
        let pseudo = Pseudo { method: b"GE T", scheme: None, authority: Some(b"h"), path: b"/" };
        assert_eq!(request(pseudo, std::iter::empty(), false), Err(Malformed::Method));
    }

    #[test]
    fn fields_of_a_connection_stay_on_it() {
        let head = Fields::from([
            ("Host", "h"),
            ("Connection", "TE"),
            ("TE", "trailers"),
            ("Transfer-Encoding", "chunked"),
            ("X-Kept", "1"),
        ]);
        let kept: Vec<_> = fields(&head).map(|(name, _)| String::from_utf8(name).unwrap()).collect();
        assert_eq!(kept, ["te", "x-kept"]);
    }

    #[test]
    fn a_websocket_is_an_upgrade_with_a_key_of_ours() {
        let pseudo =
            Pseudo { method: b"CONNECT", scheme: None, authority: Some(b"web.example"), path: b"/chat" };
        let fields: [(&[u8], &[u8]); 2] =
            [(b"sec-websocket-version", b"13"), (b"sec-websocket-key", b"theirs")];
        let mut out = Vec::new();
        websocket(pseudo, fields.into_iter(), "ours").unwrap().write_to(&mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "GET /chat HTTP/1.1\r\nHost: web.example\r\nsec-websocket-version: 13\r\nConnection: Upgrade\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Key: ours\r\n\r\n"
        );
        let upgrade: [(&[u8], &[u8]); 1] = [(b"upgrade", b"h2c")];
        assert_eq!(websocket(pseudo, upgrade.into_iter(), "ours"), Err(Malformed::Field));
        let plain = Pseudo { scheme: Some(b"http"), ..pseudo };
        assert_eq!(websocket(plain, std::iter::empty(), "ours"), Err(Malformed::Scheme));
    }

    #[test]
    fn a_tunnel_of_datagrams_is_an_upgrade() {
        let path = b"/.well-known/masque/udp/192.0.2.6/443/";
        for scheme in [&b"https"[..], b"http"] {
            let pseudo =
                Pseudo { method: b"CONNECT", scheme: Some(scheme), authority: Some(b"gw:3128"), path };
            let fields: [(&[u8], &[u8]); 1] = [(b"capsule-protocol", b"?1")];
            let request = connect_udp(pseudo, fields.into_iter()).unwrap();
            assert!(crate::http::udp::is_asked(&request));
            let mut out = Vec::new();
            request.write_to(&mut out);
            assert_eq!(
                String::from_utf8(out).unwrap(),
                "GET /.well-known/masque/udp/192.0.2.6/443/ HTTP/1.1\r\nHost: gw:3128\r\ncapsule-protocol: ?1\r\n\
                 Connection: Upgrade\r\nUpgrade: connect-udp\r\n\r\n"
            );
            let ftp = Pseudo { scheme: Some(b"ftp"), ..pseudo };
            assert_eq!(connect_udp(ftp, std::iter::empty()), Err(Malformed::Scheme));
        }
    }
}
