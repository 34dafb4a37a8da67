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

use crate::carry::Stream;
use crate::intercept::Listening;
use crate::live::{Ended, LiveFlow, Slot};
use crate::worker::{Admission, Worker};
use pump::Pump;
use setup::{Setup, SetupEnd};
use sidetrack_core::flow::EndReason;
use std::net::SocketAddr;
use std::sync::Arc;

/// A flow's entry in its worker's ledger; leaves it exactly once, also when the task is dropped.
struct Entry {
    worker: Arc<Worker>,
    live: Arc<LiveFlow>,
    slot: Option<Slot>,
}

impl Entry {
    fn new(worker: &Arc<Worker>) -> Self {
        let live = Arc::new(LiveFlow::new(worker.next_flow_id()));
        let slot = worker.ledger.enter(live.clone());
        Self { worker: worker.clone(), live, slot: Some(slot) }
    }

    fn end(&mut self, reason: EndReason, detail: Option<String>) {
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

/// A client that has come.
#[derive(Debug)]
pub struct Arrived {
    /// What its bytes come over.
    pub stream: Stream,
    /// Who is at the other end of the connection.
    pub peer: SocketAddr,
    /// Bytes of it that were read already.
    pub held: Vec<u8>,
}

/// Serves one client to its end.
pub async fn serve(worker: Arc<Worker>, listening: Arc<Listening>, arrived: Arrived) {
    let Arrived { stream, peer, held } = arrived;
    let admission = match Admission::ask(&worker, peer.ip()) {
        Ok(admission) => admission,
        Err(detail) => return shed(&worker, &listening, stream, peer, detail),
    };
    let mut entry = Entry::new(&worker);
    let mut client = Client::new(stream);
    client.put_first(held);
    // Boxed, so that the memory goes back before the long part of a flow's life begins.
    let made = Box::pin(Setup::new(&worker, &listening, &entry.live, peer).run(&mut client)).await;
    if entry.live.decided().is_none() {
        entry.live.decide(setup::undecided(&listening, peer));
    }
    match made {
        SetupEnd::Ready(ready) => {
            let early_up = client.take_held();
            let (live, clock) = (entry.live.clone(), worker.clock);
            let early = (early_up, ready.early);
            let part_of = ready.session;
            let ending = match (client.stream, ready.server) {
                (Stream::Tcp(client), Stream::Tcp(server)) => {
                    Pump::new((client, server), early, ready.config, live, clock).await
                }
                // Boxed, so that sockets alone decide how much memory a flow between sockets has.
                sides => Box::pin(Pump::new(sides, early, ready.config, live, clock)).await,
            };
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
    drop(admission);
}

/// Refuses a flow there is no room for; it still gets its record.
fn shed(worker: &Arc<Worker>, listening: &Listening, stream: Stream, peer: SocketAddr, detail: String) {
    let mut entry = Entry::new(worker);
    entry.live.decide(setup::undecided(listening, peer));
    Client::new(stream).reset();
    entry.end(EndReason::Limit, Some(detail));
}
