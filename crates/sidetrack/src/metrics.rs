//! Metrics in OpenMetrics text. They are counted from records, or read from the ledgers on request.
//!
//! No code here is on the data path. Labels have few, fixed values: rules, listeners and words, but no
//! addresses.

mod buckets;
mod carried;
mod dns;
mod engine;
mod export;
mod history;
mod losses;
mod memory;
mod overlay;
mod path;
mod process;
mod profile;
mod shunt;
mod wires;

use crate::live::{Batch, Decided, Ended, Ledger, Tally, Transport};
use crate::record::Observer;
use buckets::{Buckets, CONNECT_BUCKETS, DURATION_BUCKETS, SNIFF_BUCKETS, Seen};
pub use carried::Carried;
pub use dns::DnsCounts;
use dns::DnsMetrics;
use engine::EngineMetrics;
pub use export::ExportCounts;
use export::ExportMetrics;
use history::HistoryMetrics;
use losses::LossMetrics;
pub use memory::MemoryCounts;
use memory::MemoryMetrics;
use overlay::OverlayMetrics;
use path::{Path, carrier, path};
use process::ProcessMetrics;
pub use process::ProcessUse;
use profile::ProfileMetrics;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use sidetrack_common::admin::FunctionCounts;
use sidetrack_core::flow::EndReason;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
pub use wires::WireCounts;
use wires::WireMetrics;

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
struct DirectionLabel {
    direction: &'static str,
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

/// Values that are in neither records nor ledgers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Open descriptors of this process.
    pub fds_in_use: u64,
    /// Limit of open descriptors (the soft RLIMIT_NOFILE).
    pub fds_limit: u64,
    /// Number of the configuration in force, counted from 1.
    pub config_generation: u64,
    /// Whether the latest reload succeeded.
    pub config_last_reload_success: bool,
    /// What this process uses.
    pub process: ProcessUse,
}

/// How many connections were closed to make room for others, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClosedForOthers {
    /// Before the end of their handshake or their first request.
    pub handshakes: u64,
    /// While they were idle between requests.
    pub idle: u64,
}

