//! The match of an entry.

use super::Version;
use super::wire::{Malformed, Reader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of a match in 1.0.
const MATCH_1_0: usize = 40;

/// Wildcards of 1.0 (`ofp_flow_wildcards`).
mod wild {
    pub(super) const IN_PORT: u32 = 1;
    pub(super) const VLAN: u32 = 1 << 1;
    pub(super) const SOURCE_MAC: u32 = 1 << 2;
    pub(super) const DESTINATION_MAC: u32 = 1 << 3;
    pub(super) const ETHER_TYPE: u32 = 1 << 4;
    pub(super) const PROTOCOL: u32 = 1 << 5;
    pub(super) const SOURCE_PORT: u32 = 1 << 6;
    pub(super) const DESTINATION_PORT: u32 = 1 << 7;
    /// The number of low bits of the source address that are ignored. 32 or more: the whole address.
    pub(super) const SOURCE_SHIFT: u32 = 8;
    pub(super) const DESTINATION_SHIFT: u32 = 14;
    pub(super) const ALL_BITS: u32 = 32;
    pub(super) const PRIORITY: u32 = 1 << 20;
    pub(super) const TOS: u32 = 1 << 21;
}

/// OXM and NXM: classes and fields.
mod oxm {
    pub(super) const BASIC: u16 = 0x8000;
    /// Nicira's class, as in Open vSwitch.
    pub(super) const NXM_1: u16 = 0x0001;
    pub(super) const IN_PORT: u8 = 0;
    pub(super) const ETHER_TYPE: u8 = 5;
    pub(super) const VLAN: u8 = 6;
    pub(super) const PROTOCOL: u8 = 10;
    pub(super) const IPV4: [u8; 2] = [11, 12];
    pub(super) const TCP: [u8; 2] = [13, 14];
    pub(super) const UDP: [u8; 2] = [15, 16];
    pub(super) const IPV6: [u8; 2] = [26, 27];
    pub(super) const NXM_TCP_FLAGS: u8 = 34;
    pub(super) const NXM_FRAGMENT: u8 = 26;
}

const ETHER_IPV4: u16 = 0x0800;
const ETHER_IPV6: u16 = 0x86dd;

/// Transport protocols with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    const fn of_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            _ => None,
        }
    }
}

/// What an entry matches: all packets that arrive on a port, or one direction of one flow. Other fields are skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pattern {
    /// The switch port that packets arrive on.
    pub in_port: Option<u32>,
    /// Source and destination, of the same IP version. 1.0 does not support IPv6.
    pub addresses: Option<(IpAddr, IpAddr)>,
    /// The protocol. Only with addresses.
    pub protocol: Option<Protocol>,
    /// Source and destination port. Only with a protocol.
    pub ports: Option<(u16, u16)>,
    /// Only packets without a VLAN tag.
    pub untagged: bool,
    /// No fragments, and no TCP packets with FIN, SYN or RST. Only in 1.3, with Nicira's extension.
    pub established: bool,
}

