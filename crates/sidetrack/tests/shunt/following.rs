//! `sidetrack flows` and `flows --follow` as a person has them: the real binary, real transfers, its output line by line.

use crate::binary::{Node, start};
use crate::firewall::SHUNT;
use crate::flows::{Pair, connect, forget};
use crate::node::Up;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, eventually, is_root};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("flows").args(arguments).arg("--admin").arg(folder.join("admin.sock"));
    command
}

/// The flows of a client, as JSON.
fn listed(folder: &Path, client: SocketAddr) -> Vec<serde_json::Value> {
    let output = command(folder, &["--json"]).output().expect("the binary");
    let text = String::from_utf8(output.stdout).expect("text");
    let flows = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    flows.filter(|flow| flow["client"] == client.to_string()).collect()
}

/// A running `flows --follow`.
struct Follow {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Follow {
    fn start(folder: &Path) -> Self {
        let mut child = command(folder, &["--follow"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary");
        let (sender, lines) = channel();
        let out = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut follow = Self { child, lines, seen: Vec::new() };
        let header = follow.until("the header", |_| true);
        assert!(header.contains("STATE"), "{header}");
        follow
    }

    /// The next line that fits.
    fn until(&mut self, what: &str, fits: impl Fn(&str) -> bool) -> String {
        let until = Instant::now() + LIMIT;
        while let Ok(line) = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            self.seen.push(line.clone());
            if fits(&line) {
                return line;
            }
        }
        panic!("no {what}; there was:\n{}", self.seen.join("\n"));
    }

    /// The next line about a flow of this client that goes on: its bytes up, and its rate up in bytes per second.
    fn rate(&mut self, client: SocketAddr) -> (f64, f64) {
        let from = format!(" {client} ");
        let line = self.until("line with a rate", |line| line.contains(&from) && line.contains("live: "));
        let (columns, rates) = line.split_once("live: ").expect("just seen");
        assert!(rates.ends_with("/s down"), "it is not cut: {line}");
        let up = rates.split_once("/s up, ").expect("both rates").0;
        // The numbers before the state: bytes up and down with their units, and the time to connect.
        let words: Vec<_> = columns.split_whitespace().collect();
        let units: Vec<_> =
            (1..words.len()).filter(|at| UNITS.iter().any(|(unit, _)| unit == &words[*at])).collect();
        let [first, ..] = units[..] else { panic!("no bytes in {line}") };
        (bytes(&format!("{} {}", words[first - 1], words[first])), bytes(up))
    }

    /// Waits for its end.
    fn ended(mut self) {
        eventually(
            "flows --follow ends",
            || matches!(self.child.try_wait(), Ok(Some(status)) if status.success()),
        );
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        // Fails if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const UNITS: [(&str, f64); 4] = [("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9)];

/// `12.3 kB` as a number.
fn bytes(text: &str) -> f64 {
    let (number, unit) = text.split_once(' ').unwrap_or_else(|| panic!("'{text}'"));
    let unit = UNITS.iter().find(|(name, _)| *name == unit).unwrap_or_else(|| panic!("'{text}'"));
    number.parse::<f64>().unwrap_or_else(|_| panic!("'{text}'")) * unit.1
}

/// Sends pieces from one end and reads them at the other, until the listing has shown three rates and growing bytes.
fn moves_while_followed(
    follow: &mut Follow,
    from: SocketAddr,
    client: &mut TcpStream,
    server: &mut TcpStream,
) {
    let (sender, stop) = channel::<()>();
    let (mut out, mut into) = (client.try_clone().expect("a copy"), server.try_clone().expect("a copy"));
    let transfer = std::thread::spawn(move || {
        let mut piece = [7; 16_384];
        // Ends when the other end of the channel is dropped.
        while stop.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            out.write_all(&piece).expect("sent");
            into.read_exact(&mut piece).expect("received");
        }
    });
    let rates = [(); 3].map(|()| follow.rate(from));
    drop(sender);
    transfer.join().expect("moved");
    assert!(rates.iter().all(|(_, rate)| *rate > 0.0), "{rates:?}");
    assert!(rates.windows(2).all(|pair| pair[0].0 <= pair[1].0) && rates[0].0 < rates[2].0, "{rates:?}");
}

#[test]
fn a_transfer_in_progress_is_followed_with_its_rate_to_its_end() {
    let up = Up::start(
        "default = \"direct\"\n",
        "[[listen]]\nname = \"in\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n",
    );
    let entry = up.addresses("in")[0];
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    let mut follow = Follow::start(&up.folder());
    let mut client = TcpStream::connect_timeout(&entry, LIMIT).expect("connected");
    client.set_read_timeout(Some(LIMIT)).expect("a limit");
    client.write_all(&[5, 1, 0]).expect("greeted");
    let mut request = vec![5, 1, 0, 1, 127, 0, 0, 1];
    request.extend(port.to_be_bytes());
    client.read_exact(&mut [0; 2]).expect("a method");
    client.write_all(&request).expect("asked");
    client.read_exact(&mut [0; 10]).expect("an answer");
    let (mut server, _) = listener.accept().expect("a connection");
    server.set_read_timeout(Some(LIMIT)).expect("a limit");
    let from = client.local_addr().expect("an address");
    moves_while_followed(&mut follow, from, &mut client, &mut server);
    drop((client, server));
    let end = follow
        .until("end of the flow", |line| line.contains(&format!(" {from} ")) && !line.contains("live: "));
    assert!(end.trim_end().ends_with("ok"), "{end}");
    assert!(up.stop().0.success());
    follow.ended();
}

fn shunted(forwarding: Forwarding) {
    if !is_root() {
        return;
    }
    let Node { network, up, folder, .. } = &mut start(forwarding);
    let mut pair = connect(network, network.server_addresses[0], SHUNT);
    let mut follow = Follow::start(folder);
    let find = || listed(folder, pair.from).into_iter().find(|flow| flow["shunted"] == true);
    // A switch or a filter may let the first words pass by themselves: talk until the flow is on the fast path.
    let mut talking = (pair.client.try_clone().expect("a copy"), pair.server.try_clone().expect("a copy"));
    eventually("flows shows the shunted flow", || {
        Pair::transfer(&mut talking.0, &mut talking.1, 10);
        Pair::transfer(&mut talking.1, &mut talking.0, 10);
        find().is_some()
    });
    let before = find().expect("it stays");
    assert_eq!(
        (before["orig_dst"].as_str(), before["reason"].is_null()),
        (Some(pair.to.to_string().as_str()), true)
    );
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    let from = pair.from;
    let counted = |flow: &serde_json::Value| flow["bytes_up"].as_u64().unwrap_or_default();
    eventually("its bytes are counted", || {
        listed(folder, from).iter().any(|flow| counted(flow) > counted(&before) + 1_000_000)
    });
    moves_while_followed(&mut follow, from, &mut pair.client, &mut pair.server);
    // A copy keeps the connection open.
    drop(talking);
    pair.close();
    forget(&network.firewall);
    let end = follow.until("end of the flow", |line| {
        line.contains(&format!(" {from} ")) && line.contains("kernel_closed")
    });
    assert!(end.contains("fast path"), "{end}");
    eventually("flows shows it no more", || listed(folder, from).is_empty());
    assert_eq!(up.record().address("client"), from);
}

#[test]
fn a_flow_shunted_on_a_bridge_is_listed_and_followed() {
    shunted(Forwarding::Bridged);
}

#[test]
fn a_flow_shunted_by_a_router_is_listed_and_followed() {
    shunted(Forwarding::Routed);
}
