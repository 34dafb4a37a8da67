//! Nodes of an overlay are upgraded under flows: that which catches them, that which relays them, and that which delivers them. `a`
//! dials `b`, and `b` dials `c`.

use crate::load::Load;
use crate::node::peers::{Client, Server};
use crate::node::{Record, Up, admin, send};
use crate::scene::{Keys, Scene, overlay_address, path_to, status, wait_for};
use crate::{Started, Upgrade, ends, stop};
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

/// Bytes of one write of a transfer, and most bytes that have not come back.
const PART: u64 = 8192;
const AHEAD: u64 = 512 * 1024;

/// Bytes of a transfer that have to come back before and after an upgrade.
const SOME: u64 = 300_000;

/// Flows of each kind.
const FLOWS: usize = 3;

fn byte(at: u64, seed: u64) -> u8 {
    (at / 7 + at / 4096 + seed * 31) as u8
}

/// A transfer in both directions at a time, until it is told to end: a server sends everything back.
struct Transfer {
    address: SocketAddr,
    /// Bytes that came back, each of them right.
    back: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    threads: [JoinHandle<std::io::Result<u64>>; 2],
}

impl Transfer {
    fn start(entry: SocketAddr, seed: u64) -> Self {
        let stream = TcpStream::connect(entry).expect("a connection");
        stream.set_read_timeout(Some(LIMIT)).expect("set");
        stream.set_write_timeout(Some(LIMIT)).expect("set");
        let address = stream.local_addr().expect("bound");
        let (back, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let mut writing = stream.try_clone().expect("a copy");
        let (came, is_over) = (back.clone(), ends.clone());
        let write = move || {
            let mut sent = 0;
            while !is_over.load(Relaxed) {
                if sent >= came.load(Relaxed) + AHEAD {
                    std::thread::yield_now();
                    continue;
                }
                let part: Vec<_> = (sent..sent + PART).map(|at| byte(at, seed)).collect();
                writing.write_all(&part)?;
                sent += PART;
            }
            writing.shutdown(Shutdown::Write)?;
            Ok(sent)
        };
        let count = back.clone();
        let read = move || {
            let mut reader = BufReader::new(stream);
            reader.read_line(&mut String::new())?;
            let (mut buffer, mut at) = (vec![0; 65_536], 0);
            loop {
                let bytes = reader.read(&mut buffer)?;
                if bytes == 0 {
                    return Ok(at);
                }
                for got in &buffer[..bytes] {
                    assert_eq!(*got, byte(at, seed), "byte {at}");
                    at += 1;
                }
                count.store(at, Relaxed);
            }
        };
        Self { address, back, ends, threads: [std::thread::spawn(write), std::thread::spawn(read)] }
    }

    /// Waits until more bytes have come back.
    fn goes_on(&self) {
        let until = self.back.load(Relaxed) + SOME;
        eventually("bytes come back", || self.back.load(Relaxed) >= until);
    }

    /// Ends it in order. Returns its client and its bytes, the same in both directions.
    fn finish(self) -> (SocketAddr, u64) {
        self.ends.store(true, Relaxed);
        let [sent, back] = self.threads.map(|thread| thread.join().expect("right bytes").expect("not cut"));
        assert_eq!(sent, back, "every byte came back");
        (self.address, sent)
    }
}

/// A server that reads to the end, says so, and sends much when it is told to.
struct Late {
    address: SocketAddr,
    read: Receiver<Vec<u8>>,
    go: Sender<()>,
}

const MUCH: u64 = 3_000_000;

impl Late {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let ((say, read), (go, told)) = (channel(), channel());
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut all = Vec::new();
            stream.read_to_end(&mut all).expect("an orderly end");
            say.send(all).expect("the test waits");
            told.recv().expect("the test goes on");
            stream.write_all(&(0..MUCH).map(|at| byte(at, 9)).collect::<Vec<_>>()).expect("sent");
        });
        Self { address, read, go }
    }
}

/// Three nodes in a row.
struct Row {
    /// The new processes read them again.
    keys: Keys,
    a: Up,
    b: Up,
    c: Up,
}

impl Row {
    fn new(server: SocketAddr, late: SocketAddr) -> Self {
        let keys = Keys::new(&["a", "b", "c"]);
        let listener = |name: &str, to: SocketAddr| {
            format!(
                "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{to}\"\n"
            )
        };
        let c = Up::start("default = \"direct\"\n", &(keys.section("c", &[], true) + DELIVER));
        let to_c = [("c", overlay_address(&c))];
        let b = Up::start("", &keys.section("b", &to_c, true));
        let to_b = [("b", overlay_address(&b))];
        let tables = listener("reverse", server)
            + &listener("late", late)
            + "[[rule]]\nname = \"over\"\ncarrier = \"overlay:c\"\n"
            + &keys.section("a", &to_b, true);
        let row = Self { keys, a: Up::start("default = \"deny\"\n", &tables), b, c };
        wait_for(&row.a, "a path from a to c", |status| path_to(status, "c").len() == 3);
        row
    }

    fn entry(&self) -> SocketAddr {
        self.a.addresses("reverse")[0]
    }

