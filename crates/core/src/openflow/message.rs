//! All messages, read and written.

use super::flow::{FlowCounts, FlowMod, FlowRemoved};
use super::pattern::{Pattern, Unsayable};
use super::wire::{Frame, Malformed, Reader, Version};

/// Types; the first seven are those of both versions.
mod kind {
    pub const HELLO: u8 = 0;
    pub const ERROR: u8 = 1;
    pub const ECHO_REQUEST: u8 = 2;
    pub const ECHO_REPLY: u8 = 3;
    pub const FEATURES_REQUEST: u8 = 5;
    pub const FEATURES_REPLY: u8 = 6;
    pub const SET_CONFIG: u8 = 9;
    pub const FLOW_REMOVED: u8 = 11;
    pub const FLOW_MOD: u8 = 14;
    pub const STATS_1_0: [u8; 2] = [16, 17];
    pub const BARRIER_1_0: [u8; 2] = [18, 19];
    pub const MULTIPART_1_3: [u8; 2] = [18, 19];
    pub const BARRIER_1_3: [u8; 2] = [20, 21];
}

/// The kind of statistics that lists entries.
const STATS_FLOW: u16 = 1;
/// In an answer: more follows.
const MORE: u16 = 1;
/// `OFPHET_VERSIONBITMAP`.
const VERSION_BITMAP: u16 = 1;

/// What a switch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Its datapath id.
    pub datapath: u64,
    /// Its number of tables.
    pub tables: u8,
}

/// What a switch says, as far as we need to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The versions it speaks: the one of the header, and a bitmap if it sent one.
    Hello {
        /// The number in its header.
        version: u8,
        /// Bit n: version n.
        bitmap: Option<u32>,
    },
    /// Something was wrong; the transaction id is that of what it is about.
    Error {
        /// What kind.
        kind: u16,
        /// What exactly.
        code: u16,
    },
    /// Are you there?
    EchoRequest(Vec<u8>),
    /// It is there.
    EchoReply,
    /// What it is.
    FeaturesReply(Features),
    /// The end of an entry.
    FlowRemoved(FlowRemoved),
    /// Everything that was asked before is done.
    BarrierReply,
    /// Entries that are there.
    FlowStatsReply {
        /// More follow in another message.
        more: bool,
        /// The entries.
        entries: Vec<FlowCounts>,
    },
    /// One that we need not understand.
    Other {
        /// Its type.
        kind: u8,
    },
}

/// What we say to a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The versions we speak; bit n: version n.
    Hello {
        /// The bits.
        bitmap: u32,
    },
    /// No version in common (`OFPET_HELLO_FAILED`, `OFPHFC_INCOMPATIBLE`).
    Incompatible,
    /// Are you there?
    EchoRequest,
    /// Yes, with what was asked.
    EchoReply(Vec<u8>),
    /// What are you?
    FeaturesRequest,
    /// How fragments are treated (0: as any packet) and how much of a packet without entry is sent to us.
    SetConfig {
        /// `OFPC_FRAG_*`.
        flags: u16,
        /// Bytes.
        miss_send_len: u16,
    },
    /// A change of the table.
    FlowMod(FlowMod),
    /// Answer when everything before this is done.
    Barrier,
    /// Which entries are there whose cookie has these bits (1.0: all)?
    FlowStats {
        /// The bits.
        cookie: u64,
        /// Those that count; 0: all entries.
        mask: u64,
    },
}

/// Reads a message of the version in its header. A version that we do not speak is that of a HELLO or an error.
///
/// # Errors
/// If it is not what its type says.
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

/// The types of request and reply.
const fn barrier(version: Version) -> [u8; 2] {
    match version {
        Version::V1_0 => kind::BARRIER_1_0,
        Version::V1_3 => kind::BARRIER_1_3,
    }
}

/// The types of request and reply.
const fn stats(version: Version) -> [u8; 2] {
    match version {
        Version::V1_0 => kind::STATS_1_0,
        Version::V1_3 => kind::MULTIPART_1_3,
    }
}

/// The elements of a HELLO; those that are not known are skipped, and an end in the middle of one is the end.
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

/// Writes a request with this transaction id.
///
/// # Errors
/// What the version cannot say: IPv6 and TCP flags in 1.0.
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
            // Table all, pad, any port.
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
