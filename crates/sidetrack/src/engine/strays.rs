//! Hands over answers of servers that arrived at the wrong worker. AF_XDP receives frames where the card puts them, and
//! not every card can sort them by port or by address.

use super::driver::Arrived;
use sidetrack_core::engine::packet::Ip;
use sidetrack_core::engine::{Checksums, Hop, Share};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Most packets that wait for one worker; further ones are lost, as in a full queue of a card.
const WAITING_MAX: usize = 1024;

/// A packet on its way to another worker.
#[derive(Debug)]
pub(super) struct Stray {
    /// Its bytes.
    pub packet: Vec<u8>,
    /// The neighbour it came from.
    pub hop: Hop,
    /// What the driver knows about its checksums.
    pub checksums: Checksums,
}

/// Wakes a worker, because a packet was handed to it.
pub(super) type Ring = Arc<dyn Fn() + Send + Sync>;

/// One worker's end of the channels.
pub(super) struct Strays {
    own: usize,
    shares: Arc<Vec<Share>>,
    others: Vec<SyncSender<Stray>>,
    bells: Vec<Ring>,
    inbox: Receiver<Stray>,
}

impl fmt::Debug for Strays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Strays").field("own", &self.own).finish_non_exhaustive()
    }
}

impl Strays {
    /// Returns the ends of all workers with these shares. `bells` holds the function that wakes each of them.
    pub(super) fn between(shares: Vec<Share>, bells: &[Ring]) -> Vec<Self> {
        let shares = Arc::new(shares);
        let (others, inboxes): (Vec<_>, Vec<_>) = shares.iter().map(|_| sync_channel(WAITING_MAX)).unzip();
        let end = |(own, inbox)| Self {
            own,
            shares: shares.clone(),
            others: others.clone(),
            bells: bells.to_vec(),
            inbox,
        };
        inboxes.into_iter().enumerate().map(end).collect()
    }

    /// Hands a packet over if it belongs to another worker. Returns true if it does.
    pub(super) fn pass_on(&self, arrived: &Arrived<'_>) -> bool {
        if self.shares.len() < 2 {
            return false;
        }
        let Some(owner) = self.owner(arrived.packet).filter(|owner| *owner != self.own) else { return false };
        let stray = Stray { packet: arrived.packet.to_vec(), hop: arrived.hop, checksums: arrived.checksums };
        if let (Some(other), Some(bell)) = (self.others.get(owner), self.bells.get(owner))
            && other.try_send(stray).is_ok()
        {
            bell();
        }
        true
    }

    /// Returns the next packet that another worker handed to us.
    pub(super) fn next(&self) -> Option<Stray> {
        self.inbox.try_recv().ok()
    }

    /// Returns the worker that owns the destination address and port of a packet, if there is one: the packet is an
    /// answer of a server.
    fn owner(&self, packet: &[u8]) -> Option<usize> {
        let ip = Ip::parse(packet).ok()?;
        let port: [u8; 2] = packet.get(ip.payload + 2..ip.payload + 4)?.try_into().ok()?;
        let (address, port) = (IpAddr::from(ip.dst), u16::from_be_bytes(port));
        self.shares.iter().position(|share| share.ports.contains(&port) && share.addresses.contains(&address))
    }
}
