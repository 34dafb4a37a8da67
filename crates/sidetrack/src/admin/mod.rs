//! The admin interface: HTTP/1.1 on a unix socket, for `sidetrack flows`, scripts and the dashboard.
//!
//! | request | answer or effect |
//! |---|---|
//! | `GET /v1/flows?filter=&recent=N` | running flows and, with `recent`, the latest N that ended |
//! | `GET /v1/flows/{id}` | one flow |
//! | `DELETE /v1/flows/{id}`, `DELETE /v1/flows?filter=` | ends flows (reason `killed`) |
//! | `POST /v1/flows/{id}/back` | brings a flow back from the wire into two sockets |
//! | `GET /v1/events?filter=&opened=true` | flows when they end (and open), one JSON object per line |
//! | `GET /v1/filter?filter=&at=` | what is wrong with a filter, and what may come next in it |
//! | `GET /v1/live?filter=` | running flows and what changes in them, once a second, as server-sent events |
//! | `GET /v1/history?filter=&since=&until=&limit=&top=&by=` | ended flows of the history, or sums by groups |
//! | `GET /v1/history/moved?flow=&since=&until=` | bytes of running flows in each second |
//! | `POST /v1/capture?filter=&last_ms=&name=` | the packets of flows as a pcapng file, until its reader leaves |
//! | `DELETE /v1/capture?name=` | ends a capture in order |
//! | `GET /v1/functions` | the functions in force, and their counts |
//! | `POST /v1/functions/{name}/start` | starts its containers that are waiting for their next start |
//! | `GET /v1/rules` | the rules in force |
//! | `GET /v1/config`, `POST /v1/reload`, `POST /v1/reload/confirm` | the configuration in force, reloading it, and keeping one that is tried |
//! | `GET /v1/policy` | the data-flow agreement in force: allowed movements and their functions |
//! | `PUT /v1/policy?dry_run=&version=&peer=` | replaces it by the text in the body, or by an earlier version; says
//! which flows end |
//! | `GET /v1/policy/history` | its versions and decisions, and whether their chain is whole |
//! | `GET /v1/policy/history/{version}` | the text of a version |
//! | `GET /v1/shunt` | the flows of the shunt |
//! | `POST /v1/shunt?client=&server=&transport=&action=` | sets the action for a flow: `shunt`, `block` or
//! `ignore` |
//! | `DELETE /v1/shunt?client=&server=&transport=` | removes that action, or an entry: the packet filter decides
//! again |
//! | `GET /v1/cache` | the caches: their use of memory and disk |
//! | `GET /v1/cache/resources?listener=&prefix=&limit=` | the stored resources |
//! | `DELETE /v1/cache?listener=&url=`, `&prefix=`, `&all=true` | removes resources; answers when they are
//! removed from disk too |
//! | `POST /v1/profile?seconds=`, `GET`, `DELETE` | measures how long the data path works at each stage; shows and
//! ends the measurement |
//! | `GET /v1/status` | a summary of the process |
//! | `GET /v1/doctor` | what this machine lacks |
//! | `GET /v1/control` | the applications of the orchestrator, and their steps |
//! | `GET /v1/overlay` | links, paths and sessions of the overlay |
//! | `GET /v1/overlay/group` | the groups that this node knows, their members, and counts of packets |
//! | `POST /v1/overlay/group/{group}` | makes this node a member of a group, or not |
//! | `GET /v1/overlay/ping/{node}` | a round trip to a node over the path that flows take |
//! | `GET /v1/overlay/way/{node}` | the links that packets of a service to a node use |
//! | `POST /v1/overlay/bench/{node}` | floods that path, or sends packets of a service, and reports how much arrived |
//! | `POST /v1/overlay/link/{neighbour}` | sets cost, rate or loss of a link, or takes it down |
//! | `GET /`, `GET /page/{file}` | the page; over TCP it needs a login for all others of these paths |
//! | `GET /page/session`, `POST`, `DELETE` | what the session may do; logs in; logs out |
//! | `GET /healthz`, `GET /readyz` | whether the process answers, and whether it serves new flows; without a login |
//! | `GET /v1/openapi.json` | the OpenAPI document of all these requests |
//! | `GET /metrics` | OpenMetrics text; also on a TCP address, if configured |
//!
//! Errors are `{"error": what is wrong, "help": what to do}`. The socket file's mode is the access control:
//! 0660. The control thread serves the interface: no code here runs on a worker.

