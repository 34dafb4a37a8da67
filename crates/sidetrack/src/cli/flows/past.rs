//! Flows of the history: a list, or sums by groups.

use super::{Output, Table, human};
use crate::admin::{Answer, Client};
use crate::record::Timestamp;
use crate::record::history::Sum;
use clap::Args;
use hyper::Method;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

/// What is asked of the history.
#[derive(Debug, Args)]
#[command(next_help_heading = "History (needs [history] in the configuration)")]
pub(super) struct PastArgs {
    /// Shows also ended flows of the history that were there at this time or later: how long ago (2h, 3days), or a time
    /// in UTC (2026-11-28T06:00:00Z)
    #[arg(long, value_name = "TIME")]
    pub(super) since: Option<String>,
    /// Only flows that were there until this time
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Shows sums by these fields instead of flows: host, process, user, rule, carrier, listener, client, dst, port, reason,
    /// protocol, intercept; up to four, with commas
    #[arg(long, value_name = "FIELDS")]
    top: Option<String>,
    /// The order of the sums
    #[arg(long, value_name = "WHAT", value_enum, requires = "top")]
    by: Option<Order>,
    /// Most flows or sums [default: 1000 flows, 20 sums]
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
}

/// The order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Order {
    /// Bytes in both directions
    Bytes,
    /// Bytes from clients to servers
    Up,
    /// Bytes from servers to clients
    Down,
    /// Number of flows
    Flows,
    /// Datagrams
    Packets,
}

impl Order {
    const fn word(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Up => "up",
            Self::Down => "down",
            Self::Flows => "flows",
            Self::Packets => "packets",
        }
    }
}

/// Sums that are shown unless the command says another number.
const SUMS: usize = 20;

impl PastArgs {
    /// Whether the history is asked at all.
    pub(super) const fn is_asked(&self) -> bool {
        self.since.is_some() || self.until.is_some() || self.top.is_some() || self.limit.is_some()
    }
}

/// Asks the history.
pub(super) async fn ask(client: &Client, filter: &str, args: &PastArgs) -> anyhow::Result<Answer> {
    let limit = args.limit.or_else(|| args.top.is_some().then_some(SUMS)).map(|limit| limit.to_string());
    let asked = [
        ("filter", Some(filter)),
        ("since", args.since.as_deref()),
        ("until", args.until.as_deref()),
        ("top", args.top.as_deref()),
        ("by", args.by.map(Order::word)),
        ("limit", limit.as_deref()),
    ];
    let query: Vec<_> = asked.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    Ok(client.ask(Method::GET, "/v1/history", &query).await?)
}

/// Says what of the history was not read.
pub(super) fn tell_gaps(answer: &Answer, output: &mut Output<'_>) -> anyhow::Result<()> {
    for damaged in &answer.damaged {
        writeln!(output.notes, "not read: {damaged}")?;
    }
    if answer.has_more {
        writeln!(
            output.notes,
            "there are earlier flows that match: --limit N shows more, --until TIME earlier ones"
        )?;
    }
    Ok(())
}

