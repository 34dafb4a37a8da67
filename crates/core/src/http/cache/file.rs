//! The file format of a stored response. After a crash, a file is read back exactly as it was written, or not at all.
//!
//! ```text
//! plan     magic, version, size of a slot, length of the content, checksum
//! slot 0   sequence, length, head, checksum       \ the one with the higher sequence counts; a new head goes into the
//! slot 1   the same                               / other one, so that a torn write leaves the head that was there
//! content  starts at a multiple of 4096
//! sums     one checksum for each block of the content, and one over these
//! ```
//!
//! A new file is written under a temporary name and then renamed. Only a head (after a 304) is written into an
//! existing file. Numbers are little-endian. Each block of the content is checked when it is read, and a block that
//! does not match its checksum is never sent.

use super::super::fields::Fields;
use super::super::octets::Reader;
use super::range::ContentRange;
use super::store::{Extent, Stored};
use super::vary::Selecting;
use super::{Rules, UnixSeconds};
use twox_hash::XxHash64;

/// Bytes of content that one checksum covers.
pub const BLOCK: usize = 128 * 1024;

const MAGIC: [u8; 8] = *b"SDTRKOBJ";
const VERSION: u32 = 1;
const PLAN_BYTES: usize = 32;
/// Sequence and length before a head, and the checksum behind it.
const SLOT_OVERHEAD: usize = 8 + 4 + 8;
/// Spare bytes by which a head may grow when a 304 updates it.
const SLOT_SPARE: usize = 1024;
/// Most bytes of a head: up to 64 KiB of the message, and the data that the cache adds.
const SLOT_MAX: usize = 256 * 1024;
const PAGE: u64 = 4096;

/// The layout of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    slot_bytes: u32,
    /// Bytes of content.
    pub length: u64,
}

impl Plan {
    /// Makes the layout of a file for this head and this many bytes of content. `None` if the head is too long to be
    /// stored.
    pub fn new(head: &[u8], length: u64) -> Option<Self> {
        let slot = (head.len() + SLOT_OVERHEAD + SLOT_SPARE).next_multiple_of(1024);
        let slot_bytes = u32::try_from(slot).ok().filter(|_| slot <= SLOT_MAX)?;
        Some(Self { slot_bytes, length })
    }

    /// Encodes the first bytes of the file.
    pub fn to_bytes(self) -> [u8; PLAN_BYTES] {
        let mut bytes = [0; PLAN_BYTES];
        let parts: [&[u8]; 4] =
            [&MAGIC, &VERSION.to_le_bytes(), &self.slot_bytes.to_le_bytes(), &self.length.to_le_bytes()];
        let (said, sum) = bytes.split_at_mut(PLAN_BYTES - 8);
        for (place, byte) in said.iter_mut().zip(parts.into_iter().flatten()) {
            *place = *byte;
        }
        sum.copy_from_slice(&checksum(said).to_le_bytes());
        bytes
    }

