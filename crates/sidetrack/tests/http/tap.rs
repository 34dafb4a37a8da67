//! Intercepted TLS: what is seen, what passes untouched, and which certificates are not trusted.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Act, ok};
use crate::tls_origin::{Asks, Shaken, TlsOrigin, World, echo, shake_hands};
use sidetrack::cli::ca;
use sidetrack::config::Config;
use sidetrack::live::Ended;
use sidetrack::tls::Scope;
use sidetrack_core::flow::EndReason;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

pub(crate) const NAME: &str = "web.site.test";

/// A folder with an authority for names below `site.test`, and the certificate of the world outside.
pub(crate) struct Authority {
    folder: tempfile::TempDir,
}

impl Authority {
    pub(crate) fn new(world: &World) -> Self {
        let folder = tempfile::tempdir().unwrap();
        ca::init(&folder.path().join("ca"), &[Scope::Below("site.test".parse().unwrap())], 30).unwrap();
        std::fs::write(folder.path().join("world.pem"), world.pem()).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn root(&self) -> String {
        std::fs::read_to_string(self.path("ca/root.pem")).unwrap()
    }

    /// The table of the configuration.
    pub(crate) fn table(&self, more: &str) -> String {
        let at = self.folder.path().display();
        format!("[tap]\nca = '{at}/ca'\ntrust = '{at}/world.pem'\n{more}\n")
    }

    /// A configuration file for `run`, where connections to names below `site.test` go to `to`.
    pub(crate) fn run_config(&self, to: SocketAddr) -> PathBuf {
        let config = self.path("run.toml");
        let text = format!(
            "version = 1\ndefault = 'direct'\n{}[[rule]]\nname = 'site'\nmatch = {{ host = '*.site.test' }}\nto = '{to}'\n\
             carrier = 'direct'\n",
            self.table("")
        );
        std::fs::write(&config, text).unwrap();
        config
    }
}

/// A node whose listener opens connections; those to names below `site.test` go to `to`.
pub(crate) fn node(authority: &Authority, to: SocketAddr, listener: &str, tap: &str) -> Node {
    Node::start(&format!(
        "workers = 1\ndefault = 'direct'\n{}[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\ntap = true\n{listener}\n\
         [[rule]]\nname = 'site'\nmatch = {{ host = '*.site.test' }}\nto = '{to}'\ncarrier = 'direct'\n",
        authority.table(tap)
    ))
}

/// A connection through CONNECT.
pub(crate) fn connect(node: &Node, to: &str) -> Client {
    let mut client = Client::new(node.entry());
    client.send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    assert_eq!(client.response(true).status, 200);
    client
}

pub(crate) fn opened(node: &Node, root: &str, alpn: &[&str]) -> Shaken {
    shake_hands(connect(node, &format!("{NAME}:443")), root, NAME, alpn).unwrap()
}

#[test]
fn requests_inside_connect_are_seen_decided_cached_and_recorded() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| {
        ok("Cache-Control: max-age=60", request.path())
    });
    let node = node(&authority, origin.address, "cache = {}", "");
    let mut shaken = opened(&node, &authority.root(), &["http/1.1"]);
    assert_eq!(shaken.protocol.as_deref(), Some(&b"http/1.1"[..]));
    assert_eq!(shaken.shown.len(), 2, "the authority that signed is sent along");
    let get = |client: &mut Client, path: &str| {
        client.send(format!("GET {path} HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
        client.response(false)
    };
    let first = get(&mut shaken.client, "/a?q=1");
    assert_eq!((first.status, first.text().as_str(), first.is_hit()), (200, "/a?q=1", false));
    assert!(get(&mut shaken.client, "/a?q=1").is_hit());
    let mut other = opened(&node, &authority.root(), &[]);
    assert!(get(&mut other.client, "/a?q=1").is_hit(), "shared by connections");
    assert_eq!(get(&mut other.client, "/b").text(), "/b");
    assert_eq!(*origin.connections.lock().unwrap(), 1, "the server's connection is kept");
    let asked = origin.asked.lock().unwrap().clone();
    assert_eq!(asked[0].field("host"), Some(NAME));
    drop((shaken, other));
    let ended = node.ended(6);
    let of = |text: &str| {
        let said = |ended: &&Ended| ended.detail.as_deref().is_some_and(|detail| detail.starts_with(text));
        ended.iter().filter(said).collect::<Vec<_>>()
    };
    assert_eq!(of("opened for web.site.test").len(), 2, "{ended:?}");
    assert_eq!(of("GET https://web.site.test/a 200 hit").len(), 2, "{ended:?}");
    let request = of("GET https://web.site.test/b 200 fwd=uri-miss").pop();
    let decided = request.unwrap().flow.decided().unwrap();
    assert_eq!(decided.rule().map(|rule| &**rule), Some("site"));
    assert_eq!(decided.flow.orig_dst.to_string(), "web.site.test:443");
}

#[test]
fn tls_with_a_server_is_resumed() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin =
        TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("Connection: close", "once"));
    let node = node(&authority, origin.address, "", "");
    let mut shaken = opened(&node, &authority.root(), &["http/1.1"]);
    for _ in 0..3 {
        shaken.client.send(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
        assert_eq!(shaken.client.response(false).text(), "once");
    }
    let seen = (*origin.connections.lock().unwrap(), *origin.resumed.lock().unwrap());
    assert_eq!(
        seen,
        (3, 2),
        "each request has a connection of its own, and the first handshake is the only full one"
    );
}

