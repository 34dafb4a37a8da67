//! Sums of flows by the values of some of their fields.

use super::columns::Cell;
use super::columns::{Column, cell};
use crate::record::FlowRecord;
use crate::record::history::span;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Most groups of an answer before it is cut; the flows of further groups are counted together.
const GROUPS_MAX: usize = 1 << 20;

/// A field that flows are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(Column);

impl Key {
    /// Most fields of a group.
    pub const MOST: usize = 4;

    /// The names of all, and their fields.
    const ALL: [(&'static str, Column); 12] = [
        ("host", Column::Host),
        ("process", Column::Process),
        ("user", Column::User),
        ("rule", Column::Rule),
        ("carrier", Column::Carrier),
        ("listener", Column::Listener),
        ("client", Column::ClientIp),
        ("dst", Column::Dst),
        ("port", Column::Port),
        ("reason", Column::Reason),
        ("protocol", Column::Protocol),
        ("intercept", Column::Intercept),
    ];

    /// Returns the field with this name.
    ///
    /// # Errors
    /// There is none; the message names all.
    pub fn parse(name: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, column)| Self(*column)).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|(name, _)| *name).collect();
            format!("flows have no groups by '{name}': there are {}", names.join(", "))
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, column)| *column == self.0).map_or("", |(name, _)| *name)
    }

    pub(super) const fn column(self) -> Column {
        self.0
    }

    pub(super) fn of(self, record: &FlowRecord<'_>) -> Option<String> {
        match cell(record, self.0) {
            Cell::Null => None,
            Cell::Text(text) => Some(text.into_owned()),
            Cell::Number(number) => Some(number.to_string()),
        }
    }
}

/// What groups are ordered by, the largest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// Payload bytes in both directions.
    #[default]
    Bytes,
    /// Payload bytes from clients to servers.
    Up,
    /// Payload bytes from servers to clients.
    Down,
    /// Number of flows.
    Flows,
    /// Datagrams in both directions.
    Packets,
}

/// Sums of some flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
    /// Number of flows.
    pub flows: u64,
    /// Payload bytes from clients to servers.
    pub bytes_up: u64,
    /// Payload bytes from servers to clients.
    pub bytes_down: u64,
    /// Datagrams from clients to servers.
    pub packets_up: u64,
    /// Datagrams from servers to clients.
    pub packets_down: u64,
    /// The latest end, milliseconds since 1970.
    pub last_ms: i64,
}

impl Sum {
    /// The sums of one flow.
    pub(super) fn of(record: &FlowRecord<'_>) -> Self {
        Self {
            flows: 1,
            bytes_up: record.bytes_up,
            bytes_down: record.bytes_down,
            packets_up: record.packets_up.unwrap_or(0),
            packets_down: record.packets_down.unwrap_or(0),
            last_ms: span(record).1,
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.flows += other.flows;
        self.bytes_up = self.bytes_up.saturating_add(other.bytes_up);
        self.bytes_down = self.bytes_down.saturating_add(other.bytes_down);
        self.packets_up = self.packets_up.saturating_add(other.packets_up);
        self.packets_down = self.packets_down.saturating_add(other.packets_down);
        self.last_ms = self.last_ms.max(other.last_ms);
    }

    const fn rank(&self, by: By) -> u64 {
        match by {
            By::Bytes => self.bytes_up.saturating_add(self.bytes_down),
            By::Up => self.bytes_up,
            By::Down => self.bytes_down,
            By::Flows => self.flows,
            By::Packets => self.packets_up.saturating_add(self.packets_down),
        }
    }
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The values of the fields, in the order in which they were asked for. `null`: not known.
    pub values: Vec<Option<String>>,
    /// Its sums.
    #[serde(flatten)]
    pub sum: Sum,
}

/// Sums by group.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    sums: HashMap<Vec<Option<String>>, Sum>,
    /// Flows beyond [`GROUPS_MAX`].
    rest: Sum,
}

impl Groups {
    pub(super) fn add(&mut self, values: impl Iterator<Item = Option<String>>, one: &Sum) {
        let values: Vec<_> = values.collect();
        if let Some(sum) = self.sums.get_mut(&values) {
            sum.add(one);
        } else if self.sums.len() < GROUPS_MAX {
            self.sums.insert(values, *one);
        } else {
            self.rest.add(one);
        }
    }

    /// Adds other sums.
    pub fn join(&mut self, other: Self) {
        for (values, sum) in other.sums {
            self.add(values.into_iter(), &sum);
        }
        self.rest.add(&other.rest);
    }

    /// Returns the largest groups, at most `limit`, and the sums of all others together.
    pub fn largest(self, by: By, limit: usize) -> (Vec<Group>, Sum) {
        let mut rest = self.rest;
        let mut groups: Vec<_> = self.sums.into_iter().map(|(values, sum)| Group { values, sum }).collect();
        groups.sort_by(|a, b| b.sum.rank(by).cmp(&a.sum.rank(by)).then_with(|| a.values.cmp(&b.values)));
        groups.iter().skip(limit).for_each(|group| rest.add(&group.sum));
        groups.truncate(limit);
        (groups, rest)
    }
}
