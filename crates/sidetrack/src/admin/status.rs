//! Routes for the program itself: rules, configuration, status.

use super::AdminState;
use super::error::ApiError;
use crate::metrics::ProcessUse;
use crate::record::Timestamp;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use sidetrack_common::admin::Functions;
use sidetrack_core::policy::{Action, Policy};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The configuration in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigStatus {
    /// Its number: 1 at the start, one more for each replacement.
    pub generation: u64,
    /// The file it was read from. `None` if it was made from the command line.
    pub path: Option<PathBuf>,
    /// Why the latest reload failed. `None` if it succeeded, or if there was none.
    pub last_error: Option<String>,
    /// Changed settings in the file that need a restart, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_for_restart: Vec<String>,
    /// After how many milliseconds the configuration in force is taken back, unless it is confirmed. `None`: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unconfirmed_ms: Option<u64>,
}

/// A configuration that is tried. Without one the file is loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TriedConfig {
    /// Its text.
    pub text: String,
    /// After how many milliseconds it is taken back, unless it is confirmed.
    pub confirm_ms: u64,
}

/// A configuration that was confirmed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmedConfig {
    /// The configuration file.
    pub path: Option<PathBuf>,
    /// What belongs into it. `None`: it has it.
    pub text: Option<String>,
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerStatus {
    /// Its name.
    pub name: String,
    /// Its kind: `socks`, `reverse`, `redirect`, `tproxy`, `run`.
    pub kind: String,
    /// The addresses it listens on.
    pub addresses: Vec<SocketAddr>,
}

/// A rule in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleView {
    /// Its position, counted from 1. `None` for the default.
    pub place: Option<usize>,
    /// Its name. `None` for the default.
    pub name: Option<String>,
    /// Its conditions, such as `to 10.0.0.0/8`; all must hold.
    pub matches: Vec<String>,
    /// Its action.
    pub action: ActionView,
    /// The functions that its flows pass, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<String>,
}

/// An action in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActionView {
    /// Denied.
    Deny,
    /// Carried: `direct`, or the hops in order, without credentials.
    Carry(String),
}

impl From<&Action> for ActionView {
    fn from(action: &Action) -> Self {
        match action {
            Action::Deny => Self::Deny,
            Action::Carry(carry) => Self::Carry(carry.carrier.to_string()),
        }
    }
}

/// The names of the functions that an action leads through.
fn chain_of(action: &Action) -> Vec<String> {
    let Action::Carry(carry) = action else { return Vec::new() };
    carry.chain.iter().flat_map(|chain| chain.names()).map(ToString::to_string).collect()
}

impl RuleView {
    /// All rules of a policy in order, its default last.
    pub fn all(policy: &Policy) -> Vec<Self> {
        let rule = |(index, rule): (usize, &sidetrack_core::policy::Rule)| Self {
            place: Some(index + 1),
            name: Some(rule.name.to_string()),
            matches: rule.matcher.conditions().iter().map(ToString::to_string).collect(),
            action: ActionView::from(&rule.action),
            chain: chain_of(&rule.action),
        };
        let default = Self {
            place: None,
            name: None,
            matches: Vec::new(),
            action: ActionView::from(policy.default_action()),
            chain: chain_of(policy.default_action()),
        };
        policy.rules().iter().enumerate().map(rule).chain([default]).collect()
    }
}

/// A summary of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The version of this program.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// When it started.
    pub started: Timestamp,
    /// Time since the start, whole seconds.
    pub uptime_seconds: u64,
    /// Number of running flows.
    pub flows_active: usize,
    /// Number of flows that ended since the start.
    pub flows_ended: u64,
    /// Open descriptors.
    pub fds_in_use: u64,
    /// Limit of open descriptors.
    pub fds_limit: u64,
    /// The configuration in force.
    pub config: ConfigStatus,
    /// The listeners.
    pub listeners: Vec<ListenerStatus>,
}

