//! Which layout a peer speaks.

use super::super::address;
use super::super::reader::{Reader, Stop};
use super::super::server::ServerDialect;
use crate::carrier::Socks6Dialect;

/// The layout of a request, told by its first eight bytes: byte 2 is the high byte of the options length in the draft
/// and the address type in `socksx`.
pub(super) fn of_request(setting: ServerDialect, bytes: &[u8]) -> Result<Socks6Dialect, Stop> {
    match setting {
        ServerDialect::Draft => return Ok(Socks6Dialect::Draft),
        ServerDialect::Socksx => return Ok(Socks6Dialect::Socksx),
        ServerDialect::Auto => {}
    }
    let mut reader = Reader::new(bytes);
    reader.take(2)?;
    if !address::is_atyp(reader.u8()?) {
        return Ok(Socks6Dialect::Draft);
    }
    // The shortest request of socksx that can get here has ten bytes (a name of one byte), so these eight come.
    let options_len_low = reader.u8()?;
    reader.take(2)?;
    let (padding, atyp) = (reader.u8()?, reader.u8()?);
    let draft = options_len_low % 4 == 0 && padding == 0 && address::is_atyp(atyp);
    Ok(if draft { Socks6Dialect::Draft } else { Socks6Dialect::Socksx })
}

/// The generation of `socksx` that wrote an Operation Reply, by its bytes 2 and 3: `00 atyp` from 0.1.1 on, a port
/// before, which 0.1.0 always sends as 0.
pub(super) const fn of_socksx_reply(byte_2: u8, byte_3: u8) -> Socks6Dialect {
    if byte_2 == 0 && address::is_atyp(byte_3) { Socks6Dialect::Socksx } else { Socks6Dialect::Socksx010 }
}
