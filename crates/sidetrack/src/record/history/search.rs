//! Answers questions about stored flows: a list of the latest that match, or sums by groups.

use super::columns::{self, Column, Row};
use super::folder::{Content, Folder, Name};
use super::segment::{Loaded, Quick, Segment};
use super::{Query, Span, span};
use crate::record::FlowRecord;
use crate::record::history::groups::{Groups, Key, Sum};
use parquet::data_type::ByteArray;
use sidetrack_core::filter::{Filter, FlowFacts, Property, Required};
use sidetrack_core::flow::{Destination, EndReason, Intercept, Protocol};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// What was found.
#[derive(Debug, Default)]
pub struct Found {
    /// The latest flows that match, unless groups were asked for. In no order.
    pub flows: Vec<FlowRecord<'static>>,
    /// Sums by group.
    pub groups: Groups,
    /// Flows in the files that were searched.
    pub searched: u64,
    /// There are more flows than the list may have.
    pub has_more: bool,
    /// Files that could not be read, and why.
    pub damaged: Vec<String>,
}

impl Found {
    fn join(&mut self, other: Self) {
        self.flows.extend(other.flows);
        self.groups.join(other.groups);
        self.searched += other.searched;
        self.damaged.extend(other.damaged);
    }

    /// Adds a flow if it is asked for.
    pub fn offer(&mut self, record: &FlowRecord<'_>, query: &Query) {
        self.searched += 1;
        if !query.window.touches(span(record)) || !query.filter.matches(&record.facts()) {
            return;
        }
        match &query.top {
            Some(top) => self.groups.add(top.keys.iter().map(|key| key.of(record)), &Sum::of(record)),
            None => self.flows.push(record.to_owned_record()),
        }
    }

    /// Keeps the latest flows that a list may have, in rising order of their ends.
    pub fn cut(&mut self, query: &Query) {
        self.flows.sort_by_key(|record| (span(record).1, record.flow));
        let many = self.flows.len().saturating_sub(query.limit);
        self.has_more |= many > 0;
        self.flows.drain(..many);
    }
}

/// Searches a folder.
pub(super) fn search(folder: &Folder, query: &Query) -> Found {
    let (mut names, current) = folder.list(Content::Flows);
    let mut found = Found::default();
    let plan = Plan::new(query);
    if let Some((file, bytes)) = current {
        let read = plan.lines(&mut file.take(bytes), &mut found);
        read.unwrap_or_else(|error| found.damaged.push(format!("the latest flows: {error}")));
    }
    names.retain(|name| name.span.is_none_or(|span| query.window.touches(span)));
    names.reverse();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // The latest files first. A list needs no more of them when it is full.
    for piece in names.chunks(threads) {
        if query.top.is_none() && found.flows.len() > query.limit {
            found.has_more = true;
            break;
        }
        let parts: Vec<_> = std::thread::scope(|scope| {
            let tasks: Vec<_> = piece.iter().map(|name| scope.spawn(|| plan.file(folder, *name))).collect();
            tasks.into_iter().filter_map(|task| task.join().ok()).collect()
        });
        parts.into_iter().for_each(|part| found.join(part));
    }
    found
}

/// What a search has to do in each file.
struct Plan<'a> {
    query: &'a Query,
    required: Vec<Required>,
    looks_at: BTreeSet<Property>,
    /// For each required word of a text field, how a line of JSON must contain it.
    quoted: Vec<Vec<String>>,
}

impl<'a> Plan<'a> {
    fn new(query: &'a Query) -> Self {
        let required = query.filter.required();
        let quoted = required.iter().filter_map(|required| match required {
            // Addresses and names stand together with a port.
            Required::Words(Property::Destination | Property::Client, _) | Required::Ranges(..) => None,
            Required::Words(_, words) => words.iter().map(|word| serde_json::to_string(word).ok()).collect(),
        });
        let quoted = quoted.collect();
        Self { query, looks_at: query.filter.looks_at(), quoted, required }
    }

