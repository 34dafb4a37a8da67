//! Connections that are accepted only when the far side has accepted: the queues of a node, and the thread that answers the
//! kernel for them.

use crate::config::{Config, OnCrash};
use crate::intercept::hold::{self, Hold};
use crate::live::Clock;
use crate::steer::{self, OWN_MARK, Steer};
use anyhow::Context;
use sidetrack_core::hold::Overflow;
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::nfqueue::{HOLD_NUMBERS, HoldSockets};
use std::net::SocketAddr;
use std::sync::Arc;

/// The queues before and after the thread has them.
pub(super) struct Holding {
    sockets: Option<HoldSockets>,
    overflow: Overflow,
    /// The connections that are held. `None`: no rule asked for it at the start.
    pub hold: Option<Arc<Hold>>,
}

impl Holding {
    /// Opens the queues, if a rule asks for them. Needs CAP_NET_ADMIN and CAP_NET_RAW then.
    ///
    /// # Errors
    /// The kernel has no queues, or all numbers are in use.
    pub(super) fn open(config: &Config) -> anyhow::Result<Self> {
        let overflow = match config.on_crash {
            OnCrash::Open => Overflow::Early,
            OnCrash::Closed => Overflow::Refuse,
        };
        let sockets = steer::holds(config).then(|| {
            let bounds = (hold::PACKETS_MAX, config.on_crash == OnCrash::Open);
            HoldSockets::open(HOLD_NUMBERS, hold::LISTENERS_MAX, bounds, OWN_MARK.value).context(
                "connect = \"faithful\" needs packet queues (root, and NFQUEUE in the kernel); without them, write connect = \
                 \"early\"",
            )
        });
        Ok(Self { sockets: sockets.transpose()?, overflow, hold: None })
    }

    /// The right that is kept for a moment longer than others.
    pub(super) const fn needs(&self) -> CapabilitySet {
        if self.sockets.is_some() { hold::NEEDED } else { CapabilitySet::empty() }
    }

    /// Starts the thread that answers the kernel. Only this thread keeps the right to do so.
    ///
    /// # Errors
    /// The system gives no thread.
    pub(super) fn answer_kernel(&mut self) -> anyhow::Result<()> {
        let Some(sockets) = self.sockets.take() else { return Ok(()) };
        let hold = Hold::start(sockets, self.overflow, Clock::start());
        self.hold = Some(hold.context("cannot start the thread that holds connections")?);
        Ok(())
    }
}

/// Puts the queues into the kernel's task, if this configuration asks for them.
pub(super) fn put(
    hold: Option<&Arc<Hold>>,
    config: &Config,
    task: Steer,
    bound: &[(Arc<str>, SocketAddr)],
) -> Steer {
    match hold {
        Some(hold) if steer::holds(config) => task.holding(bound, |name| {
            let is_led_to = config.listeners.iter().any(|one| one.name == *name && steer::may_hold(one));
            is_led_to.then(|| hold.queue_of(name)).flatten()
        }),
        _ => task,
    }
}
