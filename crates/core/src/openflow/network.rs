//! The controllers of several switches. A flow has entries on each switch of its path, and they come and go together.
//!
//! ```text
//!              far entries          near entries
//!  install ──▶ REQUESTED ──all──▶ REQUESTED ──all──▶ INSTALLED
//!                  │                   │                 │
//!                  └───── refused, gone, withdrawn ──────┘
//!                                      ▼
//!           near entries removed ──all──▶ far entries removed ──all──▶ reported once
//! ```
//! The *near* entry of a direction is that of the switch where its packets enter. It is installed last and removed
//! first, so no packet meets a switch that does not know the flow. The near entries alone are counted, so each byte
//! counts once. A flow whose ports are on one switch has one entry there, for both directions.
//!
//! The links between the switches form a tree: there is one path between two switches.

use super::controller::{Controller, ControllerConfig, ControllerInput, ControllerOutput};
use super::entries::{End, Way};
use crate::shunt::{Both, Cause, Entry, EntryId, Obstacle, PortNumber};
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};

/// One switch of a network.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its name, for messages.
    pub name: String,
    /// Its controller's configuration. `through` is filled in by [`Network::new`].
    pub config: ControllerConfig,
    /// The neighbouring switches by their position, each with the port that leads there.
    pub links: Vec<(usize, u32)>,
}

/// The state of an entry of one switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not sent yet.
    Waiting,
    Requested,
    Installed,
    Removing,
    Gone,
}

/// An entry of one switch: a part of the path of a flow.
#[derive(Clone, Copy, Debug)]
struct Part {
    switch: usize,
    id: EntryId,
    /// Its direction; `None`: both.
    way: Option<Way>,
    is_near: bool,
    state: State,
    traffic: Both,
}

/// The entries of a flow.
#[derive(Clone, Debug)]
struct Route {
    entry: Entry,
    parts: Vec<Part>,
    is_installed: bool,
    /// Why it ends; `None` while it is wanted.
    end: Option<End>,
}

/// The controllers of all switches, as one.
#[derive(Debug)]
pub struct Network {
    names: Vec<String>,
    controllers: Vec<Controller>,
    /// The switch of each port.
    homes: BTreeMap<PortNumber, usize>,
    links: Vec<Vec<(usize, u32)>>,
    routes: BTreeMap<EntryId, Route>,
    /// The flow of each part.
    flows: BTreeMap<EntryId, EntryId>,
    last_part: u64,
    outputs: VecDeque<(usize, ControllerOutput)>,
}

impl Network {
    /// Makes the controllers of these switches, none of which is connected.
    pub fn new(members: Vec<Member>, now: Instant) -> Self {
        let links: Vec<_> = members.iter().map(|member| member.links.clone()).collect();
        let mut homes = BTreeMap::new();
        for (at, member) in members.iter().enumerate() {
            homes.extend(member.config.ports.keys().map(|number| (*number, at)));
        }
        let names = members.iter().map(|member| member.name.clone()).collect();
        let controller = |(at, member): (usize, Member)| {
            let through = homes.iter().filter(|(_, home)| **home != at);
            let through = through.filter_map(|(number, home)| {
                let path = path(&links, at, *home)?;
                let next = path.get(1)?;
                let (_, port) = links.get(at)?.iter().find(|(neighbour, _)| neighbour == next)?;
                Some((*number, *port))
            });
            Controller::new(ControllerConfig { through: through.collect(), ..member.config }, now)
        };
        let controllers = members.into_iter().enumerate().map(controller).collect();
        Self {
            names,
            controllers,
            homes,
            links,
            routes: BTreeMap::new(),
            flows: BTreeMap::new(),
            last_part: 0,
            outputs: VecDeque::new(),
        }
    }

    /// Returns the next output with the number of its switch, or `None`. [`ControllerOutput::Send`] and
    /// [`ControllerOutput::Close`] are for the connection of that switch.
    pub fn poll(&mut self) -> Option<(usize, ControllerOutput)> {
        self.outputs.pop_front()
    }

