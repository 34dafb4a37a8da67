//! The receiving half of a session: buffers data of the other end until the application takes it.

use super::send::MOST_BYTES;
use super::state::{Reader, StateError, bits, put_count, put_numbers, put_piece, sure};
use super::{Config, fits_one_frame};
use crate::overlay::frame::{Ack, DATA_MAX};
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most pieces that are buffered behind a gap. With several paths a sender keeps to it. With one path only a peer that cuts
/// its data into tiny pieces exceeds it.
pub const PIECES_MAX: usize = 2048;

/// Why data may come behind a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gaps {
    /// It may not.
    None,
    /// The path loses and reorders data.
    Lossy,
    /// The data before it comes on another path, and nothing is lost.
    Paths,
}

/// An acknowledgement is sent after this number of new bytes.
const ACK_EVERY: u64 = 128 * 1024;

/// The window grows if a whole window is delivered within this time. On a slower path, a larger window would only
/// make data wait longer at the beginning of the path. Two seconds are more than three round trips over a
/// satellite, the time that a byte needs if it is lost twice.
const GROW_WITHIN: Duration = Duration::from_secs(2);

/// The receiving half of a session.
#[derive(Clone, Debug)]
pub(super) struct Receiver {
    /// Data in order, for the application. The first `taken` bytes of the first element are delivered.
    queue: VecDeque<Vec<u8>>,
    taken: usize,
    /// Data behind a gap, by offset.
    ahead: BTreeMap<u64, Vec<u8>>,
    /// All bytes before this one have arrived.
    next: u64,
    delivered: u64,
    confirmed: u64,
    fin: Option<u64>,
    fin_delivered: bool,
    window: u64,
    window_max: u64,
    /// The number of bytes delivered, and the time, when the growth of the window was last checked.
    looked_at: (u64, Instant),
    /// The last acknowledgement sent.
    told: Ack,
    must_ack: bool,
}

impl Receiver {
    pub(super) fn new(config: &Config, now: Instant) -> Self {
        let window = u64::from(config.window_bytes);
        Self {
            queue: VecDeque::new(),
            taken: 0,
            ahead: BTreeMap::new(),
            next: 0,
            delivered: 0,
            confirmed: 0,
            fin: None,
            fin_delivered: false,
            window,
            window_max: config.window_max_bytes.into(),
            looked_at: (0, now),
            told: Ack { limit: window, ..Ack::default() },
            must_ack: false,
        }
    }

    /// Returns the next byte expected. One more if the FIN has arrived, too.
    pub(super) fn next(&self) -> u64 {
        self.next + u64::from(self.fin == Some(self.next))
    }

    /// Returns the limit that the other end knows.
    pub(super) fn told_limit(&self) -> u64 {
        self.told.limit
    }

    fn limit(&self) -> u64 {
        // Credit that was granted stays granted.
        self.told.limit.max(self.delivered + self.window)
    }

    pub(super) fn delivered(&self) -> u64 {
        self.delivered
    }

    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    pub(super) fn has_fin(&self) -> bool {
        self.fin.is_some()
    }

    pub(super) fn must_ack(&mut self) {
        self.must_ack = true;
    }

    pub(super) fn set_window_max(&mut self, bytes: u32) {
        self.window_max = u64::from(bytes).max(Config::WINDOW_MIN.into());
        self.window = self.window.min(self.window_max);
    }

    pub(super) fn deliverable(&self) -> &[u8] {
        self.queue.front().map_or(&[], |first| &first[self.taken..])
    }

    /// Whether all data and the FIN have been passed to the application.
    pub(super) fn is_complete(&self) -> bool {
        self.fin_delivered && self.confirmed >= self.delivered
    }

    /// Returns true once: when all data is delivered and the FIN is to be passed on.
    pub(super) fn take_fin(&mut self) -> bool {
        let due = !self.fin_delivered && self.fin == Some(self.next) && self.queue.is_empty();
        self.fin_delivered |= due;
        due
    }

