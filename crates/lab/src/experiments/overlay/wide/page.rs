//! The tables, CSV files and plots of the wide area.

use anyhow::Result;

use super::super::measure::Figures;
use super::super::report::cell;
use super::area::{Area, Voice};
use super::chain::Chain;
use super::routes::Routes;
use super::stream::{self, BUDGET};
use super::weather::RATE;
use crate::chart::{self, Series, Titles};
use crate::kit::Page;
use crate::output::Output;
use crate::statistics::{median, percentile};

/// Table 2 of Seamless Overlays, in Mb/s: plain TCP, whose congestion control it does not name, and interceptor with overlay.
const SEED: [(&str, f64, f64); 2] = [("flood", 163.0, 371.0), ("scp", 110.0, 182.0)];

/// Formats all parts of the wide area.
pub(in super::super) fn pages(page: &mut Page, figures: &Figures) {
    if let Some(routes) = &figures.routes {
        cuts(page, routes);
    }
    if let Some(area) = &figures.area {
        bulk(page, area);
        voice(page, area);
    }
    if let Some(chain) = &figures.chain {
        streams(page, chain);
    }
}

fn cuts(page: &mut Page, routes: &Routes) {
    page.line(format_args!(
        "\nTwelve nodes at wide-area distances (links of 4 to 50 ms), {} flows from coast to coast; while \
         these say nothing the busiest link carries {:.1} kbit/s, both ways; then links on their path are \
         cut, {} times:\n",
        routes.flows,
        routes.idle_kbit,
        routes.converged_ms.len()
    ));
    page.columns(["ms after a cut", "median:", "p99:", "worst:"]);
    for (name, times) in [
        ("a node has the new routes", &routes.heard_ms),
        ("the last node has them", &routes.converged_ms),
        ("a flow has an answer", &routes.flow_ms),
        ("the last flow has one", &routes.answered_ms),
    ] {
        let (middle, worst) = (cell(median(times)), cell(times.last().copied()));
        page.row(format_args!("{name} | {middle} | {:.1} | {worst}", percentile(times, 0.99)));
    }
}

fn bulk(page: &mut Page, area: &Area) {
    let late = area.lateness.map_or_else(String::new, |late| format!(" {late}"));
    page.line(format_args!(
        "\nTwelve cities at about their distances by fibre, links of {} Mb/s (a fifth of the seed's 500, for two cores), in \
         bad weather: bursts of losses, outages and cross traffic from a seeded trace, the same for all rows of a round. The \
         best way is {} ({} ms); plain TCP is routed along it.{late} Mb/s beside the seed's Table 2, whose rates have no \
         common scale with ours; compare ours with plain TCP:\n",
        RATE / 1_000_000,
        area.route.join(", "),
        area.route_ms
    ));
    page.columns(["wide area", "", "Mb/s, median:", "each", "seed: TCP:", "seed: overlay:"]);
    for row in &area.bulk {
        let each: Vec<_> = row.mbit.iter().map(|mbit| format!("{mbit:.1}")).collect();
        let seed = SEED.iter().find(|(program, ..)| *program == row.program);
        let seed = |value: fn(&(&str, f64, f64)) -> f64| cell(seed.map(value));
        page.row(format_args!(
            "{} | {} | {} | {} | {} | {}",
            row.program,
            row.way,
            cell(median(&row.mbit)),
            each.join(", "),
            seed(|seed| seed.1),
            seed(|seed| seed.2)
        ));
    }
}

/// The median over the rounds.
fn middle(rounds: &[stream::Figures], figure: impl Fn(&stream::Figures) -> f64) -> f64 {
    median(&rounds.iter().map(figure).collect::<Vec<_>>()).unwrap_or(f64::NAN)
}

fn voice(page: &mut Page, area: &Area) {
    page.line(format_args!(
        "\nVoice over the same network: 50 packets per second of {} bytes in each service, all at a time, {} ms one way. \
         *Pulled*: in calm weather, after a quarter of the time the link to {} is cut. Copies: links that carried a copy of \
         a packet. Real-time links sent {:.2} % of their copies again. Medians of {} rounds:\n",
        stream::BYTES,
        BUDGET.as_millis(),
        area.pulled,
        100.0 * area.repeated,
        area.voice.first().map_or(0, |row| row.weather.len())
    ));
    page.columns([
        "voice",
        "in time, %:",
        "lost, %:",
        "p50, ms:",
        "p99:",
        "max:",
        "copies:",
        "pulled: in time, %:",
        "longest gap, ms:",
    ]);
    for row in &area.voice {
        let weather = |figure: fn(&stream::Figures) -> f64| middle(&row.weather, figure);
        page.row(format_args!(
            "{} | {:.2} | {:.2} | {:.1} | {:.1} | {:.1} | {:.1} | {:.2} | {:.0}",
            row.service,
            weather(|one| one.in_time),
            weather(|one| one.lost),
            weather(|one| one.delay_ms[0]),
            weather(|one| one.delay_ms[1]),
            weather(|one| one.delay_ms[2]),
            row.copies,
            middle(&row.pulled, |one| one.in_time),
            middle(&row.pulled, |one| one.gap_ms)
        ));
    }
}

