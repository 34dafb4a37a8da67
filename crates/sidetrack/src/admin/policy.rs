//! Routes for the data-flow agreement: for `sidetrack policy`, and for a domain's agent.

use super::AdminState;
use super::error::ApiError;
use super::socket::Client;
use crate::agreement::Book;
use crate::config::PolicyMode;
use crate::record::Timestamp;
use axum::Extension;
use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection, StringRejection};
use axum::extract::{ConnectInfo, Path, Query, State};
use serde::{Deserialize, Serialize};
use sidetrack_common::history::{Act, Caller, Cause, Entry, Head, hex};
use sidetrack_core::agreement::{Access, Plan, Ruling, Surplus};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// The data-flow agreement in force.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AgreementStatus {
    /// Whether flows that it does not allow are denied. `null` if there is no agreement.
    pub mode: Option<PolicyMode>,
    /// The names of the agreements that are valid now.
    pub agreements: Vec<String>,
    /// When an agreement begins or ends next.
    pub next_change: Option<Timestamp>,
    /// The allowed movements, with their functions.
    #[serde(flatten)]
    pub movements: Movements,
}

/// The movements between nodes, for each purpose.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Movements {
    /// Each pair of a node and a data set of another node, for each purpose and access; at most
    /// [`Movements::MAX`].
    pub movements: Vec<Movement>,
    /// The share of these movements that are unfeasible, 0 to 1. 0 if the list is empty.
    pub unfeasibility_ratio: f64,
}

/// Whether and how data may move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Movement {
    /// The purpose of the data flow.
    pub purpose: String,
    /// The direction of the data.
    pub access: Access,
    /// The client's node.
    pub client: String,
    /// The data set.
    pub data: String,
    /// The node that the data leaves.
    pub from: String,
    /// The node that the data goes to.
    pub to: String,
    /// Whether there is a channel (Eq. 4).
    pub channel: bool,
    /// The attributes that must be applied.
    pub missing: Vec<String>,
    /// The attributes that `from` has and `to` lacks. Empty if there is a channel.
    #[serde(default)]
    pub surplus: Vec<String>,
    /// Whether the area logic excludes it. No function can apply the missing attributes, or there is only a
    /// surplus and no agreement allows it.
    #[serde(default)]
    pub unfeasible: bool,
    /// Whether it may move: how, or why not.
    #[serde(flatten)]
    pub way: Way,
}

/// Whether data may move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "decision", rename_all = "lowercase")]
pub enum Way {
    /// It may move.
    Allow {
        /// The agreements that allow it.
        by: Vec<String>,
        /// The functions at the client's end.
        functions_client: Vec<String>,
        /// The functions at the end of the data.
        functions_server: Vec<String>,
        /// "allow": it may move only because an agreement has `surplus = "allow"`. The name differs from the
        /// movement's own `surplus`, beside which it stands.
        #[serde(default)]
        agreed_surplus: Surplus,
    },
    /// It may not move.
    Deny {
        /// The reason.
        why: String,
    },
}

impl Movements {
    /// Most pairs in the list.
    pub const MAX: usize = 10_000;

    /// The movements of an agreement.
    pub fn of(book: &Book) -> Self {
        let agreement = book.agreement();
        let asked = book.purposes().iter().flat_map(|purpose| Access::ALL.map(|access| (purpose, access)));
        let all = asked.flat_map(|(purpose, access)| {
            agreement.plans(purpose, access).map(move |plan| Movement::of(plan, purpose, access))
        });
        Self::new(all.take(Self::MAX).collect())
    }

    /// Returns these movements with their unfeasibility ratio (EPI framework, Sec. III-B).
    pub fn new(movements: Vec<Movement>) -> Self {
        let mut all = Self { movements, unfeasibility_ratio: 0.0 };
        if !all.movements.is_empty() {
            all.unfeasibility_ratio = all.unfeasible() as f64 / all.movements.len() as f64;
        }
        all
    }

    /// Returns how many movements are unfeasible.
    pub fn unfeasible(&self) -> usize {
        self.movements.iter().filter(|movement| movement.unfeasible).count()
    }
}

impl Movement {
    fn of(plan: Plan, purpose: &str, access: Access) -> Self {
        let texts = |names: &[Arc<str>]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let way = match &plan.ruling {
            Ruling::Allow(bridging) => Way::Allow {
                by: texts(&bridging.by),
                functions_client: texts(&bridging.client),
                functions_server: texts(&bridging.server),
                agreed_surplus: bridging.surplus,
            },
            Ruling::Deny(why) => Way::Deny { why: why.to_string() },
        };
        Self {
            purpose: purpose.to_owned(),
            access,
            client: plan.client.to_string(),
            data: plan.data.to_string(),
            from: plan.from.to_string(),
            to: plan.to.to_string(),
            channel: plan.channel,
            missing: texts(&plan.missing),
            surplus: texts(&plan.surplus),
            unfeasible: plan.unfeasible,
            way,
        }
    }
}

/// The result of applying a new agreement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Applied {
    /// True if nothing was changed and this is what would happen.
    pub dry_run: bool,
    /// The numbers of the flows that end with `policy_revoked`.
    pub revoked: Vec<u64>,
    /// The state now, or the state it would be.
    #[serde(flatten)]
    pub status: AgreementStatus,
}

/// How to apply a new agreement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    #[serde(default)]
    dry_run: bool,
    /// The version to go back to. The body is empty then.
    version: Option<u64>,
    /// The name in the certificate of the peer for which the caller asks.
    peer: Option<String>,
}

