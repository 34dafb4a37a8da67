//! Several workers: answers of servers come to the worker that asked, by port and by address.

use crate::node::peers::visit;
use crate::site::{ENGINE, Site};
use sidetrack_testkit::is_root;
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Twenty-four connections through three workers: what sources the servers saw.
fn sources(engine: &str, addresses: &[&str]) -> BTreeSet<SocketAddr> {
    let mut site = Site::new();
    for address in addresses {
        site.line.router.ip(&format!("addr add {address}/24 dev to-server"));
    }
    let server = site.server("10.0.2.1");
    let listen = format!(
        "[[listen]]\nkind = \"engine\"\naddress = \"{ENGINE}\"\ninterfaces = [\"to-client\", \"to-server\"]\n\
         engine = {{ {engine} }}\nto = \"{}\"\n",
        server.address
    );
    site.start("workers = 3\n", &listen);
    let seen: BTreeSet<_> = site
        .line
        .client
        .run(|| (0..24).map(|_| visit(ENGINE.parse().expect("an address"), b"which worker?").1).collect());
    for _ in 0..24 {
        assert_eq!(site.record().text("reason"), "ok");
    }
    seen
}

#[test]
fn by_port() {
    if !is_root() {
        return;
    }
    let seen = sources("sources = [\"10.0.2.254\"], source_ports = \"61000-61299\"", &[]);
    // A hundred ports each: all three had work.
    let blocks: BTreeSet<_> = seen.iter().map(|source| (source.port() - 61_000) / 100).collect();
    assert_eq!(blocks.into_iter().collect::<Vec<_>>(), [0, 1, 2], "{seen:?}");
}

#[test]
fn by_address() {
    if !is_root() {
        return;
    }
    let seen = sources(
        "sources = [\"10.0.2.11\", \"10.0.2.12\", \"10.0.2.13\"], steering = \"ip\"",
        &["10.0.2.11", "10.0.2.12", "10.0.2.13"],
    );
    let ips: BTreeSet<_> = seen.iter().map(|source| source.ip().to_string()).collect();
    assert_eq!(ips.into_iter().collect::<Vec<_>>(), ["10.0.2.11", "10.0.2.12", "10.0.2.13"]);
}
