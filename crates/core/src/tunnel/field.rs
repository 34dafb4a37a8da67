//! Messages and their fields.

use super::{BODY_MAX, HEAD, MessageError, Parsed};
use crate::flow::{Destination, Host};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// From here on a type must be understood.
const CRITICAL: u8 = 128;

/// A message in the making.
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn new(kind: u8) -> Self {
        Self { bytes: vec![kind, 0, 0] }
    }

    /// Appends a field whose value consists of these parts; a value too long for its length field makes the whole
    /// message too long.
    pub(super) fn put(&mut self, field: u8, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.bytes.push(field);
        self.bytes.extend_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
    }

    /// Appends a field that holds an address or name, and a port.
    pub(super) fn put_destination(&mut self, field: u8, destination: &Destination) {
        let port = destination.port.to_be_bytes();
        match &destination.host {
            Host::Ip(ip) => match ip.to_canonical() {
                IpAddr::V4(ip) => self.put(field, &[&[IPV4], &port, &ip.octets()]),
                IpAddr::V6(ip) => self.put(field, &[&[IPV6], &port, &ip.octets()]),
            },
            Host::Name(name) => self.put(field, &[&[NAME], &port, name.as_str().as_bytes()]),
        }
    }

    pub(super) fn finish(mut self) -> Result<Vec<u8>, MessageError> {
        let length = self.bytes.len() - HEAD;
        let length =
            u16::try_from(length).ok().filter(|_| length <= BODY_MAX).ok_or(MessageError::TooLong)?;
        self.bytes[1..HEAD].copy_from_slice(&length.to_be_bytes());
        Ok(self.bytes)
    }
}

/// The body of the message at the head of `bytes`, once all of it is there, and its kind.
pub(super) fn body(bytes: &[u8]) -> Result<Option<(u8, &[u8])>, MessageError> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
    let [kind, high, low] = *head;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > BODY_MAX {
        return Err(MessageError::TooLong);
    }
    Ok(rest.get(..length).map(|body| (kind, body)))
}

/// Parses the message at the head of `bytes` with `read`, which gets its kind and fields. A kind that is wrong is told
/// before the rest is there.
pub(super) fn parse<T>(
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
pub(super) struct Fields<'a> {
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

/// What to do with a field that this version does not know.
pub(super) const fn unknown(field: u8) -> Result<(), MessageError> {
    if field >= CRITICAL { Err(MessageError::Unknown(field)) } else { Ok(()) }
}

/// Puts `value` where nothing may be yet.
pub(super) fn once<T>(slot: &mut Option<T>, field: u8, value: T) -> Result<(), MessageError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(MessageError::Twice(field)),
    }
}

/// Reads what [`Writer::put_destination`] wrote.
pub(super) fn destination(field: u8, value: &[u8]) -> Result<Destination, MessageError> {
    let bad = MessageError::BadField(field);
    let (&[kind, high, low], host) = value.split_first_chunk::<3>().ok_or(bad)?;
    let host = match kind {
        IPV4 => Host::from(IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(host).map_err(|_| bad)?))),
        IPV6 => Host::from(IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(host).map_err(|_| bad)?))),
        NAME => Host::from_bytes(host).map_err(|_| bad)?,
        _ => return Err(bad),
    };
    Ok(Destination { host, port: u16::from_be_bytes([high, low]) })
}

/// Reads a text.
pub(super) fn text(field: u8, value: &[u8]) -> Result<&str, MessageError> {
    std::str::from_utf8(value).map_err(|_| MessageError::BadField(field))
}
