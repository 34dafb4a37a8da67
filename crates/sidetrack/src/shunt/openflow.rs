//! The fast path of switches: they connect to us, and we send them their entries by OpenFlow.

use super::{FastPath, Report};
use crate::config::{ShuntSwitch, SwitchMember};
use sidetrack_core::openflow::{
    ControllerConfig, ControllerInput, ControllerOutput, Member, Network, SwitchPorts,
};
use sidetrack_core::shunt::{Cause, Entry, EntryId, PortNumber};
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::monotonic_ns;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Most bytes read at once.
const READ_MAX: usize = 64 << 10;
/// Most bytes that wait to be sent. The connection to a switch that reads no more is closed.
const WAITING_MAX: usize = 16 << 20;
/// How long to wait when the socket is full.
const FULL: Duration = Duration::from_millis(2);
/// How long until the next call is needed when nothing is due.
const NOTHING_DUE: Duration = Duration::from_secs(1);

/// A connection, and the bytes that could not be sent yet.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    from: SocketAddr,
    waiting: VecDeque<u8>,
}

/// A switch: the address it connects from, and its connection.
#[derive(Debug)]
struct Peer {
    /// `None`: any address may connect.
    from: Option<IpAddr>,
    connection: Option<Connection>,
}

/// The fast path: the connections to the switches, and the controllers that speak OpenFlow.
#[derive(Debug)]
pub struct SwitchPath {
    listeners: Vec<TcpListener>,
    peers: Vec<Peer>,
    network: Network,
    clear_at_end: bool,
    reports: VecDeque<Report>,
}

fn now() -> Instant {
    Instant::from_nanos(monotonic_ns())
}

impl SwitchPath {
    /// Listens for the switches.
    ///
    /// # Errors
    /// Returns the address that cannot be listened on, and why.
    pub fn start(switch: &ShuntSwitch) -> io::Result<Self> {
        let listeners: io::Result<Vec<_>> = switch.listen.iter().map(listen).collect();
        let (peers, members) = members(switch);
        Ok(Self {
            listeners: listeners?,
            peers,
            network: Network::new(members, now()),
            clear_at_end: switch.clear_at_end,
            reports: VecDeque::new(),
        })
    }

    /// Returns the addresses it listens on.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    fn tell(&mut self, input: ControllerInput<'_>) {
        self.network.handle(now(), input);
        self.obey();
    }

    /// Tells the controller of one switch.
    fn tell_of(&mut self, at: usize, input: ControllerInput<'_>) {
        self.network.handle_of(now(), at, input);
        self.obey();
    }

    fn obey(&mut self) {
        while let Some((at, output)) = self.network.poll() {
            match output {
                ControllerOutput::Send(bytes) => {
                    let peer = self.peers.get_mut(at);
                    if let Some(connection) = peer.and_then(|peer| peer.connection.as_mut()) {
                        connection.waiting.extend(bytes);
                    }
                }
                ControllerOutput::Close(why) => {
                    // The last message may say why.
                    self.flush(at);
                    self.hang_up(at, &why);
                }
                ControllerOutput::Ready(version, features) => {
                    tracing::info!(
                        switch = self.network.name(at),
                        datapath = format_args!("{:016x}", features.datapath),
                        ?version,
                        "the switch is ready"
                    );
                    self.reports.push_back(Report::Back);
                }
                ControllerOutput::Note(note) => tracing::warn!("{note}"),
                ControllerOutput::Installed(id) => self.reports.push_back(Report::Installed(id)),
                ControllerOutput::Failed(id, why) => self.reports.push_back(Report::Failed(id, why)),
                ControllerOutput::Counted(id, traffic) => {
                    self.reports.push_back(Report::Counted(id, traffic));
                }
                ControllerOutput::Gone(id, cause, traffic) => {
                    self.reports.push_back(Report::Gone(id, cause, traffic));
                }
            }
        }
        (0..self.peers.len()).for_each(|at| self.flush(at));
    }

    fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.peers.iter().filter_map(|peer| peer.connection.as_ref())
    }

    fn hang_up(&mut self, at: usize, why: &str) {
        if let Some(connection) = self.peers.get_mut(at).and_then(|peer| peer.connection.take()) {
            tracing::warn!(switch = %connection.from, "the connection of the switch is closed: {why}");
        }
    }

    /// Handles a connection that ended from outside.
    fn lost(&mut self, at: usize, why: &str) {
        self.hang_up(at, why);
        self.network.handle_of(now(), at, ControllerInput::Disconnected);
    }

    /// Sends waiting bytes, as far as the socket accepts them.
    fn flush(&mut self, at: usize) {
        let connection = self.peers.get_mut(at).and_then(|peer| peer.connection.as_mut());
        if let Some(error) = connection.and_then(|connection| connection.flush().err()) {
            self.lost(at, &error.to_string());
        }
    }

    fn accept(&mut self) {
        let accepted: Vec<_> = self.listeners.iter().filter_map(|listener| listener.accept().ok()).collect();
        for (stream, from) in accepted {
            let fits = |peer: &Peer| peer.from.is_none_or(|only| only == from.ip().to_canonical());
            let Some(at) = self.peers.iter().position(fits) else {
                tracing::warn!(%from, "an address that is not a switch's connected, and was refused");
                continue;
            };
            if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
                continue;
            }
            // A switch connects again when it considers the old connection dead.
            self.hang_up(at, "it has connected again");
            tracing::info!(%from, "a switch has connected");
            let connection = Connection { stream, from, waiting: VecDeque::new() };
            if let Some(peer) = self.peers.get_mut(at) {
                peer.connection = Some(connection);
            }
            self.tell_of(at, ControllerInput::Connected);
        }
    }

    /// Reads what is there, with a limit: entries must not wait for a switch that sends without end.
    fn read(&mut self, at: usize, buffer: &mut [u8]) {
        for _ in 0..16 {
            let peer = self.peers.get_mut(at);
            let Some(connection) = peer.and_then(|peer| peer.connection.as_mut()) else { return };
            match connection.stream.read(buffer) {
                Ok(0) => return self.lost(at, "the switch closed it"),
                Ok(length) => {
                    let bytes = buffer.get(..length).unwrap_or_default();
                    self.tell_of(at, ControllerInput::Bytes(bytes));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.lost(at, &error.to_string()),
            }
        }
    }
}

