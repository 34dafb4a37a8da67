//! Gives the secrets of TLS connections away in the NSS key log format, so that a capture can be decrypted: to a file, and to captures
//! that run.

use crate::live::keys;
use sidetrack_sys::sync::lock;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Where the secrets of connections go. The file is appended to, and only its owner can read it.
#[derive(Debug, Default)]
pub(super) struct KeyLogs {
    file: Option<Mutex<File>>,
}

impl KeyLogs {
    /// Opens the file, or makes it. Without a file, only captures get secrets.
    ///
    /// # Errors
    /// As open(2).
    pub(super) fn open(path: Option<&Path>) -> io::Result<Arc<Self>> {
        let open = |path| OpenOptions::new().create(true).append(true).mode(0o600).open(path);
        let file = path.map(open).transpose()?;
        Ok(Arc::new(Self { file: file.map(Mutex::new) }))
    }
}

impl rustls::KeyLog for KeyLogs {
    fn log(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        keys::keep(label, client_random, secret);
        let Some(file) = &self.file else { return };
        let line = keys::line(label, client_random, secret);
        if let Err(error) = lock(file).write_all(line.as_bytes()) {
            tracing::warn!(%error, "cannot write the key log");
        }
    }

    fn will_log(&self, _: &str) -> bool {
        self.file.is_some() || keys::are_wanted()
    }
}
