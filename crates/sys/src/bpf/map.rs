//! BPF maps: tables that programs and user space share.
#![allow(unsafe_code, reason = "works on memory that it shares with the kernel")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use super::syscall::{Argument, Command};

/// Entries that [`Map::for_each`] reads in one system call.
const BATCH: usize = 256;

/// The kind of a map (`enum bpf_map_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// A hash table. Memory for all entries is reserved at once, so an insertion fails only when the table is
    /// full.
    Hash = 1,
    /// An array, indexed from 0.
    Array = 2,
    /// An array, indexed from 0, with separate values for each processor.
    PerCpuArray = 6,
    /// Devices for XDP to redirect to, indexed from 0.
    Devices = 14,
    /// AF_XDP sockets, indexed from 0.
    Xsk = 17,
    /// Devices for XDP to redirect to, by interface index.
    DeviceHash = 25,
}

/// The shape of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    /// Its kind.
    pub kind: MapKind,
    /// The name that programs and `bpftool` know it by, at most 15 bytes.
    pub name: &'static str,
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Maximum number of entries.
    pub entries_max: u32,
}

/// A map. It lives as long as this process or an attached program holds it. Using it after its creation takes
/// no capability.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    shape: MapShape,
}

impl AsFd for Map {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn size(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

fn wrong_size() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "a key or value of another size than the map's")
}

impl Map {
    /// Creates an empty map.
    ///
    /// # Errors
    /// EPERM without CAP_BPF (CAP_SYS_ADMIN before Linux 5.8), ENOMEM.
    pub fn create(shape: MapShape) -> io::Result<Self> {
        Self::create_with(shape, 0)
    }

    /// Creates an empty map with flags (`BPF_F_*`).
    ///
    /// # Errors
    /// As [`Map::create`].
    pub(super) fn create_with(shape: MapShape, flags: u32) -> io::Result<Self> {
        let mut argument = Argument::new()
            .u32(0, shape.kind as u32)
            .u32(4, size(shape.key_bytes))
            .u32(8, size(shape.value_bytes))
            .u32(12, shape.entries_max)
            .u32(16, flags)
            .name(28, shape.name);
        // SAFETY: no addresses; the result is a descriptor.
        let fd = unsafe { argument.open(Command::MapCreate) }?;
        Ok(Self { fd, shape })
    }

    /// Opens the map with this name in a file system of type `bpf`. It has this shape, but for the number of entries.
    ///
    /// # Errors
    /// `InvalidData` if it has another shape.
    pub(super) fn pinned(path: &Path, shape: MapShape) -> io::Result<Self> {
        Self::given(super::pin::open(path)?, shape)
    }

