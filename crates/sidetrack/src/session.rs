//! One task per flow: from an accepted connection to the one record of its end.
//!
//! [`setup::Setup`] asks interceptor, policy and carrier in turn; then the [`pump::Pump`] moves the bytes.

mod associating;
mod binding;
mod carrying;
mod containers;
mod farewell;
mod held;
mod hello;
mod lane;
mod moved;
mod near;
mod outgoing;
mod parts;
mod probe;
pub mod pump;
pub mod room;
mod setup;
mod watch;

pub use associating::{Asking, AskingTunnel, Associate, NearSide, Relays, Tunnel};
pub use carrying::{Carrying, Passage, carry_on};
pub use held::serve_held;
pub use lane::{Lane, allow_pipes};
pub use moved::{adopt, come_back};
pub use setup::{Connect, ESTABLISHED, Refusals, undecided};
pub use watch::Watched;

use crate::carry::{Client, Failure, Stream};
use crate::intercept::Listening;
use crate::live::profile::Stage;
use crate::live::{Ended, LiveFlow, Slot};
use crate::reactor;
use crate::worker::{Admission, Arrived, Handed, Wired, Worker};
use carrying::Moving;
use containers::{offered, search};
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::policy::Carry;
use std::net::SocketAddr;
use std::sync::Arc;

/// A flow's entry in its worker's ledger. It leaves the ledger exactly once, also if the task is dropped.
pub struct Entry {
    worker: Arc<Worker>,
    live: Arc<LiveFlow>,
    slot: Option<Slot>,
    /// A text for the record besides the end reason.
    note: Option<String>,
}

impl Entry {
    /// Enters a flow that was just captured.
    pub fn new(worker: &Arc<Worker>) -> Self {
        let live = Arc::new(LiveFlow::new(worker.next_flow_id()));
        let slot = worker.ledger.enter(live.clone());
        Self { worker: worker.clone(), live, slot: Some(slot), note: None }
    }

    /// The flow.
    pub fn live(&self) -> &Arc<LiveFlow> {
        &self.live
    }

    /// Adds a text to the record, besides how the flow ends.
    pub fn note(&mut self, text: String) {
        self.note = Some(text);
    }

    /// The flow goes on without its task. Returns what may keep something until its end.
    pub(super) fn wired(&mut self, handed: Handed, detail: Option<String>) -> Option<Arc<Wired>> {
        let slot = self.slot.take()?;
        let notes = [self.note.take(), detail].into_iter().flatten();
        let detail = notes.reduce(|one, other| one + "; " + &other);
        Some(handed.go_on(&self.live, (&self.worker.ledger, slot), detail))
    }

    /// Another process goes on with the flow: no record is written here.
    fn give_away(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.worker.ledger.forget(slot);
        }
    }

    /// Ends the flow. Only the first call counts.
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

/// Serves one client until its end, in a task of its own. `relays` serve the flows of UDP that clients ask for.
pub fn serve(worker: Arc<Worker>, listening: Arc<Listening>, arrived: Arrived, relays: Relays) {
    let Some(Admitted { client, peer, admission }) = admit(&worker, &listening, arrived) else { return };
    let entry = Entry::new(&worker);
    if listening.mptcp {
        entry.live.speaks_multipath(Side::Client, client.stream.speaks_multipath());
    }
    let mut carrying = {
        let passage = Passage { worker, listening, peer, connect: None, held: None, relays: Some(relays) };
        carry_on(passage, client, entry)
    };
    reactor::spawn(async move {
        // Await by reference: awaiting by value would store the future twice in this task.
        let wired = (&mut carrying).await;
        keep(wired, admission);
    });
}

/// Keeps a flow's place among the flows for as long as it is on the wire, if it is there.
pub fn keep(wired: Option<Arc<Wired>>, admission: impl Send + 'static) {
    if let Some(wired) = wired {
        wired.keep(Box::new(admission));
    }
}

/// A client that no limit turns away.
#[derive(Debug)]
pub struct Admitted {
    /// The client.
    pub client: Client,
    /// The address of the peer.
    pub peer: SocketAddr,
    /// Its place among the flows, for as long as it is kept.
    pub admission: Admission,
}

/// Admits a client that has just connected. `None`: a limit turned it away, which has its record.
pub fn admit(worker: &Arc<Worker>, listening: &Listening, arrived: Arrived) -> Option<Admitted> {
    let _span = Stage::Admit.enter();
    let Arrived { stream, peer, held } = arrived;
    let is_own = || {
        let is_here = |address: SocketAddr| address.ip().to_canonical().is_loopback();
        // A connection that the kernel redirects on this host comes to the loopback address, whatever its source
        // is.
        is_here(peer) || listening.proxy_from.contains(peer.ip()) || stream.local_address().is_ok_and(is_here)
    };
    let admission = match Admission::ask(worker, peer.ip(), is_own) {
        Ok(admission) => admission,
        Err(detail) => {
            shed(worker, listening, stream, peer, detail);
            return None;
        }
    };
    let mut client = Client::new(stream);
    client.put_first(held);
    Some(Admitted { client, peer, admission })
}

/// Moves the bytes of a connection after its protocol was upgraded.
pub async fn upgraded(
    worker: &Worker,
    listening: &Listening,
    mut client: Client,
    (server, early): (Stream, Vec<u8>),
    carry: &Carry,
    mut entry: Entry,
) {
    let searched = searched(worker, listening, client.take_held());
    let (chain, held) = match searched {
        Ok(searched) => searched,
        Err(failure) => {
            client.reset();
            return entry.end(failure.reason, Some(failure.detail));
        }
    };
    let config = setup::bounds(&worker.config().limits, carry);
    let moving = Moving { early: (held, early), config, chain, wiring: None };
    let ending = moving.between((client.stream, server), &entry.live, worker.clock).await;
    entry.end(ending.reason, ending.error.map(|error| error.to_string()));
}

/// Searches the client's first bytes after an upgrade for placeholders of secrets. Returns them, and what searches the rest.
fn searched(
    worker: &Worker,
    listening: &Listening,
    held: Vec<u8>,
) -> Result<(Option<Box<Chain>>, Vec<u8>), Failure> {
    let Some(secrets) = listening.secrets() else { return Ok((None, held)) };
    let now = worker.clock.now();
    let mut chain = search(secrets, now)?;
    let held = offered(&mut chain, now, Side::Client, held)?;
    Ok((Some(Box::new(chain)), held))
}

/// Rejects a flow because of a limit. It still gets its record.
fn shed(worker: &Arc<Worker>, listening: &Listening, stream: Stream, peer: SocketAddr, detail: String) {
    tracing::warn!(listener = %listening.name, client = %peer, %detail, "a connection is refused");
    let mut entry = Entry::new(worker);
    entry.live.decide(setup::undecided(listening, peer));
    Client::new(stream).reset();
    entry.end(EndReason::Limit, Some(detail));
}
