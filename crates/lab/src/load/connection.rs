//! One connection of the generator: follows the script as far as the socket allows.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::histogram::Histogram;
use super::script::Script;
use super::tls::Tls;
use super::wire;
use super::{Spec, Work};

/// `MSG_FASTOPEN` (tcp(7)), which rustix does not define.
const SEND_IN_SYN: SendFlags = SendFlags::from_bits_retain(0x2000_0000);
/// Maximum size of a buffered head or SOCKS reply, in bytes.
const INPUT_LIMIT: usize = 64 * 1024;
/// Maximum number of reads per event in bulk work, so that one stream cannot starve the others.
const READS_PER_EVENT: u32 = 8;

/// Why a connection failed, as named in the report.
pub(super) type Failure = Cow<'static, str>;

/// Counts over all connections.
#[derive(Debug)]
pub(super) struct Tally {
    /// Complete answers.
    pub requests: u64,
    /// Bytes of answers.
    pub bytes: u64,
    /// Times to the last byte of an answer.
    pub latencies: Histogram,
}

impl Tally {
    /// Makes empty counts.
    pub(super) fn new() -> Self {
        Self { requests: 0, bytes: 0, latencies: Histogram::new() }
    }

    fn answer(&mut self, took: Duration) {
        self.requests += 1;
        self.latencies.record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// The state of a connection after an event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It waits for the next event.
    Open,
    /// There may be more to read: the event must be requested again.
    More,
    /// It has finished its one request, and the stream has ended.
    Done,
}

/// A connection and its place in the script.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// TLS, from the first step inside TLS on.
    tls: Option<Box<Tls>>,
    /// Number of the step, see [`Script::step`].
    step: usize,
    /// Bytes of the step written.
    sent: usize,
    /// Replies of the step read.
    replies: usize,
    input: Vec<u8>,
    body_left: u64,
    /// Has its answer and requests no other ([`Work::NewConnection`], [`Work::Idle`]).
    answered: bool,
    asked_at: Instant,
    progress_at: Instant,
}

impl Connection {
    /// Starts to connect; the first event of the socket reports the result.
    ///
    /// # Errors No socket, or the kernel rejects the address at once.
    pub(super) fn open(spec: &Spec, script: &Script) -> Result<Self, Failure> {
        let family = if spec.dial.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .map_err(|e| failure("socket", e))?;
        rustix::net::sockopt::set_tcp_nodelay(&socket, true).map_err(|e| failure("socket", e))?;
        let sent = connect(&socket, spec.dial, spec.fast_open.then(|| script.step(0).send.as_slice()))
            .map_err(|error| failure("connect", error))?;
        let now = Instant::now();
        Ok(Self {
            socket,
            tls: None,
            step: 0,
            sent,
            replies: 0,
            input: Vec::new(),
            body_left: 0,
            answered: false,
            asked_at: now,
            progress_at: now,
        })
    }

    /// Returns true if it has its answer and only waits for the end.
    pub(super) fn is_answered(&self) -> bool {
        self.answered
    }

    /// Returns true if a pending connection made no progress for `limit`.
    pub(super) fn is_stuck(&self, now: Instant, limit: Duration, work: Work) -> bool {
        !(self.answered && work == Work::Idle) && now.duration_since(self.progress_at) > limit
    }

