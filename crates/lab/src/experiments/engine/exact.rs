//! Byte for byte: many connections between two kernels, through the engine, over links that lose, repeat and reorder frames
//! on both sides; with payload changed on the way, and without.
//!
//! A client sends a head of 24 hexadecimal digits (the seed of its bytes, and how many it wants back) and random
//! bytes, and closes its side. The server answers with the SHA-256 of all received bytes, and with bytes from the
//! same seed. The changes do not affect digits or each other: every `x` becomes three `y`, and every `z` is removed.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::kit::{Missing, Page};
use crate::link::{Conditions, Kind, Loss, Network};
use crate::peers::ours;
use crate::progress::Progress;
use crate::site::Site;

/// Clients at a time.
const AT_ONCE: u64 = 96;
/// Largest number of bytes each way.
const BYTES_MAX: u64 = 48_000;
/// Time limit for everything.
const STUCK_AFTER: Duration = Duration::from_secs(90);
const PORT: u16 = 7000;
const DIGITS: usize = 24;
/// Stack of a client's thread.
const STACK: usize = 128 << 10;

/// The conditions of both links, in each direction.
fn conditions() -> Conditions {
    Conditions {
        delay: Duration::from_millis(1),
        loss: Loss::Bernoulli(0.01),
        duplicate: 0.01,
        reorder: 0.02,
        ..Conditions::default()
    }
}

/// The result of one kind of run.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    /// Whether payload was changed on its way.
    pub changed: bool,
    /// Requested connections.
    pub connections: u64,
    /// Connections whose bytes were equal at both ends, in both directions.
    pub exact: u64,
    /// Connections that exceeded the time limit.
    pub stuck: u64,
    /// Bytes that clients sent.
    pub sent: u64,
    /// Bytes that came back to them.
    pub received: u64,
    /// Frames lost on the links.
    pub lost: u64,
    /// The first error, in words.
    pub first_error: Option<String>,
}

impl Row {
    /// Returns true if there was no error.
    #[must_use]
    pub(super) fn holds(&self) -> bool {
        self.exact == self.connections && self.stuck == 0
    }
}

/// Generates bytes from a seed; xorshift64*.
fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes()
    };
    let mut out: Vec<u8> = std::iter::repeat_with(&mut next).take(length.div_ceil(8)).flatten().collect();
    out.truncate(length);
    out
}

/// Returns the bytes as the functions of [`tables`] change them.
fn change(bytes: &[u8]) -> Vec<u8> {
    let one = |byte: &u8| match byte {
        b'x' => vec![b'y'; 3],
        b'z' => Vec::new(),
        other => vec![*other],
    };
    bytes.iter().flat_map(one).collect()
}

fn tables(changed: bool) -> &'static str {
    if !changed {
        return "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\n";
    }
    "[function.grow]\nkind = \"replace\"\nreplace = [{ find = \"x\", with = \"yyy\" }]\n\
     [function.shrink]\nkind = \"replace\"\nreplace = [{ find = \"z\", with = \"\" }]\n\
     [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nchain = [\"grow\", \"shrink\"]\n"
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The server's side of one connection.
fn serve(mut stream: TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(STUCK_AFTER))?;
    let mut all = Vec::new();
    stream.read_to_end(&mut all)?;
    let head = std::str::from_utf8(all.get(..DIGITS).context("no head")?)?;
    let (seed, length) = (u64::from_str_radix(&head[..16], 16)?, usize::from_str_radix(&head[16..], 16)?);
    stream.write_all(hash(&all).as_bytes())?;
    stream.write_all(&bytes(!seed, length))?;
    Ok(stream.shutdown(Shutdown::Write)?)
}

