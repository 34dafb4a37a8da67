//! Reads the table of a tar archive (POSIX.1-1988 ustar, and GNU's numbers): which entries are where. Nothing is
//! unpacked.
//!
//! Readers differ in which of two entries with one name they take, and in whether they follow links. So each
//! name may occur only once, and the caller sees each link with its target.

use super::{ArchiveError, malformed};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::ops::Range;

/// Size of a header, and the multiple to which content is padded, bytes.
const BLOCK: u64 = 512;
/// Most entries of an archive.
const ENTRIES_MAX: usize = 4096;
/// Longest extended header that is read, bytes.
const EXTENDED_MAX: u64 = 64 << 10;
/// Extended headers that could make other readers see a different file (POSIX.1-2001, pax).
const TELLING: [&str; 4] = ["path", "linkpath", "size", "GNU."];

/// One entry of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// A regular file, and the place of its content, which is complete.
    File(Range<u64>),
    /// A hard or symbolic link, and the name of the entry that it leads to.
    Link(String),
    /// A folder.
    Folder,
}

/// The entries by name.
pub(super) type Table = BTreeMap<String, Entry>;

/// Reads the table of an archive.
///
/// # Errors
/// Fails if it is not a tar archive, is truncated, or can be read in two ways.
pub(super) fn table(archive: &mut (impl Read + Seek)) -> Result<Table, ArchiveError> {
    let end = archive.seek(SeekFrom::End(0))?;
    let (mut at, mut table) = (0, Table::new());
    for _ in 0..=ENTRIES_MAX {
        let mut header = [0; BLOCK as usize];
        archive.seek(SeekFrom::Start(at))?;
        archive.read_exact(&mut header).map_err(cut)?;
        if header == [0; BLOCK as usize] {
            // The end is two blocks of zeros. Some readers stop after one, others do not.
            archive.read_exact(&mut header).map_err(cut)?;
            let ended = header == [0; BLOCK as usize];
            return if ended { Ok(table) } else { Err(malformed("something is behind its end")) };
        }
        if number(&header[148..156]) != Some(sum(&header)) {
            return Err(malformed("it is not in the format of tar"));
        }
        let size = number(&header[124..136]).ok_or_else(|| malformed("a size in it is not a number"))?;
        let start = at + BLOCK;
        let (Some(stop), Some(next)) = (start.checked_add(size), size.checked_next_multiple_of(BLOCK)) else {
            return Err(malformed("a size in it is too large"));
        };
        if stop > end {
            return Err(ArchiveError::Truncated);
        }
        let entry = match header[156] {
            b'0' | 0 => Entry::File(start..stop),
            b'1' if size == 0 => Entry::Link(link_target(&header, "")?),
            b'2' if size == 0 => Entry::Link(link_target(&header, &name(&header)?)?),
            b'5' if size == 0 => Entry::Folder,
            b'x' | b'g' => {
                extended(archive, size)?;
                at = start.saturating_add(next);
                continue;
            }
            other => return Err(malformed(format!("an entry of kind '{}'", other.escape_ascii()))),
        };
        let name = name(&header)?;
        if table.insert(name.clone(), entry).is_some() {
            return Err(malformed(format!("it has two entries '{name}'")));
        }
        at = start.saturating_add(next);
    }
    Err(malformed(format!("it has more than {ENTRIES_MAX} entries")))
}

fn cut(error: std::io::Error) -> ArchiveError {
    if error.kind() == ErrorKind::UnexpectedEof { ArchiveError::Truncated } else { error.into() }
}

/// Parses a number in octal digits, or in GNU's form for large ones.
fn number(field: &[u8]) -> Option<u64> {
    if let [0x80, rest @ ..] = field {
        let (high, low) = rest.split_at_checked(rest.len().checked_sub(8)?)?;
        return high
            .iter()
            .all(|byte| *byte == 0)
            .then(|| u64::from_be_bytes(low.try_into().unwrap_or_default()));
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    // `from_str_radix` accepts a sign, which is not allowed here.
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    u64::from_str_radix(text, 8).ok()
}

/// Returns the checksum of a header: the sum of all bytes, with its own field counted as blanks.
fn sum(header: &[u8]) -> u64 {
    let byte = |(at, byte): (usize, &u8)| if (148..156).contains(&at) { 32 } else { u64::from(*byte) };
    header.iter().enumerate().map(byte).sum()
}

fn until_nul(field: &[u8]) -> Vec<u8> {
    field.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
}

fn text(bytes: Vec<u8>) -> Result<String, ArchiveError> {
    String::from_utf8(bytes).map_err(|_| malformed("a name in it is not UTF-8"))
}

/// Returns the name of an entry. A folder's name loses its last slash.
fn name(header: &[u8]) -> Result<String, ArchiveError> {
    let mut name = until_nul(&header[..100]);
    // GNU's header, whose magic ends with a blank, has other fields instead of the prefix.
    if header[257..263] == *b"ustar\0" && header[345] != 0 {
        name = [&until_nul(&header[345..500])[..], b"/", &name].concat();
    }
    let mut name = text(name)?;
    if header[156] == b'5' && name.ends_with('/') {
        name.pop();
    }
    let plain = name.strip_prefix("./").unwrap_or(&name);
    // The folder that contains everything.
    if header[156] == b'5' && name == "." {
        return Ok(name);
    }
    if plain.is_empty() || plain.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(malformed(format!("it has an entry '{name}'")));
    }
    Ok(plain.to_owned())
}

/// Returns the name of the entry that a link points to. A symbolic link is relative to the folder of `from`, the
/// link's name.
fn link_target(header: &[u8], from: &str) -> Result<String, ArchiveError> {
    let target = text(until_nul(&header[157..257]))?;
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            ".." if !parts.is_empty() => drop(parts.pop()),
            "" | ".." => return Err(malformed(format!("it has a link to '{target}'"))),
            "." => {}
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

/// Checks records of `length key=value\n` (pax). Records about times and owners are harmless.
fn extended(archive: &mut impl Read, size: u64) -> Result<(), ArchiveError> {
    if size > EXTENDED_MAX {
        return Err(malformed("an extended header of it is too long"));
    }
    let mut text = Vec::new();
    archive.take(size).read_to_end(&mut text)?;
    let mut rest = &text[..];
    while !rest.is_empty() {
        let (record, behind) = record(rest).ok_or_else(|| malformed("an extended header of it is none"))?;
        if let Some(telling) = TELLING.iter().find(|telling| record.starts_with(telling.as_bytes())) {
            return Err(malformed(format!("an extended header of it says '{telling}'")));
        }
        rest = behind;
    }
    Ok(())
}

/// Returns the first record without its length, and the rest.
fn record(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let blank = text.iter().take(8).position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&text[..blank]).ok()?.parse().ok()?;
    let record = text.get(blank + 1..length).filter(|record| record.last() == Some(&b'\n'))?;
    Some((record, &text[length..]))
}
