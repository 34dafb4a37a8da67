//! The payload of a QUIC datagram in a tunnel: the context of its flow, and a UDP payload.

use crate::http::capsule::{put_varint, read_varint};

/// Appends a datagram of this context.
pub fn put(out: &mut Vec<u8>, context: u64, payload: &[u8]) {
    put_varint(out, context);
    out.extend_from_slice(payload);
}

/// Returns the context of a datagram and the length of the header before the payload. `None`: it has no whole context.
pub fn context(datagram: &[u8]) -> Option<(u64, usize)> {
    read_varint(datagram)
}
