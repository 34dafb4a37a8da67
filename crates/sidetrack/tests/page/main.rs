//! The page: its login and its header fields over real connections, the live flows, and all of it in a real browser.

#[path = "../node/mod.rs"]
mod node;
#[path = "../overlay/scene.rs"]
#[allow(dead_code, reason = "every test binary uses a part")]
mod overlay_scene;
#[path = "../support/mod.rs"]
mod support;

mod browser;
mod chromium;
mod feed;
mod login;
mod real;
mod screens;

use serde_json::json;
use sidetrack::admin::{
    AdminState, Applications, CacheRequests, CacheScope, CacheStatus, CachedResource, ConfigStatus, Control,
    Finding, FunctionCounts, ListenerStatus, MemoryStatus, Tokens, serve_page,
};
use sidetrack::live::Ledger;
use sidetrack::metrics::Metrics;
use sidetrack::record::{Feed, Recorder};
use sidetrack_common::admin::ContainersHealth;
use sidetrack_core::net::IpNet;
use sidetrack_core::policy::{Action, Condition, Match, Policy, Rule};
use sidetrack_testkit::LIMIT;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::watch;

/// A program with some rules, of which one has a hostile name.
struct Program;

/// What a hostile name tries.
pub(crate) const HOSTILE: &str = "<img src=x onerror=window.hacked=1>";

impl Control for Program {
    fn policy(&self) -> Arc<Policy> {
        let lan = Condition::To([IpNet::from(std::net::IpAddr::from([10, 0, 0, 1]))].into_iter().collect());
        let rule = |name: &str, conditions| Rule {
            name: name.into(),
            matcher: Match::new(conditions),
            action: Action::default(),
        };
        Arc::new(Policy::new(vec![rule("bulk", vec![lan]), rule(HOSTILE, Vec::new())], Action::Deny))
    }

    fn config(&self) -> ConfigStatus {
        ConfigStatus { generation: 1, path: Some("/etc/sidetrack.toml".into()), ..ConfigStatus::default() }
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        let addresses = vec![([127, 0, 0, 1], 1080).into()];
        vec![ListenerStatus { name: "out".into(), kind: "redirect".into(), addresses }]
    }

    fn functions(&self) -> Vec<FunctionCounts> {
        let trouble =
            ContainersHealth { image: HOSTILE.into(), trouble: Some(HOSTILE.into()), ..Default::default() };
        let kind = "container".into();
        vec![FunctionCounts {
            name: HOSTILE.into(),
            kind,
            flows: 1,
            bytes_up: 0,
            bytes_down: 0,
            containers: Some(trouble),
        }]
    }

    fn caches(&self) -> Vec<CacheStatus> {
        let memory = MemoryStatus { resources: 1, bytes: 7, capacity_bytes: 100 };
        let requests = CacheRequests { hits: 3, misses: 1, passed: 0 };
        vec![CacheStatus { listener: HOSTILE.into(), memory, disk: None, requests }]
    }

    fn cached(&self, _: Option<&str>, _: &CacheScope, _: usize) -> Result<Vec<CachedResource>, String> {
        let one = |at: u64| {
            let key = format!("http://{at}.example/{HOSTILE}");
            CachedResource { listener: HOSTILE.into(), key, memory_bytes: at, disk_bytes: 0 }
        };
        Ok((1..100).map(one).collect())
    }

    fn applications(&self) -> Result<Option<Applications>, String> {
        let status = |name: &str, id: &str, phase: &str| {
            json!({"application": {"name": name, "purpose": HOSTILE}, "id": id, "owner": HOSTILE, "phase": phase, "domains": [HOSTILE],
                "movements": [{"client": HOSTILE, "data": HOSTILE, "by": [HOSTILE], "functions_client": [HOSTILE], "functions_server": []}]})
        };
        let done = |number: usize, step: &str| json!({"event": "done", "step": step, "number": number, "seconds": 0.1, "detail": HOSTILE});
        let failed =
            json!({"event": "failed", "step": "request-access", "domain": HOSTILE, "error": HOSTILE});
        let lines = [done(1, "submit"), done(2, "request-access"), done(3, "grants")];
        let applications = vec![status(HOSTILE, "1", "preparing"), status("ready-one", "2", "ready")];
        let progress = vec![
            json!({"name": HOSTILE, "id": "1", "owner": HOSTILE, "lines": lines}),
            json!({"name": "refused-one", "id": "3", "owner": HOSTILE, "lines": [done(1, "submit"), failed]}),
        ];
        Ok(Some(Applications { applications, progress }))
    }

