//! Connections whose SYN waits until the carrier has an answer (`connect = "faithful"`).
//!
//! The kernel hands each opening segment to us and keeps it. A session dials meanwhile. Then the segment goes on to our
//! listener, which accepts the connection, or the client gets the answer of the far side.
//!
//! ```text
//!                 SYN, no room --------------------------> passed or reset (Overflow)
//!                  |
//!   SYN (new) -> [Held] -- Early ------------------------> passed, forgotten
//!                  |  ^    Admit -> [Admitted] -- its SYN again: passed -- time -> forgotten
//!                  |  |    Refuse -> [Refused] -- its SYN again: same answer -- time -> forgotten
//!                  |  |
//!                  |  +-- its SYN again (same ISN): dropped, joins
//!                  +----- another SYN (other ISN): Abandon, dropped; the new one is Held
//!                  +----- wait_max over: Abandon, Refused(Silent)
//! ```
//!
//! While the packet of a local client waits in the queue, its kernel does not retransmit the SYN, and counts each attempt to do
//! so as one that failed. So the packet is dropped shortly before the next retransmission is due; the retransmitted one takes
//! its place. Between the two, an admitted connection waits for at most [`RELEASE_BEFORE`]. Remote clients need none of this.
//!
//! A local client's kernel drops an ICMP error that arrives while `connect()` still works on the socket. So such an answer is sent again
//! after each of [`REPEAT_AFTER`]. A client that had the first one has no socket left that the others could concern.
//!
//! A SYN with another initial sequence number is a new attempt from the same port: the client gave the first one up.

mod answer;
mod packet;

pub use answer::Answer;
pub use packet::Syn;

use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// How long a SYN that comes again after its connection was admitted still belongs to it.
const ADMITTED_MEMORY: Duration = Duration::from_secs(10);

/// How long a refused SYN that comes again gets the same answer without another attempt.
const REFUSED_MEMORY: Duration = Duration::from_secs(3);

/// How long a SYN without an answer stays unanswered after it came last: longer than the longest pause between two
/// retransmissions (RFC 6298; Linux doubles 1 s up to 64 s).
const SILENT_MEMORY: Duration = Duration::from_secs(130);

/// The first retransmission time-out of a SYN, which doubles each time (RFC 6298 Sec. 2.1).
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);

/// How long before its next retransmission the SYN of a local client is dropped.
const RELEASE_BEFORE: Duration = Duration::from_millis(300);

/// When an ICMP error to a local client is sent again, after the one before.
const REPEAT_AFTER: [Duration; 3] =
    [Duration::from_millis(2), Duration::from_millis(20), Duration::from_millis(200)];

/// Most doublings of [`FIRST_TIMEOUT`].
const DOUBLINGS_MAX: u32 = 6;

/// A packet that the kernel keeps for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PacketId {
    /// The number of the queue.
    pub queue: u16,
    /// Its number in the queue.
    pub id: u32,
}

/// Names one attempt to connect. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What happens to new connections while [`Config::held_max`] are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// They are accepted early, as without this machine.
    Early,
    /// They are reset.
    Refuse,
}

/// The bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most SYNs held at the same time, and most answers remembered.
    pub held_max: usize,
    /// What happens to more.
    pub overflow: Overflow,
    /// The longest time that a SYN is held. The session's own time-out is shorter; this one ends what has no session.
    pub wait_max: Duration,
}

/// The decision about a held SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is accepted now, and whatever comes later is not told to the client as an answer to its SYN.
    Early,
    /// The far side has accepted; a session waits for the connection.
    Admit,
    /// The far side has not accepted.
    Refuse(Answer),
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The kernel keeps this packet, which is a SYN.
    Syn {
        /// The packet.
        packet: PacketId,
        /// What it says.
        syn: Syn,
        /// Whether it comes from a socket of this host, which cannot retransmit it meanwhile.
        is_local: bool,
    },
    /// A session's decision. Of an attempt that is over it has no effect.
    Decided(Ticket, Decision),
    /// The deadline may have passed.
    Tick,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Begin an attempt.
    Ask {
        /// Its name.
        ticket: Ticket,
        /// The queue that the SYN came by.
        queue: u16,
        /// The client.
        client: SocketAddr,
        /// The destination.
        server: SocketAddr,
    },
    /// End this attempt: the client has given it up, or it takes too long.
    Abandon(Ticket),
    /// Send this packet to the client at this address.
    Send(SocketAddr, Vec<u8>),
    /// Tell the kernel what happens to a packet: it goes on, or is dropped.
    Verdict(PacketId, bool),
}

/// How often something happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// SYNs that were held.
    pub held: u64,
    /// Accepted early by decision.
    pub early: u64,
    /// Accepted after the far side.
    pub admitted: u64,
    /// Answered, by [`Answer::ALL`].
    pub refused: [u64; Answer::ALL.len()],
    /// Retransmitted SYNs.
    pub repeated: u64,
    /// Attempts that the client replaced by another one.
    pub replaced: u64,
    /// SYNs that were not held because of [`Config::held_max`].
    pub overflowed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// `None`: it was dropped so that the client's kernel can send it again.
    Held(Option<PacketId>),
    Admitted,
    Refused(Answer),
}

