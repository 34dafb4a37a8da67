//! What TCP knows at both ends of a connection while it runs, every 100 ms (the paper, Sec. III-C: Web100).

use super::network::{Network, PORT};
use anyhow::{Result, anyhow};
use sidetrack_sys::sockdiag::{Connection, SockDiag};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time between two samples.
pub(super) const EVERY: Duration = Duration::from_millis(100);

/// The state of one end of a connection at one moment.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(super) struct Sample {
    /// Milliseconds since the measurement began.
    pub at_ms: u64,
    /// The client's port, which tells the connections of one measurement apart.
    pub client_port: u16,
    /// Congestion window, in segments.
    pub congestion_window_segments: u32,
    /// Smoothed round-trip time, in microseconds.
    pub rtt_us: u64,
    /// Largest segment that this end sends, in bytes.
    pub send_mss_bytes: u32,
    /// Segments on their way.
    pub unacked_segments: u32,
    /// Segments sent again since the connection began.
    pub retransmitted_segments: u32,
    /// Bytes that the other end has acknowledged.
    pub acked_bytes: u64,
    /// Bytes received in order.
    pub received_bytes: u64,
    /// Bytes in the send buffer that were never sent.
    pub unsent_bytes: u32,
}

impl Sample {
    fn new(at: Duration, one: &Connection) -> Self {
        let client = if one.remote.port() == PORT { one.local } else { one.remote };
        Self {
            at_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
            client_port: client.port(),
            congestion_window_segments: one.info.congestion_window_segments,
            rtt_us: u64::try_from(one.info.rtt.as_micros()).unwrap_or(u64::MAX),
            send_mss_bytes: one.info.send_mss_bytes,
            unacked_segments: one.info.unacked_segments,
            retransmitted_segments: one.info.retransmitted_segments,
            acked_bytes: one.info.acked_bytes,
            received_bytes: one.info.received_bytes,
            unsent_bytes: one.info.unsent_bytes,
        }
    }
}

/// The samples of both ends.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(super) struct Samples {
    /// Of the end that sends.
    pub client: Vec<Sample>,
    /// Of the end that receives.
    pub server: Vec<Sample>,
}

impl Samples {
    /// Returns the sender's samples of the connection that carried the most bytes.
    pub(super) fn largest(&self) -> Vec<Sample> {
        let port = self.client.iter().max_by_key(|one| one.acked_bytes).map(|one| one.client_port);
        self.client.iter().filter(|one| Some(one.client_port) == port).copied().collect()
    }
}

/// Runs `work`, and samples both ends of the connections to [`PORT`] meanwhile.
///
/// # Errors
/// `work` fails, or the kernel does not list its connections.
pub(super) fn during<T>(network: &Network, work: impl FnOnce() -> Result<T>) -> Result<(T, Samples)> {
    let (begun, done) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let done = &done;
        let [client, server] = [&network.client, &network.server]
            .map(|host| scope.spawn(move || host.enter(|| sampled(begun, done))));
        let result = work();
        done.store(true, Ordering::Relaxed);
        let panicked = |_| anyhow!("a thread that samples panicked");
        let client = client.join().map_err(panicked)??;
        let server = server.join().map_err(panicked)??;
        Ok((result?, Samples { client, server }))
    })
}

fn sampled(begun: Instant, done: &AtomicBool) -> Result<Vec<Sample>> {
    let mut diag = SockDiag::open()?;
    let mut samples = Vec::new();
    let mut next = begun;
    while !done.load(Ordering::Relaxed) {
        let at = begun.elapsed();
        samples.extend(diag.connections(PORT)?.iter().map(|one| Sample::new(at, one)));
        next += EVERY;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(samples)
}