    fn file(&self, folder: &Folder, name: Name) -> Found {
        let read = || -> io::Result<Found> {
            let mut file = match folder.read(name) {
                // It was the oldest, and had to go.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::default()),
                opened => opened?,
            };
            let mut found = Found::default();
            // Lines may have become columns since they were listed.
            if name.span.is_some() || is_columns(&mut file)? {
                self.columns(file, name, &mut found).map_err(io::Error::other)?;
            } else {
                self.lines(&mut file, &mut found)?;
            }
            Ok(found)
        };
        // A file that the disk has damaged may surprise the library that reads it.
        let why = match catch_unwind(AssertUnwindSafe(read)) {
            Ok(Ok(found)) => return found,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it is damaged".to_owned(),
        };
        Found { damaged: vec![format!("file {}: {why}", name.number)], ..Found::default() }
    }

    /// Searches lines of JSON. Lines that are not records are left out: a process has died while it wrote them.
    fn lines(&self, file: &mut impl Read, found: &mut Found) -> io::Result<()> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        for line in bytes.split(|byte| *byte == b'\n') {
            let Ok(line) = std::str::from_utf8(line) else { continue };
            if line.is_empty() {
                continue;
            }
            let may_match = self.quoted.iter().all(|words| words.iter().any(|word| line.contains(&**word)));
            if !may_match {
                found.searched += 1;
            } else if let Ok(record) = serde_json::from_str::<FlowRecord<'_>>(line) {
                found.offer(&record, self.query);
            }
        }
        Ok(())
    }

    fn columns(
        &self,
        file: File,
        name: Name,
        found: &mut Found,
    ) -> Result<(), parquet::errors::ParquetError> {
        let mut segment = Segment::open(file)?;
        found.searched += segment.rows() as u64;
        if !segment.may_have(&self.required) {
            return Ok(());
        }
        let is_within = name.span.is_some_and(|(from, to)| self.query.window.contains((from, to)));
        segment.load(self.looks_at.iter().flat_map(|property| Column::of(*property)).copied())?;
        if !is_within {
            segment.load([Column::Ts, Column::Duration])?;
        }
        let facts = Facts::new(&segment);
        let is_asked = |at: &usize| {
            (is_within || self.query.window.touches(row_span(&segment, *at)))
                && facts.match_row(&self.query.filter, *at)
        };
        let rows: Vec<usize> = (0..segment.rows()).filter(is_asked).collect();
        if rows.is_empty() {
            return Ok(());
        }
        match &self.query.top {
            Some(top) => {
                segment.load(top.keys.iter().map(|key| key.column()))?;
                segment.load([Column::BytesUp, Column::BytesDown, Column::PacketsUp, Column::PacketsDown])?;
                segment.load([Column::Ts, Column::Duration])?;
                sum(&segment, &top.keys, &rows, &mut found.groups);
            }
            None => {
                segment.load(Column::ALL.iter().map(|(column, ..)| *column))?;
                // The last rows are the latest: a list needs no others.
                let first = rows.len().saturating_sub(self.query.limit.saturating_add(1));
                found.flows.extend(rows[first..].iter().map(|at| columns::record(&segment.row(*at))));
            }
        }
        Ok(())
    }
}

/// Whether a file begins as Parquet does.
pub(super) fn is_columns(file: &mut File) -> io::Result<bool> {
    use std::os::unix::fs::FileExt;
    let mut magic = [0; 4];
    Ok(file.read_at(&mut magic, 0)? == 4 && &magic == b"PAR1")
}

fn row_span(segment: &Segment, at: usize) -> Span {
    let row = segment.row(at);
    let from = row.number(Column::Ts).unwrap_or(0);
    (from, from.saturating_add(row.number(Column::Duration).unwrap_or(0) / 1000))
}

/// Adds rows to their groups. Within a file, texts are compared by their numbers.
fn sum(segment: &Segment, keys: &[Key], rows: &[usize], groups: &mut Groups) {
    let loaded: Vec<_> = keys.iter().map(|key| segment.loaded(key.column())).collect();
    let mut sums: HashMap<[u64; Key::MOST], (usize, Sum), Quick> = HashMap::default();
    for at in rows {
        let mut numbers = [0; Key::MOST];
        for (number, column) in numbers.iter_mut().zip(&loaded) {
            *number = match column {
                Some(Loaded::Text(rows, _)) => rows[*at].into(),
                Some(Loaded::Number(rows)) => rows[*at].map_or(u64::MAX, i64::cast_unsigned),
                None => u64::MAX,
            };
        }
        let row = segment.row(*at);
        let count = |column| row.number(column).map_or(0, i64::cast_unsigned);
        let one = Sum {
            flows: 1,
            bytes_up: count(Column::BytesUp),
            bytes_down: count(Column::BytesDown),
            packets_up: count(Column::PacketsUp),
            packets_down: count(Column::PacketsDown),
            last_ms: row_span(segment, *at).1,
        };
        match sums.get_mut(&numbers) {
            Some((_, sum)) => sum.add(&one),
            None => drop(sums.insert(numbers, (*at, one))),
        }
    }
    for (at, one) in sums.values() {
        let row = segment.row(*at);
        let texts = keys.iter().map(|key| {
            let column = key.column();
            row.text(column)
                .map(str::to_owned)
                .or_else(|| row.number(column).map(|number| number.to_string()))
        });
        groups.add(texts, one);
    }
}

