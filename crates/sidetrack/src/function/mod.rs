//! Functions at work: the state that all flows through a function share (counts, bandwidth, words, keys), and
//! the chains made for each flow. The contract is `sidetrack_core::function`, described in `docs/functions.md`.

pub mod container;
mod crypt;
mod datagrams;
mod route;
mod shared;

pub use datagrams::Datagrams;
pub use route::{Leg, Route};
pub use shared::Tally;

use crate::live::Clock;
#[cfg(feature = "wasm")]
use crate::wasm::Program;
use arc_swap::ArcSwap;
use container::{Containers, Pool};
use crypt::RingSuite;
use shared::{ClientBuckets, Counter, SharedBucket};
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::Flow;
use sidetrack_core::function::{
    Branch, BranchSpec, ByteBucket, ChainSpec, Choice, ContainerSpec, End, Filter, FilterSpec, FunctionKind,
    FunctionSpec, LimitSpec, Make, Named, Records, Replace, Replacements, Share, Stage, Stop, Suite,
    Throttle, Words,
};
use sidetrack_core::time::Instant;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// All functions of a process, by name. A function that a reload does not change keeps its state.
#[derive(Clone, Debug)]
pub struct Library {
    functions: Arc<ArcSwap<BTreeMap<Arc<str>, Arc<Function>>>>,
    clock: Clock,
    /// Starts containers. If it is not set, no container function is ever up.
    containers: Arc<OnceLock<Arc<Containers>>>,
}

/// One function with the state that its flows share.
#[derive(Debug)]
pub struct Function {
    spec: Arc<FunctionSpec>,
    tally: Arc<Tally>,
    work: Work,
}

/// How a bandwidth is shared.
enum Bandwidth {
    /// Each flow has its own.
    Own,
    /// Each client has one.
    Clients(ClientBuckets),
    /// All flows share one.
    Shared(SharedBucket),
}

/// The parts from which stages are made.
enum Work {
    Count,
    Limit(LimitSpec, Bandwidth),
    Filter(Arc<FilterSpec>, Arc<Words>),
    Replace(Replacements),
    Records(Arc<dyn Suite>, End),
    Branch,
    #[cfg(feature = "wasm")]
    Wasm(Arc<Program>),
    /// The module does not compile here, and why.
    NoWasm(Box<str>),
    /// `None` if this process does not start containers.
    Container(Option<Arc<Pool>>),
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Work")
    }
}

impl Library {
    /// A library without functions.
    pub fn new(clock: Clock) -> Self {
        Self { functions: Arc::default(), clock, containers: Arc::default() }
    }

    /// Sets what starts containers. Must be called once, before any function is made.
    pub fn start_with(&self, containers: Arc<Containers>) {
        let _ = self.containers.set(containers);
    }

    /// What starts containers.
    pub fn containers(&self) -> Option<&Arc<Containers>> {
        self.containers.get()
    }

    /// All functions, with their counts.
    pub fn functions(&self) -> Vec<Arc<Function>> {
        self.functions.load().values().cloned().collect()
    }

    /// Makes the functions of a configuration and forgets those that it no longer has. Flows keep the functions
    /// they pass through.
    pub fn keep(&self, specs: &[Arc<FunctionSpec>]) {
        self.take(self.make(specs));
    }

    /// Makes the functions for a new configuration: unchanged ones are reused, others are new. One whose limits are only
    /// raised keeps its containers. New containers are started. Dropping the result stops them again.
    pub fn make(&self, specs: &[Arc<FunctionSpec>]) -> Vec<Arc<Function>> {
        let old = self.functions.load();
        let of = |spec: &Arc<FunctionSpec>| {
            let old = old.get(&spec.name);
            let known = old.filter(|function| function.spec == *spec).cloned();
            let known = known.or_else(|| Some(Arc::new(old?.raised(spec)?)));
            known.unwrap_or_else(|| Arc::new(self.new_function(spec)))
        };
        specs.iter().map(of).collect()
    }

    /// Replaces the functions by these.
    pub fn take(&self, functions: Vec<Arc<Function>>) {
        for function in &functions {
            if let (Some(pool), FunctionKind::Container(spec)) = (function.pool(), &function.spec.kind) {
                pool.limit(spec.resources);
            }
        }
        let named = functions.into_iter().map(|function| (function.spec.name.clone(), function));
        self.functions.store(Arc::new(named.collect()));
    }

    fn new_function(&self, spec: &Arc<FunctionSpec>) -> Function {
        Function::new(spec.clone(), self.clock.now(), self.containers.get())
    }

