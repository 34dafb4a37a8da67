//! Table II: the times from a flow's SYN until its mark is seen, its entry is confirmed, and its last packet takes
//! the slow path. A flow sends one byte there and one back, repeatedly.

use super::network::{NEVER_IDLE_MS, Network, PORT, SERVER};
use super::setup::Setup;
use crate::capture::{Capture, Stamped};
use crate::scratch::Scratch;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long each flow sends: longer than the slowest bar.
const TALK: Duration = Duration::from_millis(40);
/// DSCP CS1, which the slow path writes into each packet.
const SLOW: u8 = 0x20;
/// Maximum delay of the capture.
const LIMIT: Duration = Duration::from_secs(10);
/// The byte that ends a flow.
const LAST: u8 = 1;
/// FIN and RST.
const END: u8 = 5;
/// SYN and ACK.
const SYN_ACK: u8 = 0x12;
/// Number of flows before the counted ones, to fill caches and neighbour tables.
const WARM_UP: usize = 3;

/// The times of one flow, in milliseconds after its SYN.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(super) struct Run {
    /// The switch delivered to the firewall the packet by which policy decides (the server's SYN-ACK); only with a
    /// switch.
    pub brought_ms: Option<f64>,
    /// Its mark was seen and an entry was requested.
    pub seen_ms: f64,
    /// The entry was confirmed.
    pub installed_ms: f64,
    /// Its last packet on the slow path reached a host.
    pub last_slow_ms: f64,
    /// Number of its packets that reached a host by the fast path.
    pub fast_packets: usize,
}

/// Measures this number of flows, one after the other.
///
/// # Errors A flow is not shunted.
pub(super) fn measure(setup: Setup, runs: usize) -> Result<Vec<Run>> {
    let network = Network::new(setup, NEVER_IDLE_MS, Duration::ZERO)?;
    network.mark_slow_packets()?;
    let scratch = Scratch::new()?;
    let filter = format!("tcp port {PORT}");
    let capture = |node, name: &str| Capture::headers(node, "eth0", &scratch.path().join(name), &filter);
    let captures = [capture(&network.client, "client.pcap")?, capture(&network.server, "server.pcap")?];
    let of_firewall =
        |name: &str| Capture::headers(&network.firewall, "to-server", &scratch.path().join(name), &filter);
    let behind_switch = setup.has_switch().then(|| of_firewall("firewall.pcap")).transpose()?;
    let listener = network.server.enter(|| Ok(TcpListener::bind(SERVER)?))?;
    let (mut open, mut times) = (Vec::new(), Vec::new());
    for _ in 0..runs + WARM_UP {
        let ends = talk(&network, &listener)?;
        let from = ends[0].local_addr()?;
        // Clocks are compared for each flow: the wall clock may be adjusted during the measurement.
        let flow = network.wait_for(from.port(), |flow| flow.state == "installed")?;
        ensure!(flow.installs == 1, "the flow was shunted {} times", flow.installs);
        times.push((from.port(), flow.requested_ns, flow.installed_ns));
        open.push(ends);
    }
    drop(open);
    let times = times.split_off(WARM_UP);
    let last = times.last().context("no flows")?.0;
    let [at_client, at_server] = captures.map(|capture| packets(&capture, last));
    let (at_client, at_server) = (at_client?, at_server?);
    let at_firewall = behind_switch.map(|capture| packets(&capture, last)).transpose()?;
    let none = Vec::new();
    let runs = times.into_iter().map(|(port, seen, installed)| {
        let (Some(seen), Some(installed)) = (seen, installed) else { bail!("a flow has no times") };
        let of = |packets: &BTreeMap<u16, Vec<Stamped>>| packets.get(&port).unwrap_or(&none).clone();
        let at_firewall = at_firewall.as_ref().map(of);
        let captured = Captured {
            at_client: &of(&at_client),
            at_firewall: at_firewall.as_deref(),
            at_server: &of(&at_server),
        };
        run(port, seen, installed, &captured).context("the captures lack a flow")
    });
    runs.collect()
}

/// The captured packets of one flow.
struct Captured<'a> {
    at_client: &'a [Stamped],
    /// At the firewall's port towards the server.
    at_firewall: Option<&'a [Stamped]>,
    at_server: &'a [Stamped],
}

