//! Follows the changes of keys. After a broken connection it goes on where it stopped, at another member if need be.

use super::client::Client;
use super::wire::{Bytes64, Create, Line, Number, Watch, Watched, after, end_of};
use super::{Event, Revision, own};
use axum::body::Body;
use hyper::body::Body as _;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// Time until a broken watch is begun again.
const AGAIN: Duration = Duration::from_millis(200);
/// A watch without a change for this time is begun again: the member may be cut off without a sign.
const QUIET: Duration = Duration::from_secs(20);
/// Longest line, bytes.
const LINE_MAX: usize = 64 << 20;

/// Why a watch stopped.
enum End {
    /// Begin again.
    Broken,
    /// The receiver is gone or too slow, or etcd no longer has the changes.
    Over,
}

pub(super) struct Watcher {
    client: Arc<Client>,
    prefix: String,
    key: Bytes64,
    /// The revision of the next change.
    next: Revision,
    told: mpsc::Sender<Event>,
}

impl Watcher {
    pub(super) fn new(
        client: Arc<Client>,
        prefix: String,
        key: Bytes64,
        next: Revision,
        told: mpsc::Sender<Event>,
    ) -> Self {
        Self { client, prefix, key, next, told }
    }

    /// Runs until the receiver is gone or has to begin anew.
    pub(super) async fn follow(mut self) {
        let told = self.told.clone();
        let watching = async {
            while let End::Broken = self.once().await {
                sleep(AGAIN).await;
            }
        };
        tokio::select! {
            () = watching => {}
            () = told.closed() => {}
        }
    }

    async fn once(&mut self) -> End {
        let create = Create {
            key: self.key.clone(),
            range_end: end_of(&self.key.0),
            start_revision: Number(self.next),
        };
        let Ok(answer) = self.client.stream("/v3/watch", &Watch { create_request: create }).await else {
            return End::Broken;
        };
        let (mut body, mut held) = (answer.into_body(), Vec::new());
        loop {
            let Ok(Some(bytes)) = timeout(QUIET, piece(&mut body)).await else { return End::Broken };
            held.extend_from_slice(&bytes);
            while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
                let rest = held.split_off(end + 1);
                let line = std::mem::replace(&mut held, rest);
                if let Some(end) = self.take(&line) {
                    return end;
                }
            }
            if held.len() > LINE_MAX {
                return End::Broken;
            }
        }
    }

    /// Handles a line. `Some`: the watch has ended.
    fn take(&mut self, line: &[u8]) -> Option<End> {
        let Ok(Line::<Watched> { result: Some(watched) }) = serde_json::from_slice(line) else {
            return Some(End::Broken);
        };
        if watched.canceled {
            let compacted = watched.compact_revision.0 > 0;
            return Some(if compacted { End::Over } else { End::Broken });
        }
        for change in watched.events {
            let revision = change.kv.mod_revision.0;
            let Some(key) = own(&self.prefix, &change.kv.key) else { continue };
            let entry = (change.kind != "DELETE").then(|| change.kv.entry());
            if self.told.try_send(Event { key, revision, entry }).is_err() {
                return Some(End::Over);
            }
            self.next = self.next.max(after(revision));
        }
        None
    }
}

/// The next bytes of a body.
async fn piece(body: &mut Body) -> Option<axum::body::Bytes> {
    loop {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await?.ok()?;
        if let Ok(bytes) = frame.into_data() {
            return Some(bytes);
        }
    }
}