    /// Takes data. Returns false if the other end broke the protocol.
    pub(super) fn data(&mut self, offset: u64, mut bytes: Vec<u8>, gaps: Gaps) -> bool {
        let end = offset.saturating_add(bytes.len() as u64);
        let is_ahead = offset > self.next;
        if end > self.told.limit || self.fin.is_some_and(|fin| end > fin) || (is_ahead && gaps == Gaps::None)
        {
            return false;
        }
        if is_ahead {
            return self.keep_ahead(offset, bytes, gaps);
        }
        let gaps = gaps == Gaps::Lossy;
        let known = usize::try_from(self.next - offset).unwrap_or(usize::MAX);
        if known >= bytes.len() {
            // All of it is a duplicate: the acknowledgement was lost, or is still on its way.
            self.must_ack |= gaps;
            return true;
        }
        bytes.drain(..known);
        self.append(bytes);
        // The gap may be closed now: append the data that waited behind it.
        while let Some((offset, mut bytes)) = self.ahead.pop_first() {
            if offset > self.next {
                self.ahead.insert(offset, bytes);
                break;
            }
            let known = usize::try_from(self.next - offset).unwrap_or(usize::MAX).min(bytes.len());
            bytes.drain(..known);
            self.append(bytes);
        }
        self.must_ack |= gaps || self.next >= self.told.next + ACK_EVERY || self.fin == Some(self.next);
        true
    }

    fn keep_ahead(&mut self, offset: u64, bytes: Vec<u8>, gaps: Gaps) -> bool {
        let fits = self.ahead.len() < PIECES_MAX || self.ahead.contains_key(&offset);
        if fits {
            self.ahead.entry(offset).or_insert(bytes);
        }
        self.must_ack |= gaps == Gaps::Lossy;
        // Data that is dropped comes again from a path that loses data anyway. On several paths it counts as arrived.
        fits || gaps == Gaps::Lossy
    }

    fn append(&mut self, bytes: Vec<u8>) {
        self.next += bytes.len() as u64;
        match self.queue.back_mut() {
            Some(last) if fits_one_frame(last.len(), bytes.len()) => last.extend_from_slice(&bytes),
            _ if bytes.is_empty() => {}
            _ => self.queue.push_back(bytes),
        }
    }

    /// Takes the end of the data. Returns false if it contradicts what arrived before.
    pub(super) fn fin(&mut self, offset: u64) -> bool {
        let ahead = self.ahead.last_key_value().map_or(0, |(at, bytes)| at + bytes.len() as u64);
        if offset < self.next.max(ahead)
            || self.fin.is_some_and(|fin| fin != offset)
            || offset > self.told.limit
        {
            return false;
        }
        self.fin = Some(offset);
        self.must_ack = true;
        true
    }

    pub(super) fn written(&mut self, n: usize, now: Instant) {
        let Some(first) = self.queue.front() else { return };
        let n = n.min(first.len() - self.taken);
        self.taken += n;
        self.delivered += n as u64;
        if self.taken == first.len() {
            self.queue.pop_front();
            self.taken = 0;
        }
        // Check the growth only when a whole window was delivered: the application then keeps up with the path.
        let (delivered, since) = self.looked_at;
        if self.queue.is_empty() && self.delivered - delivered >= self.window {
            if now.since(since) <= GROW_WITHIN {
                self.window = (self.window * 2).min(self.window_max);
            }
            self.looked_at = (self.delivered, now);
        }
        self.must_ack |= self.limit() >= self.told.limit + self.window / 4;
    }

    pub(super) fn confirm(&mut self, offset: u64) {
        let offset = offset.min(self.delivered);
        if offset > self.confirmed {
            self.confirmed = offset;
            self.must_ack = true;
        }
    }

    /// Returns whether an acknowledgement is due, and forgets it.
    pub(super) fn take_due(&mut self) -> bool {
        std::mem::take(&mut self.must_ack)
    }

