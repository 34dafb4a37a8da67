//! Functions at work: what all flows that pass a function share (its counts, its bandwidth, its words, its keys), and the
//! chains that are made of them for each flow. The contract is `sidetrack_core::function`, in words `docs/functions.md`.

pub mod container;
mod crypt;
mod route;
mod shared;

pub use route::{Leg, Route};
pub use shared::Tally;

use crate::live::Clock;
use arc_swap::ArcSwap;
use container::{Containers, Pool};
use crypt::RingSuite;
use shared::{ClientBuckets, Counter, SharedBucket};
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::Flow;
use sidetrack_core::function::{
    ByteBucket, ChainSpec, End, Filter, FilterSpec, FunctionKind, FunctionSpec, LimitSpec, Records, Replace,
    Replacements, Share, Stage, Stop, Suite, Throttle, Words,
};
use sidetrack_core::time::Instant;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

/// All functions of a process, by name. A function whose definition a reload does not change goes on with what it has.
#[derive(Debug)]
pub struct Library {
    functions: ArcSwap<BTreeMap<Arc<str>, Arc<Function>>>,
    clock: Clock,
    /// Who starts containers; not there, no function in a container is ever up.
    containers: OnceLock<Arc<Containers>>,
}

/// One function: what its flows share.
#[derive(Debug)]
pub struct Function {
    spec: Arc<FunctionSpec>,
    tally: Arc<Tally>,
    work: Work,
}

/// Whose a bandwidth is.
enum Bandwidth {
    /// Each flow has its own.
    Own,
    /// Each client has one.
    Clients(ClientBuckets),
    /// All have it together.
    Shared(SharedBucket),
}

/// What a stage is made of.
enum Work {
    Count,
    Limit(LimitSpec, Bandwidth),
    Filter(Arc<FilterSpec>, Arc<Words>),
    Replace(Replacements),
    Records(Arc<dyn Suite>, End),
    /// None where nobody starts containers.
    Container(Option<Arc<Pool>>),
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Work")
    }
}

impl Library {
    /// No functions yet.
    pub fn new(clock: Clock) -> Self {
        Self { functions: ArcSwap::default(), clock, containers: OnceLock::new() }
    }

    /// From now on functions in containers are started; to be said once, before any is known.
    pub fn start_with(&self, containers: Arc<Containers>) {
        let _ = self.containers.set(containers);
    }

    /// Who starts containers.
    pub fn containers(&self) -> Option<&Arc<Containers>> {
        self.containers.get()
    }

    /// The functions there are, with their counts.
    pub fn functions(&self) -> Vec<Arc<Function>> {
        self.functions.load().values().cloned().collect()
    }

    /// Makes the functions of a configuration ready and forgets those that it no longer has; flows that pass one of them
    /// keep it.
    pub fn keep(&self, specs: &[Arc<FunctionSpec>]) {
        self.take(self.make(specs));
    }

    /// The functions of a configuration to be: those that it has in common with the one in force, and new ones. New
    /// containers are started, and thrown away with what is given if that is not taken.
    pub fn make(&self, specs: &[Arc<FunctionSpec>]) -> Vec<Arc<Function>> {
        let old = self.functions.load();
        let of = |spec: &Arc<FunctionSpec>| {
            let known = old.get(&spec.name).filter(|function| function.spec == *spec).cloned();
            known.unwrap_or_else(|| Arc::new(self.new_function(spec)))
        };
        specs.iter().map(of).collect()
    }

    /// Puts functions that were made in the place of the old ones.
    pub fn take(&self, functions: Vec<Arc<Function>>) {
        let named = functions.into_iter().map(|function| (function.spec.name.clone(), function));
        self.functions.store(Arc::new(named.collect()));
    }

    fn new_function(&self, spec: &Arc<FunctionSpec>) -> Function {
        Function::new(spec.clone(), self.clock.now(), self.containers.get())
    }

    /// The function with this definition; made now if nobody has asked for it yet.
    fn function(&self, spec: &Arc<FunctionSpec>) -> Arc<Function> {
        let known = self.functions.load();
        if let Some(function) = known.get(&spec.name).filter(|function| function.spec == *spec) {
            return function.clone();
        }
        // A flow that was decided just before a reload may ask for what is going: it gets its own, and the library keeps
        // what is new.
        let made = Arc::new(self.new_function(spec));
        if !known.contains_key(&spec.name) {
            self.functions.rcu(|functions| {
                let mut functions = BTreeMap::clone(functions);
                functions.entry(spec.name.clone()).or_insert_with(|| made.clone());
                functions
            });
            // Two threads may have made it at the same moment: what its flows share there is once.
            if let Some(first) =
                self.functions.load().get(&spec.name).filter(|function| function.spec == *spec)
            {
                return first.clone();
            }
        }
        made
    }

    /// The chain of one flow that has no sockets: a packet engine's, which no container can be part of.
    ///
    /// # Errors
    /// As [`Library::stages`].
    pub fn chain(&self, spec: &ChainSpec, flow: &Flow) -> Result<Chain, Stop> {
        self.stages(&spec.functions, flow)
    }

    /// The functions inside us that one flow passes one after the other.
    ///
    /// # Errors
    /// One of them ends the flow at once; one is a container.
    pub fn stages(&self, specs: &[Arc<FunctionSpec>], flow: &Flow) -> Result<Chain, Stop> {
        let now = self.clock.now();
        let stage = |spec: &Arc<FunctionSpec>| {
            let function = self.function(spec);
            let blame =
                |stop: Stop| Stop { detail: format!("function '{}': {}", spec.name, stop.detail), ..stop };
            let stage = function.stage(flow, now).map_err(blame)?;
            Ok((spec.name.clone(), stage))
        };
        Chain::new(specs.iter().map(stage).collect::<Result<_, Stop>>()?, now)
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
                // The configuration was refused if they cannot be compiled.
                let words = Words::new(&filter.deny_words, filter.ignore_case);
                words.map_or(Work::Count, |words| Work::Filter(Arc::new(filter.clone()), Arc::new(words)))
            }
            FunctionKind::Replace(all) => Replacements::new(all).map_or(Work::Count, Work::Replace),
            FunctionKind::Encrypt(key) => Work::Records(Arc::new(RingSuite::new(key)), End::Encrypt),
            FunctionKind::Decrypt(key) => Work::Records(Arc::new(RingSuite::new(key)), End::Decrypt),
            FunctionKind::Container(container) => {
                Work::Container(containers.map(|containers| containers.pool(&spec.name, container)))
            }
        };
        Self { spec, tally: Arc::default(), work }
    }

    /// Its definition.
    pub fn spec(&self) -> &FunctionSpec {
        &self.spec
    }

    /// What has passed it.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Its containers, if it is of that kind and there is somebody to start them.
    pub const fn pool(&self) -> Option<&Arc<Pool>> {
        match &self.work {
            Work::Container(pool) => pool.as_ref(),
            _ => None,
        }
    }

    /// The function at work on one flow.
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
        // So many words take long enough to make it that both find none.
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
