//! The associations of one clients' socket: their flows, from the first datagram to the record.

use super::clients::Clients;
use super::path::{Found, PathId, Paths, State, Users, Waiting, first_of, order};
use super::ready::Ready;
use crate::carry::datagrams::{Direct, Remote, associate, connect, probe};
use crate::carry::{Failure, Gate, resolve};
use crate::function::Datagrams;
use crate::intercept::Listening;
use crate::live::LiveFlow;
use crate::reactor::{self, UdpSocket};
use crate::session::Entry;
use crate::worker::{Admission, Worker};
use sidetrack_core::association::{Config, Counts, Dropped, Id, Input, MappingId, Output, Table};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, HostName, Side};
use sidetrack_core::policy::{Action, Carry, Resolve, Verdict};
use sidetrack_sys::sockopt;
use sidetrack_sys::udp::batch::{Batch, Target};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// How the datagrams of an association get to its server.
#[derive(Debug)]
pub(super) enum Server {
    /// Not yet.
    None,
    /// By a socket that is connected to the server.
    Own(UdpSocket),
    /// By a path to many servers.
    Path(PathId, Remote),
}

/// An association that is not over.
pub(super) struct Association {
    pub id: Id,
    pub mapping: MappingId,
    pub entry: Entry,
    pub flow: Flow,
    /// The client, as the socket's family writes it, and the address that it has sent to: answers leave from there.
    pub client: Target,
    /// The address and port that a client has sent to, if it was captured or the address represents a name.
    pub asked: Option<SocketAddr>,
    /// The side that has sent the first datagram.
    pub from: Side,
    pub server: Server,
    /// The functions that its datagrams pass. Boxed: most have none.
    pub functions: Option<Box<Datagrams>>,
    /// Datagrams of that side that wait until the association is open. The table bounds them.
    pub held: Vec<Box<[u8]>>,
    pub waker: Waker,
    /// Its place among all flows, and its descriptors if it has its own.
    pub admission: Option<Admission>,
}

/// All associations of one socket.
pub(super) struct Associations {
    pub worker: Arc<Worker>,
    pub listening: Arc<Listening>,
    /// The configuration by which the associations were decided.
    pub config: Arc<crate::config::Config>,
    /// Where clients send to.
    pub socket: UdpSocket,
    pub clients: Clients,
    pub table: Table,
    /// By the slot of the id. Boxed: the list grows by doubling.
    pub slots: Vec<Option<Box<Association>>>,
    pub paths: Paths,
    /// The only mapping, if all associations belong to one client and it has one.
    pub mapping: Option<MappingId>,
    pub ready: Arc<Ready>,
    /// Wakes for the clients' socket.
    pub waker: Waker,
    /// The slots that are looked at now.
    looked: Vec<u32>,
    found: Rc<RefCell<Vec<Found>>>,
    pub dropped: [u64; Dropped::ALL.len()],
}

/// Time between two questions whether a hop has a place.
const AGAIN: Duration = Duration::from_millis(10);

/// The slot number that stands for the clients' socket, and for what tasks have found.
pub(super) const LISTENER: u32 = u32::MAX;

/// The bit that tells a path's index from a slot number.
pub(super) const PATH: u32 = 1 << 31;

thread_local! {
    /// The memory for batches. The tasks of a worker use it in turn.
    pub(super) static BATCH: Cell<Option<Box<Batch>>> = const { Cell::new(None) };
}

