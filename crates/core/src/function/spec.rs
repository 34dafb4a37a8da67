//! The configuration of functions: plain values, shared by all flows that pass them.

use super::{BranchSpec, ContainerSpec};
use crate::flow::Side;
use crate::policy::HostPattern;
use std::fmt;
use std::sync::Arc;

/// A function with its name. Rules list the names in `chain`.
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
    /// The functions, at least one.
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

/// What happens to running flows when the chain of their rule changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnChange {
    /// They keep their chain.
    #[default]
    Keep,
    /// They are reset.
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
    /// Limits the bandwidth of flows.
    Limit(LimitSpec),
    /// Ends flows by host name and by words in their bytes.
    Filter(FilterSpec),
    /// Replaces words in the bytes.
    Replace(Vec<Replacement>),
    /// Encrypts what comes from the client and decrypts what comes from the server.
    Encrypt(Key),
    /// The other end of `Encrypt`.
    Decrypt(Key),
    /// Does what a module in WebAssembly does.
    Wasm(Box<WasmSpec>),
    /// Leads each flow through one of several chains, which merge behind it.
    Branch(Arc<BranchSpec>),
    /// Does what the image of a container does.
    Container(Box<ContainerSpec>),
}

impl FunctionKind {
    /// Returns the word of the configuration.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Count => "count",
            Self::Limit(_) => "limit",
            Self::Filter(_) => "filter",
            Self::Replace(_) => "replace",
            Self::Encrypt(_) => "encrypt",
            Self::Decrypt(_) => "decrypt",
            Self::Wasm(_) => "wasm",
            Self::Branch(_) => "branch",
            Self::Container(_) => "container",
        }
    }

    /// Whether this holds for the function and, if it is a branch, for all functions of its arms.
    pub fn all(&self, holds: &impl Fn(&Self) -> bool) -> bool {
        let of_arms = |branch: &BranchSpec| {
            branch.arms.iter().flat_map(|arm| &arm.functions).all(|function| function.kind.all(holds))
        };
        match self {
            Self::Branch(branch) => of_arms(branch),
            kind => holds(kind),
        }
    }

    /// Whether flows pass it over sockets, instead of inside this program.
    pub const fn is_container(&self) -> bool {
        matches!(self, Self::Container(_))
    }
}

/// The directions of a flow that a function applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Directions {
    /// From client to server.
    Up,
    /// From server to client.
    Down,
    /// Both directions.
    #[default]
    Both,
}

impl Directions {
    /// Whether it applies to bytes from this side.
    pub const fn contains(self, from: Side) -> bool {
        matches!((self, from), (Self::Both, _) | (Self::Up, Side::Client) | (Self::Down, Side::Server))
    }
}

/// A function in WebAssembly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WasmSpec {
    /// The file of the module, as the configuration names it.
    pub file: Box<str>,
    /// The module: binary, or text (WAT).
    pub module: Arc<[u8]>,
    /// What the module can read as its configuration.
    pub configuration: Box<str>,
    /// Most memory of one flow's instance, bytes.
    pub memory_bytes: u64,
    /// Most instructions of one call.
    pub fuel: u64,
}

impl WasmSpec {
    /// The default of `memory_bytes`.
    pub const MEMORY_BYTES: u64 = 8 << 20;
    /// The default of `fuel`.
    pub const FUEL: u64 = 10_000_000;
}

/// A bandwidth limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    /// Bytes per second.
    pub bytes_per_second: u64,
    /// Bytes that may move at once after a pause.
    pub burst_bytes: u64,
    /// The directions that are counted.
    pub directions: Directions,
    /// The flows that share it.
    pub share: Share,
}

impl LimitSpec {
    /// Returns the default burst: the bytes of 6 ms, but at least one TCP segment over Ethernet. So each tenth of a
    /// second moves at most 1.1 times its share, even if some bytes come a few milliseconds late.
    pub const fn usual_burst_bytes(bytes_per_second: u64) -> u64 {
        const SEGMENT: u64 = 1460;
        let bytes = bytes_per_second.saturating_mul(6) / 1000;
        if bytes > SEGMENT { bytes } else { SEGMENT }
    }
}

/// The flows that share a bandwidth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Share {
    /// Each flow has its own bandwidth.
    #[default]
    Flow,
    /// All flows of one client address through this function share it.
    Client,
    /// All flows through this function share it.
    Function,
}

/// The configuration of a filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilterSpec {
    /// If not empty, only flows whose host matches one of these pass. Flows without a known host do not pass.
    pub allow_hosts: Vec<HostPattern>,
    /// Flows whose host matches one of these do not pass.
    pub deny_hosts: Vec<HostPattern>,
    /// A flow that contains one of these words ends before the last byte of the word has passed.
    pub deny_words: Vec<Vec<u8>>,
    /// Whether words are compared without regard to the case of ASCII letters.
    pub ignore_case: bool,
    /// The directions in which words are searched.
    pub directions: Directions,
}

/// A word and its replacement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// The word to find. Not empty.
    pub find: Vec<u8>,
    /// The replacement.
    pub replace: Vec<u8>,
    /// The directions to replace it in.
    pub directions: Directions,
}

/// A secret key of 32 bytes, which both ends of an encrypting pair share. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

/// Why a text is not a valid key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key is 64 hexadecimal digits (32 bytes): `openssl rand -hex 32` makes one")]
pub struct KeyError;

impl Key {
    /// Makes a key from 64 hexadecimal digits.
    ///
    /// # Errors
    /// Fails if the text is anything else.
    pub fn from_hex(text: &str) -> Result<Self, KeyError> {
        let bytes =
            data_encoding::HEXLOWER_PERMISSIVE.decode(text.trim().as_bytes()).map_err(|_| KeyError)?;
        bytes.try_into().map(Self).map_err(|_| KeyError)
    }

    /// Returns the bytes, for a cipher.
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
