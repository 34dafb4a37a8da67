//! Sessions of the page: a login with a token gives a cookie that a key of these tokens signs.
//!
//! ```text
//! no cookie --POST /page/session with a token--> cookie "ROLE.EXPIRES.NONCE.TAG" --12 h, or DELETE--> no cookie
//! ```
//!
//! The process keeps no table of sessions: a restart with the same tokens goes on with them, and other tokens end all
//! of them. Only the sessions that logged out are noted, until a restart; their number is bounded.

use super::Role;
use super::tokens::{Tokens, random};
use data_encoding::HEXLOWER;
use ring::hmac;
use sidetrack_sys::sync::lock;
use std::collections::VecDeque;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a session lasts.
pub(super) const LASTS: Duration = Duration::from_hours(12);

/// Most sessions that are noted as logged out.
const LOGGED_OUT_MAX: usize = 1024;

/// Checks tokens and cookies.
pub(super) struct Sessions {
    tokens: Vec<(Role, String)>,
    key: hmac::Key,
    logged_out: Mutex<VecDeque<String>>,
}

/// Seconds since 1970.
fn unix(now: SystemTime) -> u64 {
    now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Sessions {
    pub(super) fn new(tokens: &Tokens) -> Self {
        let all: Vec<_> =
            tokens.all().iter().map(|(role, token)| format!("{} {token}", role.as_str())).collect();
        let seed = hmac::Key::new(hmac::HMAC_SHA256, all.join("\n").as_bytes());
        let key = hmac::sign(&seed, b"sidetrack page session");
        let key = hmac::Key::new(hmac::HMAC_SHA256, key.as_ref());
        Self { tokens: tokens.all().to_vec(), key, logged_out: Mutex::default() }
    }

    /// The role of a token. Takes the same time for all that are wrong.
    pub(super) fn role_of(&self, token: &str) -> Option<Role> {
        let tag = hmac::sign(&self.key, token.as_bytes());
        let mut found = None;
        for (role, known) in &self.tokens {
            if hmac::verify(&self.key, known.as_bytes(), tag.as_ref()).is_ok() {
                found = Some(*role);
            }
        }
        found
    }

    /// The value of a new session's cookie.
    ///
    /// # Errors
    /// Fails if the system gives no random bytes.
    pub(super) fn open(&self, role: Role, now: SystemTime) -> io::Result<String> {
        let about = format!("{}.{}.{}", role.as_str(), unix(now) + LASTS.as_secs(), random::<16>()?);
        let tag = hmac::sign(&self.key, about.as_bytes());
        Ok(format!("{about}.{}", HEXLOWER.encode(tag.as_ref())))
    }

    /// The role of a session, if its cookie is ours, has not expired and was not logged out.
    pub(super) fn role(&self, cookie: &str, now: SystemTime) -> Option<Role> {
        let (about, tag) = cookie.rsplit_once('.')?;
        let tag = HEXLOWER.decode(tag.as_bytes()).ok()?;
        hmac::verify(&self.key, about.as_bytes(), &tag).ok()?;
        let mut parts = about.split('.');
        let (role, expires, nonce) = (Role::parse(parts.next()?)?, parts.next()?, parts.next()?);
        let is_over = expires.parse::<u64>().ok()? <= unix(now) || self.is_logged_out(nonce);
        (!is_over).then_some(role)
    }

    fn is_logged_out(&self, nonce: &str) -> bool {
        lock(&self.logged_out).iter().any(|other| other == nonce)
    }

    /// Ends a session.
    pub(super) fn close(&self, cookie: &str, now: SystemTime) {
        if self.role(cookie, now).is_none() {
            return;
        }
        let Some(nonce) = cookie.split('.').nth(2) else { return };
        let mut logged_out = lock(&self.logged_out);
        if logged_out.len() >= LOGGED_OUT_MAX {
            logged_out.pop_front();
        }
        logged_out.push_back(nonce.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sessions(folder: &tempfile::TempDir) -> (Sessions, Tokens) {
        let tokens = Tokens::load(&folder.path().join("tokens")).unwrap();
        (Sessions::new(&tokens), tokens)
    }

    #[test]
    fn a_session_lasts_over_a_restart_until_it_expires_or_logs_out() {
        let folder = tempfile::tempdir().unwrap();
        let (first, tokens) = sessions(&folder);
        let now = SystemTime::now();
        assert_eq!(first.role_of(&tokens.all()[1].1), Some(Role::Read));
        assert_eq!(first.role_of("admin"), None);
        let cookie = first.open(Role::Read, now).unwrap();
        let (again, _) = sessions(&folder);
        assert_eq!(again.role(&cookie, now), Some(Role::Read));
        assert_eq!(again.role(&cookie, now + LASTS), None, "expired");
        again.close(&cookie, now);
        assert_eq!(again.role(&cookie, now), None, "logged out");
        assert_eq!(first.role(&cookie, now), Some(Role::Read));
        let other = tempfile::tempdir().unwrap();
        assert_eq!(sessions(&other).0.role(&cookie, now), None, "other tokens");
    }

    #[test]
    fn a_changed_cookie_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let (sessions, _) = sessions(&folder);
        let now = SystemTime::now();
        let cookie = sessions.open(Role::Read, now).unwrap();
        assert_eq!(sessions.role(&cookie.replace("read", "admin"), now), None);
        for end in 0..cookie.len() {
            assert_eq!(sessions.role(&cookie[..end], now), None, "{end}");
        }
        for text in ["", ".", "...", "admin.9999999999.a.", "admin.9999999999.a.00"] {
            assert_eq!(sessions.role(text, now), None, "{text}");
        }
    }
}
