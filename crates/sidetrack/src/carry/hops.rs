//! Carriers with hops. The handshakes run one after the other on one socket, each inside the tunnel of the one
//! before, from the last hop of TLS or HTTP/3 on: the way to such a hop may be shared by many flows. Each hop's opening is sent as initial data of the hop before it where the protocol allows. So the
//! openings of a chain of SOCKS6 hops and the client's first bytes leave in one write.

use super::direct::Wishes;
use super::gate;
use super::tls::{self, Tls};
use super::{Carried, Failure, FirstBytes, Order, Stream, Wire, h2, h3, hop_name, resolve};
use crate::live::{self, Clock};
use crate::reactor::TcpStream;
use sidetrack_core::carrier::{Hop, HopProtocol};
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::hold::Answer;
use sidetrack_core::http::connect;
use sidetrack_core::socks::address::UNSPECIFIED;
use sidetrack_core::socks::v6::{Metadata, StackOption};
use sidetrack_core::socks::{Command, client as socks};
use sidetrack_core::socks::{v5, v6};
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt};

/// Most bytes of the client that travel with a request (the SOCKS6 draft's limit for initial data).
pub const INITIAL_DATA_MAX: usize = 1 << 14;

/// The request to one proxy.
#[derive(Debug)]
pub struct Request<'a> {
    /// The proxy.
    pub hop: &'a Hop,
    /// What to ask the proxy for: CONNECT, or UDP ASSOCIATE, which is CONNECT-UDP for a proxy of HTTP.
    pub command: Command,
    /// The destination for the proxy to connect to, or of all datagrams. UDP ASSOCIATE of SOCKS: zeros, as the address of the
    /// datagrams is not known yet.
    pub destination: Destination,
    /// Metadata for the proxy (SOCKS6).
    pub metadata: Vec<Metadata>,
    /// Options for the proxy's own socket (SOCKS6).
    pub stack: &'a [StackOption],
    /// The first bytes for the destination, sent as early as the protocol allows.
    pub initial: Vec<u8>,
}

/// Sends the request to the proxy at the other end of a connection, and waits for its answer. Returns the bytes
/// after the answer.
///
/// # Errors
/// Fails if the proxy refuses, breaks its protocol or disconnects.
pub async fn ask(stream: &mut TcpStream, request: Request<'_>) -> Result<Vec<u8>, Failure> {
    let clock = Clock::start();
    let machine = Machine::new(request, clock.now());
    Ok(shake(stream, machine, Vec::new(), &clock).await?.leftover)
}

/// The state machine for one hop.
enum Machine {
    Socks(socks::Client),
    /// With the bytes to send once the tunnel is established.
    Http(Box<connect::Client>, Vec<u8>),
}

/// The next step of a machine.
enum Step {
    Send(Vec<u8>),
    Connected { bound: Option<Destination>, stack: Vec<StackOption>, leftover: Vec<u8>, then: Vec<u8> },
    Failed(Failure),
}

impl Machine {
    /// Creates the machine that asks a hop for a destination, and sends first bytes as early as the protocol
    /// allows.
    fn new(request: Request<'_>, now: Instant) -> Self {
        let Request { hop, command, destination, metadata, stack, initial } = request;
        let credentials = hop.credentials.clone();
        // The flow's own deadline ends the handshakes; this time-out is never reached.
        let timeout = Duration::from_secs(3600);
        match hop.protocol {
            HopProtocol::Socks5 => {
                let config = v5::ClientConfig {
                    command,
                    destination,
                    credentials,
                    optimistic: hop.optimistic,
                    initial_data: initial,
                    handshake_timeout: timeout,
                };
                Self::Socks(socks::Client::V5(Box::new(v5::Client::new(config, now))))
            }
            HopProtocol::Socks6(dialect) => {
                let config = v6::ClientConfig {
                    command: match command {
                        Command::UdpAssociate => v6::ClientCommand::UdpAssociate,
                        _ => v6::ClientCommand::Connect(destination),
                    },
                    session: v6::SessionUse::None,
                    dialect,
                    credentials,
                    metadata,
                    stack: stack.to_vec(),
                    initial_data: initial,
                    handshake_timeout: timeout,
                };
                Self::Socks(socks::Client::V6(Box::new(v6::Client::new(config, now))))
            }
            HopProtocol::Http | HopProtocol::Https | HopProtocol::Http3 => {
                let (early, late) =
                    if hop.optimistic { (initial, Vec::new()) } else { (Vec::new(), initial) };
                let kind = match command {
                    Command::UdpAssociate => connect::Kind::Datagrams,
                    _ => connect::Kind::Bytes,
                };
                let proxy = hop.address.clone();
                let initial_data = early;
                let config = connect::Config { kind, proxy, destination, credentials, initial_data, timeout };
                Self::Http(Box::new(connect::Client::new(config, now)), late)
            }
        }
    }

