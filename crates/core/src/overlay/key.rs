//! The keys of nodes in their text form, as in key files and configurations.

use super::NodeId;
use data_encoding::BASE64;
use std::fmt;
use std::str::FromStr;

/// A node's public key (Ed25519, RFC 8032). Other nodes identify the node by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; 32]);

/// A node's secret key: the seed of RFC 8032 Sec. 5.1.5. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretKey(pub [u8; 32]);

/// Why a text is not a valid key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text does not begin like a public key.
    #[error("a public key begins with \"ed25519:\"")]
    NotPublic,
    /// The text does not begin like a secret key.
    #[error("a secret key begins with \"ed25519-secret:\"")]
    NotSecret,
    /// The text after the colon is not Base64 of 32 bytes.
    #[error("after the colon a key has 44 characters of Base64 (32 bytes)")]
    BadBase64,
}

const PUBLIC: &str = "ed25519:";
const SECRET: &str = "ed25519-secret:";

fn key_bytes(text: &str) -> Result<[u8; 32], KeyError> {
    let bytes = BASE64.decode(text.as_bytes()).map_err(|_| KeyError::BadBase64)?;
    bytes.try_into().map_err(|_| KeyError::BadBase64)
}

impl PublicKey {
    /// Returns the name of the node on the wire.
    pub fn node_id(&self) -> NodeId {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        NodeId(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC}{}", BASE64.encode(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        key_bytes(text.strip_prefix(PUBLIC).ok_or(KeyError::NotPublic)?).map(Self)
    }
}

impl SecretKey {
    /// Returns the text for a key file. Other users must not be able to read this file.
    pub fn to_text(&self) -> String {
        format!("{SECRET}{}\n", BASE64.encode(&self.0))
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(***)")
    }
}

impl FromStr for SecretKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        key_bytes(text.trim().strip_prefix(SECRET).ok_or(KeyError::NotSecret)?).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_read_as_they_are_written_and_secrets_stay_secret() {
        let public = PublicKey([1; 32]);
        assert_eq!(public.to_string().parse(), Ok(public));
        assert_eq!(public.node_id(), NodeId(0x0101_0101_0101_0101));
        let secret = SecretKey([2; 32]);
        assert_eq!(secret.to_text().parse(), Ok(secret.clone()));
        assert!(!format!("{secret:?}").contains("AgIC"));
        assert_eq!(secret.to_text().parse::<PublicKey>(), Err(KeyError::NotPublic));
        assert_eq!(public.to_string().parse::<SecretKey>(), Err(KeyError::NotSecret));
        assert_eq!("ed25519:AAAA".parse::<PublicKey>(), Err(KeyError::BadBase64));
    }
}
