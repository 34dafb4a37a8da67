//! Messages and their fields.

use super::{BODY_MAX, HEAD, MessageError, Parsed};
use crate::flow::{Destination, Host};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// A receiver must understand types from here on.
const CRITICAL: u8 = 128;

/// A message that is being encoded.
pub(crate) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(crate) fn new(kind: u8) -> Self {
        Self { bytes: vec![kind, 0, 0] }
    }

    /// Appends a field whose value consists of these parts. If the value is too long for its length field, the whole
    /// message is too long, and [`Self::finish`] fails.
    pub(crate) fn put(&mut self, field: u8, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.bytes.push(field);
        self.bytes.extend_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
    }

    /// Appends a field with an address or name, and a port.
    pub(crate) fn put_destination(&mut self, field: u8, destination: &Destination) {
        let port = destination.port.to_be_bytes();
        match &destination.host {
            Host::Ip(ip) => match ip.to_canonical() {
                IpAddr::V4(ip) => self.put(field, &[&[IPV4], &port, &ip.octets()]),
                IpAddr::V6(ip) => self.put(field, &[&[IPV6], &port, &ip.octets()]),
            },
            Host::Name(name) => self.put(field, &[&[NAME], &port, name.as_str().as_bytes()]),
        }
    }

    pub(crate) fn finish(mut self) -> Result<Vec<u8>, MessageError> {
        let length = self.bytes.len() - HEAD;
        let length =
            u16::try_from(length).ok().filter(|_| length <= BODY_MAX).ok_or(MessageError::TooLong)?;
        self.bytes[1..HEAD].copy_from_slice(&length.to_be_bytes());
        Ok(self.bytes)
    }
}

/// Returns the kind and the body of the message at the beginning of `bytes`. `None` if it is not complete.
pub(crate) fn body(bytes: &[u8]) -> Result<Option<(u8, &[u8])>, MessageError> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
    let [kind, high, low] = *head;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > BODY_MAX {
        return Err(MessageError::TooLong);
    }
    Ok(rest.get(..length).map(|body| (kind, body)))
}

/// Parses the message at the beginning of `bytes` with `read`, which gets its kind and fields. Rejects a wrong kind
/// before the rest has arrived.
pub(crate) fn parse<T>(
    bytes: &[u8],
    kinds: &[u8],
    read: impl FnOnce(u8, Fields<'_>) -> Result<T, MessageError>,
) -> Parsed<T> {
    if let Some(kind) = bytes.first().filter(|kind| !kinds.contains(kind)) {
        return Parsed::Malformed(MessageError::Kind(*kind));
    }
    match body(bytes) {
        Err(error) => Parsed::Malformed(error),
        Ok(None) => Parsed::Incomplete,
        Ok(Some((kind, body))) => match read(kind, Fields { rest: body }) {
            Ok(message) => Parsed::Message(message, HEAD + body.len()),
            Err(error) => Parsed::Malformed(error),
        },
    }
}

/// The fields of a message, in order.
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u8, &'a [u8]), MessageError>;

    fn next(&mut self) -> Option<Self::Item> {
        let field = *self.rest.first()?;
        let Some((value, rest)) = self.rest.split_first_chunk::<HEAD>().and_then(|(head, rest)| {
            rest.split_at_checked(usize::from(u16::from_be_bytes([head[1], head[2]])))
        }) else {
            self.rest = &[];
            return Some(Err(MessageError::BadField(field)));
        };
        self.rest = rest;
        Some(Ok((field, value)))
    }
}

/// Handles a field that this version does not know: fails if it must be understood.
pub(crate) const fn unknown(field: u8) -> Result<(), MessageError> {
    if field >= CRITICAL { Err(MessageError::Unknown(field)) } else { Ok(()) }
}

/// Sets a value that may be set only once.
pub(crate) fn once<T>(slot: &mut Option<T>, field: u8, value: T) -> Result<(), MessageError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(MessageError::Twice(field)),
    }
}

/// Parses a field that [`Writer::put_destination`] wrote.
pub(crate) fn destination(field: u8, value: &[u8]) -> Result<Destination, MessageError> {
    let bad = MessageError::BadField(field);
    let (&[kind, high, low], host) = value.split_first_chunk::<3>().ok_or(bad)?;
    let host = match kind {
        IPV4 => Host::from(IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(host).map_err(|_| bad)?))),
        IPV6 => Host::from(IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(host).map_err(|_| bad)?))),
        NAME => Host::from_bytes(host).map_err(|_| bad)?,
        _ => return Err(bad),
    };
    Ok(Destination { host, port: u16::from_be_bytes([high, low]), zone: 0 })
}

/// Parses a text.
pub(crate) fn text(field: u8, value: &[u8]) -> Result<&str, MessageError> {
    std::str::from_utf8(value).map_err(|_| MessageError::BadField(field))
}
