//! One orchestrator among several that share a store (etcd).
//!
//! Each has an identity, which stands in the store under a lease. A set-up carries the identity of the orchestrator that leads it.
//! If that identity is gone, its orchestrator is dead or cut off: another one takes the set-up back.
//!
//! ```text
//!              granted, identity stored              renewed
//!   OUTSIDE ------------------------------> INSIDE --------+
//!      ^                                      |  ^         |
//!      |  the lease is over, or was not       |  +---------+
//!      +--------- renewed in time ------------+
//! ```
//!
//! OUTSIDE: no set-up begins, and those that run stop before their next request. An identity is never used again.

use super::{AGAIN, APPLICATIONS, CONSENT, Orchestrator};
use crate::api::{ApplicationStatus, Phase};
use crate::settings::StateAt;
use crate::store::{Event, If, LeaseId, StoreError};
use sidetrack_sys::sync::lock;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::mpsc;

/// Prefix of the identities of orchestrators in the store.
const ORCHESTRATORS: &str = "orchestrator/";
/// A lease is renewed this often in its time.
const RENEWALS: u32 = 4;

/// The identity of this orchestrator.
#[derive(Debug, Default)]
pub(super) struct Member(Mutex<Option<Inside>>);

#[derive(Clone, Debug)]
struct Inside {
    id: String,
    lease: LeaseId,
    /// From this time on the others may count it as dead.
    until: Instant,
}

impl Member {
    /// The identity, while the lease surely holds.
    pub(super) fn id(&self) -> Option<String> {
        lock(&self.0).as_ref().filter(|inside| Instant::now() < inside.until).map(|inside| inside.id.clone())
    }
}

impl Orchestrator {
    /// The time of a lease, if several orchestrators share the store.
    fn lease(&self) -> Option<Duration> {
        match &self.settings.state {
            StateAt::Etcd(at) if self.store.is_shared() => Some(at.lease),
            _ => None,
        }
    }

    /// Begins with an identity, if several orchestrators share the store.
    ///
    /// # Errors
    /// etcd cannot be reached.
    pub fn join(&self) -> Result<(), StoreError> {
        self.lease().map_or(Ok(()), |ttl| self.renew(ttl))
    }

    /// Gives the identity up, so that the others take its set-ups back at once.
    pub fn leave(&self) {
        let Some(id) = self.member.id() else { return };
        if let Err(error) = self.store.delete(&format!("{ORCHESTRATORS}{id}"), If::Always) {
            tracing::warn!(%error, "the others notice the end of this orchestrator only when its lease is over");
        }
    }

    /// Keeps the identity, follows the changes of other orchestrators, and takes back what dead ones left. Does not return if the
    /// store is shared.
    pub async fn belong(self: Arc<Self>) {
        let Some(ttl) = self.lease() else { return };
        let mut changes = None;
        loop {
            if let Err(error) = self.renew(ttl) {
                tracing::error!(%error, "cannot renew the lease in etcd; trying again");
            }
            if changes.is_none() {
                changes = self.begin_to_watch();
            }
            if let Err(error) = self.take_over() {
                tracing::error!(%error, "cannot look for set-ups of dead orchestrators; trying again");
            }
            let pause = tokio::time::sleep((ttl / RENEWALS).min(AGAIN));
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    event = next(&mut changes) => match event {
                        Some(event) => self.notice(&event),
                        None => {
                            changes = None;
                            break;
                        }
                    },
                }
            }
        }
    }

    /// Renews the lease, or begins with a new identity.
    fn renew(&self, ttl: Duration) -> Result<(), StoreError> {
        let held = lock(&self.member.0).clone();
        // Counted from before the request: etcd counts from a later time.
        let began = Instant::now();
        if let Some(inside) = held {
            if began + ttl / 2 < inside.until {
                return Ok(());
            }
            match self.store.keep_alive(inside.lease, SystemTime::now()) {
                Ok(()) if began < inside.until => {
                    *lock(&self.member.0) = Some(Inside { until: began + ttl, ..inside });
                    return Ok(());
                }
                // Renewed late: the set-ups have stopped meanwhile. A new identity lets them be taken back.
                Ok(()) => drop(self.store.delete(&format!("{ORCHESTRATORS}{}", inside.id), If::Always)?),
                Err(StoreError::NoLease(_)) => {}
                Err(error) => return Err(error),
            }
            *lock(&self.member.0) = None;
            tracing::warn!("the lease in etcd is over: set-ups that ran here are taken back");
        }
        let began = Instant::now();
        let lease = self.store.grant(ttl, SystemTime::now())?;
        let id = format!("{:016x}", u64::from_be_bytes(sidetrack_sys::random::bytes()));
        self.store.put(
            &format!("{ORCHESTRATORS}{id}"),
            self.settings.listen.as_bytes(),
            If::Absent,
            Some(lease),
        )?;
        tracing::info!(%id, "one of the orchestrators");
        *lock(&self.member.0) = Some(Inside { id, lease, until: began + ttl });
        Ok(())
    }

    fn begin_to_watch(&self) -> Option<mpsc::Receiver<Event>> {
        let changes = self.store.watch("", None);
        let changes =
            changes.inspect_err(|error| tracing::error!(%error, "cannot follow etcd; trying again")).ok()?;
        // What changed before the watch began.
        self.catch_up();
        Some(changes)
    }

    /// Acts on a change that another orchestrator may have made.
    fn notice(&self, event: &Event) {
        let gone = event.entry.is_none() && event.key.starts_with(ORCHESTRATORS);
        if gone || event.key.starts_with(CONSENT) {
            self.catch_up();
        }
        if event.key.starts_with(APPLICATIONS) {
            self.changed.notify_one();
        }
    }

    /// Reads consent and agreement again, and tells the domains about all ready applications: a dead orchestrator may not have done
    /// it any more.
    fn catch_up(&self) {
        if let Err(error) = self.reconsider() {
            tracing::error!("the agreement is rejected; nothing changes\n{error:#}");
        }
    }

    /// Has all set-ups taken back whose orchestrator is gone.
    fn take_over(&self) -> Result<(), StoreError> {
        let preparing: Vec<_> =
            self.applications()?.into_iter().filter(|(_, status)| status.phase == Phase::Preparing).collect();
        if preparing.is_empty() {
            return Ok(());
        }
        // Read after the applications: an orchestrator that leads one of them was there before it.
        let alive = self.store.list(ORCHESTRATORS)?.into_iter();
        let alive: BTreeSet<_> =
            alive.map(|(key, _)| key.trim_start_matches(ORCHESTRATORS).to_owned()).collect();
        for (revision, status) in preparing {
            if status.by.as_ref().is_some_and(|by| alive.contains(by)) {
                continue;
            }
            let name = status.application.name.clone();
            let ending = ApplicationStatus { phase: Phase::Ending, by: None, ..status };
            match self.put(&ending, If::Revision(revision)) {
                Ok(_) => {
                    tracing::warn!(application = %name, "its orchestrator is gone: taking it back");
                    self.changed.notify_one();
                }
                // It became ready, or another orchestrator was faster.
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The next change; without end if none is followed.
async fn next(changes: &mut Option<mpsc::Receiver<Event>>) -> Option<Event> {
    match changes {
        Some(changes) => changes.recv().await,
        None => std::future::pending().await,
    }
}
