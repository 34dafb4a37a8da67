//! Watches whether the interfaces send frames that XDP redirects to them. An end of a veth does so only while the other
//! end has GRO or an XDP program. Otherwise the kernel drops every frame of an offloaded connection, so no connection is
//! offloaded there.

use super::open::Interface;
use sidetrack_core::time::Instant;
use sidetrack_sys::redirect::RedirectTargets;
use sidetrack_sys::sync::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// The interfaces of one listener.
#[derive(Debug)]
pub(super) struct Targets {
    listener: String,
    interfaces: Vec<(Interface, AtomicBool)>,
    /// None: this kernel does not report it (before Linux 6.3). Then every interface counts as one that sends them.
    watch: Option<Mutex<Watch>>,
}

#[derive(Debug)]
struct Watch {
    kernel: RedirectTargets,
    /// When the kernel is asked again; all workers share its answer.
    next: Instant,
}

/// How often the kernel is asked.
const EVERY: Duration = Duration::from_millis(500);

impl Targets {
    /// Begins to watch these interfaces, which are in the network namespace of the calling thread.
    pub(super) fn new(listener: &str, interfaces: &[Interface]) -> Self {
        let interfaces = interfaces.iter().map(|interface| (interface.clone(), AtomicBool::new(true)));
        let watch = RedirectTargets::open().ok();
        let watch = watch.map(|kernel| Mutex::new(Watch { kernel, next: Instant::ZERO }));
        Self { listener: listener.to_owned(), interfaces: interfaces.collect(), watch }
    }

    /// True if this interface sent redirected frames at the last check.
    pub(super) fn takes(&self, interface: usize) -> bool {
        self.interfaces.get(interface).is_none_or(|(_, takes)| takes.load(Relaxed))
    }

    /// True if every interface sent redirected frames at the last check.
    pub(super) fn all_take(&self) -> bool {
        self.interfaces.iter().all(|(_, takes)| takes.load(Relaxed))
    }

    /// Checks every interface, unless another worker has just done so. The log gets one line for each change.
    pub(super) fn look(&self, now: Instant) {
        let Some(watch) = &self.watch else { return };
        let mut watch = lock(watch);
        if now < watch.next {
            return;
        }
        watch.next = now + EVERY;
        for (interface, takes) in &self.interfaces {
            // An interface that no longer exists has no traffic to protect.
            let Ok(found) = watch.kernel.takes(interface.index) else { continue };
            let (listener, name) = (&self.listener, &interface.name);
            match (takes.swap(found, Relaxed), found) {
                (true, false) => tracing::warn!(
                    %listener,
                    "offload is off for interface '{name}': it drops frames that XDP redirects to it. On a veth, switch GRO on at the \
                     other end: ethtool -K <interface> gro on"
                ),
                (false, true) => {
                    tracing::info!(%listener, "offload is on for interface '{name}': it sends redirected frames now");
                }
                _ => {}
            }
        }
    }
}