#[derive(Serialize)]
pub(super) struct Rules {
    generation: u64,
    rules: Vec<RuleView>,
}

pub(super) async fn rules(State(state): State<AdminState>) -> Json<Rules> {
    let generation = state.control.config().generation;
    Json(Rules { generation, rules: RuleView::all(&state.control.policy()) })
}

pub(super) async fn functions(State(state): State<AdminState>) -> Json<Functions> {
    Json(Functions { functions: state.control.functions() })
}

pub(super) async fn config(State(state): State<AdminState>) -> Json<ConfigStatus> {
    Json(state.control.config())
}

pub(super) async fn start_function(
    State(state): State<AdminState>,
    Path(name): Path<String>,
) -> Result<Json<()>, ApiError> {
    if state.control.start_function(&name) {
        return Ok(Json(()));
    }
    Err(ApiError::not_found(
        format!("there is no function '{name}' in containers"),
        "`GET /v1/functions` lists all of them",
    ))
}

pub(super) async fn confirm(State(state): State<AdminState>) -> Result<Json<ConfirmedConfig>, ApiError> {
    let control = state.control.clone();
    match tokio::task::spawn_blocking(move || control.confirm_config()).await {
        Ok(Ok(text)) => Ok(Json(ConfirmedConfig { path: state.control.config().path, text })),
        Ok(Err(error)) => Err(ApiError::conflict(error, "`GET /v1/config` shows what is in force")),
        Err(error) => Err(ApiError::internal(format!("the confirmation ended early: {error}"))),
    }
}

pub(super) async fn reload(
    State(state): State<AdminState>,
    body: Bytes,
) -> Result<Json<ConfigStatus>, ApiError> {
    let control = state.control.clone();
    let tried = (!body.is_empty()).then(|| serde_json::from_slice::<TriedConfig>(&body)).transpose();
    let tried = tried.map_err(|error| {
        ApiError::bad_request(
            format!("the body: {error}"),
            "send {\"text\": ..., \"confirm_ms\": N}, or no body",
        )
    })?;
    let work = move || match tried {
        None => control.reload(),
        Some(TriedConfig { text, confirm_ms }) => control.try_config(text, Duration::from_millis(confirm_ms)),
    };
    let result = tokio::task::spawn_blocking(work).await;
    match result {
        Ok(Ok(())) => Ok(Json(state.control.config())),
        Ok(Err(error)) => {
            let help = "nothing has changed: the configuration before stays in force. `sidetrack check FILE` says the same";
            Err(ApiError::conflict(error, help))
        }
        Err(error) => Err(ApiError::internal(format!("loading the configuration ended early: {error}"))),
    }
}

pub(super) async fn status(State(state): State<AdminState>) -> Json<Status> {
    Json(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        started: state.started_at,
        uptime_seconds: state.started.elapsed().as_secs(),
        flows_active: state.ledgers.iter().map(|ledger| ledger.len()).sum(),
        flows_ended: state.feed.ended_total(),
        fds_in_use: descriptors_in_use(),
        fds_limit: sidetrack_sys::caps::open_files_limit().0,
        config: state.control.config(),
        listeners: state.control.listeners(),
    })
}

/// What this process uses now.
pub(super) fn process_use(started: Timestamp) -> ProcessUse {
    let (resident_bytes, virtual_bytes) = sidetrack_sys::process::memory_bytes().unwrap_or_default();
    let started = started.system_time().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    ProcessUse {
        cpu_us: sidetrack_sys::process::cpu_us(std::process::id()).unwrap_or(0),
        resident_bytes,
        virtual_bytes,
        started_unix_ms: u64::try_from(started.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Returns the number of open descriptors of this process; 0 if /proc is not mounted.
pub(super) fn descriptors_in_use() -> u64 {
    // Leave out the descriptor that reads the directory.
    std::fs::read_dir("/proc/self/fd").map_or(0, |entries| (entries.count() as u64).saturating_sub(1))
}
