//! Tables, bars and plots.

use super::cycles::Outcome;
use super::events::{self, Events};
use super::latency::Run;
use super::samples::EVERY;
use super::setup::Setup;
use super::validate::Validated;
use super::{load, network, small};
use crate::chart::{self, Series, Titles};
use crate::kit::Bound::{self, AtLeast, AtMost};
use crate::kit::Page;
use crate::statistics::{self, deviation, percentile, rank_sum};
use std::collections::BTreeMap;
use std::fmt::Arguments;

/// Maximum ratio of the 99th percentile to the median.
const SPREAD: f64 = 5.0;
/// Maximum milliseconds until seen, installed and last slow packet, for each fast path. Behind a switch, "seen" has no
/// bar of its own: most of that time passes in the switch, before the firewall can know of the flow. What counts is the
/// time after that, see [`SEEN_AFTER_SWITCH_MS`].
const LATENCY_BARS: [(Setup, [Option<f64>; 3]); 3] = [
    (Setup::Tc, [Some(0.3), Some(0.5), Some(1.0)]),
    (Setup::Xdp, [Some(0.3), Some(0.5), Some(1.0)]),
    (Setup::OpenFlow, [None, Some(2.0), Some(8.0)]),
];
/// Maximum milliseconds from the packet that decides, at the switch's slow port, until the mark was seen.
const SEEN_AFTER_SWITCH_MS: f64 = 0.3;
/// Milliseconds after which no packet of a denied flow may arrive, by BPF and by a switch (whose packet cache has to
/// be emptied).
const REVOKE_BARS: [(Setup, f64); 3] = [(Setup::Tc, 5.0), (Setup::Xdp, 5.0), (Setup::OpenFlow, 15.0)];

/// Rows of a table: the measurements of each set-up.
pub(super) type Rows<T> = [(Setup, Vec<T>)];
/// The same, owned.
pub(super) type Table<T> = Vec<(Setup, Vec<T>)>;

/// The page of a part, and whether its bars are met.
pub(super) struct Section {
    /// Markdown.
    pub page: Page,
    /// All of them.
    pub held: bool,
}

impl Section {
    fn new(title: &str) -> Self {
        let mut page = Page::default();
        page.line(format_args!("## {title}\n"));
        Self { page, held: true }
    }

    /// Adds a line.
    fn line(&mut self, line: &str) {
        self.page.line(format_args!("{line}"));
    }

    fn columns(&mut self, names: &[&str]) {
        self.page.columns(names);
    }

    fn row(&mut self, cells: Arguments<'_>) {
        self.page.row(cells);
    }

    fn verdict(&mut self, held: bool) -> &'static str {
        self.held &= held;
        if held { "held" } else { "**missed**" }
    }

    /// Returns the last cells of a row whose median has to be below a limit.
    fn within(&mut self, values: &[f64], limit: f64) -> String {
        let (middle, high) = (middle(values), percentile(values, 0.99));
        let verdict = self.verdict(middle < limit && high <= SPREAD * middle);
        format!("{limit} | {verdict}")
    }

    /// Adds bars: the text, the figure, and its bound.
    fn bars(&mut self, bars: &[(&str, f64, Bound)]) {
        self.page.blank();
        self.page.columns(["bar", "measured", "asked for", ""]);
        for (what, figure, bound) in bars {
            let verdict = self.verdict(bound.holds(*figure));
            self.page.row(format_args!("{what} | {figure:.2} | {bound} | {verdict}"));
        }
        self.page.blank();
    }
}

/// Returns the rows with the names of tables, for JSON.
pub(super) fn by_name<T>(rows: &Rows<T>) -> BTreeMap<&'static str, &Vec<T>> {
    rows.iter().map(|(setup, row)| (setup.name(), row)).collect()
}

fn values<T>(rows: &Rows<T>, setup: Setup, value: impl Fn(&T) -> f64) -> Vec<f64> {
    let row = rows.iter().find(|(of, _)| *of == setup);
    row.map(|(_, row)| row.iter().map(value).collect()).unwrap_or_default()
}

/// Returns the median of ratios of the same round.
fn ratio(above: &[f64], below: &[f64]) -> f64 {
    middle(&above.iter().zip(below).map(|(a, b)| a / b).collect::<Vec<_>>())
}

