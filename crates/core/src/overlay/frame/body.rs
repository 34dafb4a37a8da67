//! Encodes and decodes the bodies of frames, type by type.

use super::holding::HOLDING;
use super::membership::{MEMBERSHIP, MEMBERSHIP_ACK};
use super::paced::{OFFER, PACED, PACED_ACK};
use super::spread::{FEATURES, SPREAD};
use super::timed::{NEWEST, RESEND, TIMED};
use super::vouched::{STANDING, VOUCHED};
use super::wire::{Put, Reader};
use super::{
    Ack, DATA_MAX, DETAIL_MAX, Dissemination, Features, Frame, FrameError, Greeting, Hello, Holding,
    LinkEntry, LinkKind, LinkState, Membership, Newest, Offer, Open, Opened, PACKET_MAX, Paced, PacedAck,
    Packet, Piece, Protocol, Purpose, Record, Refusal, Refused, Resend, ResetReason, Resume, SessionFrame,
    SessionId, Spread, Standing, Timed, Vouched,
};
use crate::overlay::NODES_MAX;

const GREETING: u8 = 0x01;
const HELLO: u8 = 0x02;
const RECORD: u8 = 0x03;
const RECORD_ACK: u8 = 0x04;
const WANT: u8 = 0x05;
const PACKET: u8 = 0x06;
const PIECE: u8 = 0x07;
const PROBE: u8 = 0x08;
const PROBE_ACK: u8 = 0x09;
const OPEN: u8 = 0x10;
const OPENED: u8 = 0x11;
const REFUSED: u8 = 0x12;
pub(super) const DATA: u8 = 0x20;
const ACK: u8 = 0x21;
const FIN: u8 = 0x22;
const RESET: u8 = 0x23;
const DONE: u8 = 0x24;

const ARRIVED: u8 = 0xC0;
const LEG_HELLO: u8 = 0xC1;

/// A receiver that does not know a type from here on skips the frame.
const MAY_BE_SKIPPED: u8 = 0x80;

/// Encodes a value as its index in a fixed list.
macro_rules! closed_list {
    ($type:ty, $name:literal, $($value:expr),+ $(,)?) => {
        impl $type {
            /// All values, in the order of their codes, from 0 on.
            pub const ALL: &'static [Self] = &[$($value),+];

            pub(super) fn code(self) -> u8 {
                Self::ALL.iter().position(|other| *other == self).and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX)
            }

            pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
                let code = usize::from(reader.u8()?);
                Self::ALL.get(code).copied().ok_or(FrameError::BadValue($name))
            }
        }
    };
}

closed_list!(LinkKind, "kind of link", Self::Reliable, Self::BestEffort, Self::RealTime);
closed_list!(Dissemination, "dissemination", Self::Shortest, Self::Duplicate, Self::Flood, Self::Graph);
closed_list!(Purpose, "purpose", Self::Control, Self::FromDialer, Self::FromAcceptor, Self::MovedControl);
closed_list!(LinkState, "link state", Self::Down, Self::Init, Self::Up);
closed_list!(Protocol, "protocol", Self::EchoRequest, Self::EchoReply, Self::Session, Self::Ip, Self::Group);
closed_list!(
    Refusal,
    "refusal",
    Self::NoLink,
    Self::BadRequest,
    Self::Denied,
    Self::ConnectionRefused,
    Self::Unreachable,
    Self::TimedOut,
    Self::Dns,
    Self::Limit,
    Self::UnknownSession,
);
closed_list!(ResetReason, "reset reason", Self::Application, Self::PathLost, Self::Protocol, Self::Ended);

impl Frame {
    pub(super) fn encode_body(&self, out: &mut Vec<u8>) {
        match self {
            Self::Greeting(greeting) => {
                out.put(&[GREETING, greeting.version, greeting.kind.code(), greeting.purpose.code()]);
            }
            Self::Hello(hello) => {
                out.put_u8(HELLO);
                put_hello(out, hello);
            }
            Self::Record(record) => {
                out.put_u8(RECORD);
                record.put_signed(out);
                out.put(&record.signature.0);
            }
            Self::RecordAck { origin, sequence } => {
                out.put_u8(RECORD_ACK);
                out.put_u64(origin.0);
                out.put_u64(*sequence);
            }
            Self::Want { connections } => {
                out.put_u8(WANT);
                out.put_u16(*connections);
            }
            Self::Packet(packet) => {
                out.put_u8(PACKET);
                out.put_path(&packet.path);
                out.put(&[packet.position, packet.protocol.code()]);
                out.put(&packet.payload);
            }
            Self::Piece(piece) => {
                out.put_u8(PIECE);
                out.put_u32(piece.message);
                out.put(&[piece.index, piece.count]);
                out.put(&piece.bytes);
            }
            Self::Probe { number, padding } => {
                out.put_u8(PROBE);
                out.put_u32(*number);
                out.resize(out.len() + usize::from(*padding), 0);
            }
            Self::ProbeAck { number } => {
                out.put_u8(PROBE_ACK);
                out.put_u32(*number);
            }
            Self::Open(open) => {
                out.put(&[OPEN, open.position]);
                open.put_signed(out);
                out.put(&open.signature.0);
            }
            Self::Opened(opened) => {
                out.put_u8(OPENED);
                opened.put_signed(out);
                out.put(&opened.signature.0);
            }
            Self::Refused(refused) => {
                out.put_u8(REFUSED);
                out.put_u64(refused.by.0);
                out.put_u8(refused.reason.code());
                out.put(words(&refused.detail).as_bytes());
            }
            Self::Session(frame) => put_session(out, frame),
            extension => extension.encode_extension(out),
        }
    }

