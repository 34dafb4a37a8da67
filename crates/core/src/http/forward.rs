//! How a proxy changes a head before it forwards it (RFC 9110 Sec. 7.6). It removes the fields of one connection,
//! extends Via, and sets Host from the target. All other fields stay unchanged, in their order.

use super::auth;
use super::fields::{Fields, members, same_name};
use super::framing::Length;
use super::message::{Method, Request, Response, Version};
use super::uri::Resource;

/// Fields that Connection cannot remove: without them the next hop would read a different message.
const PROTECTED: [&str; 10] = [
    "authorization",
    "cache-control",
    "content-length",
    "content-range",
    "content-type",
    "cookie",
    "host",
    "range",
    "set-cookie",
    "via",
];

/// Protocols whose upgrade is forwarded. Never `h2c`: the requests in its tunnel would be invisible to the proxy.
const UPGRADES: [&str; 3] = ["websocket", "connect-udp", "connect-ip"];

/// What a request says about its two connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestHop {
    /// The client keeps the connection open for another request.
    pub keeps_alive: bool,
    /// The protocol that the client asks to switch to, if its upgrade is forwarded.
    pub upgrade: Option<Vec<u8>>,
    /// The client accepts trailers.
    pub takes_trailers: bool,
    /// The client waits for a 100 before it sends the body.
    pub expects_continue: bool,
    /// The request may authenticate its connection, so that connection must not serve another client.
    pub binds: bool,
    /// The request uses a scheme that authenticates the connection, so it cannot use a connection shared by streams.
    pub needs_own_connection: bool,
}

/// The entry to add to Via.
#[derive(Clone, Copy, Debug)]
pub struct Via<'a> {
    /// The name of this proxy.
    pub pseudonym: &'a str,
    /// The version in which the message arrived, if it was not that of its head (RFC 9110 Sec. 7.6.3): "2.0" or "3.0".
    pub received: Option<&'static str>,
}

impl Via<'_> {
    fn add_to(self, fields: &mut Fields, version: Version) {
        let version = self.received.unwrap_or(version.number());
        fields.push_pieces("Via", &[version.as_bytes(), b" ", self.pseudonym.as_bytes()]);
    }
}

/// Why the proxy answers a request itself instead of forwarding it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Via already names this proxy.
    Loop,
    /// Max-Forwards is 0, so this proxy answers.
    Here,
    /// The request has an unknown expectation (417).
    UnknownExpectation,
}

/// Whether the sender keeps its connection open (RFC 9112 Sec. 9.3).
pub fn keeps_alive(version: Version, fields: &Fields) -> bool {
    if fields.has_member("connection", "close") {
        return false;
    }
    // HTTP/1.0 clients of proxies use either field.
    version >= Version::Http11
        || fields.has_member("connection", "keep-alive")
        || fields.has_member("proxy-connection", "keep-alive")
}

/// Turns the head that arrived into the head for the server.
///
/// # Errors
/// Fails if the request is not to be forwarded.
pub fn request(
    request: &mut Request,
    resource: &Resource,
    length: Length,
    via: Via<'_>,
) -> Result<RequestHop, Stop> {
    // Read the fields of this connection now: `strip` removes them below.
    let mut hop = RequestHop {
        keeps_alive: keeps_alive(request.version, &request.fields),
        takes_trailers: request.fields.has_member("te", "trailers"),
        binds: auth::request_binds(&request.fields),
        needs_own_connection: auth::request_needs_own_connection(&request.fields),
        ..RequestHop::default()
    };
    if is_loop(&request.fields, via.pseudonym) {
        return Err(Stop::Loop);
    }
    for expectation in request.fields.members("expect") {
        if !same_name(expectation, b"100-continue") {
            return Err(Stop::UnknownExpectation);
        }
        hop.expects_continue = request.version >= Version::Http11;
    }
    count_forward(request)?;
    hop.upgrade =
        upgrade(&request.fields).filter(|_| length == Length::None && request.method == Method::Get);
    strip(&mut request.fields);
    if request.version == Version::Http10 {
        // An HTTP/1.0 client would take a 100 for the answer.
        request.fields.remove("expect");
    }
    request.target.clone_from(&resource.path);
    put_host(&mut request.fields, &resource.host_field());
    via.add_to(&mut request.fields, request.version);
    put_length(&mut request.fields, length);
    if let Some(upgrade) = &hop.upgrade {
        request.fields.push("Connection", "Upgrade");
        request.fields.push("Upgrade", upgrade);
    } else if hop.takes_trailers {
        request.fields.push("Connection", "TE");
        request.fields.push("TE", "trailers");
    }
    Ok(hop)
}

