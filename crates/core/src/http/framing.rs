//! Where a body ends (RFC 9112 Sec. 6 and 7): one length or an error, and a decoder that holds no bytes.

use super::fields::Fields;
use super::lines::Lines;
use super::message::{MAX_FIELDS, MessageError, Method, Request, Response, Version, fields};

/// Most bytes of chunk extensions of one body.
const MAX_EXTENSIONS: usize = 4 * 1024;
/// Most bytes of a trailer section.
const MAX_TRAILERS: usize = 16 * 1024;
/// Most digits of a chunk size: 2^64 - 1.
const MAX_SIZE_DIGITS: u8 = 16;

/// How the end of a body is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// There is no body.
    None,
    /// So many bytes; 0 is said by a Content-Length.
    Exact(u64),
    /// Chunked transfer coding.
    Chunked,
    /// The connection's end is the body's.
    UntilClose,
}

/// The length of a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseLength {
    /// How its end is known.
    pub length: Length,
    /// False where another recipient could have read another length: the response is passed on, but not stored, and
    /// its connection serves no other request.
    pub is_certain: bool,
}

/// The length of a request's body.
///
/// # Errors
/// There is none, or more than one reading of it.
pub fn request_length(request: &Request) -> Result<Length, MessageError> {
    let length = content_length(&request.fields)?;
    let coded = request.fields.has("transfer-encoding");
    if !coded {
        return Ok(length.map_or(Length::None, Length::Exact));
    }
    if length.is_some() || request.version == Version::Http10 {
        return Err(MessageError::BadLength);
    }
    match coding(&request.fields) {
        Coding::Chunked => Ok(Length::Chunked),
        Coding::Unknown => Err(MessageError::UnknownCoding),
        Coding::Contradictory => Err(MessageError::BadLength),
    }
}

/// The length of the body of a response to a request of this method.
///
/// # Errors
/// There is none, or more than one reading of it.
pub fn response_length(method: &Method, response: &Response) -> Result<ResponseLength, MessageError> {
    let certain = |length| Ok(ResponseLength { length, is_certain: true });
    let uncertain = |length| Ok(ResponseLength { length, is_certain: false });
    let coded = response.fields.has("transfer-encoding");
    let status = response.status;
    if *method == Method::Connect && (200..300).contains(&status) {
        return certain(Length::None);
    }
    if *method == Method::Head || status == 304 {
        // What it says is about another response: nothing of it frames this one.
        return certain(Length::None);
    }
    let length = content_length(&response.fields)?;
    if status < 200 || status == 204 {
        // A zero is said by many and means what we read anyway.
        let says_more = coded || length.is_some_and(|length| length > 0);
        return if says_more { Err(MessageError::BadLength) } else { certain(Length::None) };
    }
    if !coded {
        return certain(length.map_or(Length::UntilClose, Length::Exact));
    }
    if response.version == Version::Http10 {
        return Err(MessageError::BadLength);
    }
    match (coding(&response.fields), length) {
        (Coding::Chunked, None) => certain(Length::Chunked),
        (Coding::Chunked, Some(_)) => uncertain(Length::Chunked),
        (Coding::Contradictory, _) => uncertain(Length::UntilClose),
        // Passed on without the field that names it, the content would be another.
        (Coding::Unknown, _) => Err(MessageError::UnknownCoding),
    }
}

/// The one value of Content-Length; equal repetitions count as one (RFC 9110 Sec. 8.6).
fn content_length(fields: &Fields) -> Result<Option<u64>, MessageError> {
    let mut found = None;
    for line in fields.all("content-length") {
        for member in line.split(|byte| *byte == b',') {
            let digits = super::fields::trim(member);
            let good = (1..=18).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
            let text = std::str::from_utf8(digits).ok().filter(|_| good);
            let value = text.and_then(|text| text.parse().ok()).ok_or(MessageError::BadLength)?;
            if found.is_some_and(|other: u64| other != value) {
                return Err(MessageError::BadLength);
            }
            found = Some(value);
        }
    }
    Ok(found)
}

