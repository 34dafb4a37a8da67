//! One flow of the least relay.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use sidetrack_sys::sockopt;

use super::{Options, Role};

/// SOCKS5: no authentication; connected, bound to 0.0.0.0:0.
const METHOD: [u8; 2] = [5, 0];
const REPLY_5: [u8; 10] = [5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
/// SOCKS6: Authentication Reply and Operation Reply in one.
const REPLIES_6: [u8; 16] = [6, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];

/// A side of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    fn other(self) -> Self {
        if self == Self::Client { Self::Server } else { Self::Client }
    }
}

/// What the flow waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The client's first bytes.
    First,
    /// The client's SOCKS5 request.
    Request5,
    /// The connection; then these bytes go to the client.
    Dial(&'static [u8]),
    /// The server's SOCKS5 method, then its reply.
    Method,
    Reply5,
    /// The server's SOCKS6 replies.
    Replies6,
    /// Payload only.
    Relay,
}

/// The state of one side, and the bytes it has sent that are not forwarded yet.
#[derive(Debug)]
struct End {
    socket: Option<OwnedFd>,
    held: Vec<u8>,
    readable: bool,
    writable: bool,
    /// FIN or a reset was announced: reading has an end.
    ended: bool,
    /// The end of the stream was read.
    over: bool,
    /// The end was passed on to the other side.
    told: bool,
}

impl End {
    fn new(socket: Option<OwnedFd>, readable: bool) -> Self {
        Self {
            socket,
            held: Vec::new(),
            readable,
            writable: readable,
            ended: false,
            over: false,
            told: false,
        }
    }

