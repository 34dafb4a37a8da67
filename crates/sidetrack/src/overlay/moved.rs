//! Sessions on their way to another process of this node. An end has no path then, and no task reads its application's socket; the
//! far node waits for a path, as after a cut link.

use super::delivered::Delivered;
use crate::carry::OverlayOrder;
use crate::live::{Decided, Ledger, LiveFlow, Spared, Spread};
use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use sidetrack_core::carrier::OverlayCarrier;
use sidetrack_core::flow::FlowId;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::SessionId;
use sidetrack_core::overlay::session::{Mode, PATHS_MAX};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

/// Most bytes of the state of a session: both buffers, and pieces behind gaps.
pub const STATE_MAX: usize = 256 << 20;

/// A flow for the overlay, as another process reads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OrderPart {
    node: String,
    mode: String,
    paths: u8,
    destination: String,
    client: SocketAddr,
    host: Option<String>,
}

impl OrderPart {
    pub(super) fn of(order: &OverlayOrder) -> Self {
        let OverlayOrder { carrier, destination, client, host } = order;
        Self {
            node: carrier.node.to_string(),
            mode: carrier.mode.name().to_owned(),
            paths: carrier.paths,
            destination: destination.to_string(),
            client: *client,
            host: host.as_ref().map(ToString::to_string),
        }
    }

    pub(super) fn order(&self) -> anyhow::Result<OverlayOrder> {
        let modes = [Mode::Shortest, Mode::Stripe, Mode::Duplicate];
        let mode = modes.into_iter().find(|mode| mode.name() == self.mode).context("a mode of paths")?;
        let carrier = OverlayCarrier::one_path(self.node.as_str().into());
        Ok(OverlayOrder {
            carrier: OverlayCarrier { mode, paths: self.paths, ..carrier },
            destination: self.destination.parse().context("a destination")?,
            client: self.client,
            host: self.host.as_deref().and_then(|host| host.parse().ok()),
        })
    }
}

/// What another process must know about a session, except its state. A field that is added must have a default: the release before
/// does not send it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionFacts {
    /// The number of the session.
    id: [u8; 16],
    /// The node at the other end.
    peer: u64,
    /// The latest attempt to open each path.
    attempts: Vec<u32>,
    /// What was asked for, at the near end.
    order: Option<OrderPart>,
    /// What a flow over several paths has done with them: paths that were open, and bytes sent on each.
    #[serde(default)]
    spread: Option<(u64, Vec<u64>)>,
}

/// The end of a session that is in this node.
pub(super) enum End {
    /// A flow that this node sends over the overlay.
    Near(OverlayOrder),
    /// A flow that this node delivers.
    Far(Box<Delivered>),
}

/// A session without a task.
pub struct MovedSession {
    pub(super) id: SessionId,
    /// The node at the other end.
    pub(super) peer: NodeId,
    /// The latest attempt to open each path.
    pub(super) attempts: Vec<u32>,
    pub(super) end: End,
    /// Counts what a flow over several paths does with them, at the near end.
    pub(super) spread: Option<Arc<Spread>>,
    pub(super) state: Vec<u8>,
    pub(super) socket: TcpStream,
}

/// The same without its end.
pub(super) struct Rest {
    pub id: SessionId,
    pub peer: NodeId,
    pub attempts: Vec<u32>,
    pub spread: Option<Arc<Spread>>,
    pub state: Vec<u8>,
    pub socket: TcpStream,
}

impl MovedSession {
    /// Returns what another process must know.
    pub fn facts(&self) -> SessionFacts {
        let order = match &self.end {
            End::Near(order) => Some(OrderPart::of(order)),
            End::Far(_) => None,
        };
        let attempts = self.attempts.clone();
        let spread = self.spread.as_ref().map(|spread| spread.counts());
        SessionFacts { id: self.id.0, peer: self.peer.0, attempts, order, spread }
    }

    /// Returns the state of its end, and the socket of its application.
    pub fn state(&self) -> (&[u8], &TcpStream) {
        (&self.state, &self.socket)
    }

    /// Returns the flow that is delivered, whose record is written here. `None`: a worker does that.
    pub fn flow(&self) -> Option<&Arc<LiveFlow>> {
        match &self.end {
            End::Near(_) => None,
            End::Far(delivered) => Some(delivered.live()),
        }
    }

    /// Returns what counts its paths, and the address of the worker's end of its connection.
    pub(super) fn spread(&self) -> Option<(SocketAddr, Arc<Spread>)> {
        Some((self.socket.peer_addr().ok()?, self.spread.clone()?))
    }

    /// Forgets it: another process continues it, and writes its record.
    pub fn forget(self) {
        if let End::Far(delivered) = self.end {
            delivered.forget();
        }
    }

    /// A session that another process has begun. `flow`: its number, counts and decision if it is delivered here, and the ledger
    /// that it enters.
    ///
    /// # Errors
    /// Returns what is wrong with it.
    pub fn again(
        facts: &SessionFacts,
        (state, socket): (Vec<u8>, TcpStream),
        flow: Option<(u64, Spared, Decided)>,
        ledger: &Arc<Ledger>,
    ) -> anyhow::Result<Self> {
        let end = match (&facts.order, flow) {
            (Some(order), _) => End::Near(order.order()?),
            (None, Some((id, spared, decided))) => {
                End::Far(Box::new(Delivered::again(ledger, (FlowId(id), &spared), decided)))
            }
            (None, None) => anyhow::bail!("a session without its flow"),
        };
        let attempts = facts.attempts.iter().copied().take(usize::from(PATHS_MAX)).collect();
        socket.set_nonblocking(true).context("the socket of a session")?;
        let spread = facts.spread.as_ref().map(|counts| Arc::new(Spread::again(counts)));
        Ok(Self { id: SessionId(facts.id), peer: NodeId(facts.peer), attempts, end, spread, state, socket })
    }
}
