//! What a paced link sends, and what its streams are used for.

use super::flight::{Part, low};
use super::outgoing::Piece;
use super::stream::Stream;
use super::{
    CREDIT_FIRST, Link, OFFER_AGAIN, OFFER_EVERY, PROBES_QUIET, Read, SEND_MAX, STREAM_WINDOW_MAX,
    STREAMS_MAX, State, UNSENT, arrivals,
};
use crate::overlay::frame::{Chunk, Frame, Offer, Paced};
use crate::time::Instant;

/// Most bytes of a packet's frame, whatever the datagrams of the link hold: a chunk has a length of 16 bits.
const FRAME_MAX: usize = 60_000;

/// A chunk of data is not begun in less room than this.
const DATA_MIN: usize = Chunk::DATA_BYTES + 32;

impl Link {
    /// Opens a stream. `None`: the link is not agreed or is down, or too many streams are open.
    pub fn open(&mut self) -> Option<u32> {
        let name = self.next_own.filter(|_| self.is_agreed() && self.ours < STREAMS_MAX)?;
        self.next_own = name.checked_add(2);
        self.ours += 1;
        self.enter(name);
        Some(name)
    }

    /// Returns how many bytes may be written on a stream now.
    pub(super) fn room_of(&self, name: u32) -> usize {
        let Some(stream) = self.streams.get(&name) else { return 0 };
        let share = (SEND_MAX / self.streams.len().max(1)).clamp(CREDIT_FIRST as usize, STREAM_WINDOW_MAX);
        let unsent_max = usize::try_from(u128::from(self.config.rate) * UNSENT.as_nanos() / 8_000_000_000);
        let unsent_max = unsent_max.unwrap_or(usize::MAX).clamp(CREDIT_FIRST as usize, share);
        let unsent = unsent_max.saturating_sub(stream.out.unsent());
        let spare = SEND_MAX.saturating_sub(self.sums.held);
        let held = share.min(stream.out.held() + spare).max(CREDIT_FIRST as usize);
        unsent.min(held.saturating_sub(stream.out.held()))
    }

    /// Writes bytes on a stream. Returns how many were taken; 0: there is no room, and [`super::Output::Writable`] follows.
    /// `None`: the link is down. If the other end has closed the stream, the bytes are taken and dropped; reading shows
    /// that end.
    pub fn write(&mut self, name: u32, bytes: &[u8]) -> Option<usize> {
        if self.state == State::Down {
            return None;
        }
        let room = self.room_of(name).min(bytes.len());
        let taken = self.with(name, |stream| {
            if !stream.may_write() {
                return bytes.len();
            }
            stream.out.write(&bytes[..room]);
            stream.wants_room = room < bytes.len();
            room
        });
        self.activate(name);
        taken
    }

    /// Whether there is room on a stream. If there is none, [`super::Output::Writable`] follows.
    pub fn has_room(&mut self, name: u32) -> bool {
        let room = self.room_of(name);
        let Some(stream) = self.streams.get_mut(&name) else { return true };
        stream.wants_room = room == 0 && stream.may_write();
        !stream.wants_room
    }

    /// Reads bytes of a stream.
    pub fn read(&mut self, name: u32, room: &mut [u8]) -> Read {
        let read = self.with(name, |stream| match stream.incoming.read(room) {
            0 if stream.is_reset => Read::Broken,
            0 if stream.incoming.is_over() => Read::Ended,
            0 => Read::Later,
            bytes => Read::Bytes(bytes),
        });
        if matches!(read, Some(Read::Bytes(_))) {
            self.grant(name);
        }
        read.unwrap_or(Read::Broken)
    }

    /// Whether there is something to read on a stream.
    pub fn is_readable(&self, name: u32) -> bool {
        self.streams.get(&name).is_none_or(|stream| stream.is_reset || stream.incoming.is_ready())
    }

    /// Ends the use of a stream. What was written still arrives.
    pub fn close(&mut self, name: u32) {
        self.with(name, Stream::close);
        self.end_if_due(name);
        self.reap(name);
    }

    /// Drops a stream: the other end sees that it broke.
    pub fn abandon(&mut self, name: u32) {
        if self.with(name, Stream::abandon) == Some(true) {
            self.control.push_back(Part::Reset(name));
        }
        self.reap(name);
    }

