//! Files of stored responses (`sidetrack_core::http::cache::file` has their format). They are written aside and renamed,
//! and every checksum is verified on reading. The functions here block on the disk.

use sidetrack_core::http::cache::file::{BLOCK, Plan, block_sum, read_head, variant_of, write_head};
use sidetrack_core::http::cache::{Rules, Stored};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folders that files are spread over: one for each value of the first byte of a file's number.
const FOLDERS: u64 = 256;
/// The folder of incomplete files.
const ASIDE: &str = "new";
/// Bytes of the first read: plan and heads of nearly every file, and all of a small one.
const FIRST_READ: usize = 16 * 1024;

/// The folder of a store on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Folder(PathBuf);

/// A file whose head was read.
#[derive(Debug)]
pub(super) struct Found {
    /// The key.
    pub key: Vec<u8>,
    /// The response.
    pub stored: Stored,
    /// Where the sections of the file lie.
    pub plan: Plan,
    /// The number of the last head.
    pub sequence: u64,
    file: File,
}

impl std::fmt::Display for Folder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.display().fmt(f)
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

impl Folder {
    /// Makes the folder, for this user alone, and removes incomplete files.
    ///
    /// # Errors
    /// It cannot be made or written to.
    pub(super) fn make(path: &Path) -> io::Result<Self> {
        let make = |path: &Path| fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        make(path)?;
        for number in 0..FOLDERS {
            make(&path.join(format!("{number:02x}")))?;
        }
        let aside = path.join(ASIDE);
        make(&aside)?;
        for entry in fs::read_dir(&aside)? {
            fs::remove_file(entry?.path())?;
        }
        // An existing folder may still not be writable.
        let probe = aside.join("probe");
        File::create(&probe).and_then(|_| fs::remove_file(probe))?;
        Ok(Self(path.to_owned()))
    }

    /// The folder itself.
    pub(super) fn root(&self) -> &Path {
        &self.0
    }

    /// The path of the file with this number.
    pub(super) fn path(&self, number: u64) -> PathBuf {
        self.0.join(format!("{:02x}/{number:016x}", number >> 56))
    }

    /// Removes a file. A missing file is ignored. After another failure, the next scan finds the file again.
    pub(super) fn remove(&self, number: u64) {
        if let Err(error) = fs::remove_file(self.path(number))
            && error.kind() != ErrorKind::NotFound
        {
            tracing::debug!(%error, path = %self.path(number).display(), "cannot remove from the cache");
        }
    }

    /// The numbers of all files, the one written to longest ago first.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(super) fn numbers(&self) -> io::Result<Vec<u64>> {
        let mut found = Vec::new();
        for folder in 0..FOLDERS {
            for entry in fs::read_dir(self.0.join(format!("{folder:02x}")))? {
                let entry = entry?;
                let name = entry.file_name();
                let number = name.to_str().filter(|name| name.len() == 16);
                let number = number.and_then(|name| u64::from_str_radix(name, 16).ok());
                // Files that we did not write are left alone.
                let Some(number) = number.filter(|number| number >> 56 == folder) else { continue };
                // It was removed meanwhile.
                if let Ok(at) = entry.metadata().and_then(|metadata| metadata.modified()) {
                    found.push((at, number));
                }
            }
        }
        found.sort_unstable();
        Ok(found.into_iter().map(|(_, number)| number).collect())
    }

    /// Opens a file and reads the response's head.
    ///
    /// # Errors
    /// It cannot be read, or is corrupt.
    pub(super) fn find(&self, number: u64, rules: &Rules) -> io::Result<Found> {
        let file = OpenOptions::new().read(true).open(self.path(number))?;
        let mut bytes = vec![0; FIRST_READ];
        let read = read_up_to(&file, &mut bytes, 0)?;
        bytes.truncate(read);
        let plan = Plan::parse(&bytes).ok_or_else(|| broken("it is not a file of this cache"))?;
        let needed = usize::try_from(plan.content_offset()).map_err(io::Error::other)?;
        if bytes.len() < needed {
            bytes.resize(needed, 0);
            let read = read_up_to(&file, &mut bytes, 0)?;
            bytes.truncate(read);
        }
        let (sequence, head) = plan.head(&bytes).ok_or_else(|| broken("its head is broken"))?;
        let (key, stored) = read_head(head, rules).ok_or_else(|| broken("its head cannot be read"))?;
        if file.metadata()?.len() != plan.file_bytes() {
            return Err(broken("its end is missing"));
        }
        Ok(Found { key, stored, plan, sequence, file })
    }
}

