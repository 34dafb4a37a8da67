//! Strict parser for HTTP/1 heads: one interpretation or an error (RFC 9112 Sec. 2 to 5).
//!
//! A [`Scan`] finds the end of a head in a growing buffer. It rejects bytes that recipients interpret differently at
//! the first such byte: bare LF, bare CR, NUL and other controls, folded lines, endless heads. [`Request::parse`] and
//! [`Response::parse`] then read the whole head. So any split of the stream gives the same result.

use super::fields::{Fields, is_token, trim_end, trim_start};
use super::head::{Authority, HeadError};
use super::lines::{Lines, Marks, name_length};

/// Most bytes of a head, including its empty line.
pub const MAX_HEAD: usize = 64 * 1024;
/// Most field lines in a head or in a trailer section.
pub const MAX_FIELDS: usize = 100;
/// Most bytes of a request target.
pub const MAX_TARGET: usize = 8 * 1024;
/// Most empty lines before a request line (RFC 9112 Sec. 2.2 asks to ignore at least one).
const MAX_EMPTY_LINES: usize = 2;
/// Room for the fields of most messages and for those that are added, so that it is allocated once.
const USUAL_FIELDS: usize = 16;
/// Like [`USUAL_FIELDS`], in bytes.
const ADDED_BYTES: usize = 128;
/// Most bytes of a request line: the target, a method and a version.
const MAX_REQUEST_LINE: usize = MAX_TARGET + 64;

/// How a message is malformed. [`MessageError::status`] answers such a request; such a response becomes a 502.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// A line ends with LF alone, or a CR is not followed by LF.
    #[error("a line of the head does not end with CR LF")]
    BareLineEnd,
    /// A NUL or another control byte.
    #[error("the head holds a control byte")]
    ControlByte,
    /// A line begins with white space: obs-fold, or white space before the first field line.
    #[error("a line of the head begins with white space")]
    Folded,
    /// The first line is not a request line or status line.
    #[error("the first line is not an HTTP/1 request line or status line")]
    BadStartLine,
    /// A field line has no name, no colon, or white space before the colon.
    #[error("a line of the head is not a header field")]
    BadField,
    /// The target does not have a form that its method allows.
    #[error("the request target has no form that its method allows")]
    BadTarget,
    /// Host is missing in HTTP/1.1, repeated, or not a host and port.
    #[error("the request needs exactly one Host field that is a host and port")]
    BadHost,
    /// The host is a number, but not an address. Another program might read it as one (`127.1`).
    #[error(
        "the host is neither a name nor an address: write IPv4 as four decimal numbers without leading zeros (192.0.2.1)"
    )]
    BadNumber,
    /// A version other than 1.x.
    #[error("the HTTP version is not 1.0 or 1.1")]
    BadVersion,
    /// The target exceeds [`MAX_TARGET`] bytes.
    #[error("the request target is longer than {MAX_TARGET} bytes")]
    TargetTooLong,
    /// The head exceeds [`MAX_HEAD`] bytes or [`MAX_FIELDS`] fields.
    #[error("the head is longer than {MAX_HEAD} bytes or has more than {MAX_FIELDS} fields")]
    TooLong,
    /// Length fields that contradict each other or are invalid.
    #[error("Content-Length and Transfer-Encoding do not give one length")]
    BadLength,
    /// A transfer coding that this proxy does not support.
    #[error("the transfer coding is not chunked")]
    UnknownCoding,
    /// A chunk is malformed, or its extensions or trailers are too long.
    #[error("the chunked body is malformed")]
    BadChunk,
    /// The body ended before its length.
    #[error("the body ended early")]
    Truncated,
}

impl MessageError {
    /// Returns this error, or a more exact one if the authority has its own error.
    pub(super) const fn or(self, authority: HeadError) -> Self {
        match authority {
            HeadError::BadNumber => Self::BadNumber,
            _ => self,
        }
    }

    /// Returns the status of the answer to a request with this error.
    pub const fn status(self) -> u16 {
        match self {
            Self::BadVersion => 505,
            Self::TargetTooLong => 414,
            Self::TooLong => 431,
            Self::UnknownCoding => 501,
            _ => 400,
        }
    }
}

