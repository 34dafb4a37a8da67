//! Writes a new archive of the checked parts, in the form of `docker save` up to version 24. All engines read
//! this form in the same way.

use super::{ArchiveError, Checked, digest};
use serde_json::json;
use std::collections::BTreeSet;
use std::io::{self, Read, Seek, Write};

/// Size of a header, and the multiple to which content is padded, bytes.
const BLOCK: u64 = 512;
/// Largest size that fits into the digits of a ustar header (POSIX.1-1988): 11 octal digits.
const SIZE_MAX: u64 = (1 << 33) - 1;

impl Checked {
    /// Writes the new archive. `archive` is the one that was checked.
    ///
    /// # Errors
    /// Fails if one of the files cannot be read or written, or if `archive` has changed since the check.
    pub fn write(&self, mut archive: impl Read + Seek, mut to: impl Write) -> Result<(), ArchiveError> {
        let configuration = format!("{}.json", hex(&digest(&mut &self.configuration[..])?.0));
        let file = |diff_id: &str| format!("{}.tar", hex(diff_id));
        let mut written = BTreeSet::new();
        for checked in self.layers.iter().filter(|checked| written.insert(&checked.diff_id)) {
            header(&mut to, &file(&checked.diff_id), checked.len)?;
            let mut content = checked.layer.open(&mut archive)?.take(checked.len);
            if io::copy(&mut content, &mut to)? != checked.len {
                return Err(ArchiveError::Truncated);
            }
            fill(&mut to, checked.len)?;
        }
        let layers: Vec<_> = self.layers.iter().map(|checked| file(&checked.diff_id)).collect();
        let names: Vec<_> = self.name.iter().collect();
        let manifest = json!([{ "Config": configuration, "RepoTags": names, "Layers": layers }]).to_string();
        for (name, content) in
            [(&configuration[..], &self.configuration[..]), ("manifest.json", manifest.as_bytes())]
        {
            header(&mut to, name, content.len() as u64)?;
            to.write_all(content)?;
            fill(&mut to, content.len() as u64)?;
        }
        to.write_all(&[0; 2 * BLOCK as usize])?;
        Ok(())
    }
}

/// The digits of a digest.
fn hex(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

/// A header of ustar for a regular file.
fn header(to: &mut impl Write, name: &str, size: u64) -> io::Result<()> {
    let mut header = [0; BLOCK as usize];
    let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
    put(0, name.as_bytes());
    put(100, b"0000444\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    if size <= SIZE_MAX {
        put(124, format!("{size:011o}\0").as_bytes());
    } else {
        // GNU's form for larger sizes: the first bit set, then the number in binary.
        put(124, &[0x80]);
        put(128, &size.to_be_bytes());
    }
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    to.write_all(&header)
}

fn fill(to: &mut impl Write, len: u64) -> io::Result<()> {
    let rest = usize::try_from(len.next_multiple_of(BLOCK) - len).unwrap_or_default();
    to.write_all(&[0; BLOCK as usize][..rest])
}
