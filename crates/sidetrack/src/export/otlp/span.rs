//! A flow as spans: one for the flow, and below it one for each step of its set-up. Names of attributes are those of
//! OpenTelemetry's semantic conventions where there are such.

use super::{attribute, nanos, text};
use crate::live::Batch;
use crate::record::{FlowRecord, StepDone, steps_of};
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::span::{Event, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use ring::digest::{Context, SHA256};
use sidetrack_core::flow::{EndReason, Protocol};
use std::net::SocketAddr;

/// Longest text of an attribute, bytes.
const TEXT_MAX: usize = 1024;

/// Makes the spans of flows.
pub(super) struct Spans {
    /// Chance of this process: traces of several nodes must differ.
    seed: [u8; 16],
}

/// The ids of one flow: of its trace (W3C Trace Context, 16 bytes), and a number from which those of its spans follow.
struct Ids {
    trace: Vec<u8>,
    root: u64,
}

impl Ids {
    /// The id of the flow's span (0), and of those below it. Never 0 in practice, which would not be valid.
    fn span(&self, number: u64) -> Vec<u8> {
        let id = self.root ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        id.max(1).to_be_bytes().to_vec()
    }
}

/// When something was, nanoseconds since 1970.
#[derive(Clone, Copy)]
struct Clock(u64);

impl Clock {
    fn at(self, seconds: f64) -> u64 {
        self.0.saturating_add((seconds * 1e9).round() as u64)
    }
}

impl Spans {
    pub(super) const fn new(seed: [u8; 16]) -> Self {
        Self { seed }
    }

    fn ids(&self, flow: u64) -> Ids {
        let mut digest = Context::new(&SHA256);
        digest.update(&self.seed);
        digest.update(&flow.to_be_bytes());
        let digest = digest.finish();
        let (trace, rest) = digest.as_ref().split_at(16);
        let root = rest.first_chunk().map_or(1, |root| u64::from_be_bytes(*root));
        Ids { trace: trace.to_vec(), root }
    }

    /// Appends the spans of these flows.
    pub(super) fn add(&self, batch: &Batch, out: &mut Vec<Span>) {
        for past in batch.iter() {
            let ended = past.to_ended();
            let decided = ended.flow.decided();
            let record = FlowRecord::ended(&ended, decided.as_deref());
            let steps = steps_of(&record, &ended.flow, decided.as_deref());
            let clock = Clock(nanos(ended.flow.since));
            let ids = self.ids(record.flow);
            let children = below(&steps, &record, &ids, clock, ended.flow.trace().dialled);
            out.push(whole(&record, &steps, &ids, clock, ended.flow.trace().dialled));
            out.extend(children);
        }
    }
}

/// A text of bounded length, cut after a whole character.
fn short(key: &str, value: &str) -> KeyValue {
    let end = (0..=value.len().min(TEXT_MAX)).rev().find(|at| value.is_char_boundary(*at)).unwrap_or(0);
    text(key, value.get(..end).unwrap_or_default())
}

fn number(key: &str, value: u64) -> KeyValue {
    attribute(key, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
}

fn address(prefix: &str, address: SocketAddr) -> [KeyValue; 2] {
    let ip = text(&format!("{prefix}.address"), address.ip().to_string());
    [ip, number(&format!("{prefix}.port"), address.port().into())]
}

/// Whether a flow that ended like this has failed.
const fn is_failure(reason: EndReason, protocol: Option<Protocol>) -> bool {
    !matches!(
        (reason, protocol),
        (
            EndReason::Ok
                | EndReason::KernelClosed
                | EndReason::Shutdown
                | EndReason::Killed
                | EndReason::Lifetime,
            _
        ) | (EndReason::Idle, Some(Protocol::Udp))
    )
}

/// The span of a whole flow.
fn whole(
    record: &FlowRecord<'_>,
    steps: &[StepDone],
    ids: &Ids,
    clock: Clock,
    dialled: Option<SocketAddr>,
) -> Span {
    let protocol = record.protocol.map_or("unknown", Protocol::as_str);
    let failure = record.reason.filter(|reason| is_failure(*reason, record.protocol));
    let mut attributes = parties(record, dialled);
    attributes.extend(own(record));
    attributes.extend(failure.map(|reason| text("error.type", reason.as_str())));
    let status = failure.map(|reason| Status {
        message: record.detail.as_deref().unwrap_or(reason.as_str()).chars().take(TEXT_MAX).collect(),
        code: StatusCode::Error.into(),
    });
    let moments = steps.iter().filter(|step| is_moment(&step.step));
    let events = moments.map(|step| Event {
        time_unix_nano: clock.at(step.at_seconds),
        name: step.step.clone(),
        ..Event::default()
    });
    Span {
        trace_id: ids.trace.clone(),
        span_id: ids.span(0),
        name: format!("{protocol} flow"),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: clock.at(0.0),
        end_time_unix_nano: clock.at(record.duration_seconds),
        attributes,
        events: events.collect(),
        status,
        ..Span::default()
    }
}

/// The attributes with standard names.
fn parties(record: &FlowRecord<'_>, dialled: Option<SocketAddr>) -> Vec<KeyValue> {
    let mut all = Vec::with_capacity(24);
    all.extend(record.protocol.map(|protocol| text("network.transport", protocol.as_str())));
    if let Some(client) = record.client {
        all.push(text("network.type", if client.is_ipv4() { "ipv4" } else { "ipv6" }));
        all.extend(address("client", client));
    }
    if let Some(to) = record.orig_dst.as_deref() {
        let name = record.host.as_deref().map_or_else(|| to.host.to_string(), str::to_owned);
        all.push(short("server.address", &name));
        all.push(number("server.port", to.port.into()));
    }
    all.extend(dialled.into_iter().flat_map(|dialled| address("network.peer", dialled)));
    let texts = [
        ("process.executable.name", &record.process),
        ("user.name", &record.user),
        ("tls.client.server_name", &record.tls_name),
    ];
    all.extend(texts.iter().filter_map(|(key, value)| Some(short(key, value.as_deref()?))));
    all
}

/// The attributes of our own, with the names of records.
fn own(record: &FlowRecord<'_>) -> Vec<KeyValue> {
    let mut all = vec![
        number("sidetrack.flow", record.flow),
        number("sidetrack.bytes_up", record.bytes_up),
        number("sidetrack.bytes_down", record.bytes_down),
        attribute("sidetrack.shunted", Value::BoolValue(record.shunted)),
    ];
    let counts =
        [("sidetrack.packets_up", record.packets_up), ("sidetrack.packets_down", record.packets_down)];
    all.extend(counts.iter().filter_map(|(key, count)| Some(number(key, (*count)?))));
    let texts = [
        ("sidetrack.rule", &record.rule),
        ("sidetrack.carrier", &record.carrier),
        ("sidetrack.listener", &record.listener),
        ("sidetrack.detail", &record.detail),
        ("sidetrack.path", &record.path),
        ("sidetrack.agreement", &record.agreement),
    ];
    all.extend(texts.iter().filter_map(|(key, value)| Some(short(key, value.as_deref()?))));
    all.extend(record.intercept.map(|by| text("sidetrack.intercept", by.as_str())));
    all.extend(record.reason.map(|reason| text("sidetrack.reason", reason.as_str())));
    if let Some(to) = record.orig_dst.as_deref() {
        all.push(short("sidetrack.orig_dst", &to.to_string()));
    }
    if !record.chain.is_empty() {
        let name = |name: &str| AnyValue { value: Some(Value::StringValue(name.to_owned())) };
        let values = record.chain.iter().map(|one| name(one)).collect();
        all.push(attribute("sidetrack.chain", Value::ArrayValue(ArrayValue { values })));
    }
    all
}

/// Whether a step of the trace is a moment, and nothing that took time.
fn is_moment(step: &str) -> bool {
    matches!(step, "ready" | "answered" | "reused" | "wired" | "back")
}

/// The name of the span for what took until this step was done. `None`: it has none.
fn span_name(step: &str) -> Option<&'static str> {
    Some(match step {
        "first_bytes" => "first bytes",
        "decided" => "policy",
        "container" => "function",
        "resolved" => "resolve",
        "connected" => "connect",
        "hop_secured" => "hop tls",
        "hop_answered" => "hop",
        "far_side" => "far side",
        "server_secured" => "tls",
        "first_byte" => "first byte",
        _ => return None,
    })
}

/// The spans below that of the flow. Each begins when the step before was done.
fn below(
    steps: &[StepDone],
    record: &FlowRecord<'_>,
    ids: &Ids,
    clock: Clock,
    dialled: Option<SocketAddr>,
) -> Vec<Span> {
    let mut before = 0.0;
    let mut spans = Vec::new();
    let mut add = |name: &str, kind: SpanKind, from: f64, to: f64, attributes| {
        let number = spans.len() as u64 + 1;
        spans.push(Span {
            trace_id: ids.trace.clone(),
            span_id: ids.span(number),
            parent_span_id: ids.span(0),
            name: name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: clock.at(from),
            end_time_unix_nano: clock.at(to),
            attributes,
            ..Span::default()
        });
    };
    if let Some(held) = record.held_seconds {
        add("held", SpanKind::Internal, 0.0, held, Vec::new());
    }
    for step in steps {
        if let Some(name) = span_name(&step.step) {
            let is_dialling = step.step == "connected";
            let kind = if is_dialling { SpanKind::Client } else { SpanKind::Internal };
            let mut attributes = Vec::new();
            if is_dialling {
                attributes.extend(dialled.into_iter().flat_map(|to| address("network.peer", to)));
            } else {
                attributes.extend(step.what.as_deref().map(|what| short("sidetrack.what", what)));
            }
            add(name, kind, before, step.at_seconds, attributes);
        }
        before = step.at_seconds;
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::{Decided, Ended, LiveFlow, Step};
    use sidetrack_core::flow::{Flow, FlowId, Intercept, Process};
    use std::sync::Arc;
    use std::time::Duration;

    fn flow(process: &str, user: &str) -> Flow {
        Flow {
            protocol: Protocol::Tcp,
            intercept: Intercept::Kernel,
            listener: "port".into(),
            client: ([10, 0, 0, 1], 5).into(),
            orig_dst: "web.example:443".parse().unwrap(),
            host: None,
            process: Some(Process { name: Some(process.to_owned()), ..Process::default() }),
            user: Some(user.to_owned()),
        }
    }

    fn spans(of: Flow, reason: EndReason) -> Vec<Span> {
        let live = LiveFlow::new(FlowId(3));
        live.decide(Decided::new(of, None));
        live.held(Duration::from_millis(40));
        live.traced(|trace| {
            trace.step(Step::Decided, Duration::from_millis(1));
            trace.step(Step::Resolved, Duration::from_millis(11));
            trace.step(Step::Connected, Duration::from_millis(31));
        });
        live.first_byte(Duration::from_millis(50));
        let (mut batch, mut out) = (Batch::default(), Vec::new());
        batch.add(&Ended { flow: Arc::new(live), reason, detail: None, duration: Duration::from_millis(60) });
        Spans::new([1; 16]).add(&batch, &mut out);
        out
    }

    #[test]
    fn hostile_texts_are_cut_and_stay_texts() {
        let (nasty, long) = ("\u{1b}[2J\0\"'<script>\r\n", "\u{e9}".repeat(2000));
        let root = spans(flow(nasty, &long), EndReason::Internal).remove(0);
        let value = |key: &str| {
            let found = root.attributes.iter().find(|one| one.key == key).expect(key);
            match found.value.clone().and_then(|value| value.value) {
                Some(Value::StringValue(text)) => text,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(value("process.executable.name"), nasty);
        assert_eq!(value("user.name"), "\u{e9}".repeat(TEXT_MAX / 2));
        assert_eq!((value("error.type"), value("sidetrack.intercept")), ("internal".into(), "kernel".into()));
    }

    #[test]
    fn each_step_begins_where_the_one_before_ended() {
        let all = spans(flow("curl", "ann"), EndReason::Ok);
        let (root, below) = all.split_first().expect("spans");
        let start = root.start_time_unix_nano;
        let times: Vec<_> = below
            .iter()
            .map(|one| (&one.name[..], one.start_time_unix_nano - start, one.end_time_unix_nano - start))
            .map(|(name, from, to)| (name, from / 1_000_000, to / 1_000_000))
            .collect();
        assert_eq!(
            times,
            [
                ("held", 0, 40),
                ("policy", 0, 1),
                ("resolve", 1, 11),
                ("connect", 11, 31),
                ("first byte", 40, 50)
            ]
        );
        assert!(below.iter().all(|one| one.parent_span_id == root.span_id && one.trace_id == root.trace_id));
        assert_eq!(root.events.iter().map(|one| &one.name[..]).collect::<Vec<_>>(), ["answered"]);
    }
}
