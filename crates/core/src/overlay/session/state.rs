//! The state of an end as bytes: another process of the same node continues the session with it.
//!
//! ```text
//! state    = version:u8 mode:u8 flags:u8 phase sender receiver            all numbers are big-endian
//! phase    = kind:u8 reason:u8 left_ms:u32 offset:u64                      what a phase lacks is 0
//! sender   = acked:u64 confirmed:u64 end:u64 sent:u64 limit:u64 flags:u8 mark:u64
//!            pieces:u32 length:u16* bytes                                  from `acked` to `end`
//! receiver = delivered:u64 confirmed:u64 window:u64 limit:u64 flags:u8 fin:u64
//!            length:u32 bytes ahead:u32 (offset:u64 length:u16 bytes)*
//! ```
//!
//! Paths do not move: the state is that of an end whose paths are all gone. The other end notices nothing but a new path. Pieces
//! keep their bounds, because with several paths a receiver tells pieces apart by their offsets.

use super::receive::Receiver;
use super::send::Sender;
use super::{Config, Lanes, Mode, Phase, Session};
use crate::overlay::frame::{DATA_MAX, ResetReason};
use crate::time::Instant;
use std::time::Duration;

/// The version that this program writes and reads.
const VERSION: u8 = 1;

/// Bit of the flags: the other end is told what came on each path.
const TELLS: u8 = 1;
/// Bit of the flags: `Done` came.
const DONE_CAME: u8 = 2;

/// The reasons of a reset, in the order of their numbers.
const REASONS: [ResetReason; 4] =
    [ResetReason::Application, ResetReason::PathLost, ResetReason::Protocol, ResetReason::Ended];

/// Why bytes are not the state of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A later program has written it.
    #[error("the state of a session has format {0}, and this program reads format {VERSION}")]
    Version(u8),
    /// It ends too early, or too late.
    #[error("the state of a session does not have its length")]
    Length,
    /// Two values contradict each other.
    #[error("the state of a session contradicts itself: {0}")]
    Contradiction(&'static str),
}

/// Reads values from the beginning of bytes.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], StateError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(StateError::Length)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(StateError::Length)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self) -> Result<u8, StateError> {
        self.array().map(u8::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, StateError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, StateError> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads the length of a piece: 1 to [`DATA_MAX`] bytes.
    pub(super) fn piece(&mut self) -> Result<usize, StateError> {
        let length = usize::from(u16::from_be_bytes(self.array()?));
        sure((1..=DATA_MAX).contains(&length), "a piece has a length that no frame has")?;
        Ok(length)
    }

    /// Reads a number of things that have at least `each` bytes. So it is never larger than the bytes that are there.
    pub(super) fn count(&mut self, each: usize) -> Result<usize, StateError> {
        let count = usize::try_from(self.u32()?).map_err(|_| StateError::Length)?;
        if count.saturating_mul(each) > self.0.len() { Err(StateError::Length) } else { Ok(count) }
    }
}

/// Fails unless a condition holds.
pub(super) fn sure(holds: bool, otherwise: &'static str) -> Result<(), StateError> {
    if holds { Ok(()) } else { Err(StateError::Contradiction(otherwise)) }
}

/// Returns the bits of the flags that hold.
pub(super) fn bits(flags: &[(bool, u8)]) -> u8 {
    flags.iter().filter(|(holds, _)| *holds).map(|(_, bit)| bit).sum()
}

/// Writes the length of a piece.
pub(super) fn put_piece(out: &mut Vec<u8>, bytes: &[u8]) {
    // No piece is longer than a frame.
    out.extend_from_slice(&u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_be_bytes());
}

/// Writes a number of things.
pub(super) fn put_count(out: &mut Vec<u8>, count: usize) {
    // Windows bound it.
    out.extend_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_be_bytes());
}

pub(super) fn put_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_be_bytes()));
}

