//! The state machine of all flows. The module above has the state diagram of a flow.

mod block;
mod look;

use super::flows::{Flows, Place};
use super::{
    Both, Cause, Connection, Entry, EntryId, FastPathKind, Flow, Identity, Input, MarkActions, Obstacle,
    Output, Phase, PortNumber, ShuntAction, Standing, Transport, Tuple, WhenFull, Wish,
};
use crate::flow::Process;
use crate::policy::Policy;
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// How long the fast path may take to confirm an entry.
const CONFIRM: Duration = Duration::from_secs(5);

/// How long to wait before a refused flow is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// The interval at which all flows are checked.
const LOOK: Duration = Duration::from_millis(500);

/// Outputs for which an empty queue keeps memory.
const QUEUE_KEPT: usize = 64;

/// The configuration of a shunt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The ports that marks may name.
    pub ports: BTreeSet<PortNumber>,
    /// The meaning of the numbers of actions in marks.
    pub actions: MarkActions,
    /// The fast path of flows whose mark and rule do not name one.
    pub fast_path: FastPathKind,
    /// Our own rules, for flows whose mark leaves the decision to them.
    pub rules: Option<Arc<Policy>>,
    /// Most entries at a time. The last tenth is reserved for blocked flows.
    pub entries_max: usize,
    /// Most entries of one client address at a time.
    pub entries_max_per_client: usize,
    /// What happens to a flow for which there is no entry.
    pub when_full: WhenFull,
    /// A shunted flow returns to the slow path after this time without a packet.
    pub shunt_idle: Duration,
    /// If the table is full, a blocked flow without a packet for this time makes room for another. The entry of a
    /// blocked flow has no other idle time.
    pub block_idle: Duration,
    /// The interval at which conntrack is told to keep connections whose packets it does not see.
    pub keep_every: Duration,
}

/// The shunt: moves flows to the fast path and back.
#[derive(Clone, Debug)]
pub struct Shunt {
    config: Config,
    flows: Flows,
    /// Flows whose connection has ended or was replaced, but whose entry still exists.
    leaving: BTreeMap<EntryId, Flow>,
    /// The place of each entry's flow, as long as the flow is not in `leaving`.
    entries: BTreeMap<EntryId, Place>,
    clients: BTreeMap<IpAddr, u32>,
    last_entry: u64,
    /// The flow that gets the place of an entry when it is gone.
    successors: BTreeMap<EntryId, Tuple>,
    survey: look::Survey,
    evicted: u64,
    /// When a blocked flow was last sought that could make room.
    room_sought: Option<Instant>,
    listing: bool,
    stopping: bool,
    look_at: Instant,
    outputs: VecDeque<Output>,
}

impl Shunt {
    /// Makes a shunt without flows. Its first output requests a list of the existing connections.
    pub fn new(config: Config, now: Instant) -> Self {
        Self {
            config,
            flows: Flows::default(),
            leaving: BTreeMap::new(),
            entries: BTreeMap::new(),
            clients: BTreeMap::new(),
            last_entry: 0,
            successors: BTreeMap::new(),
            survey: look::Survey::default(),
            evicted: 0,
            room_sought: None,
            listing: true,
            stopping: false,
            look_at: now + LOOK,
            outputs: VecDeque::from([Output::List]),
        }
    }

    /// Returns the flows, in the order of their addresses.
    pub fn flows(&self) -> impl Iterator<Item = &Flow> {
        self.flows.values()
    }

    /// Returns one flow.
    pub fn flow(&self, tuple: &Tuple) -> Option<&Flow> {
        self.flows.get(tuple)
    }

    /// Returns the name of the rule that decided about a flow whose mark leaves the decision to the rules.
    pub fn rule(&self, flow: &Flow) -> Option<&str> {
        let rule = self.config.rules.as_ref()?.rules().get(flow.wish?.rule()?)?;
        Some(&rule.name)
    }

