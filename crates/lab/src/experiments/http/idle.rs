//! Memory of intercepted TLS connections that have had one answer and stay open.

use std::time::Duration;

use anyhow::anyhow;

use super::cells::{Cell, Part};
use super::rows::{Row, Scene};
use crate::kit::{Bar, Bound, Page};
use crate::load::{Spec, Work};
use crate::peers::Unavailable;
use crate::service::Service;
use crate::statistics::Spread;

/// Time limit for opening the connections.
const OPENS_WITHIN_MS: u64 = 60_000;
/// How long they stay open.
const IDLE_MS: u64 = 2000;
/// When memory is read: by then the memory for opening has been released.
const READ_AFTER: Duration = Duration::from_millis(IDLE_MS / 2);
/// Maximum KiB per connection of ours.
const MOST_KIB: f64 = 40.0;

const ROWS: [&str; 2] = ["Squid ssl_bump", "ours, opening"];

/// The measurement of one program.
struct Held {
    connections: u32,
    empty_bytes: u64,
    full_bytes: u64,
}

impl Held {
    fn kib_each(&self) -> f64 {
        self.full_bytes.saturating_sub(self.empty_bytes) as f64 / 1024.0 / f64::from(self.connections.max(1))
    }
}

/// Measures, writes the table and returns the bar.
pub(super) fn run(scene: &Scene<'_>, connections: u32, page: &mut Page) -> Vec<Bar> {
    page.line(format_args!(
        "### Memory of idle connections\n\n{connections} intercepted TLS connections to one host. Each had \
         one answer from the cache, then is idle. Memory is the proportional share (Pss) of all processes \
         above the same with one such connection.\n"
    ));
    page.columns(["", "held:", "with one, KiB:", "with all, KiB:", "KiB each:"]);
    let mut bars = Vec::new();
    for row in ROWS.iter().filter_map(|name| Row::named(name)) {
        let held = hold(scene, row, connections);
        match &held {
            Ok(held) => page.row(format_args!(
                "{} | {} | {} | {} | {:.1}",
                row.name,
                held.connections,
                held.empty_bytes / 1024,
                held.full_bytes / 1024,
                held.kib_each()
            )),
            Err(why) => page.row(format_args!("{} | {why} | - | - | -", row.name)),
        }
        if row.is_ours {
            let all = |held: Held| match held.connections {
                open if open == connections => Ok(Spread::single(held.kib_each())),
                open => Err(format!("only {open} of {connections} were held")),
            };
            let measured = held.map_err(|why| why.to_string()).and_then(all);
            let what = format!("{}, idle connection", row.name);
            bars.push(Bar::new(what, measured, Bound::AtMost(MOST_KIB)).unit(" KiB"));
        }
    }
    page.blank();
    bars
}

fn hold(scene: &Scene<'_>, row: &Row, connections: u32) -> Result<Held, Unavailable> {
    let mut services = (row.start)(scene)?;
    let cell = Cell::of(Part::Tls, true).next().ok_or_else(|| anyhow!("there is no column of TLS"))?;
    let load = row.load(scene, cell);
    let idle = |connections| Spec {
        work: Work::Idle,
        connections,
        warmup_ms: OPENS_WITHIN_MS,
        window_ms: IDLE_MS,
        ..load.clone()
    };
    let (empty_bytes, _) = read(scene, &services, &idle(1))?;
    let (full_bytes, open) = read(scene, &services, &idle(connections))?;
    if !services.iter_mut().all(Service::is_running) {
        return Err(anyhow!("ended under load").into());
    }
    Ok(Held { connections: open, empty_bytes, full_bytes })
}

/// Returns the memory while the connections of a job are idle, and their number.
fn read(scene: &Scene<'_>, services: &[Service], spec: &Spec) -> anyhow::Result<(u64, u32)> {
    let mut generator = scene.site.generate(spec)?;
    generator.wait_window()?;
    std::thread::sleep(READ_AFTER);
    let bytes = services.iter().map(Service::resident_bytes).sum();
    Ok((bytes, generator.report()?.open))
}
