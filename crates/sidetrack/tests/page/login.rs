//! Who gets in, and what each answer says to browsers.

use crate::{Rig, field, state, status, tokens};
use sidetrack::admin::{AdminSocket, serve};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn the_files_are_open_and_the_data_are_not() {
    let (folder, admin, _) = tokens();
    let rig = Rig::new(folder.path());
    let index = rig.ask("GET", "/", &[], "");
    assert_eq!((status(&index), field(&index, "content-type")), ("200", "text/html; charset=utf-8"));
    assert!(field(&index, "content-security-policy").starts_with("default-src 'self';"), "{index}");
    assert!(field(&index, "content-security-policy").contains("frame-ancestors 'none'"));
    assert_eq!(field(&index, "x-content-type-options"), "nosniff");
    assert_eq!(field(&index, "referrer-policy"), "no-referrer");
    let etag = field(&index, "etag");
    assert_eq!(status(&rig.ask("GET", "/", &[("if-none-match", etag)], "")), "304");
    let script = rig.ask("GET", "/page/main.js", &[("accept-encoding", "gzip")], "");
    assert_eq!(field(&script, "content-type"), "text/javascript; charset=utf-8");
    assert_eq!((field(&script, "content-encoding"), field(&script, "cache-control")), ("gzip", "no-cache"));
    assert_eq!(status(&rig.ask("GET", "/page/none.js", &[], "")), "404");
    assert!(rig.ask("GET", "/healthz", &[], "").ends_with("ok\n"));
    assert!(rig.ask("GET", "/readyz", &[], "").ends_with("ready\n"));
    for path in ["/v1/flows", "/v1/live", "/v1/status", "/metrics", "/v1/none", "/page", "//"] {
        let refused = rig.ask("GET", path, &[], "");
        assert_eq!(status(&refused), "401", "{path}");
        assert_eq!(field(&refused, "cache-control"), "no-store");
    }
    let cookie = rig.log_in(&admin);
    let flows = rig.ask("GET", "/v1/flows", &[("cookie", &cookie)], "");
    assert_eq!((status(&flows), field(&flows, "cache-control")), ("200", "no-store"));
    assert_eq!(status(&rig.ask("GET", "/v1/flows?token=x", &[], "")), "401", "no token in an address");
}

