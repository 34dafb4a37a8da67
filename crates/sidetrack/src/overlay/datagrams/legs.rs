//! The legs of links: sends and receives their hellos, and tells the other threads which leg to use.
//!
//! The decisions are in [`sidetrack_core::overlay::legs`]. A link has legs if the end that dialled it has a choice: several
//! uplinks of its own, or several addresses of the neighbour. Connections follow the legs: one that is on a leg that died, or
//! that is clearly worse than another, is cut, and its flow continues on a connection over the best leg.

use super::Datagrams;
use super::link::{Link, Route};
use crate::overlay::control::Event;
use crate::overlay::shared::Shared;
use arc_swap::ArcSwap;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Features, Frame, Hello};
use sidetrack_core::overlay::hello::Pace;
use sidetrack_core::overlay::legs::{Config, Input, LEGS_MAX, Legs, Output, View};
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// A leg that falls silent is left after 112 ms.
const PACE: Pace = Pace { interval: Duration::from_millis(28), missed: 4 };

/// The two ends of a connection or leg: our address, and the neighbour's.
pub(crate) type Ends = (IpAddr, IpAddr);

/// A leg, as connections see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    ends: Ends,
    /// It is down, or clearly worse than the best one.
    is_left: bool,
}

/// The legs of one link, as connections see them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    legs: Vec<Known>,
    /// Our address and the neighbour's address and port on the best leg.
    best: Option<(IpAddr, SocketAddr)>,
}

impl Choice {
    /// Whether connections with these ends should be replaced.
    pub(crate) fn is_left(&self, ends: Ends) -> bool {
        // The addresses of two legs may be the same to us: then the one that works counts.
        let mut same = self.legs.iter().filter(|leg| leg.ends == ends).peekable();
        same.peek().is_some() && same.all(|leg| leg.is_left)
    }
}

/// The legs of all links that have any. Links without are not in it.
pub(crate) type Choices = Arc<BTreeMap<NodeId, Choice>>;

/// Tells the other threads about legs.
pub(crate) struct Announced {
    choices: watch::Sender<Choices>,
    /// How often a link moved to another leg.
    pub moves: AtomicU64,
}

impl Default for Announced {
    fn default() -> Self {
        Self { choices: watch::Sender::new(Choices::default()), moves: AtomicU64::new(0) }
    }
}

impl Announced {
    /// Returns our address and that of the neighbour on the best leg of the link to it.
    pub(crate) fn best(&self, neighbour: NodeId) -> Option<(IpAddr, SocketAddr)> {
        self.choices.borrow().get(&neighbour)?.best
    }

    /// Whether connections with these ends should be replaced.
    pub(crate) fn is_left(&self, neighbour: NodeId, ends: Ends) -> bool {
        self.choices.borrow().get(&neighbour).is_some_and(|choice| choice.is_left(ends))
    }

    /// Waits until connections with these ends should be replaced.
    pub(crate) async fn left(&self, neighbour: NodeId, ends: Ends) {
        let mut choices = self.choices.subscribe();
        let is_left = |choices: &Choices| choices.get(&neighbour).is_some_and(|choice| choice.is_left(ends));
        // The sender lives as long as `self`, so an error cannot happen.
        let _ = choices.wait_for(is_left).await;
    }

    /// Returns a receiver that sees each change.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Choices> {
        self.choices.subscribe()
    }

    fn set(&self, neighbour: NodeId, choice: Option<Choice>) {
        self.choices.send_if_modified(|choices| {
            if choices.get(&neighbour) == choice.as_ref() {
                return false;
            }
            let choices = Arc::make_mut(choices);
            match choice {
                Some(choice) => choices.insert(neighbour, choice),
                None => choices.remove(&neighbour),
            };
            true
        });
    }
}

/// The legs of one link.
pub(crate) struct LinkLegs {
    /// We dialled the link, so we number its legs.
    is_ours: bool,
    /// Their hellos pass: we began to send them, or the neighbour's came.
    has_begun: AtomicBool,
    state: Mutex<State>,
    /// The routes that datagrams take now. Empty: the one of the link.
    chosen: ArcSwap<Vec<Route>>,
}

struct State {
    legs: Legs,
    routes: [Option<Route>; LEGS_MAX as usize],
    best: Option<u8>,
    /// The largest datagram is searched on all legs together: the probe, and how many answers to it are missing.
    probed: Option<(u32, usize)>,
}

