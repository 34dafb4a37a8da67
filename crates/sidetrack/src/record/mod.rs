//! Records: one JSON line for each flow, the latest records in memory, and clients that follow new ones.
//!
//! All this runs on threads beside the workers. The data path only puts an ended flow, in compact form, into its
//! worker's [`Ledger`](crate::live::Ledger).

mod feed;
pub mod history;
mod line;
mod recorder;
mod seen;
mod states;
mod text;
mod traced;
mod writer;

pub use feed::{FOLLOWERS_MAX, Feed, Follow, TooManyFollowers};
pub use recorder::{Observer, Offered, Recorder, Switch, VISIT_EVERY};
pub use seen::{is_refusal, seen};
pub use states::Reached;
pub use text::Timestamp;
pub use traced::{RuleTried, StepDone, TcpMeasured, Traced, steps_of};
pub use writer::{BUFFER_MAX, RecordWriter, Target, Trouble};

use crate::live::{Batch, Decided, Ended, LiveFlow};
use serde::{Deserialize, Serialize};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::filter::FlowFacts;
use sidetrack_core::flow::{Destination, EndReason, Flow, Host, Intercept, Process, Protocol};
use sidetrack_core::policy::Action;
use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

/// The JSON Schema (draft 2020-12) of a record: `docs/records.schema.json`.
pub const SCHEMA: &str = include_str!("../../../../docs/records.schema.json");

/// The record of a flow. The names, their order and their meaning are fixed: `docs/records.md`.
///
/// A field that is not known is `null`; no field is ever left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowRecord<'a> {
    /// When the flow was captured: RFC 3339, UTC, milliseconds. The end is `ts` + `duration_seconds`.
    pub ts: Timestamp,
    /// The flow's number, unique in one process. It counts from 1.
    pub flow: u64,
    /// Name of the rule that decided. `null`: the default decided, or policy was not asked.
    pub rule: Option<Cow<'a, str>>,
    /// Names of the functions that the flow passed through, in order. Empty if the rule names none.
    pub chain: Vec<Cow<'a, str>>,
    /// How it was carried: `direct`, `kernel`, or the hops in order, as in `socks6://gw:1080 -> http://b:3128`,
    /// never with credentials. `null` if it was not carried.
    pub carrier: Option<Cow<'a, str>>,
    /// Name of the listener that captured it.
    pub listener: Option<Cow<'a, str>>,
    /// How it was captured.
    pub intercept: Option<Intercept>,
    /// The client's address, from the PROXY protocol header where that is trusted. Under an isolated `run`, an
    /// address of this host's loopback.
    pub client: Option<SocketAddr>,
    /// The application's destination before any rule: `address:port` or `name:port`.
    #[serde(with = "text::option")]
    pub orig_dst: Option<Cow<'a, Destination>>,
    /// The host name, if known: from our DNS answer, a SOCKS request, SNI or the HTTP Host field; otherwise the
    /// name in `orig_dst`.
    pub host: Option<Cow<'a, str>>,
    /// Base name of the local program, if a rule needed it or `run` captured the flow, and if it was found.
    /// `pid:N` if it has no name.
    pub process: Option<Cow<'a, str>>,
    /// The SOCKS user that authenticated; otherwise, for a local program, `uid:N`.
    pub user: Option<Cow<'a, str>>,
    /// Payload bytes from client to server.
    pub bytes_up: u64,
    /// Payload bytes from server to client.
    pub bytes_down: u64,
    /// Time from the capture until the path to the server was set up. `null` if it never was.
    pub connect_seconds: Option<f64>,
    /// Time from the capture to the server's first byte. `null` if there was none.
    pub first_byte_seconds: Option<f64>,
    /// Time from the capture to the end, or until now.
    pub duration_seconds: f64,
    /// Whether its bytes bypassed us through an entry that we installed.
    pub shunted: bool,
    /// The reason why it ended. `null` only while it is running.
    pub reason: Option<EndReason>,
    /// Details beyond the reason: which hop, step and code.
    pub detail: Option<Cow<'a, str>>,
    /// What carried it, if the carrier leaves a choice: `quic ADDRESS` or `tls ADDRESS` of a tunnel's far side,
    /// `warm ADDRESS` of a server with an existing connection.
    #[serde(default)]
    pub path: Option<Cow<'a, str>>,
    /// The agreement's decision, if the rule asks it: `allow: NAMES`, `deny: why`, `would deny: why`, or
    /// `revoked: why`.
    #[serde(default)]
    pub agreement: Option<Cow<'a, str>>,
    /// The name in the client's TLS hello, if it differs from `host`. Policy was asked about both.
    #[serde(default)]
    pub tls_name: Option<Cow<'a, str>>,
    /// The TCP states of both sides in the order in which they were reached. Only for flows of the packet
    /// engine.
    #[serde(default)]
    pub states: Option<Vec<Reached>>,
    /// The sides, `client` and `server`, that used Multipath TCP. The others used plain TCP.
    #[serde(default)]
    pub mptcp: Vec<Cow<'a, str>>,
    /// The transport protocol.
    #[serde(default)]
    pub protocol: Option<Protocol>,
    /// Datagrams from client to server. `null` for TCP.
    #[serde(default)]
    pub packets_up: Option<u64>,
    /// Datagrams from server to client. `null` for TCP.
    #[serde(default)]
    pub packets_down: Option<u64>,
    /// How long the client's SYN was held until its answer. `null` if it was not.
    #[serde(default)]
    pub held_seconds: Option<f64>,
}

