//! The client's side while the path is being made: its socket and the bytes it has sent so far.

use crate::carry::FirstBytes;
use sidetrack_core::flow::HostName;
use sidetrack_core::http::{Sniff, sniff};
use sidetrack_sys::sockopt;
use std::io;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

/// Most bytes held of a client whose path does not stand yet (a ClientHello or request head has at most 16 KiB; what
/// is more waits in the kernel).
const HELD_MAX: usize = 16 * 1024;

/// How long a refused client may take to read the refusal before the socket is closed under it.
const REFUSAL_LINGER: Duration = Duration::from_millis(500);

/// See the module.
#[derive(Debug)]
pub struct Client {
    /// The socket.
    pub stream: TcpStream,
    held: Vec<u8>,
}

impl Client {
    /// A client that was just accepted.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream, held: Vec::new() }
    }

    /// Bytes that came and belong to the server, in front of those held.
    pub fn put_first(&mut self, bytes: Vec<u8>) {
        if self.held.is_empty() {
            self.held = bytes;
        } else if !bytes.is_empty() {
            self.held.splice(..0, bytes);
        }
    }

    /// Bytes that came and belong to the server, behind those held.
    pub fn put_last(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Takes what is held.
    pub fn take_held(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }

    /// Reads what is there into the held bytes, waiting for at least one. 0: nothing more comes.
    ///
    /// # Errors
    /// As the socket says.
    pub async fn read_more(&mut self) -> io::Result<usize> {
        loop {
            self.stream.readable().await?;
            match self.try_read_more() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    fn try_read_more(&mut self) -> io::Result<usize> {
        let room = HELD_MAX.saturating_sub(self.held.len());
        if room == 0 {
            return Ok(0);
        }
        let mut buffer = [0; 4096];
        let buffer = &mut buffer[..room.min(4096)];
        let n = self.stream.try_read(buffer)?;
        self.held.extend_from_slice(&buffer[..n]);
        Ok(n)
    }

    /// Waits, but not longer than `wait`, until the first bytes name a host or cannot.
    pub async fn sniff(&mut self, wait: Duration) -> Option<HostName> {
        let deadline = Instant::now() + wait;
        loop {
            if !self.held.is_empty() {
                match sniff(&self.held) {
                    Sniff::Host { name, .. } => return Some(name),
                    Sniff::None => return None,
                    Sniff::NeedMore => {}
                }
            }
            match timeout_at(deadline, self.read_more()).await {
                Ok(Ok(n)) if n > 0 => {}
                _ => return None,
            }
        }
    }

    /// Waits, but not longer than `wait`, for any first bytes.
    pub async fn wait_for_bytes(&mut self, wait: Duration) {
        if self.held.is_empty() && !wait.is_zero() {
            // Silence and a broken socket alike mean: nothing to send along. The pump meets the error again.
            let _ = timeout_at(Instant::now() + wait, self.read_more()).await;
        }
    }

    /// Writes all of an answer.
    ///
    /// # Errors
    /// As the socket says.
    pub async fn answer(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Closes after an answer that refuses: the client gets time to read it (a close with unread bytes would turn
    /// into a reset that overtakes it).
    pub async fn close_after_answer(mut self) {
        if self.stream.shutdown().await.is_err() {
            return;
        }
        let deadline = Instant::now() + REFUSAL_LINGER;
        for _ in 0..64 {
            self.held.clear();
            match timeout_at(deadline, self.read_more()).await {
                Ok(Ok(n)) if n > 0 => {}
                _ => return,
            }
        }
    }

    /// Closes with a reset: refused must not look like accepted and then closed.
    pub fn reset(self) {
        // Cannot fail on a TCP socket; an orderly end is what is left if it did.
        let _ = sockopt::reset_on_close(&self.stream);
    }
}

impl FirstBytes for Client {
    fn held(&mut self) -> &[u8] {
        // WouldBlock is the ordinary case; any other error is met again by the pump.
        let _ = self.try_read_more();
        &self.held
    }
}
