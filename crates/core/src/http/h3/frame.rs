//! Frames of HTTP/3 (RFC 9114 Sec. 7): `type(i) length(i) payload`.
//!
//! ```text
//!            header complete                              last byte
//!   HEADER ---------------------> DATA: passed on ----------------------> HEADER
//!      |        DATA
//!      +------------------------> HELD: at most its limit --------------> HEADER, with one piece
//!      |    HEADERS, SETTINGS, GOAWAY, MAX_PUSH_ID, CANCEL_PUSH
//!      +------------------------> SKIPPED: not held --------------------> HEADER
//!      |    unknown types
//!      +------------------------> error
//!           a frame that this stream must not have, or that is too long
//! ```

use super::{Code, Error};
use crate::http::capsule::{put_varint, read_varint};
use crate::http::message::MAX_HEAD;

/// DATA.
pub const DATA: u64 = 0x0;
/// HEADERS.
pub const HEADERS: u64 = 0x1;
const CANCEL_PUSH: u64 = 0x3;
/// SETTINGS.
pub const SETTINGS: u64 = 0x4;
const PUSH_PROMISE: u64 = 0x5;
/// GOAWAY.
pub const GOAWAY: u64 = 0x7;
const MAX_PUSH_ID: u64 = 0xd;

/// Frames of HTTP/2 that HTTP/3 does not have (RFC 9114 Sec. 7.2.8).
const OF_HTTP_2: [u64; 4] = [0x2, 0x6, 0x8, 0x9];

/// Most bytes of an encoded field section. One that is larger has fields that are too large.
pub const HEADERS_MAX: usize = MAX_HEAD;
/// Most bytes of SETTINGS.
const SETTINGS_MAX: usize = 1024;
/// Most bytes of a frame that holds one id.
const ID_MAX: usize = 8;

/// The setting for the largest table of QPACK, in bytes (RFC 9204 Sec. 5).
const QPACK_MAX_TABLE_CAPACITY: u64 = 0x1;
/// The setting for the largest field section, in bytes (RFC 9114 Sec. 7.2.4.1).
const MAX_FIELD_SECTION_SIZE: u64 = 0x6;
const QPACK_BLOCKED_STREAMS: u64 = 0x7;
/// The setting for extended CONNECT (RFC 9220 Sec. 3).
const ENABLE_CONNECT_PROTOCOL: u64 = 0x8;
/// The setting for datagrams (RFC 9297 Sec. 2.1.1).
const H3_DATAGRAM: u64 = 0x33;

/// Which stream frames are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A request stream.
    Request,
    /// The control stream.
    Control,
}

/// The settings of a peer that matter here. The defaults are those of a peer that announces nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The largest field section that the peer accepts, in bytes. `None`: it names no limit.
    pub max_field_section_bytes: Option<u64>,
    /// The peer accepts extended CONNECT (RFC 9220).
    pub connects: bool,
    /// The peer accepts datagrams (RFC 9297).
    pub has_datagrams: bool,
}

/// A part of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// An encoded field section.
    Headers(Vec<u8>),
    /// Content: all or a part of a DATA frame.
    Data(&'a [u8]),
    /// The peer's settings.
    Settings(Settings),
    /// Requests from this id on are not processed, or the sender opens no more (RFC 9114 Sec. 5.2).
    Goaway(u64),
    /// A frame about pushes, which we do not use: its id.
    Push(u64),
}

/// Reads the frames of one stream, however its bytes are split.
#[derive(Debug)]
pub struct Frames {
    place: Place,
    state: State,
    /// The part of a header, or of a frame that is held.
    held: Vec<u8>,
    has_settings: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Header,
    Data(u64),
    Held(u64, usize),
    Skipped(u64),
}

impl Frames {
    /// Reads a stream from its first frame on.
    pub const fn new(place: Place) -> Self {
        Self { place, state: State::Header, held: Vec::new(), has_settings: false }
    }

