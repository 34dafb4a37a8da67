//! A server that says from where it is reached and echoes, and connections to it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;

use crate::topology::Node;

/// Longest time for an answer.
const LIMIT: Duration = Duration::from_secs(60);

/// Bytes that are written before their echo is read: they fit into the buffers of every socket on the way.
const PIECE: usize = 8_192;
/// A connection of which the server hears nothing for this time is given up: its other end was killed.
const GIVEN_UP: Duration = Duration::from_secs(10);

/// The server; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Echo {
    /// Where it listens.
    pub address: SocketAddr,
    listener: TcpListener,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    /// Starts it in a node, at this address.
    ///
    /// # Errors
    /// The address is not the node's.
    pub(crate) fn start(node: &Node, address: SocketAddr) -> Result<Self> {
        let listener = node.enter(|| Ok(TcpListener::bind(address)?))?;
        let address = listener.local_addr()?;
        let accepting = listener.try_clone()?;
        let serve_all = move || {
            while let Ok((stream, peer)) = accepting.accept() {
                std::thread::spawn(move || serve(stream, peer));
            }
        };
        Ok(Self { address, listener, thread: Some(std::thread::spawn(serve_all)) })
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        // Wakes the thread that waits in accept(2).
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(mut stream: TcpStream, peer: SocketAddr) {
    let _ = stream.set_read_timeout(Some(GIVEN_UP));
    let greeted = writeln!(stream, "{peer}");
    let echoed = greeted.and_then(|()| io::copy(&mut stream.try_clone()?, &mut stream));
    // Most connections end because a process on their way is killed.
    let _ = echoed.and_then(|_| stream.shutdown(Shutdown::Write));
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Flow {
    stream: TcpStream,
    /// The client's address.
    pub own: SocketAddr,
    /// The address that the server sees.
    pub seen: SocketAddr,
    /// Bytes that were sent and came back.
    pub bytes: u64,
}

impl Flow {
    /// Connects from the network namespace of the calling thread and reads the server's first line.
    ///
    /// # Errors
    /// The connection is refused or not established in time, or it ends before the line.
    pub(crate) fn open(to: SocketAddr, within: Duration) -> io::Result<Self> {
        Self::begin(TcpStream::connect_timeout(&to, within)?, within)
    }

    /// Reads the server's first line from a connection that leads to it.
    ///
    /// # Errors
    /// The connection ends before the line, or the line does not come in time.
    pub(crate) fn begin(mut stream: TcpStream, within: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(within))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let (mut line, mut byte) = (Vec::new(), [0]);
        while byte != *b"\n" {
            stream.read_exact(&mut byte)?;
            line.extend(byte);
        }
        stream.set_read_timeout(Some(LIMIT))?;
        let seen = String::from_utf8_lossy(&line).trim().parse().map_err(io::Error::other)?;
        Ok(Self { own: stream.local_addr()?, stream, seen, bytes: 0 })
    }

    /// Returns true if a relay is between the client and the server.
    pub(crate) fn is_relayed(&self) -> bool {
        self.own != self.seen
    }

    /// Sends this number of bytes and expects the same back. They tell this flow and the place in it.
    ///
    /// # Errors
    /// The connection breaks, or a byte is wrong (`InvalidData`).
    pub(crate) fn echo(&mut self, bytes: usize) -> io::Result<()> {
        let mut back = vec![0; bytes.min(PIECE)];
        let mut left = bytes;
        while left > 0 {
            let length = left.min(back.len());
            let sent: Vec<u8> = (self.bytes..).take(length).map(|at| self.byte(at)).collect();
            self.stream.write_all(&sent)?;
            self.stream.read_exact(&mut back[..length])?;
            if back[..length] != sent {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a byte came back changed"));
            }
            self.bytes += length as u64;
            left -= length;
        }
        Ok(())
    }

    fn byte(&self, at: u64) -> u8 {
        // Neither number divides a power of two, in which lengths and places are often counted.
        ((at * 31 + u64::from(self.own.port()) * 7) % 251) as u8
    }

    /// Ends it in order: nothing more comes back.
    ///
    /// # Errors
    /// The connection breaks, or bytes come that were not sent (`InvalidData`).
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)?;
        match self.stream.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a byte came that was not sent")),
        }
    }
}