    /// Returns the number of entries that the fast path has or may have.
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Returns the largest number of entries.
    pub const fn entries_max(&self) -> usize {
        self.config.entries_max
    }

    /// Whether all entries were removed after [`Input::Shutdown`].
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the action that policy wants for a flow now. If that is unknown, the flow stays on the slow path.
    pub fn action(&self, flow: &Flow) -> ShuntAction {
        self.wanted(flow).unwrap_or(ShuntAction::Ignore)
    }

    /// Returns why a flow is not on the fast path. `None` if it may be there, or if policy does not want it there.
    pub fn obstacle(&self, flow: &Flow) -> Option<Obstacle> {
        match self.wanted(flow) {
            Err(why) => Some(why),
            Ok(ShuntAction::Ignore) => (flow.pinned == Some(ShuntAction::Ignore)).then_some(Obstacle::Held),
            Ok(action) => match flow.standing {
                Standing::Failed { why, .. } => Some(why),
                _ => flow.obstacle(action),
            },
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        let output = self.outputs.pop_front();
        if output.is_none() {
            // After a change of all flows: the queue of the usual case is short.
            self.outputs.shrink_to(QUEUE_KEPT);
        }
        output
    }

    /// Returns when to call [`Self::handle`] with [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        (!self.flows.is_empty()).then_some(self.look_at)
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        match input {
            Input::Connection(connection) => self.connection(now, &connection, None),
            Input::Pinned(connection, action) => self.connection(now, &connection, Some(action)),
            Input::Ended(connection) => self.ended(&connection),
            Input::SlowCounted(tuple, identity, traffic) => {
                if let Some(flow) = self.flows.get_mut(&tuple).filter(|flow| flow.is(identity)) {
                    flow.tracked = traffic;
                    flow.identity.start_ns = flow.identity.start_ns.or(identity.start_ns);
                    if flow.is_unripe() {
                        self.decide(now, &tuple);
                    }
                }
            }
            Input::Owned(tuple, identity, process) => self.identified(now, &tuple, identity, process),
            Input::EventsLost => {
                if !self.listing {
                    self.listing = true;
                    self.outputs.push_back(Output::List);
                }
            }
            Input::Listed(connections) => self.listed(now, connections),
            Input::Installed(entry) => self.installed(now, entry),
            Input::Failed(entry, why) => self.failed(now, entry, why),
            Input::Counted(entry, traffic) => self.counted(now, entry, traffic),
            Input::Gone(entry, cause, traffic) => {
                self.gone(now, entry, cause, traffic);
                self.succeed(now, entry);
            }
            Input::PathBack => self.path_back(now),
            Input::RulesChanged => self.remove_all(Cause::RulesChanged),
            Input::Withdraw(tuple) => self.withdraw(now, &tuple),
            Input::Shutdown => {
                self.stopping = true;
                self.remove_all(Cause::Shutdown);
            }
            Input::Tick => self.look(now),
        }
    }

    /// Returns the action that policy wants for a flow, or why that is unknown.
    fn wanted(&self, flow: &Flow) -> Result<ShuntAction, Obstacle> {
        let action = match (flow.pinned, flow.mark.action()) {
            (Some(action), _) => action,
            (None, None) => return Ok(ShuntAction::Ignore),
            (None, Some(number)) if self.config.actions.asks_rules(number) => {
                let none = if flow.asked_whose { Obstacle::Unidentified } else { Obstacle::UnknownAction };
                flow.wish.ok_or(none)?.action(flow.ripe)?
            }
            (None, Some(number)) => self.config.actions.action(number).ok_or(Obstacle::UnknownAction)?,
        };
        if action == ShuntAction::Ignore {
            return Ok(action);
        }
        self.ports(flow).map(|_| action).ok_or(Obstacle::UnknownPort)
    }