/// Finds the end of a head in a growing buffer. Use one for each head.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scan {
    scanned: usize,
    empty_lines: usize,
    /// Bytes of the current line so far.
    line: usize,
    started: bool,
}

/// The sender of the head. A server may send a bare LF, but this proxy never forwards one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A request.
    Client,
    /// A response.
    Server,
}

impl Scan {
    /// Examines the new bytes. Returns the length of the head once its empty line has arrived.
    ///
    /// # Errors
    /// Fails at the first byte that is not allowed in a head, or if the head is too long.
    pub fn advance(&mut self, bytes: &[u8], sender: Sender) -> Result<Option<usize>, MessageError> {
        let mut marks = Marks::of_controls(bytes, self.scanned);
        loop {
            if self.line == 0 && matches!(bytes.get(self.scanned), Some(b' ' | b'\t')) {
                return Err(MessageError::Folded);
            }
            let at = marks.next().unwrap_or(bytes.len());
            if bytes.get(at..at + 2) == Some(b"\r\n") {
                marks.next();
                self.pass(at + 1 - self.scanned)?;
                if self.end_line(1)? {
                    return Ok(Some(self.scanned));
                }
                continue;
            }
            self.pass(at.saturating_sub(self.scanned))?;
            let Some(byte) = bytes.get(at) else { return Ok(None) };
            match byte {
                b'\n' if sender == Sender::Client => return Err(MessageError::BareLineEnd),
                b'\n' if self.end_line(0)? => return Ok(Some(self.scanned)),
                b'\n' => {}
                // This CR is judged together with the next byte.
                b'\r' if at + 1 == bytes.len() => return self.within().map(|()| None),
                b'\r' => return Err(MessageError::BareLineEnd),
                b'\t' => self.pass(1)?,
                _ => return Err(MessageError::ControlByte),
            }
        }
    }

    /// Adds `count` bytes to the current line.
    fn pass(&mut self, count: usize) -> Result<(), MessageError> {
        self.scanned += count;
        self.line += count;
        // Check the request line first: its limit is smaller than that of the head.
        if !self.started && self.line > MAX_REQUEST_LINE {
            return Err(MessageError::TargetTooLong);
        }
        self.within()
    }

    fn within(&self) -> Result<(), MessageError> {
        if self.scanned >= MAX_HEAD { Err(MessageError::TooLong) } else { Ok(()) }
    }

    /// Handles the end of a line. Returns whether it was the empty line behind the fields.
    fn end_line(&mut self, cr: usize) -> Result<bool, MessageError> {
        let is_empty = self.line == cr;
        self.scanned += 1;
        self.line = 0;
        if is_empty && !self.started {
            self.empty_lines += 1;
            return if self.empty_lines > MAX_EMPTY_LINES {
                Err(MessageError::BadStartLine)
            } else {
                Ok(false)
            };
        }
        self.started = true;
        Ok(is_empty)
    }
}

/// A version of HTTP/1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// HTTP/1.0
    Http10,
    /// HTTP/1.1, and each later 1.x, which is answered as 1.1 (RFC 9110 Sec. 2.5).
    Http11,
}

impl Version {
    fn parse(text: &[u8]) -> Result<Self, MessageError> {
        match text {
            b"HTTP/1.0" => Ok(Self::Http10),
            [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'1'..=b'9'] => Ok(Self::Http11),
            [b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9'] => Err(MessageError::BadVersion),
            _ => Err(MessageError::BadStartLine),
        }
    }

    /// Returns the version as Via writes it.
    pub const fn number(self) -> &'static str {
        match self {
            Self::Http10 => "1.0",
            Self::Http11 => "1.1",
        }
    }
}

/// A request method. It is a token and case-sensitive (RFC 9110 Sec. 9).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Method {
    /// GET
    Get,
    /// HEAD
    Head,
    /// POST
    Post,
    /// PUT
    Put,
    /// DELETE
    Delete,
    /// CONNECT
    Connect,
    /// OPTIONS
    Options,
    /// TRACE
    Trace,
    /// PATCH (RFC 5789)
    Patch,
    /// Any other.
    Other(Box<[u8]>),
}

