//! Maps: tables that programs and user space share.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::syscall::{Argument, Command};

/// Entries that one call of [`Map::for_each`] takes from the kernel.
const BATCH: usize = 256;

/// What a map is (`enum bpf_map_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MapKind {
    /// Keys of any kind; memory for all entries is set aside at once, so that an insertion fails only when it is full.
    Hash = 1,
    /// Numbered from 0.
    Array = 2,
    /// Numbered from 0, each processor with values of its own.
    PerCpuArray = 6,
    /// Devices, numbered from 0, for XDP.
    Devices = 14,
    /// AF_XDP sockets, numbered from 0.
    Xsk = 17,
    /// Devices by interface index, for XDP.
    DeviceHash = 25,
}

/// The shape of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    /// What it is.
    pub kind: MapKind,
    /// The name that programs and `bpftool` know it by, at most 15 bytes.
    pub name: &'static str,
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Most entries.
    pub entries_max: u32,
}

/// A map. It lives as long as somebody holds it: we, or a program that is attached. Once made it can be used without any
/// right.
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
    /// Makes an empty map.
    ///
    /// # Errors
    /// EPERM without CAP_BPF (CAP_SYS_ADMIN before Linux 5.8), ENOMEM.
    pub fn create(shape: MapShape) -> io::Result<Self> {
        Self::create_with(shape, 0)
    }

    /// The same with flags of the kernel's (`BPF_F_*`).
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

    /// Its shape.
    pub const fn shape(&self) -> &MapShape {
        &self.shape
    }

    fn element<'a>(&self, key: &'a [u8]) -> io::Result<Argument<'a>> {
        if key.len() != self.shape.key_bytes {
            return Err(wrong_size());
        }
        Ok(Argument::new().fd(0, self.fd.as_raw_fd()).input(8, key))
    }

    /// Adds an entry; says `AlreadyExists` if there is one with this key.
    ///
    /// # Errors
    /// E2BIG if the map is full.
    pub fn insert(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        const NO_EXIST: u64 = 1;
        self.write(key, value, NO_EXIST)
    }

    /// Adds an entry or takes the place of the one with this key.
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

    /// The value of a key.
    ///
    /// # Errors
    /// What bpf(2) says other than that there is none.
    pub fn look_up(&self, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        self.read(key, Command::MapLookup)
    }

    /// Removes an entry and gives its last value. For hashes: Linux 5.14; before that it is read and then removed, and what
    /// the program counts in between is lost.
    ///
    /// # Errors
    /// What bpf(2) says other than that there is none.
    pub fn take(&self, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        match self.read(key, Command::MapLookupAndDelete) {
            // ENOTSUPP (524) of kernels that cannot do it for hashes.
            Err(error) if matches!(error.raw_os_error(), Some(524 | libc::EINVAL | libc::EOPNOTSUPP)) => {
                let value = self.look_up(key)?;
                self.remove(key)?;
                Ok(value)
            }
            result => result,
        }
    }

    fn read(&self, key: &[u8], command: Command) -> io::Result<Option<Vec<u8>>> {
        // Values are copied in whole words.
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

    /// Removes an entry; says whether it was there.
    ///
    /// # Errors
    /// What bpf(2) says other than that there is none.
    pub fn remove(&self, key: &[u8]) -> io::Result<bool> {
        let mut argument = self.element(key)?;
        // SAFETY: the key has the map's size and is borrowed until here.
        match unsafe { argument.perform(Command::MapDelete) } {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Shows every entry of a hash, in no order, a few hundred for each call of the kernel. Entries that come or go
    /// meanwhile may be shown or not.
    ///
    /// # Errors
    /// What bpf(2) says (Linux 5.6).
    pub fn for_each(&self, mut look: impl FnMut(&[u8], &[u8])) -> io::Result<()> {
        let (key, value) = (self.shape.key_bytes, self.shape.value_bytes);
        let mut keys = vec![0; key * BATCH];
        let mut values = vec![0; value * BATCH];
        // The place to go on from: for a hash a number, for others a key.
        let mut place = vec![0; key.max(4)];
        let mut begun = false;
        // A table that others fill while we read ends all the same: there are no more buckets than this.
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