mod cache;
mod capped;
mod capture;
mod control;
mod error;
mod filter;
mod findings;
mod flows;
mod health;
mod history;
mod losses;
mod openapi;
mod overlay;
mod page;
mod places;
mod policy;
mod profile;
mod rebinding;
mod shunt;
mod socket;
mod status;
mod watch;

pub use cache::{
    CacheRequests, CacheScope, CacheStatus, CachedResource, CachedResources, Caches, DiskStatus,
    MemoryStatus, Purged,
};
pub use control::Applications;
pub use findings::{Finding, Findings};
pub use health::{Readiness, Stage};
pub use history::{Answer, MovedAnswer};
pub use losses::{HISTORY, ONLY_RUNNING, RECORDS, Written};
pub use openapi::OPENAPI;
pub use page::{Role, Tokens, TokensError, serve_page};
pub use places::{SYSTEM_SOCKET, default_socket, directory, forget_dead_runs, run_socket, run_sockets, runs};
pub use policy::{AgreementStatus, Applied, Audit, Movement, Movements, NewAgreement, Past, Version, Way};
pub use profile::{Profile, StageTime};
pub use shunt::{Done, ShuntFlows};
pub use sidetrack_common::admin::{Back, Client, ClientError, FunctionCounts, Functions, Killed, Lines};
pub use socket::{AdminSocket, BindError};
pub use status::{ActionView, ConfigStatus, ConfirmedConfig, ListenerStatus, RuleView, Status, TriedConfig};

use crate::capture::Captures;
use crate::live::Ledger;
use crate::live::work::WorkCounts;
use crate::metrics::{
    CONTENT_TYPE, ClosedForOthers, DnsCounts, ExportCounts, HeldCounts, MemoryCounts, Metrics, Surroundings,
    WireCounts,
};
use crate::record::history::History;
use crate::record::{Feed, Timestamp};
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::middleware::from_fn;
use axum::response::IntoResponse;
use axum::routing::get;
use error::ApiError;
use sidetrack_common::history::Caller;
use sidetrack_core::policy::Policy;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Semaphore;
use tokio::sync::watch::Receiver;

/// How long open connections may take to end when the process stops.
const LAST_WORDS: std::time::Duration = std::time::Duration::from_secs(1);

