//! One task per flow: from an accepted connection to the one record of its end.
//!
//! Interceptor, policy and carrier are asked in turn ([`Setup`]); then the [`pump::Pump`] moves the bytes. What the
//! making of a path needs is in a box that is gone when the long part of the flow's life begins.

mod client;
mod farewell;
mod lane;
mod probe;
pub mod pump;
mod setup;
mod watch;

pub use client::{Client, Sniffed};
pub use lane::allow_pipes;
pub use setup::{Connect, undecided};
pub use watch::Watched;

use crate::http;
use crate::intercept::Catches;
use crate::intercept::Listening;
use crate::live::{Ended, LiveFlow, Slot};
use crate::reactor::TcpStream;
use crate::worker::{Admission, Worker};
use pump::Pump;
use setup::{Setup, SetupEnd};
use sidetrack_core::flow::EndReason;
use sidetrack_core::policy::Carry;
use std::net::SocketAddr;
use std::sync::Arc;

/// A flow's entry in its worker's ledger; leaves it exactly once, also when the task is dropped.
pub struct Entry {
    worker: Arc<Worker>,
    live: Arc<LiveFlow>,
    slot: Option<Slot>,
}

impl Entry {
    /// Enters a flow that was caught just now.
    pub fn new(worker: &Arc<Worker>) -> Self {
        let live = Arc::new(LiveFlow::new(worker.next_flow_id()));
        let slot = worker.ledger.enter(live.clone());
        Self { worker: worker.clone(), live, slot: Some(slot) }
    }

    /// The flow.
    pub fn live(&self) -> &Arc<LiveFlow> {
        &self.live
    }

    /// Its end; only the first one counts.
    pub fn end(&mut self, reason: EndReason, detail: Option<String>) {
        if let Some(slot) = self.slot.take() {
            let duration = self.live.age();
            let detail = detail.map(String::into_boxed_str);
            self.worker.ledger.leave(slot, Ended { flow: self.live.clone(), reason, detail, duration });
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.end(EndReason::Shutdown, None);
    }
}

/// Serves one accepted connection to its end.
pub async fn serve(worker: Arc<Worker>, listening: Arc<Listening>, stream: TcpStream, peer: SocketAddr) {
    let admission = match Admission::ask(&worker, peer.ip()) {
        Ok(admission) => admission,
        Err(detail) => return shed(&worker, &listening, stream, peer, detail),
    };
    if matches!(listening.catches, Catches::Http(_)) {
        // Boxed: other flows need not have room for requests.
        return Box::pin(http::serve(worker, listening, Client::new(stream), peer, admission)).await;
    }
    let entry = Entry::new(&worker);
    carry_on(Tunnel { worker, listening, peer, connect: None }, Client::new(stream), entry).await;
    drop(admission);
}

/// A flow that is led by [`Setup`] and moved by [`Pump`].
pub struct Tunnel {
    /// The worker.
    pub worker: Arc<Worker>,
    /// What caught it.
    pub listening: Arc<Listening>,
    /// The client.
    pub peer: SocketAddr,
    /// What the client asked for by CONNECT; none where the interceptor finds it out.
    pub connect: Option<Connect>,
}

/// Makes the path, moves the bytes, and ends the flow.
pub async fn carry_on(tunnel: Tunnel, mut client: Client, mut entry: Entry) {
    let Tunnel { worker, listening, peer, connect } = tunnel;
    // Boxed, so that the memory goes back before the long part of a flow's life begins.
    let setup = Setup::new(&worker, &listening, &entry.live, peer, connect);
    let made = Box::pin(setup.run(&mut client)).await;
    if entry.live.decided().is_none() {
        entry.live.decide(setup::undecided(&listening, peer));
    }
    match made {
        SetupEnd::Ready(ready) => {
            let early_up = client.take_held();
            let pump = Pump::new(
                (client.stream, ready.server),
                (early_up, ready.early),
                ready.config,
                entry.live.clone(),
                worker.clock,
            );
            let part_of = ready.session;
            let ending = pump.await;
            drop(part_of);
            entry.end(ending.reason, ending.error.map(|error| error.to_string()));
        }
        SetupEnd::Answered(reason, detail) => {
            entry.end(reason, detail);
            client.close_after_answer().await;
        }
        SetupEnd::Failed(failure) => {
            client.reset();
            entry.end(failure.reason, Some(failure.detail));
        }
    }
}

/// Moves the bytes of a connection that changed its protocol with the server.
pub async fn upgraded(
    worker: &Worker,
    mut client: Client,
    (server, early): (TcpStream, Vec<u8>),
    carry: &Carry,
    mut entry: Entry,
) {
    let early_up = client.take_held();
    let sides = (client.stream, server);
    let bounds = setup::bounds(&worker.config().limits, carry);
    let ending = Pump::new(sides, (early_up, early), bounds, entry.live.clone(), worker.clock).await;
    entry.end(ending.reason, ending.error.map(|error| error.to_string()));
}

/// Refuses a flow there is no room for; it still gets its record.
fn shed(worker: &Arc<Worker>, listening: &Listening, stream: TcpStream, peer: SocketAddr, detail: String) {
    let mut entry = Entry::new(worker);
    entry.live.decide(setup::undecided(listening, peer));
    Client::new(stream).reset();
    entry.end(EndReason::Limit, Some(detail));
}
