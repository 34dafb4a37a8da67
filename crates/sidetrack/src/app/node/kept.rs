//! The rights that a node has, and the process that keeps them.

use crate::config::{Config, Listener, ListenerKind};
use crate::keeper::Keeper;
use crate::process::Owners;
use sidetrack_core::flow::Process;
use sidetrack_sys::caps::{self, CapabilitySet};
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Asks the keeper for processes: it may see all processes of this host, and we may not.
pub(super) fn ask_keeper(keeper: Arc<Keeper>) -> Owners {
    Owners::Asked(Arc::new(move |socket| {
        keeper.owner(socket).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot look up a process");
            Process::default()
        })
    }))
}

/// Whether we may change the kernel's rules; an error if a listener needs that.
pub(super) fn may_steer(config: &Config) -> anyhow::Result<bool> {
    if caps::holds(CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW) {
        return Ok(true);
    }
    let captures = |listener: &&Listener| {
        matches!(listener.kind, ListenerKind::Redirect(_) | ListenerKind::Tproxy(_) | ListenerKind::Engine(_))
    };
    if let Some(listener) = config.listeners.iter().find(captures) {
        anyhow::bail!(
            "listener '{}': kind {} needs root (CAP_NET_ADMIN and CAP_NET_RAW): start with sudo, or use \
             'sidetrack run -- COMMAND', which needs no rights",
            listener.name,
            listener.kind.intercept().as_str()
        );
    }
    tracing::debug!("without CAP_NET_ADMIN nothing is left to the kernel; all flows pass through user space");
    Ok(false)
}

/// Waits until a descriptor is readable.
pub(super) async fn wait_for(fd: std::os::fd::OwnedFd) -> std::io::Result<()> {
    #[expect(deprecated, reason = "its successor is unsafe; this descriptor is owned and stays open")]
    let fd = AsyncFd::with_interest(fd, Interest::READABLE)?;
    fd.readable().await.map(drop)
}
