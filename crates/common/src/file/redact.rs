//! Hides secrets in the text of a configuration before the text is shown.

/// Returns the text with each password replaced by stars, byte for byte, so that places stay valid. Works on
/// text that is not TOML too, and then hides too much rather than too little.
pub(super) fn redact(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    hide_passwords(text, &mut bytes);
    hide_userinfo(text, &mut bytes);
    String::from_utf8(bytes).unwrap_or_default()
}

fn stars(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().filter(|byte| **byte != b'\n' && **byte != b'\r') {
        *byte = b'*';
    }
}

/// Hides the value of every key `password`.
fn hide_passwords(text: &str, bytes: &mut [u8]) {
    for (start, word) in text.match_indices("password") {
        let after = &text[start + word.len()..];
        let rest = after.trim_start_matches(['"', '\'', ' ', '\t']);
        let Some(rest) = rest.strip_prefix('=') else { continue };
        let value = rest.trim_start_matches([' ', '\t']);
        let from = text.len() - value.len();
        let end = from + value_len(value);
        if let Some(value) = bytes.get_mut(from..end) {
            stars(value);
        }
    }
}

/// Returns the length of a value: up to the closing quote, or without quotes to the end of the entry.
fn value_len(value: &str) -> usize {
    for quote in ["\"\"\"", "'''"] {
        if let Some(body) = value.strip_prefix(quote) {
            return body.find(quote).map_or(value.len(), |end| end + 2 * quote.len());
        }
    }
    let line = value.find('\n').unwrap_or(value.len());
    let (quote, escapes) = match value.as_bytes().first() {
        Some(b'"') => (b'"', true),
        Some(b'\'') => (b'\'', false),
        _ => return value.find([',', '}', '\n']).unwrap_or(value.len()),
    };
    let mut escaped = false;
    for (index, byte) in value.bytes().enumerate().take(line).skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if escapes => escaped = true,
            byte if byte == quote => return index + 1,
            _ => {}
        }
    }
    line
}

/// Hides the password of `scheme://user:password@host`, with or without the scheme.
fn hide_userinfo(text: &str, bytes: &mut [u8]) {
    let ends = |c: char| matches!(c, '"' | '\'' | '\n');
    for (last, _) in text.match_indices('@') {
        let start = text[..last].rfind(ends).map_or(0, |at| at + 1);
        let token = &text[start..last];
        let user = token.find("://").map_or(start, |scheme| start + scheme + 3);
        let Some(colon) = text[user..last].find(':') else { continue };
        if let Some(secret) = bytes.get_mut(user + colon + 1..last) {
            stars(secret);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::redact;

    #[test]
    fn secrets_become_stars_of_the_same_length() {
        for (text, shown) in [
            ("password = \"ab\\\"c\" # x", "password = ******* # x"),
            ("{user='a', password='b c'}", "{user='a', password=*****}"),
            ("\"password\" = 12345\nnext = 1", "\"password\" = *****\nnext = 1"),
            ("password=\"open\nnext = 1", "password=*****\nnext = 1"),
            ("password = \"\"\"a\nb\"\"\"\nc = 1", "password = ****\n****\nc = 1"),
            ("password = \"é\"", "password = ****"),
            ("c = \"socks5://u:p@ss@gw:1\"", "c = \"socks5://u:****@gw:1\""),
            ("c = [\"u:p,[w@gw\", \"@set\"]", "c = [\"u:****@gw\", \"@set\"]"),
            ("c = \"u:pw@gw\"", "c = \"u:**@gw\""),
            ("c = \"socks5://gw:1\"", "c = \"socks5://gw:1\""),
            ("password_file = \"/etc/pw\"", "password_file = \"/etc/pw\""),
        ] {
            assert_eq!(redact(text), shown, "{text}");
            assert_eq!(redact(text).len(), text.len(), "{text}");
        }
    }
}
