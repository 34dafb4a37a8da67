//! User name and password (RFC 1929), in the stream of version 5 and of -11, and in options of version 6.

use super::reader::{Reader, Stop};

/// Method number: no authentication.
pub(crate) const METHOD_NONE: u8 = 0;
/// Method number: user name and password.
pub(crate) const METHOD_PASSWORD: u8 = 2;
/// Method number: none of the offered methods is acceptable.
pub(crate) const METHOD_UNACCEPTABLE: u8 = 0xff;
/// Version byte of the sub-negotiation.
pub(crate) const VERSION: u8 = 1;

/// Writes `01 ulen user plen password`. `None` if a part is empty or longer than 255 bytes.
pub(crate) fn put_request(out: &mut Vec<u8>, user: &[u8], password: &[u8]) -> Option<()> {
    let len = |part: &[u8]| u8::try_from(part.len()).ok().filter(|len| *len > 0);
    let (user_len, password_len) = (len(user)?, len(password)?);
    out.extend_from_slice(&[VERSION, user_len]);
    out.extend_from_slice(user);
    out.push(password_len);
    out.extend_from_slice(password);
    Some(())
}

/// Reads `01 ulen user plen password`. The caller checks the version byte, which comes first.
pub(crate) fn read_request<'a>(reader: &mut Reader<'a>) -> Result<(u8, &'a [u8], &'a [u8]), Stop> {
    let version = reader.u8()?;
    let user_len = reader.u8()?;
    let user = reader.take(usize::from(user_len))?;
    let password_len = reader.u8()?;
    Ok((version, user, reader.take(usize::from(password_len))?))
}