#[test]
fn bodies_pass_through_tls_both_ways() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| {
        ok("", &String::from_utf8_lossy(&request.content))
    });
    let node = node(&authority, origin.address, "", "");
    let mut shaken = opened(&node, &authority.root(), &[]);
    for length in [0, 1, 16_384, 3_000_000] {
        let content = "0123456789abcdef".repeat(length / 16 + 1)[..length].to_owned();
        shaken
            .client
            .send(format!("POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {length}\r\n\r\n{content}"));
        assert!(shaken.client.response(false).text() == content, "{length}");
    }
}

#[test]
fn a_server_that_does_not_prove_who_it_is_is_shown_as_such() {
    let (world, other) = (World::new(), World::new());
    let authority = Authority::new(&world);
    for (identity, why) in [
        (other.identity(NAME, 30), "no trusted authority signed it"),
        (world.identity("elsewhere.test", 30), "its certificate is for others"),
    ] {
        let origin = TlsOrigin::start(&identity, Asks::Nothing, |_| ok("", "secret"));
        let node = node(&authority, origin.address, "cache = {}", "");
        let mut shaken = opened(&node, &authority.root(), &[]);
        shaken.client.send(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
        let page = shaken.client.response(false);
        assert_eq!(page.status, 502, "{page:?}");
        assert!(page.text().contains(why) && !page.text().contains("secret"), "{}", page.text());
        assert!(page.field("proxy-status").unwrap().contains("error=tls_certificate_error"));
        assert!(origin.asked.lock().unwrap().is_empty(), "nothing was said to it");
        let ended = node.ended(2);
        assert!(ended.iter().any(|ended| ended.reason == EndReason::Certificate), "{ended:?}");
    }
}

#[test]
fn what_is_not_to_be_opened_passes_untouched() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("", "itself"));
    // The server's own certificate comes through, byte for byte.
    let is_untouched = |node: &Node, name: &str, alpn: &[&str]| {
        let shaken = shake_hands(connect(node, &format!("{name}:443")), world.pem(), name, alpn);
        let mut shaken = shaken.unwrap_or_else(|error| panic!("{name}: {error}"));
        shaken.client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        assert_eq!(shaken.client.response(false).text(), "itself");
        drop(shaken);
        let ended = node.only_end();
        ended.detail.map(String::from).unwrap_or_default()
    };
    let bypassing = node(&authority, origin.address, "", &format!("bypass = ['{NAME}']"));
    is_untouched(&bypassing, NAME, &[]);
    let elsewhere = node(&authority, origin.address, "", "ports = [444]");
    is_untouched(&elsewhere, NAME, &[]);
    // An authority for other names: asked for by address, so that only the hello names the host.
    let narrow = Authority { folder: tempfile::tempdir().unwrap() };
    ca::init(&narrow.path("ca"), &[Scope::Below("other.test".parse().unwrap())], 30).unwrap();
    std::fs::write(narrow.path("world.pem"), world.pem()).unwrap();
    let narrow = node(&narrow, origin.address, "", "");
    assert!(is_untouched(&narrow, NAME, &[]).contains("may not sign"));
    let plain = node(&authority, echo(), "", "");
    let mut client = connect(&plain, &format!("{NAME}:443"));
    client.send("SSH-2.0-x\r\n");
    assert_eq!(client.bytes(11), b"SSH-2.0-x\r\n");
    drop(client);
    assert!(plain.only_end().detail.unwrap().contains("it is not TLS"));
    let mail = node(&authority, echo(), "", "");
    let mut client = connect(&mail, &format!("{NAME}:443"));
    let hello = {
        let mut config = rustls::ClientConfig::builder_with_provider(sidetrack::tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(crate::tls_origin::roots(world.pem()))
            .with_no_client_auth();
        config.alpn_protocols = vec![b"imap".to_vec()];
        let mut connection = rustls::ClientConnection::new(config.into(), NAME.try_into().unwrap()).unwrap();
        let mut hello = Vec::new();
        connection.write_tls(&mut hello).unwrap();
        hello
    };
    client.send(&hello);
    assert_eq!(client.bytes(hello.len()), hello);
    drop(client);
    assert!(mail.only_end().detail.unwrap().contains("it does not carry HTTP"));
}

