//! How caught packets get to the node that delivers them: one trait, with one implementation for each kind of link.

use super::Interception;
use crate::overlay::datagrams::{self, Use};
use crate::overlay::shared::Shared;
use sidetrack_core::overlay::frame::Protocol;
use sidetrack_core::overlay::service::Service;
use sidetrack_core::overlay::{NodeId, mss};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::sync::mpsc;

/// Sends packets to one node.
pub(super) trait Way: Send + Sync {
    /// True if packets can be sent now.
    fn stands(&self) -> bool;

    /// Sends a packet. Returns false if the packet is dropped; never waits.
    fn take(&self, packet: &[u8]) -> bool;
}

/// Sends packets in the session itself: each hop repairs losses, and all packets to one node stay in order.
#[derive(Clone)]
pub(super) struct Reliable {
    /// To the task that writes them into the session.
    pub packets: mpsc::Sender<Vec<u8>>,
    /// True while the session is open.
    pub stands: Arc<AtomicBool>,
}

impl Way for Reliable {
    fn stands(&self) -> bool {
        self.stands.load(Relaxed)
    }

    fn take(&self, packet: &[u8]) -> bool {
        self.packets.try_send(packet.to_vec()).is_ok()
    }
}

/// Sends packets in datagrams, and no packet waits for another: best effort, or real time. While datagrams do not arrive,
/// it uses the session.
pub(super) struct ByDatagram {
    /// The node that delivers the packets.
    pub to: NodeId,
    /// How the packets travel.
    pub service: Service,
    /// The state with the datagrams.
    pub shared: Arc<Shared>,
    /// The state with the counters.
    pub interception: Arc<Interception>,
    /// The session: without it, no packet is sent or delivered.
    pub reliable: Reliable,
}

impl Way for ByDatagram {
    fn stands(&self) -> bool {
        self.reliable.stands()
    }

    fn take(&self, packet: &[u8]) -> bool {
        let shrink = |packet: &mut [u8], most| {
            mss::clamp(packet, most);
        };
        match datagrams::send(&self.shared, (self.to, Use::Packets), &self.service, packet.to_vec(), shrink) {
            Some(sent) => {
                self.interception.counters.by_datagram.fetch_add(u64::from(sent > 0), Relaxed);
                sent > 0
            }
            None => self.reliable.take(packet),
        }
    }
}

/// Sends packets with a proof of their source. There is no session: a relay that lies could refuse it.
pub(super) struct Vouched {
    /// The node that delivers the packets.
    pub to: NodeId,
    /// How the packets travel.
    pub service: Service,
    /// The state with the datagrams.
    pub shared: Arc<Shared>,
}

impl Way for Vouched {
    fn stands(&self) -> bool {
        let now = self.shared.clock.now();
        self.shared.datagrams.paths.is_proven_by(self.to, &self.service, now)
    }

    fn take(&self, packet: &[u8]) -> bool {
        let shrink = |packet: &mut [u8], most| {
            mss::clamp(packet, most);
        };
        datagrams::send_vouched(&self.shared, self.to, &self.service, Protocol::Ip, packet.to_vec(), shrink)
            > 0
    }
}
