//! Unidirectional streams that the peer has opened (RFC 9114 Sec. 6.2, RFC 9204 Sec. 4.2).
//!
//! ```text
//!          type            frames
//!   TYPE --------> CONTROL --------> settings, goaway
//!      |              | closed: error
//!      +---------> ENCODER, DECODER: instructions that need no table; closed: error
//!      +---------> PUSH: error
//!      +---------> UNKNOWN: the caller stops reading it
//! ```

use super::frame::{Frames, Piece, Place, Settings};
use super::{Code, Error};
use crate::http::capsule::read_varint;
use crate::http::hpack::{HpackError, Rest};
use crate::http::message::Sender;

/// The type of control streams.
pub const CONTROL: u64 = 0x0;
const PUSH: u64 = 0x1;
const ENCODER: u64 = 0x2;
const DECODER: u64 = 0x3;

/// Most bytes of an instruction of QPACK that is not complete.
const INSTRUCTION_MAX: usize = 8;

/// Which streams of a peer exist. Each may exist once (RFC 9114 Sec. 6.2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    control: bool,
    encoder: bool,
    decoder: bool,
}

/// What a stream says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// The peer's settings.
    Settings(Settings),
    /// GOAWAY. From a server: requests from this stream id on were not processed.
    Goaway(u64),
    /// The stream's type is unknown: stop reading it.
    Unknown,
}

/// Reads one stream.
#[derive(Debug)]
pub struct Uni {
    peer: Sender,
    state: State,
    held: Vec<u8>,
    /// The id of the last GOAWAY: a later one must not be larger (RFC 9114 Sec. 5.2).
    goaway: Option<u64>,
}

#[derive(Debug)]
enum State {
    Type,
    Control(Frames),
    Encoder,
    Decoder,
    Unknown,
}

impl Uni {
    /// Reads a stream that this peer has opened.
    pub const fn new(peer: Sender) -> Self {
        Self { peer, state: State::Type, held: Vec::new(), goaway: None }
    }

    /// Takes bytes from the front until the stream says something. `None`: all bytes are taken.
    ///
    /// # Errors
    /// The connection must end.
    pub fn next(&mut self, bytes: &mut &[u8], opened: &mut Opened) -> Result<Option<Said>, Error> {
        loop {
            match &mut self.state {
                State::Type => {
                    let Some((first, rest)) = bytes.split_first() else { return Ok(None) };
                    self.held.push(*first);
                    *bytes = rest;
                    if let Some((kind, _)) = read_varint(&self.held) {
                        self.held.clear();
                        self.state = begin(kind, opened)?;
                        if matches!(self.state, State::Unknown) {
                            return Ok(Some(Said::Unknown));
                        }
                    }
                }
                State::Control(frames) => match frames.next(bytes)? {
                    None => return Ok(None),
                    Some(Piece::Settings(settings)) => return Ok(Some(Said::Settings(settings))),
                    Some(Piece::Goaway(id)) => return self.goaway(id).map(Some),
                    // Only clients say how much may be pushed to them. We push nothing.
                    Some(_) if self.peer == Sender::Client => {}
                    Some(_) => return Err(Error::new(Code::FrameUnexpected, "a server cannot allow pushes")),
                },
                State::Encoder | State::Decoder => {
                    let Some((first, rest)) = bytes.split_first() else { return Ok(None) };
                    self.held.push(*first);
                    *bytes = rest;
                    self.instruction()?;
                }
                State::Unknown => {
                    *bytes = &[];
                    return Ok(None);
                }
            }
        }
    }

    fn goaway(&mut self, id: u64) -> Result<Said, Error> {
        let fits = self.peer == Sender::Client || id.is_multiple_of(4);
        if !fits || self.goaway.is_some_and(|before| id > before) {
            return Err(Error::new(Code::Id, "GOAWAY names an id that it cannot name"));
        }
        self.goaway = Some(id);
        Ok(Said::Goaway(id))
    }

    /// Reads an instruction of QPACK. Only those that concern no table are allowed: we have none, and refer to none.
    fn instruction(&mut self) -> Result<(), Error> {
        let is_encoder = matches!(self.state, State::Encoder);
        let error = if is_encoder {
            Error::new(Code::QpackEncoderStream, "an instruction for a table that we do not have")
        } else {
            Error::new(Code::QpackDecoderStream, "an instruction about a table that we do not use")
        };
        let first = self.held.first().copied().unwrap_or_default();
        // Set Dynamic Table Capacity (to 0); Stream Cancellation.
        let (is_allowed, prefix) =
            if is_encoder { (first & 0xe0 == 0x20, 5) } else { (first & 0xc0 == 0x40, 6) };
        if !is_allowed {
            return Err(error);
        }
        match Rest(&self.held).integer(prefix) {
            Err(HpackError::Truncated) if self.held.len() < INSTRUCTION_MAX => return Ok(()),
            // The id of a stream may have more bytes than an integer that we understand. It does not matter here.
            Ok(value) if is_encoder && value != 0 => return Err(error),
            Err(_) if is_encoder => return Err(error),
            Err(_) if self.held.last().is_some_and(|last| last & 0x80 != 0) => {
                return if self.held.len() > 2 * INSTRUCTION_MAX { Err(error) } else { Ok(()) };
            }
            _ => {}
        }
        self.held.clear();
        Ok(())
    }

    /// Tells that the stream has ended or was reset.
    ///
    /// # Errors
    /// The connection must end: it needs this stream (RFC 9114 Sec. 6.2.1, RFC 9204 Sec. 4.2).
    pub const fn end(&self) -> Result<(), Error> {
        match self.state {
            State::Type | State::Unknown => Ok(()),
            State::Control(_) | State::Encoder | State::Decoder => {
                Err(Error::new(Code::ClosedCriticalStream, "a stream that the connection needs was closed"))
            }
        }
    }
}

fn begin(kind: u64, opened: &mut Opened) -> Result<State, Error> {
    let (flag, state) = match kind {
        CONTROL => (&mut opened.control, State::Control(Frames::new(Place::Control))),
        ENCODER => (&mut opened.encoder, State::Encoder),
        DECODER => (&mut opened.decoder, State::Decoder),
        // A client must not push, and a server may only what was allowed, which is nothing.
        PUSH => return Err(Error::new(Code::StreamCreation, "a push stream")),
        _ => return Ok(State::Unknown),
    };
    if std::mem::replace(flag, true) {
        return Err(Error::new(Code::StreamCreation, "a stream of this type exists already"));
    }
    Ok(state)
}
