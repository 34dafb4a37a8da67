//! `docs/openapi.json` says what the interface does: its paths and methods, its parameters, its types, and real answers.

use super::{Program, Rig, http, rig, rig_of};
use crate::support::schema::{answer_schema, mismatches, named, openapi, sample};
use crate::support::{denied, ended, enter, flow, full, live};
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sidetrack::admin::{
    AgreementStatus, Answer, Applications, Applied, Audit, Back, CacheScope, CacheStatus, CachedResource,
    CachedResources, Caches, ConfigStatus, ConfirmedConfig, Control, Done, Finding, Findings, FunctionCounts,
    Functions, Killed, ListenerStatus, MovedAnswer, NewAgreement, Profile, Purged, RuleView, ShuntFlows,
    Status, TriedConfig, Version,
};
use sidetrack::overlay::{BenchView, GroupView, LinkSettingView, PacketBenchView, PingView, WayView};
use sidetrack::record::history::{History, Settings};
use sidetrack::record::{FlowRecord, Traced};
use sidetrack::shunt::{Ask, Told};
use sidetrack_common::admin::ErrorBody;
use sidetrack_common::history::Caller;
use sidetrack_core::flow::EndReason;
use sidetrack_core::policy::Policy;
use sidetrack_testkit::LIMIT;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The path whose POST and DELETE are only at the address of the page: `tests/page/login.rs` asks it there.
const SESSION: &str = "/page/session";

fn filled(path: &str) -> String {
    path.split('/').map(|part| if part.starts_with('{') { "1" } else { part }).collect::<Vec<_>>().join("/")
}

/// The paths of all routes in the sources below a folder.
fn routes(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            routes(&path, found);
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("a source");
        for part in text.split(".route(").skip(1) {
            let path = part.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next());
            found.insert(path.expect("the path is written out").to_owned());
        }
        assert!(!text.contains(".nest(") && !text.contains(".merge("), "this test does not see such routes");
    }
}

/// The operations of the document: path, then method, then what it says.
fn operations(document: &Value) -> BTreeMap<String, BTreeMap<String, Value>> {
    serde_json::from_value(document["paths"].clone()).expect("paths with methods")
}

