//! Table II of the paper, with a fourth column and the evidence of each tick.

use std::fmt::Write;

use super::bars::Verdict;
use super::measure::{Figures, Plan};
use super::paper::TABLE_I;
use super::rows::{NGINX, NO_PROXY, OUR_SOCKS6_DATA, ROWS};

/// One parameter: the paper's ticks, and what shows ours.
struct Parameter {
    name: &'static str,
    nginx: bool,
    socks5: bool,
    socks6: bool,
    /// A command anybody can run; absent: this run itself shows it.
    command: Option<&'static str>,
    shows: &'static str,
}

const PARAMETERS: [Parameter; 6] = [
    Parameter {
        name: "Δt",
        nginx: true,
        socks5: false,
        socks6: false,
        command: None,
        shows: "SOCKS6 with data within 0.5 ms of nginx, DOCKER 1 to 3",
    },
    Parameter {
        name: "Processing rate",
        nginx: false,
        socks5: false,
        socks6: true,
        command: None,
        shows: "SOCKS6 with data above every proxy of the paper from 8 connections on",
    },
    Parameter {
        name: "Port scalability",
        nginx: false,
        socks5: true,
        socks6: true,
        command: Some("examples/reverse-proxy/run.sh"),
        shows: "one port for several servers, by SNI or Host; SOCKS by request",
    },
    Parameter {
        name: "Reconfiguration",
        nginx: false,
        socks5: true,
        socks6: true,
        command: Some("cargo test -p sidetrack --test reload"),
        shows: "rules and carriers change at once, no flow is cut",
    },
    Parameter {
        name: "Dynamicity",
        nginx: false,
        socks5: true,
        socks6: true,
        command: Some("examples/chain-of-three/run.sh"),
        shows: "the destination travels with the request through any chain",
    },
    Parameter {
        name: "Security",
        nginx: false,
        socks5: true,
        socks6: true,
        command: Some("cargo test -p sidetrack-core --test socks"),
        shows: "user and password inside the first flight; rules on who may go where",
    },
];

/// The table in Markdown. A tick of ours that this run shows is set by its figures, the others by their commands.
#[must_use]
pub fn render(figures: &Figures, plan: &Plan, verdicts: &[Verdict]) -> String {
    let mut text = String::from(
        "| parameter | NGINX | SOCKS5 | SOCKS6 | ours | shown by |\n|---|---|---|---|---|---|\n",
    );
    for parameter in &PARAMETERS {
        let (tick, shown) = match parameter.command {
            Some(command) => ("✓", format!("`{command}`: {}", parameter.shows)),
            None => {
                let holds = match parameter.name {
                    "Δt" => delta_holds(verdicts),
                    _ => rate_holds(figures, plan),
                };
                (measured(holds), format!("this run: {}", parameter.shows))
            }
        };
        let tick_if = |ticked: bool| if ticked { "✓" } else { "" };
        let (nginx, socks5) = (tick_if(parameter.nginx), tick_if(parameter.socks5));
        let socks6 = tick_if(parameter.socks6);
        let _ = writeln!(text, "| {} | {nginx} | {socks5} | {socks6} | {tick} | {shown} |", parameter.name);
    }
    text
}

fn measured(holds: Option<bool>) -> &'static str {
    match holds {
        Some(true) => "✓",
        Some(false) => "missed",
        None => "not measured",
    }
}

/// Whether our carrier that ticks the rest of the column is as near to no proxy as nginx is.
fn delta_holds(verdicts: &[Verdict]) -> Option<bool> {
    let about = |verdict: &&Verdict| {
        verdict.bar.contains(OUR_SOCKS6_DATA)
            && TABLE_I.iter().any(|topology| verdict.bar.starts_with(topology.name))
    };
    let of_it: Vec<&Verdict> = verdicts.iter().filter(about).collect();
    let all_measured = !of_it.is_empty() && of_it.iter().all(|verdict| verdict.reached.is_some());
    all_measured.then(|| of_it.iter().all(|verdict| verdict.holds))
}

/// Whether it carries more requests than every proxy of the paper from 8 connections on.
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

    #[test]
    fn our_ticks_of_this_run_need_its_figures() {
        let plan = Plan { connections: vec![8], ..Plan::quick() };
        let bar = |topology: &str| format!("{topology}: {OUR_SOCKS6_DATA} behind nginx, at most 0.5 ms");
        let verdict = |holds| Verdict { bar: bar("DOCKER 1"), reached: Some(0.0), holds };
        let mut figures = Figures::default();
        let ticks = |text: &str, row: usize| {
            text.lines()
                .nth(row + 2)
                .map(|line| line.split('|').nth(5).map(str::trim).unwrap_or("").to_owned())
        };
        assert_eq!(ticks(&render(&figures, &plan, &[]), 0).as_deref(), Some("not measured"));
        assert_eq!(ticks(&render(&figures, &plan, &[verdict(false)]), 0).as_deref(), Some("missed"));
        assert_eq!(ticks(&render(&figures, &plan, &[verdict(true)]), 0).as_deref(), Some("✓"));
        figures.rates.insert(OUR_SOCKS6_DATA.into(), vec![vec![Some(2.0)]]);
        figures.rates.insert(NGINX.into(), vec![vec![Some(1.0)]]);
        assert_eq!(ticks(&render(&figures, &plan, &[]), 1).as_deref(), Some("✓"));
        figures.rates.insert("socksx SOCKS6".into(), vec![vec![Some(3.0)]]);
        assert_eq!(ticks(&render(&figures, &plan, &[]), 1).as_deref(), Some("missed"));
    }
}
