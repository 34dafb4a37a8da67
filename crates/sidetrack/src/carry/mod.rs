//! Carriers: how the bytes get to the destination. Directly, or through hops, each reached through the one before.

mod direct;
mod hops;
mod overlay;
mod resolve;
pub mod stack;

pub use direct::Dialing;
pub use overlay::{OverlayEntry, OverlayOrder};
pub use resolve::resolve;

use crate::reactor::TcpStream;
use sidetrack_core::carrier::{Carrier, Hop};
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::policy::{Carry, Resolve};
use sidetrack_core::socks::v6::{Metadata, StackOption};
use std::net::SocketAddr;

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
    /// The client, for [`Carry::keep_client_address`].
    pub client: SocketAddr,
    /// Stack options a SOCKS6 client asked for towards the server.
    pub stack: &'a [StackOption],
    /// Metadata that came with the request and goes on along the chain.
    pub metadata: Vec<Metadata>,
    /// Marks and congestion control of the sockets we dial with.
    pub dialing: &'a Dialing,
}

/// The path stands.
#[derive(Debug)]
pub struct Carried {
    /// The socket towards the server or the first hop.
    pub stream: TcpStream,
    /// Bytes the server sent already.
    pub early: Vec<u8>,
    /// What the last hop said is bound for us; none if we dialled: then it is the socket's own address.
    pub bound: Option<Destination>,
    /// How many of the client's first bytes went out already.
    pub sent: usize,
    /// Stack options, as they were really used.
    pub stack: Vec<StackOption>,
}

/// Where the client's first bytes come from while the path is made: read late, so that what arrives meanwhile still
/// travels with the first write.
pub trait FirstBytes {
    /// The bytes the client has sent so far, without waiting; they stay held for a carrier that does not send them.
    fn held(&mut self) -> &[u8];
}

/// Makes the path.
///
/// # Errors
/// The reason for the record, naming the hop and the step.
pub async fn carry(order: &Order<'_>, first: &mut impl FirstBytes) -> Result<Carried, Failure> {
    match &order.carry.carrier {
        Carrier::Direct => direct::carry(order, first).await,
        Carrier::Hops(hops) => {
            let destination = match (order.carry.resolve, &order.destination.host) {
                (Resolve::Local, Host::Name(_)) => resolve(&order.destination)
                    .await?
                    .first()
                    .map(|address| Destination::from(*address))
                    .unwrap_or_else(|| order.destination.clone()),
                _ => order.destination.clone(),
            };
            // Boxed: a direct flow's future need not have room for handshakes.
            Box::pin(hops::carry(order, hops, &destination, first)).await
        }
        Carrier::Overlay(node) => Box::pin(overlay::carry(order, node)).await,
    }
}

/// `hop 2 of 3 (socks5://b:1080)`, for details of records.
fn hop_name(index: usize, hops: &[Hop]) -> String {
    format!("hop {} of {} ({})", index + 1, hops.len(), hops[index])
}
