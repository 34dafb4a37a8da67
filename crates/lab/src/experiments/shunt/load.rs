//! Tables III to VI: the rates, costs and losses of one TCP connection, or several.

use super::counters::{Lost, Reading};
use super::network::{NEVER_IDLE_MS, Network, PORT};
use super::samples::{self, Samples};
use super::setup::Setup;
use crate::service::Service;
use anyhow::{Context, Result};
use std::time::Duration;

/// One run of iperf3.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Slice {
    /// Payload that arrived, in Gbit/s, including the beginning.
    pub gbit_s: f64,
    /// Frames that did not arrive, in both directions, counted at both ends.
    pub lost: Lost,
    /// Segments that TCP retransmitted.
    pub retransmits: u64,
    /// CPU time of the whole machine per gigabyte that arrived, in seconds.
    pub gigabyte_s: f64,
    /// Share of the bytes that took the fast path, 0 to 1; 0 without a shunt.
    pub fast: f64,
    /// What TCP knew at both ends, every 100 ms.
    pub samples: Samples,
}

/// What iperf3 does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Connections at once.
    pub connections: usize,
    /// How long it measures, in seconds.
    pub seconds: u64,
    /// How long it runs before, in seconds.
    pub skipped: u64,
    /// The round trip of the network.
    pub round_trip: Duration,
}

/// Measures this number of connections at once, on a new network.
///
/// # Errors iperf3 is missing or fails.
pub(super) fn measure(setup: Setup, connections: usize, seconds: u64, round_trip: Duration) -> Result<Slice> {
    let network = Network::new(setup, NEVER_IDLE_MS, round_trip)?;
    on(&network, Run { connections, seconds, skipped: 0, round_trip })
}

/// The same on a network that exists.
///
/// # Errors iperf3 is missing or fails.
pub(super) fn on(network: &Network, run: Run) -> Result<Slice> {
    let port = PORT.to_string();
    let mut command = network.server.command("iperf3");
    command.args(["-s", "-p", &port]);
    let mut server = Service::start_muted("iperf3", command, network.folder())?;
    server.wait_listening(&network.server, PORT)?;
    let before = Reading::now(network)?;
    let [time, skipped] = [run.seconds, run.skipped].map(|seconds| seconds.to_string());
    let connections = run.connections.to_string();
    // The congestion control of the paper's kernels; named, so that tables of two machines can be compared.
    let mut arguments =
        vec!["-c", "10.0.0.2", "-p", &port, "-t", &time, "-P", &connections, "-C", "cubic", "-J"];
    if run.skipped > 0 {
        arguments.extend(["-O", &skipped]);
    }
    let (report, samples) = samples::during(network, || network.client.run("iperf3", &arguments))?;
    // Waits until the packets on their way arrive.
    std::thread::sleep(run.round_trip + Duration::from_millis(50));
    let after = Reading::now(network)?;
    let report: serde_json::Value = serde_json::from_str(&report).context("iperf3's report")?;
    let end = &report["end"];
    let rate = end["sum_received"]["bits_per_second"].as_f64().context("iperf3 reports no rate")?;
    let bytes = end["sum_received"]["bytes"].as_f64().context("iperf3 reports no bytes")?;
    Ok(Slice {
        gbit_s: rate / 1e9,
        lost: after.lost_since(&before),
        retransmits: end["sum_sent"]["retransmits"].as_u64().unwrap_or(0),
        gigabyte_s: (after.busy_ns - before.busy_ns) as f64 / bytes.max(1.0),
        fast: fast_part(network)?,
        samples,
    })
}

/// Of the flow that carried the most bytes.
fn fast_part(network: &Network) -> Result<f64> {
    let flows = network.flows()?;
    let parts = flows.iter().map(|flow| (flow.fast.bytes_up, flow.fast.bytes_up + flow.slow.bytes_up));
    let largest = parts.max_by_key(|(_, all)| *all);
    Ok(largest.map_or(0.0, |(fast, all)| fast as f64 / all.max(1) as f64))
}
