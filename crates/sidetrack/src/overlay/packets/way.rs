//! How caught packets get to the node that delivers them: one trait, a kind of link each.

use super::Interception;
use crate::overlay::datagrams;
use crate::overlay::shared::Shared;
use sidetrack_core::overlay::{NodeId, mss};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::sync::mpsc;

/// See the module.
pub trait Way: Send + Sync {
    /// Whether it leads anywhere now.
    fn stands(&self) -> bool;

    /// Takes a packet and sends it on, or drops it (false); never waits.
    fn take(&self, packet: &[u8]) -> bool;
}

/// By the session itself: recovered on every hop, in order, all packets to one node behind each other.
#[derive(Clone)]
pub struct Reliable {
    /// To the task that writes them into the session.
    pub packets: mpsc::Sender<Vec<u8>>,
    /// Whether the session stands.
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

/// In datagrams: what is lost stays lost, and nothing waits for anything. By the session while datagrams do not arrive.
pub struct BestEffort {
    /// The node that delivers.
    pub to: NodeId,
    /// Whose datagrams.
    pub shared: Arc<Shared>,
    /// Who counts.
    pub interception: Arc<Interception>,
    /// The session: nothing travels without it, nor is delivered.
    pub reliable: Reliable,
}

impl Way for BestEffort {
    fn stands(&self) -> bool {
        self.reliable.stands()
    }

    fn take(&self, packet: &[u8]) -> bool {
        let shrink = |packet: &mut [u8], most| {
            mss::clamp(packet, most);
        };
        match datagrams::send(&self.shared, self.to, packet.to_vec(), shrink) {
            Some(sent) => {
                self.interception.counters.by_datagram.fetch_add(u64::from(sent), Relaxed);
                sent
            }
            None => self.reliable.take(packet),
        }
    }
}
