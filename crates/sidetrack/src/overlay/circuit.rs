//! Handles a flow that comes from a neighbour: relays it to the next node of its path, or delivers it here.

use super::deliver;
use super::pool;
use super::shared::Shared;
use super::stream::Stream;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Frame, Open, Refusal, Refused};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::timeout;

/// Most time for sending the last frames of a flow.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);

/// Waits until a neighbour sends a flow on this connection. Returns `None` if the connection or the link ended first.
pub(super) async fn wait_for_open(
    shared: &Shared,
    mut stream: Stream,
    from: NodeId,
    number: u64,
) -> Option<(Stream, Box<Open>)> {
    let ends = stream.ends();
    let frame = tokio::select! {
        frame = stream.frame() => frame,
        () = shared.connection_is_cut(from, number, ends) => return None,
    };
    match frame {
        Ok(Frame::Open(open)) => Some((stream, open)),
        Ok(other) => {
            tracing::debug!(from = %shared.identity.name(from), ?other, "instead of a session's opening");
            None
        }
        Err(_) => None,
    }
}

/// Waits for a flow on a connection that a neighbour dialled for its flows, and serves it.
pub(super) async fn wait_and_serve(shared: Arc<Shared>, stream: Stream, from: NodeId) {
    // A neighbour's first connections may be there before its link is up.
    let up = timeout(super::shared::HANDSHAKE_TIMEOUT, shared.link_is_up(from));
    let Ok(number) = up.await else { return };
    if let Some((stream, open)) = wait_for_open(&shared, stream, from, number).await {
        serve(shared, stream, from, open).await;
    }
}

/// Serves a flow that came from a neighbour.
pub(super) async fn serve(shared: Arc<Shared>, stream: Stream, from: NodeId, mut open: Box<Open>) {
    let own = shared.identity.own();
    if open.path.at(open.position) != Some(own) || open.path.before(open.position) != Some(from) {
        return refuse(&shared, stream, Refusal::BadRequest, "the path does not lead here").await;
    }
    open.position += 1;
    match open.path.at(open.position) {
        Some(next) => relay(&shared, stream, from, next, open).await,
        None => deliver::deliver(shared, stream, from, open).await,
    }
}

/// Refuses the session, and closes the connection.
pub(super) async fn refuse(shared: &Shared, mut stream: Stream, reason: Refusal, detail: impl Into<String>) {
    shared.counters.sessions_refused.fetch_add(1, Relaxed);
    let refused = Refused { by: shared.identity.own(), reason, detail: detail.into() };
    let _ = timeout(LAST_WORDS, async {
        // If the neighbour has closed the connection, the refusal is not needed.
        if stream.send(&Frame::Refused(refused)).await.is_ok() {
            stream.close().await;
        }
    })
    .await;
}

async fn relay(shared: &Shared, mut prev: Stream, from: NodeId, to: NodeId, open: Box<Open>) {
    let (Some(from_number), Some(to_number)) = (shared.link(from), shared.link(to)) else {
        let detail = format!("the link to {} is down", shared.identity.name(to));
        return refuse(shared, prev, Refusal::NoLink, detail).await;
    };
    let next = tokio::select! {
        next = pool::take(shared, to) => next,
        () = given_up(&mut prev) => {
            tracing::debug!(from = %shared.identity.name(from), "an opening was given up on its way");
            return;
        }
        () = shared.link_is_down(from, from_number) => return,
    };
    let mut next = match next {
        Ok(next) => next,
        Err(detail) => return refuse(shared, prev, Refusal::NoLink, detail).await,
    };
    shared.counters.relayed.fetch_add(1, Relaxed);
    // Bytes that came right after the opening go on with it.
    let rest = prev.take_rest();
    let begun = next.write_frame(&Frame::Open(open)).and_then(|()| next.write(&rest, &[]));
    if begun.is_ok() {
        let (prev_ends, next_ends) = (prev.ends(), next.ends());
        let mut cut = pin!(async {
            tokio::select! {
                () = shared.connection_is_cut(from, from_number, prev_ends) => {}
                () = shared.connection_is_cut(to, to_number, next_ends) => {}
            }
        });
        poll_fn(|cx| {
            if cut.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            pass(cx, &mut prev, &mut next, shared)
        })
        .await;
    }
    let _ = timeout(LAST_WORDS, async { tokio::join!(prev.close(), next.close()) }).await;
}

/// Waits until the asking node gives up its opening. It then closes the connection, and may send one frame before. It sends
/// nothing else before it has an answer.
async fn given_up(prev: &mut Stream) {
    let _ = prev.frame().await;
}

/// Moves what can be moved both ways; ready when either end is gone.
fn pass(cx: &mut Context<'_>, prev: &mut Stream, next: &mut Stream, shared: &Shared) -> Poll<()> {
    let mut moved = false;
    for result in [prev.poll_pass(cx, next), next.poll_pass(cx, prev)] {
        match result {
            Poll::Ready(Ok(bytes)) => {
                shared.counters.relayed_bytes.fetch_add(bytes, Relaxed);
                moved = true;
            }
            Poll::Ready(Err(_)) => return Poll::Ready(()),
            Poll::Pending => {}
        }
    }
    for stream in [prev, next] {
        if matches!(stream.poll_flush(cx), Poll::Ready(Err(_))) {
            return Poll::Ready(());
        }
    }
    if moved {
        cx.waker().wake_by_ref();
    }
    Poll::Pending
}
