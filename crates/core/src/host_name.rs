//! Host names, and how they are distinguished from addresses written as text.
//!
//! A name that the resolver accepts as an address, but that a rule does not recognise as one, would bypass every rule
//! about networks. So a [`HostName`] is never an address in any notation that a resolver accepts. International names
//! have only one form: the ASCII form of DNS (RFC 5890 "A-label").

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

/// A host name from a peer or an application: 1 to 255 ASCII bytes, without NUL, control bytes and white space, and
/// not an address in any notation.
///
/// ASCII upper case becomes lower case (RFC 4343), and one final dot is dropped. An international name is converted
/// to ASCII (UTS 46, non-transitional): `Bücher.example` becomes `xn--bcher-kva.example`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(Arc<str>);

/// Why bytes are not a valid host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostNameError {
    /// It is empty.
    #[error("a host name cannot be empty")]
    Empty,
    /// It has more than 255 bytes, or a converted label has more than 63.
    #[error("a host name has at most 255 bytes")]
    TooLong,
    /// It contains a NUL, a control byte, white space or bytes that are not UTF-8.
    #[error("a host name cannot hold control bytes, white space or broken UTF-8")]
    BadByte,
    /// It contains a character that separates the parts of a URL, or it ends in two dots.
    #[error("a host name cannot hold : / \\ @ ? # % [ ] and cannot end in two dots")]
    Separator,
    /// It is an address, but only a name is allowed here.
    #[error("this is an address, not a host name")]
    Address,
    /// Its last label is a number, but the whole is not an address.
    #[error(
        "the last part is a number, but this is not an address: write four decimal numbers from 0 to 255 without leading zeros, such as 192.0.2.1"
    )]
    Number,
    /// It is an IPv6 address with a zone.
    #[error("an address with a zone (after %) has a meaning on one host only: leave the zone out")]
    Zone,
    /// It cannot be converted to ASCII (UTS 46).
    #[error("this international name cannot be converted to ASCII (IDNA, UTS 46)")]
    International,
}

/// Most bytes of a label (RFC 1035 Sec. 2.3.4).
const LABEL_MAX: usize = 63;

/// The beginning of a converted label (RFC 5890 Sec. 2.3.2.1).
const CONVERTED: &str = "xn--";

impl HostName {
    /// Most bytes of a name (the length field of SOCKS5 and SOCKS6 has one byte; DNS allows 253).
    pub const MAX: usize = 255;

    /// Checks a name from wire bytes and converts it.
    ///
    /// # Errors
    /// Fails with the rule that the bytes break.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HostNameError> {
        if bytes.len() > Self::MAX + 1 {
            return Err(HostNameError::TooLong);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| HostNameError::BadByte)?;
        if text.is_ascii() {
            return Self::from_ascii(text);
        }
        let converted = to_ascii(text)?;
        if converted.split('.').any(|label| label.len() > LABEL_MAX) {
            return Err(HostNameError::TooLong);
        }
        Self::from_ascii(&converted)
    }

    fn from_ascii(text: &str) -> Result<Self, HostNameError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(HostNameError::Empty);
        }
        if text.len() > Self::MAX {
            return Err(HostNameError::TooLong);
        }
        if text.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
            return Err(HostNameError::BadByte);
        }
        if text.ends_with('.') {
            return Err(HostNameError::Separator);
        }
        match address(text.as_bytes())? {
            Some(_) => return Err(HostNameError::Address),
            None if text.bytes().any(is_separator) => return Err(HostNameError::Separator),
            None => {}
        }
        Ok(Self(match text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            true => text.to_ascii_lowercase().into(),
            false => text.into(),
        }))
    }

    /// Returns the name as text: ASCII in lower case, without a final dot.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name in Unicode if that differs from [`Self::as_str`]: `bücher.example`.
    pub fn to_unicode(&self) -> Option<String> {
        if !self.0.contains(CONVERTED) {
            return None;
        }
        // A label that is not a valid conversion stays unchanged.
        Some(idna::domain_to_unicode(&self.0).0).filter(|text| **text != *self.0)
    }

    /// Whether the name means the local host, whatever a resolver answers (RFC 6761 Sec. 6.3).
    pub fn is_localhost(&self) -> bool {
        self.0.strip_suffix("localhost").is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }
}

impl FromStr for HostName {
    type Err = HostNameError;