impl Connection {
    fn flush(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            let (first, _) = self.waiting.as_slices();
            match self.stream.write(first) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(sent) => drop(self.waiting.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.waiting.len() > WAITING_MAX {
            return Err(io::Error::other("the switch takes no more of what it is told"));
        }
        Ok(())
    }
}

/// Returns the switches of a configuration, and what their controllers need to know.
fn members(switch: &ShuntSwitch) -> (Vec<Peer>, Vec<Member>) {
    let (run, master) = (run_number(), switch.master.then(generation));
    let config = |ports: &BTreeMap<PortNumber, SwitchPorts>| ControllerConfig {
        versions: switch.versions.clone(),
        ports: ports.clone(),
        through: BTreeMap::new(),
        run,
        clear: switch.clear_at_start,
        pairs: switch.pairs,
        master,
        shared: switch.shared,
        table: switch.table,
    };
    if switch.members.is_empty() {
        let peer = Peer { from: switch.from, connection: None };
        let member = Member { name: String::new(), config: config(&switch.ports), links: Vec::new() };
        return (vec![peer], vec![member]);
    }
    let one = |member: &SwitchMember| {
        let (name, links) = (member.name.clone(), member.links.clone());
        let peer = Peer { from: Some(member.address), connection: None };
        (peer, Member { name, config: config(&member.ports), links })
    };
    switch.members.iter().map(one).unzip()
}

/// Returns a generation of masters that is newer than those of earlier runs: milliseconds since 1970.
fn generation() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn listen(address: &SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|error| {
        io::Error::new(error.kind(), format!("cannot listen for the switch on {address}: {error}"))
    })
}

/// Returns a number that tells this run of the program from earlier ones. Once in 65,536 times it is the same; then an
/// entry of the earlier run ends with its idle time.
fn run_number() -> u16 {
    let bytes = monotonic_ns().to_le_bytes();
    bytes.chunks_exact(2).fold(1, |mixed: u16, pair| {
        mixed.wrapping_mul(31).wrapping_add(u16::from_le_bytes([pair[0], pair[1]]))
    })
}

impl FastPath for SwitchPath {
    fn install(&mut self, entry: &Entry) {
        self.tell(ControllerInput::Install(entry));
    }

    fn remove(&mut self, id: EntryId, cause: Cause) {
        self.tell(ControllerInput::Remove(id, cause));
    }

    fn suspend(&mut self) {
        self.tell(ControllerInput::Suspend);
    }

    fn tend(&mut self) -> io::Result<Duration> {
        self.accept();
        let mut buffer = vec![0; READ_MAX];
        (0..self.peers.len()).for_each(|at| self.read(at, &mut buffer));
        self.tell(ControllerInput::Tick);
        if self.connections().any(|connection| !connection.waiting.is_empty()) {
            return Ok(FULL);
        }
        Ok(self.network.deadline().map_or(NOTHING_DUE, |at| at - now()))
    }

    fn count(&mut self) -> io::Result<()> {
        self.tell(ControllerInput::Count);
        Ok(())
    }

    fn finish(&mut self) {
        if self.clear_at_end {
            self.tell(ControllerInput::Clear);
        }
    }

    fn judges_resets(&self) -> bool {
        // If the switch matches flags, each RST reaches conntrack. One that conntrack rejects would leave the flow as it
        // is.
        self.network.matches_flags()
    }

    fn report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let listeners = self.listeners.iter().map(AsFd::as_fd);
        listeners.chain(self.connections().map(|connection| connection.stream.as_fd())).collect()
    }
}
