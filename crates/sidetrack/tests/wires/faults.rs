//! Faults while a flow is on the wire: closed windows, hosts that ask whether the other one is there, no room, and interfaces and
//! addresses that go.

use crate::node::Up;
use crate::node::admin::{ask, flows};
use crate::{Flow, RULE, address, flow, metric, on_the_wire, pass};
use sidetrack_sys::sockopt::{set_keepalive, tcp_info};
use sidetrack_testkit::{Line, awaited, eventually, is_root};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// More than all buffers between both ends.
const MUCH: usize = 40_000_000;

/// A server that takes bytes acknowledges them sooner.
const CLOSED: Duration = Duration::from_millis(500);

fn bring_back(up: &Up) -> (u16, String) {
    let id = on_the_wire(up).number("flow");
    ask(up, "POST", &format!("/v1/flows/{id}/back"))
}

/// The server takes nothing until its window is closed, then all. `then` is called in between.
fn closes_its_window(then: fn(&Up)) {
    if !is_root() {
        return;
    }
    let Flow { mut client, mut server, mut up, line: _line } = flow(false, "", RULE).wired();
    let seen = client.try_clone().expect("a copy");
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            client.write_all(&vec![5; MUCH]).expect("sent");
            client
        });
        eventually("the window is closed", || {
            let info = tcp_info(&seen).expect("TCP_INFO");
            // A segment that the server has no room for is sent again and again.
            info.unsent_bytes > 0 && (info.unacked_segments == 0 || info.last_ack > CLOSED)
        });
        then(&up);
        let mut received = vec![0; MUCH];
        server.read_exact(&mut received).expect("received");
        assert!(received.iter().all(|byte| *byte == 5));
        drop(sender.join().expect("the client"));
    });
    drop((seen, server));
    let record = up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("ok", (150_000 + MUCH) as u64));
}

#[test]
fn a_closed_window_opens_again() {
    closes_its_window(|_| {});
}

#[test]
fn a_flow_comes_back_while_a_window_is_closed() {
    closes_its_window(|up| assert_eq!(bring_back(up).0, 200));
}

#[test]
fn hosts_ask_whether_the_other_one_is_there() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE).wired();
    let second = Duration::from_secs(1);
    set_keepalive(&flow.client, second, second, 3).expect("set");
    let quiet = || tcp_info(&flow.client).expect("TCP_INFO").last_ack;
    for _ in 0..2 {
        eventually("it is quiet", || quiet() > second / 2);
        // The kernel gives up after three probes without an answer: then the next read would fail.
        eventually("a probe is answered", || quiet() < second / 4);
    }
    let counted = on_the_wire(&flow.up);
    assert_eq!(
        (counted.number("bytes_up"), counted.number("bytes_down")),
        (150_000, 8),
        "probes have no bytes"
    );
    flow.exchange(10_000);
}

#[test]
fn a_flow_without_room_keeps_its_sockets_until_there_is_room() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let listener = line.server.run(|| TcpListener::bind("10.0.2.1:0").expect("bound"));
    let to = address(&listener);
    let tables = format!(
        "[wire]\npins = \"none\"\nflows_max = 16\n\
         [[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"{to}\"\n{RULE}"
    );
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let connect = || {
        let client = line.client.run(|| TcpStream::connect("10.0.1.254:80").expect("connected"));
        (client, listener.accept().expect("accepted").0)
    };
    let mut all: Vec<_> = (0..16).map(|_| connect()).collect();
    for (at, (client, server)) in all.iter_mut().enumerate() {
        pass(client, server, 150_000);
        eventually("it is on the wire", || metric(&up, "sidetrack_wire_taken_flows_total ") == at as u64 + 1);
    }
    let (mut client, mut server) = connect();
    pass(&mut client, &mut server, 150_000);
    eventually("it stays", || metric(&up, "sidetrack_wire_stayed_flows_total{reason=\"full\"} ") > 0);
    pass(&mut client, &mut server, 1_000_000);
    pass(&mut server, &mut client, 1_000_000);
    drop(all.pop());
    eventually("there is room", || metric(&up, "sidetrack_wire_taken_flows_total ") == 17);
    pass(&mut client, &mut server, 1_000_000);
    let bytes = |flow: &crate::Record| (flow.number("bytes_up"), flow.number("bytes_down"));
    awaited("it is counted", || {
        flows(&up).iter().any(|flow| bytes(flow) == (2_150_000, 1_000_000)).then_some(())
    });
}

#[test]
fn a_flow_whose_interface_is_gone_does_not_come_back_and_ends_when_it_is_idle() {
    if !is_root() {
        return;
    }
    let rule = format!("{RULE}idle_timeout_ms = 3000\n");
    let mut flow = flow(false, "", &rule).wired();
    flow.line.router.ip("link del to-server");
    let (status, body) = bring_back(&flow.up);
    assert!(status == 409 && body.contains("the kernel has refused a step"), "{status} {body}");
    let record = flow.up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("idle", 150_000), "{record:?}");
}

#[test]
fn a_flow_whose_address_was_removed_goes_on_when_it_is_there_again() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE).wired();
    flow.line.router.ip("addr del 10.0.1.254/24 dev to-client");
    let (status, body) = bring_back(&flow.up);
    assert!(status == 409 && body.contains("the kernel has refused a step"), "{status} {body}");
    flow.line.router.ip("addr add 10.0.1.254/24 dev to-client");
    flow.exchange(100_000);
    assert_eq!(bring_back(&flow.up).0, 200);
    flow.exchange(100_000);
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    let record = up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("ok", 350_000), "{record:?}");
}
