//! Shows all fields of one flow.

use super::human;
use super::why;
use crate::record::{FlowRecord, Traced};
use serde_json::Value;
use std::fmt::Write;

/// The width of the column of field names.
const NAMES: usize = 20;

/// Formats the flow, its steps, and what TCP measured.
pub(in crate::cli) fn traced(traced: &Traced<'_>) -> String {
    let mut text = text(&traced.flow);
    text.push('\n');
    why::steps(&mut text, traced);
    why::tcp(&mut text, traced);
    text
}

/// Formats the flow as lines of `field value`. Fields that are null or empty are left out. The TCP states of the
/// packet engine follow as a table.
fn text(flow: &FlowRecord<'_>) -> String {
    let mut text = String::new();
    let fields = serde_json::to_value(flow).unwrap_or_default();
    // In the order of records: a map of JSON values would be sorted by name.
    for name in FIELDS {
        let value = match fields.get(name) {
            None | Some(Value::Null) => continue,
            Some(Value::Array(list)) if list.is_empty() => continue,
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "),
            Some(Value::String(value)) => value.clone(),
            Some(other) => other.to_string(),
        };
        line(&mut text, name, &human::printable(&value));
    }
    if flow.reason.is_none() {
        line(&mut text, "reason", "in flight");
    }
    if let Some(states) = flow.states.as_ref().filter(|states| !states.is_empty()) {
        text.push_str("\n  SECONDS  SIDE    STATE\n");
        for state in states {
            let _ = writeln!(text, "{:>9.6}  {:<6}  {}", state.2, state.0, state.1);
        }
    }
    text
}

fn line(text: &mut String, name: &str, value: &str) {
    let _ = writeln!(text, "{name:<NAMES$}{value}");
}

/// The fields of a record that are shown as lines.
const FIELDS: [&str; 28] = [
    "flow",
    "ts",
    "client",
    "orig_dst",
    "host",
    "process",
    "user",
    "listener",
    "intercept",
    "protocol",
    "rule",
    "carrier",
    "path",
    "chain",
    "agreement",
    "tls_name",
    "mptcp",
    "bytes_up",
    "bytes_down",
    "packets_up",
    "packets_down",
    "connect_seconds",
    "first_byte_seconds",
    "held_seconds",
    "duration_seconds",
    "shunted",
    "reason",
    "detail",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_of_a_record_is_shown() {
        let text = r#"{"ts":"2026-11-21T23:07:19.123Z","flow":7,"rule":"r","chain":["a"],"carrier":"c","listener":"l","intercept":"engine",
            "client":"10.0.0.1:1","orig_dst":"10.0.0.2:2","host":"h","process":"p","user":"u","bytes_up":1,"bytes_down":2,
            "connect_seconds":0.1,"first_byte_seconds":0.2,"duration_seconds":0.3,"shunted":true,"reason":"ok","detail":"d",
            "path":"quic 10.0.0.3:3","agreement":"allow: a","tls_name":"t","mptcp":["client"],"protocol":"udp","packets_up":3,"packets_down":4,"held_seconds":0.05,"states":[["client","SYN-SENT",0.0],["server","ESTABLISHED",12.000412]]}"#;
        let flow: FlowRecord<'_> = serde_json::from_str(text).expect("a record");
        let shown = super::text(&flow);
        let Value::Object(fields) = serde_json::to_value(&flow).expect("JSON") else { panic!("an object") };
        for name in fields.keys().filter(|name| *name != "states") {
            assert!(shown.lines().any(|line| line.starts_with(name)), "{name} is missing:\n{shown}");
        }
        assert!(shown.ends_with(" 0.000000  client  SYN-SENT\n12.000412  server  ESTABLISHED\n"), "{shown}");
    }
}