/// Table II.
pub(super) fn latency(rows: &Rows<Vec<Run>>) -> Section {
    let flows = rows.iter().flat_map(|(_, runs)| runs.iter().map(Vec::len)).max().unwrap_or(0);
    let mut section = Section::new(&format!("Table II: milliseconds after the SYN, {flows} flows each"));
    section.columns(&["fast path", "", "median", "sd", "p99", "most", "bar", ""]);
    for (setup, limits) in LATENCY_BARS {
        let columns = ["mark seen", "entry confirmed", "last packet on the slow path"];
        for (at, (name, limit)) in columns.into_iter().zip(limits).enumerate() {
            let values = moments(rows, setup, at);
            let held = limit.map_or_else(|| " | ".to_owned(), |limit| section.within(&values, limit));
            section.row(format_args!("{} | {name} | {} | {held}", setup.name(), spread(&values)));
        }
        switch(&mut section, rows, setup);
    }
    section.line(&format!(
        "\nNFShunt (the paper; a Pica8 switch): mark seen 3.3, entry 58.0, last packet 75.8 ms. A bar is held if the median is below \
         it and the 99th percentile at most {SPREAD} times the median.\n"
    ));
    section
}

/// The delay that a switch adds before the firewall can know the flow: the SYN crosses it twice, the answer once.
fn switch(section: &mut Section, rows: &Rows<Vec<Run>>, setup: Setup) {
    let both: Vec<_> = runs_of(rows, setup)
        .filter_map(|run| Some((run.brought_ms?, run.seen_ms - run.brought_ms?)))
        .collect();
    if both.is_empty() {
        return;
    }
    let (brought, after): (Vec<_>, Vec<_>) = both.into_iter().unzip();
    let held = section.within(&after, SEEN_AFTER_SWITCH_MS);
    for (name, values, held) in [
        ("of these, the switch's: the SYN,ACK that decides, out of the switch", brought, " | "),
        ("of these, ours: mark seen after that", after, held.as_str()),
    ] {
        section.row(format_args!("{} | {name} | {} | {held}", setup.name(), spread(&values)));
    }
}

fn runs_of(rows: &Rows<Vec<Run>>, setup: Setup) -> impl Iterator<Item = &Run> {
    rows.iter().filter(move |(of, _)| *of == setup).flat_map(|(_, runs)| runs.iter().flatten())
}

fn moments(rows: &Rows<Vec<Run>>, setup: Setup, at: usize) -> Vec<f64> {
    runs_of(rows, setup).map(|run| [run.seen_ms, run.installed_ms, run.last_slow_ms][at]).collect()
}

/// Returns the median; NaN without values, so that no bar holds.
fn middle(values: &[f64]) -> f64 {
    statistics::median(values).unwrap_or(f64::NAN)
}

/// Returns cells of a table: median, standard deviation, 99th percentile, maximum.
fn spread(values: &[f64]) -> String {
    let (high, most) = (percentile(values, 0.99), percentile(values, 1.0));
    format!("{:.3} | {:.3} | {high:.3} | {most:.3}", middle(values), deviation(values))
}

/// Formats how many flows had their last slow packet in which part of a millisecond.
pub(super) fn histogram(rows: &Rows<Vec<Run>>) -> String {
    const WIDTH_MS: f64 = 0.1;
    const PLACES: u32 = 16;
    let places: Vec<String> = (0..PLACES).map(|at| format!("{:.1}", f64::from(at) * WIDTH_MS)).collect();
    let series: Vec<Series> = rows
        .iter()
        .map(|(setup, _)| {
            let mut counts = vec![0.0; places.len()];
            for value in moments(rows, *setup, 2) {
                counts[((value / WIDTH_MS) as usize).min(places.len() - 1)] += 1.0;
            }
            Series { name: setup.name().to_owned(), values: counts.into_iter().map(Some).collect() }
        })
        .collect();
    let title = "Last packet on the slow path, milliseconds after the SYN (the last place: and later)";
    chart::bars(&Titles { title, vertical: "flows", places: &places }, &series)
}

