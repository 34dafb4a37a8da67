//! Sends a flow of our own through a container, which shows whether it works.

use super::instance::Guest;
use super::passage::{Intro, Passed, Trouble, pass};
use crate::reactor::{TcpStream, timeout};
use sidetrack_core::flow::{Destination, FlowId};
use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddr};
use std::task::{Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

/// The destination of a probe: an address for documentation (RFC 5737), with a port that no service uses.
pub(super) const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

/// Bytes that a probe sends in each direction, in two pieces.
const LENGTH: usize = 1024;

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probed {
    /// Time until the flow had passed the container.
    pub connect: Duration,
    /// Time from then until the bytes had gone there and back.
    pub round_trip: Duration,
    /// Whether bytes come out unchanged in both directions, followed by the ends.
    pub echo: Result<(), String>,
}

/// Returns what a container is told about a flow of our own.
pub(super) const fn intro(destination: &Destination, patience: Duration) -> Intro<'_> {
    let client = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9);
    Intro { id: FlowId(0), client, destination, host: None, metadata: &[], first: &[], patience }
}

/// Returns why the flow did not pass, in words.
pub(super) fn words(trouble: Trouble) -> String {
    match trouble {
        Trouble::Down(why) => why,
        Trouble::Failed(failure) => failure.detail,
    }
}

/// Probes a container.
///
/// # Errors
/// Returns why a flow does not pass.
pub(super) async fn probe(instance: &Guest) -> Result<Probed, String> {
    let patience = Duration::from_millis(instance.spec.probe_timeout_ms);
    let destination = NOWHERE.into();
    let began = Instant::now();
    let passed = pass(instance, intro(&destination, patience)).await.map_err(words)?;
    let connect = began.elapsed();
    let echo = timeout(patience, echo(passed)).await;
    let late =
        |_| Err(format!("it holds bytes back: they did not come out within {} ms", patience.as_millis()));
    let echo = echo.unwrap_or_else(late);
    Ok(Probed { connect, round_trip: began.elapsed() - connect, echo })
}

/// Sends bytes there and back, then ends both directions.
async fn echo(passed: Passed) -> Result<(), String> {
    let Passed { mut into, early, mut back, held, .. } = passed;
    through(&mut into, &mut back, held, "to the server").await?;
    through(&mut back, &mut into, early, "to the client").await?;
    let cannot = |error: std::io::Error| format!("cannot end: {error}");
    into.shutdown_write().map_err(cannot)?;
    match read(&mut back, &mut Vec::new(), 1).await {
        Ok(0) => {}
        Ok(_) => return Err("it adds bytes behind the client's last".to_owned()),
        Err(error) => return Err(format!("the client's end does not come out: {error}")),
    }
    back.shutdown_write().map_err(cannot)?;
    // A proxy without half-closed connections has ended it already, by FIN or RST.
    match read(&mut into, &mut Vec::new(), 1).await {
        Ok(0) | Err(_) => Ok(()),
        Ok(_) => Err("it adds bytes behind the server's last".to_owned()),
    }
}

/// Returns the byte at an offset of a pattern. Pieces and directions all differ.
fn pattern(seed: usize, at: usize) -> u8 {
    let mixed = (at + seed * 0x1_0001).wrapping_mul(0x9e37_79b9);
    mixed.to_le_bytes()[2]
}

async fn through(
    from: &mut TcpStream,
    to: &mut TcpStream,
    mut came: Vec<u8>,
    which: &str,
) -> Result<(), String> {
    let sent: Vec<u8> = (0..LENGTH).map(|at| pattern(which.len(), at)).collect();
    for piece in sent.chunks(LENGTH / 2) {
        from.write_all(piece).await.map_err(|error| format!("bytes {which}: {error}"))?;
    }
    while came.len() < LENGTH {
        let missing = LENGTH - came.len();
        match read(to, &mut came, missing).await {
            Ok(0) => return Err(format!("bytes {which} are cut after {}", came.len())),
            Ok(_) => {}
            Err(error) => return Err(format!("bytes {which} after {}: {error}", came.len())),
        }
        if let Some(at) = came.iter().zip(&sent).position(|(came, sent)| came != sent) {
            return Err(format!(
                "it changes or reorders bytes {which}, from byte {at} on; if it is to, write probe = \"connect\""
            ));
        }
    }
    Ok(())
}

async fn read(stream: &mut TcpStream, bytes: &mut Vec<u8>, most: usize) -> std::io::Result<usize> {
    poll_fn(|cx| {
        let mut buffer = [0; LENGTH];
        let room = &mut buffer[..most.min(LENGTH)];
        let n = ready!(stream.poll_recv(cx, room))?;
        bytes.extend_from_slice(&room[..n]);
        Poll::Ready(Ok(n))
    })
    .await
}
