//! Measures a service for packets (`overlay bench --kind best-effort` or `real-time`): a steady stream of echo requests over
//! the links that its packets use. Any member answers echo requests, and nothing leaves the measured node.

use super::datagrams::{self, Pinged};
use super::shared::Shared;
use serde::{Deserialize, Serialize};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::service::Service;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Bytes of a request: a packet of voice, 20 ms at 64 kb/s.
const BYTES: usize = 160;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Most requests per second: more could wait for an answer than a node remembers.
pub(crate) const PER_SECOND_MAX: u32 = 500;

/// The result of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PacketBenchView {
    /// Requests that were sent.
    pub packets: u64,
    /// Share that had no answer, percent: the request or the answer was lost or late.
    pub lost_percent: f64,
    /// Round trip of those that had one, milliseconds: median, 99th percentile, and most.
    pub rtt_ms: [f64; 3],
    /// Links that a request could use, on average. The answer uses them the other way.
    pub links: f64,
}

/// Sends `per_second` requests per second for `duration`.
///
/// # Errors
/// Returns the reason in words if no request could be sent.
pub(super) async fn run(
    shared: &Shared,
    to: NodeId,
    service: &Service,
    duration: Duration,
    per_second: u32,
) -> Result<PacketBenchView, String> {
    let mut due = interval(Duration::from_secs(1) / per_second.max(1));
    due.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let (began, mut waiting, mut links, mut failed) = (Instant::now(), JoinSet::new(), 0, None);
    while began.elapsed() < duration {
        due.tick().await;
        let since = Instant::now();
        match datagrams::ping(shared, to, service, BYTES) {
            Ok(Pinged { links: used, answer }) => {
                links += used.len();
                waiting.spawn(async move {
                    let came = timeout(PATIENCE, answer).await.is_ok_and(|answer| answer.is_ok());
                    came.then(|| since.elapsed().as_secs_f64() * 1e3)
                });
            }
            Err(error) => failed = Some(error),
        }
    }
    let packets = waiting.len() as u64;
    if packets == 0 {
        return Err(failed.unwrap_or_else(|| "no request was sent".to_owned()));
    }
    let mut answers = Vec::new();
    while let Some(answer) = waiting.join_next().await {
        // A task that panicked has no answer.
        answers.extend(answer.ok().flatten());
    }
    answers.sort_by(f64::total_cmp);
    let lost = packets - answers.len() as u64;
    Ok(PacketBenchView {
        packets,
        lost_percent: 100.0 * lost as f64 / packets as f64,
        rtt_ms: [0.5, 0.99, 1.0].map(|share| share_of(&answers, share)),
        links: links as f64 / packets as f64,
    })
}

/// Returns the least of ascending values that this share of them do not exceed; 0 without values.
pub(super) fn share_of(values: &[f64], share: f64) -> f64 {
    let at = (values.len() as f64 * share).ceil().max(1.0) as usize - 1;
    values.get(at).or(values.last()).copied().unwrap_or(0.0)
}