/// One flow at this machine's round trip.
pub(super) fn tcp(rows: &Rows<load::Slice>) -> Section {
    let mut section = Section::new("One TCP flow, this machine's round trip (iperf3, cubic, MTU 1500)");
    section.columns(&["set-up", "Gbit/s", "range", "to direct", "p", "CPU s a GB", "frames lost", "fast"]);
    let direct = values(rows, Setup::Direct, |slice| slice.gbit_s);
    for (setup, row) in rows {
        let rate = values(rows, *setup, |slice| slice.gbit_s);
        let cost = values(rows, *setup, |slice| slice.gigabyte_s);
        section.row(format_args!(
            "{} | {:.2} | {:.2}-{:.2} | {:.3} | {:.3} | {:.2} | {} | {}",
            setup.name(),
            middle(&rate),
            percentile(&rate, 0.0),
            percentile(&rate, 1.0),
            ratio(&rate, &direct),
            rank_sum(&rate, &direct),
            middle(&cost),
            lost(row),
            fast(*setup, row),
        ));
    }
    section.line(&note_on_p(rows));
    let rate = |setup| values(rows, setup, |slice: &load::Slice| slice.gbit_s);
    let cost = |setup| values(rows, setup, |slice: &load::Slice| slice.gigabyte_s);
    section.bars(&[
        ("tc, to direct", ratio(&rate(Setup::Tc), &direct), AtLeast(0.97)),
        ("tc, CPU a GB to direct", ratio(&cost(Setup::Tc), &cost(Setup::Direct)), AtMost(1.15)),
        ("OpenFlow, to the switch alone", ratio(&rate(Setup::OpenFlow), &rate(Setup::Switch)), AtLeast(1.0)),
    ]);
    let alike = rank_sum(&rate(Setup::OpenFlow), &rate(Setup::Switch));
    section.line(&format!(
        "OpenFlow beside the switch alone: p {alike:.3}; above 0.05 the two cannot be told apart, and 1 is reached every other time.\n"
    ));
    section
}

fn note_on_p<T>(rows: &Rows<T>) -> String {
    let rounds = rows.first().map_or(0, |(_, row)| row.len());
    format!(
        "\np: rank-sum test against direct, two-sided, exact; {rounds} rounds. Medians; ratios are those of one round."
    )
}

fn lost(row: &[load::Slice]) -> String {
    let (lost, of) =
        row.iter().fold((0, 0), |(lost, of), slice| (lost + slice.lost.frames, of + slice.lost.of));
    format!("{lost} of {of}")
}

fn fast(setup: Setup, row: &[load::Slice]) -> String {
    let least = row.iter().map(|slice| slice.fast).fold(1.0, f64::min);
    if setup.fast_path().is_some() { format!("{:.1} %", 100.0 * least) } else { "-".to_owned() }
}

/// Tables III, V and VI.
pub(super) fn rtt(tables: &[(u64, Table<load::Slice>)]) -> Section {
    let mut section =
        Section::new("Tables III, V and VI: one TCP flow at a round trip of its own (iperf3, cubic)");
    section.columns(&[
        "round trip",
        "set-up",
        "Gbit/s",
        "range",
        "p to direct",
        "frames lost",
        "sent again",
        "fast",
    ]);
    let mut least: f64 = 0.0;
    for (ms, rows) in tables {
        let direct = values(rows, Setup::Direct, |slice| slice.gbit_s);
        for (setup, row) in rows {
            let rate = values(rows, *setup, |slice| slice.gbit_s);
            section.row(format_args!(
                "{ms} ms | {} | {:.3} | {:.3}-{:.3} | {:.3} | {} | {} | {}",
                setup.name(),
                middle(&rate),
                percentile(&rate, 0.0),
                percentile(&rate, 1.0),
                rank_sum(&rate, &direct),
                lost(row),
                row.iter().map(|slice| slice.retransmits).sum::<u64>(),
                fast(*setup, row),
            ));
            if *ms > 0 && setup.fast_path().is_some() {
                least = row.iter().map(|slice| slice.lost.percent()).fold(least, f64::max);
            }
        }
    }
    let rows = tables.first().map(|(_, rows)| rows.as_slice()).unwrap_or_default();
    section.line(&note_on_p(rows));
    section.line(&format!(
        "With a round trip the client's wire is an emulated link of {} Mbit/s whose queue never overflows; the beginning of the \
         connection counts.",
        network::RATE / 1_000_000
    ));
    section.bars(&[("shunted, frames lost at 100 ms and more, percent", least, AtMost(0.0))]);
    section
}