    /// Takes bytes from the front until a piece is complete, and returns it. `None`: all bytes are taken.
    ///
    /// # Errors
    /// The connection must end. Do not use the reader after that.
    pub fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<Piece<'a>>, Error> {
        loop {
            match self.state {
                State::Header => {
                    let Some((kind, length)) = self.header(bytes) else { return Ok(None) };
                    self.state = self.begin(kind, length)?;
                    if self.state == State::Data(0) {
                        // Even an empty DATA frame must be in its place.
                        return Ok(Some(Piece::Data(&[])));
                    }
                }
                State::Data(0) | State::Skipped(0) => self.state = State::Header,
                State::Data(_) | State::Skipped(_) if bytes.is_empty() => return Ok(None),
                State::Data(rest) => {
                    let part = take(bytes, rest);
                    self.state = State::Data(rest - part.len() as u64);
                    return Ok(Some(Piece::Data(part)));
                }
                State::Skipped(rest) => self.state = State::Skipped(rest - take(bytes, rest).len() as u64),
                State::Held(kind, length) => {
                    self.held.extend_from_slice(take(bytes, (length - self.held.len()) as u64));
                    if self.held.len() < length {
                        return Ok(None);
                    }
                    self.state = State::Header;
                    let payload = std::mem::take(&mut self.held);
                    return self.whole(kind, payload).map(Some);
                }
            }
        }
    }

    /// Reads the header of a frame; `None` if more bytes are needed.
    fn header(&mut self, bytes: &mut &[u8]) -> Option<(u64, u64)> {
        loop {
            let read = read_varint(&self.held)
                .and_then(|(kind, at)| Some((kind, read_varint(self.held.get(at..)?)?.0)));
            if read.is_some() {
                self.held.clear();
                return read;
            }
            let (first, rest) = bytes.split_first()?;
            self.held.push(*first);
            *bytes = rest;
        }
    }

    fn begin(&mut self, kind: u64, length: u64) -> Result<State, Error> {
        let is_control = self.place == Place::Control;
        if is_control && !self.has_settings && kind != SETTINGS {
            return Err(Error::new(Code::MissingSettings, "the control stream does not begin with SETTINGS"));
        }
        let most = match kind {
            DATA if !is_control => return Ok(State::Data(length)),
            HEADERS if !is_control => HEADERS_MAX,
            SETTINGS if is_control && !self.has_settings => SETTINGS_MAX,
            GOAWAY | MAX_PUSH_ID | CANCEL_PUSH if is_control => ID_MAX,
            // We never send MAX_PUSH_ID, so no id of a push may be used.
            PUSH_PROMISE if !is_control => return Err(Error::new(Code::Id, "a push that nobody asked for")),
            DATA | HEADERS | SETTINGS | GOAWAY | MAX_PUSH_ID | CANCEL_PUSH | PUSH_PROMISE => {
                return Err(Error::new(Code::FrameUnexpected, "a frame on the wrong stream, or twice"));
            }
            _ if OF_HTTP_2.contains(&kind) => {
                return Err(Error::new(Code::FrameUnexpected, "a frame of HTTP/2"));
            }
            _ => return Ok(State::Skipped(length)),
        };
        self.has_settings |= is_control;
        let length = usize::try_from(length).ok().filter(|length| *length <= most);
        length.map(|length| State::Held(kind, length)).ok_or(match kind {
            HEADERS => Error::of_stream(Code::ExcessiveLoad, "a field section that is too large"),
            SETTINGS => Error::new(Code::ExcessiveLoad, "too many settings"),
            _ => Error::new(Code::Frame, "a frame that is longer than its one id"),
        })
    }

    fn whole(&self, kind: u64, payload: Vec<u8>) -> Result<Piece<'static>, Error> {
        match kind {
            HEADERS => Ok(Piece::Headers(payload)),
            SETTINGS => Settings::parse(&payload).map(Piece::Settings),
            _ => match read_varint(&payload) {
                Some((id, length)) if length == payload.len() => {
                    Ok(if kind == GOAWAY { Piece::Goaway(id) } else { Piece::Push(id) })
                }
                _ => Err(Error::new(Code::Frame, "a frame that is not one id")),
            },
        }
    }

    /// Tells that the stream has ended.
    ///
    /// # Errors
    /// It ended in a frame (RFC 9114 Sec. 7.1).
    pub const fn end(&self) -> Result<(), Error> {
        match self.state {
            State::Header | State::Data(0) | State::Skipped(0) if self.held.is_empty() => Ok(()),
            _ => Err(Error::new(Code::Frame, "the stream ended in a frame")),
        }
    }
}

