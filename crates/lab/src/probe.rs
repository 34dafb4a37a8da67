//! Measures a link from its two ends: with numbered, time-stamped datagrams and with one TCP flow.
//!
//! A socket stays in the namespace where it was made. So both ends are threads of this process and share a clock.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use crate::topology::Node;

/// Below the priority of the links' thread, above all ordinary threads, so that the probe measures the link and not
/// the scheduler.
const PRIORITY: u8 = 5;
/// Buffer for datagrams that arrive while the receiver is delayed.
const RECEIVE_BUFFER_BYTES: usize = 64 << 20;
/// How long the receiver waits after the last datagram, in addition to the link's delay.
const PATIENCE: Duration = Duration::from_millis(400);

/// Datagrams to send over a link.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// How many.
    pub count: u32,
    /// Time between two.
    pub gap: Duration,
    /// UDP payload of each in bytes, at least 12.
    pub bytes: usize,
    /// The maximum time that the link may delay one.
    pub longest: Duration,
}

/// The datagrams of a [`Stream`] that arrived, in the order of arrival.
#[derive(Debug, Clone, Default)]
pub struct Arrivals {
    /// The number and the delay of each, in nanoseconds.
    each: Vec<(u32, u64)>,
    /// Time from the first to the last, in nanoseconds.
    span_ns: u64,
}

impl Arrivals {
    /// Returns the number of datagrams that arrived, each counted once.
    #[must_use]
    pub fn distinct(&self) -> u64 {
        let mut numbers: Vec<u32> = self.each.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers.len() as u64
    }

    /// Returns the number of second copies.
    #[must_use]
    pub fn duplicates(&self) -> u64 {
        self.each.len() as u64 - self.distinct()
    }

    /// Returns the number of datagrams that arrived after a later one, without second copies.
    #[must_use]
    pub fn out_of_order(&self) -> u64 {
        let mut highest = None;
        let mut seen = std::collections::BTreeSet::new();
        let mut late = 0;
        for (number, _) in &self.each {
            late += u64::from(seen.insert(*number) && highest.is_some_and(|highest| *number < highest));
            highest = highest.max(Some(*number));
        }
        late
    }

    /// Returns the mean length of runs of missing datagrams; 0 if none is missing.
    #[must_use]
    pub fn mean_burst(&self) -> f64 {
        let mut numbers: Vec<u32> = self.each.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let gaps: Vec<u32> =
            numbers.windows(2).map(|pair| pair[1] - pair[0] - 1).filter(|gap| *gap > 0).collect();
        if gaps.is_empty() { 0.0 } else { f64::from(gaps.iter().sum::<u32>()) / gaps.len() as f64 }
    }

    /// Returns the one-way delays in nanoseconds, sorted.
    #[must_use]
    pub fn delays_ns(&self) -> Vec<u64> {
        let mut delays: Vec<u64> = self.each.iter().map(|(_, delay)| *delay).collect();
        delays.sort_unstable();
        delays
    }

    /// Returns the rate of arrival per second, from the first to the last.
    #[must_use]
    pub fn frames_per_second(&self) -> f64 {
        let steps = self.each.len().saturating_sub(1) as f64;
        if self.span_ns == 0 { 0.0 } else { steps * 1e9 / self.span_ns as f64 }
    }
}

/// Returns the value below which `share` (0 to 1) of `sorted` lies; 0 if empty.
#[must_use]
pub fn quantile(sorted: &[u64], share: f64) -> u64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(0)
}

/// Sends datagrams from one node to an address of another and returns what arrived.
///
/// # Errors
/// A socket cannot be made or used.
pub fn one_way(from: &Node, to: &Node, address: std::net::IpAddr, stream: Stream) -> Result<Arrivals> {
    let receiver = to.enter(|| Ok(UdpSocket::bind((address, 0))?))?;
    rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, RECEIVE_BUFFER_BYTES)?;
    receiver.set_read_timeout(Some(Duration::from_millis(20)))?;
    let target = receiver.local_addr()?;
    let sender = from.enter(|| Ok(UdpSocket::bind((unspecified(target), 0))?))?;
    sender.connect(target)?;
    let (epoch, done) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&receiver, epoch, stream, &done));
        let sent = send(&sender, epoch, stream);
        done.store(true, Ordering::Release);
        let arrivals = receiving.join().map_err(|_| anyhow!("the receiver panicked"))?;
        sent.and(arrivals)
    })
}

fn unspecified(address: SocketAddr) -> std::net::IpAddr {
    if address.is_ipv4() {
        std::net::Ipv4Addr::UNSPECIFIED.into()
    } else {
        std::net::Ipv6Addr::UNSPECIFIED.into()
    }
}

fn send(socket: &UdpSocket, epoch: Instant, stream: Stream) -> Result<()> {
    let begun = Instant::now();
    let mut datagram = vec![0; stream.bytes.max(12)];
    for number in 0..stream.count {
        let due = begun + stream.gap * number;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        datagram[..4].copy_from_slice(&number.to_be_bytes());
        let now = u64::try_from(epoch.elapsed().as_nanos())?;
        datagram[4..12].copy_from_slice(&now.to_be_bytes());
        socket.send(&datagram).context("the link takes no datagram")?;
    }
    Ok(())
}

