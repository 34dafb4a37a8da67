//! The machine on which figures are taken, and how much other work disturbed it.

use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Whether an [`Awake`] was held.
static IS_KEPT_AWAKE: AtomicBool = AtomicBool::new(false);

/// Keeps idle processors from deep sleep while it exists (PM QoS: a latency of 0 written to `/dev/cpu_dma_latency`
/// holds while the file is open). Otherwise most of a quiet link's delay would be wake-ups: some 50 us in a virtual
/// machine, twice for each program on the way, and a different time on another machine. It is the same for all rows
/// of a table.
#[derive(Debug)]
pub struct Awake(#[expect(dead_code, reason = "held open")] File);

impl Awake {
    /// Asks for it; `None` if the kernel has no such file or this process may not write it.
    #[must_use]
    pub fn hold() -> Option<Self> {
        let mut file = File::options().write(true).open("/dev/cpu_dma_latency").ok()?;
        file.write_all(&0_i32.to_ne_bytes()).ok()?;
        IS_KEPT_AWAKE.store(true, Ordering::Relaxed);
        Some(Self(file))
    }
}

/// The machine a table was measured on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Machine {
    /// UTC date, `YYYY-MM-DD`.
    pub date: String,
    /// Kernel release.
    pub kernel: String,
    /// CPU model and count, and whether the processors were kept awake.
    pub cpu: String,
    /// TCP congestion control of new connections.
    pub congestion_control: String,
    /// Load average over one minute at the start.
    pub load: f64,
}

impl Machine {
    /// Reads what can be read; the rest is `unknown`.
    #[must_use]
    pub fn probe() -> Self {
        let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).ok();
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
        let count = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
        let awake = if IS_KEPT_AWAKE.load(Ordering::Relaxed) { ", kept awake" } else { "" };
        Self {
            date: today(),
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into()),
            cpu: format!("{count} x {}{awake}", model.unwrap_or("unknown").trim()),
            congestion_control: read("/proc/sys/net/ipv4/tcp_congestion_control")
                .unwrap_or_else(|| "unknown".into()),
            load: load_average(),
        }
    }
}

/// `Kernel 6.1, 2 x ..., congestion control bbr, load 0.1 before`.
impl fmt::Display for Machine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, cpu, congestion_control, load, .. } = self;
        write!(
            formatter,
            "Kernel {kernel}, {cpu}, congestion control {congestion_control}, load {load:.1} before"
        )
    }
}

/// Load average over one minute.
#[must_use]
pub fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// How much time other work took during a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// Time that the hypervisor gave to other machines, in percent of all CPU time.
    pub steal_percent: f64,
    /// Time in which at least one task waited for a CPU, in percent of the sample (`/proc/pressure/cpu`).
    pub pressure_percent: f64,
}

/// Counters at the start of a sample.
#[derive(Debug)]
pub struct DisturbanceMeter {
    since: Instant,
    steal_ticks: u64,
    all_ticks: u64,
    pressure_us: u64,
}

impl DisturbanceMeter {
    /// Starts counting.
    #[must_use]
    pub fn start() -> Self {
        let (steal_ticks, all_ticks) = cpu_ticks();
        Self { since: Instant::now(), steal_ticks, all_ticks, pressure_us: pressure_us() }
    }

    /// Returns the disturbance since [`Self::start`].
    #[must_use]
    pub fn stop(&self) -> Disturbance {
        let (steal, all) = cpu_ticks();
        let elapsed_us = self.since.elapsed().as_micros() as f64;
        Disturbance {
            steal_percent: percent((steal - self.steal_ticks) as f64, (all - self.all_ticks) as f64),
            pressure_percent: percent((pressure_us() - self.pressure_us) as f64, elapsed_us),
        }
    }
}

fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}

/// Returns steal and total ticks of all CPUs, from the first line of `/proc/stat` (proc_stat(5)).
fn cpu_ticks() -> (u64, u64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .take(8) // guest time is already in user time
        .filter_map(|field| field.parse().ok())
        .collect();
    (fields.get(7).copied().unwrap_or(0), fields.iter().sum())
}

fn pressure_us() -> u64 {
    let text = fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let total = text.lines().next().and_then(|line| line.rsplit("total=").next());
    total.and_then(|total| total.parse().ok()).unwrap_or(0)
}

/// Returns the UTC date, `YYYY-MM-DD`.
fn today() -> String {
    let now = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
    now.split('T').next().unwrap_or_default().to_owned()
}
