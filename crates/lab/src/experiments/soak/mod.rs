//! `soak`: mixed traffic through every listener, carrier and kind of function at once, the packet engine, the shunt and `run` as well,
//! with a reload each second, and kills of peers, links and functions. No byte may be wrong, no flow cut without a reason, and memory and
//! descriptors stay flat.

mod beside;
mod faults;
mod records;
mod report;
mod routes;
mod setup;
mod stand;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::Signal;
use serde::Serialize;

use crate::engine::Engine;
use crate::experiments::held::Held;
use crate::kit::{self, Missing};
use crate::link::random::Random;
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::peers::{Unavailable, ours};
use crate::progress::Progress;

use faults::Fault;
use records::Records;
use stand::{Files, Stand};
use traffic::{Datagrams, Done, Entry, Traffic};

/// Clients on the client's host, on the gateway, and in the network of `run`.
const CLIENTS: [usize; 3] = [10, 3, 2];
/// Time between two samples, and between two reloads.
const SECOND: Duration = Duration::from_secs(1);
/// Time until the first fault.
const FIRST_FAULT: Duration = Duration::from_secs(2);
/// No fault is made in the last seconds, so that flows end without one.
const LAST_FAULT: Duration = Duration::from_secs(2);
/// Longest time until the gateway's program has ended all flows.
const LIMIT: Duration = Duration::from_secs(60);

/// Options of `sidetrack-lab soak`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// How long clients begin flows, in seconds [default: 1800, with --quick 12].
    #[arg(long)]
    pub seconds: Option<u64>,
    /// Decides the kinds and times of flows and faults.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Twelve seconds, without a container.
    #[arg(long)]
    pub quick: bool,
    /// Where all flows, faults and samples go.
    #[command(flatten)]
    pub output: Output,
}

/// What the processes held at a time, in the order of [`Stand::programs`].
#[derive(Debug, Clone, Serialize)]
struct Sample {
    at: Duration,
    held: Vec<Held>,
    /// Flows that were over.
    flows: usize,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    program: String,
    seed: u64,
    seconds: u64,
    flows: Vec<Done>,
    datagrams: Datagrams,
    faults: Vec<Fault>,
    samples: Vec<Sample>,
    /// The programs' names.
    programs: Vec<&'static str>,
    /// After the last flow had ended.
    after: Vec<Held>,
    before: Vec<Held>,
    /// Versions that were read, and what was said of those that were rejected.
    reloads: usize,
    rejected: Vec<String>,
    records: Records,
    missing: Missing,
}

/// Makes the traffic, prints the tables and says whether all bars hold.
///
/// # Errors
/// Not root, a program is missing, or a host cannot be made.
pub fn run(options: &Options) -> Result<ExitCode> {
    let progress = Progress::new();
    let seconds = options.seconds.unwrap_or(if options.quick { 12 } else { 1800 });
    let program = ours::program().map_err(Unavailable::into_error)?;
    let mut missing = Missing::default();
    let engine = if options.quick {
        None
    } else {
        let engine = Engine::shared(&program, 0).map_err(|why| Unavailable::Absent(why).into_error());
        missing.note("container", engine, &progress)
    };
    let mut stand = Stand::new(engine)?;
    progress.say(&format!("{seconds} s, {} routes, seed {}", stand.routes.len(), options.seed));
    let (programs, pids): (Vec<_>, Vec<_>) = stand.programs().into_iter().unzip();
    let before = held(&pids)?;
    let traffic = Traffic::new();
    let (faults, samples) = soak(&mut stand, &traffic, seconds, options.seed, &progress)?;
    let (flows, datagrams) = traffic.into_results();
    let after = rest(&pids, &before)?;
    stand.up.signal(Signal::TERM)?;
    let status = stand.up.wait_ended()?;
    anyhow::ensure!(status.success(), "the gateway's end: {status}: {}", stand.up.log());
    stand.beside.end()?;
    let log = stand.up.log() + &stand.beside.log();
    let reloads = log.matches(" reloaded (").count();
    let lines: Vec<_> = log.lines().collect();
    let rejected = lines.iter().enumerate().filter(|(_, line)| line.contains(" is rejected ("));
    let rejected = rejected.map(|(at, _)| lines[at..].iter().take(4).copied().collect::<Vec<_>>().join(" "));
    let rejected = rejected.collect();
    let records = Records::read(&stand.records()?, &flows);
    let results = Results {
        machine: Machine::probe(),
        program: program.display().to_string(),
        seed: options.seed,
        seconds,
        flows,
        datagrams,
        faults,
        samples,
        programs,
        after,
        before,
        reloads,
        rejected,
        records,
        missing,
    };
    let (page, is_well) = report::page(&results, &stand.routes, machine::load_average());
    page.publish(None)?;
    options.output.json(&results)?;
    report::plots(&results, &options.output)?;
    Ok(kit::exit(is_well))
}