    /// Reads what is available; `None` if nothing is. 0 is the end of the stream.
    fn recv(&mut self, scratch: &mut [u8]) -> Result<Option<usize>, Errno> {
        let Some(socket) = self.socket.as_ref().filter(|_| self.readable && !self.over) else {
            return Ok(None);
        };
        match rustix::net::recv(socket, &mut *scratch, RecvFlags::empty()) {
            Ok((_, count)) => {
                // A short read has emptied the socket; further bytes cause a new edge.
                self.readable = count == scratch.len() || self.ended;
                self.over = count == 0 || self.ended && count < scratch.len();
                Ok(Some(count))
            }
            Err(Errno::AGAIN) => {
                self.readable = false;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn send(&mut self, bytes: &[u8], last: bool) -> Result<usize, Errno> {
        let Some(socket) = self.socket.as_ref().filter(|_| self.writable) else { return Ok(0) };
        let flags = SendFlags::NOSIGNAL | if last { SendFlags::MORE } else { SendFlags::empty() };
        let sent = match rustix::net::send(socket, bytes, flags) {
            Err(Errno::AGAIN) => 0,
            result => result?,
        };
        self.writable = sent == bytes.len();
        Ok(sent)
    }
}

/// A client, its server, and the state of both.
#[derive(Debug)]
pub(super) struct Flow {
    key: u64,
    stage: Stage,
    client: End,
    server: End,
    /// Whether epoll reports that the client is writable; requested when it is first needed.
    client_out: bool,
}

impl Flow {
    /// Makes a flow of an accepted client. `key` identifies it in events; the lowest bit is set for its server.
    pub(super) fn new(client: OwnedFd, key: u64) -> Self {
        let (client, server) = (End::new(Some(client), true), End::new(None, false));
        Self { key, stage: Stage::First, client, server, client_out: false }
    }

    /// Registers a side once, for all the events it will need.
    pub(super) fn watch(&mut self, epoll: &OwnedFd, side: Side) -> Result<(), Errno> {
        let (end, bit, out) = match side {
            Side::Client => (&self.client, 0, EventFlags::empty()),
            Side::Server => (&self.server, 1, EventFlags::OUT),
        };
        let Some(socket) = &end.socket else { return Ok(()) };
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET | out;
        epoll::add(epoll, socket, EventData::new_u64(self.key | bit), flags)
    }

    /// Notes the flags of an event.
    pub(super) fn notice(&mut self, side: Side, flags: EventFlags) {
        let end = self.end(side);
        let over = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        end.readable |= over || flags.intersects(EventFlags::IN | EventFlags::RDHUP);
        end.writable |= over || flags.contains(EventFlags::OUT);
        end.ended |= over || flags.contains(EventFlags::RDHUP);
    }

    /// Continues as far as possible; returns false when both sides are finished.
    pub(super) fn run(
        &mut self,
        options: &Options,
        epoll: &OwnedFd,
        scratch: &mut [u8],
    ) -> Result<bool, Errno> {
        loop {
            let goes_on = match self.stage {
                Stage::First => self.first(options, epoll, scratch)?,
                Stage::Request5 => self.request5(epoll, scratch)?,
                Stage::Dial(reply) => self.connected(options.role, reply)?,
                Stage::Method => self.method(scratch)?,
                Stage::Reply5 => self.replies(scratch, REPLY_5.len())?,
                Stage::Replies6 => self.replies(scratch, REPLIES_6.len())?,
                Stage::Relay => {
                    self.pump(Side::Client, epoll, scratch)?;
                    self.pump(Side::Server, epoll, scratch)?;
                    return Ok(!(self.client.told && self.server.told));
                }
            };
            if !goes_on {
                let gone = if self.server.socket.is_none() { self.client.over } else { self.server.over };
                return Ok(!gone);
            }
        }
    }

    fn end(&mut self, side: Side) -> &mut End {
        if side == Side::Client { &mut self.client } else { &mut self.server }
    }

    /// Reads more of a handshake; returns true if there was more.
    fn read(&mut self, side: Side, scratch: &mut [u8]) -> Result<bool, Errno> {
        let end = self.end(side);
        let count = end.recv(scratch)?.unwrap_or(0);
        end.held.extend_from_slice(&scratch[..count]);
        Ok(count > 0)
    }

    fn first(&mut self, options: &Options, epoll: &OwnedFd, scratch: &mut [u8]) -> Result<bool, Errno> {
        let more = self.read(Side::Client, scratch)?;
        match (options.role, options.to) {
            (Role::Reverse, Some(to)) if more => self.dial(to, &[], epoll),
            (Role::Redirect5 | Role::Redirect6, Some(via)) if more => self.dial(via, &[], epoll),
            (Role::Socks, _) => match self.client.held.as_slice() {
                [5, count, methods @ ..] if methods.len() >= usize::from(*count) => {
                    self.client.held.drain(..2 + usize::from(*count)).for_each(drop);
                    self.client.send(&METHOD, false)?;
                    self.stage = Stage::Request5;
                    Ok(true)
                }
                [6, _, high, low, p, q, _, 1, a, b, c, d, rest @ ..]
                    if rest.len() >= usize::from(u16::from_be_bytes([*high, *low])) =>
                {
                    let to = (Ipv4Addr::new(*a, *b, *c, *d), u16::from_be_bytes([*p, *q])).into();
                    let length = 12 + usize::from(u16::from_be_bytes([*high, *low]));
                    self.client.held.drain(..length).for_each(drop);
                    self.dial(to, &REPLIES_6, epoll)
                }
                _ => Ok(more),
            },
            _ => Ok(false),
        }
    }

    fn request5(&mut self, epoll: &OwnedFd, scratch: &mut [u8]) -> Result<bool, Errno> {
        let more = self.client.held.len() < 10 && self.read(Side::Client, scratch)?;
        let [5, 1, 0, 1, a, b, c, d, p, q, ..] = self.client.held[..] else { return Ok(more) };
        self.client.held.drain(..10).for_each(drop);
        self.dial((Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([p, q])).into(), &REPLY_5, epoll)
    }

    fn dial(&mut self, to: SocketAddr, reply: &'static [u8], epoll: &OwnedFd) -> Result<bool, Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let socket = sockopt::stream_socket(&to).map_err(errno)?;
        sockopt::set_tcp_nodelay(&socket, true).map_err(errno)?;
        sockopt::set_tcp_ack_with_data(&socket).map_err(errno)?;
        sockopt::start_connect(&socket, to).map_err(errno)?;
        self.server.socket = Some(socket.into());
        self.stage = Stage::Dial(reply);
        self.watch(epoll, Side::Server)?;
        Ok(false)
    }

    fn connected(&mut self, role: Role, reply: &'static [u8]) -> Result<bool, Errno> {
        if !self.server.writable {
            return Ok(false);
        }
        if self.server.ended {
            return Err(Errno::CONNREFUSED);
        }
        // A handshake fits into the buffer of a socket that has sent nothing yet.
        self.stage = match role {
            // Datagrams have no connections, so no flow has that role.
            Role::Reverse | Role::Datagrams => Stage::Relay,
            Role::Socks => {
                // The server's bytes go first: it can work while the client is informed.
                self.flush(Side::Client)?;
                self.client.send(reply, false)?;
                Stage::Relay
            }
            Role::Redirect5 => {
                self.server.send(&[5, 1, 0], false)?;
                Stage::Method
            }
            Role::Redirect6 => {
                let (address, port) = self.original()?;
                let initial = u16::try_from(self.client.held.len()).unwrap_or(0).to_be_bytes();
                let mut request = vec![6, 1, 0, 8, port[0], port[1], 0, 1];
                request.extend(address);
                request.extend([0, 2, 0, 8, initial[0], initial[1], 0, 0]);
                request.append(&mut self.client.held);
                self.server.send(&request, false)?;
                Stage::Replies6
            }
        };
        Ok(true)
    }

    fn method(&mut self, scratch: &mut [u8]) -> Result<bool, Errno> {
        let more = self.read(Side::Server, scratch)?;
        if !self.server.held.starts_with(&METHOD) {
            return Ok(more);
        }
        self.server.held.drain(..METHOD.len()).for_each(drop);
        let ([a, b, c, d], [p, q]) = self.original()?;
        self.server.send(&[5, 1, 0, 1, a, b, c, d, p, q], false)?;
        self.stage = Stage::Reply5;
        Ok(true)
    }

    /// Reads the server's replies, which are always positive: this program only dials servers that exist.
    fn replies(&mut self, scratch: &mut [u8], length: usize) -> Result<bool, Errno> {
        let more = self.read(Side::Server, scratch)?;
        if self.server.held.len() < length {
            return Ok(more);
        }
        self.server.held.drain(..length).for_each(drop);
        self.stage = Stage::Relay;
        Ok(true)
    }

    /// Returns the client's destination before the redirection.
    fn original(&self) -> Result<([u8; 4], [u8; 2]), Errno> {
        let client = self.client.socket.as_ref().ok_or(Errno::BADF)?;
        match sockopt::original_dst(client) {
            Ok(SocketAddr::V4(to)) => Ok((to.ip().octets(), to.port().to_be_bytes())),
            _ => Err(Errno::AFNOSUPPORT),
        }
    }

    /// Sends the buffered bytes of a side; returns true if all were sent.
    fn flush(&mut self, from: Side) -> Result<bool, Errno> {
        let held = std::mem::take(&mut self.end(from).held);
        let sent = if held.is_empty() { 0 } else { self.end(from.other()).send(&held, false)? };
        let end = self.end(from);
        end.held = held;
        end.held.drain(..sent).for_each(drop);
        Ok(end.held.is_empty())
    }

    /// Moves bytes from a side, and then its end.
    fn pump(&mut self, from: Side, epoll: &OwnedFd, scratch: &mut [u8]) -> Result<(), Errno> {
        loop {
            if !self.flush(from)? {
                return self.await_room(from.other(), epoll);
            }
            if self.end(from).over {
                if !std::mem::replace(&mut self.end(from).told, true) {
                    let other = self.end(from.other());
                    // The last FIN needs no separate call: closing the socket sends it.
                    if !other.told {
                        rustix::net::shutdown(other.socket.as_ref().ok_or(Errno::BADF)?, Shutdown::Write)?;
                    }
                }
                return Ok(());
            }
            let Some(count) = self.end(from).recv(scratch)? else { return Ok(()) };
            let over = self.end(from).over;
            if count > 0 {
                let sent = self.end(from.other()).send(&scratch[..count], over)?;
                self.end(from).held.extend_from_slice(&scratch[sent..count]);
            }
        }
    }

    fn await_room(&mut self, side: Side, epoll: &OwnedFd) -> Result<(), Errno> {
        if side == Side::Server || self.client_out {
            return Ok(());
        }
        self.client_out = true;
        let Some(client) = &self.client.socket else { return Ok(()) };
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::modify(epoll, client, EventData::new_u64(self.key), flags)
    }
}