#[test]
fn a_client_that_knows_the_real_certificate_is_left_alone_after_two_refusals() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("", "itself"));
    let node = node(&authority, origin.address, "", "");
    let pinned = || shake_hands(connect(&node, &format!("{NAME}:443")), world.pem(), NAME, &[]);
    for turn in 0..2 {
        assert!(pinned().is_err());
        let ended = node.ends_with(EndReason::TlsFailed);
        let detail = ended.detail.unwrap();
        assert!(detail.contains("does not take our certificate"), "{detail}");
        assert_eq!(detail.contains("pass untouched"), turn == 1, "{detail}");
    }
    let mut shaken = pinned().unwrap();
    shaken.client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(shaken.client.response(false).text(), "itself");
}

#[test]
fn a_host_that_asks_for_client_certificates_is_left_alone_from_then_on() {
    let world = World::new();
    let authority = Authority::new(&world);
    let identity = world.identity(NAME, 30);
    let origin = TlsOrigin::start(&identity, Asks::Certificate(world.pem().to_owned()), |_| ok("", "itself"));
    let node = node(&authority, origin.address, "", "");
    let mut shaken = opened(&node, &authority.root(), &[]);
    shaken.client.send(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
    assert_eq!(shaken.client.response(false).status, 502);
    drop(shaken);
    node.ended(2);
    // Its own handshake comes through; without a certificate it ends there, as it would without us.
    let direct = shake_hands(connect(&node, &format!("{NAME}:443")), world.pem(), NAME, &[]);
    let shown = direct.map(|shaken| shaken.shown.len());
    assert_eq!(shown.unwrap_or(1), 1, "the server's own certificate");
    let ended = node.only_end();
    assert!(ended.detail.is_some_and(|detail| detail.contains("client certificates")));
}

#[test]
fn requests_for_others_than_the_host_that_was_proved_are_refused() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("", "yes"));
    let node = node(&authority, origin.address, "", "");
    let mut shaken = opened(&node, &authority.root(), &[]);
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: other.site.test\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: web.site.test:444\r\n\r\n", 421),
        ("GET http://web.site.test/ HTTP/1.1\r\nHost: web.site.test\r\n\r\n", 421),
        ("CONNECT web.site.test:443 HTTP/1.1\r\nHost: web.site.test\r\n\r\n", 501),
        ("GET https://web.site.test/ HTTP/1.1\r\nHost: web.site.test\r\n\r\n", 200),
        ("GET / HTTP/1.1\r\nHost: WEB.site.test.\r\n\r\n", 200),
        (
            "GET / HTTP/1.1\r\nHost: web.site.test\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
    ] {
        shaken.client.send(request);
        assert_eq!(shaken.client.response(false).status, status, "{request}");
    }
    assert!(shaken.client.is_closed());
}

