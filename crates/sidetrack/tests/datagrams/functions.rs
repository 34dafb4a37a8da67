//! Functions on flows of UDP: `count` and `limit`.

use super::node::admin;
use super::{Echo, client, dropped, echo, socks, up};
use sidetrack_testkit::eventually;

/// One byte a second in bursts of 1460: the first datagram of a flow uses the burst up, and more.
const FUNCTIONS: &str = "[function.all]\nkind = \"count\"\n\
                         [function.slow]\nkind = \"limit\"\nbytes_per_second = 1\nburst_bytes = 1460\n\
                         direction = \"up\"\nshare = \"flow\"\n";

#[test]
fn datagrams_are_counted_and_those_above_the_bandwidth_are_dropped() {
    let server = Echo::start("127.0.0.1");
    let rule = "[[rule]]\nname = \"all\"\nmatch = { protocol = \"udp\" }\ncarrier = \"direct\"\nchain = [\"all\", \"slow\"]\n";
    let up = up(&server.address.to_string(), "", &format!("{rule}{FUNCTIONS}"));
    let clients = [client(up.addresses("dns")[0]), client(up.addresses("dns")[0])];
    for client in &clients {
        assert_eq!(echo(client, &[7; 9000]).len(), 9000, "each flow has a bandwidth of its own");
        for _ in 0..3 {
            client.send(&[8; 900]).unwrap();
        }
        // An empty datagram needs no bandwidth. It comes behind the others.
        assert_eq!(echo(client, b""), b"");
    }
    eventually("the others are dropped", || dropped(&up, "limited") == 6);
    let functions = admin::show(&up, "/v1/functions");
    // Two datagrams of 9000 bytes and six of 900 in, two of 9000 out.
    assert!(
        functions.contains("\"bytes_up\":23400") && functions.contains("\"bytes_down\":18000"),
        "{functions}"
    );
}

#[test]
fn functions_apply_to_socks_clients() {
    let server = Echo::start("127.0.0.1");
    let rule = "[[rule]]\nname = \"all\"\nmatch = { protocol = \"udp\" }\ncarrier = \"direct\"\nchain = [\"all\", \"slow\"]\n";
    let up = socks::up("", &format!("{rule}{FUNCTIONS}"));
    let client = socks::Associated::new(up.addresses("proxy")[0]);
    client.echo(server.address, &[7; 9000]);
    client.send(&server.address.to_string(), &[8; 900]);
    client.echo(server.address, b"");
    eventually("it is dropped", || dropped(&up, "limited") == 1);
}
