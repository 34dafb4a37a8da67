//! What a flow on the wire takes in user space.

use crate::metric;
use crate::node::Up;
use sidetrack_sys::caps;
use sidetrack_testkit::{Line, eventually, is_root};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

/// Most resident memory of a flow on the wire, bytes.
const MOST_BYTES: u64 = 512;

/// Flows that begin at the same time: each has its task until the kernel has it.
const AT_A_TIME: usize = 25;

/// Flows of the measurement. Memory that their tasks have left is used again by the tasks of later ones, so the first half is
/// there when it begins.
fn flows() -> usize {
    std::env::var("SIDETRACK_WIRED").ok().and_then(|text| text.parse().ok()).unwrap_or(2000)
}

/// Resident memory of a process, bytes.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("there");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") * 1024
}

#[test]
fn a_flow_takes_little_memory() {
    if !is_root() {
        return;
    }
    caps::raise_open_files_limit().expect("descriptors");
    let (line, half) = (Line::new(), flows() / 2);
    let listener = line.server.run(|| TcpListener::bind("10.0.2.1:0").expect("bound"));
    let to = listener.local_addr().expect("an address");
    let door: SocketAddr = "10.0.1.254:80".parse().expect("an address");
    let tables = format!(
        "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"{door}\"\nto = \"{to}\"\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n\
         shunt = {{ fast_path = \"wire\", after_bytes = 1 }}\n[wire]\npins = \"none\"\n"
    );
    let up = line.router.run(move || Up::start_measured("default = \"deny\"\n", &tables));
    let more = || {
        let clients = line.client.run(move || {
            (0..AT_A_TIME).map(|_| TcpStream::connect(door).expect("connected")).collect::<Vec<_>>()
        });
        let accepted = listener.try_clone().expect("a copy");
        let servers = line
            .server
            .run(move || (0..AT_A_TIME).map(|_| accepted.accept().expect("accepted").0).collect::<Vec<_>>());
        (clients, servers)
    };
    let mut kept = Vec::new();
    let mut used = [0; 2];
    for used in &mut used {
        for _ in 0..half / AT_A_TIME {
            let (mut clients, mut servers) = more();
            clients.iter_mut().for_each(|end| end.write_all(b"x").expect("sent"));
            servers.iter_mut().for_each(|end| end.read_exact(&mut [0]).expect("received"));
            kept.push((clients, servers));
            let all = (kept.len() * AT_A_TIME) as u64;
            eventually("all flows are on the wire", || {
                metric(&up, "sidetrack_wire_taken_flows_total ") == all
            });
        }
        *used = resident(up.pid());
    }
    let [before, after] = used;
    let each = after.saturating_sub(before) / half as u64;
    println!("{each} bytes for each of {half} flows on the wire; {before} and {after} bytes in all");
    assert!(each <= MOST_BYTES, "{each} bytes for each flow");
}
