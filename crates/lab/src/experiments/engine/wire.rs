//! The complete engine, over a veth pair with AF_XDP at both ends. The generator plays clients and server on the
//! first CPU; Sidetrack has the second alone.
//!
//! ```text
//!   generator 10.77.9.1 (server), 10.78.0.x (clients) ------ engine 10.77.9.2:80
//! ```

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;
use sidetrack_common::exchange;
use sidetrack_sys::link;

use crate::kit::{Bar, Bound, Missing, Page};
use crate::launch::{self, Placement};
use crate::packets::{By, Generator, KernelPeer, Least, REQUEST, Report, Shakes, Side, Spec};
use crate::peers::ours;
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::service::Service;
use crate::site;
use crate::taker::Taker;
use crate::topology::{self, Node};

/// Number of the link's network.
const SUBNET: u8 = 9;
const PORT: u16 = 80;
/// The bar of user space, in connections per second on one core.
const USER_SPACE_AT_LEAST: f64 = 130_000.0;
/// The bar of decided connections: complete connections per second on one core.
const KERNEL_AT_LEAST: f64 = 400_000.0;
/// The bar of connections with their first flight in user space and the rest in the kernel.
const BOTH_AT_LEAST: f64 = 220_000.0;
/// The names of the rows.
const USER_SPACE: &str = "AF_XDP, user space";
const BOTH: &str = "XDP after the first flight";
const ANSWERED: &str = "XDP after the first flight, and for SYNs";
const KERNEL: &str = "XDP, decided";
/// The smallest program with the same means: it only changes addresses.
const LEAST_BY_PROCESS: &str = "limit: AF_XDP";
const LEAST_BY_KERNEL: &str = "limit: XDP";
/// Maximum number of offloaded connections: the open ones, and those that ended within 20 ms. A larger table works as
/// well, but is some 5 % slower because no cache holds it.
const OFFLOAD_MAX: u32 = 8192;
/// Maximum number of decided connections: the open ones, and ports in TIME-WAIT.
const KERNEL_CONNECTIONS: u32 = 49_152;
/// Time limit until the program takes packets, and until its count of flows is up to date.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
const NICE: i32 = -19;

/// One sample, the median of its rounds by rate.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    /// The part of the engine that carries packets.
    pub plane: String,
    /// Connections open at a time.
    pub open: u32,
    /// The generator's report.
    pub report: Report,
    /// CPU time of Sidetrack in the window, in nanoseconds.
    pub cpu_ns: u64,
    /// Sessions that ended with `ok` by the engine's own count, in the whole run; `None` without records.
    pub records: Option<u64>,
}

impl Row {
    /// Returns the CPU time of a connection, in microseconds.
    #[must_use]
    pub(super) fn cpu_us(&self) -> Option<f64> {
        (self.report.completed > 0).then(|| self.cpu_ns as f64 / 1000.0 / self.report.completed as f64)
    }

    /// Returns the connections per second if the engine's CPU time were one whole core.
    #[must_use]
    pub(super) fn rate_of_core(&self) -> Option<f64> {
        self.cpu_us().map(|us| 1e6 / us)
    }
}

/// Generator and engine, joined.
pub(super) struct Scene {
    generator: Node,
    proxy: Node,
    folder: Scratch,
    engine: [u8; 6],
}

impl Scene {
    pub(super) fn new() -> Result<Self> {
        let launcher = launch::launcher()?;
        let (generator, proxy) = (Node::new("generator", &launcher)?, Node::new("proxy", &launcher)?);
        let interface = topology::one_queue_link(&generator, &proxy, SUBNET)?;
        let address = proxy.enter(|| Ok(link::interface(&interface)?.address))?;
        let engine = address.context("a veth has a link-layer address")?;
        Ok(Self { generator, proxy, folder: Scratch::new()?, engine })
    }

    pub(super) fn admin(&self) -> PathBuf {
        self.folder.path().join("wire.sock")
    }

