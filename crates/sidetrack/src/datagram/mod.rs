//! UDP flows: the driver of the associations in core.
//!
//! Clients reach a table in two ways. A UDP listener has one task for each of its sockets, and each worker has one socket
//! ([`serve`]): it stands for a server, or gets datagrams to any destination, which rules of the packet filter lead to it
//! ([`captured`]). A SOCKS client that has asked for UDP ASSOCIATE has a task and a socket of its own ([`mod@relay`]), maybe on a
//! port that all share ([`shared`]).
//! Besides, a client of HTTP that has asked for CONNECT-UDP has one flow in its connection, without a table ([`mod@tunnelled`]).
//!
//! The task receives, asks the table, and sends, in batches and without allocating for a datagram. Servers are reached by
//! a connected socket for each association, or by a path that all associations of a client share ([`path`]). Their
//! readiness wakes this one task ([`ready`]). No datagram starts a task; only a name to resolve or a hop to ask does.

mod anew;
mod association;
mod captured;
mod clients;
mod moved;
mod path;
mod ready;
mod relay;
mod room;
mod servers;
mod shared;
mod tunnelled;

pub use relay::relay;
pub use shared::share;
pub use tunnelled::tunnelled;

use crate::intercept::{Catches, Listening};
use crate::reactor::{self, UdpSocket};
use crate::worker::Worker;
use association::Associations;
use captured::Captured;
use clients::Clients;
use sidetrack_core::association::{Config, Filtering};
use sidetrack_core::flow::EndReason;
use sidetrack_sys::sockopt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::watch;

/// Batches that the task takes from one socket before it looks at the others.
const ROUNDS: usize = 4;

/// Room for datagrams that wait in one socket of a listener, bytes. The kernel allows at most `net.core.rmem_max`.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Serves the datagrams of one socket of a listener until `stop` becomes true or its sender is dropped. Its associations
/// end then.
pub async fn serve(
    worker: Arc<Worker>,
    listening: Arc<Listening>,
    socket: std::net::UdpSocket,
    mut stop: watch::Receiver<bool>,
) {
    let clients = match &listening.catches {
        Catches::Reverse(target) => match target.server_for(None) {
            Some(server) => Clients::Asking { server: server.clone() },
            None => return,
        },
        _ => match Captured::new(&listening, worker.clock.now()) {
            Some(captured) => Clients::Captured(captured),
            None => return,
        },
    };
    // First datagrams of a burst wait here while their associations begin. Without the room, fewer can wait.
    let _ = sockopt::set_receive_buffer(&socket, RECEIVE_BUFFER);
    let number = sockopt::cookie(&socket).ok();
    let socket = match UdpSocket::new(socket) {
        Ok(socket) => socket,
        Err(error) => {
            tracing::error!(listener = %listening.name, %error, "cannot watch the listener");
            return;
        }
    };
    let max = worker.config().limits.max_associations;
    // A server that was not asked is not heard, with a connected socket or without one.
    let config =
        Config { max, per_client: max.div_ceil(2), ..config(&worker, Filtering::AddressAndPortDependent) };
    let is_run = matches!(listening.catches, Catches::Run(_));
    let shared = worker.clone();
    let mut associations = Associations::new(worker, listening, socket, clients, config);
    let waiting = number.map(|number| shared.resting().take(number)).unwrap_or_default();
    waiting.into_iter().for_each(|moved| associations.adopt(moved));
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
    if shared.resting().is_on() {
        shared.resting().put(associations.take_apart());
    }
    // The end of a command is the ordinary end of its flows.
    associations.close(if is_run { EndReason::Ok } else { EndReason::Shutdown });
    // Close the socket before `stop` is dropped: the task that waits for `stop` must find the address free.
    drop(associations);
    drop(stop);
}

/// Returns the limits of a table in this configuration.
fn config(worker: &Worker, filtering: Filtering) -> Config {
    let limits = worker.config().limits;
    Config {
        filtering,
        idle: Duration::from_millis(limits.udp_idle_timeout_ms),
        lifetime: limits.lifetime_ms.map(Duration::from_millis),
        ..Config::default()
    }
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
