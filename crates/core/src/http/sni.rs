//! What a TLS ClientHello tells before encryption starts: the server name (RFC 6066 Sec. 3), the application
//! protocols (RFC 7301), and whether Encrypted Client Hello is used (RFC 9849).
//!
//! The function depends only on the bytes received so far. The hello may arrive in any number of TCP segments, and
//! may be split over several TLS records (RFC 8446 Sec. 5.1). With ML-KEM key shares it has 1.7 KB or more.

use super::dns_name;
use crate::flow::{Host, HostName};
use std::borrow::Cow;

/// Most bytes of the handshake message. Clients do not send that much, and servers refuse it.
pub const MAX_HELLO: usize = 16 * 1024;

/// Most bytes examined for one hello: [`MAX_HELLO`], and the same again for the headers of small records.
pub const MAX_BYTES: usize = 2 * MAX_HELLO;

/// Most bytes of one TLSPlaintext fragment (RFC 8446 Sec. 5.1).
const MAX_FRAGMENT: usize = 1 << 14;
/// type(1) version(2) length(2)
const RECORD_HEADER: usize = 5;
/// type(1) length(3)
const HANDSHAKE_HEADER: usize = 4;

/// ContentType of a handshake record.
const HANDSHAKE: u8 = 22;
/// HandshakeType of a ClientHello.
const CLIENT_HELLO: u8 = 1;

const EXT_SERVER_NAME: u16 = 0;
const EXT_ALPN: u16 = 16;
const EXT_ECH: u16 = 0xfe0d;

/// What the bytes received so far are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientHello {
    /// Not a TLS handshake, whatever follows.
    NotTls,
    /// The start of a handshake. More bytes are needed. Never returned for more than [`MAX_BYTES`] bytes.
    Incomplete,
    /// A complete ClientHello.
    Hello(Hello),
    /// TLS by its record header, but malformed.
    Malformed(HelloError),
}

/// The readable part of a ClientHello.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// The requested name. `None` without the extension, and for an IP literal, which RFC 6066 forbids but clients
    /// send. With Encrypted Client Hello it is the public name of the outer hello, not the real one.
    pub server_name: Option<HostName>,
    /// The offered protocols in the client's order, including GREASE values (RFC 8701).
    pub alpn: Vec<Vec<u8>>,
    /// The hello has the `encrypted_client_hello` extension. Browsers send it to every host with random content, so
    /// it does not mean that `server_name` is a cover name.
    pub ech: bool,
}

/// How a ClientHello is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// A record is empty, longer than 2^14 bytes, or not a handshake record.
    #[error("a TLS record of the hello has a wrong type, version or length")]
    BadRecord,
    /// The first handshake message is not a ClientHello.
    #[error("the first TLS handshake message is not a ClientHello")]
    NotClientHello,
    /// It exceeds [`MAX_HELLO`], or its records exceed [`MAX_BYTES`].
    #[error("the ClientHello is longer than {MAX_HELLO} bytes")]
    TooLong,
    /// A length points beyond the end, leaves bytes over, or is not allowed.
    #[error("a length inside the ClientHello is wrong")]
    BadLength,
    /// server_name, ALPN or ECH occurs twice, or there are two names of one type.
    #[error("the ClientHello holds a server name, protocol list or ECH twice")]
    Repeated,
    /// The server name is not a DNS name, or has an unknown type.
    #[error("the server name in the ClientHello is not a DNS name")]
    BadName,
}

/// Reads a ClientHello from the first bytes of a connection.
pub fn client_hello(bytes: &[u8]) -> ClientHello {
    match handshake_message(bytes) {
        Ok(Some(body)) => match hello(&body) {
            Ok(hello) => ClientHello::Hello(hello),
            Err(error) => ClientHello::Malformed(error),
        },
        Ok(None) if bytes.len() >= MAX_BYTES => ClientHello::Malformed(HelloError::TooLong),
        Ok(None) => ClientHello::Incomplete,
        Err(Refusal::NotTls) => ClientHello::NotTls,
        Err(Refusal::Broken(error)) => ClientHello::Malformed(error),
    }
}

enum Refusal {
    NotTls,
    Broken(HelloError),
}

impl From<HelloError> for Refusal {
    fn from(error: HelloError) -> Self {
        Self::Broken(error)
    }
}

/// Returns the body of the first handshake message, assembled from its records. `None` if bytes are missing. Copies
/// only if there is more than one record.
fn handshake_message(bytes: &[u8]) -> Result<Option<Cow<'_, [u8]>>, Refusal> {
    if !starts_like_tls(bytes) {
        return Err(Refusal::NotTls);
    }
    let mut message: Cow<'_, [u8]> = Cow::Borrowed(&[]);
    let mut rest = bytes.get(..MAX_BYTES).unwrap_or(bytes);
    loop {
        let Some(length) = fragment_length(rest)? else { return Ok(None) };
        let end = RECORD_HEADER + length;
        let fragment = rest.get(RECORD_HEADER..end.min(rest.len())).unwrap_or_default();
        if message.is_empty() {
            message = Cow::Borrowed(fragment);
        } else {
            message.to_mut().extend_from_slice(fragment);
        }
        if let Some(length) = message_length(&message)? {
            let range = HANDSHAKE_HEADER..HANDSHAKE_HEADER + length;
            match message {
                Cow::Borrowed(whole) if whole.len() >= range.end => {
                    return Ok(whole.get(range).map(Cow::Borrowed));
                }
                Cow::Owned(ref whole) if whole.len() >= range.end => {
                    return Ok(whole.get(range).map(|body| Cow::Owned(body.to_vec())));
                }
                _ => {}
            }
        }
        // The hello is not complete: continue with the next record.
        match rest.get(end..) {
            Some(next) => rest = next,
            None => return Ok(None),
        }
    }
}

