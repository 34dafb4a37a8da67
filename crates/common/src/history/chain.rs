//! The format of a history: one line for each entry, chained by hashes.
//!
//! A line is `HASH JSON\n`: 64 lower-case hex digits, one space, and an [`Entry`] as JSON. HASH is the SHA-256 of the previous line's hash
//! (32 bytes; zeros before the first line) followed by the bytes of this line's JSON. A change of any line therefore breaks the chain
//! at that line or at the next one.

use super::digest;
use serde::{Deserialize, Serialize};

/// Length of the hash of a line as text.
const HEX: usize = 64;

/// The process or peer that asked for a change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Caller {
    /// The user id at the other end of the admin socket, from the kernel. `None`: this program itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The process id at the other end, from the kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The name of that process's program, if it could be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// The name in the certificate of the peer for which that process asked, as the process says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
}

/// Why there is a new version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A caller put it in force.
    Apply,
    /// A caller asked for an earlier version.
    Rollback,
    /// The file of the agreement was changed, or another file was named.
    File,
}

/// What an entry says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Act {
    /// A new version.
    Version {
        /// Its number: 1 for the first, and one more for each.
        version: u64,
        /// Why there is a new version.
        cause: Cause,
        /// The version that has the same text, after a rollback.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        same_as: Option<u64>,
        /// The text of the agreement.
        text: String,
    },
    /// A text was refused. Nothing changed.
    Refused {
        /// What is wrong with it.
        error: String,
        /// The SHA-256 of the text, in hex.
        text_sha256: String,
    },
    /// A version could not be put in force: the one before it stays.
    Failed {
        /// Its number.
        version: u64,
        /// The reason.
        error: String,
    },
    /// The last line was incomplete, and was cut off: the machine stopped while it was written.
    Mended {
        /// The length of what was cut off, bytes.
        cut_bytes: u64,
    },
}

/// An entry of a history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its number: that of its line, from 1.
    pub number: u64,
    /// The time in milliseconds since 1970; never less than that of the previous entry.
    pub at_ms: u64,
    /// How far the clock was behind the previous entry, milliseconds. 0 if it was not.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clock_back_ms: u64,
    /// The caller.
    pub by: Caller,
    /// What happened.
    pub act: Act,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The end of a chain: what the next line follows from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// The number of entries.
    pub number: u64,
    /// The number of versions.
    pub version: u64,
    /// The time of the last entry, milliseconds since 1970.
    pub at_ms: u64,
    /// The hash of the last line.
    pub hash: [u8; 32],
}

/// Why a line does not follow from the one before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// The line has no end.
    #[error("the line is cut off")]
    Cut,
    /// The line does not have the form of an entry.
    #[error("it is not an entry: {0}")]
    Form(String),
    /// The hash is another one.
    #[error(
        "its hash does not follow from the line before it: one of the two was changed, or a line is missing"
    )]
    Hash,
    /// The entry has another number.
    #[error("it has the number {0}")]
    Number(u64),
    /// The version has another number, or names one that does not exist.
    #[error("it names version {0}, which does not follow")]
    Version(u64),
    /// The time is before that of the previous entry.
    #[error("its time is {0} ms before that of the entry before it")]
    Clock(u64),
}

/// The first broken link of a chain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct Broken {
    /// The number of the line, from 1.
    pub line: u64,
    /// What is wrong.
    pub why: Why,
}

/// A hash as text.
pub fn hex(hash: &[u8; 32]) -> String {
    hash.iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from_digit(digit.into(), 16).unwrap_or('0'))
        .collect()
}

impl Head {
    /// Returns the line of an entry that follows, and the end of the chain after it. Sets the entry's number, and its time if the clock
    /// went back.
    ///
    /// # Errors
    /// The entry cannot follow: it names a version that does not exist.
    pub fn append(&self, entry: &mut Entry) -> Result<(String, Self), Why> {
        entry.number = self.number + 1;
        entry.clock_back_ms = self.at_ms.saturating_sub(entry.at_ms);
        entry.at_ms = entry.at_ms.max(self.at_ms);
        let json = serde_json::to_string(entry).map_err(|error| Why::Form(error.to_string()))?;
        let hash = digest(&[&self.hash, json.as_bytes()]);
        let head = self.after(entry, hash)?;
        Ok((format!("{} {json}\n", hex(&hash)), head))
    }

    /// The end of the chain after this entry.
    fn after(&self, entry: &Entry, hash: [u8; 32]) -> Result<Self, Why> {
        if entry.number != self.number + 1 {
            return Err(Why::Number(entry.number));
        }
        if entry.at_ms < self.at_ms {
            return Err(Why::Clock(self.at_ms - entry.at_ms));
        }
        let version = match entry.act {
            Act::Version { version, .. } if version != self.version + 1 => return Err(Why::Version(version)),
            Act::Version { same_as: Some(named), .. } if named == 0 || named > self.version => {
                return Err(Why::Version(named));
            }
            Act::Failed { version, .. } if version == 0 || version > self.version => {
                return Err(Why::Version(version));
            }
            Act::Version { version, .. } => version,
            Act::Refused { .. } | Act::Failed { .. } | Act::Mended { .. } => self.version,
        };
        Ok(Self { number: entry.number, version, at_ms: entry.at_ms, hash })
    }

    /// Reads the next line, without its end.
    fn follow(&self, line: &[u8]) -> Result<(Entry, Self), Why> {
        let form = |why: &str| Why::Form(why.to_owned());
        let (given, json) = line.split_at_checked(HEX).ok_or_else(|| form("it is too short"))?;
        let json = json.strip_prefix(b" ").ok_or_else(|| form("it does not begin with a hash"))?;
        let hash = digest(&[&self.hash, json]);
        if given != hex(&hash).as_bytes() {
            return Err(Why::Hash);
        }
        let entry: Entry = serde_json::from_slice(json).map_err(|error| Why::Form(error.to_string()))?;
        let head = self.after(&entry, hash)?;
        Ok((entry, head))
    }
}

/// Reads a history, from its first line to its last or to the first that does not follow. `see` gets each entry with the end of the
/// chain after it. Returns the end of the chain.
///
/// # Errors
/// Names the first broken link.
pub fn read(text: &[u8], mut see: impl FnMut(Entry, &Head)) -> Result<Head, Broken> {
    let mut head = Head::default();
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let broken = |why| Broken { line: head.number + 1, why };
        let line = line.strip_suffix(b"\n").ok_or_else(|| broken(Why::Cut))?;
        let (entry, next) = head.follow(line).map_err(broken)?;
        see(entry, &next);
        head = next;
    }
    Ok(head)
}
