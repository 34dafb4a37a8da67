//! Names of network interfaces.

use std::fmt;
use std::str::FromStr;

/// An interface name: 1 to 15 bytes, no NUL, slash or white space (the kernel's `dev_valid_name`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceName([u8; 16]);

impl InterfaceName {
    /// The loopback interface.
    pub const LOOPBACK: Self = Self([b'l', b'o', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);

    /// The name with NULs up to 16 bytes.
    pub const fn padded(self) -> [u8; 16] {
        self.0
    }
}

impl FromStr for InterfaceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad =
            |c: char| c == '/' || c == '\0' || c == ':' || c.is_whitespace() || c.is_control() || c == '"';
        if text.is_empty() || text.len() > 15 || text.contains(bad) || text == "." || text == ".." {
            return Err(format!(
                "{text:?} is no interface name: 1 to 15 bytes without slash, colon or space"
            ));
        }
        let mut padded = [0; 16];
        padded.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        Ok(Self(padded))
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        f.write_str(&String::from_utf8_lossy(self.0.get(..end).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_are_checked() {
        assert_eq!("lo".parse(), Ok(InterfaceName::LOOPBACK));
        assert_eq!("veth-a".parse::<InterfaceName>().map(|n| n.to_string()), Ok("veth-a".into()));
        for bad in ["", "sixteen-bytes-xx", "a b", "a/b", "..", "a\"b"] {
            assert!(bad.parse::<InterfaceName>().is_err(), "{bad}");
        }
    }
}
