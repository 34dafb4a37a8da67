//! Clients: flows of random kinds through every listener and route, and datagrams.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Result;
use socket2::{Domain, Socket, Type};

use super::routes::{self, DATAGRAMS, OF_GATEWAY, Route};
use crate::experiments::echo::Flow;
use crate::launch;
use crate::link::random::Random;
use crate::topology::Node;

/// The server, as clients ask for it.
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 2, 2);
/// The client's host, and the gateway as the server sees it.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 1, 1);
const GATEWAY_OUT: Ipv4Addr = Ipv4Addr::new(10, 77, 2, 1);
/// The gateway, as the client sees it.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 1, 2);
/// The packet engine's address, and the server behind the shunt and in the network of `run`.
pub(super) const ENGINE: Ipv4Addr = Ipv4Addr::new(10, 77, 5, 2);
pub(super) const BEHIND_SHUNT: Ipv4Addr = Ipv4Addr::new(10, 77, 8, 2);
pub(super) const BEHIND_RUN: Ipv4Addr = Ipv4Addr::new(10, 77, 9, 2);
/// The server behind the packet engine.
pub(super) const BEHIND_ENGINE: Ipv4Addr = Ipv4Addr::new(10, 77, 6, 2);
/// Longest time until a flow is open. It is above that of the gateway's own limits.
const OPEN_WITHIN: Duration = Duration::from_secs(30);
/// A datagram without an answer within this time is lost.
const LOST_AFTER: Duration = Duration::from_millis(500);
/// Time between two datagrams.
const PACE: Duration = Duration::from_millis(10);

/// How a flow comes to a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) enum Entry {
    /// The client's host asks for the server, and the gateway is its router.
    Tproxy,
    /// A program of the gateway asks for the server.
    Redirect,
    /// The client asks for a port of the gateway.
    Reverse,
    /// The client speaks SOCKS5.
    Socks,
    /// The client speaks HTTP CONNECT.
    Http,
    /// The client asks for an address of the packet engine.
    Engine,
    /// The client asks for a server behind a firewall with a shunt.
    Shunt,
    /// A command of `sidetrack run` asks for a server.
    Run,
}

impl Entry {
    /// Those of the client's host.
    pub(super) const OF_CLIENT: [Self; 6] =
        [Self::Tproxy, Self::Reverse, Self::Socks, Self::Http, Self::Engine, Self::Shunt];
    /// All of them, in the order of tables.
    pub(super) const ALL: [Self; 8] = [
        Self::Tproxy,
        Self::Redirect,
        Self::Reverse,
        Self::Socks,
        Self::Http,
        Self::Engine,
        Self::Shunt,
        Self::Run,
    ];

    /// Whether it is a listener of the gateway.
    pub(super) const fn is_of_gateway(self) -> bool {
        !matches!(self, Self::Engine | Self::Shunt | Self::Run)
    }

    /// Returns its name in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Tproxy => "tproxy",
            Self::Redirect => "redirect",
            Self::Reverse => "reverse",
            Self::Socks => "socks",
            Self::Http => "http",
            Self::Engine => "engine",
            Self::Shunt => "shunt",
            Self::Run => "run",
        }
    }

    /// The client's address.
    const fn host(self) -> Ipv4Addr {
        match self {
            Self::Redirect => GATEWAY_OUT,
            Self::Tproxy | Self::Reverse | Self::Socks | Self::Http => CLIENT,
            Self::Engine => Ipv4Addr::new(10, 77, 5, 1),
            Self::Shunt => Ipv4Addr::new(10, 77, 7, 1),
            Self::Run => Ipv4Addr::new(10, 77, 9, 1),
        }
    }

    /// The client's address as records have it: addresses in the network of `run` mean nothing outside.
    fn recorded(self, own: SocketAddr) -> SocketAddr {
        if self == Self::Run { (Ipv4Addr::LOCALHOST, own.port()).into() } else { own }
    }

    /// Connects this socket, so that it leads to this port of the server.
    fn connect(self, socket: Socket, port: u16) -> io::Result<TcpStream> {
        let to = match self {
            Self::Tproxy | Self::Redirect => (SERVER, port),
            Self::Reverse => (GATEWAY, port + OF_GATEWAY),
            Self::Socks => (GATEWAY, 1080),
            Self::Http => (GATEWAY, 3128),
            Self::Engine => (ENGINE, port),
            Self::Shunt => (BEHIND_SHUNT, port),
            Self::Run => (BEHIND_RUN, port),
        };
        socket.connect_timeout(&SocketAddr::from(to).into(), OPEN_WITHIN)?;
        let mut stream = TcpStream::from(socket);
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(OPEN_WITHIN))?;
        match self {
            Self::Socks => ask_socks(&mut stream, port)?,
            Self::Http => ask_http(&mut stream, port)?,
            Self::Tproxy | Self::Redirect | Self::Reverse | Self::Engine | Self::Shunt | Self::Run => {}
        }
        Ok(stream)
    }
}