impl Associations {
    pub(super) fn new(
        worker: Arc<Worker>,
        listening: Arc<Listening>,
        socket: UdpSocket,
        clients: Clients,
        config: Config,
    ) -> Self {
        let ready = Arc::new(Ready::default());
        ready.notify(LISTENER);
        Self {
            config: worker.config(),
            worker,
            listening,
            socket,
            clients,
            table: Table::new(config),
            slots: Vec::new(),
            paths: Paths::default(),
            mapping: None,
            waker: ready.waker(LISTENER),
            ready,
            looked: Vec::new(),
            found: Rc::default(),
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

    /// Ends all associations.
    pub(super) fn close(&mut self, reason: EndReason) {
        let now = self.worker.clock.now();
        let ids: Vec<_> = self.slots.iter().flatten().map(|association| association.id).collect();
        for id in ids {
            self.table.handle(now, Input::End(id, reason));
            self.finish();
        }
        self.publish();
    }

    /// Handles what is ready. Ready after some work, so that the caller can look at its other events.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.ready.set_task(cx.waker());
        let mut looked = std::mem::take(&mut self.looked);
        self.ready.exchange(&mut looked);
        if looked.is_empty() {
            self.looked = looked;
            return Poll::Pending;
        }
        self.follow_rules();
        let mut batch = BATCH.take().unwrap_or_default();
        for &slot in &looked {
            match slot {
                LISTENER => {
                    self.take_found();
                    self.read_clients(&mut batch);
                }
                path if path & PATH != 0 => self.look_at_path(path & !PATH, &mut batch),
                slot => self.look_at(slot, &mut batch),
            }
        }
        BATCH.set(Some(batch));
        self.looked = looked;
        self.publish();
        Poll::Ready(())
    }

    /// Returns an association that is not over.
    pub(super) fn find(&self, id: Id) -> Option<&Association> {
        self.slots.get(id.slot as usize)?.as_deref().filter(|association| association.id == id)
    }

    pub(super) fn find_mut(&mut self, id: Id) -> Option<&mut Association> {
        self.slots.get_mut(id.slot as usize)?.as_deref_mut().filter(|association| association.id == id)
    }

    /// Does what the table wants. `payload`: the datagram of this input. `client`: where answers to it go. Returns the
    /// association that the datagram passes in.
    pub(super) fn outputs(&mut self, payload: Option<&[u8]>, client: Target) -> Option<Id> {
        let mut passed = None;
        while let Some(output) = self.table.poll() {
            match output {
                Output::Begin { id, mapping, from, .. } => self.begin(id, mapping, (client, from)),
                Output::Forward(id) => passed = self.passed(id, Side::Client, payload),
                Output::Deliver(id) => passed = self.passed(id, Side::Server, payload),
                Output::Hold(id) => {
                    if let Some((association, payload)) = self.find_mut(id).zip(payload) {
                        association.held.push(payload.into());
                    }
                }
                Output::Drop(why) => self.dropped[why as usize] += 1,
                Output::Release(id) => self.release(id),
                Output::End { id, reason, counts } => self.end(id, reason, None, counts),
                Output::Unmapped(mapping) => {
                    // The client has no outside port any more.
                    self.paths.remove_of(mapping);
                    if self.mapping == Some(mapping) {
                        self.mapping = None;
                        self.paths.clear();
                    }
                }
            }
        }
        passed
    }

    /// Does what the table wants after an input without a datagram.
    pub(super) fn finish(&mut self) {
        let nowhere = Target { to: self.listening.address, from: None };
        self.outputs(None, nowhere);
    }

    fn release(&mut self, id: Id) {
        let Some(association) = self.find_mut(id) else { return };
        let (from, client, asked) = (association.from, association.client, association.asked);
        let remote = association.flow.orig_dst.socket_addr();
        for datagram in std::mem::take(&mut association.held) {
            if self.passed(id, from, Some(&datagram)).is_none() {
                continue;
            }
            match (from, remote) {
                (Side::Client, _) => self.forward_one(id, &datagram),
                (Side::Server, Some(remote)) => {
                    self.deliver(&client, &asked.unwrap_or(remote).into(), &datagram);
                }
                (Side::Server, None) => {}
            }
        }
        self.count(id);
    }

    pub(super) fn end(&mut self, id: Id, reason: EndReason, detail: Option<String>, counts: Counts) {
        let place = self.slots.get_mut(id.slot as usize);
        let Some(mut association) = place.and_then(|place| place.take_if(|it| it.id == id)) else { return };
        let detail = detail.or_else(|| self.told(&association.server, counts.packets_up));
        self.leave_path(id, &association.server);
        show(association.entry.live(), counts);
        association.entry.end(reason, detail);
    }

    /// Returns what the path of an association says of its datagrams, in words.
    fn told(&mut self, server: &Server, sent: u64) -> Option<String> {
        let Server::Path(path, remote) = server else { return None };
        let State::Open(path) = &self.paths.get(*path)?.state else { return None };
        let copies = path.copies(remote).filter(|copies| *copies != sent);
        let copies = copies.map(|copies| format!("{copies} copies of its datagrams were sent"));
        [copies, path.happened(remote)]
            .into_iter()
            .flatten()
            .reduce(|copies, happened| copies + "; " + &happened)
    }

    /// Copies the counts of an association to where they are shown.
    pub(super) fn count(&self, id: Id) {
        if let Some((association, counts)) = self.find(id).zip(self.table.counts(id)) {
            let live = association.entry.live();
            show(live, counts);
            live.touch(live.age());
        }
    }

    /// The first datagram of an association has come: makes the flow, and asks policy.
    fn begin(&mut self, id: Id, mapping: MappingId, (client, from): (Target, Side)) {
        let Some((_, destination)) = self.table.parties(id) else { return };
        let mut flow = crate::session::undecided(&self.listening, sockopt::canonical(client.to)).flow;
        flow.protocol = sidetrack_core::flow::Protocol::Udp;
        flow.client = self.listening.client(flow.client);
        flow.orig_dst = destination.clone();
        let mut asked = None;
        match &self.clients {
            Clients::Associated(associated) => {
                flow.user.clone_from(&associated.user);
                self.mapping = Some(mapping);
            }
            Clients::Captured(captured) if from == Side::Client => asked = captured.asked,
            Clients::Captured(_) => asked = destination.socket_addr(),
            Clients::Asking { .. } => {}
        }
        let entry = Entry::new(&self.worker);
        let waker = self.ready.waker(id.slot);
        entry.live().set_waker(&waker);
        let decided = self.decide(&entry, &mut flow, (client.to, asked));
        if matches!((&self.clients, &flow.orig_dst.host), (Clients::Associated(_), Host::Name(_))) {
            // If the client has asked an address that represents the name, it expects answers from there.
            asked = destination.socket_addr();
        }
        let decided = decided.and_then(|carry| self.worker.begins_flows().map(|()| carry));
        let admitted = decided.and_then(|carry| {
            let admission = self.admit((id, mapping), &flow, &carry)?;
            let made = self.worker.functions().datagrams(carry.chain.as_deref(), &flow);
            let functions = made.map_err(|stop| Failure::new(stop.reason, stop.detail))?;
            Ok((carry, functions, admission))
        });
        let (verdict, functions, admission) = match admitted {
            Ok((carry, functions, admission)) => (Ok(carry), functions, Some(admission)),
            Err(failure) => (Err(failure), None, None),
        };
        let slot = id.slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        let (held, server) = (Vec::new(), Server::None);
        let association = Association {
            id,
            mapping,
            entry,
            flow,
            client,
            asked,
            from,
            server,
            functions,
            held,
            waker,
            admission,
        };
        self.slots[slot] = Some(Box::new(association));
        match verdict {
            Ok(carry) => self.reach(id, carry),
            Err(failure) => self.refuse(id, failure),
        }
    }

    /// Asks policy about a flow. `client`, `asked`: the two ends of the client's socket, if the flow was captured.
    fn decide(
        &self,
        entry: &Entry,
        flow: &mut Flow,
        (client, asked): (SocketAddr, Option<SocketAddr>),
    ) -> Result<Arc<Carry>, Failure> {
        let config = self.worker.config();
        let named = self.name(flow, asked);
        if let Host::Name(name) = &flow.orig_dst.host {
            flow.host = Some(name.clone());
        }
        if let Err(failure) = named {
            self.find_owner(flow, client, asked);
            entry.live().decide(crate::live::Decided::new(flow.clone(), None));
            return Err(failure);
        }
        let ours = self.is_our_question(client, asked).then(|| Verdict {
            rule: None,
            index: None,
            action: Action::Carry(Arc::default()),
            why: "our own question for the address of a name".into(),
            agreement: None,
        });
        let Some(verdict) = ours.or_else(|| self.ask_rules(flow, client, asked)) else {
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

    /// Finds the server's address, at once or after its name is resolved.
    fn reach(&mut self, id: Id, carry: Arc<Carry>) {
        let Some(association) = self.find(id) else { return };
        let destination = carry.destination(&association.flow);
        if let Some(address) = destination.socket_addr() {
            return self.open(id, carry, None, vec![address]);
        }
        let is_direct = carry.carrier == Carrier::Direct;
        let is_localhost = matches!(&destination.host, Host::Name(name) if name.is_localhost());
        if !is_direct && carry.resolve != Resolve::Local && !is_localhost {
            // The last hop resolves it. For `localhost` the address is known, so it is checked here.
            return self.join(Waiting { id, carry, remote: Remote::Name(destination) });
        }
        let (found, ready) = (self.found.clone(), self.ready.clone());
        reactor::spawn(async move {
            let addresses = resolve(&destination).await;
            found.borrow_mut().push(Found::Addresses(id, carry, addresses));
            ready.notify(LISTENER);
        });
    }

    fn take_found(&mut self) {
        let all = std::mem::take(&mut *self.found.borrow_mut());
        for found in all {
            match found {
                Found::Addresses(id, carry, addresses) => {
                    let Some(association) = self.find(id) else { continue };
                    let name = match carry.destination(&association.flow).host {
                        Host::Name(name) => Some(name),
                        Host::Ip(_) => None,
                    };
                    match addresses {
                        Ok(addresses) => self.open(id, carry, name.as_ref(), addresses),
                        Err(failure) => self.refuse(id, failure),
                    }
                }
                Found::Path(path, Ok(open)) => {
                    let Some(only) = self.paths.get(path).map(|place| place.users.only) else { continue };
                    if only.is_some_and(|id| self.find(id).is_none()) {
                        // The association has ended meanwhile.
                        self.paths.remove(path);
                        continue;
                    }
                    let Some(place) = self.paths.get(path) else { continue };
                    let before = std::mem::replace(&mut place.state, State::Open(open));
                    self.ready.notify(path.index | PATH);
                    if let State::Opening(waiting) = before {
                        waiting.into_iter().for_each(|waiting| self.opened(waiting, path));
                    }
                }
                Found::Path(path, Err(failure)) => {
                    // Another association on the same hops gives its place.
                    if failure.reason == EndReason::Limit && self.leave_hops(path, &failure.detail) {
                        self.ask_again(path);
                    } else {
                        self.refuse_waiting(path, &failure);
                    }
                }
            }
            self.finish();
        }
    }

    /// Opens the way to the first of these addresses that may be dialled and has a route.
    fn open(&mut self, id: Id, carry: Arc<Carry>, name: Option<&HostName>, addresses: Vec<SocketAddr>) {
        let Some(association) = self.find(id) else { return };
        let config = self.worker.config();
        let (policy, flow, peer) = (&*config.policy, &association.flow, association.flow.client.ip());
        let is_configured = matches!(self.clients, Clients::Asking { .. });
        let gate = Gate { policy, flow, carry: &carry, resource: None, peer, is_configured };
        let admitted = match gate.admit_all(name, addresses) {
            Ok(admitted) => admitted,
            Err(failure) => return self.refuse(id, failure),
        };
        let dialing = self.worker.dialing();
        let done = match (&carry.carrier, &self.clients) {
            (Carrier::Direct, Clients::Asking { .. }) => {
                first_of(admitted, |to| connect(&dialing, to)).map(|(socket, to)| (Some(socket), to))
            }
            (Carrier::Direct, Clients::Associated(_) | Clients::Captured(_)) => {
                first_of(admitted, |to| probe(&dialing, to)).map(|((), to)| (None, to))
            }
            _ => first_of(admitted, |_| Ok(())).map(|((), to)| (None, to)),
        };
        match done {
            Ok((Some(socket), to)) => {
                let remote = Some(sockopt::canonical(to.address()));
                self.begins(id, Server::Own(socket), remote, &carry);
                // The loop tells of the socket once the task has asked for it.
                self.ready.notify(id.slot);
            }
            Ok((None, to)) => self.join(Waiting { id, carry, remote: Remote::Address(to) }),
            Err(failure) => self.refuse(id, failure),
        }
    }

    /// Lets an association use the path of its carrier: one that is open, one that opens, or a new one.
    fn join(&mut self, waiting: Waiting) {
        let carrier = &waiting.carry.carrier;
        let is_own = self.is_own(carrier, &waiting.remote);
        let mapping = self.find(waiting.id).and_then(|association| self.mapping_of_path(association.mapping));
        let v6 = *carrier == Carrier::Direct && waiting.remote.address().is_some_and(|to| to.is_ipv6());
        let descriptors = if is_own { None } else { self.shares_descriptors(waiting.id) };
        if !is_own && let Some(path) = self.paths.shared(carrier, mapping) {
            self.paths.keep(path, v6, descriptors);
            match self.paths.get(path).map(|path| &mut path.state) {
                Some(State::Opening(others)) => others.push(waiting),
                _ => self.opened(waiting, path),
            }
            return;
        }
        let ready = self.ready.clone();
        let waker = |index: u32| ready.waker(index | PATH);
        let users = Users { mapping, only: is_own.then_some(waiting.id) };
        let carrier = carrier.clone();
        if carrier == Carrier::Direct {
            let direct = Box::new(Direct::new(self.worker.dialing()));
            let path = self.paths.add(carrier, users, State::Open(direct), waker);
            self.paths.keep(path, v6, descriptors);
            return self.opened(waiting, path);
        }
        let (id, carry, destination) = (waiting.id, waiting.carry.clone(), waiting.remote.destination());
        let path = self.paths.add(carrier, users, State::Opening(vec![waiting]), waker);
        self.paths.keep(path, v6, descriptors);
        self.ask_for_path((id, path), carry, destination, false);
    }

    /// Asks the hops of a carrier, or a node of the overlay, for a path to this destination, and to others if the carrier can.
    /// `has_left`: an association has given its place, and the hop may not have said yet that it is free.
    pub(super) fn ask_for_path(
        &self,
        (id, path): (Id, PathId),
        carry: Arc<Carry>,
        destination: Destination,
        has_left: bool,
    ) {
        let Some(association) = self.find(id) else { return };
        let (worker, flow) = (self.worker.clone(), association.flow.clone());
        let (found, ready) = (self.found.clone(), self.ready.clone());
        let limit = carry.connect_timeout_ms.unwrap_or(worker.config().limits.connect_timeout_ms);
        reactor::spawn(async move {
            let dialing = worker.dialing();
            let order = order(&worker, &dialing, &carry, &flow, destination);
            let asked = Box::pin(async {
                loop {
                    match associate(&order).await {
                        Err(failure) if has_left && failure.reason == EndReason::Limit => {
                            reactor::sleep(AGAIN).await;
                        }
                        done => break done,
                    }
                }
            });
            let late = || Failure::new(EndReason::ConnectTimeout, "there was no path for datagrams in time");
            let done = reactor::timeout(Duration::from_millis(limit), asked).await;
            let done = done.unwrap_or_else(|_| Err(late()));
            found.borrow_mut().push(Found::Path(path, done));
            ready.notify(LISTENER);
        });
    }

    /// The path of an association is open.
    fn opened(&mut self, waiting: Waiting, path: PathId) {
        let Waiting { id, carry, remote } = waiting;
        let address = remote.address();
        let taken = match self.paths.get(path).map(|path| &path.state) {
            Some(State::Open(path)) => path.taken(),
            _ => None,
        };
        if let Some(association) = self.find(id) {
            association.entry.live().carried_by(taken);
            self.begins(id, Server::Path(path, remote), address, &carry);
            // A path's sockets may have been opened by this datagram: they are watched once the path was polled.
            self.ready.notify(path.index | PATH);
        }
    }

    fn begins(&mut self, id: Id, server: Server, remote: Option<SocketAddr>, carry: &Carry) {
        let Some(association) = self.find_mut(id) else { return };
        association.entry.live().connected(association.entry.live().age());
        association.server = server;
        let millis = |value: Option<u64>| value.map(Duration::from_millis);
        let (idle, lifetime) = (millis(carry.idle_timeout_ms), millis(carry.lifetime_ms));
        self.table.handle(self.worker.clock.now(), Input::Opened { id, remote, idle, lifetime });
    }

    pub(super) fn refuse(&mut self, id: Id, failure: Failure) {
        self.tell_of(id, self.refusal(Some(failure.reason)), 0);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_association_holds_little() {
        // With its entry in the table of core, its place among live flows and its waker, less than 4 KiB.
        assert!(size_of::<Association>() <= 1024, "{} bytes", size_of::<Association>());
        assert!(size_of::<LiveFlow>() <= 1024, "{} bytes", size_of::<LiveFlow>());
        assert!(size_of::<crate::live::Decided>() <= 1024, "{} bytes", size_of::<crate::live::Decided>());
    }
}
