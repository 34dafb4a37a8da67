//! Messages about entries: add and remove them, their ends and their counters.

use super::Version;
use super::pattern::{Pattern, Unsayable};
use super::wire::{Malformed, Reader};

/// The entry has no buffered packet (`OFP_NO_BUFFER`).
const NO_BUFFER: u32 = u32::MAX;
/// Any port or group, when entries are removed.
const ANY_1_0: u16 = 0xffff;
const ANY_1_3: u32 = u32::MAX;
/// Requests a message when the entry ends.
const SEND_FLOW_REMOVED: u16 = 1;
/// The first table of the switch. 1.0 has only this one.
const TABLE: u8 = 0;
/// `OFPTT_ALL`: all tables, when entries are removed.
const TABLE_ALL: u8 = 0xff;
/// The action that sends a packet out of a port.
const OUTPUT: u16 = 0;
/// `OFPIT_APPLY_ACTIONS`.
const APPLY_ACTIONS: u16 = 4;

/// The command of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Add an entry. One with the same pattern and priority is replaced, its counters are lost, and no message is
    /// sent.
    Add,
    /// Remove every entry that the pattern covers.
    Delete,
    /// Remove the entry with exactly this pattern and priority.
    DeleteStrict,
}

impl Command {
    const fn number(self) -> u8 {
        match self {
            Self::Add => 0,
            Self::Delete => 3,
            Self::DeleteStrict => 4,
        }
    }
}

/// A change of the flow table (`OFPT_FLOW_MOD`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowMod {
    /// The command.
    pub command: Command,
    /// The packets that it applies to.
    pub pattern: Pattern,
    /// The cookie of the entry.
    pub cookie: u64,
    /// Applies only to entries whose cookie equals `cookie` in these bits. 0: all entries. Ignored by 1.0, and when
    /// adding.
    pub cookie_mask: u64,
    /// A higher priority wins.
    pub priority: u16,
    /// The entry ends after this number of seconds without a packet. 0: never.
    pub idle_timeout_s: u16,
    /// The port that packets are sent out of. `None`: they are dropped.
    pub output: Option<u32>,
    /// The table. `None`: the first one when adding, all when removing. 1.0 has one table only.
    pub table: Option<u8>,
}

/// Why an entry was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// No packet arrived for its idle time.
    Idle,
    /// Its hard time-out has passed.
    Hard,
    /// It was deleted.
    Deleted,
    /// Its group was deleted.
    Group,
    /// It made room for another entry (1.4; Open vSwitch also sends it under 1.3).
    Evicted,
    /// An unknown number.
    Other(u8),
}

impl Removal {
    const fn of_number(number: u8) -> Self {
        match number {
            0 => Self::Idle,
            1 => Self::Hard,
            2 => Self::Deleted,
            3 => Self::Group,
            5 => Self::Evicted,
            other => Self::Other(other),
        }
    }
}

/// The end of an entry (`OFPT_FLOW_REMOVED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRemoved {
    /// The cookie of the entry.
    pub cookie: u64,
    /// Its priority.
    pub priority: u16,
    /// Why it was removed.
    pub why: Removal,
    /// Number of packets in total.
    pub packets: u64,
    /// Bytes of frames in total.
    pub bytes: u64,
    /// The packets that it matched.
    pub pattern: Pattern,
}

/// An entry in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowCounts {
    /// The cookie of the entry.
    pub cookie: u64,
    /// Its priority.
    pub priority: u16,
    /// Packets so far. May be up to half a second old.
    pub packets: u64,
    /// Bytes of frames so far.
    pub bytes: u64,
    /// The packets that it matches.
    pub pattern: Pattern,
}

impl FlowMod {
    pub(super) fn write(&self, version: Version) -> Result<Vec<u8>, Unsayable> {
        match version {
            Version::V1_0 => self.write_1_0(),
            Version::V1_3 => self.write_1_3(),
        }
    }

    fn flags(&self) -> u16 {
        if self.command == Command::Add { SEND_FLOW_REMOVED } else { 0 }
    }

