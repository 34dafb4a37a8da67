//! What rules say of hosts by the thousand, of words in their names and of URLs: where requests are seen, and by the name
//! in the hello where they are not.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Origin, ok};
use crate::tap::{Authority, NAME};
use crate::tls_origin::{Asks, TlsOrigin, World, shake_hands};
use sidetrack_core::flow::EndReason;

fn list(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hosts.txt");
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    (folder, path)
}

#[test]
fn a_request_to_a_listed_host_a_word_or_a_url_gets_the_page_with_the_rule() {
    let origin = Origin::start(|_| ok("", "fine"));
    let (_folder, path) = list("0.0.0.0 one.test\n||ads.test^\n@@||good.ads.test^\n");
    let node = Node::start(&format!(
        "default = 'direct'\n[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\n\
         [[rule]]\nname = 'listed'\nmatch = {{ host_file = '{path}' }}\naction = 'deny'\n\
         [[rule]]\nname = 'word'\nmatch = {{ host_contains = ['Tufts'] }}\naction = 'deny'\n\
         [[rule]]\nname = 'banner'\nmatch = {{ url = ['http://*.test/banner/*', '*.exe'] }}\naction = 'deny'\n\
         [[rule]]\nname = 'rest'\nmatch = {{ host = '*.test' }}\nto = '{}'\ncarrier = 'direct'\n",
        origin.address
    ));
    let mut client = Client::new(node.entry());
    for (url, rule) in [
        ("http://one.test/", Some("listed")),
        ("http://www.ads.test/", Some("listed")),
        ("http://good.ads.test/", None),
        ("http://www.cs.tufts.test/", Some("word")),
        ("http://web.test/banner/1.png", Some("banner")),
        ("http://web.test/banners/1.png", None),
        ("http://web.test/setup.exe", Some("banner")),
        ("http://web.test/setup.exe?x", None),
    ] {
        let answer = client.fetch(url);
        assert_eq!(answer.status, if rule.is_some() { 403 } else { 200 }, "{url}");
        if let Some(rule) = rule {
            assert!(answer.text().contains(&format!("rule '{rule}'")), "{url}: {}", answer.text());
        }
    }
}

#[test]
fn inside_tls_that_is_opened_urls_are_seen() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("", "fine"));
    let table = authority.table("");
    let node = Node::start(&format!(
        "default = 'deny'\n{table}[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\ntap = true\n\
         [[rule]]\nname = 'no-feed'\nmatch = {{ url = 'https://{NAME}/feed*' }}\naction = 'deny'\n\
         [[rule]]\nname = 'rest'\nmatch = {{ host = '{NAME}' }}\nto = '{}'\ncarrier = 'direct'\n",
        origin.address
    ));
    let mut client = Client::new(node.entry());
    client.send(format!("CONNECT {NAME}:443 HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
    assert_eq!(client.response(true).status, 200);
    let mut shaken = shake_hands(client, &authority.root(), NAME, &["http/1.1"]).unwrap();
    let mut status = |path: &str| {
        shaken.client.send(format!("GET {path} HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
        shaken.client.response(false).status
    };
    assert_eq!((status("/feed/1"), status("/page")), (403, 200));
}

#[test]
fn unopened_tls_is_told_by_the_name_in_its_hello() {
    let world = World::new();
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |_| ok("", "fine"));
    let (_folder, path) = list(&format!("*.{}\n", NAME.split_once('.').unwrap().1));
    let told = |list: &str| {
        let node = Node::start(&format!(
            "default = 'direct'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{}'\n\
             [[rule]]\nname = 'listed'\nmatch = {{ {list} }}\naction = 'deny'\n",
            origin.address
        ));
        let shaken = shake_hands(Client::new(node.entry()), world.pem(), NAME, &[]);
        let got_through = shaken.is_ok();
        drop(shaken);
        (got_through, node.only_end().reason)
    };
    assert_eq!(told(&format!("host_file = '{path}'")), (false, EndReason::PolicyDenied));
    assert_eq!(told("host_contains = 'site.t'"), (false, EndReason::PolicyDenied));
    assert!(told("host_contains = 'other'").0);
}
