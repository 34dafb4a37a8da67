//! What the admin interface can ask of the program: of a node, and of `sidetrack run`.

use super::caches;
use super::node::Node;
use super::orchestrator::Orchestrator;
use super::shunt::ShuntFlows;
use crate::admin::{
    AgreementStatus, Applications, Applied, Audit, CacheScope, CacheStatus, CachedResource, ConfigStatus,
    Control, Finding, ListenerStatus, NewAgreement,
};
use crate::config::Config;
use crate::doctor::{Check, Facts, examine_running};
use crate::function::Function;
use crate::intercept::hold::{Hold, HoldCounts};
use crate::metrics::{ClosedForOthers, DnsCounts, HeldCounts, MemoryCounts, WireCounts};
use crate::overlay;
use crate::reload::ReloadHandle;
use crate::session::room;
use crate::shunt::{Ask, Capacity, Told};
use crate::worker::{Stays, WiresSeen};
use arc_swap::ArcSwap;
use sidetrack_common::admin::{ContainersHealth, FunctionCounts};
use sidetrack_common::history::Caller;
use sidetrack_core::hold::Answer;
use sidetrack_core::policy::Policy;
use sidetrack_sys::sync::lock;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// A node and its configuration, for the admin interface.
pub(super) struct ControlOf {
    node: Arc<Node>,
    reload: ReloadHandle,
    runtime: Handle,
    shunt: Option<Arc<ShuntFlows>>,
    orchestrator: Option<Orchestrator>,
}

impl ControlOf {
    /// Call it on the control event loop.
    pub(super) fn new(
        node: Arc<Node>,
        reload: ReloadHandle,
        shunt: Option<Arc<ShuntFlows>>,
        orchestrator: Option<Orchestrator>,
    ) -> Self {
        Self { node, reload, runtime: Handle::current(), shunt, orchestrator }
    }
}

impl Control for ControlOf {
    fn policy(&self) -> Arc<Policy> {
        self.reload.current().load().policy.clone()
    }

    fn config(&self) -> ConfigStatus {
        let standing = self.reload.standing();
        ConfigStatus {
            generation: standing.generation,
            path: Some(self.reload.path().to_owned()),
            last_error: standing.last_error,
            waiting_for_restart: standing.waiting_for_restart,
            unconfirmed_ms: standing.unconfirmed_until.map(|until| {
                let left = until.saturating_duration_since(tokio::time::Instant::now());
                u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
            }),
        }
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        let rows = self.node.listeners().into_iter();
        rows.map(|(name, kind, addresses)| ListenerStatus {
            name: name.to_string(),
            kind: kind.to_owned(),
            addresses,
        })
        .collect()
    }

    fn functions(&self) -> Vec<FunctionCounts> {
        let counts = |function: Arc<Function>| {
            let (bytes_up, bytes_down) = function.tally().bytes();
            let spec = function.spec();
            let (name, kind) = (spec.name.to_string(), spec.kind.as_str().into());
            let containers = spec.kind.is_container().then(|| health(&function));
            FunctionCounts { name, kind, flows: function.tally().flows(), bytes_up, bytes_down, containers }
        };
        self.node.functions().into_iter().map(counts).collect()
    }

    fn overlay(&self) -> Option<Arc<overlay::Entry>> {
        self.node.overlay()
    }

    fn agreement(&self) -> AgreementStatus {
        self.node.agreement_status()
    }

    fn apply_agreement(&self, new: &NewAgreement, dry_run: bool, by: &Caller) -> Result<Applied, String> {
        let config = self.reload.current().load_full();
        self.node.apply_agreement(&config, new, dry_run, by).map_err(|error| format!("{error:#}"))
    }

    fn audit(&self) -> Result<Audit, String> {
        self.node.audit().map_err(|error| format!("{error:#}"))
    }

    fn version_of_agreement(&self, version: u64) -> Result<String, String> {
        self.node.version_of_agreement(version).map_err(|error| format!("{error:#}"))
    }

    fn memory(&self) -> MemoryCounts {
        let seen = self.node.shared.memory().seen();
        MemoryCounts {
            used_bytes: seen.memory.used_bytes,
            limit_bytes: seen.memory.limit_bytes,
            is_short: seen.is_short,
            refused: seen.refused,
            buffered_bytes: room::held() as u64,
        }
    }

    fn caches(&self) -> Vec<CacheStatus> {
        caches::status(&self.node.proxies())
    }

    fn cached(
        &self,
        listener: Option<&str>,
        scope: &CacheScope,
        most: usize,
    ) -> Result<Vec<CachedResource>, String> {
        caches::list(&self.node.proxies(), listener, scope, most)
    }

    fn purge(&self, listener: Option<&str>, scope: &CacheScope) -> Result<usize, String> {
        caches::purge(&self.node.proxies(), listener, scope)
    }

    fn start_function(&self, name: &str) -> bool {
        let functions = self.node.functions();
        let found = functions.iter().find(|function| &*function.spec().name == name);
        let pool = found.and_then(|function| function.pool());
        pool.inspect(|pool| pool.again()).is_some()
    }

    fn applications(&self) -> Result<Option<Applications>, String> {
        let Some(orchestrator) = &self.orchestrator else { return Ok(None) };
        self.runtime.block_on(orchestrator.applications()).map(Some)
    }

