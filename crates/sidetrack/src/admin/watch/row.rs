//! A running flow as the live table shows it.

use crate::live::{Decided, LiveFlow};
use crate::record::{FlowRecord, Timestamp};
use serde::Serialize;
use sidetrack_core::flow::{Destination, EndReason, Intercept, Protocol, Side};
use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// What a row says of its flow: fields of a [record](FlowRecord) with the same names and meanings, and what changes each
/// second. Fields that are not known are left out.
#[derive(Debug, Serialize)]
pub(super) struct Shown<'a> {
    flow: u64,
    ts: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    chain: Vec<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    carrier: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    listener: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    intercept: Option<Intercept>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<Protocol>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "in_words")]
    orig_dst: Option<Cow<'a, Destination>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_name: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    process: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<Cow<'a, str>>,
    bytes_up: u64,
    bytes_down: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    connect_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_byte_seconds: Option<f64>,
    duration_seconds: f64,
    shunted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<EndReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agreement: Option<Cow<'a, str>>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    moved: Option<Moved>,
}

fn in_words<S: serde::Serializer>(
    to: &Option<Cow<'_, Destination>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(to.as_deref().map_or(&"" as &dyn std::fmt::Display, |to| to as _))
}

impl<'a> Shown<'a> {
    pub(super) fn new(record: FlowRecord<'a>, moved: Option<Moved>) -> Self {
        Self {
            flow: record.flow,
            ts: record.ts,
            rule: record.rule,
            chain: record.chain,
            carrier: record.carrier,
            listener: record.listener,
            intercept: record.intercept,
            protocol: record.protocol,
            client: record.client,
            orig_dst: record.orig_dst,
            host: record.host,
            tls_name: record.tls_name,
            process: record.process,
            user: record.user,
            bytes_up: record.bytes_up,
            bytes_down: record.bytes_down,
            connect_seconds: record.connect_seconds,
            first_byte_seconds: record.first_byte_seconds,
            duration_seconds: record.duration_seconds,
            shunted: record.shunted,
            reason: record.reason,
            detail: record.detail,
            path: record.path,
            agreement: record.agreement,
            moved,
        }
    }
}

/// What changes while bytes move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Moved {
    /// Payload bytes of the last second from client to server.
    up_bytes_per_second: u64,
    /// Payload bytes of the last second from server to client.
    down_bytes_per_second: u64,
    /// Smoothed round-trip time to the client, microseconds. 0: not measured.
    client_rtt_us: u32,
    /// The same to the server or the first hop.
    server_rtt_us: u32,
}

/// The names of what a line of `moved` has, in order.
pub(super) const MOVED_COLUMNS: [&str; 7] = [
    "flow",
    "bytes_up",
    "bytes_down",
    "up_bytes_per_second",
    "down_bytes_per_second",
    "client_rtt_us",
    "server_rtt_us",
];

/// What rarely changes. If it does, the whole row is sent again.
#[derive(Debug, Default, PartialEq, Eq)]
struct Shape {
    connect: Option<Duration>,
    first_byte: Option<Duration>,
    shunted: bool,
    is_taken: bool,
    is_greeted: bool,
}

impl Shape {
    fn of(flow: &LiveFlow) -> Self {
        Self {
            connect: flow.connect_time(),
            first_byte: flow.first_byte_time(),
            shunted: flow.was_shunted(),
            is_taken: flow.taken().is_some(),
            is_greeted: flow.tls_name().is_some(),
        }
    }
}

/// A row of the table.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) flow: Arc<LiveFlow>,
    pub(super) decided: Option<Arc<Decided>>,
    shape: Shape,
    bytes: (u64, u64),
    moved: Moved,
    /// TCP was asked at this version. 0: never.
    asked_at: u64,
    /// The version in which the shape changed last.
    pub(super) shaped_at: u64,
    /// The version in which bytes, rates or times changed last.
    pub(super) moved_at: u64,
    /// The version in which it was running.
    pub(super) seen_at: u64,
}

impl Row {
    pub(super) fn new(flow: Arc<LiveFlow>, version: u64) -> Self {
        let (decided, shape, bytes) = (flow.decided(), Shape::of(&flow), flow.bytes());
        let moved = Moved::default();
        Self {
            flow,
            decided,
            shape,
            bytes,
            moved,
            asked_at: 0,
            shaped_at: version,
            moved_at: version,
            seen_at: version,
        }
    }

    /// Looks at the flow again, `after` the last time. Returns the bytes that moved.
    pub(super) fn look(&mut self, version: u64, after: Duration) -> (u64, u64) {
        self.seen_at = version;
        let decided = self.flow.decided();
        let is_same = match (&decided, &self.decided) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        let shape = Shape::of(&self.flow);
        if !is_same || shape != self.shape {
            (self.decided, self.shape, self.shaped_at) = (decided, shape, version);
        }
        let bytes = self.flow.bytes();
        let delta = (bytes.0.saturating_sub(self.bytes.0), bytes.1.saturating_sub(self.bytes.1));
        let per_second = |bytes: u64| (bytes as f64 / after.as_secs_f64().max(0.001)) as u64;
        let mut moved = Moved {
            up_bytes_per_second: per_second(delta.0),
            down_bytes_per_second: per_second(delta.1),
            ..self.moved
        };
        if self.asked_at > 0 && !self.flow.waits_for_tcp() {
            let rtt = |side| self.flow.tcp(side).map_or(0, |seen| seen.rtt_us);
            (moved.client_rtt_us, moved.server_rtt_us) = (rtt(Side::Client), rtt(Side::Server));
        }
        if bytes != self.bytes || moved != self.moved {
            (self.bytes, self.moved, self.moved_at) = (bytes, moved, version);
        }
        delta
    }

    /// Whether TCP can be asked about the flow, and has not been asked since `version`, or has moved bytes since then.
    pub(super) fn wants_tcp(&self, version: u64) -> bool {
        let is_stale = self.asked_at == 0 || (self.asked_at < version && self.moved_at > self.asked_at);
        is_stale && self.shape.connect.is_some() && !self.flow.waits_for_tcp()
    }

    /// Asks TCP at both sides. The answer is there one version later.
    pub(super) fn ask_tcp(&mut self, version: u64) {
        self.asked_at = version;
        self.flow.want_tcp();
    }

    pub(super) fn record(&self) -> FlowRecord<'_> {
        FlowRecord::live(&self.flow, self.decided.as_deref())
    }

    /// Appends the whole row.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        // Writing to a Vec cannot fail, and a row contains nothing that JSON cannot express.
        let _ = serde_json::to_writer(out, &Shown::new(self.record(), Some(self.moved)));
    }

    /// Appends what changes while bytes move, in the order of [`MOVED_COLUMNS`].
    pub(super) fn write_moved(&self, out: &mut Vec<u8>) {
        let Moved { up_bytes_per_second, down_bytes_per_second, client_rtt_us, server_rtt_us } = self.moved;
        let values = [
            self.flow.id.0,
            self.bytes.0,
            self.bytes.1,
            up_bytes_per_second,
            down_bytes_per_second,
            client_rtt_us.into(),
            server_rtt_us.into(),
        ];
        let _ = serde_json::to_writer(out, &values);
    }
}
