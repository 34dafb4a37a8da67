//! More connections than there is room for: shed with a reason, never by a busy loop, and all is well afterwards.

use crate::binary::{Binary, reasons, role};
use crate::node::Node;
use crate::peers::{Server, connect, expect, expect_echo, expect_reset, patient};
use crate::random::Random;
use crate::socks::{v5_connect, v5_reply, v5_request};
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::{LIMIT, awaited};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Child;

/// Connects; none if it was reset at once.
fn try_connect(to: SocketAddr) -> Option<TcpStream> {
    match TcpStream::connect_timeout(&to, LIMIT) {
        Ok(stream) => Some(patient(stream)),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            None
        }
    }
}

#[test]
fn a_low_limit_sheds_and_recovers() {
    sidetrack_sys::caps::raise_open_files_limit().unwrap();
    let server = Server::echo();
    let to = server.address.to_string();
    let node = Binary::start("", 256);
    // 128 are kept back, two pipes of two set aside; a flow has two.
    let room = (256 - 128 - 4) / 2;
    let mut held: Vec<_> = (0..room).map(|_| v5_connect(node.entry, &to)).collect();
    let shed = 2000;
    for _ in 0..shed {
        if let Some(mut stream) = try_connect(node.entry) {
            expect_reset(&mut stream);
        }
    }
    assert!(node.open_files() < 256);
    node.expect_calm();
    for stream in &mut held {
        expect_echo(stream, b"still served");
    }
    drop(held);
    let mut stream = awaited("there is room again", || {
        let mut stream = try_connect(node.entry)?;
        stream.write_all(&[5, 1, 0]).ok()?;
        let mut answer = [0; 2];
        stream.read_exact(&mut answer).ok().map(|()| stream)
    });
    stream.write_all(&crate::socks::v5_request(1, &to)).unwrap();
    assert_eq!(crate::socks::v5_reply(&mut stream), 0);
    expect_echo(&mut stream, b"served again");
    drop(stream);
    node.await_records(room + shed + 1);
    let records = node.stop();
    let reasons = reasons(&records);
    assert_eq!(reasons.iter().map(|(reason, _)| &**reason).collect::<Vec<_>>(), ["limit", "ok"]);
    assert!(reasons[0].1 >= shed, "{reasons:?}");
    assert_eq!(reasons[1].1, room + 1);
    let shed = records.iter().find(|record| record["reason"] == "limit").unwrap();
    assert!(shed["detail"].as_str().unwrap().contains("RLIMIT_NOFILE"), "{shed}");
}

#[test]
fn large_flows_share_the_pipes_that_are_set_aside() {
    const FLOWS: usize = 12;
    let server = Server::echo();
    let to = server.address.to_string();
    let node = Binary::start("", 512);
    let (before, set_aside) = (node.pipe_ends(), (512 - 128) / 32 / 2);
    let large = vec![7; 1 << 20];
    let mut held: Vec<_> = (0..FLOWS).map(|_| v5_connect(node.entry, &to)).collect();
    for stream in &mut held {
        expect_echo(stream, &large);
    }
    let lent = (node.pipe_ends() - before) / 2;
    assert!(lent > 0 && lent <= set_aside, "{lent} pipes where {set_aside} are set aside");
    // Those that found none are copied, and go on.
    for stream in &mut held {
        expect_echo(stream, &large);
    }
    drop(held);
    node.await_records(FLOWS);
    assert_eq!(reasons(&node.stop()), [("ok".to_owned(), FLOWS)]);
}

#[test]
fn without_a_descriptor_to_accept_with_it_rests() {
    let server = Server::echo();
    let to = server.address.to_string();
    // Without CAP_SYS_RESOURCE only the same user may change a process's limits.
    let same_user = if rustix::process::geteuid().is_root() { "user = 'root'" } else { "" };
    let node = Binary::start(same_user, 1024);
    let began = std::time::Instant::now();
    let mut first = v5_connect(node.entry, &to);
    expect_echo(&mut first, b"made");
    // The test takes the descriptors away while we run.
    node.limit_open_files(node.open_files());
    // The kernel takes the connections into its queue; no worker can accept them.
    let waiting: Vec<_> = (0..50).map(|_| connect(node.entry)).collect();
    node.expect_calm();
    expect_echo(&mut first, b"still served");
    let complaints = || node.log().iter().filter(|line| line.contains("cannot accept")).count();
    awaited("it says so", || (complaints() > 0).then_some(()));
    // It tries a hundred times a second. All workers together write eight lines at once, and one per second.
    let (lines, bound) = (complaints(), 9 + began.elapsed().as_secs());
    assert!(lines as u64 <= bound, "{lines} lines in the log about one cause, not {bound}");
    node.limit_open_files(1024);
    drop(waiting);
    expect_echo(&mut v5_connect(node.entry, &to), b"served again");
    drop(first);
    node.await_records(52);
    let records = node.stop();
    let reasons = reasons(&records);
    assert_eq!(reasons.iter().map(|(reason, _)| &**reason).collect::<Vec<_>>(), ["client_gone", "ok"]);
    assert_eq!(reasons[1].1, 2);
}

