//! The reply at the head of the way back.

use super::field::{self, Fields, Writer, once, unknown};
use super::{DETAIL_MAX, MessageError, Parsed};
use crate::flow::{Destination, EndReason};

const CONNECTED: u8 = 2;
const REFUSED: u8 = 3;

const BOUND: u8 = 1;
const REASON: u8 = 128;
const DETAIL: u8 = 2;

/// How the far side answers a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The path to the destination stands; the server's bytes follow.
    Connected {
        /// The address the destination sees, where the far side knows it.
        bound: Option<Destination>,
    },
    /// There is no path; nothing follows.
    Refused {
        /// The reason in the far side's own record, in the closed list's words; one that is not known here is
        /// `hop_failed`.
        reason: EndReason,
        /// Which rule, step or system call, in words; at most [`DETAIL_MAX`] bytes.
        detail: String,
    },
}

impl Reply {
    /// A refusal with its words, cut to what may be sent.
    pub fn refused(reason: EndReason, detail: &str) -> Self {
        let end = (0..=DETAIL_MAX.min(detail.len())).rev().find(|end| detail.is_char_boundary(*end));
        Self::Refused { reason, detail: detail[..end.unwrap_or(0)].to_owned() }
    }

    /// The bytes of the reply.
    ///
    /// # Errors
    /// `TooLong` if the words of a refusal are longer than [`Reply::refused`] makes them.
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

    /// Reads the reply at the head of `bytes`.
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
                    // It goes into logs and terminals.
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