    /// Returns the acknowledgement of what is here now.
    pub(super) fn ack(&self) -> Ack {
        let hole_end = self.ahead.first_key_value().map_or(0, |(offset, _)| *offset);
        Ack { next: self.next(), limit: self.limit(), confirmed: self.confirmed, hole_end }
    }

    /// Notes that this acknowledgement is sent.
    pub(super) fn told(&mut self, ack: Ack) {
        self.told = ack;
    }
}

/// Bits of the flags of a state.
const HAS_FIN: u8 = 1;
const FIN_DELIVERED: u8 = 2;

/// Most credit that another process may have granted, bytes. No configuration grants more.
const CREDIT_MAX: u64 = 1 << 32;

impl Receiver {
    /// Writes the state.
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        put_numbers(out, &[self.delivered, self.confirmed, self.window, self.told.limit]);
        out.push(bits(&[(self.fin.is_some(), HAS_FIN), (self.fin_delivered, FIN_DELIVERED)]));
        put_numbers(out, &[self.fin.unwrap_or_default()]);
        let waiting: usize = self.queue.iter().map(Vec::len).sum();
        put_count(out, waiting - self.taken);
        let mut skipped = self.taken;
        for bytes in &self.queue {
            out.extend_from_slice(&bytes[skipped..]);
            skipped = 0;
        }
        put_count(out, self.ahead.len());
        for (offset, bytes) in &self.ahead {
            put_numbers(out, &[*offset]);
            put_piece(out, bytes);
            out.extend_from_slice(bytes);
        }
    }

    /// Reads such a state.
    pub(super) fn read_from(
        from: &mut Reader<'_>,
        config: &Config,
        now: Instant,
    ) -> Result<Self, StateError> {
        let [delivered, confirmed, window, limit] = [from.u64()?, from.u64()?, from.u64()?, from.u64()?];
        let (flags, fin) = (from.u8()?, from.u64()?);
        sure(flags & !(HAS_FIN | FIN_DELIVERED) == 0, "a flag of the receiver is unknown")?;
        let fin = (flags & HAS_FIN != 0).then_some(fin);
        let waiting = from.count(1)?;
        let mut this = Self { delivered, confirmed, fin, ..Self::new(config, now) };
        let next = delivered.saturating_add(waiting as u64);
        sure(limit <= MOST_BYTES && next <= limit, "more came than there was credit for")?;
        sure(limit - delivered <= CREDIT_MAX, "there is too much credit")?;
        sure(confirmed <= delivered, "more is confirmed than delivered")?;
        for bytes in from.take(waiting)?.chunks(DATA_MAX) {
            this.queue.push_back(bytes.to_vec());
        }
        (this.next, this.looked_at) = (next, (delivered, now));
        this.window = window.clamp(Config::WINDOW_MIN.into(), this.window_max);
        this.told = Ack { next, limit, confirmed, hole_end: 0 };
        let mut last = next;
        for _ in 0..from.count(11)? {
            let offset = from.u64()?;
            let bytes = from.piece().and_then(|length| from.take(length))?;
            let end = offset.saturating_add(bytes.len() as u64);
            sure(offset > last && end <= limit, "a piece has no place")?;
            last = offset;
            this.ahead.insert(offset, bytes.to_vec());
        }
        sure(this.ahead.len() <= PIECES_MAX, "there are too many pieces")?;
        let end = this.ahead.iter().map(|(at, bytes)| at + bytes.len() as u64).fold(next, u64::max);
        sure(fin.is_none_or(|fin| (end..=limit).contains(&fin)), "a FIN is not at the end")?;
        this.fin_delivered = flags & FIN_DELIVERED != 0;
        let may_be = fin == Some(next) && waiting == 0;
        sure(may_be || !this.fin_delivered, "a FIN was delivered before the data")?;
        Ok(this)
    }
}