#[derive(Clone, Debug)]
struct Entry {
    ticket: Ticket,
    syn: Syn,
    state: State,
    until: Instant,
    is_local: bool,
    /// How often it came, and when its packet is dropped so that it can come again.
    came: u32,
    /// The same for a refused one: how often the answer was sent again, and when it is next.
    repeats: usize,
    release: Option<Instant>,
}

type Key = (SocketAddr, SocketAddr);

/// The table of held SYNs.
#[derive(Clone, Debug)]
pub struct Machine {
    config: Config,
    entries: BTreeMap<Key, Entry>,
    tickets: BTreeMap<Ticket, Key>,
    /// When entries are forgotten: those that are held, and those that are only remembered.
    held: BTreeSet<(Instant, Ticket)>,
    remembered: BTreeSet<(Instant, Ticket)>,
    releases: BTreeSet<(Instant, Ticket)>,
    outputs: VecDeque<Output>,
    counts: Counts,
    next: u64,
}

impl Machine {
    /// Makes an empty table.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            entries: BTreeMap::new(),
            tickets: BTreeMap::new(),
            held: BTreeSet::new(),
            remembered: BTreeSet::new(),
            releases: BTreeSet::new(),
            outputs: VecDeque::new(),
            counts: Counts::default(),
            next: 1,
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        self.expire(now);
        match input {
            Input::Syn { packet, syn, is_local } => self.syn(now, packet, syn, is_local),
            Input::Decided(ticket, decision) => self.decided(now, ticket, decision),
            Input::Tick => {}
        }
    }

    /// Returns the next output. Drain it after each event.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to call [`Self::handle`] with [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        let first = [self.held.first(), self.remembered.first(), self.releases.first()];
        first.into_iter().flatten().map(|(at, _)| *at).min()
    }

    /// Returns how many SYNs are held now.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Returns how many connections are known, held or remembered.
    pub fn known(&self) -> usize {
        self.entries.len()
    }

    /// Returns the counts since the start.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    fn syn(&mut self, now: Instant, packet: PacketId, syn: Syn, is_local: bool) {
        let key = (syn.client, syn.server);
        if let Some(entry) = self.entries.get(&key) {
            if entry.syn.isn == syn.isn {
                return self.again(now, packet, key, is_local);
            }
            if let State::Held(before) = entry.state {
                self.counts.replaced += 1;
                self.outputs.push_back(Output::Abandon(entry.ticket));
                self.outputs.extend(before.map(|before| Output::Verdict(before, false)));
            }
            self.forget(key);
        }
        if self.held.len() >= self.config.held_max {
            self.counts.overflowed += 1;
            if self.config.overflow == Overflow::Refuse {
                self.tell(&syn, Answer::Reset);
            }
            return self.verdict(packet, self.config.overflow == Overflow::Early);
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.counts.held += 1;
        let (client, server) = key;
        self.outputs.push_back(Output::Ask { ticket, queue: packet.queue, client, server });
        let until = now + self.config.wait_max;
        self.held.insert((until, ticket));
        self.tickets.insert(ticket, key);
        let state = State::Held(Some(packet));
        self.entries
            .insert(key, Entry { ticket, syn, state, until, is_local, came: 0, repeats: 0, release: None });
        self.came(now, key, is_local);
    }

    /// Plans when the packet that has come is dropped again.
    fn came(&mut self, now: Instant, key: Key, is_local: bool) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let timeout = FIRST_TIMEOUT * 2_u32.pow(entry.came.min(DOUBLINGS_MAX));
        entry.came = entry.came.saturating_add(1);
        if is_local {
            let at = now + timeout.saturating_sub(RELEASE_BEFORE);
            entry.release = Some(at);
            self.releases.insert((at, entry.ticket));
        }
    }

    /// A SYN that came before.
    fn again(&mut self, now: Instant, packet: PacketId, key: Key, is_local: bool) {
        self.counts.repeated += 1;
        let Some(entry) = self.entries.get_mut(&key) else { return };
        match entry.state {
            State::Held(None) => {
                entry.state = State::Held(Some(packet));
                self.came(now, key, is_local);
            }
            // The first one is enough: the kernel would refuse a second entry in conntrack.
            State::Held(Some(_)) => self.verdict(packet, false),
            State::Admitted => self.verdict(packet, true),
            State::Refused(answer) => {
                entry.repeats = 0;
                let syn = entry.syn.clone();
                self.tell(&syn, answer);
                self.verdict(packet, false);
                self.remember(now, key, State::Refused(answer));
                self.plan_repeat(now, key, answer);
            }
        }
    }

    fn decided(&mut self, now: Instant, ticket: Ticket, decision: Decision) {
        let Some(key) = self.tickets.get(&ticket).copied() else { return };
        let Some(Entry { state: State::Held(packet), syn, .. }) = self.entries.get(&key) else { return };
        let packet = *packet;
        match decision {
            Decision::Early => {
                self.counts.early += 1;
                self.pass(packet);
                self.forget(key);
            }
            Decision::Admit => {
                self.counts.admitted += 1;
                self.pass(packet);
                self.remember(now, key, State::Admitted);
            }
            Decision::Refuse(answer) => {
                let syn = syn.clone();
                self.refuse(now, key, (packet, &syn), answer);
            }
        }
    }

    /// Lets a packet go on. Without one, the retransmitted SYN passes when it comes.
    fn pass(&mut self, packet: Option<PacketId>) {
        self.outputs.extend(packet.map(|packet| Output::Verdict(packet, true)));
    }

    fn refuse(&mut self, now: Instant, key: Key, (packet, syn): (Option<PacketId>, &Syn), answer: Answer) {
        let place = Answer::ALL.iter().position(|one| *one == answer);
        if let Some(count) = place.and_then(|place| self.counts.refused.get_mut(place)) {
            *count += 1;
        }
        self.tell(syn, answer);
        self.outputs.extend(packet.map(|packet| Output::Verdict(packet, false)));
        self.remember(now, key, State::Refused(answer));
        self.plan_repeat(now, key, answer);
    }

    /// Plans when the answer is sent again.
    fn plan_repeat(&mut self, now: Instant, key: Key, answer: Answer) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let is_lost = entry.is_local && answer.icmp(entry.syn.server.is_ipv6()).is_some();
        let Some(after) = REPEAT_AFTER.get(entry.repeats).filter(|_| is_lost) else { return };
        let at = now + *after;
        entry.repeats += 1;
        entry.release = Some(at);
        self.releases.insert((at, entry.ticket));
    }

    fn tell(&mut self, syn: &Syn, answer: Answer) {
        if let Some(packet) = syn.answered(answer) {
            self.outputs.push_back(Output::Send(syn.client, packet));
        }
    }

    fn verdict(&mut self, packet: PacketId, passes: bool) {
        self.outputs.push_back(Output::Verdict(packet, passes));
    }

    /// Keeps the answer for SYNs that come again.
    fn remember(&mut self, now: Instant, key: Key, state: State) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        self.held.remove(&(entry.until, entry.ticket));
        self.remembered.remove(&(entry.until, entry.ticket));
        if let Some(at) = entry.release.take() {
            self.releases.remove(&(at, entry.ticket));
        }
        entry.state = state;
        entry.until = now
            + match state {
                State::Refused(Answer::Silent) => SILENT_MEMORY,
                State::Refused(_) => REFUSED_MEMORY,
                State::Admitted | State::Held(_) => ADMITTED_MEMORY,
            };
        self.remembered.insert((entry.until, entry.ticket));
        while self.remembered.len() > self.config.held_max {
            let first = self.remembered.first().copied();
            let Some(key) = first.and_then(|(_, ticket)| self.tickets.get(&ticket)).copied() else { return };
            self.forget(key);
        }
    }

    fn forget(&mut self, key: Key) {
        let Some(entry) = self.entries.remove(&key) else { return };
        self.tickets.remove(&entry.ticket);
        self.held.remove(&(entry.until, entry.ticket));
        self.remembered.remove(&(entry.until, entry.ticket));
        if let Some(at) = entry.release {
            self.releases.remove(&(at, entry.ticket));
        }
    }

    fn release(&mut self, now: Instant) {
        while let Some((at, ticket)) = self.releases.first().copied()
            && at <= now
        {
            self.releases.pop_first();
            let Some(entry) = self.tickets.get(&ticket).and_then(|key| self.entries.get_mut(key)) else {
                continue;
            };
            entry.release = None;
            match entry.state {
                State::Held(packet @ Some(_)) => {
                    entry.state = State::Held(None);
                    self.outputs.extend(packet.map(|packet| Output::Verdict(packet, false)));
                }
                State::Refused(answer) => {
                    let (key, syn) = ((entry.syn.client, entry.syn.server), entry.syn.clone());
                    self.tell(&syn, answer);
                    self.plan_repeat(now, key, answer);
                }
                State::Held(None) | State::Admitted => {}
            }
        }
    }

    fn expire(&mut self, now: Instant) {
        self.release(now);
        while let Some((at, ticket)) = self.remembered.first().copied()
            && at <= now
        {
            self.remembered.pop_first();
            if let Some(key) = self.tickets.get(&ticket).copied() {
                self.forget(key);
            }
        }
        while let Some((at, ticket)) = self.held.first().copied()
            && at <= now
        {
            self.held.pop_first();
            let Some(key) = self.tickets.get(&ticket).copied() else { continue };
            self.outputs.push_back(Output::Abandon(ticket));
            if let Some(Entry { state: State::Held(packet), syn, .. }) = self.entries.get(&key).cloned() {
                self.refuse(now, key, (packet, &syn), Answer::Silent);
            }
        }
    }
}