    /// Decodes the first bytes of a file. `None` if they are not a plan, or have another version.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (said, sum) = bytes.get(..PLAN_BYTES)?.split_at(PLAN_BYTES - 8);
        let mut reader = Reader(said);
        let is_ours = reader.take(8)? == MAGIC && reader.u32_le()? == VERSION;
        let plan = Self { slot_bytes: reader.u32_le()?, length: reader.u64_le()? };
        let fits =
            (SLOT_OVERHEAD..=SLOT_MAX).contains(&(plan.slot_bytes as usize)) && plan.length <= u64::MAX / 4;
        (is_ours && fits && sum == checksum(said).to_le_bytes()).then_some(plan)
    }

    /// Returns the offset of the slot for this sequence.
    pub const fn slot_offset(&self, sequence: u64) -> u64 {
        PLAN_BYTES as u64 + (sequence % 2) * self.slot_bytes as u64
    }

    /// Returns the offset of the content. The plan and the heads are before it.
    pub const fn content_offset(&self) -> u64 {
        (PLAN_BYTES as u64 + 2 * self.slot_bytes as u64).next_multiple_of(PAGE)
    }

    /// Returns the offset of the checksums of the content.
    pub const fn sums_offset(&self) -> u64 {
        self.content_offset() + self.length
    }

    /// Returns the number of blocks of the content.
    pub const fn blocks(&self) -> u64 {
        self.length.div_ceil(BLOCK as u64)
    }

    /// Returns the number of bytes of the checksums.
    pub const fn sums_bytes(&self) -> u64 {
        (self.blocks() + 1) * 8
    }

    /// Returns the number of bytes of the whole file.
    pub const fn file_bytes(&self) -> u64 {
        self.sums_offset() + self.sums_bytes()
    }

    /// Returns the number of content bytes in this block; 0 behind the last block.
    pub fn block_bytes(&self, index: u64) -> usize {
        let left = self.length.saturating_sub(index.saturating_mul(BLOCK as u64));
        usize::try_from(left).unwrap_or(BLOCK).min(BLOCK)
    }

    /// Encodes a head for the slot of this sequence. `None` if the slot is too small.
    pub fn slot(&self, sequence: u64, head: &[u8]) -> Option<Vec<u8>> {
        let length = u32::try_from(head.len()).ok()?;
        if head.len() + SLOT_OVERHEAD > self.slot_bytes as usize {
            return None;
        }
        let mut slot = Vec::with_capacity(head.len() + SLOT_OVERHEAD);
        slot.extend_from_slice(&sequence.to_le_bytes());
        slot.extend_from_slice(&length.to_le_bytes());
        slot.extend_from_slice(head);
        slot.extend_from_slice(&checksum(&slot).to_le_bytes());
        Some(slot)
    }

    /// Returns the valid head with the highest sequence, and that sequence. `file` holds at least the bytes before
    /// the content.
    pub fn head<'a>(&self, file: &'a [u8]) -> Option<(u64, &'a [u8])> {
        let slot = |number: u64| {
            let offset = usize::try_from(self.slot_offset(number)).ok()?;
            let (sequence, head) = read_slot(file.get(offset..)?.get(..self.slot_bytes as usize)?)?;
            // A slot holds every other sequence. Another one was not written by this program.
            (sequence % 2 == number).then_some((sequence, head))
        };
        slot(0).into_iter().chain(slot(1)).max_by_key(|(sequence, _)| *sequence)
    }

    /// Encodes the checksums.
    pub fn sums_to_bytes(sums: &[u64]) -> Vec<u8> {
        let mut bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        bytes.extend_from_slice(&checksum(&bytes).to_le_bytes());
        bytes
    }

    /// Decodes the checksums. `None` if their number is not the number of blocks, or if they are damaged.
    pub fn parse_sums(&self, bytes: &[u8]) -> Option<Vec<u64>> {
        let (said, own) = bytes.split_at_checked(bytes.len().checked_sub(8)?)?;
        let (words, rest) = said.as_chunks::<8>();
        let good =
            rest.is_empty() && words.len() as u64 == self.blocks() && own == checksum(said).to_le_bytes();
        good.then(|| words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
}

fn read_slot(slot: &[u8]) -> Option<(u64, &[u8])> {
    let mut reader = Reader(slot);
    let (sequence, length) = (reader.u64_le()?, reader.u32_le()? as usize);
    let (head, sum) = (reader.take(length)?, reader.u64_le()?);
    (checksum(slot.get(..length + 12)?) == sum).then_some((sequence, head))
}

/// Returns XXH64 of these bytes. It detects files that were not written completely. It does not protect against an attacker: a
/// process that can write the cache's files can also write a valid checksum.
fn checksum(bytes: &[u8]) -> u64 {
    XxHash64::oneshot(0, bytes)
}

/// Returns the checksum of one block of content.
pub fn block_sum(block: &[u8]) -> u64 {
    checksum(block)
}

/// Returns a number that identifies a variant under one key: a hash of the selecting fields and the extent.
pub fn variant_of(stored: &Stored) -> u64 {
    let mut bytes = Vec::new();
    write_selecting(&mut bytes, &stored.selecting);
    write_extent(&mut bytes, stored.extent);
    checksum(&bytes)
}

/// Encodes the head of a stored response: its key, its fields, and the cache's data about it.
pub fn write_head(key: &[u8], stored: &Stored) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    out.extend_from_slice(&stored.status.to_le_bytes());
    out.push(u8::from(stored.is_invalid) | (u8::from(stored.is_personal) << 1));
    out.extend_from_slice(&stored.request_time_s.to_le_bytes());
    out.extend_from_slice(&stored.response_time_s.to_le_bytes());
    write_extent(&mut out, stored.extent);
    write_text(&mut out, key);
    write_text(&mut out, &stored.reason);
    write_selecting(&mut out, &stored.selecting);
    write_count(&mut out, stored.fields.len());
    for (name, value) in stored.fields.iter() {
        write_text(&mut out, name);
        write_text(&mut out, value);
    }
    out
}

