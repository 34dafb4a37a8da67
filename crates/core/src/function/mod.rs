//! Network functions inside this program ("bridging functions" in the EPI framework): the interface of all functions,
//! and the functions that need only bytes and time.
//!
//! A [`Stage`] is one function for one flow. It is between the client and the server, and sees what each of them
//! sends. [`crate::chain::Chain`] leads the bytes through several stages. `docs/functions.md` describes the interface
//! for authors of functions.

mod branch;
mod bucket;
mod container;
mod filter;
pub mod graph;
mod records;
mod replace;
pub mod scale;
mod search;
mod spec;
pub mod supervise;

pub use branch::{ArmSpec, Branch, BranchSpec, Choice, Make};
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
    OnDown, Replacement, Share, WasmSpec,
};

use crate::flow::{EndReason, Side};
use crate::time::Instant;
use std::sync::Arc;

/// What a stage must see of the bytes from one side. The interest may fall while a flow runs, but never rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Interest {
    /// Nothing any more: the stage is bypassed.
    Nothing,
    /// The number of bytes and the time. The kernel may move the bytes.
    Count,
    /// The bytes themselves.
    Bytes,
}

/// The result of offering bytes to a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The first bytes, this many, pass unchanged. More than were offered means all of them.
    Pass(usize),
    /// The stage took this number of bytes, and has appended the bytes that replace them.
    Taken(usize),
    /// The stage takes none of these bytes and is replaced by its [`Stage::successors`].
    Become,
    /// The flow ends.
    Stop(Stop),
}

/// Stages with the names of their functions, in order from the client to the server.
pub type Named = Vec<(Arc<str>, Box<dyn Stage>)>;

/// The stages that replace a stage.
pub struct Successors {
    /// The stages. None at all if the flow goes straight on.
    pub stages: Named,
    /// Bytes of the client that the replaced stage took and held back.
    pub held: Vec<u8>,
}

/// The end of a flow on request of a stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    /// [`EndReason::FunctionRefused`] if the stage refuses the flow, [`EndReason::FunctionFailed`] if it cannot do
    /// its work, [`EndReason::PolicyDenied`] if a stage that asks policy is told to deny,
    /// [`EndReason::SecretRefused`] if the client has sent the placeholder of a secret.
    pub reason: EndReason,
    /// The reason in words for the record. The chain puts the function's name in front, unless the reason is one of the last two.
    pub detail: String,
}

impl Stop {
    /// The stage refuses the flow.
    pub fn refused(detail: impl Into<String>) -> Self {
        Self { reason: EndReason::FunctionRefused, detail: detail.into() }
    }

    /// The stage cannot do its work.
    pub fn failed(detail: impl Into<String>) -> Self {
        Self { reason: EndReason::FunctionFailed, detail: detail.into() }
    }
}

/// One function for one flow. `from` is always the side that the bytes come from.
///
/// - A stage never blocks. If it cannot take bytes now, it returns `Taken(0)`. It is asked again at its deadline, and
///   whenever bytes have moved in either direction.
/// - One call appends at most [`STAGE_OUT_MAX`] bytes. A stage that would append more takes less.
/// - The result does not depend on how the bytes are split into calls.
/// - The bytes come from a peer: they must never cause a panic.
pub trait Stage: Send {
    /// Returns what it must see of the bytes from this side.
    fn interest(&self, from: Side) -> Interest;

    /// Starts the flow. The appended bytes go to the server if `from` is the client, otherwise to the client, before
    /// all other bytes.
    fn start(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) {}

    /// Handles bytes, at least one. The default is for a stage that counts: it passes as many as [`Stage::allowance`]
    /// returns.
    fn handle(&mut self, now: Instant, from: Side, bytes: &[u8], _out: &mut Vec<u8>) -> Step {
        let passed = self.allowance(now, from).min(bytes.len());
        self.count(now, from, passed);
        Step::Pass(passed)
    }

    /// Handles the end of this side, after all its bytes were taken. Appended bytes go before the end. Returns
    /// whether the stage is done; if not, it is asked again as after `Taken(0)`.
    ///
    /// # Errors
    /// Fails if the flow must not end in an orderly way.
    fn finish(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) -> Result<bool, Stop> {
        Ok(true)
    }

    /// Handles the deadline of this side: bytes that were held back may pass.
    fn tick(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) {}

    /// Returns when to call [`Stage::tick`], or when to offer the bytes again that it did not take.
    fn deadline(&self, _from: Side) -> Option<Instant> {
        None
    }

    /// Whether the stage is to be replaced. Asked after [`Stage::tick`] and [`Stage::finish`].
    fn has_chosen(&self) -> bool {
        false
    }

    /// Returns the stages that replace this one, after [`Step::Become`] or [`Stage::has_chosen`].
    ///
    /// # Errors
    /// Fails if one of them ends the flow at once.
    fn successors(&mut self) -> Result<Successors, Stop> {
        Ok(Successors { stages: Vec::new(), held: Vec::new() })
    }

    /// Returns how many bytes from this side may move now. Called for a stage with [`Interest::Count`] before they
    /// move.
    fn allowance(&mut self, _now: Instant, _from: Side) -> usize {
        usize::MAX
    }

    /// Notes that this number of bytes from this side has moved.
    fn count(&mut self, _now: Instant, _from: Side, _bytes: usize) {}
}

/// Most bytes that a stage may add to the offered bytes ([`crate::chain::OFFER_MAX`]) in one call, such as headers
/// and tags.
pub const FRAMING_MAX: usize = 4 * 1024;

/// Most bytes that one call of a stage appends: the largest offer, and the framing.
pub const STAGE_OUT_MAX: usize = crate::chain::OFFER_MAX + FRAMING_MAX;
