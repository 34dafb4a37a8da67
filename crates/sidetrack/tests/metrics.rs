//! Metrics: what is counted, under which names, and that counters never fall.

mod support;

use sidetrack::live::profile::{Busy, Stage};
use sidetrack::live::work::WorkCounts;
use sidetrack::live::{Ledger, LiveFlow, Taken, Transport};
use sidetrack::metrics::{
    ClosedForOthers, DnsCounts, ExportCounts, HeldCounts, Metrics, ProcessUse, Surroundings, WireCounts,
};
use sidetrack::overlay::PacedTotals;
use sidetrack::record::Observer;
use sidetrack::shunt::Capacity;
use sidetrack_core::engine::Totals;
use sidetrack_core::flow::{EndReason, FlowId, Intercept};
use std::sync::Arc;
use std::time::Duration;
use support::{carried, denied, ended, enter, flow, full, live};

/// As the recorder does.
fn record(metrics: &Metrics, flow: &Arc<LiveFlow>, reason: EndReason) {
    metrics.ended(&ended(flow, reason), flow.decided().as_deref());
}

fn value(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in\n{text}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

#[test]
fn what_carried_flows_is_counted_where_the_carrier_leaves_it_open() {
    let metrics = Metrics::new();
    for (id, transport) in [(1, Transport::Quic), (2, Transport::Quic), (3, Transport::Warm)] {
        let flow = live(id, flow("10.9.8.7:80"), carried(Some("r"), &[]));
        flow.carried_by(Some(Taken { transport, address: ([10, 9, 8, 7], 80).into() }));
        record(&metrics, &flow, EndReason::Ok);
    }
    record(&metrics, &live(4, flow("10.9.8.7:80"), carried(Some("r"), &[])), EndReason::Ok);
    let text = metrics.text(&[], Surroundings::default());
    let count = |transport: &str| {
        value(&text, &format!("sidetrack_flow_transports_total{{rule=\"r\",transport=\"{transport}\"}}"))
    };
    assert_eq!((count("quic"), count("warm")), (2, 1));
    assert!(!text.contains("transport=\"tls\""), "{text}");
}

fn surroundings() -> Surroundings {
    Surroundings {
        fds_in_use: 17,
        fds_limit: 20_000,
        config_generation: 2,
        config_last_reload_success: true,
        process: ProcessUse {
            cpu_us: 1_250_000,
            resident_bytes: 9 << 20,
            virtual_bytes: 1 << 30,
            started_unix_ms: 1_795_302_439_123,
        },
    }
}

#[test]
fn everything_at_a_glance() {
    let metrics = Metrics::new();
    let sniffed = live(2, flow("10.9.8.7:80"), carried(None, &[]));
    sniffed.sniffed(Duration::from_millis(7));
    sniffed.count(10, 20);
    let mut fast = flow("10.9.8.7:22");
    fast.intercept = Intercept::Kernel;
    let fast = live(3, fast, carried(Some("fast"), &[]));
    fast.count(5, 6);
    record(&metrics, &full(1), EndReason::Ok);
    record(&metrics, &sniffed, EndReason::Idle);
    record(&metrics, &fast, EndReason::KernelClosed);
    record(&metrics, &live(4, flow("10.9.8.7:25"), denied(Some("no mail"))), EndReason::PolicyDenied);
    record(&metrics, &Arc::new(LiveFlow::new(FlowId(5))), EndReason::Limit);
    record(&metrics, &live(8, flow("10.9.8.7:80"), carried(None, &[])), EndReason::Limit);
    metrics.lost(3);
    metrics.read_engine_errors(2);
    metrics.read_engine_errors(2);
    let totals = Totals { rounds: [7, 2, 1], packets: 30, timers: 4, merged: 5, openings: 6, shed: 8 };
    metrics.read_wires(&WireCounts {
        flows: 1,
        taken: 1,
        adopted: 1,
        back: 1,
        stayed: vec![("full", 1)],
        ..WireCounts::default()
    });
    let dropped = vec![("full", 2)];
    metrics.read_exports(&[ExportCounts { to: "ipfix", sent: 5, dropped, failures: 1, waiting: 3 }]);
    metrics.read_engine(&WorkCounts::default());
    metrics.read_engine(&WorkCounts { totals, no_room: 9 });
    metrics.read_closed(ClosedForOthers { handshakes: 4, idle: 5 });
    metrics.closed_scraper();
    let capacity = Capacity { entries: 7, entries_max: 65_536, waiting: 2, evicted: 3 };
    metrics.read_shunt(&capacity.entries(), capacity.evicted);
    let paced = PacedTotals {
        bytes: 900,
        bytes_again: 18,
        packets: 10,
        lost: 3,
        late: 1,
        acks: 4,
        ..PacedTotals::default()
    };
    metrics.read_paced(&paced.counts(), (5, 40));
    let ledger = Arc::new(Ledger::default());
    enter(&ledger, &full(6));
    enter(&ledger, &Arc::new(LiveFlow::new(FlowId(7))));
    let text = metrics.text(&[ledger], surroundings());
    // The order of series inside one name is that of a hash table.
    let mut names: Vec<Vec<&str>> = Vec::new();
    for line in text.lines() {
        match names.last_mut() {
            Some(series) if !line.starts_with('#') => series.push(line),
            _ => names.push(vec![line]),
        }
    }
    for series in names.iter_mut().filter(|series| !series.iter().any(|line| line.contains("{le=\""))) {
        series[1..].sort_unstable();
    }
    insta::assert_snapshot!(names.concat().join("\n"));
}

#[test]
fn bytes_of_flows_in_flight_count_and_never_count_twice() {
    let metrics = Metrics::new();
    let ledgers = [Arc::new(Ledger::default())];
    let up = || {
        value(&metrics.text(&ledgers, Surroundings::default()), "sidetrack_flow_bytes_total{direction=\"up\"")
    };
    let flow = live(1, flow("10.9.8.7:80"), carried(None, &[]));
    let slot = enter(&ledgers[0], &flow);
    flow.count(100, 0);
    assert_eq!(up(), 100, "while it runs");
    flow.count(50, 0);
    ledgers[0].leave(slot, ended(&flow, EndReason::Ok));
    assert_eq!(up(), 100, "left, not recorded yet: a counter never falls");
    record(&metrics, &flow, EndReason::Ok);
    assert_eq!(up(), 150);
    assert_eq!(up(), 150);
    let text = metrics.text(&ledgers, Surroundings::default());
    assert_eq!(value(&text, "sidetrack_flows_active{listener=\"out\"}"), 0, "none is a number, too");
}

#[test]
fn the_manual_names_every_metric() {
    let manual = include_str!("../../../docs/admin.md");
    let named: std::collections::BTreeSet<_> = manual
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|rest| rest.split(['{', '`']).next())
        .filter(|name| name.starts_with("sidetrack_") || name.starts_with("process_"))
        .map(|name| name.trim_end_matches("_total").trim_end_matches("_info").to_owned())
        .collect();
    // A family without members is not there: give each one.
    let (metrics, ledger) = (Metrics::new(), Arc::new(Ledger::default()));
    let full_one = full(1);
    full_one.carried_by(Some(Taken { transport: Transport::Quic, address: ([10, 9, 8, 7], 4433).into() }));
    record(&metrics, &full_one, EndReason::Limit);
    metrics.closed_scraper();
    enter(&ledger, &full(2));
    metrics.read_packets(&[("denied", 1)]);
    metrics.read_paced(&[("lost", 1)], (1, 1));
    metrics.read_service("real-time", "shortest", &[("sent", 1)]);
    metrics.read_groups(&[("delivered", 1)], 1, 1);
    metrics.read_paths(&[("opened", 1)]);
    metrics.read_shunt(&[("used", 1)], 1);
    metrics.read_profile(&[Busy { events: 1, ns: 1 }; Stage::ALL.len()]);
    metrics.read_dropped(&[("limit", 1)]);
    metrics.read_dns(&DnsCounts {
        queries: vec![("udp", 1)],
        answers: vec![("name", 1)],
        unanswered: vec![("stranger", 1)],
        names: 1,
        kept: 1,
    });
    metrics.read_wires(&WireCounts {
        flows: 1,
        taken: 1,
        adopted: 1,
        back: 1,
        stayed: vec![("full", 1)],
        ..WireCounts::default()
    });
    metrics.read_engine(&WorkCounts { no_room: 1, ..WorkCounts::default() });
    metrics.read_unwritable("records", true);
    let dropped = vec![("full", 1)];
    metrics.read_exports(&[ExportCounts { to: "ipfix", dropped, ..ExportCounts::default() }]);
    let results = vec![("admitted", 1)];
    metrics.read_held(&HeldCounts { results, now: 1, repeated: 1, overruns: 1 });
    let text = metrics.text(&[ledger], Surroundings::default());
    let there: std::collections::BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|rest| rest.split(' ').next())
        .map(str::to_owned)
        .collect();
    assert_eq!(named, there);
}

#[test]
fn packets_of_the_overlay_are_counted_by_service_and_never_fall() {
    let metrics = Metrics::new();
    for delivered in [5, 9, 9] {
        metrics.read_service(
            "real-time",
            "graph",
            &[("copy_sent", 0), ("delivered", delivered), ("late", 2)],
        );
    }
    metrics.read_packets(&[("copy_sent", 7)]);
    let text = metrics.text(&[], Surroundings::default());
    let count = |fate: &str| {
        let labels = format!("{{kind=\"real-time\",dissemination=\"graph\",fate=\"{fate}\"}}");
        value(&text, &format!("sidetrack_overlay_service_packets_total{labels}"))
    };
    assert_eq!((count("copy_sent"), count("delivered"), count("late")), (0, 9, 2));
    assert_eq!(value(&text, "sidetrack_overlay_packets_total{fate=\"copy_sent\"}"), 7);
}