fn receive(socket: &UdpSocket, epoch: Instant, stream: Stream, done: &AtomicBool) -> Result<Arrivals> {
    let _ = sidetrack_sys::scheduling::become_real_time(PRIORITY);
    let mut arrivals = Arrivals::default();
    let mut buffer = [0; 2048];
    let (mut quiet_since, mut first) = (Instant::now(), None);
    while !done.load(Ordering::Acquire) || quiet_since.elapsed() < stream.longest + PATIENCE {
        match socket.recv(&mut buffer) {
            Ok(length) if length >= 12 => {
                let now = u64::try_from(epoch.elapsed().as_nanos())?;
                let number = u32::from_be_bytes(buffer[..4].try_into()?);
                let sent = u64::from_be_bytes(buffer[4..12].try_into()?);
                arrivals.each.push((number, now.saturating_sub(sent)));
                let first = *first.get_or_insert(now);
                arrivals.span_ns = now - first;
                quiet_since = Instant::now();
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if arrivals.each.len() >= stream.count as usize && done.load(Ordering::Acquire) {
                    break;
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(arrivals)
}

/// Measures round-trip times with `count` small datagrams, one every `gap`, that `to` sends back. Returns them in
/// nanoseconds, sorted; lost datagrams are missing.
///
/// # Errors
/// A socket cannot be made or used.
pub fn round_trips(
    from: &Node,
    to: &Node,
    address: std::net::IpAddr,
    count: u32,
    gap: Duration,
) -> Result<Vec<u64>> {
    let mirror = to.enter(|| Ok(UdpSocket::bind((address, 0))?))?;
    let target = mirror.local_addr()?;
    mirror.set_read_timeout(Some(Duration::from_millis(20)))?;
    let socket = from.enter(|| Ok(UdpSocket::bind((unspecified(target), 0))?))?;
    socket.connect(target)?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = sidetrack_sys::scheduling::become_real_time(PRIORITY);
            let mut buffer = [0; 64];
            while !done.load(Ordering::Acquire) {
                if let Ok((length, back)) = mirror.recv_from(&mut buffer) {
                    let _ = mirror.send_to(buffer.get(..length).unwrap_or_default(), back);
                }
            }
        });
        let times = scope.spawn(|| ping(&socket, count, gap)).join();
        done.store(true, Ordering::Release);
        times.map_err(|_| anyhow!("the probe panicked"))?
    })
}

fn ping(socket: &UdpSocket, count: u32, gap: Duration) -> Result<Vec<u64>> {
    let _ = sidetrack_sys::scheduling::become_real_time(PRIORITY);
    let mut times = Vec::new();
    for number in 0..count {
        let sent = Instant::now();
        socket.send(&number.to_be_bytes())?;
        let mut answer = [0; 64];
        // An answer with another number is late or a second copy.
        while let Ok(length) = socket.recv(&mut answer) {
            if answer.get(..length) == Some(&number.to_be_bytes()) {
                times.push(u64::try_from(sent.elapsed().as_nanos())?);
                break;
            }
        }
        std::thread::sleep(gap);
    }
    times.sort_unstable();
    Ok(times)
}

/// Measures the rate of one TCP flow in `window`, after a warm-up of a quarter of it, in bits per second; with the
/// named congestion control, or the kernel's default.
///
/// # Errors
/// There is no connection, or this kernel lacks the congestion control.
pub fn throughput(
    from: &Node,
    to: &Node,
    address: std::net::IpAddr,
    window: Duration,
    congestion_control: Option<&str>,
) -> Result<f64> {
    let listener = to.enter(|| Ok(TcpListener::bind((address, 0))?))?;
    let target = listener.local_addr()?;
    let mut client = from.enter(|| Ok(TcpStream::connect_timeout(&target, Duration::from_secs(5))?))?;
    let (server, _) = listener.accept()?;
    if let Some(name) = congestion_control {
        rustix::net::sockopt::set_tcp_congestion(&client, name)
            .with_context(|| format!("this kernel lets nobody choose {name}"))?;
    }
    server.set_read_timeout(Some(Duration::from_secs(3)))?;
    client.set_write_timeout(Some(Duration::from_secs(3)))?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let block = vec![0; 256 << 10];
            let mut open = true;
            while open && !done.load(Ordering::Acquire) {
                open = client.write_all(&block).is_ok();
            }
        });
        let counted = count_bytes(server, window / 4, window);
        done.store(true, Ordering::Release);
        counted
    })
}

fn count_bytes(mut server: TcpStream, warm_up: Duration, window: Duration) -> Result<f64> {
    let mut buffer = vec![0; 1 << 20];
    let begun = Instant::now();
    let (mut since, mut bytes) = (None, 0u64);
    loop {
        let count = server.read(&mut buffer).context("the flow stands still")?;
        let Some(since) = since else {
            since = Some(Instant::now()).filter(|_| begun.elapsed() >= warm_up);
            continue;
        };
        bytes += count as u64;
        let elapsed = Instant::now().saturating_duration_since(since);
        if elapsed >= window || count == 0 {
            return Ok(bytes as f64 * 8.0 / elapsed.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_are_counted_as_they_are() {
        let each = [0, 1, 4, 2, 2, 9].map(|number| (number, 10 * u64::from(number))).to_vec();
        let arrivals = Arrivals { each, span_ns: 1_000_000 };
        assert!((arrivals.frames_per_second() - 5000.0).abs() < 1e-9);
        assert_eq!((arrivals.distinct(), arrivals.duplicates(), arrivals.out_of_order()), (5, 1, 1));
        // 3 is missing, and 5 to 8.
        assert!((arrivals.mean_burst() - 2.5).abs() < 1e-9);
        assert_eq!(quantile(&arrivals.delays_ns(), 0.5), 20);
        assert_eq!(quantile(&[], 0.5), 0);
    }
}