fn streams(page: &mut Page, chain: &Chain) {
    page.line(format_args!(
        "\nThree hops of 10 ms, the middle one loses 1 % in bursts of four frames, {} bytes per packet, {} ms one way. \
         Medians of the rounds; copies for each packet on real-time links:\n",
        stream::BYTES,
        BUDGET.as_millis()
    ));
    page.columns(["stream", "packets/s:", "in time, %:", "lost, %:", "p50, ms:", "p99:", "max:", "copies:"]);
    for row in &chain.rows {
        let figure = |figure: fn(&stream::Figures) -> f64| middle(&row.rounds, figure);
        let copies = row.copies.map_or_else(|| "-".to_owned(), |copies| format!("{copies:.3}"));
        page.row(format_args!(
            "{} | {} | {:.3} | {:.3} | {:.1} | {:.1} | {:.1} | {copies}",
            row.service,
            row.per_second,
            figure(|one| one.in_time),
            figure(|one| one.lost),
            figure(|one| one.delay_ms[0]),
            figure(|one| one.delay_ms[1]),
            figure(|one| one.delay_ms[2])
        ));
    }
}

/// Writes the figures as CSV, and plots.
///
/// # Errors
/// The files cannot be written.
pub(in super::super) fn files(output: &Output, figures: &Figures) -> Result<()> {
    let Some(area) = &figures.area else { return Ok(()) };
    let bulk: Vec<_> = area
        .bulk
        .iter()
        .map(|row| vec![row.program.to_owned(), row.way.clone(), cell(median(&row.mbit))])
        .collect();
    output.csv("wide-bulk", &["program", "way", "mbit_per_s"], &bulk)?;
    let row = |row: &Voice| {
        let weather = |figure: fn(&stream::Figures) -> f64| format!("{:.3}", middle(&row.weather, figure));
        vec![
            row.service.clone(),
            weather(|one| one.in_time),
            weather(|one| one.delay_ms[0]),
            weather(|one| one.delay_ms[1]),
            weather(|one| one.delay_ms[2]),
            format!("{:.2}", row.copies),
            format!("{:.3}", middle(&row.pulled, |one| one.in_time)),
        ]
    };
    let header =
        ["service", "in_time_percent", "p50_ms", "p99_ms", "max_ms", "copies", "pulled_in_time_percent"];
    output.csv("wide-voice", &header, &area.voice.iter().map(row).collect::<Vec<_>>())?;
    plots(output, area)
}

/// Fig. 3 of the seed, and the voice.
fn plots(output: &Output, area: &Area) -> Result<()> {
    let places: Vec<String> = SEED.iter().map(|(program, ..)| (*program).to_owned()).collect();
    let mut ways: Vec<&str> = Vec::new();
    for row in &area.bulk {
        if !ways.contains(&row.way.as_str()) {
            ways.push(&row.way);
        }
    }
    let figure = |program: &str, way: &str| {
        area.bulk
            .iter()
            .find(|row| row.program == program && row.way == way)
            .and_then(|row| median(&row.mbit))
    };
    let series: Vec<_> = ways
        .iter()
        .map(|way| Series {
            name: (*way).to_owned(),
            values: places.iter().map(|program| figure(program, way)).collect(),
        })
        .collect();
    let titles =
        Titles { title: "Bulk data across twelve cities", vertical: "Mb/s (medians)", places: &places };
    output.svg("wide-bulk", || chart::bars(&titles, &series))?;
    let places: Vec<String> = area.voice.iter().map(|row| row.service.clone()).collect();
    let late = |rounds: fn(&Voice) -> &[stream::Figures]| {
        area.voice.iter().map(|row| Some(100.0 - middle(rounds(row), |one| one.in_time))).collect()
    };
    let series = [
        Series { name: "bad weather".to_owned(), values: late(|row| &row.weather) },
        Series { name: "an uplink is pulled out".to_owned(), values: late(|row| &row.pulled) },
    ];
    let titles = Titles { title: "Voice that is not in time", vertical: "% (medians)", places: &places };
    output.svg("wide-voice", || chart::bars(&titles, &series))
}
