//! Says why a flow was treated as it was, and where its time went.

use super::human::{self, printable};
use crate::record::{RuleTried, StepDone, TcpMeasured, Traced};
use std::fmt::Write;

/// The width of the column of names.
const NAMES: usize = 10;

/// Formats the decision trace of a flow.
pub(super) fn text(traced: &Traced<'_>) -> String {
    let mut text = String::new();
    let flow = &traced.flow;
    let known = |text: Option<&str>| printable(text.unwrap_or("unknown"));
    let client = flow.client.map_or_else(|| "unknown".to_owned(), |client| client.to_string());
    let asked = flow.orig_dst.as_ref().map(ToString::to_string);
    let by = flow.intercept.map_or("unknown", |intercept| intercept.as_str());
    let listener = known(flow.listener.as_deref());
    line(&mut text, "flow", &format!("{} from {client}, caught by '{listener}' ({by})", flow.flow));
    line(&mut text, "asked", &known(asked.as_deref()));
    for (name, value) in [
        ("host", flow.host.as_deref()),
        ("tls name", flow.tls_name.as_deref()),
        ("process", flow.process.as_deref()),
        ("user", flow.user.as_deref()),
    ] {
        value.into_iter().for_each(|value| line(&mut text, name, &printable(value)));
    }
    rules(&mut text, traced);
    let verdict = traced.verdict.as_deref().unwrap_or("policy was not asked");
    line(&mut text, "verdict", &printable(verdict));
    flow.agreement.iter().for_each(|word| line(&mut text, "agreement", &printable(word)));
    if let Some(to) = traced.destination.as_ref().filter(|to| Some(*to) != asked.as_ref()) {
        line(&mut text, "to", &printable(to));
    }
    if !traced.resolved.is_empty() {
        let mut all: Vec<_> = traced.resolved.iter().map(ToString::to_string).collect();
        let more = u32::try_from(all.len()).map_or(0, |shown| traced.resolved_count.saturating_sub(shown));
        all.extend((more > 0).then(|| format!("{more} more")));
        line(&mut text, "resolved", &all.join(", "));
    }
    traced.dialled.iter().for_each(|to| line(&mut text, "dialled", &to.to_string()));
    let reason = flow.reason.map_or("in flight", sidetrack_core::flow::EndReason::as_str);
    let detail = flow.detail.as_deref().map(|detail| format!(": {}", printable(detail))).unwrap_or_default();
    line(&mut text, "end", &format!("{reason}{detail}"));
    text.push('\n');
    steps(&mut text, traced);
    tcp(&mut text, traced);
    text
}

fn line(text: &mut String, name: &str, value: &str) {
    let _ = writeln!(text, "{name:<NAMES$}{value}");
}

fn rules(text: &mut String, traced: &Traced<'_>) {
    let Some(rules) = &traced.rules else {
        if traced.flow.rule.is_some() {
            line(text, "rules", "the rules that decided have been replaced since");
        }
        return;
    };
    // The rules behind the one that decided say nothing.
    let tried = rules.iter().take_while(|rule| rule.outcome != "not_reached");
    let mut name = "rules";
    for (index, RuleTried { rule, outcome, condition }) in tried.enumerate() {
        let word = match (outcome.as_str(), condition) {
            ("matched", _) => "matches".to_owned(),
            (_, Some(condition)) => format!("no: not {}", printable(condition)),
            (_, None) => "has to know more of the flow".to_owned(),
        };
        line(text, name, &format!("{}. '{}': {word}", index + 1, printable(rule)));
        name = "";
    }
}

/// Appends the steps as a table: when each was done, and how long it took.
pub(super) fn steps(text: &mut String, traced: &Traced<'_>) {
    text.push_str("  SECONDS      TOOK  STEP\n");
    let mut before = 0.0;
    for StepDone { at_seconds, step, what } in &traced.steps {
        let took = human::time((at_seconds - before).max(0.0));
        let step = step.replace('_', " ");
        let what = what.as_deref().map(|what| format!(" {}", printable(what))).unwrap_or_default();
        let _ = writeln!(text, "{at_seconds:>9.6} {took:>9}  {step}{what}");
        before = *at_seconds;
    }
}

/// Appends what TCP measured, a line for each side.
pub(super) fn tcp(text: &mut String, traced: &Traced<'_>) {
    let sides = [("client", &traced.tcp_client), ("server", &traced.tcp_server)];
    let sides = sides.into_iter().filter_map(|(side, seen)| Some((side, seen.as_ref()?)));
    for (index, (side, seen)) in sides.enumerate() {
        if index == 0 {
            text.push_str("\n  TCP       RTT   MIN RTT  SENT AGAIN  LOST      RATE\n");
        }
        let TcpMeasured { rtt_seconds, min_rtt_seconds, retransmitted_segments, lost_segments, .. } = seen;
        let least = min_rtt_seconds.map_or_else(|| "-".to_owned(), human::time);
        let rate = seen
            .delivery_rate_bytes
            .map_or_else(|| "-".to_owned(), |rate| format!("{}/s", human::bytes(rate)));
        let rtt = human::time(*rtt_seconds);
        let _ = writeln!(
            text,
            "  {side} {rtt:>6} {least:>9} {retransmitted_segments:>11} {lost_segments:>5} {rate:>9}"
        );
    }
}
