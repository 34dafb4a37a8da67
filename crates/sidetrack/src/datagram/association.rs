//! The associations of one listening socket: their flows, their sockets to servers, and what waits for them.

use super::ROUNDS;
use super::ready::Ready;
use crate::carry::{Admitted, Failure, Gate, datagrams, resolve};
use crate::intercept::Listening;
use crate::live::LiveFlow;
use crate::reactor::{self, UdpSocket};
use crate::session::Entry;
use crate::worker::{Admission, Worker};
use sidetrack_core::association::{Config, Counts, Dropped, Id, Input, MappingId, Output, Table};
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, HostName, Process};
use sidetrack_core::policy::{Action, Carry, Decision, Seen};
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use sidetrack_sys::udp::batch::{Batch, Target};
use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// An association that is not over.
struct Association {
    id: Id,
    mapping: MappingId,
    entry: Entry,
    flow: Flow,
    /// The client, as the socket's family writes it, and the address that it has sent to: answers leave from there.
    client: Target,
    /// Set once it is open.
    server: Option<UdpSocket>,
    /// Datagrams of the client that wait until it is open. The table bounds them.
    held: Vec<Box<[u8]>>,
    waker: Waker,
    _admission: Admission,
}

/// The resolved addresses of an association's server.
type Resolved = (Id, Arc<Carry>, Result<Vec<SocketAddr>, Failure>);

/// All of one listening socket.
pub(super) struct Associations {
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    socket: UdpSocket,
    server: Destination,
    table: Table,
    /// By the slot of the id.
    slots: Vec<Option<Association>>,
    ready: Arc<Ready>,
    /// Wakes for the listening socket.
    waker: Waker,
    /// The slots that are looked at now.
    looked: Vec<u32>,
    batch: Batch,
    resolved: Rc<RefCell<Vec<Resolved>>>,
    dropped: [u64; Dropped::ALL.len()],
}

/// The slot number that stands for the listening socket, and for resolved names.
const LISTENER: u32 = u32::MAX;

impl Associations {
    pub(super) fn new(
        worker: Arc<Worker>,
        listening: Arc<Listening>,
        socket: UdpSocket,
        server: Destination,
        config: Config,
    ) -> Self {
        let ready = Arc::new(Ready::default());
        ready.notify(LISTENER);
        Self {
            worker,
            listening,
            socket,
            server,
            table: Table::new(config),
            slots: Vec::new(),
            waker: ready.waker(LISTENER),
            ready,
            looked: Vec::new(),
            batch: Batch::new(),
            resolved: Rc::default(),
            dropped: [0; Dropped::ALL.len()],
        }
    }

    /// Returns when [`Associations::tick`] is due.
    pub(super) fn deadline(&self) -> Option<std::time::Instant> {
        self.table.deadline().map(|at| self.worker.clock.instant(at))
    }

    /// Ends associations whose time is over.
    pub(super) fn tick(&mut self) {
        self.table.handle(self.worker.clock.now(), Input::Tick);
        self.finish();
    }

    /// Ends all associations: the listener stops.
    pub(super) fn close(&mut self) {
        let now = self.worker.clock.now();
        let ids: Vec<_> = self.slots.iter().flatten().map(|association| association.id).collect();
        for id in ids {
            self.table.handle(now, Input::End(id, EndReason::Shutdown));
            self.finish();
        }
    }

