//! Carriers: how bytes get to the destination. Directly, or through hops, each reached through the one before.

mod client;
pub mod datagrams;
mod direct;
pub mod gate;
pub mod h2;
pub mod h3;
pub mod hops;
mod memory;
mod overlay;
mod resolve;
mod shared;
pub mod stack;
mod stream;
pub mod tls;
pub mod tunnel;
pub mod warm;

pub use client::{Client, HELD_MAX, Incoming, Presence, Sniffed};
pub use direct::Dialing;
pub use gate::{Admitted, Gate};
pub use memory::{Cutter, Memory};
pub use overlay::{Associating, Entered, Entering, OverlayEntry, OverlayOrder};
pub use resolve::resolve;
pub use stream::{Stream, Wire};

use crate::live::{LiveFlow, Spread, Step, Taken, legs};
use crate::reactor::TcpStream;
use sidetrack_core::carrier::{Carrier, Hop};
use sidetrack_core::flow::{Destination, EndReason, Host, HostName, Side};
use sidetrack_core::hold::Answer;
use sidetrack_core::policy::{Carry, Resolve};
use sidetrack_core::socks::v6::{Metadata, StackOption};
use sidetrack_sys::sockopt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Why a flow could not be carried: the end reason, and a text that names hop, step and code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct Failure {
    /// The end reason of the flow.
    pub reason: EndReason,
    /// Details: which hop, step and code.
    pub detail: String,
    /// The answer of the far side, where it is more exact than the end reason.
    pub told: Option<Answer>,
}

impl Failure {
    /// A failure with its details.
    pub fn new(reason: EndReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into(), told: None }
    }

    /// The same, with the answer of the far side.
    #[must_use]
    pub fn telling(self, told: Option<Answer>) -> Self {
        Self { told, ..self }
    }
}

/// The order to carry one flow.
#[derive(Debug)]
pub struct Order<'a> {
    /// The settings of the rule.
    pub carry: &'a Carry,
    /// The destination, after all rewriting.
    pub destination: Destination,
    /// The client, for [`Carry::keep_client_address`] and for the next hop.
    pub client: SocketAddr,
    /// The host name that the client meant, if known.
    pub host: Option<&'a HostName>,
    /// Stack options that a SOCKS6 client asked for, for the leg towards the server.
    pub stack: &'a [StackOption],
    /// Metadata that came with the request and is passed on along the chain.
    pub metadata: Vec<Metadata>,
    /// Checks the addresses that the destination resolves to. `None`: the configuration names the destination.
    pub gate: Option<Gate<'a>>,
    /// Mark, own addresses and overlay for dialling.
    pub dialing: &'a Dialing,
    /// The tunnels of this worker.
    pub tunnels: &'a tunnel::Tunnels,
    /// The warm connections of this worker.
    pub warm: &'a warm::Warm,
    /// The flow whose decision trace gets the steps. `None`: they are not kept.
    pub traced: Option<&'a LiveFlow>,
}

/// A path that is set up.
#[derive(Debug)]
pub struct Carried {
    /// The connection to the server or the first hop.
    pub stream: Stream,
    /// Bytes that the server has already sent.
    pub early: Vec<u8>,
    /// The address that the last hop has bound for us. `None` if we dialled: then it is the socket's own
    /// address.
    pub bound: Option<Destination>,
    /// How many of the client's first bytes were already sent.
    pub sent: usize,
    /// Stack options with the values in force.
    pub stack: Vec<StackOption>,
    /// What carries it, if the carrier leaves a choice.
    pub taken: Option<Taken>,
    /// The admitted address that the last hop was told to dial. `None`: a hop resolves the name, or there is no
    /// hop and the socket itself has the peer's address.
    pub leads_to: Option<SocketAddr>,
    /// Counts what a flow over several paths of the overlay does with them.
    pub spread: Option<Arc<Spread>>,
}

/// The client's first bytes during the set-up. They are read late, so that bytes that arrive meanwhile can be
/// sent with the first write.
pub trait FirstBytes {
    /// Returns the bytes that the client has sent so far, without waiting. They stay buffered if a carrier does
    /// not send them.
    fn held(&mut self) -> &[u8];

    /// Ready when there are more bytes than before. Pending for ever when the buffer is full and after the
    /// client's FIN or end: then the buffered bytes are all there are.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<()>;
}

/// Sets up the path.
///
/// # Errors
/// Fails with the reason for the record, which names the hop and the step.
pub async fn carry(order: &Order<'_>, first: &mut impl FirstBytes) -> Result<Carried, Failure> {
    if order.carry.carrier == Carrier::Direct {
        return direct::carry(order, first).await;
    }
    // Boxed, so that a direct flow's future does not reserve room for handshakes.
    Box::pin(carry_on(order, first)).await
}

