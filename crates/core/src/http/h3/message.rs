//! One direction of a request stream: one request, or the responses to it (RFC 9114 Sec. 4.1).
//!
//! ```text
//!   HEAD --HEADERS--> CONTENT --HEADERS--> OVER
//!    ^  |                ^  |
//!    +--+ interim        +--+ DATA
//! ```
//!
//! A message whose fields are malformed, or whose content has another length than it says, aborts the stream (Sec. 4.1.2). What
//! is out of order aborts the connection.

use super::frame::{Frames, HEADERS, Piece, Place, put_frame};
use super::{Code, Error, qpack};
use crate::http::block::{Block, Part as Kind};
use crate::http::h2::Malformed;
use crate::http::message::{MAX_FIELDS, MAX_HEAD, Sender};

/// Most fields of one message.
const FIELDS_MAX: usize = MAX_FIELDS;

/// Names and values, in order.
pub type Lines = Vec<(Vec<u8>, Vec<u8>)>;

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// The head of a request.
    Request(Request),
    /// The head of a response. Those with a status from 100 to 199 are followed by another.
    Response(u16, Lines),
    /// Content.
    Content(&'a [u8]),
    /// Trailers.
    Trailers(Lines),
}

/// The head of a request. Which pseudo-header fields may be missing was checked (RFC 9114 Sec. 4.3.1, RFC 9220 Sec. 3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// `:method`
    pub method: Vec<u8>,
    /// `:scheme`. Missing only for CONNECT.
    pub scheme: Option<Vec<u8>>,
    /// `:authority`. Missing if Host names the server.
    pub authority: Option<Vec<u8>>,
    /// `:path`. Missing only for CONNECT.
    pub path: Option<Vec<u8>>,
    /// `:protocol` of an extended CONNECT.
    pub protocol: Option<Vec<u8>>,
    /// The other fields.
    pub lines: Lines,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    Content,
    Over,
}

/// Reads one direction of a request stream, however its bytes are split.
#[derive(Debug)]
pub struct Message {
    sender: Sender,
    frames: Frames,
    state: State,
    /// The bytes of content that are still to come, if Content-Length has told them.
    left: Option<u64>,
    /// Content-Length says nothing about this stream: the response to HEAD, or a tunnel.
    has_free_length: bool,
}

impl Message {
    /// Reads what this peer sends.
    pub const fn new(sender: Sender) -> Self {
        Self {
            sender,
            frames: Frames::new(Place::Request),
            state: State::Head,
            left: None,
            has_free_length: false,
        }
    }

    /// The response to HEAD: its Content-Length is not that of its content.
    #[must_use]
    pub const fn to_head(mut self) -> Self {
        self.has_free_length = true;
        self
    }

    /// Takes bytes from the front until a part is complete, and returns it. `None`: all bytes are taken.
    ///
    /// # Errors
    /// The stream or the connection must end, as the error says.
    pub fn next<'a>(&mut self, bytes: &mut &'a [u8]) -> Result<Option<Part<'a>>, Error> {
        let unexpected = |why| Err(Error::new(Code::FrameUnexpected, why));
        let Some(piece) = self.frames.next(bytes)? else { return Ok(None) };
        match (piece, self.state) {
            (Piece::Headers(section), State::Head) => self.head(&section).map(Some),
            (Piece::Headers(section), State::Content) => {
                self.state = State::Over;
                self.whole()?;
                let (_, lines) = read(&section, Kind::Trailers, self.sender)?;
                Ok(Some(Part::Trailers(lines)))
            }
            (Piece::Data(part), State::Content) => {
                if let Some(left) = &mut self.left {
                    *left = left.checked_sub(part.len() as u64).ok_or(LENGTH)?;
                }
                Ok(Some(Part::Content(part)))
            }
            (Piece::Data(_), State::Head) => unexpected("content before a head"),
            (Piece::Data(_) | Piece::Headers(_), State::Over) => unexpected("a frame after trailers"),
            (Piece::Settings(_) | Piece::Goaway(_) | Piece::Push(_), _) => {
                unexpected("a frame of the control stream")
            }
        }
    }

    fn head(&mut self, section: &[u8]) -> Result<Part<'static>, Error> {
        let kind = if self.sender == Sender::Client { Kind::Request } else { Kind::Response };
        let (block, lines) = read(section, kind, self.sender)?;
        let is_final = block.end(false).map_err(malformed)?;
        let is_connect = block.method.as_deref() == Some(b"CONNECT");
        let part = match kind {
            Kind::Request => {
                let Block { method, scheme, authority, path, protocol, .. } = block;
                let method = method.unwrap_or_default();
                Part::Request(Request { method, scheme, authority, path, protocol, lines })
            }
            _ => {
                let digits = block.status.unwrap_or_default();
                let status = digits.iter().fold(0, |status, digit| status * 10 + u16::from(digit - b'0'));
                self.has_free_length |= status == 304;
                Part::Response(status, lines)
            }
        };
        if is_final {
            self.state = State::Content;
            let (Part::Request(Request { lines, .. }) | Part::Response(_, lines)) = &part else {
                return Ok(part);
            };
            self.left = length(lines)?.filter(|_| !self.has_free_length && !is_connect);
        }
        Ok(part)
    }

    fn whole(&self) -> Result<(), Error> {
        if self.left.is_none_or(|left| left == 0) { Ok(()) } else { Err(LENGTH) }
    }

    /// Tells that the stream has ended.
    ///
    /// # Errors
    /// The message is not complete.
    pub fn end(&self) -> Result<(), Error> {
        self.frames.end()?;
        match self.state {
            State::Head if self.sender == Sender::Client => {
                Err(Error::of_stream(Code::RequestIncomplete, "the request ended before its head"))
            }
            State::Head => Err(Error::of_stream(Code::Message, "there is no final response")),
            State::Content | State::Over => self.whole(),
        }
    }
}