/// Returns seconds, exact to the microsecond, with no more digits than that.
fn seconds(time: Duration) -> f64 {
    // Exact below 2^53 microseconds (285 years).
    time.as_micros() as f64 / 1e6
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

impl<'a> FlowRecord<'a> {
    /// The record of a running flow at this time. `decided` is the flow's.
    pub fn live(flow: &LiveFlow, decided: Option<&'a Decided>) -> Self {
        Self::after(flow, decided, flow.opened.elapsed())
    }

    /// The record of a running flow at `duration` after its capture.
    fn after(flow: &LiveFlow, decided: Option<&'a Decided>, duration: Duration) -> Self {
        let (bytes_up, bytes_down) = flow.bytes();
        let known = decided.map(|decided| &decided.flow);
        let packets = known.filter(|known| known.protocol == Protocol::Udp).map(|_| flow.packets());
        let process = known.and_then(|known| known.process.as_ref());
        Self {
            ts: Timestamp::from(flow.since),
            flow: flow.id.0,
            rule: decided.and_then(Decided::rule).map(|rule| Cow::Borrowed(&**rule)),
            chain: decided.map(chain).unwrap_or_default(),
            carrier: decided.and_then(carrier),
            listener: known.map(|known| Cow::Borrowed(&*known.listener)),
            intercept: known.map(|known| known.intercept),
            client: known.map(|known| known.client),
            orig_dst: known.map(|known| Cow::Borrowed(&known.orig_dst)),
            host: known.and_then(host),
            process: process.and_then(program),
            user: known
                .and_then(|known| known.user.as_deref())
                .map(Cow::Borrowed)
                .or_else(|| process?.uid.map(|uid| Cow::Owned(format!("uid:{uid}")))),
            bytes_up,
            bytes_down,
            connect_seconds: flow.connect_time().map(seconds),
            first_byte_seconds: flow.first_byte_time().map(seconds),
            duration_seconds: seconds(duration),
            shunted: flow.was_shunted() || known.is_some_and(|known| known.intercept == Intercept::Kernel),
            reason: None,
            detail: None,
            agreement: decided.and_then(Decided::agreement).map(Cow::Borrowed),
            tls_name: flow.tls_name().map(|name| Cow::Owned(name.to_string())),
            path: flow.taken().map(|taken| Cow::Owned(taken.to_string())),
            mptcp: flow.multipath().names().map(Cow::Borrowed).collect(),
            protocol: known.map(|known| known.protocol),
            packets_up: packets.map(|(up, _)| up),
            packets_down: packets.map(|(_, down)| down),
            held_seconds: flow.held_wait().map(seconds),
            states: flow.states().map(|states| states.iter().map(Reached::from).collect()),
        }
    }

    /// The record of an ended flow. `decided` is the flow's.
    pub fn ended(ended: &'a Ended, decided: Option<&'a Decided>) -> Self {
        Self {
            reason: Some(ended.reason),
            detail: ended.detail.as_deref().map(Cow::Borrowed),
            ..Self::after(&ended.flow, decided, ended.duration)
        }
    }

    /// One line for people: `api.example:443 via socks5://gw:1080: refused: hop 1 of 1 …`.
    pub fn sentence(&self) -> String {
        let to = self.orig_dst.as_ref().map_or_else(|| "unknown destination".to_owned(), ToString::to_string);
        let path = self.path.as_deref().map(|path| format!(" ({path})")).unwrap_or_default();
        let carrier =
            self.carrier.as_deref().map(|carrier| format!(" via {carrier}{path}")).unwrap_or_default();
        let reason = self.reason.map_or("in flight", EndReason::as_str);
        let detail = self.detail.as_deref().map(|detail| format!(": {detail}")).unwrap_or_default();
        format!("{to}{carrier}, {} bytes up, {} bytes down: {reason}{detail}", self.bytes_up, self.bytes_down)
    }

    /// The values that a filter can test.
    pub fn facts(&self) -> FlowFacts<'_> {
        FlowFacts {
            id: self.flow,
            client: self.client,
            dst: self.orig_dst.as_deref(),
            host: self.host.as_deref(),
            process: self.process.as_deref(),
            user: self.user.as_deref(),
            rule: self.rule.as_deref(),
            chain: (!self.chain.is_empty()).then(|| self.chain.join(",").into()),
            carrier: self.carrier.as_deref(),
            listener: self.listener.as_deref(),
            intercept: self.intercept,
            protocol: self.protocol,
            reason: self.reason,
            bytes_up: self.bytes_up,
            bytes_down: self.bytes_down,
            packets_up: self.packets_up.unwrap_or(0),
            packets_down: self.packets_down.unwrap_or(0),
            age: duration(self.duration_seconds),
            connect: self.connect_seconds.map(duration),
            first_byte: self.first_byte_seconds.map(duration),
        }
    }

    /// Returns a record that borrows nothing.
    pub fn to_owned_record(&self) -> FlowRecord<'static> {
        fn owned<'a>(text: Option<&Cow<'_, str>>) -> Option<Cow<'a, str>> {
            text.map(|text| Cow::Owned(text.to_string()))
        }
        let words = |words: &[Cow<'_, str>]| words.iter().map(|word| Cow::Owned(word.to_string())).collect();
        FlowRecord {
            ts: self.ts,
            flow: self.flow,
            rule: owned(self.rule.as_ref()),
            chain: words(&self.chain),
            carrier: owned(self.carrier.as_ref()),
            listener: owned(self.listener.as_ref()),
            intercept: self.intercept,
            client: self.client,
            orig_dst: self.orig_dst.as_deref().map(|dst| Cow::Owned(dst.clone())),
            host: owned(self.host.as_ref()),
            process: owned(self.process.as_ref()),
            user: owned(self.user.as_ref()),
            bytes_up: self.bytes_up,
            bytes_down: self.bytes_down,
            connect_seconds: self.connect_seconds,
            first_byte_seconds: self.first_byte_seconds,
            duration_seconds: self.duration_seconds,
            shunted: self.shunted,
            reason: self.reason,
            detail: owned(self.detail.as_ref()),
            path: owned(self.path.as_ref()),
            agreement: owned(self.agreement.as_ref()),
            tls_name: owned(self.tls_name.as_ref()),
            states: self.states.clone(),
            mptcp: words(&self.mptcp),
            protocol: self.protocol,
            packets_up: self.packets_up,
            packets_down: self.packets_down,
            held_seconds: self.held_seconds,
        }
    }

    /// Appends the record as one line of JSON.
    pub fn write_line(&self, out: &mut Vec<u8>) {
        // A Vec accepts all bytes, and a record contains nothing that JSON cannot express.
        if serde_json::to_writer(&mut *out, self).is_ok() {
            out.push(b'\n');
        }
    }
}

