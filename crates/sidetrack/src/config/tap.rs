//! `[tap]`, checked.

use crate::tls::{Roots, Signer, TlsError};
use sidetrack_core::flow::Host;
use sidetrack_core::http::tap::TapRules;
use sidetrack_core::placeholder::Secrets;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which TLS connections are intercepted, who signs for them, and which servers are trusted.
#[derive(Clone, Debug)]
pub struct Tap {
    /// Signs certificates for intercepted connections.
    pub signer: Arc<Signer>,
    /// Which connections are intercepted.
    pub rules: TapRules,
    /// PEM text with more certificates to trust for servers.
    pub trust_pem: Option<Arc<str>>,
    /// Servers whose certificates are not verified.
    pub unverified_hosts: Vec<Host>,
    /// What the certificates of servers are verified by.
    pub roots: Roots,
    /// A file for the secrets of connections.
    pub keylog: Option<PathBuf>,
    /// A file for the requests of connections, without secrets in their heads.
    pub har: Option<PathBuf>,
    /// Most bytes of content of each request and response in that file.
    pub har_bodies_max: usize,
    /// The secrets of a command, which its requests carry as placeholders. A file cannot name any.
    pub secrets: Option<Arc<Secrets>>,
}

impl Tap {
    /// Most bytes of content of a request or response in the archive.
    pub const HAR_BODIES_MAX: u64 = 64 << 20;
}

impl PartialEq for Tap {
    fn eq(&self, other: &Self) -> bool {
        // The roots follow from the system, from `trust_pem` and from `unverified_hosts`.
        self.signer == other.signer
            && self.rules == other.rules
            && self.trust_pem == other.trust_pem
            && self.unverified_hosts == other.unverified_hosts
            && self.keylog == other.keylog
            && self.har == other.har
            && self.har_bodies_max == other.har_bodies_max
            && self.secrets.is_some() == other.secrets.is_some()
    }
}

impl Eq for Tap {}

/// Names of the files in the folder of an authority.
pub const ROOT_FILE: &str = "root.pem";
/// The certificate of the authority that signs; a file name like [`ROOT_FILE`].
pub const SIGNING_FILE: &str = "signing.pem";
/// Its private key; a file name like [`ROOT_FILE`].
pub const KEY_FILE: &str = "signing-key.pem";

/// Why the folder of an authority cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file is missing or cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// Other users can read or change the key.
    #[error("{} is open to others (mode {mode:03o}): whoever has this key speaks for every host", path.display())]
    Open {
        /// The key.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The key belongs to another user, who can read it.
    #[error("{} belongs to user {uid}", path.display())]
    Foreign {
        /// The key.
        path: PathBuf,
        /// The owner's user id.
        uid: u32,
    },
    /// The files do not belong together or cannot be parsed.
    #[error("{}: {error}", path.display())]
    Wrong {
        /// The folder.
        path: PathBuf,
        /// The error.
        error: TlsError,
    },
}

impl AuthorityError {
    /// Says how to fix it.
    pub fn help(&self) -> String {
        match self {
            Self::Unreadable { path, .. } => {
                let folder = path.parent().unwrap_or(Path::new(".")).display();
                format!("`sidetrack ca init --dir {folder} --name DOMAIN` makes an authority")
            }
            Self::Open { path, .. } => format!("chmod 600 {}", path.display()),
            Self::Foreign { path, .. } => {
                format!("chown it to the user that runs sidetrack: chown $USER {}", path.display())
            }
            Self::Wrong { path, .. } => {
                format!("make it anew: move {} away and run `sidetrack ca init`", path.display())
            }
        }
    }
}

/// Reads the name or address of a server whose certificates are not verified.
///
/// # Errors
/// The text is neither, or stands for several hosts.
pub fn exact_host(text: &str) -> Result<Host, String> {
    if text.contains('*') {
        return Err(format!("'{text}' stands for several hosts, and here each one is named"));
    }
    Host::from_bytes(text.as_bytes()).map_err(|error| format!("'{text}': {error}"))
}

/// Reads the authority in a folder.
///
/// # Errors
/// Fails if a file is missing, if other users can read the key, or if the files do not belong together.
pub fn authority(folder: &Path) -> Result<Signer, AuthorityError> {
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read_to_string(&path).map_err(|error| AuthorityError::Unreadable { path, error })
    };
    let path = folder.join(KEY_FILE);
    let metadata =
        std::fs::metadata(&path).map_err(|error| AuthorityError::Unreadable { path: path.clone(), error })?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(AuthorityError::Open { path, mode });
    }
    let uid = metadata.uid();
    if uid != 0 && uid != nix::unistd::geteuid().as_raw() {
        return Err(AuthorityError::Foreign { path, uid });
    }
    let (root, signing, key) = (read(ROOT_FILE)?, read(SIGNING_FILE)?, read(KEY_FILE)?);
    Signer::new(&root, &signing, &key)
        .map_err(|error| AuthorityError::Wrong { path: folder.to_owned(), error })
}