    /// Returns the fast path for a flow. A block may use any fast path.
    fn path(&self, flow: &Flow, action: ShuntAction) -> FastPathKind {
        let named = flow.mark.action().and_then(|number| match self.config.actions.asks_rules(number) {
            true => flow.wish?.path(),
            false => self.config.actions.path(number),
        });
        named.filter(|_| action == ShuntAction::Shunt).unwrap_or(self.config.fast_path)
    }

    /// Returns the ports of client and server.
    fn ports(&self, flow: &Flow) -> Option<(PortNumber, PortNumber)> {
        let (client, server) = (flow.mark.ingress()?, flow.mark.egress()?);
        let known = self.config.ports.contains(&client) && self.config.ports.contains(&server);
        (known && client != server).then_some((client, server))
    }

    fn connection(&mut self, now: Instant, connection: &Connection, pinned: Option<ShuntAction>) {
        let known = self.flows.get(&connection.tuple).map(|flow| flow.is(connection.identity));
        // Another connection has taken these addresses: finish the old flow before its state is overwritten.
        if known == Some(false) {
            self.replace(&connection.tuple);
        }
        let decided = connection.mark.action().is_some();
        if known != Some(true) {
            if !decided && pinned.is_none() {
                return;
            }
            self.flows.insert(Flow::new(connection, now));
        }
        if let Some(flow) = self.flows.get_mut(&connection.tuple) {
            flow.learn(connection);
            flow.pinned = pinned.or(flow.pinned);
            if flow.standing == Standing::Asking && (!decided || pinned.is_some()) {
                flow.standing = Standing::Slow;
            }
        }
        self.ask_rules(&connection.tuple);
        self.decide(now, &connection.tuple);
    }

    /// Asks our own rules, once, about a flow whose mark leaves the decision to them.
    fn ask_rules(&mut self, tuple: &Tuple) {
        let (Some(flow), Some(rules)) = (self.flows.get_mut(tuple), &self.config.rules) else { return };
        let left_to_rules = flow.mark.action().is_some_and(|number| self.config.actions.asks_rules(number));
        if !left_to_rules || flow.wish.is_some() || flow.asked_whose {
            return;
        }
        // A UDP sender need not have a connected socket, so the process cannot be found: treat it as unknown.
        let nobody = (tuple.transport == Transport::Udp).then(Process::default);
        flow.wish = Wish::of(rules, tuple, nobody.as_ref());
        if flow.wish.is_none() {
            flow.asked_whose = true;
            self.outputs.push_back(Output::Whose(flow.tuple, flow.identity));
        }
    }

    /// Continues with the process behind a flow, if it is known.
    fn identified(&mut self, now: Instant, tuple: &Tuple, identity: Identity, process: &Process) {
        let (Some(flow), Some(rules)) = (self.flows.get_mut(tuple), &self.config.rules) else { return };
        if flow.is(identity) && flow.wish.is_none() {
            flow.wish = Wish::of(rules, tuple, Some(process));
            self.decide(now, tuple);
        }
    }

    /// Moves one flow to where policy wants it.
    fn decide(&mut self, now: Instant, tuple: &Tuple) {
        let Some(flow) = self.flows.get_mut(tuple) else { return };
        flow.ripen(now);
        let Some(flow) = self.flows.get(tuple) else { return };
        let wanted = self.wanted(flow).unwrap_or(ShuntAction::Ignore);
        // The packet filter drops packets with this mark. That also works without a fast path, and after this program
        // has ended.
        if let Some(number) = self.number_to_block(flow) {
            self.outputs.push_back(Output::MarkBlocked(flow.tuple, flow.identity, number));
        }
        let same = wanted == flow.action && self.path(flow, wanted) == flow.path;
        match flow.standing {
            Standing::Requested | Standing::Installed => {
                let cause = match flow.phase {
                    _ if same && flow.obstacle(wanted).is_none() => return,
                    Phase::Closing if same => Cause::Fin,
                    Phase::Reset if same => Cause::Rst,
                    _ if flow.pinned.is_some() => Cause::Withdrawn,
                    _ => Cause::MarkChanged,
                };
                self.remove(tuple, cause);
            }
            Standing::Slow if wanted != ShuntAction::Ignore => self.request(now, tuple, wanted),
            Standing::Failed { until, .. } if wanted != ShuntAction::Ignore && now >= until => {
                self.request(now, tuple, wanted);
            }
            _ => {}
        }
        self.forget_idle(tuple);
    }

