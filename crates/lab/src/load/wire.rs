//! The generator's own small codec: it must not share a codec with the measured program.
//!
//! SOCKS5: RFC 1928. SOCKS6: draft-olteanu-intarea-socks-6-11, and the layout of the socksx crate.

use std::net::{IpAddr, SocketAddr};

/// An answer the generator waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// SOCKS5 method selection: 2 bytes, method 0.
    Socks5Method,
    /// SOCKS5 reply with code 0.
    Socks5Reply,
    /// SOCKS6 Authentication Reply, type success.
    Socks6Auth,
    /// SOCKS6 Operation Reply in the draft's layout, code success.
    Socks6Operation,
    /// SOCKS6 Operation Reply in the layout of socksx (0.1.0 or later), for an IPv4 bound address: 12 bytes.
    Socks6SocksxOperation,
    /// The head of an HTTP answer with status 200; its body follows.
    HttpHead,
    /// The head of an HTTP answer with status 200 to CONNECT: the tunnel begins behind it.
    HttpTunnel,
}

/// A parsed reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reply {
    /// Length of the message in bytes.
    pub length: usize,
    /// Length of the body that follows, in bytes; 0 except for HTTP.
    pub body: u64,
}

/// An unexpected reply; the text is the kind of error in the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Reads one reply from the front of `bytes`; `None`: not complete yet.
pub(super) fn parse(expect: Expect, bytes: &[u8]) -> Result<Option<Reply>, Malformed> {
    match expect {
        Expect::Socks5Method => fixed(bytes, &[5, 0], 2, "SOCKS5 method refused"),
        Expect::Socks5Reply => {
            let Some(length) = address_end(bytes, 3, 4).map(|end| end + 2) else {
                return wrong_start(bytes, 5);
            };
            fixed(bytes, &[5, 0, 0], length, "SOCKS5 request refused")
        }
        Expect::Socks6Auth => {
            let length = 4 + usize::from(big_endian(bytes, 2).unwrap_or(0));
            fixed(bytes, &[6, 0], length.max(4), "SOCKS6 authentication refused")
        }
        Expect::Socks6Operation => {
            let Some(end) = address_end(bytes, 7, 8) else { return wrong_start(bytes, 6) };
            let length = end + usize::from(big_endian(bytes, 2).unwrap_or(0));
            fixed(bytes, &[6, 0], length, "SOCKS6 operation refused")
        }
        Expect::Socks6SocksxOperation => fixed(bytes, &[6, 0], 12, "SOCKS6 operation refused"),
        Expect::HttpHead => http_head(bytes, body_length),
        // Lengths in this head have no meaning (RFC 9110 Sec. 9.3.6).
        Expect::HttpTunnel => http_head(bytes, |_| Some(0)),
    }
}

fn fixed(bytes: &[u8], start: &[u8], length: usize, error: &'static str) -> Result<Option<Reply>, Malformed> {
    let seen = start.len().min(bytes.len());
    if bytes[..seen] != start[..seen] {
        return Err(Malformed(error));
    }
    Ok((bytes.len() >= length).then_some(Reply { length, body: 0 }))
}

/// The address type is missing or unknown: wait for more bytes, unless the version is wrong.
fn wrong_start(bytes: &[u8], version: u8) -> Result<Option<Reply>, Malformed> {
    match bytes.first() {
        Some(first) if *first != version => Err(Malformed("not a SOCKS reply")),
        _ if bytes.len() >= 8 => Err(Malformed("unknown address type in a SOCKS reply")),
        _ => Ok(None),
    }
}

/// Returns the end of the address that begins at `at` and has the type at `type_at`.
fn address_end(bytes: &[u8], type_at: usize, at: usize) -> Option<usize> {
    match bytes.get(type_at)? {
        1 => Some(at + 4),
        4 => Some(at + 16),
        3 => Some(at + 1 + usize::from(*bytes.get(at)?)),
        _ => None,
    }
}

fn big_endian(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

fn http_head(bytes: &[u8], body: impl Fn(&str) -> Option<u64>) -> Result<Option<Reply>, Malformed> {
    const OK: &[u8] = b"HTTP/1.? 200";
    const VERSION_AT: usize = 7;
    let differs = |(at, (seen, wanted)): (usize, (&u8, &u8))| at != VERSION_AT && seen != wanted;
    if bytes.iter().zip(OK).enumerate().any(differs) {
        return Err(Malformed("HTTP status is not 200"));
    }
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| Malformed("HTTP head is not ASCII"))?;
    body(head).map_or(Err(Malformed("HTTP answer without a length")), |body| {
        Ok(Some(Reply { length: end + 4, body }))
    })
}

fn body_length(head: &str) -> Option<u64> {
    const NAME: &str = "content-length:";
    let named = |line: &&str| line.get(..NAME.len()).is_some_and(|name| name.eq_ignore_ascii_case(NAME));
    head.lines().find(named)?.get(NAME.len()..)?.trim().parse().ok()
}