impl Method {
    /// Reads a method.
    ///
    /// # Errors
    /// Fails if the bytes are not a token.
    pub fn parse(bytes: &[u8]) -> Result<Self, MessageError> {
        Ok(match bytes {
            b"GET" => Self::Get,
            b"HEAD" => Self::Head,
            b"POST" => Self::Post,
            b"PUT" => Self::Put,
            b"DELETE" => Self::Delete,
            b"CONNECT" => Self::Connect,
            b"OPTIONS" => Self::Options,
            b"TRACE" => Self::Trace,
            b"PATCH" => Self::Patch,
            other if is_token(other) && other.len() <= 32 => Self::Other(other.into()),
            _ => return Err(MessageError::BadStartLine),
        })
    }

    /// Returns the method as it is written.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Get => b"GET",
            Self::Head => b"HEAD",
            Self::Post => b"POST",
            Self::Put => b"PUT",
            Self::Delete => b"DELETE",
            Self::Connect => b"CONNECT",
            Self::Options => b"OPTIONS",
            Self::Trace => b"TRACE",
            Self::Patch => b"PATCH",
            Self::Other(other) => other,
        }
    }

    /// Whether the method is safe: it asks for no change (RFC 9110 Sec. 9.2.1). An unknown method is not safe.
    pub const fn is_safe(&self) -> bool {
        matches!(self, Self::Get | Self::Head | Self::Options | Self::Trace)
    }

    /// Whether the method is idempotent: it may be sent again after a broken connection (RFC 9110 Sec. 9.2.2).
    pub const fn is_idempotent(&self) -> bool {
        self.is_safe() || matches!(self, Self::Put | Self::Delete)
    }
}

/// The head of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// The target as it was written, in any of the four forms.
    pub target: Vec<u8>,
    /// The sender's version.
    pub version: Version,
    /// The header fields.
    pub fields: Fields,
}

/// The head of a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// The status code, 100 to 999.
    pub status: u16,
    /// The reason phrase. May be empty.
    pub reason: Vec<u8>,
    /// The sender's version.
    pub version: Version,
    /// The header fields.
    pub fields: Fields,
}

impl Request {
    /// Parses a whole head, as [`Scan`] found it.
    ///
    /// # Errors
    /// Fails if the head is malformed.
    pub fn parse(head: &[u8]) -> Result<Self, MessageError> {
        let mut lines = Lines::of(head);
        let (_, first) = lines.find(|(_, line)| !line.is_empty()).unwrap_or_default();
        let mut parts = first.split(|byte| *byte == b' ');
        let (Some(method), Some(target), Some(version), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(MessageError::BadStartLine);
        };
        let method = Method::parse(method)?;
        if target.is_empty() || target.contains(&b'\t') {
            return Err(MessageError::BadStartLine);
        }
        if target.len() > MAX_TARGET {
            return Err(MessageError::TargetTooLong);
        }
        let version = Version::parse(version)?;
        let fields = fields(lines)?;
        let request = Self { method, target: target.to_vec(), version, fields };
        request.check_host()?;
        Ok(request)
    }

    fn check_host(&self) -> Result<(), MessageError> {
        let mut hosts = self.fields.all("host");
        match (hosts.next(), hosts.next()) {
            (_, Some(_)) => Err(MessageError::BadHost),
            (None, None) if self.version == Version::Http11 => Err(MessageError::BadHost),
            // An empty Host is allowed if the target has no authority (RFC 9112 Sec. 3.2).
            (None | Some(b""), None) => Ok(()),
            // A Host equal to the target's authority is checked together with the target.
            (Some(host), None) if self.is_asked_for(host) => Ok(()),
            (Some(host), None) => {
                Authority::parse(host).map(drop).map_err(|error| MessageError::BadHost.or(error))
            }
        }
    }

    /// Whether the target is a URL with exactly this authority, as in a request to a proxy.
    fn is_asked_for(&self, host: &[u8]) -> bool {
        let Some(rest) = self.target.strip_prefix(b"http://") else { return false };
        let end = rest.iter().position(|byte| matches!(byte, b'/' | b'?')).unwrap_or(rest.len());
        !host.is_empty() && rest.get(..end) == Some(host)
    }