#[test]
fn a_session_has_a_role_and_ends() {
    let (folder, admin, read) = tokens();
    let rig = Rig::new(folder.path());
    let answer = rig.ask("POST", "/page/session", &[JSON], &format!("{{\"token\":\"{admin}\"}}"));
    let cookie = field(&answer, "set-cookie");
    for part in ["; HttpOnly", "; SameSite=Strict", "; Path=/", "; Max-Age=43200"] {
        assert!(cookie.contains(part), "{cookie}");
    }
    assert!(
        !cookie.contains("Secure") && cookie.starts_with(&format!("sidetrack-{}=admin.", rig.address.port()))
    );
    let tls = [JSON, ("host", "node.example"), ("origin", "https://node.example")];
    let answer = rig.ask("POST", "/page/session", &tls, &format!("{{\"token\":\"{admin}\"}}"));
    assert!(field(&answer, "set-cookie").ends_with("; Secure"), "{answer}");
    let (admin, read) = (rig.log_in(&admin), rig.log_in(&read));
    for (cookie, expected) in [(&admin, "200"), (&read, "403")] {
        let of = [("cookie", cookie.as_str())];
        assert_eq!(status(&rig.ask("GET", "/v1/flows", &of, "")), "200");
        assert_eq!(status(&rig.ask("DELETE", "/v1/flows?filter=id%20==%201", &of, "")), expected);
        assert_eq!(status(&rig.ask("POST", "/v1/reload", &of, "")), expected);
    }
    let of = [("cookie", read.as_str())];
    assert!(rig.ask("GET", "/page/session", &of, "").ends_with(r#"{"role":"read","has_login":true}"#));
    assert_eq!(status(&rig.ask("DELETE", "/page/session", &of, "")), "204");
    assert_eq!(status(&rig.ask("GET", "/v1/flows", &of, "")), "401", "logged out");
    // A restart with the same tokens goes on with the sessions.
    drop(rig);
    let rig = Rig::new(folder.path());
    let cookie = admin.split_once('=').expect("a value").1;
    let cookie = format!("sidetrack-{}={cookie}", rig.address.port());
    assert_eq!(status(&rig.ask("GET", "/v1/flows", &[("cookie", &cookie)], "")), "200");
}

#[test]
fn other_sites_get_nothing() {
    let (folder, admin, _) = tokens();
    let rig = Rig::new(folder.path());
    let cookie = rig.log_in(&admin);
    let host = rig.address.to_string();
    let (own, other) = (format!("http://{host}"), format!("http://127.0.0.1:{}", rig.address.port() ^ 1));
    for (fields, expected) in [
        (vec![("host", "evil.example")], "421"),
        (vec![("host", "localhost.evil.example")], "421"),
        (vec![("host", "localhost")], "401"),
        (vec![("origin", "http://evil.example"), ("cookie", &cookie)], "403"),
        (vec![("origin", "null"), ("cookie", &cookie)], "403"),
        (vec![("origin", &other), ("cookie", &cookie)], "403"),
        (vec![("sec-fetch-site", "cross-site"), ("cookie", &cookie)], "403"),
        (vec![("origin", &own), ("sec-fetch-site", "same-origin"), ("cookie", &cookie)], "200"),
    ] {
        assert_eq!(status(&rig.ask("GET", "/v1/flows", &fields, "")), expected, "{fields:?}");
    }
    let foreign = [JSON, ("origin", "http://evil.example")];
    let login = format!("{{\"token\":\"{admin}\"}}");
    assert_eq!(status(&rig.ask("POST", "/page/session", &foreign, &login)), "403");
    // A form of another site can send no JSON.
    let form = [("content-type", "text/plain")];
    assert_eq!(status(&rig.ask("POST", "/page/session", &form, &login)), "415");
}

#[test]
fn guesses_have_to_wait() {
    let (folder, admin, _) = tokens();
    let rig = Rig::new(folder.path());
    let guess =
        |token: &str| rig.ask("POST", "/page/session", &[JSON], &format!("{{\"token\":\"{token}\"}}"));
    let first = guess("admin");
    assert_eq!((status(&first), field(&first, "set-cookie")), ("401", ""));
    // Each failure doubles the delay. A pause of this test may be longer than one, and then the next failure delays more.
    let must_wait = (0..20).any(|_| {
        let refused =
            (0..20).map(|_| guess("guess")).find(|answer| status(answer) == "429").expect("a delay");
        assert!(field(&refused, "retry-after").parse::<u64>().is_ok_and(|seconds| seconds > 0), "{refused}");
        status(&guess(&admin)) == "429"
    });
    assert!(must_wait, "the right token has to wait too");
}

#[test]
fn strangers_do_not_keep_a_viewer_out() {
    let (folder, admin, _) = tokens();
    let rig = Rig::new(folder.path());
    let cookie = rig.log_in(&admin);
    let connect = || std::net::TcpStream::connect(rig.address).expect("a connection");
    let _strangers: Vec<_> = (0..100).map(|_| connect()).collect();
    assert_eq!(status(&rig.ask("GET", "/v1/flows", &[("cookie", &cookie)], "")), "200");
}

#[test]
fn the_socket_needs_no_login_and_serves_no_other_site() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("admin.sock");
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let socket = AdminSocket::bind(&path).expect("a socket");
    let serving = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(serve(state().0, socket, stopped)).expect("served");
    });
    let ask = |target: &str, fields: &str| {
        let mut stream = UnixStream::connect(&path).expect("a connection");
        let request = format!("GET {target} HTTP/1.1\r\nconnection: close\r\n{fields}\r\n");
        stream.write_all(request.as_bytes()).expect("written");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    let index = ask("/", "host: localhost:9466\r\n");
    assert!(index.starts_with("HTTP/1.1 200") && index.contains("<title>Sidetrack</title>"), "{index}");
    assert!(field(&index, "content-security-policy").starts_with("default-src 'self';"));
    let session = ask("/page/session", "host: localhost:9466\r\n");
    assert!(session.ends_with(r#"{"role":"admin","has_login":false}"#), "{session}");
    // Our own client, a name of the user's, an address; then what pages of other sites can send through `ssh -L`.
    for (fields, expected) in [
        ("host: sidetrack\r\n", "200"),
        ("host: x\r\n", "200"),
        ("host: 127.0.0.1:9466\r\n", "200"),
        ("host: [::1]:9466\r\norigin: http://[::1]:9466\r\n", "200"),
        ("host: evil.example:9466\r\n", "421"),
        ("host: localhost:9466\r\norigin: http://evil.example\r\n", "403"),
        ("host: localhost:9466\r\nsec-fetch-site: cross-site\r\nsec-fetch-mode: no-cors\r\n", "403"),
    ] {
        assert_eq!(status(&ask("/v1/flows", fields)), expected, "{fields}");
    }
    stop.send_replace(true);
    serving.join().expect("served");
}
