//! A node with a packet engine refuses an upgrade by name, and loses nothing by it.

use crate::node::peers::{Client, visit};
use crate::node::upgrading::{Upgrade, ends};
use crate::site::{ENGINE, Site, engine};
use sidetrack_testkit::is_root;

#[test]
fn an_upgrade_is_refused_before_anything_moves() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &engine(&format!("name = \"core\"\nto = \"{}\"", server.address)));
    let at = ENGINE.parse().expect("an address");
    let mut client = site.line.client.run(move || Client::connect(at).expect("a connection"));
    let mut upgrade = Upgrade::start(&site.up.as_ref().expect("started").folder(), &[]);
    let new = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(!success && said.contains("listener 'core' of kind engine has its interfaces"), "{said}");
    assert!(said.contains("nothing has moved"), "{said}");
    ends(&new);
    client.echo(b"as before").expect("its connection goes on");
    client.close().expect("an orderly end");
    site.line.client.run(move || visit(at, b"and a new one"));
    assert!(site.up.take().expect("started").stop().0.success());
}