/// RFC 1928 Sec. 3 and 4.
fn ask_socks(stream: &mut TcpStream, port: u16) -> io::Result<()> {
    let mut request = vec![5, 1, 0, 5, 1, 0, 1];
    request.extend(SERVER.octets());
    request.extend(port.to_be_bytes());
    stream.write_all(&request)?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    match answer[3] {
        0 => Ok(()),
        code => Err(io::Error::other(format!("SOCKS answers {code}"))),
    }
}

/// RFC 9110 Sec. 9.3.6.
fn ask_http(stream: &mut TcpStream, port: u16) -> io::Result<()> {
    write!(stream, "CONNECT {SERVER}:{port} HTTP/1.1\r\nHost: {SERVER}:{port}\r\n\r\n")?;
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.extend(byte);
    }
    let line =
        String::from_utf8_lossy(head.split(|byte| *byte == b'\r').next().unwrap_or_default()).into_owned();
    if line.split(' ').nth(1) == Some("200") { Ok(()) } else { Err(io::Error::other(line)) }
}

/// A flow that is over.
#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct Done {
    /// How it came in.
    pub entry: Entry,
    /// The server's port: its route.
    pub port: u16,
    /// The client's address, as records have it. It is chosen before the connection begins, so that records of those that fail can be found.
    pub own: SocketAddr,
    /// When it began and ended, from the start of the experiment.
    pub begun: Duration,
    /// When it ended.
    pub ended: Duration,
    /// Bytes that came back.
    pub bytes: u64,
    /// Why it was cut.
    pub error: Option<String>,
    /// Whether a byte was wrong.
    pub is_wrong: bool,
}

/// Counts of datagrams.
#[derive(Debug, Clone, Copy, Default, serde::Serialize)]
pub(super) struct Datagrams {
    /// Sent.
    pub sent: u64,
    /// Came back.
    pub came: u64,
    /// Came back changed.
    pub wrong: u64,
}

/// What all clients share.
#[derive(Debug)]
pub(super) struct Traffic {
    begun: Instant,
    stopping: AtomicBool,
    done: Mutex<Vec<Done>>,
    datagrams: Mutex<Datagrams>,
}

impl Traffic {
    /// Begins.
    pub(super) fn new() -> Self {
        let (done, datagrams) = (Mutex::default(), Mutex::default());
        Self { begun: Instant::now(), stopping: AtomicBool::new(false), done, datagrams }
    }