impl Found {
    /// The checksums of the content.
    ///
    /// # Errors
    /// They cannot be read, or are corrupt.
    pub(super) fn sums(&self) -> io::Result<Vec<u64>> {
        let length = usize::try_from(self.plan.sums_bytes()).map_err(io::Error::other)?;
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, self.plan.sums_offset())?;
        self.plan.parse_sums(&bytes).ok_or_else(|| broken("its checksums are broken"))
    }

    /// All of the content, in pieces.
    ///
    /// # Errors
    /// It cannot be read, or is corrupt.
    pub(super) fn content(&self) -> io::Result<Vec<Arc<[u8]>>> {
        let sums = self.sums()?;
        (0..).zip(&sums).map(|(index, sum)| read_block(&self.file, &self.plan, (index, *sum))).collect()
    }
}

/// Reads a block of content and verifies its checksum.
///
/// # Errors
/// It cannot be read, or is corrupt.
pub(super) fn read_block(file: &File, plan: &Plan, (index, sum): (u64, u64)) -> io::Result<Arc<[u8]>> {
    let mut block = room(plan.block_bytes(index));
    let bytes = Arc::get_mut(&mut block).ok_or_else(|| broken("a buffer is shared"))?;
    file.read_exact_at(bytes, plan.content_offset() + index * BLOCK as u64)?;
    if block_sum(bytes) == sum { Ok(block) } else { Err(broken("its content is not what was written")) }
}

/// Like [`read_block`], but only from the page cache; `None` if the read would block.
///
/// # Errors
/// As [`read_block`].
pub(super) fn read_block_at_hand(
    file: &File,
    plan: &Plan,
    (index, sum): (u64, u64),
) -> io::Result<Option<Arc<[u8]>>> {
    use rustix::io::{ReadWriteFlags, preadv2};
    let mut block = room(plan.block_bytes(index));
    let bytes = Arc::get_mut(&mut block).ok_or_else(|| broken("a buffer is shared"))?;
    let at = plan.content_offset() + index * BLOCK as u64;
    let length = bytes.len();
    match preadv2(file, &mut [io::IoSliceMut::new(bytes)], at, ReadWriteFlags::NOWAIT) {
        Ok(read) if read == length => {}
        // Only partly cached, not cached, or the file system does not support the flag.
        _ => return Ok(None),
    }
    if block_sum(bytes) == sum { Ok(Some(block)) } else { Err(broken("its content is not what was written")) }
}

/// A zeroed piece to read into.
fn room(length: usize) -> Arc<[u8]> {
    std::iter::repeat_n(0, length).collect()
}

fn read_up_to(file: &File, bytes: &mut [u8], at: u64) -> io::Result<usize> {
    let mut read = 0;
    while let Some(rest) = bytes.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, at + read as u64) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// Writes a new head to a file, if it still holds this variant; returns whether the head was written.
///
/// # Errors
/// It cannot be read or written.
pub(super) fn rewrite_head(folder: &Folder, number: u64, key: &[u8], stored: &Stored) -> io::Result<bool> {
    // Any rules will do here: what they decide is not written to the file.
    let found = folder.find(number, &Rules::default())?;
    let sequence = found.sequence + 1;
    let Some(slot) = found.plan.slot(sequence, &write_head(key, stored)) else { return Ok(false) };
    if found.key != key || variant_of(&found.stored) != variant_of(stored) {
        return Ok(false);
    }
    let file = OpenOptions::new().write(true).open(folder.path(number))?;
    file.write_all_at(&slot, found.plan.slot_offset(sequence))?;
    Ok(true)
}