/// Removes the fields of the previous connection from a response, and adds this proxy to Via. The sender sets the
/// length fields of the body: see [`put_length`].
pub fn response(response: &mut Response, via: Via<'_>) {
    if auth::challenges(&response.fields) {
        // The proxy does not share such connections, so the client may use the scheme (RFC 4559 Sec. 6).
        let (name, value) = auth::PROXY_SUPPORT;
        response.fields.set(name, value);
    }
    strip(&mut response.fields);
    via.add_to(&mut response.fields, response.version);
}

/// Makes `host` the only Host field and the first field, unless it is the only one already.
fn put_host(fields: &mut Fields, host: &str) {
    let is_said = {
        let mut said = fields.all("host");
        said.next() == Some(host.as_bytes()) && said.next().is_none()
    };
    if is_said {
        return;
    }
    let mut all = Fields::with_capacity(fields.memory_bytes(), fields.len() + 4);
    all.push("Host", host);
    for (name, value) in fields.iter().filter(|(name, _)| !same_name(name, b"host")) {
        all.push(name, value);
    }
    *fields = all;
}

/// Replaces the fields that frame the body.
pub fn put_length(fields: &mut Fields, length: Length) {
    match length {
        // In answers to HEAD and in 304, the length describes another message, so it stays.
        Length::None => {
            fields.remove("transfer-encoding");
        }
        Length::Exact(bytes) => fields.set_number("Content-Length", bytes),
        Length::Chunked => {
            fields.remove("content-length");
            fields.set("Transfer-Encoding", "chunked");
        }
        Length::UntilClose => {
            fields.remove("content-length");
            fields.remove("transfer-encoding");
        }
    }
}

/// Removes the fields of one connection: the fixed ones, and those that Connection names.
pub fn strip(fields: &mut Fields) {
    let mut named: Vec<Vec<u8>> = Vec::new();
    for line in fields.all("connection") {
        // The usual members name no field, or one that is removed anyway.
        if same_name(line, b"close") || is_of_one_hop(line) {
            continue;
        }
        let others = members(line).filter(|name| !same_name(name, b"close") && !is_of_one_hop(name));
        named.extend(others.map(<[u8]>::to_vec));
    }
    fields.retain(|name, _| {
        let is_named = named.iter().any(|other| same_name(name, other));
        !is_of_one_hop(name) && (!is_named || is_in(&PROTECTED, name))
    });
}

/// Whether a field concerns one connection, whatever Connection says. The length alone excludes most names.
fn is_of_one_hop(name: &[u8]) -> bool {
    let candidates: &[&str] = match name.len() {
        2 => &["te"],
        7 => &["upgrade"],
        10 => &["connection", "keep-alive"],
        14 => &["http2-settings"],
        16 => &["proxy-connection"],
        17 => &["transfer-encoding"],
        18 => &["proxy-authenticate"],
        19 => &["proxy-authorization"],
        25 => &["proxy-authentication-info"],
        _ => return false,
    };
    is_in(candidates, name)
}

fn is_in(list: &[&str], name: &[u8]) -> bool {
    list.iter().any(|other| same_name(name, other.as_bytes()))
}

fn upgrade(fields: &Fields) -> Option<Vec<u8>> {
    if !fields.has_member("connection", "upgrade") {
        return None;
    }
    let asked = fields
        .members("upgrade")
        .find(|asked| UPGRADES.iter().any(|known| same_name(asked, known.as_bytes())));
    asked.map(<[u8]>::to_vec)
}

/// Whether Via names this proxy as a recipient.
fn is_loop(fields: &Fields, pseudonym: &str) -> bool {
    fields.members("via").any(|member| {
        let mut words = member.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
        words.nth(1).is_some_and(|by| same_name(by, pseudonym.as_bytes()))
    })
}

