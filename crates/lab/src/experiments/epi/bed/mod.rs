//! The same measurements on a test bed of three real hosts (EPI framework, Sec. IX): set-up times beside what the
//! equations say for the measured distances, and processed requests.
//!
//! There is no redirector on the client's host, because that needs root. The load generator speaks SOCKS itself, or runs
//! under `sidetrack run`.

mod report;
mod rows;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;

use super::measure::Plan;
use super::paper::Topology;
use super::{Options, Part};
use crate::bed::{Distance, Host, PATH, Remote, TestBed};
use crate::kit::{self, Missing, Page, in_turn};
use crate::launch;
use crate::load::{Report, Spec, Via, Work};
use crate::machine::Machine;
use crate::peers::{Unavailable, ours};
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::statistics::Spread;
use rows::{ROWS, Row, Way};

/// Names of the copied programs.
const LAB: &str = "sidetrack-lab";
const SIDETRACK: &str = "sidetrack";
/// Time limit for all requests of one turn, in milliseconds.
const TURN_LIMIT_MS: u64 = 60_000;
const WARMUP_MS: u64 = 250;

/// The content of `results.json`.
#[derive(Debug, Serialize)]
struct Results {
    hosts: Vec<Member>,
    /// The measured round trips.
    distances: Topology,
    plan: Plan,
    figures: BTreeMap<&'static str, Figures>,
    missing: Missing,
}

/// A host and its machine.
#[derive(Debug, Serialize)]
struct Member {
    role: crate::bed::Role,
    ssh: String,
    machine: Machine,
}

/// The figures of one row.
#[derive(Debug, Default, Serialize)]
struct Figures {
    /// The median time of a request in each round, in milliseconds.
    medians_ms: Vec<f64>,
    /// Requests without a correct answer.
    failed: u64,
    /// Requests per second by round and number of connections.
    rates: Vec<Vec<f64>>,
}

impl Figures {
    fn time_ms(&self) -> Option<f64> {
        Spread::of(self.medians_ms.clone()).map(|spread| spread.median)
    }

    fn rate(&self, at: usize) -> Option<f64> {
        let rates = self.rates.iter().filter_map(|round| round.get(at).copied());
        Spread::of(rates.collect()).map(|spread| spread.median)
    }
}

/// The three hosts with what always runs there.
struct Scene {
    bed: TestBed,
    client: Host,
    proxy: Host,
    server: Host,
    /// The origin, and a second one at the proxy, to which the distance is measured.
    _origins: [Remote; 2],
    _logs: Scratch,
}

/// Measures on the hosts of a file and prints the tables. Returns failure if a row could not be measured or a request
/// failed.
///
/// # Errors
/// The file is not valid, a host cannot be reached, or a program does not run there.
pub(super) fn run(options: &Options, file: &Path) -> Result<ExitCode> {
    let plan = super::plan(options);
    let rows: Vec<Row> = ROWS.iter().copied().filter(|row| row.is_chosen(&options.only)).collect();
    ensure!(!rows.is_empty(), "no row has such a name; the rows are: {}", rows::names());
    let bed = TestBed::read(file)?;
    let progress = Progress::new();
    progress.say("Copies the programs to the hosts.");
    let scene = Scene::open(bed)?;
    let members = scene.members()?;
    let distances = scene.distances()?;
    let (mut figures, mut missing) = (BTreeMap::<_, Figures>::new(), Missing::default());
    for round in 0..plan.rounds {
        for (at, row) in in_turn(&rows, round).into_iter().enumerate() {
            let done = round as usize * rows.len() + at;
            progress.bar(done, plan.rounds as usize * rows.len(), row.name);
            let turn = scene.turn(&row, &plan, options.part, figures.entry(row.name).or_default());
            missing.note(row.name, turn, &progress);
        }
    }
    progress.end();
    drop(scene);
    let results = Results { hosts: members, distances, plan, figures, missing };
    let mut page = Page::default();
    report::write(&mut page, &results, &rows);
    page.publish(None)?;
    options.output.json(&results)?;
    report::files(&options.output, &results)?;
    let failed: u64 = results.figures.values().map(|figures| figures.failed).sum();
    Ok(kit::exit(!results.missing.is_failure() && failed == 0))
}

impl Scene {
    fn open(bed: TestBed) -> Result<Self> {
        let logs = Scratch::new()?;
        let lab = launch::launcher()?;
        let sidetrack = ours::program().map_err(Unavailable::into_error)?;
        let open = |at: usize| -> Result<Host> {
            let host = Host::open(&bed.hosts[at], logs.path())?;
            host.install(&lab, LAB)?;
            // The server only answers requests.
            if at < 2 {
                host.install(&sidetrack, SIDETRACK)?;
            }
            Ok(host)
        };
        let opened = std::thread::scope(|scope| {
            let threads = [0, 1, 2].map(|at| scope.spawn(move || open(at)));
            threads.map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked")).flatten())
        });
        let [client, proxy, server] = opened;
        let (client, proxy, server) = (client?, proxy?, server?);
        let port = bed.first_port.to_string();
        let origin = |host: &Host| -> Result<Remote> {
            let program = format!("./{LAB}");
            let mut origin = host.start("origin", &[&program, "bed", "origin", "--port", &port])?;
            origin.wait_line("ready").with_context(|| format!("the origin on host \"{}\"", host.role()))?;
            Ok(origin)
        };
        let origins = [origin(&server)?, origin(&proxy)?];
        Ok(Self { bed, client, proxy, server, _origins: origins, _logs: logs })
    }

