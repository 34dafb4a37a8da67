//! Seals and opens the datagrams of one link (AES-128-GCM; nonces as in RFC 5288).

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::datagram::{HEADER_BYTES, Header, OVERHEAD_BYTES};

/// Bytes that both ends export from the handshake of their control connection (RFC 8446 Sec. 7.5): for each direction a
/// key, a first nonce and a name.
pub(crate) const MATERIAL_BYTES: usize = 2 * DIRECTION_BYTES;

/// The exporter's label.
pub(crate) const LABEL: &[u8] = b"EXPORTER sidetrack overlay 1 datagrams";

const KEY_BYTES: usize = 16;
const DIRECTION_BYTES: usize = KEY_BYTES + NONCE_LEN + 4;

/// The keys of one direction.
pub(crate) struct Direction {
    key: LessSafeKey,
    first_nonce: [u8; NONCE_LEN],
    /// Its name in headers.
    pub name: u32,
}

/// Returns the directions that we send with and receive with. The lower node sends with the first half.
pub(super) fn directions(
    own: NodeId,
    peer: NodeId,
    material: &[u8; MATERIAL_BYTES],
) -> Option<(Direction, Direction)> {
    let (low, high) = material.split_first_chunk::<DIRECTION_BYTES>()?;
    let (low, high) = (Direction::new(low)?, Direction::new(high.first_chunk()?)?);
    Some(if own < peer { (low, high) } else { (high, low) })
}

impl Direction {
    fn new(material: &[u8; DIRECTION_BYTES]) -> Option<Self> {
        let (key, rest) = material.split_first_chunk::<KEY_BYTES>()?;
        let (first_nonce, name) = rest.split_first_chunk::<NONCE_LEN>()?;
        let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, key).ok()?);
        Some(Self { key, first_nonce: *first_nonce, name: u32::from_be_bytes(*name.first_chunk()?) })
    }

    fn nonce(&self, sequence: u64) -> Nonce {
        let mut nonce = self.first_nonce;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(sequence.to_be_bytes()) {
            *byte ^= number;
        }
        Nonce::assume_unique_for_key(nonce)
    }

    /// Returns the datagram of this frame. A sequence must not be used twice.
    pub(crate) fn seal(&self, sequence: u64, frame: &[u8]) -> Option<Vec<u8>> {
        let mut datagram = Vec::with_capacity(frame.len() + OVERHEAD_BYTES);
        self.seal_onto(sequence, frame, &mut datagram)?;
        Some(datagram)
    }

    /// Appends the datagram of this frame to `out`. `None`: it is too long, and `out` may hold a part of it.
    pub(crate) fn seal_onto(&self, sequence: u64, frame: &[u8], out: &mut Vec<u8>) -> Option<()> {
        let header = Header { link: self.name, sequence }.to_bytes();
        let start = out.len() + HEADER_BYTES;
        out.extend_from_slice(&header);
        out.extend_from_slice(frame);
        let body = out.get_mut(start..)?;
        let tag = self.key.seal_in_place_separate_tag(self.nonce(sequence), Aad::from(header), body).ok()?;
        out.extend_from_slice(tag.as_ref());
        Some(())
    }

    /// Returns the frame of a datagram, if its seal is right.
    pub(crate) fn open<'d>(&self, header: Header, sealed: &'d mut [u8]) -> Option<&'d [u8]> {
        let aad = Aad::from(header.to_bytes());
        self.key.open_in_place(self.nonce(header.sequence), aad, sealed).ok().map(|frame| &*frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::array;

    fn ends() -> [(Direction, Direction); 2] {
        let material = array::from_fn(|at| (at * 3) as u8);
        [(NodeId(1), NodeId(2)), (NodeId(2), NodeId(1))]
            .map(|(own, peer)| directions(own, peer, &material).expect("keys"))
    }

    #[test]
    fn what_one_end_seals_the_other_opens_and_nobody_else() {
        let [(send, own_receive), (other_send, receive)] = ends();
        assert_eq!((send.name, own_receive.name), (receive.name, other_send.name));
        assert_ne!(send.name, other_send.name);
        let datagram = send.seal(7, b"a frame").expect("sealed");
        assert_eq!(datagram.len(), 7 + OVERHEAD_BYTES);
        let opened = |direction: &Direction, datagram: &[u8]| {
            let (header, sealed) = Header::split(datagram)?;
            direction.open(header, &mut sealed.to_vec()).map(<[u8]>::to_vec)
        };
        assert_eq!(opened(&receive, &datagram).as_deref(), Some(&b"a frame"[..]));
        assert_eq!(opened(&own_receive, &datagram), None, "reflected");
        assert_ne!(send.seal(8, b"a frame").expect("sealed")[HEADER_BYTES..], datagram[HEADER_BYTES..]);
        // Change every single bit of header and seal, then cut at every length.
        for bit in 0..datagram.len() * 8 {
            let mut changed = datagram.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(opened(&receive, &changed), None, "bit {bit}");
        }
        for length in 0..datagram.len() {
            assert_eq!(opened(&receive, &datagram[..length]), None, "{length} bytes");
        }
    }
}
