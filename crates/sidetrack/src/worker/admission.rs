//! Which flows have room: the bound on all flows, and the share of one client.

use super::{CLIENT_SHARE, Shared, Worker};
use sidetrack_core::limit::{Budget, Lack};
use sidetrack_sys::sync::lock;
use std::net::IpAddr;
use std::sync::Arc;

/// Permission to use descriptors; given back on drop.
#[derive(Debug)]
pub struct Admission {
    shared: Arc<Shared>,
    client: Option<IpAddr>,
    holds: Holds,
}

/// What an admission takes from the budget.
#[derive(Clone, Copy, Debug)]
enum Holds {
    Nothing,
    Descriptors,
    /// A UDP association with one descriptor.
    Descriptor,
    /// A flow that needs no descriptors of its own: of the packet engine, or a UDP association on a path of others.
    Beside,
    /// Descriptors that associations share.
    Shared(u8),
}

impl Admission {
    /// Asks for one more flow of this client. Without room, the connection that has been idle longest is closed.
    /// `is_own` is called if the client has used up its share. It returns whether the client acts for many others (this host,
    /// or a proxy that forwards for named clients): then a share applies only if it is configured.
    ///
    /// # Errors
    /// Which limit is reached, in words.
    pub fn ask(worker: &Worker, client: IpAddr, is_own: impl FnOnce() -> bool) -> Result<Self, String> {
        let shared = &worker.shared;
        shared.enough_memory().map_err(Lack::words)?;
        // Count first: a client that has used up its share must not close connections of others.
        let mut admission = Self { shared: shared.clone(), client: None, holds: Holds::Nothing };
        admission.count(client, is_own)?;
        let budget = || lock(&shared.budget);
        if !budget().admit() {
            let max = budget().flows().max;
            let most = budget().most();
            if !shared.idle.tell_oldest() {
                return Err(match most {
                    Some(most) if most <= max => {
                        format!("{most} flows are the most that limits.max_flows allows")
                    }
                    _ => format!(
                        "{max} flows are the most that the limit on open files allows (RLIMIT_NOFILE)"
                    ),
                });
            }
            budget().admit_for_one_that_leaves();
            tracing::warn!(
                "there is no room for one more flow ({max} at most): the connection that is idle longest is closed"
            );
        }
        admission.holds = Holds::Descriptors;
        Ok(admission)
    }

    /// Asks for one more flow of this client that needs no descriptors; `None` if there is no limit for such flows.
    /// `for_one_that_leaves`: another such flow ends for it, so there is room.
    ///
    /// # Errors
    /// Which limit is reached.
    pub fn beside(
        shared: &Arc<Shared>,
        client: IpAddr,
        for_one_that_leaves: bool,
    ) -> Result<Option<Self>, Lack> {
        shared.enough_memory()?;
        let most = lock(&shared.budget).most();
        if most.is_none() && !shared.is_client_bound {
            return Ok(None);
        }
        // Count first: no flow of others may leave for a client that has its share. A flow takes no descriptors from
        // others here, so a share applies only if it is configured.
        let mut admission = Self { shared: shared.clone(), client: None, holds: Holds::Nothing };
        if shared.is_client_bound {
            admission.count(client, || false).map_err(Lack::Share)?;
        }
        let mut budget = lock(&shared.budget);
        if for_one_that_leaves {
            budget.admit_beside_for_one_that_leaves();
        } else if !budget.admit_beside() {
            let most = most.unwrap_or_default();
            drop(budget);
            return Err(Lack::Room(format!("{most} flows are the most that limits.max_flows allows")));
        }
        drop(budget);
        admission.holds = Holds::Beside;
        Ok(Some(admission))
    }

    /// Asks for one more UDP association of this client, with one descriptor, or `two`. A client's share applies only if it is
    /// configured: without room, the caller ends the association that is idle for longest, and asks again.
    ///
    /// # Errors
    /// Which limit is reached.
    pub fn of_datagrams(worker: &Worker, client: IpAddr, two: bool) -> Result<Self, Lack> {
        let shared = &worker.shared;
        shared.enough_memory()?;
        let mut admission = Self { shared: shared.clone(), client: None, holds: Holds::Nothing };
        if shared.is_client_bound {
            admission.count(client, || false).map_err(Lack::Share)?;
        }
        let mut budget = lock(&shared.budget);
        let is_admitted = if two { budget.admit() } else { budget.admit_single() };
        if !is_admitted {
            let (max, most) = (budget.flows().max, budget.most());
            drop(budget);
            return Err(Lack::Room(match most {
                Some(most) if most <= max => {
                    format!("{most} flows are the most that limits.max_flows allows")
                }
                _ => format!(
                    "{max} associations are the most that the limit on open files allows (RLIMIT_NOFILE)"
                ),
            }));
        }
        drop(budget);
        admission.holds = if two { Holds::Descriptors } else { Holds::Descriptor };
        Ok(admission)
    }

    /// Asks for one more UDP association of this client that uses the descriptors of others.
    ///
    /// # Errors
    /// Which limit is reached.
    pub fn of_datagrams_beside(worker: &Worker, client: IpAddr) -> Result<Self, Lack> {
        let shared = &worker.shared;
        shared.enough_memory()?;
        let mut admission = Self { shared: shared.clone(), client: None, holds: Holds::Nothing };
        if shared.is_client_bound {
            admission.count(client, || false).map_err(Lack::Share)?;
        }
        let mut budget = lock(&shared.budget);
        // Memory is bounded as by descriptors.
        let is_full = budget.beside() >= Budget::MAX_FLOWS || !budget.admit_beside();
        if is_full {
            let most = budget.most();
            drop(budget);
            return Err(Lack::Room(match most {
                Some(most) => format!("{most} flows are the most that limits.max_flows allows"),
                None => format!("{} associations are the most of one process", Budget::MAX_FLOWS),
            }));
        }
        drop(budget);
        admission.holds = Holds::Beside;
        Ok(admission)
    }

    /// Lets other associations use the descriptors of this one. Returns the permission for these descriptors, which outlives the
    /// association. `None`: it has no descriptors.
    pub fn share(&mut self) -> Option<Self> {
        let mut budget = lock(&self.shared.budget);
        let descriptors = match self.holds {
            Holds::Descriptor => {
                budget.share_single();
                1
            }
            Holds::Descriptors => {
                budget.share();
                2
            }
            Holds::Nothing | Holds::Beside | Holds::Shared(_) => return None,
        };
        drop(budget);
        self.holds = Holds::Beside;
        Some(Self { shared: self.shared.clone(), client: None, holds: Holds::Shared(descriptors) })
    }

    /// Counts the flow among those of its client.
    fn count(&mut self, client: IpAddr, is_own: impl FnOnce() -> bool) -> Result<(), String> {
        if lock(&self.shared.per_client).admit(client) {
            self.client = Some(client);
            return Ok(());
        }
        if self.shared.is_client_bound {
            return Err(format!("{client} has as many flows as limits.max_flows_per_client allows"));
        }
        if is_own() {
            return Ok(());
        }
        Err(format!(
            "{client} has one in {CLIENT_SHARE} of all flows: a client may have more if limits.max_flows_per_client says so"
        ))
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if let Some(client) = self.client {
            lock(&self.shared.per_client).release(client);
        }
        let mut budget = lock(&self.shared.budget);
        match self.holds {
            Holds::Nothing => {}
            Holds::Descriptors => budget.release(),
            Holds::Descriptor => budget.release_single(),
            Holds::Beside => budget.release_beside(),
            Holds::Shared(descriptors) => (0..descriptors).for_each(|_| budget.release_shared()),
        }
    }
}
