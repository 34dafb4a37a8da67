//! The server side of the Basic authentication scheme (RFC 7617).

use data_encoding::BASE64;

/// Returns the user and the password of credentials such as `Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==`. `None` for another
/// scheme, invalid Base64, bytes that are not UTF-8, or a missing colon.
pub fn credentials(value: &[u8]) -> Option<(String, String)> {
    let (scheme, token) = value.split_at(value.iter().position(|byte| *byte == b' ')?);
    if !scheme.eq_ignore_ascii_case(b"basic") {
        return None;
    }
    let login = String::from_utf8(BASE64.decode(token.trim_ascii()).ok()?).ok()?;
    let (user, password) = login.split_once(':')?;
    Some((user.to_owned(), password.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_read() {
        let login = |text: &str| credentials(text.as_bytes());
        let pair = Some(("a".to_owned(), "b:c".to_owned()));
        assert_eq!(login("Basic YTpiOmM="), pair);
        assert_eq!(login("basic  YTpiOmM= "), pair);
        for bad in ["Bearer x", "Basic", "Basic ?", "Basic YQ==", ""] {
            assert_eq!(login(bad), None, "{bad}");
        }
    }
}
