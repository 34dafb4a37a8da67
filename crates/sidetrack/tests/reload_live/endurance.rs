//! Many reloads under many flows.

use super::{TOP, free, redirect, reverse};
use crate::hosts::in_namespace;
use crate::node::peers::{Client, Server, visit};
use crate::node::{Record, Up};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const RELOADS: usize = 200;
/// Flows of each of three kinds that live through all reloads.
const FLOWS: usize = 67;

/// Memory that may come with reloads beyond the first tenth, bytes: less than one leaked configuration each.
const GROWTH_MAX: u64 = 4 << 20;

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
        let mut sizes = Vec::new();
        for number in 1..=RELOADS {
            up.reload(TOP, &text(number));
            if number % 20 == 0 {
                echo_all(&mut clients);
                sizes.push([size(up.pid()), size(up.keeper())]);
            }
        }
        stop.store(true, Ordering::Relaxed);
        let visits = visiting.join().expect("every visit went well");
        for (process, who) in ["main", "keeper"].into_iter().enumerate() {
            let of = |part: &[[(u64, usize); 2]]| part.iter().map(|sizes| sizes[process]).collect::<Vec<_>>();
            // An allocator gives back when it likes: what grows without end is more at its least than it was at its most.
            let (early, late) = (of(&sizes[..3]), of(&sizes[sizes.len() - 3..]));
            let most = early.iter().map(|(bytes, _)| *bytes).max();
            let least = late.iter().map(|(bytes, _)| *bytes).min();
            let what = format!("{who}: {early:?} became {late:?} after {visits} visits");
            assert!(least < most.map(|bytes| bytes + GROWTH_MAX), "{what}");
            // Visitors come and go, two descriptors a flow.
            assert!(late[2].1 <= early[0].1 + 8, "{what}");
        }
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
