//! The decision trace of a flow, in the form in which the admin interface gives it away: which rules were tried, which
//! addresses its names led to, where the time went, and what TCP measured.

use super::{FlowRecord, seconds};
use crate::live::{Decided, LiveFlow, Step, TcpSeen, Trace};
use serde::{Deserialize, Serialize};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Intercept, Protocol, Side};
use sidetrack_core::function::FunctionKind;
use sidetrack_core::http::message::Method;
use sidetrack_core::http::uri::Resource;
use sidetrack_core::policy::{Action, Policy, Seen, TraceOutcome, Url};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A flow with its decision trace. Its JSON form is stable: fields are added, never renamed or removed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Traced<'a> {
    /// The flow's record so far.
    pub flow: FlowRecord<'a>,
    /// The decision in words, such as `carried direct (rule 'x')`. `None`: policy was not asked.
    pub verdict: Option<String>,
    /// Each rule's part in the decision, in order. `None`: policy was not asked, or many others have replaced it since.
    pub rules: Option<Vec<RuleTried>>,
    /// Where the flow was to go: after `to` and `dial` of its rule. `None`: it was not carried.
    pub destination: Option<String>,
    /// Addresses to which the name of the server, or of the first hop, was resolved: the first four of them.
    pub resolved: Vec<IpAddr>,
    /// How many addresses there were.
    pub resolved_count: u32,
    /// The address that answered: the server's, or the first hop's.
    pub dialled: Option<SocketAddr>,
    /// The steps in the order of time.
    pub steps: Vec<StepDone>,
    /// What TCP measured at the client's side. `None`: not asked yet, or the flow was short, or it is not our TCP connection.
    pub tcp_client: Option<TcpMeasured>,
    /// What TCP measured at the side of the server or the first hop.
    pub tcp_server: Option<TcpMeasured>,
}

/// The outcome of one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleTried {
    /// The name of the rule.
    pub rule: String,
    /// `matched`, `failed`, `waits` (for first bytes or for the process) or `not_reached`.
    pub outcome: String,
    /// The condition that did not hold, such as `to 10.0.0.0/8`.
    pub condition: Option<String>,
}

/// A step of a flow's set-up that is done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepDone {
    /// Seconds after the capture.
    pub at_seconds: f64,
    /// One word: `caught`, `first_bytes`, `decided`, `container`, `resolved`, `connected`, `hop_secured`, `hop_answered`,
    /// `far_side`, `server_secured`, `reused`, `answered` (the client's SYN was held until then), `ready`, `first_byte`, `ended`.
    pub step: String,
    /// What it was about: a function, a hop, an address.
    pub what: Option<String>,
}

/// What TCP measured at one side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TcpMeasured {
    /// When, seconds after the capture.
    pub at_seconds: f64,
    /// Smoothed round-trip time, seconds.
    pub rtt_seconds: f64,
    /// Least round-trip time, seconds. `None`: none was measured.
    pub min_rtt_seconds: Option<f64>,
    /// Segments that we sent again.
    pub retransmitted_segments: u32,
    /// Segments that counted as lost at that moment.
    pub lost_segments: u32,
    /// Latest rate at which the peer took our bytes, bytes per second. `None`: none was measured.
    pub delivery_rate_bytes: Option<u64>,
}

impl From<TcpSeen> for TcpMeasured {
    fn from(seen: TcpSeen) -> Self {
        let time = |us: u32| seconds(Duration::from_micros(us.into()));
        Self {
            at_seconds: time(seen.at_us),
            rtt_seconds: time(seen.rtt_us),
            min_rtt_seconds: (seen.min_rtt_us > 0).then(|| time(seen.min_rtt_us)),
            retransmitted_segments: seen.retransmitted,
            lost_segments: seen.lost,
            delivery_rate_bytes: (seen.delivery_rate > 0).then_some(seen.delivery_rate),
        }
    }
}

impl<'a> Traced<'a> {
    /// The trace of the flow with this record.
    pub fn new(record: FlowRecord<'a>, flow: &LiveFlow, decided: Option<&Decided>) -> Self {
        let trace = flow.trace();
        let policy = decided.and_then(|decided| Some((decided, decided.policy.upgrade()?)));
        let verdict = decided.and_then(|decided| decided.verdict.as_ref());
        let destination = match (decided, verdict.map(|verdict| &verdict.action)) {
            (Some(decided), Some(Action::Carry(carry))) => Some(carry.destination(&decided.flow).to_string()),
            _ => None,
        };
        let measured = |side| trace.tcp_of(side).map(TcpMeasured::from);
        Self {
            verdict: verdict.map(sidetrack_core::policy::Verdict::summary),
            rules: policy.map(|(decided, policy)| tried(&policy, decided, flow, &trace)),
            destination,
            steps: steps(&record, &trace, verdict.map(|verdict| &verdict.action)),
            tcp_client: measured(Side::Client),
            tcp_server: measured(Side::Server),
            resolved: trace.resolved,
            resolved_count: trace.resolved_count,
            dialled: trace.dialled,
            flow: record,
        }
    }
}

