//! The filter language: its meaning, its messages about mistakes, and that no text crashes it.

use proptest::prelude::*;
use sidetrack_core::filter::{Filter, FlowFacts};
use sidetrack_core::flow::{Destination, EndReason, Intercept, Protocol};
use std::time::Duration;

fn curl(dst: &Destination) -> FlowFacts<'_> {
    FlowFacts {
        id: 7,
        client: Some(([10, 1, 0, 5], 40_000).into()),
        dst: Some(dst),
        host: Some("www.example"),
        process: Some("curl"),
        user: None,
        rule: Some("bulk"),
        chain: Some("audit,gate".into()),
        carrier: Some("socks6://gw:1080"),
        listener: Some("out"),
        intercept: Some(Intercept::Redirect),
        protocol: Some(Protocol::Tcp),
        reason: Some(EndReason::Refused),
        bytes_up: 1024,
        bytes_down: 1 << 20,
        packets_up: 3,
        packets_down: 4,
        age: Duration::from_secs(12),
        connect: Some(Duration::from_millis(41)),
        first_byte: None,
    }
}

#[track_caller]
fn says(filter: &str, flow: &FlowFacts<'_>) -> bool {
    match Filter::parse(filter) {
        Ok(filter) => filter.matches(flow),
        Err(error) => panic!("{}", error.caret(filter)),
    }
}

#[test]
fn the_example_of_the_manual_matches() {
    let dst: Destination = "10.9.8.7:443".parse().unwrap();
    let mut flow = curl(&dst);
    let text = r#"proc == "curl" and dst in 10.0.0.0/8 and port == 443 and host ~ "*.example"
        and reason != ok and bytes > 1MiB and rule == bulk and age > 10s"#;
    assert!(says(text, &flow));
    flow.bytes_up = 0;
    assert!(!says(text, &flow), "exactly 1 MiB is not more than 1 MiB");
}

#[test]
fn every_field_and_operator_does_what_it_says() {
    let dst: Destination = "10.9.8.7:443".parse().unwrap();
    let flow = curl(&dst);
    for yes in [
        "",
        "  ",
        "id == 7",
        "flow in [1, 5-9]",
        "port in [80, 443]",
        "port in 400-500",
        "port >= 443 and port <= 443",
        "sport < 40001 and not sport < 40000",
        "src == 10.1.0.5",
        "src in [192.0.2.0/24, 10.1.0.0/16]",
        "dst != 10.9.8.8",
        "dst ~ 10.9.*",
        "dst !~ *.example",
        "host == WWW.Example.",
        "host in [a.example, www.example]",
        "proc = curl",
        "process =~ c??l",
        "carrier ~ socks6://*",
        "chain == gate and chain == \"audit,gate\" and chain ~ a*t and chain in [slow, audit]",
        "chain != slow and not chain == \"gate,audit\"",
        "listener == out && intercept == redirect",
        "reason in [refused, dns]",
        "state == ended",
        "connect > 40ms and connect < 42ms",
        "up == 1KiB and down == 1024KiB",
        "proc == wget or proc == curl and port == 443",
        "!(proc == wget)",
        "not user == root",
        "age != 11s",
    ] {
        assert!(says(yes, &flow), "{yes}");
    }
    for no in [
        "id < 0",
        "id != 7",
        "bytes < 0B",
        "user == root",
        "user != root",
        "first_byte > 0us",
        "first_byte <= 0us",
        "state == live",
        "dst == db.example",
        "chain != audit",
        "chain !~ g*",
        "(proc == wget or proc == curl) and port == 80",
        "host !~ *.example",
        "dst in 2000::/3",
        "id > 18446744073709551615",
    ] {
        assert!(!says(no, &flow), "{no}");
    }
}

