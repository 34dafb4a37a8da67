//! The table of an overlay as one line of text, signed by one of its nodes: how the other nodes learn of a new one.

use super::message::{Message, OverlayOffer};
use crate::tunnel::{BODY_MAX, MessageError, Parsed};
use data_encoding::BASE64URL_NOPAD;
use std::str::FromStr;

/// The beginning of the text. The number is the version of what follows.
const PREFIX: &str = "sidetrack-nodes1:";

/// What a signature is for, so that it proves nothing else.
const PURPOSE: &[u8] = b"sidetrack nodes 1\0";

/// Bytes of an Ed25519 signature.
const SIGNATURE: usize = 64;

/// Most characters of a table.
const TEXT_MAX: usize = (BODY_MAX + 128) * 4 / 3;

/// A signed table. `content.host` is the node that has signed it; `content.addresses` is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The nodes and links.
    pub content: OverlayOffer,
    /// The bytes that the signature is for.
    pub signed: Vec<u8>,
    /// The signature (Ed25519).
    pub signature: [u8; SIGNATURE],
}

/// Why a text is not a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// It begins in another way.
    #[error("this is not a table of nodes: one begins with \"{PREFIX}\"")]
    NotOne,
    /// It was damaged on its way, or only a part of it was copied.
    #[error("the table is damaged or not complete: copy the whole line")]
    Damaged,
    /// Its content is wrong.
    #[error("the table is wrong: {0}")]
    Content(#[from] MessageError),
}

/// Returns the text of a table that `sign` signs.
///
/// # Errors
/// `TooLong` if there are too many nodes or links.
pub fn signed(
    content: &OverlayOffer,
    sign: impl FnOnce(&[u8]) -> [u8; SIGNATURE],
) -> Result<String, MessageError> {
    let bytes = Message::Overlay(content.clone()).encode()?;
    let signature = sign(&[PURPOSE, &bytes].concat());
    Ok(format!("{PREFIX}{}", BASE64URL_NOPAD.encode(&[&bytes[..], &signature].concat())))
}

impl FromStr for Table {
    type Err = TableError;

    /// Parses the text. The signature is not checked: the caller has the keys. Blanks and line ends are skipped.
    fn from_str(text: &str) -> Result<Self, TableError> {
        let text: String = text.chars().filter(|c| !c.is_ascii_whitespace()).take(TEXT_MAX + 1).collect();
        let encoded = text.strip_prefix(PREFIX).ok_or(TableError::NotOne)?;
        let bytes = BASE64URL_NOPAD.decode(encoded.as_bytes()).map_err(|_| TableError::Damaged)?;
        let (content, signature) = bytes.split_last_chunk().ok_or(TableError::Damaged)?;
        match Message::parse(content) {
            Parsed::Message(Message::Overlay(offer), consumed) if consumed == content.len() => {
                Ok(Self { content: offer, signed: [PURPOSE, content].concat(), signature: *signature })
            }
            Parsed::Malformed(error) => Err(error.into()),
            Parsed::Message(..) | Parsed::Incomplete => Err(TableError::Damaged),
        }
    }
}
