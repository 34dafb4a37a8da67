//! The request at the beginning of a flow's stream.

use super::field::{self, Fields, Writer, once, unknown};
use super::{MessageError, Parsed};
use crate::flow::{Destination, HostName};
use crate::http::capsule::VARINT_MAX;
use std::net::SocketAddr;

const KIND: u8 = 1;

const DESTINATION: u8 = 128;
/// An end that does not know it refuses the request, instead of passing datagrams on as bytes.
pub(super) const DATAGRAMS: u8 = 129;
const HOST: u8 = 2;
const CLIENT: u8 = 3;
const METADATA: u8 = 4;

/// What the far side should connect to, and what it may need for its rules and records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The destination of the flow. The port is never 0.
    pub destination: Destination,
    /// The host name that the client requested, if the destination is an address.
    pub host: Option<HostName>,
    /// The client's own address.
    pub client: Option<SocketAddr>,
    /// Metadata of the chain, keys and values in order (as in the SOCKS6 option of kind 65000).
    pub metadata: Vec<(u16, String)>,
    /// A flow of UDP. Capsules follow instead of bytes, and QUIC datagrams of this context, at most [`VARINT_MAX`].
    pub datagrams: Option<u64>,
}

impl Request {
    /// Makes a request with only a destination.
    pub const fn to(destination: Destination) -> Self {
        Self { destination, host: None, client: None, metadata: Vec::new(), datagrams: None }
    }

    /// Encodes the request.
    ///
    /// # Errors
    /// `TooLong` if there is no room for the metadata.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        let mut writer = Writer::new(KIND);
        writer.put_destination(DESTINATION, &self.destination);
        if let Some(host) = &self.host {
            writer.put(HOST, &[host.as_str().as_bytes()]);
        }
        if let Some(client) = self.client {
            writer.put_destination(CLIENT, &client.into());
        }
        for (key, value) in &self.metadata {
            writer.put(METADATA, &[&key.to_be_bytes(), value.as_bytes()]);
        }
        if let Some(context) = self.datagrams {
            writer.put(DATAGRAMS, &[&context.to_be_bytes()]);
        }
        writer.finish()
    }

    /// Parses the request at the beginning of `bytes`.
    pub fn parse(bytes: &[u8]) -> Parsed<Self> {
        field::parse(bytes, &[KIND], |_, fields| Self::of(fields))
    }

    fn of(fields: Fields<'_>) -> Result<Self, MessageError> {
        let (mut destination, mut host, mut client, mut metadata) = (None, None, None, Vec::new());
        let mut datagrams = None;
        for item in fields {
            let (field, value) = item?;
            let bad = MessageError::BadField(field);
            match field {
                DESTINATION => {
                    let to = field::destination(field, value)?;
                    once(&mut destination, field, Some(to).filter(|to| to.port != 0).ok_or(bad)?)?;
                }
                HOST => once(&mut host, field, HostName::from_bytes(value).map_err(|_| bad)?)?,
                CLIENT => {
                    let from = field::destination(field, value)?;
                    once(&mut client, field, from.socket_addr().ok_or(bad)?)?;
                }
                METADATA => {
                    let (key, text) = value.split_first_chunk::<2>().ok_or(bad)?;
                    metadata.push((u16::from_be_bytes(*key), field::text(field, text)?.to_owned()));
                }
                DATAGRAMS => {
                    let context = u64::from_be_bytes(value.try_into().map_err(|_| bad)?);
                    once(&mut datagrams, field, Some(context).filter(|id| *id <= VARINT_MAX).ok_or(bad)?)?;
                }
                other => unknown(other)?,
            }
        }
        let destination = destination.ok_or(MessageError::Missing(DESTINATION))?;
        Ok(Self { destination, host, client, metadata, datagrams })
    }
}
