//! The encrypting pair: `encrypt` near the client, `decrypt` near the server, and authenticated records between them.
//!
//! This module does the framing. The caller provides the cipher ([`Suite`], [`Cipher`]), because core contains no
//! cryptography. Each direction looks like this on the wire:
//!
//! ```text
//! header   "STR1"  time(8, milliseconds since 1970)  salt(20)
//! record   type(1: 0 data, 1 end)  length(2, of the rest)  sealed bytes with their tag(16)
//! ```
//!
//! Numbers are big-endian. A record's type and length are authenticated with it, and its number is the nonce. The
//! keys of the client's direction are derived from the shared key and the client's header. Those of the server's
//! direction are derived from both headers, so an answer belongs to one request only. After [`REKEY_RECORDS`]
//! records, each direction derives a new key from its last one. If a direction ends without an `end` record, it was
//! truncated, and the flow is not ended in an orderly way.

use super::{Interest, STAGE_OUT_MAX, Stage, Step, Stop};
use crate::chain::OFFER_MAX;
use crate::flow::Side;
use crate::time::Instant;
use std::sync::Arc;

/// Most plaintext bytes in one record, as in TLS (RFC 8446 Sec. 5.1).
pub const RECORD_MAX: usize = 1 << 14;

/// Records of one direction under one key. Together at most 1 GiB.
pub const REKEY_RECORDS: u64 = 1 << 16;

const TAG: usize = 16;
const HEAD: usize = 3;
const MAGIC: [u8; 4] = *b"STR1";
const DATA: u8 = 0;
const END: u8 = 1;

/// The first bytes of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// When it was made, ms since 1970.
    pub time_ms: u64,
    /// Random bytes.
    pub salt: [u8; 20],
}

impl Header {
    /// Its length on the wire.
    pub const BYTES: usize = 32;

    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..12].copy_from_slice(&self.time_ms.to_be_bytes());
        bytes[12..].copy_from_slice(&self.salt);
        bytes
    }

    /// Decodes the header. `None` if it is not valid.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (time, salt) = rest.split_first_chunk()?;
        let salt = *salt.first_chunk()?;
        (*magic == MAGIC).then(|| Self { time_ms: u64::from_be_bytes(*time), salt })
    }
}

/// Keys and ciphers, provided by the caller.
pub trait Suite: Send + Sync {
    /// Returns a new header with a new salt.
    fn header(&self) -> Header;

    /// Checks that the other end's header is fresh and was not seen before.
    ///
    /// # Errors
    /// Fails with the reason in words.
    fn accept(&self, header: &Header) -> Result<(), String>;

    /// Returns the cipher of the client's direction (`server` is `None`), or of the server's direction.
    fn cipher(&self, client: &Header, server: Option<&Header>) -> Box<dyn Cipher>;
}

/// The cipher of one direction.
pub trait Cipher: Send {
    /// Appends the sealed form of `plain`, which is 16 bytes longer.
    fn seal(&mut self, number: u64, head: &[u8], plain: &[u8], out: &mut Vec<u8>);

    /// Opens `sealed` in place. The plaintext is 16 bytes shorter, at the beginning. Returns false if the bytes are
    /// not authentic.
    fn open(&mut self, number: u64, head: &[u8], sealed: &mut [u8]) -> bool;

    /// Changes to the next key, which is derived from this one.
    fn rekey(&mut self);
}

/// Which end of the pair a stage is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Near the client: encrypts what the client sends.
    Encrypt,
    /// Near the server: decrypts what the client sent.
    Decrypt,
}

impl End {
    /// Returns the side whose bytes are plaintext at this end.
    const fn plain_side(self) -> Side {
        match self {
            Self::Encrypt => Side::Client,
            Self::Decrypt => Side::Server,
        }
    }
}

/// One end of the pair for one flow.
pub struct Records {
    suite: Arc<dyn Suite>,
    end: End,
    own: Header,
    peer: Option<Header>,
    seal: Option<Sequence>,
    open: Option<Sequence>,
    /// The beginning of an incomplete header or record.
    partial: Vec<u8>,
    has_ended: bool,
}

struct Sequence {
    cipher: Box<dyn Cipher>,
    number: u64,
}

impl Sequence {
    const fn new(cipher: Box<dyn Cipher>) -> Self {
        Self { cipher, number: 0 }
    }

    fn next(&mut self) -> u64 {
        let number = self.number;
        if number > 0 && number.is_multiple_of(REKEY_RECORDS) {
            self.cipher.rekey();
        }
        self.number += 1;
        number
    }

    fn seal(&mut self, kind: u8, plain: &[u8], out: &mut Vec<u8>) {
        let number = self.next();
        let length = u16::try_from(plain.len() + TAG).unwrap_or(u16::MAX).to_be_bytes();
        let head = [kind, length[0], length[1]];
        out.extend_from_slice(&head);
        self.cipher.seal(number, &head, plain, out);
    }

    /// Appends the plaintext of a record. Returns its type.
    fn open(&mut self, record: &[u8], out: &mut Vec<u8>) -> Result<u8, Stop> {
        let number = self.next();
        let start = out.len();
        let (head, sealed) = record.split_at(HEAD);
        out.extend_from_slice(sealed);
        if !self.cipher.open(number, head, &mut out[start..]) {
            out.truncate(start);
            let detail = format!(
                "record {number} does not authenticate: altered on the way, or made with another key"
            );
            return Err(Stop::failed(detail));
        }
        out.truncate(out.len().saturating_sub(TAG));
        Ok(head[0])
    }
}

