//! Table II of the paper, with a fourth column and the evidence of each tick.

use super::measure::{Figures, Plan};
use super::paper::TABLE_I;
use super::rows::{NGINX, NO_PROXY, OUR_SOCKS6_DATA, OUR_TUNNEL, ROWS};
use crate::kit::{Bar, Page};

/// One parameter: the paper's ticks, and the evidence for ours.
struct Parameter {
    name: &'static str,
    nginx: bool,
    socks5: bool,
    socks6: bool,
    /// A command that shows it.
    command: &'static str,
    /// Whether this run shows it, so that its figures set the tick.
    is_this_run: bool,
    shows: &'static str,
}

const PARAMETERS: [Parameter; 6] = [
    Parameter {
        name: "Δt",
        nginx: true,
        socks5: false,
        socks6: false,
        command: "sidetrack-lab epi --part times",
        is_this_run: true,
        shows: "SOCKS6 with data within 0.5 ms of nginx, the tunnel below zero, DOCKER 1 to 3",
    },
    Parameter {
        name: "Processing rate",
        nginx: false,
        socks5: false,
        socks6: true,
        command: "sidetrack-lab epi --part rates",
        is_this_run: true,
        shows: "SOCKS6 with data above every proxy of the paper from 8 connections on",
    },
    Parameter {
        name: "Port scalability",
        nginx: false,
        socks5: true,
        socks6: true,
        command: "examples/reverse-proxy/run.sh",
        is_this_run: false,
        shows: "one port for several servers, by SNI or Host; SOCKS by request",
    },
    Parameter {
        name: "Reconfiguration",
        nginx: false,
        socks5: true,
        socks6: true,
        command: "cargo test -p sidetrack --test reload",
        is_this_run: false,
        shows: "rules and carriers change at once, no flow is cut",
    },
    Parameter {
        name: "Dynamicity",
        nginx: false,
        socks5: true,
        socks6: true,
        command: "examples/chain-of-three/run.sh",
        is_this_run: false,
        shows: "the destination travels with the request through any chain",
    },
    Parameter {
        name: "Security",
        nginx: false,
        socks5: true,
        socks6: true,
        command: "cargo test -p sidetrack-core --test socks",
        is_this_run: false,
        shows: "user and password inside the first flight; rules on who may go where",
    },
];

/// Formats the table in Markdown. The figures of this run set those of our ticks that it shows; commands show the
/// others.
pub(super) fn render(page: &mut Page, figures: &Figures, plan: &Plan, bars: &[Bar]) {
    page.columns(["parameter", "NGINX", "SOCKS5", "SOCKS6", "ours", "shown by"]);
    for parameter in &PARAMETERS {
        let tick = match parameter.name {
            _ if !parameter.is_this_run => "✓",
            "Δt" => measured(delta_holds(bars)),
            _ => measured(rate_holds(figures, plan)),
        };
        let shown = format!("`{}`: {}", parameter.command, parameter.shows);
        let tick_if = |ticked: bool| if ticked { "✓" } else { "" };
        let (nginx, socks5) = (tick_if(parameter.nginx), tick_if(parameter.socks5));
        let socks6 = tick_if(parameter.socks6);
        page.row(format_args!("{} | {nginx} | {socks5} | {socks6} | {tick} | {shown}", parameter.name));
    }
}

fn measured(holds: Option<bool>) -> &'static str {
    match holds {
        Some(true) => "✓",
        Some(false) => "missed",
        None => "not measured",
    }
}

/// Returns true if our carrier of this column is as close to no proxy as nginx is, and the tunnel is closer.
fn delta_holds(bars: &[Bar]) -> Option<bool> {
    let on_the_way = |name: &str| {
        TABLE_I.iter().any(|topology| topology.is_in_between() && name.starts_with(topology.name))
    };
    let mut holds = true;
    for row in [format!(" {OUR_SOCKS6_DATA} "), format!(" {OUR_TUNNEL} ")] {
        let about = |bar: &&Bar| bar.what.contains(&row) && on_the_way(&bar.what);
        let of_it: Vec<&Bar> = bars.iter().filter(about).collect();
        if of_it.is_empty() || of_it.iter().any(|bar| bar.reached().is_none()) {
            return None;
        }
        holds &= of_it.iter().all(|bar| bar.holds());
    }
    Some(holds)
}

