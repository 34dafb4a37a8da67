//! `idle`: resident memory of flows that carried one request each and then stay open.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow};
use rustix::process::Resource;

use crate::load::{Spec, Work};
use crate::peers::{self, Peer, Running, Unavailable};
use crate::progress::Progress;
use crate::site::{SMALL_FILE, Site};

/// Maximum resident memory per flow above the empty process, in bytes.
const MOST_BYTES_PER_FLOW: f64 = 4096.0;
/// Share of the limit of open files that a program may reserve for itself, refusing further flows.
const LEAST_SHARE_HELD: f64 = 0.95;
/// Descriptors that a proxy needs in addition to two per flow: its binary, logs, listeners, event loops.
const SPARE_DESCRIPTORS: u64 = 200;
/// Time limit for opening the flows.
const OPENS_WITHIN_MS: u64 = 60_000;
/// How long they stay idle while the memory is read.
const IDLE_MS: u64 = 3000;
/// Readings of the memory, spread over the idle time.
const READINGS: u32 = 8;

const ROWS: &[&str] = &[
    "nginx stream",
    "HAProxy tcp",
    "dante S5",
    "socksx 0.1.0 S5",
    "ours reverse",
    "ours S5",
    "ours S6 + data",
];

/// Options of `sidetrack-lab idle`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Flows to hold; fewer if the limit of open files does not allow this number, and the table says so.
    #[arg(long, default_value_t = 10_000)]
    pub flows: u32,
    /// Only rows whose name contains this; may be given several times.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
}

/// The measurement of one program.
#[derive(Debug, Clone, Copy)]
struct Held {
    flows: u32,
    empty_bytes: u64,
    full_bytes: u64,
}

impl Held {
    fn bytes_per_flow(&self) -> f64 {
        self.full_bytes.saturating_sub(self.empty_bytes) as f64 / f64::from(self.flows.max(1))
    }
}

/// Measures, prints the table and returns whether ours stays below its bar.
///
/// # Errors
/// The site cannot be built.
pub fn run(options: &Options) -> Result<ExitCode> {
    crate::launch::raise_file_limit();
    let flows = options.flows.min(affordable_flows());
    let site = Site::new()?;
    let progress = Progress::new();
    println!(
        "## Idle flows\n\n{} flows asked for, {flows} possible with this limit of open files (two descriptors a flow in the \
         proxy). Each carried one request before; memory is the proportional share (Pss) of all processes.\n\n\
         | | flows held | empty KiB | with flows KiB | bytes a flow | |\n|---|---:|---:|---:|---:|---|",
        options.flows
    );
    let wanted = |name: &&&str| super::is_named(&options.only, name);
    let mut failed = false;
    for name in ROWS.iter().filter(wanted) {
        let peer = peers::find(name).ok_or_else(|| anyhow!("no peer is called {name}"))?;
        progress.now(&format!("{name}: opening {flows} flows"));
        let held = hold(&site, peer, flows);
        progress.now("");
        let (line, is_failure) = judge(peer, flows, held);
        println!("{line}");
        failed |= is_failure;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn affordable_flows() -> u32 {
    let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::from(u32::MAX));
    u32::try_from(limit.saturating_sub(SPARE_DESCRIPTORS) / 2).unwrap_or(u32::MAX)
}

fn judge(peer: Peer, wanted: u32, held: Result<Held, Unavailable>) -> (String, bool) {
    match held {
        Err(reason) => {
            let reason = reason.to_string().replace('\n', " ");
            (format!("| {} | - | - | - | - | {reason} |", peer.name), peer.is_ours)
        }
        Ok(held) => {
            let fits = held.bytes_per_flow() <= MOST_BYTES_PER_FLOW
                && f64::from(held.flows) >= LEAST_SHARE_HELD * f64::from(wanted);
            let result = if !peer.is_ours {
                ""
            } else if fits {
                "ok, at most 4096"
            } else {
                "**FAIL**, at most 4096"
            };
            let (empty, full) = (held.empty_bytes / 1024, held.full_bytes / 1024);
            let line = format!(
                "| {} | {} | {empty} | {full} | {:.0} | {result} |",
                peer.name,
                held.flows,
                held.bytes_per_flow()
            );
            (line, peer.is_ours && !fits)
        }
    }
}

fn hold(site: &Site, peer: Peer, flows: u32) -> Result<Held, Unavailable> {
    let mut running = peer.start(site)?;
    let empty_bytes = running.resident_bytes();
    let spec = Spec {
        work: Work::Idle,
        connections: flows,
        dial: running.dial,
        via: running.via,
        destination: running.destination,
        authority: None,
        tls: false,
        path: SMALL_FILE.into(),
        fast_open: false,
        warmup_ms: OPENS_WITHIN_MS,
        window_ms: IDLE_MS,
        max_requests: u64::MAX,
        per_second: None,
    };
    let mut generator = site.generate(&spec)?;
    generator.wait_window()?;
    let full_bytes = settled_bytes(&running);
    let report = generator.report()?;
    if !running.is_running() {
        return Err(anyhow!("ended under load: {}", running.log()).into());
    }
    if report.open == 0 {
        return Err(anyhow!("held no flow: {:?}", report.errors).into());
    }
    Ok(Held { flows: report.open, empty_bytes, full_bytes })
}

/// The last of several readings within the idle time, when the memory for opening has been released.
fn settled_bytes(running: &Running<'_>) -> u64 {
    let pause = Duration::from_millis(IDLE_MS * 3 / 4) / READINGS;
    let mut bytes = 0;
    for _ in 0..READINGS {
        std::thread::sleep(pause);
        bytes = running.resident_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_is_per_flow_above_the_empty_process_and_needs_the_flows() {
        let ours = peers::find("ours S5").expect("a row");
        let held = |flows, full_bytes| Ok(Held { flows, empty_bytes: 1_000_000, full_bytes });
        assert!(!judge(ours, 1000, held(1000, 1_000_000 + 4_096_000)).1);
        assert!(judge(ours, 1000, held(1000, 1_000_000 + 4_097_000)).1, "a byte too many each");
        assert!(judge(ours, 1000, held(949, 1_000_000)).1, "too many flows were lost");
        assert!(!judge(ours, 1000, held(950, 1_000_000)).1);
        assert!(ROWS.iter().all(|name| peers::find(name).is_some()));
    }
}
