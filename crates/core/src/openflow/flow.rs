//! Entries: adding and removing them, what is told of their ends and counts.

use super::Version;
use super::pattern::{Pattern, Unsayable};
use super::wire::{Malformed, Reader};

/// No packet is held for the entry (`OFP_NO_BUFFER`).
const NO_BUFFER: u32 = u32::MAX;
/// Any port or group, as a filter of what is removed.
const ANY_1_0: u16 = 0xffff;
const ANY_1_3: u32 = u32::MAX;
/// Tell us when it ends.
const SEND_FLOW_REMOVED: u16 = 1;
/// The switch's first table, where 1.0 has its only one.
const TABLE: u8 = 0;
/// `OFPTT_ALL`: every table, where entries are removed.
const TABLE_ALL: u8 = 0xff;
/// Send out by a port.
const OUTPUT: u16 = 0;
/// `OFPIT_APPLY_ACTIONS`.
const APPLY_ACTIONS: u16 = 4;

/// What is done to the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// An entry is added; one with the same pattern and priority is replaced, its counters are lost and nobody is told.
    Add,
    /// Every entry that the pattern covers is removed.
    Delete,
    /// The entry with this very pattern and priority is removed.
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

/// A change of the table (`OFPT_FLOW_MOD`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowMod {
    /// What is done.
    pub command: Command,
    /// What it is about.
    pub pattern: Pattern,
    /// Our number for the entry.
    pub cookie: u64,
    /// Only entries whose cookie has these bits as `cookie` has; 0: all. Ignored by 1.0 and when adding.
    pub cookie_mask: u64,
    /// Higher wins.
    pub priority: u16,
    /// Seconds without a packet after which it goes; 0: never.
    pub idle_timeout_s: u16,
    /// The port that packets are sent out by; none: they are dropped.
    pub output: Option<u32>,
}

/// Why an entry is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Nothing came for its idle time.
    Idle,
    /// Its hard time-out.
    Hard,
    /// It was deleted.
    Deleted,
    /// Its group was deleted.
    Group,
    /// It made room for another (1.4; Open vSwitch says it under 1.3 too).
    Evicted,
    /// A number that is none of these.
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
    /// Our number.
    pub cookie: u64,
    /// Its priority.
    pub priority: u16,
    /// Why.
    pub why: Removal,
    /// Packets in all.
    pub packets: u64,
    /// Bytes of frames in all.
    pub bytes: u64,
    /// What it matched.
    pub pattern: Pattern,
}

/// An entry as a list shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowCounts {
    /// Our number.
    pub cookie: u64,
    /// Its priority.
    pub priority: u16,
    /// Packets until now, up to half a second ago.
    pub packets: u64,
    /// Bytes of frames until now.
    pub bytes: u64,
    /// What it matches.
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
        bytes.extend([if adding { TABLE } else { TABLE_ALL }, self.command.number()]);
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
    /// The entries of one part of a list.
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