impl Settings {
    /// Our own settings: no table, no pushes, extended CONNECT if `connects` (servers), and datagrams.
    pub const fn ours(connects: bool) -> Self {
        Self { max_field_section_bytes: Some(MAX_HEAD as u64), connects, has_datagrams: true }
    }

    /// Reads the payload of SETTINGS. Unknown settings are ignored.
    fn parse(mut rest: &[u8]) -> Result<Self, Error> {
        let mut seen = Vec::new();
        let mut settings = Self::default();
        while !rest.is_empty() {
            let mut next = || {
                let (value, length) = read_varint(rest)?;
                rest = rest.get(length..)?;
                Some(value)
            };
            let cut = Error::new(Code::Frame, "SETTINGS end in a setting");
            let (id, value) = (next().ok_or(cut)?, next().ok_or(cut)?);
            if seen.contains(&id) {
                return Err(Error::new(Code::Settings, "a setting is repeated"));
            }
            seen.push(id);
            let flag = |what| match value {
                0 | 1 => Ok(value == 1),
                _ => Err(Error::new(Code::Settings, what)),
            };
            match id {
                MAX_FIELD_SECTION_SIZE => settings.max_field_section_bytes = Some(value),
                ENABLE_CONNECT_PROTOCOL => settings.connects = flag("extended CONNECT is neither 0 nor 1")?,
                H3_DATAGRAM => settings.has_datagrams = flag("datagrams are neither 0 nor 1")?,
                0x2..=0x5 => return Err(Error::new(Code::Settings, "a setting of HTTP/2")),
                _ => {}
            }
        }
        Ok(settings)
    }

    /// Appends a SETTINGS frame.
    pub fn put(&self, out: &mut Vec<u8>) {
        let mut payload = Vec::with_capacity(32);
        let mut setting = |id, value| {
            put_varint(&mut payload, id);
            put_varint(&mut payload, value);
        };
        setting(QPACK_MAX_TABLE_CAPACITY, 0);
        setting(QPACK_BLOCKED_STREAMS, 0);
        if let Some(most) = self.max_field_section_bytes {
            setting(MAX_FIELD_SECTION_SIZE, most);
        }
        if self.connects {
            setting(ENABLE_CONNECT_PROTOCOL, 1);
        }
        if self.has_datagrams {
            setting(H3_DATAGRAM, 1);
        }
        put_frame(out, SETTINGS, &payload);
    }
}

/// Appends a frame.
pub fn put_frame(out: &mut Vec<u8>, kind: u64, payload: &[u8]) {
    put_header(out, kind, payload.len());
    out.extend_from_slice(payload);
}

/// Appends the header of a frame whose payload has this many bytes.
pub fn put_header(out: &mut Vec<u8>, kind: u64, length: usize) {
    put_varint(out, kind);
    put_varint(out, length as u64);
}

/// Appends GOAWAY with this id.
pub fn put_goaway(out: &mut Vec<u8>, id: u64) {
    let mut payload = Vec::with_capacity(8);
    put_varint(&mut payload, id);
    put_frame(out, GOAWAY, &payload);
}

/// Removes at most `count` bytes from the front and returns them.
fn take<'a>(bytes: &mut &'a [u8], count: u64) -> &'a [u8] {
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(bytes.len());
    let (taken, rest) = bytes.split_at(count);
    *bytes = rest;
    taken
}
