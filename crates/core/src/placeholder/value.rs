//! A secret in memory.

use std::fmt;
use zeroize::Zeroizing;

/// Bytes that may contain a secret. They are overwritten when they are dropped.
pub type Wiped = Zeroizing<Vec<u8>>;

/// A secret. It is overwritten when it is dropped, and is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Wiped);

/// Why a text cannot be a secret. No error contains a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// Nothing is there.
    #[error("it is empty")]
    Empty,
    /// It would be found in texts that do not contain it.
    #[error("it has {0} bytes; a secret has at least {min} here, so that answers can be searched for it", min = Secret::MIN)]
    Short(usize),
    /// No field of a request can carry it.
    #[error("it has {0} bytes, more than {max}", max = Secret::MAX)]
    Long(usize),
    /// It would end the field.
    #[error("it has several lines: write the secret into one line")]
    Lines,
    /// A field cannot carry it.
    #[error("it contains a control character")]
    Control,
}

impl Secret {
    /// Fewest bytes.
    pub const MIN: usize = 8;
    /// Most bytes.
    pub const MAX: usize = 4096;

    /// Checks a secret. One line break at its end is left out, as editors write it.
    ///
    /// # Errors
    /// What a request could not carry.
    pub fn new(text: Vec<u8>) -> Result<Self, SecretError> {
        let mut bytes = Wiped::new(text);
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
            if bytes.last() == Some(&b'\r') {
                bytes.pop();
            }
        }
        match bytes.len() {
            0 => return Err(SecretError::Empty),
            1..Self::MIN => return Err(SecretError::Short(bytes.len())),
            Self::MIN..=Self::MAX => {}
            _ => return Err(SecretError::Long(bytes.len())),
        }
        if bytes.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
            return Err(SecretError::Lines);
        }
        if bytes.iter().any(|byte| byte.is_ascii_control()) {
            return Err(SecretError::Control);
        }
        Ok(Self(bytes))
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_field_cannot_carry_is_refused_and_no_error_shows_it() {
        let of = |text: &str| Secret::new(text.as_bytes().to_vec());
        assert_eq!(of("sk-12345\n").unwrap().bytes(), b"sk-12345");
        assert_eq!(of("sk-12345\r\n").unwrap().bytes(), b"sk-12345");
        assert_eq!(of("two words").unwrap().bytes(), b"two words");
        for (text, error) in [
            ("", SecretError::Empty),
            ("\n", SecretError::Empty),
            ("hunter2", SecretError::Short(7)),
            (&"x".repeat(4097), SecretError::Long(4097)),
            ("sk-12345\n\n", SecretError::Lines),
            ("hunter2x\nhunter3x", SecretError::Lines),
            ("hunter2x\0", SecretError::Control),
        ] {
            let got = of(text).unwrap_err();
            assert_eq!(got, error);
            assert!(!format!("{got} {got:?}").contains("hunter"));
        }
        assert_eq!(format!("{:?}", of("hunter2-hunter3").unwrap()), "Secret");
    }
}
