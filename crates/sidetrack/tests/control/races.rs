//! Requests that overlap: one that comes late for an ended application does nothing to a later one of the same name, and a
//! change that is made between the reading and the writing of another one is not lost.

use crate::plane::Plane;
use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use hyper::Method;
use serde_json::{Value, json};
use sidetrack::control::api::{Application, ApplicationStatus, Phase};
use sidetrack::control::link::{ALPN, Link, LinkError, No, serve};
use sidetrack::control::orchestrator::Orchestrator;
use sidetrack::control::settings::{OrchestratorSettings, StateAt};
use sidetrack::control::store::{Entry, Event, FileStore, If, LeaseId, Revision, Store, StoreError};
use sidetrack::tls::{Mutual, Trust};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};

const PATIENCE: Duration = Duration::from_secs(30);
/// The name of every application here, and its key in the store.
const NAME: &str = "trial-1";
const KEY: &str = "application/trial-1";

/// A request that waits at a gate.
struct Waiting(oneshot::Sender<()>);

impl Waiting {
    fn go(self) {
        self.0.send(()).expect("the gate waits");
    }
}

/// What both gates hold back: requests with this method and this end of their path.
struct Held {
    which: Mutex<Option<(Method, &'static str)>>,
    told: mpsc::UnboundedSender<Waiting>,
}

/// Stands before the agent of a domain, and passes requests on.
struct Gate {
    agent: Link,
    held: Arc<Held>,
}

async fn pass(State(gate): State<Arc<Gate>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let which = gate.held.which.lock().expect("no panic").clone();
    if which.is_some_and(|(method, end)| head.method == method && head.uri.path().ends_with(end)) {
        let (go, gone) = oneshot::channel();
        gate.held.told.send(Waiting(go)).expect("the test waits");
        gone.await.expect("the test lets it go");
    }
    let body = to_bytes(body, 1 << 20).await.expect("a body").to_vec();
    let path = head.uri.path_and_query().expect("a path").as_str();
    match gate.agent.send(head.method, path, body).await {
        Ok(answer) => answer,
        Err(LinkError::Refused { status, error }) => {
            No::new(StatusCode::from_u16(status).expect("a status"), error, "").into_response()
        }
        Err(error) => panic!("{error}"),
    }
}

/// An orchestrator in this process, whose requests to the agents of a [`Plane`] can be held back.
struct Late {
    orchestrator: Arc<Orchestrator>,
    store: Arc<Between>,
    held: Arc<Held>,
    waiting: mpsc::UnboundedReceiver<Waiting>,
    _serving: watch::Sender<bool>,
}

impl Late {
    async fn start(plane: &Plane) -> Self {
        let folder = plane.folder.path();
        let (told, waiting) = mpsc::unbounded_channel();
        let held = Arc::new(Held { which: Mutex::default(), told });
        let (serving, stopped) = watch::channel(false);
        let mut text = std::fs::read_to_string(folder.join("orchestrator.toml")).expect("the file");
        text = text.replace("orchestrator.redb", "late.redb");
        for (party, agent) in
            ["hospital", "centre"].map(|party| (party, plane.asked_by(party, "orchestrator")))
        {
            let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("a key");
            let trust = Trust::Authority(read("ca.pem").into());
            let mutual = Mutual::new(&read(&format!("{party}.pem")), trust, ALPN).expect("a key");
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
            let address = listener.local_addr().expect("an address");
            let gate = Arc::new(Gate { agent, held: held.clone() });
            let router = Router::new().fallback(pass).with_state(gate);
            tokio::spawn(serve(listener, mutual, router, stopped.clone()));
            let agents_own = std::fs::read_to_string(folder.join(format!("{party}.toml"))).expect("the file");
            let listens =
                agents_own.lines().find_map(|line| line.strip_prefix("listen = ")).expect("an address");
            text = text.replace(&format!("address = {listens}"), &format!("address = \"{address}\""));
        }
        std::fs::write(folder.join("late.toml"), text).expect("written");
        let settings = OrchestratorSettings::load(&folder.join("late.toml")).expect("a configuration");
        let StateAt::File(state) = &settings.state else { panic!("the state is a file") };
        let inner = FileStore::open(state).expect("a store");
        let store = Arc::new(Between { inner, before_put: Mutex::default() });
        let orchestrator = Arc::new(Orchestrator::new(settings, store.clone()).expect("an orchestrator"));
        Self { orchestrator, store, held, waiting, _serving: serving }
    }

