//! The tables and the bars.

use super::Results;
use super::cells::Cell;
use super::sample::Sample;
use crate::kit::{Bar, Bound, Page};
use crate::peers::DATAGRAMS;
use crate::statistics::{Spread, median};

/// Minimum rate of ours as a share of nginx's.
const OF_NGINX: f64 = 1.0;
/// Maximum CPU time of a datagram of ours as a share of nginx's.
const CPU_OF_NGINX: f64 = 0.5;
/// Minimum rate of ours as a multiple of dante's.
const OF_DANTE: f64 = 3.0;
/// Maximum CPU time of CONNECT-UDP over HTTP/3 as a multiple of our tunnel's, for a datagram and for a byte.
const CPU_OF_TUNNEL: f64 = 1.3;
/// Minimum rate of QUIC through CONNECT-UDP as a share of direct QUIC's.
const QUIC_OF_DIRECT: f64 = 0.7;
/// Maximum KiB of an idle association.
const MOST_KIB: f64 = 4.5;

fn middle(results: &Results, cell: Cell, row: &str, figure: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
    let figures: Vec<f64> = results.of(cell, row).into_values().filter_map(figure).collect();
    median(&figures)
}

fn cell(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Writes the figures.
pub(super) fn render(page: &mut Page, results: &Results) {
    page.blank();
    let of = |bytes: usize| [format!("{bytes} bytes, back/s:"), "CPU µs:".to_owned(), "lost %:".to_owned()];
    let head = [64, 1200].into_iter().flat_map(of);
    let more = [
        "at 100000/s, back %:",
        "CPU µs:",
        "QUIC MB/s:",
        "CPU s/GB:",
        "new flows/s:",
        "without an answer:",
        "KiB of an idle flow:",
    ]
    .map(str::to_owned);
    page.columns(std::iter::once(String::new()).chain(head).chain(more));
    for peer in DATAGRAMS {
        let figures = Cell::ALL.iter().map(|cell| figures(results, *cell, peer.name));
        page.row(format_args!("{} | {}", peer.name, figures.collect::<Vec<_>>().join(" | ")));
    }
}

fn figures(results: &Results, of: Cell, row: &str) -> String {
    let middle = |figure: &dyn Fn(&Sample) -> Option<f64>| middle(results, of, row, figure);
    match of {
        Cell::Echo(_) => format!(
            "{} | {} | {}",
            cell(middle(&|sample| Some(sample.rate())), 0),
            cell(middle(&Sample::cost_us), 2),
            cell(middle(&|sample| Some(sample.report.lost_percent())), 2)
        ),
        Cell::Rate => format!(
            "{} | {}",
            cell(middle(&|sample| Some(100.0 - sample.report.lost_percent())), 2),
            cell(middle(&Sample::cost_us), 2)
        ),
        Cell::Quic => format!(
            "{} | {}",
            cell(middle(&|sample| Some(sample.report.bytes_per_second() / 1e6)), 0),
            cell(middle(&Sample::seconds_per_gb), 2)
        ),
        Cell::New => format!(
            "{} | {}",
            cell(middle(&|sample| Some(sample.rate())), 0),
            cell(middle(&|sample| Some(sample.report.lost as f64)), 0)
        ),
        Cell::Idle => cell(middle(&|sample| Some(sample.kib_each())), 1),
    }
}

/// Returns the ratio of two rows, round by round.
fn ratio(
    results: &Results,
    cell: Cell,
    [ours, other]: [&str; 2],
    figure: impl Fn(&Sample) -> Option<f64>,
) -> Result<Spread, String> {
    let others = results.of(cell, other);
    let ours = results.of(cell, ours);
    let pairs = ours.iter().filter_map(|(round, ours)| Some(figure(ours)? / figure(others.get(round)?)?));
    Spread::of(pairs.collect()).ok_or_else(|| format!("no round with {other}"))
}

/// Returns the bars of the run.
pub(super) fn bars(results: &Results) -> Vec<Bar> {
    let rate = |sample: &Sample| Some(sample.rate());
    let mut bars = Vec::new();
    for bytes in [64, 1200] {
        let (echo, nginx) = (Cell::Echo(bytes), ["ours reverse", "nginx stream"]);
        let limit = ratio(results, echo, ["bare reverse", "nginx stream"], rate).ok();
        let bar = Bar::new(
            format!("reverse, {bytes} bytes, of nginx's datagrams per second"),
            ratio(results, echo, nginx, rate),
            Bound::AtLeast(OF_NGINX),
        );
        bars.push(Bar { limit: limit.map(|limit| limit.median), ..bar });
        let limit = ratio(results, echo, ["bare reverse", "nginx stream"], Sample::cost_us).ok();
        let bar = Bar::new(
            format!("reverse, {bytes} bytes, of nginx's CPU for a datagram"),
            ratio(results, echo, nginx, Sample::cost_us),
            Bound::AtMost(CPU_OF_NGINX),
        );
        bars.push(Bar { limit: limit.map(|limit| limit.median), ..bar });
        bars.push(Bar::new(
            format!("SOCKS5, {bytes} bytes, of dante's datagrams per second"),
            ratio(results, echo, ["ours S5", "dante S5"], rate),
            Bound::AtLeast(OF_DANTE),
        ));
    }
    let (two, bulk) =
        (["ours CONNECT-UDP", "ours tunnel"], |sample: &Sample| Some(sample.report.bytes_per_second()));
    bars.push(Bar::new(
        "CONNECT-UDP, 1200 bytes, of the tunnel's CPU for a datagram",
        ratio(results, Cell::Echo(1200), two, Sample::cost_us),
        Bound::AtMost(CPU_OF_TUNNEL),
    ));
    bars.push(Bar::new(
        "CONNECT-UDP, bulk over QUIC, of the tunnel's CPU for a byte",
        ratio(results, Cell::Quic, two, Sample::seconds_per_gb),
        Bound::AtMost(CPU_OF_TUNNEL),
    ));
    bars.push(Bar::new(
        "CONNECT-UDP, bulk over QUIC, of direct QUIC's rate",
        ratio(results, Cell::Quic, ["ours CONNECT-UDP", "direct"], bulk),
        Bound::AtLeast(QUIC_OF_DIRECT),
    ));
    let lost = results.of(Cell::New, "ours reverse").into_values().map(|sample| sample.report.lost as f64);
    let lost = Spread::of(lost.collect()).ok_or_else(|| "no sample".to_owned());
    bars.push(Bar::new(
        "10000 new flows per second, first datagrams without an answer",
        lost,
        Bound::AtMost(0.0),
    ));
    for row in ["ours reverse", "ours S5"] {
        let kib = results.of(Cell::Idle, row).into_values().map(Sample::kib_each);
        let kib = Spread::of(kib.collect()).ok_or_else(|| "no sample".to_owned());
        let bar = Bar::new(format!("{row}, memory of an idle association"), kib, Bound::AtMost(MOST_KIB));
        bars.push(bar.unit(" KiB"));
    }
    bars
}