    pub(super) fn end_if_due(&mut self, name: u32) {
        if self.with(name, Stream::take_end) == Some(true) {
            self.control.push_back(Part::End(name));
        }
    }

    /// Puts a stream into the queue if it has something to send.
    pub(super) fn activate(&mut self, name: u32) {
        if let Some(stream) = self.streams.get_mut(&name)
            && !stream.is_active
            && stream.out.is_ready()
        {
            stream.is_active = true;
            self.active.push_back(name);
        }
    }

    pub(super) fn has_work(&self) -> bool {
        let may = self.is_agreed() && self.flight.probes() < PROBES_QUIET && self.flight.has_room();
        may && !(self.control.is_empty() && self.active.is_empty())
    }

    pub(super) fn probe_at(&self) -> Option<Instant> {
        self.flight.probe_at(arrivals::ACK_DELAY_MAX).filter(|_| self.flight.has_room())
    }

    /// Returns the next frame to send, of at most `room` bytes. `None`: nothing, until [`Link::deadline`].
    pub fn transmit(&mut self, now: Instant, room: usize) -> Option<Frame> {
        if self.state == State::Down {
            return None;
        }
        let around = self.config.around_bytes;
        self.room =
            room.min(FRAME_MAX).min(self.pace.packet_bytes().saturating_sub(around)).max(DATA_MIN * 2);
        if self.offer_at <= now && self.spend(now, Offer::BYTES) {
            let heard = self.peer.is_some();
            let is_known = heard && self.peer.is_some_and(|offer| offer.heard);
            self.offer_at = now + if is_known { OFFER_AGAIN } else { OFFER_EVERY };
            return Some(Frame::Offer(Offer { rate: self.config.rate, credit: CREDIT_FIRST, heard }));
        }
        let ack_bytes = self.arrivals.bytes();
        if self.arrivals.due(around).is_some_and(|due| due <= now) && self.spend(now, ack_bytes) {
            self.counts.acks += 1;
            let ack = self.arrivals.acknowledge(now, around)?;
            return Some(Frame::PacedAck(Box::new(ack)));
        }
        self.packet(now)
    }

    /// Returns the next packet with chunks.
    fn packet(&mut self, now: Instant) -> Option<Frame> {
        let is_probe = self.probe_at().is_some_and(|due| due <= now);
        if !self.is_agreed() || !(is_probe || self.has_work()) {
            return None;
        }
        if !self.pace.allows(now, self.room + self.config.around_bytes) {
            return None;
        }
        let mut filling =
            Filling { room: self.room - Paced::OVERHEAD_BYTES, chunks: Vec::new(), parts: Vec::new() };
        if is_probe {
            self.repeat(&mut filling);
        }
        if self.flight.probes() < PROBES_QUIET {
            self.fill_control(&mut filling);
            self.fill_data(&mut filling);
        }
        if filling.chunks.is_empty() {
            if !is_probe {
                return None;
            }
            // What the oldest packet carried does not matter any more. Credit that does not rise changes nothing.
            filling.push(Chunk::Credit { stream: self.known_name(), limit: 0 }, None);
        }
        let Filling { room, chunks, parts } = filling;
        let number = self.flight.sent(now, parts);
        let back = u16::try_from(number - self.flight.floor()).unwrap_or(u16::MAX);
        self.pace.spend(now, self.room - room + self.config.around_bytes);
        self.counts.packets += 1;
        Some(Frame::Paced(Box::new(Paced { number: low(number), back, chunks })))
    }

    fn spend(&mut self, now: Instant, frame_bytes: usize) -> bool {
        let bytes = frame_bytes + self.config.around_bytes;
        let allowed = self.pace.allows(now, bytes);
        if allowed {
            self.pace.spend(now, bytes);
        }
        allowed
    }

    /// Returns the name of a stream that was opened: a packet is in flight, so there was one.
    fn known_name(&self) -> u32 {
        let own = u32::from(!self.config.is_even);
        if self.next_own == Some(own) { own ^ 1 } else { own }
    }

