//! One sample: a peer is started, loaded, measured and ended.

use anyhow::anyhow;
use serde::Serialize;

use super::cells::Cell;
use crate::certificate::{self, Pair};
use crate::cpu;
use crate::datagrams::{Generator, Report, Spec, Via};
use crate::kit::Timing;
use crate::launch::Placement;
use crate::load;
use crate::peers::{Peer, Running, Unavailable};
use crate::service::Service;
use crate::site::Site;

/// How long idle flows are kept, milliseconds.
const IDLE_MS: u64 = 1500;
/// How long new flows begin, milliseconds: relays keep a socket for each of them.
const NEW_MS: u64 = 800;

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Sample {
    /// What the generator saw.
    pub report: Report,
    /// CPU time of the relay's programs in the window, nanoseconds. `None`: the kernel relays.
    pub cpu_ns: Option<u64>,
    /// Memory of the relay's programs before the flows, and with them, bytes.
    pub resident: (u64, u64),
}

impl Sample {
    /// Returns datagrams per second that came back.
    pub(super) fn rate(&self) -> f64 {
        self.report.rate()
    }

    /// Returns the CPU time for a gigabyte of a QUIC stream, seconds.
    pub(super) fn seconds_per_gb(&self) -> Option<f64> {
        self.cpu_ns.filter(|_| self.report.bytes > 0).map(|cpu| cpu as f64 / self.report.bytes as f64)
    }

    /// Returns the CPU time of one datagram's passage, microseconds.
    pub(super) fn cost_us(&self) -> Option<f64> {
        let passed = 2.0 * self.report.answers as f64;
        self.cpu_ns.filter(|_| passed > 0.0).map(|cpu| cpu as f64 / 1e3 / passed)
    }

    /// Returns the memory of one flow, KiB.
    pub(super) fn kib_each(&self) -> f64 {
        let (empty, full) = self.resident;
        full.saturating_sub(empty) as f64 / 1024.0 / f64::from(self.report.open.max(1))
    }
}

/// Takes one sample.
///
/// # Errors
/// The peer is absent, or no datagram comes back.
pub(super) fn take(site: &Site, peer: Peer, cell: Cell, timing: Timing) -> Result<Sample, Unavailable> {
    let mut running = peer.start(site)?;
    let _server = if cell == Cell::Quic { quic(site)? } else { echo(site)? };
    let (work, flows, bytes) = cell.load();
    let via = if running.via == load::Via::Socks5 { Via::Socks5 } else { Via::Plain };
    let window_ms = match cell {
        Cell::Echo(_) | Cell::Rate | Cell::Quic => timing.window_ms,
        Cell::New => NEW_MS,
        Cell::Idle => IDLE_MS,
    };
    let (dial, destination, warmup_ms) = (running.dial, running.destination, timing.warmup_ms);
    let spec = Spec { work, flows, bytes, dial, via, destination, warmup_ms, window_ms };
    let empty = running.resident_bytes();
    let program = site.launcher.to_string_lossy();
    let command = match running.inside.split_first() {
        None => site.client.command_at(&program, &site.client_placement()),
        Some((outer, words)) => {
            let mut command = site.client.command_at(outer, &site.proxy_placement());
            command.args(words).arg(&*program);
            command
        }
    };
    let mut generator = Generator::start(command, &spec)?;
    generator.wait_window()?;
    // The program that runs the client is one of the relays.
    let outer = (!running.inside.is_empty()).then(|| generator.pid());
    let cpu = |running: &Running<'_>| running.cpu_ns() + outer.map_or(0, cpu::process_cpu_ns);
    let before = cpu(&running);
    if cell == Cell::Idle {
        std::thread::sleep(std::time::Duration::from_millis(IDLE_MS / 2));
    }
    let full = running.resident_bytes();
    let (report, after) = generator.report_with(|| cpu(&running))?;
    let cpu_ns = running.has_programs().then(|| after.saturating_sub(before));
    if !running.is_running() {
        return Err(anyhow!("{} ended under load: {}", peer.name, running.log()).into());
    }
    if report.answers == 0 && report.open == 0 && report.bytes == 0 {
        return Err(anyhow!("{}: no datagram came back: {}", peer.name, running.log()).into());
    }
    Ok(Sample { report, cpu_ns, resident: (empty, full) })
}

/// Starts a server of QUIC behind the origin's address.
fn quic(site: &Site) -> Result<Service, Unavailable> {
    let pair = Pair::at(site.directory.path(), "bulk");
    certificate::make(&[], &pair, "/CN=bulk.lab")?;
    let port = site.origin().port();
    let placement = Placement { cpu: Some(0), ..site.client_placement() };
    let mut command = site.server.command_at(&site.launcher.to_string_lossy(), &placement);
    command.args(["quic", "--listen", &format!("0.0.0.0:{port}")]);
    command.arg("--certificate").arg(&pair.certificate).arg("--key").arg(&pair.key);
    let mut service = Service::start("quic", command, site.directory.path())?;
    service.wait_bound(&site.server, port)?;
    Ok(service)
}

/// Starts the server behind the origin's address.
fn echo(site: &Site) -> Result<Service, Unavailable> {
    let port = site.origin().port();
    let placement = Placement { cpu: Some(0), ..site.client_placement() };
    let mut command = site.server.command_at(&site.launcher.to_string_lossy(), &placement);
    command.args(["echo", &format!("0.0.0.0:{port}")]);
    let mut service = Service::start("echo", command, site.directory.path())?;
    service.wait_bound(&site.server, port)?;
    Ok(service)
}
