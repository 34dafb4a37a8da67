//! Routes for the profile: how long the data path works at each stage.

use super::error::ApiError;
use crate::live::profile::{self, Stage};
use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Longest measurement, seconds.
const SECONDS_MAX: u64 = 600;
/// Length of a measurement if none is given, seconds.
const SECONDS: u64 = 10;

/// A measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Whether it goes on.
    pub is_running: bool,
    /// How long it has lasted, milliseconds.
    pub lasted_ms: u64,
    /// The stages with events, in the order of the data path.
    pub stages: Vec<StageTime>,
}

/// The time at one stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTime {
    /// The part of the program, and the stage.
    pub stage: String,
    /// How often it was entered; for packets, how many there were.
    pub events: u64,
    /// Time at it, of all threads, nanoseconds. Time at other stages in between does not count.
    pub busy_ns: u64,
}

/// How long to measure.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    seconds: Option<u64>,
}

/// Begins a measurement, which ends by itself.
pub(super) async fn start(asked: Result<Query<Wish>, QueryRejection>) -> Result<Json<Profile>, ApiError> {
    let help = format!("the path takes seconds=1 to seconds={SECONDS_MAX}; default {SECONDS}");
    let Query(wish) = asked.map_err(|rejection| ApiError::bad_request(rejection.body_text(), &help))?;
    let seconds = wish.seconds.unwrap_or(SECONDS);
    if !(1..=SECONDS_MAX).contains(&seconds) {
        return Err(ApiError::bad_request(format!("{seconds} seconds are not allowed"), help));
    }
    let Some(number) = profile::start() else {
        let help = "wait for its end, or end it with DELETE";
        return Err(ApiError::conflict("a profile is being measured", help));
    };
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        profile::stop(Some(number));
    });
    Ok(Json(view()))
}

/// Shows the latest measurement.
pub(super) async fn show() -> Json<Profile> {
    Json(view())
}

/// Ends the measurement.
pub(super) async fn stop() -> Json<Profile> {
    profile::stop(None);
    Json(view())
}

fn view() -> Profile {
    let Some(latest) = profile::latest() else { return Profile::default() };
    let stages = Stage::ALL.into_iter().zip(latest.counts).filter(|(_, busy)| busy.events > 0);
    let stage = |(stage, busy): (Stage, profile::Busy)| StageTime {
        stage: stage.as_str().to_owned(),
        events: busy.events,
        busy_ns: busy.ns,
    };
    Profile {
        is_running: latest.is_running,
        lasted_ms: u64::try_from(latest.lasted.as_millis()).unwrap_or(u64::MAX),
        stages: stages.map(stage).collect(),
    }
}
