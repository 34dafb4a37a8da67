//! Other programs that meddle with the firewall and the routing.

use crate::node::Up;
use crate::node::peers::{Server, visit};
use sidetrack_sys::netlink::{Protocol, Received, Socket};
use sidetrack_sys::route;
use sidetrack_testkit::{Line, is_root, nft};

const TPROXY: &str = "[[listen]]\nname = \"router\"\nkind = \"tproxy\"\ninterfaces = \"to-client\"\n\
                      [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n";

/// Flows of another host are carried by us after another program has done this on the router.
fn carried_all_the_same(meddle: fn()) {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
    let mut up = line.router.run(|| Up::start("default = \"deny\"\n", TPROXY));
    line.router.run(meddle);
    for server in &servers {
        let to = server.address;
        let (client, seen, _) = line.client.run(move || visit(to, b"word"));
        assert_ne!(client.ip(), seen.ip(), "carried on by us");
        assert_eq!(up.record().fate(), ("all", "direct", "ok"));
    }
    assert!(up.stop().0.success());
}

#[test]
fn a_flush_of_the_whole_ruleset_leaves_steering() {
    carried_all_the_same(|| {
        nft("add table inet somebody");
        nft("flush ruleset");
    });
}

/// Groups of rtnetlink that tell of changed policy rules and routes (`RTNLGRP_*` of linux/rtnetlink.h).
const CHANGES: [u32; 4] = [7, 8, 11, 19];

/// Removes what we added to the routing of this host, as a network service does that restarts, and waits until it is back.
fn remove_routing() {
    let before = route::ours().expect("routes");
    assert_eq!((before.rules.len(), before.local_defaults.len()), (2, 2), "IPv4 and IPv6");
    let mut changes = Socket::open(Protocol::Route).expect("netlink");
    CHANGES.iter().try_for_each(|group| changes.join(*group)).expect("joined");
    assert_eq!(route::remove_ours().expect("removed"), 4);
    let back = (0..100).any(|_| {
        // Each change is told; the socket has a limit of time.
        assert!(matches!(changes.receive(), Ok(Received::Bytes(_))), "no change in time");
        route::ours().expect("routes") == before
    });
    assert!(back, "the routing is back");
}

#[test]
fn routing_that_somebody_removes_comes_back() {
    carried_all_the_same(remove_routing);
}
