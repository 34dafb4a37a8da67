//! Encodes and decodes all messages.

use super::flow::{FlowCounts, FlowMod, FlowRemoved};
use super::pattern::{Pattern, Unsayable};
use super::wire::{Frame, Malformed, Reader, Version};

/// Message types. The single numbers are the same in both versions.
mod kind {
    pub(super) const HELLO: u8 = 0;
    pub(super) const ERROR: u8 = 1;
    pub(super) const ECHO_REQUEST: u8 = 2;
    pub(super) const ECHO_REPLY: u8 = 3;
    pub(super) const FEATURES_REQUEST: u8 = 5;
    pub(super) const FEATURES_REPLY: u8 = 6;
    pub(super) const SET_CONFIG: u8 = 9;
    pub(super) const FLOW_REMOVED: u8 = 11;
    pub(super) const FLOW_MOD: u8 = 14;
    pub(super) const STATS_1_0: [u8; 2] = [16, 17];
    pub(super) const BARRIER_1_0: [u8; 2] = [18, 19];
    pub(super) const MULTIPART_1_3: [u8; 2] = [18, 19];
    pub(super) const BARRIER_1_3: [u8; 2] = [20, 21];
    pub(super) const ROLE_REQUEST: u8 = 24;
}

/// The kind of statistics that lists entries.
const STATS_FLOW: u16 = 1;
/// Flag of an answer: more parts follow.
const MORE: u16 = 1;
/// `OFPCR_ROLE_MASTER`.
const MASTER: u32 = 2;
/// `OFPHET_VERSIONBITMAP`.
const VERSION_BITMAP: u16 = 1;

/// The properties of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Its datapath id.
    pub datapath: u64,
    /// Its number of tables.
    pub tables: u8,
}

/// A message of a switch, as far as the controller needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The versions that the switch supports: the number in the header, and a bitmap if it sent one.
    Hello {
        /// The number in its header.
        version: u8,
        /// Bit n stands for version n.
        bitmap: Option<u32>,
    },
    /// An error. Its transaction id is that of the message with the error.
    Error {
        /// The kind of error.
        kind: u16,
        /// The exact error.
        code: u16,
    },
    /// The switch asks whether the controller is alive.
    EchoRequest(Vec<u8>),
    /// The switch is alive.
    EchoReply,
    /// The properties of the switch.
    FeaturesReply(Features),
    /// An entry has ended.
    FlowRemoved(FlowRemoved),
    /// All earlier requests are done.
    BarrierReply,
    /// Entries of the switch.
    FlowStatsReply {
        /// More entries follow in another message.
        more: bool,
        /// The entries.
        entries: Vec<FlowCounts>,
    },
    /// A message that is not needed.
    Other {
        /// The type of the message.
        kind: u8,
    },
}

/// A message to a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The versions that the controller supports. Bit n stands for version n.
    Hello {
        /// The bits.
        bitmap: u32,
    },
    /// There is no common version (`OFPET_HELLO_FAILED`, `OFPHFC_INCOMPATIBLE`).
    Incompatible,
    /// Asks whether the switch is alive.
    EchoRequest,
    /// Answers an echo request, with the data of the request.
    EchoReply(Vec<u8>),
    /// Asks for the properties of the switch.
    FeaturesRequest,
    /// Sets how fragments are treated (0: like any packet), and how much of a packet without an entry is sent to the
    /// controller.
    SetConfig {
        /// `OFPC_FRAG_*`.
        flags: u16,
        /// Bytes.
        miss_send_len: u16,
    },
    /// Changes the flow table.
    FlowMod(FlowMod),
    /// Requests an answer when all earlier requests are done.
    Barrier,
    /// Makes this controller the switch's only one that changes entries (1.3). Others become slaves. A request with an older
    /// generation than that of the present master is refused.
    BecomeMaster {
        /// `generation_id`.
        generation: u64,
    },
    /// Requests the entries whose cookie has these bits (1.0: all entries).
    FlowStats {
        /// The bits.
        cookie: u64,
        /// The bits that are compared; 0: all entries.
        mask: u64,
    },
}

/// Decodes a message according to the version in its header. If that version is not supported, only the types common
/// to all versions are decoded.
///
/// # Errors
/// Fails if the body does not match its type.
pub fn read(frame: &Frame) -> Result<Message, Malformed> {
    let mut reader = Reader::new(frame.kind, &frame.body);
    match frame.kind {
        kind::HELLO => return hello(frame.version, &mut reader),
        kind::ERROR => {
            return Ok(Message::Error { kind: reader.u16()?, code: reader.u16()? });
        }
        kind::ECHO_REQUEST => return Ok(Message::EchoRequest(frame.body.clone())),
        kind::ECHO_REPLY => return Ok(Message::EchoReply),
        _ => {}
    }
    let Some(version) = Version::of_number(frame.version) else {
        return Ok(Message::Other { kind: frame.kind });
    };
    let [_, barrier_reply] = barrier(version);
    let [_, stats_reply] = stats(version);
    match frame.kind {
        kind::FEATURES_REPLY => {
            let datapath = reader.u64()?;
            reader.skip(4)?; // buffers
            Ok(Message::FeaturesReply(Features { datapath, tables: reader.u8()? }))
        }
        kind::FLOW_REMOVED => FlowRemoved::read(version, &mut reader).map(Message::FlowRemoved),
        kind if kind == barrier_reply => Ok(Message::BarrierReply),
        kind if kind == stats_reply => flow_stats(version, kind, &mut reader),
        kind => Ok(Message::Other { kind }),
    }
}

