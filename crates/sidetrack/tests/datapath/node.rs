//! A node of the product inside the test's own process: its listeners, its workers, its records.

use sidetrack::app::{Before, Fleet, Serving, bind};
use sidetrack::carry::Dialing;
use sidetrack::config::Config;
use sidetrack::live::{Clock, Ended, Ledger, LiveFlow};
use sidetrack::process::Owners;
use sidetrack::worker::Shared;
use sidetrack_common::systemd::passed::Passed;
use sidetrack_core::flow::EndReason;
use sidetrack_core::limit::Budget;
use sidetrack_testkit::awaited;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Workers in this process, with their listeners.
pub(crate) struct Node {
    /// What its workers share.
    pub shared: Arc<Shared>,
    fleet: Option<Fleet>,
    serving: Vec<Serving>,
    ended: Mutex<Vec<Ended>>,
}

impl Node {
    /// Starts a node with this configuration (without `version`), two workers unless it says otherwise.
    pub(crate) fn start(text: &str) -> Self {
        Self::start_with(text, Budget::from_nofile(4096, 64))
    }

    /// A node that carries everything directly, behind a SOCKS listener `in`.
    pub(crate) fn socks() -> Self {
        Self::start("[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n")
    }

    /// A node whose one port `in` stands for `server`, with the keys of one rule for all flows.
    pub(crate) fn reverse(server: SocketAddr, rule: &str) -> Self {
        Self::start(&reverse_config(server, rule))
    }

    /// As [`Node::start`], with this budget of descriptors.
    pub(crate) fn start_with(text: &str, budget: Budget) -> Self {
        let workers = if text.starts_with("workers") { "" } else { "workers = 2\n" };
        let text = format!("version = 1\n{workers}{text}");
        let config = Config::from_text("test.toml", &text)
            .unwrap_or_else(|error| panic!("{text}\n{}", error.render(false)));
        let passed = Passed::default();
        let bound: Vec<_> = config
            .listeners
            .iter()
            .flat_map(|listener| {
                let before = Before { own: &listener.addresses, heritage: None, passed: &passed };
                bind(listener, &config, (config.workers, None), before).expect("loopback ports")
            })
            .collect();
        let own = bound.iter().map(|bound| bound.listening.address).collect();
        let dialing = Dialing { own, ..Dialing::default() };
        let budget = match config.limits.max_flows {
            Some(most) => budget.at_most(most.into()),
            None => budget,
        };
        let workers = config.workers;
        let config = Arc::new(arc_swap::ArcSwap::from_pointee(config));
        let shared = Arc::new(Shared::new(config, dialing, Owners::Ourselves, budget, Clock::start()));
        let fleet = Fleet::start(&shared, workers).expect("threads");
        let serving = bound.into_iter().map(|bound| fleet.serve(bound)).collect();
        Self { shared, fleet: Some(fleet), serving, ended: Mutex::default() }
    }

    /// Where the listener of this name listens.
    pub(crate) fn address(&self, name: &str) -> SocketAddr {
        let found = self.serving.iter().find(|serving| &*serving.listening.name == name);
        found.unwrap_or_else(|| panic!("no listener '{name}'")).listening.address
    }

    /// Where the listener `in` listens.
    pub(crate) fn entry(&self) -> SocketAddr {
        self.address("in")
    }

    /// The flows in flight.
    pub(crate) fn live(&self) -> Vec<Arc<LiveFlow>> {
        self.fleet.iter().flat_map(|fleet| fleet.ledgers()).flat_map(|ledger| ledger.snapshot()).collect()
    }

    /// The ledgers of the workers.
    pub(crate) fn ledgers(&self) -> Vec<Arc<Ledger>> {
        self.fleet.iter().flat_map(|fleet| fleet.ledgers()).cloned().collect()
    }

    /// Waits for a flow in flight for which `is` holds.
    pub(crate) fn await_live(&self, what: &str, is: impl Fn(&LiveFlow) -> bool) -> Arc<LiveFlow> {
        awaited(what, || self.live().into_iter().find(|flow| is(flow)))
    }

