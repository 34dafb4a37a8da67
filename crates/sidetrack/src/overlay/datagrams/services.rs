//! Counts of packets over subgraphs by their service: the kind of links and the dissemination that each packet names.

use sidetrack_core::overlay::frame::{Protocol, Spread};
use sidetrack_core::overlay::service::{Dissemination, LinkKind};
use sidetrack_core::overlay::spread::{Dropped, Step};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of one service.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Copies that this node has sent to neighbours for the first time, of its own packets and of others.
    pub copies: AtomicU64,
    /// Packets for this node: the first copy of each.
    pub delivered: AtomicU64,
    /// Copies that came after the deadline of their packet.
    pub late: AtomicU64,
}

const KINDS: usize = LinkKind::ALL.len();
const DISSEMINATIONS: usize = Dissemination::ALL.len();

/// Counts of all services. Echo requests and answers are not counted.
#[derive(Debug, Default)]
pub(crate) struct Services([[Counts; DISSEMINATIONS]; KINDS]);

impl Services {
    fn of(&self, packet: &Spread) -> Option<&Counts> {
        if packet.protocol != Protocol::Ip {
            return None;
        }
        let kind = LinkKind::ALL.iter().position(|one| *one == packet.kind)?;
        let dissemination = Dissemination::ALL.iter().position(|one| *one == packet.dissemination)?;
        self.0.get(kind)?.get(dissemination)
    }

    /// Counts a copy that came, by what the core decided about it.
    pub(super) fn came(&self, packet: &Spread, decided: &Result<Step, Dropped>) {
        let Some(counts) = self.of(packet) else { return };
        match decided {
            Ok(step) if step.deliver => counts.delivered.fetch_add(1, Relaxed),
            Err(Dropped::Late) => counts.late.fetch_add(1, Relaxed),
            Ok(_) | Err(Dropped::OffGraph | Dropped::Duplicate) => 0,
        };
    }

    /// Counts copies that were sent.
    pub(super) fn sent(&self, packet: &Spread, copies: u64) {
        if let Some(counts) = self.of(packet) {
            counts.copies.fetch_add(copies, Relaxed);
        }
    }

    /// Returns the counts of each service.
    pub(crate) fn all(&self) -> impl Iterator<Item = (LinkKind, Dissemination, &Counts)> {
        let rows = LinkKind::ALL.iter().zip(&self.0);
        rows.flat_map(|(kind, row)| {
            Dissemination::ALL.iter().zip(row).map(|(dissemination, counts)| (*kind, *dissemination, counts))
        })
    }
}