/// Appends the records of these flows, one JSON line each. The text equals that of [`FlowRecord::write_line`],
/// in a fraction of the time.
pub fn write_lines(batch: &Batch, out: &mut Vec<u8>) {
    line::Lines::default().write(batch, out);
}

/// The host name. A destination that is a name counts too.
fn host(flow: &Flow) -> Option<Cow<'_, str>> {
    let name = flow.host.as_ref().or(match &flow.orig_dst.host {
        Host::Name(name) => Some(name),
        Host::Ip(_) => None,
    });
    name.map(|name| Cow::Borrowed(name.as_str()))
}

/// The functions in the verdict's chain.
fn chain(decided: &Decided) -> Vec<Cow<'_, str>> {
    match decided.action() {
        Some(Action::Carry(carry)) => {
            carry.chain.iter().flat_map(|chain| chain.names()).map(|name| Cow::Borrowed(&**name)).collect()
        }
        _ => Vec::new(),
    }
}

/// The carrier in words. `None` for a denied flow.
fn carrier(decided: &Decided) -> Option<Cow<'_, str>> {
    match decided.action()? {
        Action::Deny => None,
        Action::Carry(_) if decided.flow.intercept == Intercept::Kernel => Some("kernel".into()),
        Action::Carry(carry) => Some(match &carry.carrier {
            Carrier::Direct => "direct".into(),
            through => through.to_string().into(),
        }),
    }
}

fn program(process: &Process) -> Option<Cow<'_, str>> {
    match (&process.name, process.pid) {
        (Some(name), _) => Some(name.into()),
        (None, Some(pid)) => Some(format!("pid:{pid}").into()),
        (None, None) => None,
    }
}