/// Table IV: round trip in milliseconds, connections at once, and their rates.
pub(super) fn flows(tables: &[(u64, usize, Table<load::Slice>)]) -> Section {
    let mut section = Section::new("Table IV: several TCP flows at once (iperf3, cubic)");
    section.columns(&[
        "round trip",
        "flows",
        "set-up",
        "Gbit/s",
        "range",
        "frames lost",
        "sent again",
        "fast",
    ]);
    for (ms, connections, rows) in tables {
        for (setup, row) in rows {
            let rate = values(rows, *setup, |slice| slice.gbit_s);
            section.row(format_args!(
                "{ms} ms | {connections} | {} | {:.3} | {:.3}-{:.3} | {} | {} | {}",
                setup.name(),
                middle(&rate),
                percentile(&rate, 0.0),
                percentile(&rate, 1.0),
                lost(row),
                row.iter().map(|slice| slice.retransmits).sum::<u64>(),
                fast(*setup, row),
            ));
        }
    }
    section.line("\nThe links are those of the tables above. Fast: of the flow that carried most.\n");
    section
}

/// Rates over round trips.
pub(super) fn rates(tables: &[(u64, Table<load::Slice>)]) -> String {
    let places: Vec<String> = tables.iter().map(|(ms, _)| format!("{ms} ms")).collect();
    let series: Vec<Series> = Setup::SEED
        .iter()
        .map(|setup| Series {
            name: setup.name().to_owned(),
            values: tables
                .iter()
                .map(|(_, rows)| Some(middle(&values(rows, *setup, |slice| slice.gbit_s))))
                .collect(),
        })
        .collect();
    let title = "One TCP flow over round-trip time (at 0 ms a veth pair, else an emulated link)";
    chart::bars(&Titles { title, vertical: "Gbit/s", places: &places }, &series)
}

/// The sender's congestion window over time, at the longest round trip, in the first round of each set-up.
pub(super) fn windows(tables: &[(u64, Table<load::Slice>)]) -> String {
    let (ms, rows) = tables.last().map_or((0, &[][..]), |(ms, rows)| (*ms, rows.as_slice()));
    let series: Vec<Series> = rows
        .iter()
        .filter_map(|(setup, row)| {
            let samples = row.first()?.samples.largest();
            let values = samples.iter().map(|one| Some(f64::from(one.congestion_window_segments))).collect();
            Some(Series { name: setup.name().to_owned(), values })
        })
        .collect();
    let length = series.iter().map(|one| one.values.len()).max().unwrap_or(0);
    let a_second = (1000 / EVERY.as_millis()) as usize;
    let place =
        |at: usize| if at.is_multiple_of(a_second) { format!("{} s", at / a_second) } else { String::new() };
    let places: Vec<String> = (0..length).map(place).collect();
    let title = format!("Congestion window of one TCP flow, every 100 ms, at {ms} ms");
    chart::lines(&Titles { title: &title, vertical: "segments", places: &places }, &series)
}

/// Sec. IV-A and Table I.
pub(super) fn validate(found: &[Validated]) -> Section {
    let mut section = Section::new("Sec. IV-A: the hosts' tuning (Table I), and one flow without a firewall");
    section.columns(&["host", "setting", "before", "Table I", "in force", "after", ""]);
    for tuned in found.first().map(|first| first.tuned.as_slice()).unwrap_or_default() {
        let verdict = section.verdict(tuned.is_well());
        section.row(format_args!(
            "{} | {} | {} | {} | {} | {} | {verdict}",
            tuned.host, tuned.name, tuned.before, tuned.wanted, tuned.during, tuned.after
        ));
    }
    let others = found.iter().skip(1).flat_map(|one| &one.tuned);
    let well = others.clone().filter(|tuned| tuned.is_well()).count();
    let all = others.count();
    let verdict = section.verdict(well == all);
    section.line(&format!("\nAt the other round trips: {well} of {all} in force and undone, {verdict}.\n"));
    section.columns(&["round trip", "Gbit/s", "to reach", "frames lost", ""]);
    for one in found {
        let verdict = section.verdict(one.gbit_s >= one.wanted_gbit_s);
        section.row(format_args!(
            "{} ms | {:.3} | {:.2} | {} | {verdict}",
            one.round_trip_ms, one.gbit_s, one.wanted_gbit_s, one.lost
        ));
    }
    section.line(&format!(
        "\nThe paper: over 9 Gbit/s at 0, 100 and 200 ms. Here a veth pair at 0 ms, else an emulated link of {} Mbit/s, of which 90 % \
         are to be reached once slow start is over.\n",
        network::RATE / 1_000_000
    ));
    section
}

