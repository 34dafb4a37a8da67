//! The thread of flows: accepts connections of neighbours, and runs the tasks of sessions and relayed flows.

use super::control::Event;
use super::ingress::{self, Request};
use super::moved::{self, End, MovedSession};
use super::shared::Shared;
use super::{circuit, deliver, paced, places, pool, stream, udp};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::Purpose;
use std::future::Future;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// How long a listener waits when the process has no descriptor for the next connection.
const ACCEPT_REST: Duration = Duration::from_millis(10);

/// The task of the thread of flows.
pub(super) async fn serve(
    shared: Arc<Shared>,
    listeners: Vec<TcpListener>,
    (mut orders, mut coming): (mpsc::Receiver<Request>, mpsc::Receiver<Option<MovedSession>>),
    ways: Vec<impl Future<Output = ()> + Send + 'static>,
    mut stop: watch::Receiver<bool>,
) {
    // It is set once: this is the only thread of flows.
    let _ = shared.flows.set(tokio::runtime::Handle::current());
    for (node, _) in shared.identity.members().filter(|(node, _)| *node != shared.identity.own()) {
        tokio::spawn(pool::maintain(shared.clone(), node));
    }
    tokio::spawn(paced::serve(shared.clone()));
    tokio::spawn(udp::serve(shared.clone()));
    for way in ways {
        tokio::spawn(way);
    }
    for listener in listeners {
        match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => {
                tokio::spawn(accept(shared.clone(), listener));
            }
            Err(error) => tracing::error!(%error, "cannot watch the overlay's listener"),
        }
    }
    loop {
        tokio::select! {
            request = orders.recv() => match request {
                Some(request) => {
                    tokio::spawn(ingress::run(shared.clone(), request));
                }
                None => return,
            },
            Some(came) = coming.recv() => match came {
                Some(session) => go_on(&shared, session),
                None => shared.sessions.set_coming(false),
            },
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

/// Continues a session of another process.
fn go_on(shared: &Arc<Shared>, session: MovedSession) {
    let shared = shared.clone();
    let MovedSession { id, peer, attempts, end, spread, state, socket } = session;
    let rest = moved::Rest { id, peer, attempts, spread, state, socket };
    match end {
        End::Near(order) => drop(tokio::spawn(ingress::run_again(shared, order, rest))),
        End::Far(record) => drop(tokio::spawn(deliver::deliver_again(shared, record, rest))),
    }
}

async fn accept(shared: Arc<Shared>, listener: tokio::net::TcpListener) {
    let identity = &shared.identity;
    let members = identity.members().filter_map(|(node, _)| identity.member(node));
    let addresses = members.flat_map(|member| member.addresses.clone());
    let places = places::Places::new(addresses.map(|address| address.ip()));
    loop {
        match listener.accept().await {
            Ok((tcp, peer)) => {
                // A flood is closed at once. Otherwise neighbours would wait behind it in the kernel's accept queue.
                let Some(place) = places.take(peer.ip()) else {
                    shared.counters.strangers.fetch_add(1, Relaxed);
                    continue;
                };
                let shared = shared.clone();
                tokio::spawn(async move {
                    let accepted = shared.accept(tcp).await;
                    drop(place);
                    match accepted {
                        Ok((stream, neighbour, purpose)) => arrived(shared, stream, neighbour, purpose).await,
                        Err(error) => {
                            shared.counters.strangers.fetch_add(1, Relaxed);
                            tracing::debug!(%peer, error = format!("{error:#}"), "a connection that is not a neighbour's");
                        }
                    }
                });
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
}

/// Handles a connection that a neighbour has dialled.
async fn arrived(shared: Arc<Shared>, stream: stream::Stream, neighbour: NodeId, purpose: Purpose) {
    match purpose {
        Purpose::Control | Purpose::MovedControl => match stream.park() {
            Ok(stream) => {
                let (gone, _) = oneshot::channel();
                let stream = Box::new(stream);
                let event = match purpose {
                    Purpose::MovedControl => Event::Moved { neighbour, stream, dialled: false },
                    _ => Event::Connected { neighbour, stream, dialled: false, gone },
                };
                // An error only means that the control thread has ended.
                let _ = shared.control.send(event).await;
            }
            Err(error) => tracing::error!(%error, "cannot hand over a control connection"),
        },
        Purpose::FromDialer => circuit::wait_and_serve(shared, stream, neighbour).await,
        Purpose::FromAcceptor => shared.pool.put(neighbour, stream),
    }
}
