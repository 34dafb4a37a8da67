//! Many reloads under many flows.

use super::{TOP, free, redirect, reverse};
use crate::node::peers::{Client, Server, visit};
use crate::node::{Record, Up};
use sidetrack_testkit::in_namespace;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Reloads of a round, and rounds there may be at most.
const RELOADS: usize = 200;
const ROUNDS: usize = 4;
/// Flows of each of three kinds that live through all reloads.
const FLOWS: usize = 67;

/// Memory that may come with a round, bytes: less than one leaked configuration for each reload.
const GROWTH_MAX: u64 = 3 << 20;

/// The `number`th configuration: every other one has a listener more, another place for one, and other kernel paths.
fn tables(server: SocketAddr, kernel: &str, moving: &[String; 2], number: usize) -> String {
    let odd = number % 2;
    let mut text = redirect(server);
    // More paths before it in every other configuration: its number changes.
    if odd == 1 {
        text += &reverse("extra", "127.0.0.1:0", server);
    }
    text += &reverse("port", kernel, server);
    text += &reverse("moving", &moving[odd], server);
    let to = "carrier = \"direct\"\n";
    text += &format!(
        "[[rule]]\nname = \"ours{odd}\"\nmatch = {{ listener = [\"out\", \"moving\"] }}\n{to}kernel = \"never\"\n"
    );
    text += &format!("[[rule]]\nname = \"kernel{odd}\"\n{to}");
    text
}

/// Bytes in memory and open descriptors.
fn size(pid: u32) -> (u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("resident");
    let kib: u64 = anonymous.trim().trim_end_matches(" kB").parse().expect("a number");
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process").count();
    (kib * 1024, fds)
}

/// Sizes of main and keeper in the course of a round.
type Sizes = Vec<[(u64, usize); 2]>;

/// Whether a process has more at the end of a round than at its beginning. The least of the last three sizes counts against
/// the largest of the first three: flows come and go all the while, and what is written of them waits in memory for a moment.
fn has_grown(round: &Sizes) -> bool {
    let (early, late) = (&round[..3], &round[round.len() - 3..]);
    (0..2).any(|who| {
        let bytes = |sizes: &[[(u64, usize); 2]]| sizes.iter().map(|sizes| sizes[who].0).collect::<Vec<_>>();
        let fds = |sizes: &[[(u64, usize); 2]]| sizes.iter().map(|sizes| sizes[who].1).collect::<Vec<_>>();
        bytes(late).into_iter().min() > bytes(early).into_iter().max().map(|bytes| bytes + GROWTH_MAX)
            || fds(late).into_iter().min() > fds(early).into_iter().max().map(|count| count + 8)
    })
}

/// Reloads until a round brought no growth. What leaks grows in every round; an allocator that takes another huge page, or
/// another arena for a thread, does so once or twice.
fn reload_until_steady(up: &Up, text: impl Fn(usize) -> String, clients: &mut [Client]) {
    let mut rounds: Vec<Sizes> = Vec::new();
    while rounds.len() < ROUNDS {
        let mut round = Sizes::new();
        for number in 1..=RELOADS {
            up.reload(TOP, &text(number));
            if number % 20 == 0 {
                echo_all(clients);
                round.push([size(up.pid()), size(up.keeper())]);
            }
        }
        let grown = has_grown(&round);
        rounds.push(round);
        if !grown {
            return;
        }
    }
    panic!("grew in each of {ROUNDS} rounds, bytes and descriptors of main and keeper: {rounds:?}");
}

/// New connections all the while: none is refused, none goes past us.
fn visitors(server: SocketAddr, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<usize> {
    std::thread::spawn(move || {
        let mut visits = 0;
        while !stop.load(Ordering::Relaxed) && visits < 100_000 {
            let (client, seen, _) = visit(server, b"word");
            assert_ne!(client, seen, "caught at every moment");
            visits += 1;
        }
        visits
    })
}

fn echo_all(clients: &mut [Client]) {
    for client in clients {
        client.echo(b"still there").expect("not cut");
    }
}

/// How many records there are of each fate.
fn fates(records: &[Record]) -> BTreeMap<(&str, &str, &str), usize> {
    let mut counts = BTreeMap::new();
    for record in records {
        *counts.entry(record.fate()).or_default() += 1;
    }
    counts
}

#[test]
fn long_flows_live_through_many_reloads_and_nothing_grows() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let to = server.address;
        let (kernel, moving) = (free(), [free(), free()]);
        let text = |number| tables(to, &kernel, &moving, number);
        let mut up = Up::start(TOP, &text(0));
        let doors = [to, kernel.parse().expect("an address"), moving[0].parse().expect("an address")];
        let connect = |door: &SocketAddr| Client::connect(*door).expect("connect");
        let mut clients: Vec<_> = doors.iter().cycle().take(doors.len() * FLOWS).map(connect).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let visiting = visitors(to, stop.clone());
        reload_until_steady(&up, text, &mut clients);
        stop.store(true, Ordering::Relaxed);
        let visits = visiting.join().expect("every visit went well");
        clients.into_iter().for_each(|client| client.close().expect("closed"));
        let records: Vec<_> = (0..visits + doors.len() * FLOWS).map(|_| up.record()).collect();
        let fates = fates(&records);
        assert_eq!(fates.get(&("kernel0", "kernel", "kernel_closed")), Some(&FLOWS), "{fates:?}");
        let ours: usize =
            ["ours0", "ours1"].iter().filter_map(|rule| fates.get(&(*rule, "direct", "ok"))).sum();
        assert_eq!(ours, visits + 2 * FLOWS, "{fates:?}");
        assert_eq!(up.stop().1.len(), 0);
    });
}
