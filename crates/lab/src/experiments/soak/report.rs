//! The tables and plots.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;

use super::routes::{Part, Route};
use super::traffic::{Done, Entry};
use super::{Held, Results, Sample};
use crate::chart::{self, Series, Titles};
use crate::kit::{Bar, Bound, Page};
use crate::output::Output;

/// Descriptors that may be open after the last flow in addition to those before the first: connections to hops that wait for
/// further flows, and of the tunnel and the overlay.
pub(super) const SPARE_DESCRIPTORS: usize = 64;
/// Memory may grow by this number of MiB from the second quarter to the last one, or by this share if that is more.
const GROWTH_MIB: f64 = 16.0;
const GROWTH: f64 = 0.1;
/// Most troubles that are listed.
const LISTED: usize = 20;
/// Points of a plot.
const POINTS: usize = 60;

/// Returns the page, and whether everything was as it should be.
pub(super) fn page(results: &Results, routes: &[&Route], load_after: f64) -> (Page, bool) {
    let mut page = Page::default();
    let built = Path::new(&results.program).parent().and_then(Path::file_name).unwrap_or_default();
    page.text(format_args!(
        "## Mixed traffic, {}\n\n{} and {load_after:.1} after. {} s, seed {}. The program is the one in the folder `{}`. \
         {} reloads.\n\n",
        results.machine.date,
        results.machine,
        results.seconds,
        results.seed,
        built.display(),
        results.reloads
    ));
    let of_route = |port: u16| results.flows.iter().filter(move |flow| flow.port == port);
    page.columns(["route", "flows:", "MiB:", "cut by a fault:", "cut without one:", "wrong bytes:"]);
    for route in routes {
        let flows: Vec<_> = of_route(route.port).collect();
        row(&mut page, route.name, &flows, |flow| is_explained(results, flow, route));
    }
    page.blank();
    page.columns(["listener", "flows:", "MiB:", "cut by a fault:", "cut without one:", "wrong bytes:"]);
    let explained = |flow: &Done| {
        routes.iter().any(|route| route.port == flow.port && is_explained(results, flow, route))
    };
    for entry in Entry::ALL {
        let flows: Vec<_> = results.flows.iter().filter(|flow| flow.entry == entry).collect();
        row(&mut page, entry.name(), &flows, explained);
    }
    let datagrams = results.datagrams;
    page.line(format_args!(
        "\nDatagrams: {} sent, {} came back, {} of them wrong.\n",
        datagrams.sent, datagrams.came, datagrams.wrong
    ));
    faults(&mut page, results);
    held(&mut page, results);
    let bars = bars(results, explained);
    troubles(&mut page, results, explained);
    results.missing.render(&mut page);
    page.blank();
    Bar::table(&mut page, &bars);
    let is_well = !results.missing.is_failure() && !bars.iter().any(Bar::is_failure);
    (page, is_well)
}

fn is_explained(results: &Results, flow: &Done, route: &Route) -> bool {
    results.faults.iter().any(|fault| fault.explains(flow, route))
}

fn row(page: &mut Page, name: &str, flows: &[&Done], explained: impl Fn(&Done) -> bool) {
    let cut = || flows.iter().filter(|flow| flow.error.is_some());
    let by_fault = cut().filter(|flow| explained(flow)).count();
    page.row(format_args!(
        "{name} | {} | {:.1} | {by_fault} | {} | {}",
        flows.len(),
        flows.iter().map(|flow| flow.bytes as f64).sum::<f64>() / f64::from(1 << 20),
        cut().count() - by_fault,
        flows.iter().filter(|flow| flow.is_wrong).count()
    ));
}

fn faults(page: &mut Page, results: &Results) {
    page.columns(["fault", "times:", "until every route works again, s, median:", "longest:"]);
    for part in [Part::Far, Part::Link, Part::Container] {
        let of_part = results.faults.iter().filter(|fault| fault.part == part);
        let mut took: Vec<f64> = of_part
            .map(|fault| fault.until.map_or(f64::INFINITY, |until| (until - fault.from).as_secs_f64()))
            .collect();
        took.sort_by(f64::total_cmp);
        if let (Some(median), Some(longest)) = (took.get(took.len() / 2), took.last()) {
            page.row(format_args!("{} | {} | {median:.2} | {longest:.2}", part.name(), took.len()));
        }
    }
    page.blank();
}