/// Why a version cannot express a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this version of OpenFlow cannot say: {0}")]
pub struct Unsayable(&'static str);

impl Unsayable {
    pub(super) const fn port() -> Self {
        Self("port numbers above 65535")
    }

    pub(super) const fn role() -> Self {
        Self("roles of controllers")
    }
}

impl Pattern {
    /// Encodes the match for 1.0: always 40 bytes.
    ///
    /// # Errors
    /// Fails for IPv6, TCP flags, and port numbers above 16 bits, which 1.0 does not support.
    pub fn to_1_0(&self) -> Result<Vec<u8>, Unsayable> {
        if self.established {
            return Err(Unsayable("TCP flags"));
        }
        let mut wildcards = wild::SOURCE_MAC | wild::DESTINATION_MAC | wild::PRIORITY | wild::TOS;
        let mut given = |there: bool, bits: u32| wildcards |= if there { 0 } else { bits };
        given(self.in_port.is_some(), wild::IN_PORT);
        given(self.untagged, wild::VLAN);
        let all = wild::ALL_BITS << wild::SOURCE_SHIFT | wild::ALL_BITS << wild::DESTINATION_SHIFT;
        given(self.addresses.is_some(), wild::ETHER_TYPE | all);
        given(self.protocol.is_some(), wild::PROTOCOL);
        given(self.ports.is_some(), wild::SOURCE_PORT | wild::DESTINATION_PORT);
        let in_port = u16::try_from(self.in_port.unwrap_or(0)).map_err(|_| Unsayable::port())?;
        let (source, destination) = match self.addresses {
            Some((IpAddr::V4(source), IpAddr::V4(destination))) => (source, destination),
            None => (Ipv4Addr::UNSPECIFIED, Ipv4Addr::UNSPECIFIED),
            _ => return Err(Unsayable("IPv6 addresses")),
        };
        let (source_port, destination_port) = self.ports.unwrap_or_default();
        let mut bytes = wildcards.to_be_bytes().to_vec();
        bytes.extend(in_port.to_be_bytes());
        bytes.extend([0; 12]);
        // 0xffff means no tag.
        bytes.extend(if self.untagged { [0xff, 0xff] } else { [0, 0] });
        bytes.extend([0, 0]);
        bytes.extend(if self.addresses.is_some() { ETHER_IPV4 } else { 0 }.to_be_bytes());
        bytes.extend([0, self.protocol.map_or(0, Protocol::number), 0, 0]);
        bytes.extend(source.octets());
        bytes.extend(destination.octets());
        bytes.extend(source_port.to_be_bytes());
        bytes.extend(destination_port.to_be_bytes());
        debug_assert_eq!(bytes.len(), MATCH_1_0);
        Ok(bytes)
    }

    /// Decodes a match of 1.0.
    pub(super) fn read_1_0(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let wildcards = reader.u32()?;
        let is = |bit: u32| wildcards & bit == 0;
        let in_port = reader.u16()?;
        reader.skip(12)?;
        let vlan = reader.u16()?;
        reader.skip(2)?;
        let ether_type = reader.u16()?;
        reader.skip(1)?;
        let protocol = reader.u8()?;
        reader.skip(2)?;
        let (source, destination) = (Ipv4Addr::from(reader.u32()?), Ipv4Addr::from(reader.u32()?));
        let ports = (reader.u16()?, reader.u16()?);
        let exact = wildcards >> wild::SOURCE_SHIFT & 0xfff == 0;
        let ip = is(wild::ETHER_TYPE) && ether_type == ETHER_IPV4;
        Ok(Self {
            in_port: is(wild::IN_PORT).then_some(in_port.into()),
            addresses: (ip && exact).then_some((source.into(), destination.into())),
            protocol: Protocol::of_number(protocol).filter(|_| ip && is(wild::PROTOCOL)),
            ports: (is(wild::SOURCE_PORT) && is(wild::DESTINATION_PORT)).then_some(ports),
            untagged: is(wild::VLAN) && vlan == 0xffff,
            established: false,
        })
    }

    /// Encodes the match for 1.3: type, length, and fields, padded to a multiple of 8. Prerequisite fields come
    /// first.
    pub fn to_1_3(&self) -> Vec<u8> {
        let mut fields = Vec::new();
        let mut field = |class: u16, number: u8, value: &[u8], mask: &[u8]| {
            let length = u8::try_from(value.len() + mask.len()).unwrap_or(u8::MAX);
            fields.extend(class.to_be_bytes());
            fields.extend([number << 1 | u8::from(!mask.is_empty()), length]);
            fields.extend_from_slice(value);
            fields.extend_from_slice(mask);
        };
        if let Some(port) = self.in_port {
            field(oxm::BASIC, oxm::IN_PORT, &port.to_be_bytes(), &[]);
        }
        if self.untagged {
            field(oxm::BASIC, oxm::VLAN, &[0, 0], &[]);
        }
        if let Some((source, destination)) = self.addresses {
            let v4 = source.is_ipv4();
            let ether_type = if v4 { ETHER_IPV4 } else { ETHER_IPV6 };
            field(oxm::BASIC, oxm::ETHER_TYPE, &ether_type.to_be_bytes(), &[]);
            if let Some(protocol) = self.protocol {
                field(oxm::BASIC, oxm::PROTOCOL, &[protocol.number()], &[]);
            }
            let numbers = if v4 { oxm::IPV4 } else { oxm::IPV6 };
            for (number, address) in numbers.into_iter().zip([source, destination]) {
                match address {
                    IpAddr::V4(address) => field(oxm::BASIC, number, &address.octets(), &[]),
                    IpAddr::V6(address) => field(oxm::BASIC, number, &address.octets(), &[]),
                }
            }
        }
        if let (Some(protocol), Some((source, destination))) = (self.protocol, self.ports) {
            let numbers = if protocol == Protocol::Tcp { oxm::TCP } else { oxm::UDP };
            for (number, port) in numbers.into_iter().zip([source, destination]) {
                field(oxm::BASIC, number, &port.to_be_bytes(), &[]);
            }
        }
        if self.established {
            // FIN, SYN and RST must be 0, and all bits of the fragment field, too.
            if self.protocol == Some(Protocol::Tcp) {
                field(oxm::NXM_1, oxm::NXM_TCP_FLAGS, &[0, 0], &[0, 7]);
            }
            field(oxm::NXM_1, oxm::NXM_FRAGMENT, &[0], &[3]);
        }
        let length = u16::try_from(4 + fields.len()).unwrap_or(u16::MAX);
        let mut bytes = vec![0, 1];
        bytes.extend(length.to_be_bytes());
        bytes.extend(fields);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    /// Decodes a match of 1.3, with its padding.
    pub(super) fn read_1_3(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        reader.skip(2)?;
        let length = usize::from(reader.u16()?);
        let fields = length.checked_sub(4).ok_or(reader.inside())?;
        let mut fields = reader.part(fields)?;
        // The last match in a message may lack its padding.
        let padding = (length.next_multiple_of(8) - length).min(reader.rest().len());
        reader.skip(padding)?;
        let mut pattern = Self::default();
        let mut ends = Ends::default();
        while !fields.is_empty() {
            let (class, head, length) = (fields.u16()?, fields.u8()?, fields.u8()?);
            let mut value = fields.part(length.into())?;
            pattern.field(class, head >> 1, &mut value, &mut ends)?;
        }
        pattern.addresses = ends.addresses[0].zip(ends.addresses[1]);
        pattern.ports = ends.ports[0].zip(ends.ports[1]);
        Ok(pattern)
    }

    fn field(
        &mut self,
        class: u16,
        number: u8,
        value: &mut Reader<'_>,
        ends: &mut Ends,
    ) -> Result<(), Malformed> {
        if class == oxm::NXM_1 {
            self.established |= number == oxm::NXM_FRAGMENT;
            return Ok(());
        }
        if class != oxm::BASIC {
            return Ok(());
        }
        let side = |numbers: [u8; 2]| numbers.iter().position(|one| *one == number);
        match number {
            oxm::IN_PORT => self.in_port = Some(value.u32()?),
            oxm::VLAN => self.untagged = value.u16()? == 0,
            oxm::PROTOCOL => self.protocol = Protocol::of_number(value.u8()?),
            _ => {
                if let Some(side) = side(oxm::IPV4) {
                    ends.addresses[side] = Some(Ipv4Addr::from(value.u32()?).into());
                } else if let Some(side) = side(oxm::IPV6) {
                    let high = u128::from(value.u64()?);
                    ends.addresses[side] = Some(Ipv6Addr::from(high << 64 | u128::from(value.u64()?)).into());
                } else if let Some(side) = side(oxm::TCP).or(side(oxm::UDP)) {
                    ends.ports[side] = Some(value.u16()?);
                }
            }
        }
        Ok(())
    }

    /// Encodes the match for a version.
    pub(super) fn to_bytes(self, version: Version) -> Result<Vec<u8>, Unsayable> {
        match version {
            Version::V1_0 => self.to_1_0(),
            Version::V1_3 => Ok(self.to_1_3()),
        }
    }

    pub(super) fn read(version: Version, reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        match version {
            Version::V1_0 => Self::read_1_0(reader),
            Version::V1_3 => Self::read_1_3(reader),
        }
    }
}

/// Fields that arrive one by one, but are used in pairs.
#[derive(Default)]
struct Ends {
    addresses: [Option<IpAddr>; 2],
    ports: [Option<u16>; 2],
}