/// Connections whose SYN was held until the far side had answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldCounts {
    /// How many of each result there were, by word.
    pub results: Vec<(&'static str, u64)>,
    /// How many are held now.
    pub now: u64,
    /// SYNs that came again meanwhile.
    pub repeated: u64,
    /// How often the kernel dropped segments because they were not read in time.
    pub overruns: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WaitedLabel {
    waited_for: &'static str,
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EntriesLabel {
    entries: &'static str,
}

/// Up and down.
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
    overlay: OverlayMetrics,
    process: ProcessMetrics,
    profile: ProfileMetrics,
    shunt_entries: Family<EntriesLabel, Gauge>,
    shunt_evicted: Family<ReasonLabel, Counter>,
    connect: Buckets,
    duration: Buckets,
    sniff_wait: Buckets,
    shed: Family<ReasonLabel, Counter>,
    closed_for_others: Family<WaitedLabel, Counter>,
    datagrams: Family<DirectionLabel, Counter>,
    datagrams_dropped: Family<ReasonLabel, Counter>,
    held_results: Family<ResultLabel, Counter>,
    held_now: Gauge,
    held_repeated: Counter,
    held_overruns: Counter,
    records_dropped: Counter,
    history: HistoryMetrics,
    memory: MemoryMetrics,
    losses: LossMetrics,
    dns: DnsMetrics,
    engine: EngineMetrics,
    export: ExportMetrics,
    wires: WireMetrics,
    fds_in_use: Gauge,
    fds_limit: Gauge,
    generation: Gauge,
    reload_success: Gauge,
    /// Bytes of the flows that have ended.
    ended_bytes: Mutex<BTreeMap<Path, Bytes>>,
    /// All listeners seen so far, each with the number of its running flows.
    listeners: Mutex<BTreeMap<Arc<str>, i64>>,
    /// What other processes of this node have counted.
    carried: Mutex<[Carried; 2]>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics, with value 0.
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("sidetrack"),
            flows: Family::default(),
            transports: Family::default(),
            active: Family::default(),
            bytes: Family::default(),
            function_flows: Family::default(),
            function_bytes: Family::default(),
            overlay: OverlayMetrics::default(),
            process: ProcessMetrics::default(),
            profile: ProfileMetrics::default(),
            shunt_entries: Family::default(),
            shunt_evicted: Family::default(),
            connect: Buckets::new(&CONNECT_BUCKETS),
            duration: Buckets::new(&DURATION_BUCKETS),
            sniff_wait: Buckets::new(&SNIFF_BUCKETS),
            shed: Family::default(),
            closed_for_others: Family::default(),
            datagrams: Family::default(),
            datagrams_dropped: Family::default(),
            held_results: Family::default(),
            held_now: Gauge::default(),
            held_repeated: Counter::default(),
            held_overruns: Counter::default(),
            records_dropped: Counter::default(),
            history: HistoryMetrics::default(),
            memory: MemoryMetrics::default(),
            losses: LossMetrics::default(),
            dns: DnsMetrics::default(),
            engine: EngineMetrics::default(),
            export: ExportMetrics::default(),
            wires: WireMetrics::default(),
            fds_in_use: Gauge::default(),
            fds_limit: Gauge::default(),
            generation: Gauge::default(),
            reload_success: Gauge::default(),
            ended_bytes: Mutex::default(),
            listeners: Mutex::default(),
            carried: Mutex::default(),
        };
        metrics.register_flows();
        metrics.overlay.register(&mut metrics.registry);
        metrics.engine.register(&mut metrics.registry);
        metrics.export.register(&mut metrics.registry);
        metrics.wires.register(&mut metrics.registry);
        metrics.profile.register(&mut metrics.registry);
        metrics.history.register(&mut metrics.registry);
        metrics.memory.register(&mut metrics.registry);
        metrics.losses.register(&mut metrics.registry);
        metrics.dns.register(&mut metrics.registry);
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
            "shunt_entries",
            "Entries of the shunt's fast path: in use, at most, and wanted by flows that wait",
            self.shunt_entries.clone(),
        );
        to.register(
            "shunt_evicted",
            "Entries that flows have lost to faster ones",
            self.shunt_evicted.clone(),
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
        to.register(
            "closed_for_others",
            "Connections closed to make room for others, by what they waited for",
            self.closed_for_others.clone(),
        );
        to.register(
            "datagrams",
            "Datagrams of UDP flows that have ended, by direction",
            self.datagrams.clone(),
        );
        to.register(
            "datagrams_dropped",
            "Datagrams that were not passed on, by the reason",
            self.datagrams_dropped.clone(),
        );
        self.register_held();
    }

    fn register_held(&mut self) {
        let to = &mut self.registry;
        to.register(
            "held_connections",
            "Connections whose SYN is held until the far side has answered",
            self.held_now.clone(),
        );
        to.register("held", "SYNs that were held, by the result", self.held_results.clone());
        to.register(
            "held_repeated",
            "Retransmitted SYNs of connections that were held",
            self.held_repeated.clone(),
        );
        to.register(
            "held_overruns",
            "How often SYNs were lost because they were not read in time",
            self.held_overruns.clone(),
        );
    }

    /// Takes over how many connections were closed to make room for others.
    pub fn read_closed(&self, closed: ClosedForOthers) {
        for (waited_for, total) in [("handshake", closed.handshakes), ("request", closed.idle)] {
            let counter = self.closed_for_others.get_or_create_owned(&WaitedLabel { waited_for });
            counter.inc_by(total.saturating_sub(counter.get()));
        }
    }

    /// Takes over how many datagrams were not passed on.
    pub fn read_dropped(&self, dropped: &[(&'static str, u64)]) {
        for (reason, total) in dropped {
            let counter = self.datagrams_dropped.get_or_create_owned(&ReasonLabel { reason });
            counter.inc_by(total.saturating_sub(counter.get()));
        }
    }

    /// Takes over the counts of held connections.
    pub fn read_held(&self, held: &HeldCounts) {
        for (result, total) in &held.results {
            raise(&self.held_results.get_or_create_owned(&ResultLabel { result }), *total);
        }
        self.held_now.set(held.now.cast_signed());
        raise(&self.held_repeated, held.repeated);
        raise(&self.held_overruns, held.overruns);
    }

    /// Counts a client of the metrics address that was closed for another one.
    pub fn closed_scraper(&self) {
        self.closed_for_others.get_or_create(&WaitedLabel { waited_for: "scrape" }).inc();
    }

    /// Takes over the counts of functions. A function that was made again counts from 0, but counters must never
    /// fall.
    pub fn read_functions(&self, functions: &[FunctionCounts]) {
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

    /// Returns all metrics as OpenMetrics text. `ledgers` are those of all workers.
    pub fn text(&self, ledgers: &[Arc<Ledger>], surroundings: Surroundings) -> String {
        self.read_ledgers(ledgers);
        self.fds_in_use.set(signed(surroundings.fds_in_use));
        self.fds_limit.set(signed(surroundings.fds_limit));
        self.generation.set(signed(surroundings.config_generation));
        self.reload_success.set(i64::from(surroundings.config_last_reload_success));
        let mut out = String::new();
        self.process.write(&surroundings, &mut out);
        // Writing to a String cannot fail.
        let _ = text::encode(&mut out, &self.registry);
        for carried in lock(&self.carried).iter().filter(|carried| **carried != Carried::default()) {
            out = carried.added_to(&out);
        }
        out
    }

    fn read_ledgers(&self, ledgers: &[Arc<Ledger>]) {
        let mut active = lock(&self.listeners);
        // A listener whose last flow ended must show 0 instead of disappearing.
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

    /// Raises a counter of bytes to `total`. A flow between its ledger and its record is missing from the total
    /// for a moment. The counter then keeps its value, because counters must never fall.
    fn raise(&self, path: Path, direction: &'static str, total: u64) {
        let counter = self.bytes.get_or_create_owned(&BytesLabels { direction, path: path.as_str() });
        raise(&counter, total);
    }
}

/// Raises a counter to `total`; it never falls.
fn raise(counter: &Counter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
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

impl Metrics {
    /// Counts flows that a limit ended.
    fn shed(&self, reason: EndReason, decided: Option<&Decided>, flows: u64) {
        if reason == EndReason::Limit {
            // Without a verdict it was rejected by admission. Later, ports or descriptors for dialling ran out.
            let at_the_door = decided.is_none_or(|decided| decided.verdict.is_none());
            let reason = if at_the_door { "admission" } else { "connect" };
            self.shed.get_or_create(&ReasonLabel { reason }).inc_by(flows);
        }
    }
}

/// Flows of one batch with the same rule, carrier and reason.
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
        let mut datagrams = (0, 0);
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
            let (up, down) = past.packets();
            datagrams = (datagrams.0 + up, datagrams.1 + down);
            past.connect_time().into_iter().for_each(|time| connect.add(time));
            past.sniff_wait().into_iter().for_each(|time| sniff.add(time));
            duration.add(past.duration());
        }
        for (direction, packets) in [("up", datagrams.0), ("down", datagrams.1)] {
            self.datagrams.get_or_create(&DirectionLabel { direction }).inc_by(packets);
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

    fn missing_in_history(&self, flows: u64) {
        self.history.missing(flows);
    }
}
