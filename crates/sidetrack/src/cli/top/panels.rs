//! The tables beside the flows: the fast path, and the health of the node.

use super::columns::{Shape, fit, padded};
use crate::admin::Status;
use crate::cli::flows::human;
use crate::shunt::{Counts, FlowView};
use std::fmt::Write as _;

/// The flows of the shunt.
#[derive(Clone, Debug, Default)]
pub struct FastPath {
    /// The flows.
    pub flows: Vec<FlowView>,
}

/// The state of the node.
#[derive(Clone, Debug)]
pub struct Health {
    /// What `GET /v1/status` says.
    pub status: Status,
    /// The lines of `GET /metrics`.
    pub metrics: Vec<String>,
}

/// Counters that should stay 0, and what they count.
const LOSSES: [(&str, &str); 8] = [
    ("sidetrack_shed_total", "flows refused because a limit was reached"),
    ("sidetrack_records_dropped_total", "records lost: a reader or the disk was too slow"),
    ("sidetrack_history_missing_total", "flows that the history lacks"),
    ("sidetrack_datagrams_dropped_total", "datagrams that were not passed on"),
    ("sidetrack_held_overruns_total", "times that SYNs were lost because they were not read in time"),
    ("sidetrack_closed_for_others_total", "connections closed to make room for others"),
    ("sidetrack_engine_shed_total", "new connections that the packet engine did not serve"),
    ("sidetrack_engine_internal_total", "errors of the packet engine itself"),
];

/// Most lines of metrics that are kept.
pub(super) const METRICS_MAX: usize = 20_000;

/// The columns of the fast path.
const COLUMNS: [Shape; 9] = [
    Shape { title: "STATE", least: 9, most: 10, is_number: false, rank: 0 },
    Shape { title: "ACTION", least: 6, most: 7, is_number: false, rank: 4 },
    Shape { title: "CLIENT", least: 15, most: 47, is_number: false, rank: 1 },
    Shape { title: "SERVER", least: 15, most: 47, is_number: false, rank: 2 },
    Shape { title: "PATH", least: 8, most: 12, is_number: false, rank: 7 },
    Shape { title: "FAST", least: 7, most: 8, is_number: true, rank: 3 },
    Shape { title: "SLOW", least: 7, most: 8, is_number: true, rank: 5 },
    Shape { title: "PER S", least: 7, most: 8, is_number: true, rank: 8 },
    Shape { title: "WHY NOT", least: 8, most: 30, is_number: false, rank: 6 },
];

impl FastPath {
    /// The lines of the table, its titles first.
    pub fn lines(&self, width: usize) -> Vec<String> {
        if self.flows.is_empty() {
            return vec!["No flow was wanted on the fast path yet: docs/shunt.md says which are.".to_owned()];
        }
        let chosen = fit(&COLUMNS, width);
        let line = |cell: &dyn Fn(usize) -> String| {
            let cells =
                chosen.iter().map(|(index, width)| padded(&cell(*index), *width, COLUMNS[*index].is_number));
            cells.collect::<Vec<_>>().join(" ").trim_end().to_owned()
        };
        let titles = line(&|index| COLUMNS[index].title.to_owned());
        let rows = self.flows.iter().map(|flow| line(&|index| cell(flow, index)));
        std::iter::once(titles).chain(rows).collect()
    }
}

fn cell(flow: &FlowView, column: usize) -> String {
    let sum = |counts: Counts| human::bytes(counts.bytes_up + counts.bytes_down);
    match column {
        0 => flow.state.clone(),
        1 => flow.action.as_str().to_owned(),
        2 => flow.client.to_string(),
        3 => flow.server.to_string(),
        4 => flow.fast_path.map_or("", sidetrack_core::shunt::FastPathKind::as_str).to_owned(),
        5 => sum(flow.fast),
        6 => sum(flow.slow),
        7 => flow.bytes_per_s.map(human::bytes).unwrap_or_default(),
        _ => {
            let obstacle = flow.obstacle.map(sidetrack_core::shunt::Obstacle::as_str);
            let cause = flow.cause.map(sidetrack_core::shunt::Cause::as_str);
            obstacle.into_iter().chain(cause).collect::<Vec<_>>().join(", ")
        }
    }
}

impl Health {
    /// The lines of the table.
    pub fn lines(&self) -> Vec<String> {
        let status = &self.status;
        let config = &status.config;
        let mut text = String::new();
        let path = config.path.as_ref().map(|path| human::printable(&path.display().to_string()));
        let path = path.unwrap_or_else(|| "from the command line".to_owned());
        for (name, value) in [
            ("version", status.version.clone()),
            ("process", status.pid.to_string()),
            ("running for", human::time(status.uptime_seconds as f64)),
            ("flows", format!("{} in flight, {} ended", status.flows_active, status.flows_ended)),
            ("descriptors", format!("{} of {}", status.fds_in_use, status.fds_limit)),
            ("configuration", format!("{path}, number {}", config.generation)),
        ] {
            let _ = writeln!(text, "{name:<14} {value}");
        }
        if let Some(error) = &config.last_error {
            let _ = writeln!(text, "\n! The latest reload failed:");
            error.lines().for_each(|line| {
                let _ = writeln!(text, "  {}", human::printable(line));
            });
        }
        for setting in &config.waiting_for_restart {
            let _ = writeln!(text, "! waits for a restart: {}", human::printable(setting));
        }
        text.push('\n');
        let losses = self.losses();
        if losses.is_empty() {
            text.push_str("Nothing was lost or refused since the start.\n");
        } else {
            text.push_str("Lost or refused since the start:\n");
        }
        for (count, what) in losses {
            let _ = writeln!(text, "! {count:>9}  {what}");
        }
        text.push_str("\nListeners:\n");
        for listener in &status.listeners {
            let addresses: Vec<_> = listener.addresses.iter().map(ToString::to_string).collect();
            let name = human::printable(&listener.name);
            let _ = writeln!(text, "  {name:<14} {:<10} {}", listener.kind, addresses.join(", "));
        }
        text.push_str("\nWhat this machine lacks for some uses, `sidetrack doctor` says.\n");
        text.lines().map(str::to_owned).collect()
    }

    /// The counters of losses that are not 0, in words with their labels.
    fn losses(&self) -> Vec<(u64, String)> {
        let of = |line: &String| {
            let (series, value) = line.rsplit_once(' ')?;
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let (_, what) = LOSSES.iter().find(|(counter, _)| *counter == name)?;
            let count = value.parse::<f64>().ok().filter(|count| *count > 0.0)? as u64;
            let labels = human::printable(labels.trim_end_matches('}'));
            Some((count, if labels.is_empty() { (*what).to_owned() } else { format!("{what} ({labels})") }))
        };
        self.metrics.iter().filter_map(of).collect()
    }
}
