//! Metrics in OpenMetrics text: counted from records as they are made, and read off the ledgers when somebody asks.
//!
//! Nothing here is on the data path. Labels are few and closed: rules, listeners and words, never addresses.

mod buckets;

use crate::live::{Batch, Decided, Ended, Ledger, Tally, Transport};
use crate::record::Observer;
use buckets::{Buckets, Seen};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use sidetrack_core::carrier::{Carrier, HopProtocol};
use sidetrack_core::flow::{EndReason, Intercept};
use sidetrack_core::policy::Action;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The media type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FlowLabels {
    /// Empty if no rule decided.
    rule: Arc<str>,
    carrier: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ListenerLabel {
    listener: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BytesLabels {
    direction: &'static str,
    path: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabels {
    /// Empty if no rule decided.
    rule: Arc<str>,
    transport: &'static str,
}

/// What the metrics say that neither records nor ledgers know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Descriptors this process has open.
    pub fds_in_use: u64,
    /// Descriptors it may have open (the soft RLIMIT_NOFILE).
    pub fds_limit: u64,
    /// Number of the configuration in force, rising from 1.
    pub config_generation: u64,
    /// Whether the latest attempt to load a configuration went well.
    pub config_last_reload_success: bool,
}

/// A function and what has passed it since it was made.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FunctionCounts {
    /// Its name.
    pub name: String,
    /// What it does: the word of the configuration.
    pub kind: Cow<'static, str>,
    /// Flows that were led through it.
    pub flows: u64,
    /// Bytes from clients to servers; only a function of kind `count` counts them.
    pub bytes_up: u64,
    /// Bytes from servers to clients; as `bytes_up`.
    pub bytes_down: u64,
    /// How its containers are; none for a function inside sidetrack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub containers: Option<ContainersHealth>,
}

/// How the containers of a function are.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ContainersHealth {
    /// The image they are of, as the configuration names it.
    #[serde(default)]
    pub image: String,
    /// Containers that there are to be.
    pub wanted: u16,
    /// Those that are well: started, and a probe came through.
    pub well: u16,
    /// How often one that was started has been given up.
    pub falls: u64,
    /// While fewer are well than there are to be: what was wrong with the last one that fell; none before its first trouble.
    pub trouble: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FunctionLabel {
    function: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FunctionBytesLabels {
    function: String,
    direction: &'static str,
}

/// Which way a flow's bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Path {
    Direct,
    Proxy,
    Overlay,
    Kernel,
}

impl Path {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Proxy => "proxy",
            Self::Overlay => "overlay",
            Self::Kernel => "kernel",
        }
    }
}

/// Bytes of one path: up and down.
type Bytes = (u64, u64);

/// All metrics of this process.
pub struct Metrics {
    registry: Registry,
    flows: Family<FlowLabels, Counter>,
    transports: Family<TransportLabels, Counter>,
    active: Family<ListenerLabel, Gauge>,
    bytes: Family<BytesLabels, Counter>,
    function_flows: Family<FunctionLabel, Counter>,
    function_bytes: Family<FunctionBytesLabels, Counter>,
    connect: Buckets,
    duration: Buckets,
    sniff_wait: Buckets,
    shed: Family<ReasonLabel, Counter>,
    records_dropped: Counter,
    fds_in_use: Gauge,
    fds_limit: Gauge,
    generation: Gauge,
    reload_success: Gauge,
    /// Bytes of the flows that have ended.
    ended_bytes: Mutex<BTreeMap<Path, Bytes>>,
    /// Every listener seen, with its flows in flight.
    listeners: Mutex<BTreeMap<Arc<str>, i64>>,
}

/// From half a millisecond to 16 s.
static CONNECT_BUCKETS: [f64; 12] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 4.0, 16.0];

/// From a millisecond to a day.
static DURATION_BUCKETS: [f64; 12] =
    [0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0, 1_800.0, 10_800.0, 86_400.0];