    /// Waits until `count` flows have ended and none is in flight; fails if it is not that many, or if one of them
    /// was recorded twice.
    pub(crate) fn ended(&self, count: usize) -> Vec<Ended> {
        awaited(&format!("{count} flows end"), || {
            let (idle, ended) = self.collect();
            (idle && ended >= count).then_some(())
        });
        let ended = self.take();
        assert_eq!(ended.len(), count, "{:?}", ended.iter().map(|ended| ended.reason).collect::<Vec<_>>());
        ended
    }

    /// Waits until at least this number of flows has ended, none is in flight and every connection that was made has been
    /// accepted; gives the flows that ended, each recorded once.
    pub(crate) fn all_ended(&self, least: usize) -> Vec<Ended> {
        awaited(&format!("{least} flows end"), || (self.collect().1 >= least).then_some(()));
        // What is in a listener's queue is accepted within moments by a worker with nothing else to do: idle several
        // times in a row is idle.
        for _ in 0..20 {
            awaited("the flows end", || self.collect().0.then_some(()));
            std::thread::park_timeout(Duration::from_millis(5));
        }
        self.take()
    }

    /// Waits until no more than `count` flows are in flight, and forgets those that have ended.
    pub(crate) fn all_ended_but(&self, count: usize) {
        awaited("the other flows end", || (self.live().len() <= count).then_some(()));
        self.ended_so_far();
    }

    /// Waits until this many flows have ended, whatever others do, and gives them.
    pub(crate) fn ended_when(&self, count: usize) -> Vec<Ended> {
        awaited("flows end", || (self.collect().1 >= count).then_some(()));
        self.take()
    }

    /// The flows that have ended so far.
    pub(crate) fn ended_so_far(&self) -> Vec<Ended> {
        self.collect();
        self.take()
    }

    /// Takes in the records so far; whether no flow is in flight, and how many have ended.
    fn collect(&self) -> (bool, usize) {
        let mut ended = self.ended.lock().expect("no test panics inside");
        let ledgers: Vec<_> = self.fleet.iter().flat_map(|fleet| fleet.ledgers()).collect();
        // Looked at before the records are: a flow leaves the one for the other in one step.
        let idle = ledgers.iter().all(|ledger| ledger.is_empty());
        for ledger in ledgers {
            let (more, lost) = ledger.take_ended();
            assert_eq!(lost, 0, "records were lost");
            ended.extend(more);
        }
        (idle, ended.len())
    }

    fn take(&self) -> Vec<Ended> {
        let ended = std::mem::take(&mut *self.ended.lock().expect("no test panics inside"));
        let numbers: BTreeSet<_> = ended.iter().map(|ended| ended.flow.id).collect();
        assert_eq!(numbers.len(), ended.len(), "a flow was recorded twice");
        ended
    }

    /// Waits for the one flow to end.
    pub(crate) fn only_end(&self) -> Ended {
        self.ended(1).remove(0)
    }

    /// Waits for the one flow to end, and fails if it did so for another reason.
    pub(crate) fn ends_with(&self, reason: EndReason) -> Ended {
        let ended = self.only_end();
        assert_eq!(ended.reason, reason, "{ended:?}");
        ended
    }

    /// Stops the node as SIGTERM does; gives the records of the flows that it ended.
    pub(crate) fn stop(mut self) -> Vec<Ended> {
        self.serving.clear();
        let fleet = self.fleet.take().expect("stopped once");
        let ledgers: Vec<_> = fleet.ledgers().to_vec();
        fleet.stop();
        let mut ended: Vec<_> = ledgers.iter().flat_map(|ledger| ledger.take_ended().0).collect();
        ended.append(&mut self.ended.lock().expect("no test panics inside"));
        ended
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.serving.clear();
        if let Some(fleet) = self.fleet.take() {
            fleet.stop();
        }
    }
}

/// The configuration of [`Node::reverse`].
pub(crate) fn reverse_config(server: SocketAddr, rule: &str) -> String {
    format!(
        "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{server}'\n\
         [[rule]]\nname = 'all'\n{rule}\n"
    )
}
