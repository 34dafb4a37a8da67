//! The resolvers of `sidetrack run` and of nodes. Each name gets its own address of 198.18.0.0/15. The connection to
//! this address leads back to the name, and a proxy resolves it instead of this host. Names that this host resolves
//! itself are looked up at once, so that the client learns when they do not exist.
//!
//! [`answer()`] works on the table and on bytes only. [`Resolver`] answers a command, [`Gateway`] the clients of a
//! node; they decide which other servers are asked. [`serve_udp`], [`serve_tcp`] and [`serve_streams`] do the I/O.

mod answer;
mod cache;
mod counts;
mod forward;
mod gateway;
mod rates;
mod resolver;

pub use answer::{Known, Transport, answer};
pub use counts::{Counts, Source, Unanswered};
pub use forward::{listed_servers, servers};
pub use gateway::{ASKED_MAX, Gateway, Rules, Standing};
pub use rates::Treated;
pub use resolver::{Admission, Admits, Asker, Mode, Resolver, ResolvesHere};

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sidetrack_core::limit::SourceLimit;
use sidetrack_core::names::NameTable;
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
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

/// Most TCP connections of all clients of a node at a time, and of one client.
pub const STREAMS_MAX: usize = 256;
const STREAMS_PER_CLIENT: u32 = 32;
/// How long to wait if the system has no descriptor for the next connection.
const ACCEPT_REST: Duration = Duration::from_millis(10);

/// Answers queries.
pub trait Answers: Send + Sync + 'static {
    /// Returns the answer to one message, or `None` if it gets none. `now` ages names.
    fn answer_to(
        &self,
        question: &[u8],
        transport: Transport,
        now: Instant,
        asker: Option<Asker>,
    ) -> impl Future<Output = Option<Vec<u8>>> + Send;

    /// Decides how a datagram of this client is treated.
    fn treat(&self, _client: IpAddr) -> Treated {
        Treated::Answered
    }

    /// Whether this client may connect.
    fn may_connect(&self, _client: IpAddr) -> bool {
        true
    }

    /// Is told that a connection was closed because there are too many.
    fn crowded(&self) {}
}

/// Answers queries that arrive on a socket of [`udp::bind`], each from the address it was sent to, while the
/// future is polled. `now` is the clock that ages names; all users of the table share it.
///
/// # Errors
/// Fails if the socket cannot be watched, or fails a hundred times in a row.
pub async fn serve_udp(
    socket: UdpSocket,
    resolver: Arc<impl Answers>,
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
        let question = buffer.get(..datagram.len).unwrap_or_default();
        let client = sidetrack_sys::sockopt::canonical(datagram.from);
        match resolver.treat(client.ip()) {
            Treated::Answered => {}
            Treated::Slowed => {
                if let Some(reply) = answer::by_tcp(question) {
                    let _ = udp::send(&socket, &reply, datagram.from, datagram.to);
                }
                continue;
            }
            Treated::Dropped => continue,
        }
        let question = question.to_vec();
        let (socket, resolver, now) = (Arc::clone(&socket), Arc::clone(&resolver), now());
        waiting.spawn(async move {
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
    stream: impl AsyncRead + AsyncWrite + Unpin,
    resolver: &impl Answers,
    now: impl Fn() -> Instant,
) -> io::Result<()> {
    serve_client(stream, resolver, now, None).await
}

/// Accepts connections on a socket, and answers the queries on them, while the future is polled.
///
/// # Errors
/// Fails if the socket cannot be watched.
pub async fn serve_streams(
    listener: TcpListener,
    resolver: Arc<impl Answers>,
    now: impl Fn() -> Instant + Clone + Send + Sync + 'static,
) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let clients = Arc::new(Mutex::new(SourceLimit::new(STREAMS_PER_CLIENT, STREAMS_MAX)));
    let mut serving = JoinSet::new();
    loop {
        while serving.try_join_next().is_some() {}
        let Ok((stream, peer)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_REST).await;
            continue;
        };
        let peer = sidetrack_sys::sockopt::canonical(peer);
        if !resolver.may_connect(peer.ip()) {
            continue;
        }
        let has_room = serving.len() < STREAMS_MAX && lock(&clients).admit(peer.ip());
        if !has_room {
            resolver.crowded();
            continue;
        }
        let asked = stream.local_addr().map(sidetrack_sys::sockopt::canonical);
        let asker = asked.ok().map(|asked| (peer, asked));
        let (resolver, now, clients) = (resolver.clone(), now.clone(), clients.clone());
        serving.spawn(async move {
            // A connection that breaks concerns its client only.
            let _ = serve_client(stream, &*resolver, now, asker).await;
            lock(&clients).release(peer.ip());
        });
    }
}

async fn serve_client(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    resolver: &impl Answers,
    now: impl Fn() -> Instant,
    asker: Option<Asker>,
) -> io::Result<()> {
    let mut question = Vec::new();
    for _ in 0..MAX_QUESTIONS {
        match timeout(TCP_IDLE, read_question(&mut stream, &mut question)).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) | Err(_) => break,
            Ok(Err(error)) => return Err(error),
        }
        let Some(reply) = resolver.answer_to(&question, Transport::Tcp, now(), asker).await else { break };
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
