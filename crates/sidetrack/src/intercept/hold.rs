//! Connections that are accepted only when the far side has accepted (`connect = "faithful"`).
//!
//! One thread reads the queues of opening segments and gives the kernel its verdicts. It drives the machine of core, and hands
//! each new attempt to a worker as [`Held`]. The worker's session dials, and answers. When the connection is accepted then,
//! the worker that accepted it hands it to the waiting session ([`Hold::claim`]).
//!
//! Only this thread keeps the right to give verdicts (CAP_NET_ADMIN). It sends answers by raw sockets that were opened before.

use super::{Catches, Listening};
use crate::live::{Clock, LiveFlow};
use crate::reactor::TcpStream;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use sidetrack_core::flow::{EndReason, Protocol};
use sidetrack_core::hold::{
    Answer, Config, Counts, Decision, Input, Machine, Output, Overflow, PacketId, Syn, Ticket,
};
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::conntrack::behind_redirect;
use sidetrack_sys::nfqueue::{HoldSockets, Verdict};
use sidetrack_sys::sockopt::{self, Ends};
use sidetrack_sys::sync::lock;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// Most listeners whose connections are held at the same time.
pub const LISTENERS_MAX: usize = 8;

/// Most connections that are held at the same time. More are accepted early, or reset (`on_crash`).
pub const HELD_MAX: usize = 4096;

/// Most segments in the kernel's queue: those that are held, and those that were not read yet.
pub const PACKETS_MAX: u32 = 16_384;

/// The longest time that a segment is held. `connect_timeout_ms` ends an attempt before.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// The right that is needed at the moment when a verdict is given.
pub const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN;

/// Begins an attempt: hands it to a worker.
pub type Dispatch = Box<dyn Fn(Held) + Send + Sync>;

/// The connections that are held, for all threads.
pub struct Hold {
    state: Mutex<State>,
    /// Wakes the thread.
    bell: OwnedFd,
    dispatch: OnceLock<Dispatch>,
    numbers: Vec<u16>,
}

#[derive(Default)]
struct State {
    /// Sessions that wait for their connection.
    waiting: BTreeMap<Key, Waiting>,
    /// Decisions that the thread has not seen.
    decided: Vec<(Ticket, Decision)>,
    /// Redirected connections that may be those of sessions that wait for another port of the client.
    strangers: Vec<Stranger>,
    /// The listeners; the place is that of the queue's number.
    listeners: Vec<(Arc<str>, Vec<Weak<Listening>>)>,
    counts: Counts,
    held: usize,
    overruns: u64,
    /// All listeners are served, so attempts begin.
    begun: bool,
    ends: bool,
}

/// Client and destination.
type Key = (SocketAddr, SocketAddr);

struct Waiting {
    ticket: Ticket,
    give: oneshot::Sender<OwnedFd>,
    live: Option<Arc<LiveFlow>>,
}

/// An accepted connection.
struct Stranger {
    socket: OwnedFd,
    client: SocketAddr,
    server: SocketAddr,
    back: oneshot::Sender<OwnedFd>,
}

/// Whose an accepted connection is.
#[derive(Debug)]
pub enum Claimed {
    /// It has got to the session that waited for it.
    Given,
    /// A session of its own begins.
    Not(TcpStream),
    /// The thread finds out. If no session waits for it, it comes back.
    Asked(oneshot::Receiver<OwnedFd>),
}

/// What the metrics show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldCounts {
    /// The machine's counts.
    pub counts: Counts,
    /// Connections held now.
    pub held: usize,
    /// How often the kernel dropped segments because they were not read in time.
    pub overruns: u64,
}

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hold").field("numbers", &self.numbers).finish_non_exhaustive()
    }
}