    fn bytes(&mut self, now: Instant, bytes: &[u8]) {
        match self {
            Self::Socks(client) => client.handle(now, socks::Input::Bytes(bytes)),
            Self::Http(client, _) => client.handle(now, connect::Input::Bytes(bytes)),
        }
    }

    fn eof(&mut self, now: Instant) {
        match self {
            Self::Socks(client) => client.handle(now, socks::Input::Eof),
            Self::Http(client, _) => client.handle(now, connect::Input::End),
        }
    }

    fn poll(&mut self) -> Option<Step> {
        Some(match self {
            Self::Socks(client) => match client.poll()? {
                socks::Output::Send(bytes) => Step::Send(bytes),
                socks::Output::Connected(connected) => Step::Connected {
                    bound: Some(connected.bound),
                    stack: connected.stack,
                    leftover: connected.leftover,
                    then: Vec::new(),
                },
                socks::Output::Failed { reason, detail } => {
                    Step::Failed(Failure::new(reason, detail).telling(client.told()))
                }
            },
            Self::Http(client, then) => match client.poll()? {
                connect::Output::Send(bytes) => Step::Send(bytes),
                connect::Output::Connected { leftover } => {
                    Step::Connected { bound: None, stack: Vec::new(), leftover, then: std::mem::take(then) }
                }
                connect::Output::Failed { reason, detail } => {
                    Step::Failed(Failure::new(reason, detail).telling(client.told()))
                }
            },
        })
    }
}

/// Creates the machines of these hops, from the last one to the first, each with the opening of the next as its initial data.
/// Returns them in order, with the bytes that open the first.
fn machines(
    order: &Order<'_>,
    (hops, range): (&[Hop], Range<usize>),
    (command, destination): (Command, &Destination),
    first: &[u8],
    now: Instant,
) -> Result<(Vec<Machine>, Vec<u8>), Failure> {
    let mut machines = Vec::with_capacity(range.len());
    let mut initial = first.to_vec();
    let end = range.end;
    for (index, hop) in hops.iter().enumerate().take(end).skip(range.start).rev() {
        let is_last = index + 1 == end;
        let to = if is_last { destination } else { &hops[index + 1].address };
        let own = order.carry.metadata.iter();
        let own = own.map(|(key, value)| Metadata { key: *key, value: value.clone() });
        let metadata = order.metadata.iter().cloned().chain(own).collect();
        let command = if is_last { command } else { Command::Connect };
        let request =
            Request { hop, command, destination: to.clone(), metadata, stack: order.stack, initial };
        let mut machine = Machine::new(request, now);
        initial = match machine.poll() {
            Some(Step::Send(opening)) => opening,
            Some(Step::Failed(failure)) => return Err(at(failure, index, hops)),
            Some(Step::Connected { .. }) | None => Vec::new(),
        };
        machines.push(machine);
    }
    machines.reverse();
    Ok((machines, initial))
}

fn at(failure: Failure, index: usize, hops: &[Hop]) -> Failure {
    Failure { detail: format!("{}: {}", hop_name(index, hops), failure.detail), ..failure }
}

/// The failure of a connection to the first hop: what it says is not about the destination, so the application is told that
/// no route leads there.
fn out_of_reach(failure: Failure) -> Failure {
    let is_late = failure.reason == EndReason::ConnectTimeout;
    failure.telling(Some(if is_late { Answer::Silent } else { Answer::Net }))
}

fn broken(error: &io::Error, step: &str) -> Failure {
    let reason = match error.kind() {
        io::ErrorKind::ConnectionRefused => EndReason::Refused,
        io::ErrorKind::TimedOut => EndReason::ConnectTimeout,
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => EndReason::Unreachable,
        _ => EndReason::HopFailed,
    };
    Failure::new(reason, format!("{step}: {error}")).telling(Some(Answer::Net))
}

/// Sets up the path through `hops`.
pub(super) async fn carry(
    order: &Order<'_>,
    hops: &[Hop],
    destination: &Destination,
    first: &mut impl FirstBytes,
) -> Result<Carried, Failure> {
    ask_all(order, (hops, hops.len()), (Command::Connect, destination), first).await
}