/// A file that is being written, aside. It is removed if it is not finished.
#[derive(Debug)]
pub(super) struct Writing {
    file: File,
    number: u64,
    aside: PathBuf,
    place: PathBuf,
    head: Vec<u8>,
    plan: Plan,
    block: Vec<u8>,
    sums: Vec<u64>,
    written: u64,
    is_finished: bool,
}

impl Writing {
    /// Begins a file for this response with `length` bytes of content; 0: the length is unknown.
    ///
    /// # Errors
    /// The file cannot be made, or the head is too long.
    pub(super) fn begin(
        folder: &Folder,
        number: u64,
        key: &[u8],
        stored: &Stored,
        length: u64,
    ) -> io::Result<Self> {
        let head = write_head(key, stored);
        let plan = Plan::new(&head, length).ok_or_else(|| broken("its head is too long"))?;
        let aside = folder.0.join(ASIDE).join(format!("{number:016x}"));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        let place = folder.path(number);
        let (block, sums) = (Vec::new(), Vec::new());
        Ok(Self { file, number, aside, place, head, plan, block, sums, written: 0, is_finished: false })
    }

    /// Replaces the head that it was begun with.
    pub(super) fn set_head(&mut self, key: &[u8], stored: &Stored) {
        self.head = write_head(key, stored);
    }

    /// Its number.
    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// Bytes of the finished file, if no more content comes than was announced or has arrived.
    pub(super) fn file_bytes(&self) -> u64 {
        let length = self.plan.length.max(self.written + self.block.len() as u64);
        let mut plan = self.plan;
        plan.length = length;
        plan.file_bytes()
    }

    /// Adds content.
    ///
    /// # Errors
    /// For example, the disk is full.
    pub(super) fn push(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let (now, later) = data.split_at(data.len().min(BLOCK - self.block.len()));
            // A whole block is written without a copy.
            if now.len() == BLOCK {
                self.write_block(now)?;
            } else {
                self.block.extend_from_slice(now);
                if self.block.len() == BLOCK {
                    self.flush()?;
                }
            }
            data = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut block = std::mem::take(&mut self.block);
        let written = self.write_block(&block);
        block.clear();
        self.block = block;
        written
    }

    fn write_block(&mut self, block: &[u8]) -> io::Result<()> {
        self.file.write_all_at(block, self.plan.content_offset() + self.written)?;
        self.sums.push(block_sum(block));
        self.written += block.len() as u64;
        Ok(())
    }

    /// Writes the rest and moves the file to its place.
    ///
    /// # Errors
    /// For example, the disk is full; or the content has another length than announced.
    pub(super) fn finish(mut self) -> io::Result<()> {
        if !self.block.is_empty() {
            self.flush()?;
        }
        if self.plan.length == 0 {
            self.plan.length = self.written;
        }
        if self.written != self.plan.length {
            return Err(broken("its content has another length"));
        }
        self.file.write_all_at(&Plan::sums_to_bytes(&self.sums), self.plan.sums_offset())?;
        let slot = self.plan.slot(0, &self.head).ok_or_else(|| broken("its head is too long"))?;
        self.file.write_all_at(&slot, self.plan.slot_offset(0))?;
        self.file.write_all_at(&self.plan.to_bytes(), 0)?;
        // The rename comes last: after a crash, an incomplete file lies aside and the next start removes it.
        fs::rename(&self.aside, &self.place)?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.is_finished {
            // A file that cannot be removed now is removed at the next start of the cache.
            let _ = fs::remove_file(&self.aside);
        }
    }
}