/// Asks the history, and prints its answer.
pub(super) async fn show(
    client: &Client,
    filter: &str,
    args: &PastArgs,
    json: bool,
    output: &mut Output<'_>,
) -> anyhow::Result<ExitCode> {
    let answer = ask(client, filter, args).await?;
    if let Some(top) = &args.top {
        let text = if json { sums_as_lines(top, &answer) } else { sums(top, &answer) };
        output.out.write_all(text.as_bytes())?;
    } else if json {
        let mut lines = Vec::new();
        answer.flows.iter().for_each(|flow| flow.write_line(&mut lines));
        output.out.write_all(&lines)?;
    } else if answer.flows.is_empty() {
        writeln!(output.notes, "no flow matches; {} were searched", answer.searched)?;
    } else {
        let table = Table::new(&answer.flows, output.width);
        output.out.write_all(table.header().as_bytes())?;
        for flow in &answer.flows {
            output.out.write_all(table.row(flow).as_bytes())?;
        }
    }
    tell_gaps(&answer, output)?;
    output.out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The table of sums.
fn sums(top: &str, answer: &Answer) -> String {
    let mut rows = vec![top.split(',').map(|name| name.trim().to_uppercase()).collect::<Vec<_>>()];
    rows[0].extend(["FLOWS", "UP", "DOWN", "PACKETS", "LAST"].map(str::to_owned));
    let keys = rows[0].len() - 5;
    let cells = |sum: &Sum| {
        let packets = sum.packets_up + sum.packets_down;
        let last = UNIX_EPOCH + Duration::from_millis(u64::try_from(sum.last_ms).unwrap_or(0));
        let last = Timestamp::from(last).to_string();
        [
            sum.flows.to_string(),
            human::bytes(sum.bytes_up),
            human::bytes(sum.bytes_down),
            if packets == 0 { "-".to_owned() } else { packets.to_string() },
            last.get(..19).unwrap_or(&last).replace('T', " "),
        ]
    };
    for group in &answer.groups {
        let mut row: Vec<_> = group
            .values
            .iter()
            .map(|value| value.as_deref().map_or_else(|| "-".to_owned(), human::printable))
            .collect();
        row.extend(cells(&group.sum));
        rows.push(row);
    }
    if answer.rest.flows > 0 {
        let mut row = vec![String::new(); keys];
        row[0] = "(all others)".to_owned();
        row.extend(cells(&answer.rest));
        rows.push(row);
    }
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let is_number = (keys..keys + 4).contains(&at);
            let _ =
                if is_number { write!(line, "{cell:>width$}  ") } else { write!(line, "{cell:<width$}  ") };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// One JSON object for each sum.
fn sums_as_lines(top: &str, answer: &Answer) -> String {
    let names: Vec<_> = top.split(',').map(str::trim).collect();
    let mut text = String::new();
    for group in &answer.groups {
        let mut fields = serde_json::Map::new();
        for (name, value) in names.iter().zip(&group.values) {
            fields.insert((*name).to_owned(), value.clone().into());
        }
        if let Ok(serde_json::Value::Object(sums)) = serde_json::to_value(group.sum) {
            fields.extend(sums);
        }
        let _ = writeln!(text, "{}", serde_json::Value::Object(fields));
    }
    text
}

/// The word of an order is one that the admin interface knows.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::history::{By, Group};
    use clap::ValueEnum;

    #[test]
    fn every_order_is_known_to_the_admin_interface() {
        for order in Order::value_variants() {
            let text = format!("\"{}\"", order.word());
            assert!(serde_json::from_str::<By>(&text).is_ok(), "{text}");
        }
    }

    #[test]
    fn sums_stand_in_columns() {
        let sum = |flows, up| Sum { flows, bytes_up: up, last_ms: 1_795_302_439_123, ..Sum::default() };
        let answer = Answer {
            flows: Vec::new(),
            groups: vec![
                Group { values: vec![Some("web.example".to_owned()), None], sum: sum(12, 2048) },
                Group { values: vec![Some("a\u{7}".to_owned()), Some("curl".to_owned())], sum: sum(3, 1) },
            ],
            rest: sum(7, 0),
            searched: 22,
            has_more: false,
            damaged: Vec::new(),
        };
        let text = sums("host, process", &answer);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[0].starts_with("HOST"), "{text}");
        assert!(lines[1].contains("web.example") && lines[1].contains("2026-11-21 23:07:19"), "{text}");
        assert!(!text.contains('\u{7}'), "{text}");
        assert!(lines[3].starts_with("(all others)"), "{text}");
        let json = sums_as_lines("host,process", &answer);
        let first: serde_json::Value =
            serde_json::from_str(json.lines().next().expect("a line")).expect("JSON");
        assert_eq!(
            (&first["host"], &first["process"], &first["flows"]),
            (&"web.example".into(), &serde_json::Value::Null, &12.into())
        );
    }
}
