//! Sends flows as spans, and metrics, by OTLP over HTTP (OpenTelemetry Protocol 1.x, "OTLP/HTTP", binary Protobuf).
//!
//! ```text
//!           batches                      answer 2xx, or one that says never
//!   GATHER ---------> ATTEMPT request -----------------------------------------> GATHER
//!                       ^        |
//!                       +--------+ no connection, 429, 502, 503, 504: after `Retry-After`, or a pause that doubles
//! ```

mod client;
mod registry;
mod span;

use super::backoff::Backoff;
use super::lane::{Drop, Lane};
use super::{Around, chance};
use crate::config::Otlp;
use crate::live::Batch;
use client::{Answer, Client};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::metrics::v1::{ResourceMetrics, ScopeMetrics};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans};
use prost::Message;
use span::Spans;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep, timeout};

/// Flows after which a request is sent without waiting for more.
const FLOWS_MAX: u64 = 256;
/// How long flows wait for others, so that they share a request.
const GATHER: Duration = Duration::from_secs(1);
/// Longest pause that a collector may ask for by `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// Nanoseconds since 1970.
fn nanos(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

/// An attribute with a text.
fn text(key: &str, value: impl Into<String>) -> KeyValue {
    attribute(key, Value::StringValue(value.into()))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn scope() -> Option<InstrumentationScope> {
    let (name, version) = ("sidetrack".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    Some(InstrumentationScope { name, version, ..InstrumentationScope::default() })
}

/// The attributes of this node: those of the configuration, and `service.name`, `service.version`, `service.instance.id`.
fn resource(settings: &Otlp, instance: &str) -> Resource {
    let own = [
        ("service.name", "sidetrack"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", instance),
    ];
    let own = own.into_iter().filter(|(key, _)| !settings.resource.contains_key(*key));
    let configured = settings.resource.iter().map(|(key, value)| text(key, value));
    let attributes = own.map(|(key, value)| text(key, value)).chain(configured).collect();
    Resource { attributes, ..Resource::default() }
}

/// Sends until the queue is closed, and everything in it is sent. `metrics` returns what `/metrics` shows.
pub(super) async fn run(lane: Arc<Lane>, settings: Otlp, around: Around, seed: [u8; 16]) {
    let instance = seed.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let sender = Sender {
        client: Client::new(&settings, around.mark),
        resource: resource(&settings, &instance),
        spans: Spans::new(seed),
        started: nanos(SystemTime::now()),
        lane,
        settings,
        around,
    };
    sender.run().await;
}

struct Sender {
    lane: Arc<Lane>,
    settings: Otlp,
    around: Around,
    client: Client,
    resource: Resource,
    spans: Spans,
    /// When this process began to count: nanoseconds since 1970.
    started: u64,
}

/// What a request has.
struct Load {
    path: &'static str,
    body: Vec<u8>,
    /// Flows in it; 0 for metrics.
    flows: u64,
}

impl Sender {
    async fn run(mut self) {
        let lane = self.lane.clone();
        let every = self.settings.interval;
        let mut metrics = interval_at(Instant::now() + every, every);
        metrics.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                batch = lane.queue.next() => match batch {
                    Some(batch) => {
                        let load = self.gather(&batch).await;
                        self.deliver(load).await;
                    }
                    None => break,
                },
                _ = metrics.tick(), if self.settings.metrics => self.deliver_metrics().await,
            }
        }
        if self.settings.metrics {
            self.deliver_metrics().await;
        }
    }

    /// Makes a request of a batch, and of those that follow soon.
    async fn gather(&mut self, first: &Batch) -> Load {
        let (mut spans, mut flows) = (Vec::new(), first.len() as u64);
        self.spans.add(first, &mut spans);
        let until = Instant::now() + GATHER;
        while flows < FLOWS_MAX {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(Some(batch)) = timeout(left, self.lane.queue.next()).await else { break };
            flows += batch.len() as u64;
            self.spans.add(&batch, &mut spans);
        }
        let spans = ScopeSpans { scope: scope(), spans, ..ScopeSpans::default() };
        let all = ResourceSpans {
            resource: Some(self.resource.clone()),
            scope_spans: vec![spans],
            ..ResourceSpans::default()
        };
        let body = ExportTraceServiceRequest { resource_spans: vec![all] }.encode_to_vec();
        Load { path: "/v1/traces", body, flows }
    }

    async fn deliver_metrics(&mut self) {
        let now = nanos(SystemTime::now());
        let metrics = registry::metrics(&(self.around.metrics)(), self.started, now);
        let metrics = ScopeMetrics { scope: scope(), metrics, ..ScopeMetrics::default() };
        let all = ResourceMetrics {
            resource: Some(self.resource.clone()),
            scope_metrics: vec![metrics],
            ..ResourceMetrics::default()
        };
        let body = ExportMetricsServiceRequest { resource_metrics: vec![all] }.encode_to_vec();
        self.deliver(Load { path: "/v1/metrics", body, flows: 0 }).await;
    }

    /// Sends a request until the collector takes it or refuses it for good. After the queue was closed there is one attempt.
    async fn deliver(&mut self, load: Load) {
        let mut backoff = Backoff::default();
        self.lane.hold(load.flows);
        loop {
            let is_last = self.lane.queue.is_closed();
            let (wait, why) = match self.client.post(load.path, load.body.clone()).await {
                Ok(Answer::Taken(body)) => return self.taken(&load, &body),
                Ok(Answer::Refused(why)) => {
                    self.lane.failed(&why);
                    return self.lane.dropped(Drop::Refused, load.flows);
                }
                Ok(Answer::Later(wait, why)) => (wait.map(|wait| wait.min(RETRY_AFTER_MAX)), why),
                Err(error) => (None, error.to_string()),
            };
            self.lane.failed(&why);
            // Old metrics are of no use: the next ones have the same totals.
            if is_last || load.flows == 0 {
                return self.lane.dropped(Drop::Ending, load.flows);
            }
            // A collector that asks for no pause gets one all the same.
            let pause = backoff.next(chance()).max(wait.unwrap_or_default());
            tokio::select! {
                () = sleep(pause) => {}
                () = self.lane.queue.closing() => {}
            }
        }
    }

    /// Notes what the collector has taken. It may have refused a part.
    fn taken(&self, load: &Load, body: &[u8]) {
        let (rejected, why) = rejected(load.path, body).unwrap_or_default();
        let rejected_flows = if load.flows > 0 { rejected.min(load.flows) } else { 0 };
        self.lane.sent(load.flows - rejected_flows);
        self.lane.dropped(Drop::Refused, rejected_flows);
        if rejected > 0 {
            self.lane
                .failed(&io::Error::other(format!("the collector refused {rejected} of a request: {why:?}")));
        }
    }
}

/// What an answer says was refused, and why. An answer that cannot be read refuses nothing.
fn rejected(path: &str, body: &[u8]) -> Option<(u64, String)> {
    let (count, why) = match path {
        "/v1/traces" => {
            let partial = ExportTraceServiceResponse::decode(body).ok()?.partial_success?;
            (partial.rejected_spans, partial.error_message)
        }
        _ => {
            let partial = ExportMetricsServiceResponse::decode(body).ok()?.partial_success?;
            (partial.rejected_data_points, partial.error_message)
        }
    };
    Some((u64::try_from(count).unwrap_or(0), why.chars().take(200).collect()))
}
