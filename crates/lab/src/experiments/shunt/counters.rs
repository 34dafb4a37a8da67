//! Counters of interfaces and processors.

use super::network::Network;
use crate::topology::Node;
use anyhow::{Context, Result};
use std::time::Instant;

/// The counters of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Frames {
    /// Frames sent.
    pub sent: u64,
    /// Frames received.
    pub received: u64,
    /// Bytes received.
    pub bytes: u64,
}

impl Frames {
    /// Reads those of `eth0` of a host.
    ///
    /// # Errors
    /// `ip` fails.
    pub(super) fn of(host: &Node) -> Result<Self> {
        let text = host.run("ip", &["-j", "-s", "link", "show", "eth0"])?;
        let value: serde_json::Value = serde_json::from_str(&text)?;
        let count =
            |way: &str, key: &str| value[0]["stats64"][way][key].as_u64().context("ip shows no counters");
        Ok(Self {
            sent: count("tx", "packets")?,
            received: count("rx", "packets")?,
            bytes: count("rx", "bytes")?,
        })
    }
}

/// All counters at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// The time.
    pub at: Instant,
    /// Time that the processors were busy, in nanoseconds.
    pub busy_ns: u64,
    /// At the client.
    pub client: Frames,
    /// At the server.
    pub server: Frames,
}

impl Reading {
    /// Reads them now.
    ///
    /// # Errors
    /// A counter cannot be read.
    pub(super) fn now(network: &Network) -> Result<Self> {
        let (server, client) = (Frames::of(&network.server)?, Frames::of(&network.client)?);
        Ok(Self { at: Instant::now(), busy_ns: busy_ns()?, client, server })
    }

    /// Returns the frames that left one host since `before` and did not reach the other, both directions together.
    pub(super) fn lost_since(&self, before: &Self) -> Lost {
        let sent = [self.client.sent - before.client.sent, self.server.sent - before.server.sent];
        let received =
            [self.server.received - before.server.received, self.client.received - before.client.received];
        let lost = sent.iter().zip(received).map(|(sent, received)| sent.saturating_sub(received)).sum();
        Lost { frames: lost, of: sent.iter().sum() }
    }
}

/// Frames that did not arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Lost {
    /// Lost frames.
    pub frames: u64,
    /// Sent frames.
    pub of: u64,
}

impl Lost {
    /// Returns the loss in percent.
    pub(super) fn percent(self) -> f64 {
        100.0 * self.frames as f64 / self.of.max(1) as f64
    }
}

fn busy_ns() -> Result<u64> {
    /// USER_HZ is 100 everywhere.
    const TICK_NS: u64 = 10_000_000;
    let text = std::fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    // Fields: user, nice, system, then idle and iowait, then irq, softirq.
    let busy: u64 = [0, 1, 2, 5, 6].iter().filter_map(|at| ticks.get(*at)).sum();
    Ok(busy * TICK_NS)
}
