//! Small packets: the cost of forwarding one. One processor sends frames of 60 bytes at full speed and does all the
//! kernel's work on their path; the receiver drops them on arrival.

use super::counters::{Lost, Reading};
use super::network::{NEVER_IDLE_MS, Network, SERVER};
use super::setup::Setup;
use crate::launch;
use crate::topology::Node;
use anyhow::{Context, Result, anyhow};
use sidetrack_sys::raw::{BATCH, PacketSocket, VNET_HEADER_BYTES};
use std::io::IoSlice;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Payload of the datagrams: the least that fills an Ethernet frame.
const PAYLOAD_BYTES: u8 = 18;
/// The processor of the sender.
const CPU: usize = 0;
/// Warm-up before counting.
const WARM_UP: Duration = Duration::from_millis(300);

/// The measurement of one slice.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(super) struct Slice {
    /// Frames that arrived, per second.
    pub frames_s: f64,
    /// Frames that did not.
    pub lost: Lost,
    /// CPU time of the whole machine per frame that arrived, in nanoseconds.
    pub frame_ns: f64,
    /// Whether the flow was on the fast path; false without a shunt.
    pub shunted: bool,
}

/// Measures on a new network.
///
/// # Errors The flow does not reach the expected path.
pub(super) fn measure(setup: Setup, seconds: u64) -> Result<Slice> {
    let network = Network::new(setup, NEVER_IDLE_MS, Duration::ZERO)?;
    let from = open(&network)?;
    network.server.nft(
        "table netdev lab { chain door { type filter hook ingress device eth0 priority 0; udp dport 5000 drop; }; }\n",
    )?;
    let frame = frame(&network, from)?;
    let blast = Blast::start(&network.client, frame)?;
    std::thread::sleep(WARM_UP);
    let before = Reading::now(&network)?;
    std::thread::sleep(Duration::from_secs(seconds));
    let after = Reading::now(&network)?;
    blast.stop()?;
    let elapsed = after.at.duration_since(before.at).as_secs_f64();
    let arrived = (after.server.received - before.server.received).max(1) as f64;
    let flows = network.flows()?;
    let shunted = flows.iter().any(|flow| flow.client == from && flow.state == "installed");
    if shunted != setup.fast_path().is_some() {
        eprintln!("shunt small, {}: the flow left the fast path; its row is of the slow path", setup.name());
    }
    Ok(Slice {
        frames_s: arrived / elapsed,
        lost: after.lost_since(&before),
        frame_ns: (after.busy_ns - before.busy_ns) as f64 / arrived,
        shunted,
    })
}

/// Opens a flow with packets in both directions, and waits for the fast path if there is one.
pub(super) fn open(network: &Network) -> Result<SocketAddr> {
    let server = network.server.enter(|| Ok(UdpSocket::bind(SERVER)?))?;
    let client = network.client.enter(|| Ok(UdpSocket::bind("10.0.0.1:0")?))?;
    let from = client.local_addr()?;
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    }
    let mut buffer = [0; 64];
    for _ in 0..3 {
        client.send_to(b"there", SERVER)?;
        let (_, peer) = server.recv_from(&mut buffer).context("a datagram")?;
        server.send_to(b"back", peer)?;
        client.recv_from(&mut buffer).context("its answer")?;
    }
    if network.setup().fast_path().is_some() {
        network.wait_for(from.port(), |flow| flow.state == "installed")?;
    }
    Ok(from)
}

/// Returns a frame of that flow, behind an empty header of the packet socket.
fn frame(network: &Network, from: SocketAddr) -> Result<Vec<u8>> {
    let address = |node: &Node, arguments: &[&str], key: &str| -> Result<Vec<u8>> {
        let value: serde_json::Value = serde_json::from_str(&node.run("ip", arguments)?)?;
        let text = value[0][key].as_str().with_context(|| format!("ip shows no {key}"))?.to_owned();
        text.split(':').map(|byte| u8::from_str_radix(byte, 16).context("a link address")).collect()
    };
    let there = address(&network.client, &["-j", "neigh", "show", "10.0.0.2"], "lladdr")?;
    let here = address(&network.client, &["-j", "link", "show", "eth0"], "address")?;
    let mut frame = vec![0; VNET_HEADER_BYTES];
    frame.extend(there);
    frame.extend(here);
    frame.extend([8, 0]);
    let mut ip = [0_u8; 20];
    ip[0] = 0x45;
    ip[3] = 28 + PAYLOAD_BYTES;
    (ip[8], ip[9]) = (64, 17);
    ip[12..16].copy_from_slice(&[10, 0, 0, 1]);
    ip[16..20].copy_from_slice(&[10, 0, 0, 2]);
    let checksum = checksum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    frame.extend(ip);
    frame.extend(from.port().to_be_bytes());
    frame.extend(SERVER.port().to_be_bytes());
    // Without a checksum, as UDP over IPv4 may be (RFC 768).
    frame.extend([0, 8 + PAYLOAD_BYTES, 0, 0]);
    frame.extend([7; PAYLOAD_BYTES as usize]);
    Ok(frame)
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum = words.sum::<u32>();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded + (folded >> 16)) as u16)
}

/// A running sender.
struct Blast {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Blast {
    fn start(node: &Node, frame: Vec<u8>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (netns, halt) = (node.netns(), stop.clone());
        let thread = std::thread::Builder::new().name("blast".into()).spawn(move || {
            launch::join_netns(&netns)?;
            let mut processors = rustix::thread::CpuSet::new();
            processors.set(CPU);
            rustix::thread::sched_setaffinity(None, &processors).context("cannot pin the sender")?;
            let interface =
                sidetrack_sys::link::interface("eth0").map_err(|error| anyhow!("eth0: {error}"))?;
            let socket = PacketSocket::sender(interface.index).context("a packet socket")?;
            let batch: Vec<_> = (0..BATCH).map(|_| IoSlice::new(&frame)).collect();
            while !halt.load(Ordering::Relaxed) {
                socket.send(&batch).context("sending")?;
            }
            Ok(())
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    fn stop(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let joined = self.thread.take().map(JoinHandle::join);
        joined.unwrap_or(Ok(Ok(()))).map_err(|_| anyhow!("the sender panicked"))?
    }
}

impl Drop for Blast {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn a_header_with_its_checksum_sums_to_nothing() {
        // RFC 1071 Sec. 3, and a header of IPv4.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        let mut ip = [0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let sum = checksum(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(checksum(&ip), 0);
    }
}
