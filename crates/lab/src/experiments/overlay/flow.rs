//! One flow from the source to the target, and its measurement at the far end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use sidetrack_core::overlay::frame::LinkKind;
use sidetrack_sys::sockopt;

use super::scene::{COPIES, PACKETS, PACKETS_BEST_EFFORT, PACKETS_RELIABLE, PLAIN, Scene, TARGET};
use crate::topology::Node;

/// Bytes of a message of [`messages`], as in the literature on delays of overlays.
const MESSAGE_BYTES: usize = 1000;
/// Interval between two messages.
const MESSAGE_EVERY: Duration = Duration::from_millis(1);
/// Time limit for everything.
const PATIENCE: Duration = Duration::from_secs(30);

/// The way of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Plain TCP along the three hops with this congestion control.
    Plain(&'static str),
    /// Over the overlay; the application's socket has the system's defaults.
    Overlay,
    /// Over the overlay, a copy of each byte on both paths.
    Copies,
    /// Over the overlay, as whole packets on links of this kind.
    Packets(LinkKind),
}

impl Way {
    /// All ways, in the order of the tables.
    pub(super) const ALL: [Self; 3] = [Self::Plain("cubic"), Self::Plain("bbr"), Self::Overlay];

    /// Returns its name in the tables.
    pub(super) fn name(self) -> String {
        match self {
            Self::Plain(congestion) => format!("TCP {congestion}"),
            Self::Overlay => "ours".to_owned(),
            Self::Copies => "ours, duplicated".to_owned(),
            Self::Packets(LinkKind::Reliable) => "ours, packets, reliable".to_owned(),
            Self::Packets(LinkKind::BestEffort | LinkKind::RealTime) => {
                "ours, packets, best effort".to_owned()
            }
        }
    }

    /// Returns the destination address.
    pub(super) const fn address(self) -> Ipv4Addr {
        match self {
            Self::Plain(_) => PLAIN,
            Self::Overlay => TARGET,
            Self::Copies => COPIES,
            Self::Packets(_) => PACKETS,
        }
    }

    /// The server's port; 0: any.
    pub(super) const fn port(self) -> u16 {
        match self {
            Self::Packets(LinkKind::Reliable) => PACKETS_RELIABLE,
            Self::Packets(LinkKind::BestEffort | LinkKind::RealTime) => PACKETS_BEST_EFFORT,
            _ => 0,
        }
    }
}

/// An open flow: the application's end and the server's.
pub(super) struct Ends {
    /// At the source.
    pub near: TcpStream,
    /// At the target.
    pub far: TcpStream,
}

/// Opens a flow.
///
/// # Errors The connection fails, or the congestion control is not available.
pub(super) fn open(scene: &Scene, way: Way) -> Result<Ends> {
    if let Way::Plain(congestion) = way {
        scene.route_plain(congestion)?;
    }
    let listener = scene.target().enter(|| Ok(TcpListener::bind((way.address(), way.port()))?))?;
    let to = listener.local_addr()?;
    let ends = ends(&listener, scene.source(), to)?;
    if let Way::Plain(congestion) = way {
        is_in_use(&ends, congestion)?;
    }
    Ok(ends)
}

/// Checks that the kernel took this congestion control for the application's socket.
///
/// # Errors
/// It took another one.
pub(super) fn is_in_use(ends: &Ends, congestion: &str) -> Result<()> {
    let got = sockopt::congestion(&ends.near)?;
    ensure!(got == congestion, "asked for {congestion}, the kernel took {got}");
    Ok(())
}

/// Opens a flow from a node to the address that leads to the listener.
///
/// # Errors
/// The connection fails.
pub(super) fn ends(listener: &TcpListener, source: &Node, to: SocketAddr) -> Result<Ends> {
    let near = source.enter(|| connect(to))?;
    let far = accept(listener)?;
    far.set_read_timeout(Some(PATIENCE))?;
    near.set_nodelay(true)?;
    Ok(Ends { near, far })
}

fn connect(to: SocketAddr) -> Result<TcpStream> {
    TcpStream::connect_timeout(&to, PATIENCE).with_context(|| format!("connect to {to}"))
}

fn accept(listener: &TcpListener) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let until = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error).context("the flow did not come across"),
        }
    }
}

/// Writes at full speed until the flow is shut down.
fn flooder(mut near: TcpStream) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let bytes = vec![0x5a; 65_536];
        // The loop ends when the other thread shuts the socket down.
        while near.write_all(&bytes).is_ok() {}
    })
}