    /// Encodes a frame of a type that may be skipped.
    fn encode_extension(&self, out: &mut Vec<u8>) {
        match self {
            Self::Spread(packet) => {
                out.put_u8(SPREAD);
                packet.put(out);
            }
            Self::Features(features) => {
                out.put_u8(FEATURES);
                features.put(out);
            }
            Self::Membership(membership) => {
                out.put_u8(MEMBERSHIP);
                membership.put(out);
            }
            Self::MembershipAck { origin, sequence } => {
                out.put_u8(MEMBERSHIP_ACK);
                out.put_u64(origin.0);
                out.put_u64(*sequence);
            }
            Self::Timed(timed) => {
                out.put_u8(TIMED);
                timed.put(out);
            }
            Self::Resend(request) => {
                out.put_u8(RESEND);
                request.put(out);
            }
            Self::Newest(newest) => {
                out.put_u8(NEWEST);
                newest.put(out);
            }
            Self::LegHello { leg, hello } => {
                out.put(&[LEG_HELLO, *leg]);
                put_hello(out, hello);
            }
            Self::Paced(packet) => {
                out.put_u8(PACED);
                packet.put(out);
            }
            Self::PacedAck(ack) => {
                out.put_u8(PACED_ACK);
                ack.put(out);
            }
            Self::Offer(offer) => {
                out.put_u8(OFFER);
                offer.put(out);
            }
            Self::Vouched(packet) => {
                out.put_u8(VOUCHED);
                packet.put(out);
            }
            Self::Standing(standing) => {
                out.put_u8(STANDING);
                standing.put(out);
            }
            Self::Holding(holding) => {
                out.put_u8(HOLDING);
                holding.put(out);
            }
            // `encode_body` encodes the others.
            _ => {}
        }
    }

    /// Decodes a body. `None` if its type is unknown but may be skipped.
    pub(super) fn decode_body(body: &[u8]) -> Result<Option<Self>, FrameError> {
        let mut reader = Reader(body);
        let kind = reader.u8()?;
        let frame = match kind {
            GREETING => Self::Greeting(Greeting {
                version: reader.u8()?,
                kind: LinkKind::read(&mut reader)?,
                purpose: Purpose::read(&mut reader)?,
            }),
            HELLO => Self::Hello(read_hello(&mut reader)?),
            RECORD => Self::Record(read_record(&mut reader)?),
            RECORD_ACK => Self::RecordAck { origin: reader.node()?, sequence: reader.u64()? },
            WANT => Self::Want { connections: reader.u16()? },
            PACKET => Self::Packet(read_packet(&mut reader)?),
            PIECE => Self::Piece(read_piece(&mut reader)?),
            PROBE => read_probe(&mut reader)?,
            PROBE_ACK => Self::ProbeAck { number: reader.u32()? },
            OPEN => Self::Open(Box::new(read_open(&mut reader)?)),
            OPENED => Self::Opened(Opened {
                session: SessionId(reader.array()?),
                next: reader.u64()?,
                window_bytes: reader.u32()?,
                signature: reader.signature()?,
            }),
            REFUSED => Self::Refused(read_refused(&mut reader)?),
            DATA | ACK | FIN | RESET | DONE | ARRIVED => Self::Session(read_session(kind, &mut reader)?),
            SPREAD => Self::Spread(Box::new(Spread::read(&mut reader)?)),
            TIMED => Self::Timed(Timed::read(&mut reader)?),
            RESEND => Self::Resend(Resend::read(&mut reader)?),
            NEWEST => Self::Newest(Newest::read(&mut reader)?),
            LEG_HELLO => Self::LegHello { leg: reader.u8()?, hello: read_hello(&mut reader)? },
            PACED => Self::Paced(Box::new(Paced::read(&mut reader)?)),
            PACED_ACK => Self::PacedAck(Box::new(PacedAck::read(&mut reader)?)),
            OFFER => Self::Offer(Offer::read(&mut reader)?),
            VOUCHED => Self::Vouched(Box::new(Vouched::read(&mut reader)?)),
            STANDING => Self::Standing(Standing::read(&mut reader)?),
            HOLDING => Self::Holding(Box::new(Holding::read(&mut reader)?)),
            FEATURES => Self::Features(Features::read(&mut reader)?),
            MEMBERSHIP => Self::Membership(Membership::read(&mut reader)?),
            MEMBERSHIP_ACK => Self::MembershipAck { origin: reader.node()?, sequence: reader.u64()? },
            skipped if skipped >= MAY_BE_SKIPPED => return Ok(None),
            unknown => return Err(FrameError::UnknownType(unknown)),
        };
        match reader.0.len() {
            0 => Ok(Some(frame)),
            left => Err(FrameError::TrailingBytes(left)),
        }
    }
}

