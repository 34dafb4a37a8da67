//! The resolver of `sidetrack run`. Each name gets its own address of 198.18.0.0/15. The connection to this
//! address leads back to the name, and a proxy resolves it instead of this host. Names that this host resolves
//! itself are looked up at once, so that the command learns when they do not exist.
//!
//! [`answer()`] works on the table and on bytes only. [`Resolver`] decides which other servers are asked.
//! [`serve_udp`] and [`serve_tcp`] do the I/O.

mod answer;
mod forward;
mod resolver;

pub use answer::{Known, Transport, answer};
pub use forward::servers;
pub use resolver::{Admission, Admits, Asker, Mode, Resolver, ResolvesHere};

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sidetrack_core::names::NameTable;
use sidetrack_core::time::Instant;
use sidetrack_sys::udp;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The port of DNS (RFC 1035 section 4.2).
pub const PORT: u16 = 53;

/// The table of names, shared with the code that maps addresses back to names.
pub type SharedNames = Arc<Mutex<NameTable>>;

/// Largest query over UDP, bytes. Real queries have a few dozen.
const MAX_DATAGRAM: usize = 4096;
/// Most queries on one TCP connection.
const MAX_QUESTIONS: usize = 1000;
/// Most queries that are answered at the same time. Further ones wait in the socket.
const MAX_WAITING: usize = 512;
/// How long a TCP connection may be idle (RFC 7766 section 6.2.3 recommends seconds).
const TCP_IDLE: Duration = Duration::from_secs(10);
/// Consecutive socket errors after which the socket counts as broken. Single errors are ICMP errors for earlier
/// answers.
const MAX_ERRORS: u32 = 100;

/// Answers queries that arrive on a socket of [`udp::bind`], each from the address it was sent to, while the
/// future is polled. `now` is the clock that ages names; all users of the table share it.
///
/// # Errors
/// Fails if the socket cannot be watched, or fails a hundred times in a row.
pub async fn serve_udp(
    socket: UdpSocket,
    resolver: Arc<Resolver>,
    now: impl Fn() -> Instant,
) -> io::Result<()> {
    let socket = Arc::new(tokio::net::UdpSocket::from_std(socket)?);
    let mut buffer = vec![0; MAX_DATAGRAM];
    let mut errors = 0;
    let mut waiting = JoinSet::new();
    loop {
        // Collect finished answers. At the limit, wait for one: further queries stay in the socket's buffer.
        while waiting.len() >= MAX_WAITING || waiting.try_join_next().is_some() {
            if waiting.len() >= MAX_WAITING {
                waiting.join_next().await;
            }
        }
        let received = socket.async_io(Interest::READABLE, || udp::receive(&socket, &mut buffer)).await;
        let datagram = match received {
            Ok(datagram) => datagram,
            Err(error) if errors >= MAX_ERRORS => return Err(error),
            Err(_) => {
                errors += 1;
                continue;
            }
        };
        errors = 0;
        let question = buffer.get(..datagram.len).unwrap_or_default().to_vec();
        let (socket, resolver, now) = (Arc::clone(&socket), Arc::clone(&resolver), now());
        waiting.spawn(async move {
            let client = sidetrack_sys::sockopt::canonical(datagram.from);
            let asker = Some((client, SocketAddr::new(datagram.to.to_canonical(), PORT)));
            if let Some(reply) = resolver.answer_to(&question, Transport::Udp, now, asker).await {
                // If the send buffer is full or the client is gone, the answer is lost. A client repeats its
                // query after a loss.
                let _ = udp::send(&socket, &reply, datagram.from, datagram.to);
            }
        });
    }
}

/// Answers queries on one TCP connection (RFC 7766) until the peer closes it, is idle for ten seconds or has
/// sent a thousand queries.
///
/// # Errors
/// Fails if the connection breaks. A malformed query is not an error.
pub async fn serve_tcp(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    resolver: &Resolver,
    now: impl Fn() -> Instant,
) -> io::Result<()> {
    let mut question = Vec::new();
    for _ in 0..MAX_QUESTIONS {
        match timeout(TCP_IDLE, read_question(&mut stream, &mut question)).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) | Err(_) => break,
            Ok(Err(error)) => return Err(error),
        }
        let Some(reply) = resolver.answer(&question, Transport::Tcp, now()).await else { break };
        let Ok(len) = u16::try_from(reply.len()) else { break };
        // Length and message in one segment (RFC 7766 section 8).
        let framed = [&len.to_be_bytes()[..], &reply].concat();
        match timeout(TCP_IDLE, stream.write_all(&framed)).await {
            Ok(written) => written?,
            Err(_) => break,
        }
    }
    stream.shutdown().await
}

/// Reads one framed message; false at the end of the stream.
async fn read_question(stream: &mut (impl AsyncRead + Unpin), question: &mut Vec<u8>) -> io::Result<bool> {
    let mut len = [0; 2];
    match stream.read_exact(&mut len).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        Err(error) => return Err(error),
    }
    question.resize(usize::from(u16::from_be_bytes(len)), 0);
    match stream.read_exact(question).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