/// The result of a flood in its window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flood {
    /// Application bytes in the window, as Mb/s.
    pub mbit: f64,
    /// CPU time of the nodes in the window, in seconds per delivered GB.
    pub cpu_s_per_gb: f64,
}

/// Sends at full speed: `warm` first, then `window` is measured.
///
/// # Errors
/// The flow breaks.
pub(super) fn flood(scene: &Scene, way: Way, warm: Duration, window: Duration) -> Result<Flood> {
    flood_through(open(scene, way)?, || scene.cpu_ns(), warm, window)
}

/// The same over an open flow. `cpu_ns` is the CPU time of the nodes.
///
/// # Errors
/// The flow breaks.
pub(super) fn flood_through(
    ends: Ends,
    cpu_ns: impl Fn() -> u64,
    warm: Duration,
    window: Duration,
) -> Result<Flood> {
    let Ends { near, mut far } = ends;
    let writer = flooder(near.try_clone()?);
    let mut buffer = vec![0; 262_144];
    let began = Instant::now();
    while began.elapsed() < warm {
        read_some(&mut far, &mut buffer)?;
    }
    let (since, cpu) = (Instant::now(), cpu_ns());
    let mut bytes = 0_u64;
    while since.elapsed() < window {
        bytes += read_some(&mut far, &mut buffer)? as u64;
    }
    let (seconds, cpu) = (since.elapsed().as_secs_f64(), cpu_ns() - cpu);
    end(&near, &far, writer)?;
    let gigabytes = bytes as f64 / 1e9;
    Ok(Flood { mbit: bytes as f64 * 8.0 / seconds / 1e6, cpu_s_per_gb: cpu as f64 / 1e9 / gigabytes })
}

/// Floods the overlay with several flows at once, each at full speed; returns the Mb/s of all together.
///
/// # Errors
/// A flow breaks.
pub(super) fn overload(scene: &Scene, flows: usize, duration: Duration) -> Result<f64> {
    Ok(together(scene, flows, Duration::ZERO, duration)?.iter().sum())
}

/// Floods the overlay with several flows at once: `warm` first, then `duration` is measured. Returns the Mb/s of each.
///
/// # Errors
/// A flow breaks.
pub(super) fn together(scene: &Scene, flows: usize, warm: Duration, duration: Duration) -> Result<Vec<f64>> {
    let ends: Vec<_> = (0..flows).map(|_| open(scene, Way::Overlay)).collect::<Result<_>>()?;
    let writers: Vec<_> =
        ends.iter().map(|ends| Ok(flooder(ends.near.try_clone()?))).collect::<Result<_>>()?;
    let began = Instant::now();
    let read = |far: &TcpStream| {
        let (mut far, mut buffer, mut bytes) = (far.try_clone()?, vec![0; 262_144], 0);
        while began.elapsed() < warm {
            read_some(&mut far, &mut buffer)?;
        }
        let since = Instant::now();
        while began.elapsed() < warm + duration {
            bytes += read_some(&mut far, &mut buffer)?;
        }
        anyhow::Ok(bytes as f64 * 8.0 / since.elapsed().as_secs_f64() / 1e6)
    };
    let mbit = std::thread::scope(|scope| {
        let readers: Vec<_> = ends.iter().map(|ends| scope.spawn(|| read(&ends.far))).collect();
        let joined =
            readers.into_iter().map(|reader| reader.join().map_err(|_| anyhow!("a reader panicked"))?);
        joined.collect::<Result<Vec<f64>>>()
    })?;
    for (ends, writer) in ends.iter().zip(writers) {
        end(&ends.near, &ends.far, writer)?;
    }
    Ok(mbit)
}

fn end(near: &TcpStream, far: &TcpStream, writer: JoinHandle<()>) -> Result<()> {
    // The flow has done its work; its end does not affect these figures.
    let _ = (far.shutdown(Shutdown::Both), near.shutdown(Shutdown::Both));
    writer.join().map_err(|_| anyhow!("the writer panicked"))
}

fn read_some(far: &mut TcpStream, buffer: &mut [u8]) -> Result<usize> {
    let n = far.read(buffer).context("the flow stands still")?;
    ensure!(n > 0, "the flow ended by itself");
    Ok(n)
}

/// Returns the delays of messages in milliseconds, ascending.
///
/// # Errors
/// The flow breaks.
pub(super) fn messages(scene: &Scene, way: Way, warm: usize, count: usize) -> Result<Vec<f64>> {
    let Ends { near, mut far } = open(scene, way)?;
    let epoch = Instant::now();
    let stop = AtomicBool::new(false);
    let mut delays = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_messages(&near, epoch, warm + count, &stop));
        let delays = read_messages(&mut far, epoch, warm + count);
        stop.store(true, Relaxed);
        writer.join().map_err(|_| anyhow!("the writer panicked"))??;
        delays
    })?;
    delays.drain(..warm);
    delays.sort_by(f64::total_cmp);
    Ok(delays)
}

