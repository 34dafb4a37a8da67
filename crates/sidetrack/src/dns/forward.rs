//! Forwards queries unchanged to the host's own DNS servers (RFC 1035 Sec. 4.2, RFC 5452).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use sidetrack_sys::random;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, UdpSocket};
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

/// A name server, and the mark of our packets to it.
type Server = (SocketAddr, Option<u32>);

/// Returns the name servers in a resolv.conf(5).
pub fn servers(resolv_conf: &str) -> Vec<SocketAddr> {
    let mut servers = listed_servers(resolv_conf);
    // The default of resolv.conf(5).
    if servers.is_empty() {
        servers.push((Ipv4Addr::LOCALHOST, super::PORT).into());
    }
    servers
}

/// As [`servers`], without the default.
pub fn listed_servers(resolv_conf: &str) -> Vec<SocketAddr> {
    let addresses = resolv_conf.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()).flatten()?.parse().ok()
    });
    addresses.map(|address: IpAddr| SocketAddr::new(address, super::PORT)).take(SERVERS_MAX).collect()
}

/// Returns the first answer of one of `servers`, with the id of the query. `None` if no answer comes in time.
pub(super) async fn ask(servers: &[SocketAddr], question: &[u8], transport: Transport) -> Option<Vec<u8>> {
    let asked = Message::from_vec(question).ok()?;
    for server in servers.iter().cycle().take(servers.len() * ROUNDS) {
        // Use a new random id: an attacker who knows the command's id must not be able to forge an answer.
        let id = random::bytes::<2>();
        let ours = with_id(question, id);
        let answered = match transport {
            Transport::Udp => timeout(PATIENCE, by_datagram((*server, None), &ours, &asked, id)).await,
            Transport::Tcp => timeout(PATIENCE, by_stream((*server, None), &ours)).await,
        };
        let Ok(Ok(answer)) = answered else { continue };
        if fits(&answer, &asked, id) {
            return Some(with_id(&answer, question.get(..2)?.try_into().ok()?));
        }
    }
    None
}

/// Asks `servers` in turn, beginning with number `first`, and returns the first answer that is not a failure, its length, and the
/// number of its server. A truncated answer is fetched again over TCP. `mark`: for our own packets. `None` if all fail, or none
/// answers in time.
pub(super) async fn fetch(
    servers: &[SocketAddr],
    first: usize,
    question: &Message,
    mark: Option<u32>,
) -> Option<(Message, usize, usize)> {
    let bytes = question.to_vec().ok()?;
    for turn in 0..servers.len() * ROUNDS {
        let number = (first + turn) % servers.len();
        let Some(server) = servers.get(number) else { break };
        let Ok(Some((answer, length))) = timeout(PATIENCE, one((*server, mark), &bytes, question)).await
        else {
            continue;
        };
        // Another server may know better.
        let code = answer.metadata.response_code;
        if matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
            return Some((answer, length, number));
        }
    }
    None
}

/// Asks one server.
async fn one(server: Server, question: &[u8], asked: &Message) -> Option<(Message, usize)> {
    let id = random::bytes::<2>();
    let ours = with_id(question, id);
    let bytes = by_datagram(server, &ours, asked, id).await.ok()?;
    let answer = Message::from_vec(&bytes).ok()?;
    if !answer.metadata.truncation {
        return Some((answer, bytes.len()));
    }
    let bytes = by_stream(server, &ours).await.ok().filter(|bytes| fits(bytes, asked, id))?;
    Some((Message::from_vec(&bytes).ok()?, bytes.len()))
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

/// Marks our own packets, so that no listener captures them. Without the right to set a mark, nothing is captured.
fn set_mark(socket: impl AsFd, mark: Option<u32>) {
    if let Some(mark) = mark {
        let _ = sidetrack_sys::sockopt::set_mark(socket, mark);
    }
}

async fn by_datagram(
    (server, mark): Server,
    question: &[u8],
    asked: &Message,
    id: [u8; 2],
) -> io::Result<Vec<u8>> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    set_mark(&socket, mark);
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

async fn by_stream((server, mark): Server, question: &[u8]) -> io::Result<Vec<u8>> {
    let socket = if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    set_mark(&socket, mark);
    let mut stream = socket.connect(server).await?;
    let len = u16::try_from(question.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    stream.write_all(&[&len.to_be_bytes()[..], question].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}