    fn findings(&self) -> Vec<Finding> {
        let config = self.reload.current().load_full();
        let memory = self.node.shared.memory().seen().memory;
        let memory = (memory.limit_bytes > 0).then_some(memory);
        let checks = examine_running(&Facts { memory, ..Facts::look(Some(&config)) });
        let told = |check: Check| Finding {
            name: check.name,
            level: check.level.as_str().to_owned(),
            found: check.found,
            needed_for: check.needed_for,
            fix: check.fix,
        };
        checks.into_iter().map(told).collect()
    }

    fn closed_for_others(&self) -> ClosedForOthers {
        let (handshakes, idle) = self.node.shared.closed_for_others();
        ClosedForOthers { handshakes, idle }
    }

    fn datagrams_dropped(&self) -> Vec<(&'static str, u64)> {
        self.node.shared.datagrams_dropped().map(|(why, count)| (why.as_str(), count)).collect()
    }

    fn wires(&self) -> Option<WireCounts> {
        let seen = self.node.shared.wires()?.seen();
        let stayed = Stays::ALL.map(Stays::as_str).into_iter().zip(seen.stayed).collect();
        let WiresSeen { flows, taken, adopted, back, freezes, .. } = seen;
        Some(WireCounts { flows, taken, adopted, back, stayed, freezes })
    }

    fn bring_back(&self, flow: u64) -> Result<(), String> {
        self.node.bring_back(flow).map_err(|error| format!("{error:#}"))
    }

    fn dns(&self) -> Option<DnsCounts> {
        let resolver = lock(&self.node.resolver);
        let gateway = &resolver.as_ref()?.gateway;
        let (names, kept) = gateway.held();
        Some(DnsCounts {
            queries: gateway.counts.queries().to_vec(),
            answers: gateway.counts.answers().collect(),
            unanswered: gateway.counts.without_answer().collect(),
            names: names as u64,
            kept: kept as u64,
        })
    }

    fn held(&self) -> HeldCounts {
        self.node.shared.hold().map(|hold| held_counts(hold)).unwrap_or_default()
    }

    fn engine_errors(&self) -> u64 {
        self.node.engines.errors()
    }

    fn engine_work(&self) -> crate::live::work::WorkCounts {
        self.node.engines.work()
    }

    fn look_at_kernel_flows(&self) {
        self.node.look_at_kernel_flows();
        if let Some(shunt) = &self.shunt {
            shunt.look(&self.node);
        }
    }

    fn shunt(&self, ask: &Ask) -> Result<Told, String> {
        let shunt = self.shunt.as_ref().ok_or("the configuration has no [shunt]")?;
        shunt.ask(ask).map_err(|error| format!("{error:#}"))
    }

    fn shunt_capacity(&self) -> Option<Capacity> {
        self.shunt.as_ref().map(|shunt| shunt.capacity())
    }

    fn reload(&self) -> Result<(), String> {
        self.runtime.block_on(self.reload.reload()).map(|_| ())
    }

    fn try_config(&self, text: String, within: Duration) -> Result<(), String> {
        self.runtime.block_on(self.reload.attempt(text, within)).map(|_| ())
    }

    fn confirm_config(&self) -> Result<Option<String>, String> {
        self.runtime.block_on(self.reload.confirm()).map(|done| done.text)
    }
}

/// The health of a function's containers.
fn health(function: &Function) -> ContainersHealth {
    let Some(pool) = function.pool() else {
        let trouble = Some("nothing here starts containers".to_owned());
        return ContainersHealth { trouble, ..ContainersHealth::default() };
    };
    let wanted = pool.target();
    let well = u16::try_from(pool.well().len()).unwrap_or(u16::MAX);
    let trouble = pool.trouble().filter(|_| well < wanted);
    ContainersHealth { image: pool.spec().image.to_string(), wanted, well, falls: pool.falls(), trouble }
}

/// A `sidetrack run`; its rules do not change.
pub(super) struct ControlOfRun {
    /// The configuration that decides.
    pub config: Arc<ArcSwap<Config>>,
    /// The file it came from, if any.
    pub path: Option<PathBuf>,
    /// The listeners that intercept the command.
    pub listeners: Vec<ListenerStatus>,
}

impl Control for ControlOfRun {
    fn policy(&self) -> Arc<Policy> {
        self.config.load().policy.clone()
    }

    fn config(&self) -> ConfigStatus {
        ConfigStatus { generation: 1, path: self.path.clone(), ..ConfigStatus::default() }
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        self.listeners.clone()
    }

    fn reload(&self) -> Result<(), String> {
        Err("a run keeps the rules it began with; start the command anew for others".to_owned())
    }
}

/// The counts of held connections, by the word of each result.
fn held_counts(hold: &Hold) -> HeldCounts {
    let HoldCounts { counts, held, overruns } = hold.counts();
    let refused = Answer::ALL.iter().map(|answer| answer.as_str()).zip(counts.refused);
    let others = [
        ("admitted", counts.admitted),
        ("early", counts.early),
        ("replaced", counts.replaced),
        ("overflow", counts.overflowed),
    ];
    let results = others.into_iter().chain(refused).collect();
    HeldCounts { results, now: held as u64, repeated: counts.repeated, overruns }
}
