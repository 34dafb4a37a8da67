//! Messages of one transport session (RFC 7011 Sec. 3.1, 8, 10).
//!
//! ```text
//!               add(report)                              add(report), refresh is over
//!   UNKNOWN -------------------> ANNOUNCED -------------------------------------------> ANNOUNCED
//!            template, record        |                        template, record
//!                                    +--- add(report): record
//! ```
//!
//! This is the state of each template. It is sent before the first record that needs it, in the same message, and over UDP
//! again after `refresh`, because datagrams get lost and collectors forget templates (RFC 7011 Sec. 8.4).

use super::report::Report;
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Version of the protocol in each message.
const VERSION: u16 = 10;
/// Bytes of a message's header.
const HEADER: usize = 16;
/// Bytes of a set's header.
const SET_HEADER: usize = 4;
/// The set of templates.
const TEMPLATES: u16 = 2;

/// Smallest bound of a message, bytes: without knowledge of the path, RFC 7011 Sec. 10.3.3 allows this much. Every report
/// fits, with its template.
pub const MESSAGE_MIN: usize = 512;
/// Largest message, bytes: its length has 16 bits.
pub const MESSAGE_MAX: usize = 65_535;

/// Settings of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Observation domain: tells the senders behind one address apart.
    pub domain: u32,
    /// Most bytes of a message, [`MESSAGE_MIN`] to [`MESSAGE_MAX`].
    pub message_bytes: usize,
    /// Time after which a template is sent again. `None`: never, because the transport is reliable.
    pub refresh: Option<Duration>,
    /// Enterprise number of elements without a standard one. `None`: they are left out.
    pub enterprise: Option<u32>,
}

/// A message to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// All of its bytes.
    pub bytes: Vec<u8>,
    /// The number of its data records.
    pub records: u32,
}

/// One transport session: a TCP connection, or a UDP socket.
#[derive(Debug)]
pub struct Session {
    settings: Settings,
    /// Data records in the messages before, modulo 2^32.
    sequence: u32,
    /// Templates that were sent, with the time.
    announced: BTreeMap<u16, Instant>,
    /// The message that is being filled. Its header is written at the end.
    message: Vec<u8>,
    /// Its last set: number and start.
    set: Option<(u16, usize)>,
    records: u32,
    /// At most two messages, as the driver polls after each call.
    ready: VecDeque<Message>,
}

impl Session {
    /// Starts a session: the collector knows nothing yet.
    pub fn new(settings: Settings) -> Self {
        let mut session = Self {
            settings,
            sequence: 0,
            announced: BTreeMap::new(),
            message: Vec::new(),
            set: None,
            records: 0,
            ready: VecDeque::new(),
        };
        session.limit(settings.message_bytes);
        session.begin();
        session
    }

    /// Changes the most bytes of a message: the path has another MTU.
    pub fn limit(&mut self, message_bytes: usize) {
        self.settings.message_bytes = message_bytes.clamp(MESSAGE_MIN, MESSAGE_MAX);
    }

    /// Adds a report. `unix_s` is the time that messages carry, in seconds since 1970.
    pub fn add(&mut self, now: Instant, unix_s: u32, report: &Report<'_>) {
        let most = self.settings.message_bytes;
        let encoded = report.encode(self.settings.enterprise, most - HEADER - 2 * SET_HEADER);
        let template = encoded.template;
        let is_known = |at: &Instant| self.settings.refresh.is_none_or(|after| now.since(*at) < after);
        let mut is_new = !self.announced.get(&template).is_some_and(is_known);
        let announcement = |is_new| if is_new { SET_HEADER + encoded.announcement.len() } else { 0 };
        if self.message.len() + announcement(is_new) + SET_HEADER + encoded.data.len() > most {
            self.flush(unix_s);
            is_new = is_new || !self.announced.contains_key(&template);
        }
        if is_new {
            self.put(TEMPLATES, &encoded.announcement);
            self.announced.insert(template, now);
        }
        self.put(template, &encoded.data);
        self.records += 1;
    }

    /// Ends the message that is being filled, if it has anything.
    pub fn flush(&mut self, unix_s: u32) {
        if self.message.len() <= HEADER {
            return;
        }
        self.close_set();
        let mut bytes = std::mem::take(&mut self.message);
        let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(&VERSION.to_be_bytes());
        header.extend_from_slice(&length.to_be_bytes());
        for number in [unix_s, self.sequence, self.settings.domain] {
            header.extend_from_slice(&number.to_be_bytes());
        }
        if let Some(place) = bytes.get_mut(..HEADER) {
            place.copy_from_slice(&header);
        }
        self.ready.push_back(Message { bytes, records: self.records });
        self.sequence = self.sequence.wrapping_add(self.records);
        self.begin();
    }

    /// Returns the next message to send.
    pub fn poll(&mut self) -> Option<Message> {
        self.ready.pop_front()
    }

    fn begin(&mut self) {
        self.message.clear();
        self.message.resize(HEADER, 0);
        self.records = 0;
        self.set = None;
    }

    /// Appends a record to the set with this number.
    fn put(&mut self, number: u16, record: &[u8]) {
        if self.set.is_none_or(|(open, _)| open != number) {
            self.close_set();
            self.set = Some((number, self.message.len()));
            self.message.extend_from_slice(&number.to_be_bytes());
            // The length is written when the set is closed.
            self.message.extend_from_slice(&[0, 0]);
        }
        self.message.extend_from_slice(record);
    }

    fn close_set(&mut self) {
        let Some((_, start)) = self.set.take() else { return };
        let length = u16::try_from(self.message.len() - start).unwrap_or(u16::MAX);
        if let Some(place) = self.message.get_mut(start + 2..start + 4) {
            place.copy_from_slice(&length.to_be_bytes());
        }
    }
}