    /// Returns the function with this definition. Makes it if it does not exist yet.
    fn function(&self, spec: &Arc<FunctionSpec>) -> Arc<Function> {
        let known = self.functions.load();
        if let Some(function) = known.get(&spec.name).filter(|function| function.spec == *spec) {
            return function.clone();
        }
        // A flow decided just before a reload may need an old function. It gets one of its own, and the library
        // keeps the new one.
        let made = Arc::new(self.new_function(spec));
        if !known.contains_key(&spec.name) {
            self.functions.rcu(|functions| {
                let mut functions = BTreeMap::clone(functions);
                functions.entry(spec.name.clone()).or_insert_with(|| made.clone());
                functions
            });
            // Two threads may have made it at the same time. All flows must share the first one's state.
            if let Some(first) =
                self.functions.load().get(&spec.name).filter(|function| function.spec == *spec)
            {
                return first.clone();
            }
        }
        made
    }

    /// Makes the chain of one flow without sockets: the packet engine's flows cannot pass through containers.
    ///
    /// # Errors
    /// Fails as [`Library::stages`] does.
    pub fn chain(&self, spec: &ChainSpec, flow: &Flow) -> Result<Chain, Stop> {
        self.stages(&spec.functions, flow)
    }

    /// Makes the chain of functions inside this process that one flow passes through.
    ///
    /// # Errors
    /// Fails if a function ends the flow at once, or if one is a container.
    pub fn stages(&self, specs: &[Arc<FunctionSpec>], flow: &Flow) -> Result<Chain, Stop> {
        let mut stages = Vec::new();
        self.named(specs, flow, &mut stages)?;
        Chain::new(stages, self.clock.now())
    }

    /// Appends the stages of these functions. If the flow alone shows the arm of a branch, the arm's stages replace the
    /// branch.
    fn named(&self, specs: &[Arc<FunctionSpec>], flow: &Flow, stages: &mut Named) -> Result<(), Stop> {
        for spec in specs {
            let function = self.function(spec);
            let FunctionKind::Branch(branch) = &spec.kind else {
                let blame = |stop: Stop| Stop {
                    detail: format!("function '{}': {}", spec.name, stop.detail),
                    ..stop
                };
                let stage = function.stage(flow, self.clock.now()).map_err(blame)?;
                stages.push((spec.name.clone(), stage));
                continue;
            };
            function.tally.flow();
            match branch.choose(flow) {
                Choice::Arm(None) => {}
                Choice::Arm(Some(arm)) => self.named(&branch.arms[arm].functions, flow, stages)?,
                Choice::Open(open) => {
                    let stage = Branch::new(branch.clone(), &open, flow, self.arms(branch.clone(), flow));
                    stages.push((spec.name.clone(), Box::new(stage)));
                }
            }
        }
        Ok(())
    }

    /// Makes the stages of an arm once the first bytes have shown which.
    fn arms(&self, branch: Arc<BranchSpec>, flow: &Flow) -> Make {
        let (library, flow) = (self.clone(), flow.clone());
        Box::new(move |arm, host| {
            let mut flow = flow.clone();
            flow.host = flow.host.or(host);
            let mut stages = Vec::new();
            if let Some(arm) = arm {
                library.named(&branch.arms[arm].functions, &flow, &mut stages)?;
            }
            Ok(stages)
        })
    }
}

impl Function {
    fn new(spec: Arc<FunctionSpec>, now: Instant, containers: Option<&Arc<Containers>>) -> Self {
        let work = match &spec.kind {
            FunctionKind::Count => Work::Count,
            FunctionKind::Limit(limit) => {
                let bandwidth = match limit.share {
                    Share::Flow => Bandwidth::Own,
                    Share::Client => Bandwidth::Clients(ClientBuckets::default()),
                    Share::Function => Bandwidth::Shared(SharedBucket::new(limit, now)),
                };
                Work::Limit(*limit, bandwidth)
            }
            FunctionKind::Filter(filter) => {
                // A configuration with words that cannot be compiled was rejected before.
                let words = Words::new(&filter.deny_words, filter.ignore_case);
                words.map_or(Work::Count, |words| Work::Filter(Arc::new(filter.clone()), Arc::new(words)))
            }
            FunctionKind::Replace(all) => Replacements::new(all).map_or(Work::Count, Work::Replace),
            FunctionKind::Encrypt(key) => Work::Records(Arc::new(RingSuite::new(key)), End::Encrypt),
            FunctionKind::Decrypt(key) => Work::Records(Arc::new(RingSuite::new(key)), End::Decrypt),
            FunctionKind::Branch(_) => Work::Branch,
            #[cfg(feature = "wasm")]
            FunctionKind::Wasm(wasm) => match Program::new(wasm) {
                Ok(program) => Work::Wasm(Arc::new(program)),
                Err(why) => Work::NoWasm(why.into()),
            },
            #[cfg(not(feature = "wasm"))]
            FunctionKind::Wasm(_) => Work::NoWasm("it is built without WebAssembly".into()),
            FunctionKind::Container(container) => {
                Work::Container(containers.map(|containers| containers.pool(&spec.name, container)))
            }
        };
        Self { spec, tally: Arc::default(), work }
    }

