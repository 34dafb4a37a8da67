//! The invitation as one line of text: `sidetrack1:` and base64url of a message with a checksum.

use super::ADDRESSES_MAX;
use crate::flow::Destination;
use crate::proxy_protocol::crc32c;
use crate::tunnel::field::{self, Fields, Writer, once, unknown};
use crate::tunnel::{MessageError, Parsed};
use data_encoding::BASE64URL_NOPAD;
use std::fmt;
use std::str::FromStr;

/// The beginning of the text. The number is the version of what follows.
const PREFIX: &str = "sidetrack1:";
/// What all versions begin with.
const ANY_VERSION: &str = "sidetrack";

/// Most characters of an invitation.
const TEXT_MAX: usize = 4096;

/// Bytes of the checksum (CRC32c) at the end. It finds a damaged copy, and does not protect from forgers.
const CHECKSUM: usize = 4;

/// Bytes of the secret: 128 random bits.
pub const SECRET_BYTES: usize = 16;

/// Most bytes of a name.
const NAME_MAX: usize = 253;

const KIND: u8 = 0x49;

const FOR: u8 = 128;
const ADDRESS: u8 = 129;
const PIN: u8 = 130;
const NAME: u8 = 131;
const SECRET: u8 = 132;
const EXPIRES: u8 = 133;

/// What the guest joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The far side of a tunnel.
    Tunnel,
    /// An overlay.
    Overlay,
}

impl Kind {
    const fn byte(self) -> u8 {
        match self {
            Self::Tunnel => 1,
            Self::Overlay => 2,
        }
    }
}

impl fmt::Display for Kind {
    /// The command that uses it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tunnel => "tunnel",
            Self::Overlay => "overlay",
        })
    }
}

/// The secret of an invitation. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub [u8; SECRET_BYTES]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

/// What a guest needs to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invitation {
    /// What it joins.
    pub kind: Kind,
    /// Where the host waits, tried in this order: 1 to [`ADDRESSES_MAX`].
    pub addresses: Vec<Destination>,
    /// SHA-256 of the host's public key (SubjectPublicKeyInfo).
    pub pin: [u8; 32],
    /// The name of the guest: without control characters, 1 to 253 bytes.
    pub name: String,
    /// The secret that works once.
    pub secret: Secret,
    /// When the host stops waiting, in seconds since 1970 by the host's clock.
    pub expires: u64,
}

/// Why a text is not an invitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvitationError {
    /// It begins in another way.
    #[error("this is not an invitation: one begins with \"{PREFIX}\"")]
    NotOne,
    /// It has another version.
    #[error("this invitation was made by a newer version of sidetrack: update this host")]
    Version,
    /// It was damaged on its way, or only a part of it was copied.
    #[error("the invitation is damaged or not complete: copy the whole line")]
    Damaged,
    /// The checksum is right, and the content is not.
    #[error("the invitation is wrong: {0}")]
    Content(#[from] MessageError),
}

impl Invitation {
    /// Returns the text, one line.
    ///
    /// # Errors
    /// `TooLong` if there are too many or too long addresses or names.
    pub fn to_text(&self) -> Result<String, MessageError> {
        let mut writer = Writer::new(KIND);
        writer.put(FOR, &[&[self.kind.byte()]]);
        self.addresses.iter().for_each(|address| writer.put_destination(ADDRESS, address));
        writer.put(PIN, &[&self.pin]);
        writer.put(NAME, &[self.name.as_bytes()]);
        writer.put(SECRET, &[&self.secret.0]);
        writer.put(EXPIRES, &[&self.expires.to_be_bytes()]);
        let mut bytes = writer.finish()?;
        bytes.extend(crc32c::checksum(&bytes).to_be_bytes());
        let text = format!("{PREFIX}{}", BASE64URL_NOPAD.encode(&bytes));
        if text.len() > TEXT_MAX { Err(MessageError::TooLong) } else { Ok(text) }
    }

    fn of(fields: Fields<'_>) -> Result<Self, MessageError> {
        let (mut kind, mut pin, mut name, mut secret, mut expires) = (None, None, None, None, None);
        let mut addresses = Vec::new();
        for item in fields {
            let (field, value) = item?;
            let bad = MessageError::BadField(field);
            match field {
                FOR => {
                    let known = [Kind::Tunnel, Kind::Overlay].into_iter().find(|kind| [kind.byte()] == value);
                    once(&mut kind, field, known.ok_or(bad)?)?;
                }
                ADDRESS => addresses.push(address(field, value)?),
                PIN => once(&mut pin, field, value.try_into().map_err(|_| bad)?)?,
                NAME => once(&mut name, field, guest_name(field, value)?)?,
                SECRET => once(&mut secret, field, Secret(value.try_into().map_err(|_| bad)?))?,
                EXPIRES => {
                    once(&mut expires, field, u64::from_be_bytes(value.try_into().map_err(|_| bad)?))?;
                }
                other => unknown(other)?,
            }
        }
        if addresses.is_empty() || addresses.len() > ADDRESSES_MAX {
            return Err(MessageError::BadField(ADDRESS));
        }
        let missing = MessageError::Missing;
        Ok(Self {
            kind: kind.ok_or(missing(FOR))?,
            addresses,
            pin: pin.ok_or(missing(PIN))?,
            name: name.ok_or(missing(NAME))?,
            secret: secret.ok_or(missing(SECRET))?,
            expires: expires.ok_or(missing(EXPIRES))?,
        })
    }
}

/// Parses an address with a port other than 0.
pub(super) fn address(field: u8, value: &[u8]) -> Result<Destination, MessageError> {
    let address = field::destination(field, value)?;
    if address.port == 0 { Err(MessageError::BadField(field)) } else { Ok(address) }
}

/// Parses a name: it goes into configurations and terminals.
pub(super) fn guest_name(field: u8, value: &[u8]) -> Result<String, MessageError> {
    let name = field::text(field, value)?;
    let is_name = !name.is_empty() && name.len() <= NAME_MAX && !name.contains(char::is_control);
    if is_name { Ok(name.to_owned()) } else { Err(MessageError::BadField(field)) }
}

impl FromStr for Invitation {
    type Err = InvitationError;

    /// Parses the text. Blanks and line ends inside it are skipped: terminals and mail programs add them.
    fn from_str(text: &str) -> Result<Self, InvitationError> {
        let text: String = text.chars().filter(|c| !c.is_ascii_whitespace()).take(TEXT_MAX + 1).collect();
        let Some(encoded) = text.strip_prefix(PREFIX) else {
            let version = text.strip_prefix(ANY_VERSION).and_then(|rest| rest.split_once(':'));
            let is_version = version.is_some_and(|(number, _)| number.parse::<u32>().is_ok());
            return Err(if is_version { InvitationError::Version } else { InvitationError::NotOne });
        };
        let bytes = BASE64URL_NOPAD.decode(encoded.as_bytes()).map_err(|_| InvitationError::Damaged)?;
        let (content, sum) = bytes
            .len()
            .checked_sub(CHECKSUM)
            .and_then(|at| bytes.split_at_checked(at))
            .ok_or(InvitationError::Damaged)?;
        if text.len() > TEXT_MAX || crc32c::checksum(content).to_be_bytes() != sum {
            return Err(InvitationError::Damaged);
        }
        match field::parse(content, &[KIND], |_, fields| Self::of(fields)) {
            Parsed::Message(invitation, consumed) if consumed == content.len() => Ok(invitation),
            Parsed::Malformed(error) => Err(error.into()),
            Parsed::Message(..) | Parsed::Incomplete => Err(InvitationError::Damaged),
        }
    }
}
