//! How flows on the wire end.

use crate::node::admin::ask;
use crate::{Flow, RULE, flow, metric, on_the_wire};
use sidetrack_testkit::{eventually, is_root};
use std::io::{ErrorKind, Read, Write};

fn is_reset(stream: &mut impl Read) {
    assert_eq!(stream.read(&mut [0]).expect_err("reset").kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_killed_flow_is_reset_at_both_hosts_and_counted_to_the_byte() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        let mut flow = flow(v6, "", RULE).wired();
        flow.exchange(30_000);
        let id = on_the_wire(&flow.up).0["flow"].clone();
        let (status, body) = ask(&flow.up, "DELETE", &format!("/v1/flows/{id}"));
        assert_eq!(status, 200, "{body}");
        is_reset(&mut flow.client);
        is_reset(&mut flow.server);
        let record = flow.up.record();
        assert_eq!(record.text("reason"), "killed", "{record:?}");
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (180_000, 8));
        eventually("it is gone", || metric(&flow.up, "sidetrack_wire_flows ") == 0);
    }
}

#[test]
fn a_reset_of_a_host_reaches_the_other_one() {
    if !is_root() {
        return;
    }
    let Flow { client, mut server, mut up, line: _line } = flow(false, "", RULE).wired();
    sidetrack_sys::sockopt::reset_on_close(&client).expect("set");
    drop(client);
    is_reset(&mut server);
    assert_eq!(up.record().text("reason"), "client_reset");
}

#[test]
fn an_idle_flow_ends() {
    if !is_root() {
        return;
    }
    let rule = format!("{RULE}idle_timeout_ms = 1500\n");
    let mut flow = flow(false, "", &rule).wired();
    is_reset(&mut flow.client);
    is_reset(&mut flow.server);
    let record = flow.up.record();
    assert_eq!((record.text("reason"), record.0["shunted"] == true), ("idle", true));
}

#[test]
fn half_a_flow_goes_on() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE).wired();
    flow.client.shutdown(std::net::Shutdown::Write).expect("closed");
    assert_eq!(flow.server.read(&mut [0]).expect("the end"), 0);
    flow.server.write_all(&[3; 70_000]).expect("sent");
    flow.client.read_exact(&mut [0; 70_000]).expect("received");
    drop(flow.server);
    assert_eq!(flow.client.read(&mut [0]).expect("the end"), 0);
    let record = flow.up.record();
    assert_eq!(record.text("reason"), "ok", "{record:?}");
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (150_000, 70_008));
}

#[test]
fn the_end_of_the_node_is_the_end_of_its_flows() {
    if !is_root() {
        return;
    }
    let Flow { mut client, mut server, up, line: _line } = flow(false, "", RULE).wired();
    let (status, records) = up.stop();
    assert!(status.success());
    let reasons: Vec<_> = records.iter().map(|record| record.text("reason")).collect();
    assert_eq!(reasons, ["shutdown"]);
    is_reset(&mut client);
    is_reset(&mut server);
}
