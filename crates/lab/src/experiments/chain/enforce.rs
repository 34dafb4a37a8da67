//! How long it takes until a decision holds: the eight steps of an application, and a consent that is withdrawn while
//! flows pass three nodes.

use std::io::Read as _;
use std::net::TcpStream;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::plane::{DOMAINS, Plane};
use crate::kit::{Bar, Bound, Page};
use crate::statistics::{Spread, median};

/// Time limit for the eight steps, in milliseconds.
const READY_WITHIN_MS: f64 = 500.0;
/// Time within which 99 of 100 changes must hold everywhere, in milliseconds.
const HOLDS_WITHIN_MS: f64 = 50.0;
/// Maximum length of a bar in the picture.
const COLUMNS: f64 = 40.0;

/// One line of progress.
#[derive(Debug, Deserialize)]
struct Line {
    step: String,
    number: usize,
    seconds: f64,
}

/// Duration of each of the eight steps in milliseconds, by application.
#[derive(Debug, Clone, Default)]
pub(super) struct Steps {
    names: Vec<String>,
    each_ms: Vec<Vec<f64>>,
    all_ms: Vec<f64>,
}

/// Sets the same application up this number of times, and ends it each time.
///
/// # Errors It is refused, or not all steps are reported.
pub(super) fn steps(plane: &Plane<'_>, times: usize) -> Result<Steps> {
    let mut steps = Steps::default();
    for _ in 0..times {
        steps.add(&plane.submit()?)?;
        // It is ready: flows pass.
        plane.flow(&DOMAINS[2])?;
        plane.end()?;
    }
    Ok(steps)
}

impl Steps {
    /// Adds the progress of one application.
    fn add(&mut self, progress: &str) -> Result<()> {
        let lines = progress.lines().map(serde_json::from_str::<Line>);
        let lines = lines.collect::<Result<Vec<_>, _>>().context("the lines of progress")?;
        ensure!(lines.iter().map(|line| line.number).eq(1..=8), "not the eight steps: {progress}");
        self.each_ms.resize(lines.len(), Vec::new());
        let mut before = 0.0;
        for (line, each) in lines.iter().zip(&mut self.each_ms) {
            each.push((line.seconds - before) * 1e3);
            before = line.seconds;
        }
        self.all_ms.push(before * 1e3);
        self.names = lines.into_iter().map(|line| line.step).collect();
        Ok(())
    }

    /// Formats a table with a bar for each step, and the result of the time limit.
    pub(super) fn render(&self, page: &mut Page) -> Bar {
        let medians: Vec<f64> = self.each_ms.iter().map(|each| median(each).unwrap_or_default()).collect();
        let longest = medians.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        page.line(format_args!(
            "The eight steps of an application in three domains, functions warm, {} times; medians.\n",
            self.all_ms.len()
        ));
        page.columns(["step", "ms:", ""]);
        for (index, (name, median)) in self.names.iter().zip(&medians).enumerate() {
            let bar = "#".repeat((median / longest * COLUMNS).round() as usize);
            page.row(format_args!("{}. {name} | {median:.1} | {bar}", index + 1));
        }
        page.blank();
        let measured = Spread::of(self.all_ms.clone()).ok_or_else(|| "no application".to_owned());
        let what = "the eight steps of an application, functions warm";
        Bar::new(what, measured, Bound::AtMost(READY_WITHIN_MS)).unit(" ms")
    }
}

/// Withdraws consent this number of times under a flow through each proxy. Returns the milliseconds from the
/// operator's command to the end of the last flow.
///
/// # Errors
/// A flow does not pass when it is allowed, or does not end.
pub(super) fn changes(plane: &Plane<'_>, times: usize) -> Result<Vec<f64>> {
    plane.submit()?;
    let mut all_ms = Vec::with_capacity(times);
    for _ in 0..times {
        let flows = DOMAINS.iter().map(|domain| plane.flow(domain)).collect::<Result<Vec<_>>>()?;
        all_ms.push(withdrawn(plane, flows)?);
        plane.consent("given")?;
    }
    plane.end()?;
    Ok(all_ms)
}

fn withdrawn(plane: &Plane<'_>, flows: Vec<TcpStream>) -> Result<f64> {
    std::thread::scope(|scope| {
        let ends: Vec<_> = flows.into_iter().map(|flow| scope.spawn(move || ended(flow))).collect();
        let began = Instant::now();
        plane.consent("withdrawn")?;
        let mut last = began;
        for end in ends {
            let end = end.join().map_err(|_| anyhow::anyhow!("a client has panicked"))??;
            last = last.max(end);
        }
        Ok((last - began).as_secs_f64() * 1e3)
    })
}

/// Returns when the flow ended with a reset.
fn ended(mut flow: TcpStream) -> Result<Instant> {
    let read = flow.read(&mut [0]);
    let at = Instant::now();
    match read {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(at),
        other => anyhow::bail!("a flow without consent did not end by a reset: {other:?}"),
    }
}

/// Formats it in words, with the result of the time limit.
pub(super) fn render(page: &mut Page, all_ms: &[f64]) -> Bar {
    let mut sorted = all_ms.to_vec();
    sorted.sort_by(f64::total_cmp);
    // Returns the least value that 99 % do not exceed; with fewer than a hundred values it is the worst.
    let rank = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
    let spread = Spread::of(sorted.clone());
    let (p99, worst) = (sorted.get(rank).copied(), sorted.last().copied());
    page.line(format_args!(
        "Consent withdrawn {} times under a flow through each of three proxies, until the last flow had \
         ended: median {:.1} ms, worst {:.1} ms.\n",
        sorted.len(),
        spread.map_or(0.0, |spread| spread.median),
        worst.unwrap_or(0.0)
    ));
    let measured = match (spread, p99, worst) {
        (Some(spread), Some(p99), Some(worst)) => Ok(Spread { low: spread.median, median: p99, high: worst }),
        _ => Err("no change".to_owned()),
    };
    let what = "a change of policy holds on three nodes, 99 % (median to worst)";
    Bar::new(what, measured, Bound::AtMost(HOLDS_WITHIN_MS)).unit(" ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_what_came_since_the_one_before() {
        let names =
            ["submit", "request-access", "grants", "request-nodes", "plan", "ship", "configure", "ready"];
        let line = |(index, name): (usize, &&str)| {
            let number = index + 1;
            let seconds = 0.010 * number as f64;
            format!(
                "{{\"event\":\"done\",\"step\":\"{name}\",\"number\":{number},\"seconds\":{seconds},\"detail\":\"\"}}\n"
            )
        };
        let progress: String = names.iter().enumerate().map(line).collect();
        let mut steps = Steps::default();
        steps.add(&progress).expect("eight steps");
        let mut page = Page::default();
        let bar = steps.render(&mut page);
        assert!(bar.holds() && page.as_str().contains("| 8. ready | 10.0 | ####"), "{page:?}");
        assert!(bar.measured.is_ok_and(|all| (all.median - 80.0).abs() < 1e-6));
        let seven: String = progress.lines().take(7).collect::<Vec<_>>().join("\n");
        assert!(steps.add(&seven).is_err());
    }

    #[test]
    fn one_of_a_hundred_may_be_late_and_two_may_not() {
        let mut all = vec![10.0; 99];
        all.push(70.0);
        assert!(render(&mut Page::default(), &all).holds());
        all[0] = 60.0;
        assert!(!render(&mut Page::default(), &all).holds());
        assert!(!render(&mut Page::default(), &[10.0, 51.0]).holds(), "of a few the worst counts");
        assert!(!render(&mut Page::default(), &[]).holds());
    }
}
