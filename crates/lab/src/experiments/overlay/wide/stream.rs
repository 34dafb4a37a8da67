//! A steady stream of small datagrams in each of several services at a time, and the delay of each packet.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;

use super::world::{CLIENT, FIRST_PORT, PACKETS, World};
use crate::statistics::percentile;

/// Bytes of a packet: 20 ms of speech at 64 kb/s.
pub(super) const BYTES: usize = 160;
/// A packet is of use for this long, one way: the goal of the paper on dissemination graphs.
pub(super) const BUDGET: Duration = Duration::from_millis(65);
/// How long the last packets may take.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Delays of the packets of one service: for each packet, milliseconds, or `None` if it did not arrive.
#[derive(Debug, Clone, Default)]
pub(super) struct Delays(Vec<Option<f64>>);

/// The result of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(in super::super) struct Figures {
    /// Packets that were sent.
    pub sent: usize,
    /// Share that was in time, percent.
    pub in_time: f64,
    /// Share that did not arrive, percent.
    pub lost: f64,
    /// One-way delay of those that arrived, milliseconds: median, 99 of 100, and most.
    pub delay_ms: [f64; 3],
    /// Longest time without a packet in time, milliseconds.
    pub gap_ms: f64,
}

impl Delays {
    /// Computes the figures, for packets sent this far apart.
    pub(super) fn figures(&self, every: Duration) -> Figures {
        let budget = BUDGET.as_secs_f64() * 1e3;
        let arrived: Vec<f64> = self.0.iter().copied().flatten().collect();
        let is_in_time = |delay: &Option<f64>| delay.is_some_and(|delay| delay <= budget);
        let in_time = self.0.iter().filter(|delay| is_in_time(delay)).count();
        let longest = self.0.split(is_in_time).map(<[_]>::len).max().unwrap_or(0);
        let percent = |count: usize| 100.0 * count as f64 / self.0.len() as f64;
        Figures {
            sent: self.0.len(),
            in_time: percent(in_time),
            lost: percent(self.0.len() - arrived.len()),
            delay_ms: [0.5, 0.99, 1.0].map(|share| percentile(&arrived, share)),
            gap_ms: longest as f64 * every.as_secs_f64() * 1e3,
        }
    }
}

/// Sends `count` packets of each of these services of the map, one each `every`, and returns the delays by service. `during`
/// runs on the calling thread meanwhile.
///
/// # Errors
/// A socket fails.
pub(super) fn run(
    world: &World,
    services: &[u16],
    every: Duration,
    count: u32,
    during: impl FnOnce() -> Result<()>,
) -> Result<Vec<Delays>> {
    let ends = services.iter().map(|service| open(world, *service)).collect::<Result<Vec<_>>>()?;
    let (epoch, is_over) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let receive = |far| {
            let is_over = &is_over;
            scope.spawn(move || receive(far, epoch, count, is_over))
        };
        let receivers: Vec<_> = ends.iter().map(|(_, far)| receive(far)).collect();
        let sender = scope.spawn(|| send(&ends, epoch, every, count));
        let done = during();
        let sent = sender.join().map_err(|_| anyhow!("the sender panicked"))?;
        std::thread::sleep(PATIENCE);
        is_over.store(true, Relaxed);
        let delays =
            receivers.into_iter().map(|one| one.join().map_err(|_| anyhow!("a receiver panicked"))?);
        let delays = delays.collect::<Result<Vec<_>>>();
        done.and(sent)?;
        delays
    })
}

/// Opens the socket of an application at the source, and that of its server.
fn open(world: &World, service: u16) -> Result<(UdpSocket, UdpSocket)> {
    let to = SocketAddr::from((PACKETS, FIRST_PORT + service));
    let far = world.target().enter(|| Ok(UdpSocket::bind(to)?))?;
    far.set_read_timeout(Some(LOOK_AGAIN))?;
    let near = world.source().enter(|| {
        let socket = UdpSocket::bind((CLIENT, 0))?;
        socket.connect(to)?;
        Ok(socket)
    })?;
    Ok((near, far))
}

/// Sends the packets. The services take turns, so that no packet waits for those of the others. Each packet carries its
/// number and the time when it was due.
fn send(ends: &[(UdpSocket, UdpSocket)], epoch: Instant, every: Duration, count: u32) -> Result<()> {
    let apart = every / u32::try_from(ends.len().max(1))?;
    let mut packet = [0x5a; BYTES];
    for number in 0..count {
        for ((near, _), turn) in ends.iter().zip(0..) {
            let due = every * number + apart * turn;
            std::thread::sleep((epoch + due).saturating_duration_since(Instant::now()));
            packet[..4].copy_from_slice(&number.to_be_bytes());
            packet[4..12].copy_from_slice(&u64::try_from(due.as_nanos())?.to_be_bytes());
            // While the overlay restarts a session, the packet filter may refuse it: then it is lost.
            let _ = near.send(&packet);
        }
    }
    Ok(())
}

fn receive(far: &UdpSocket, epoch: Instant, count: u32, is_over: &AtomicBool) -> Result<Delays> {
    let mut delays = vec![None; count as usize];
    let mut packet = [0; BYTES];
    while !is_over.load(Relaxed) {
        let bytes = match far.recv(&mut packet) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error).context("a receiver"),
        };
        let now = epoch.elapsed();
        let number = packet.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
        let due = packet[4..].first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
        let (Some(number), Some(due), BYTES) = (number, due, bytes) else { continue };
        if let Some(delay @ None) = delays.get_mut(number as usize) {
            *delay = Some(now.saturating_sub(Duration::from_nanos(due)).as_secs_f64() * 1e3);
        }
    }
    Ok(Delays(delays))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_and_lost_packets_are_not_in_time() {
        let delays =
            Delays(vec![Some(30.0), None, Some(66.0), Some(65.0), Some(31.0), None, Some(32.0), Some(33.0)]);
        let figures = delays.figures(Duration::from_millis(20));
        assert_eq!((figures.sent, figures.in_time, figures.lost), (8, 62.5, 25.0));
        assert_eq!(figures.delay_ms, [32.0, 66.0, 66.0]);
        assert_eq!(figures.gap_ms, 40.0, "two packets in a row");
    }
}
