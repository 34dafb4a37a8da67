//! What user space knows of a flow on the wire and the kernel does not, in one entry of a fixed size. It lies beside the flow's
//! numbers in the kernel, so that the next process can go on with the flow after a crash.
//!
//! The layout, little-endian:
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 4 | [`MAGIC`] |
//! | 4 | 2 | [`VERSION`] |
//! | 6 | 2 | bytes that are used, from offset 0 |
//! | 8 | 4 | FNV-1a (32 bits) of the used bytes after this word |
//! | 12 | 80 | ten numbers of 8 bytes; `u64::MAX`: not known |
//! | 92 | 2 | index of the interception in [`Intercept::ALL`]; index of the transport, 255: none |
//! | 94 | | texts, each behind its length of 2 bytes; 65535: there is none |
//!
//! A text that does not fit is left out. The rest of the entry is zero.

use crate::flow::{Destination, Flow, FlowId, HostName, Intercept, Process, Protocol};
use std::net::SocketAddr;

/// Bytes of an entry.
pub const NOTE_BYTES: usize = 1024;

/// The first bytes of an entry.
pub const MAGIC: [u8; 4] = *b"STWN";

/// The version of the format. A reader refuses every other one.
pub const VERSION: u16 = 1;

/// Offsets; see the head of the file.
const SUMMED: usize = 12;
const NUMBERS: usize = 10;
const KIND: usize = SUMMED + NUMBERS * 8;
const TEXTS: usize = KIND + 2;

/// The length of a text that is not there.
const NONE: u16 = u16::MAX;

/// A number that is not known.
const UNKNOWN: u64 = u64::MAX;

/// What user space knows of a flow on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The flow's number.
    pub number: FlowId,
    /// When it was captured, microseconds since 1970.
    pub since_us: u64,
    /// For the client and the server: what is added to the kernel's count of sequence numbers to get payload bytes, modulo 2^64.
    pub base: [u64; 2],
    /// Time from the capture until the path to the server was set up, microseconds.
    pub connect_us: Option<u64>,
    /// Time from the capture to the server's first byte, microseconds.
    pub first_byte_us: Option<u64>,
    /// How long the flow waited for its first bytes, microseconds.
    pub sniff_us: Option<u64>,
    /// How long the client's SYN was held, microseconds.
    pub held_us: Option<u64>,
    /// The flow ends after this time without a byte, milliseconds.
    pub idle_ms: Option<u64>,
    /// The flow ends this long after its capture, milliseconds.
    pub lifetime_ms: Option<u64>,
    /// The flow as policy saw it.
    pub flow: Flow,
    /// The rule that decided. `None`: the default did.
    pub rule: Option<String>,
    /// How it is carried, without credentials.
    pub carrier: Option<String>,
    /// The agreement's decision.
    pub agreement: Option<String>,
    /// The name in the client's TLS hello, if it differs from the host.
    pub tls_name: Option<HostName>,
    /// The index of the transport, and where it leads to, if the carrier leaves a choice.
    pub path: Option<(u8, SocketAddr)>,
    /// A text for the record besides the end reason.
    pub detail: Option<String>,
    /// The decision trace, in a form of its own.
    pub trace: Vec<u8>,
}

/// Why an entry cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoteError {
    /// Another version of the program wrote it.
    #[error("it has version {0} of the format; this program reads version {VERSION}")]
    Version(u16),
    /// Its bytes are not those that were written.
    #[error("it is damaged")]
    Damaged,
}

/// FNV-1a, 32 bits.
fn sum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Writes an entry from its beginning to its end.
struct Writer {
    bytes: [u8; NOTE_BYTES],
    used: usize,
}

impl Writer {
    fn number(&mut self, number: u64) {
        if let Some(place) = self.bytes.get_mut(self.used..self.used + 8) {
            place.copy_from_slice(&number.to_le_bytes());
            self.used += 8;
        }
    }

    fn byte(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.used) {
            *place = byte;
            self.used += 1;
        }
    }

    /// `after` further lengths follow this text.
    fn text(&mut self, text: Option<&[u8]>, after: usize) {
        let room = NOTE_BYTES.saturating_sub(self.used + 2 + 2 * after);
        let text = text.filter(|text| text.len() <= room);
        let length = text.map_or(NONE, |text| u16::try_from(text.len()).unwrap_or(NONE));
        self.bytes[self.used..self.used + 2].copy_from_slice(&length.to_le_bytes());
        self.used += 2;
        if let Some(text) = text {
            self.bytes[self.used..self.used + text.len()].copy_from_slice(text);
            self.used += text.len();
        }
    }
}