/// Checks and decrements Max-Forwards of TRACE and OPTIONS (RFC 9110 Sec. 7.6.2).
fn count_forward(request: &mut Request) -> Result<(), Stop> {
    if !matches!(request.method, Method::Trace | Method::Options) {
        return Ok(());
    }
    let Some(text) = request.fields.first("max-forwards") else { return Ok(()) };
    let count: Option<u64> = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    match count {
        Some(0) => Err(Stop::Here),
        Some(count) => {
            request.fields.set("Max-Forwards", (count - 1).to_string());
            Ok(())
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOP_BY_HOP: [&str; 10] = [
        "connection",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "transfer-encoding",
        "upgrade",
    ];

    const EDGE: Via<'_> = Via { pseudonym: "edge", received: None };

    fn pass(text: &str) -> Result<(String, RequestHop), Stop> {
        let mut head = Request::parse(text.as_bytes()).unwrap();
        let length = super::super::framing::request_length(&head).unwrap();
        let resource = Resource::parse(b"http://web.example:8080/p?q", &Method::Get).unwrap();
        let hop = request(&mut head, &resource, length, EDGE)?;
        let mut out = Vec::new();
        head.write_to(&mut out);
        Ok((String::from_utf8(out).unwrap(), hop))
    }

    #[test]
    fn fields_of_one_hop_stay_there_and_others_do_not() {
        let text = "GET http://web.example:8080/p?q HTTP/1.1\r\nHost: evil\r\nCookie: a\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n\
                    Connection: x-hop, cookie, close\r\nProxy-Connection: keep-alive\r\nTE: trailers, gzip\r\n\
                    Proxy-Authorization: Basic x\r\nVia: 1.0 other\r\nUpgrade: h2c\r\nAccept: *\r\n\r\n";
        let (out, hop) = pass(text).unwrap();
        assert_eq!(
            out,
            "GET /p?q HTTP/1.1\r\nHost: web.example:8080\r\nCookie: a\r\nVia: 1.0 other\r\nAccept: *\r\n\
             Via: 1.1 edge\r\nConnection: TE\r\nTE: trailers\r\n\r\n"
        );
        assert!(!hop.keeps_alive && hop.takes_trailers && hop.upgrade.is_none());
    }

    #[test]
    fn a_host_that_is_said_stays_where_it_is_and_any_other_comes_first() {
        let head = |host: &str| {
            format!("GET http://web.example:8080/ HTTP/1.1\r\nAccept: *\r\nHost: {host}\r\n\r\n")
        };
        let (out, _) = pass(&head("web.example:8080")).unwrap();
        assert!(out.starts_with("GET /p?q HTTP/1.1\r\nAccept: *\r\nHost: web.example:8080\r\nVia:"), "{out}");
        for other in ["WEB.example:8080", "web.example", ""] {
            let (out, _) = pass(&head(other)).unwrap();
            assert!(
                out.starts_with("GET /p?q HTTP/1.1\r\nHost: web.example:8080\r\nAccept: *\r\nVia:"),
                "{out}"
            );
        }
    }

    #[test]
    fn names_of_every_length_are_told_from_those_of_one_hop() {
        for name in HOP_BY_HOP {
            assert!(is_of_one_hop(name.to_ascii_uppercase().as_bytes()), "{name}");
            assert!(!is_of_one_hop(&name.as_bytes()[1..]), "{name}");
        }
        for length in [0, 31, 32, 33, 300] {
            assert!(!is_of_one_hop("x".repeat(length).as_bytes()));
        }
    }

    #[test]
    fn upgrades_are_rebuilt_or_dropped() {
        let text = |upgrade: &str| {
            format!("GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n\r\n")
        };
        let (out, hop) = pass(&text("h2c, websocket")).unwrap();
        assert!(out.ends_with("Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"), "{out}");
        assert_eq!(hop.upgrade.as_deref(), Some(&b"websocket"[..]));
        let (out, hop) = pass(&text("h2c")).unwrap();
        assert!(hop.upgrade.is_none() && !out.contains("pgrade"), "{out}");
    }

    #[test]
    fn what_is_not_passed_on() {
        let with =
            |method: &str, field: &str| pass(&format!("{method} / HTTP/1.1\r\nHost: h\r\n{field}\r\n\r\n"));
        assert_eq!(with("GET", "Via: 1.1 a (x), 1.1 EDGE"), Err(Stop::Loop));
        assert_eq!(with("GET", "Expect: 200-maybe"), Err(Stop::UnknownExpectation));
        assert_eq!(with("TRACE", "Max-Forwards: 0"), Err(Stop::Here));
        assert!(with("OPTIONS", "Max-Forwards: 7").unwrap().0.contains("Max-Forwards: 6\r\n"));
        assert!(with("GET", "Max-Forwards: 0").unwrap().0.contains("Max-Forwards: 0\r\n"));
    }
}