/// The client's side; returns the bytes in each direction, if they were correct.
fn visit(to: SocketAddr, number: u64, changed: bool) -> Result<(u64, u64)> {
    let seed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (up, down) = ((seed >> 20) % BYTES_MAX, (seed >> 40) % BYTES_MAX);
    let mut sent = format!("{seed:016x}{down:08x}").into_bytes();
    sent.extend(bytes(seed, up as usize));
    let pass = |bytes: &[u8]| if changed { change(bytes) } else { bytes.to_vec() };
    let wanted = [hash(&pass(&sent)).into_bytes(), pass(&bytes(!seed, down as usize))].concat();
    let stream = TcpStream::connect_timeout(&to, STUCK_AFTER).context("connect")?;
    stream.set_read_timeout(Some(STUCK_AFTER))?;
    stream.set_write_timeout(Some(STUCK_AFTER))?;
    for piece in sent.chunks(1 + (seed >> 50) as usize % 9000) {
        (&stream).write_all(piece).context("send")?;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut got = Vec::new();
    (&stream).read_to_end(&mut got).context("receive")?;
    ensure!(
        hash(&got) == hash(&wanted),
        "connection {number}: {} bytes came back and not the {} expected, or others",
        got.len(),
        wanted.len()
    );
    Ok((sent.len() as u64, got.len() as u64))
}

/// Runs this number of connections of each kind. Errors of connections are in the rows. A kind for which the engine does
/// not start is missing.
pub(super) fn run(connections: u64, progress: &Progress, missing: &mut Missing) -> Vec<Row> {
    let kinds = [("byte for byte, unchanged", false), ("byte for byte, changed", true)];
    let row = |(name, changed)| missing.note(name, one_kind(connections, changed, progress), progress);
    kinds.into_iter().filter_map(row).collect()
}

fn one_kind(connections: u64, changed: bool, progress: &Progress) -> Result<Row> {
    let network = Network::new(Kind::Builtin, &crate::launch::launcher()?, 7)?;
    let (site, wires) = Site::emulated(&network)?;
    let server = SocketAddr::new(site.proxy_server.b.v4.into(), PORT);
    let listener = site.server.enter(|| Ok(TcpListener::bind(server)?))?;
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            // A failure here is noticed by the client.
            let _ = std::thread::Builder::new().stack_size(STACK).spawn(move || serve(stream));
        }
    });
    let (_engine, front) = ours::packet_engine(&site, ("packet", ""), server, tables(changed))
        .map_err(|error| anyhow!("{error}"))?;
    for wire in wires.iter().take(2) {
        wire.set_both(conditions())?;
    }
    let mut row =
        Row { changed, connections, exact: 0, stuck: 0, sent: 0, received: 0, lost: 0, first_error: None };
    drive(&site, front, &mut row, progress)?;
    for wire in wires.iter().take(2) {
        row.lost += wire.counts()?.map_or(0, |counts| counts.iter().map(|way| way.lost).sum());
    }
    Ok(row)
}

fn drive(site: &Site, front: SocketAddr, row: &mut Row, progress: &Progress) -> Result<()> {
    let (next, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    let (connections, changed) = (row.connections, row.changed);
    let work = || {
        let mut own = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= connections {
                return own;
            }
            own.push(visit(front, number, changed));
            let done = ended.fetch_add(1, Ordering::Relaxed);
            if done.is_multiple_of(100) {
                let kind = if changed { "changed" } else { "unchanged" };
                progress.now(&format!("byte for byte, {kind}: {done} of {connections}"));
            }
        }
    };
    let outcomes = site.client.enter(|| {
        std::thread::scope(|scope| {
            let start = || std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
            let threads: Vec<_> = (0..AT_ONCE.min(connections)).map(|_| start()).collect::<Result<_, _>>()?;
            let mut all = Vec::new();
            for thread in threads {
                all.extend(thread.join().map_err(|_| anyhow!("a client panicked"))?);
            }
            Ok(all)
        })
    })?;
    for outcome in outcomes {
        match outcome {
            Ok((sent, received)) => {
                row.exact += 1;
                row.sent += sent;
                row.received += received;
            }
            Err(error) => {
                let timed_out =
                    error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>()).any(|error| {
                        matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
                    });
                row.stuck += u64::from(timed_out);
                row.first_error.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }
    Ok(())
}

/// The table.
pub(super) fn render(page: &mut Page, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let each = conditions();
    let percent = |share: f64| share * 100.0;
    page.line(format_args!(
        "### Byte for byte, between two kernels\n\nEach way of both links: {:.0} ms, {:.0} % lost, {:.0} % \
         repeated, {:.0} % out of order. Sizes at random up to {BYTES_MAX} bytes each way, {AT_ONCE} clients \
         at a time, SHA-256 of both directions compared. Changed: every x becomes three y, every z is taken \
         out, both ways.\n",
        each.delay.as_secs_f64() * 1000.0,
        percent(each.loss.share()),
        percent(each.duplicate),
        percent(each.reorder)
    ));
    page.columns([
        "payload",
        "connections:",
        "exact:",
        "stuck:",
        "MB up:",
        "MB down:",
        "frames lost:",
        "first error",
    ]);
    for row in rows {
        page.row(format_args!(
            "{} | {} | {} | {} | {:.1} | {:.1} | {} | {}",
            if row.changed { "changed" } else { "as it is" },
            row.connections,
            row.exact,
            row.stuck,
            row.sent as f64 / 1e6,
            row.received as f64 / 1e6,
            row.lost,
            row.first_error.as_deref().unwrap_or("-")
        ));
    }
    page.blank();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_follow_from_their_seed_and_are_changed_as_said() {
        assert_eq!((bytes(5, 13), bytes(5, 0).len()), (bytes(5, 16)[..13].to_vec(), 0));
        assert_ne!(bytes(5, 16), bytes(9, 16));
        assert_eq!(change(b"axbzxc"), b"ayyybyyyc");
        assert_eq!(change(b"0123456789abcdef"), b"0123456789abcdef", "the head passes as it is");
    }

    #[test]
    fn a_client_notices_bytes_that_are_not_its_own() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        std::thread::spawn(move || while listener.accept().is_ok_and(|(stream, _)| serve(stream).is_ok()) {});
        assert!(visit(to, 1, false).is_ok(), "nothing between them");
        let error = visit(to, 2, true).unwrap_err().to_string();
        assert!(error.contains("connection 2"), "{error}");
    }
}