    fn members(&self) -> Result<Vec<Member>> {
        let describe = |host: &Host| {
            let text = host.run(&[&format!("./{LAB}"), "bed", "about"])?;
            let machine = serde_json::from_str(&text).context("the description of a machine is not JSON")?;
            Ok(Member { role: host.role(), ssh: host.name(), machine })
        };
        [&self.client, &self.proxy, &self.server].into_iter().map(describe).collect()
    }

    fn distances(&self) -> Result<Topology> {
        let port = self.bed.first_port;
        Ok(Topology {
            name: "test bed",
            client_proxy_ms: distance(&self.client, (self.bed.proxy_for_client, port).into())?,
            proxy_server_ms: distance(&self.proxy, self.origin_for_proxy())?,
            client_server_ms: distance(&self.client, self.origin_for_client())?,
        })
    }

    fn origin_for_proxy(&self) -> SocketAddr {
        (self.bed.server_for_proxy, self.bed.first_port).into()
    }

    fn origin_for_client(&self) -> SocketAddr {
        (self.bed.server_for_client, self.bed.first_port).into()
    }

    /// Starts the programs of a row, measures it, and ends them.
    fn turn(&self, row: &Row, plan: &Plan, part: Option<Part>, figures: &mut Figures) -> Result<()> {
        let relay = SocketAddr::from((self.bed.proxy_for_client, self.bed.first_port + 1));
        let _running = row.start(&self.proxy, relay, self.origin_for_proxy())?;
        let dial = if row.way == Way::Direct { self.origin_for_client() } else { relay };
        distance(&self.client, dial).with_context(|| row.name)?;
        if part != Some(Part::Rates) {
            let report = self.load(row, dial, Work::NewConnection, 1, u64::from(plan.requests))?;
            figures.failed += report.error_count();
            ensure!(report.requests > 0, "no request was answered: {:?}", report.errors);
            figures.medians_ms.push(report.p50_ns as f64 / 1e6);
        }
        if part != Some(Part::Times) {
            let mut rates = Vec::new();
            for connections in &plan.connections {
                let window_ms = plan.window_seconds * 1000;
                let report = self.load(row, dial, Work::KeepAlive, *connections, window_ms)?;
                figures.failed += report.error_count();
                rates.push(report.rate());
            }
            figures.rates.push(rates);
        }
        Ok(())
    }

    /// Sends requests from the client: `amount` of them, or, on connections that stay open, for `amount` milliseconds.
    fn load(&self, row: &Row, dial: SocketAddr, work: Work, connections: u32, amount: u64) -> Result<Report> {
        let by_count = work == Work::NewConnection;
        let server = self.origin_for_proxy();
        let is_plain = row.via == Via::Plain;
        let spec = Spec {
            work,
            connections,
            // Under `run` the program dials the server, and does not know of the proxy.
            dial: if row.way == Way::Run { server } else { dial },
            via: row.via,
            destination: if is_plain { dial } else { server },
            authority: None,
            tls: false,
            path: PATH.to_owned(),
            fast_open: false,
            warmup_ms: if by_count { 0 } else { WARMUP_MS },
            window_ms: if by_count { TURN_LIMIT_MS } else { amount },
            max_requests: if by_count { amount } else { u64::MAX },
            per_second: None,
        };
        let spec = serde_json::to_string(&spec)?;
        let (lab, sidetrack) = (format!("./{LAB}"), format!("./{SIDETRACK}"));
        let hop = format!("socks6://{dial}");
        let load = [lab.as_str(), "load", &spec];
        let text = match row.way {
            Way::Run => self
                .client
                .run(&[&[sidetrack.as_str(), "run", "--quiet", "--via", &hop, "--"], &load[..]].concat()),
            _ => self.client.run(&load),
        }?;
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last)
            .with_context(|| format!("the load generator's report is not JSON: {last:?}"))
    }
}

/// Waits until an address accepts connections of a host; returns the round trip in milliseconds.
fn distance(from: &Host, to: SocketAddr) -> Result<f64> {
    let text = from.run(&[&format!("./{LAB}"), "bed", "distance", &to.to_string()])?;
    let distance: Distance = serde_json::from_str(&text).context("a distance is not JSON")?;
    Ok(distance.round_trip_ms)
}
