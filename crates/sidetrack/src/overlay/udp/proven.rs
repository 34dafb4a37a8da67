//! Flows of UDP among members that lie: they use no session that a relay could refuse. All messages carry a proof of their
//! source. Orders and answers travel in the reliable flows between the two nodes, datagrams by the service of their rule.
//!
//! The node that catches draws an id for what it says to another node, so that the other one can tell a restart.

use super::far::{LOOK, Session};
use super::near::Peer;
use super::{BY_PACKET_MAX, ORDERS_MAX, Outbox, To, Use, Waiting};
use crate::carry::Failure;
use crate::overlay::datagrams;
use crate::overlay::ingress::new_session;
use crate::overlay::shared::Shared;
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Features, OpenUdp, Refusal, Relayed, SessionId};
use sidetrack_core::overlay::service::Trust;
use sidetrack_sys::sync::lock;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::sleep;

/// What a node must understand to deliver flows of UDP for us.
const NEEDED: u32 = Features::TOLERANT | Features::RELIABLE_FLOODS | Features::TOLERANT_FLOWS;

/// Why a further service is refused.
pub(super) const TOO_MANY: &str =
    "too many kinds of intrusion-tolerant packets are in use between these nodes";

/// How long a message waits before it asks again for room in the reliable flow.
const RETRY: Duration = Duration::from_millis(10);

/// Returns the id for what this node says to another one.
///
/// # Errors
/// Fails if that node cannot deliver such flows.
pub(super) fn begin(shared: &Shared, peer: &Peer) -> Result<SessionId, Failure> {
    let failed = |reason, detail: &str| Err(Failure::new(reason, format!("overlay:{}: {detail}", peer.name)));
    let graph = shared.graph.load();
    if !graph.epochs().contains_key(&peer.node) {
        return failed(EndReason::Unreachable, "this node is not in the overlay now");
    }
    if graph.features(peer.node) & NEEDED != NEEDED {
        return failed(EndReason::Unsupported, "this node is too old to deliver flows of UDP with proofs");
    }
    new_session().map_err(|error| Failure::new(EndReason::Internal, error.to_string()))
}

/// Passes what waits on to the other node, until no sender is left.
pub(super) async fn pass(shared: &Shared, to: To, mut waiting: Waiting) {
    while let Some(message) = waiting.next().await {
        // A reliable flow has no pieces.
        if message.len() > BY_PACKET_MAX {
            continue;
        }
        let message = to.ahead_of(&message);
        while !datagrams::send_reliably(shared, to.node, message.clone()) {
            sleep(RETRY).await;
        }
    }
}

/// An order of another node to open an association.
struct Order {
    to: To,
    number: u32,
    open: OpenUdp,
}

/// The orders that came with a proof. The thread that receives them is not one of the event loop.
pub(super) struct Orders {
    sender: mpsc::Sender<Order>,
    receiver: Mutex<Option<mpsc::Receiver<Order>>>,
}

impl Default for Orders {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel(ORDERS_MAX);
        Self { sender, receiver: Mutex::new(Some(receiver)) }
    }
}

/// Handles a message about flows of UDP that `origin` has sent with a proof.
pub(super) fn came(shared: &Shared, origin: NodeId, session: SessionId, message: &[u8]) {
    let to = To { node: origin, what: Use::Delivered, session };
    let udp = &shared.udp;
    match Relayed::parse(message) {
        Ok((number, Relayed::Open(open))) => {
            if udp.orders.sender.try_send(Order { to, number, open: *open }).is_err() {
                refuse(shared, to, number, Refusal::Limit, "too many orders wait at this node");
            }
        }
        // This node has restarted: the other one opens the association again.
        Ok((number, Relayed::Datagram(_))) if !udp.far.knows(origin, session) => {
            refuse(shared, to, number, Refusal::UnknownSession, "");
        }
        _ => {
            udp.far.came(origin, session, message);
        }
    }
}

fn refuse(shared: &Shared, to: To, number: u32, reason: Refusal, detail: &str) {
    let said = Relayed::Refused(reason, detail.to_owned()).to_bytes(number);
    // Without an answer the other node asks again, or gives up.
    let _ = datagrams::send_reliably(shared, to.node, to.ahead_of(&said));
}

/// Opens what other nodes ask for with a proof, without end.
pub(in crate::overlay) async fn serve(shared: Arc<Shared>) {
    let orders = lock(&shared.udp.orders.receiver).take();
    let Some(mut orders) = orders else { return };
    while let Some(Order { to, number, mut open }) = orders.recv().await {
        open.service.trust = Trust::Tolerant;
        if !shared.datagrams.paths.begin(to.node, open.service) {
            refuse(&shared, to, number, Refusal::Limit, TOO_MANY);
            continue;
        }
        let session = shared.udp.far.proven(to, || {
            let (out, waiting) = Outbox::new();
            let session = Arc::new(Session::new(shared.clone(), to, out));
            tokio::spawn(look(Arc::downgrade(&session)));
            let shared = shared.clone();
            tokio::spawn(async move { pass(&shared, to, waiting).await });
            session
        });
        session.open(number, open);
    }
}

/// Ends associations that are over, while their session exists.
async fn look(session: Weak<Session>) {
    loop {
        sleep(LOOK).await;
        let Some(session) = session.upgrade() else { return };
        session.look(Instant::now());
    }
}
