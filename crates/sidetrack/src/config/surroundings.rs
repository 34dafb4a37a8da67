//! Things outside a configuration that it refers to: users of this machine, and files.

use super::zone;
use std::borrow::Cow;
use std::cell::RefCell;
use std::io;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Access to users and files that a configuration refers to. A trait, so that tests need no real users and
/// files.
pub trait Surroundings {
    /// The id of a user of this machine.
    fn uid_of(&self, name: &str) -> Option<u32>;

    /// The index of a network interface of this machine.
    fn interface_index(&self, name: &str) -> Option<u32>;

    /// The text of a file of secrets. A relative path starts from the folder of the configuration.
    ///
    /// # Errors
    /// Fails as reading the file does, and also if it is larger than 64 KiB or not UTF-8.
    fn secret_file(&self, path: &str) -> io::Result<SecretFile>;

    /// Resolves a path from the folder of the configuration.
    fn resolve(&self, path: &str) -> PathBuf;
}

/// A file of secrets.
#[derive(Clone)]
pub struct SecretFile {
    /// Its text.
    pub text: String,
    /// Whether every user of this machine can read it.
    pub world_readable: bool,
}

/// This machine.
#[derive(Clone, Debug)]
pub struct System {
    folder: PathBuf,
}

impl System {
    /// Relative paths start from `folder`.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }
}

/// Largest file of secrets.
const SECRET_FILE_MAX: u64 = 64 * 1024;

impl Surroundings for System {
    fn uid_of(&self, name: &str) -> Option<u32> {
        nix::unistd::User::from_name(name).ok().flatten().map(|user| user.uid.as_raw())
    }

    fn interface_index(&self, name: &str) -> Option<u32> {
        sidetrack_sys::route::interface_index(name).ok()
    }

    fn secret_file(&self, path: &str) -> io::Result<SecretFile> {
        let file = std::fs::File::open(self.resolve(path))?;
        let world_readable = file.metadata()?.permissions().mode() & 0o004 != 0;
        let mut text = String::new();
        file.take(SECRET_FILE_MAX + 1).read_to_string(&mut text)?;
        if text.len() as u64 > SECRET_FILE_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 64 KiB"));
        }
        Ok(SecretFile { text, world_readable })
    }

    fn resolve(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }
}

/// Returns a text with the zone of its address, if it has one, as the number of an interface of this machine.
///
/// # Errors
/// Fails if the address has no zones, or if there is no such interface.
pub fn numbered(text: &str) -> anyhow::Result<Cow<'_, str>> {
    let index_of = |name: &str| System::new(Path::new("")).interface_index(name);
    zone::numbered(text, index_of).map_err(|error| anyhow::anyhow!("{error}; {}", error.help()))
}

/// Wraps surroundings and remembers which paths a configuration names.
pub(super) struct Noting<'a> {
    inner: &'a dyn Surroundings,
    named: RefCell<Vec<PathBuf>>,
}

impl<'a> Noting<'a> {
    /// Starts with no paths.
    pub(super) const fn new(inner: &'a dyn Surroundings) -> Self {
        Self { inner, named: RefCell::new(Vec::new()) }
    }

    /// The paths, each once.
    pub(super) fn named(&self) -> Vec<PathBuf> {
        let mut named = self.named.take();
        named.sort_unstable();
        named.dedup();
        named
    }
}

impl Surroundings for Noting<'_> {
    fn uid_of(&self, name: &str) -> Option<u32> {
        self.inner.uid_of(name)
    }

    fn interface_index(&self, name: &str) -> Option<u32> {
        self.inner.interface_index(name)
    }

    fn secret_file(&self, path: &str) -> io::Result<SecretFile> {
        let _ = self.resolve(path);
        self.inner.secret_file(path)
    }

    fn resolve(&self, path: &str) -> PathBuf {
        let resolved = self.inner.resolve(path);
        self.named.borrow_mut().push(resolved.clone());
        resolved
    }
}