    /// Time since the beginning.
    pub(super) fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Lets all clients end their present flows, and begin no others.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Relaxed);
    }

    /// Whether clients shall end.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    /// Number of flows that are over.
    pub(super) fn count(&self) -> usize {
        self.done.lock().map_or(0, |done| done.len())
    }

    /// All flows, and the datagrams.
    pub(super) fn into_results(self) -> (Vec<Done>, Datagrams) {
        (self.done.into_inner().unwrap_or_default(), self.datagrams.into_inner().unwrap_or_default())
    }

    /// Makes flows in this network until it is told to stop. The calling thread stays there.
    ///
    /// # Errors
    /// The network cannot be entered, or has no socket or port.
    pub(super) fn flows(
        &self,
        netns: &Path,
        entries: &[Entry],
        routes: &[&'static Route],
        seed: u64,
    ) -> Result<()> {
        launch::join_netns(netns)?;
        let mut random = Random::new(seed);
        let mut one_of = |count: usize| (random.bits() % count as u64) as usize;
        while !self.is_stopping() {
            let entry = entries[one_of(entries.len())];
            let routes = routes::of(routes, |other| other == entry);
            let route = routes[one_of(routes.len())];
            let kind = Kind::ALL[one_of(Kind::ALL.len())];
            self.one(entry, route, kind, one_of(kind.most()) + 1)?;
            std::thread::sleep(Duration::from_millis(one_of(50) as u64));
        }
        Ok(())
    }

    /// Makes one flow. The calling thread is in the client's network. Returns whether it ended well.
    ///
    /// # Errors
    /// The host has no socket or no port.
    pub(super) fn one(&self, entry: Entry, route: &Route, kind: Kind, size: usize) -> io::Result<bool> {
        let begun = self.now();
        let mut bytes = 0;
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((entry.host(), 0)).into())?;
        let own = entry.recorded(socket.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?);
        let talk = |bytes: &mut u64| {
            let stream = entry.connect(socket, route.port)?;
            let mut flow = Flow::begin(stream, OPEN_WITHIN)?;
            let talked = self.talk(&mut flow, kind, size);
            *bytes = flow.bytes;
            talked.and_then(|()| flow.finish())
        };
        let result = talk(&mut bytes);
        let is_wrong = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidData);
        let error = result.err().map(|error| error.to_string());
        let is_well = error.is_none();
        let done = Done { entry, port: route.port, own, begun, ended: self.now(), bytes, error, is_wrong };
        if let Ok(mut all) = self.done.lock() {
            all.push(done);
        }
        Ok(is_well)
    }

    fn talk(&self, flow: &mut Flow, kind: Kind, size: usize) -> io::Result<()> {
        match kind {
            Kind::Short | Kind::Bulk => flow.echo(size),
            Kind::Long => {
                for _ in 0..size {
                    if self.is_stopping() {
                        break;
                    }
                    flow.echo(1000)?;
                    std::thread::sleep(Duration::from_millis(20));
                }
                Ok(())
            }
        }
    }

    /// Sends datagrams through both kinds of UDP listeners until it is told to stop.
    ///
    /// # Errors
    /// The host cannot be entered, or has no socket.
    pub(super) fn datagrams(&self, host: &Node) -> Result<()> {
        host.enter(|| {
            let ways = [(SERVER, DATAGRAMS), (GATEWAY, DATAGRAMS + OF_GATEWAY)];
            let mut counts = Datagrams::default();
            let mut sockets = Vec::new();
            for way in ways {
                let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
                socket.connect(way)?;
                socket.set_read_timeout(Some(LOST_AFTER))?;
                sockets.push(socket);
            }
            let (mut number, mut buffer) = (0_u64, [0; 2048]);
            while !self.is_stopping() {
                for socket in &sockets {
                    number += 1;
                    let payload: Vec<u8> = number.to_be_bytes().into_iter().cycle().take(1200).collect();
                    counts.sent += u64::from(socket.send(&payload).is_ok());
                    let until = Instant::now() + LOST_AFTER;
                    while let Ok(length) = socket.recv(&mut buffer) {
                        let came = &buffer[..length];
                        let is_whole = came.len() == 1200 && came.chunks(8).all(|piece| piece == &came[..8]);
                        counts.wrong += u64::from(!is_whole);
                        counts.came += 1;
                        // An earlier one has come late.
                        if came == payload || Instant::now() > until {
                            break;
                        }
                    }
                }
                std::thread::sleep(PACE);
            }
            if let Ok(mut all) = self.datagrams.lock() {
                *all = counts;
            }
            Ok(())
        })
    }
}

/// How a flow behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Some bytes.
    Short,
    /// Many bytes.
    Bulk,
    /// Few bytes for a long time.
    Long,
}

impl Kind {
    /// Half of the flows are short.
    const ALL: [Self; 4] = [Self::Short, Self::Short, Self::Bulk, Self::Long];

    /// Most bytes of a flow, or most pieces of a long one: ten seconds.
    const fn most(self) -> usize {
        match self {
            Self::Short => 64_000,
            Self::Bulk => 4_000_000,
            Self::Long => 500,
        }
    }
}
