//! `[tap]`, checked.

use crate::tls::{Roots, Signer, TlsError};
use sidetrack_core::http::tap::TapRules;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which TLS is opened, in whose name, and whom we believe on the other side.
#[derive(Clone, Debug)]
pub struct Tap {
    /// Who signs certificates.
    pub signer: Arc<Signer>,
    /// Which connections are opened.
    pub rules: TapRules,
    /// Text of a file with further authorities whose servers are believed.
    pub trust_pem: Option<Arc<str>>,
    /// Whose servers are believed.
    pub roots: Roots,
    /// A file for the secrets of connections.
    pub keylog: Option<PathBuf>,
    /// A file for the requests of connections, without content and secrets.
    pub har: Option<PathBuf>,
}

impl PartialEq for Tap {
    fn eq(&self, other: &Self) -> bool {
        // The roots are those of the system and of the text.
        self.signer == other.signer
            && self.rules == other.rules
            && self.trust_pem == other.trust_pem
            && self.keylog == other.keylog
            && self.har == other.har
    }
}

impl Eq for Tap {}

/// Names of the files in the folder of an authority.
pub const ROOT_FILE: &str = "root.pem";
/// As [`ROOT_FILE`]: the certificate of the authority that signs.
pub const SIGNING_FILE: &str = "signing.pem";
/// As [`ROOT_FILE`]: its private key.
pub const KEY_FILE: &str = "signing-key.pem";

/// Why the folder of an authority is of no use.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file is not there, or cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Others can read or change the key.
    #[error("{} is open to others (mode {mode:03o}): whoever has this key speaks for every host", path.display())]
    Open {
        /// The key.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The key belongs to somebody else, who can read it.
    #[error("{} belongs to user {uid}", path.display())]
    Foreign {
        /// The key.
        path: PathBuf,
        /// Whose it is.
        uid: u32,
    },
    /// What is in them does not fit.
    #[error("{}: {error}", path.display())]
    Wrong {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        error: TlsError,
    },
}

impl AuthorityError {
    /// What mends it.
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

/// Reads the authority in a folder.
///
/// # Errors
/// It is not there, others can read its key, or its files do not belong together.
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