fn held(page: &mut Page, results: &Results) {
    page.columns(
        ["resident memory, MiB / descriptors".to_owned()]
            .into_iter()
            .chain(results.programs.iter().map(|name| format!("{name}:"))),
    );
    let mut row = |name: &str, cells: Vec<[f64; 2]>| {
        let cells: Vec<_> =
            cells.iter().map(|[mib, descriptors]| format!("{mib:.1} / {descriptors:.0}")).collect();
        page.row(format_args!("{name} | {}", cells.join(" | ")));
    };
    let of =
        |all: &[Held]| all.iter().map(|held| [mib(held.resident_bytes), held.descriptors as f64]).collect();
    row("before the first flow", of(&results.before));
    for (number, name) in
        ["first quarter", "second quarter", "third quarter", "last quarter"].into_iter().enumerate()
    {
        row(
            name,
            (0..results.programs.len()).map(|which| quarter(&results.samples, number, which)).collect(),
        );
    }
    row("after the last flow", of(&results.after));
    page.blank();
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns the medians of a quarter of the time for one program: MiB and descriptors. NaN without samples.
fn quarter(samples: &[Sample], number: usize, which: usize) -> [f64; 2] {
    let part = &samples[samples.len() * number / 4..samples.len() * (number + 1) / 4];
    let median = |value: fn(&Held) -> f64| {
        let mut values: Vec<f64> = part.iter().map(|sample| value(&sample.held[which])).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    [median(|held| mib(held.resident_bytes)), median(|held| held.descriptors as f64)]
}

fn bars(results: &Results, explained: impl Fn(&Done) -> bool) -> Vec<Bar> {
    let zero = |what: &str, count: usize| Bar::single(what, Some(count as f64), Bound::AtMost(0.0));
    let wrong = results.flows.iter().filter(|flow| flow.is_wrong).count() + results.datagrams.wrong as usize;
    let cut = results.flows.iter().filter(|flow| flow.error.is_some() && !explained(flow)).count();
    let records = &results.records;
    // A function that is killed after the last byte ends a flow as if it were in order.
    let misjudged = misjudged(results, &explained).count();
    let mut bars = vec![
        zero("flows and datagrams with wrong bytes", wrong),
        zero("flows that were cut without a fault", cut),
        zero(
            "routes that never came back",
            results.faults.iter().filter(|fault| fault.until.is_none()).count(),
        ),
        zero("clients' addresses with more or fewer records than flows", records.miscounted.len()),
        zero("flows that were cut, and whose record says ok", records.without_reason.len()),
        zero("flows that ended well without a fault, and whose record says otherwise", misjudged),
        zero("lines that could not be read as records", records.unread),
        zero("reloads that were rejected", results.rejected.len()),
        Bar::single("flows that the shunt has moved", Some(records.moved as f64), Bound::AtLeast(1.0)),
    ];
    for (which, name) in results.programs.iter().enumerate() {
        let (early, late) = (quarter(&results.samples, 1, which)[0], quarter(&results.samples, 3, which)[0]);
        let growth = Bar::single(
            format!("{name}: growth of memory from the second quarter to the last"),
            Some(late - early),
            Bound::AtMost(GROWTH_MIB.max(early * GROWTH)),
        );
        let open = results.after[which].descriptors.saturating_sub(results.before[which].descriptors);
        let open = Bar::single(
            format!("{name}: descriptors more after the last flow than before the first"),
            Some(open as f64),
            Bound::AtMost(SPARE_DESCRIPTORS as f64),
        );
        bars.extend([growth.unit(" MiB"), open]);
    }
    bars
}

/// Flows without a fault that ended well, and what their records say.
fn misjudged(
    results: &Results,
    explained: impl Fn(&Done) -> bool,
) -> impl Iterator<Item = &(SocketAddr, String)> {
    let is_explained =
        move |own: SocketAddr| results.flows.iter().any(|flow| flow.own == own && explained(flow));
    results.records.misjudged.iter().filter(move |(own, _)| !is_explained(*own))
}

fn troubles(page: &mut Page, results: &Results, explained: impl Fn(&Done) -> bool) {
    let cut = results.flows.iter().filter(|flow| flow.is_wrong || flow.error.is_some() && !explained(flow));
    for flow in cut.take(LISTED) {
        page.line(format_args!(
            "- {}, port {}, {} of {}, {:.2} to {:.2} s: {} after {} bytes",
            flow.entry.name(),
            flow.port,
            if flow.is_wrong { "wrong byte" } else { "cut" },
            flow.own,
            flow.begun.as_secs_f64(),
            flow.ended.as_secs_f64(),
            flow.error.as_deref().unwrap_or("ended"),
            flow.bytes
        ));
    }
    for said in results.rejected.iter().take(LISTED) {
        page.line(format_args!("- {said}"));
    }
    let records = &results.records;
    for (own, flows, count) in records.miscounted.iter().take(LISTED) {
        page.line(format_args!("- {own}: {flows} flows, {count} records"));
    }
    for own in records.without_reason.iter().take(LISTED) {
        page.line(format_args!("- {own}: cut, and the record says ok"));
    }
    for (own, reason) in misjudged(results, &explained).take(LISTED) {
        page.line(format_args!("- {own}: ended well, and the record says {reason}"));
    }
}

/// Writes the plots of memory and of descriptors.
///
/// # Errors
/// A file cannot be written.
pub(super) fn plots(results: &Results, output: &Output) -> Result<()> {
    let step = results.samples.len().div_ceil(POINTS).max(1);
    let chosen: Vec<_> = results.samples.iter().step_by(step).collect();
    let places: Vec<_> = chosen
        .iter()
        .enumerate()
        .map(
            |(number, sample)| {
                if number % 10 == 0 { format!("{:.0} s", sample.at.as_secs_f64()) } else { String::new() }
            },
        )
        .collect();
    let plot = |title, vertical, value: fn(&Held) -> f64| {
        let of = |which: usize| chosen.iter().map(|sample| Some(value(&sample.held[which]))).collect();
        let programs = results.programs.iter().enumerate();
        let series: Vec<_> =
            programs.map(|(which, name)| Series { name: (*name).to_owned(), values: of(which) }).collect();
        chart::lines(&Titles { title, vertical, places: &places }, &series)
    };
    output.svg("soak-memory", || {
        plot("Resident memory of the processes", "MiB", |held| mib(held.resident_bytes))
    })?;
    output.svg("soak-descriptors", || {
        plot("Open descriptors of the processes", "descriptors", |held| held.descriptors as f64)
    })
}
