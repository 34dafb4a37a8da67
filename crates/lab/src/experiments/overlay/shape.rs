//! The nodes, and the links between them.

use std::time::Duration;

use anyhow::Result;

use crate::link::{Conditions, Loss, Rate};

/// The queue before a link's rate, as time at that rate.
const QUEUE: Duration = Duration::from_millis(60);

/// The nodes and links of a scene. The first node is the source.
#[derive(Debug)]
pub(super) struct Shape {
    /// Names of the nodes.
    pub names: &'static [&'static str],
    /// Links as indices into `names`, the dialling end first, with their one-way delay in milliseconds. The first
    /// ones, in order, are the hops from source to target; only the overlay uses the others.
    pub links: &'static [(usize, usize, u64)],
    /// Number of links that are hops.
    pub hops: usize,
    /// The link with loss.
    pub lossy: usize,
    /// Rate of every link, in bits per second.
    pub rate: u64,
    /// The declared rate of every hop whose bandwidth is bought, in bits per second. `None`: hops are TCP.
    pub bought: Option<u64>,
    /// Whether applications of plain hosts beside source and target are carried, too.
    pub has_hosts: bool,
}

/// The in-lab path of Seamless Overlays, a spare path beside it, and hosts without any software of ours behind both
/// ends.
pub(super) const THREE_HOPS: Shape = Shape {
    names: &["source", "near", "far", "target", "spare"],
    links: &[(0, 1, 10), (1, 2, 10), (2, 3, 10), (0, 4, 17), (4, 3, 17)],
    hops: 3,
    lossy: 1,
    rate: 200_000_000,
    bought: None,
    has_hosts: true,
};

/// The same path with paced links. The links count Ethernet headers, too, so the declared rate is a little lower.
pub(super) const THREE_BOUGHT_HOPS: Shape =
    Shape { bought: Some(190_000_000), has_hosts: false, ..THREE_HOPS };

/// One long and fast hop.
pub(super) const ONE_HOP: Shape = Shape {
    names: &["source", "target"],
    links: &[(0, 1, 30)],
    hops: 1,
    lossy: 0,
    rate: 500_000_000,
    bought: None,
    has_hosts: false,
};

impl Shape {
    /// Returns the index of the target.
    pub(super) const fn target(&self) -> usize {
        self.hops
    }

    /// Returns the conditions of a link.
    pub(super) fn conditions(&self, link: usize, loss: Loss) -> Conditions {
        let queue_bytes = self.rate / 8 * QUEUE.as_millis() as u64 / 1000;
        let rate = Some(Rate { bits_per_second: self.rate, queue_bytes });
        let delay = Duration::from_millis(self.links.get(link).map_or(0, |link| link.2));
        Conditions { loss, rate, ..Conditions::delayed(delay) }
    }
}

/// Returns the number of a link's network.
///
/// # Errors There are fewer links.
pub(super) fn subnet(link: usize) -> Result<u8> {
    Ok(u8::try_from(link + 1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_three_hops_is_shorter_than_the_spare_way() {
        let way = |links: &[usize]| links.iter().map(|at| THREE_HOPS.links[*at].2).sum::<u64>();
        assert_eq!(way(&[0, 1, 2]), 30, "the seed's path");
        assert!(way(&[3, 4]) > 30);
        assert!(THREE_HOPS.links[THREE_HOPS.lossy] == (1, 2, 10));
        for shape in [&THREE_HOPS, &ONE_HOP] {
            for (hop, link) in shape.links[..shape.hops].iter().enumerate() {
                assert_eq!((link.0, link.1), (hop, hop + 1), "hops lead from the first node to the target");
            }
        }
    }
}