#[test]
fn an_end_without_close_notify_is_a_cut_and_never_stored() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| {
        Act::SendAndClose(b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n\r\nhalf".to_vec())
    });
    let node = node(&authority, origin.address, "cache = {}", "");
    for _ in 0..2 {
        let mut shaken = opened(&node, &authority.root(), &[]);
        shaken.client.send(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
        assert!(shaken.client.try_response(false).is_none(), "the client must not take it for all");
    }
    assert_eq!(origin.asked.lock().unwrap().len(), 2);
}

#[test]
fn a_denied_host_is_not_opened_and_inside_every_request_is_asked_of_policy() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("", "yes"));
    let at = authority.table("");
    let node = Node::start(&format!(
        "default = 'deny'\n{at}[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\ntap = true\n\
         [[rule]]\nname = 'address'\nmatch = {{ to = '127.0.0.1/32' }}\ncarrier = 'direct'\n\
         [[rule]]\nname = 'never'\nmatch = {{ host = '{NAME}' }}\naction = 'deny'\n"
    ));
    let mut client = Client::new(node.entry());
    client.send(format!("CONNECT {NAME}:443 HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
    assert_eq!(client.response(false).status, 403);
    let _ = origin;
    node.ends_with(EndReason::PolicyDenied);
}

#[test]
fn a_key_that_others_can_read_refuses_to_start_and_says_what_to_do() {
    let world = World::new();
    let authority = Authority::new(&world);
    let text = format!("version = 1\n{}", authority.table(""));
    assert!(Config::from_text("t.toml", &text).is_ok());
    let key = authority.path("ca/signing-key.pem");
    assert_eq!(std::fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600, "as it was made");
    for mode in [0o604, 0o640, 0o666] {
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
        let error = Config::from_text("t.toml", &text).unwrap_err().render(false);
        assert!(error.contains("is open to others") && error.contains("chmod 600"), "{error}");
    }
    std::fs::remove_file(&key).unwrap();
    let error = Config::from_text("t.toml", &text).unwrap_err().render(false);
    assert!(error.contains("cannot read") && error.contains("sidetrack ca init"), "{error}");
}

#[test]
fn an_authority_is_never_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let scopes = [Scope::AnyName];
    let said = ca::init(&folder.path().join("ca"), &scopes, 1).unwrap();
    assert!(said.contains("root.pem") && said.contains("tap = true"));
    assert!(ca::init(&folder.path().join("ca"), &scopes, 1).is_err());
}

