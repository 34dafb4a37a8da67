//! The overlay carrier: sends the flow to another node of the overlay, which delivers it.

use super::datagrams::Datagrams;
use super::{Carried, Failure, Order};
use crate::live::Spread;
use crate::reactor::TcpStream;
use sidetrack_core::carrier::OverlayCarrier;
use sidetrack_core::flow::{Destination, EndReason, Host, HostName};
use std::fmt::Debug;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

/// A flow for the overlay to carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayOrder {
    /// The node that delivers it, by name, and how the flow uses the paths to it.
    pub carrier: OverlayCarrier,
    /// The destination.
    pub destination: Destination,
    /// The application that opened the flow.
    pub client: SocketAddr,
    /// The host name, if known.
    pub host: Option<HostName>,
}

/// A session that is open.
#[derive(Debug)]
pub struct Entered {
    /// A non-blocking socket; the overlay carries its other end.
    pub stream: std::net::TcpStream,
    /// Counts what a flow over several paths does with them.
    pub spread: Option<Arc<Spread>>,
}

/// A session, once it is open.
pub type Entering = Pin<Box<dyn Future<Output = Result<Entered, Failure>> + Send>>;

/// A path for datagrams, once it is open.
pub type Associating = Pin<Box<dyn Future<Output = Result<Box<dyn Datagrams>, Failure>> + Send>>;

/// The entry into the overlay.
pub trait OverlayEntry: Debug + Send + Sync {
    /// Opens a session. FIN, resets and speed on its socket are those of the application at the far end.
    fn open(&self, order: OverlayOrder) -> Entering;

    /// Opens a path for the datagrams of one client. The destination of the order is the first one.
    fn associate(&self, order: OverlayOrder) -> Associating;
}

/// Carries a flow over the overlay.
pub(super) async fn carry(
    order: &Order<'_>,
    carrier: &OverlayCarrier,
    destination: Destination,
) -> Result<Carried, Failure> {
    let failed = |error| Failure::new(EndReason::Internal, format!("the socket to the overlay: {error}"));
    let Entered { stream, spread } = entry(order)?.open(to_node(order, carrier, destination)).await?;
    let stream = TcpStream::new(stream.into()).map_err(failed)?;
    Ok(Carried {
        stream: stream.into(),
        early: Vec::new(),
        bound: None,
        sent: 0,
        stack: Vec::new(),
        taken: None,
        leads_to: None,
        spread,
    })
}

/// Opens a path over the overlay for the datagrams of the order's client.
///
/// # Errors
/// Fails if the node cannot be reached, or refuses the destination.
pub(super) async fn associate(
    order: &Order<'_>,
    carrier: &OverlayCarrier,
) -> Result<Box<dyn Datagrams>, Failure> {
    entry(order)?.associate(to_node(order, carrier, order.destination.clone())).await
}

fn entry<'a>(order: &'a Order<'_>) -> Result<&'a Arc<dyn OverlayEntry>, Failure> {
    let detail = "this process is not a node of an overlay: use 'sidetrack up'";
    order.dialing.overlay.as_ref().ok_or_else(|| Failure::new(EndReason::Unreachable, detail))
}

fn to_node(order: &Order<'_>, carrier: &OverlayCarrier, destination: Destination) -> OverlayOrder {
    let host = match &order.destination.host {
        Host::Name(name) => Some(name.clone()),
        Host::Ip(_) => order.host.cloned(),
    };
    OverlayOrder { carrier: carrier.clone(), destination, client: order.client, host }
}