/// The rest of the program, as the admin interface sees it. Called on the control thread. [`Control::reload`] is
/// called on a thread that may block.
pub trait Control: Send + Sync + 'static {
    /// The policy in force.
    fn policy(&self) -> Arc<Policy>;
    /// The configuration in force.
    fn config(&self) -> ConfigStatus;
    /// The listeners.
    fn listeners(&self) -> Vec<ListenerStatus>;
    /// The functions, with their counts.
    fn functions(&self) -> Vec<FunctionCounts> {
        Vec::new()
    }
    /// Starts the waiting containers of a function. Returns false if there is no such function.
    fn start_function(&self, _name: &str) -> bool {
        false
    }
    /// The entry into the overlay, if this node is part of one.
    fn overlay(&self) -> Option<Arc<crate::overlay::Entry>> {
        None
    }
    /// Updates the data about flows that the kernel forwards without us. May block.
    fn look_at_kernel_flows(&self) {}
    /// The data-flow agreement in force.
    fn agreement(&self) -> AgreementStatus {
        AgreementStatus::default()
    }
    /// Puts another data-flow agreement in force, or says what that would do. May block.
    ///
    /// # Errors
    /// Says what is wrong with the text. Then nothing has changed.
    fn apply_agreement(&self, _new: &NewAgreement, _dry_run: bool, _by: &Caller) -> Result<Applied, String> {
        Err("there is no [policy] here".to_owned())
    }
    /// The history of the agreement. May block.
    ///
    /// # Errors
    /// Fails if no history is kept, or if it cannot be read.
    fn audit(&self) -> Result<Audit, String> {
        Err("there is no [policy] here".to_owned())
    }
    /// The text of a version of the agreement. May block.
    ///
    /// # Errors
    /// Fails as [`Control::audit`] does, and if there is no such version.
    fn version_of_agreement(&self, _version: u64) -> Result<String, String> {
        Err("there is no [policy] here".to_owned())
    }
    /// Sends a request to the shunt. May block.
    ///
    /// # Errors
    /// Fails if there is no shunt, or if it refuses.
    fn shunt(&self, _ask: &crate::shunt::Ask) -> Result<crate::shunt::Told, String> {
        Err("the configuration has no [shunt]".to_owned())
    }
    /// How full the shunt's fast path is. `None` without a shunt.
    fn shunt_capacity(&self) -> Option<crate::shunt::Capacity> {
        None
    }
    /// The memory of the control group.
    fn memory(&self) -> MemoryCounts {
        MemoryCounts::default()
    }
    /// The caches.
    fn caches(&self) -> Vec<CacheStatus> {
        Vec::new()
    }
    /// Returns stored resources of one listener or of all, at most `most` for each.
    ///
    /// # Errors
    /// Fails if there is no such listener, or if the URL is not valid.
    fn cached(
        &self,
        _listener: Option<&str>,
        _scope: &CacheScope,
        _most: usize,
    ) -> Result<Vec<CachedResource>, String> {
        Ok(Vec::new())
    }
    /// Removes stored resources. Returns their number. May block.
    ///
    /// # Errors
    /// Fails as [`Control::cached`] does.
    fn purge(&self, _listener: Option<&str>, _scope: &CacheScope) -> Result<usize, String> {
        Ok(0)
    }
    /// The applications of the orchestrator. `None`: none is configured. May block.
    ///
    /// # Errors
    /// Says why there is no answer.
    fn applications(&self) -> Result<Option<Applications>, String> {
        Ok(None)
    }
    /// What this machine lacks, as far as this process may look. May block.
    fn findings(&self) -> Vec<Finding> {
        Vec::new()
    }
    /// How many connections were closed to make room for others.
    fn closed_for_others(&self) -> ClosedForOthers {
        ClosedForOthers::default()
    }
    /// How many datagrams were not passed on, by the word of the reason.
    fn datagrams_dropped(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// What the resolver has done. `None`: there is none.
    fn dns(&self) -> Option<DnsCounts> {
        None
    }
    /// What is counted of the wire. `None`: no flow goes there.
    fn wires(&self) -> Option<WireCounts> {
        None
    }
    /// Brings a flow back from the wire into two sockets. May block.
    ///
    /// # Errors
    /// Says why it cannot come back. It goes on as before then.
    fn bring_back(&self, _flow: u64) -> Result<(), String> {
        Err("no flow goes to the wire here".to_owned())
    }
    /// Connections whose SYN was held until the far side had answered.
    fn held(&self) -> HeldCounts {
        HeldCounts::default()
    }
    /// How many errors of their own the packet engines have counted.
    fn engine_errors(&self) -> u64 {
        0
    }
    /// What the workers of the packet engines have done in their rounds.
    fn engine_work(&self) -> WorkCounts {
        WorkCounts::default()
    }
    /// Reloads the configuration.
    ///
    /// # Errors
    /// Says what is wrong with it, in the form of `sidetrack check`. Then nothing has changed.
    fn reload(&self) -> Result<(), String>;
    /// Puts this text in force. Unless it is confirmed within this time, the configuration before it comes back.
    ///
    /// # Errors
    /// As [`Control::reload`].
    fn try_config(&self, _text: String, _within: Duration) -> Result<(), String> {
        Err("the configuration of this process does not change".to_owned())
    }
    /// Keeps the configuration that is tried. Returns its text, which belongs into the file; `None` if the file has it.
    ///
    /// # Errors
    /// None is tried.
    fn confirm_config(&self) -> Result<Option<String>, String> {
        Err("no configuration waits for a confirmation".to_owned())
    }
}

/// The state for the routes.
#[derive(Clone)]
pub struct AdminState {
    /// The ledgers of all workers.
    pub ledgers: Vec<Arc<Ledger>>,
    /// The latest records.
    pub feed: Arc<Feed>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The rest of the program.
    pub control: Arc<dyn Control>,
    history: Option<Arc<History>>,
    /// What this process writes.
    written: Arc<[losses::Written]>,
    /// What was sent to collectors.
    exports: Option<Arc<dyn Fn() -> Vec<ExportCounts> + Send + Sync>>,
    captures: Option<Arc<Captures>>,
    /// The captures that have names.
    capturing: capture::Running,
    /// The table of running flows, while there is a viewer.
    watch: Arc<watch::Watch>,
    /// The latest findings about this machine.
    findings: findings::Latest,
    /// The latest answer of the orchestrator.
    applications: control::Latest,
    /// Searches of the history at a time.
    searches: Arc<Semaphore>,
    readiness: Readiness,
    started: Instant,
    started_at: Timestamp,
}

/// Most searches of the history at a time. Each uses all cores.
const SEARCHES_MAX: usize = 2;