    fn node(&self, name: &str) -> &Up {
        match name {
            "a" => &self.a,
            "b" => &self.b,
            _ => &self.c,
        }
    }

    /// Ends all nodes, of which one has been replaced. Returns the records of `a` and of `c`.
    fn stop(self, replaced: &str, last: &Started) -> [Vec<Record>; 2] {
        for up in [&self.a, &self.c] {
            eventually("no flow is left", || admin::flows(up).is_empty());
        }
        let Self { keys, a, b, c } = self;
        let end = |name: &str, up: Up| {
            if name == replaced {
                return stop(up, last);
            }
            let (status, records) = up.stop();
            assert!(status.success(), "{name}: {status}");
            records
        };
        let records = end("a", a);
        end("b", b);
        let delivered = end("c", c);
        drop(keys);
        [records, delivered]
    }
}

/// The records of one client's flow: exactly one, which ended in order with these bytes.
fn expect_one(records: &[Record], client: SocketAddr, [up, down]: [u64; 2]) {
    let ours: Vec<_> = records.iter().filter(|record| record.address("client") == client).collect();
    assert!(ours.len() == 1 && ours[0].text("reason") == "ok", "{ours:?}");
    assert_eq!((ours[0].number("bytes_up"), ours[0].number("bytes_down")), (up, down), "{:?}", ours[0]);
}

/// Upgrades this node under flows of all kinds.
fn upgraded(name: &str) {
    let (server, late) = (Server::start("127.0.0.1"), Late::start());
    let row = Row::new(server.address, late.address);
    let transfers: Vec<_> = (0..FLOWS).map(|seed| Transfer::start(row.entry(), seed as u64)).collect();
    let idle: Vec<_> = (0..FLOWS).map(|_| Client::connect(row.entry()).expect("a connection")).collect();
    let mut half = TcpStream::connect(row.a.addresses("late")[0]).expect("a connection");
    half.write_all(b"half").expect("sent");
    half.shutdown(Shutdown::Write).expect("an end");
    assert_eq!(late.read.recv_timeout(LIMIT).expect("the server reads"), b"half");
    transfers.iter().for_each(Transfer::goes_on);
    let mut upgrade = Upgrade::start(&row.node(name).folder(), &[]);
    let new = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(success, "{said}");
    if name != "b" {
        assert!(said.contains(&format!("{} sessions of the overlay go on", 2 * FLOWS + 1)), "{said}");
    }
    transfers.iter().for_each(Transfer::goes_on);
    let mut greetings = Vec::new();
    for mut client in idle {
        client.echo(b"after").expect("an idle flow goes on");
        greetings.push((client.address, client.greeting_bytes() + 5));
        client.close().expect("an orderly end");
    }
    late.go.send(()).expect("the server waits");
    half.set_read_timeout(Some(LIMIT)).expect("set");
    let mut much = Vec::new();
    half.read_to_end(&mut much).expect("an orderly end");
    assert!(much.len() as u64 == MUCH && (0..MUCH).zip(&much).all(|(at, got)| *got == byte(at, 9)));
    let half_client = half.local_addr().expect("bound");
    drop(half);
    let transfers: Vec<_> = transfers.into_iter().map(Transfer::finish).collect();
    // A flow that begins after it passes, too.
    let mut client = Client::connect(row.entry()).expect("a connection");
    client.echo(b"new").expect("an echo");
    client.close().expect("an orderly end");
    for records in row.stop(name, &new) {
        assert_eq!(records.len(), 2 * FLOWS + 2, "one record each: {records:?}");
        for (client, bytes) in &transfers {
            let record = records.iter().find(|record| record.address("client") == *client);
            let greeting = record.expect("a record").number("bytes_down") - bytes;
            assert!((10..64).contains(&greeting), "a greeting of {greeting} bytes");
            expect_one(&records, *client, [*bytes, bytes + greeting]);
        }
        greetings.iter().for_each(|(client, down)| expect_one(&records, *client, [5, *down]));
        expect_one(&records, half_client, [4, MUCH]);
    }
}

#[test]
fn the_node_that_catches_flows_is_upgraded() {
    upgraded("a");
}

#[test]
fn the_relay_is_upgraded() {
    upgraded("b");
}

#[test]
fn the_node_that_delivers_flows_is_upgraded() {
    upgraded("c");
}

#[test]
fn upgrades_in_a_row_of_all_nodes_cost_no_byte() {
    let (server, late) = (Server::start("127.0.0.1"), Late::start());
    let row = Row::new(server.address, late.address);
    let transfer = Transfer::start(row.entry(), 5);
    transfer.goes_on();
    let mut last: Vec<Started> = Vec::new();
    for _ in 0..2 {
        last = ["a", "b", "c"].map(|name| upgrade_of(row.node(name))).into();
    }
    transfer.goes_on();
    let (client, bytes) = transfer.finish();
    let counted = status(&row.a)["sessions_resumed"].as_u64();
    assert!(counted >= Some(1), "it has gone on over another path: {counted:?}");
    for up in [&row.a, &row.c] {
        eventually("no flow is left", || admin::flows(up).is_empty());
    }
    let Row { keys: _keys, a, b, c } = row;
    let records: Vec<_> = [a, b, c].into_iter().zip(&last).map(|(up, last)| stop(up, last)).collect();
    for records in [&records[0], &records[2]] {
        assert_eq!(records.len(), 1, "{records:?}");
        assert_eq!((records[0].address("client"), records[0].number("bytes_up")), (client, bytes));
    }
}