enum Coding {
    /// `chunked`, alone.
    Chunked,
    /// A coding that we do not serve.
    Unknown,
    /// Chunked twice, not last, with parameters; or a member that is no coding at all.
    Contradictory,
}

fn coding(fields: &Fields) -> Coding {
    let (mut chunked, mut unknown) = (0, false);
    let mut chunked_is_last = false;
    // An empty member is a way to hide one from somebody.
    for member in fields.all("transfer-encoding").flat_map(|line| line.split(|byte| *byte == b',')) {
        let member = super::fields::trim(member);
        chunked_is_last = member.eq_ignore_ascii_case(b"chunked");
        if chunked_is_last {
            chunked += 1;
        } else if member.eq_ignore_ascii_case(b"identity") || !super::fields::is_token(member) {
            return Coding::Contradictory;
        } else {
            unknown = true;
        }
    }
    match (chunked, chunked_is_last, unknown) {
        (1, true, false) => Coding::Chunked,
        (0, _, true) | (1, true, true) => Coding::Unknown,
        _ => Coding::Contradictory,
    }
}

/// What [`Decoder::decode`] found at the front of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded<'a> {
    /// Bytes of the input that are dealt with: framing, then `data`. 0: give more, or the body is over.
    pub consumed: usize,
    /// Content; may be empty.
    pub data: &'a [u8],
}

/// Takes a body out of its framing.
#[derive(Clone, Debug)]
pub struct Decoder {
    state: State,
    extensions: usize,
    trailer_text: Vec<u8>,
    trailers: Fields,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Done,
    /// So many bytes of content are left; a whole body without chunks.
    Exact(u64),
    UntilClose,
    /// Digits of a chunk size: value and count.
    Size(u64, u8),
    Extension(u64),
    SizeLf(u64),
    Chunk(u64),
    ChunkCr,
    ChunkLf,
    Trailers,
}

impl Decoder {
    /// A decoder at the start of a body.
    pub fn new(length: Length) -> Self {
        let state = match length {
            Length::None | Length::Exact(0) => State::Done,
            Length::Exact(bytes) => State::Exact(bytes),
            Length::Chunked => State::Size(0, 0),
            Length::UntilClose => State::UntilClose,
        };
        Self { state, extensions: 0, trailer_text: Vec::new(), trailers: Fields::new() }
    }

    /// Whether the whole body came.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Content that is still to come, where it is known.
    pub const fn remaining(&self) -> Option<u64> {
        match self.state {
            State::Done => Some(0),
            State::Exact(rest) => Some(rest),
            _ => None,
        }
    }

    /// The trailer fields, once the body is over.
    pub fn take_trailers(&mut self) -> Fields {
        std::mem::take(&mut self.trailers)
    }

