//! Bars over made-up samples.

use super::*;
use crate::kit::Timing;
use crate::load::Report;
use crate::machine::{Disturbance, Machine};
use crate::peers::{self, Unavailable};

fn results() -> Results<Cell> {
    let machine = Machine {
        date: "2026-01-01".into(),
        kernel: "6".into(),
        cpu: "1".into(),
        congestion_control: "bbr".into(),
        load: 0.0,
    };
    Results::new(machine, 3, Timing::QUICK)
}

/// Three rounds at the given rates, each request costing `cpu_us`.
fn add(results: &mut Results<Cell>, cell: Cell, peer: &'static str, rates: [u64; 3], cpu_us: u64) {
    for (round, rate) in (0..).zip(rates) {
        let report = Report { requests: rate, bytes: rate, window_ns: 1_000_000_000, ..Report::default() };
        let cpu_ns = Some(rate * cpu_us * 1000);
        results.add(cell, peer, round, Some(Sample { report, cpu_ns, disturbance: Disturbance::default() }));
    }
}

fn verdict<'v>(verdicts: &'v [Verdict], ours: &str, what: &str) -> &'v Verdict {
    verdicts.iter().find(|verdict| verdict.ours == ours && verdict.what == what).expect("judged")
}

#[test]
fn every_row_named_by_a_bar_exists() {
    for bar in BARS {
        for name in std::iter::once(&bar.ours).chain(bar.others) {
            assert!(peers::find(name).is_some(), "{name}");
        }
        assert!(peers::find(bar.ours).is_some_and(|peer| peer.is_ours));
    }
    for (ours, bare) in LIMITS {
        assert!(peers::find(bare).is_some() && BARS.iter().any(|bar| bar.ours == *ours), "{ours}, {bare}");
    }
}

#[test]
fn the_best_of_the_others_counts_and_ratios_are_taken_within_a_round() {
    let (mut results, cell) = (results(), Cell::New(32));
    add(&mut results, cell, "nginx stream", [100, 200, 400], 40);
    add(&mut results, cell, "HAProxy tcp", [90, 180, 360], 50);
    // The machine got four times faster meanwhile; the ratio did not change.
    add(&mut results, cell, "ours reverse", [98, 196, 392], 41);
    let verdicts = judge(&results);
    let speed = verdict(&verdicts, "ours reverse", "speed");
    assert_eq!(speed.other, "nginx stream");
    assert!(
        speed.ratio.as_ref().is_ok_and(|ratio| (ratio.median - 0.98).abs() < 1e-9 && ratio.low == ratio.high)
    );
    assert!(speed.holds() && !speed.is_failure());
    assert!(verdict(&verdicts, "ours reverse", "CPU").holds());
}

#[test]
fn a_missed_bar_fails() {
    let (mut results, cell) = (results(), Cell::New(8));
    add(&mut results, cell, "nginx stream", [100, 100, 100], 40);
    add(&mut results, cell, "ours reverse", [96, 96, 99], 42);
    let verdicts = judge(&results);
    assert!(verdict(&verdicts, "ours reverse", "speed").is_failure(), "0.96 < 0.97");
    assert!(verdict(&verdicts, "ours reverse", "CPU").is_failure(), "1.05 > 1.03");
}

#[test]
fn a_failure_in_one_cell_leaves_the_others() {
    let mut results = results();
    add(&mut results, Cell::New(8), "nginx stream", [100, 100, 100], 40);
    add(&mut results, Cell::New(8), "ours reverse", [100, 100, 100], 40);
    add(&mut results, Cell::New(64), "nginx stream", [100, 100, 100], 40);
    let line = results.unavailable(
        "ours reverse",
        Cell::New(64),
        &Unavailable::Failed(anyhow::anyhow!("two\nlines")),
    );
    assert_eq!(line, "ours reverse, new at 64: failed: two lines");
    let failures: Vec<Cell> = judge(&results).iter().filter(|v| v.is_failure()).map(|v| v.cell).collect();
    assert_eq!(failures, [Cell::New(64), Cell::New(64)], "speed and CPU");
}

#[test]
fn an_absent_peer_is_said_and_our_own_absence_fails() {
    let (mut results, cell) = (results(), Cell::New(8));
    add(&mut results, cell, "ours pair S5", [100, 100, 100], 40);
    add(&mut results, cell, "dante S5", [10, 10, 10], 40);
    results.unavailable("socksx 0.1.0 pair S5", cell, &Unavailable::Absent("socksx".into()));
    results.unavailable("ours S5", cell, &Unavailable::Absent("not built".into()));
    let verdicts = judge(&results);
    let pair = verdict(&verdicts, "ours pair S5", "speed");
    assert!(pair.result().contains("not measured: socksx 0.1.0 pair S5: absent"), "{}", pair.result());
    let ours = verdict(&verdicts, "ours S5", "speed");
    assert!(ours.is_failure() && ours.result().contains("FAIL"), "{}", ours.result());
}

#[test]
fn a_bar_names_its_limit_where_that_was_measured() {
    let (mut results, cell) = (results(), Cell::New(32));
    add(&mut results, cell, "dante S5", [100, 100, 100], 100);
    add(&mut results, cell, "ours S5", [190, 190, 190], 50);
    assert_eq!(verdict(&judge(&results), "ours S5", "speed").limit, None);
    add(&mut results, cell, "bare S5", [200, 200, 200], 40);
    let verdicts = judge(&results);
    let limit = verdict(&verdicts, "ours S5", "speed").limit.expect("bare S5 was measured");
    assert!(limit.bare == "bare S5" && limit.best.median == 2.0 && limit.reached.median == 0.95);
    assert!(!verdict(&verdicts, "ours S5", "speed").holds(), "a limit excuses nothing");
}