    /// Adds what the oldest packet in flight carries.
    fn repeat(&mut self, filling: &mut Filling) {
        for part in self.flight.probe() {
            match part {
                Part::Data(name, from, to) => {
                    let most = filling.room.saturating_sub(Chunk::DATA_BYTES);
                    let piece = self.streams.get(&name).and_then(|stream| stream.out.again(from, to, most));
                    if let Some(piece) = piece {
                        self.counts.bytes_again += piece.bytes.len() as u64;
                        filling.data(name, piece);
                    }
                }
                part => self.push_control(filling, part),
            }
        }
    }

    fn fill_control(&mut self, filling: &mut Filling) {
        while filling.room >= Chunk::OTHER_BYTES
            && let Some(part) = self.control.pop_front()
        {
            self.push_control(filling, part);
        }
    }

    fn push_control(&mut self, filling: &mut Filling, part: Part) {
        if filling.room < Chunk::OTHER_BYTES {
            return;
        }
        let (Part::Data(name, ..) | Part::End(name) | Part::Reset(name) | Part::Credit(name)) = part;
        // A stream that is over needs none of it.
        let Some(stream) = self.streams.get_mut(&name) else { return };
        let chunk = match part {
            Part::End(_) if stream.sends_end() => Chunk::End { stream: name, offset: stream.out.end() },
            Part::Reset(_) if stream.sends_reset() => Chunk::Reset { stream: name },
            Part::Credit(_) => {
                stream.credit_is_queued = false;
                Chunk::Credit { stream: name, limit: stream.incoming.limit() }
            }
            _ => return,
        };
        filling.push(chunk, Some(part));
    }

    /// Adds bytes of streams in their turn. Each turn adds the room of a packet to what a stream may send.
    fn fill_data(&mut self, filling: &mut Filling) {
        let turn = i64::try_from(self.room).unwrap_or(i64::MAX);
        while filling.room >= DATA_MIN
            && let Some(name) = self.active.front().copied()
        {
            let most = filling.room - Chunk::DATA_BYTES;
            let piece = self.with(name, |stream| {
                if stream.deficit <= 0 && stream.out.is_ready() {
                    stream.deficit += turn;
                    return Err(());
                }
                Ok(stream.out.next(most))
            });
            match piece {
                // Its turn is over: the others are before it now.
                Some(Err(())) if self.active.len() > 1 => self.active.rotate_left(1),
                Some(Err(())) => {}
                Some(Ok(Some(piece))) => self.send_piece(filling, name, piece),
                Some(Ok(None)) | None => {
                    self.active.pop_front();
                    if let Some(stream) = self.streams.get_mut(&name) {
                        (stream.is_active, stream.deficit) = (false, 0);
                    }
                }
            }
        }
    }

    fn send_piece(&mut self, filling: &mut Filling, name: u32, piece: Piece) {
        let bytes = piece.bytes.len();
        let count = if piece.again { &mut self.counts.bytes_again } else { &mut self.counts.bytes };
        *count += bytes as u64;
        if let Some(stream) = self.streams.get_mut(&name) {
            stream.deficit -= i64::try_from(bytes + Chunk::DATA_BYTES).unwrap_or(i64::MAX);
        }
        filling.data(name, piece);
        self.end_if_due(name);
        self.tell_room(name);
    }
}

/// A packet that is being filled.
struct Filling {
    room: usize,
    chunks: Vec<Chunk>,
    parts: Vec<Part>,
}

impl Filling {
    fn push(&mut self, chunk: Chunk, part: Option<Part>) {
        let bytes = match &chunk {
            Chunk::Data { bytes, .. } => Chunk::DATA_BYTES + bytes.len(),
            Chunk::Reset { .. } => 5,
            Chunk::End { .. } | Chunk::Credit { .. } => Chunk::OTHER_BYTES,
        };
        self.room = self.room.saturating_sub(bytes);
        self.chunks.push(chunk);
        self.parts.extend(part);
    }

    fn data(&mut self, stream: u32, piece: Piece) {
        let Piece { offset, bytes, .. } = piece;
        let part = Part::Data(stream, offset, offset + bytes.len() as u64);
        self.push(Chunk::Data { stream, offset, bytes }, Some(part));
    }
}
