//! The fast path of a switch: the switch connects to us, and we send it its entries by OpenFlow.

use super::{FastPath, Report};
use crate::config::ShuntSwitch;
use sidetrack_core::openflow::{Controller, ControllerConfig, ControllerInput, ControllerOutput};
use sidetrack_core::shunt::{Cause, Entry, EntryId};
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::monotonic_ns;
use std::collections::VecDeque;
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

/// The fast path: the connection to the switch, and the controller that speaks OpenFlow.
#[derive(Debug)]
pub struct SwitchPath {
    listeners: Vec<TcpListener>,
    from: Option<IpAddr>,
    connection: Option<Connection>,
    controller: Controller,
    clear_at_end: bool,
    reports: VecDeque<Report>,
}

fn now() -> Instant {
    Instant::from_nanos(monotonic_ns())
}

impl SwitchPath {
    /// Listens for the switch.
    ///
    /// # Errors
    /// Returns the address that cannot be listened on, and why.
    pub fn start(switch: &ShuntSwitch) -> io::Result<Self> {
        let listeners: io::Result<Vec<_>> = switch.listen.iter().map(listen).collect();
        let config = ControllerConfig {
            versions: switch.versions.clone(),
            ports: switch.ports.clone(),
            run: run_number(),
            clear: switch.clear_at_start,
            pairs: switch.pairs,
            master: switch.master.then(generation),
            shared: switch.shared,
            table: switch.table,
        };
        Ok(Self {
            listeners: listeners?,
            from: switch.from,
            connection: None,
            controller: Controller::new(config, now()),
            clear_at_end: switch.clear_at_end,
            reports: VecDeque::new(),
        })
    }

    /// Returns the addresses it listens on.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    fn tell(&mut self, input: ControllerInput<'_>) {
        self.controller.handle(now(), input);
        self.obey();
    }

    fn obey(&mut self) {
        while let Some(output) = self.controller.poll() {
            match output {
                ControllerOutput::Send(bytes) => {
                    if let Some(connection) = &mut self.connection {
                        connection.waiting.extend(bytes);
                    }
                }
                ControllerOutput::Close(why) => {
                    // The last message may say why.
                    self.flush();
                    self.hang_up(&why);
                }
                ControllerOutput::Ready(version, features) => {
                    tracing::info!(
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
        self.flush();
    }

    fn hang_up(&mut self, why: &str) {
        if let Some(connection) = self.connection.take() {
            tracing::warn!(switch = %connection.from, "the connection of the switch is closed: {why}");
        }
    }

    /// Handles a connection that ended from outside.
    fn lost(&mut self, why: &str) {
        self.hang_up(why);
        self.controller.handle(now(), ControllerInput::Disconnected);
    }

    /// Sends waiting bytes, as far as the socket accepts them.
    fn flush(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let ended = connection.flush().err();
        if let Some(error) = ended {
            self.lost(&error.to_string());
        }
    }

    fn accept(&mut self) {
        let accepted: Vec<_> = self.listeners.iter().filter_map(|listener| listener.accept().ok()).collect();
        for (stream, from) in accepted {
            if self.from.is_some_and(|only| only != from.ip().to_canonical()) {
                tracing::warn!(%from, "somebody else than the switch connected, and was refused");
                continue;
            }
            if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_err() {
                continue;
            }
            // A switch connects again when it considers the old connection dead.
            self.hang_up("it has connected again");
            tracing::info!(%from, "a switch has connected");
            self.connection = Some(Connection { stream, from, waiting: VecDeque::new() });
            self.tell(ControllerInput::Connected);
        }
    }

    /// Reads what is there, with a limit: entries must not wait for a switch that sends without end.
    fn read(&mut self) {
        let mut buffer = vec![0; READ_MAX];
        for _ in 0..16 {
            let Some(connection) = &mut self.connection else { return };
            match connection.stream.read(&mut buffer) {
                Ok(0) => return self.lost("the switch closed it"),
                Ok(length) => {
                    let bytes = buffer.get(..length).unwrap_or_default();
                    self.tell(ControllerInput::Bytes(bytes));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.lost(&error.to_string()),
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
        self.read();
        self.tell(ControllerInput::Tick);
        if self.connection.as_ref().is_some_and(|connection| !connection.waiting.is_empty()) {
            return Ok(FULL);
        }
        Ok(self.controller.deadline().map_or(NOTHING_DUE, |at| at - now()))
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
        self.controller.matches_flags()
    }

    fn report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let listeners = self.listeners.iter().map(AsFd::as_fd);
        listeners.chain(self.connection.iter().map(|connection| connection.stream.as_fd())).collect()
    }
}
