//! Type-length-value fields behind the addresses of a version 2 header (Secs. 2.2.1 to 2.2.8 of the document).

use super::{EncodeError, HeaderError, MAX_UNIQUE_ID, MAX_V2, crc32c};
use crate::flow::{HostName, HostNameError};

const ALPN: u8 = 0x01;
const AUTHORITY: u8 = 0x02;
pub(super) const CRC32C: u8 = 0x03;
const NOOP: u8 = 0x04;
const UNIQUE_ID: u8 = 0x05;
const TLS: u8 = 0x20;
const NETNS: u8 = 0x30;

/// type(1) length(2)
const FIXED: usize = 3;

/// One further fact about the relayed connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tlv {
    /// 0x01: the application protocol that the client agreed on with an earlier hop, as an ALPN name.
    Alpn(Vec<u8>),
    /// 0x02: the host name that the client requested, as in SNI.
    Authority(HostName),
    /// 0x05: an opaque id of the connection, up to [`MAX_UNIQUE_ID`] bytes, the same at every hop.
    UniqueId(Vec<u8>),
    /// 0x20: the client used TLS to an earlier hop.
    Tls(Tls),
    /// 0x30: the name of the network namespace that the connection came from, US-ASCII.
    Netns(Vec<u8>),
    /// Any other type, with unchanged content: custom (0xe0 to 0xef), experimental (0xf0 to 0xf7), future, or of a
    /// vendor (AWS 0xea, Google 0xe0, Azure 0xee).
    Other {
        /// The type.
        kind: u8,
        /// The content.
        value: Vec<u8>,
    },
}

/// What an earlier hop reports about the client's TLS (TLV 0x20).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Bit 0: the client used TLS. Bit 1: it sent a certificate in this connection. Bit 2: it sent one in this
    /// session.
    pub client: u8,
    /// 0 if the client sent a certificate and it was verified.
    pub verify: u32,
    /// Types and contents, in order: the types named below, which are text, and any other.
    pub facts: Vec<(u8, Vec<u8>)>,
}

impl Tlv {
    fn parse(kind: u8, value: &[u8]) -> Result<Self, HeaderError> {
        let bad = HeaderError::BadTlv(kind);
        Ok(match kind {
            ALPN if value.is_empty() => return Err(bad),
            ALPN => Self::Alpn(value.to_vec()),
            AUTHORITY => match HostName::from_bytes(value) {
                Ok(name) => Self::Authority(name),
                // A client may send an address as its host name. Then the header does not contain a name.
                Err(HostNameError::Address | HostNameError::Number) => {
                    Self::Other { kind, value: value.to_vec() }
                }
                Err(_) => return Err(bad),
            },
            UNIQUE_ID if value.len() > MAX_UNIQUE_ID => return Err(bad),
            UNIQUE_ID => Self::UniqueId(value.to_vec()),
            TLS => Self::Tls(Tls::parse(value).ok_or(bad)?),
            NETNS => Self::Netns(value.to_vec()),
            _ => Self::Other { kind, value: value.to_vec() },
        })
    }

    /// Appends type, length and content.
    pub(super) fn put(&self, header: &mut Vec<u8>) -> Result<(), EncodeError> {
        match self {
            Self::Alpn(value) => put(header, ALPN, value),
            Self::Authority(name) => put(header, AUTHORITY, name.as_str().as_bytes()),
            Self::UniqueId(id) if id.len() > MAX_UNIQUE_ID => Err(EncodeError::TooLong),
            Self::UniqueId(id) => put(header, UNIQUE_ID, id),
            Self::Tls(tls) => put(header, TLS, &tls.encode()?),
            Self::Netns(name) => put(header, NETNS, name),
            Self::Other { kind, value } => put(header, *kind, value),
        }
    }
}

impl Tls {
    /// The type of the TLS version's text in [`Self::facts`], such as `TLSv1.3`.
    pub const VERSION: u8 = 0x21;
    /// The type of the common name of the client's certificate.
    pub const COMMON_NAME: u8 = 0x22;
    /// The type of the cipher's name.
    pub const CIPHER: u8 = 0x23;
    /// The type of the signature algorithm of the client's certificate.
    pub const SIGNATURE_ALGORITHM: u8 = 0x24;
    /// The type of the key algorithm.
    pub const KEY_ALGORITHM: u8 = 0x25;

    /// Returns the first fact of a type.
    pub fn fact(&self, kind: u8) -> Option<&[u8]> {
        self.facts.iter().find(|(found, _)| *found == kind).map(|(_, fact)| fact.as_slice())
    }

    fn parse(value: &[u8]) -> Option<Self> {
        let (&client, rest) = value.split_first()?;
        let (verify, mut rest) = rest.split_first_chunk::<4>()?;
        let mut facts = Vec::new();
        while !rest.is_empty() {
            let (kind, fact, after) = split(rest)?;
            facts.push((kind, fact.to_vec()));
            rest = after;
        }
        Some(Self { client, verify: u32::from_be_bytes(*verify), facts })
    }

    fn encode(&self) -> Result<Vec<u8>, EncodeError> {
        let mut value = vec![self.client];
        value.extend_from_slice(&self.verify.to_be_bytes());
        for (kind, fact) in &self.facts {
            put(&mut value, *kind, fact)?;
        }
        Ok(value)
    }
}

/// Splits off type and content, and returns the rest, too. `None` if bytes are missing.
fn split(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[kind, high, low], rest) = bytes.split_first_chunk::<FIXED>()?;
    let (value, after) = rest.split_at_checked(usize::from(u16::from_be_bytes([high, low])))?;
    Some((kind, value, after))
}

/// Appends type, length and content.
pub(super) fn put(header: &mut Vec<u8>, kind: u8, value: &[u8]) -> Result<(), EncodeError> {
    let length = u16::try_from(value.len()).map_err(|_| EncodeError::TooLong)?;
    if header.len() + FIXED + value.len() > MAX_V2 {
        return Err(EncodeError::TooLong);
    }
    header.push(kind);
    header.extend_from_slice(&length.to_be_bytes());
    header.extend_from_slice(value);
    Ok(())
}

/// Parses the TLVs in `block`, the end of the header `whole`, and verifies the checksum if there is one.
pub(super) fn parse(block: &[u8], whole: &[u8]) -> Result<Vec<Tlv>, HeaderError> {
    let mut tlvs = Vec::new();
    let mut checked = false;
    let mut rest = block;
    while let Some(&kind) = rest.first() {
        let (kind, value, after) = split(rest).ok_or(HeaderError::BadTlv(kind))?;
        match kind {
            CRC32C if checked => return Err(HeaderError::BadTlv(kind)),
            CRC32C => {
                let field = value.first_chunk::<4>().filter(|field| field.len() == value.len());
                let expected = u32::from_be_bytes(*field.ok_or(HeaderError::BadTlv(kind))?);
                let end = whole.len() - after.len();
                // The sender has computed the checksum with this field set to zero.
                if crc32c::checksum_without(whole, end - 4..end) != expected {
                    return Err(HeaderError::BadChecksum);
                }
                checked = true;
            }
            NOOP => {}
            _ => tlvs.push(Tlv::parse(kind, value)?),
        }
        rest = after;
    }
    Ok(tlvs)
}
