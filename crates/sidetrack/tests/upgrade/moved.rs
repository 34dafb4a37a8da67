//! Running flows go on in the new process: bytes on the way, half-closed sides, counts and records.

use crate::node::Up;
use crate::node::peers::{Client, Server};
use crate::replaced::{TOP, tables};
use crate::{Upgrade, stop};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

/// Flows of each kind.
const FLOWS: usize = 20;

/// Bytes of a flow whose client reads late: more than all buffers on the way hold.
const MUCH: usize = 12 << 20;

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 5 + at / 4096 + seed) as u8).collect()
}

/// A server that sends much at once, and returns what the client has sent until its end.
fn sender(count: usize) -> (SocketAddr, JoinHandle<Vec<usize>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let serve = move || {
        let one = |number: usize| {
            let (mut stream, _) = listener.accept().expect("a connection");
            std::thread::spawn(move || {
                // The number of the pattern comes first, so that the client can check what follows.
                stream.write_all(&[number as u8]).expect("sent");
                stream.write_all(&pattern(MUCH, number)).expect("sent");
                stream.shutdown(Shutdown::Write).expect("an end");
                let mut back = Vec::new();
                stream.read_to_end(&mut back).expect("an orderly end");
                back.len()
            })
        };
        let all: Vec<_> = (0..count).map(one).collect();
        all.into_iter().map(|thread| thread.join().expect("served")).collect()
    };
    (address, std::thread::spawn(serve))
}

#[test]
fn fifty_flows_move_three_times_and_every_byte_is_right() {
    let server = Server::start("127.0.0.1");
    let (much, sent) = sender(FLOWS / 2);
    let tables = tables(server.address)
        + &format!(
            "[[listen]]\nname = \"much\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{much}\"\n"
        );
    let up = Up::start(TOP, &tables);
    let (entry, entry_of_much) = (up.addresses("reverse")[0], up.addresses("much")[0]);
    let folder = up.folder();
    // Flows that are used between the upgrades, flows whose client has ended and reads on, and flows with full buffers.
    let mut talking: Vec<_> = (0..FLOWS).map(|_| Client::connect(entry).expect("a connection")).collect();
    let quiet: Vec<_> = (0..FLOWS).map(|_| Client::connect(entry).expect("a connection")).collect();
    let mut late: Vec<_> =
        (0..FLOWS / 2).map(|_| TcpStream::connect(entry_of_much).expect("a connection")).collect();
    for one in &mut late {
        one.write_all(b"x").expect("sent");
        // The path stands when the server has been heard.
        assert_eq!(one.peek(&mut [0]).expect("a byte"), 1);
    }
    let mut ended: Vec<TcpStream> = late.split_off(FLOWS / 4);
    ended.iter().for_each(|one| one.shutdown(Shutdown::Write).expect("an end"));
    let mut processes = Vec::new();
    for round in 0..3 {
        for (number, client) in talking.iter_mut().enumerate() {
            client.echo(&pattern(30_000, number + round)).expect("every byte comes back");
        }
        let mut upgrade = Upgrade::start(&folder, &[]);
        processes.push(upgrade.started());
        let (success, said) = upgrade.ended();
        assert!(
            success && said.contains("50 flows have moved") && said.contains("no flow is left"),
            "{said}"
        );
    }
    for client in talking.iter_mut() {
        client.echo(&pattern(300_000, 9)).expect("every byte comes back");
    }
    for stream in late.iter_mut().chain(&mut ended) {
        let mut number = [0];
        stream.read_exact(&mut number).expect("a number");
        let mut all = Vec::new();
        stream.read_to_end(&mut all).expect("an orderly end");
        assert!(all == pattern(MUCH, number[0].into()), "{} bytes", all.len());
    }
    let expected: Vec<_> = talking.iter().map(|client| client.address).collect();
    drop((late, ended));
    talking.into_iter().chain(quiet).for_each(|client| client.close().expect("an orderly end"));
    assert_eq!(sent.join().expect("served"), vec![1; FLOWS / 2], "what the clients have sent");
    let last = processes.pop().expect("three");
    let records = stop(up, &last);
    assert_eq!(records.len(), FLOWS * 5 / 2, "one record each");
    assert!(records.iter().all(|record| record.text("reason") == "ok"), "{records:?}");
    for client in expected {
        let record = records.iter().find(|record| record.address("client") == client).expect("a record");
        assert_eq!(record.number("bytes_up"), 3 * 30_000 + 300_000, "counts go on: {record:?}");
        assert_eq!((record.text("rule"), record.text("carrier")), ("all", "direct"));
    }
    let of_much: Vec<_> = records.iter().filter(|record| record.text("listener") == "much").collect();
    assert_eq!(of_much.len(), FLOWS / 2);
    assert!(
        of_much
            .iter()
            .all(|record| record.number("bytes_down") == MUCH as u64 + 1 && record.number("bytes_up") == 1)
    );
}