#[tokio::test]
async fn the_document_has_every_path_and_method_and_no_other() {
    let (mut routed, operations) = (BTreeSet::new(), operations(&openapi()));
    routes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/admin"), &mut routed);
    assert_eq!(operations.keys().cloned().collect::<BTreeSet<_>>(), routed);
    let rig = rig();
    let socket = rig.path.clone();
    let allowed = tokio::task::spawn_blocking(move || {
        let ask = |path: &String| {
            let stream = UnixStream::connect(&socket).expect("a connection");
            let target = filled(path);
            let request = format!("PATCH {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
            let answer = http(stream, &request);
            assert!(answer.starts_with("HTTP/1.1 405"), "{path}: {answer}");
            let field = answer.lines().find_map(|line| line.strip_prefix("allow: ")).expect("Allow");
            let methods = field.split(',').map(str::to_lowercase).filter(|method| method != "head");
            (path.clone(), methods.collect::<BTreeSet<_>>())
        };
        routed.iter().map(ask).collect::<BTreeMap<_, _>>()
    });
    for (path, mut methods) in allowed.await.expect("no panic") {
        if path == SESSION {
            methods.extend(["post", "delete"].map(str::to_owned));
        }
        assert_eq!(operations[&path].keys().cloned().collect::<BTreeSet<_>>(), methods, "{path}");
    }
}

fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(object) => {
            found.extend(object.get("$ref").and_then(Value::as_str));
            object.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[test]
fn the_document_is_whole() {
    let document = openapi();
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let mut used = BTreeSet::new();
    references(&document, &mut used);
    let defined = ["schemas", "responses"].map(|kind| {
        let all = document["components"][kind].as_object().expect("definitions");
        all.keys().map(move |name| format!("#/components/{kind}/{name}")).collect::<Vec<_>>()
    });
    let defined = defined.concat();
    assert_eq!(used, defined.iter().map(String::as_str).collect::<BTreeSet<_>>(), "defined and used");
    let mut ids = BTreeSet::new();
    for (path, methods) in operations(&document) {
        for (method, operation) in methods {
            assert!(ids.insert(operation["operationId"].to_string()), "{method} {path}: its id is taken");
        }
    }
    let mut record: Value = serde_json::from_str(sidetrack::record::SCHEMA).expect("JSON");
    let object = record.as_object_mut().expect("an object");
    object.remove("$schema");
    object.remove("title");
    assert_eq!(document["components"]["schemas"]["FlowRecord"], record, "docs/records.schema.json");
}

/// Reads made-up values of a schema as `T` and writes them again: a field, a word or a type that only one of the two has is found.
fn agrees<T: Serialize + DeserializeOwned>(document: &Value, name: &str) {
    for pick in 0..64 {
        let value = sample(document, &named(name), pick);
        assert_eq!(mismatches(document, &named(name), &value), [] as [String; 0], "{name}");
        let typed: T = serde_json::from_value(value.clone())
            .unwrap_or_else(|error| panic!("{name} of the document: {error}: {value}"));
        assert_eq!(serde_json::to_value(&typed).expect("JSON"), value, "{name} of the program");
    }
}

#[test]
fn the_document_and_the_types_say_the_same() {
    let of = &openapi();
    agrees::<ErrorBody>(of, "Error");
    agrees::<FlowRecord<'static>>(of, "FlowRecord");
    agrees::<Traced<'static>>(of, "Traced");
    agrees::<Killed>(of, "Killed");
    agrees::<Back>(of, "Back");
    agrees::<Answer>(of, "HistoryAnswer");
    agrees::<MovedAnswer>(of, "MovedAnswer");
    agrees::<Functions>(of, "Functions");
    agrees::<RuleView>(of, "RuleView");
    agrees::<ConfigStatus>(of, "ConfigStatus");
    agrees::<TriedConfig>(of, "TriedConfig");
    agrees::<ConfirmedConfig>(of, "ConfirmedConfig");
    agrees::<Status>(of, "Status");
    agrees::<AgreementStatus>(of, "AgreementStatus");
    agrees::<Applied>(of, "Applied");
    agrees::<Audit>(of, "AgreementHistory");
    agrees::<Version>(of, "AgreementVersion");
    agrees::<ShuntFlows>(of, "ShuntFlows");
    agrees::<Done>(of, "ShuntDone");
    agrees::<Caches>(of, "Caches");
    agrees::<CachedResources>(of, "CachedResources");
    agrees::<Purged>(of, "Purged");
    agrees::<Profile>(of, "Profile");
    agrees::<Findings>(of, "Findings");
    agrees::<Applications>(of, "Applications");
    agrees::<sidetrack::overlay::Status>(of, "OverlayStatus");
    agrees::<GroupView>(of, "GroupView");
    agrees::<PingView>(of, "PingView");
    agrees::<WayView>(of, "WayView");
    agrees::<BenchView>(of, "BenchView");
    agrees::<PacketBenchView>(of, "PacketBenchView");
    agrees::<LinkSettingView>(of, "LinkSettingView");
}

fn made<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_value(sample(&openapi(), &named(name), 0)).expect("the types say the same")
}

/// A program that has everything but an overlay.
#[derive(Default)]
struct Whole(Program);

impl Control for Whole {
    fn policy(&self) -> Arc<Policy> {
        self.0.policy()
    }

    fn config(&self) -> ConfigStatus {
        self.0.config()
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        self.0.listeners()
    }

    fn reload(&self) -> Result<(), String> {
        self.0.reload()
    }

    fn confirm_config(&self) -> Result<Option<String>, String> {
        Ok(Some("the text".to_owned()))
    }

    fn functions(&self) -> Vec<FunctionCounts> {
        made::<Functions>("Functions").functions
    }

    fn start_function(&self, _name: &str) -> bool {
        true
    }

    fn agreement(&self) -> AgreementStatus {
        made("AgreementStatus")
    }

    fn apply_agreement(&self, _new: &NewAgreement, _dry_run: bool, _by: &Caller) -> Result<Applied, String> {
        Ok(made("Applied"))
    }

    fn audit(&self) -> Result<Audit, String> {
        Ok(made("AgreementHistory"))
    }

    fn version_of_agreement(&self, _version: u64) -> Result<String, String> {
        Ok("the text".to_owned())
    }

    fn shunt(&self, ask: &Ask) -> Result<Told, String> {
        Ok(match ask {
            Ask::Flows => Told::Flows(made::<ShuntFlows>("ShuntFlows").flows),
            _ => Told::Found(true),
        })
    }

    fn caches(&self) -> Vec<CacheStatus> {
        made::<Caches>("Caches").caches
    }

    fn cached(&self, _: Option<&str>, _: &CacheScope, _: usize) -> Result<Vec<CachedResource>, String> {
        Ok(made::<CachedResources>("CachedResources").resources)
    }

    fn purge(&self, _: Option<&str>, _: &CacheScope) -> Result<usize, String> {
        Ok(1)
    }

    fn applications(&self) -> Result<Option<Applications>, String> {
        Ok(Some(made("Applications")))
    }

    fn findings(&self) -> Vec<Finding> {
        made::<Findings>("Findings").checks
    }
}

type Query = &'static [(&'static str, &'static str)];

const ADDRESSES: [(&str, &str); 2] = [("client", "10.0.0.1:4000"), ("server", "10.0.0.2:5000")];

/// Each request with JSON as answer, with all parameters that it takes. The last ones end flows.
const REQUESTS: [(&str, &str, Query); 46] = [
    ("get", "/v1/flows", &[("filter", "id > 0"), ("recent", "9")]),
    ("get", "/v1/flows/{id}", &[]),
    ("get", "/v1/flows/{id}/trace", &[]),
    ("get", "/v1/filter", &[("filter", "prot == 1"), ("at", "3")]),
    ("get", "/v1/filter", &[]),
    ("get", "/v1/history", &[("filter", "id > 0"), ("since", "2026-01-01T00:00:00Z"), ("limit", "5")]),
    ("get", "/v1/history", &[("top", "host,process"), ("by", "up"), ("until", "1ms")]),
    ("get", "/v1/history/moved", &[("flow", "1"), ("since", "2h"), ("until", "1s")]),
    ("get", "/v1/functions", &[]),
    ("post", "/v1/functions/{name}/start", &[]),
    ("get", "/v1/rules", &[]),
    ("get", "/v1/config", &[]),
    ("post", "/v1/reload", &[]),
    ("post", "/v1/reload/confirm", &[]),
    ("get", "/v1/policy", &[]),
    ("put", "/v1/policy", &[("dry_run", "true"), ("version", "1"), ("peer", "agent")]),
    ("get", "/v1/policy/history", &[]),
    ("get", "/v1/policy/history/{version}", &[]),
    ("get", "/v1/shunt", &[]),
    ("post", "/v1/shunt", &[ADDRESSES[0], ADDRESSES[1], ("transport", "udp"), ("action", "block")]),
    ("delete", "/v1/shunt", &[ADDRESSES[0], ADDRESSES[1], ("transport", "tcp")]),
    ("get", "/v1/cache", &[]),
    (
        "get",
        "/v1/cache/resources",
        &[("listener", "web"), ("prefix", "http://a.example/"), ("limit", "7"), ("order", "bytes")],
    ),
    ("delete", "/v1/cache", &[("listener", "web"), ("url", "http://a.example/")]),
    ("delete", "/v1/cache", &[("prefix", "http://a.example/")]),
    ("delete", "/v1/cache", &[("all", "true")]),
    ("get", "/v1/profile", &[]),
    ("get", "/v1/status", &[]),
    ("get", "/v1/doctor", &[]),
    ("get", "/v1/control", &[]),
    ("get", "/v1/openapi.json", &[]),
    ("get", SESSION, &[]),
    ("get", "/v1/overlay", &[]),
    ("get", "/v1/overlay/group", &[]),
    ("post", "/v1/overlay/group/{group}", &[("member", "true")]),
    ("get", "/v1/overlay/ping/{node}", &[]),
    ("get", "/v1/overlay/ping/{node}", SERVICE),
    ("get", "/v1/overlay/way/{node}", SERVICE),
    ("post", "/v1/overlay/bench/{node}", &[("seconds", "0.5"), ("rate_mbit", "5")]),
    ("post", "/v1/overlay/bench/{node}", &[("packets_per_second", "9"), ("kind", "best-effort")]),
    ("post", "/v1/overlay/bench/{node}", SERVICE),
    (
        "post",
        "/v1/overlay/link/{neighbour}",
        &[("up", "true"), ("cost_ms", "5"), ("rate_mbit", "8"), ("loss_percent", "1")],
    ),
    ("get", "/healthz", &[]),
    ("get", "/readyz", &[]),
    ("delete", "/v1/flows/{id}", &[]),
    ("delete", "/v1/flows", &[("filter", "id == 2")]),
];

const SERVICE: Query = &[("kind", "real-time"), ("dissemination", "flood"), ("deadline_ms", "100")];

/// Operations that no request of [`REQUESTS`] asks, and where they are asked.
const ELSEWHERE: [(&str, &str, &str); 11] = [
    ("post", "/v1/flows/{id}/back", "tests/wires/back.rs"),
    ("post", "/v1/capture", "tests/http/capture.rs"),
    ("delete", "/v1/capture", "tests/http/capture.rs"),
    ("post", "/v1/profile", "a_profile_runs_once_at_a_time_and_ends"),
    ("delete", "/v1/profile", "a_profile_runs_once_at_a_time_and_ends"),
    ("get", "/v1/events", "streams_fit_the_document"),
    ("get", "/v1/live", "streams_fit_the_document"),
    ("get", "/metrics", "metrics_are_on_the_socket_and_alone_on_tcp"),
    ("get", "/", "tests/page"),
    ("get", "/page/{name}", "tests/page"),
    ("post", SESSION, "tests/page/login.rs"),
];

#[test]
fn each_operation_and_each_parameter_is_tried() {
    let mut tried = BTreeMap::<(String, String), BTreeSet<String>>::new();
    for (method, path, query) in REQUESTS {
        let names = tried.entry((method.to_owned(), path.to_owned())).or_default();
        names.extend(query.iter().map(|(name, _)| (*name).to_owned()));
    }
    let elsewhere = ELSEWHERE.map(|(method, path, _)| (method.to_owned(), path.to_owned()));
    for (path, methods) in operations(&openapi()) {
        for (method, operation) in methods {
            let key = (method.clone(), path.clone());
            if elsewhere.contains(&key) || key == ("delete".to_owned(), SESSION.to_owned()) {
                continue;
            }
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let queries = parameters.filter(|one| one["in"] == "query");
            let names = queries.map(|one| one["name"].as_str().expect("a name").to_owned());
            let names = names.collect::<BTreeSet<_>>();
            assert_eq!(tried.get(&key), Some(&names), "{method} {path}");
        }
    }
}

/// A history that is about to have three flows.
fn history(folder: &Path) -> Arc<History> {
    let keep = Duration::from_secs(3650 * 86_400);
    let settings = Settings { path: folder.to_owned(), bytes_max: 1 << 30, keep, counters: true };
    let history = History::open(&settings, Vec::new()).expect("a history");
    let mut lines = Vec::new();
    for id in 1..=3 {
        let ended = ended(&full(id), EndReason::Ok);
        FlowRecord::ended(&ended, ended.flow.decided().as_deref()).write_line(&mut lines);
    }
    history.push(&lines);
    Arc::new(history)
}

async fn answer(rig: &Rig, method: &str, path: &str, query: Query) -> Value {
    let verb: Method = method.to_uppercase().parse().expect("a method");
    let asked = rig.client.ask::<Value>(verb, &filled(path), query).await;
    asked.unwrap_or_else(|error| panic!("{method} {path} {query:?}: {error}"))
}

#[tokio::test]
async fn answers_fit_the_document() {
    let (folder, document) = (tempfile::tempdir().expect("a folder"), openapi());
    let history = history(folder.path());
    let mut rig = rig_of(Arc::new(Whole::default()), Some(history.clone()));
    enter(&rig.ledger, &full(1));
    enter(&rig.ledger, &live(2, flow("10.0.0.1:22"), denied(None)));
    rig.ledger.note(ended(&full(3), EndReason::Refused));
    rig.recorder.visit();
    // Three flows are stored within a moment, and two run.
    let limit = Instant::now() + LIMIT;
    while answer(&rig, "get", "/v1/history", &[]).await["flows"].as_array().map(Vec::len) != Some(5) {
        assert!(Instant::now() < limit, "the history has not all flows");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for (method, path, query) in REQUESTS {
        if path.starts_with("/v1/overlay") {
            let verb: Method = method.to_uppercase().parse().expect("a method");
            let told = rig.refused(verb, &filled(path), query).await;
            assert!(told.contains("is not a node of an overlay"), "{method} {path} {query:?}: {told}");
            continue;
        }
        let schema = answer_schema(&document, method, path);
        if schema["type"] == "string" {
            let word = rig.client.lines(&filled(path), query).await.expect("an answer").next().await;
            let word = word.expect("a line").map(|line| json!(line + "\n"));
            assert!(word.is_some_and(|word| mismatches(&document, schema, &word).is_empty()), "{path}");
            continue;
        }
        let answer = answer(&rig, method, path, query).await;
        let wrong = mismatches(&document, schema, &answer);
        assert!(wrong.is_empty(), "{method} {path} {query:?}: {wrong:#?}\n{answer:#}");
    }
    history.close();
    // What cannot be read is an error in JSON, too.
    let told = rig.refused(Method::PUT, "/v1/policy", &[("dry_run", "perhaps")]).await;
    assert!(told.contains("dry_run=true"), "{told}");
    let told = rig.refused(Method::GET, "/v1/policy/history/first", &[]).await;
    assert!(told.contains("a version is a number"), "{told}");
}

#[tokio::test]
async fn streams_fit_the_document() {
    let (mut rig, document) = (rig(), openapi());
    let fits = |name: &str, text: &str| {
        let value: Value = serde_json::from_str(text).expect("JSON");
        let wrong = mismatches(&document, &named(name), &value);
        assert!(wrong.is_empty(), "{name}: {wrong:#?}\n{value:#}");
        value
    };
    let mut events = rig.client.lines("/v1/events", &[("opened", "true")]).await.expect("events");
    let mut watch = rig.client.lines("/v1/live", &[]).await.expect("live flows");
    let (flow, other) = (full(1), live(2, flow("10.0.0.1:22"), denied(None)));
    let (mut slot, _stays) = (Some(enter(&rig.ledger, &flow)), enter(&rig.ledger, &other));
    rig.recorder.visit();
    let (mut name, mut seen) = (String::new(), BTreeSet::new());
    while !seen.contains("ended") {
        let line = tokio::time::timeout(LIMIT, watch.next()).await.expect("in time").expect("goes on");
        let line = line.expect("no end");
        if let Some(event) = line.strip_prefix("event: ") {
            name = event.to_owned();
        }
        let Some(data) = line.strip_prefix("data: ") else { continue };
        let schema = match name.as_str() {
            "hello" => "LiveHello",
            "flows" => "LiveFlows",
            "tick" => "LiveTick",
            other => panic!("the event {other}"),
        };
        let value = fits(schema, data);
        let is_filled = |list: &str| value[list].as_array().is_some_and(|list| !list.is_empty());
        for list in ["rows", "moved", "ended"] {
            if is_filled(list) {
                seen.insert(list);
            }
        }
        // Both flows are shown; then one moves bytes; then it ends.
        if name == "tick" {
            if seen.contains("moved") {
                if let Some(slot) = slot.take() {
                    rig.ledger.leave(slot, ended(&flow, EndReason::Ok));
                }
                rig.recorder.visit();
            } else {
                flow.count(10, 20);
            }
        }
    }
    for expected in ["opened", "opened", "ended"] {
        let line = tokio::time::timeout(LIMIT, events.next()).await.expect("in time").expect("goes on");
        let event = fits("FlowEvent", &line.expect("no end"));
        assert_eq!(event["event"], expected);
    }
}