/// Lets clients work, and makes faults, reloads and samples meanwhile.
fn soak(
    stand: &mut Stand,
    traffic: &Traffic,
    seconds: u64,
    seed: u64,
    progress: &Progress,
) -> Result<(Vec<Fault>, Vec<Sample>)> {
    let (client, routes) = (stand.client.clone(), stand.routes.clone());
    let places: [(PathBuf, &[Entry]); 3] = [
        (client.netns(), &Entry::OF_CLIENT),
        (stand.gateway.netns(), &[Entry::Redirect]),
        (stand.beside.netns.clone(), &[Entry::Run]),
    ];
    thread::scope(|scope| {
        let mut clients = Vec::new();
        let all = places.iter().zip(CLIENTS).flat_map(|(place, count)| std::iter::repeat_n(place, count));
        for (number, (netns, entries)) in all.enumerate() {
            let seed = seed.wrapping_mul(1000).wrapping_add(number as u64);
            let routes = &routes;
            clients.push(scope.spawn(move || traffic.flows(netns, entries, routes, seed)));
        }
        let host = &client;
        clients.push(scope.spawn(move || traffic.datagrams(host)));
        let length = Duration::from_secs(seconds);
        let (files, pids) =
            (stand.files.clone(), stand.programs().into_iter().map(|(_, pid)| pid).collect::<Vec<_>>());
        let faults = scope.spawn(move || faults(stand, traffic, length, seed, progress));
        let samples = reload(files, &pids, traffic, length);
        let faults = faults.join().map_err(|_| anyhow::anyhow!("the thread of faults has panicked"))?;
        traffic.stop();
        for client in clients {
            client.join().map_err(|_| anyhow::anyhow!("a client has panicked"))??;
        }
        Ok((faults?, samples?))
    })
}

/// One reload and one sample each second.
fn reload(mut files: Vec<Files>, pids: &[u32], traffic: &Traffic, length: Duration) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    let mut next = SECOND;
    while next <= length {
        thread::sleep(next.saturating_sub(traffic.now()));
        next += SECOND;
        files.iter_mut().try_for_each(Files::write)?;
        samples.push(Sample { at: traffic.now(), held: held(pids)?, flows: traffic.count() });
    }
    Ok(samples)
}

/// A fault every few seconds.
fn faults(
    stand: &mut Stand,
    traffic: &Traffic,
    length: Duration,
    seed: u64,
    progress: &Progress,
) -> Result<Vec<Fault>> {
    let (parts, mut faults, mut random) = (stand.parts(), Vec::new(), Random::new(!seed));
    thread::sleep(FIRST_FAULT);
    loop {
        if traffic.now() + LAST_FAULT > length {
            return Ok(faults);
        }
        // Each part has its turn.
        let part = parts[faults.len() % parts.len()];
        let fault = Fault::make(part, stand, traffic)?;
        let took = fault.until.map(|until| (until - fault.from).as_secs_f64());
        let took = took.map_or("never".to_owned(), |seconds| format!("after {seconds:.1} s"));
        progress.say(&format!("{:.0} s: {}: back {took}", fault.from.as_secs_f64(), part.name()));
        faults.push(fault);
        thread::sleep(Duration::from_secs_f64(2.0 + 6.0 * random.unit()));
    }
}

fn held(pids: &[u32]) -> Result<Vec<Held>> {
    pids.iter().map(|pid| Held::by(*pid)).collect()
}

/// Waits until the descriptors of all flows are closed; returns what is held then.
fn rest(pids: &[u32], before: &[Held]) -> Result<Vec<Held>> {
    let begun = Instant::now();
    loop {
        let held = held(pids)?;
        let is_closed =
            |(now, before): (&Held, &Held)| now.descriptors <= before.descriptors + report::SPARE_DESCRIPTORS;
        if held.iter().zip(before).all(is_closed) || begun.elapsed() > LIMIT {
            return Ok(held);
        }
        thread::sleep(Duration::from_millis(100));
    }
}