/// Asks the hop with this index for UDP ASSOCIATE, through those before it. The connection is then for this alone.
pub(super) async fn associate(order: &Order<'_>, hops: &[Hop], index: usize) -> Result<Carried, Failure> {
    ask_all(order, (hops, index + 1), (Command::UdpAssociate, &UNSPECIFIED), &mut Nothing).await
}

/// Asks the hop with this index, of kind `http`, for a tunnel of datagrams to this destination, through those before it.
pub(super) async fn connect_udp(
    order: &Order<'_>,
    hops: &[Hop],
    index: usize,
    destination: &Destination,
) -> Result<Carried, Failure> {
    ask_all(order, (hops, index + 1), (Command::UdpAssociate, destination), &mut Nothing).await
}

/// The first bytes of a connection that has none.
pub(super) struct Nothing;

impl FirstBytes for Nothing {
    fn held(&mut self) -> &[u8] {
        &[]
    }

    fn poll_more(&mut self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

/// Asks the hops one after the other. The last hop of TLS or of HTTP/3 is where the stream begins: what is before it leads there. A
/// request that a shared connection has not processed is sent again, on another one.
async fn ask_all(
    order: &Order<'_>,
    (hops, count): (&[Hop], usize),
    what: (Command, &Destination),
    first: &mut impl FirstBytes,
) -> Result<Carried, Failure> {
    let from = hops.iter().take(count).rposition(|hop| hop.protocol.is_encrypted()).unwrap_or(0);
    let is_datagrams = what.0 == Command::UdpAssociate && from + 1 == count;
    let kind = if is_datagrams { connect::Kind::Datagrams } else { connect::Kind::Bytes };
    for _ in 0..REPEATS_MAX {
        let (stream, trial) = entry(order, (hops, from), kind).await?;
        let failure = match ask_from(stream, order, (hops, from..count), what, first).await {
            Ok(carried) => return Ok(carried),
            Err(failure) => failure,
        };
        match trial.take() {
            None => return Err(failure),
            Some(ended) if ended.is_repeatable => {
                tracing::debug!(why = ended.why, "a hop has not processed a request: it is sent again");
            }
            Some(ended) => return Err(unanswered(from, hops, &ended.why)),
        }
    }
    Err(unanswered(from, hops, "it processes no request"))
}

/// Most connections on which a request is tried.
const REPEATS_MAX: usize = 3;

fn unanswered(index: usize, hops: &[Hop], why: &str) -> Failure {
    at(Failure::new(EndReason::HopFailed, why).telling(Some(Answer::Net)), index, hops)
}

/// Asks these hops, on a connection to the first of them.
async fn ask_from(
    mut stream: Stream,
    order: &Order<'_>,
    (hops, range): (&[Hop], Range<usize>),
    what: (Command, &Destination),
    first: &mut impl FirstBytes,
) -> Result<Carried, Failure> {
    let (from, clock) = (range.start, Clock::start());
    // Read the client's bytes only now: those that came while we dialled travel with the request.
    let held = first.held();
    let sent = held.len().min(INITIAL_DATA_MAX);
    let (machines, opening) = machines(order, (hops, range), what, &held[..sent], clock.now())?;
    let written = stream.write_all(&opening).await;
    written.map_err(|error| at(broken(&error, "sending the request"), from, hops))?;
    let (mut early, mut bound, mut stack) = (Vec::new(), None, Vec::new());
    // Bytes after a hop's answer belong to the next hop's handshake, and after the last answer to the server.
    for (index, machine) in machines.into_iter().enumerate() {
        let done = shake(&mut stream, machine, early, &clock).await;
        let done = done.map_err(|failure| at(failure, from + index, hops))?;
        order.done(live::Step::HopAnswered(number(from + index)));
        (early, bound, stack) = (done.leftover, done.bound, done.stack);
    }
    Ok(Carried { stream, early, bound, sent, stack, taken: None, leads_to: None, spread: None })
}

/// Returns a connection to the hop with this index: the first one, or one of TLS or HTTP/3.
async fn entry(
    order: &Order<'_>,
    (hops, index): (&[Hop], usize),
    kind: connect::Kind,
) -> Result<(Stream, h2::Trial), Failure> {
    match hops[index].protocol {
        HopProtocol::Https => h2::dial(order, (hops, index), kind).await,
        HopProtocol::Http3 => {
            let dialled = h3::dial(order, &hops[..index], &hops[index]).await;
            let stream = dialled.map_err(|failure| at(out_of_reach(failure), index, hops))?;
            order.done(live::Step::HopSecured(number(index)));
            Ok((stream, h2::Trial::default()))
        }
        _ => Ok((first_hop(order, hops).await?.into(), h2::Trial::default())),
    }
}

/// Dials the first hop.
async fn first_hop(order: &Order<'_>, hops: &[Hop]) -> Result<TcpStream, Failure> {
    let named = |failure: Failure| at(out_of_reach(failure), 0, hops);
    let hop = &hops[0];
    let addresses = resolve(&hop.address).await.map_err(named)?;
    if hop.address.socket_addr().is_none() {
        order.resolved_to(&addresses);
    }
    let addresses = gate::configured(addresses);
    let wishes = Wishes { tfo: hop.tfo, speaks_first: true, mptcp: hop.mptcp, ..Wishes::default() };
    let (stream, _) = order.dialing.race(&addresses, wishes).await.map_err(named)?;
    order.connected(&stream, &addresses);
    Ok(stream)
}

fn number(index: usize) -> u8 {
    u8::try_from(index).unwrap_or(u8::MAX)
}

/// A path to a hop, before anything is said to it.
type Way<'a> = Pin<Box<dyn Future<Output = Result<Carried, Failure>> + 'a>>;

/// Makes TLS with the hop with this index, through those before it. It then speaks one of these protocols (ALPN).
pub(super) async fn secured(
    order: &Order<'_>,
    (hops, index): (&[Hop], usize),
    protocols: &[&[u8]],
) -> Result<Tls, Failure> {
    let hop = &hops[index];
    let (stream, early) = if index == 0 {
        (first_hop(order, hops).await?.into(), Vec::new())
    } else {
        let mut nothing = Nothing;
        // Boxed: another hop of TLS may be among those before this one.
        let way: Way<'_> =
            Box::pin(ask_all(order, (hops, index), (Command::Connect, &hop.address), &mut nothing));
        let carried = way.await?;
        (carried.stream, carried.early)
    };
    let secured = tls::with_hop(stream, early, hop, protocols).await;
    let secured = secured.map_err(|failure| at(out_of_reach(failure), index, hops))?;
    order.done(live::Step::HopSecured(number(index)));
    Ok(secured)
}

struct Shaken {
    leftover: Vec<u8>,
    bound: Option<Destination>,
    stack: Vec<StackOption>,
}

/// Runs one machine to its end, beginning with bytes that were already read.
async fn shake(
    stream: &mut (impl Wire + AsyncWrite),
    mut machine: Machine,
    came: Vec<u8>,
    clock: &Clock,
) -> Result<Shaken, Failure> {
    if !came.is_empty() {
        machine.bytes(clock.now(), &came);
    }
    let mut has_read = !came.is_empty();
    loop {
        let mut is_part = has_read;
        while let Some(step) = machine.poll() {
            is_part = false;
            match step {
                Step::Send(bytes) => {
                    stream.write_all(&bytes).await.map_err(|error| broken(&error, "sending"))?;
                }
                Step::Connected { bound, stack, leftover, then } => {
                    stream.write_all(&then).await.map_err(|error| broken(&error, "sending"))?;
                    return Ok(Shaken { leftover, bound, stack });
                }
                Step::Failed(failure) => return Err(failure),
            }
        }
        if is_part {
            // The proxy answers in pieces. It may hold one back until the one before is acknowledged (Nagle, RFC
            // 896).
            let _ = stream.socket().map(sockopt::set_tcp_ack_at_once);
        }
        has_read = true;
        let read = poll_fn(|cx| {
            // The buffer is in this closure, so that it is on the stack and not part of each flow's future.
            let mut buffer = [0; 2048];
            let n = ready!(Wire::poll_recv(stream, cx, &mut buffer))?;
            match &buffer[..n] {
                [] => machine.eof(clock.now()),
                bytes => machine.bytes(clock.now(), bytes),
            }
            Poll::Ready(io::Result::Ok(()))
        });
        match read.await {
            Ok(()) => {}
            // A proxy that closes with our initial data unread sends a reset. The machine knows what an end
            // means here.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => machine.eof(clock.now()),
            Err(error) => return Err(broken(&error, "waiting for the answer")),
        }
    }
}