impl Records {
    /// Makes one end of the pair for the beginning of a flow.
    pub fn new(suite: Arc<dyn Suite>, end: End) -> Self {
        let own = suite.header();
        let seal = (end == End::Encrypt).then(|| Sequence::new(suite.cipher(&own, None)));
        Self { suite, end, own, peer: None, seal, open: None, partial: Vec::new(), has_ended: false }
    }

    /// Handles the other end's header.
    fn meet(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let header = bytes.first_chunk().and_then(Header::from_bytes);
        let header = header.ok_or_else(|| {
            Stop::failed("the other end does not encrypt: its first bytes are not a header")
        })?;
        self.suite.accept(&header).map_err(Stop::failed)?;
        let (client, server) = match self.end {
            End::Encrypt => (&self.own, Some(&header)),
            End::Decrypt => (&header, None),
        };
        self.open = Some(Sequence::new(self.suite.cipher(client, server)));
        self.peer = Some(header);
        Ok(())
    }

    /// Returns the sealing sequence. The server's end has no keys before it has the client's header.
    fn sealing(&mut self, out: &mut Vec<u8>) -> Option<&mut Sequence> {
        if self.seal.is_none() {
            let client = self.peer.as_ref()?;
            out.extend_from_slice(&self.own.to_bytes());
            self.seal = Some(Sequence::new(self.suite.cipher(client, Some(&self.own))));
        }
        self.seal.as_mut()
    }

    /// Returns the length of the header or record that begins with `bytes`. `None` while that is unknown.
    fn wanted(&self, bytes: &[u8]) -> Result<Option<usize>, Stop> {
        if self.open.is_none() {
            return Ok(Some(Header::BYTES));
        }
        let [kind, high, low, ..] = *bytes else { return Ok(None) };
        let sealed = usize::from(u16::from_be_bytes([high, low]));
        if kind > END || !(TAG..=RECORD_MAX + TAG).contains(&sealed) {
            return Err(Stop::failed(
                "the stream between the two ends is broken: no record where one should be",
            ));
        }
        Ok(Some(HEAD + sealed))
    }

    /// Handles a complete header or record.
    fn unit(&mut self, unit: &[u8], out: &mut Vec<u8>) -> Result<(), Stop> {
        if self.has_ended {
            return Err(Stop::failed("bytes behind the end record"));
        }
        let Some(open) = &mut self.open else { return self.meet(unit) };
        let before = out.len();
        match open.open(unit, out)? {
            END if out.len() > before => Err(Stop::failed("an end record with bytes in it")),
            END => {
                self.has_ended = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Takes sealed bytes, and appends the plaintext. Returns how many bytes were taken.
    fn opening(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<usize, Stop> {
        let most = out.len() + STAGE_OUT_MAX - RECORD_MAX - TAG;
        out.reserve(bytes.len().min(STAGE_OUT_MAX));
        let mut taken = 0;
        while taken < bytes.len() && out.len() <= most {
            let rest = &bytes[taken..];
            if self.partial.is_empty()
                && let Some(unit) = self.wanted(rest)?.and_then(|wanted| rest.get(..wanted))
            {
                self.unit(unit, out)?;
                taken += unit.len();
                continue;
            }
            let wanted = self.wanted(&self.partial)?.unwrap_or(HEAD);
            let more = wanted.saturating_sub(self.partial.len()).min(rest.len());
            // Reserve exactly what is needed: doubling would waste memory, and the next record needs it, too.
            self.partial.reserve_exact(more);
            self.partial.extend_from_slice(&rest[..more]);
            taken += more;
            if self.partial.len() == wanted && self.wanted(&self.partial)? == Some(wanted) {
                let mut unit = std::mem::take(&mut self.partial);
                self.unit(&unit, out)?;
                unit.clear();
                self.partial = unit;
            }
        }
        if self.partial.is_empty() {
            // A flow that is idle between two records holds no memory for them.
            self.partial = Vec::new();
        }
        Ok(taken)
    }
}

impl Stage for Records {
    fn interest(&self, _from: Side) -> Interest {
        Interest::Bytes
    }

    fn start(&mut self, _now: Instant, from: Side, out: &mut Vec<u8>) {
        // Send the header at once: a server that speaks first can then encrypt its bytes.
        if self.end == End::Encrypt && from == Side::Client {
            out.extend_from_slice(&self.own.to_bytes());
        }
    }

    fn handle(&mut self, _now: Instant, from: Side, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        if from != self.end.plain_side() {
            return self.opening(bytes, out).map_or_else(Step::Stop, Step::Taken);
        }
        // The records of this many bytes with their overhead, and a header, stay within the limit of one call.
        let taken = bytes.len().min(OFFER_MAX);
        // Reserve it all at once, so that the buffer does not move while it grows.
        out.reserve(Header::BYTES + taken + taken.div_ceil(RECORD_MAX) * (HEAD + TAG));
        let Some(seal) = self.sealing(out) else { return Step::Taken(0) };
        for plain in bytes[..taken].chunks(RECORD_MAX) {
            seal.seal(DATA, plain, out);
        }
        Step::Taken(taken)
    }

    fn finish(&mut self, _now: Instant, from: Side, out: &mut Vec<u8>) -> Result<bool, Stop> {
        if from == self.end.plain_side() {
            let sealing = self.sealing(out);
            return Ok(sealing.map(|seal| seal.seal(END, &[], out)).is_some());
        }
        let words = "the stream between the two ends was cut: it ended without its end record";
        if self.has_ended { Ok(true) } else { Err(Stop::failed(words)) }
    }
}
