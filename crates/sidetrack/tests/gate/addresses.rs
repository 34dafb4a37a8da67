//! Addresses that no client may reach through us: in every notation, and by names that stand for them.

use crate::dns::Answers;
use crate::scene::{Scene, Web};
use sidetrack_testkit::is_root;
use std::net::Ipv4Addr;

/// Where the proxy shows its metrics.
const METRICS: &str = "10.0.1.254:9100";

fn answers() -> Answers {
    [
        ("loopback.test", vec![vec![Ipv4Addr::LOCALHOST]]),
        ("metadata.test", vec![vec![Ipv4Addr::new(169, 254, 169, 254)]]),
        ("named.test", vec![vec![Ipv4Addr::new(169, 254, 169, 254)]]),
        ("zero.test", vec![vec![Ipv4Addr::UNSPECIFIED]]),
        ("self.test", vec![vec![Ipv4Addr::new(10, 0, 1, 254)]]),
    ]
    .into()
}

/// A scene in which loopback and the metadata address of the proxy's host serve pages.
fn scene(tables: &str) -> (Scene, [Web; 2]) {
    let scene = Scene::new(answers(), "default = \"direct\"\n", tables);
    scene.line.router.ip("addr add 169.254.169.254/32 dev lo");
    let webs = scene
        .line
        .router
        .run(|| [Web::start("127.0.0.1:80", "loopback"), Web::start("169.254.169.254:80", "credentials")]);
    (scene, webs)
}

#[test]
fn no_notation_and_no_name_leads_a_client_of_another_host_to_loopback_or_metadata() {
    if !is_root() {
        return;
    }
    let (mut scene, webs) = scene("");
    for host in [
        "127.0.0.1",
        "127.0.0.1.",
        "::1",
        "[::1]",
        "::ffff:127.0.0.1",
        "localhost",
        "LOCALHOST.",
        "a.localhost",
        "loopback.test",
        "metadata.test",
        "zero.test",
        "169.254.169.254",
        "0.0.0.0",
        "64:ff9b::7f00:1",
    ] {
        assert_eq!(scene.socks(&format!("{host}:80")), Some(2), "{host} by SOCKS");
        scene.denied("never_dial");
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            assert_eq!(scene.get(&format!("http://{host}/")).0, 403, "{host} by HTTP");
            scene.denied("never_dial");
        }
    }
    for host in ["127.1", "2130706433", "0177.0.0.1", "0x7f.1", "0", "017700000001", "0x7f000001"] {
        assert!(!matches!(scene.socks(&format!("{host}:80")), Some(0)), "{host} by SOCKS");
        let record = scene.record();
        assert_eq!(record.text("reason"), "bad_request", "{record:?}");
        assert!(record.text("detail").contains("four decimal numbers"), "{record:?}");
        let (status, body) = scene.get(&format!("http://{host}/"));
        assert!(status == 400 && body.contains("four decimal numbers"), "{host}: {status} {body}");
        assert_eq!(scene.record().text("reason"), "bad_request");
    }
    assert!(webs.iter().all(|web| web.connections() == 0));
    assert!(scene.up.stop().0.success());
}

#[test]
fn clients_of_this_host_reach_its_loopback_and_rules_name_exceptions() {
    if !is_root() {
        return;
    }
    let rule = "[[rule]]\nname = \"meta\"\nmatch = { host = \"named.test\" }\ncarrier = \"direct\"\n";
    let (mut scene, webs) = scene(rule);
    let local = |host: &str| {
        let to = format!("{host}:80");
        scene.line.router.run(move || crate::scene::socks(&to).map(|(code, _)| code))
    };
    for host in ["127.0.0.1", "localhost", "loopback.test"] {
        assert_eq!(local(host), Some(0), "{host}");
    }
    assert_eq!(local("metadata.test"), Some(2), "it is no address of this host");
    for _ in 0..4 {
        scene.record();
    }
    assert_eq!(scene.get("http://named.test/"), (200, "credentials".to_owned()));
    assert_eq!(scene.get("http://metadata.test/").0, 403);
    assert_eq!(webs.map(|web| web.connections()), [3, 1]);
    assert!(scene.up.stop().0.success());
}

#[test]
fn our_own_ports_are_loops() {
    if !is_root() {
        return;
    }
    let top = format!("default = \"direct\"\n#admin metrics = \"{METRICS}\"\n");
    let mut scene = Scene::new(answers(), &top, "[outgoing]\nlisten = \"10.0.1.254:9101\"\n");
    for to in [METRICS, "self.test:9100", "10.0.1.254:9101", "self.test:1080", "10.0.1.254:3128"] {
        assert!(!matches!(scene.socks(to), Some(0)), "{to}");
        let record = scene.record();
        assert_eq!(record.text("reason"), "loop", "{to}: {record:?}");
    }
    assert!(scene.up.stop().0.success());
}