    /// Continues as far as an event allows. `ended`: the peer has closed or failed, so it reads to the end.
    ///
    /// # Errors
    /// The kind of failure; the connection is useless then.
    pub(super) fn advance(
        &mut self,
        script: &Script,
        work: Work,
        ended: bool,
        scratch: &mut [u8],
        tally: &mut Tally,
    ) -> Result<Outcome, Failure> {
        for _ in 0..READS_PER_EVENT {
            self.write(script)?;
            let discard = self.tls.is_none() && self.body_left > 0 && self.input.is_empty();
            let wanted = if discard {
                scratch.len().min(usize::try_from(self.body_left).unwrap_or(usize::MAX))
            } else {
                scratch.len()
            };
            let flags = if discard { RecvFlags::TRUNC } else { RecvFlags::empty() };
            let Some(buffer) = scratch.get_mut(..wanted) else { return Ok(Outcome::Open) };
            let count = match rustix::net::recv(&self.socket, &mut *buffer, flags) {
                Ok((_, count)) => count,
                Err(Errno::AGAIN) => return Ok(Outcome::Open),
                Err(error) => return Err(failure("read", error)),
            };
            if count == 0 {
                return if self.answered && work == Work::NewConnection {
                    Ok(Outcome::Done)
                } else {
                    Err("closed early".into())
                };
            }
            self.progress_at = Instant::now();
            let bytes = buffer.get(..count).unwrap_or_default();
            match &mut self.tls {
                Some(tls) => tls.receive(bytes, &mut self.input)?,
                None if discard => self.take_body(count as u64, tally),
                None => self.input.extend_from_slice(bytes),
            }
            self.understand(script, work, tally)?;
            if count < wanted && !ended {
                self.write(script)?;
                return Ok(Outcome::Open);
            }
        }
        Ok(Outcome::More)
    }

    fn write(&mut self, script: &Script) -> Result<(), Failure> {
        let rest = script.step(self.step).send.get(self.sent..).unwrap_or_default();
        if let Some(config) = script.tls_at(self.step) {
            let tls = match &mut self.tls {
                Some(tls) => tls,
                none => none.insert(Box::new(Tls::new(config)?)),
            };
            if !self.answered {
                self.sent += tls.take(rest)?;
            }
            return tls.send(&self.socket);
        }
        if rest.is_empty() || self.answered {
            return Ok(());
        }
        match rustix::net::send(&self.socket, rest, SendFlags::NOSIGNAL) {
            Ok(count) => self.sent += count,
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(failure("write", error)),
        }
        Ok(())
    }

    fn take_body(&mut self, count: u64, tally: &mut Tally) {
        let taken = count.min(self.body_left);
        self.body_left -= taken;
        tally.bytes += taken;
    }

    /// Consumes the complete replies of the input.
    fn understand(&mut self, script: &Script, work: Work, tally: &mut Tally) -> Result<(), Failure> {
        loop {
            if self.body_left > 0 {
                let count = self.input.len();
                self.take_body(count as u64, tally);
                // Requests are not pipelined, so nothing can follow the body.
                self.input.clear();
            }
            if self.body_left > 0 {
                return Ok(());
            }
            let step = script.step(self.step);
            let Some(expect) = step.expect.get(self.replies) else {
                self.finish_step(script, work, tally);
                return Ok(());
            };
            let Some(reply) = wire::parse(*expect, &self.input).map_err(|malformed| malformed.0)? else {
                return if self.input.len() > INPUT_LIMIT { Err("reply too long".into()) } else { Ok(()) };
            };
            self.input.drain(..reply.length);
            self.replies += 1;
            self.body_left = reply.body;
            if *expect == wire::Expect::HttpHead {
                tally.bytes += reply.length as u64;
            }
        }
    }

    fn finish_step(&mut self, script: &Script, work: Work, tally: &mut Tally) {
        if self.step + 1 >= script.opening.len() {
            let now = Instant::now();
            tally.answer(now.duration_since(self.asked_at));
            self.asked_at = now;
            self.answered = matches!(work, Work::NewConnection | Work::Idle);
        }
        self.step += 1;
        self.sent = 0;
        self.replies = 0;
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connects without waiting, with `first` in the SYN if a Fast Open cookie is known. Returns the number of bytes
/// sent.
fn connect(socket: &OwnedFd, dial: SocketAddr, first: Option<&[u8]>) -> Result<usize, Errno> {
    let result = match first {
        Some(first) => rustix::net::sendto(socket, first, SEND_IN_SYN | SendFlags::NOSIGNAL, &dial),
        None => rustix::net::connect(socket, &dial).map(|()| 0),
    };
    match result {
        // No cookie yet: the kernel sent the SYN without data, so the bytes still have to be sent.
        Err(Errno::INPROGRESS) => Ok(0),
        other => other,
    }
}

fn failure(call: &str, error: Errno) -> Failure {
    format!("{call}: {}", std::io::Error::from(error)).into()
}