/// The wait is bounded to tens of milliseconds; above the last bucket something is wrong.
static SNIFF_BUCKETS: [f64; 8] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1];

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics, at nought.
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("sidetrack"),
            flows: Family::default(),
            transports: Family::default(),
            active: Family::default(),
            bytes: Family::default(),
            function_flows: Family::default(),
            function_bytes: Family::default(),
            connect: Buckets::new(&CONNECT_BUCKETS),
            duration: Buckets::new(&DURATION_BUCKETS),
            sniff_wait: Buckets::new(&SNIFF_BUCKETS),
            shed: Family::default(),
            records_dropped: Counter::default(),
            fds_in_use: Gauge::default(),
            fds_limit: Gauge::default(),
            generation: Gauge::default(),
            reload_success: Gauge::default(),
            ended_bytes: Mutex::default(),
            listeners: Mutex::default(),
        };
        metrics.register_flows();
        metrics.register_process();
        metrics
    }

    fn register_flows(&mut self) {
        let to = &mut self.registry;
        to.register("flows", "Flows that ended, by rule, carrier and reason", self.flows.clone());
        to.register(
            "flow_transports",
            "Flows that ended, by what carried them where the carrier leaves that open",
            self.transports.clone(),
        );
        to.register("flows_active", "Flows in flight, by listener", self.active.clone());
        to.register("flow_bytes", "Payload bytes moved, by direction and path", self.bytes.clone());
        to.register("function_flows", "Flows led through functions", self.function_flows.clone());
        to.register(
            "function_bytes",
            "Bytes that passed functions of kind count, by direction",
            self.function_bytes.clone(),
        );
        to.register(
            "connect_seconds",
            "From catching a flow until the path to its server stood",
            self.connect.clone(),
        );
        to.register("flow_duration_seconds", "From catching a flow to its end", self.duration.clone());
        to.register(
            "sniff_wait_seconds",
            "How long flows were held for first bytes",
            self.sniff_wait.clone(),
        );
        to.register("shed", "Flows refused because a limit was reached", self.shed.clone());
    }

    fn register_process(&mut self) {
        let to = &mut self.registry;
        to.register(
            "records_dropped",
            "Records lost: their reader was too slow, or writing failed",
            self.records_dropped.clone(),
        );
        to.register("fds_in_use", "Descriptors open", self.fds_in_use.clone());
        to.register("fds_limit", "Descriptors allowed (RLIMIT_NOFILE)", self.fds_limit.clone());
        to.register("config_generation", "Configuration in force, from 1", self.generation.clone());
        to.register(
            "config_last_reload_success",
            "1 if the latest attempt to load a configuration went well",
            self.reload_success.clone(),
        );
        to.register("build", "This build", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
    }

    /// Takes over what functions have counted. One that was made anew begins at nought, and counters never fall.
    pub fn read_functions(&self, functions: &[FunctionCounts]) {
        let raise = |counter: &Counter, total: u64| {
            counter.inc_by(total.saturating_sub(counter.get()));
        };
        for function in functions {
            let label = FunctionLabel { function: function.name.clone() };
            raise(&self.function_flows.get_or_create_owned(&label), function.flows);
            if function.kind != "count" {
                continue;
            }
            for (direction, bytes) in [("up", function.bytes_up), ("down", function.bytes_down)] {
                let labels = FunctionBytesLabels { function: function.name.clone(), direction };
                raise(&self.function_bytes.get_or_create_owned(&labels), bytes);
            }
        }
    }

    /// Everything, as OpenMetrics text, as of now. `ledgers` are those of all workers.
    pub fn text(&self, ledgers: &[Arc<Ledger>], surroundings: Surroundings) -> String {
        self.read_ledgers(ledgers);
        self.fds_in_use.set(signed(surroundings.fds_in_use));
        self.fds_limit.set(signed(surroundings.fds_limit));
        self.generation.set(signed(surroundings.config_generation));
        self.reload_success.set(i64::from(surroundings.config_last_reload_success));
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }

    /// Sets what depends on the flows in flight.
    fn read_ledgers(&self, ledgers: &[Arc<Ledger>]) {
        let mut active = lock(&self.listeners);
        // A listener whose last flow ended says 0, not nothing.
        active.values_mut().for_each(|flows| *flows = 0);
        let mut bytes = lock(&self.ended_bytes).clone();
        for flow in ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
            let decided = flow.decided();
            let listener = decided.as_ref().map(|decided| decided.flow.listener.clone());
            *active.entry(listener.unwrap_or_default()).or_default() += 1;
            add(&mut bytes, decided.as_deref(), flow.bytes());
        }
        for (listener, flows) in active.iter() {
            self.active.get_or_create(&ListenerLabel { listener: listener.clone() }).set(*flows);
        }
        for (path, (up, down)) in bytes {
            self.raise(path, "up", up);
            self.raise(path, "down", down);
        }
    }

    /// Raises a counter of bytes to `total`. A flow that has left its ledger but has no record yet is missing from the
    /// total for a moment: the counter then stays, as counters never fall.
    fn raise(&self, path: Path, direction: &'static str, total: u64) {
        let counter = self.bytes.get_or_create_owned(&BytesLabels { direction, path: path.as_str() });
        counter.inc_by(total.saturating_sub(counter.get()));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn add(to: &mut BTreeMap<Path, Bytes>, decided: Option<&Decided>, (up, down): Bytes) {
    if let Some(path) = decided.and_then(path) {
        let total = to.entry(path).or_default();
        *total = (total.0 + up, total.1 + down);
    }
}

/// Which way it goes; none if it is denied.
fn path(decided: &Decided) -> Option<Path> {
    match decided.action()? {
        Action::Deny => None,
        Action::Carry(_) if decided.flow.intercept == Intercept::Kernel => Some(Path::Kernel),
        Action::Carry(carry) => Some(match carry.carrier {
            Carrier::Direct => Path::Direct,
            Carrier::Hops(_) | Carrier::Tunnel(_) => Path::Proxy,
            Carrier::Overlay(_) => Path::Overlay,
        }),
    }
}

/// The protocol of the first hop, or `direct`, `kernel`, `none`.
fn carrier(decided: Option<&Decided>) -> &'static str {
    let Some((decided, path)) = decided.and_then(|decided| Some((decided, path(decided)?))) else {
        return "none";
    };
    let Some(Action::Carry(carry)) = decided.action() else { return "none" };
    match &carry.carrier {
        Carrier::Hops(hops) if path == Path::Proxy => {
            hops.first().map_or("direct", |hop| match hop.protocol {
                HopProtocol::Socks5 => "socks5",
                HopProtocol::Socks6(_) => "socks6",
                HopProtocol::Http => "http",
            })
        }
        Carrier::Tunnel(_) if path == Path::Proxy => "tunnel",
        _ => path.as_str(),
    }
}

