//! Network functions inside us ("bridging functions" in the EPI framework): the contract every one of them keeps, and those that
//! need nothing but bytes and time.
//!
//! A [`Stage`] is one function at work on one flow. It stands between the client and the server and sees what each of
//! them sends; [`crate::chain::Chain`] leads the bytes through several. The contract in words, for people who write one,
//! is `docs/functions.md`.

mod bucket;
mod container;
mod filter;
mod records;
mod replace;
mod search;
mod spec;
pub mod supervise;

pub use bucket::{ByteBucket, Throttle, Tokens};
pub use container::{
    ContainerSpec, ContainerUser, ContainerUserError, Probe, Resources, Spoken, Ticket, WayBack,
    metadata_from, metadata_to,
};
pub use filter::Filter;
pub use records::{Cipher, End, Header, RECORD_MAX, REKEY_RECORDS, Records, Suite};
pub use replace::{Replace, Replacements};
pub use search::{Words, WordsError};
pub use spec::{
    ChainSpec, Directions, FilterSpec, FunctionKind, FunctionSpec, Key, KeyError, LimitSpec, OnChange,
    OnDown, Replacement, Share,
};

use crate::flow::{EndReason, Side};
use crate::time::Instant;

/// What a stage has to see of the bytes from one side. It may fall while a flow runs, and never rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Interest {
    /// Nothing any more: the stage is out of the way.
    Nothing,
    /// How many there are, and when: the kernel may move them.
    Count,
    /// The bytes themselves.
    Bytes,
}

/// What became of bytes that a stage was offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The first so many go on as they are; more than were offered counts as all of them.
    Pass(usize),
    /// So many were taken; what goes on in their place was appended.
    Taken(usize),
    /// The flow ends.
    Stop(Stop),
}

/// The end of a flow, at a stage's wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    /// [`EndReason::FunctionRefused`] if the stage says no, [`EndReason::FunctionFailed`] if it cannot do its work.
    pub reason: EndReason,
    /// Why, in words for the record; the chain puts the function's name before them.
    pub detail: String,
}

impl Stop {
    /// The stage says no.
    pub fn refused(detail: impl Into<String>) -> Self {
        Self { reason: EndReason::FunctionRefused, detail: detail.into() }
    }

    /// The stage cannot do its work.
    pub fn failed(detail: impl Into<String>) -> Self {
        Self { reason: EndReason::FunctionFailed, detail: detail.into() }
    }
}

/// One function at work on one flow. `from` is always the side that the bytes come from.
///
/// - A stage never waits: if it can take nothing now it returns `Taken(0)`, and is asked again at its deadline and
///   whenever bytes have moved in either direction.
/// - One call appends at most [`STAGE_OUT_MAX`] bytes; a stage that would append more takes less.
/// - The result does not depend on how the bytes are cut into calls.
/// - Bytes are a peer's: nothing they hold may make it panic.
pub trait Stage: Send {
    /// What it has to see of the bytes from this side.
    fn interest(&self, from: Side) -> Interest;

    /// The flow begins; what is appended goes towards the server (`from` is the client) or the client, before any byte.
    fn start(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) {}

    /// Bytes came, at least one. The default is that of a stage that counts: as many pass as
    /// [`Stage::allowance`] says.
    fn handle(&mut self, now: Instant, from: Side, bytes: &[u8], _out: &mut Vec<u8>) -> Step {
        let passed = self.allowance(now, from).min(bytes.len());
        self.count(now, from, passed);
        Step::Pass(passed)
    }

    /// This side has sent its last byte, and all were taken. What is appended goes before the end. Gives whether it is
    /// done; if not, it is asked again as after `Taken(0)`.
    ///
    /// # Errors
    /// The flow must not end in order.
    fn finish(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) -> Result<bool, Stop> {
        Ok(true)
    }

    /// The deadline of this side has passed: what was held back may go.
    fn tick(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) {}

    /// When it wants [`Stage::tick`], or to be offered again what it did not take.
    fn deadline(&self, _from: Side) -> Option<Instant> {
        None
    }

    /// How many bytes from this side may move now. Asked of a stage with [`Interest::Count`] before they do.
    fn allowance(&mut self, _now: Instant, _from: Side) -> usize {
        usize::MAX
    }

    /// So many bytes from this side have moved.
    fn count(&mut self, _now: Instant, _from: Side, _bytes: usize) {}
}

/// Most bytes that a stage may put around what it was offered ([`crate::chain::OFFER_MAX`]) in one call: heads, tags.
pub const FRAMING_MAX: usize = 4 * 1024;

/// Most bytes that one call of a stage appends: everything that it can be offered at once, and framing.
pub const STAGE_OUT_MAX: usize = crate::chain::OFFER_MAX + FRAMING_MAX;
