//! The flows that the screen shows: those that run, by their number, and the latest that ended. Both are bounded.

use super::events::{Changes, Event, FlowRow, Tick};
use crate::record::Timestamp;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Most running flows that are kept.
pub const LIVE_MAX: usize = 100_000;
/// Most ended flows that are kept.
pub const ENDED_MAX: usize = 500;

/// All rows.
#[derive(Debug, Default)]
pub struct Rows {
    live: BTreeMap<u64, Arc<FlowRow>>,
    ended: VecDeque<Arc<FlowRow>>,
    tick: Tick,
    /// Where in a line of `moved` each number stands.
    places: Places,
    /// Flows that found no room.
    left_out: u64,
}

/// The places of the numbers in a line of `moved`.
#[derive(Clone, Copy, Debug, Default)]
struct Places {
    flow: Option<usize>,
    bytes_up: Option<usize>,
    bytes_down: Option<usize>,
    up_rate: Option<usize>,
    down_rate: Option<usize>,
    client_rtt: Option<usize>,
    server_rtt: Option<usize>,
}

impl Places {
    fn of(columns: &[String]) -> Self {
        let place = |name: &str| columns.iter().position(|column| column == name);
        Self {
            flow: place("flow"),
            bytes_up: place("bytes_up"),
            bytes_down: place("bytes_down"),
            up_rate: place("up_bytes_per_second"),
            down_rate: place("down_bytes_per_second"),
            client_rtt: place("client_rtt_us"),
            server_rtt: place("server_rtt_us"),
        }
    }
}

impl Rows {
    /// Takes what the node tells. Returns true at the end of an update.
    pub fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Hello(hello) => {
                *self = Self { places: Places::of(&hello.moved_columns), ..Self::default() };
                false
            }
            Event::Reset => {
                self.live.clear();
                self.left_out = 0;
                false
            }
            Event::Flows(changes) => {
                self.change(changes);
                false
            }
            Event::Tick(tick) => {
                self.end(tick);
                true
            }
            Event::Other => false,
        }
    }

    fn change(&mut self, changes: Changes) {
        for row in changes.rows {
            if self.live.len() < LIVE_MAX || self.live.contains_key(&row.flow) {
                self.live.insert(row.flow, Arc::new(row));
            } else {
                self.left_out += 1;
            }
        }
        for numbers in changes.moved {
            let number = |place: Option<usize>| place.and_then(|place| numbers.get(place)).copied();
            let Some(row) = number(self.places.flow).and_then(|id| self.live.get_mut(&id)) else { continue };
            // A frozen screen may still have the row as it was.
            let row = Arc::make_mut(row);
            for (place, field) in [
                (self.places.bytes_up, &mut row.bytes_up),
                (self.places.bytes_down, &mut row.bytes_down),
                (self.places.up_rate, &mut row.up_bytes_per_second),
                (self.places.down_rate, &mut row.down_bytes_per_second),
                (self.places.client_rtt, &mut row.client_rtt_us),
                (self.places.server_rtt, &mut row.server_rtt_us),
            ] {
                *field = number(place).unwrap_or(*field);
            }
        }
        for id in changes.left {
            self.live.remove(&id);
        }
    }

    fn end(&mut self, mut tick: Tick) {
        for id in std::mem::take(&mut tick.gone) {
            self.live.remove(&id);
        }
        for row in std::mem::take(&mut tick.ended) {
            self.live.remove(&row.flow);
            self.ended.push_front(Arc::new(row));
        }
        self.ended.truncate(ENDED_MAX);
        if self.live.len() < LIVE_MAX {
            self.left_out = 0;
        }
        self.tick = tick;
    }

    /// The flows that run, by number, and then those that ended, the latest first.
    pub fn all(&self, with_ended: bool) -> impl Iterator<Item = &Arc<FlowRow>> {
        self.live.values().chain(self.ended.iter().filter(move |_| with_ended))
    }

    /// The row of a flow.
    pub fn get(&self, id: u64) -> Option<&Arc<FlowRow>> {
        self.live.get(&id).or_else(|| self.ended.iter().find(|row| row.flow == id))
    }

    /// The sums of the latest update.
    pub const fn tick(&self) -> &Tick {
        &self.tick
    }

    /// The time of the node at the latest update.
    pub const fn now(&self) -> Option<Timestamp> {
        self.tick.now
    }

    /// Flows that found no room.
    pub const fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Number of rows, running and ended.
    pub fn len(&self) -> (usize, usize) {
        (self.live.len(), self.ended.len())
    }
}
