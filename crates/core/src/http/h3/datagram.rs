//! Datagrams of QUIC that carry payloads of UDP (RFC 9297 Sec. 2.1, RFC 9298 Sec. 5): the quarter of the request's stream id, a
//! context id, and the payload.

use super::{Code, Error};
use crate::http::capsule::{put_varint, read_varint};

/// The largest quarter of a stream id.
const QUARTER_MAX: u64 = (1 << 60) - 1;

/// The context of UDP payloads.
const UDP: u64 = 0;

/// Appends a datagram for the request on this stream. `stream` is the id of a stream that a client has opened for a request, so
/// it is a multiple of 4.
pub fn put(out: &mut Vec<u8>, stream: u64, payload: &[u8]) {
    put_varint(out, stream / 4);
    put_varint(out, UDP);
    out.extend_from_slice(payload);
}

/// Returns how many bytes [`put`] writes before the payload.
pub const fn header_bytes(stream: u64) -> usize {
    let quarter = match stream / 4 {
        0..0x40 => 1,
        0x40..0x4000 => 2,
        0x4000..0x4000_0000 => 4,
        _ => 8,
    };
    quarter + 1
}

/// Reads a datagram. Returns the id of its request's stream and the payload; `None` for a payload of another context, which is
/// dropped (RFC 9298 Sec. 4).
///
/// # Errors
/// Fails if it has no stream or no context, or if no stream can have this id. The connection must end.
pub fn read(bytes: &[u8]) -> Result<(u64, Option<&[u8]>), Error> {
    let odd = Error::new(Code::Datagram, "a datagram ends in its stream id");
    let (quarter, length) = read_varint(bytes).ok_or(odd)?;
    if quarter > QUARTER_MAX {
        return Err(Error::new(Code::Datagram, "no stream has the id of a datagram"));
    }
    let rest = bytes.get(length..).unwrap_or_default();
    // A datagram without a context is malformed for CONNECT-UDP only: the stream that it belongs to is not known here.
    let payload = read_varint(rest).filter(|(context, _)| *context == UDP);
    Ok((quarter * 4, payload.and_then(|(_, length)| rest.get(length..))))
}
