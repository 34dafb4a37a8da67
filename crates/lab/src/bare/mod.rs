//! The least relay there can be: what no program in user space can go below, measured like any peer.
//!
//! One thread, one epoll instance, places made in advance, no policy, no record, no limits, no time-outs, IPv4 only.
//! It passes a half-close on, as every relay here has to: a program that closed both sides as soon as the server has
//! ended would cut off a client that still has something to say. What it saves that a relay for people must not: it
//! dials when the client has spoken and lets the acknowledgement of every handshake wait for bytes (a server that
//! speaks first is kept waiting), and it never answers with an error. What remains is the kernel's TCP.

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

/// Places for flows.
const FLOWS_MAX: usize = 9_900;
/// Most events taken at once.
const EVENTS_MAX: usize = 256;
/// Tells the listener from flows.
const LISTENER: u64 = u64::MAX;
/// Read buffer of the thread where nothing else is said, in bytes.
pub const BUFFER_BYTES: usize = 64 * 1024;

/// What the program is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    /// A relay to `--to`.
    Reverse,
    /// A SOCKS server: version 5 without authentication, version 6 in the layout of draft 11.
    Socks,
    /// A redirector to the SOCKS5 server `--to`, every step awaited.
    Redirect5,
    /// A redirector to the SOCKS6 server `--to`, the client's first bytes with the request.
    Redirect6,
}

impl Role {
    /// How the command line names it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reverse => "reverse",
            Self::Socks => "socks",
            Self::Redirect5 => "redirect5",
            Self::Redirect6 => "redirect6",
        }
    }
}

/// Options of `sidetrack-lab bare`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Options {
    /// What to be.
    pub role: Role,
    /// Where to listen.
    pub listen: SocketAddr,
    /// The server, or the SOCKS server of a redirector.
    #[arg(long, required_if_eq_any([("role", "reverse"), ("role", "redirect5"), ("role", "redirect6")]))]
    pub to: Option<SocketAddr>,
    /// Most bytes that one read takes.
    #[arg(long, value_name = "N", default_value_t = BUFFER_BYTES)]
    pub buffer_bytes: usize,
}

/// Relays until it is ended.
///
/// # Errors
/// The address cannot be listened on, or epoll cannot be used.
pub fn run(options: &Options) -> Result<()> {
    crate::launch::raise_file_limit();
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
    // Level-triggered and one accept(2) a turn: no call that finds nobody.
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

/// Where a flow is, or was; the generation tells events of the present one from those of an earlier one.
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
        // Most have spoken already: read before it is watched, and no event tells what we know.
        place.flow = Some(Flow::new(client, key));
        self.run(at);
        self.watch(at, Side::Client);
    }

    /// Watches a side of a flow that is still there.
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
        // What fails ends the flow: nobody is told why.
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
