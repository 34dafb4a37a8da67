//! Reads and writes the values that frames consist of.

use super::{FrameError, Path};
use crate::flow::{Destination, Host, HostName};
use crate::overlay::{NodeId, PATH_MAX, SIGNATURE_BYTES, Signature};
use std::net::{IpAddr, SocketAddr};

/// Reads values from the front of a body.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, n: usize) -> Result<&'a [u8], FrameError> {
        let (taken, rest) = self.0.split_at_checked(n).ok_or(FrameError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Truncated)?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self) -> Result<u8, FrameError> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_be_bytes)
    }

    pub(super) fn node(&mut self) -> Result<NodeId, FrameError> {
        self.u64().map(NodeId)
    }

    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    pub(super) fn signature(&mut self) -> Result<Signature, FrameError> {
        self.array::<SIGNATURE_BYTES>().map(Signature)
    }

    pub(super) fn path(&mut self) -> Result<Path, FrameError> {
        let count = usize::from(self.u8()?);
        if count > PATH_MAX {
            return Err(FrameError::BadValue("path"));
        }
        let nodes = (0..count).map(|_| self.node()).collect::<Result<_, _>>()?;
        Path::new(nodes).ok_or(FrameError::BadValue("path"))
    }

    fn ip(&mut self, length: u8) -> Result<IpAddr, FrameError> {
        match length {
            4 => self.array::<4>().map(IpAddr::from),
            16 => self.array::<16>().map(IpAddr::from),
            _ => Err(FrameError::BadValue("address")),
        }
    }

    pub(super) fn socket_addr(&mut self) -> Result<SocketAddr, FrameError> {
        let length = self.u8()?;
        let ip = self.ip(length)?;
        Ok(SocketAddr::new(ip, self.u16()?))
    }

    /// Reads a length byte and a name of that length. Length 0 means that there is no name.
    pub(super) fn host_name(&mut self) -> Result<Option<HostName>, FrameError> {
        let length = usize::from(self.u8()?);
        if length == 0 {
            return Ok(None);
        }
        let name = HostName::from_bytes(self.take(length)?).map_err(|_| FrameError::BadValue("host name"))?;
        // Accept only the shortest form, so that each frame has exactly one encoding (the signatures depend on it).
        if name.as_str().len() == length { Ok(Some(name)) } else { Err(FrameError::BadValue("host name")) }
    }

    pub(super) fn destination(&mut self) -> Result<Destination, FrameError> {
        let kind = self.u8()?;
        let host = match kind {
            0 => Host::Name(self.host_name()?.ok_or(FrameError::BadValue("destination"))?),
            length => {
                let ip = self.ip(length)?;
                // An IPv4 address must not be written as an IPv6 address: each destination has one encoding.
                let host = Host::from(ip);
                if host != Host::Ip(ip) {
                    return Err(FrameError::BadValue("destination"));
                }
                host
            }
        };
        match self.u16()? {
            0 => Err(FrameError::BadValue("port")),
            port => Ok(Destination { host, port, zone: 0 }),
        }
    }
}

/// Appends values to a body.
pub(super) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_be_bytes());
    }

    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }

    fn put_path(&mut self, path: &Path) {
        self.put_u8(u8::try_from(path.nodes().len()).unwrap_or(u8::MAX));
        for node in path.nodes() {
            self.put_u64(node.0);
        }
    }

    fn put_ip(&mut self, ip: IpAddr) {
        match ip {
            IpAddr::V4(ip) => {
                self.put_u8(4);
                self.put(&ip.octets());
            }
            IpAddr::V6(ip) => {
                self.put_u8(16);
                self.put(&ip.octets());
            }
        }
    }

    fn put_socket_addr(&mut self, address: SocketAddr) {
        self.put_ip(address.ip());
        self.put_u16(address.port());
    }

    fn put_host_name(&mut self, name: Option<&HostName>) {
        let bytes = name.map_or(&[][..], |name| name.as_str().as_bytes());
        self.put_u8(u8::try_from(bytes.len()).unwrap_or(0));
        self.put(bytes);
    }

    fn put_destination(&mut self, destination: &Destination) {
        match &destination.host {
            Host::Ip(ip) => self.put_ip(*ip),
            Host::Name(name) => {
                self.put_u8(0);
                self.put_host_name(Some(name));
            }
        }
        self.put_u16(destination.port);
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