#[test]
fn the_transport_protocol_and_its_datagrams_are_matched() {
    let dst: Destination = "9.9.9.9:53".parse().unwrap();
    let flow = FlowFacts { protocol: Some(Protocol::Udp), ..curl(&dst) };
    for yes in ["protocol == udp", "packets == 7", "packets_up <= 3 and packets_down > 3", "packets in [7-9]"]
    {
        assert!(says(yes, &flow), "{yes}");
    }
    for no in ["protocol == tcp", "protocol != udp", "packets_down > 4"] {
        assert!(!says(no, &flow), "{no}");
    }
    let error = Filter::parse("protocol == udb").unwrap_err().to_string();
    assert!(error.contains("did you mean 'udp'"), "{error}");
}

#[test]
fn a_destination_that_is_a_name_is_matched_by_name() {
    let dst: Destination = "db.example:5432".parse().unwrap();
    let flow = FlowFacts { host: None, ..curl(&dst) };
    assert!(says("host == db.example", &flow), "a destination that is a name is a known host name");
    assert!(says("dst == DB.example and dst ~ *.example and dst in [db.example, 10.0.0.0/8]", &flow));
    assert!(!says("dst in 0.0.0.0/0", &flow));
    assert!(!says("dst in ::/0", &flow));
}

#[test]
fn mistakes_are_pointed_at() {
    let mistakes = [
        "prot == 443",
        "colour == red",
        "proc",
        "proc curl",
        "proc ==",
        "port == https",
        "port in 90-80",
        "port ~ 4*",
        "host < a",
        "dst > 10.0.0.1",
        "dst in 10.0.0.0/33",
        "dst in 10.0.0.1/8",
        "dst == 10.0.0.1:443",
        "reason == okay",
        "reason == sleepy",
        "state == dead",
        "intercept == socs",
        "bytes > 1MegaByte",
        "age > 10",
        "proc == 'curl",
        "(proc == curl",
        "proc == curl)",
        "proc == curl port == 80",
        "port == [80, 443]",
        "port in [80 443]",
        "port in [80, 443",
        "proc == curl and",
        "proc == and",
        "proc == curl and;",
        "42",
        "\tproc == curl or prt == 1",
    ];
    let mut shown = String::new();
    for text in mistakes {
        let error = Filter::parse(text).expect_err(text);
        shown.push_str(&error.caret(text));
        shown.push_str("\n\n");
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn size_and_depth_are_bounded() {
    let long = format!("proc == {}", "a".repeat(Filter::TEXT_MAX));
    assert!(Filter::parse(&long).unwrap_err().to_string().contains("at most 4096 bytes"));
    let deep = format!("{}id == 1{}", "(".repeat(100), ")".repeat(100));
    assert!(Filter::parse(&deep).unwrap_err().to_string().contains("nested more than"));
    let nots = format!("{} id == 1", "not ".repeat(100));
    assert!(Filter::parse(&nots).unwrap_err().to_string().contains("nested more than"));
    let wide = (0..300).map(|id| format!("id == {id}")).collect::<Vec<_>>().join(" or ");
    assert!(says(&wide, &FlowFacts { id: 299, ..FlowFacts::default() }));
}

/// An expression as a tree, whose meaning is computed independently.
#[derive(Clone, Debug)]
enum Tree {
    Port(&'static str, u16),
    Proc(&'static str, String),
    Not(Box<Tree>),
    And(Box<Tree>, Box<Tree>),
    Or(Box<Tree>, Box<Tree>),
}

impl Tree {
    fn text(&self) -> String {
        match self {
            Self::Port(op, port) => format!("port {op} {port}"),
            Self::Proc(op, name) => format!("proc {op} {name:?}"),
            Self::Not(tree) => format!("not ({})", tree.text()),
            Self::And(a, b) => format!("({}) and ({})", a.text(), b.text()),
            Self::Or(a, b) => format!("({}) or ({})", a.text(), b.text()),
        }
    }

    fn means(&self, port: u16, process: Option<&str>) -> bool {
        match self {
            Self::Port("==", want) => port == *want,
            Self::Port("!=", want) => port != *want,
            Self::Port("<", want) => port < *want,
            Self::Port(_, want) => port >= *want,
            Self::Proc("==", want) => process.is_some_and(|name| name == want),
            Self::Proc(_, want) => process.is_some_and(|name| name != want),
            Self::Not(tree) => !tree.means(port, process),
            Self::And(a, b) => a.means(port, process) && b.means(port, process),
            Self::Or(a, b) => a.means(port, process) || b.means(port, process),
        }
    }
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = prop_oneof![
        (prop::sample::select(vec!["==", "!=", "<", ">="]), 1..5_u16)
            .prop_map(|(op, port)| Tree::Port(op, port)),
        (prop::sample::select(vec!["==", "!="]), "[ab\"\\\\ ]{1,2}")
            .prop_map(|(op, name)| Tree::Proc(op, name)),
    ];
    leaf.prop_recursive(4, 24, 2, |inner| {
        prop_oneof![
            inner.clone().prop_map(|tree| Tree::Not(Box::new(tree))),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| Tree::And(Box::new(a), Box::new(b))),
            (inner.clone(), inner).prop_map(|(a, b)| Tree::Or(Box::new(a), Box::new(b))),
        ]
    })
}

proptest! {
    #[test]
    fn a_written_tree_means_what_it_meant(tree in tree(), port in 1..5_u16, process in prop::option::of("[ab\"\\\\ ]{1,2}")) {
        let dst = Destination { host: "h".parse().map(sidetrack_core::flow::Host::Name).unwrap(), port, zone: 0 };
        let flow = FlowFacts { dst: Some(&dst), process: process.as_deref(), ..FlowFacts::default() };
        let text = tree.text();
        let filter = Filter::parse(&text).map_err(|error| TestCaseError::fail(error.caret(&text)))?;
        prop_assert_eq!(filter.matches(&flow), tree.means(port, process.as_deref()), "{}", text);
    }

    #[test]
    fn no_text_panics_and_errors_point_into_it(text in "(?s).{0,80}") {
        point(&text)?;
    }

    #[test]
    fn no_likely_text_panics(words in prop::collection::vec(
        prop::sample::select(vec!["port", "dst", "==", "~", "in", "[", "]", ",", "(", ")", "and", "not", "'", "\"", "\\",
            "10.0.0.0/8", "1-2", "9MiB", "5s", "é", "*", "reason", "ok"]), 0..14)) {
        point(&words.join(" "))?;
        point(&words.concat())?;
    }
}

fn point(text: &str) -> Result<(), TestCaseError> {
    match Filter::parse(text) {
        Ok(filter) => {
            filter.matches(&FlowFacts::default());
        }
        Err(error) => {
            prop_assert!(text.get(error.at.clone()).is_some(), "{:?} is not in {:?}", error.at, text);
            prop_assert_eq!(error.caret(text).lines().count(), 3);
        }
    }
    Ok(())
}

#[test]
fn the_manual_tells_the_truth() {
    let manual = include_str!("../../../docs/filters.md");
    let examples = manual.split("```").nth(1).expect("a block of examples");
    for example in examples.lines().filter(|line| !line.is_empty()) {
        assert!(Filter::parse(example).is_ok(), "{example}");
    }
    let rows: Vec<_> = manual.lines().filter(|line| line.starts_with("| `")).collect();
    assert_eq!(rows.len(), 23, "a row a field");
    for row in rows {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let field = cells[1].trim_matches('`');
        for op in ["==", "!=", "~", "!~", "<", "<=", ">", ">=", "in"] {
            let fits = ["1", "1s", "ok", "run", "live", "udp"]
                .iter()
                .any(|value| Filter::parse(&format!("{field} {op} {value}")).is_ok());
            assert_eq!(fits, cells[3].contains(&format!("`{op}`")), "{field} {op}");
        }
    }
}
