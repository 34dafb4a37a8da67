//! How many flows the limit on open files allows, and what is reserved for other uses.

use crate::carry::tunnel::pool::READY_MAX as POOL_READY_MAX;
use crate::carry::warm::Room;
use crate::config::{Config, Listener, ListenerKind};
use crate::http::sheet;
use crate::worker::FAR_WAITING_MAX;
use sidetrack_core::limit::Budget;
use sidetrack_core::pressure::Memory;
use sidetrack_sys::splice::DEFAULT_PIPE_BYTES;

/// Descriptors reserved for other uses than flows: listeners, epoll, records, admin clients, the resolver.
const DESCRIPTOR_RESERVE: u64 = 128;

/// The number of descriptors reserved for warm connections to servers.
pub(super) fn warm_room(config: &Config, nofile: u64, workers: usize) -> u64 {
    let wanted = Room::wanted(&config.policy, workers);
    u64::try_from(wanted).unwrap_or(u64::MAX).min(nofile / 8)
}

/// A flow over the overlay needs two more descriptors than others: both ends of the connection between its worker and the
/// overlay's thread. The same number is left for flows of other nodes.
const fn overlay_part(config: &Config) -> u64 {
    if config.overlay.is_some() { 2 } else { 1 }
}

/// The number of descriptors reserved for large content in the memory of caches.
pub(super) fn sheets(config: &Config, nofile: u64) -> u64 {
    let caches = |listener: &Listener| listener.kind.http().is_some_and(|http| http.cache.is_some());
    if config.listeners.iter().any(caches) { sheet::SHEETS_MAX.min(nofile / 16) } else { 0 }
}

/// The number of flows that the limit on open files and the configuration allow. `memory`: that of the control group, if it is
/// limited; pipes get a part of it.
pub(super) fn budget(config: &Config, nofile: u64, workers: usize, memory: Option<Memory>) -> Budget {
    let is_far = |listener: &&Listener| matches!(listener.kind, ListenerKind::Tunnel(_));
    let waiting = config.listeners.iter().find(is_far).map_or(0, |_| FAR_WAITING_MAX);
    let paths: usize = config.tunnels.iter().map(|tunnel| tunnel.paths.len()).sum();
    // Tunnel connections without a flow.
    let idle = ((waiting + paths * POOL_READY_MAX) * workers) as u64;
    let resolver = config.dns.as_ref().map_or(0, super::dns::descriptors);
    let idle = idle.min(nofile / 8)
        + warm_room(config, nofile, workers)
        + sheets(config, nofile)
        + resolver.min(nofile / 8);
    let share = super::containers::share(config, nofile) / overlay_part(config);
    let pipes = memory.map_or(u64::MAX, |memory| memory.for_pipes() / DEFAULT_PIPE_BYTES as u64);
    let budget = Budget::from_nofile(share, DESCRIPTOR_RESERVE + idle).pipes_at_most(pipes);
    match config.limits.max_flows {
        Some(most) => budget.at_most(most.into()),
        None => budget,
    }
}
