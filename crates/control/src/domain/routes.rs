//! The HTTP interface of a domain's agent: for the orchestrator, and for the domain's operators.

use super::{Domain, DomainError, Held};
use crate::api::{
    AccessRequest, Configuration, Configured, ConsentChange, Offer, Shipment, Shipped, Submission,
};
use crate::link::{BODY_MAX, No, Peer};
use crate::name::Identity;
use crate::openapi;
use crate::store::StoreError;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{delete, get, post, put};
use axum::{Extension, Json, Router};
use std::sync::Arc;

type Shared = Arc<Domain>;

/// All routes.
pub fn router(domain: Shared) -> Router {
    Router::new()
        .route("/v1/applications", post(grant).get(list))
        .route("/v1/applications/{name}", delete(end))
        .route("/v1/applications/{name}/functions", put(ship))
        .route("/v1/applications/{name}/images/{id}", put(receive))
        .route("/v1/applications/{name}/policy", put(configure))
        .route("/v1/applications/{name}/ready", post(ready))
        .route("/v1/nodes", get(nodes))
        .route("/v1/consent/{data}", put(consent))
        .route("/openapi.json", get(|| async { Json(openapi::domain()) }))
        .fallback(|| async { No::new(StatusCode::NOT_FOUND, "there is no such path", "see /openapi.json") })
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(domain)
}

impl From<DomainError> for No {
    fn from(error: DomainError) -> Self {
        let (status, help) = match &error {
            DomainError::Refused(_) => (StatusCode::FORBIDDEN, "[[grant]] of the domain says what it grants"),
            DomainError::NotGranted(_) => (StatusCode::CONFLICT, "POST /v1/applications asks for access"),
            DomainError::Lacking(_) => {
                (StatusCode::CONFLICT, "add [function.NAME] to the configuration of the proxy")
            }
            DomainError::Down(_) => (
                StatusCode::SERVICE_UNAVAILABLE,
                "`sidetrack fn probe NAME` says more; submit it again when the function is well",
            ),
            DomainError::Image(_) => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "[image] of the domain and of the orchestrator have to mean the same",
            ),
            DomainError::Proxy(_) => {
                (StatusCode::BAD_GATEWAY, "see the log of the domain's agent and of its proxies")
            }
            DomainError::Store(StoreError::Conflict(_)) => {
                (StatusCode::CONFLICT, "another request for this application came first")
            }
            DomainError::Store(_) => (StatusCode::INTERNAL_SERVER_ERROR, "see the log of the domain's agent"),
        };
        Self::new(status, error, help)
    }
}

fn is_orchestrator(domain: &Domain, peer: &Peer) -> Result<(), No> {
    let help = "[orchestrator] of the domain names whom it serves";
    let ours = domain.settings().orchestrator.name == peer.name;
    if ours {
        Ok(())
    } else {
        Err(No::new(StatusCode::FORBIDDEN, format!("'{}' is not our orchestrator", peer.name), help))
    }
}

type Said<T> = Result<Json<T>, No>;

async fn grant(
    State(domain): State<Shared>,
    Extension(peer): Extension<Peer>,
    Json(request): Json<AccessRequest>,
) -> Said<()> {
    is_orchestrator(&domain, &peer)?;
    Ok(Json(domain.grant(request).await?))
}

async fn list(State(domain): State<Shared>, Extension(peer): Extension<Peer>) -> Said<Vec<Held>> {
    if !domain.settings().operators.contains(&peer.name) {
        is_orchestrator(&domain, &peer)?;
    }
    Ok(Json(domain.held().map_err(DomainError::from)?))
}

async fn nodes(State(domain): State<Shared>, Extension(peer): Extension<Peer>) -> Said<Offer> {
    is_orchestrator(&domain, &peer)?;
    Ok(Json(domain.offer().await?))
}

async fn ship(
    State(domain): State<Shared>,
    Extension(peer): Extension<Peer>,
    submission: Submission,
    Json(shipment): Json<Shipment>,
) -> Said<Shipped> {
    is_orchestrator(&domain, &peer)?;
    Ok(Json(domain.ship(&submission, &shipment.functions).await?))
}

async fn receive(
    State(domain): State<Shared>,
    Extension(peer): Extension<Peer>,
    Path((name, id)): Path<(String, String)>,
    Query(identity): Query<Identity>,
    archive: Body,
) -> Said<()> {
    is_orchestrator(&domain, &peer)?;
    Ok(Json(domain.receive(&identity.of(name)?, &id, archive).await?))
}

async fn configure(
    State(domain): State<Shared>,
    Extension(peer): Extension<Peer>,
    submission: Submission,
    Json(configuration): Json<Configuration>,
) -> Said<Configured> {
    is_orchestrator(&domain, &peer)?;
    Ok(Json(domain.configure(&peer.name, &submission, configuration).await?))
}

async fn ready(
    State(domain): State<Shared>,
    Extension(peer): Extension<Peer>,
    submission: Submission,
) -> Said<()> {
    is_orchestrator(&domain, &peer)?;
    Ok(Json(domain.ready(&submission)?))
}

async fn end(
    State(domain): State<Shared>,
    Extension(peer): Extension<Peer>,
    submission: Submission,
) -> Said<Configured> {
    is_orchestrator(&domain, &peer)?;
    Ok(Json(domain.end(&peer.name, &submission).await?))
}

async fn consent(
    State(domain): State<Shared>,
    Extension(peer): Extension<Peer>,
    Path(data): Path<String>,
    Json(change): Json<ConsentChange>,
) -> Said<Configured> {
    if !domain.settings().operators.contains(&peer.name) {
        let help = "add the name to `operators` of the domain";
        return Err(No::new(StatusCode::FORBIDDEN, format!("'{}' may not change consent", peer.name), help));
    }
    Ok(Json(domain.consent(&peer.name, &data, change.consent).await?))
}