impl LinkLegs {
    /// Returns the legs with these routes, if we dialled the link. Legs of the neighbour become known by its hellos.
    pub(crate) fn new(ours: Option<&[Route]>) -> Self {
        let mut routes = [None; LEGS_MAX as usize];
        for (at, route) in routes.iter_mut().zip(ours.unwrap_or_default()) {
            *at = Some(*route);
        }
        let legs = Legs::new(Config::new(PACE));
        let state = Mutex::new(State { legs, routes, best: None, probed: None });
        let (has_begun, chosen) = (AtomicBool::new(false), ArcSwap::default());
        Self { is_ours: ours.is_some(), has_begun, state, chosen }
    }

    /// Returns the routes that datagrams take now. Empty: the one of the link.
    pub(crate) fn chosen(&self) -> Arc<Vec<Route>> {
        self.chosen.load_full()
    }

    /// Returns whether the link has legs, whether or not one is up now: then a datagram may come more than once.
    pub(crate) fn exist(&self) -> bool {
        self.has_begun.load(Relaxed)
    }

    /// From now on hellos pass on the legs.
    pub(super) fn begin(&self) {
        self.has_begun.store(true, Relaxed);
    }

    /// Returns the route of the best leg, or `None` if the link has no legs.
    pub(crate) fn best(&self) -> Option<Route> {
        let state = lock(&self.state);
        state.best.and_then(|best| state.routes[usize::from(best)])
    }

    /// Returns when the legs need a tick.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        lock(&self.state).legs.deadline()
    }

    /// Returns the legs for the status.
    pub(crate) fn views(&self) -> Vec<(View, Route)> {
        let state = lock(&self.state);
        let view = |view: View| Some((view, state.routes[usize::from(view.leg)]?));
        state.legs.views().filter_map(view).collect()
    }

    fn choice(&self, state: &State) -> Choice {
        let ends = |route: Route| (route.from.to_canonical(), route.to.ip().to_canonical());
        let known = |view: View| {
            let route = state.routes[usize::from(view.leg)].filter(|route| !route.from.is_unspecified())?;
            // Only the end that dials new connections leaves a leg that works.
            let is_worse = self.is_ours && state.legs.is_worse(view.leg);
            Some(Known { ends: ends(route), is_left: !view.is_up || is_worse })
        };
        let best = state.best.and_then(|best| state.routes[usize::from(best)]);
        Choice {
            legs: state.legs.views().filter_map(known).collect(),
            best: best.filter(|route| !route.from.is_unspecified()).map(|route| (route.from, route.to)),
        }
    }
}

/// Begins to measure the legs of a link, if there is a choice and the neighbour knows legs; ticks.
pub(super) fn tick(shared: &Shared, link: &Arc<Link>) {
    let (legs, now) = (&link.legs, shared.clock.now());
    if legs.is_ours && !legs.has_begun.load(Relaxed) {
        let mut state = lock(&legs.state);
        let count = state.routes.iter().flatten().count();
        let knows = shared.graph.load().features(link.neighbour) & Features::LEGS != 0;
        if count < 2 || !knows {
            return;
        }
        legs.begin();
        (0..LEGS_MAX).take(count).for_each(|leg| state.legs.handle(now, Input::Add(leg)));
    } else if legs.deadline().is_none_or(|at| at > now) {
        return;
    }
    lock(&legs.state).legs.handle(now, Input::Tick);
    drain(shared, link);
}

/// Handles a hello on a leg.
pub(super) fn came(shared: &Shared, link: &Arc<Link>, leg: u8, hello: Hello, route: Route) {
    let legs = &link.legs;
    {
        let mut state = lock(&legs.state);
        let Some(known) = state.routes.get_mut(usize::from(leg)) else { return };
        match known {
            // Our own legs lead where the configuration says. Our address on them becomes known.
            Some(known) if legs.is_ours => known.from = route.from,
            None if legs.is_ours => return,
            // If the neighbour's NAT forgot its mapping, the leg comes from elsewhere now.
            _ => *known = Some(route),
        }
        legs.begin();
        state.legs.handle(shared.clock.now(), Input::Hello(leg, hello));
    }
    drain(shared, link);
}

fn drain(shared: &Shared, link: &Arc<Link>) {
    let legs = &link.legs;
    let mut has_changed = false;
    loop {
        let mut state = lock(&legs.state);
        let Some(output) = state.legs.poll() else { break };
        match output {
            Output::Send(leg, hello) => {
                let route = state.routes[usize::from(leg.min(LEGS_MAX - 1))];
                drop(state);
                if let Some(route) = route {
                    shared.datagrams.send_over(link, route, &Frame::LegHello { leg, hello });
                }
            }
            Output::Changed => has_changed = true,
        }
    }
    if has_changed {
        choose(shared, link);
    }
}