/// Sets up a path on which another node dials the destination.
async fn carry_on(order: &Order<'_>, first: &mut impl FirstBytes) -> Result<Carried, Failure> {
    let destination = resolved(order).await?;
    let leads_to = destination.socket_addr();
    let carried = match &order.carry.carrier {
        Carrier::Direct => direct::carry(order, first).await?,
        Carrier::Hops(hops) => hops::carry(order, hops, &destination, first).await?,
        Carrier::Overlay(carrier) => overlay::carry(order, carrier, destination).await?,
        Carrier::Tunnel(name) => tunnel::carry(order, name, destination, first).await?,
    };
    if matches!(order.carry.carrier, Carrier::Overlay(_) | Carrier::Tunnel(_)) {
        order.done(Step::FarSide);
    }
    Ok(Carried { leads_to, ..carried })
}

/// Whether a rule asks for Multipath TCP, towards the server or towards the first hop.
pub fn asks_multipath(carry: &Carry) -> bool {
    let first_hop = match &carry.carrier {
        Carrier::Hops(hops) => hops.first(),
        Carrier::Direct | Carrier::Overlay(_) | Carrier::Tunnel(_) => None,
    };
    carry.mptcp || first_hop.is_some_and(|hop| hop.mptcp)
}

impl Order<'_> {
    /// Whether the rule or the client asks for Multipath TCP, towards the server or towards the first hop.
    pub fn asks_multipath(&self) -> bool {
        asks_multipath(self.carry) || self.stack.contains(&StackOption::Multipath(true))
    }

    /// Notes a step of the set-up in the flow's decision trace.
    fn done(&self, step: Step) {
        self.traced.inspect(|flow| flow.step(step));
    }

    /// Notes to which addresses a name was resolved.
    fn resolved_to(&self, addresses: &[SocketAddr]) {
        if let Some(flow) = self.traced {
            flow.traced(|trace| trace.resolved_to(addresses.iter().map(SocketAddr::ip)));
            flow.step(Step::Resolved);
        }
    }

    /// Notes which of these addresses has answered.
    fn connected(&self, stream: &TcpStream, addresses: &[Admitted]) {
        let Some(flow) = self.traced else { return };
        legs::note(flow, Side::Server, stream);
        let dialled = match addresses {
            [one] => Some(one.address()),
            _ => sockopt::peer_address(stream).ok(),
        };
        flow.traced(|trace| trace.dialled = dialled);
        flow.step(Step::Connected);
    }

    /// Returns the order for another destination, which the configuration names.
    fn again(&self, destination: &Destination) -> Order<'_> {
        let Order { carry, client, host, stack, dialing, tunnels, warm, .. } = *self;
        let (destination, metadata) = (destination.clone(), self.metadata.clone());
        let (gate, traced) = (None, None);
        Order { carry, destination, client, host, stack, metadata, gate, dialing, tunnels, warm, traced }
    }

    /// Returns those addresses of the destination that may be dialled.
    fn admit(&self, addresses: Vec<SocketAddr>) -> Result<Vec<Admitted>, Failure> {
        match &self.gate {
            Some(gate) => gate.admit_all(self.name(), addresses),
            None => Ok(gate::configured(addresses)),
        }
    }

    /// Checks whether this one address of the destination may be dialled.
    fn admit_one(&self, to: SocketAddr) -> Result<Admitted, Failure> {
        match &self.gate {
            Some(gate) => gate.admit(self.name(), to),
            None => Ok(Admitted::configured(to)),
        }
    }

    /// The name in the destination, if it has one.
    const fn name(&self) -> Option<&HostName> {
        match &self.destination.host {
            Host::Name(name) => Some(name),
            Host::Ip(_) => None,
        }
    }
}

/// Returns the destination to send to the next hop: an admitted address if we resolve names, otherwise
/// unchanged. A name that is passed on is resolved by the last hop, whose rules decide. For `localhost` the
/// address is known, so it is checked here.
///
/// # Errors
/// The name does not resolve, or no address may be dialled.
pub async fn resolved(order: &Order<'_>) -> Result<Destination, Failure> {
    let to = &order.destination;
    if to.zone != 0 {
        let why = format!("{to} is an address of a link of this host: no other host can dial it");
        return Err(Failure::new(EndReason::Unreachable, why));
    }
    match &to.host {
        Host::Name(_) if order.carry.resolve == Resolve::Local => {
            let addresses = resolve(to).await?;
            order.resolved_to(&addresses);
            let admitted = order.admit(addresses)?;
            let first = admitted.first().map(|admitted| admitted.address());
            return Ok(first.map_or_else(|| to.clone(), Destination::from));
        }
        Host::Name(name) if name.is_localhost() => drop(order.admit(resolve(to).await?)?),
        Host::Name(_) => {}
        Host::Ip(ip) => drop(order.admit_one(SocketAddr::new(*ip, to.port))?),
    }
    Ok(to.clone())
}

/// Returns `hop 2 of 3 (socks5://b:1080)`, for details in records.
fn hop_name(index: usize, hops: &[Hop]) -> String {
    format!("hop {} of {} ({})", index + 1, hops.len(), hops[index])
}