    /// Forgets a flow that never had an entry, and that policy does not want to have one.
    fn forget_idle(&mut self, tuple: &Tuple) {
        let idle = self.flows.get(tuple).is_some_and(|flow| {
            flow.standing == Standing::Slow
                && !flow.was_shunted()
                && flow.pinned.is_none()
                && flow.mark.action().is_none()
        });
        if idle {
            self.flows.remove(tuple);
        }
    }

    fn request(&mut self, now: Instant, tuple: &Tuple, action: ShuntAction) {
        let Some(flow) = self.flows.get(tuple) else { return };
        // An earlier connection on these addresses may still have its entry: wait until that is removed.
        let blocked_by_predecessor = self.leaving.values().any(|old| old.tuple == *tuple);
        if self.stopping || blocked_by_predecessor || flow.obstacle(action).is_some() {
            return;
        }
        let Some((client_port, server_port)) = self.ports(flow) else { return };
        let (room, path) = (self.has_room(flow, action), self.path(flow, action));
        let id = EntryId(self.last_entry + 1);
        if !room {
            // The room is for the next attempt. This flow is tried again after `RETRY`.
            self.make_room(now);
        }
        let Some(flow) = self.flows.get_mut(tuple) else { return };
        if !room {
            flow.standing = Standing::Failed { why: Obstacle::Full, until: now + RETRY };
            return;
        }
        self.last_entry = id.0;
        flow.standing = Standing::Requested;
        flow.entry = id;
        (flow.action, flow.path) = (action, path);
        flow.times = super::Times::request(now);
        let block = action == ShuntAction::Block;
        let idle = if block { Entry::NEVER_IDLE } else { self.config.shunt_idle };
        flow.moved = now;
        if let Some(place) = self.flows.place(tuple) {
            self.entries.insert(id, place);
        }
        *self.clients.entry(tuple.client().ip()).or_default() += 1;
        let entry = Entry { id, tuple: *tuple, client_port, server_port, path, block, idle };
        self.outputs.push_back(Output::Install(entry));
    }

    fn has_room(&self, flow: &Flow, action: ShuntAction) -> bool {
        let most = match action {
            ShuntAction::Block => self.config.entries_max,
            _ => self.config.entries_max - self.config.entries_max / 10,
        };
        let of_client = self.clients.get(&flow.tuple.client().ip()).copied().unwrap_or(0);
        self.entries.len() < most && (of_client as usize) < self.config.entries_max_per_client
    }

    fn remove(&mut self, tuple: &Tuple, cause: Cause) {
        let Some(flow) = self.flows.get_mut(tuple) else { return };
        if let (Standing::Requested | Standing::Installed, Some(entry)) = (flow.standing, flow.entry()) {
            flow.standing = Standing::Leaving(cause);
            self.outputs.push_back(Output::Remove(entry, cause));
        }
    }

    fn remove_all(&mut self, cause: Cause) {
        let tuples: Vec<_> = self.flows.tuples().copied().collect();
        tuples.iter().for_each(|tuple| self.remove(tuple, cause));
    }

    fn withdraw(&mut self, now: Instant, tuple: &Tuple) {
        let Some(flow) = self.flows.get_mut(tuple) else { return };
        let pinned = flow.pinned.take().is_some();
        if matches!(flow.standing, Standing::Requested | Standing::Installed) {
            self.remove(tuple, Cause::Withdrawn);
        } else if pinned {
            self.decide(now, tuple);
        }
    }