/// Reads an entry from its beginning to its end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], NoteError> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(NoteError::Damaged)?;
        self.0 = rest;
        Ok(*first)
    }

    fn number(&mut self) -> Result<u64, NoteError> {
        self.array().map(u64::from_le_bytes)
    }

    fn known(&mut self) -> Result<Option<u64>, NoteError> {
        Ok(Some(self.number()?).filter(|number| *number != UNKNOWN))
    }

    fn bytes(&mut self) -> Result<Option<&'a [u8]>, NoteError> {
        let length = u16::from_le_bytes(self.array()?);
        if length == NONE {
            return Ok(None);
        }
        let (text, rest) = self.0.split_at_checked(length.into()).ok_or(NoteError::Damaged)?;
        self.0 = rest;
        Ok(Some(text))
    }

    fn text(&mut self) -> Result<Option<&'a str>, NoteError> {
        let bytes = self.bytes()?;
        bytes.map(|bytes| str::from_utf8(bytes).map_err(|_| NoteError::Damaged)).transpose()
    }

    fn parsed<T: std::str::FromStr>(&mut self) -> Result<Option<T>, NoteError> {
        self.text()?.map(|text| text.parse().map_err(|_| NoteError::Damaged)).transpose()
    }
}

impl Note {
    /// Writes the entry.
    pub fn encode(&self) -> [u8; NOTE_BYTES] {
        let mut to = Writer { bytes: [0; NOTE_BYTES], used: SUMMED };
        let [base_up, base_down] = self.base;
        to.number(self.number.0);
        for number in [self.since_us, base_up, base_down] {
            to.number(number);
        }
        let known = [self.connect_us, self.first_byte_us, self.sniff_us, self.held_us];
        for number in known.into_iter().chain([self.idle_ms, self.lifetime_ms]) {
            to.number(number.unwrap_or(UNKNOWN));
        }
        let flow = &self.flow;
        let intercept = Intercept::ALL.iter().position(|one| *one == flow.intercept);
        to.byte(intercept.and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX));
        to.byte(self.path.map_or(u8::MAX, |(transport, _)| transport));
        let process = flow.process.as_ref();
        let number = |number: Option<u32>| number.map(|number| number.to_string());
        let texts = [
            Some(flow.client.to_string()),
            Some(flow.orig_dst.to_string()),
            Some(flow.listener.to_string()),
            self.rule.clone(),
            self.carrier.clone(),
            flow.host.as_ref().map(ToString::to_string),
            // A process that was looked for and not found is a text without letters.
            process.map(|process| process.name.clone().unwrap_or_default()),
            number(process.and_then(|process| process.pid)),
            number(process.and_then(|process| process.uid)),
            flow.user.clone(),
            self.tls_name.as_ref().map(ToString::to_string),
            self.path.map(|(_, address)| address.to_string()),
            self.agreement.clone(),
            self.detail.clone(),
        ];
        for (at, text) in texts.iter().enumerate() {
            to.text(text.as_ref().map(String::as_bytes), texts.len() - at);
        }
        to.text(Some(&self.trace), 0);
        let Writer { mut bytes, used } = to;
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&u16::try_from(used).unwrap_or(u16::MAX).to_le_bytes());
        let sum = sum(&bytes[SUMMED..used]);
        bytes[8..SUMMED].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// Another version wrote it, or its bytes are not those that were written.
    pub fn parse(bytes: &[u8]) -> Result<Self, NoteError> {
        let mut from = Reader(bytes);
        if from.array()? != MAGIC {
            return Err(NoteError::Damaged);
        }
        let version = u16::from_le_bytes(from.array()?);
        if version != VERSION {
            return Err(NoteError::Version(version));
        }
        let used = usize::from(u16::from_le_bytes(from.array()?));
        let expected = u32::from_le_bytes(from.array()?);
        let summed = bytes.get(SUMMED..used).ok_or(NoteError::Damaged)?;
        if used < TEXTS || sum(summed) != expected {
            return Err(NoteError::Damaged);
        }
        read(Reader(summed))
    }
}

