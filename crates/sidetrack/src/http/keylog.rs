//! Writes the secrets of TLS connections in the NSS key log format, so that a capture can be decrypted.

use data_encoding::HEXLOWER;
use sidetrack_sys::sync::lock;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

/// A key log file. It is appended to, and only its owner can read it.
#[derive(Debug)]
pub(super) struct KeyLogFile(Mutex<File>);

impl KeyLogFile {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// As open(2).
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
        Ok(Self(Mutex::new(file)))
    }
}

impl rustls::KeyLog for KeyLogFile {
    fn log(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        let line = format!("{label} {} {}\n", HEXLOWER.encode(client_random), HEXLOWER.encode(secret));
        let mut file = lock(&self.0);
        if let Err(error) = file.write_all(line.as_bytes()) {
            tracing::warn!(%error, "cannot write the key log");
        }
    }
}
