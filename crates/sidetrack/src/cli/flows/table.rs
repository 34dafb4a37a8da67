//! The table of flows, at most as wide as the terminal.

use super::human;
use crate::record::FlowRecord;
use sidetrack_core::flow::{Host, Intercept};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Blanks between columns.
const GAP: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Id,
    Age,
    Client,
    Destination,
    Process,
    Rule,
    Carrier,
    Up,
    Down,
    Connect,
    State,
}

/// A column's title, its least width, and its width if rows are printed one by one.
struct Shape {
    title: &'static str,
    least: usize,
    streaming: usize,
    to_the_right: bool,
}

/// The order in which columns are dropped if the terminal is too narrow for their least widths.
const GIVEN_UP: [Column; 8] = [
    Column::Connect,
    Column::Process,
    Column::Rule,
    Column::Client,
    Column::Carrier,
    Column::Age,
    Column::Up,
    Column::Down,
];

impl Column {
    const ALL: [Self; 11] = [
        Self::Id,
        Self::Age,
        Self::Client,
        Self::Destination,
        Self::Process,
        Self::Rule,
        Self::Carrier,
        Self::Up,
        Self::Down,
        Self::Connect,
        Self::State,
    ];

    const fn shape(self) -> Shape {
        let (title, least, streaming, to_the_right) = match self {
            Self::Id => ("ID", 1, 6, true),
            Self::Age => ("AGE", 3, 7, true),
            Self::Client => ("CLIENT", 13, 21, false),
            Self::Destination => ("DESTINATION", 18, 32, false),
            Self::Process => ("PROCESS", 7, 12, false),
            Self::Rule => ("RULE", 6, 12, false),
            Self::Carrier => ("CARRIER", 8, 24, false),
            Self::Up => ("UP", 2, 7, true),
            Self::Down => ("DOWN", 4, 7, true),
            Self::Connect => ("CONNECT", 7, 7, true),
            Self::State => ("STATE", 13, RATES, false),
        };
        Shape { title, least, streaming, to_the_right }
    }

    /// Whether its text may be shortened; numbers are never shortened.
    const fn can_shrink(self) -> bool {
        !self.shape().to_the_right
    }

    fn cell(self, flow: &FlowRecord<'_>) -> String {
        let text = |text: &Option<std::borrow::Cow<'_, str>>| text.as_deref().map(human::printable);
        let cell = match self {
            Self::Id => Some(flow.flow.to_string()),
            Self::Age => Some(human::time(flow.duration_seconds)),
            Self::Client => flow.client.map(|client| client.to_string()),
            Self::Destination => destination(flow),
            Self::Process => text(&flow.process),
            Self::Rule => text(&flow.rule),
            Self::Carrier => carrier(flow),
            Self::Up => Some(human::bytes(flow.bytes_up)),
            Self::Down => Some(human::bytes(flow.bytes_down)),
            Self::Connect => flow.connect_seconds.map(human::time),
            Self::State => Some(state(flow)),
        };
        cell.unwrap_or_else(|| "-".to_owned())
    }
}

/// The name if there is one, because it says more than the address.
fn destination(flow: &FlowRecord<'_>) -> Option<String> {
    let dst = flow.orig_dst.as_deref()?;
    match (&flow.host, &dst.host) {
        (Some(host), Host::Ip(_)) => Some(format!("{}:{}", human::printable(host), dst.port)),
        _ => Some(dst.to_string()),
    }
}

/// The carrier, with the transport if several are possible: `tunnel:t (quic)`.
fn carrier(flow: &FlowRecord<'_>) -> Option<String> {
    let carrier = human::printable(flow.carrier.as_deref()?);
    let transport = flow.path.as_deref().and_then(|path| path.split(' ').next());
    Some(match transport {
        Some(transport) => format!("{carrier} ({})", human::printable(transport)),
        None => carrier,
    })
}

fn state(flow: &FlowRecord<'_>) -> String {
    let Some(reason) = flow.reason else {
        return if flow.intercept == Some(Intercept::Kernel) { "in kernel".into() } else { "live".into() };
    };
    match &flow.detail {
        Some(detail) => format!("{reason}: {}", human::printable(detail)),
        None => reason.to_string(),
    }
}

/// A table: its columns and their widths.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(Column, usize)>,
    /// The width of the terminal; `None` without a terminal.
    terminal: Option<usize>,
    /// The least width of the state.
    least_state: usize,
}

