//! The HTTP interface of an orchestrator: applications for its members, and consent for the agents of domains.

use super::Orchestrator;
use crate::api::{Application, ApplicationStatus, ConsentChange, Planned, Report};
use crate::link::{BODY_MAX, No, Peer};
use crate::name::Name;
use crate::openapi;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use hyper::body::Frame;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Progress lines that are queued for a slow reader. Then the set-up waits.
const LINES_MAX: usize = 16;

type Shared = Arc<Orchestrator>;

/// All routes.
pub fn router(orchestrator: Shared) -> Router {
    Router::new()
        .route("/v1/applications", post(submit).get(list))
        .route("/v1/applications/{name}", get(show).delete(end))
        .route("/v1/progress", get(progress))
        .route("/v1/plan", post(plan))
        .route("/v1/consent/{data}", put(consent))
        .route("/openapi.json", get(|| async { Json(openapi::orchestrator()) }))
        .fallback(|| async { No::new(StatusCode::NOT_FOUND, "there is no such path", "see /openapi.json") })
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(orchestrator)
}

/// A body of JSON lines, sent as they come.
struct Lines<T>(mpsc::Receiver<T>);

impl<T: serde::Serialize> hyper::body::Body for Lines<T> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|item| {
            let mut line = serde_json::to_vec(&item?).ok()?;
            line.push(b'\n');
            Some(Ok(Frame::data(line.into())))
        })
    }
}

fn may_submit(orchestrator: &Orchestrator, peer: &Peer) -> Result<(), No> {
    let known = orchestrator.settings().applications.contains(&peer.name);
    let help = "add the name to `applications` of the orchestrator";
    if known {
        Ok(())
    } else {
        Err(No::new(StatusCode::FORBIDDEN, format!("'{}' may not have applications", peer.name), help))
    }
}

/// Which applications a peer may see and end.
#[derive(Clone, Debug)]
enum Reach {
    /// The applications of all members.
    Operator,
    /// Only its own.
    Member(String),
}

impl Reach {
    /// # Errors
    /// Fails if the peer is neither a member nor an operator.
    fn of(orchestrator: &Orchestrator, peer: &Peer) -> Result<Self, No> {
        if orchestrator.settings().operators.contains(&peer.name) {
            return Ok(Self::Operator);
        }
        may_submit(orchestrator, peer).map(|()| Self::Member(peer.identity.clone()))
    }

    fn covers(&self, status: &ApplicationStatus) -> bool {
        self.covers_owner(status.owner.as_ref())
    }

    fn covers_owner(&self, owner: Option<&String>) -> bool {
        match self {
            Self::Operator => true,
            Self::Member(identity) => owner == Some(identity),
        }
    }
}

fn failed(error: impl ToString) -> No {
    No::new(StatusCode::INTERNAL_SERVER_ERROR, error, "the log of the orchestrator says more")
}

/// Runs the eight steps and answers with one JSON line for each.
async fn submit(
    State(orchestrator): State<Shared>,
    Extension(peer): Extension<Peer>,
    Json(application): Json<Application>,
) -> Result<Response, No> {
    may_submit(&orchestrator, &peer)?;
    let (told, lines) = mpsc::channel(LINES_MAX);
    // A task of its own: the set-up runs to its end even if the client disconnects.
    tokio::spawn(async move { orchestrator.submit(application, peer.identity, told).await });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::new(Lines(lines))).into_response())
}

/// Says what would be done for an application.
async fn plan(
    State(orchestrator): State<Shared>,
    Extension(peer): Extension<Peer>,
    Json(application): Json<Application>,
) -> Result<Json<Planned>, No> {
    may_submit(&orchestrator, &peer)?;
    let help = "`sidetrack orchestrate submit` would be refused for the same reason";
    orchestrator
        .plan_only(&application)
        .await
        .map(Json)
        .map_err(|error| No::new(StatusCode::CONFLICT, error, help))
}

async fn list(
    State(orchestrator): State<Shared>,
    Extension(peer): Extension<Peer>,
) -> Result<Json<Vec<ApplicationStatus>>, No> {
    let reach = Reach::of(&orchestrator, &peer)?;
    let all = orchestrator.applications().map_err(failed)?;
    Ok(Json(all.into_iter().map(|(_, status)| status).filter(|status| reach.covers(status)).collect()))
}

/// What the latest set-ups of this orchestrator have reported.
async fn progress(
    State(orchestrator): State<Shared>,
    Extension(peer): Extension<Peer>,
) -> Result<Json<Vec<Report>>, No> {
    let reach = Reach::of(&orchestrator, &peer)?;
    Ok(Json(orchestrator.reports.of(|report| reach.covers_owner(report.owner.as_ref()))))
}

async fn show(
    State(orchestrator): State<Shared>,
    Extension(peer): Extension<Peer>,
    Name(name): Name,
) -> Result<Json<ApplicationStatus>, No> {
    let reach = Reach::of(&orchestrator, &peer)?;
    // The same answer for another member's application and for an unknown name, so that names do not leak.
    let found = orchestrator.application(&name).map_err(failed)?.filter(|(_, status)| reach.covers(status));
    found.map(|(_, status)| Json(status)).ok_or_else(|| none(&name))
}

async fn end(
    State(orchestrator): State<Shared>,
    Extension(peer): Extension<Peer>,
    Name(name): Name,
) -> Result<Json<()>, No> {
    let reach = Reach::of(&orchestrator, &peer)?;
    match orchestrator.end(&name, |status| reach.covers(status)).await.map_err(failed)? {
        true => Ok(Json(())),
        false => Err(none(&name)),
    }
}

fn none(name: &str) -> No {
    No::new(
        StatusCode::NOT_FOUND,
        format!("there is no application '{name}'"),
        "`sidetrack orchestrate ls` lists them",
    )
}

async fn consent(
    State(orchestrator): State<Shared>,
    Extension(peer): Extension<Peer>,
    Path(data): Path<String>,
    Json(change): Json<ConsentChange>,
) -> Result<Json<()>, No> {
    let help = "only the agent of the party that has the data may change consent";
    let changed = orchestrator.consent(&peer.name, &data, change.consent);
    changed.map(Json).map_err(|error| No::new(StatusCode::FORBIDDEN, format!("{error:#}"), help))
}