/// Decodes a head: the key and the stored response. `None` if it is not valid.
pub fn read_head(head: &[u8], rules: &Rules) -> Option<(Vec<u8>, Stored)> {
    let mut reader = Reader(head);
    let status = reader.u16_le()?;
    let flags = reader.u8()?;
    let times: (UnixSeconds, UnixSeconds) = (reader.u64_le()?, reader.u64_le()?);
    let extent = reader.extent()?;
    let key = reader.text()?.to_vec();
    let reason = reader.text()?.to_vec();
    let selecting = reader.selecting()?;
    let mut fields = Fields::new();
    for _ in 0..reader.u32_le()? {
        let (name, value) = (reader.text()?, reader.text()?);
        fields.push(name, value);
    }
    let mut stored = Stored::restore((status, reason, fields), selecting, extent, times, rules);
    (stored.is_invalid, stored.is_personal) = (flags & 1 != 0, flags & 2 != 0);
    reader.0.is_empty().then_some((key, stored))
}

fn write_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

fn write_text(out: &mut Vec<u8>, text: &[u8]) {
    write_count(out, text.len());
    out.extend_from_slice(text);
}

fn write_selecting(out: &mut Vec<u8>, selecting: &Selecting) {
    write_count(out, selecting.len());
    for (name, value) in selecting {
        write_text(out, name);
        out.push(u8::from(value.is_some()));
        write_text(out, value.as_deref().unwrap_or_default());
    }
}

fn write_extent(out: &mut Vec<u8>, extent: Extent) {
    match extent {
        Extent::Whole => out.push(0),
        Extent::Part(part) => {
            out.push(if part.total.is_some() { 2 } else { 1 });
            for number in [part.first, part.last, part.total.unwrap_or_default()] {
                out.extend_from_slice(&number.to_le_bytes());
            }
        }
    }
}

impl<'a> Reader<'a> {
    fn text(&mut self) -> Option<&'a [u8]> {
        let length = self.u32_le()?;
        self.take(length as usize)
    }

    fn selecting(&mut self) -> Option<Selecting> {
        let mut selecting = Selecting::new();
        for _ in 0..self.u32_le()? {
            let name = self.text()?.to_vec();
            let is_there = self.u8()? != 0;
            let value = self.text()?;
            selecting.push((name, is_there.then(|| value.to_vec())));
        }
        Some(selecting)
    }

    fn extent(&mut self) -> Option<Extent> {
        let kind = self.u8()?;
        if kind == 0 {
            return Some(Extent::Whole);
        }
        let (first, last, total) = (self.u64_le()?, self.u64_le()?, self.u64_le()?);
        let total = (kind == 2).then_some(total);
        let good = kind <= 2 && first <= last && total.is_none_or(|total| last < total);
        good.then_some(Extent::Part(ContentRange { first, last, total }))
    }
}
