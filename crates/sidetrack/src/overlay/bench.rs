//! Measures a path in the way flows use it: one node floods a session, the other counts (like `t_flooder` of Spines).
//!
//! The far node discards what it receives, and only members can open sessions. So `[[overlay.deliver]]` is not checked.
//! Every 20 ms, and once more at the end, the far end reports how many bytes have come (8 bytes, big-endian).

use super::echoes::share_of;
use super::ingress::{Request, open_reserved};
use serde::{Deserialize, Serialize};
use sidetrack_core::overlay::reserved::Reserved;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{sleep, timeout};

/// Bytes of one write.
const WRITE_BYTES: usize = 65_536;

/// How often the far end reports how many bytes have come.
const SAY_EVERY: Duration = Duration::from_millis(20);

/// Most writes that are stored until their bytes were counted. Further ones are not timed.
const WRITES_MAX: usize = 65_536;

/// How long the last bytes may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The longest measurement, for both ends.
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// The result of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchView {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Time from the first write until the report that the last byte has arrived, seconds.
    pub seconds: f64,
    /// Goodput, Mb/s.
    pub mbit: f64,
    /// Time from a write until the report that its last byte has arrived, milliseconds: median and 99th percentile. It
    /// includes the time in the socket buffers of both nodes.
    pub answer_ms: [f64; 2],
}

/// Floods a session to this node.
///
/// # Errors
/// Returns the reason in words.
pub(super) async fn run(
    requests: &mpsc::Sender<Request>,
    node: &str,
    duration: Duration,
    rate: Option<u64>,
) -> Result<BenchView, String> {
    let session = open(requests, node).await?;
    let (reading, writing) = session.into_split();
    let began = Instant::now();
    let (times, written) = mpsc::unbounded_channel();
    let flooding = flood(writing, duration, rate, times);
    let counted = async {
        let (sent, counted) = tokio::join!(flooding, count(reading, written));
        sent.and(counted)
    };
    let counted = timeout(duration + PATIENCE, counted).await;
    let counted = counted.map_err(|_| "the last bytes did not arrive in time".to_owned())?;
    let (bytes, last, mut answers) = counted.map_err(|error| format!("the session broke: {error}"))?;
    answers.sort_by(f64::total_cmp);
    let share = |share: f64| share_of(&answers, share);
    let seconds = last.saturating_duration_since(began).as_secs_f64();
    let mbit = bytes as f64 * 8.0 / seconds.max(1e-6) / 1e6;
    Ok(BenchView { bytes, seconds, mbit, answer_ms: [share(0.5), share(0.99)] })
}

async fn open(requests: &mpsc::Sender<Request>, node: &str) -> Result<TcpStream, String> {
    let node = node.into();
    let opened = timeout(PATIENCE, open_reserved(Reserved::Bench, &node, requests)).await;
    let opened = opened.map_err(|_| format!("no session to {node} in time"))?;
    opened.map(|(stream, _)| stream).map_err(|failure| failure.detail)
}

/// A write: the offset of its end, and the time when it was done.
type Written = (u64, Instant);

async fn flood(
    mut writing: OwnedWriteHalf,
    duration: Duration,
    rate: Option<u64>,
    times: mpsc::UnboundedSender<Written>,
) -> std::io::Result<()> {
    let bytes = vec![0x5a; WRITE_BYTES];
    let (began, mut sent) = (Instant::now(), 0_u64);
    while began.elapsed() < duration {
        if let Some(rate) = rate {
            let due = Duration::from_secs_f64(sent as f64 * 8.0 / rate.max(1) as f64);
            sleep(due.saturating_sub(began.elapsed())).await;
        }
        writing.write_all(&bytes).await?;
        sent += bytes.len() as u64;
        // The receiver lives as long as this future, so an error cannot happen.
        let _ = times.send((sent, Instant::now()));
    }
    writing.shutdown().await
}

/// Reads the far end's reports until it ends. Returns the bytes that came, the time of the last increase, and how long
/// the writes took.
async fn count(
    mut reading: OwnedReadHalf,
    mut written: mpsc::UnboundedReceiver<Written>,
) -> std::io::Result<(u64, Instant, Vec<f64>)> {
    let (mut bytes, mut last, mut answers) = (0, Instant::now(), Vec::new());
    let mut waiting: VecDeque<Written> = VecDeque::new();
    let mut word = [0; 8];
    loop {
        match reading.read_exact(&mut word).await {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Ok((bytes, last, answers));
            }
            Err(error) => return Err(error),
        }
        let now = Instant::now();
        let came = u64::from_be_bytes(word);
        if came > bytes {
            (bytes, last) = (came, now);
        }
        while let Ok(write) = written.try_recv() {
            if waiting.len() < WRITES_MAX {
                waiting.push_back(write);
            }
        }
        while let Some((_, at)) = waiting.pop_front_if(|(end, _)| *end <= bytes) {
            answers.push(now.saturating_duration_since(at).as_secs_f64() * 1e3);
        }
    }
}

/// The far end: counts the bytes and discards them.
pub(super) async fn sink(session: TcpStream, leave: OwnedSemaphorePermit) {
    // A measurement that takes longer than allowed is cut off.
    let _ = timeout(LONGEST + PATIENCE, count_all(session)).await;
    drop(leave);
}

async fn count_all(mut session: TcpStream) -> std::io::Result<()> {
    let mut buffer = vec![0; 262_144];
    let (mut came, mut said) = (0_u64, Instant::now());
    loop {
        let n = session.read(&mut buffer).await?;
        came += n as u64;
        if n == 0 || said.elapsed() >= SAY_EVERY {
            said = Instant::now();
            session.write_all(&came.to_be_bytes()).await?;
        }
        if n == 0 {
            return session.shutdown().await;
        }
    }
}