    /// Takes framing and content from the front of `input`, up to the end of the first run of content.
    ///
    /// # Errors
    /// The framing is broken: what follows has no meaning.
    pub fn decode<'a>(&mut self, input: &'a [u8]) -> Result<Decoded<'a>, MessageError> {
        let mut at = 0;
        while let Some(byte) = input.get(at) {
            if let State::Exact(rest) | State::Chunk(rest) = self.state {
                let most = usize::try_from(rest).unwrap_or(usize::MAX).min(input.len() - at);
                let left = rest - most as u64;
                self.state = match (self.state, left) {
                    (State::Exact(_), 0) => State::Done,
                    (State::Exact(_), left) => State::Exact(left),
                    (_, 0) => State::ChunkCr,
                    (_, left) => State::Chunk(left),
                };
                let data = input.get(at..at + most).unwrap_or_default();
                return Ok(Decoded { consumed: at + most, data });
            }
            match self.state {
                State::Done => break,
                State::UntilClose => {
                    let data = input.get(at..).unwrap_or_default();
                    return Ok(Decoded { consumed: input.len(), data });
                }
                _ => self.state = self.framing(*byte)?,
            }
            at += 1;
        }
        Ok(Decoded { consumed: at, data: &[] })
    }

    /// The peer's side of the connection ended.
    ///
    /// # Errors
    /// The body is not complete.
    pub fn end(&mut self) -> Result<(), MessageError> {
        match self.state {
            State::Done | State::UntilClose => {
                self.state = State::Done;
                Ok(())
            }
            _ => Err(MessageError::Truncated),
        }
    }

    /// One byte of chunk framing.
    fn framing(&mut self, byte: u8) -> Result<State, MessageError> {
        match (self.state, byte) {
            (State::Size(size, digits), byte) if byte.is_ascii_hexdigit() && digits < MAX_SIZE_DIGITS => {
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                Ok(State::Size(size << 4 | u64::from(digit), digits + 1))
            }
            (State::Size(size, 1..), b'\r') | (State::Extension(size), b'\r') => Ok(State::SizeLf(size)),
            (State::Size(size, 1..), b';') => self.extension(size),
            (State::Extension(size), b'\t' | b' '..=b'~' | 0x80..) => self.extension(size),
            (State::SizeLf(0), b'\n') => Ok(State::Trailers),
            (State::SizeLf(size), b'\n') => Ok(State::Chunk(size)),
            (State::ChunkCr, b'\r') => Ok(State::ChunkLf),
            (State::ChunkLf, b'\n') => Ok(State::Size(0, 0)),
            (State::Trailers, byte) => self.trailer(byte),
            _ => Err(MessageError::BadChunk),
        }
    }

    fn extension(&mut self, size: u64) -> Result<State, MessageError> {
        self.extensions += 1;
        if self.extensions > MAX_EXTENSIONS {
            Err(MessageError::BadChunk)
        } else {
            Ok(State::Extension(size))
        }
    }

    fn trailer(&mut self, byte: u8) -> Result<State, MessageError> {
        let after_cr = self.trailer_text.last() == Some(&b'\r');
        let good = match byte {
            b'\n' => after_cr,
            b'\r' | b'\t' | b' '..=b'~' | 0x80.. => !after_cr,
            _ => false,
        };
        if !good || self.trailer_text.len() >= MAX_TRAILERS {
            return Err(MessageError::BadChunk);
        }
        self.trailer_text.push(byte);
        let ends = self.trailer_text == b"\r\n" || self.trailer_text.ends_with(b"\r\n\r\n");
        if !ends {
            return Ok(State::Trailers);
        }
        let text = std::mem::take(&mut self.trailer_text);
        self.trailers = fields(Lines::of(&text)).map_err(|_| MessageError::BadChunk)?;
        debug_assert!(self.trailers.len() <= MAX_FIELDS);
        self.trailers.retain(|name, _| may_trail(name));
        Ok(State::Done)
    }
}

/// Whether a field may stand in a trailer section: none that frames, routes, authenticates or steers caches (RFC 9110
/// Sec. 6.5.1).
pub fn may_trail(name: &[u8]) -> bool {
    const NEVER: [&str; 30] = [
        "age",
        "authorization",
        "cache-control",
        "connection",
        "content-encoding",
        "content-length",
        "content-location",
        "content-range",
        "content-type",
        "cookie",
        "date",
        "expect",
        "expires",
        "host",
        "keep-alive",
        "location",
        "max-forwards",
        "pragma",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "range",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "vary",
        "via",
        "www-authenticate",
    ];
    let is_condition = name.get(..3).is_some_and(|start| start.eq_ignore_ascii_case(b"if-"));
    !is_condition && !NEVER.iter().any(|never| name.eq_ignore_ascii_case(never.as_bytes()))
}

/// Appends the line before a chunk of so many bytes (more than 0).
pub fn write_chunk_size(out: &mut Vec<u8>, size: usize) {
    let digits = (usize::BITS - size.leading_zeros()).div_ceil(4).max(1);
    for place in (0..digits).rev() {
        let digit = u32::try_from(size >> (4 * place) & 0xf).unwrap_or_default();
        out.extend(char::from_digit(digit, 16).map(|digit| digit as u8));
    }
    out.extend_from_slice(b"\r\n");
}

/// Appends the end of a chunked body.
pub fn write_last_chunk(out: &mut Vec<u8>, trailers: &Fields) {
    out.extend_from_slice(b"0\r\n");
    trailers.write_to(out);
    out.extend_from_slice(b"\r\n");
}
