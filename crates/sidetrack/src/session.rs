//! One task per flow: from an accepted connection to the one record of its end.
//!
//! Interceptor, policy and carrier are asked in turn ([`Setup`]); then the [`pump::Pump`] moves the bytes. What the
//! making of a path needs is in a box that is gone when the long part of the flow's life begins.

mod client;
mod containers;
mod farewell;
mod lane;
mod outgoing;
mod probe;
pub mod pump;
mod relay;
mod setup;
mod watch;

pub use client::{Client, Sniffed};
pub use lane::allow_pipes;
pub use setup::{Connect, ESTABLISHED, undecided};
pub use watch::Watched;

use crate::carry::Stream;
use crate::http;
use crate::intercept::{Catches, Listening};
use crate::live::{Clock, Ended, LiveFlow, Slot};
use crate::worker::{Admission, Worker};
use pump::Pump;
use relay::Relay;
use setup::{Setup, SetupEnd};
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::EndReason;
use sidetrack_core::policy::Carry;
use sidetrack_core::splice;
use std::net::SocketAddr;
use std::sync::Arc;

/// A flow's entry in its worker's ledger; leaves it exactly once, also when the task is dropped.
pub struct Entry {
    worker: Arc<Worker>,
    live: Arc<LiveFlow>,
    slot: Option<Slot>,
    /// What the record says beside how it ended.
    note: Option<String>,
}

impl Entry {
    /// Enters a flow that was caught just now.
    pub fn new(worker: &Arc<Worker>) -> Self {
        let live = Arc::new(LiveFlow::new(worker.next_flow_id()));
        let slot = worker.ledger.enter(live.clone());
        Self { worker: worker.clone(), live, slot: Some(slot), note: None }
    }

    /// The flow.
    pub fn live(&self) -> &Arc<LiveFlow> {
        &self.live
    }

    /// What is to be known of it beside how it ends.
    pub fn note(&mut self, text: String) {
        self.note = Some(text);
    }

    /// Its end; only the first one counts.
    pub fn end(&mut self, reason: EndReason, detail: Option<String>) {
        if let Some(slot) = self.slot.take() {
            let duration = self.live.age();
            let detail = match (self.note.take(), detail) {
                (Some(note), Some(detail)) => Some(format!("{note}; {detail}")),
                (note, detail) => note.or(detail),
            };
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
    let mut client = Client::new(stream);
    client.put_first(held);
    // Boxed: other flows need not have room for requests.
    if let Catches::Http(proxy) = &listening.catches {
        let proxy = proxy.clone();
        return Box::pin(http::serve(worker, listening, proxy, client, peer, admission)).await;
    }
    if let Some(proxy) = listening.http.clone() {
        return Box::pin(http::intercepted(worker, listening, proxy, client, peer, admission)).await;
    }
    let entry = Entry::new(&worker);
    carry_on(Passage { worker, listening, peer, connect: None }, client, entry).await;
    drop(admission);
}

/// A flow that is led by [`Setup`] and moved by [`Pump`].
pub struct Passage {
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
pub async fn carry_on(passage: Passage, mut client: Client, mut entry: Entry) {
    let Passage { worker, listening, peer, connect } = passage;
    // Boxed, so that the memory goes back before the long part of a flow's life begins.
    let setup = Setup::new(&worker, &listening, &entry.live, peer, connect);
    let made = Box::pin(setup.run(&mut client)).await;
    if entry.live.decided().is_none() {
        entry.live.decide(setup::undecided(&listening, peer));
    }
    match made {
        SetupEnd::Ready(ready) => {
            let early = (client.take_held(), ready.early);
            let part_of = ready.session;
            let sides = (client.stream, ready.server);
            let containers::Way { chain, joints, note } = ready.way;
            let moving = Moving { early, config: ready.config, chain };
            let ending = if joints.is_empty() {
                moved(sides, moving, &entry.live, worker.clock).await
            } else {
                // Boxed, so that flows without containers need not have room for them.
                Box::pin(Relay::new(sides, moving, joints, entry.live.clone(), worker.clock)).await
            };
            drop(part_of);
            entry.end(ending.reason, ending.error.map(|error| error.to_string()).or(note));
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

/// What the moving of bytes begins with.
struct Moving {
    /// Bytes read from the client and from the server already.
    early: (Vec<u8>, Vec<u8>),
    config: splice::Config,
    /// The functions on the way.
    chain: Option<Box<Chain>>,
}

/// Moves the bytes between two sides.
async fn moved(sides: (Stream, Stream), moving: Moving, live: &Arc<LiveFlow>, clock: Clock) -> pump::Ending {
    let live = live.clone();
    let Moving { early, config, chain } = moving;
    match sides {
        (Stream::Tcp(client), Stream::Tcp(server)) => {
            Pump::new((client, server), early, config, live, clock).through(chain).await
        }
        // Boxed, so that sockets alone decide how much memory a flow between sockets has.
        sides => Box::pin(Pump::new(sides, early, config, live, clock).through(chain)).await,
    }
}

/// Moves the bytes of a connection that changed its protocol with the server.
pub async fn upgraded(
    worker: &Worker,
    mut client: Client,
    (server, early): (Stream, Vec<u8>),
    carry: &Carry,
    mut entry: Entry,
) {
    let early = (client.take_held(), early);
    let config = setup::bounds(&worker.config().limits, carry);
    let moving = Moving { early, config, chain: None };
    let ending = moved((client.stream, server), moving, &entry.live, worker.clock).await;
    entry.end(ending.reason, ending.error.map(|error| error.to_string()));
}

/// Refuses a flow there is no room for; it still gets its record.
fn shed(worker: &Arc<Worker>, listening: &Listening, stream: Stream, peer: SocketAddr, detail: String) {
    let mut entry = Entry::new(worker);
    entry.live.decide(setup::undecided(listening, peer));
    Client::new(stream).reset();
    entry.end(EndReason::Limit, Some(detail));
}