impl Hold {
    /// Starts the thread that answers the kernel. Call it while this process has [`NEEDED`], or owns the queues' namespace.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn start(sockets: HoldSockets, overflow: Overflow, clock: Clock) -> io::Result<Arc<Self>> {
        let hold = Arc::new(Self {
            state: Mutex::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            dispatch: OnceLock::new(),
            numbers: sockets.queues.numbers().to_vec(),
        });
        let config = Config { held_max: HELD_MAX, overflow, wait_max: WAIT_MAX };
        let shared = hold.clone();
        std::thread::Builder::new().name("hold".into()).spawn(move || {
            let kept = caps::capabilities().map(|held| held.permitted & NEEDED);
            if let Err(error) = kept.and_then(caps::keep_only) {
                tracing::error!(%error, "cannot give up capabilities");
            }
            let (machine, waiting) = (Machine::new(config), Vec::new());
            let mut thread = Thread { hold: shared, sockets, machine, waiting, clock };
            if let Err(error) = thread.run() {
                tracing::error!(%error, "connections are not held any more: the packet queue has failed");
            }
            let mut state = thread.hold.state();
            state.ends = true;
            state.strangers.clear();
        })?;
        Ok(hold)
    }

    /// Says which function begins an attempt.
    pub fn serve(&self, dispatch: Dispatch) {
        // Set once: a process has one fleet of workers.
        let _ = self.dispatch.set(dispatch);
    }

    /// Lets attempts begin: the listeners are served. Connections before that wait.
    pub fn begin(&self) {
        self.state().begun = true;
        self.ring();
    }

    /// Ends the thread; the kernel drops the segments that it keeps.
    pub fn end(&self) {
        self.state().ends = true;
        self.ring();
    }

    /// Returns the number of the queue for a listener, by name. `None`: all queues are in use.
    pub fn queue_of(&self, listener: &Arc<str>) -> Option<u16> {
        let mut state = self.state();
        let place = state.listeners.iter().position(|(name, _)| name == listener).or_else(|| {
            // A queue whose listener is gone is used again.
            let free =
                state.listeners.iter().position(|(_, all)| all.iter().all(|one| one.strong_count() == 0));
            match free {
                Some(free) => state.listeners[free] = (listener.clone(), Vec::new()),
                None if state.listeners.len() < self.numbers.len() => {
                    state.listeners.push((listener.clone(), Vec::new()));
                }
                None => return None,
            }
            free.or(Some(state.listeners.len() - 1))
        })?;
        self.numbers.get(place).copied()
    }

    /// Adds a listener whose connections may be held.
    pub fn listens(&self, listening: &Arc<Listening>) {
        if !may_hold(listening) || self.queue_of(&listening.name).is_none() {
            return;
        }
        let mut state = self.state();
        if let Some((_, all)) = state.listeners.iter_mut().find(|(name, _)| *name == listening.name) {
            all.retain(|one| one.strong_count() > 0);
            all.push(Arc::downgrade(listening));
        }
    }

    /// Returns the counts for metrics.
    pub fn counts(&self) -> HoldCounts {
        let state = self.state();
        HoldCounts { counts: state.counts, held: state.held, overruns: state.overruns }
    }

    /// Hands an accepted connection to the session that waits for it, if one does.
    pub fn claim(&self, stream: TcpStream, listening: &Listening) -> Claimed {
        if !may_hold(listening) || self.state().waiting.is_empty() {
            return Claimed::Not(stream);
        }
        let is_redirect = matches!(listening.catches, Catches::Redirect);
        let server = match listening.catches {
            Catches::Tproxy => sockopt::local_address(&stream),
            _ => sockopt::original_dst(&stream),
        };
        let (Ok(client), Ok(server)) = (sockopt::peer_address(&stream), server) else {
            return Claimed::Not(stream);
        };
        let (client, server) = (plain(client), plain(server));
        let mut state = self.state();
        let waiting = state.waiting.remove(&(client, server));
        let is_alike = |key: &Key| key.0.ip() == client.ip() && key.1 == server;
        let may_be = is_redirect && !state.ends && state.waiting.keys().any(is_alike);
        if waiting.is_none() && !may_be {
            return Claimed::Not(stream);
        }
        // Without its session, the client has a connection that leads nowhere: dropped, it is closed.
        let Ok(socket) = stream.into_std() else { return Claimed::Given };
        let Some(waiting) = waiting else {
            let (back, asked) = oneshot::channel();
            state.strangers.push(Stranger { socket: socket.into(), client, server, back });
            drop(state);
            self.ring();
            return Claimed::Asked(asked);
        };
        let _ = waiting.give.send(socket.into());
        Claimed::Given
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn ring(&self) {
        // A full counter wakes the thread too.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    fn decide(&self, ticket: Ticket, decision: Decision) {
        self.state().decided.push((ticket, decision));
        self.ring();
    }

    fn forget(&self, key: Key, ticket: Ticket) {
        let mut state = self.state();
        if state.waiting.get(&key).is_some_and(|waiting| waiting.ticket == ticket) {
            state.waiting.remove(&key);
        }
    }

    /// Finds the listener that will accept this connection.
    fn listening(&self, queue: u16, server: SocketAddr) -> Option<Arc<Listening>> {
        let place = self.numbers.iter().position(|number| *number == queue)?;
        let state = self.state();
        let (_, all) = state.listeners.get(place)?;
        let mut all = all.iter().filter_map(Weak::upgrade);
        all.find(|one| {
            let is_run = matches!(&one.catches, Catches::Run(run) if run.alone);
            is_run || one.address.is_ipv6() == server.is_ipv6()
        })
    }
}