/// The width of the longest state of a flow that moves bytes: `live: 99.9 kB/s up, 99.9 kB/s down`.
const RATES: usize = 34;

/// The narrowest terminal with room for rates.
const ROOM_FOR_RATES: usize = 80;

impl Table {
    /// Makes a table in which these flows fit into `width` columns; `None`: there is no limit.
    ///
    /// Columns without any value are left out.
    pub fn new(flows: &[FlowRecord<'_>], width: Option<usize>) -> Self {
        let measured = |column: Column| {
            let cells = flows.iter().map(|flow| column.cell(flow));
            let (known, widest) = cells.fold((false, column.shape().title.len()), |(known, widest), cell| {
                (known || cell != "-", widest.max(cell.width()))
            });
            known.then_some((column, widest))
        };
        let least_state = Column::State.shape().least;
        let columns = Column::ALL.into_iter().filter_map(measured).collect();
        let mut table = Self { columns, terminal: width, least_state };
        if let Some(width) = width {
            table.fit(width);
        }
        table
    }

    /// Makes a table for flows that are not known yet, with room for rates in a terminal of usual width.
    pub fn streaming(width: Option<usize>) -> Self {
        let columns = Column::ALL.into_iter().map(|column| (column, column.shape().streaming)).collect();
        let has_room = width.is_none_or(|width| width >= ROOM_FOR_RATES);
        let least_state = if has_room { RATES } else { Column::State.shape().least };
        let mut table = Self { columns, terminal: width, least_state };
        if let Some(width) = width {
            table.fit(width);
        }
        table
    }

    fn width(&self) -> usize {
        self.columns.iter().map(|(_, width)| width + GAP).sum::<usize>().saturating_sub(GAP)
    }

    /// Shortens texts to their least widths. If that is not enough, drops a column and tries again.
    fn fit(&mut self, width: usize) {
        let mut natural = std::mem::take(&mut self.columns);
        for given_up in GIVEN_UP.map(Some).into_iter().chain([None]) {
            self.columns.clone_from(&natural);
            self.shorten(width);
            if self.width() <= width {
                break;
            }
            natural.retain(|(column, _)| Some(*column) != given_up);
        }
    }

    fn shorten(&mut self, width: usize) {
        let least_state = self.least_state;
        let least = |column: Column| if column == Column::State { least_state } else { column.shape().least };
        while self.width() > width {
            let widest = self
                .columns
                .iter_mut()
                .filter(|(column, width)| column.can_shrink() && *width > least(*column))
                .max_by_key(|(_, width)| *width);
            match widest {
                Some((_, widest)) => *widest -= 1,
                None => break,
            }
        }
    }

    /// The line of titles.
    pub fn header(&self) -> String {
        self.line(|column| column.shape().title.to_owned())
    }

    /// The line of a flow.
    pub fn row(&self, flow: &FlowRecord<'_>) -> String {
        self.line(|column| column.cell(flow))
    }

    /// The line of a running flow, with its rate instead of its state.
    pub(super) fn row_at(&self, flow: &FlowRecord<'_>, rate: &str) -> String {
        self.line(|column| match column {
            Column::State => rate.to_owned(),
            _ => column.cell(flow),
        })
    }

    fn line(&self, text: impl Fn(Column) -> String) -> String {
        let mut line = String::new();
        for (column, width) in &self.columns {
            // The last column gets the rest of the line. Without a terminal its text is not shortened.
            let room = match (column, self.terminal) {
                (Column::State, None) => usize::MAX,
                (Column::State, Some(terminal)) => terminal.saturating_sub(line.width()).max(*width),
                _ => *width,
            };
            let text = if column.can_shrink() { cut(&text(*column), room) } else { text(*column) };
            let blanks = " ".repeat(width.saturating_sub(text.width()));
            let cell = if column.shape().to_the_right { blanks + &text } else { text + &blanks };
            line.push_str(&cell);
            line.push_str(&" ".repeat(GAP));
        }
        line.truncate(line.trim_end().len());
        line.push('\n');
        line
    }
}

/// Returns the text if it fits into `width` columns, otherwise its beginning and an ellipsis.
pub(in crate::cli) fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    let mut room = width.saturating_sub(1);
    for c in text.chars() {
        let columns = c.width().unwrap_or(0);
        if columns > room {
            break;
        }
        room -= columns;
        kept.push(c);
    }
    kept.push('…');
    kept
}