    fn from_str(text: &str) -> Result<Self, HostNameError> {
        Self::from_bytes(text.as_bytes())
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Converts an international name, or a part of one, to the ASCII form of DNS.
fn to_ascii(text: &str) -> Result<Cow<'_, str>, HostNameError> {
    // UTS 46 removes some characters. This must not hide white space or control characters.
    if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(HostNameError::BadByte);
    }
    idna::domain_to_ascii_cow(text.as_bytes(), idna::AsciiDenyList::EMPTY)
        .map_err(|_| HostNameError::International)
}

/// Normalises a part of an international name in the same way as names: case, composition, width (UTS 46).
///
/// # Errors
/// [`HostNameError::International`]
pub fn folded_part(text: &str) -> Result<String, HostNameError> {
    if text.is_ascii() {
        return Ok(text.to_ascii_lowercase());
    }
    to_ascii(text).map(|ascii| idna::domain_to_unicode(&ascii).0)
}

const fn is_separator(byte: u8) -> bool {
    matches!(byte, b':' | b'/' | b'\\' | b'@' | b'?' | b'#' | b'%' | b'[' | b']')
}

/// Parses an address as in RFC 3986 Sec. 3.2.2, and IPv6 also without brackets. `None` if the text may be a name.
///
/// # Errors
/// Fails if the text cannot be a name either: `inet_aton(3)` would accept it as an address, or it has a zone.
pub(crate) fn address(bytes: &[u8]) -> Result<Option<IpAddr>, HostNameError> {
    if bytes.contains(&b':') || bytes.first() == Some(&b'[') {
        return ipv6(bytes).map(Some);
    }
    let bytes = bytes.strip_suffix(b".").unwrap_or(bytes);
    let start = bytes.iter().rposition(|byte| *byte == b'.').map_or(0, |dot| dot + 1);
    if !is_number(bytes.get(start..).unwrap_or_default()) {
        return Ok(None);
    }
    let ip = std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<Ipv4Addr>().ok());
    ip.map(|ip| Some(ip.into())).ok_or(HostNameError::Number)
}

fn ipv6(bytes: &[u8]) -> Result<IpAddr, HostNameError> {
    let bare = match bytes.strip_prefix(b"[") {
        Some(rest) => rest.strip_suffix(b"]").ok_or(HostNameError::Separator)?,
        None => bytes,
    };
    let text = std::str::from_utf8(bare).map_err(|_| HostNameError::BadByte)?;
    if let Ok(ip) = text.parse::<Ipv6Addr>() {
        return Ok(IpAddr::V6(ip).to_canonical());
    }
    let is_zoned = text.split_once('%').is_some_and(|(ip, _)| ip.parse::<Ipv6Addr>().is_ok());
    Err(if is_zoned { HostNameError::Zone } else { HostNameError::Separator })
}