impl Phase {
    fn put(self, out: &mut Vec<u8>, now: Instant) -> Option<()> {
        let (kind, reason, until, offset) = match self {
            Self::Open => (0, None, None, 0),
            Self::Resetting(reason, until) => (1, Some(reason), Some(until), 0),
            Self::ResetByPeer { offset, reason, until } => (2, Some(reason), Some(until), offset),
            Self::Lingering(until) => (3, None, Some(until), 0),
            Self::Closing(_) | Self::Closed => return None,
        };
        let place = |reason| REASONS.iter().position(|one| *one == reason).unwrap_or(0);
        let left = until.map_or(Duration::ZERO, |until| until.since(now)).as_millis();
        out.extend([kind, u8::try_from(reason.map_or(0, place)).unwrap_or(0)]);
        out.extend_from_slice(&u32::try_from(left).unwrap_or(u32::MAX).to_be_bytes());
        put_numbers(out, &[offset]);
        Some(())
    }

    fn read(from: &mut Reader<'_>, config: &Config, now: Instant) -> Result<Self, StateError> {
        let (kind, reason) = (from.u8()?, usize::from(from.u8()?));
        let (left, offset) = (Duration::from_millis(from.u32()?.into()), from.u64()?);
        let reason = *REASONS.get(reason).ok_or(StateError::Contradiction("its reason is unknown"))?;
        // A later end than that of the configuration would only keep memory.
        let until = |most: Duration| now + left.min(most);
        match kind {
            0 => Ok(Self::Open),
            1 => Ok(Self::Resetting(reason, until(config.linger))),
            2 => Ok(Self::ResetByPeer { offset, reason, until: until(config.linger) }),
            3 => Ok(Self::Lingering(until(config.path_timeout))),
            _ => Err(StateError::Contradiction("its phase is unknown")),
        }
    }
}

impl Session {
    /// Returns the state as bytes, for a process that continues the session. `None`: the session is over.
    pub fn to_bytes(&self, now: Instant) -> Option<Vec<u8>> {
        let mode = match self.mode {
            Mode::Shortest => 0,
            Mode::Stripe => 1,
            Mode::Duplicate => 2,
        };
        let flags = bits(&[(self.tells, TELLS), (self.done_came, DONE_CAME)]);
        let mut out = vec![VERSION, mode, flags];
        self.phase.put(&mut out, now)?;
        self.send.put(&mut out);
        self.receive.put(&mut out);
        Some(out)
    }

    /// Makes an end without a path from the state of another process. It waits for a path as long as any.
    ///
    /// # Errors
    /// Returns what is wrong with the bytes.
    pub fn from_bytes(bytes: &[u8], config: Config, now: Instant) -> Result<Self, StateError> {
        let mut from = Reader(bytes);
        let version = from.u8()?;
        if version != VERSION {
            return Err(StateError::Version(version));
        }
        let mode = match from.u8()? {
            0 => Mode::Shortest,
            1 => Mode::Stripe,
            2 => Mode::Duplicate,
            _ => return Err(StateError::Contradiction("its mode is unknown")),
        };
        let flags = from.u8()?;
        sure(flags & !(TELLS | DONE_CAME) == 0, "a flag is unknown")?;
        let empty = Self::with_mode(config, mode, now);
        let phase = Phase::read(&mut from, &empty.config, now)?;
        let send = Sender::read_from(&mut from, empty.config.keep_max_bytes)?;
        let receive = Receiver::read_from(&mut from, &empty.config, now)?;
        sure(from.0.is_empty(), "bytes follow")?;
        let is_complete = send.is_complete() && receive.is_complete();
        sure(is_complete || !matches!(phase, Phase::Lingering(_)), "it lingers and is not complete")?;
        let (tells, done_came) = (flags & TELLS != 0, flags & DONE_CAME != 0);
        Ok(Self { phase, send, receive, lanes: Lanes::new(), tells, done_came, ..empty })
    }
}
