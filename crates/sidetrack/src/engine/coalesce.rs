//! Frames gather in the interfaces of an engine before the kernel takes them, so that many are taken at once.

use super::open::Interface;
use sidetrack_sys::napi::{self, Napi};
use sidetrack_sys::undo::{Action, Guard};
use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

/// Interfaces whose frames gather while this lives. Afterwards they do as before, also where we were killed: a guard process
/// sees to that, with rights that we have given up by then.
#[derive(Debug)]
pub struct Coalescing(Option<Guard>);

/// Why frames do not gather.
#[derive(Debug, thiserror::Error)]
pub enum CoalesceError {
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] sidetrack_sys::netlink::Error),
    /// There is nothing in which they could.
    #[error(
        "{0} has no NAPI that can be told (it takes Linux 6.13, and a card's driver; on veth io = \"xdp\" or `ethtool -K {0} gro on`)"
    )]
    NoNapi(String),
    /// The process that would put it back cannot be had.
    #[error("the guard that would put it back: {0}")]
    Guard(#[from] io::Error),
}

impl Coalescing {
    /// Lets frames gather so long in each of these interfaces, the longest time where one is there twice. Nothing is changed where
    /// one of them cannot, nor where no listener asks for it.
    ///
    /// # Errors
    /// Which interface cannot, or what the kernel said.
    pub fn new(interfaces: &[(Interface, Duration)]) -> Result<Option<Self>, CoalesceError> {
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
        // From here on whatever happens puts it back.
        let coalescing = Self(Some(Guard::spawn(&undo)?));
        for (before, time) in found {
            napi::set(&wanted(before, time))?;
        }
        Ok(Some(coalescing))
    }
}

impl Drop for Coalescing {
    fn drop(&mut self) {
        // One that is gone has done it.
        let _ = self.0.take().map(Guard::finish);
    }
}

/// What is set already stays where it says more.
fn wanted(before: Napi, time: Duration) -> Napi {
    let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Napi {
        defer_hard_irqs: before.defer_hard_irqs.max(1),
        gro_flush_timeout_ns: before.gro_flush_timeout_ns.max(time_ns),
        ..before
    }
}