    /// Returns when to call [`Self::handle`] with [`ControllerInput::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        self.controllers.iter().filter_map(Controller::deadline).min()
    }

    /// Whether all switches match TCP flags, so that each RST takes the slow path.
    pub fn matches_flags(&self) -> bool {
        self.controllers.iter().all(Controller::matches_flags)
    }

    /// Returns the number of flows that have or may have entries.
    pub fn entries(&self) -> usize {
        self.routes.len()
    }

    /// Returns the name of a switch.
    pub fn name(&self, switch: usize) -> &str {
        self.names.get(switch).map_or("", String::as_str)
    }

    /// Handles one event of the connection of a switch.
    pub fn handle_of(&mut self, now: Instant, switch: usize, input: ControllerInput<'_>) {
        if let Some(controller) = self.controllers.get_mut(switch) {
            controller.handle(now, input);
        }
        self.settle(now);
    }

    /// Handles one event that concerns a flow, or all switches.
    pub fn handle(&mut self, now: Instant, input: ControllerInput<'_>) {
        match input {
            ControllerInput::Install(entry) => self.install(now, entry),
            ControllerInput::Remove(id, cause) => self.end(now, id, End::Gone(cause)),
            other => self.controllers.iter_mut().for_each(|controller| controller.handle(now, other)),
        }
        self.settle(now);
    }

    fn install(&mut self, now: Instant, entry: &Entry) {
        let failed = |why| (0, ControllerOutput::Failed(entry.id, why));
        let home = |number| self.homes.get(&number).copied();
        let (Some(from), Some(to)) = (home(entry.client_port), home(entry.server_port)) else {
            return self.outputs.push_back(failed(Obstacle::UnknownPort));
        };
        let Some(path) = path(&self.links, from, to) else {
            return self.outputs.push_back(failed(Obstacle::UnknownPort));
        };
        let is_ready = |at: &usize| self.controllers.get(*at).is_some_and(Controller::is_ready);
        if !path.iter().all(is_ready) {
            return self.outputs.push_back(failed(Obstacle::Unreachable));
        }
        let parts = places(&path, entry.block).into_iter().map(|(switch, way, is_near)| {
            self.last_part += 1;
            let id = EntryId(self.last_part);
            Part { switch, id, way, is_near, state: State::Waiting, traffic: Both::default() }
        });
        let parts: Vec<Part> = parts.collect();
        self.flows.extend(parts.iter().map(|part| (part.id, entry.id)));
        self.routes.insert(entry.id, Route { entry: *entry, parts, is_installed: false, end: None });
        self.advance(now, entry.id);
    }

    fn end(&mut self, now: Instant, id: EntryId, end: End) {
        let Some(route) = self.routes.get_mut(&id) else { return };
        if route.end.is_none() {
            route.end = Some(end);
            self.advance(now, id);
        }
    }

    /// Takes the outputs of all controllers, until there are none.
    fn settle(&mut self, now: Instant) {
        for at in 0..self.controllers.len() {
            while let Some(output) = self.controllers.get_mut(at).and_then(Controller::poll) {
                self.heard(now, at, output);
            }
        }
        // What was heard last may have led to more at a switch before it.
        if self.controllers.iter().any(Controller::has_output) {
            self.settle(now);
        }
    }

    fn heard(&mut self, now: Instant, at: usize, output: ControllerOutput) {
        match output {
            ControllerOutput::Installed(part) => self.turned(now, part, State::Installed, None, None),
            ControllerOutput::Failed(part, why) => {
                self.turned(now, part, State::Gone, None, Some(End::Failed(why)));
            }
            ControllerOutput::Gone(part, cause, traffic) => {
                self.turned(now, part, State::Gone, Some(traffic), Some(End::Gone(cause)));
            }
            ControllerOutput::Counted(part, traffic) => self.counted(part, traffic),
            ControllerOutput::Note(text) if self.names.len() > 1 => {
                let text = format!("switch {}: {text}", self.name(at));
                self.outputs.push_back((at, ControllerOutput::Note(text)));
            }
            other => self.outputs.push_back((at, other)),
        }
    }

    fn counted(&mut self, part: EntryId, traffic: Both) {
        let Some(id) = self.flows.get(&part).copied() else { return };
        let Some(route) = self.routes.get_mut(&id) else { return };
        let Some(part) = route.parts.iter_mut().find(|other| other.id == part) else { return };
        part.traffic = traffic;
        if part.is_near {
            let all = route.traffic();
            self.outputs.push_back((0, ControllerOutput::Counted(id, all)));
        }
    }

    /// A switch has changed the state of a part. `end`: the flow has to leave all switches, for this reason.
    fn turned(&mut self, now: Instant, part: EntryId, state: State, traffic: Option<Both>, end: Option<End>) {
        let Some(id) = self.flows.get(&part).copied() else { return };
        let Some(route) = self.routes.get_mut(&id) else { return };
        if let Some(part) = route.parts.iter_mut().find(|other| other.id == part) {
            // A confirmation may come after the removal was requested.
            if part.state != State::Removing || state == State::Gone {
                part.state = state;
            }
            part.traffic = traffic.unwrap_or(part.traffic);
        }
        if route.end.is_none() {
            route.end = end;
        }
        self.advance(now, id);
    }

    /// Sends the next changes of a flow to its switches, or reports what it has come to.
    fn advance(&mut self, now: Instant, id: EntryId) {
        let Some(route) = self.routes.get_mut(&id) else { return };
        match route.end {
            None => {
                let far_is_done = route.are(false, State::Installed);
                let (entry, controllers) = (route.entry, &mut self.controllers);
                let due = |part: &&mut Part| part.state == State::Waiting && (!part.is_near || far_is_done);
                for part in route.parts.iter_mut().filter(due) {
                    part.state = State::Requested;
                    let entry = Entry { id: part.id, ..entry };
                    let input = part.way.map_or(ControllerInput::Install(&entry), |way| {
                        ControllerInput::InstallOne(&entry, way)
                    });
                    if let Some(controller) = controllers.get_mut(part.switch) {
                        controller.handle(now, input);
                    }
                }
                if !route.is_installed && far_is_done && route.are(true, State::Installed) {
                    route.is_installed = true;
                    self.outputs.push_back((0, ControllerOutput::Installed(id)));
                }
            }
            Some(end) => self.leave(now, id, end),
        }
    }

    /// Removes the entries of a flow: first where its packets enter, then the others.
    fn leave(&mut self, now: Instant, id: EntryId, end: End) {
        let Some(route) = self.routes.get_mut(&id) else { return };
        let cause = match end {
            End::Gone(cause) => cause,
            End::Failed(_) => Cause::Unconfirmed,
        };
        for is_near in [true, false] {
            for part in route.parts.iter_mut().filter(|part| part.is_near == is_near) {
                match part.state {
                    State::Waiting => part.state = State::Gone,
                    State::Requested | State::Installed => {
                        part.state = State::Removing;
                        if let Some(controller) = self.controllers.get_mut(part.switch) {
                            controller.handle(now, ControllerInput::Remove(part.id, cause));
                        }
                    }
                    State::Removing | State::Gone => {}
                }
            }
            if !route.are(is_near, State::Gone) {
                return;
            }
        }
        let traffic = route.traffic();
        for part in &route.parts {
            self.flows.remove(&part.id);
        }
        self.routes.remove(&id);
        let output = match end {
            End::Failed(why) if traffic == Both::default() => ControllerOutput::Failed(id, why),
            End::Failed(_) => ControllerOutput::Gone(id, Cause::Unconfirmed, traffic),
            End::Gone(cause) => ControllerOutput::Gone(id, cause, traffic),
        };
        self.outputs.push_back((0, output));
    }
}

