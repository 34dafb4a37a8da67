//! Detects the layout of a peer.

use super::super::address;
use super::super::reader::{Reader, Stop};
use super::super::server::ServerDialect;
use crate::carrier::Socks6Dialect;

/// Returns the layout of a request, from its first eight bytes. In the draft, byte 2 is the high byte of the options
/// length. In `socksx` it is the address type.
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
    // The shortest `socksx` request that gets here has ten bytes (a name of one byte), so these eight bytes will
    // arrive.
    let options_len_low = reader.u8()?;
    reader.take(2)?;
    let (padding, atyp) = (reader.u8()?, reader.u8()?);
    let draft = options_len_low % 4 == 0 && padding == 0 && address::is_atyp(atyp);
    Ok(if draft { Socks6Dialect::Draft } else { Socks6Dialect::Socksx })
}

/// Returns the generation of `socksx` that wrote an Operation Reply, from its bytes 2 and 3. They are `00 atyp` from
/// 0.1.1 on. Before, they are a port, which 0.1.0 always sends as 0.
pub(super) const fn of_socksx_reply(byte_2: u8, byte_3: u8) -> Socks6Dialect {
    if byte_2 == 0 && address::is_atyp(byte_3) { Socks6Dialect::Socksx } else { Socks6Dialect::Socksx010 }
}
