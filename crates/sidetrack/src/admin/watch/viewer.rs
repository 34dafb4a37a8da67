//! One viewer of the table: how far it is, and what it is told next.
//!
//! ```text
//! hello --> pass (rows and moves in parts, by the number of the flow) --> tick --waits for an update--> pass --> tick …
//!             ^                                                             |
//!             +--- from the start, if the table has forgotten too much -----+
//! ```

use super::row::{MOVED_COLUMNS, Row, Shown};
use super::table::Table;
use crate::record::FlowRecord;
use serde_json::json;
use sidetrack_core::filter::{Filter, Property};
use std::collections::HashSet;
use std::time::SystemTime;

/// Most whole rows in one event.
const ROWS_EACH: usize = 500;
/// Most moves in one event.
const MOVES_EACH: usize = 5000;

/// A viewer.
pub(super) struct Viewer {
    filter: Filter,
    /// Rows that match, if there is a filter.
    inside: HashSet<u64>,
    /// Whether matching changes with time alone.
    is_of_time: bool,
    /// All changes up to this version are known to it. 0: none.
    since: u64,
    /// The version at the beginning of this pass.
    until: u64,
    /// The next flow of this pass. `None`: the pass is over.
    next: Option<u64>,
}

/// What a viewer is told of a row.
enum News {
    Nothing,
    Whole,
    Moved,
    Left,
}

/// Lists of one event, as JSON without the brackets.
#[derive(Default)]
struct Part {
    rows: Vec<u8>,
    moved: Vec<u8>,
    left: Vec<u64>,
    row_count: usize,
    moved_count: usize,
}

fn comma(list: &mut Vec<u8>) {
    if !list.is_empty() {
        list.push(b',');
    }
}

impl Part {
    fn is_full(&self) -> bool {
        self.row_count >= ROWS_EACH || self.moved_count + self.left.len() >= MOVES_EACH
    }

    fn is_empty(&self) -> bool {
        self.row_count + self.moved_count + self.left.len() == 0
    }

    fn event(&self) -> Vec<u8> {
        let mut out = b"event: flows\ndata: {\"rows\":[".to_vec();
        out.extend_from_slice(&self.rows);
        out.extend_from_slice(b"],\"moved\":[");
        out.extend_from_slice(&self.moved);
        out.extend_from_slice(b"],\"left\":");
        // Writing to a Vec cannot fail.
        let _ = serde_json::to_writer(&mut out, &self.left);
        out.extend_from_slice(b"}\n\n");
        out
    }
}

impl Viewer {
    pub(super) fn new(filter: Filter) -> Self {
        let is_of_time = filter.looks_at().contains(&Property::Age);
        Self { filter, inside: HashSet::new(), is_of_time, since: 0, until: 0, next: None }
    }

    /// The first event.
    pub(super) fn hello() -> Vec<u8> {
        let hello = json!({"interval_ms": super::EVERY.as_millis() as u64, "moved_columns": MOVED_COLUMNS});
        format!("retry: 2000\nevent: hello\ndata: {hello}\n\n").into_bytes()
    }

    /// Begins a pass over the table, if there is something new.
    pub(super) fn begin(&mut self, table: &Table) -> Option<Vec<u8>> {
        if !table.is_filled() || table.version == self.since {
            return None;
        }
        let mut event = None;
        if self.since > 0 && !table.remembers(self.since) {
            self.since = 0;
            self.inside.clear();
            event = Some(b"event: reset\ndata: {}\n\n".to_vec());
        }
        (self.until, self.next) = (table.version, Some(0));
        Some(event.unwrap_or_default())
    }

    /// Returns the next event of a pass. `None`: the pass is over.
    pub(super) fn next(&mut self, table: &Table) -> Option<Vec<u8>> {
        let start = self.next?;
        let mut part = Part::default();
        for (id, row) in table.rows.range(start..) {
            if part.is_full() {
                self.next = Some(*id);
                return Some(part.event());
            }
            self.tell(row, &mut part);
        }
        self.next = None;
        let mut out = if part.is_empty() { Vec::new() } else { part.event() };
        out.extend_from_slice(&self.tick(table));
        self.since = self.until;
        Some(out)
    }

    fn tell(&mut self, row: &Row, part: &mut Part) {
        match self.news(row) {
            News::Nothing => {}
            News::Whole => {
                comma(&mut part.rows);
                row.write(&mut part.rows);
                part.row_count += 1;
            }
            News::Moved => {
                comma(&mut part.moved);
                row.write_moved(&mut part.moved);
                part.moved_count += 1;
            }
            News::Left => part.left.push(row.flow.id.0),
        }
    }

    fn news(&mut self, row: &Row) -> News {
        let (is_shaped, has_moved) = (row.shaped_at > self.since, row.moved_at > self.since);
        if !self.filter.is_everything() {
            if !is_shaped && !has_moved && !self.is_of_time {
                return News::Nothing;
            }
            let (id, matches) = (row.flow.id.0, self.filter.matches(&row.record().facts()));
            match (matches, self.inside.contains(&id)) {
                (false, false) => return News::Nothing,
                (false, true) => {
                    self.inside.remove(&id);
                    return News::Left;
                }
                (true, false) => {
                    self.inside.insert(id);
                    return News::Whole;
                }
                (true, true) => {}
            }
        }
        match (is_shaped, has_moved) {
            (true, _) => News::Whole,
            (false, true) => News::Moved,
            (false, false) => News::Nothing,
        }
    }

    /// The event at the end of a pass.
    fn tick(&mut self, table: &Table) -> Vec<u8> {
        let is_all = self.filter.is_everything();
        // A first pass has shown what ran at its beginning. Earlier ends are not reported.
        let known = if self.since == 0 { self.until } else { self.since };
        let gone: Vec<u64> = table.gone(known).filter(|id| is_all || self.inside.remove(id)).collect();
        let mut ended = Vec::new();
        for flow in table.ended(known) {
            let decided = flow.flow.decided();
            let record = FlowRecord::ended(flow, decided.as_deref());
            if is_all || self.filter.matches(&record.facts()) {
                comma(&mut ended);
                let _ = serde_json::to_writer(&mut ended, &Shown::new(record, None));
            }
        }
        let sums = json!({
            "now": crate::record::Timestamp::from(SystemTime::now()),
            "flows_active": table.rows.len(),
            "flows_shown": if is_all { table.rows.len() } else { self.inside.len() },
            "flows_ended": table.ended_total(),
            "ended_missed": table.missed(known),
            "up_bytes_per_second": table.rates.0,
            "down_bytes_per_second": table.rates.1,
            "gone": gone,
        });
        let sums = sums.to_string();
        let mut out = b"event: tick\ndata: ".to_vec();
        out.extend_from_slice(sums.strip_suffix('}').unwrap_or(&sums).as_bytes());
        out.extend_from_slice(b",\"ended\":[");
        out.extend_from_slice(&ended);
        out.extend_from_slice(b"]}\n\n");
        out
    }
}
