//! The columns of the flows: their text, their order, and how many of them fit.

use super::events::FlowRow;
use crate::cli::flows::{cut, human};
use crate::record::Timestamp;
use std::cmp::Ordering;
use unicode_width::UnicodeWidthStr;

/// What a table needs to know of a column.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Its title.
    pub title: &'static str,
    /// Its least width, columns of the terminal.
    pub least: usize,
    /// Its greatest width.
    pub most: usize,
    /// Whether it has numbers, which stand at its right end.
    pub is_number: bool,
    /// The columns with the lowest numbers are shown if there is not enough room for all.
    pub rank: u8,
}

const fn text(title: &'static str, least: usize, most: usize, rank: u8) -> Shape {
    Shape { title, least, most, is_number: false, rank }
}

const fn number(title: &'static str, width: usize, rank: u8) -> Shape {
    Shape { title, least: width, most: width, is_number: true, rank }
}

/// Chooses columns that fit into `width`, in their order, and their widths. A blank stands between two of them.
pub(super) fn fit(shapes: &[Shape], width: usize) -> Vec<(usize, usize)> {
    let mut by_rank: Vec<usize> = (0..shapes.len()).collect();
    by_rank.sort_by_key(|index| shapes[*index].rank);
    let mut left = width + 1;
    let mut chosen: Vec<(usize, usize)> = Vec::new();
    for index in by_rank {
        let least = shapes[index].least;
        // A narrower column that matters less does not replace one that matters more.
        if least + 1 > left {
            break;
        }
        left -= least + 1;
        chosen.push((index, least));
    }
    chosen.sort_unstable();
    loop {
        let before = left;
        for (index, width) in &mut chosen {
            if left > 0 && *width < shapes[*index].most {
                *width += 1;
                left -= 1;
            }
        }
        if left == before {
            return chosen;
        }
    }
}

/// Returns `text` in exactly `width` columns of the terminal.
pub(super) fn padded(text: &str, width: usize, is_right: bool) -> String {
    let text = cut(text, width);
    let blanks = " ".repeat(width.saturating_sub(text.width()));
    if is_right { blanks + &text } else { text + &blanks }
}

/// A column of the flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "their titles say what they are")]
pub enum Column {
    Flow,
    State,
    Process,
    Client,
    Host,
    Destination,
    Rule,
    Chain,
    Carrier,
    DownRate,
    UpRate,
    Down,
    Up,
    Rtt,
    Age,
}

impl Column {
    /// All columns, from left to right.
    pub const ALL: [Self; 15] = [
        Self::Flow,
        Self::State,
        Self::Process,
        Self::Client,
        Self::Host,
        Self::Destination,
        Self::Rule,
        Self::Chain,
        Self::Carrier,
        Self::DownRate,
        Self::UpRate,
        Self::Down,
        Self::Up,
        Self::Rtt,
        Self::Age,
    ];

    /// Its shape.
    pub const fn shape(self) -> Shape {
        match self {
            Self::Flow => number("FLOW", 5, 9),
            Self::State => text("STATE", 8, 20, 2),
            Self::Process => text("PROCESS", 9, 16, 1),
            Self::Client => text("CLIENT", 15, 21, 11),
            Self::Host => text("HOST", 15, 36, 0),
            Self::Destination => text("DESTINATION", 15, 21, 10),
            Self::Rule => text("RULE", 7, 16, 7),
            Self::Chain => text("CHAIN", 7, 20, 12),
            Self::Carrier => text("CARRIER", 8, 28, 8),
            Self::DownRate => number("DOWN/S", 8, 3),
            Self::UpRate => number("UP/S", 8, 4),
            Self::Down => number("DOWN", 8, 13),
            Self::Up => number("UP", 8, 14),
            Self::Rtt => number("RTT", 7, 6),
            Self::Age => number("AGE", 6, 5),
        }
    }