    fn installed(&mut self, now: Instant, entry: EntryId) {
        let Some(tuple) = self.tuple(entry) else { return };
        let Some(flow) = self.flows.get_mut(&tuple) else { return };
        // A flow that is already being removed stays so.
        if flow.entry() != Some(entry) || flow.standing != Standing::Requested {
            return;
        }
        flow.standing = Standing::Installed;
        flow.installs = flow.installs.saturating_add(1);
        flow.times.install(now);
        self.keep(now, &tuple);
    }

    fn failed(&mut self, now: Instant, entry: EntryId, why: Obstacle) {
        let Some(tuple) = self.release(entry) else { return };
        if self.leaving.contains_key(&entry) {
            return self.finish_leaving(now, entry);
        }
        let Some(flow) = self.flows.get_mut(&tuple).filter(|flow| flow.entry() == Some(entry)) else {
            return;
        };
        match flow.standing {
            Standing::Requested => flow.standing = Standing::Failed { why, until: now + RETRY },
            // Its removal was requested meanwhile, and there is nothing to remove.
            Standing::Leaving(cause) => self.after(now, &tuple, cause),
            _ => {}
        }
    }

    fn counted(&mut self, now: Instant, entry: EntryId, traffic: Both) {
        let tuple = self.tuple(entry);
        let flow = match self.leaving.get_mut(&entry) {
            Some(flow) => Some(flow),
            None => tuple.and_then(|tuple| self.flows.get_mut(&tuple)),
        };
        if let Some(flow) = flow.filter(|flow| flow.entry() == Some(entry)) {
            if flow.now != traffic {
                flow.moved = now;
            }
            flow.now = traffic;
        }
    }

    fn gone(&mut self, now: Instant, entry: EntryId, cause: Cause, traffic: Both) {
        let Some(tuple) = self.release(entry) else { return };
        if let Some(flow) = self.leaving.get_mut(&entry) {
            flow.left(now, cause, traffic);
            return self.finish_leaving(now, entry);
        }
        let Some(flow) = self.flows.get_mut(&tuple).filter(|flow| flow.entry() == Some(entry)) else {
            return;
        };
        // Our own cause comes before the cause that the fast path reports.
        let cause = match flow.standing {
            Standing::Leaving(wanted) => wanted,
            _ => cause,
        };
        flow.left(now, cause, traffic);
        self.after(now, &tuple, cause);
    }

    /// Returns the addresses of an entry's flow. None if there is no such entry.
    fn tuple(&self, entry: EntryId) -> Option<Tuple> {
        let place = self.entries.get(&entry)?;
        // Another flow may have taken the place since this one began to leave.
        let here = self.flows.at(*place).filter(|flow| flow.entry() == Some(entry));
        here.or_else(|| self.leaving.get(&entry)).map(|flow| flow.tuple)
    }

    /// Notes that the fast path no longer has the entry.
    fn release(&mut self, entry: EntryId) -> Option<Tuple> {
        let tuple = self.tuple(entry)?;
        self.entries.remove(&entry);
        if let Some(count) = self.clients.get_mut(&tuple.client().ip()) {
            *count -= 1;
            if *count == 0 {
                self.clients.remove(&tuple.client().ip());
            }
        }
        Some(tuple)
    }

    /// Decides what follows after the fast path has removed an entry.
    fn after(&mut self, now: Instant, tuple: &Tuple, cause: Cause) {
        let Some(flow) = self.flows.get_mut(tuple) else { return };
        flow.standing = Standing::Slow;
        let pinned = flow.pinned.is_some();
        if flow.action == ShuntAction::Block && !pinned && cause.keeps_block() {
            // Do not clear the policy bit: the next packet would pass before the rules have blocked the flow again.
            if cause == Cause::Evicted {
                flow.standing = Standing::Failed { why: Obstacle::Full, until: now + RETRY };
            }
            return self.decide(now, tuple);
        }
        if flow.mark.action().is_some() && !pinned {
            flow.standing = Standing::Asking;
            // This also happens at shutdown: the rules then decide as if this program had never run.
            self.outputs.push_back(Output::Ask(flow.tuple, flow.identity));
        } else if pinned && !cause.is_end() {
            self.decide(now, tuple);
        }
    }

