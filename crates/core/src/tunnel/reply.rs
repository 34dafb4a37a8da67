//! The reply at the beginning of the opposite direction.

use super::field::{self, Fields, Writer, once, unknown};
use super::{DETAIL_MAX, MessageError, Parsed};
use crate::flow::{Destination, EndReason};

const CONNECTED: u8 = 2;
const REFUSED: u8 = 3;

const BOUND: u8 = 1;
const REASON: u8 = 128;
const DETAIL: u8 = 2;

/// The answer of the far side to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The path to the destination is established. The server's bytes follow.
    Connected {
        /// The address that the destination sees, if the far side knows it.
        bound: Option<Destination>,
    },
    /// There is no path. Nothing follows.
    Refused {
        /// The reason in the far side's record, as a word of the closed list. An unknown word becomes `hop_failed`.
        reason: EndReason,
        /// The rule, step or system call, in words. At most [`DETAIL_MAX`] bytes.
        detail: String,
    },
}

impl Reply {
    /// Makes a refusal, with its text truncated to the allowed length.
    pub fn refused(reason: EndReason, detail: &str) -> Self {
        let end = (0..=DETAIL_MAX.min(detail.len())).rev().find(|end| detail.is_char_boundary(*end));
        Self::Refused { reason, detail: detail[..end.unwrap_or(0)].to_owned() }
    }

    /// Encodes the reply.
    ///
    /// # Errors
    /// `TooLong` if the text of a refusal is longer than [`Reply::refused`] makes it.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        match self {
            Self::Connected { bound } => {
                let mut writer = Writer::new(CONNECTED);
                if let Some(bound) = bound {
                    writer.put_destination(BOUND, bound);
                }
                writer.finish()
            }
            Self::Refused { reason, detail } => {
                if detail.len() > DETAIL_MAX {
                    return Err(MessageError::TooLong);
                }
                let mut writer = Writer::new(REFUSED);
                writer.put(REASON, &[reason.as_str().as_bytes()]);
                writer.put(DETAIL, &[detail.as_bytes()]);
                writer.finish()
            }
        }
    }

    /// Parses the reply at the beginning of `bytes`.
    pub fn parse(bytes: &[u8]) -> Parsed<Self> {
        field::parse(bytes, &[CONNECTED, REFUSED], |kind, fields| match kind {
            CONNECTED => Self::connected_of(fields),
            _ => Self::refused_of(fields),
        })
    }

    fn connected_of(fields: Fields<'_>) -> Result<Self, MessageError> {
        let mut bound = None;
        for item in fields {
            match item? {
                (BOUND, value) => once(&mut bound, BOUND, field::destination(BOUND, value)?)?,
                (other, _) => unknown(other)?,
            }
        }
        Ok(Self::Connected { bound })
    }

    fn refused_of(fields: Fields<'_>) -> Result<Self, MessageError> {
        let (mut reason, mut detail) = (None, None);
        for item in fields {
            match item? {
                (REASON, value) => {
                    let word = field::text(REASON, value)?;
                    let known = EndReason::ALL.into_iter().find(|reason| reason.as_str() == word);
                    once(&mut reason, REASON, known.unwrap_or(EndReason::HopFailed))?;
                }
                (DETAIL, value) if value.len() > DETAIL_MAX => return Err(MessageError::BadField(DETAIL)),
                (DETAIL, value) => {
                    // The text goes into logs and terminals, so remove control characters.
                    let words = field::text(DETAIL, value)?;
                    once(&mut detail, DETAIL, words.replace(|c: char| c.is_control(), " "))?;
                }
                (other, _) => unknown(other)?,
            }
        }
        let reason = reason.ok_or(MessageError::Missing(REASON))?;
        Ok(Self::Refused { reason, detail: detail.unwrap_or_default() })
    }
}