fn upgrade_of(up: &Up) -> Started {
    let mut upgrade = Upgrade::start(&up.folder(), &[]);
    let new = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(success, "{said}");
    new
}

/// A flow over two paths: the nodes at both of its ends are upgraded, and a relay of it.
fn over_paths(dissemination: &str) {
    let server = Server::start("127.0.0.1");
    let keys = format!("dissemination = \"{dissemination}\"\npaths = 2\n");
    let scene = Scene::by_rule(server.address, DELIVER, &keys, |_, to| to);
    let transfer = Transfer::start(scene.entry(), 3);
    transfer.goes_on();
    let Scene { keys, a, b1, b2, c } = scene;
    let nodes = [a, b1.expect("it runs"), c];
    let new: Vec<_> = nodes
        .iter()
        .map(|up| {
            let new = upgrade_of(up);
            transfer.goes_on();
            new
        })
        .collect();
    let (client, bytes) = transfer.finish();
    for up in [&nodes[0], &nodes[2]] {
        eventually("no flow is left", || admin::flows(up).is_empty());
    }
    let records: Vec<_> = nodes.into_iter().zip(&new).map(|(up, new)| stop(up, new)).collect();
    drop((b2, keys));
    let detail = records[0][0].text("detail");
    assert!(detail.contains("paths opened, bytes sent on each"), "its paths are told: {detail}");
    for records in [&records[0], &records[2]] {
        assert_eq!(records.len(), 1, "{records:?}");
        assert_eq!((records[0].address("client"), records[0].text("reason")), (client, "ok"));
        assert_eq!(records[0].number("bytes_up"), bytes);
    }
}

#[test]
fn a_striped_flow_goes_on() {
    over_paths("stripe");
}

#[test]
fn a_duplicated_flow_goes_on() {
    over_paths("duplicate");
}

#[test]
fn no_flow_is_refused_while_links_are_away() {
    let (server, late) = (Server::start("127.0.0.1"), Late::start());
    let row = Row::new(server.address, late.address);
    let load = Load::start(row.entry(), 2, false);
    let last: Vec<_> = ["a", "b", "c"]
        .map(|name| {
            load.goes_on();
            let new = upgrade_of(row.node(name));
            load.goes_on();
            new
        })
        .into();
    load.finish();
    let Row { keys: _keys, a, b, c } = row;
    let records: Vec<_> = [a, b, c].into_iter().zip(&last).map(|(up, last)| stop(up, last)).collect();
    let bad: Vec<_> = records[0].iter().filter(|record| record.text("reason") != "ok").collect();
    assert!(bad.is_empty() && !records[0].is_empty(), "{bad:?}");
}

/// An upgrade of this node that is not confirmed, and one whose new process is killed.
fn taken_back(name: &str) {
    let (server, late) = (Server::start("127.0.0.1"), Late::start());
    let row = Row::new(server.address, late.address);
    let transfer = Transfer::start(row.entry(), 1);
    let mut idle = Client::connect(row.entry()).expect("a connection");
    transfer.goes_on();
    let mut upgrade = Upgrade::start(&row.node(name).folder(), &["--confirm", "60s"]);
    let back = upgrade.started();
    upgrade.until("serves new connections");
    transfer.goes_on();
    // The new process has no links, and uses those of the old one.
    let mut through = Client::connect(row.entry()).expect("a connection");
    through.echo(b"unconfirmed").expect("an echo");
    let paths = status(row.node(name))["paths"].as_array().map(Vec::len);
    assert_eq!(paths, Some(2), "the status comes from the old process");
    send(back.0, Signal::KILL);
    assert!(!upgrade.ended().0);
    ends(&back);
    transfer.goes_on();
    let mut upgrade = Upgrade::start(&row.node(name).folder(), &["--confirm", "1ms"]);
    let back = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(!success && said.contains("taken everything back"), "{said}");
    ends(&back);
    transfer.goes_on();
    idle.echo(b"after").expect("an idle flow goes on");
    idle.close().expect("an orderly end");
    drop(through);
    let (client, bytes) = transfer.finish();
    for up in [&row.a, &row.c] {
        eventually("no flow is left", || admin::flows(up).is_empty());
    }
    let (status, records) = row.a.stop();
    assert!(status.success(), "{status}");
    let ours: Vec<_> = records.iter().filter(|record| record.address("client") == client).collect();
    assert!(ours.len() == 1 && ours[0].number("bytes_up") == bytes, "{ours:?}");
}

#[test]
fn an_upgrade_of_the_node_that_catches_flows_is_taken_back() {
    taken_back("a");
}

#[test]
fn an_upgrade_of_the_node_that_delivers_flows_is_taken_back() {
    taken_back("c");
}
