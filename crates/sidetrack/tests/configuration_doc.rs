//! `docs/configuration.md` says what the program does: its tables are compared with the schema, its example is right.
//! `SIDETRACK_UPDATE_DOCS=1` writes the tables anew.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use serde_json::{Map, Value};
use sidetrack::cli::schema::schema;
use sidetrack::config::Config;
use std::path::PathBuf;

fn document() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md")
}

/// What a reference leads to; anything else is itself.
fn followed<'s>(root: &'s Value, value: &'s Value) -> &'s Value {
    let name = value.get("$ref").and_then(|target| target.as_str()?.strip_prefix("#/$defs/"));
    name.map_or(value, |name| &root["$defs"][name])
}

/// The table of keys at a path such as `rule.match`: through lists, and to the choice that is a table.
fn table<'s>(root: &'s Value, path: &str) -> &'s Value {
    let mut at = root;
    for key in path.split('.').filter(|key| !key.is_empty() && *key != "/") {
        at = inner(root, &at["properties"][key]).unwrap_or_else(|| panic!("{path}: no table of keys"));
    }
    at
}

fn inner<'s>(root: &'s Value, value: &'s Value) -> Option<&'s Value> {
    let value = followed(root, value);
    if value.get("properties").is_some() {
        return Some(value);
    }
    let choices = value.get("anyOf").and_then(Value::as_array).into_iter().flatten();
    // A table of tables, each under a name of its own.
    let named = value.get("additionalProperties").filter(|one| one.is_object());
    value.get("items").into_iter().chain(named).chain(choices).find_map(|one| inner(root, one))
}

/// The type in words.
fn kind(root: &Value, value: &Value) -> String {
    let value = followed(root, value);
    if let Some(choices) = value.get("oneOf").and_then(Value::as_array) {
        let words: Vec<_> =
            choices.iter().filter_map(|one| Some(format!("`\"{}\"`", one["const"].as_str()?))).collect();
        return words.join(", ");
    }
    if let Some(choices) = value.get("anyOf").and_then(Value::as_array) {
        let list = choices.iter().find(|one| one["type"] == "array");
        return match list {
            Some(_) => format!("{}, or a list", kind(root, &choices[0])),
            None => choices.iter().map(|one| kind(root, one)).collect::<Vec<_>>().join(" or "),
        };
    }
    match value["type"].as_str() {
        Some("integer") => "number".into(),
        Some("boolean") => "true or false".into(),
        Some("string") => "text".into(),
        Some("array") => "tables".into(),
        Some("object") => "table".into(),
        other => panic!("no words for {other:?} in {value}"),
    }
}

fn rendered(root: &Value, path: &str) -> String {
    let table = table(root, path);
    let required: Vec<&str> = table
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let mut out = String::from("| key | value | meaning |\n|---|---|---|\n");
    let keys: &Map<String, Value> = table["properties"].as_object().unwrap();
    let sorted: std::collections::BTreeMap<_, _> = keys.iter().collect();
    for (key, value) in sorted {
        let meaning = value.get("description").or_else(|| followed(root, value).get("description"));
        let meaning =
            meaning.and_then(Value::as_str).unwrap_or_else(|| panic!("{path}.{key} is not described"));
        let needed = if required.contains(&key.as_str()) { " **Required.**" } else { "" };
        out.push_str(&format!(
            "| `{key}` | {} | {}{needed} |\n",
            kind(root, value),
            meaning.replace('|', "\\|")
        ));
    }
    out
}

/// The tables of the document, in its order.
const TABLES: [&str; 43] = [
    "/",
    "admin",
    "admin.orchestrator",
    "record",
    "history",
    "export.ipfix",
    "export.otlp",
    "capture",
    "log",
    "limits",
    "run",
    "shunt",
    "shunt.port",
    "shunt.openflow",
    "wire",
    "outgoing",
    "dns",
    "policy",
    "containers",
    "function",
    "function.replace",
    "listen",
    "listen.users",
    "listen.cache",
    "listen.cache.htcp",
    "listen.cache.htcp.siblings",
    "listen.engine",
    "listen.engine.choose",
    "tap",
    "tunnel",
    "overlay",
    "overlay.node",
    "overlay.link",
    "overlay.topology",
    "overlay.deliver",
    "overlay.group",
    "overlay.packets",
    "rule",
    "rule.agreement",
    "rule.match",
    "test",
    "test.flow",
    "test.expect",
];

#[test]
fn the_tables_are_those_of_the_program() {
    let written = std::fs::read_to_string(document()).unwrap();
    let root = schema();
    let mut out = String::new();
    let (mut skipping, mut paths) = (false, Vec::new());
    for line in written.lines() {
        if line == "<!-- end -->" {
            skipping = false;
        }
        if !skipping {
            out.push_str(line);
            out.push('\n');
        }
        if let Some(path) = line.strip_prefix("<!-- keys: ").and_then(|rest| rest.strip_suffix(" -->")) {
            out.push_str(&rendered(&root, path));
            paths.push(path.to_owned());
            skipping = true;
        }
    }
    if std::env::var_os("SIDETRACK_UPDATE_DOCS").is_some() {
        std::fs::write(document(), &out).unwrap();
    } else {
        assert!(
            out == written,
            "docs/configuration.md is behind; run this test with SIDETRACK_UPDATE_DOCS=1"
        );
    }
    assert_eq!(paths, TABLES);
}

#[test]
fn every_key_tells_its_default_and_its_unit() {
    let root = schema();
    // A table, a list of tables, or one of several keys of which one is needed.
    let no_default = [
        "shunt.port",
        "shunt.openflow",
        "listen.to",
        "listen.names",
        "listen.identity",
        "listen.ca",
        "listen.pins",
        "tunnel.ca",
        "tunnel.pins",
        "rule.action",
        "rule.carrier",
        "rule.credentials_file",
    ];
    let tables = [
        "admin",
        "record",
        "log",
        "limits",
        "run",
        "shunt",
        "containers",
        "outgoing",
        "policy",
        "set",
        "function",
        "listen",
        "tap",
        "tunnel",
        "rule",
        "test",
        "default",
    ];
    let tables = tables.map(|key| format!("/.{key}"));
    for path in [
        "/",
        "admin",
        "record",
        "log",
        "limits",
        "run",
        "shunt",
        "shunt.port",
        "shunt.openflow",
        "containers",
        "listen",
        "tap",
        "tunnel",
        "rule",
    ] {
        let table = table(&root, path);
        let required = table.get("required").cloned().unwrap_or_default();
        for (key, value) in table["properties"].as_object().unwrap() {
            let text = value["description"].as_str().unwrap_or_default();
            let place = format!("{path}.{key}");
            assert!(!key.ends_with("_ms") || text.contains("milliseconds"), "{place} has no unit: {text}");
            let told = ["Default", "As in [limits]"].iter().any(|word| text.contains(word));
            let needed = required.as_array().is_some_and(|list| list.iter().any(|one| one == key));
            assert!(
                told || needed || no_default.contains(&place.as_str()) || tables.contains(&place),
                "{place} has no default: {text}"
            );
        }
    }
}

#[test]
fn the_example_is_right() {
    let text = std::fs::read_to_string(document()).unwrap();
    let example = text.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let config = Config::from_text("docs/configuration.md", example)
        .unwrap_or_else(|error| panic!("{}", error.render(false)));
    assert_eq!((config.tests.len(), config.warnings.len()), (1, 0));
}

#[test]
fn what_is_no_null_in_toml_is_none_in_the_schema() {
    assert!(!schema().to_string().contains("\"null\""));
}
