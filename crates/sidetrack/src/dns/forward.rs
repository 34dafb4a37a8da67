//! Questions that the host's own servers answer, passed on as they are (RFC 1035 Sec. 4.2, RFC 5452).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use hickory_proto::op::Message;
use sidetrack_sys::random;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::answer::Transport;

/// Servers that are asked, as resolv.conf(5) has it (`MAXNS`).
const SERVERS_MAX: usize = 3;
/// How often all of them are asked.
const ROUNDS: usize = 2;
/// How long one of them may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest answer over UDP.
const MAX_DATAGRAM: usize = 65_535;

/// The name servers of a resolv.conf(5).
pub fn servers(resolv_conf: &str) -> Vec<SocketAddr> {
    let addresses = resolv_conf.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()).flatten()?.parse().ok()
    });
    let mut servers: Vec<_> =
        addresses.map(|address: IpAddr| SocketAddr::new(address, super::PORT)).take(SERVERS_MAX).collect();
    // What a resolver without any asks.
    if servers.is_empty() {
        servers.push((Ipv4Addr::LOCALHOST, super::PORT).into());
    }
    servers
}

/// The first answer of one of `servers`, with the id of the question; `None` if none comes in time.
pub(super) async fn ask(servers: &[SocketAddr], question: &[u8], transport: Transport) -> Option<Vec<u8>> {
    let asked = Message::from_vec(question).ok()?;
    for server in servers.iter().cycle().take(servers.len() * ROUNDS) {
        // An id of our own: who guesses the command's must not be able to answer for the server.
        let id = random::bytes::<2>();
        let ours = with_id(question, id);
        let answered = match transport {
            Transport::Udp => timeout(PATIENCE, by_datagram(*server, &ours, &asked, id)).await,
            Transport::Tcp => timeout(PATIENCE, by_stream(*server, &ours)).await,
        };
        let Ok(Ok(answer)) = answered else { continue };
        if fits(&answer, &asked, id) {
            return Some(with_id(&answer, question.get(..2)?.try_into().ok()?));
        }
    }
    None
}

fn with_id(message: &[u8], id: [u8; 2]) -> Vec<u8> {
    id.into_iter().chain(message.iter().skip(2).copied()).collect()
}

/// Whether it answers this question.
fn fits(answer: &[u8], asked: &Message, id: [u8; 2]) -> bool {
    answer.get(..2) == Some(&id)
        && Message::from_vec(answer).is_ok_and(|answer| {
            answer.metadata.message_type == hickory_proto::op::MessageType::Response
                && answer.queries == asked.queries
        })
}

async fn by_datagram(
    server: SocketAddr,
    question: &[u8],
    asked: &Message,
    id: [u8; 2],
) -> io::Result<Vec<u8>> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut buffer = vec![0; MAX_DATAGRAM];
    // What does not fit may be forged or late: the right one may follow. The caller's patience bounds it.
    loop {
        let len = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..len).unwrap_or_default();
        if fits(answer, asked, id) {
            return Ok(answer.to_vec());
        }
    }
}

async fn by_stream(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let len = u16::try_from(question.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    stream.write_all(&[&len.to_be_bytes()[..], question].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}
