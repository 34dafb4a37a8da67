//! Version 1: `PROXY TCP4 192.0.2.1 198.51.100.1 56324 443` and CRLF (Sec. 2.1 of the document).

use super::{Addresses, Header, HeaderError, MAX_V1, Transport, Version, in_one_family};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

const START: &[u8] = b"PROXY ";

/// Parses the header and returns its length. `None` if bytes are missing.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<(Header, usize)>, HeaderError> {
    if bytes.iter().zip(START).any(|(byte, wanted)| byte != wanted) {
        return Err(HeaderError::NotProxy);
    }
    let looked_at = bytes.get(..MAX_V1).unwrap_or(bytes);
    let Some(end) = looked_at.iter().position(|byte| matches!(byte, b'\r' | b'\n')) else {
        return if bytes.len() < MAX_V1 { Ok(None) } else { Err(HeaderError::BadLine) };
    };
    let (line, rest) = looked_at.split_at(end);
    match rest {
        [b'\r', b'\n', ..] => {}
        [b'\r'] if looked_at.len() < MAX_V1 => return Ok(None),
        _ => return Err(HeaderError::BadLine),
    }
    let line = std::str::from_utf8(line.strip_prefix(START).ok_or(HeaderError::NotProxy)?);
    let addresses = addresses(line.map_err(|_| HeaderError::BadAddress)?)?;
    Ok(Some((Header { version: Version::V1, addresses, tlvs: Vec::new() }, end + 2)))
}

/// Parses the part behind `PROXY `.
fn addresses(line: &str) -> Result<Addresses, HeaderError> {
    let (protocol, rest) = line.split_once(' ').unwrap_or((line, ""));
    match protocol {
        // The document says to ignore the rest of the line.
        "UNKNOWN" => Ok(Addresses::Unknown),
        "TCP4" => pair::<Ipv4Addr>(rest),
        "TCP6" => pair::<Ipv6Addr>(rest),
        _ => Err(HeaderError::BadAddress),
    }
}

/// Parses `client server client-port server-port`, separated by single spaces. The address parsers of the standard
/// library reject leading zeros in an IPv4 address, zones and ports.
fn pair<A: FromStr + Into<IpAddr>>(text: &str) -> Result<Addresses, HeaderError> {
    let mut parts = text.split(' ');
    let mut next = || parts.next().ok_or(HeaderError::BadAddress);
    let (client, server) = (address::<A>(next()?)?, address::<A>(next()?)?);
    let (client_port, server_port) = (port(next()?)?, port(next()?)?);
    match parts.next() {
        None => {
            Ok(Addresses::tcp(SocketAddr::new(client, client_port), SocketAddr::new(server, server_port)))
        }
        Some(_) => Err(HeaderError::BadAddress),
    }
}

fn address<A: FromStr + Into<IpAddr>>(text: &str) -> Result<IpAddr, HeaderError> {
    text.parse::<A>().map(Into::into).map_err(|_| HeaderError::BadAddress)
}

/// Parses a decimal number from 0 to 65535 without a sign or a leading zero.
fn port(text: &str) -> Result<u16, HeaderError> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten().ok_or(HeaderError::BadAddress)
}

pub(super) fn encode(addresses: &Addresses) -> Vec<u8> {
    let Addresses::Inet { transport: Transport::Stream, client, server } = *addresses else {
        return b"PROXY UNKNOWN\r\n".to_vec();
    };
    let (from, to) = in_one_family(client, server);
    let protocol = if from.is_ipv4() { "TCP4" } else { "TCP6" };
    format!("PROXY {protocol} {from} {to} {} {}\r\n", client.port(), server.port()).into_bytes()
}