/// Whether a resolver could read the whole as an address because of its last label. Top-level domains are never
/// numbers.
fn is_number(label: &[u8]) -> bool {
    match label {
        [] => false,
        [b'0', b'x' | b'X', digits @ ..] => digits.iter().all(u8::is_ascii_hexdigit),
        digits => digits.iter().all(u8::is_ascii_digit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Host;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Host, HostNameError> {
        Host::from_bytes(text.as_bytes())
    }

    #[test]
    fn text_that_is_an_address_is_an_address() {
        for (text, ip) in [
            ("127.0.0.1", "127.0.0.1"),
            ("127.0.0.1.", "127.0.0.1"),
            ("::1", "::1"),
            ("[::1]", "::1"),
            ("::ffff:127.0.0.1", "127.0.0.1"),
            ("[::FFFF:7f00:1]", "127.0.0.1"),
            ("64:ff9b::7f00:1", "64:ff9b::7f00:1"),
        ] {
            assert_eq!(read(text), Ok(Host::Ip(ip.parse().unwrap())), "{text}");
            assert!(HostName::from_bytes(text.as_bytes()).is_err(), "{text} is no name");
        }
    }

    #[test]
    fn what_only_inet_aton_takes_for_an_address_is_neither() {
        for text in [
            "127.1",
            "127.0.1",
            "2130706433",
            "017700000001",
            "0177.0.0.1",
            "0x7f.1",
            "0x7F.0.0.0x1",
            "0x7f000001",
            "0",
            "0.",
            "0x",
            "00.0.0.0",
            "127.0.0.01",
            "256.0.0.1",
            "1.2.3.4.5",
            "a.1",
            "127.0.0.1..",
            "4294967296",
            // Digits of other scripts.
            "１２７.0.0.1",
            "１２７.１",
        ] {
            let error = read(text).unwrap_err();
            assert!(matches!(error, HostNameError::Number | HostNameError::Separator), "{text}: {error}");
        }
        for text in ["fe80::1%lo", "[fe80::1%25lo]", "fe80::1%1"] {
            assert_eq!(read(text), Err(HostNameError::Zone), "{text}");
        }
        for text in
            ["[::1", "::1]", "[127.0.0.1]", "[a]", "a:b", "a/b", "u@h", "a..", "a%00", "127.0.0.1/8", "a\\b"]
        {
            assert_eq!(read(text), Err(HostNameError::Separator), "{text}");
        }
        for text in ["1a", "a1", "1.example", "0x7f.example", "x0", "0xg", "10-0-0-1.example", "a_b"] {
            assert!(matches!(read(text), Ok(Host::Name(_))), "{text} is a name");
        }
    }

    #[test]
    fn international_names_have_one_form() {
        for text in [
            "bücher.example",
            "BÜCHER.Example.",
            "bu\u{308}cher.example",
            "bücher。example",
            "XN--BCHER-KVA.example",
        ] {
            assert_eq!(text.parse::<HostName>().unwrap().as_str(), "xn--bcher-kva.example", "{text}");
        }
        let name: HostName = "xn--bcher-kva.example".parse().unwrap();
        assert_eq!(name.to_unicode().as_deref(), Some("bücher.example"));
        assert_eq!("www.example".parse::<HostName>().unwrap().to_unicode(), None);
        assert_eq!("straße.example".parse::<HostName>().unwrap().as_str(), "xn--strae-oqa.example");
        assert_eq!("a\u{2f}ü".parse::<HostName>(), Err(HostNameError::Separator));
        assert_eq!("ü\u{a0}b".parse::<HostName>(), Err(HostNameError::BadByte));
        for bad in ["\u{fffd}.example", "xn--ü.example", "\u{5d0}a\u{5d0}1.example"] {
            assert_eq!(bad.parse::<HostName>(), Err(HostNameError::International), "{bad}");
        }
        let long = format!("{}.example", "ü".repeat(70));
        assert_eq!(long.parse::<HostName>(), Err(HostNameError::TooLong));
        assert_eq!(folded_part("BÜCHER"), Ok("bücher".to_owned()));
        assert_eq!(folded_part("Casino-"), Ok("casino-".to_owned()));
    }

    #[test]
    fn localhost_and_what_is_below_it_is_this_host() {
        for (text, is_it) in [
            ("localhost", true),
            ("LocalHost.", true),
            ("a.localhost", true),
            ("notlocalhost", false),
            ("localhost.example", false),
        ] {
            assert_eq!(text.parse::<HostName>().unwrap().is_localhost(), is_it, "{text}");
        }
    }

    proptest! {
        /// Whatever the bytes are: a name is ASCII, parses to itself, and is not an address for any parser.
        #[test]
        fn a_name_is_never_an_address(text in "([0-9a-fx:%.\\[\\]üß]|١|１|[a-z]{2}){1,20}") {
            if let Ok(name) = text.parse::<HostName>() {
                prop_assert!(name.as_str().is_ascii());
                prop_assert_eq!(name.as_str().parse::<HostName>(), Ok(name.clone()));
                prop_assert!(name.as_str().parse::<IpAddr>().is_err());
                let last = name.as_str().rsplit('.').next().unwrap_or_default();
                prop_assert!(!is_number(last.as_bytes()));
            }
        }

        /// Every address parses to itself, also with a final dot and in brackets.
        #[test]
        fn an_address_reads_as_it_is_written(v4 in any::<u32>(), v6 in any::<u128>()) {
            let (v4, v6) = (Ipv4Addr::from(v4), Ipv6Addr::from(v6));
            for text in [v4.to_string(), format!("{v4}."), format!("::ffff:{v4}")] {
                prop_assert_eq!(read(&text), Ok(Host::Ip(v4.into())));
            }
            for text in [v6.to_string(), format!("[{v6}]")] {
                prop_assert_eq!(read(&text), Ok(Host::from(IpAddr::V6(v6))));
            }
        }
    }
}
