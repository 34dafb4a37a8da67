//! Flows come back from the wire into two sockets, and go on as if they had never been there.

use crate::listeners::{DOORS, through};
use crate::node::Up;
use crate::node::admin::{ask, flows, show};
use crate::{Flow, RULE, flow, metric, on_the_wire, pass};
use sidetrack_sys::sockopt::tcp_info;
use sidetrack_testkit::{eventually, is_root};
use std::io::{Read, Write};
use std::net::Shutdown;

/// Brings the only flow back; returns its number.
fn bring_back(up: &Up) -> u64 {
    let id = on_the_wire(up).number("flow");
    let (status, body) = ask(up, "POST", &format!("/v1/flows/{id}/back"));
    assert_eq!((status, body.trim()), (200, &*format!("{{\"back\":[{id}]}}")));
    id
}

/// The last step of a flow.
fn last_step(up: &Up, id: u64) -> String {
    let body = show(up, &format!("/v1/flows/{id}/trace"));
    let trace: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let steps = trace["steps"].as_array().expect("a list");
    steps.last().expect("steps")["step"].as_str().expect("a word").to_owned()
}

#[test]
fn a_quiet_flow_comes_back_and_nothing_is_sent_again() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        let mut flow = flow(v6, "", RULE).wired();
        pass(&mut flow.server, &mut flow.client, 70_000);
        // An acknowledgement may be delayed. Then bytes that it is for would be sent again.
        eventually("all is acknowledged", || {
            [&flow.client, &flow.server]
                .iter()
                .all(|end| tcp_info(end).is_ok_and(|info| info.unacked_segments == 0))
        });
        let id = bring_back(&flow.up);
        assert_eq!(last_step(&flow.up, id), "back");
        let counted = &flows(&flow.up)[0];
        assert_eq!((counted.number("bytes_up"), counted.number("bytes_down")), (150_000, 70_008));
        flow.exchange(1000);
        pass(&mut flow.server, &mut flow.client, 1000);
        // Much at a time is sent again by itself where processors are busy.
        for end in [&flow.client, &flow.server] {
            assert_eq!(tcp_info(end).expect("TCP_INFO").retransmitted_segments, 0);
        }
        for _ in 0..3 {
            flow.exchange(1_000_000);
            pass(&mut flow.server, &mut flow.client, 1_000_000);
        }
        eventually("the kernel helps no more", || metric(&flow.up, "sidetrack_wire_flows ") == 0);
        assert_eq!(metric(&flow.up, "sidetrack_wire_back_flows_total "), 1);
        let Flow { mut client, mut server, mut up, line: _line } = flow;
        client.shutdown(Shutdown::Write).expect("closed");
        assert_eq!(server.read(&mut [0]).expect("the end"), 0);
        server.write_all(b"last").expect("sent");
        drop(server);
        client.read_exact(&mut [0; 4]).expect("received");
        assert_eq!(client.read(&mut [0]).expect("the end"), 0);
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (3_151_000, 3_071_012));
        assert_eq!(record.0["shunted"], true);
        let (status, rest) = up.stop();
        assert!(status.success() && rest.is_empty(), "{rest:?}");
    }
}

/// Both directions are busy: what is under way is sent again, and no byte is lost or counted twice.
fn comes_back_busy(up: &Up) {
    let then = on_the_wire(up);
    bring_back(up);
    eventually("its sockets carry more", || {
        let now = &flows(up)[0];
        ["bytes_up", "bytes_down"].iter().all(|key| now.number(key) > then.number(key) + 2_000_000)
    });
    eventually("the kernel helps no more", || metric(up, "sidetrack_wire_flows ") == 0);
}

#[test]
fn a_busy_flow_of_a_port() {
    through(DOORS[0], comes_back_busy);
}

#[test]
fn a_busy_flow_of_socks() {
    through(DOORS[1], comes_back_busy);
}

#[test]
fn a_busy_flow_of_http_connect() {
    through(DOORS[2], comes_back_busy);
}

#[test]
fn a_busy_flow_that_was_redirected() {
    through(DOORS[3], comes_back_busy);
}

#[test]
fn a_busy_flow_of_tproxy() {
    through(DOORS[4], comes_back_busy);
}

#[test]
fn one_that_cannot_come_back_goes_on() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE).wired();
    assert_eq!(ask(&flow.up, "POST", "/v1/flows/999/back").0, 404);
    flow.client.shutdown(Shutdown::Write).expect("closed");
    assert_eq!(flow.server.read(&mut [0]).expect("the end"), 0);
    let id = on_the_wire(&flow.up).number("flow");
    let (status, body) = ask(&flow.up, "POST", &format!("/v1/flows/{id}/back"));
    assert!(status == 409 && body.contains("a host has closed its side"), "{status} {body}");
    flow.server.write_all(&[3; 70_000]).expect("sent");
    flow.client.read_exact(&mut [0; 70_000]).expect("received");
    drop(flow.server);
    assert_eq!(flow.client.read(&mut [0]).expect("the end"), 0);
    let record = flow.up.record();
    assert_eq!((record.text("reason"), record.number("bytes_down")), ("ok", 70_008), "{record:?}");
}

#[test]
fn one_with_sockets_stays_as_it_is() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE);
    flow.exchange(1000);
    let id = flows(&flow.up)[0].number("flow");
    let (status, body) = ask(&flow.up, "POST", &format!("/v1/flows/{id}/back"));
    assert!(status == 409 && body.contains("it is not on the wire"), "{status} {body}");
    flow.exchange(1000);
}

#[test]
fn it_is_killed_as_any_flow() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE).wired();
    let id = bring_back(&flow.up);
    assert_eq!(ask(&flow.up, "DELETE", &format!("/v1/flows/{id}")).0, 200);
    for end in [&mut flow.client, &mut flow.server] {
        assert_eq!(end.read(&mut [0]).expect_err("reset").kind(), std::io::ErrorKind::ConnectionReset);
    }
    let record = flow.up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("killed", 150_000), "{record:?}");
}