impl AdminState {
    /// The state of a program that is starting.
    pub fn new(
        ledgers: Vec<Arc<Ledger>>,
        feed: Arc<Feed>,
        metrics: Arc<Metrics>,
        control: Arc<dyn Control>,
    ) -> Self {
        let (started, started_at) = (Instant::now(), SystemTime::now().into());
        let searches = Arc::new(Semaphore::new(SEARCHES_MAX));
        Self {
            ledgers,
            feed,
            metrics,
            control,
            history: None,
            written: Arc::default(),
            exports: None,
            captures: None,
            capturing: capture::Running::default(),
            watch: Arc::default(),
            findings: findings::Latest::default(),
            applications: control::Latest::default(),
            searches,
            readiness: Readiness::new(Stage::Ready),
            started,
            started_at,
        }
    }

    /// The same with a history.
    #[must_use]
    pub fn with_history(self, history: Option<Arc<History>>) -> Self {
        Self { history, ..self }
    }

    /// The same with collectors.
    #[must_use]
    pub fn with_exports(self, counts: impl Fn() -> Vec<ExportCounts> + Send + Sync + 'static) -> Self {
        Self { exports: Some(Arc::new(counts)), ..self }
    }

    /// The same with captures of packets.
    #[must_use]
    pub fn with_captures(self, captures: Arc<Captures>) -> Self {
        Self { captures: Some(captures), ..self }
    }

    /// The same for a process that has yet to say when it is ready, and how it says so.
    #[must_use]
    pub fn starting(self) -> (Self, Readiness) {
        let readiness = Readiness::new(Stage::Starting);
        (Self { readiness: readiness.clone(), ..self }, readiness)
    }

    /// Updates the kernel's flows before they are listed.
    async fn look(&self) {
        let control = self.control.clone();
        // After a panic the list is as it was before.
        let _ = tokio::task::spawn_blocking(move || control.look_at_kernel_flows()).await;
    }

    /// All metrics as text.
    pub fn metrics_text(&self) -> String {
        let config = self.control.config();
        let surroundings = Surroundings {
            fds_in_use: status::descriptors_in_use(),
            fds_limit: sidetrack_sys::caps::open_files_limit().0,
            config_generation: config.generation,
            config_last_reload_success: config.last_error.is_none(),
            process: status::process_use(self.started_at),
        };
        self.metrics.read_closed(self.control.closed_for_others());
        self.metrics.read_dropped(&self.control.datagrams_dropped());
        self.metrics.read_memory(&self.control.memory());
        self.count_losses();
        self.metrics.read_held(&self.control.held());
        self.metrics.read_dns(&self.control.dns().unwrap_or_default());
        self.metrics.read_wires(&self.control.wires().unwrap_or_default());
        self.metrics.read_engine_errors(self.control.engine_errors());
        self.metrics.read_engine(&self.control.engine_work());
        self.metrics.read_functions(&self.control.functions());
        if let Some(packets) = self.control.overlay().and_then(|overlay| overlay.packets()) {
            self.metrics.read_packets(&packets.fates());
        }
        if let Some(overlay) = self.control.overlay() {
            self.metrics.read_packets(&overlay.spread().fates());
            self.metrics.read_paths(&overlay.path_counts());
            if let Some(paced) = overlay.paced() {
                let waiting = (paced.queued_bytes, paced.pacing_delay_us);
                self.metrics.read_paced(&paced.counts(), waiting);
            }
            for service in overlay.services() {
                self.metrics.read_service(&service.kind, &service.dissemination, &service.fates());
            }
            let totals = overlay.group_totals();
            self.metrics.read_groups(&totals.packets, totals.groups, totals.members);
        }
        self.metrics.read_profile(&crate::live::profile::counts());
        if let Some(history) = &self.history {
            self.metrics.read_history(history.bytes());
        }
        if let Some(counts) = &self.exports {
            self.metrics.read_exports(&counts());
        }
        if let Some(capacity) = self.control.shunt_capacity() {
            self.metrics.read_shunt(&capacity.entries(), capacity.evicted);
        }
        self.metrics.text(&self.ledgers, surroundings)
    }
}