/// Whether the bytes may be the start of a TLS handshake: type 22, version 3.0 to 3.4.
fn starts_like_tls(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(|kind| *kind == HANDSHAKE)
        && bytes.get(1).is_none_or(|major| *major == 3)
        && bytes.get(2).is_none_or(|minor| *minor <= 4)
}

/// Returns the fragment length of the record that starts here. `None` if its header is not complete.
fn fragment_length(record: &[u8]) -> Result<Option<usize>, HelloError> {
    if !starts_like_tls(record) {
        return Err(HelloError::BadRecord);
    }
    let Some(&[high, low]) = record.get(3..RECORD_HEADER).and_then(|length| length.first_chunk()) else {
        return Ok(None);
    };
    match usize::from(u16::from_be_bytes([high, low])) {
        length @ 1..=MAX_FRAGMENT => Ok(Some(length)),
        _ => Err(HelloError::BadRecord),
    }
}

/// Returns the body length of the handshake message that starts here. `None` if its header is not complete.
fn message_length(message: &[u8]) -> Result<Option<usize>, HelloError> {
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(HelloError::NotClientHello);
    }
    let Some(&[_, high, middle, low]) = message.first_chunk::<HANDSHAKE_HEADER>() else { return Ok(None) };
    match u32::from_be_bytes([0, high, middle, low]) as usize {
        length if length <= MAX_HELLO => Ok(Some(length)),
        _ => Err(HelloError::TooLong),
    }
}

/// Reads a structure in TLS presentation language from the front. Every failure is [`HelloError::BadLength`].
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], HelloError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(HelloError::BadLength)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, HelloError> {
        let byte = self.take(1)?;
        byte.first().copied().ok_or(HelloError::BadLength)
    }

    fn u16(&mut self) -> Result<u16, HelloError> {
        let bytes = self.take(2)?.first_chunk().ok_or(HelloError::BadLength)?;
        Ok(u16::from_be_bytes(*bytes))
    }

    /// `opaque x<0..2^8-1>`
    fn vector8(&mut self) -> Result<&'a [u8], HelloError> {
        let length = self.u8()?;
        self.take(usize::from(length))
    }

    /// `opaque x<0..2^16-1>`
    fn vector16(&mut self) -> Result<&'a [u8], HelloError> {
        let length = self.u16()?;
        self.take(usize::from(length))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn require(condition: bool) -> Result<(), HelloError> {
    condition.then_some(()).ok_or(HelloError::BadLength)
}

/// Parses the body of a ClientHello (RFC 8446 Sec. 4.1.2; RFC 5246 Sec. 7.4.1.2, where extensions may be absent).
fn hello(body: &[u8]) -> Result<Hello, HelloError> {
    let mut reader = Reader(body);
    reader.take(2 + 32)?; // legacy_version, random
    require(reader.vector8()?.len() <= 32)?; // legacy_session_id
    let suites = reader.vector16()?;
    require(!suites.is_empty() && suites.len().is_multiple_of(2))?;
    require(!reader.vector8()?.is_empty())?; // legacy_compression_methods
    let mut hello = Hello::default();
    if reader.is_empty() {
        return Ok(hello);
    }
    let mut extensions = Reader(reader.vector16()?);
    require(reader.is_empty())?;
    let mut seen = Seen::default();
    while !extensions.is_empty() {
        let (kind, data) = (extensions.u16()?, extensions.vector16()?);
        match kind {
            EXT_SERVER_NAME => {
                first(&mut seen.server_name)?;
                hello.server_name = server_name(data)?;
            }
            EXT_ALPN => {
                first(&mut seen.alpn)?;
                hello.alpn = protocols(data)?;
            }
            EXT_ECH => {
                first(&mut seen.ech)?;
                hello.ech = true;
            }
            _ => {}
        }
    }
    Ok(hello)
}

/// Which of the interesting extensions were found.
#[derive(Default)]
struct Seen {
    server_name: bool,
    alpn: bool,
    ech: bool,
}

/// Marks an extension as found. A second one could name one host to us and another to the server.
fn first(seen: &mut bool) -> Result<(), HelloError> {
    if std::mem::replace(seen, true) { Err(HelloError::Repeated) } else { Ok(()) }
}

/// Parses a ServerNameList (RFC 6066 Sec. 3): one name of type host_name, the only type that exists.
fn server_name(data: &[u8]) -> Result<Option<HostName>, HelloError> {
    let mut reader = Reader(data);
    let mut list = Reader(reader.vector16()?);
    require(reader.is_empty() && !list.is_empty())?;
    if list.u8()? != 0 {
        return Err(HelloError::BadName);
    }
    let name = list.vector16()?;
    if !list.is_empty() {
        return Err(HelloError::Repeated);
    }
    if std::str::from_utf8(name).is_ok_and(|text| text.parse::<std::net::IpAddr>().is_ok()) {
        return Ok(None);
    }
    if !name.is_ascii() {
        // RFC 6066 Sec. 3: clients send international names as A-labels.
        return Err(HelloError::BadName);
    }
    match dns_name(name) {
        Ok(Host::Name(name)) => Ok(Some(name)),
        _ => Err(HelloError::BadName),
    }
}

/// Parses a ProtocolNameList (RFC 7301 Sec. 3.1): at least one name, and no empty name.
fn protocols(data: &[u8]) -> Result<Vec<Vec<u8>>, HelloError> {
    let mut reader = Reader(data);
    let mut list = Reader(reader.vector16()?);
    require(reader.is_empty() && !list.is_empty())?;
    let mut protocols = Vec::new();
    while !list.is_empty() {
        let protocol = list.vector8()?;
        require(!protocol.is_empty())?;
        protocols.push(protocol.to_vec());
    }
    Ok(protocols)
}