/// Small packets.
pub(super) fn small(rows: &Rows<small::Slice>) -> Section {
    let mut section = Section::new("Small packets: frames of 60 bytes, one flow, sent by one processor");
    section.columns(&["set-up", "packets/s", "range", "CPU ns a packet", "above direct", "shunted"]);
    let rate = |setup| values(rows, setup, |slice: &small::Slice| slice.frames_s);
    let cost = |setup| values(rows, setup, |slice: &small::Slice| slice.frame_ns);
    let net = |setup| -> Vec<f64> {
        cost(setup).iter().zip(cost(Setup::Direct)).map(|(mine, direct)| mine - direct).collect()
    };
    for (setup, row) in rows {
        let rates = rate(*setup);
        section.row(format_args!(
            "{} | {:.0} | {:.0}-{:.0} | {:.0} | {:.0} | {}",
            setup.name(),
            middle(&rates),
            percentile(&rates, 0.0),
            percentile(&rates, 1.0),
            middle(&cost(*setup)),
            middle(&net(*setup)),
            if row.iter().all(|slice| slice.shunted) { "yes" } else { "-" }
        ));
    }
    section.line("\nThe kernel's paths run on the processor that sends; Open vSwitch's user-space switch runs on the other, and drops frames that it has no time for.");
    section.bars(&[
        ("tc, packets/s to the bridge's", ratio(&rate(Setup::Tc), &rate(Setup::Slow)), AtLeast(1.5)),
        ("XDP, packets/s to the bridge's", ratio(&rate(Setup::Xdp), &rate(Setup::Slow)), AtLeast(1.5)),
        ("tc, CPU above direct to the bridge's", ratio(&net(Setup::Tc), &net(Setup::Slow)), AtMost(0.5)),
        ("XDP, CPU above direct to the bridge's", ratio(&net(Setup::Xdp), &net(Setup::Slow)), AtMost(0.5)),
        (
            "routed tc, packets/s to the router's",
            ratio(&rate(Setup::RoutedTc), &rate(Setup::Routed)),
            AtLeast(1.5),
        ),
        (
            "routed tc, CPU above direct to the router's",
            ratio(&net(Setup::RoutedTc), &net(Setup::Routed)),
            AtMost(0.5),
        ),
    ]);
    section
}

/// The events that end a flow's time on the fast path.
pub(super) fn events(rows: &Rows<Events>) -> Section {
    let mut section =
        Section::new("Events that end a flow's time on the fast path, or begin it again: milliseconds");
    section.columns(&["fast path", "event", "median", "most", "runs"]);
    let mut latest = Vec::new();
    for (setup, row) in rows {
        for what in [events::FIN, events::RST, events::IDLE, events::RESUME, events::REVOKE] {
            let values: Vec<f64> =
                row.iter().filter_map(|events| events.get(what)).flatten().copied().collect();
            let most = percentile(&values, 1.0);
            section.row(format_args!(
                "{} | {what} | {:.2} | {most:.2} | {}",
                setup.name(),
                middle(&values),
                values.len()
            ));
            if what == events::REVOKE
                && let Some((_, limit)) = REVOKE_BARS.iter().find(|(of, _)| of == setup)
            {
                latest.push((format!("{}, last packet of a denied flow, ms", setup.name()), most, *limit));
            }
        }
    }
    section.line("\nDenied: counted from the return of the iptables command that denies the flow.");
    let bars: Vec<_> =
        latest.iter().map(|(name, most, limit)| (name.as_str(), *most, AtMost(*limit))).collect();
    section.bars(&bars);
    section
}

/// Entries that are removed and installed.
pub(super) fn cycles(rows: &Rows<Vec<Outcome>>) -> Section {
    let mut section = Section::new("Entries that are removed and installed under traffic");
    section.columns(&[
        "fast path",
        "traffic",
        "installs",
        "seconds",
        "frames lost",
        "out of order",
        "sent again",
        "",
    ]);
    for (setup, row) in rows {
        let outcomes =
            row.iter().flat_map(|both| both.iter().zip(["one TCP flow (iperf3)", "small datagrams"]));
        for (outcome, traffic) in outcomes {
            let verdict = section.verdict(outcome.lost.frames == 0 && outcome.disordered.unwrap_or(0) == 0);
            let count = |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
            section.row(format_args!(
                "{} | {traffic} | {} | {:.1} | {} of {} | {} | {} | {verdict}",
                setup.name(),
                outcome.installs,
                outcome.seconds,
                outcome.lost.frames,
                outcome.lost.of,
                count(outcome.disordered),
                count(outcome.retransmits)
            ));
        }
    }
    section.line(
        "\nThe interfaces of both ends count frames. Datagrams are numbered. Where TCP retransmits although every frame arrived, \
         it does so without a shunt, too.\n",
    );
    section
}