fn run(port: u16, seen: u64, installed: u64, captured: &Captured<'_>) -> Option<Run> {
    let Captured { at_client, at_firewall, at_server } = *captured;
    let syn = at_client.iter().find(|packet| packet.flags & 2 != 0)?.time_ns;
    let after = |time: u64| (time as f64 - syn as f64) / 1e6;
    // Arrivals at each end, without FIN and later packets, which take the slow path on purpose.
    let arrived = |packets: &[Stamped], to: u16| -> Vec<Stamped> {
        let end = packets.iter().position(|packet| packet.flags & END != 0).unwrap_or(packets.len());
        packets.iter().take(end).filter(|packet| packet.to == to).copied().collect()
    };
    let mut all = arrived(at_server, PORT);
    all.extend(arrived(at_client, port));
    let brought = at_firewall.and_then(|all| all.iter().find(|packet| packet.flags & SYN_ACK == SYN_ACK));
    let slow = all.iter().filter(|packet| packet.tos & 0xfc == SLOW);
    Some(Run {
        brought_ms: brought.map(|packet| after(packet.time_ns)),
        seen_ms: after(seen),
        installed_ms: after(installed),
        last_slow_ms: after(slow.clone().map(|packet| packet.time_ns).max()?),
        fast_packets: all.len() - slow.count(),
    })
}

/// A connection that sends from the beginning: a byte there and one back until the time is over.
fn talk(network: &Network, listener: &TcpListener) -> Result<[TcpStream; 2]> {
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| answer(listener));
        let client = network.client.enter(|| {
            let mut client = TcpStream::connect(SERVER)?;
            prepare(&client)?;
            let begun = Instant::now();
            let mut byte = [0];
            while byte[0] != LAST {
                byte[0] = if begun.elapsed() < TALK { !LAST } else { LAST };
                client.write_all(&byte)?;
                client.read_exact(&mut byte)?;
            }
            Ok(client)
        });
        let server = answering.join().map_err(|_| anyhow::anyhow!("the server panicked"))??;
        Ok([client?, server])
    })
}

fn answer(listener: &TcpListener) -> Result<TcpStream> {
    let (mut server, _) = listener.accept()?;
    prepare(&server)?;
    let mut byte = [0];
    while byte[0] != LAST {
        server.read_exact(&mut byte)?;
        server.write_all(&byte)?;
    }
    Ok(server)
}

fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    Ok(stream.set_read_timeout(Some(LIMIT))?)
}

/// Returns the packets of each flow by its client's port, once the end of the flow of port `last` was captured.
fn packets(capture: &Capture, last: u16) -> Result<BTreeMap<u16, Vec<Stamped>>> {
    let of = |packet: &Stamped| if packet.to == PORT { packet.from } else { packet.to };
    let begun = Instant::now();
    loop {
        let packets = capture.stamped()?;
        if packets.iter().any(|packet| of(packet) == last && packet.flags & END != 0) {
            let mut flows: BTreeMap<u16, Vec<Stamped>> = BTreeMap::new();
            packets.into_iter().for_each(|packet| flows.entry(of(&packet)).or_default().push(packet));
            return Ok(flows);
        }
        ensure!(
            begun.elapsed() < LIMIT,
            "the capture of {} packets lacks the end of the last flow",
            packets.len()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::{Captured, PORT, SLOW, Stamped, run};

    fn packet(time_us: u64, to_server: bool, tos: u8, flags: u8) -> Stamped {
        let (from, to) = if to_server { (4000, PORT) } else { (PORT, 4000) };
        Stamped { time_ns: time_us * 1000, from, to, tos, flags }
    }

    #[test]
    fn what_a_host_sends_is_not_what_reached_it_and_the_end_does_not_count() {
        // The client's packets are captured there without a mark; at the server those of the slow path have it.
        let at_client = [
            packet(1000, true, 0, 2),
            packet(1100, false, SLOW, 0x12),
            packet(1200, true, 0, 0x18),
            packet(1500, false, 0, 0x18),
            packet(9000, false, SLOW, 0x11),
        ];
        let at_server = [
            packet(1050, true, SLOW, 2),
            packet(1060, false, 0, 0x12),
            packet(1250, true, SLOW, 0x18),
            packet(1400, false, 0, 0x18),
        ];
        let at_firewall =
            [packet(1040, true, 0, 2), packet(1090, false, 0, 0x12), packet(1230, true, 0, 0x18)];
        let captured =
            Captured { at_client: &at_client, at_firewall: Some(&at_firewall), at_server: &at_server };
        let run = run(4000, 1_150_000, 1_180_000, &captured).expect("a flow");
        assert!(run.brought_ms.is_some_and(|brought| (brought - 0.09).abs() < 1e-9), "{run:?}");
        assert!((run.seen_ms - 0.15).abs() < 1e-9 && (run.installed_ms - 0.18).abs() < 1e-9, "{run:?}");
        assert!((run.last_slow_ms - 0.25).abs() < 1e-9, "{run:?}");
        assert_eq!(run.fast_packets, 1);
    }
}