/// Returns the types of request and reply.
const fn barrier(version: Version) -> [u8; 2] {
    match version {
        Version::V1_0 => kind::BARRIER_1_0,
        Version::V1_3 => kind::BARRIER_1_3,
    }
}

/// Returns the types of request and reply.
const fn stats(version: Version) -> [u8; 2] {
    match version {
        Version::V1_0 => kind::STATS_1_0,
        Version::V1_3 => kind::MULTIPART_1_3,
    }
}

/// Decodes the elements of a HELLO. Unknown elements are skipped. Fewer than four bytes at the end are ignored.
fn hello(version: u8, reader: &mut Reader<'_>) -> Result<Message, Malformed> {
    let mut bitmap = None;
    while reader.rest().len() >= 4 {
        let (kind, length) = (reader.u16()?, usize::from(reader.u16()?));
        let value = length.checked_sub(4).ok_or(reader.inside())?;
        let mut element = reader.part(value)?;
        if kind == VERSION_BITMAP && bitmap.is_none() {
            bitmap = Some(element.u32()?);
        }
        let padding = (length.next_multiple_of(8) - length).min(reader.rest().len());
        reader.skip(padding)?;
    }
    Ok(Message::Hello { version, bitmap })
}

fn flow_stats(version: Version, kind: u8, reader: &mut Reader<'_>) -> Result<Message, Malformed> {
    let (what, flags) = (reader.u16()?, reader.u16()?);
    if version == Version::V1_3 {
        reader.skip(4)?;
    }
    if what != STATS_FLOW {
        return Ok(Message::Other { kind });
    }
    let entries = FlowCounts::read_all(version, reader)?;
    Ok(Message::FlowStatsReply { more: flags & MORE != 0, entries })
}

/// Encodes a request with this transaction id.
///
/// # Errors
/// Fails if the version cannot express the request: IPv6, TCP flags and roles in 1.0.
pub fn write(version: Version, xid: u32, request: &Request) -> Result<Vec<u8>, Unsayable> {
    let [barrier_request, _] = barrier(version);
    let [stats_request, _] = stats(version);
    let (kind, body) = match request {
        Request::Hello { bitmap } => {
            let [element, length] = [VERSION_BITMAP.to_be_bytes(), 8u16.to_be_bytes()];
            (kind::HELLO, [&element[..], &length, &bitmap.to_be_bytes()].concat())
        }
        Request::Incompatible => (kind::ERROR, vec![0; 4]),
        Request::EchoRequest => (kind::ECHO_REQUEST, Vec::new()),
        Request::EchoReply(data) => (kind::ECHO_REPLY, data.clone()),
        Request::FeaturesRequest => (kind::FEATURES_REQUEST, Vec::new()),
        Request::SetConfig { flags, miss_send_len } => {
            (kind::SET_CONFIG, [flags.to_be_bytes(), miss_send_len.to_be_bytes()].concat())
        }
        Request::FlowMod(change) => (kind::FLOW_MOD, change.write(version)?),
        Request::Barrier => (barrier_request, Vec::new()),
        Request::BecomeMaster { .. } if version == Version::V1_0 => return Err(Unsayable::role()),
        Request::BecomeMaster { generation } => {
            let body = [&MASTER.to_be_bytes()[..], &[0; 4], &generation.to_be_bytes()].concat();
            (kind::ROLE_REQUEST, body)
        }
        Request::FlowStats { cookie, mask } => {
            (stats_request, write_flow_stats_request(version, *cookie, *mask)?)
        }
    };
    Ok(Frame { version: version.number(), kind, xid, body }.to_bytes())
}

fn write_flow_stats_request(version: Version, cookie: u64, mask: u64) -> Result<Vec<u8>, Unsayable> {
    let mut body = STATS_FLOW.to_be_bytes().to_vec();
    body.extend([0, 0]);
    let everything = Pattern::default().to_bytes(version)?;
    match version {
        Version::V1_0 => {
            body.extend(everything);
            // All tables, padding, any port.
            body.extend([0xff, 0, 0xff, 0xff]);
        }
        Version::V1_3 => {
            body.extend([0; 4]);
            body.extend([0xff, 0, 0, 0]);
            body.extend(u32::MAX.to_be_bytes()); // any port
            body.extend(u32::MAX.to_be_bytes()); // any group
            body.extend([0; 4]);
            body.extend(cookie.to_be_bytes());
            body.extend(mask.to_be_bytes());
            body.extend(everything);
        }
    }
    Ok(body)
}