    /// Takes the map of another process. It has this shape, but for the number of entries.
    ///
    /// # Errors
    /// `InvalidData` if it has another shape.
    pub(super) fn given(fd: OwnedFd, shape: MapShape) -> io::Result<Self> {
        let [kind, _, key_bytes, value_bytes, entries_max, ..] = super::pin::info::<8>(fd.as_fd())?;
        if (kind, key_bytes, value_bytes)
            != (shape.kind as u32, size(shape.key_bytes), size(shape.value_bytes))
        {
            let text = format!("the map '{}' has another shape than this program's", shape.name);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(Self { fd, shape: MapShape { entries_max, ..shape } })
    }

    /// Lets it outlive this process, under this name in a file system of type `bpf`.
    pub(super) fn pin(&self, path: &Path) -> io::Result<()> {
        super::pin::pin(self.fd.as_fd(), path)
    }

    /// Returns its shape.
    pub const fn shape(&self) -> &MapShape {
        &self.shape
    }

    fn element<'a>(&self, key: &'a [u8]) -> io::Result<Argument<'a>> {
        if key.len() != self.shape.key_bytes {
            return Err(wrong_size());
        }
        Ok(Argument::new().fd(0, self.fd.as_raw_fd()).input(8, key))
    }

    /// Adds an entry; fails with `AlreadyExists` if there is one with this key.
    ///
    /// # Errors
    /// E2BIG if the map is full.
    pub fn insert(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        const NO_EXIST: u64 = 1;
        self.write(key, value, NO_EXIST)
    }

    /// Adds an entry, or replaces the one with this key.
    ///
    /// # Errors
    /// E2BIG if the map is full.
    pub fn put(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.write(key, value, 0)
    }

    fn write(&self, key: &[u8], value: &[u8], flags: u64) -> io::Result<()> {
        if value.len() != self.shape.value_bytes {
            return Err(wrong_size());
        }
        let mut argument = self.element(key)?.input(16, value).u64(24, flags);
        // SAFETY: key and value are as long as the map was made for, and borrowed until here.
        unsafe { argument.perform(Command::MapUpdate) }
    }

    /// Returns the value of a key; `None` if there is no such entry.
    ///
    /// # Errors
    /// What bpf(2) reports, except that the entry does not exist.
    pub fn look_up(&self, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        self.read(key, Command::MapLookup)
    }

    /// Removes an entry and returns its last value. For hash tables this takes Linux 5.14. On older kernels
    /// the entry is read and then removed, and what the program counts in between is lost.
    ///
    /// # Errors
    /// What bpf(2) reports, except that the entry does not exist.
    pub fn take(&self, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        match self.read(key, Command::MapLookupAndDelete) {
            // Kernels that cannot do it for hash tables say ENOTSUPP (524).
            Err(error) if matches!(error.raw_os_error(), Some(524 | libc::EINVAL | libc::EOPNOTSUPP)) => {
                let value = self.look_up(key)?;
                self.remove(key)?;
                Ok(value)
            }
            result => result,
        }
    }

    fn read(&self, key: &[u8], command: Command) -> io::Result<Option<Vec<u8>>> {
        // The kernel copies values in whole 8-byte words.
        let mut value = vec![0; self.shape.value_bytes.next_multiple_of(8)];
        let mut argument = self.element(key)?.output(16, &mut value);
        // SAFETY: the key has the map's size, the value at least that; both are borrowed until here.
        let found = unsafe { argument.perform(command) };
        match found {
            Ok(()) => {
                value.truncate(self.shape.value_bytes);
                Ok(Some(value))
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes an entry; returns whether it existed.
    ///
    /// # Errors
    /// What bpf(2) reports, except that the entry does not exist.
    pub fn remove(&self, key: &[u8]) -> io::Result<bool> {
        let mut argument = self.element(key)?;
        // SAFETY: the key has the map's size and is borrowed until here.
        match unsafe { argument.perform(Command::MapDelete) } {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Calls `look` with every entry of a hash table, in no order, reading a few hundred entries in each
    /// system call. Entries that are added or removed meanwhile may be missed.
    ///
    /// # Errors
    /// What bpf(2) reports; it needs Linux 5.6.
    pub fn for_each(&self, mut look: impl FnMut(&[u8], &[u8])) -> io::Result<()> {
        let (key, value) = (self.shape.key_bytes, self.shape.value_bytes);
        let mut keys = vec![0; key * BATCH];
        let mut values = vec![0; value * BATCH];
        // Where the next call continues: a number for hash tables, a key for others.
        let mut place = vec![0; key.max(4)];
        let mut begun = false;
        // Bounds the loop even if the table is filled while we read: there are no more buckets than this.
        for _ in 0..=self.shape.entries_max {
            let from = place.clone();
            let mut argument = Argument::new()
                .output(8, &mut place)
                .output(16, &mut keys)
                .output(24, &mut values)
                .u32(32, size(BATCH))
                .u32(36, self.fd.as_raw_fd().cast_unsigned());
            if begun {
                argument = argument.input(0, &from);
            }
            // SAFETY: places, keys and values have room for BATCH of them and are borrowed until here.
            let result = unsafe { argument.perform(Command::MapLookupBatch) };
            let count = argument.read_u32(32) as usize;
            let last = match result {
                Ok(()) => false,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                Err(error) => return Err(error),
            };
            let pairs = keys.chunks_exact(key).zip(values.chunks_exact(value));
            pairs.take(count).for_each(|(key, value)| look(key, value));
            if last {
                return Ok(());
            }
            begun = true;
        }
        Ok(())
    }
}