/// Reads what comes after the sum.
fn read(mut from: Reader<'_>) -> Result<Note, NoteError> {
    let (number, since_us, base) = (FlowId(from.number()?), from.number()?, [from.number()?, from.number()?]);
    let (connect_us, first_byte_us, sniff_us, held_us) =
        (from.known()?, from.known()?, from.known()?, from.known()?);
    let (idle_ms, lifetime_ms) = (from.known()?, from.known()?);
    let [intercept, transport] = from.array()?;
    let intercept = *Intercept::ALL.get(usize::from(intercept)).ok_or(NoteError::Damaged)?;
    let client = from.parsed()?.ok_or(NoteError::Damaged)?;
    let orig_dst = from.parsed::<Destination>()?.ok_or(NoteError::Damaged)?;
    let listener = from.text()?.ok_or(NoteError::Damaged)?.into();
    let (rule, carrier) = (from.text()?.map(str::to_owned), from.text()?.map(str::to_owned));
    let host = from.parsed()?;
    let name = from.text()?;
    let (pid, uid) = (from.parsed()?, from.parsed()?);
    let name = name.map(|name| Some(name.to_owned()).filter(|name| !name.is_empty()));
    let process = name.map(|name| Process { pid, name, uid, is_hidden: false });
    let user = from.text()?.map(str::to_owned);
    let tls_name = from.parsed()?;
    let path = from.parsed()?.filter(|_| transport != u8::MAX).map(|address| (transport, address));
    let (agreement, detail) = (from.text()?.map(str::to_owned), from.text()?.map(str::to_owned));
    let trace = from.bytes()?.unwrap_or_default().to_vec();
    if !from.0.is_empty() {
        return Err(NoteError::Damaged);
    }
    let flow = Flow { protocol: Protocol::Tcp, intercept, listener, client, orig_dst, host, process, user };
    Ok(Note {
        number,
        since_us,
        base,
        connect_us,
        first_byte_us,
        sniff_us,
        held_us,
        idle_ms,
        lifetime_ms,
        flow,
        rule,
        carrier,
        agreement,
        tls_name,
        path,
        detail,
        trace,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note() -> Note {
        Note {
            number: FlowId(7),
            since_us: 1_800_000_000_000_000,
            base: [5, u64::MAX - 2],
            connect_us: Some(900),
            first_byte_us: None,
            sniff_us: None,
            held_us: Some(3),
            idle_ms: Some(60_000),
            lifetime_ms: None,
            flow: Flow {
                protocol: Protocol::Tcp,
                intercept: Intercept::Socks,
                listener: "door".into(),
                client: "192.0.2.1:4000".parse().unwrap(),
                orig_dst: "db.example:5432".parse().unwrap(),
                host: Some("db.example".parse().unwrap()),
                process: Some(Process { pid: Some(12), uid: Some(0), ..Process::default() }),
                user: Some("ann".into()),
            },
            rule: Some("large".into()),
            carrier: Some("direct".into()),
            agreement: None,
            tls_name: None,
            path: Some((2, "[fe80::1%3]:80".parse().unwrap())),
            detail: Some("resolved late".into()),
            trace: vec![1, 2, 3],
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The bytes that version 1 writes. A change of them needs another version.
    #[test]
    fn the_format_stays() {
        let golden = include_str!("note.golden.hex");
        let bytes = note().encode();
        let used = usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
        assert_eq!(hex(&bytes[..used]), golden.trim());
        assert!(bytes[used..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn an_entry_reads_as_it_was_written() {
        assert_eq!(Note::parse(&note().encode()), Ok(note()));
        let bare = Note {
            flow: Flow { host: None, process: None, user: None, ..note().flow },
            rule: None,
            path: None,
            detail: None,
            trace: Vec::new(),
            ..note()
        };
        assert_eq!(Note::parse(&bare.encode()), Ok(bare));
    }

    #[test]
    fn what_does_not_fit_is_left_out() {
        let long = Note { agreement: Some("a".repeat(900)), detail: Some("d".repeat(70)), ..note() };
        let read = Note::parse(&long.encode()).unwrap();
        assert_eq!((read.agreement, read.detail, read.trace), (None, long.detail, vec![1, 2, 3]));
        let all = Note { trace: vec![0; 2000], ..note() };
        assert_eq!(Note::parse(&all.encode()).unwrap().trace, [0; 0]);
        let names = Note { rule: Some("r".repeat(5000)), carrier: Some("c".repeat(800)), ..note() };
        let read = Note::parse(&names.encode()).unwrap();
        assert_eq!((read.rule, read.carrier, read.flow), (None, names.carrier, note().flow));
    }

    #[test]
    fn garbage_and_other_versions_are_refused() {
        let good = note().encode();
        for at in 0..usize::from(u16::from_le_bytes([good[6], good[7]])) {
            let mut bad = good;
            bad[at] ^= 0x40;
            assert!(Note::parse(&bad).is_err(), "byte {at}");
            assert_eq!(Note::parse(&good[..at]), Err(NoteError::Damaged), "cut at {at}");
        }
        let mut later = good;
        later[4] = 2;
        assert_eq!(Note::parse(&later), Err(NoteError::Version(2)));
        assert!(Note::parse(&later).unwrap_err().to_string().contains("version 2"));
        assert_eq!(Note::parse(&[0; NOTE_BYTES]), Err(NoteError::Damaged));
        assert_eq!(Note::parse(&[0xff; NOTE_BYTES]), Err(NoteError::Damaged));
    }
}