const LENGTH: Error = Error::of_stream(Code::Message, "the content has another length than Content-Length");

/// Reads a field section.
fn read(section: &[u8], kind: Kind, sender: Sender) -> Result<(Block, Lines), Error> {
    let mut block = Block::new(kind, sender).for_proxy();
    let mut lines = Lines::new();
    let mut count: usize = 0;
    qpack::decode(section, MAX_HEAD, |name, value| {
        block.field(name, value);
        count += 1;
        if name.first() != Some(&b':') && count <= FIELDS_MAX {
            lines.push((name.to_vec(), value.to_vec()));
        }
    })?;
    if count > FIELDS_MAX {
        return Err(Error::of_stream(Code::ExcessiveLoad, "a message has too many fields"));
    }
    if kind == Kind::Trailers {
        block.end(true).map_err(malformed)?;
    }
    Ok((block, lines))
}

/// Reads Content-Length. Several equal ones count as one (RFC 9110 Sec. 8.6).
fn length(lines: &Lines) -> Result<Option<u64>, Error> {
    let mut found = None;
    for (_, value) in lines.iter().filter(|(name, _)| name == b"content-length") {
        for member in value.split(|byte| *byte == b',') {
            let text = std::str::from_utf8(member.trim_ascii()).ok();
            let is_number = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let number = text.filter(is_number).and_then(|text| text.parse::<u64>().ok());
            let number = number.ok_or(Error::of_stream(Code::Message, "Content-Length is not a number"))?;
            if found.is_some_and(|before| before != number) {
                return Err(Error::of_stream(Code::Message, "Content-Length contradicts itself"));
            }
            found = Some(number);
        }
    }
    Ok(found)
}

const fn malformed(why: Malformed) -> Error {
    Error::of_stream(
        Code::Message,
        match why {
            Malformed::Method => "the method is not a token",
            Malformed::Path => "the path is malformed",
            Malformed::Scheme => "the scheme is neither http nor https",
            Malformed::Authority => "the authority is missing or malformed, or Host contradicts it",
            Malformed::Field => "a field is malformed or belongs to a connection",
            Malformed::Pseudo => "a pseudo-header field is missing, repeated, unknown or in the wrong place",
            Malformed::Status => "the status is malformed",
            Malformed::Trailers => "the trailers do not end the stream",
            Malformed::TooLong => "the fields are too large",
            Malformed::Unread => "the connection is broken before this message",
        },
    )
}

/// Appends the head of a request, or its trailers. Names must be in lower case.
pub fn put_request(out: &mut Vec<u8>, request: &Request) {
    let Request { method, scheme, authority, path, protocol, lines } = request;
    let pseudo = [
        (&b":method"[..], Some(method)),
        (b":protocol", protocol.as_ref()),
        (b":scheme", scheme.as_ref()),
        (b":authority", authority.as_ref()),
        (b":path", path.as_ref()),
    ];
    let pseudo = pseudo.into_iter().filter_map(|(name, value)| Some((name, value?.as_slice())));
    put_lines(out, pseudo.chain(pairs(lines)));
}

/// Appends the head of a response.
pub fn put_response(out: &mut Vec<u8>, status: u16, lines: &Lines) {
    let status = status.to_string();
    put_lines(out, [(&b":status"[..], status.as_bytes())].into_iter().chain(pairs(lines)));
}

/// Appends trailers.
pub fn put_trailers(out: &mut Vec<u8>, lines: &Lines) {
    put_lines(out, pairs(lines));
}

fn pairs(lines: &Lines) -> impl Iterator<Item = (&[u8], &[u8])> {
    lines.iter().map(|(name, value)| (name.as_slice(), value.as_slice()))
}

fn put_lines<'a>(out: &mut Vec<u8>, lines: impl Iterator<Item = (&'a [u8], &'a [u8])>) {
    put_frame(out, HEADERS, &qpack::encode(lines));
}