/// Connections that each of the three client processes opens.
const OF_ONE_CLIENT: usize = 7000;

/// What a client process says: how many of its connections stand, and how many were reset.
fn counts(client: &mut Child) -> (usize, usize) {
    let lines = BufReader::new(client.stdout.as_mut().expect("piped")).lines();
    let line = lines.map_while(Result::ok).find(|line| line.contains("standing ")).expect("its counts");
    let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    (numbers[0], numbers[1])
}

#[test]
fn more_than_twenty_thousand_connections() {
    let limit = sidetrack_sys::caps::raise_open_files_limit().unwrap().min(20_000);
    // No client finishes a handshake, so that the limit is met by clients alone.
    let node = Binary::start("limits = { handshake_timeout_ms = 600000, max_handshakes = 1000000 }", limit);
    let entry = node.entry.to_string();
    let mut clients: Vec<_> = (0..3).map(|_| role("limits::client_of_many_connections", &entry)).collect();
    let (mut standing, mut reset) = (0, 0);
    for client in &mut clients {
        let (of_one, of_one_reset) = counts(client);
        standing += of_one;
        reset += of_one_reset;
    }
    assert_eq!(standing + reset, 3 * OF_ONE_CLIENT, "every connection stands or was reset");
    let room = usize::try_from(limit).unwrap() / 2;
    assert!(standing <= room && standing > room * 8 / 10, "{standing} of {limit} descriptors");
    node.expect_calm();
    for mut client in clients {
        // It goes when it is told to, with all its connections.
        drop(client.stdin.take());
        assert!(client.wait().unwrap().success());
    }
    let server = Server::echo();
    let mut stream = awaited("there is room again", || {
        let mut stream = try_connect(node.entry)?;
        stream.write_all(&[5, 1, 0]).ok()?;
        stream.read_exact(&mut [0; 2]).ok().map(|()| stream)
    });
    stream.write_all(&crate::socks::v5_request(1, &server.address.to_string())).unwrap();
    assert_eq!(crate::socks::v5_reply(&mut stream), 0);
    expect_echo(&mut stream, b"served again");
    drop(stream);
    node.await_records(3 * OF_ONE_CLIENT + 1);
    let reasons = reasons(&node.stop());
    let count = |name: &str| reasons.iter().find(|(reason, _)| reason == name).map_or(0, |(_, count)| *count);
    assert_eq!((count("client_gone"), count("ok")), (standing, 1), "{reasons:?}");
    assert!(count("limit") >= reset, "{reasons:?}");
    assert_eq!(reasons.len(), 3, "{reasons:?}");
}