/// As [`messages`], while another flow of the same way sends the same: its losses must not delay the first.
///
/// # Errors
/// A flow breaks.
pub(super) fn messages_beside(scene: &Scene, way: Way, warm: usize, count: usize) -> Result<Vec<f64>> {
    let Ends { near, mut far } = open(scene, way)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_messages(&near, Instant::now(), 20 * (warm + count), &stop));
        let reader = scope.spawn(move || {
            let mut buffer = vec![0; 65_536];
            while matches!(far.read(&mut buffer), Ok(1..)) {}
        });
        let delays = messages(scene, way, warm, count);
        stop.store(true, Relaxed);
        let _ = near.shutdown(Shutdown::Both);
        // It ends because it is shut down here.
        let _ = writer.join().map_err(|_| anyhow!("the writer panicked"))?;
        reader.join().map_err(|_| anyhow!("the reader panicked"))?;
        delays
    })
}

/// Each message carries the time when it was due. So waiting for room in the socket counts as delay.
fn write_messages(mut near: &TcpStream, epoch: Instant, count: usize, stop: &AtomicBool) -> Result<()> {
    let mut message = vec![0x5a; MESSAGE_BYTES];
    for number in 0..u32::try_from(count)? {
        let due = epoch + MESSAGE_EVERY * number;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if stop.load(Relaxed) {
            break;
        }
        let at = u64::try_from((due - epoch).as_nanos())?;
        message[..8].copy_from_slice(&at.to_be_bytes());
        near.write_all(&message)?;
    }
    Ok(())
}

fn read_messages(far: &mut TcpStream, epoch: Instant, count: usize) -> Result<Vec<f64>> {
    let mut message = vec![0; MESSAGE_BYTES];
    let mut delays = Vec::with_capacity(count);
    for _ in 0..count {
        far.read_exact(&mut message).context("a message did not come")?;
        let sent = message.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes));
        let delay = epoch.elapsed().saturating_sub(Duration::from_nanos(sent));
        delays.push(delay.as_secs_f64() * 1e3);
    }
    Ok(delays)
}

/// Returns the longest time between two messages, in milliseconds, from the moment on when `break_it` is called: after a third of
/// the messages.
///
/// # Errors
/// The flow breaks.
pub(super) fn pause(
    scene: &mut Scene,
    way: Way,
    count: usize,
    break_it: impl FnOnce(&mut Scene) -> Result<()>,
) -> Result<f64> {
    let Ends { near, mut far } = open(scene, way)?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_messages(&near, Instant::now(), count, &stop));
        let longest = longest_pause(&mut far, count, || break_it(scene));
        stop.store(true, Relaxed);
        let _ = near.shutdown(Shutdown::Read);
        writer.join().map_err(|_| anyhow!("the writer panicked"))??;
        Ok(longest?.as_secs_f64() * 1e3)
    })
}

fn longest_pause(
    far: &mut TcpStream,
    count: usize,
    break_it: impl FnOnce() -> Result<()>,
) -> Result<Duration> {
    let mut message = vec![0; MESSAGE_BYTES];
    let mut read = |count: usize| -> Result<Duration> {
        let (mut longest, mut last) = (Duration::ZERO, Instant::now());
        for _ in 0..count {
            far.read_exact(&mut message).context("a message did not come")?;
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        Ok(longest)
    };
    read(count / 3)?;
    break_it()?;
    read(count - count / 3)
}

/// Returns the longest time without a byte after `break_it`, in milliseconds, of a flood over the overlay that is
/// observed for `watch`.
///
/// # Errors The flow ends, or makes no progress for 30 s.
pub(super) fn stall(
    scene: &mut Scene,
    warm: Duration,
    watch: Duration,
    break_it: impl FnOnce(&mut Scene) -> Result<()>,
) -> Result<f64> {
    let Ends { near, mut far } = open(scene, Way::Overlay)?;
    let writer = flooder(near.try_clone()?);
    let mut buffer = vec![0; 262_144];
    let began = Instant::now();
    while began.elapsed() < warm {
        read_some(&mut far, &mut buffer)?;
    }
    break_it(scene)?;
    let mut last = Instant::now();
    let mut longest = Duration::ZERO;
    let until = last + watch;
    while last < until {
        read_some(&mut far, &mut buffer)?;
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    end(&near, &far, writer)?;
    Ok(longest.as_secs_f64() * 1e3)
}
