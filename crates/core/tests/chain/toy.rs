//! A suite without any cryptography that still notices every changed bit: enough to test the framing.

use sidetrack_core::function::{Cipher, Header, Suite};

/// Keys made by adding up.
pub(crate) struct Toy {
    pub key: u64,
    pub salt: u8,
    /// Whether headers are refused.
    pub refuses: bool,
}

impl Toy {
    pub(crate) fn shared(key: u64, salt: u8) -> std::sync::Arc<dyn Suite> {
        std::sync::Arc::new(Self { key, salt, refuses: false })
    }
}

fn mix(state: u64, byte: u64) -> u64 {
    (state ^ byte).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
}

fn digest(mut state: u64, bytes: &[u8]) -> u64 {
    for byte in bytes {
        state = mix(state, u64::from(*byte));
    }
    state
}

impl Suite for Toy {
    fn header(&self) -> Header {
        Header { time_ms: 1, salt: [self.salt; 20] }
    }

    fn accept(&self, _header: &Header) -> Result<(), String> {
        if self.refuses { Err("seen before".into()) } else { Ok(()) }
    }

    fn cipher(&self, client: &Header, server: Option<&Header>) -> Box<dyn Cipher> {
        let key = digest(self.key, &client.to_bytes());
        let key = server.map_or(key, |server| digest(mix(key, 7), &server.to_bytes()));
        Box::new(ToyCipher(key))
    }
}

struct ToyCipher(u64);

impl ToyCipher {
    fn apply(&self, number: u64, bytes: &mut [u8]) {
        let mut state = mix(self.0, number);
        for byte in bytes {
            state = mix(state, 1);
            *byte ^= (state >> 32) as u8;
        }
    }

    fn tag(&self, number: u64, head: &[u8], sealed: &[u8]) -> [u8; 16] {
        let tag = digest(digest(mix(self.0, !number), head), sealed);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&tag.to_be_bytes());
        bytes[8..].copy_from_slice(&(!tag).to_be_bytes());
        bytes
    }
}

impl Cipher for ToyCipher {
    fn seal(&mut self, number: u64, head: &[u8], plain: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(plain);
        self.apply(number, &mut out[start..]);
        let tag = self.tag(number, head, &out[start..]);
        out.extend_from_slice(&tag);
    }

    fn open(&mut self, number: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        let (bytes, tag) = sealed.split_at_mut(sealed.len() - 16);
        if self.tag(number, head, bytes) != *tag {
            return false;
        }
        self.apply(number, bytes);
        true
    }

    fn rekey(&mut self) {
        self.0 = mix(self.0, 99);
    }
}
