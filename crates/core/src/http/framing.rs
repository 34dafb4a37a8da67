//! Finds the end of a body (RFC 9112 Sec. 6 and 7): one length or an error, and a decoder that buffers no content.

use super::fields::Fields;
use super::lines::Lines;
use super::message::{MAX_FIELDS, MessageError, Method, Request, Response, Version, fields};

/// Most bytes of all chunk extensions of one body.
const MAX_EXTENSIONS: usize = 4 * 1024;
/// Most bytes of a trailer section.
const MAX_TRAILERS: usize = 16 * 1024;
/// Most digits of a chunk size, which is at most 2^64 - 1.
const MAX_SIZE_DIGITS: u8 = 16;

/// How a recipient knows the end of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// There is no body.
    None,
    /// This number of bytes. 0 comes from a Content-Length.
    Exact(u64),
    /// Chunked transfer coding.
    Chunked,
    /// The body ends when the connection ends.
    UntilClose,
}

/// The length of a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseLength {
    /// How the recipient knows its end.
    pub length: Length,
    /// False if another recipient could read another length. The response is then forwarded, but not stored, and its
    /// connection is not reused.
    pub is_certain: bool,
}

/// Returns the length of a request's body.
///
/// # Errors
/// Fails if the length is invalid, or if it can be read in more than one way.
pub fn request_length(request: &Request) -> Result<Length, MessageError> {
    let length = content_length(&request.fields)?;
    let coded = request.fields.has("transfer-encoding");
    if !coded {
        return Ok(length.map_or(Length::None, Length::Exact));
    }
    // Both fields together allow request smuggling, and HTTP/1.0 has no chunked coding (RFC 9112 Sec. 6.1): reject
    // the request.
    if length.is_some() || request.version == Version::Http10 {
        return Err(MessageError::BadLength);
    }
    match coding(&request.fields) {
        Coding::Chunked => Ok(Length::Chunked),
        Coding::Unknown => Err(MessageError::UnknownCoding),
        Coding::Contradictory => Err(MessageError::BadLength),
    }
}

/// Returns the length of the body of a response to a request of this method.
///
/// # Errors
/// Fails if the length is invalid, or if it can be read in more than one way.
pub fn response_length(method: &Method, response: &Response) -> Result<ResponseLength, MessageError> {
    let certain = |length| Ok(ResponseLength { length, is_certain: true });
    let uncertain = |length| Ok(ResponseLength { length, is_certain: false });
    let coded = response.fields.has("transfer-encoding");
    let status = response.status;
    // The order follows RFC 9112 Sec. 6.3: method and status come before the length fields.
    if *method == Method::Connect && (200..300).contains(&status) {
        return certain(Length::None);
    }
    if *method == Method::Head || status == 304 {
        // Its fields describe another response, so they do not frame this one.
        return certain(Length::None);
    }
    let length = content_length(&response.fields)?;
    if status < 200 || status == 204 {
        // Many servers send a length of 0, which is harmless.
        let says_more = coded || length.is_some_and(|length| length > 0);
        return if says_more { Err(MessageError::BadLength) } else { certain(Length::None) };
    }
    if !coded {
        return certain(length.map_or(Length::UntilClose, Length::Exact));
    }
    // An HTTP/1.0 message with Transfer-Encoding has faulty framing (RFC 9112 Sec. 6.1).
    if response.version == Version::Http10 {
        return Err(MessageError::BadLength);
    }
    match (coding(&response.fields), length) {
        (Coding::Chunked, None) => certain(Length::Chunked),
        (Coding::Chunked, Some(_)) => uncertain(Length::Chunked),
        (Coding::Contradictory, _) => uncertain(Length::UntilClose),
        // The proxy would forward the content without the field that names its coding, so the client would misread
        // it.
        (Coding::Unknown, _) => Err(MessageError::UnknownCoding),
    }
}

/// Reads the single value of Content-Length. Equal repetitions count as one (RFC 9110 Sec. 8.6).
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
    /// A coding that this proxy does not support.
    Unknown,
    /// Chunked twice, not last, or with parameters; or a member that is not a coding at all.
    Contradictory,
}

fn coding(fields: &Fields) -> Coding {
    let (mut chunked, mut unknown) = (0, false);
    let mut chunked_is_last = false;
    // Split by hand: an empty member must not be skipped, because it could hide a coding from one of the recipients.
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
    /// Bytes of the input that are finished: framing, then `data`. 0: more input is needed, or the body is over.
    pub consumed: usize,
    /// Content. May be empty.
    pub data: &'a [u8],
}

/// Removes the framing from a body.
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
    /// The number of content bytes left in a body without chunks.
    Exact(u64),
    UntilClose,
    /// Inside a chunk size: the value and the number of digits so far.
    Size(u64, u8),
    Extension(u64),
    SizeLf(u64),
    Chunk(u64),
    ChunkCr,
    ChunkLf,
    Trailers,
}

impl Decoder {
    /// Makes a decoder for the start of a body.
    pub fn new(length: Length) -> Self {
        let state = match length {
            Length::None | Length::Exact(0) => State::Done,
            Length::Exact(bytes) => State::Exact(bytes),
            Length::Chunked => State::Size(0, 0),
            Length::UntilClose => State::UntilClose,
        };
        Self { state, extensions: 0, trailer_text: Vec::new(), trailers: Fields::new() }
    }

    /// Whether the whole body has arrived.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Returns the number of content bytes still to come, if it is known.
    pub const fn remaining(&self) -> Option<u64> {
        match self.state {
            State::Done => Some(0),
            State::Exact(rest) => Some(rest),
            _ => None,
        }
    }

    /// Returns the trailer fields once the body is over.
    pub fn take_trailers(&mut self) -> Fields {
        std::mem::take(&mut self.trailers)
    }

    /// Decodes framing and content from the front of `input`, up to the end of the first run of content.
    ///
    /// # Errors
    /// Fails if the framing is broken. The bytes that follow have no meaning then.
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

    /// Handles the end of the peer's side of the connection.
    ///
    /// # Errors
    /// Fails if the body is not complete.
    pub fn end(&mut self) -> Result<(), MessageError> {
        match self.state {
            State::Done | State::UntilClose => {
                self.state = State::Done;
                Ok(())
            }
            _ => Err(MessageError::Truncated),
        }
    }

    /// Handles one byte of chunk framing.
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

/// Whether a trailer section may contain a field. It must not frame, route, authenticate or control caches (RFC 9110
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

/// Appends the line before a chunk of `size` bytes (more than 0).
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
