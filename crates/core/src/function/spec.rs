//! What the configuration says of a function: plain values, shared by every flow that passes it.

use super::ContainerSpec;
use crate::flow::Side;
use crate::policy::HostPattern;
use std::fmt;
use std::sync::Arc;

/// One function, by name: what rules list in `chain`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionSpec {
    /// Its name, unique in a configuration.
    pub name: Arc<str>,
    /// What it does.
    pub kind: FunctionKind,
}

/// The functions that flows of a rule pass, in order from the client to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainSpec {
    /// At least one.
    pub functions: Vec<Arc<FunctionSpec>>,
    /// What happens to running flows when the rule's chain changes.
    pub on_change: OnChange,
    /// What happens to flows while one of the containers among them is down.
    pub on_down: OnDown,
}

/// What happens to a flow when a function that it is to pass is down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnDown {
    /// It is refused.
    #[default]
    Deny,
    /// It goes on without the function.
    Skip,
}

/// What happens to running flows when their rule's chain changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnChange {
    /// They keep the chain they have.
    #[default]
    Keep,
    /// They are cut.
    Cut,
}

impl ChainSpec {
    /// The names of the functions, in order.
    pub fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.functions.iter().map(|function| &function.name)
    }
}

/// What a function does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FunctionKind {
    /// Counts flows and bytes.
    Count,
    /// Holds flows to a bandwidth.
    Limit(LimitSpec),
    /// Ends flows by host name and by words in their bytes.
    Filter(FilterSpec),
    /// Replaces words in the bytes.
    Replace(Vec<Replacement>),
    /// Encrypts what comes from the client and decrypts what comes from the server.
    Encrypt(Key),
    /// The other end of `Encrypt`.
    Decrypt(Key),
    /// Whatever the image of a container does.
    Container(Box<ContainerSpec>),
}

impl FunctionKind {
    /// The word of the configuration.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Limit(_) => "limit",
            Self::Filter(_) => "filter",
            Self::Replace(_) => "replace",
            Self::Encrypt(_) => "encrypt",
            Self::Decrypt(_) => "decrypt",
            Self::Container(_) => "container",
        }
    }

    /// Whether flows pass it over sockets, and not inside us.
    pub const fn is_container(&self) -> bool {
        matches!(self, Self::Container(_))
    }
}

/// Which directions of a flow a function is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Directions {
    /// From client to server.
    Up,
    /// From server to client.
    Down,
    /// Both.
    #[default]
    Both,
}

impl Directions {
    /// Whether bytes from this side are meant.
    pub const fn contains(self, from: Side) -> bool {
        matches!((self, from), (Self::Both, _) | (Self::Up, Side::Client) | (Self::Down, Side::Server))
    }
}

/// A bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    /// Bytes a second.
    pub bytes_per_second: u64,
    /// Bytes that may move at once after a pause.
    pub burst_bytes: u64,
    /// Which directions count.
    pub directions: Directions,
    /// Who shares it.
    pub share: Share,
}

impl LimitSpec {
    /// The burst where none is said: the bytes of 6 ms, so that no tenth of a second has more than 1.1 of its own even where some of
    /// them come a few milliseconds late, and at least one segment (TCP over Ethernet).
    pub const fn usual_burst_bytes(bytes_per_second: u64) -> u64 {
        const SEGMENT: u64 = 1460;
        let bytes = bytes_per_second.saturating_mul(6) / 1000;
        if bytes > SEGMENT { bytes } else { SEGMENT }
    }
}

/// Who shares a bandwidth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Share {
    /// Each flow has its own.
    #[default]
    Flow,
    /// All flows of one client address that pass the function have one together.
    Client,
    /// All flows that pass the function have one together.
    Function,
}

/// What a filter refuses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilterSpec {
    /// If not empty: only flows whose host matches one of these pass, and flows of no known host do not.
    pub allow_hosts: Vec<HostPattern>,
    /// Flows whose host matches one of these do not pass.
    pub deny_hosts: Vec<HostPattern>,
    /// Flows that hold one of these end before its last byte has passed.
    pub deny_words: Vec<Vec<u8>>,
    /// Whether words are compared without regard to the case of ASCII letters.
    pub ignore_case: bool,
    /// Where words are looked for.
    pub directions: Directions,
}

/// A word that takes another's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// What is looked for; not empty.
    pub find: Vec<u8>,
    /// What takes its place.
    pub replace: Vec<u8>,
    /// In which directions.
    pub directions: Directions,
}

/// A secret key of 32 bytes that both ends of an encrypting pair share. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

/// Why a text is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key is 64 hexadecimal digits (32 bytes): `openssl rand -hex 32` makes one")]
pub struct KeyError;

impl Key {
    /// From its 64 hexadecimal digits.
    ///
    /// # Errors
    /// It is not that.
    pub fn from_hex(text: &str) -> Result<Self, KeyError> {
        let bytes =
            data_encoding::HEXLOWER_PERMISSIVE.decode(text.trim().as_bytes()).map_err(|_| KeyError)?;
        bytes.try_into().map(Self).map_err(|_| KeyError)
    }

    /// The bytes, for a cipher.
    pub const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_and_never_shown() {
        let text = "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F";
        let key = Key::from_hex(&format!(" {text}\n")).unwrap();
        assert_eq!((key.bytes()[0], key.bytes()[31]), (0, 31));
        assert_eq!(format!("{key:?}"), "Key(***)");
        for bad in ["", "00", &text[1..], &format!("{text}00"), &text.replace('0', "g")] {
            assert_eq!(Key::from_hex(bad), Err(KeyError), "{bad}");
        }
    }
}
