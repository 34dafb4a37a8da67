//! Carriers: how the bytes get to the destination. Directly, or through hops, each reached through the one before.

mod direct;
pub mod gate;
pub mod hops;
mod overlay;
mod resolve;
pub mod stack;
mod stream;
pub mod tls;
pub mod tunnel;
pub mod warm;

pub use direct::Dialing;
pub use gate::{Admitted, Gate};
pub use overlay::{OverlayEntry, OverlayOrder};
pub use resolve::resolve;
pub use stream::{Stream, Wire};

use crate::live::Taken;
use sidetrack_core::carrier::{Carrier, Hop};
use sidetrack_core::flow::{Destination, EndReason, Host, HostName};
use sidetrack_core::policy::{Carry, Resolve};
use sidetrack_core::socks::v6::{Metadata, StackOption};
use std::net::SocketAddr;
use std::task::{Context, Poll};

/// Why a flow could not be carried, in the closed list's word and in words that name hop, step and code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct Failure {
    /// The reason the flow ends with.
    pub reason: EndReason,
    /// Which hop, step and code.
    pub detail: String,
}

impl Failure {
    /// A failure with its words.
    pub fn new(reason: EndReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }
}

/// One request to carry a flow.
#[derive(Debug)]
pub struct Order<'a> {
    /// What the rule says.
    pub carry: &'a Carry,
    /// Where to, after all rewriting.
    pub destination: Destination,
    /// The client, for [`Carry::keep_client_address`] and for who carries on.
    pub client: SocketAddr,
    /// The host name the client meant, where it is known.
    pub host: Option<&'a HostName>,
    /// Stack options a SOCKS6 client asked for towards the server.
    pub stack: &'a [StackOption],
    /// Metadata that came with the request and goes on along the chain.
    pub metadata: Vec<Metadata>,
    /// Who is asked about the addresses that the destination leads to; none: the configuration names it.
    pub gate: Option<Gate<'a>>,
    /// Marks and congestion control of the sockets we dial with.
    pub dialing: &'a Dialing,
    /// The tunnels of this worker.
    pub tunnels: &'a tunnel::Tunnels,
    /// The connections of this worker that wait for a flow.
    pub warm: &'a warm::Warm,
}

/// The path stands.
#[derive(Debug)]
pub struct Carried {
    /// What leads to the server or the first hop.
    pub stream: Stream,
    /// Bytes the server sent already.
    pub early: Vec<u8>,
    /// What the last hop said is bound for us; none if we dialled: then it is the socket's own address.
    pub bound: Option<Destination>,
    /// How many of the client's first bytes went out already.
    pub sent: usize,
    /// Stack options, as they were really used.
    pub stack: Vec<StackOption>,
    /// What carries it, where the carrier leaves that open.
    pub taken: Option<Taken>,
    /// The admitted address that the last hop was told to dial. None: a hop resolves the name, or there is no hop and the
    /// socket itself knows its peer.
    pub leads_to: Option<SocketAddr>,
}

/// Where the client's first bytes come from while the path is made: read late, so that what arrives meanwhile still
/// travels with the first write.
pub trait FirstBytes {
    /// The bytes the client has sent so far, without waiting; they stay held for a carrier that does not send them.
    fn held(&mut self) -> &[u8];

    /// Ready when there are more of them than before. Pending for ever once as many are held as may be, and after the
    /// client's FIN or end: then what is held is all.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<()>;
}

/// Makes the path.
///
/// # Errors
/// The reason for the record, naming the hop and the step.
pub async fn carry(order: &Order<'_>, first: &mut impl FirstBytes) -> Result<Carried, Failure> {
    if order.carry.carrier == Carrier::Direct {
        return direct::carry(order, first).await;
    }
    // Boxed: a direct flow's future need not have room for handshakes.
    Box::pin(carry_on(order, first)).await
}

/// Has another node dial.
async fn carry_on(order: &Order<'_>, first: &mut impl FirstBytes) -> Result<Carried, Failure> {
    let destination = resolved(order).await?;
    let leads_to = destination.socket_addr();
    let carried = match &order.carry.carrier {
        Carrier::Direct => direct::carry(order, first).await?,
        Carrier::Hops(hops) => hops::carry(order, hops, &destination, first).await?,
        Carrier::Overlay(node) => overlay::carry(order, node, destination).await?,
        Carrier::Tunnel(name) => tunnel::carry(order, name, destination, first).await?,
    };
    Ok(Carried { leads_to, ..carried })
}

/// Whether a rule asks for Multipath TCP: towards the server, or towards the first hop.
pub fn asks_multipath(carry: &Carry) -> bool {
    let first_hop = match &carry.carrier {
        Carrier::Hops(hops) => hops.first(),
        Carrier::Direct | Carrier::Overlay(_) | Carrier::Tunnel(_) => None,
    };
    carry.mptcp || first_hop.is_some_and(|hop| hop.mptcp)
}

impl Order<'_> {
    /// Whether Multipath TCP was asked for: towards the server, or towards the first hop.
    pub fn asks_multipath(&self) -> bool {
        asks_multipath(self.carry) || self.stack.contains(&StackOption::Multipath(true))
    }

    /// Those of the addresses of the destination that may be dialled.
    fn admit(&self, addresses: Vec<SocketAddr>) -> Result<Vec<Admitted>, Failure> {
        match &self.gate {
            Some(gate) => gate.admit_all(self.name(), addresses),
            None => Ok(gate::configured(addresses)),
        }
    }

    /// Whether this one address of the destination may be dialled.
    fn admit_one(&self, to: SocketAddr) -> Result<Admitted, Failure> {
        match &self.gate {
            Some(gate) => gate.admit(self.name(), to),
            None => Ok(Admitted::configured(to)),
        }
    }

    /// The name of the destination.
    const fn name(&self) -> Option<&HostName> {
        match &self.destination.host {
            Host::Name(name) => Some(name),
            Host::Ip(_) => None,
        }
    }
}

/// Returns the destination to send to the next hop: an admitted address if we resolve names, otherwise unchanged. A name that
/// goes on is resolved by the last hop, whose rules decide; only of `localhost` we know where it leads.
async fn resolved(order: &Order<'_>) -> Result<Destination, Failure> {
    let to = &order.destination;
    match &to.host {
        Host::Name(_) if order.carry.resolve == Resolve::Local => {
            let admitted = order.admit(resolve(to).await?)?;
            let first = admitted.first().map(|admitted| admitted.address());
            return Ok(first.map_or_else(|| to.clone(), Destination::from));
        }
        Host::Name(name) if name.is_localhost() => drop(order.admit(resolve(to).await?)?),
        Host::Name(_) => {}
        Host::Ip(ip) => drop(order.admit_one(SocketAddr::new(*ip, to.port))?),
    }
    Ok(to.clone())
}

/// `hop 2 of 3 (socks5://b:1080)`, for details of records.
fn hop_name(index: usize, hops: &[Hop]) -> String {
    format!("hop {} of {} ({})", index + 1, hops.len(), hops[index])
}
