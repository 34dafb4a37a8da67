//! Flows that cannot go to the wire stay with their sockets, and lose nothing.

use crate::{Flow, NO_PINS, RULE, flow, flow_on, metric};
use sidetrack_sys::sysctl;
use sidetrack_testkit::{Line, eventually, is_root};

/// The flow has gone on past its limit, and stays for this reason.
fn stays(mut flow: Flow, reason: &str) {
    flow.exchange(150_000);
    let line = format!("sidetrack_wire_stayed_flows_total{{reason=\"{reason}\"}} ");
    eventually(reason, || metric(&flow.up, &line) == 1);
    flow.exchange(1_000_000);
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    let record = up.record();
    assert_eq!(record.number("bytes_up"), 1_150_000, "{record:?}");
    assert_eq!(record.0["shunted"], false);
}

#[test]
fn sides_with_different_options() {
    if is_root() {
        let line = Line::new();
        line.client.run(|| sysctl::write("net/ipv4/tcp_timestamps", "0").expect("set"));
        stays(flow_on(line, false, "", RULE), "tcp_options");
    }
}

#[test]
fn a_side_whose_segments_are_too_large_for_the_other() {
    if is_root() {
        let line = Line::new();
        line.server.ip("link set eth0 mtu 1400");
        line.router.ip("link set to-server mtu 1400");
        stays(flow_on(line, false, "", RULE), "segments");
    }
}

#[test]
fn a_server_of_this_host() {
    if is_root() {
        let line = Line::new();
        let listener = line.router.run(|| std::net::TcpListener::bind("10.0.2.254:0").expect("bound"));
        let to = listener.local_addr().expect("an address");
        let listen = format!(
            "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"{to}\"\n{RULE}{NO_PINS}"
        );
        let up = line.router.run(move || crate::node::Up::start("default = \"deny\"\n", &listen));
        let client = line.client.run(|| std::net::TcpStream::connect("10.0.1.254:80").expect("connected"));
        let server = listener.accept().expect("accepted").0;
        stays(Flow { line, up, client, server }, "this_host");
    }
}

#[test]
fn a_side_whose_addresses_are_translated_by_others() {
    if is_root() {
        let line = Line::new();
        line.router.run(|| {
            let rules = "add table ip other; \
                         add chain ip other post { type nat hook postrouting priority 100; }; \
                         add rule ip other post oifname \"to-server\" ip saddr 10.0.2.254 snat to 10.0.2.253";
            sidetrack_testkit::nft(rules).expect("rules");
        });
        line.router.ip("addr add 10.0.2.253/24 dev to-server");
        stays(flow_on(line, false, "", RULE), "translated");
    }
}

#[test]
fn rules_that_keep_their_flows() {
    if is_root() {
        let rule = RULE.replace("fast_path = \"wire\", after_bytes = 100000", "fast_path = \"none\"");
        let mut flow = flow(false, "", &format!("{rule}[wire]\npins = \"none\"\nafter_bytes = 1000\n"));
        flow.exchange(2_000_000);
        assert_eq!(metric(&flow.up, "sidetrack_wire_taken_flows_total "), 0);
    }
}

#[test]
fn without_a_rule_the_table_says_when() {
    if is_root() {
        let rule = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n[wire]\npins = \"none\"\nafter_bytes = 100000\n";
        let mut flow = flow(false, "", rule).wired();
        flow.exchange(1_000_000);
    }
}