    /// Starts Sidetrack with these further settings of its engine, ready for packets.
    pub(super) fn start(&self, open: u32, settings: &str) -> Result<Service> {
        let program = ours::program().map_err(|error| anyhow!("{error}"))?;
        let config = self.folder.path().join("wire.toml");
        // Room for the open connections and the same number in TIME-WAIT, so that ports are free in time.
        let text = format!(
            "version = 1\nworkers = 1\ndefault = \"deny\"\n[admin]\nsocket = \"{}\"\n[record]\nto = \"none\"\n[[listen]]\n\
             kind = \"engine\"\naddress = \"10.77.{SUBNET}.2:{PORT}\"\ninterfaces = [\"link{SUBNET}\"]\n\
             to = \"10.77.{SUBNET}.1:{PORT}\"\nengine = {{ io = \"xdp\", source_ports = \"1024-65535\", connections_max = {}, \
             {settings} }}\n{}",
            self.admin().display(),
            (open * 2).max(64),
            "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\n"
        );
        std::fs::write(&config, text)?;
        let mut command = self.proxy.command_at(&program.to_string_lossy(), &beside());
        command.args(["up", "-c"]).arg(&config);
        let mut service = Service::start("wire", command, self.folder.path())?;
        let since = Instant::now();
        while self.ended_well().is_err() {
            ensure!(service.is_running(), "sidetrack ended: {}", service.log());
            ensure!(
                since.elapsed() < PATIENCE,
                "sidetrack's admin socket does not answer: {}",
                service.log()
            );
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(service)
    }

    /// Returns how many flows ended with reason `ok`, from the metrics.
    fn ended_well(&self) -> Result<u64> {
        let (status, answer) = exchange::ask(&self.admin(), "GET", "/metrics", "")?;
        ensure!(status == 200, "{answer}");
        Ok(count_of(&answer, "ok"))
    }

    /// Waits until this count is at least `wanted`, or returns the last value: the recorder is delayed.
    fn ended_well_when(&self, wanted: u64) -> Result<u64> {
        let since = Instant::now();
        loop {
            let found = self.ended_well()?;
            if found >= wanted || since.elapsed() > Duration::from_secs(10) {
                return Ok(found);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Measures one row of user space.
    fn user_space(&self, open: u32, quick: bool) -> Result<Row> {
        self.after_handshake(USER_SPACE, open, quick, "")
    }

    /// Measures one row of connections that are offloaded once their first bytes have chosen the server.
    fn both(&self, plane: &str, open: u32, quick: bool) -> Result<Row> {
        let cookies = if plane == ANSWERED { "xdp" } else { "flood" };
        let settings = format!("offload_max = {OFFLOAD_MAX}, {}", with_cookies(cookies));
        self.after_handshake(plane, open, quick, &settings)
    }

    /// Connections with the engine's own handshake.
    fn after_handshake(&self, plane: &str, open: u32, quick: bool, settings: &str) -> Result<Row> {
        let service = self.start(open, settings)?;
        let (report, cpu_ns) = self.by_kernel(&service, &self.spec(open, quick)?, Shakes::Engine)?;
        let records = self.ended_well_when(report.whole.completed)?;
        Ok(Row { plane: plane.into(), open, report, cpu_ns, records: Some(records) })
    }

    /// Measures one row of decided connections. User space decides about the first flows of each client; then the
    /// rest begins.
    fn decided(&self, open: u32, quick: bool) -> Result<Row> {
        let settings = format!("kernel_connections_max = {KERNEL_CONNECTIONS}");
        // Between the first flows and the rest no program is at this end of the veth. Without GRO the end would drop
        // redirected frames then, and the engine would take its decisions back.
        self.generator.run("ethtool", &["-K", &format!("link{SUBNET}"), "gro", "on"])?;
        let service = self.start(open, &settings)?;
        let spec = self.spec(open, quick)?;
        let first = Spec { connections: 64, warmup_ms: 300, window_ms: 100, ..spec.clone() };
        let (taught, _) = self.by_process(&service, &first)?;
        let (report, cpu_ns) = self.by_kernel(&service, &spec, Shakes::Ends)?;
        let taught = taught.whole.completed;
        let records = self.ended_well_when(report.whole.completed + taught)?.saturating_sub(taught);
        Ok(Row { plane: KERNEL.into(), open, report, cpu_ns, records: Some(records) })
    }

    /// Measures one row of the limit.
    fn least(&self, plane: &str, open: u32, quick: bool) -> Result<Row> {
        let (by, shakes) = match plane {
            LEAST_BY_PROCESS => (By::Process, Shakes::Engine),
            _ => (By::Kernel, Shakes::Ends),
        };
        let spec = self.spec(open, quick)?;
        let neighbour = Least::address(&self.generator, &spec.interface)?;
        let side = Side { interface: spec.interface.clone(), neighbour };
        let least =
            Least { by, clients: side.clone(), servers: side, front: spec.front, server: spec.server };
        let service = least.start(&self.proxy, &beside(), self.folder.path())?;
        let (report, cpu_ns) = self.by_kernel(&service, &spec, shakes)?;
        Ok(Row { plane: plane.into(), open, report, cpu_ns, records: None })
    }

    pub(super) fn spec(&self, open: u32, quick: bool) -> Result<Spec> {
        Ok(Spec {
            interface: format!("link{SUBNET}"),
            engine: self.engine,
            front: format!("10.77.{SUBNET}.2:{PORT}").parse()?,
            server: format!("10.77.{SUBNET}.1:{PORT}").parse()?,
            clients: [10, 78, 0, 1].into(),
            connections: open,
            warmup_ms: if quick { 700 } else { 1500 },
            window_ms: if quick { 1000 } else { 3000 },
            kept: 0,
            patience_ms: 0,
            every_us: None,
            flood_per_s: 0,
        })
    }

    /// Runs a job of the generator process.
    pub(super) fn by_process(&self, service: &Service, spec: &Spec) -> Result<(Report, u64)> {
        let placement = Placement { netns: None, cpu: Some(0), nice: Some(NICE) };
        let program = self.generator.launcher().to_string_lossy().into_owned();
        let mut generator = Generator::start(self.generator.command_at(&program, &placement), spec)?;
        generator.wait_window()?;
        let before = service.cpu_ns();
        generator.wait_drain()?;
        let cpu_ns = service.cpu_ns().saturating_sub(before);
        Ok((generator.report()?, cpu_ns))
    }

    /// Runs a job of the peer in XDP. Each end's frames are taken on its own CPU.
    fn by_kernel(&self, service: &Service, spec: &Spec, shakes: Shakes) -> Result<(Report, u64)> {
        self.generator.enter(|| {
            let mut peer = KernelPeer::attach(spec, shakes)?;
            let _own = Taker::of(&self.generator, &spec.interface, 0)?;
            let engine = Taker::of(&self.proxy, &spec.interface, site::proxy_cpu())?;
            let cpu = || service.cpu_ns() + engine.cpu_ns();
            let (mut before, mut used) = (0, 0);
            let report = peer.run(|| before = cpu(), || used = cpu())?;
            Ok((report, used.saturating_sub(before)))
        })
    }
}

/// Settings with this value of `syn_cookies`. It needs servers that are chosen by first bytes.
pub(super) fn with_cookies(cookies: &str) -> String {
    let choose = format!("{{ prefix = \"{REQUEST}\", to = \"10.77.{SUBNET}.1:{PORT}\" }}");
    format!("syn_cookies = \"{cookies}\", choose = [{choose}]")
}

/// The placement of the measured program.
fn beside() -> Placement {
    Placement { netns: None, cpu: Some(site::proxy_cpu()), nice: Some(NICE) }
}

/// Sums `sidetrack_flows_total` over all labels except the reason.
fn count_of(metrics: &str, reason: &str) -> u64 {
    let wanted = format!("reason=\"{reason}\"");
    let lines =
        metrics.lines().filter(|line| line.starts_with("sidetrack_flows_total{") && line.contains(&wanted));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// Measures. The counts of both sides must agree; otherwise the sample is missing.
pub(super) fn run(quick: bool, rounds: u32, progress: &Progress, missing: &mut Missing) -> Vec<Row> {
    let opens: &'static [u32] = if quick { &[256] } else { &[64, 256, 1024, 4096] };
    let mut rows = Vec::new();
    let both: &'static [u32] = if quick { &[256] } else { &[256, 1024] };
    let decided: &'static [u32] = if quick { &[224] } else { &[128, 224, 1024] };
    let of = |plane, opens: &'static [u32]| opens.iter().map(move |open| (plane, open));
    let kinds = of(USER_SPACE, opens)
        .chain(of(LEAST_BY_PROCESS, both))
        .chain(of(BOTH, both))
        .chain(of(ANSWERED, both))
        .chain(of(KERNEL, decided))
        .chain(of(LEAST_BY_KERNEL, decided));
    for (plane, open) in kinds {
        let mut samples = Vec::new();
        for round in 0..rounds {
            let name = format!("{plane}, {open} open, round {} of {rounds}", round + 1);
            progress.now(&name);
            samples.extend(missing.note(&name, sample(plane, *open, quick), progress));
        }
        samples.sort_by(|a, b| a.report.rate().total_cmp(&b.report.rate()));
        let middle = samples.len() / 2;
        rows.extend(samples.into_iter().nth(middle));
    }
    rows
}

/// One sample. It has a new link, because the kernel's threads stay with a link.
fn sample(plane: &str, open: u32, quick: bool) -> Result<Row> {
    let scene = Scene::new()?;
    let row = match plane {
        KERNEL => scene.decided(open, quick)?,
        BOTH | ANSWERED => scene.both(plane, open, quick)?,
        LEAST_BY_PROCESS | LEAST_BY_KERNEL => scene.least(plane, open, quick)?,
        _ => scene.user_space(open, quick)?,
    };
    check(&row)?;
    Ok(row)
}

/// Checks that generator and engine have the same counts.
fn check(row: &Row) -> Result<()> {
    let whole = &row.report.whole;
    ensure!(whole.completed > 0, "no connection came to its end: {whole:?}");
    ensure!(whole.corrupt == 0, "{} of {} frames with a wrong checksum", whole.corrupt, row.report.checked);
    let Some(records) = row.records else { return Ok(()) };
    ensure!(
        records >= whole.completed && records <= (whole.completed + whole.stuck).max(whole.server_closed),
        "the generator saw {} connections end well, the engine {}: {whole:?}",
        whole.completed,
        records
    );
    Ok(())
}

/// Returns the bars of these rows.
pub(super) fn bars(rows: &[Row]) -> Vec<Bar> {
    let best = |plane: &str| {
        let rates = rows.iter().filter(|row| row.plane.starts_with(plane)).map(|row| row.report.rate());
        rates.fold(None, |best: Option<f64>, rate| Some(best.map_or(rate, |best| best.max(rate))))
    };
    let bar = |what: &str, plane, least| Bar::single(what, best(plane), Bound::AtLeast(least));
    let user = "user-space plane (AF_XDP, copy mode), connections a second on one core";
    let both = "first flight in user space, the rest in the kernel (XDP), connections a second on one core";
    let kernel = "decided flows in the kernel (XDP), connections a second on one core";
    vec![
        bar(user, USER_SPACE, USER_SPACE_AT_LEAST),
        bar(both, BOTH, BOTH_AT_LEAST),
        bar(kernel, KERNEL, KERNEL_AT_LEAST),
    ]
}

/// The table.
pub(super) fn render(page: &mut Page, rows: &[Row], gigahertz: f64) {
    if rows.is_empty() {
        return;
    }
    page.line(format_args!(
        "### Over veth, generator and engine on a core each\n\nClient and server are one program in the \
         kernel, which counts complete connections. There are six packets each way if the engine answers the \
         client's SYN (the last acknowledgement of the handshake brings the request), and seven if client \
         and server shake hands. *Of a core*: the rate if the engine's CPU time were one whole core. A \
         kernel thread on each side's core takes that side's frames; its time is counted. The duration of a \
         connection is not measured, so there are no percentiles. *Limit*: the least program on the path, \
         which changes addresses and knows no connections.\n"
    ));
    page.columns([
        "plane",
        "open:",
        "connections/s:",
        "of a core:",
        "CPU us:",
        "cycles a connection:",
        "Mpackets/s:",
        "p50 us:",
        "p99 us:",
        "p99.9 us:",
        "given up:",
        "completed:",
        "records:",
    ]);
    for row in rows {
        let report = &row.report;
        let us = |ns: u64| if ns == 0 { "-".into() } else { format!("{:.0}", ns as f64 / 1e3) };
        let cpu = row.cpu_us().unwrap_or_default();
        page.row(format_args!(
            "{} | {} | {:.0} | {:.0} | {cpu:.2} | {:.0} | {:.2} | {} | {} | {} | {} | {} | {}",
            row.plane,
            row.open,
            report.rate(),
            row.rate_of_core().unwrap_or_default(),
            cpu * 1000.0 * gigahertz,
            report.packet_rate() / 1e6,
            us(report.p50_ns),
            us(report.p99_ns),
            us(report.p999_ns),
            report.whole.stuck,
            report.whole.completed,
            row.records.map_or("-".to_owned(), |records| records.to_string())
        ));
    }
    page.blank();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::Tally;

    #[test]
    fn flows_are_counted_by_their_reason() {
        let text = "# HELP x\nsidetrack_flows_total{rule=\"a\",carrier=\"direct\",reason=\"ok\"} 7\n\
                    sidetrack_flows_total{rule=\"b\",carrier=\"direct\",reason=\"ok\"} 5\n\
                    sidetrack_flows_total{rule=\"a\",carrier=\"direct\",reason=\"idle\"} 3\n";
        assert_eq!((count_of(text, "ok"), count_of(text, "idle"), count_of(text, "limit")), (12, 3, 0));
    }

    #[test]
    fn counts_that_differ_are_an_error() {
        let row = |completed, stuck, records| Row {
            plane: String::new(),
            open: 1,
            report: Report {
                completed,
                whole: Tally { completed, stuck, ..Tally::default() },
                ..Report::default()
            },
            cpu_ns: 1000,
            records: Some(records),
        };
        assert!(check(&row(10, 0, 10)).is_ok());
        assert!(
            check(&row(10, 0, 9)).is_err()
                && check(&row(10, 0, 11)).is_err()
                && check(&row(0, 0, 0)).is_err()
        );
        assert!(
            check(&row(10, 1, 11)).is_ok(),
            "the last acknowledgement of one that was given up may be lost"
        );
        let mut last = row(10, 0, 11);
        last.report.whole.server_closed = 11;
        assert!(check(&last).is_ok(), "or of one that the server has seen end");
    }
}
