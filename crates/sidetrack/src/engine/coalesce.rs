//! Lets frames collect in the interfaces of an engine before the kernel handles them, so that it handles many at once.

use super::open::Interface;
use sidetrack_sys::napi::{self, Napi};
use sidetrack_sys::undo::{Action, Guard};
use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

/// Interfaces whose frames collect while this value lives. Afterwards a guard process restores the earlier settings, even
/// if our process was killed. The guard has rights that we have given up by then.
#[derive(Debug)]
pub(super) struct Coalescing(Option<Guard>);

/// Why frames do not collect.
#[derive(Debug, thiserror::Error)]
pub(super) enum CoalesceError {
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] sidetrack_sys::netlink::Error),
    /// The interface has no NAPI instance that can be configured.
    #[error(
        "{0} has no NAPI that can be told (it takes Linux 6.13, and a card's driver; on veth io = \"xdp\" or `ethtool -K {0} gro on`)"
    )]
    NoNapi(String),
    /// The guard process that would restore the settings cannot be started.
    #[error("the guard that would put it back: {0}")]
    Guard(#[from] io::Error),
}

impl Coalescing {
    /// Lets frames collect for this time in each of these interfaces; for an interface listed twice, the longer time
    /// counts. Nothing changes if one of them does not support it, or if no listener asks for it.
    ///
    /// # Errors
    /// Returns the interface that does not support it, or the kernel's error.
    pub(super) fn new(interfaces: &[(Interface, Duration)]) -> Result<Option<Self>, CoalesceError> {
        let mut times: BTreeMap<u32, (&str, Duration)> = BTreeMap::new();
        for (interface, time) in interfaces.iter().filter(|(_, time)| !time.is_zero()) {
            let entry = times.entry(interface.index).or_insert((&interface.name, *time));
            entry.1 = entry.1.max(*time);
        }
        if times.is_empty() {
            return Ok(None);
        }
        let mut found = Vec::new();
        for (index, (name, time)) in times {
            let instances = napi::of(index)?;
            if instances.is_empty() {
                return Err(CoalesceError::NoNapi(name.to_owned()));
            }
            found.extend(instances.into_iter().map(|before| (before, time)));
        }
        let undo: Vec<Action> = found.iter().map(|(before, _)| Action::RestoreNapi(*before)).collect();
        // The guard is started first: from here on it restores the settings in any case.
        let coalescing = Self(Some(Guard::spawn(&undo)?));
        for (before, time) in found {
            napi::set(&wanted(before, time))?;
        }
        Ok(Some(coalescing))
    }
}

impl Drop for Coalescing {
    fn drop(&mut self) {
        // If the guard process has already ended, it has restored the settings.
        let _ = self.0.take().map(Guard::finish);
    }
}

/// Returns the settings to write: an existing value stays if it is larger.
fn wanted(before: Napi, time: Duration) -> Napi {
    let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Napi {
        defer_hard_irqs: before.defer_hard_irqs.max(1),
        gro_flush_timeout_ns: before.gro_flush_timeout_ns.max(time_ns),
        ..before
    }
}
