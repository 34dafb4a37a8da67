//! The resolver of `sidetrack run`: every name gets an address of 198.18.0.0/15 that stands for it, so that the
//! connection which follows brings the name back and a proxy, not this host, resolves it.
//!
//! [`answer`] is the whole of it, a function of bytes; [`serve_udp`] and [`serve_tcp`] move them.

mod answer;

pub use answer::{Transport, answer};

use std::io;
use std::net::UdpSocket;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sidetrack_core::names::NameTable;
use sidetrack_core::time::Instant;
use sidetrack_sys::udp;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::time::timeout;

/// The port of DNS (RFC 1035 section 4.2).
pub const PORT: u16 = 53;

/// The table of names, shared with whoever turns addresses back into names.
pub type SharedNames = Arc<Mutex<NameTable>>;

/// Largest question read over UDP; real ones have a few dozen bytes.
const MAX_DATAGRAM: usize = 4096;
/// Questions answered over one TCP connection.
const MAX_QUESTIONS: usize = 1000;
/// How long a TCP connection may stay silent (RFC 7766 section 6.2.3 wants seconds).
const TCP_IDLE: Duration = Duration::from_secs(10);
/// Socket errors in a row that make the socket count as broken. Single ones are refusals of earlier answers.
const MAX_ERRORS: u32 = 100;

/// Answers questions that arrive on a socket of [`udp::bind`], each from the address it asked, for as long as
/// the future is polled. `now` is the clock that ages names, the same one for all that use the table.
///
/// # Errors
/// If the socket cannot be watched, or fails a hundred times in a row.
pub async fn serve_udp(socket: UdpSocket, names: SharedNames, now: impl Fn() -> Instant) -> io::Result<()> {
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    let mut buffer = vec![0; MAX_DATAGRAM];
    let mut errors = 0;
    loop {
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
        let question = buffer.get(..datagram.len).unwrap_or_default();
        if let Some(reply) = locked_answer(question, Transport::Udp, &names, now()) {
            // A full send buffer or an asker that is gone: it asks again, as it does after any loss.
            let _ = udp::send(&socket, &reply, datagram.from, datagram.to);
        }
    }
}

/// Answers questions on one TCP connection (RFC 7766) until the peer ends it, is silent for ten seconds or has
/// asked a thousand times.
///
/// # Errors
/// If the connection breaks; a peer that sends nonsense is no error.
pub async fn serve_tcp(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    names: SharedNames,
    now: impl Fn() -> Instant,
) -> io::Result<()> {
    let mut question = Vec::new();
    for _ in 0..MAX_QUESTIONS {
        match timeout(TCP_IDLE, read_question(&mut stream, &mut question)).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) | Err(_) => break,
            Ok(Err(error)) => return Err(error),
        }
        let Some(reply) = locked_answer(&question, Transport::Tcp, &names, now()) else { break };
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

fn locked_answer(
    question: &[u8],
    transport: Transport,
    names: &SharedNames,
    now: Instant,
) -> Option<Vec<u8>> {
    // The table holds no invariant across calls that a panic elsewhere could have broken.
    let mut names = names.lock().unwrap_or_else(PoisonError::into_inner);
    answer(question, transport, &mut names, now)
}

#[cfg(test)]
mod tests;
