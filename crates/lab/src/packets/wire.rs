//! The generator's loop around its AF_XDP socket.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sidetrack_sys::bpf::{Hook, Own, XdpOn};
use sidetrack_sys::link;
use sidetrack_sys::xsk::Descriptor;

use super::ends::{CLIENT_ADDRESSES, Ends, FIRST_PORT};
use super::flood::Flood;
use super::rings::{BATCH, Rings};
use super::segment::{Segment, checksums_hold};
use super::{Report, Spec};

/// One of this number of frames has its checksums checked.
const CHECKED_OF: u64 = 64;
/// Interval between searches for stuck connections.
const SWEEP_EVERY_NS: u64 = 50_000_000;
/// Time in which only connections that stay are opened.
const HEAD_START_NS: u64 = 300_000_000;
/// Slots that impatient clients look at together.
const SWEPT_AT_ONCE: usize = 128;
/// Time limit for the last connections to end.
const DRAIN: Duration = Duration::from_millis(1500);

struct Wire {
    spec: Spec,
    own: [u8; 6],
    rings: Rings,
    ends: Ends,
    flood: Flood,
    start: Instant,
    received: u64,
    sent: u64,
    checked: u64,
    swept_ns: u64,
    answers: Vec<Segment>,
    _program: XdpOn,
}

/// Runs a job on the calling thread.
///
/// # Errors The interface does not exist, or has no AF_XDP.
pub(super) fn run(spec: &Spec, on_window: impl FnOnce(), on_drain: impl FnOnce()) -> Result<Report> {
    let mut wire = Wire::open(spec)?;
    wire.until(Duration::from_millis(spec.warmup_ms), |_| false)?;
    on_window();
    wire.ends.forget_latencies();
    let (begin, before, packets) = (Instant::now(), wire.ends.tally(), (wire.received, wire.sent));
    let flooded = wire.flood.sent();
    wire.until(Duration::from_millis(spec.window_ms), |_| false)?;
    let window_ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let after = wire.ends.tally();
    let (completed, begun) = (after.completed - before.completed, after.opened - before.opened);
    let (received, sent) = (wire.received - packets.0, wire.sent - packets.1);
    let (kept, flooded) = (wire.ends.kept(), wire.flood.sent() - flooded);
    let quantile = |share| wire.ends.latencies().quantile(share);
    let (p50_ns, p99_ns, p999_ns) = (quantile(0.5), quantile(0.99), quantile(0.999));
    on_drain();
    wire.ends.drain();
    wire.until(DRAIN, |ends| ends.open_now() == 0)?;
    let (whole, open) = (wire.ends.tally(), wire.ends.open_now());
    let (checked, lost) = (wire.checked, wire.rings.lost()?);
    Ok(Report {
        completed,
        begun,
        received,
        sent,
        window_ns,
        p50_ns,
        p99_ns,
        p999_ns,
        whole,
        checked,
        open,
        lost,
        kept,
        flooded,
    })
}

fn program(spec: &Spec, index: u32) -> Result<XdpOn> {
    let own = Own::new(1, 0)?;
    own.listen(Some((*spec.server.ip()).into()), spec.server.port())?;
    // The last one is of connections that stay.
    for number in 0..=CLIENT_ADDRESSES {
        let address = Ipv4Addr::from_bits(spec.clients.to_bits() + number);
        own.source(address.into(), &(FIRST_PORT..=u16::MAX), Some(0))?;
    }
    Ok(own.take_by_xdp(index, Hook::XdpNative, 1)?)
}

impl Wire {
    fn open(spec: &Spec) -> Result<Self> {
        let interface =
            link::interface(&spec.interface).with_context(|| format!("no interface {}", spec.interface))?;
        let own = interface.address.with_context(|| format!("{} is no Ethernet", spec.interface))?;
        let program = program(spec, interface.index)?;
        let rings = Rings::open(&spec.interface, interface.index)?;
        program.serve(0, rings.as_fd())?;
        Ok(Self {
            own,
            rings,
            ends: Ends::new(spec.front, spec.server, spec.clients, spec.connections).with(
                spec.kept,
                spec.every_us,
                spec.patience_ms,
            ),
            flood: Flood::new(spec.front, spec.flood_per_s),
            start: Instant::now(),
            received: 0,
            sent: 0,
            checked: 0,
            swept_ns: 0,
            answers: Vec::with_capacity(4 * BATCH),
            spec: spec.clone(),
            _program: program,
        })
    }

    fn until(&mut self, limit: Duration, done: impl Fn(&Ends) -> bool) -> Result<()> {
        let end = Instant::now() + limit;
        let mut taken = [Descriptor::default(); BATCH];
        loop {
            let now = Instant::now();
            if now >= end || done(&self.ends) {
                return Ok(());
            }
            let now_ns = u64::try_from((now - self.start).as_nanos()).unwrap_or(u64::MAX);
            let count = self.rings.receive(&mut taken);
            self.received += count as u64;
            for descriptor in taken.iter().take(count) {
                self.take(now_ns, *descriptor);
            }
            if self.spec.kept > 0 {
                self.ends.ask(now_ns, &mut self.answers);
            }
            if self.spec.kept == 0 || now_ns >= HEAD_START_NS {
                self.begin(now_ns);
                self.flood(now_ns);
            }
            self.send()?;
            if count == 0 {
                std::hint::spin_loop();
            }
        }
    }

    /// Begins connections, and gives up those that are stuck.
    fn begin(&mut self, now_ns: u64) {
        if self.spec.patience_ms > 0 {
            if self.answers.len() < BATCH {
                self.ends.sweep_some(now_ns, SWEPT_AT_ONCE, &mut self.answers);
            }
        } else if now_ns >= self.swept_ns + SWEEP_EVERY_NS {
            self.swept_ns = now_ns;
            self.ends.sweep(now_ns, &mut self.answers);
            // It begins a few at a time, so that no queue overflows.
            self.ends.open(now_ns, 512, &mut self.answers);
        }
    }

    /// Adds to the flood, unless what is to be answered waits already.
    fn flood(&mut self, now_ns: u64) {
        if self.answers.len() < BATCH {
            self.flood.poll(now_ns, &mut self.answers);
        }
    }

    fn take(&mut self, now_ns: u64, descriptor: Descriptor) {
        let frame = self.rings.frame(descriptor);
        let segment = Segment::read(frame);
        if self.received.is_multiple_of(CHECKED_OF) && segment.is_some() {
            self.checked += 1;
            if !checksums_hold(frame) {
                self.ends.corrupt();
            }
        }
        self.rings.let_go(descriptor);
        if let Some(segment) = segment {
            self.ends.take(now_ns, &segment, &mut self.answers);
        }
    }

    /// Sends as many answers as there are free frames; the rest waits.
    fn send(&mut self) -> Result<()> {
        let mut written = 0;
        for segment in &self.answers {
            if !self.rings.send(|frame| segment.write(frame, self.spec.engine, self.own)) {
                break;
            }
            written += 1;
        }
        self.answers.drain(..written);
        self.sent += self.rings.flush()? as u64;
        Ok(())
    }
}
