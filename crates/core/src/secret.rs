//! Comparing secrets. Every password, token or key from a peer is compared here and nowhere else. The time of a
//! comparison does not reveal where the two differ, or how long the secret is (`crates/core/tests/walls/secrets.rs`).

use crate::carrier::Credentials;
use subtle::{Choice, ConstantTimeEq};

/// Returns whether a peer has sent the secret. The time depends only on the length of what it sent.
pub fn same(secret: &[u8], given: &[u8]) -> bool {
    equal(secret, given).into()
}

fn equal(secret: &[u8], given: &[u8]) -> Choice {
    let mut equal = secret.len().ct_eq(&given.len());
    for (at, byte) in given.iter().enumerate() {
        // Bytes beyond the end of the secret are compared with some byte of it, too. The lengths have decided by
        // then.
        let own = secret.get(at % secret.len().max(1)).unwrap_or(&0);
        equal &= own.ct_eq(byte);
    }
    equal
}

/// Returns the account with this user name and password. Checks every account, so that the time does not show which
/// one matches.
pub fn account<'a>(accounts: &'a [Credentials], user: &[u8], password: &[u8]) -> Option<&'a Credentials> {
    accounts.iter().fold(None, |found, account| {
        let matches = equal(account.user.as_bytes(), user) & equal(account.password.as_bytes(), password);
        if matches.into() { Some(account) } else { found }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_secret_is_the_same() {
        for secret in ["", "a", "abc", "abcabc"] {
            for given in ["", "a", "b", "ab", "abc", "abd", "bbc", "abcabc", "abcabd", "aa", "\0"] {
                assert_eq!(
                    same(secret.as_bytes(), given.as_bytes()),
                    secret == given,
                    "{secret:?} {given:?}"
                );
            }
        }
    }

    #[test]
    fn an_account_is_a_user_with_his_password() {
        let accounts = [("ann", "one"), ("bob", "two"), ("ann", "three")];
        let accounts =
            accounts.map(|(user, password)| Credentials { user: user.into(), password: password.into() });
        let found = |user: &str, password: &str| {
            account(&accounts, user.as_bytes(), password.as_bytes()).map(|account| account.password.clone())
        };
        for Credentials { user, password } in &accounts {
            assert_eq!(found(user, password).as_ref(), Some(password));
        }
        for (user, password) in
            [("ann", "two"), ("bob", "one"), ("", ""), ("ann", ""), ("", "one"), ("annone", "")]
        {
            assert_eq!(found(user, password), None, "{user} {password}");
        }
    }
}
