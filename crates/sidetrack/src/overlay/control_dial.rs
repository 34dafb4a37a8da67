//! The tasks that dial control connections.

use super::control::Event;
use super::shared::Shared;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::Purpose;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

/// The shortest and longest wait between attempts to dial a neighbour.
const REST_FIRST: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(2);

/// A connection that ended within this time was refused.
const SHORT_LIVED: Duration = Duration::from_millis(100);

/// Keeps a control connection to a neighbour that has an address.
pub(super) async fn dial(
    shared: Arc<Shared>,
    neighbour: NodeId,
    mut connected: watch::Receiver<BTreeSet<NodeId>>,
) {
    let mut rest = REST_FIRST;
    let mut told = String::new();
    loop {
        if connected.wait_for(|connected| !connected.contains(&neighbour)).await.is_err() {
            return;
        }
        let parked = match shared.dial(neighbour, Purpose::Control).await {
            Ok(stream) => stream.park().map_err(anyhow::Error::from),
            Err(error) => Err(error),
        };
        match parked {
            Ok(stream) => {
                let (gone, is_gone) = oneshot::channel();
                let stream = Box::new(stream);
                let event = Event::Connected { neighbour, stream, dialled: true, gone };
                if shared.control.send(event).await.is_err() {
                    return;
                }
                // The sender is dropped when the connection ends, which gives an error here: that is what we wait for.
                let since = Instant::now();
                let _ = is_gone.await;
                told.clear();
                // A neighbour that closes at once rejects us, for example because it keeps the link down.
                let is_refused = since.elapsed() < SHORT_LIVED;
                rest = if is_refused { (rest * 2).min(REST_MAX) } else { REST_FIRST };
                if is_refused {
                    sleep(rest).await;
                }
            }
            Err(error) => {
                let error = format!("{error:#}");
                if error != told {
                    let name = shared.identity.name(neighbour);
                    tracing::warn!(neighbour = %name, %error, "cannot reach a neighbour; trying on");
                    told = error;
                }
                sleep(rest).await;
                rest = (rest * 2).min(REST_MAX);
            }
        }
        sleep(rest.min(REST_FIRST)).await;
    }
}

/// Dials a connection that replaces the control connection of a link, until one is there or the link is gone.
pub(super) async fn redial(shared: Arc<Shared>, neighbour: NodeId, number: u64) {
    loop {
        if let Ok(stream) = shared.dial(neighbour, Purpose::MovedControl).await
            && let Ok(stream) = stream.park()
        {
            let event = Event::Moved { neighbour, stream: Box::new(stream), dialled: true };
            // The control thread has ended if this fails.
            let _ = shared.control.send(event).await;
            return;
        }
        if shared.datagrams.link(neighbour).is_none_or(|link| link.number != number) {
            return;
        }
        sleep(REST_FIRST).await;
    }
}