/// The values that a filter can test, of all rows of a file. Each distinct text is read once, not once for each row.
struct Facts<'a> {
    segment: &'a Segment,
    host: Words<'a, &'a str>,
    process: Words<'a, &'a str>,
    user: Words<'a, &'a str>,
    rule: Words<'a, &'a str>,
    chain: Words<'a, &'a str>,
    carrier: Words<'a, &'a str>,
    listener: Words<'a, &'a str>,
    intercept: Words<'a, Intercept>,
    protocol: Words<'a, Protocol>,
    reason: Words<'a, EndReason>,
    destination: Words<'a, Destination>,
    client: Words<'a, IpAddr>,
}

/// What the texts of a column mean. Empty if the column is not loaded.
struct Words<'a, T> {
    rows: &'a [u32],
    meanings: Vec<Option<T>>,
}

impl<'a, T> Words<'a, T> {
    fn new(segment: &'a Segment, column: Column, meaning: impl Fn(&'a str) -> Option<T>) -> Self {
        let Some(Loaded::Text(rows, texts)) = segment.loaded(column) else {
            return Self { rows: &[], meanings: Vec::new() };
        };
        let text = |bytes: &'a ByteArray| std::str::from_utf8(bytes.data()).ok();
        Self { rows, meanings: texts.iter().map(|bytes| meaning(text(bytes)?)).collect() }
    }

    fn of(&self, at: usize) -> Option<&T> {
        // The number of a text that is not there is beyond all of them.
        self.meanings.get(*self.rows.get(at)? as usize)?.as_ref()
    }
}

impl<'a> Facts<'a> {
    fn new(segment: &'a Segment) -> Self {
        let words = |column| Words::new(segment, column, Some);
        Self {
            segment,
            host: words(Column::Host),
            process: words(Column::Process),
            user: words(Column::User),
            rule: words(Column::Rule),
            chain: words(Column::Chain),
            carrier: words(Column::Carrier),
            listener: words(Column::Listener),
            intercept: Words::new(segment, Column::Intercept, columns::intercept),
            protocol: Words::new(segment, Column::Protocol, columns::protocol),
            reason: Words::new(segment, Column::Reason, columns::reason),
            destination: Words::new(segment, Column::OrigDst, |text| text.parse().ok()),
            client: Words::new(segment, Column::ClientIp, |text| {
                columns::client(text, 0).map(|address| address.ip())
            }),
        }
    }

    fn match_row(&self, filter: &Filter, at: usize) -> bool {
        let row = self.segment.row(at);
        let count = |column| row.number(column).map_or(0, i64::cast_unsigned);
        let time = |column| row.number(column).map(|us| Duration::from_micros(us.cast_unsigned()));
        let port = |ip: &IpAddr| SocketAddr::new(*ip, count(Column::ClientPort) as u16);
        filter.matches(&FlowFacts {
            id: count(Column::Flow),
            client: self.client.of(at).map(port),
            dst: self.destination.of(at),
            host: self.host.of(at).copied(),
            process: self.process.of(at).copied(),
            user: self.user.of(at).copied(),
            rule: self.rule.of(at).copied(),
            chain: self.chain.of(at).copied().map(Into::into),
            carrier: self.carrier.of(at).copied(),
            listener: self.listener.of(at).copied(),
            intercept: self.intercept.of(at).copied(),
            protocol: self.protocol.of(at).copied(),
            reason: self.reason.of(at).copied(),
            bytes_up: count(Column::BytesUp),
            bytes_down: count(Column::BytesDown),
            packets_up: count(Column::PacketsUp),
            packets_down: count(Column::PacketsDown),
            age: time(Column::Duration).unwrap_or_default(),
            connect: time(Column::Connect),
            first_byte: time(Column::FirstByte),
        })
    }
}