    /// Appends the head with its empty line.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.method.as_bytes());
        out.push(b' ');
        out.extend_from_slice(&self.target);
        out.extend_from_slice(b" HTTP/1.1\r\n");
        self.fields.write_to(out);
        out.extend_from_slice(b"\r\n");
    }
}

impl Response {
    /// Makes a response of this proxy itself.
    pub fn new(status: u16, fields: Fields) -> Self {
        Self { status, reason: reason_phrase(status).as_bytes().to_vec(), version: Version::Http11, fields }
    }

    /// Parses a whole head, as [`Scan`] found it.
    ///
    /// # Errors
    /// Fails if the head is malformed.
    pub fn parse(head: &[u8]) -> Result<Self, MessageError> {
        let mut lines = Lines::of(head);
        let (_, first) = lines.next().unwrap_or_default();
        let (version, rest) = first.split_at_checked(8).ok_or(MessageError::BadStartLine)?;
        let version = Version::parse(version)?;
        let (status, reason) = match rest {
            [b' ', a @ b'1'..=b'9', b @ b'0'..=b'9', c @ b'0'..=b'9', rest @ ..] => {
                let digit = |byte: &u8| u16::from(byte - b'0');
                (digit(a) * 100 + digit(b) * 10 + digit(c), rest)
            }
            _ => return Err(MessageError::BadStartLine),
        };
        // Some servers leave out the space behind the status if there is no phrase.
        let reason = match reason {
            [] => reason,
            [b' ', reason @ ..] => reason,
            _ => return Err(MessageError::BadStartLine),
        };
        Ok(Self { status, reason: reason.to_vec(), version, fields: fields(lines)? })
    }

    /// Appends the head with its empty line.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        write_status_line(out, self.status, &self.reason);
        self.fields.write_to(out);
        out.extend_from_slice(b"\r\n");
    }

    /// Whether another response to the same request follows (1xx, but not 101).
    pub const fn is_interim(&self) -> bool {
        self.status >= 100 && self.status < 200 && self.status != 101
    }
}

/// Appends `HTTP/1.1 status reason CRLF`.
pub fn write_status_line(out: &mut Vec<u8>, status: u16, reason: &[u8]) {
    out.extend_from_slice(b"HTTP/1.1 ");
    let digit = |place: u16| b'0' + u8::try_from(status / place % 10).unwrap_or_default();
    out.extend([digit(100), digit(10), digit(1), b' ']);
    out.extend_from_slice(reason);
    out.extend_from_slice(b"\r\n");
}

/// Parses field lines up to the empty line: those of a head behind its first line, or those of a trailer section.
pub(super) fn fields(lines: Lines<'_>) -> Result<Fields, MessageError> {
    // Leave room for the fields that are added before the message is forwarded.
    let mut fields = Fields::of_text(lines.text(), ADDED_BYTES, USUAL_FIELDS);
    for (begin, line) in lines.take_while(|(_, line)| !line.is_empty()) {
        let name = name_length(line);
        let (Some([b':', value @ ..]), 1..) = (line.get(name..), name) else {
            let is_folded = matches!(line.first(), Some(b' ' | b'\t'));
            return Err(if is_folded { MessageError::Folded } else { MessageError::BadField });
        };
        if fields.len() == MAX_FIELDS {
            return Err(MessageError::TooLong);
        }
        let value = trim_start(value);
        let at = begin + line.len() - value.len();
        fields.line(begin, name, at..at + trim_end(value).len());
    }
    Ok(fields)
}

/// Returns the phrase of RFC 9110 for a status, or an empty text.
pub const fn reason_phrase(status: u16) -> &'static str {
    match status {
        100 => "Continue",
        101 => "Switching Protocols",
        103 => "Early Hints",
        200 => "OK",
        204 => "No Content",
        206 => "Partial Content",
        304 => "Not Modified",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        407 => "Proxy Authentication Required",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        508 => "Loop Detected",
        _ => "",
    }
}
