//! Routes for the overlay.

use super::AdminState;
use super::error::ApiError;
use crate::overlay::{
    BenchView, Entry, GroupView, LinkSetting, LinkSettingView, PER_SECOND_MAX, PacketBenchView, PingView,
    Status, WayView,
};
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use serde::{Deserialize, Serialize};
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service};
use std::sync::Arc;
use std::time::Duration;

fn entry(state: &AdminState) -> Result<Arc<Entry>, ApiError> {
    let none = || {
        let help = "write an [overlay] section, see docs/overlay-protocol.md";
        ApiError::not_found("this sidetrack is not a node of an overlay", help)
    };
    state.control.overlay().ok_or_else(none)
}

pub(super) async fn status(State(state): State<AdminState>) -> Result<Json<Status>, ApiError> {
    let stopping = || ApiError::busy("the overlay is stopping", "ask again when sidetrack runs");
    entry(&state)?.status().await.map(Json).ok_or_else(stopping)
}

pub(super) async fn groups(State(state): State<AdminState>) -> Result<Json<Vec<GroupView>>, ApiError> {
    Ok(Json(entry(&state)?.groups()))
}

/// Whether this node is a member.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupWish {
    member: bool,
}

pub(super) async fn join_group(
    State(state): State<AdminState>,
    Path(group): Path<String>,
    wish: Result<Query<GroupWish>, QueryRejection>,
) -> Result<Json<GroupView>, ApiError> {
    let help = "the path takes member=true or member=false";
    let Query(GroupWish { member }) =
        wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let failed = |error| ApiError::conflict(error, "'sidetrack overlay group ls' shows the groups");
    entry(&state)?.join_group(&group, member).await.map(Json).map_err(failed)
}

/// A service that packets cannot have.
struct NoSuchService;

/// The service of packets. Without a kind: the path that flows take.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PingWish {
    kind: Option<String>,
    dissemination: Option<String>,
    deadline_ms: Option<u32>,
}

impl PingWish {
    /// Returns the service that it names. `None` if it names none.
    ///
    /// # Errors
    /// Fails for a word that is not known, and for a combination that does not exist.
    fn service(&self) -> Result<Option<Service>, NoSuchService> {
        let Some(kind) = &self.kind else {
            let is_empty = self.dissemination.is_none() && self.deadline_ms.is_none();
            return if is_empty { Ok(None) } else { Err(NoSuchService) };
        };
        let kind = LinkKind::named(kind).ok_or(NoSuchService)?;
        let dissemination = self.dissemination.as_deref().unwrap_or("shortest");
        let dissemination = Dissemination::named(dissemination).ok_or(NoSuchService)?;
        let deadline = self.deadline_ms.map(|ms| Duration::from_millis(ms.into()));
        if kind == LinkKind::Reliable {
            // Flows have this kind, over one path.
            let is_plain = dissemination == Dissemination::Shortest && deadline.is_none();
            return if is_plain { Ok(None) } else { Err(NoSuchService) };
        }
        Ok(Some(Service { dissemination, deadline, ..Service::new(kind) }))
    }
}

pub(super) async fn ping(
    State(state): State<AdminState>,
    Path(node): Path<String>,
    wish: Result<Query<PingWish>, QueryRejection>,
) -> Result<Json<PingView>, ApiError> {
    let help = "the path takes kind=reliable, best-effort or real-time; with the last two also dissemination=shortest, \
                duplicate, graph or flood, and deadline_ms";
    let Query(wish) = wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let service = wish
        .service()
        .map_err(|NoSuchService| ApiError::bad_request("there is no such service for packets", help))?;
    let failed = |error| ApiError::conflict(error, "'sidetrack overlay status' shows links and paths");
    let entry = entry(&state)?;
    let pinged = match service {
        Some(service) => entry.ping_by(&node, &service).await,
        None => entry.ping(&node).await,
    };
    pinged.map(Json).map_err(failed)
}

