//! Servers by an expression over the first bytes, and what becomes of clients whose bytes never decide.

use crate::node::peers::Client;
use crate::site::{ENGINE, Site, engine};
use sidetrack_testkit::{LIMIT, is_root};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

/// Says something to the engine and has the server's echo; the connection is closed in order.
fn say(words: &'static str) {
    let to: SocketAddr = ENGINE.parse().expect("an address");
    let stream = TcpStream::connect_timeout(&to, LIMIT).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).expect("limit");
    (&stream).write_all(words.as_bytes()).expect("sent");
    let mut client = Client::over(stream).expect("greeted");
    client.expect(words.as_bytes()).expect("all of it comes back");
    client.close().expect("closed in order");
}

#[test]
fn an_expression_chooses_and_what_it_never_fits_goes_where_the_rest_goes() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let (rest, api) = (site.server("10.0.2.1"), site.server("10.0.2.1"));
    let choose = format!(
        "engine = {{ choose = [{{ regex = '^(GET|POST) /api/v[0-9]+/', to = \"{}\" }}],",
        api.address
    );
    let listen = engine(&format!("to = \"{}\"", rest.address)).replace("engine = {", &choose);
    site.start("", &listen);
    for (words, server) in [
        ("GET /api/v12/things HTTP/1.1\r\n\r\n", api.address),
        ("POST /other HTTP/1.1\r\n\r\n", rest.address),
        ("\u{ff} no HTTP at all", rest.address),
    ] {
        site.line.client.run(move || say(words));
        let record = site.record();
        assert_eq!((record.text("reason"), record.address("orig_dst")), ("ok", server), "{words}");
    }
}

#[test]
fn a_client_whose_bytes_never_decide_is_reset_when_the_wait_is_over() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    let choose = format!("engine = {{ choose = [{{ regex = '^never$', to = \"{}\" }}],", server.address);
    let listen = engine(&format!("names = {{ \"a.example\" = \"{}\" }}", server.address));
    site.start("[limits]\nhandshake_timeout_ms = 300\n", &listen.replace("engine = {", &choose));
    let ended = site.line.client.run(|| {
        let mut stream =
            TcpStream::connect_timeout(&ENGINE.parse().expect("an address"), LIMIT).expect("connected");
        stream.set_read_timeout(Some(LIMIT)).expect("limit");
        stream.write_all(b"something, but nothing that decides").expect("sent");
        stream.read(&mut [0; 1]).expect_err("a reset").kind()
    });
    assert_eq!(ended, ErrorKind::ConnectionReset);
    assert_eq!(site.record().text("reason"), "bad_request");
}
