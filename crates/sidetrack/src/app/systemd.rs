//! systemd's watchdog, answered while every worker runs.

use crate::live::Ledger;
use sidetrack_common::systemd::Systemd;
use std::convert::Infallible;
use std::sync::Arc;

/// Says that the node runs while every worker checks its flows. Never ends; without a watchdog nothing is sent.
pub(super) async fn watch(systemd: &Systemd, workers: &[Arc<Ledger>]) -> Infallible {
    let Some(beat) = systemd.beat() else { return std::future::pending().await };
    let mut seen: Vec<u64> = vec![0; workers.len()];
    loop {
        tokio::time::sleep(beat).await;
        let now: Vec<u64> = workers.iter().map(|ledger| ledger.sweeps()).collect();
        match now.iter().zip(&seen).position(|(now, seen)| now == seen) {
            None => systemd.alive(),
            Some(at) => tracing::error!(
                "worker {at} has not checked its flows for {beat:?}; the service manager's watchdog is not answered"
            ),
        }
        seen = now;
    }
}