impl Metrics {
    /// Counts flows that a limit ended.
    fn shed(&self, reason: EndReason, decided: Option<&Decided>, flows: u64) {
        if reason == EndReason::Limit {
            // Before policy is asked it was refused at the door; later, there were no ports or descriptors to dial with.
            let at_the_door = decided.is_none_or(|decided| decided.verdict.is_none());
            let reason = if at_the_door { "admission" } else { "connect" };
            self.shed.get_or_create(&ReasonLabel { reason }).inc_by(flows);
        }
    }
}

/// Flows of one batch that have rule, carrier and reason in common.
struct Alike {
    kind: Option<usize>,
    reason: EndReason,
    transport: Option<Transport>,
    flows: u64,
    bytes: Bytes,
}

impl Metrics {
    fn take_alike(&self, alike: &Alike, decided: Option<&Decided>) {
        let rule = decided.and_then(|decided| decided.rule().cloned()).unwrap_or_default();
        if let Some(transport) = alike.transport {
            let labels = TransportLabels { rule: rule.clone(), transport: transport.as_str() };
            self.transports.get_or_create(&labels).inc_by(alike.flows);
        }
        let labels = FlowLabels { rule, carrier: carrier(decided), reason: alike.reason.as_str() };
        self.flows.get_or_create(&labels).inc_by(alike.flows);
        add(&mut lock(&self.ended_bytes), decided, alike.bytes);
        self.shed(alike.reason, decided, alike.flows);
    }
}

impl Observer for Metrics {
    fn took(&self, batch: &Batch) {
        let mut all: Vec<Alike> = Vec::new();
        let (mut connect, mut duration, mut sniff) =
            (Seen::of(&self.connect), Seen::of(&self.duration), Seen::of(&self.sniff_wait));
        for past in batch.iter() {
            let key = (past.kind(), past.reason(), past.transport());
            let at = all.iter().position(|one| (one.kind, one.reason, one.transport) == key);
            let at = at.unwrap_or_else(|| {
                let (kind, reason, transport) = key;
                all.push(Alike { kind, reason, transport, flows: 0, bytes: (0, 0) });
                all.len() - 1
            });
            let (up, down) = past.bytes();
            if let Some(alike) = all.get_mut(at) {
                alike.flows += 1;
                alike.bytes = (alike.bytes.0 + up, alike.bytes.1 + down);
            }
            past.connect_time().into_iter().for_each(|time| connect.add(time));
            past.sniff_wait().into_iter().for_each(|time| sniff.add(time));
            duration.add(past.duration());
        }
        for alike in &all {
            let decided = alike.kind.and_then(|at| batch.kinds().get(at));
            self.take_alike(alike, decided.map(|decided| &**decided));
        }
        self.connect.take(&connect);
        self.duration.take(&duration);
        self.sniff_wait.take(&sniff);
    }

    fn ended(&self, ended: &Ended, _decided: Option<&Decided>) {
        let mut batch = Batch::default();
        batch.add(ended);
        self.took(&batch);
    }

    fn tallied(&self, tally: &Tally) {
        let decided = tally.decided.as_deref();
        let rule = decided.and_then(|decided| decided.rule().cloned()).unwrap_or_default();
        let labels = FlowLabels { rule, carrier: carrier(decided), reason: tally.reason.as_str() };
        self.flows.get_or_create(&labels).inc_by(tally.times_us.len() as u64);
        add(&mut lock(&self.ended_bytes), decided, tally.bytes);
        let (mut connect, mut duration) = (Seen::of(&self.connect), Seen::of(&self.duration));
        for (lasted, connected) in &tally.times_us {
            duration.add(Duration::from_micros((*lasted).into()));
            if *connected != u32::MAX {
                connect.add(Duration::from_micros((*connected).into()));
            }
        }
        self.connect.take(&connect);
        self.duration.take(&duration);
        self.shed(tally.reason, decided, tally.times_us.len() as u64);
    }

    fn lost(&self, records: u64) {
        self.records_dropped.inc_by(records);
    }
}
