//! Pins: SHA-256 of a public key (SubjectPublicKeyInfo, RFC 5280 Sec. 4.1), in the notation of curl and RFC 7469.

use data_encoding::BASE64;
use ring::digest::{SHA256, digest};
use std::fmt;
use std::str::FromStr;

const PREFIX: &str = "sha256//";

/// The hash of a public key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pin([u8; 32]);

/// The text is not a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a pin is written sha256//BASE64 with 44 characters of Base64: `sidetrack tunnel pin FILE` prints it. A name may stand \
     before it: near.example=sha256//BASE64"
)]
pub struct PinError;

impl Pin {
    /// Returns the pin of a key in DER (SubjectPublicKeyInfo).
    pub fn of_key(key: &[u8]) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, key).as_ref());
        Self(hash)
    }

    /// Returns the pin of the first certificate in a PEM text.
    ///
    /// # Errors
    /// There is none, or it cannot be parsed.
    pub fn of_pem(pem: &str) -> Result<Self, String> {
        let certificates = super::certificates(pem)?;
        let first = certificates.first().ok_or("there is no CERTIFICATE")?;
        let parsed = webpki::EndEntityCert::try_from(first).map_err(|error| error.to_string())?;
        Ok(Self::of_key(&parsed.subject_public_key_info()))
    }
}

impl From<[u8; 32]> for Pin {
    fn from(hash: [u8; 32]) -> Self {
        Self(hash)
    }
}

impl From<Pin> for [u8; 32] {
    fn from(pin: Pin) -> Self {
        pin.0
    }
}

/// A trusted peer: its pin, and the name that its certificate must have. Without a name every name is accepted.
///
/// Rules know a near side of a tunnel by the name of its certificate, which its owner chooses. With a name here, the owner of one
/// key cannot take the name of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The hash of its key.
    pub pin: Pin,
    /// Its name, in lower case.
    pub name: Option<String>,
}

impl FromStr for Peer {
    type Err = PinError;

    /// Parses a pin, or `NAME=PIN`.
    fn from_str(text: &str) -> Result<Self, PinError> {
        let at = text.find(PREFIX).ok_or(PinError)?;
        let pin = text.get(at..).ok_or(PinError)?.parse()?;
        let name = match text.get(..at).ok_or(PinError)? {
            "" => None,
            named => {
                let name = named.strip_suffix('=').ok_or(PinError)?;
                rustls::pki_types::DnsName::try_from(name).map_err(|_| PinError)?;
                Some(name.to_ascii_lowercase())
            }
        };
        Ok(Self { pin, name })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            None => self.pin.fmt(f),
            Some(name) => write!(f, "{name}={}", self.pin),
        }
    }
}

impl From<Pin> for Peer {
    fn from(pin: Pin) -> Self {
        Self { pin, name: None }
    }
}

impl FromStr for Pin {
    type Err = PinError;

    fn from_str(text: &str) -> Result<Self, PinError> {
        let base64 = text.strip_prefix(PREFIX).ok_or(PinError)?;
        let hash = BASE64.decode(base64.as_bytes()).map_err(|_| PinError)?;
        hash.try_into().map(Self).map_err(|_| PinError)
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", BASE64.encode(&self.0))
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
