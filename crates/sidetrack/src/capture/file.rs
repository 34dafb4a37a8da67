//! A file that gets the pieces of a capture. It always has whole blocks only, so that it can be opened whenever the writing ends.

use anyhow::Context;
use sidetrack_core::capture::pcapng::Blocks;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Why the writing ended before the capture did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The file has as many bytes as were asked for.
    Full,
    /// The reader of standard output is gone.
    Gone,
}

/// A pcapng file, or standard output.
pub struct PacketFile {
    out: Box<dyn Write + Send>,
    name: String,
    /// `None`: standard output.
    file: Option<File>,
    bytes: u64,
    bytes_max: u64,
    packets: u64,
    /// Packets that the capture lacks.
    missing: u64,
    blocks: Blocks,
}

impl PacketFile {
    /// Opens the file, which only its owner can read, or makes it; it replaces an older one. `-` is standard output.
    ///
    /// # Errors
    /// As open(2).
    pub fn create(path: &Path, bytes_max: Option<u64>) -> anyhow::Result<Self> {
        let is_stdout = path == Path::new("-");
        let name = if is_stdout { "standard output".to_owned() } else { path.display().to_string() };
        let open = || OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path);
        let file = (!is_stdout).then(open).transpose().with_context(|| format!("cannot write {name}"))?;
        let out: Box<dyn Write + Send> = match &file {
            Some(file) => Box::new(file.try_clone()?),
            None => Box::new(io::stdout()),
        };
        let (bytes_max, blocks) = (bytes_max.unwrap_or(u64::MAX), Blocks::default());
        Ok(Self { out, name, file, bytes: 0, bytes_max, packets: 0, missing: 0, blocks })
    }

    /// Writes the whole blocks of a piece.
    ///
    /// # Errors
    /// The disk is full, or as write(2). What the file has then is whole.
    pub fn write(&mut self, piece: &[u8]) -> anyhow::Result<Option<Stop>> {
        self.blocks.push(piece);
        while let Some(block) = self.blocks.whole()? {
            let after = self.bytes + block.bytes.len() as u64;
            if after > self.bytes_max {
                return Ok(Some(Stop::Full));
            }
            match self.out.write_all(block.bytes) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(Some(Stop::Gone)),
                Err(error) => {
                    // A block that is cut would make the rest unreadable.
                    let cut = self.file.as_ref().map(|file| file.set_len(self.bytes));
                    let rest = if matches!(cut, Some(Ok(()))) { ", all of them whole" } else { "" };
                    let (name, packets) = (&self.name, self.packets);
                    anyhow::bail!("cannot write {name}: {error}: it has {packets} packets{rest}");
                }
            }
            self.bytes = after;
            self.packets += u64::from(block.is_packet());
            self.missing = block.counts().map_or(self.missing, |(_, missing)| missing);
        }
        match self.out.flush() {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Some(Stop::Gone)),
            flushed => flushed.map(|()| None).with_context(|| format!("cannot write {}", self.name)),
        }
    }

    /// Says what the file has.
    pub fn told(&self) -> String {
        let Self { packets, bytes, name, missing, .. } = self;
        let missing = match missing {
            0 => String::new(),
            missing => {
                format!("; {missing} more were dropped, because the reader or this machine was too slow")
            }
        };
        format!("{packets} packets, {bytes} bytes: {name}{missing}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::capture::pcapng;

    #[test]
    fn a_file_has_whole_blocks_and_no_more_than_it_may() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.pcapng");
        let mut bytes = Vec::new();
        pcapng::section(&mut bytes, "test");
        let head = bytes.len();
        pcapng::interface(&mut bytes, "lo", 65535);
        let mut file = PacketFile::create(&path, Some(head as u64 + 10)).unwrap();
        assert!(file.write(&bytes[..head + 3]).unwrap().is_none());
        assert_eq!(file.write(&bytes[head + 3..]).unwrap(), Some(Stop::Full));
        assert_eq!(std::fs::read(&path).unwrap(), bytes[..head]);
        assert_eq!(file.told(), format!("0 packets, {head} bytes: {}", path.display()));
    }

    #[test]
    fn a_full_disk_is_told() {
        let mut bytes = Vec::new();
        pcapng::section(&mut bytes, "test");
        let mut full = PacketFile::create(Path::new("/dev/full"), None).unwrap();
        let error = full.write(&bytes).unwrap_err().to_string();
        assert!(error.contains("/dev/full: No space left on device"), "{error}");
        assert!(error.contains("it has 0 packets"), "{error}");
        assert!(full.write(b"no block at all, but text").is_err());
    }
}