/// Returns true if it carries more requests than every proxy of the paper from 8 connections on.
fn rate_holds(figures: &Figures, plan: &Plan) -> Option<bool> {
    let theirs = |name: &str| !name.starts_with("ours") && name != NO_PROXY;
    let papers = || ROWS.iter().filter(|row| row.has_rate && row.has_times && theirs(row.name));
    let mut holds = None;
    for at in
        (0..plan.connections.len()).filter(|at| plan.connections.get(*at).is_some_and(|count| *count >= 8))
    {
        let ours = figures.rate(OUR_SOCKS6_DATA, at)?;
        figures.rate(NGINX, at)?;
        let best = papers().filter_map(|row| figures.rate(row.name, at)).fold(0.0, f64::max);
        holds = Some(holds.unwrap_or(true) && ours > best);
    }
    holds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::epi::clients::Rate;
    use crate::kit::Bound;

    fn rendered(figures: &Figures, plan: &Plan, bars: &[Bar]) -> String {
        let mut page = Page::default();
        render(&mut page, figures, plan, bars);
        page.as_str().to_owned()
    }

    #[test]
    fn our_ticks_of_this_run_need_its_figures() {
        let plan = Plan { connections: vec![8], ..Plan::quick() };
        let verdict =
            |what: String, holds| Bar::single(what, Some(0.0), Bound::AtMost(if holds { 0.0 } else { -1.0 }));
        let socks =
            |holds| verdict(format!("DOCKER 1: {OUR_SOCKS6_DATA} behind nginx, at most 0.5 ms"), holds);
        let tunnel = |holds| verdict(format!("DOCKER 1: {OUR_TUNNEL} over no proxy, at most -4 ms"), holds);
        let mut figures = Figures::default();
        let ticks = |text: &str, row: usize| {
            text.lines()
                .nth(row + 2)
                .map(|line| line.split('|').nth(5).map(str::trim).unwrap_or("").to_owned())
        };
        assert_eq!(ticks(&rendered(&figures, &plan, &[]), 0).as_deref(), Some("not measured"));
        for (verdicts, expected) in [
            ([socks(true), tunnel(true)], "✓"),
            ([socks(false), tunnel(true)], "missed"),
            ([socks(true), tunnel(false)], "missed"),
            ([socks(true), socks(true)], "not measured"),
        ] {
            assert_eq!(ticks(&rendered(&figures, &plan, &verdicts), 0).as_deref(), Some(expected));
        }
        figures.rates.insert(OUR_SOCKS6_DATA.into(), vec![vec![Some(Rate { per_second: 2.0, p99_ms: 1.0 })]]);
        figures.rates.insert(NGINX.into(), vec![vec![Some(Rate { per_second: 1.0, p99_ms: 1.0 })]]);
        assert_eq!(ticks(&rendered(&figures, &plan, &[]), 1).as_deref(), Some("✓"));
        figures.rates.insert("socksx SOCKS6".into(), vec![vec![Some(Rate { per_second: 3.0, p99_ms: 1.0 })]]);
        assert_eq!(ticks(&rendered(&figures, &plan, &[]), 1).as_deref(), Some("missed"));
    }

    #[test]
    fn every_command_is_one_that_exists() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for parameter in &PARAMETERS {
            let words: Vec<&str> = parameter.command.split(' ').collect();
            let exists = match words[..] {
                [script] => root.join(script).is_file(),
                ["sidetrack-lab", "epi", "--part", part] => ["times", "rates"].contains(&part),
                ["cargo", "test", "-p", package, "--test", test] => {
                    let tests =
                        root.join("crates").join(package.trim_start_matches("sidetrack-")).join("tests");
                    tests.join(format!("{test}.rs")).is_file() || tests.join(test).join("main.rs").is_file()
                }
                _ => false,
            };
            assert!(exists, "{}", parameter.command);
        }
    }
}