/// Returns the first [`DETAIL_MAX`] bytes at most, cut between two characters.
pub(super) fn words(text: &str) -> &str {
    let mut end = text.len().min(DETAIL_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn put_hello(out: &mut Vec<u8>, hello: &Hello) {
    out.put_u8(hello.state.code());
    out.put_u32(hello.sequence);
    out.put_u16(hello.interval_ms);
    out.put_u8(u8::from(hello.echo.is_some()));
    if let Some((sequence, delay_us)) = hello.echo {
        out.put_u32(sequence);
        out.put_u32(delay_us);
    }
}

fn read_hello(reader: &mut Reader<'_>) -> Result<Hello, FrameError> {
    let state = LinkState::read(reader)?;
    let (sequence, interval_ms) = (reader.u32()?, reader.u16()?);
    let echo = match reader.u8()? {
        0 => None,
        1 => Some((reader.u32()?, reader.u32()?)),
        _ => return Err(FrameError::BadValue("echo")),
    };
    Ok(Hello { state, sequence, interval_ms, echo })
}

fn read_record(reader: &mut Reader<'_>) -> Result<Record, FrameError> {
    let (origin, sequence) = (reader.node()?, reader.u64()?);
    let count = usize::from(reader.u16()?);
    if count > NODES_MAX {
        return Err(FrameError::BadValue("number of links"));
    }
    let mut links: Vec<LinkEntry> = Vec::with_capacity(count);
    for _ in 0..count {
        let link = LinkEntry { neighbour: reader.node()?, cost_us: reader.u32()? };
        let rises = links.last().is_none_or(|last| last.neighbour < link.neighbour);
        if !rises || link.neighbour == origin {
            return Err(FrameError::BadValue("list of links"));
        }
        links.push(link);
    }
    Ok(Record { origin, sequence, links, signature: reader.signature()? })
}

fn read_packet(reader: &mut Reader<'_>) -> Result<Packet, FrameError> {
    let path = reader.path()?;
    let position = reader.u8()?;
    if position == 0 || path.at(position).is_none() {
        return Err(FrameError::BadValue("position"));
    }
    // Older nodes reject a packet to a group on a path, so no node may relay one to them.
    let protocol = Protocol::read(reader)?;
    if protocol == Protocol::Group {
        return Err(FrameError::BadValue("protocol"));
    }
    let payload = reader.rest();
    if payload.len() > PACKET_MAX {
        return Err(FrameError::BadValue("payload"));
    }
    Ok(Packet { path, position, protocol, payload: payload.to_vec() })
}

fn read_piece(reader: &mut Reader<'_>) -> Result<Piece, FrameError> {
    let (message, index, count) = (reader.u32()?, reader.u8()?, reader.u8()?);
    let bytes = reader.rest();
    if index >= count || bytes.is_empty() {
        return Err(FrameError::BadValue("piece"));
    }
    Ok(Piece { message, index, count, bytes: bytes.to_vec() })
}

fn read_probe(reader: &mut Reader<'_>) -> Result<Frame, FrameError> {
    let number = reader.u32()?;
    let zeros = reader.rest();
    let padding = u16::try_from(zeros.len()).ok().filter(|_| zeros.iter().all(|byte| *byte == 0));
    Ok(Frame::Probe { number, padding: padding.ok_or(FrameError::BadValue("probe"))? })
}

fn read_open(reader: &mut Reader<'_>) -> Result<Open, FrameError> {
    let position = reader.u8()?;
    let session = SessionId(reader.array()?);
    let path = reader.path()?;
    if position == 0 || path.at(position).is_none() {
        return Err(FrameError::BadValue("position"));
    }
    let resume = match reader.u32()? {
        0 => None,
        attempt => Some(Resume { attempt, next: reader.u64()? }),
    };
    Ok(Open {
        session,
        path,
        position,
        resume,
        window_bytes: reader.u32()?,
        destination: reader.destination()?,
        client: reader.socket_addr()?,
        host: reader.host_name()?,
        signature: reader.signature()?,
    })
}

fn read_refused(reader: &mut Reader<'_>) -> Result<Refused, FrameError> {
    let (by, reason) = (reader.node()?, Refusal::read(reader)?);
    let bytes = reader.rest();
    let detail = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= DETAIL_MAX);
    Ok(Refused { by, reason, detail: detail.ok_or(FrameError::BadValue("detail"))?.to_owned() })
}

fn put_session(out: &mut Vec<u8>, frame: &SessionFrame) {
    match frame {
        SessionFrame::Data { offset, bytes } => {
            out.put_u8(DATA);
            out.put_u64(*offset);
            out.put(bytes);
        }
        SessionFrame::Ack(ack) => {
            out.put_u8(ACK);
            for value in [ack.next, ack.limit, ack.confirmed, ack.hole_end] {
                out.put_u64(value);
            }
        }
        SessionFrame::Fin { offset } => {
            out.put_u8(FIN);
            out.put_u64(*offset);
        }
        SessionFrame::Reset { offset, reason } => {
            out.put_u8(RESET);
            out.put_u64(*offset);
            out.put_u8(reason.code());
        }
        SessionFrame::Done => out.put_u8(DONE),
        SessionFrame::Arrived { bytes } => {
            out.put_u8(ARRIVED);
            out.put_u64(*bytes);
        }
    }
}

fn read_session(kind: u8, reader: &mut Reader<'_>) -> Result<SessionFrame, FrameError> {
    Ok(match kind {
        DATA => {
            let offset = reader.u64()?;
            let bytes = reader.rest();
            let end = offset.checked_add(bytes.len() as u64).filter(|end| *end < u64::MAX);
            if end.is_none() || !(1..=DATA_MAX).contains(&bytes.len()) {
                return Err(FrameError::BadValue("data"));
            }
            SessionFrame::Data { offset, bytes: bytes.to_vec() }
        }
        ACK => SessionFrame::Ack(Ack {
            next: reader.u64()?,
            limit: reader.u64()?,
            confirmed: reader.u64()?,
            hole_end: reader.u64()?,
        }),
        FIN => SessionFrame::Fin { offset: reader.u64()? },
        RESET => SessionFrame::Reset { offset: reader.u64()?, reason: ResetReason::read(reader)? },
        ARRIVED => SessionFrame::Arrived { bytes: reader.u64()? },
        _ => SessionFrame::Done,
    })
}

impl Record {
    /// Returns the bytes that the origin signs.
    pub fn signed_bytes(&self) -> Vec<u8> {
        let mut out = b"sidetrack overlay 1 record\0".to_vec();
        self.put_signed(&mut out);
        out
    }

    fn put_signed(&self, out: &mut Vec<u8>) {
        out.put_u64(self.origin.0);
        out.put_u64(self.sequence);
        out.put_u16(u16::try_from(self.links.len()).unwrap_or(u16::MAX));
        for link in &self.links {
            out.put_u64(link.neighbour.0);
            out.put_u32(link.cost_us);
        }
    }
}

impl Open {
    /// Returns the bytes that the requesting node signs: all fields but `position`, which each relay changes.
    pub fn signed_bytes(&self) -> Vec<u8> {
        let mut out = b"sidetrack overlay 1 open\0".to_vec();
        self.put_signed(&mut out);
        out
    }

    fn put_signed(&self, out: &mut Vec<u8>) {
        out.put(&self.session.0);
        out.put_path(&self.path);
        out.put_u32(self.resume.map_or(0, |resume| resume.attempt));
        if let Some(resume) = self.resume {
            out.put_u64(resume.next);
        }
        out.put_u32(self.window_bytes);
        out.put_destination(&self.destination);
        out.put_socket_addr(self.client);
        out.put_host_name(self.host.as_ref());
    }
}

impl Opened {
    /// Returns the bytes that the answering node signs.
    pub fn signed_bytes(&self) -> Vec<u8> {
        let mut out = b"sidetrack overlay 1 opened\0".to_vec();
        self.put_signed(&mut out);
        out
    }

    fn put_signed(&self, out: &mut Vec<u8>) {
        out.put(&self.session.0);
        out.put_u64(self.next);
        out.put_u32(self.window_bytes);
    }
}
