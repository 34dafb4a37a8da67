//! Running flows as they change: `GET /v1/live`, for the page and other screens. The stream is one of server-sent events
//! (HTML Living Standard, Sec. 9.2).
//!
//! One task brings the table up to date once a second while there is a viewer. Each viewer has a task that asks the table
//! for the next part when the viewer has taken the last one. The cost is that of the update once, and of what each viewer reads.

mod row;
mod table;
mod viewer;

use super::AdminState;
use super::error::ApiError;
use super::flows::{Asked, filter};
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde::Deserialize;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use table::Table;
use tokio::sync::{Mutex, mpsc, watch};
use viewer::Viewer;

/// Time between two updates of the table.
const EVERY: Duration = Duration::from_secs(1);

/// Most viewers at a time.
const VIEWERS_MAX: usize = 128;

/// The table and its viewers.
#[derive(Debug)]
pub(super) struct Watch {
    table: Mutex<Table>,
    viewers: AtomicUsize,
    /// Whether a task brings it up to date.
    is_updated: AtomicBool,
    /// The version of the table.
    updates: watch::Sender<u64>,
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            viewers: AtomicUsize::new(0),
            is_updated: AtomicBool::new(false),
            updates: watch::Sender::new(0),
        }
    }
}

impl Watch {
    /// Whether the caller has to start the updates.
    fn must_update(&self) -> bool {
        !self.is_updated.swap(true, SeqCst)
    }

    /// Whether there are no viewers. Then the next one starts the updates.
    fn may_rest(&self) -> bool {
        if self.viewers.load(SeqCst) > 0 {
            return false;
        }
        self.is_updated.store(false, SeqCst);
        // A viewer that came in between has not started them, if they ran then.
        self.viewers.load(SeqCst) == 0 || !self.must_update()
    }
}

/// A viewer's part in the count of viewers.
struct Seat(Arc<Watch>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.viewers.fetch_sub(1, SeqCst);
    }
}

/// What a viewer asks for.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Interest {
    filter: Option<String>,
}

impl AdminState {
    /// Takes a seat. The first viewer starts the updates.
    fn sit(&self) -> Option<Seat> {
        let before = self.watch.viewers.fetch_add(1, SeqCst);
        let seat = Seat(self.watch.clone());
        if before >= VIEWERS_MAX {
            return None;
        }
        if self.watch.must_update() {
            tokio::spawn(keep_up_to_date(self.clone()));
        }
        Some(seat)
    }

    /// Brings the table up to date. False: the last viewer has left, and the table is empty again.
    async fn update(&self) -> bool {
        let state = self.clone();
        let update = tokio::task::spawn_blocking(move || {
            state.control.look_at_kernel_flows();
            let mut table = state.watch.table.blocking_lock();
            if state.watch.may_rest() {
                *table = table.emptied();
                return None;
            }
            table.update(&state.ledgers, &state.feed, Instant::now());
            Some(table.version)
        });
        // After a panic the viewers see no more changes.
        let version = update.await.ok().flatten();
        version.is_some_and(|version| {
            self.watch.updates.send_replace(version);
            true
        })
    }
}

async fn keep_up_to_date(state: AdminState) {
    let mut clock = tokio::time::interval(EVERY);
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        clock.tick().await;
        if !state.update().await {
            return;
        }
    }
}

pub(super) async fn follow(
    State(state): State<AdminState>,
    query: Asked<Interest>,
) -> Result<Response, ApiError> {
    let help = "the path takes filter=… (percent-encoded)";
    let Query(interest) = query.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let filter = filter(interest.filter.as_deref())?;
    let seat = state.sit().ok_or_else(|| {
        ApiError::busy(format!("{VIEWERS_MAX} others watch the flows already"), "close one of these pages")
    })?;
    // One part at a time: the next one is made when this one is being sent.
    let (sender, parts) = mpsc::channel(1);
    tokio::spawn(show(seat, Viewer::new(filter), sender));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::new(Parts(parts))).into_response())
}

/// Tells a viewer everything until it leaves.
async fn show(seat: Seat, mut viewer: Viewer, sender: mpsc::Sender<Bytes>) {
    let mut updates = seat.0.updates.subscribe();
    if sender.send(Viewer::hello().into()).await.is_err() {
        return;
    }
    loop {
        let begun = viewer.begin(&*seat.0.table.lock().await);
        if let Some(event) = begun.filter(|event| !event.is_empty())
            && sender.send(event.into()).await.is_err()
        {
            return;
        }
        loop {
            // First the room, then the part: so a slow viewer gets what is true when it reads.
            let Ok(room) = sender.reserve().await else { return };
            let Some(part) = viewer.next(&*seat.0.table.lock().await) else { break };
            room.send(part.into());
        }
        tokio::select! {
            () = sender.closed() => return,
            changed = updates.changed() => if changed.is_err() { return },
        }
    }
}

/// A body that ends with its viewer.
struct Parts(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}
