//! A server that says from where it is reached and echoes, and connections to it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;

use super::LIMIT;
use crate::topology::Node;

/// Bytes that are written before their echo is read: they fit into the buffers of every socket on the way.
const PIECE: usize = 8_192;
/// A connection of which the server hears nothing for this time is given up: its other end was killed.
const GIVEN_UP: Duration = Duration::from_secs(10);

/// The server; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Echo {
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
    pub(super) fn start(node: &Node, address: SocketAddr) -> Result<Self> {
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
pub(super) struct Flow {
    stream: TcpStream,
    /// The client's address.
    pub own: SocketAddr,
    /// The address that the server sees.
    pub seen: SocketAddr,
}

impl Flow {
    /// Connects from the network namespace of the calling thread and reads the server's first line.
    ///
    /// # Errors
    /// The connection is refused or not established in time, or it ends before the line.
    pub(super) fn open(to: SocketAddr, within: Duration) -> io::Result<Self> {
        let mut stream = TcpStream::connect_timeout(&to, within)?;
        stream.set_read_timeout(Some(within))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let (mut line, mut byte) = (Vec::new(), [0]);
        while byte != *b"\n" {
            stream.read_exact(&mut byte)?;
            line.extend(byte);
        }
        stream.set_read_timeout(Some(LIMIT))?;
        let seen = String::from_utf8_lossy(&line).trim().parse().map_err(io::Error::other)?;
        Ok(Self { own: stream.local_addr()?, stream, seen })
    }

    /// Returns true if a relay is between the client and the server.
    pub(super) fn is_relayed(&self) -> bool {
        self.own != self.seen
    }

    /// Sends this number of bytes and expects the same back.
    ///
    /// # Errors
    /// The connection breaks, or a byte is wrong.
    pub(super) fn echo(&mut self, bytes: usize) -> io::Result<()> {
        let sent: Vec<u8> = (0..bytes.min(PIECE)).map(|at| (at % 251) as u8).collect();
        let mut back = vec![0; sent.len()];
        let mut left = bytes;
        while left > 0 {
            let length = left.min(sent.len());
            self.stream.write_all(&sent[..length])?;
            self.stream.read_exact(&mut back[..length])?;
            if back[..length] != sent[..length] {
                return Err(io::Error::other("a byte came back changed"));
            }
            left -= length;
        }
        Ok(())
    }
}