impl Route {
    /// Whether all near, or all far parts are in this state. True if there are none.
    fn are(&self, is_near: bool, state: State) -> bool {
        self.parts.iter().filter(|part| part.is_near == is_near).all(|part| part.state == state)
    }

    /// Returns the traffic that has entered the path.
    fn traffic(&self) -> Both {
        let mut all = Both::default();
        self.parts.iter().filter(|part| part.is_near).for_each(|part| all += part.traffic);
        all
    }
}

/// Returns the entries of a path: switch, direction (`None`: both), and whether packets enter there. Those that are
/// far from where packets enter come first, the farthest first.
fn places(path: &[usize], block: bool) -> Vec<(usize, Option<Way>, bool)> {
    let (first, last) = match path {
        [only] => return vec![(*only, None, true)],
        [first, .., last] => (*first, *last),
        [] => return Vec::new(),
    };
    let mut places = Vec::new();
    // A flow that is blocked is dropped where it enters.
    if !block {
        places.extend(path.iter().skip(1).rev().map(|switch| (*switch, Some(Way::ToServer), false)));
        places.extend(path.iter().take(path.len() - 1).map(|switch| (*switch, Some(Way::ToClient), false)));
    }
    places.extend([(first, Some(Way::ToServer), true), (last, Some(Way::ToClient), true)]);
    places
}

/// Returns the path between two switches, both included; `None` if no links join them.
fn path(links: &[Vec<(usize, u32)>], from: usize, to: usize) -> Option<Vec<usize>> {
    let mut before: BTreeMap<usize, usize> = BTreeMap::from([(from, from)]);
    let mut queue = VecDeque::from([from]);
    while let Some(at) = queue.pop_front() {
        for (next, _) in links.get(at)? {
            if !before.contains_key(next) {
                before.insert(*next, at);
                queue.push_back(*next);
            }
        }
    }
    let mut path = vec![to];
    while let Some(at) = path.last().copied().filter(|at| *at != from) {
        path.push(*before.get(&at)?);
    }
    path.reverse();
    Some(path)
}
