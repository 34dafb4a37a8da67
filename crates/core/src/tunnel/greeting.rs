//! The greeting: the far side has accepted the near side. A connection counts as established only after it. In TLS
//! 1.3 a client finishes its handshake before it knows whether the server accepts its certificate.

use super::field::{self, Writer, unknown};
use super::{MessageError, Parsed};

const KIND: u8 = 0x47;

/// The greeting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Greeting;

impl Greeting {
    /// Encodes the greeting.
    ///
    /// # Errors
    /// Never fails now. Future fields may be too long.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        Writer::new(KIND).finish()
    }

    /// Parses the greeting at the beginning of `bytes`.
    pub fn parse(bytes: &[u8]) -> Parsed<Self> {
        field::parse(bytes, &[KIND], |_, fields| {
            for field in fields {
                unknown(field?.0)?;
            }
            Ok(Self)
        })
    }
}
