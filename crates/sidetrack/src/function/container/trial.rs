//! Sends a stream of bytes through a container, to measure its cost.

use super::instance::Guest;
use super::passage::{Passed, pass};
use super::probe::{NOWHERE, Probed, intro, probe, words};
use crate::carry::Wire;
use crate::reactor;
use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Most bytes of one read.
const PIECE: usize = 64 * 1024;

/// How long the stream may stand still.
const PATIENCE: Duration = Duration::from_secs(10);

/// The result of a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Led {
    /// The bytes that came out towards the server.
    pub out: Vec<u8>,
    /// Time until the flow had passed the container.
    pub connect: Duration,
    /// Time from then until the last byte was out.
    pub moving: Duration,
}

/// Calls [`lead`] on its own event loop.
///
/// # Errors
/// Like [`lead`].
pub fn lead_and_wait(instance: &Guest, bytes: &[u8]) -> Result<Led, String> {
    reactor::block_on(lead(instance, bytes)).map_err(|error| error.to_string())?
}

/// Calls [`probe`] this many times, on its own event loop.
///
/// # Errors
/// Like [`probe`].
pub fn probe_and_wait(instance: &Guest, count: u32) -> Result<Vec<Probed>, String> {
    let all = async {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(probe(instance).await?);
        }
        Ok(all)
    };
    reactor::block_on(all).map_err(|error| error.to_string())?
}

/// Sends bytes, and their end, through a container in the way a client does.
///
/// # Errors
/// Returns why the flow does not pass, or that it stands still.
async fn lead(instance: &Guest, bytes: &[u8]) -> Result<Led, String> {
    let destination = NOWHERE.into();
    let began = Instant::now();
    let passed = pass(instance, intro(&destination, PATIENCE)).await.map_err(words)?;
    let connect = began.elapsed();
    let out = moved(passed, bytes).await?;
    Ok(Led { out, connect, moving: began.elapsed() - connect })
}

/// Writes and reads in turn, as much as is possible, until the end comes out.
async fn moved(passed: Passed, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let Passed { mut into, back, mut held, .. } = passed;
    let mut sent = 0;
    if bytes.is_empty() {
        into.shutdown_write().map_err(|error| error.to_string())?;
    }
    held.reserve(bytes.len());
    loop {
        let step = reactor::timeout(
            PATIENCE,
            poll_fn(|cx| {
                let mut is_stuck = true;
                if sent < bytes.len()
                    && let Poll::Ready(n) = into.poll_send(cx, &bytes[sent..bytes.len().min(sent + PIECE)])
                {
                    sent += n?;
                    is_stuck = false;
                    if sent == bytes.len() {
                        into.finish(cx)?;
                    }
                }
                let mut buffer = [0; PIECE];
                match back.poll_recv(cx, &mut buffer) {
                    Poll::Ready(n) => {
                        let n = n?;
                        held.extend_from_slice(&buffer[..n]);
                        Poll::Ready(std::io::Result::Ok(n == 0))
                    }
                    Poll::Pending if is_stuck => Poll::Pending,
                    Poll::Pending => Poll::Ready(Ok(false)),
                }
            }),
        );
        match step.await {
            Ok(Ok(true)) if sent == bytes.len() => return Ok(held),
            Ok(Ok(true)) => return Err(format!("it ended the flow after {sent} bytes")),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => return Err(format!("after {sent} bytes: {error}")),
            Err(_) => return Err(format!("nothing moves any more after {sent} bytes")),
        }
    }
}