/// SOCKS5 greeting that offers "no authentication" only.
pub(super) const SOCKS5_GREETING: [u8; 3] = [5, 1, 0];

/// SOCKS5 CONNECT.
pub(super) fn socks5_connect(destination: SocketAddr) -> Vec<u8> {
    let mut bytes = vec![5, 1, 0];
    push_address(&mut bytes, destination.ip());
    bytes.extend(destination.port().to_be_bytes());
    bytes
}

/// SOCKS6 CONNECT in the draft's layout; option kind 2 announces `initial` bytes if there are any.
pub(super) fn socks6_connect(destination: SocketAddr, initial: usize) -> Vec<u8> {
    let announced = announcement(initial);
    let options = if initial == 0 { &[][..] } else { &announced[..] };
    let mut bytes = vec![6, 1, 0, options.len() as u8];
    bytes.extend(destination.port().to_be_bytes());
    bytes.push(0);
    push_address(&mut bytes, destination.ip());
    bytes.extend(options);
    bytes
}

/// SOCKS6 CONNECT as socksx writes it: the announcement is always present, even for 0 bytes.
pub(super) fn socksx_connect(destination: SocketAddr, initial: usize) -> Vec<u8> {
    let mut bytes = vec![6, 1];
    push_address(&mut bytes, destination.ip());
    bytes.extend(destination.port().to_be_bytes());
    let options = announcement(initial);
    bytes.extend([0, 0, options.len() as u8]);
    bytes.extend(options);
    bytes
}

/// Option kind 2: authentication methods (none beside the default) and length of the initial data.
fn announcement(initial: usize) -> [u8; 8] {
    let [high, low] = (initial as u16).to_be_bytes();
    [0, 2, 0, 8, high, low, 0, 0]
}

/// Address type and address.
fn push_address(bytes: &mut Vec<u8>, address: IpAddr) {
    match address {
        IpAddr::V4(v4) => {
            bytes.push(1);
            bytes.extend(v4.octets());
        }
        IpAddr::V6(v6) => {
            bytes.push(4);
            bytes.extend(v6.octets());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destination() -> SocketAddr {
        "192.0.2.1:443".parse().expect("a literal")
    }

    #[test]
    fn requests_have_the_published_bytes() {
        let v1 = [6, 1, 0, 8, 1, 0xbb, 0, 1, 0xc0, 0, 2, 1, 0, 2, 0, 8, 0, 5, 0, 0];
        assert_eq!(socks6_connect(destination(), 5), v1);
        assert_eq!(socks6_connect(destination(), 0), [6, 1, 0, 0, 1, 0xbb, 0, 1, 0xc0, 0, 2, 1]);
        let x1 = [6, 1, 1, 0xc0, 0, 2, 1, 1, 0xbb, 0, 0, 8, 0, 2, 0, 8, 0, 5, 0, 0];
        assert_eq!(socksx_connect(destination(), 5), x1);
        assert_eq!(socks5_connect(destination()), [5, 1, 0, 1, 0xc0, 0, 2, 1, 1, 0xbb]);
    }

    #[test]
    fn no_prefix_of_a_reply_is_a_reply() {
        let replies: [(Expect, &[u8], u64); 8] = [
            (Expect::Socks5Method, &[5, 0], 0),
            (Expect::Socks5Reply, &[5, 0, 0, 3, 2, b'a', b'b', 0, 80], 0),
            (Expect::Socks6Auth, &[6, 0, 0, 4, 0, 8, 0, 4], 0),
            (Expect::Socks6Operation, &[6, 0, 0, 4, 1, 1, 0, 1, 9, 9, 9, 9, 0, 8, 0, 4], 0),
            (Expect::Socks6SocksxOperation, &[6, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], 0),
            (Expect::HttpHead, b"HTTP/1.1 200 OK\r\nContent-Length: 130\r\n\r\n", 130),
            (Expect::HttpHead, b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n", 7),
            (Expect::HttpTunnel, b"HTTP/1.0 200 Connection established\r\n\r\n", 0),
        ];
        for (expect, bytes, body) in replies {
            for end in 0..bytes.len() {
                assert_eq!(parse(expect, &bytes[..end]), Ok(None), "{expect:?} cut at {end}");
            }
            let trailing = [bytes, b"more"].concat();
            assert_eq!(parse(expect, &trailing), Ok(Some(Reply { length: bytes.len(), body })), "{expect:?}");
        }
    }

    #[test]
    fn refusals_are_errors() {
        assert!(parse(Expect::Socks5Method, &[5, 0xff]).is_err());
        assert!(parse(Expect::Socks5Reply, &[5, 5, 0, 1, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(parse(Expect::Socks6Operation, &[6, 5, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]).is_err());
        assert!(parse(Expect::HttpHead, b"HTTP/1.1 502 Bad Gateway\r\n").is_err());
        assert!(parse(Expect::HttpHead, b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n").is_err());
    }
}
