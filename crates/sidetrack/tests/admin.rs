//! The admin interface, over its real socket.

#[path = "admin/openapi.rs"]
mod openapi;
mod support;

use hyper::Method;
use serde_json::{Value, json};
use sidetrack::admin::{
    AdminSocket, AdminState, BindError, Client, ClientError, ConfigStatus, Control, Killed, ListenerStatus,
    Status, serve, serve_metrics,
};
use sidetrack::live::Ledger;
use sidetrack::metrics::Metrics;
use sidetrack::record::history::History;
use sidetrack::record::{Feed, Recorder};
use sidetrack_core::flow::{EndReason, Intercept};
use sidetrack_core::net::IpNet;
use sidetrack_core::policy::{Action, Condition, Match, Policy, Rule};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use support::schema::{answer_schema, mismatches, openapi};
use support::{denied, ended, enter, flow, full, live};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A program whose every second reload goes wrong.
#[derive(Default)]
struct Program {
    reloads: AtomicU64,
}

impl Control for Program {
    fn policy(&self) -> Arc<Policy> {
        let conditions = vec![
            Condition::To([IpNet::from(std::net::IpAddr::from([10, 0, 0, 1]))].into_iter().collect()),
            Condition::Intercept(vec![Intercept::Redirect]),
        ];
        let rule = Rule { name: "lan".into(), matcher: Match::new(conditions), action: Action::default() };
        Arc::new(Policy::new(vec![rule], Action::Deny))
    }

    fn config(&self) -> ConfigStatus {
        let reloads = self.reloads.load(Relaxed);
        ConfigStatus {
            generation: 1 + reloads.div_ceil(2),
            path: Some("/etc/sidetrack.toml".into()),
            last_error: (reloads > 0 && reloads.is_multiple_of(2)).then(|| "line 3: no".to_owned()),
            ..ConfigStatus::default()
        }
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        let addresses = vec![([127, 0, 0, 1], 1080).into()];
        vec![ListenerStatus { name: "out".into(), kind: "redirect".into(), addresses }]
    }

    fn reload(&self) -> Result<(), String> {
        let before = self.reloads.fetch_add(1, Relaxed);
        if before.is_multiple_of(2) { Ok(()) } else { Err("line 3: no".to_owned()) }
    }
}

/// A served admin interface in a directory of its own.
struct Rig {
    ledger: Arc<Ledger>,
    recorder: Recorder,
    client: Client,
    state: AdminState,
    stop: watch::Sender<bool>,
    serving: JoinHandle<std::io::Result<()>>,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn rig() -> Rig {
    rig_of(Arc::new(Program::default()), None)
}

fn rig_of(control: Arc<dyn Control>, history: Option<Arc<History>>) -> Rig {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("deep/er/admin.sock");
    let ledger = Arc::new(Ledger::default());
    let (feed, metrics) = (Arc::new(Feed::new(100)), Arc::new(Metrics::new()));
    let recorder = Recorder::new(vec![ledger.clone()], feed.clone(), None, metrics.clone());
    let state = AdminState::new(vec![ledger.clone()], feed, metrics, control).with_history(history);
    let (stop, stopped) = watch::channel(false);
    let socket = AdminSocket::bind(&path).expect("a socket");
    let serving = tokio::spawn(serve(state.clone(), socket, stopped));
    Rig { ledger, recorder, client: Client::new(&path), state, stop, serving, path, _dir: dir }
}

impl Rig {
    async fn get(&self, path: &str, query: &[(&str, &str)]) -> Value {
        self.client.ask(Method::GET, path, query).await.expect("an answer")
    }

    async fn refused(&self, method: Method, path: &str, query: &[(&str, &str)]) -> String {
        let error = self.client.ask::<Value>(method, path, query).await.expect_err("a refusal");
        assert!(matches!(error, ClientError::Refused { .. }), "{error}");
        error.to_string()
    }