/// The links that packets of a service would use now.
pub(super) async fn way(
    State(state): State<AdminState>,
    Path(node): Path<String>,
    wish: Result<Query<PingWish>, QueryRejection>,
) -> Result<Json<WayView>, ApiError> {
    let help = "the path takes kind=best-effort or real-time, dissemination=shortest, duplicate, graph or flood, and \
                deadline_ms; 'sidetrack overlay status' shows the paths of flows";
    let Query(wish) = wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let service = wish.service().ok().flatten();
    let service =
        service.ok_or_else(|| ApiError::bad_request("there is no such service for packets", help))?;
    let failed = |error| ApiError::conflict(error, "'sidetrack overlay status' shows links and paths");
    entry(&state)?.way(&node, &service).map(Json).map_err(failed)
}

/// The changes to a link.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkWish {
    up: Option<bool>,
    cost_ms: Option<f64>,
    rate_mbit: Option<f64>,
    loss_percent: Option<f64>,
}

pub(super) async fn set_link(
    State(state): State<AdminState>,
    Path(neighbour): Path<String>,
    wish: Result<Query<LinkWish>, QueryRejection>,
) -> Result<Json<LinkSettingView>, ApiError> {
    let help = "the path takes up=true or false, cost_ms, rate_mbit and loss_percent; 0 takes a number back";
    let Query(LinkWish { up, cost_ms, rate_mbit, loss_percent }) =
        wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let setting = LinkSetting { up, cost_ms, rate_mbit, loss_percent };
    setting.check().map_err(|error| ApiError::bad_request(error, help))?;
    let failed = |error| ApiError::conflict(error, "'sidetrack overlay status' shows the links of this node");
    entry(&state)?.set_link(&neighbour, setting).await.map(Json).map_err(failed)
}

/// How to measure a path.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BenchWish {
    seconds: Option<f64>,
    rate_mbit: Option<f64>,
    packets_per_second: Option<u32>,
    kind: Option<String>,
    dissemination: Option<String>,
    deadline_ms: Option<u32>,
}

/// The result of a measurement: of a flow, or of packets.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Measured {
    Flow(BenchView),
    Packets(PacketBenchView),
}

/// Default duration of a measurement, seconds.
const BENCH_SECONDS: f64 = 5.0;

/// Default number of packets per second: that of voice.
const BENCH_PACKETS: u32 = 50;

pub(super) async fn bench(
    State(state): State<AdminState>,
    Path(node): Path<String>,
    wish: Result<Query<BenchWish>, QueryRejection>,
) -> Result<Json<Measured>, ApiError> {
    let help = "the path takes seconds (0.1 to 60); for flows rate_mbit (above 0); with kind=best-effort or real-time \
                packets_per_second (1 to 500), dissemination and deadline_ms";
    let Query(wish) = wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let seconds = wish.seconds.unwrap_or(BENCH_SECONDS);
    let is_fast_enough = wish.rate_mbit.is_none_or(|mbit| mbit > 0.0 && mbit <= 1e6);
    let per_second = wish.packets_per_second.unwrap_or(BENCH_PACKETS);
    let cannot_be = || ApiError::bad_request("a measurement that cannot be", help);
    let is_possible = is_fast_enough && (1..=PER_SECOND_MAX).contains(&per_second);
    if !(0.1..=60.0).contains(&seconds) || !is_possible {
        return Err(cannot_be());
    }
    let BenchWish { rate_mbit, packets_per_second, kind, dissemination, deadline_ms, .. } = wish;
    let service = PingWish { kind, dissemination, deadline_ms }.service();
    let service = service.map_err(|NoSuchService| cannot_be())?;
    let failed = |error| ApiError::conflict(error, "'sidetrack overlay status' shows links and paths");
    let (entry, duration) = (entry(&state)?, Duration::from_secs_f64(seconds));
    let measured = match service {
        Some(service) if rate_mbit.is_none() => {
            entry.bench_packets(&node, &service, duration, per_second).await.map(Measured::Packets)
        }
        None if packets_per_second.is_none() => {
            let rate = rate_mbit.map(|mbit| (mbit * 1e6).ceil() as u64);
            entry.bench(&node, duration, rate).await.map(Measured::Flow)
        }
        // A flow has a rate, and packets have a pace.
        _ => return Err(cannot_be()),
    };
    measured.map(Json).map_err(failed)
}
