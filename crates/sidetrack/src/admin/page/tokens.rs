//! The file with the tokens to log in with. Made at the first start, readable by its owner alone.

use super::Role;
use data_encoding::HEXLOWER;
use ring::rand::{SecureRandom as _, SystemRandom};
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Fewest characters of a token.
const LENGTH_MIN: usize = 16;

/// The name of the file, where the configuration names none: beside the admin socket.
const FILE: &str = "page-tokens";

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// The file cannot be read or made.
    #[error("the file of the page's tokens, {0}: {1}; choose another place ([admin] page_tokens)")]
    Io(PathBuf, #[source] io::Error),
    /// Other users may read it.
    #[error("other users may read the page's tokens: chmod 600 {0}")]
    Exposed(PathBuf),
    /// A line is not valid.
    #[error("{0}, line {1}: {2}")]
    Line(PathBuf, usize, &'static str),
    /// There is no token in it.
    #[error("{0} has no token: remove the file, and a restart makes it again")]
    Empty(PathBuf),
}

/// The tokens and what each allows.
#[derive(Clone)]
pub struct Tokens {
    path: PathBuf,
    all: Vec<(Role, String)>,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Tokens {
    /// The default path: beside the admin socket, or in the directory of this user's admin sockets.
    pub fn default_path(socket: Option<&Path>) -> PathBuf {
        let beside = socket.and_then(Path::parent).map(Path::to_owned);
        beside.unwrap_or_else(super::super::directory).join(FILE)
    }

    /// Reads the tokens. If there is no such file, makes it with a new token for each role.
    ///
    /// # Errors
    /// Fails if the file cannot be read or made, if other users may read it, or if a line is not valid.
    pub fn load(path: &Path) -> Result<Self, TokensError> {
        let failed = |error| TokensError::Io(path.to_owned(), error);
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(mut file) => file.write_all(new_file().map_err(failed)?.as_bytes()).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            // A file on a read-only disk is read below.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem && path.exists() => {}
            Err(error) => return Err(failed(error)),
        }
        if fs::metadata(path).map_err(failed)?.mode() & 0o077 != 0 {
            return Err(TokensError::Exposed(path.to_owned()));
        }
        Self::parse(path, &fs::read_to_string(path).map_err(failed)?)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, TokensError> {
        let mut all = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |what| TokensError::Line(path.to_owned(), index + 1, what);
            let (role, token) = line
                .split_once(char::is_whitespace)
                .ok_or_else(|| wrong("write a role and a token: `admin TOKEN` or `read TOKEN`"))?;
            let role = Role::parse(role).ok_or_else(|| wrong("the role is `admin` or `read`"))?;
            let token = token.trim();
            if token.len() < LENGTH_MIN {
                return Err(wrong("a token has at least 16 characters: `openssl rand -hex 32` makes one"));
            }
            all.push((role, token.to_owned()));
        }
        if all.is_empty() {
            return Err(TokensError::Empty(path.to_owned()));
        }
        Ok(Self { path: path.to_owned(), all })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tokens.
    pub(super) fn all(&self) -> &[(Role, String)] {
        &self.all
    }
}

/// Returns random bytes as hexadecimal digits, two for each.
pub(super) fn random<const BYTES: usize>() -> io::Result<String> {
    let mut bytes = [0; BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("the system gives no random bytes"))?;
    Ok(HEXLOWER.encode(&bytes))
}

fn new_file() -> io::Result<String> {
    Ok(format!(
        "# Tokens for the page of Sidetrack. `admin` may do everything, `read` may only look.\n\
         # A restart after a change ends all sessions.\nadmin {}\nread {}\n",
        random::<32>()?,
        random::<32>()?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn the_file_is_made_once_and_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let first = Tokens::load(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(first.all().iter().map(|(role, _)| *role).collect::<Vec<_>>(), [Role::Admin, Role::Read]);
        assert_ne!(first.all()[0].1, first.all()[1].1);
        assert_eq!(Tokens::load(&path).unwrap().all(), first.all());
        assert!(!format!("{first:?}").contains(&first.all()[0].1));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Tokens::load(&path), Err(TokensError::Exposed(_))));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let at = |text: &str| Tokens::parse(Path::new("t"), text).unwrap_err().to_string();
        assert!(at("# a\n\nadmin").starts_with("t, line 3: write a role"), "{}", at("# a\n\nadmin"));
        assert!(at("root 0123456789abcdef").contains("`admin` or `read`"));
        assert!(at("read 0123456789abcde").contains("at least 16"));
        assert!(at("# nothing\n").contains("has no token"));
    }
}