#[test]
fn requests_are_written_down_as_an_archive_without_secrets() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| match request.path() {
        path if path.starts_with("/login") => {
            ok("Set-Cookie: session=secret\r\nContent-Type: text/plain", "welcome")
        }
        _ => ok("Cache-Control: max-age=60", "page"),
    });
    let path = authority.path("requests.har");
    let node = node(&authority, origin.address, "cache = {}", &format!("har = '{}'", path.display()));
    let read = || -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).expect("whole at any time")
    };
    assert_eq!(read()["log"]["entries"].as_array().map(Vec::len), Some(0));
    let mut shaken = opened(&node, &authority.root(), &[]);
    for request in ["/login?user=me&flag", "/page", "/page"] {
        shaken.client.send(format!(
            "GET {request} HTTP/1.1\r\nHost: {NAME}\r\nAuthorization: Basic c2VjcmV0\r\nCookie: a=secret\r\n\r\n"
        ));
        assert_eq!(shaken.client.response(false).status, 200);
    }
    let archive = sidetrack_testkit::awaited("three entries", || {
        let archive = read();
        (archive["log"]["entries"].as_array()?.len() == 3).then_some(archive)
    });
    let text = archive.to_string();
    assert!(!text.contains("secret") && !text.contains("c2VjcmV0"), "{text}");
    let entry = &archive["log"]["entries"][0];
    assert_eq!(entry["request"]["url"], format!("https://{NAME}/login?user=me&flag"));
    assert_eq!(entry["request"]["method"], "GET");
    assert_eq!(entry["request"]["queryString"][0], serde_json::json!({"name": "user", "value": "me"}));
    assert_eq!(entry["response"]["status"], 200);
    assert_eq!(entry["response"]["content"]["mimeType"], "text/plain");
    let masked = serde_json::json!({"name": "Authorization", "value": "***"});
    assert!(entry["request"]["headers"].as_array().unwrap().contains(&masked), "{entry}");
    assert!(entry["time"].as_f64().is_some_and(|time| time > 0.0) && archive["log"]["version"] == "1.2");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn the_archive_has_content_up_to_a_limit() {
    const LIMIT: usize = 2000;
    let big = "x".repeat(100_000);
    let sent = big.clone();
    let world = World::new();
    let authority = Authority::new(&world);
    let origin =
        TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, move |request| match request.path() {
            "/form" => ok("Content-Type: text/plain", "welcome"),
            "/big" => ok("Cache-Control: max-age=60", &sent),
            _ => ok("Cache-Control: max-age=60", "page"),
        });
    let path = authority.path("requests.har");
    let tables = format!("har = '{}'\nhar_bodies_max_bytes = {LIMIT}", path.display());
    let node = node(&authority, origin.address, "cache = {}", &tables);
    let mut shaken = opened(&node, &authority.root(), &[]);
    let form = "Content-Type: application/x-www-form-urlencoded\r\n";
    let requests = [
        format!("POST /form HTTP/1.1\r\nHost: {NAME}\r\n{form}Content-Length: 7\r\n\r\na=1&b=2"),
        format!(
            "POST /form HTTP/1.1\r\nHost: {NAME}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\n...\r\n0\r\n\r\n"
        ),
        format!("GET /page HTTP/1.1\r\nHost: {NAME}\r\n\r\n"),
        // A stored response.
        format!("GET /page HTTP/1.1\r\nHost: {NAME}\r\n\r\n"),
        format!("GET /big HTTP/1.1\r\nHost: {NAME}\r\n\r\n"),
        format!("GET /big HTTP/1.1\r\nHost: {NAME}\r\n\r\n"),
    ];
    for request in &requests {
        shaken.client.send(request.clone());
        let response = shaken.client.response(false);
        assert_eq!(response.status, 200);
        if request.starts_with("GET /big") {
            assert_eq!(response.content.len(), big.len());
        }
    }
    let entries = sidetrack_testkit::awaited("all entries", || {
        let archive: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).expect("whole at any time");
        let entries = archive["log"]["entries"].as_array()?.clone();
        (entries.len() == requests.len()).then_some(entries)
    });
    let json = |text: &str| serde_json::Value::from(text);
    let posted = |at: usize| &entries[at]["request"]["postData"];
    assert_eq!(posted(0)["text"], json("a=1&b=2"));
    assert_eq!(posted(0)["mimeType"], json("application/x-www-form-urlencoded"));
    assert_eq!((&posted(1)["text"], &entries[1]["request"]["bodySize"]), (&json("hello..."), &8.into()));
    assert!(posted(2).is_null());
    let content = |at: usize| &entries[at]["response"]["content"];
    assert_eq!((&content(0)["text"], &content(0)["size"]), (&json("welcome"), &7.into()));
    assert!([2, 3].iter().all(|at| content(*at)["text"] == json("page")));
    for at in [4, 5] {
        assert_eq!(content(at)["text"], json(&big[..LIMIT]));
        assert_eq!(content(at)["size"], big.len());
        assert_eq!(content(at)["comment"], json(&format!("the first {LIMIT} of {} bytes", big.len())));
    }
}

#[test]
fn secrets_are_written_for_nobody_else() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("", "yes"));
    let keys = authority.path("keys");
    let node = node(&authority, origin.address, "", &format!("keylog = '{}'", keys.display()));
    let mut shaken = opened(&node, &authority.root(), &[]);
    shaken.client.send(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
    assert_eq!(shaken.client.response(false).status, 200);
    let text = std::fs::read_to_string(&keys).unwrap();
    // Both connections, four secrets and an exporter's each.
    assert!(text.lines().filter(|line| line.starts_with("SERVER_TRAFFIC_SECRET_0 ")).count() == 2, "{text}");
    assert_eq!(std::fs::metadata(&keys).unwrap().permissions().mode() & 0o777, 0o600);
}
