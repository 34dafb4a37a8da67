//! Echo requests of operators over the links of a service (`overlay ping --kind`).

use super::way::Plan;
use crate::overlay::shared::Shared;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::service::{Dissemination, Service};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;
use tokio::sync::oneshot;

/// Most requests that wait for an answer.
const WAITING_MAX: usize = 1024;

/// The numbers of these requests begin here; the program's own have lower ones.
const FIRST: u64 = 1 << 63;

#[derive(Default)]
struct Waiting {
    requests: BTreeMap<u64, (NodeId, oneshot::Sender<()>)>,
    count: u64,
}

/// The requests that wait for an answer.
#[derive(Default)]
pub(crate) struct Pings(Mutex<Waiting>);

/// A request that was sent.
pub(crate) struct Pinged {
    /// The links that it could use.
    pub links: Vec<(NodeId, NodeId)>,
    /// Resolves when the answer comes.
    pub answer: oneshot::Receiver<()>,
}

impl Pings {
    /// Handles an answer. Returns false if its number is of another kind of request.
    pub(super) fn answered(&self, from: NodeId, number: u64) -> bool {
        if number < FIRST {
            return false;
        }
        let mut waiting = lock(&self.0);
        if waiting.requests.get(&number).is_some_and(|(to, _)| *to == from)
            && let Some((_, answer)) = waiting.requests.remove(&number)
        {
            // The asking task may have given up.
            let _ = answer.send(());
        }
        true
    }
}

fn plan(shared: &Shared, to: NodeId, service: &Service) -> Result<Plan, String> {
    let plan = Plan::new(&shared.graph.load(), shared.identity.own(), to, service);
    let name = shared.identity.name(to);
    plan.ok_or_else(|| format!("there is no way to {name} for packets: {}", service.words()))
}

/// Returns the links that packets of this service to a node would use now, and the dissemination that they would name.
///
/// # Errors
/// Returns the reason in words.
pub(crate) fn links(shared: &Shared, to: NodeId, service: &Service) -> Result<Planned, String> {
    let plan = plan(shared, to, service)?;
    Ok((plan.links(), plan.named()))
}

/// The links of packets, and the dissemination that they name.
pub(crate) type Planned = (Vec<(NodeId, NodeId)>, Dissemination);

/// Sends an echo request of `bytes` bytes over the links that packets of this service to a node would use.
///
/// # Errors
/// Returns the reason in words.
pub(crate) fn ping(shared: &Shared, to: NodeId, service: &Service, bytes: usize) -> Result<Pinged, String> {
    let plan = plan(shared, to, service)?;
    let links = plan.links();
    let (answer, answered) = oneshot::channel();
    let number = {
        let mut waiting = lock(&shared.datagrams.paths.pings.0);
        waiting.requests.retain(|_, (_, answer)| !answer.is_closed());
        if waiting.requests.len() >= WAITING_MAX {
            return Err("too many pings at a time".to_owned());
        }
        waiting.count = waiting.count.wrapping_add(1);
        let number = FIRST | waiting.count;
        waiting.requests.insert(number, (to, answer));
        number
    };
    if plan.echo(shared, service, number, bytes) {
        Ok(Pinged { links, answer: answered })
    } else {
        Err(format!("no datagram could be sent to {}", shared.identity.name(to)))
    }
}