/// Whether connections of this listener can be held: its clients know nothing of us, and send nothing to us first.
fn may_hold(listening: &Listening) -> bool {
    listening.protocol == Protocol::Tcp
        && listening.proxy_from.is_empty()
        && matches!(listening.catches, Catches::Run(_) | Catches::Redirect | Catches::Tproxy)
}

/// The address without scope and flow label, which a packet does not have.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}

/// Whether the answer to a client needs an interface, which raw sockets are not told.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// A connection that is held, with its session's duty to answer. Dropped without an answer, it is reset.
#[derive(Debug)]
pub struct Held {
    hold: Arc<Hold>,
    ticket: Ticket,
    /// The listener that will accept it.
    pub listening: Arc<Listening>,
    /// The client's address.
    pub client: SocketAddr,
    /// The destination that the client dials.
    pub server: SocketAddr,
    given: RefCell<Option<oneshot::Receiver<OwnedFd>>>,
    is_answered: Cell<bool>,
}

impl Held {
    /// Accepts it now. A session of its own begins when the connection comes.
    pub fn early(self) {
        self.hold.forget((self.client, self.server), self.ticket);
        self.answer(Decision::Early);
    }

    /// The addresses of its connection; ours is that of the listener.
    pub fn ends(&self) -> Ends {
        Ends { peer: self.client, ours: self.listening.address, asked: Some(self.server) }
    }

    /// Tells the client this.
    pub fn refuse(&self, answer: Answer) {
        self.answer(Decision::Refuse(answer));
    }

    /// Ends this flow if the client gives the attempt up.
    pub fn belongs_to(&self, live: &Arc<LiveFlow>) {
        let mut state = self.hold.state();
        if let Some(waiting) = state.waiting.get_mut(&(self.client, self.server))
            && waiting.ticket == self.ticket
        {
            waiting.live = Some(live.clone());
        }
    }

    /// Accepts it because the far side has, and waits for the connection. `None`: the client has given it up.
    pub async fn admit(&self) -> Option<TcpStream> {
        self.answer(Decision::Admit);
        let given = self.given.borrow_mut().take()?;
        TcpStream::new(given.await.ok()?).ok()
    }

    fn answer(&self, decision: Decision) {
        if !self.is_answered.replace(true) {
            self.hold.decide(self.ticket, decision);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.hold.forget((self.client, self.server), self.ticket);
        self.answer(Decision::Refuse(Answer::Reset));
    }
}

struct Thread {
    hold: Arc<Hold>,
    sockets: HoldSockets,
    machine: Machine,
    /// Attempts that came before the listeners were served.
    waiting: Vec<(Ticket, u16, Key)>,
    clock: Clock,
}

impl Thread {
    fn run(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        loop {
            self.wait()?;
            let mut verdicts = Vec::new();
            if !self.waiting.is_empty() && self.hold.state().begun {
                for (ticket, queue, key) in std::mem::take(&mut self.waiting) {
                    self.ask(ticket, queue, key);
                }
            }
            self.take_decisions();
            self.place_strangers();
            self.drain(&mut verdicts);
            let mut came = Vec::new();
            let read = self.sockets.queues.read(|one| {
                let packet = PacketId { queue: one.queue, id: one.id };
                came.push((packet, one.is_local, Syn::parse(one.head)));
            })?;
            if read.overrun {
                tracing::warn!(
                    "connections came faster than they could be held; on_crash says what happened to some"
                );
                self.hold.state().overruns += 1;
            }
            for (packet, is_local, syn) in came {
                match syn.filter(|syn| !is_link_local(syn.client.ip())) {
                    Some(syn) => {
                        self.machine.handle(self.clock.now(), Input::Syn { packet, syn, is_local });
                    }
                    None => verdicts.push((packet.queue, packet.id, Verdict::Accept)),
                }
                self.drain(&mut verdicts);
            }
            self.machine.handle(self.clock.now(), Input::Tick);
            self.drain(&mut verdicts);
            self.sockets.queues.answer(&verdicts)?;
            let mut state = self.hold.state();
            (state.counts, state.held) = (self.machine.counts(), self.machine.held());
            if state.ends {
                return Ok(());
            }
        }
    }