/// All routes.
pub fn router(state: AdminState) -> Router {
    health::routes(page::files(Router::new()))
        .route("/v1/flows", get(flows::list).delete(flows::kill_many))
        .route("/v1/flows/{id}", get(flows::show).delete(flows::kill_one))
        .route("/v1/flows/{id}/trace", get(flows::trace))
        .route("/v1/flows/{id}/back", axum::routing::post(flows::bring_back))
        .route("/v1/events", get(flows::events))
        .route("/v1/filter", get(filter::check))
        .route("/v1/live", get(watch::follow))
        .route("/v1/history", get(history::search))
        .route("/v1/history/moved", get(history::moved))
        .route("/v1/functions", get(status::functions))
        .route("/v1/functions/{name}/start", axum::routing::post(status::start_function))
        .route("/v1/rules", get(status::rules))
        .route("/v1/config", get(status::config))
        .route("/v1/reload", axum::routing::post(status::reload))
        .route("/v1/reload/confirm", axum::routing::post(status::confirm))
        .route("/v1/policy", get(policy::show).put(policy::put))
        .route("/v1/policy/history", get(policy::history))
        .route("/v1/policy/history/{version}", get(policy::version))
        .route("/v1/shunt", get(shunt::list).post(shunt::pin).delete(shunt::withdraw))
        .route("/v1/cache", get(cache::stat).delete(cache::purge))
        .route("/v1/cache/resources", get(cache::list))
        .route("/v1/capture", axum::routing::post(capture::start).delete(capture::end))
        .route("/v1/profile", get(profile::show).post(profile::start).delete(profile::stop))
        .route("/v1/status", get(status::status))
        .route("/v1/doctor", get(findings::show))
        .route("/v1/control", get(control::show))
        .route("/v1/overlay", get(overlay::status))
        .route("/v1/overlay/group", get(overlay::groups))
        .route("/v1/overlay/group/{group}", axum::routing::post(overlay::join_group))
        .route("/v1/overlay/ping/{node}", get(overlay::ping))
        .route("/v1/overlay/way/{node}", get(overlay::way))
        .route("/v1/overlay/bench/{node}", axum::routing::post(overlay::bench))
        .route("/v1/overlay/link/{neighbour}", axum::routing::post(overlay::set_link))
        .route("/v1/openapi.json", get(openapi::show))
        .route("/metrics", get(metrics))
        .fallback(|| async {
            ApiError::not_found("there is no such path", "see docs/admin.md for those there are")
        })
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed() })
        .with_state(state)
}

async fn metrics(State(state): State<AdminState>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], state.metrics_text())
}

/// Serves all routes on the unix socket until `stop` becomes true or its sender is dropped. Then removes the
/// socket.
///
/// # Errors
/// Fails if the socket cannot be registered with this runtime.
pub async fn serve(state: AdminState, socket: AdminSocket, stop: Receiver<bool>) -> io::Result<()> {
    let (listener, _guard) = socket.into_listener()?;
    let router = router(state)
        .route("/page/session", get(page::session_of_socket))
        .layer(from_fn(page::on_socket))
        .layer(from_fn(page::protect));
    let service = router.into_make_service_with_connect_info::<socket::Client>();
    let serving = axum::serve(listener, service).with_graceful_shutdown(told(stop.clone()));
    until_stopped(async move { serving.await }, stop).await
}

/// Serves only `/metrics`, `/healthz` and `/readyz` on a TCP address, with limits on the number of clients and the time of each. Requests
/// must use an address, `localhost`, or one of `names` as host.
///
/// # Errors
/// Fails if the listener cannot be registered with this runtime.
pub async fn serve_metrics(
    state: AdminState,
    listener: std::net::TcpListener,
    names: Arc<[String]>,
    stop: Receiver<bool>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let metrics_of = state.metrics.clone();
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let listener = capped::Capped::new(listener, capped::SCRAPERS, move || metrics_of.closed_scraper());
    let router = health::routes(Router::new())
        .route("/metrics", get(metrics))
        .fallback(|| async {
            ApiError::not_found(
                "there is no such path",
                "this address has /metrics, /healthz and /readyz only",
            )
        })
        .layer(axum::middleware::from_fn_with_state(names, rebinding::guard))
        .with_state(state);
    let serving = axum::serve(listener, router).with_graceful_shutdown(told(stop.clone()));
    until_stopped(async move { serving.await }, stop).await
}

/// Waits until `stop` becomes true or its sender is dropped.
async fn told(mut stop: Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Waits for the end of a server. Open connections have a little time after `stop`.
async fn until_stopped(
    serving: impl Future<Output = io::Result<()>>,
    stop: Receiver<bool>,
) -> io::Result<()> {
    tokio::select! {
        result = serving => result,
        () = async {
            told(stop).await;
            tokio::time::sleep(LAST_WORDS).await;
        } => Ok(()),
    }
}
