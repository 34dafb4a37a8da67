//! The AF_XDP socket of the generator, and the loop around it.

use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sidetrack_sys::bpf::{Hook, Own, XdpOn};
use sidetrack_sys::link;
use sidetrack_sys::xsk::{self, Copying, Descriptor, FrameSize, RING_ENTRIES, Umem, XskSocket};

use super::ends::{CLIENT_ADDRESSES, Ends, FIRST_PORT};
use super::segment::{FRAME_MAX, Segment, checksums_hold};
use super::{Report, Spec};

/// Frames that the kernel always finds to fill.
const FILL: usize = RING_ENTRIES as usize;
/// All frames: those, as many on their way out, and what may wait to be taken.
const FRAMES: usize = 2 * FILL + 8192;
/// Large enough for every frame of the loop.
const FRAME: FrameSize = FrameSize::Half;
/// Frames taken at a time.
const BATCH: usize = 64;
/// One frame in so many has its checksums looked at.
const CHECKED_OF: u64 = 64;
/// How often stuck connections are looked for.
const SWEEP_EVERY_NS: u64 = 50_000_000;
/// How long the last connections may take to end.
const DRAIN: Duration = Duration::from_millis(1500);

struct Wire {
    spec: Spec,
    own: [u8; 6],
    socket: XskSocket,
    /// Frames that are nobody's.
    free: Vec<u64>,
    outgoing: Vec<Descriptor>,
    ends: Ends,
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
/// # Errors
/// There is no such interface, or no AF_XDP on it.
pub fn run(spec: &Spec, on_window: impl FnOnce(), on_drain: impl FnOnce()) -> Result<Report> {
    let mut wire = Wire::open(spec)?;
    wire.until(Duration::from_millis(spec.warmup_ms), |_| false)?;
    on_window();
    wire.ends.forget_latencies();
    let (begin, before, packets) = (Instant::now(), wire.ends.tally(), (wire.received, wire.sent));
    wire.until(Duration::from_millis(spec.window_ms), |_| false)?;
    let window_ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let completed = wire.ends.tally().completed - before.completed;
    let (received, sent) = (wire.received - packets.0, wire.sent - packets.1);
    let quantile = |share| wire.ends.latencies().quantile(share);
    let (p50_ns, p99_ns, p999_ns) = (quantile(0.5), quantile(0.99), quantile(0.999));
    on_drain();
    wire.ends.drain();
    wire.until(DRAIN, |ends| ends.open_now() == 0)?;
    let (whole, open) = (wire.ends.tally(), wire.ends.open_now());
    let (checked, lost) = (wire.checked, wire.socket.lost()?);
    Ok(Report { completed, received, sent, window_ns, p50_ns, p99_ns, p999_ns, whole, checked, open, lost })
}

fn program(spec: &Spec, index: u32) -> Result<XdpOn> {
    let own = Own::new(1, 0)?;
    own.listen(Some((*spec.server.ip()).into()), spec.server.port())?;
    for number in 0..CLIENT_ADDRESSES {
        let address = Ipv4Addr::from_bits(spec.clients.to_bits() + number);
        own.source(address.into(), &(FIRST_PORT..=u16::MAX), Some(0))?;
    }
    Ok(own.take_by_xdp(index, Hook::XdpNative, 1)?)
}

impl Wire {
    fn open(spec: &Spec) -> Result<Self> {
        let interface =
            link::interface(&spec.interface).with_context(|| format!("no interface {}", spec.interface))?;
        let queues = xsk::queues(&spec.interface);
        ensure!(queues == 1, "{} has {queues} receive queues; the generator serves one", spec.interface);
        let own = interface.address.with_context(|| format!("{} is no Ethernet", spec.interface))?;
        let program = program(spec, interface.index)?;
        let umem: Arc<Umem> = Umem::new(FRAMES, FRAME)?;
        let socket = XskSocket::open(&umem, interface.index, 0, Copying::Auto, None)
            .with_context(|| format!("no AF_XDP on {}", spec.interface))?;
        program.serve(0, socket.as_fd())?;
        Ok(Self {
            own,
            socket,
            free: (0..FRAMES).map(|frame| (frame * FRAME.bytes()) as u64).collect(),
            outgoing: Vec::with_capacity(4 * BATCH),
            ends: Ends::new(spec.front, spec.server, spec.clients, spec.connections),
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
            self.recycle();
            let count = self.socket.receive(&mut taken);
            self.received += count as u64;
            for descriptor in taken.iter().take(count) {
                self.take(now_ns, *descriptor);
            }
            if now_ns >= self.swept_ns + SWEEP_EVERY_NS {
                self.swept_ns = now_ns;
                self.ends.sweep(now_ns, &mut self.answers);
                // A few at a time, so that no queue overflows at the beginning.
                self.ends.open(now_ns, 512, &mut self.answers);
            }
            self.send();
            self.socket.wake()?;
            if count == 0 {
                std::hint::spin_loop();
            }
        }
    }

    fn take(&mut self, now_ns: u64, descriptor: Descriptor) {
        let frame = self.socket.frame(descriptor);
        let segment = Segment::read(frame);
        if self.received.is_multiple_of(CHECKED_OF) && segment.is_some() {
            self.checked += 1;
            if !checksums_hold(frame) {
                self.ends.corrupt();
            }
        }
        self.free.push(FRAME.beginning(descriptor.address));
        if let Some(segment) = segment {
            self.ends.take(now_ns, &segment, &mut self.answers);
        }
    }

    /// Takes back what was sent, and gives the kernel frames to fill.
    fn recycle(&mut self) {
        let mut addresses = [0; BATCH];
        loop {
            let count = self.socket.finished(&mut addresses);
            self.free.extend(addresses.iter().take(count).map(|address| FRAME.beginning(*address)));
            if count < BATCH {
                break;
            }
        }
        let lacking = FILL - self.socket.to_fill();
        if lacking >= BATCH {
            let start = self.free.len() - lacking.min(self.free.len().saturating_sub(FILL));
            let given = self.socket.give(self.free.get(start..).unwrap_or_default());
            self.free.drain(start..start + given);
        }
    }

    /// Sends the answers, as many as there are frames for; the rest waits.
    fn send(&mut self) {
        let mut written = 0;
        for segment in &self.answers {
            let Some(address) = self.free.pop() else { break };
            let room = Descriptor { address, length: FRAME_MAX as u32, options: 0 };
            let Some(frame) = self.socket.frame(room).first_chunk_mut::<FRAME_MAX>() else { break };
            let length = segment.write(frame, self.spec.engine, self.own) as u32;
            self.outgoing.push(Descriptor { length, ..room });
            written += 1;
        }
        self.answers.drain(..written);
        let sent = self.socket.send(&self.outgoing);
        self.sent += sent as u64;
        self.outgoing.drain(..sent);
    }
}
