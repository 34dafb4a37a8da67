//! Forwards queries unchanged to the host's own DNS servers (RFC 1035 Sec. 4.2, RFC 5452).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use hickory_proto::op::Message;
use sidetrack_sys::random;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::answer::Transport;

/// Most servers that are asked, as in resolv.conf(5) (`MAXNS`).
const SERVERS_MAX: usize = 3;
/// How many times the list of servers is tried.
const ROUNDS: usize = 2;
/// How long one server may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest answer over UDP.
const MAX_DATAGRAM: usize = 65_535;

/// Returns the name servers in a resolv.conf(5).
pub fn servers(resolv_conf: &str) -> Vec<SocketAddr> {
    let addresses = resolv_conf.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()).flatten()?.parse().ok()
    });
    let mut servers: Vec<_> =
        addresses.map(|address: IpAddr| SocketAddr::new(address, super::PORT)).take(SERVERS_MAX).collect();
    // The default of resolv.conf(5).
    if servers.is_empty() {
        servers.push((Ipv4Addr::LOCALHOST, super::PORT).into());
    }
    servers
}

/// Returns the first answer of one of `servers`, with the id of the query. `None` if no answer comes in time.
pub(super) async fn ask(servers: &[SocketAddr], question: &[u8], transport: Transport) -> Option<Vec<u8>> {
    let asked = Message::from_vec(question).ok()?;
    for server in servers.iter().cycle().take(servers.len() * ROUNDS) {
        // Use a new random id: an attacker who knows the command's id must not be able to forge an answer.
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

/// Whether this is an answer to the query.
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
    // Another message may be forged or late, so wait for the right one. The caller limits the time.
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