/// Takes over which legs are up and which is the best one.
fn choose(shared: &Shared, link: &Arc<Link>) {
    let (legs, datagrams) = (&link.legs, &shared.datagrams);
    let mut state = lock(&legs.state);
    let best = state.legs.best();
    let before = std::mem::replace(&mut state.best, best);
    let chosen = match datagrams.all_legs {
        true => state.legs.up().filter_map(|leg| state.routes[usize::from(leg)]).collect(),
        false => state.best.and_then(|leg| state.routes[usize::from(leg)]).into_iter().collect::<Vec<_>>(),
    };
    let has_moved = before != state.best && before.is_some();
    legs.chosen.store(Arc::new(chosen));
    let choice = legs.choice(&state);
    drop(state);
    if has_moved {
        datagrams.legs.moves.fetch_add(1, Relaxed);
        // Another way may carry smaller datagrams only.
        link.restart_search(shared.clock.now());
    }
    datagrams.legs.set(link.neighbour, Some(choice));
    // If the queue is full, the control connection moves with the next change, or when it breaks.
    let _ = datagrams.control.try_send(Event::Legs(link.neighbour, link.number));
}

impl Datagrams {
    /// Sends a probe for the largest datagram over all legs in use.
    pub(super) fn send_probe(&self, link: &Link, probe: &Frame) {
        let chosen = link.legs.chosen();
        if let (Frame::Probe { number, .. }, 2..) = (probe, chosen.len()) {
            lock(&link.legs.state).probed = Some((*number, chosen.len()));
            for route in chosen.iter() {
                self.send_over(link, *route, probe);
            }
        } else {
            self.send_on(link, probe);
        }
    }

    /// Forgets the legs of a link whose control connection has ended.
    pub(super) fn forget_legs(&self, neighbour: NodeId) {
        self.legs.set(neighbour, None);
    }
}

/// Handles the answer to a probe. Returns true if all legs have answered it.
pub(super) fn has_passed(link: &Link, number: u32) -> bool {
    let mut state = lock(&link.legs.state);
    match &mut state.probed {
        Some((probed, missing)) if *probed == number => {
            *missing = missing.saturating_sub(1);
            *missing == 0
        }
        _ => true,
    }
}

/// Returns the pairs of our uplinks and the neighbour's addresses: the legs that this end could dial, the first ones first.
/// `None` as our address: the system chooses it.
pub(crate) fn candidates(uplinks: &[IpAddr], addresses: &[SocketAddr]) -> Vec<(Option<IpAddr>, SocketAddr)> {
    let mut pairs = Vec::new();
    for to in addresses {
        let mut from = uplinks.iter().filter(|uplink| uplink.is_ipv4() == to.is_ipv4()).peekable();
        if from.peek().is_none() {
            pairs.push((None, *to));
        }
        pairs.extend(from.map(|from| (Some(*from), *to)));
    }
    pairs.truncate(LEGS_MAX.into());
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legs_are_pairs_of_one_family_and_at_most_eight() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let to = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let (one, two, six) = (ip("10.0.1.1"), ip("10.0.2.1"), ip("2001:db8::1"));
        let (v4, v6) = (to("192.0.2.9:8100"), to("[2001:db8::9]:8100"));
        assert_eq!(candidates(&[], &[v4, v6]), [(None, v4), (None, v6)]);
        assert_eq!(candidates(&[one, two], &[v4]), [(Some(one), v4), (Some(two), v4)]);
        assert_eq!(candidates(&[one, six], &[v4, v6]), [(Some(one), v4), (Some(six), v6)]);
        assert_eq!(candidates(&[one], &[v6]), [(None, v6)], "no uplink of that family");
        assert_eq!(candidates(&[one, two], &[v4; 5]).len(), usize::from(LEGS_MAX));
    }

    #[test]
    fn a_connection_is_left_if_all_legs_between_its_ends_are() {
        let ends = |text: &str| (text.parse().expect("an address"), "192.0.2.9".parse().expect("an address"));
        let known = |text: &str, is_left| Known { ends: ends(text), is_left };
        let legs = vec![known("10.0.1.1", true), known("10.0.2.1", false), known("10.0.2.1", true)];
        let choice = Choice { legs, best: None };
        assert!(choice.is_left(ends("10.0.1.1")));
        assert!(
            !choice.is_left(ends("10.0.2.1")) && !choice.is_left(ends("10.0.3.1")),
            "ends that no leg has"
        );
    }
}