    /// Handles a connection that was replaced by another one with the same addresses.
    fn replace(&mut self, tuple: &Tuple) {
        let Some(mut flow) = self.flows.remove(tuple) else { return };
        flow.ended = true;
        self.part(flow, Cause::Ended);
    }

    /// Removes the entry of a flow whose connection is over, and records the flow.
    fn part(&mut self, mut flow: Flow, cause: Cause) {
        match (flow.standing, flow.entry()) {
            (Standing::Requested | Standing::Installed, Some(entry)) => {
                flow.standing = Standing::Leaving(cause);
                self.outputs.push_back(Output::Remove(entry, cause));
                self.leaving.insert(entry, flow);
            }
            (Standing::Leaving(_), Some(entry)) => {
                self.leaving.insert(entry, flow);
            }
            _ => self.record(flow),
        }
    }

    fn finish_leaving(&mut self, now: Instant, entry: EntryId) {
        let Some(flow) = self.leaving.remove(&entry) else { return };
        let tuple = flow.tuple;
        self.record(flow);
        // The next connection on the same addresses may have waited for the removal.
        self.decide(now, &tuple);
    }

    fn record(&mut self, flow: Flow) {
        if flow.was_shunted() {
            self.outputs.push_back(Output::Record(flow));
        }
    }

    fn ended(&mut self, connection: &Connection) {
        let known = self.flows.get(&connection.tuple).is_some_and(|flow| flow.is(connection.identity));
        if known && let Some(mut flow) = self.flows.remove(&connection.tuple) {
            flow.tracked = connection.traffic.unwrap_or(flow.tracked);
            // Reports of changes have no time stamps. Reports of ends and lists have them.
            flow.identity.start_ns = flow.identity.start_ns.or(connection.identity.start_ns);
            flow.ended = true;
            return self.part(flow, Cause::Ended);
        }
        // The connection was replaced before its end was reported. The last counters of the slow path are in this
        // report.
        let old = self
            .leaving
            .values_mut()
            .find(|flow| flow.tuple == connection.tuple && flow.is(connection.identity));
        if let (Some(old), Some(traffic)) = (old, connection.traffic) {
            old.tracked = traffic;
        }
    }

    fn listed(&mut self, now: Instant, connections: &[Connection]) {
        self.listing = false;
        let there: BTreeMap<Tuple, &Connection> = connections.iter().map(|c| (c.tuple, c)).collect();
        let missing: Vec<_> = self
            .flows
            .values()
            .filter(|flow| !there.get(&flow.tuple).is_some_and(|c| flow.is(c.identity)))
            .map(|flow| flow.tuple)
            .collect();
        missing.iter().for_each(|tuple| self.replace(tuple));
        for connection in connections {
            // The list is newer than our last request to conntrack, so it shows what the rules say now.
            if let Some(flow) = self.flows.get_mut(&connection.tuple)
                && flow.standing == Standing::Asking
            {
                flow.standing = Standing::Slow;
            }
            self.connection(now, connection, None);
        }
    }

    /// Tries flows again that failed because the fast path was unreachable.
    fn path_back(&mut self, now: Instant) {
        let mut again = Vec::new();
        for flow in self.flows.values_mut() {
            if let Standing::Failed { why: Obstacle::Unreachable, until } = &mut flow.standing {
                *until = now;
                again.push(flow.tuple);
            }
        }
        again.iter().for_each(|tuple| self.decide(now, tuple));
    }
}
