//! The cipher of `encrypt` and `decrypt`: ChaCha20-Poly1305 (RFC 8439) with keys from HKDF-SHA256 (RFC 5869).

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use sidetrack_core::function::{Cipher, Header, Key, Suite};
use sidetrack_sys::sync::lock;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// Most difference between the clocks of both ends, milliseconds. Headers within this time are stored, so that
/// none is accepted twice.
const SKEW_MAX_MS: u64 = 120_000;

/// Most stored headers, about 64 bytes each. Beyond it flows are rejected; no header is forgotten early.
const SEEN_MAX: usize = 1 << 20;

/// One shared key, and the headers seen with it.
pub(super) struct RingSuite {
    secret: Prk,
    seen: Mutex<Seen>,
}

/// The headers of the last minutes, oldest first.
#[derive(Default)]
struct Seen(BTreeSet<(u64, [u8; 20])>);

impl Seen {
    /// Accepts and stores a header if it is new at `now_ms`.
    fn take(&mut self, now_ms: u64, header: &Header) -> Result<(), String> {
        let apart = now_ms.abs_diff(header.time_ms);
        if apart > SKEW_MAX_MS {
            return Err(format!(
                "the other end's header is {} s from this clock: at most {} s are taken; set both clocks (NTP)",
                apart / 1000,
                SKEW_MAX_MS / 1000
            ));
        }
        // Older headers would be rejected by their age, so forget them.
        self.0 = self.0.split_off(&(now_ms.saturating_sub(SKEW_MAX_MS), [0; 20]));
        if self.0.len() >= SEEN_MAX {
            return Err(format!(
                "more than {SEEN_MAX} flows in {} s: not one more can be told from a replay",
                SKEW_MAX_MS / 500
            ));
        }
        if !self.0.insert((header.time_ms, header.salt)) {
            return Err("the other end's header was seen before: this flow is a replay".to_owned());
        }
        Ok(())
    }
}

impl RingSuite {
    /// Creates the cipher suite for this key.
    pub(super) fn new(key: &Key) -> Self {
        let secret = Salt::new(HKDF_SHA256, b"sidetrack records 1").extract(key.bytes());
        Self { secret, seen: Mutex::default() }
    }
}

/// Length of HKDF's output: a cipher's key, or the secret of the next key.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// Derives 32 bytes for one purpose.
fn expand(secret: &Prk, info: &[&[u8]]) -> [u8; 32] {
    let mut bytes = [0; 32];
    // Fails only for lengths beyond 255 times the hash's length.
    let filled = secret.expand(info, Length(32)).and_then(|material| material.fill(&mut bytes));
    debug_assert!(filled.is_ok());
    bytes
}

impl Suite for RingSuite {
    fn header(&self) -> Header {
        Header { time_ms: now_ms(), salt: sidetrack_sys::random::bytes() }
    }

    fn accept(&self, header: &Header) -> Result<(), String> {
        lock(&self.seen).take(now_ms(), header)
    }

    fn cipher(&self, client: &Header, server: Option<&Header>) -> Box<dyn Cipher> {
        let client = client.to_bytes();
        let secret = match server {
            None => expand(&self.secret, &[b"client", &client]),
            Some(server) => expand(&self.secret, &[b"server", &client, &server.to_bytes()]),
        };
        Box::new(RingCipher::new(Prk::new_less_safe(HKDF_SHA256, &secret)))
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

struct RingCipher {
    secret: Prk,
    key: LessSafeKey,
}

impl RingCipher {
    fn new(secret: Prk) -> Self {
        let key = expand(&secret, &[b"key"]);
        // Only a wrong length fails, and this one is right.
        let key = UnboundKey::new(&CHACHA20_POLY1305, &key).expect("a key of 32 bytes");
        Self { secret, key: LessSafeKey::new(key) }
    }
}

/// Returns the nonce of a record from its number, which is never used twice with one key.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[NONCE_LEN - 8..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

impl Cipher for RingCipher {
    fn seal(&mut self, number: u64, head: &[u8], plain: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(plain);
        // Fails only for a record beyond 64 GiB.
        if let Ok(tag) =
            self.key.seal_in_place_separate_tag(nonce(number), Aad::from(head), &mut out[start..])
        {
            out.extend_from_slice(tag.as_ref());
        } else {
            out.truncate(start);
        }
    }

    fn open(&mut self, number: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        self.key.open_in_place(nonce(number), Aad::from(head), sealed).is_ok()
    }

    fn rekey(&mut self) {
        let next = expand(&self.secret, &[b"next"]);
        *self = Self::new(Prk::new_less_safe(HKDF_SHA256, &next));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

    fn suite() -> RingSuite {
        RingSuite::new(&Key::from_hex(KEY).expect("a key"))
    }

    fn header(time_ms: u64, salt: u8) -> Header {
        Header { time_ms, salt: [salt; 20] }
    }

    /// The bytes were made by this code, and for the same inputs also by Python's `cryptography` 48 (HKDF,
    /// ChaCha20Poly1305).
    #[test]
    fn the_bytes_on_the_wire_are_fixed() {
        let suite = suite();
        let mut sealed = Vec::new();
        suite.cipher(&header(1, 2), None).seal(0, &[0, 0, 21], b"hello", &mut sealed);
        let mut answer = Vec::new();
        suite.cipher(&header(1, 2), Some(&header(3, 4))).seal(1, &[0, 0, 21], b"hello", &mut answer);
        let mut rekeyed = Vec::new();
        let mut cipher = suite.cipher(&header(1, 2), None);
        cipher.rekey();
        cipher.seal(65_536, &[1, 0, 16], b"", &mut rekeyed);
        assert_eq!([hex(&sealed), hex(&answer), hex(&rekeyed)], GOLDEN);
        assert!(suite.cipher(&header(1, 2), None).open(0, &[0, 0, 21], &mut sealed));
        assert_eq!(&sealed[..5], b"hello");
    }

    const GOLDEN: [&str; 3] = [
        "3697045d5ca58c5208ec823510408be5a90d5c9f63",
        "73475b233dadb22cfa087d9668833aa128285179b5",
        "646406ec79317b20537c941cfe3d4fd9",
    ];

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn headers_are_taken_once_and_in_time() {
        let mut seen = Seen::default();
        let now = 1_000_000_000;
        assert_eq!(seen.take(now, &header(now, 1)), Ok(()));
        assert!(seen.take(now, &header(now, 1)).expect_err("twice").contains("seen before"));
        assert_eq!(seen.take(now, &header(now, 2)), Ok(()));
        assert!(seen.take(now, &header(now - SKEW_MAX_MS - 1, 3)).is_err());
        assert!(seen.take(now, &header(now + SKEW_MAX_MS + 1, 3)).is_err());
        assert!(
            seen.take(now + SKEW_MAX_MS, &header(now, 1)).is_err(),
            "as long as it is taken it is remembered"
        );
        assert!(seen.take(now + SKEW_MAX_MS + 1, &header(now, 1)).is_err(), "afterwards it is too old");
        assert_eq!(seen.take(now + 3 * SKEW_MAX_MS, &header(now + 3 * SKEW_MAX_MS, 1)), Ok(()));
        assert_eq!(seen.0.len(), 1);
    }
}