/// Goes through the rules again with what policy knew of the flow. Rules have no state, so the result is the same.
fn tried(policy: &Policy, decided: &Decided, flow: &LiveFlow, trace: &Trace) -> Vec<RuleTried> {
    let about = &decided.flow;
    let url = trace.url.as_deref().and_then(|url| Resource::parse(url.as_bytes(), &Method::Get).ok());
    let url = url.as_ref().map(Url::of);
    let host = about.host.as_ref();
    let has_seen =
        flow.sniff_wait().is_some() || about.protocol == Protocol::Udp || about.intercept == Intercept::Http;
    let seen = match &url {
        Some(url) => Seen::Request { host, url },
        None if has_seen => Seen::FirstBytes(host),
        None => Seen::Nothing,
    };
    let line = |line: sidetrack_core::policy::TraceLine| {
        let (outcome, condition) = match line.outcome {
            TraceOutcome::Matched => ("matched", None),
            TraceOutcome::Failed { condition } => ("failed", Some(condition)),
            TraceOutcome::NeedsFirstBytes | TraceOutcome::NeedsProcess => ("waits", None),
            TraceOutcome::NotReached => ("not_reached", None),
        };
        RuleTried { rule: line.rule.to_string(), outcome: outcome.to_owned(), condition }
    };
    policy.trace(about, seen).into_iter().map(line).collect()
}

/// The steps of a flow, in the order of time. `record` and `decided` are the flow's.
pub fn steps_of(record: &FlowRecord<'_>, flow: &LiveFlow, decided: Option<&Decided>) -> Vec<StepDone> {
    steps(record, &flow.trace(), decided.and_then(Decided::action))
}

/// The steps of a flow, those of its record among them, in the order of time.
fn steps(record: &FlowRecord<'_>, trace: &Trace, action: Option<&Action>) -> Vec<StepDone> {
    let step = |at_seconds, step: &str, what| StepDone { at_seconds, step: step.to_owned(), what };
    let mut steps = vec![step(0.0, "caught", record.intercept.map(|by| by.as_str().to_owned()))];
    steps.extend(trace.steps().iter().map(|(done, at_us)| {
        let (word, what) = in_words(*done, trace, action);
        step(seconds(Duration::from_micros((*at_us).into())), word, what)
    }));
    steps.extend(record.held_seconds.map(|at| step(at, "answered", None)));
    steps.extend(record.connect_seconds.map(|at| step(at, "ready", None)));
    steps.extend(record.first_byte_seconds.map(|at| step(at, "first_byte", None)));
    steps.extend(
        record.reason.map(|reason| step(record.duration_seconds, "ended", Some(reason.as_str().to_owned()))),
    );
    // Stable: steps of the same microsecond stay in their order.
    steps.sort_by(|one, other| one.at_seconds.total_cmp(&other.at_seconds));
    steps
}

fn in_words(step: Step, trace: &Trace, action: Option<&Action>) -> (&'static str, Option<String>) {
    let carry = match action {
        Some(Action::Carry(carry)) => Some(carry),
        _ => None,
    };
    let hop = |at: u8| match &carry?.carrier {
        Carrier::Hops(hops) => hops.get(usize::from(at)).map(ToString::to_string),
        _ => None,
    };
    let container = |at: u8| {
        let spec = carry?.chain.as_ref()?;
        let is_branch = |kind: &FunctionKind| matches!(kind, FunctionKind::Branch(_));
        let functions = &spec.functions;
        // A branch may have led the flow through others.
        let known = !functions.iter().any(|function| is_branch(&function.kind));
        let mut containers =
            functions.iter().filter(|function| matches!(function.kind, FunctionKind::Container(_)));
        containers.nth(usize::from(at)).filter(|_| known).map(|function| function.name.to_string())
    };
    match step {
        Step::FirstBytes => ("first_bytes", None),
        Step::Decided => ("decided", None),
        Step::Container(at) => ("container", container(at)),
        Step::Resolved => ("resolved", None),
        Step::Connected => ("connected", trace.dialled.map(|to| to.to_string())),
        Step::HopSecured(at) => ("hop_secured", hop(at)),
        Step::HopAnswered(at) => ("hop_answered", hop(at)),
        Step::FarSide => ("far_side", carry.map(|carry| carry.carrier.to_string())),
        Step::ServerSecured => ("server_secured", None),
        Step::Reused => ("reused", None),
        Step::Wired => ("wired", None),
        Step::Back => ("back", None),
    }
}