/// Longest name of a peer in a history, bytes.
const PEER_MAX: usize = 256;

/// A new agreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewAgreement {
    /// This text.
    Text(String),
    /// The text of this version of the history.
    Version(u64),
}

/// An entry of the history, without the text of its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    /// Its number.
    pub number: u64,
    /// The time, never before that of the previous entry.
    pub at: Timestamp,
    /// How far the clock was behind the previous entry, milliseconds.
    pub clock_back_ms: u64,
    /// The caller.
    pub by: Caller,
    /// The version that it made, or that it is about.
    pub version: Option<u64>,
    /// What happened, in words.
    pub what: String,
    /// The hash of its line, 64 hex digits.
    pub hash: String,
}

impl Past {
    /// Describes an entry. `head` is the end of the chain after it.
    pub fn new(entry: Entry, head: &Head) -> Self {
        let (version, what) = match entry.act {
            Act::Version { version, cause: Cause::Apply, .. } => (Some(version), "applied".to_owned()),
            Act::Version { version, cause: Cause::File, .. } => {
                (Some(version), "read from its file".to_owned())
            }
            Act::Version { version, same_as, .. } => {
                (Some(version), format!("rolled back to {}", same_as.unwrap_or_default()))
            }
            Act::Refused { error, .. } => (None, format!("refused: {error}")),
            Act::Failed { version, error } => (Some(version), format!("not in force: {error}")),
            Act::Mended { cut_bytes } => {
                (None, format!("an incomplete line of {cut_bytes} bytes was cut off"))
            }
        };
        let at = (UNIX_EPOCH + Duration::from_millis(entry.at_ms)).into();
        let (number, clock_back_ms, by) = (entry.number, entry.clock_back_ms, entry.by);
        Self { number, at, clock_back_ms, by, version, what, hash: hex(&head.hash) }
    }
}

/// The history of a node's agreements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// The file.
    pub file: PathBuf,
    /// Its entries, up to the first broken link.
    pub entries: Vec<Past>,
    /// The hash of the last line that this process knows, 64 hex digits.
    pub head: String,
    /// The first broken link. `null` if the chain is whole.
    pub broken: Option<String>,
}

/// A version of the agreement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// Its number.
    pub version: u64,
    /// Its text.
    pub text: String,
}

/// `GET /v1/policy/history`
pub(super) async fn history(State(state): State<AdminState>) -> Result<Json<Audit>, ApiError> {
    blocking(move || state.control.audit()).await.map(Json)
}

/// `GET /v1/policy/history/{version}`
pub(super) async fn version(
    State(state): State<AdminState>,
    version: Result<Path<u64>, PathRejection>,
) -> Result<Json<Version>, ApiError> {
    let help = "a version is a number, as `sidetrack policy history` shows it";
    let Path(version) = version.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let text = blocking(move || state.control.version_of_agreement(version)).await?;
    Ok(Json(Version { version, text }))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| ApiError::conflict(error, HELP)),
        Err(error) => Err(ApiError::internal(format!("the work ended early: {error}"))),
    }
}

/// Where a person finds more.
const HELP: &str = "docs/control.md describes the file of an agreement and its history";

/// `GET /v1/policy`
pub(super) async fn show(State(state): State<AdminState>) -> Json<AgreementStatus> {
    Json(state.control.agreement())
}

/// `PUT /v1/policy`
pub(super) async fn put(
    State(state): State<AdminState>,
    client: Option<Extension<ConnectInfo<Client>>>,
    wish: Result<Query<Wish>, QueryRejection>,
    text: Result<String, StringRejection>,
) -> Result<Json<Applied>, ApiError> {
    let help =
        "the path takes dry_run=true, version=N and peer=NAME, and the body is the text of an agreement";
    let Query(Wish { dry_run, version, peer }) =
        wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let unreadable =
        |rejection: StringRejection| ApiError::unreadable(rejection.status(), rejection.body_text(), help);
    let text = text.map_err(unreadable)?;
    let peer = peer.map(|peer| peer.chars().take(PEER_MAX).collect());
    let client = client.map_or_else(Client::default, |Extension(ConnectInfo(client))| client);
    let new = match version {
        Some(version) if text.is_empty() => NewAgreement::Version(version),
        Some(_) => {
            return Err(ApiError::bad_request("both a text and a version were sent", "send one of the two"));
        }
        None => NewAgreement::Text(text),
    };
    blocking(move || state.control.apply_agreement(&new, dry_run, &client.caller(peer))).await.map(Json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_movement_is_read_as_it_is_written() {
        let way = |surplus| Way::Allow {
            by: vec!["trial".into()],
            functions_client: vec!["count".into()],
            functions_server: Vec::new(),
            agreed_surplus: surplus,
        };
        for way in [way(Surplus::Allow), way(Surplus::Deny), Way::Deny { why: "consent".into() }] {
            let movement = Movement {
                purpose: "research".into(),
                access: Access::Read,
                client: "lab".into(),
                data: "pulse".into(),
                from: "ward".into(),
                to: "lab".into(),
                channel: false,
                missing: vec!["counted".into()],
                surplus: vec!["isolated".into()],
                unfeasible: false,
                way,
            };
            let text = serde_json::to_string(&movement).unwrap();
            assert_eq!(serde_json::from_str::<Movement>(&text).unwrap(), movement, "{text}");
        }
    }
}
