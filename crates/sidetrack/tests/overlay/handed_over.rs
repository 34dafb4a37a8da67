//! Nodes that catch whole packets are upgraded: no packet passes the rules by, and connections through them go on.

use crate::node::Up;
use crate::node::upgrading::{Started, Upgrade, ends, stop};
use crate::packets::{Running, Sites, caught, tables_of};
use sidetrack_testkit::streams::both_ways;
use sidetrack_testkit::{LIMIT, Node, awaited, eventually, is_root, nft};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Nothing may pass without the overlay.
const CLOSED: &str = "default = \"direct\"\non_crash = \"closed\"\n";

/// The rules of a node that catches packets.
const TABLE: &str = "sidetrack-packets";

/// Time between two pieces of a transfer.
const PAUSE: Duration = Duration::from_millis(2);

/// Sites with a connection between their hosts, and what counts packets that pass without the overlay.
struct Scene {
    sites: Sites,
    up: Running,
    /// Client and server.
    ends: [TcpStream; 2],
    /// Where the server listens.
    to: SocketAddr,
    _listener: TcpListener,
}

impl Scene {
    fn new() -> Self {
        let sites = Sites::new();
        let listener = sites.right.run(|| TcpListener::bind("10.2.0.1:0").expect("a port"));
        let to = listener.local_addr().expect("bound");
        let up = sites.start_as([CLOSED; 2], "router", "reliable", &[to.port()], ["", ""]);
        let client =
            awaited("there is a way", || sites.left.run(move || TcpStream::connect_timeout(&to, LIMIT).ok()));
        let server = listener.accept().expect("accepted").0;
        for (node, net) in [(&sites.a, 2), (&sites.b, 1)] {
            // After the queue.
            let rules = format!(
                "add table ip past; add chain ip past out {{ type filter hook postrouting priority 0; }}; \
                 add rule ip past out ip daddr 10.{net}.0.0/24 oifname mid counter"
            );
            node.run(move || nft(&rules).expect("rules"));
        }
        Self { sites, up, ends: [client, server], to, _listener: listener }
    }

    /// Bytes in both directions while `work` is done, and some before and after it. Each of them arrives.
    fn transfer<T>(&self, work: impl FnOnce(&Self) -> T) -> T {
        let enough = Arc::new(AtomicBool::new(false));
        let ends = [(&self.ends[0], [1, 2]), (&self.ends[1], [2, 1])].map(|(end, seeds)| {
            let (end, enough) = (end.try_clone().expect("a copy"), enough.clone());
            std::thread::spawn(move || both_ways(end, seeds, &enough, Some(PAUSE)))
        });
        self.goes_on();
        let done = work(self);
        self.goes_on();
        enough.store(true, Relaxed);
        let [client, server] = ends.map(|end| end.join().expect("an end"));
        assert_eq!(client, [server[1], server[0]]);
        done
    }

    /// Waits until a new connection comes about.
    fn connects(&self) {
        let (to, left) = (self.to, &self.sites.left);
        eventually("a new connection", || left.run(move || TcpStream::connect_timeout(&to, LIMIT).is_ok()));
    }

    /// Waits until both nodes have caught more.
    fn goes_on(&self) {
        for up in [&self.up.a, &self.up.b] {
            let before = caught(up, "sent");
            eventually("packets are caught", || caught(up, "sent") > before + 20);
        }
    }

    /// No packet has left a node for the other site but over the overlay.
    fn nothing_passed(&self) {
        for node in [&self.sites.a, &self.sites.b] {
            let listed = node.run(|| nft("list table ip past").expect("a list"));
            assert!(listed.contains("counter packets 0 bytes 0"), "{listed}");
        }
    }
}

fn upgraded(up: &Up) -> Started {
    let mut upgrade = Upgrade::start(&up.folder(), &[]);
    let new = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(success, "{said}");
    new
}

/// Waits until a host has exactly these tables of ours.
fn has_tables(node: &Node, names: &[&str]) {
    eventually("its tables", || tables_of(node) == names);
}

#[test]
fn connections_go_on_through_upgrades_of_both_nodes_and_no_packet_passes_the_rules() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let new = scene.transfer(|scene| {
        upgraded(&scene.up.a);
        scene.goes_on();
        let of_b = upgraded(&scene.up.b);
        scene.goes_on();
        [upgraded(&scene.up.a), of_b]
    });
    scene.nothing_passed();
    for node in [&scene.sites.a, &scene.sites.b] {
        has_tables(node, &[TABLE]);
    }
    let Scene { sites, up: Running { a, b, .. }, .. } = scene;
    let [of_a, of_b] = new;
    stop(a, &of_a);
    stop(b, &of_b);
    for node in [&sites.a, &sites.b] {
        has_tables(node, &[]);
    }
}

#[test]
fn an_upgrade_that_is_taken_back_or_killed_leaves_the_rules_with_the_old_process() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    scene.transfer(|scene| {
        let mut upgrade = Upgrade::start(&scene.up.a.folder(), &["--confirm", "1ms"]);
        let back = upgrade.started();
        let (success, said) = upgrade.ended();
        assert!(!success && said.contains("taken everything back"), "{said}");
        ends(&back);
        scene.goes_on();
        let mut upgrade = Upgrade::start(&scene.up.a.folder(), &["--confirm", "60s"]);
        let killed = upgrade.started();
        upgrade.until("serves new connections");
        crate::node::send(killed.0, rustix::process::Signal::KILL);
        assert!(!upgrade.ended().0);
        ends(&killed);
    });
    scene.nothing_passed();
    let Scene { sites, up: Running { a, b, .. }, .. } = scene;
    for (node, up) in [(&sites.a, a), (&sites.b, b)] {
        has_tables(node, &[TABLE]);
        assert!(up.stop().0.success());
        has_tables(node, &[]);
    }
}

#[test]
fn the_old_process_is_killed_and_the_new_one_has_the_rules() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new();
    let mut upgrade = Upgrade::start(&scene.up.a.folder(), &["--confirm", "60s"]);
    let new = upgrade.started();
    upgrade.until("serves new connections");
    scene.up.a.signal(rustix::process::Signal::KILL);
    let _ = upgrade.ended();
    let log = &mut scene.up.a;
    let mut ways = || log.log_so_far().matches("packets pass over the overlay").count();
    eventually("packets have a way again", || ways() == 2);
    // As after a crash: connections that the old process has seen begin may be refused.
    scene.connects();
    scene.nothing_passed();
    has_tables(&scene.sites.a, &[TABLE]);
    crate::node::send(new.0, rustix::process::Signal::TERM);
    ends(&new);
    has_tables(&scene.sites.a, &[]);
}

#[test]
fn a_file_that_begins_or_ends_to_catch_packets_takes_effect_with_the_upgrade() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let (without, _) = scene.up.of_a.split_once("[[overlay.packets]]").expect("it catches");
    scene.up.a.rewrite(CLOSED, without);
    upgraded(&scene.up.a);
    has_tables(&scene.sites.a, &[]);
    scene.up.a.rewrite(CLOSED, &scene.up.of_a);
    let new = upgraded(&scene.up.a);
    has_tables(&scene.sites.a, &[TABLE]);
    scene.connects();
    let Scene { sites, up: Running { a, .. }, .. } = scene;
    stop(a, &new);
    has_tables(&sites.a, &[]);
}