    /// Waits for a segment, a decision or the deadline.
    fn wait(&self) -> io::Result<()> {
        let limit = self.machine.deadline().map(|at| {
            // Rounded up, so that the deadline has passed when this returns.
            Timespec::try_from(at.since(self.clock.now()) + Duration::from_millis(1)).unwrap_or_default()
        });
        let bell = &self.hold.bell;
        let mut fds = [
            PollFd::from_borrowed_fd(self.sockets.queues.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !fds[1].revents().is_empty() {
            // Nothing to read is as good.
            let _ = rustix::io::read(bell, &mut [0; 8]);
        }
        Ok(())
    }

    fn take_decisions(&mut self) {
        let decided = std::mem::take(&mut self.hold.state().decided);
        for (ticket, decision) in decided {
            self.machine.handle(self.clock.now(), Input::Decided(ticket, decision));
        }
    }

    /// Finds the sessions of connections whose port the kernel has changed.
    fn place_strangers(&self) {
        let strangers = std::mem::take(&mut self.hold.state().strangers);
        for Stranger { socket, client, server, back } in strangers {
            let ours = sockopt::local_address(&socket).ok();
            let own = ours.and_then(|ours| behind_redirect(ours, client));
            let waiting = own.and_then(|own| self.hold.state().waiting.remove(&(plain(own), server)));
            let to = waiting.map_or(back, |waiting| waiting.give);
            // A session that has ended, or a worker that stops: dropped, the connection is closed.
            let _ = to.send(socket);
        }
    }

    fn drain(&mut self, verdicts: &mut Vec<(u16, u32, Verdict)>) {
        while let Some(output) = self.machine.poll() {
            match output {
                Output::Ask { ticket, queue, client, server } => self.ask(ticket, queue, (client, server)),
                Output::Abandon(ticket) => self.abandon(ticket),
                Output::Send(client, packet) => {
                    if let Err(error) = self.sockets.answers.send(&packet, client.ip()) {
                        // The client sends its SYN again, and gets the answer again.
                        tracing::debug!(%client, %error, "an answer to a SYN could not be sent");
                    }
                }
                Output::Verdict(PacketId { queue, id }, passes) => {
                    let verdict = if passes { Verdict::Accept } else { Verdict::Drop };
                    verdicts.push((queue, id, verdict));
                }
            }
        }
    }

    fn ask(&mut self, ticket: Ticket, queue: u16, key: Key) {
        let (client, server) = key;
        let hold = self.hold.clone();
        if !hold.state().begun {
            return self.waiting.push((ticket, queue, key));
        }
        let listening = hold.listening(queue, server);
        let (Some(listening), Some(dispatch)) = (listening, hold.dispatch.get()) else {
            return self.machine.handle(self.clock.now(), Input::Decided(ticket, Decision::Early));
        };
        let (give, given) = oneshot::channel();
        hold.state().waiting.insert(key, Waiting { ticket, give, live: None });
        let (given, is_answered) = (RefCell::new(Some(given)), Cell::new(false));
        let held = Held { hold: hold.clone(), ticket, listening, client, server, given, is_answered };
        dispatch(held);
    }

    fn abandon(&self, ticket: Ticket) {
        let mut state = self.hold.state();
        let key = state.waiting.iter().find(|(_, waiting)| waiting.ticket == ticket).map(|(key, _)| *key);
        let waiting = key.and_then(|key| state.waiting.remove(&key));
        drop(state);
        if let Some(live) = waiting.and_then(|waiting| waiting.live) {
            live.end(EndReason::ClientGone);
        }
    }
}
