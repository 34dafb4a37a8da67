//! Entries that are removed and installed under traffic: which frames are lost or out of order. The shunt gets its
//! orders through its admin socket, one cycle after the other.

use super::counters::{Lost, Reading};
use super::network::{NEVER_IDLE_MS, Network, PORT, SERVER};
use super::setup::Setup;
use super::small;
use crate::service::Service;
use anyhow::{Context, Result, ensure};
use sidetrack_common::exchange::{Blocking, Limits};
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Datagrams per second: far below the rate of the slow path, so that no queue overflows.
const RATE: u32 = 20_000;
/// Time limit for a connection to get to the fast path.
const LIMIT: Duration = Duration::from_secs(20);

/// The result.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(super) struct Outcome {
    /// Entries that were installed.
    pub installs: u32,
    /// Duration in seconds.
    pub seconds: f64,
    /// Frames that one end sent and the other did not count, in both directions.
    pub lost: Lost,
    /// Datagrams that arrived after a later one, or twice.
    pub disordered: Option<u64>,
    /// Segments that TCP retransmitted.
    pub retransmits: Option<u64>,
}

/// Makes cycles under one TCP connection of iperf3.
///
/// # Errors iperf3 is missing, or the shunt refuses.
pub(super) fn tcp(setup: Setup, cycles: usize) -> Result<Outcome> {
    let network = Network::new(setup, NEVER_IDLE_MS, Duration::ZERO)?;
    let port = PORT.to_string();
    let mut command = network.server.command("iperf3");
    command.args(["-s", "-p", &port]);
    let mut server = Service::start_muted("iperf3", command, network.folder())?;
    server.wait_listening(&network.server, PORT)?;
    let before = Reading::now(&network)?;
    let mut command = network.client.command("iperf3");
    command.args(["-c", "10.0.0.2", "-p", &port, "-t", "600", "-J"]);
    let client = Service::start("iperf3-client", command, network.folder())?;
    let flow = busiest(&network)?;
    let (installs, seconds) = cycle(&network, flow, "tcp", cycles)?;
    client.signal(rustix::process::Signal::INT)?;
    let report = ended(client)?;
    std::thread::sleep(Duration::from_millis(200));
    let after = Reading::now(&network)?;
    let report: serde_json::Value = serde_json::from_str(&report).context("iperf3's report")?;
    let retransmits = report["end"]["sum_sent"]["retransmits"].as_u64();
    Ok(Outcome { installs, seconds, lost: after.lost_since(&before), disordered: None, retransmits })
}

/// Returns the output of a program until its end.
fn ended(mut service: Service) -> Result<String> {
    let begun = Instant::now();
    while service.is_running() {
        ensure!(begun.elapsed() < LIMIT, "{} does not end", service.name());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(service.log())
}

/// Returns the client of the flow that carries data, once it is on the fast path: iperf3 has a second flow.
fn busiest(network: &Network) -> Result<SocketAddr> {
    let begun = Instant::now();
    loop {
        let flows = network.flows()?;
        if let Some(flow) = flows.iter().find(|flow| flow.fast.bytes_up > 10_000_000) {
            return Ok(flow.client);
        }
        ensure!(begun.elapsed() < LIMIT, "iperf3's flow is not shunted: {flows:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Makes cycles under a stream of numbered datagrams.
///
/// # Errors The shunt refuses.
pub(super) fn small(setup: Setup, cycles: usize) -> Result<Outcome> {
    let network = Network::new(setup, NEVER_IDLE_MS, Duration::ZERO)?;
    let from = small::open(&network)?;
    let receiver = network.server.enter(|| Ok(UdpSocket::bind(SERVER)?))?;
    let sender = network.client.enter(|| Ok(UdpSocket::bind(from)?))?;
    let before = Reading::now(&network)?;
    let stop = Arc::new(AtomicBool::new(false));
    let halt = stop.clone();
    let sending = std::thread::spawn(move || stream(&sender, &halt));
    let receiving = std::thread::spawn(move || disorder(&receiver));
    let cycled = cycle(&network, from, "udp", cycles);
    stop.store(true, Ordering::Relaxed);
    let sent = sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?;
    let disordered = receiving.join().map_err(|_| anyhow::anyhow!("the receiver panicked"))??;
    let (installs, seconds) = cycled?;
    let after = Reading::now(&network)?;
    if sent <= FEW {
        // The row is kept: its order and loss refer to these cycles.
        eprintln!("shunt cycles: only {sent} datagrams were sent while the entries came and went");
    }
    let disordered = Some(disordered);
    Ok(Outcome { installs, seconds, lost: after.lost_since(&before), disordered, retransmits: None })
}

/// This number of datagrams or fewer say little about order.
const FEW: u64 = 1000;

/// Sends numbers at [`RATE`] until it is told to stop, then an end mark; returns how many.
fn stream(sender: &UdpSocket, stop: &AtomicBool) -> u64 {
    let (begun, mut number) = (Instant::now(), 0_u64);
    while !stop.load(Ordering::Relaxed) {
        let due = (begun.elapsed().as_secs_f64() * f64::from(RATE)) as u64;
        while number < due {
            if sender.send_to(&number.to_be_bytes(), SERVER).is_ok() {
                number += 1;
            }
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    let _ = sender.send_to(&u64::MAX.to_be_bytes(), SERVER);
    number
}

/// Returns how many arrived after a later one, or twice, until the end mark.
fn disorder(receiver: &UdpSocket) -> Result<u64> {
    receiver.set_read_timeout(Some(LIMIT))?;
    let (mut buffer, mut next, mut disordered) = ([0; 8], 0, 0);
    loop {
        let (length, _) = receiver.recv_from(&mut buffer).context("the last datagram did not arrive")?;
        ensure!(length == 8, "a datagram of {length} bytes");
        match u64::from_be_bytes(buffer) {
            u64::MAX => return Ok(disordered),
            number if number < next => disordered += 1,
            number => next = number + 1,
        }
    }
}

/// Takes a flow off the fast path and puts it back, this number of times. Returns how often it was installed, and the
/// seconds.
fn cycle(network: &Network, client: SocketAddr, transport: &str, cycles: usize) -> Result<(u32, f64)> {
    let mut admin = Admin::open(network)?;
    let begun = Instant::now();
    for _ in 0..cycles {
        for action in ["ignore", "shunt"] {
            admin.post(&format!(
                "/v1/shunt?client={client}&server={SERVER}&transport={transport}&action={action}"
            ))?;
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let flow = network.wait_for(client.port(), |flow| flow.state == "installed")?;
    Ok((flow.installs, seconds))
}

/// A connection to the admin socket.
struct Admin(Blocking);

impl Admin {
    fn open(network: &Network) -> Result<Self> {
        let limits = Limits { patience: LIMIT, ..Limits::default() };
        Ok(Self(Blocking::open(network.admin(), limits).context("the admin socket")?))
    }

    fn post(&mut self, target: &str) -> Result<()> {
        let (status, answer) = self.0.text("POST", target, "")?;
        ensure!(status == 200, "{target}: {status} {answer}");
        Ok(())
    }
}