    fn write_1_0(&self) -> Result<Vec<u8>, Unsayable> {
        let mut bytes = self.pattern.to_1_0()?;
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(u16::from(self.command.number()).to_be_bytes());
        bytes.extend(self.idle_timeout_s.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(self.priority.to_be_bytes());
        bytes.extend(NO_BUFFER.to_be_bytes());
        bytes.extend(ANY_1_0.to_be_bytes());
        bytes.extend(self.flags().to_be_bytes());
        if let (Command::Add, Some(port)) = (self.command, self.output) {
            let port = u16::try_from(port).map_err(|_| Unsayable::port())?;
            bytes.extend(OUTPUT.to_be_bytes());
            bytes.extend(8u16.to_be_bytes());
            bytes.extend(port.to_be_bytes());
            bytes.extend([0, 0]);
        }
        Ok(bytes)
    }

    fn write_1_3(&self) -> Result<Vec<u8>, Unsayable> {
        let mut bytes = self.cookie.to_be_bytes().to_vec();
        let adding = self.command == Command::Add;
        bytes.extend(if adding { 0 } else { self.cookie_mask }.to_be_bytes());
        let table = self.table.unwrap_or(if adding { TABLE } else { TABLE_ALL });
        bytes.extend([table, self.command.number()]);
        bytes.extend(self.idle_timeout_s.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(self.priority.to_be_bytes());
        bytes.extend(NO_BUFFER.to_be_bytes());
        bytes.extend(ANY_1_3.to_be_bytes());
        bytes.extend(ANY_1_3.to_be_bytes());
        bytes.extend(self.flags().to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(self.pattern.to_1_3());
        if let (true, Some(port)) = (adding, self.output) {
            bytes.extend(APPLY_ACTIONS.to_be_bytes());
            bytes.extend(24u16.to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(OUTPUT.to_be_bytes());
            bytes.extend(16u16.to_be_bytes());
            bytes.extend(port.to_be_bytes());
            bytes.extend([0; 8]);
        }
        Ok(bytes)
    }
}

impl FlowRemoved {
    pub(super) fn read(version: Version, reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let early = match version {
            Version::V1_0 => Some(Pattern::read(version, reader)?),
            Version::V1_3 => None,
        };
        let cookie = reader.u64()?;
        let priority = reader.u16()?;
        let why = Removal::of_number(reader.u8()?);
        // 1.0: pad, duration 4 + 4, idle 2, pad 2. 1.3: table, duration 4 + 4, idle 2, hard 2.
        reader.skip(1 + 8 + 2 + 2)?;
        let (packets, bytes) = (reader.u64()?, reader.u64()?);
        let pattern = match early {
            Some(pattern) => pattern,
            None => Pattern::read(version, reader)?,
        };
        Ok(Self { cookie, priority, why, packets, bytes, pattern })
    }
}

impl FlowCounts {
    /// Decodes the entries of one part of a list.
    pub(super) fn read_all(version: Version, reader: &mut Reader<'_>) -> Result<Vec<Self>, Malformed> {
        let mut entries = Vec::new();
        while !reader.is_empty() {
            let length = usize::from(reader.u16()?);
            let rest = length.checked_sub(2).ok_or(reader.inside())?;
            let mut entry = reader.part(rest)?;
            entries.push(Self::read(version, &mut entry)?);
        }
        Ok(entries)
    }

    fn read(version: Version, entry: &mut Reader<'_>) -> Result<Self, Malformed> {
        entry.skip(2)?; // table, pad
        let early = match version {
            Version::V1_0 => Some(Pattern::read(version, entry)?),
            Version::V1_3 => None,
        };
        entry.skip(8)?; // duration
        let priority = entry.u16()?;
        // idle, hard; 1.0: pad 6; 1.3: flags, pad 4
        entry.skip(4 + 6)?;
        let (cookie, packets, bytes) = (entry.u64()?, entry.u64()?, entry.u64()?);
        let pattern = match early {
            Some(pattern) => pattern,
            None => Pattern::read(version, entry)?,
        };
        Ok(Self { cookie, priority, packets, bytes, pattern })
    }
}
