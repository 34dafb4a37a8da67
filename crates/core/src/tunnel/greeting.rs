//! The greeting: the far side has let us in. Only with it a connection counts as standing, since in TLS 1.3 a client
//! has finished its handshake before it knows what the server thinks of its certificate.

use super::field::{self, Writer, unknown};
use super::{MessageError, Parsed};

const KIND: u8 = 0x47;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Greeting;

impl Greeting {
    /// The bytes of a greeting.
    ///
    /// # Errors
    /// None as it is now; fields to come may be too long.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        Writer::new(KIND).finish()
    }

    /// Reads the greeting at the head of `bytes`.
    pub fn parse(bytes: &[u8]) -> Parsed<Self> {
        field::parse(bytes, &[KIND], |_, fields| {
            for field in fields {
                unknown(field?.0)?;
            }
            Ok(Self)
        })
    }
}
