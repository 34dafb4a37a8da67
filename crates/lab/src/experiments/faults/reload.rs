//! Many reloads in a short time under long flows. Each brings another configuration: rules and listeners come and go.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use super::flows::{Flows, Outcome};
use super::page::{mib, none};
use super::stand::{GATEWAY, SERVER, Stand};
use super::{Options, wait};
use crate::experiments::held::Held;
use crate::kit::{Bar, Bound, Need, Page};
use crate::progress::Progress;
use crate::statistics;

/// Ports of the server: one for each way through the gateway.
const PORTS: [u16; 4] = [9001, 9002, 9003, 9004];
/// Added to the server's port, it is the gateway's port that leads there.
const OF_GATEWAY: u16 = 1000;
/// Time between two reloads: a thousand in a minute.
const PACE: Duration = Duration::from_millis(60);
/// Memory may grow by this number of MiB from the second quarter of the reloads to the last one.
const GROWTH_MIB: f64 = 16.0;
/// Descriptors that may be open after the flows in addition to those before.
const SPARE_DESCRIPTORS: usize = 4;
/// The rules, whose places change. What they do to flows in flight stays.
const RULES: [&str; 4] = [
    "[[rule]]\nname = \"splice\"\nmatch = { port = 9001 }\ncarrier = \"direct\"\nkernel = \"never\"\n",
    "[[rule]]\nname = \"count\"\nmatch = { port = 9002 }\ncarrier = \"direct\"\nchain = [\"count\"]\n",
    "[[rule]]\nname = \"limit\"\nmatch = { port = 9003 }\ncarrier = \"direct\"\nchain = [\"limit\"]\n",
    "[[rule]]\nname = \"branch\"\nmatch = { port = 9004 }\ncarrier = \"direct\"\nchain = [\"branch\"]\n",
];

/// What came of it.
#[derive(Debug, Serialize)]
pub(super) struct Done {
    reloads: u32,
    /// What the admin interface said of those that it rejected.
    rejected: Vec<String>,
    /// Configurations in force at the end: one more than reloads.
    generation: u64,
    /// How long each took, in milliseconds, until it was in force.
    latencies_ms: Vec<f64>,
    seconds: f64,
    flows: Outcome,
    before: Held,
    samples: Vec<Held>,
    after: Held,
}

/// Returns a version of the configuration.
fn configuration(version: u32) -> String {
    let more = match version % 3 {
        0 => "",
        1 => "[[listen]]\nname = \"more\"\nkind = \"socks\"\naddress = \"127.0.0.1:1081\"\n",
        _ => "[[listen]]\nname = \"more\"\nkind = \"http\"\naddress = \"127.0.0.1:1082\"\n",
    };
    let listeners: String = PORTS
        .iter()
        .map(|port| {
            format!(
                "[[listen]]\nname = \"port{port}\"\nkind = \"reverse\"\naddress = \"{GATEWAY}:{}\"\nto = \"{SERVER}:{port}\"\n",
                port + OF_GATEWAY
            )
        })
        .collect();
    let mut rules = RULES.to_vec();
    rules.rotate_left(version as usize % RULES.len());
    let (high, low) = (version / 256 % 256, version % 256);
    format!(
        "version = 1\nworkers = 2\ndefault = \"deny\"\n[admin]\nsocket = \"FOLDER/gateway.sock\"\n[record]\nto = \"FOLDER/records\"\n\
         [[listen]]\nname = \"router\"\nkind = \"tproxy\"\ninterfaces = [\"link1\"]\nports = [9001, 9002, 9003, 9004]\n\
         {listeners}{more}\
         [[rule]]\nname = \"version{version}\"\nmatch = {{ to = \"198.18.{high}.{low}/32\" }}\naction = \"deny\"\n{}\
         [function.count]\nkind = \"count\"\n\
         [function.limit]\nkind = \"limit\"\nbytes_per_second = {}\n\
         [function.filter]\nkind = \"filter\"\ndeny_words = [\"a word that no client of this experiment sends {version}\"]\n\
         [function.branch]\nkind = \"branch\"\narms = [{{ name = \"words\", chain = [\"filter\"] }}]\n",
        rules.concat(),
        200_000_000 + version,
    )
}