    async fn ids(&self, query: &[(&str, &str)]) -> Vec<u64> {
        let answer = self.get("/v1/flows", query).await;
        let flows = answer["flows"].as_array().expect("a list");
        flows.iter().map(|flow| flow["flow"].as_u64().expect("a number")).collect()
    }
}

#[tokio::test]
async fn flows_in_flight_and_ended_can_be_listed_and_filtered() {
    let mut rig = rig();
    assert!(rig.ids(&[]).await.is_empty());
    enter(&rig.ledger, &full(3));
    enter(&rig.ledger, &live(1, flow("10.0.0.1:22"), denied(None)));
    for id in [4, 5] {
        rig.ledger.note(ended(&full(id), EndReason::Refused));
    }
    rig.recorder.visit();
    assert_eq!(rig.ids(&[]).await, [1, 3]);
    assert_eq!(rig.ids(&[("recent", "1")]).await, [5, 1, 3]);
    assert_eq!(rig.ids(&[("recent", "9"), ("filter", "port == 443 and state == ended")]).await, [4, 5]);
    assert_eq!(rig.ids(&[("filter", "host ~ \"*.example\"")]).await, [3]);
    let one = rig.get("/v1/flows/3", &[]).await;
    assert_eq!((&one["host"], &one["reason"]), (&json!("www.example"), &Value::Null));
    assert_eq!(rig.get("/v1/flows/5", &[]).await["reason"], "refused");
}

#[tokio::test]
async fn flows_are_killed_by_number_and_by_filter() {
    let rig = rig();
    let flows: Vec<_> = (1..=4).map(full).collect();
    for flow in &flows {
        enter(&rig.ledger, flow);
    }
    let kill = async |path: &str, query: &[(&str, &str)]| {
        rig.client.ask::<Killed>(Method::DELETE, path, query).await.expect("an answer").killed
    };
    assert_eq!(kill("/v1/flows/2", &[]).await, [2]);
    assert_eq!(flows[1].ending(), Some(EndReason::Killed));
    assert_eq!(kill("/v1/flows", &[("filter", "id in 2-3")]).await, [3], "2 is ending already");
    assert_eq!((flows[0].ending(), flows[3].ending()), (None, None));
    assert!(rig.refused(Method::DELETE, "/v1/flows/9", &[]).await.contains("no flow 9 is in flight"));
    assert!(rig.refused(Method::DELETE, "/v1/flows", &[]).await.contains("this would end every flow"));
    assert!(rig.refused(Method::DELETE, "/v1/flows", &[("filter", " ")]).await.contains("every flow"));
    assert_eq!((flows[0].ending(), flows[3].ending()), (None, None));
}

#[tokio::test]
async fn mistakes_are_told_with_help() {
    let rig = rig();
    type Query = &'static [(&'static str, &'static str)];
    let mistakes: [(Method, &str, Query); 7] = [
        (Method::GET, "/v1/flows", &[("filter", "prot == 443")]),
        (Method::GET, "/v1/flows", &[("fliter", "port == 443")]),
        (Method::GET, "/v1/flows", &[("recent", "many")]),
        (Method::GET, "/v1/flows/seven", &[]),
        (Method::GET, "/v1/flows/7", &[]),
        (Method::GET, "/v2/flows", &[]),
        (Method::POST, "/v1/flows", &[]),
    ];
    let mut said = String::new();
    for (method, path, query) in mistakes {
        said.push_str(&format!(
            "{method} {path} {query:?}\n{}\n\n",
            rig.refused(method.clone(), path, query).await
        ));
    }
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn rules_configuration_and_status() {
    let rig = rig();
    enter(&rig.ledger, &full(1));
    insta::assert_snapshot!(rig.get("/v1/rules", &[]).await.to_string());
    let status: Status = rig.client.ask(Method::GET, "/v1/status", &[]).await.unwrap();
    assert_eq!((status.flows_active, status.flows_ended), (1, 0));
    assert_eq!(status.pid, std::process::id());
    assert!((4..=status.fds_limit).contains(&status.fds_in_use), "{status:?}");
    assert_eq!(status.listeners[0].name, "out");
    assert_eq!(rig.get("/v1/config", &[]).await["generation"], 1);
    let reload = || rig.client.ask::<ConfigStatus>(Method::POST, "/v1/reload", &[]);
    assert_eq!(reload().await.unwrap().generation, 2);
    let error = reload().await.unwrap_err().to_string();
    assert!(error.starts_with("line 3: no\nhelp: nothing has changed"), "{error}");
    assert_eq!(rig.get("/v1/config", &[]).await["last_error"], "line 3: no");
}

#[tokio::test]
async fn a_profile_runs_once_at_a_time_and_ends() {
    let rig = rig();
    assert_eq!(rig.get("/v1/profile", &[]).await, json!({"is_running": false, "lasted_ms": 0, "stages": []}));
    for seconds in ["0", "601", "x"] {
        let error = rig.refused(Method::POST, "/v1/profile", &[("seconds", seconds)]).await;
        assert!(error.contains("seconds=1 to seconds=600"), "{error}");
    }
    let begun: Value = rig.client.ask(Method::POST, "/v1/profile", &[("seconds", "600")]).await.unwrap();
    assert_eq!(begun["is_running"], true);
    let document = openapi();
    for method in ["get", "post", "delete"] {
        let schema = answer_schema(&document, method, "/v1/profile");
        assert_eq!(mismatches(&document, schema, &begun), [] as [String; 0], "docs/openapi.json");
    }
    let error = rig.refused(Method::POST, "/v1/profile", &[]).await;
    assert!(error.contains("a profile is being measured"), "{error}");
    let ended: Value = rig.client.ask(Method::DELETE, "/v1/profile", &[]).await.unwrap();
    assert_eq!(ended["is_running"], false);
    // One that is left alone ends by itself.
    let _: Value = rig.client.ask(Method::POST, "/v1/profile", &[("seconds", "1")]).await.unwrap();
    let limit = std::time::Instant::now() + sidetrack_testkit::LIMIT;
    while rig.get("/v1/profile", &[]).await["is_running"] == true {
        assert!(std::time::Instant::now() < limit, "it goes on");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert!(rig.get("/v1/profile", &[]).await["lasted_ms"].as_u64() >= Some(1000));
}

#[tokio::test]
async fn events_come_as_they_happen_and_end_with_the_program() {
    let mut rig = rig();
    let query = [("filter", "id > 1"), ("opened", "true")];
    let mut lines = rig.client.lines("/v1/events", &query).await.unwrap();
    let flows = [full(1), full(2)];
    let slots = flows.each_ref().map(|flow| enter(&rig.ledger, flow));
    rig.recorder.visit();
    for (flow, slot) in flows.iter().zip(slots) {
        rig.ledger.leave(slot, ended(flow, EndReason::Ok));
    }
    let (_stop, stopped) = watch::channel(true);
    rig.recorder.run(stopped).await;
    let mut seen = Vec::new();
    while let Some(line) = lines.next().await.unwrap() {
        let value: Value = serde_json::from_str(&line).unwrap();
        seen.push((value["event"].as_str().unwrap().to_owned(), value["flow"].as_u64().unwrap()));
    }
    assert_eq!(seen, [("opened".to_owned(), 2), ("ended".to_owned(), 2)]);
}

fn http(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

const SCRAPE: &str = "GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn metrics_are_on_the_socket_and_alone_on_tcp() {
    let rig = rig();
    enter(&rig.ledger, &full(1));
    let path = rig.path.clone();
    let on_socket = tokio::task::spawn_blocking(move || {
        http(std::os::unix::net::UnixStream::connect(path).expect("a connection"), SCRAPE)
    });
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (_stop, stopped) = watch::channel(false);
    let names = Arc::from(["node.example".to_owned()]);
    tokio::spawn(serve_metrics(rig.state.clone(), listener, names, stopped));
    let on_tcp = tokio::task::spawn_blocking(move || {
        let connect = || std::net::TcpStream::connect(address).expect("a connection");
        let flows = SCRAPE.replace("/metrics", "/v1/flows");
        // What a page of evil.example can send, whose name leads to us for the moment (DNS rebinding).
        for (request, is_good) in [
            (SCRAPE.replace("127.0.0.1", "evil.example"), false),
            (SCRAPE.replace("127.0.0.1", &format!("evil.example:{}", address.port())), false),
            (SCRAPE.replace("host: 127.0.0.1\r\n", ""), false),
            (SCRAPE.replace("/metrics", "http://evil.example/metrics"), false),
            (flows.replace("127.0.0.1", "evil.example"), false),
            (SCRAPE.replace("127.0.0.1", "localhost:1"), true),
            (SCRAPE.replace("127.0.0.1", "Node.example"), true),
            ("GET /metrics HTTP/1.0\r\n\r\n".to_owned(), true),
        ] {
            let answer = http(connect(), &request);
            let expected = if is_good { " 200 " } else { " 421 " };
            assert!(answer[..answer.len().min(20)].contains(expected), "{request}: {answer}");
        }
        for (path, word) in [("/healthz", "ok\n"), ("/readyz", "ready\n")] {
            let answer = http(connect(), &SCRAPE.replace("/metrics", path));
            assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(word), "{answer}");
            let answer =
                http(connect(), &SCRAPE.replace("/metrics", path).replace("127.0.0.1", "evil.example"));
            assert!(answer.starts_with("HTTP/1.1 421"), "{answer}");
        }
        (http(connect(), SCRAPE), http(connect(), &flows))
    });
    let (on_tcp, flows) = on_tcp.await.unwrap();
    for answer in [on_socket.await.unwrap(), on_tcp] {
        assert!(answer.contains("content-type: application/openmetrics-text"), "{answer}");
        assert!(answer.contains("sidetrack_flows_active{listener=\"out\"} 1"), "{answer}");
        assert!(answer.contains("sidetrack_config_generation 1"), "{answer}");
    }
    assert!(flows.starts_with("HTTP/1.1 404"), "{flows}");
}

#[tokio::test]
async fn strangers_do_not_keep_a_scraper_out() {
    const STRANGERS: usize = 40;
    let rig = rig();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (_stop, stopped) = watch::channel(false);
    tokio::spawn(serve_metrics(rig.state.clone(), listener, Arc::default(), stopped));
    let scraping = tokio::task::spawn_blocking(move || {
        let connect = || std::net::TcpStream::connect(address).expect("a connection");
        // They say nothing, and stay.
        let mut strangers: Vec<_> = (0..STRANGERS).map(|_| connect()).collect();
        let answer = http(connect(), SCRAPE);
        let first = strangers[0].read(&mut [0]);
        assert!(matches!(first, Ok(0) | Err(_)), "the oldest has left");
        answer
    });
    let answer = scraping.await.unwrap();
    // 16 have room, and the scraper is one of them.
    let closed = format!("sidetrack_closed_for_others_total{{waited_for=\"scrape\"}} {}\n", STRANGERS - 15);
    assert!(answer.contains(&closed), "{answer}");
}

#[tokio::test]
async fn the_socket_is_private_and_goes_with_us() {
    let rig = rig();
    assert_eq!(fs::metadata(&rig.path).unwrap().permissions().mode() & 0o777, 0o660);
    let files: Vec<_> = fs::read_dir(rig.path.parent().unwrap()).unwrap().collect();
    assert_eq!(files.len(), 1, "no other name is left: {files:?}");
    let idle = std::os::unix::net::UnixStream::connect(&rig.path).unwrap();
    rig.stop.send(true).unwrap();
    rig.serving.await.unwrap().unwrap();
    assert!(!rig.path.exists());
    drop(idle);
}

fn bind(path: &Path) -> Result<AdminSocket, BindError> {
    AdminSocket::bind(path)
}

#[test]
fn a_live_socket_is_never_replaced_a_stale_one_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.sock");
    let first = bind(&path).unwrap();
    assert!(matches!(bind(&path), Err(BindError::InUse(_))));
    assert!(!sidetrack_sys::probe::socket_is_stale(&path));
    drop(first);
    // As after SIGKILL: the name stays, and no process answers.
    let killed = UnixListener::bind(&path);
    drop(killed.unwrap());
    assert!(path.exists() && sidetrack_sys::probe::socket_is_stale(&path));
    let second = bind(&path).unwrap();
    assert!(!sidetrack_sys::probe::socket_is_stale(&path));
    drop(second);
}

#[test]
fn what_is_no_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.sock");
    fs::write(&path, "precious").unwrap();
    let error = bind(&path).unwrap_err().to_string();
    assert!(error.contains("exists and is not a socket: remove it, or choose another path"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_socket_that_another_has_put_there_since_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.sock");
    let ours = bind(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let other = UnixListener::bind(&path).unwrap();
    drop(ours);
    assert!(path.exists());
    drop(other);
}

#[tokio::test]
async fn who_finds_nobody_is_told_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.sock");
    let ask = async || {
        Client::new(&path).ask::<Value>(Method::GET, "/v1/status", &[]).await.unwrap_err().to_string()
    };
    for error in [ask().await, {
        drop(UnixListener::bind(&path).unwrap());
        ask().await
    }] {
        assert!(
            error.starts_with(&format!("no sidetrack runs at {}\nhelp: start one", path.display())),
            "{error}"
        );
    }
}