    /// Its text for a flow. `now` is the time of the node.
    pub fn cell(self, row: &FlowRow, now: Option<Timestamp>) -> String {
        let known = |text: &Option<String>| text.as_deref().map(human::printable).unwrap_or_default();
        let rate = |bytes: u64| if bytes == 0 { String::new() } else { human::bytes(bytes) };
        match self {
            Self::Flow => row.flow.to_string(),
            Self::State => state(row),
            Self::Process => known(&row.process),
            Self::Client => known(&row.client),
            Self::Host => host(row),
            Self::Destination => known(&row.orig_dst),
            Self::Rule => known(&row.rule),
            Self::Chain => human::printable(&row.chain.join(">")),
            Self::Carrier => known(&row.carrier),
            Self::DownRate => rate(row.down_bytes_per_second),
            Self::UpRate => rate(row.up_bytes_per_second),
            Self::Down => human::bytes(row.bytes_down),
            Self::Up => human::bytes(row.bytes_up),
            Self::Rtt if row.server_rtt_us == 0 => String::new(),
            Self::Rtt => human::time(row.server_rtt_us as f64 / 1e6),
            Self::Age => human::time(age_seconds(row, now)),
        }
    }

    /// The order of two flows in this column, smallest first. Flows that are equal there stand by their number.
    pub fn order(self, one: &FlowRow, other: &FlowRow, now: Option<Timestamp>) -> Ordering {
        let by = match self {
            Self::Flow => Ordering::Equal,
            Self::DownRate => one.down_bytes_per_second.cmp(&other.down_bytes_per_second),
            Self::UpRate => one.up_bytes_per_second.cmp(&other.up_bytes_per_second),
            Self::Down => one.bytes_down.cmp(&other.bytes_down),
            Self::Up => one.bytes_up.cmp(&other.bytes_up),
            Self::Rtt => one.server_rtt_us.cmp(&other.server_rtt_us),
            Self::Age => age_seconds(one, now).total_cmp(&age_seconds(other, now)),
            // Running flows first.
            Self::State => one.reason.cmp(&other.reason),
            Self::Process => one.process.cmp(&other.process),
            Self::Client => one.client.cmp(&other.client),
            Self::Host => one
                .host
                .as_ref()
                .or(one.orig_dst.as_ref())
                .cmp(&other.host.as_ref().or(other.orig_dst.as_ref())),
            Self::Destination => one.orig_dst.cmp(&other.orig_dst),
            Self::Rule => one.rule.cmp(&other.rule),
            Self::Chain => one.chain.cmp(&other.chain),
            Self::Carrier => one.carrier.cmp(&other.carrier),
        };
        by.then(one.flow.cmp(&other.flow))
    }

    /// Whether the largest stand first when this column is chosen.
    pub const fn is_descending(self) -> bool {
        self.shape().is_number
    }
}

/// Time since the flow was caught, or how long it lasted.
fn age_seconds(row: &FlowRow, now: Option<Timestamp>) -> f64 {
    match (row.reason.is_none(), row.ts, now) {
        (true, Some(since), Some(now)) => {
            let age = now.system_time().duration_since(since.system_time());
            age.map_or(row.duration_seconds, |age| age.as_secs_f64())
        }
        _ => row.duration_seconds,
    }
}

/// The name of the server with the port; without a name, the address.
pub(super) fn host(row: &FlowRow) -> String {
    let to = row.orig_dst.as_deref().unwrap_or("");
    let port = to.rsplit_once(':').map_or("", |(_, port)| port);
    match row.host.as_deref() {
        Some(name) => human::printable(&format!("{name}:{port}")),
        None => human::printable(to),
    }
}

fn state(row: &FlowRow) -> String {
    match (&row.reason, &row.detail) {
        (None, _) if row.shunted => "fast path".to_owned(),
        (None, _) if row.intercept.as_deref() == Some("kernel") => "in kernel".to_owned(),
        (None, _) => "live".to_owned(),
        (Some(reason), None) => reason.clone(),
        (Some(reason), Some(detail)) => human::printable(&format!("{reason}: {detail}")),
    }
}
