//! UDP flows: the driver of the associations in core.
//!
//! A UDP listener has one task for each of its sockets, and each worker has one socket. The task receives, asks the
//! table, and sends, in batches and without allocating for a datagram. Each association has a connected socket to its
//! server, whose readiness wakes this one task ([`ready`]). No datagram starts a task; only a name to resolve does.

mod association;
mod ready;

use crate::intercept::{Catches, Listening};
use crate::reactor::{self, UdpSocket};
use crate::worker::Worker;
use association::Associations;
use sidetrack_core::association::{Config, Filtering};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::watch;

/// Batches that the task takes from one socket before it looks at the others.
const ROUNDS: usize = 4;

/// Serves the datagrams of one socket of a listener until `stop` becomes true or its sender is dropped. Its associations
/// end then.
pub async fn serve(
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    socket: std::net::UdpSocket,
    mut stop: watch::Receiver<bool>,
) {
    let Catches::Reverse(target) = &listening.catches else { return };
    let Some(server) = target.server_for(None).cloned() else { return };
    let socket = match UdpSocket::new(socket) {
        Ok(socket) => socket,
        Err(error) => {
            tracing::error!(listener = %listening.name, %error, "cannot watch the listener");
            return;
        }
    };
    let limits = worker.config().limits;
    let config = Config {
        // A connected socket receives from its server only.
        filtering: Filtering::AddressAndPortDependent,
        max: limits.max_associations,
        per_client: limits.max_associations.div_ceil(2),
        idle: Duration::from_millis(limits.udp_idle_timeout_ms),
        lifetime: limits.lifetime_ms.map(Duration::from_millis),
        ..Config::default()
    };
    let mut associations = Associations::new(worker, listening, socket, server, config);
    loop {
        let at = associations.deadline();
        tokio::select! {
            biased;
            changed = stop.changed() => match changed {
                Ok(()) if !*stop.borrow() => {}
                _ => break,
            },
            () = poll_fn(|cx| associations.poll(cx)) => {}
            () = until(at) => associations.tick(),
        }
    }
    associations.close();
    // Close the socket before `stop` is dropped: the task that waits for `stop` must find the address free.
    drop(associations);
    drop(stop);
}

/// Waits until this time. `None`: for ever.
async fn until(at: Option<std::time::Instant>) {
    match at {
        Some(at) => {
            let _ = reactor::timeout_at(at, poll_fn(|_: &mut Context<'_>| Poll::<()>::Pending)).await;
        }
        None => poll_fn(|_: &mut Context<'_>| Poll::Pending).await,
    }
}