    /// Holds back requests with this method and this end of their path from now on.
    fn hold(&self, method: Method, end: &'static str) {
        *self.held.which.lock().expect("no panic") = Some((method, end));
    }

    fn hold_nothing(&self) {
        *self.held.which.lock().expect("no panic") = None;
    }

    /// The next request that is held back.
    async fn next(&mut self) -> Waiting {
        tokio::time::timeout(PATIENCE, self.waiting.recv()).await.expect("in time").expect("a request")
    }

    /// Submits the application, and gives whether it became ready.
    async fn submit(orchestrator: Arc<Orchestrator>) -> bool {
        let (told, mut lines) = mpsc::channel(64);
        let ready = orchestrator.submit(application(), "app.example".to_owned(), told).await;
        while lines.recv().await.is_some() {}
        ready
    }

    fn phase(&self) -> Option<Phase> {
        let entry = self.store.get(KEY).expect("a store")?;
        let status: ApplicationStatus = serde_json::from_slice(&entry.value).expect("a status");
        Some(status.phase)
    }
}

fn wanted() -> Value {
    json!({ "name": NAME, "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] })
}

fn application() -> Application {
    serde_json::from_value(wanted()).expect("an application")
}

/// What happens to the state just before a put.
type First = Box<dyn FnOnce(&FileStore) + Send>;

/// A store where something can happen just before a put.
struct Between {
    inner: FileStore,
    before_put: Mutex<Option<First>>,
}

impl Store for Between {
    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.inner.get(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Entry)>, StoreError> {
        self.inner.list(prefix)
    }

    fn put(&self, key: &str, value: &[u8], when: If, lease: Option<LeaseId>) -> Result<Revision, StoreError> {
        if let Some(first) = self.before_put.lock().expect("no panic").take() {
            first(&self.inner);
        }
        self.inner.put(key, value, when, lease)
    }

    fn delete(&self, key: &str, when: If) -> Result<bool, StoreError> {
        self.inner.delete(key, when)
    }

    fn grant(&self, ttl: Duration, now: SystemTime) -> Result<LeaseId, StoreError> {
        self.inner.grant(ttl, now)
    }

    fn keep_alive(&self, lease: LeaseId, now: SystemTime) -> Result<(), StoreError> {
        self.inner.keep_alive(lease, now)
    }

    fn expire(&self, now: SystemTime) -> Result<Vec<String>, StoreError> {
        self.inner.expire(now)
    }

    fn watch(&self, prefix: &str, from: Option<Revision>) -> Result<mpsc::Receiver<Event>, StoreError> {
        self.inner.watch(prefix, from)
    }
}

/// Both agents hold the application, and it is ready there.
fn runs_everywhere(plane: &Plane) {
    for domain in [0, 1] {
        let held = plane.held(domain).expect("an answer");
        assert!(matches!(&held[..], [held] if held.lease.is_none()), "domain {domain}: {held:?}");
    }
}

#[test]
fn a_late_end_of_an_application_leaves_the_next_one_of_its_name() {
    let plane = Plane::start("[[grant]]\n");
    let phase = plane.runtime.block_on(async {
        let mut late = Late::start(&plane).await;
        assert!(Late::submit(late.orchestrator.clone()).await);
        late.hold(Method::DELETE, NAME);
        let end = |orchestrator: Arc<Orchestrator>| async move { orchestrator.end(NAME, |_| true).await };
        // Two members end it at the same time: each has the agents asked, one after the other.
        let first = tokio::spawn(end(late.orchestrator.clone()));
        let first_asks = late.next().await;
        let second = tokio::spawn(end(late.orchestrator.clone()));
        let second_asks = late.next().await;
        first_asks.go();
        late.next().await.go();
        assert!(first.await.expect("no panic").expect("a store"), "it was there");
        assert_eq!(late.phase(), None);
        assert!(Late::submit(late.orchestrator.clone()).await, "the name is free");
        second_asks.go();
        late.next().await.go();
        assert!(second.await.expect("no panic").expect("a store"), "it was there");
        late.phase()
    });
    assert_eq!(phase, Some(Phase::Ready));
    runs_everywhere(&plane);
}

#[test]
fn a_set_up_that_was_ended_leaves_the_next_one_of_its_name() {
    let plane = Plane::start("[[grant]]\n");
    let phase = plane.runtime.block_on(async {
        let mut late = Late::start(&plane).await;
        late.hold(Method::GET, "/nodes");
        let first = tokio::spawn(Late::submit(late.orchestrator.clone()));
        let asks = late.next().await;
        late.hold_nothing();
        assert!(late.orchestrator.end(NAME, |_| true).await.expect("a store"));
        assert!(Late::submit(late.orchestrator.clone()).await, "the name is free");
        asks.go();
        assert!(!first.await.expect("no panic"), "it was ended while it was set up");
        late.phase()
    });
    assert_eq!(phase, Some(Phase::Ready));
    runs_everywhere(&plane);
}

#[test]
fn an_end_while_the_agreement_is_read_again_is_not_lost() {
    let plane = Plane::start("[[grant]]\n");
    let phase = plane.runtime.block_on(async {
        let late = Late::start(&plane).await;
        assert!(Late::submit(late.orchestrator.clone()).await);
        *late.store.before_put.lock().expect("no panic") = Some(Box::new(|store| {
            let entry = store.get(KEY).expect("a store").expect("it is there");
            let status: ApplicationStatus = serde_json::from_slice(&entry.value).expect("a status");
            let ended = ApplicationStatus { phase: Phase::Ending, ..status };
            let value = serde_json::to_vec(&ended).expect("JSON");
            store.put(KEY, &value, If::Revision(entry.revision), None).expect("put");
        }));
        late.orchestrator.reconsider().expect("the agreement is good");
        late.phase()
    });
    assert_eq!(phase, Some(Phase::Ending));
}

#[test]
fn an_agent_knows_the_submissions_of_one_name_apart() {
    let plane = Plane::start("[[grant]]\n");
    let agent = plane.asked_by("hospital", "orchestrator");
    let ask = |method: Method, path: &str, body: &Value| match plane
        .runtime
        .block_on(agent.ask::<Value>(method, path, body, PATIENCE))
    {
        Ok(_) => 200,
        Err(LinkError::Refused { status, .. }) => status,
        Err(error) => panic!("{error}"),
    };
    let ids = || plane.held(0).expect("an answer").into_iter().map(|held| held.id).collect::<Vec<_>>();
    for id in ["one", "two"] {
        let access = json!({ "application": wanted(), "id": id, "lease_seconds": 60 });
        assert_eq!(ask(Method::POST, "/v1/applications", &access), 200);
        assert_eq!(ids(), [id], "the later one replaces what is left of an earlier one");
    }
    let path = |end: &str, id: &str| format!("/v1/applications/{NAME}{end}?id={id}");
    let policy = json!({ "facts": "version = 1\n", "movements": [] });
    for id in ["one", ""] {
        assert_eq!(ask(Method::PUT, &path("/functions", id), &json!({ "functions": [] })), 409, "'{id}'");
        assert_eq!(ask(Method::PUT, &path("/policy", id), &policy), 409, "'{id}'");
        assert_eq!(ask(Method::POST, &path("/ready", id), &Value::Null), 409, "'{id}'");
        assert_eq!(ask(Method::DELETE, &path("", id), &Value::Null), 200, "nothing is left of '{id}'");
        assert_eq!(ids(), ["two"], "after '{id}'");
    }
    assert_eq!(ask(Method::POST, &path("/ready", "two"), &Value::Null), 200);
    assert_eq!(ask(Method::DELETE, &path("", "two"), &Value::Null), 200);
    assert_eq!(ids(), [] as [&str; 0]);
}