/// Reloads.
///
/// # Errors
/// Not root, a program is missing, or a flow cannot be opened.
pub(super) fn run(options: &Options, progress: &Progress) -> Result<Done> {
    let reloads = options.reloads.unwrap_or(if options.quick { 40 } else { 1000 });
    let count = options.flows.unwrap_or(if options.quick { 40 } else { 500 });
    let stand = Stand::new(&PORTS)?;
    stand.write(&configuration(0))?;
    let up = stand.start(&[], &[])?;
    let before = held(up.pid())?;
    let to: Vec<SocketAddr> =
        PORTS.iter().flat_map(|port| [(SERVER, *port).into(), (GATEWAY, port + OF_GATEWAY).into()]).collect();
    let flows = Flows::open(&stand.client, &to, count)?;
    progress.say(&format!("reload: {count} flows, {reloads} reloads"));
    let (mut latencies_ms, mut rejected, mut samples) = (Vec::new(), Vec::new(), Vec::new());
    let begun = Instant::now();
    for version in 1..=reloads {
        stand.write(&configuration(version))?;
        let asked = Instant::now();
        let (status, said) = stand.ask("POST", "/v1/reload")?;
        latencies_ms.push(asked.elapsed().as_secs_f64() * 1000.0);
        if status != 200 {
            rejected.push(said);
        }
        samples.push(held(up.pid())?);
        std::thread::sleep((PACE * version).saturating_sub(begun.elapsed()));
    }
    let seconds = begun.elapsed().as_secs_f64();
    // Flows that went on during the last reload, and not only until then.
    let moved = flows.bytes();
    let sizes = count as u64;
    wait("flows go on", || Ok(flows.bytes() > moved + sizes || count == 0))?;
    let flows = flows.end();
    let (_, said) = stand.ask("GET", "/v1/config")?;
    let generation = serde_json::from_str::<serde_json::Value>(&said)?["generation"].as_u64().unwrap_or(0);
    let mut after = held(up.pid())?;
    let at_rest = || {
        after = held(up.pid())?;
        Ok(after.descriptors <= before.descriptors + SPARE_DESCRIPTORS)
    };
    // The bar says it if they stay open.
    let _ = wait("descriptors are closed", at_rest);
    Ok(Done { reloads, rejected, generation, latencies_ms, seconds, flows, before, samples, after })
}

/// What a process holds, without pipes: the program keeps those of flows that have ended for others, up to a part of its limit.
fn held(pid: u32) -> Result<Held> {
    let held = Held::by(pid)?;
    let mut pipes = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor that was closed meanwhile has no link.
        let link = std::fs::read_link(entry?.path()).unwrap_or_default();
        pipes += usize::from(link.to_string_lossy().starts_with("pipe:"));
    }
    Ok(Held { descriptors: held.descriptors.saturating_sub(pipes), ..held })
}

impl Done {
    /// Writes its table.
    pub(super) fn table(&self, page: &mut Page) {
        let at = |share| {
            let mut all = self.latencies_ms.clone();
            all.sort_by(f64::total_cmp);
            statistics::quantile(&all, share).unwrap_or(f64::NAN)
        };
        page.line(format_args!("### Reloads\n"));
        page.columns([
            "reloads:",
            "seconds:",
            "flows:",
            "MiB echoed:",
            "latency, median, ms:",
            "99 %, ms:",
            "longest wait for an echo, ms:",
            "memory at the start, MiB:",
            "second quarter, MiB:",
            "last quarter, MiB:",
        ]);
        page.row(format_args!(
            "{} | {:.1} | {} | {:.1} | {:.1} | {:.1} | {:.0} | {:.1} | {:.1} | {:.1}",
            self.reloads,
            self.seconds,
            self.flows.flows,
            mib(self.flows.bytes),
            at(0.5),
            at(0.99),
            self.flows.longest.as_secs_f64() * 1000.0,
            mib(self.before.resident_bytes),
            self.quarter(1),
            self.quarter(3),
        ));
        page.blank();
        self.flows.cut.iter().chain(&self.rejected).take(20).for_each(|said| {
            page.line(format_args!("- {said}"));
        });
    }

    /// The median of the memory in a quarter of the time, in MiB.
    fn quarter(&self, number: usize) -> f64 {
        let all = &self.samples;
        let part = &all[all.len() * number / 4..all.len() * (number + 1) / 4];
        let values: Vec<f64> = part.iter().map(|held| mib(held.resident_bytes)).collect();
        statistics::median(&values).unwrap_or(f64::NAN)
    }

    /// Returns its bars.
    pub(super) fn bars(&self) -> Vec<Bar> {
        let open = self.after.descriptors.saturating_sub(self.before.descriptors);
        let missing = u64::from(self.reloads).saturating_sub(self.generation.saturating_sub(1));
        vec![
            none("reload: flows that were cut", self.flows.cut.len() as u64),
            none("reload: flows with a wrong byte", self.flows.wrong),
            none("reload: reloads that were rejected", self.rejected.len() as u64),
            none("reload: configurations that did not come into force", missing),
            Bar::single(
                "reload: growth of memory from the second quarter to the last",
                Some(self.quarter(3) - self.quarter(1)),
                Bound::AtMost(GROWTH_MIB),
            )
            .unit(" MiB"),
            Bar::single(
                "reload: descriptors more after the flows than before, without pipes",
                Some(open as f64),
                Bound::AtMost(SPARE_DESCRIPTORS as f64),
            ),
            Bar::single(
                "reload: reloads in a minute",
                Some(f64::from(self.reloads) * 60.0 / self.seconds),
                Bound::AtLeast(990.0),
            )
            .need(if self.reloads < 1000 { Need::Goal } else { Need::Always }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_differs_from_the_one_before() {
        let versions: Vec<_> = (0..300).map(configuration).collect();
        assert!(versions.windows(2).all(|two| two[0] != two[1]));
        assert!(versions[1].contains("198.18.0.1/32") && versions[299].contains("198.18.1.43/32"));
    }
}
