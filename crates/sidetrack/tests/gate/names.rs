//! Names that lead where rules deny by network.

use crate::dns::Answers;
use crate::scene::{Scene, Web, socks_web};
use sidetrack_testkit::is_root;
use std::net::Ipv4Addr;

const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 1);
const INSIDE: Ipv4Addr = Ipv4Addr::new(10, 9, 9, 9);

/// Denies the network `INSIDE` is in.
const DENY: &str = "[[rule]]\nname = \"no-inside\"\nmatch = { to = \"10.9.0.0/16\" }\naction = \"deny\"\n";

/// A scene in which the proxy itself has the address `INSIDE`, with servers on both.
fn scene(answers: Answers, tables: &str) -> (Scene, Web, Web) {
    let scene = Scene::new(answers, "default = \"direct\"\n", tables);
    scene.line.router.ip("addr add 10.9.9.9/32 dev lo");
    let inside = scene.line.router.run(|| Web::start("10.9.9.9:80", "inside"));
    let outside = scene.line.server.run(|| Web::start("10.0.2.1:80", "outside"));
    (scene, inside, outside)
}

#[test]
fn a_rule_by_network_holds_for_every_name_that_leads_there() {
    if !is_root() {
        return;
    }
    let answers = [
        ("inside.test", vec![vec![INSIDE]]),
        ("outside.test", vec![vec![OUTSIDE]]),
        ("mixed.test", vec![vec![INSIDE, OUTSIDE]]),
    ];
    let (mut scene, inside, outside) = scene(answers.into(), DENY);
    assert_eq!(scene.socks("inside.test:80"), Some(2), "not allowed");
    scene.denied("rule 'no-inside'");
    let (status, body) = scene.get("http://inside.test/");
    assert!(status == 403 && body.contains("no-inside"), "{status} {body}");
    scene.denied("rule 'no-inside'");
    assert_eq!(scene.get("http://outside.test/"), (200, "outside".to_owned()));
    assert_eq!(scene.record().text("reason"), "ok");
    // Of several addresses those that are allowed are dialled.
    assert_eq!(scene.socks("mixed.test:80"), Some(0));
    assert_eq!(scene.record().text("reason"), "ok");
    assert_eq!(inside.connections(), 0, "nothing was dialled that is denied");
    assert_eq!(outside.connections(), 2);
    assert!(scene.up.stop().0.success());
}

#[test]
fn a_name_that_leads_elsewhere_the_second_time_is_asked_about_again() {
    if !is_root() {
        return;
    }
    // What was allowed a moment ago leads inside by the time it is dialled again.
    let rebinding = vec![vec![OUTSIDE], vec![INSIDE], vec![OUTSIDE], vec![INSIDE]];
    let (mut scene, inside, outside) = scene([("rebind.test", rebinding)].into(), DENY);
    assert_eq!(scene.socks("rebind.test:80"), Some(0));
    assert_eq!(
        scene.names.asked("rebind.test"),
        1,
        "the address that was asked about is dialled, not another"
    );
    assert_eq!(scene.record().text("reason"), "ok");
    assert_eq!(scene.socks("rebind.test:80"), Some(2));
    scene.denied("'rebind.test' leads to a denied address: the address 10.9.9.9: rule 'no-inside'");
    assert_eq!(scene.get("http://rebind.test/"), (200, "outside".to_owned()));
    assert_eq!(scene.record().text("reason"), "ok");
    assert_eq!(scene.names.asked("rebind.test"), 3);
    assert_eq!((inside.connections(), outside.connections()), (0, 2));
    assert!(scene.up.stop().0.success());
}

#[test]
fn a_connection_that_another_client_may_make_is_not_lent() {
    if !is_root() {
        return;
    }
    let deny = "[[rule]]\nname = \"not-for-you\"\nmatch = { from = \"10.0.1.2\", to = \"10.9.0.0/16\" }\naction = \"deny\"\n";
    let (mut scene, inside, _outside) = scene([("inside.test", vec![vec![INSIDE]])].into(), deny);
    scene.line.client.ip("addr add 10.0.1.2/24 dev eth0");
    assert_eq!(scene.get("http://inside.test/"), (200, "inside".to_owned()));
    assert_eq!(scene.record().text("reason"), "ok");
    assert_eq!(scene.get("http://inside.test/"), (200, "inside".to_owned()));
    assert_eq!(scene.record().text("reason"), "ok");
    assert_eq!(inside.connections(), 1, "the first connection is kept and used again");
    assert_eq!(scene.get_from("10.0.1.2", "http://inside.test/").0, 403);
    scene.denied("rule 'not-for-you'");
    assert_eq!(scene.get("http://inside.test/"), (200, "inside".to_owned()));
    assert_eq!(inside.connections(), 1);
    assert!(scene.up.stop().0.success());
}

#[test]
fn a_connection_through_a_hop_is_lent_to_whom_policy_lets_to_its_address() {
    if !is_root() {
        return;
    }
    let rules = "[[rule]]\nname = \"not-for-you\"\nmatch = { from = \"10.0.1.2\", to = \"10.9.0.0/16\" }\naction = \"deny\"\n\
                 [[rule]]\nname = \"hop\"\ncarrier = \"socks5://10.0.2.1:1080\"\nresolve = \"local\"\n";
    let mut scene = Scene::new([("inside.test", vec![vec![INSIDE]])].into(), "default = \"direct\"\n", rules);
    let hop = scene.line.server.run(|| socks_web("10.0.2.1:1080", "inside"));
    scene.line.client.ip("addr add 10.0.1.2/24 dev eth0");
    for _ in 0..2 {
        assert_eq!(scene.get("http://inside.test/"), (200, "inside".to_owned()));
        assert_eq!(scene.record().text("reason"), "ok");
    }
    assert_eq!(hop.connections(), 1, "the first connection is kept and used again");
    assert_eq!(scene.get_from("10.0.1.2", "http://inside.test/").0, 403);
    scene.denied("rule 'not-for-you'");
    assert_eq!(scene.get("http://inside.test/"), (200, "inside".to_owned()));
    assert_eq!(scene.record().text("reason"), "ok");
    assert_eq!(hop.connections(), 1, "it is still there for the client that may");
    assert!(scene.up.stop().0.success());
}

#[test]
fn warm_connections_of_a_name_are_for_whom_policy_lets_there() {
    if !is_root() {
        return;
    }
    let rules = "[[rule]]\nname = \"not-for-you\"\nmatch = { from = \"10.0.1.2\", to = \"10.0.2.0/24\" }\naction = \"deny\"\n\
                 [[rule]]\nname = \"warm\"\ncarrier = \"direct\"\nwarm = 1\nwarm_idle_ms = 600000\n";
    let (mut scene, _inside, outside) = scene([("outside.test", vec![vec![OUTSIDE]])].into(), rules);
    for _ in 0..3 {
        assert_eq!(scene.socks("outside.test:80"), Some(0));
        assert_eq!(scene.record().text("reason"), "ok");
    }
    // A flow may be denied there: nothing is dialled ahead, and each flow is asked about by itself.
    assert_eq!(outside.connections(), 3);
    assert!(scene.up.stop().0.success());
}