#[test]
#[ignore = "a client process of the test before"]
fn client_of_many_connections() {
    let Ok(entry) = std::env::var("SIDETRACK_ROLE") else { return };
    let entry: SocketAddr = entry.parse().unwrap();
    sidetrack_sys::caps::raise_open_files_limit().unwrap();
    let mut standing: Vec<_> = (0..OF_ONE_CLIENT).filter_map(|_| try_connect(entry)).collect();
    // A connection that stands is greeted in return, one that is shed is reset.
    standing.retain_mut(|stream| {
        let greeted = stream.write_all(&[5, 1, 0]).and_then(|()| stream.read_exact(&mut [0; 2]));
        greeted.map_err(|error| assert_eq!(error.kind(), ErrorKind::ConnectionReset)).is_ok()
    });
    println!("standing {} reset {}", standing.len(), OF_ONE_CLIENT - standing.len());
    std::io::stdout().flush().unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn receivers_that_do_not_read_cost_bounded_memory_and_no_time() {
    const FLOWS: usize = 40;
    let (sink, accepted) = std::sync::mpsc::sync_channel(FLOWS);
    // Accepts, and never reads.
    let server = Server::start(move |stream| sink.send(stream).unwrap());
    let node = Binary::start("", 1024);
    let to = server.address.to_string();
    let mut clients: Vec<_> = (0..FLOWS).map(|_| v5_connect(node.entry, &to)).collect();
    let accepted: Vec<_> = clients.iter().map(|_| accepted.recv_timeout(LIMIT).unwrap()).collect();
    let before = node.resident_bytes();
    let block = Random::new(4).bytes(1 << 16);
    let mut written = 0;
    let mut quiet = 0;
    while quiet < 50 {
        let mut moved = 0;
        for client in &mut clients {
            client.set_nonblocking(true).unwrap();
            while let Ok(n) = client.write(&block) {
                moved += n;
            }
        }
        written += moved;
        quiet = if moved == 0 { quiet + 1 } else { 0 };
        std::thread::park_timeout(std::time::Duration::from_millis(2));
    }
    let grown = node.resident_bytes().saturating_sub(before);
    // 64 KiB is the bound of a direction; the rest of what was written waits in sockets and pipes. An allocator takes memory
    // in huge pages of 2 MiB, for each of its arenas.
    let bound = FLOWS as u64 * (96 << 10) + (8 << 20);
    assert!(grown < bound, "{grown} bytes for {FLOWS} flows that took {written}");
    assert!(written > FLOWS << 17, "the path was never full: {written}");
    node.expect_calm();
    drop((clients, accepted));
    let reasons = reasons(&node.stop());
    assert_eq!(reasons.iter().map(|(_, count)| count).sum::<usize>(), FLOWS, "{reasons:?}");
}

#[test]
fn half_closed_and_idle_flows_cost_no_time() {
    const FLOWS: usize = 30;
    let (sink, accepted) = std::sync::mpsc::sync_channel(FLOWS);
    // Says so much that the direction changes to a pipe, and then no more; closes nothing.
    let server = Server::start(move |mut stream| {
        stream.write_all(&[1; 400_000]).unwrap();
        sink.send(stream).unwrap();
    });
    let node = Binary::start("", 1024);
    let to = server.address.to_string();
    let mut clients: Vec<_> = (0..FLOWS).map(|_| v5_connect(node.entry, &to)).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.read_exact(&mut vec![0; 400_000]).unwrap();
        match number % 3 {
            0 => client.shutdown(std::net::Shutdown::Write).unwrap(),
            1 => {}
            _ => client.write_all(b"some bytes that nobody reads").unwrap(),
        }
    }
    let accepted: Vec<_> = clients.iter().map(|_| accepted.recv_timeout(LIMIT).unwrap()).collect();
    node.expect_calm();
    drop((clients, accepted));
    node.await_records(FLOWS);
    let reasons = reasons(&node.stop());
    assert_eq!(reasons.iter().map(|(_, count)| count).sum::<usize>(), FLOWS, "{reasons:?}");
}

#[test]
fn of_those_that_say_nothing_the_oldest_leaves_for_a_new_client() {
    let server = Server::echo();
    let node = Node::start(
        "limits = { max_handshakes = 2, handshake_timeout_ms = 3600000 }\n[[listen]]\nname = 'in'\nkind = 'socks'\n\
         address = '127.0.0.1:0'\n",
    );
    let mut silent: Vec<_> = Vec::new();
    for _ in 0..2 {
        let mut client = connect(node.entry());
        // With the answer it has its place: two workers may take two connections in any order.
        client.write_all(b"\x05\x01\x00").expect("sent");
        expect(&mut client, b"\x05\x00");
        silent.push(client);
    }
    // Those whose handshake is over take no place.
    let mut served: Vec<_> = (0..3).map(|_| v5_connect(node.entry(), &server.address.to_string())).collect();
    expect_reset(&mut silent[0]);
    let ended = node.ended_when(1);
    assert_eq!((ended[0].reason, ended.len()), (EndReason::Limit, 1));
    assert!(ended[0].detail.as_deref().is_some_and(|text| text.contains("max_handshakes")), "{ended:?}");
    for client in &mut served {
        expect_echo(client, b"served");
    }
    silent[1].write_all(&v5_request(1, &server.address.to_string())).expect("sent");
    assert_eq!(v5_reply(&mut silent[1]), 0, "the second is still waited for");
}
