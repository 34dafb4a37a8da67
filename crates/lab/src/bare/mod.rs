//! The smallest possible relay: a lower bound for every program in user space, measured like any peer.
//!
//! It has one thread, one epoll instance and preallocated flows; no policy, record, limit or time-out; IPv4 only. It
//! passes a half-close on, as every relay here must: a program that closed both sides when the server ends would cut
//! off a client that still sends. Two things make it faster than a real relay may be. It dials only after the
//! client's first bytes, and lets the acknowledgement of every handshake wait for bytes (a server that speaks first
//! has to wait). And it never answers with an error. The rest is the kernel's TCP.

mod datagrams;
mod flow;

use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use sidetrack_sys::sockopt::{self, ListenOptions};

use flow::{Flow, Side};

/// Maximum number of flows.
const FLOWS_MAX: usize = 9_900;
/// Maximum number of events per call.
const EVENTS_MAX: usize = 256;
/// The key of the listener, different from all flows.
const LISTENER: u64 = u64::MAX;
/// Default size of the thread's read buffer, in bytes.
pub const BUFFER_BYTES: usize = 64 * 1024;

/// The role of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    /// A relay to `--to`.
    Reverse,
    /// A relay of datagrams to `--to`.
    Datagrams,
    /// A SOCKS server: version 5 without authentication, version 6 in the layout of draft 11.
    Socks,
    /// A redirector to the SOCKS5 server `--to`, which waits for every step.
    Redirect5,
    /// A redirector to the SOCKS6 server `--to`, which sends the client's first bytes with the request.
    Redirect6,
}

impl Role {
    /// Returns its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reverse => "reverse",
            Self::Datagrams => "datagrams",
            Self::Socks => "socks",
            Self::Redirect5 => "redirect5",
            Self::Redirect6 => "redirect6",
        }
    }
}

/// Options of `sidetrack-lab bare`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Options {
    /// The role.
    pub role: Role,
    /// The address to listen on.
    pub listen: SocketAddr,
    /// The server, or the SOCKS server of a redirector.
    #[arg(long, required_if_eq_any([("role", "reverse"), ("role", "datagrams"), ("role", "redirect5"), ("role", "redirect6")]))]
    pub to: Option<SocketAddr>,
    /// Maximum number of bytes per read.
    #[arg(long, value_name = "N", default_value_t = BUFFER_BYTES)]
    pub buffer_bytes: usize,
}

/// Relays until the process ends.
///
/// # Errors
/// The address cannot be listened on, or epoll cannot be used.
pub fn run(options: &Options) -> Result<()> {
    crate::launch::raise_file_limit();
    if let (Role::Datagrams, Some(to)) = (options.role, options.to) {
        return datagrams::run(options.listen, to);
    }
    serve(&listen(options)?, *options)
}

fn listen(options: &Options) -> Result<TcpListener> {
    let listener = sockopt::listen(options.listen, &ListenOptions { backlog: 8192, ..Default::default() })
        .with_context(|| format!("cannot listen on {}", options.listen))?;
    sockopt::set_tcp_ack_with_data(&listener)?;
    Ok(listener)
}

fn serve(listener: &TcpListener, options: Options) -> Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    // Level-triggered, with one accept(2) per turn: no call finds an empty queue.
    epoll::add(&epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    let mut places = Places::new(options, epoll);
    let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS_MAX];
    loop {
        let (ready, _) = match epoll::wait(&places.epoll, &mut events, None) {
            Ok(ready) => ready,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error).context("epoll_wait failed"),
        };
        for event in ready.iter() {
            match event.data.u64() {
                LISTENER => places.accept(listener),
                key => places.advance(key, event.flags),
            }
        }
    }
}

/// The slot of a flow; the generation distinguishes events of the current flow from those of an earlier one.
#[derive(Debug, Default)]
struct Place {
    flow: Option<Flow>,
    generation: u32,
}

struct Places {
    options: Options,
    epoll: OwnedFd,
    places: Vec<Place>,
    free: Vec<usize>,
    scratch: Vec<u8>,
}

impl Places {
    fn new(options: Options, epoll: OwnedFd) -> Self {
        Self {
            options,
            epoll,
            places: (0..FLOWS_MAX).map(|_| Place::default()).collect(),
            free: (0..FLOWS_MAX).rev().collect(),
            scratch: vec![0; options.buffer_bytes.max(1)],
        }
    }

    fn accept(&mut self, listener: impl AsFd) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let Ok(client) = rustix::net::accept_with(listener, flags) else { return };
        let Some(at) = self.free.pop() else { return };
        let place = &mut self.places[at];
        place.generation = place.generation.wrapping_add(1) & (u32::MAX >> 1);
        let key = u64::from(place.generation) << 33 | (at as u64) << 1;
        // Most clients have already sent their bytes: reading before the registration saves an event.
        place.flow = Some(Flow::new(client, key));
        self.run(at);
        self.watch(at, Side::Client);
    }

    /// Registers a side of a flow that still exists.
    fn watch(&mut self, at: usize, side: Side) {
        let Some(flow) = &mut self.places[at].flow else { return };
        if flow.watch(&self.epoll, side).is_err() {
            self.end(at);
        }
    }

    fn advance(&mut self, key: u64, flags: EventFlags) {
        let at = (key >> 1 & u64::from(u32::MAX)) as usize;
        let side = if key & 1 == 0 { Side::Client } else { Side::Server };
        let Some(place) = self.places.get_mut(at) else { return };
        let Some(flow) = place.flow.as_mut().filter(|_| u64::from(place.generation) == key >> 33) else {
            return;
        };
        flow.notice(side, flags);
        self.run(at);
    }

    fn run(&mut self, at: usize) {
        let Some(flow) = &mut self.places[at].flow else { return };
        // A failure ends the flow without an error message.
        if !flow.run(&self.options, &self.epoll, &mut self.scratch).unwrap_or(false) {
            self.end(at);
        }
    }

    fn end(&mut self, at: usize) {
        self.places[at].flow = None;
        self.free.push(at);
    }
}

#[cfg(test)]
mod tests;
