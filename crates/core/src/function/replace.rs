//! Replaces words in the bytes of a flow.

use super::search::{Found, Words};
use super::{Directions, Interest, Replacement, STAGE_OUT_MAX, Stage, Step, Stop};
use crate::flow::Side;
use crate::time::Instant;
use std::sync::Arc;
use std::time::Duration;

/// How long bytes are held back that may be the beginning of a word. Without a limit, a peer that waits for an answer
/// to these bytes would wait forever.
const HOLD: Duration = Duration::from_millis(50);

/// The words to find and their replacements, compiled once for all flows.
#[derive(Clone, Debug)]
pub struct Replacements {
    up: Arc<Table>,
    down: Arc<Table>,
}

#[derive(Debug)]
struct Table {
    words: Words,
    replace: Vec<Vec<u8>>,
}

impl Table {
    fn new(all: &[Replacement], from: Side) -> Result<Self, super::WordsError> {
        let ours = || all.iter().filter(|one| Directions::contains(one.directions, from));
        let find: Vec<_> = ours().map(|one| one.find.clone()).collect();
        Ok(Self {
            words: Words::new(&find, false)?,
            replace: ours().map(|one| one.replace.clone()).collect(),
        })
    }
}

impl Table {
    /// Returns the next word that begins before `until`. From there on, a word may come that has precedence.
    fn next(&self, bytes: &[u8], at: usize, until: usize) -> Option<Found> {
        self.words.find(bytes, at).filter(|found| found.start < until)
    }
}

impl Replacements {
    /// Compiles the replacements. If several words match at one position, the first in the list is taken.
    ///
    /// # Errors
    /// Fails if a word cannot be searched for.
    pub fn new(all: &[Replacement]) -> Result<Self, super::WordsError> {
        let (up, down) = (Table::new(all, Side::Client)?, Table::new(all, Side::Server)?);
        Ok(Self { up: Arc::new(up), down: Arc::new(down) })
    }
}

/// Replaces words in one flow, also across the borders of reads.
#[derive(Debug)]
pub struct Replace {
    table: Replacements,
    /// By side: the possible beginning of a word, and until when it is held.
    held: [(Vec<u8>, Option<Instant>); 2],
}

impl Replace {
    /// Makes the stage for a flow.
    pub const fn new(table: Replacements) -> Self {
        Self { table, held: [(Vec::new(), None), (Vec::new(), None)] }
    }

    fn table(&self, from: Side) -> &Arc<Table> {
        match from {
            Side::Client => &self.table.up,
            Side::Server => &self.table.down,
        }
    }

    /// Appends `bytes` with their words replaced. Stops at the possible beginning of a word, or when there is no more
    /// room. Returns how far it came.
    fn run(table: &Table, bytes: &[u8], is_last: bool, out: &mut Vec<u8>) -> usize {
        let most = out.len() + STAGE_OUT_MAX;
        let mut at = 0;
        loop {
            let until = if is_last { bytes.len() } else { table.words.unfinished(bytes, at) };
            let Some(Found { word, start, end }) = table.next(bytes, at, until) else {
                let end = until.min(at + most.saturating_sub(out.len()));
                out.extend_from_slice(&bytes[at..end]);
                return end;
            };
            let new = &table.replace[word];
            // The first word always has room, so that there is progress.
            if at > 0 && out.len() + (start - at) + new.len() > most {
                return at;
            }
            out.extend_from_slice(&bytes[at..start]);
            out.extend_from_slice(new);
            at = end;
        }
    }

    /// Releases bytes that were held back for longer words.
    fn release(&mut self, from: Side, out: &mut Vec<u8>) {
        let table = self.table(from).clone();
        let (held, until) = &mut self.held[from as usize];
        *until = None;
        let held = std::mem::take(held);
        let mut done = 0;
        while done < held.len() {
            done += Self::run(&table, &held[done..], true, out);
        }
    }
}

impl Stage for Replace {
    fn interest(&self, from: Side) -> Interest {
        if self.table(from).words.is_empty() { Interest::Nothing } else { Interest::Bytes }
    }

    fn handle(&mut self, now: Instant, from: Side, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        let table = self.table(from).clone();
        let (held, until) = &mut self.held[from as usize];
        if held.is_empty() {
            let end = table.words.unfinished(bytes, 0);
            if table.next(bytes, 0, end).is_some() {
                return Step::Taken(Self::run(&table, bytes, false, out));
            } else if end > 0 {
                return Step::Pass(end);
            }
        }
        // Take only as many as can complete the held bytes. The rest then passes without a copy.
        let more = bytes.len().min(table.words.longest());
        held.extend_from_slice(&bytes[..more]);
        let done = Self::run(&table, held, false, out);
        held.drain(..done);
        *until = until.filter(|_| done == 0).or_else(|| (!held.is_empty()).then(|| now + HOLD));
        Step::Taken(more)
    }

    fn finish(&mut self, _now: Instant, from: Side, out: &mut Vec<u8>) -> Result<bool, Stop> {
        self.release(from, out);
        Ok(true)
    }

    fn tick(&mut self, _now: Instant, from: Side, out: &mut Vec<u8>) {
        self.release(from, out);
    }

    fn deadline(&self, from: Side) -> Option<Instant> {
        self.held[from as usize].1
    }
}