    fn findings(&self) -> Vec<Finding> {
        let text = || HOSTILE.to_owned();
        vec![Finding {
            name: text(),
            level: "fail".into(),
            found: text(),
            needed_for: text(),
            fix: Some(text()),
        }]
    }

    fn reload(&self) -> Result<(), String> {
        Ok(())
    }
}

/// The state of the routes, with a ledger of flows and its recorder.
pub(crate) fn state() -> (AdminState, Arc<Ledger>, Recorder) {
    let ledger = Arc::new(Ledger::default());
    let (feed, metrics) = (Arc::new(Feed::new(1000)), Arc::new(Metrics::new()));
    let recorder = Recorder::new(vec![ledger.clone()], feed.clone(), None, metrics.clone());
    let state = AdminState::new(vec![ledger.clone()], feed, metrics, Arc::new(Program));
    (state, ledger, recorder)
}

/// A served page, with the ledger of its flows.
pub(crate) struct Rig {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) recorder: Mutex<Recorder>,
    pub(crate) address: SocketAddr,
    stop: watch::Sender<bool>,
    serving: Option<std::thread::JoinHandle<()>>,
}

impl Rig {
    /// Serves on a free port, with the tokens of this folder.
    pub(crate) fn new(folder: &Path) -> Self {
        Self::at(folder, TcpListener::bind("127.0.0.1:0").expect("a port"))
    }

    /// Serves on this address again, as after a restart.
    pub(crate) fn again(folder: &Path, address: SocketAddr) -> Self {
        let until = Instant::now() + LIMIT;
        loop {
            match TcpListener::bind(address) {
                Ok(listener) => return Self::at(folder, listener),
                Err(error) => assert!(Instant::now() < until, "{error}"),
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn at(folder: &Path, listener: TcpListener) -> Self {
        let address = listener.local_addr().expect("an address");
        let tokens = Tokens::load(&folder.join("page-tokens")).expect("tokens");
        let (state, ledger, recorder) = state();
        let (stop, stopped) = watch::channel(false);
        let serving = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let hosts = Arc::from(["node.example".to_owned()]);
            runtime.block_on(serve_page(state, listener, tokens, hosts, stopped)).expect("served");
        });
        Self { ledger, recorder: Mutex::new(recorder), address, stop, serving: Some(serving) }
    }

    /// Sends a request, and returns the whole answer. The connection ends with it.
    pub(crate) fn ask(&self, method: &str, path: &str, fields: &[(&str, &str)], body: &str) -> String {
        let mut stream = TcpStream::connect(self.address).expect("a connection");
        stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
        let mut request = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !fields.iter().any(|(name, _)| *name == "host") {
            request += &format!("host: {}\r\n", self.address);
        }
        for (name, value) in fields {
            request += &format!("{name}: {value}\r\n");
        }
        request += &format!("content-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).expect("written");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("an answer");
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Logs in, and returns the cookie, for the field of a request.
    pub(crate) fn log_in(&self, token: &str) -> String {
        let body = format!("{{\"token\":\"{token}\"}}");
        let answer = self.ask("POST", "/page/session", &[("content-type", "application/json")], &body);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        field(&answer, "set-cookie").split(';').next().expect("a cookie").to_owned()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(serving) = self.serving.take() {
            serving.join().expect("served");
        }
    }
}

/// The value of a header field of an answer; empty if it has none.
pub(crate) fn field<'a>(answer: &'a str, name: &str) -> &'a str {
    let head = answer.split("\r\n\r\n").next().unwrap_or("");
    let mut fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.find(|(other, _)| other.eq_ignore_ascii_case(name)).map_or("", |(_, value)| value)
}

/// The status of an answer.
pub(crate) fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or("")
}

/// A folder with tokens: those of the roles `admin` and `read`.
pub(crate) fn tokens() -> (tempfile::TempDir, String, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("page-tokens");
    Tokens::load(&path).expect("tokens");
    let text = std::fs::read_to_string(&path).expect("a file");
    let token = |role: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(role));
        line.expect("a token").trim().to_owned()
    };
    let (admin, read) = (token("admin"), token("read"));
    (folder, admin, read)
}
