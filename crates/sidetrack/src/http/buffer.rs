//! Bytes that were read from a connection and are not used yet. The buffer of an idle connection has no memory.

use super::duplex::Duplex;
use std::cell::RefCell;
use std::future::poll_fn;
use std::io;

/// Least room for one read.
const READ_MIN: usize = 16 * 1024;
/// Room for one read after a read that filled its room.
const READ_MAX: usize = 128 * 1024;

/// Most spare buffers that a worker keeps for the next connection that reads.
const SPARE_MAX: usize = 64;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Bytes that were read from a connection and are not used yet.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    /// The last read filled all the room.
    was_filled: bool,
}

impl Buffer {
    /// A buffer that holds these bytes.
    pub fn holding(bytes: Vec<u8>) -> Self {
        Self { bytes, start: 0, was_filled: false }
    }

    /// The buffered bytes.
    pub fn data(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    /// Whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.data().is_empty()
    }

    /// Removes bytes from the front.
    pub fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.bytes.len());
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }

    /// Takes all buffered bytes.
    pub fn take(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.drain(..std::mem::take(&mut self.start));
        bytes
    }

    /// Gives the memory back if the buffer is empty, for the next connection that reads.
    pub fn release(&mut self) {
        if self.is_empty() {
            let mut bytes = std::mem::take(self).bytes;
            if bytes.capacity() == READ_MIN {
                bytes.clear();
                SPARE.with_borrow_mut(|spare| {
                    if spare.len() < SPARE_MAX {
                        spare.push(bytes);
                    }
                });
            }
        }
    }

    /// Reads available bytes behind the buffered ones. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// As the socket says.
    pub async fn fill(&mut self, from: &Duplex) -> io::Result<usize> {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        let room = if self.was_filled { READ_MAX } else { READ_MIN };
        if self.bytes.capacity() == 0
            && let Some(spare) = SPARE.with_borrow_mut(Vec::pop)
        {
            self.bytes = spare;
        }
        self.bytes.reserve(room);
        let room = self.bytes.capacity() - self.bytes.len();
        let n = poll_fn(|cx| from.poll_recv_into(cx, &mut self.bytes)).await?;
        self.was_filled = n == room;
        Ok(n)
    }
}