    /// Handles what is ready. Ready after some work, so that the caller can look at its other events.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.ready.set_task(cx.waker());
        let mut looked = std::mem::take(&mut self.looked);
        self.ready.exchange(&mut looked);
        for &slot in &looked {
            match slot {
                LISTENER => {
                    self.open_resolved();
                    self.read_clients();
                }
                slot => self.look_at(slot),
            }
        }
        let worked = !looked.is_empty();
        self.looked = looked;
        self.publish();
        if worked { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Reads from the listening socket.
    fn read_clients(&mut self) {
        for _ in 0..ROUNDS {
            match self.socket.receive(&mut self.batch) {
                Ok(count) => self.take_from_clients(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An ICMP error about an answer: the socket cannot say which client it is about.
                Err(_) => {}
            }
        }
        if self.socket.poll_read_ready(&mut Context::from_waker(&self.waker)).is_ready() {
            self.ready.notify(LISTENER);
        }
    }

    /// Passes on the messages in the batch. Neighbours of one association leave in one call.
    fn take_from_clients(&mut self, count: usize) {
        let now = self.worker.clock.now();
        let mut run: Option<(Id, usize)> = None;
        for at in 0..count {
            let forwards = self.take_from_client(now, at);
            if let Some((id, first)) = run.filter(|(id, _)| Some(*id) != forwards) {
                self.forward(id, first..at);
                run = None;
            }
            run = run.or(forwards.map(|id| (id, at)));
        }
        if let Some((id, first)) = run {
            self.forward(id, first..count);
        }
    }

    /// Asks the table about each datagram of a message. Returns the association whose server gets the whole message.
    fn take_from_client(&mut self, now: Instant, at: usize) -> Option<Id> {
        let (Some(from), to) = self.batch.addresses(at) else { return None };
        let client = self.listening.client(sockopt::canonical(from));
        let target = Target { to: from, from: to };
        let sizes = self.batch.datagrams(at).count();
        let mut all = None;
        for number in 0..sizes {
            let bytes = self.batch.datagrams(at).nth(number).map_or(0, <[u8]>::len);
            let input = Input::FromClient { client, destination: &self.server, bytes };
            self.table.handle(now, input);
            let passed = self.outputs(Some((at, number)), target);
            // The first one may be held while the others already pass.
            match (passed, all) {
                (Some(id), None) if number == 0 => all = Some(id),
                (Some(id), None) => self.forward_one(id, at, number),
                _ => {}
            }
        }
        all
    }

    fn forward(&mut self, id: Id, range: std::ops::Range<usize>) {
        let Some(association) = self.slots.get(id.slot as usize).and_then(Option::as_ref) else { return };
        let Some(server) = association.server.as_ref().filter(|_| association.id == id) else { return };
        let sent = server.send(&self.batch, range, None);
        self.dropped[Dropped::Unsent as usize] += sent.lost as u64;
        if let Some(error) = sent.error {
            self.failed(id, &error);
        }
        self.count(id);
    }

    fn forward_one(&mut self, id: Id, at: usize, number: usize) {
        let Some(association) = self.slots.get(id.slot as usize).and_then(Option::as_ref) else { return };
        let Some(server) = &association.server else { return };
        let sent = self.batch.datagrams(at).nth(number).map(|datagram| server.send_one(datagram, None));
        if let Some(Err(error)) = sent {
            self.failed(id, &error);
        }
    }

    /// Looks at an association that was woken: its server has sent, or another thread ends it.
    fn look_at(&mut self, slot: u32) {
        let now = self.worker.clock.now();
        let Some(association) = self.slots.get(slot as usize).and_then(Option::as_ref) else { return };
        let id = association.id;
        if let Some(reason) = association.entry.live().ending() {
            self.table.handle(now, Input::End(id, reason));
            return self.finish();
        }
        association.entry.live().set_waker(&association.waker);
        for _ in 0..ROUNDS {
            let Some(association) = self.slots.get(slot as usize).and_then(Option::as_ref) else { return };
            let Some(server) = &association.server else { return };
            match server.receive(&mut self.batch) {
                Ok(count) => self.take_from_server(now, id, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => self.failed(id, &error),
            }
        }
        let Some(association) = self.slots.get(slot as usize).and_then(Option::as_ref) else { return };
        let cx = &mut Context::from_waker(&association.waker);
        if association.server.as_ref().is_some_and(|server| server.poll_read_ready(cx).is_ready()) {
            self.ready.notify(slot);
        }
    }

    /// Passes the messages in the batch to the client.
    fn take_from_server(&mut self, now: Instant, id: Id, count: usize) {
        let Some(association) = self.slots.get(id.slot as usize).and_then(Option::as_ref) else { return };
        let (mapping, target) = (association.mapping, association.client);
        association.entry.live().first_byte(association.entry.live().age());
        for at in 0..count {
            let Some(remote) = self.batch.addresses(at).0.map(sockopt::canonical) else { continue };
            let datagrams = self.batch.datagrams(at).count();
            let mut passed = 0;
            for number in 0..datagrams {
                let bytes = self.batch.datagrams(at).nth(number).map_or(0, <[u8]>::len);
                self.table.handle(now, Input::FromServer { mapping, remote, bytes });
                passed += usize::from(self.outputs(None, target).is_some());
            }
            // The state of an association does not change between the datagrams of one message.
            if passed == datagrams {
                let sent = self.socket.send(&self.batch, at..at + 1, Some(&target));
                self.dropped[Dropped::Unsent as usize] += sent.lost as u64;
            }
        }
        self.count(id);
    }

    /// Does what the table wants. Returns the association that the datagram of this input passes in.
    fn outputs(&mut self, message: Option<(usize, usize)>, client: Target) -> Option<Id> {
        let mut passed = None;
        while let Some(output) = self.table.poll() {
            match output {
                Output::Begin { id, mapping, .. } => self.begin(id, mapping, client),
                Output::Forward(id) | Output::Deliver(id) => passed = Some(id),
                Output::Hold(id) => self.hold(id, message),
                Output::Drop(why) => self.dropped[why as usize] += 1,
                Output::Release(id) => self.release(id),
                Output::End { id, reason, counts } => self.end(id, reason, None, counts),
                Output::Unmapped(_) => {}
            }
        }
        passed
    }

    fn finish(&mut self) {
        let nowhere = Target { to: self.listening.address, from: None };
        self.outputs(None, nowhere);
    }

    fn hold(&mut self, id: Id, message: Option<(usize, usize)>) {
        let association = self.slots.get_mut(id.slot as usize).and_then(Option::as_mut);
        let Some((association, (at, number))) = association.zip(message) else { return };
        if let Some(datagram) = self.batch.datagrams(at).nth(number) {
            association.held.push(datagram.into());
        }
    }

    fn release(&mut self, id: Id) {
        let Some(association) = self.slots.get_mut(id.slot as usize).and_then(Option::as_mut) else { return };
        let held = std::mem::take(&mut association.held);
        let Some(server) = &association.server else { return };
        let mut failed = None;
        for datagram in &held {
            failed = server.send_one(datagram, None).err().or(failed);
        }
        if let Some(error) = failed {
            self.failed(id, &error);
        }
        self.count(id);
    }

    /// An error of the association's socket. Mostly an ICMP error, which ends nothing (RFC 4787 REQ-10).
    fn failed(&mut self, id: Id, error: &io::Error) {
        let Some(association) = self.slots.get(id.slot as usize).and_then(Option::as_ref) else { return };
        let to = association.flow.orig_dst.socket_addr().unwrap_or(self.listening.address);
        let reason = datagrams::failure(error, to).reason;
        self.table.handle(self.worker.clock.now(), Input::Error(id, reason));
    }

    fn end(&mut self, id: Id, reason: EndReason, detail: Option<String>, counts: Counts) {
        let place = self.slots.get_mut(id.slot as usize);
        let Some(mut association) = place.and_then(|place| place.take_if(|it| it.id == id)) else { return };
        show(association.entry.live(), counts);
        association.entry.end(reason, detail);
    }

    /// Copies the counts of an association to where they are shown.
    fn count(&self, id: Id) {
        let Some(association) = self.slots.get(id.slot as usize).and_then(Option::as_ref) else { return };
        if let Some(counts) = self.table.counts(id) {
            let live = association.entry.live();
            show(live, counts);
            live.touch(live.age());
        }
    }

    /// A client has sent its first datagram: makes the flow, and asks policy.
    fn begin(&mut self, id: Id, mapping: MappingId, client: Target) {
        let mut flow = crate::session::undecided(&self.listening, sockopt::canonical(client.to)).flow;
        flow.client = self.listening.client(flow.client);
        flow.orig_dst = self.server.clone();
        if let Host::Name(name) = &self.server.host {
            flow.host = Some(name.clone());
        }
        // Processes are not looked up by UDP sockets: rules that ask for one do not match.
        flow.process = Some(Process::default());
        let entry = Entry::new(&self.worker);
        let waker = self.ready.waker(id.slot);
        entry.live().set_waker(&waker);
        let is_own = || flow.client.ip().is_loopback() || sockopt::is_of_this_host(flow.client.ip());
        let admission = Admission::ask(&self.worker, flow.client.ip(), is_own);
        let (admission, verdict) = match admission {
            Ok(admission) => (admission, self.decide(&entry, &flow)),
            Err(detail) => {
                let mut entry = entry;
                entry.live().decide(crate::live::Decided { flow, verdict: None });
                entry.end(EndReason::Limit, Some(detail));
                return self.table.handle(self.worker.clock.now(), Input::Refused(id, EndReason::Limit));
            }
        };
        let slot = id.slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        let held = Vec::new();
        let (server, _admission) = (None, admission);
        self.slots[slot] =
            Some(Association { id, mapping, entry, flow, client, server, held, waker, _admission });
        match verdict {
            Ok(carry) => self.reach(id, carry),
            Err(failure) => self.refuse(id, failure),
        }
    }

    /// Asks policy about a flow.
    fn decide(&self, entry: &Entry, flow: &Flow) -> Result<Arc<Carry>, Failure> {
        let config = self.worker.config();
        let Decision::Verdict(verdict) = config.policy.decide(flow, Seen::FirstBytes(None)) else {
            // Both are known, so the rules ask for nothing more.
            return Err(Failure::new(EndReason::Internal, "the rules ask for more than a datagram shows"));
        };
        let verdict = self.worker.judge(&config, entry.live(), flow, verdict);
        match &verdict.action {
            Action::Deny => Err(Failure::new(EndReason::PolicyDenied, &*verdict.why)),
            Action::Carry(carry) => match carry.udp_obstacle() {
                Some(why) => Err(Failure::new(EndReason::Unsupported, why)),
                None => Ok(carry.clone()),
            },
        }
    }

    /// Opens the path, at once to an address, otherwise after the name is resolved.
    fn reach(&mut self, id: Id, carry: Arc<Carry>) {
        let Some(association) = self.slots.get(id.slot as usize).and_then(Option::as_ref) else { return };
        let destination = carry.destination(&association.flow);
        if let Some(address) = destination.socket_addr() {
            return self.open(id, &carry, None, vec![address]);
        }
        let (resolved, ready) = (self.resolved.clone(), self.ready.clone());
        reactor::spawn(async move {
            let addresses = resolve(&destination).await;
            resolved.borrow_mut().push((id, carry, addresses));
            ready.notify(LISTENER);
        });
    }

    fn open_resolved(&mut self) {
        let all = std::mem::take(&mut *self.resolved.borrow_mut());
        for (id, carry, addresses) in all {
            let association = self.slots.get(id.slot as usize).and_then(Option::as_ref);
            let Some(association) = association.filter(|association| association.id == id) else { continue };
            let name = match carry.destination(&association.flow).host {
                Host::Name(name) => Some(name),
                Host::Ip(_) => None,
            };
            match addresses {
                Ok(addresses) => self.open(id, &carry, name.as_ref(), addresses),
                Err(failure) => self.refuse(id, failure),
            }
            self.finish();
        }
    }

    /// Opens a socket to the first of these addresses that may be dialled and has a route.
    fn open(&mut self, id: Id, carry: &Carry, name: Option<&HostName>, addresses: Vec<SocketAddr>) {
        let Some(association) = self.slots.get_mut(id.slot as usize).and_then(Option::as_mut) else { return };
        let config = self.worker.config();
        let (policy, flow, peer) = (&*config.policy, &association.flow, association.flow.client.ip());
        let gate = Gate { policy, flow, carry, resource: None, peer, is_configured: true };
        let dialing = self.worker.dialing();
        let connected = gate.admit_all(name, addresses).and_then(|admitted| {
            let mut first = None;
            let mut sockets = admitted.into_iter().filter_map(|to: Admitted| {
                let socket = datagrams::connect(&dialing, to);
                socket.map_err(|failure| first.get_or_insert(failure).clone()).ok().zip(Some(to.address()))
            });
            let socket = sockets.next();
            drop(sockets);
            let none = || Failure::new(EndReason::Unreachable, "no address to try");
            socket.ok_or_else(|| first.unwrap_or_else(none))
        });
        let (socket, remote) = match connected {
            Ok(connected) => connected,
            Err(failure) => return self.refuse(id, failure),
        };
        association.entry.live().connected(association.entry.live().age());
        association.server = Some(socket);
        let millis = |value: Option<u64>| value.map(Duration::from_millis);
        let (idle, lifetime) = (millis(carry.idle_timeout_ms), millis(carry.lifetime_ms));
        let remote = Some(sockopt::canonical(remote));
        self.table.handle(self.worker.clock.now(), Input::Opened { id, remote, idle, lifetime });
        // The loop tells of the socket once the task has asked for it.
        self.ready.notify(id.slot);
    }

    fn refuse(&mut self, id: Id, failure: Failure) {
        self.end(id, failure.reason, Some(failure.detail), Counts::default());
        self.table.handle(self.worker.clock.now(), Input::Refused(id, failure.reason));
    }

    /// Adds dropped datagrams to the counts of the process.
    fn publish(&mut self) {
        if self.dropped.iter().any(|dropped| *dropped > 0) {
            self.worker.drop_datagrams(std::mem::take(&mut self.dropped));
        }
    }
}

fn show(live: &LiveFlow, counts: Counts) {
    let (up, down) = live.bytes();
    live.count(counts.bytes_up.saturating_sub(up), counts.bytes_down.saturating_sub(down));
    live.set_packets(counts.packets_up, counts.packets_down);
}