    /// Returns this function with higher limits of its containers, which go on; `None` if anything else differs.
    fn raised(&self, spec: &Arc<FunctionSpec>) -> Option<Self> {
        let (FunctionKind::Container(old), FunctionKind::Container(new)) = (&self.spec.kind, &spec.kind)
        else {
            return None;
        };
        let Work::Container(Some(pool)) = &self.work else { return None };
        let (was, is) = (old.resources, new.resources);
        let is_raised =
            is.memory_bytes >= was.memory_bytes && is.cpu_percent >= was.cpu_percent && is.pids >= was.pids;
        let others = ContainerSpec { resources: was, ..(**new).clone() };
        (is_raised && others == **old).then(|| Self {
            spec: spec.clone(),
            tally: self.tally.clone(),
            work: Work::Container(Some(pool.clone())),
        })
    }

    /// Its definition.
    pub fn spec(&self) -> &FunctionSpec {
        &self.spec
    }

    /// The counts of flows and bytes through it.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Its containers, if it is of that kind and this process starts containers.
    pub const fn pool(&self) -> Option<&Arc<Pool>> {
        match &self.work {
            Work::Container(pool) => pool.as_ref(),
            _ => None,
        }
    }

    /// Makes the stage for one flow.
    fn stage(&self, flow: &Flow, now: Instant) -> Result<Box<dyn Stage>, Stop> {
        self.tally.flow();
        Ok(match &self.work {
            Work::Count => Box::new(Counter(self.tally.clone())),
            Work::Limit(limit, Bandwidth::Own) => {
                let bucket = ByteBucket::new(limit.bytes_per_second, limit.burst_bytes, now);
                Box::new(Throttle::new(bucket, limit.directions))
            }
            Work::Limit(limit, Bandwidth::Clients(clients)) => {
                let bucket = clients.of(flow.client.ip(), limit, now);
                Box::new(Throttle::new(bucket, limit.directions))
            }
            Work::Limit(limit, Bandwidth::Shared(bucket)) => {
                Box::new(Throttle::new(bucket.clone(), limit.directions))
            }
            Work::Filter(spec, words) => {
                Box::new(Filter::new(spec.clone(), words.clone(), flow.host.as_ref())?)
            }
            Work::Replace(table) => Box::new(Replace::new(table.clone())),
            Work::Records(suite, end) => Box::new(Records::new(suite.clone(), *end)),
            #[cfg(feature = "wasm")]
            Work::Wasm(program) => program.stage(&self.spec.name, flow)?,
            Work::NoWasm(why) => return Err(Stop::failed(&**why)),
            Work::Branch => return Err(Stop::failed("a branch alone does nothing")),
            Work::Container(_) => {
                return Err(Stop::failed("it is a container: bytes pass it over sockets (`fn probe`)"));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn a_function_that_two_threads_ask_for_first_is_one() {
        // Compiling this number of words takes long enough for both threads to find no function.
        let deny_words: Vec<_> = (0..1000_u32).map(|word| format!("{word:08}").into_bytes()).collect();
        let kind = FunctionKind::Filter(FilterSpec { deny_words, ..FilterSpec::default() });
        let spec = Arc::new(FunctionSpec { name: "words".into(), kind });
        for _ in 0..20 {
            let (library, together) = (Library::new(Clock::start()), Barrier::new(2));
            let ask = || {
                together.wait();
                library.function(&spec)
            };
            let (here, there) = std::thread::scope(|scope| {
                let other = scope.spawn(ask);
                (ask(), other.join().expect("no panic"))
            });
            assert!(Arc::ptr_eq(&here, &there), "each has counts and a bandwidth of its own");
        }
    }
}
