//! Replaces the configuration of a running node.

use super::node::{Node, Served, addresses, bound_addresses, engine_listeners};
use super::sockets::{self, Before, Bound, Proof};
use super::threads::Serving;
use super::{agreement, chains, containers, hold};
use crate::config::{Config, Listener, ListenerKind, OnCrash};
use crate::function::Function;
use crate::reload::Change;
use crate::steer::{self, Host, Steer, TABLE};
use anyhow::Context;
use sidetrack_core::flow::Protocol;
use sidetrack_sys::nft::{Family, OwnError, OwnedTable};
use sidetrack_sys::sync::lock;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

impl Node {
    /// Puts a new configuration in force, all of it or nothing. Running flows keep their rules.
    ///
    /// # Errors
    /// What cannot be done. Nothing has changed then.
    pub(super) fn apply(&self, change: &Change<'_>) -> anyhow::Result<()> {
        let new = change.new;
        anyhow::ensure!(
            change.old.shunt == new.shunt,
            "[shunt] is not changed by a reload: restart sidetrack (flows go on, on the slow path meanwhile)"
        );
        anyhow::ensure!(
            change.old.overlay == new.overlay,
            "[overlay] has changed: links and sessions would be cut; restart sidetrack for it"
        );
        anyhow::ensure!(
            change.old.outgoing == new.outgoing,
            "[outgoing] is not changed by a reload: services know their ports; restart sidetrack for it"
        );
        let resolver = |config: &Config| config.dns.as_ref().map(|dns| dns.addresses.clone());
        anyhow::ensure!(
            resolver(change.old) == resolver(new),
            "[dns] address is not changed by a reload: the right to port 53 was given up; restart sidetrack for it"
        );
        anyhow::ensure!(
            engine_listeners(change.old).eq(engine_listeners(new)),
            "a listener of kind engine has changed: its rights were given up, so restart sidetrack for it"
        );
        anyhow::ensure!(
            change.old.user == new.user,
            "user is not changed by a reload: what root may do was given up; restart sidetrack for it"
        );
        anyhow::ensure!(
            self.shared.hold().is_some() || !steer::holds(new),
            "connect = \"faithful\" is new: the right to open packet queues was given up, so restart sidetrack for it"
        );
        self.allowed_by_keeper(new)?;
        // Reject a wrong agreement before anything is started for the configuration.
        agreement::read(new, &self.agreement().load())?;
        // This may wait for containers. Nothing is locked or bound meanwhile, so the admin interface shows the old state,
        // and no connection reaches a listener without a worker.
        let functions = containers::anew(&self.shared.functions, new)?;
        self.replace(change, functions)
    }

    /// Checks that the keeper still has the rights that this configuration needs: it cannot regain rights that it gave up.
    fn allowed_by_keeper(&self, new: &Config) -> anyhow::Result<()> {
        let may = self.steered.may;
        if self.steered.keeper.is_none() {
            return Ok(());
        }
        anyhow::ensure!(
            may.owners || !new.policy.asks_process(),
            "rules that ask for the process or user of a connection are new: the right to look was given up, so restart \
             sidetrack for them"
        );
        anyhow::ensure!(
            may.closed || new.on_crash == OnCrash::Open,
            "on_crash = \"closed\" is new: the right to leave rules behind was given up, so restart sidetrack for it"
        );
        Ok(())
    }

    /// Binds the sockets of listeners that are new in this configuration.
    fn bind_fresh(
        &self,
        change: &Change<'_>,
        served: &[Served],
    ) -> anyhow::Result<Vec<(Listener, Vec<Bound>)>> {
        let new = change.new;
        let kept = |listener: &Listener| {
            // The handshake timeout is part of the state that a SOCKS listener's connections share.
            let same = change.old.limits.handshake_timeout_ms == new.limits.handshake_timeout_ms;
            served.iter().any(|served| same && is_kept(&served.listener, listener))
        };
        let of_old =
            served.iter().flat_map(|served| &served.serving).map(|serving| serving.listening.address);
        let of_old: Vec<_> = of_old.collect();
        let mut fresh = Vec::new();
        for listener in new.listeners.iter().filter(|listener| !kept(listener)) {
            // The old and the new listener share the address until the old one is closed.
            let own = [of_old.clone(), bound_addresses(&fresh)].concat();
            let before = Before { own: &own, heritage: None, passed: &self.parent.passed };
            let bound = sockets::bind(listener, new, (self.workers, self.names.as_ref()), before)?;
            fresh.push((listener.clone(), bound));
        }
        Ok(fresh)
    }

    /// Replaces listeners, rules, functions and agreement by the prepared ones.
    fn replace(&self, change: &Change<'_>, functions: Vec<Arc<Function>>) -> anyhow::Result<()> {
        let new = change.new;
        let fleet = lock(&self.fleet);
        let fleet = fleet.as_ref().context("sidetrack is shutting down")?;
        // Read again: another agreement may have been put in force while this waited for containers.
        let _agreeing = lock(&self.agreeing);
        let in_force = agreement::read(new, &self.agreement().load())?;
        let mut served = lock(&self.served);
        anyhow::ensure!(!self.leaving.load(Relaxed), "sidetrack is shutting down");
        let fresh = self.bind_fresh(change, &served)?;
        let stays = |served: &Served| {
            new.listeners.iter().any(|listener| is_kept(&served.listener, listener))
                && !fresh.iter().any(|(fresh, _)| is_kept(&served.listener, fresh))
        };
        let old = served.iter().filter(|served| stays(served)).flat_map(|served| &served.serving);
        let listening = old
            .clone()
            .map(|serving| &*serving.listening)
            .chain(fresh.iter().flat_map(|(_, bound)| bound).map(|bound| &*bound.listening));
        let addresses = addresses(listening);
        let proofs = old.filter_map(Serving::proof);
        let proofs: Vec<_> =
            proofs.chain(fresh.iter().flat_map(|(_, bound)| bound).filter_map(Bound::proof)).collect();
        self.note_agreement(&in_force)?;
        self.steer_anew(new, &addresses, &proofs, |steer| steer)?;
        // From here on nothing can fail.
        let (stay, go): (Vec<_>, Vec<_>) = served.drain(..).partition(stays);
        *served = stay;
        for served in served.iter() {
            let grown = new.listeners.iter().find(|listener| served.listener.grows_into(listener));
            grown.into_iter().for_each(|listener| served.listener.grow(listener));
        }
        for (listener, bound) in fresh {
            let serving = bound.into_iter().map(|bound| fleet.serve(bound)).collect();
            served.push(Served { listener, serving });
        }
        self.set_dialing(&served);
        self.shared.functions.take(functions);
        self.put_agreement(new, in_force);
        chains::cut_changed(&new.policy, &self.ledgers);
        super::up::log_as(new);
        // Start new listeners before the old ones close, so that a shared address is served at all times.
        self.parent.let_go(&go.iter().flat_map(|served| &served.serving).collect::<Vec<_>>());
        go.into_iter().flat_map(|served| served.serving).for_each(Serving::finish);
        Ok(())
    }

    /// Accepts no new connections; running flows go on. The kernel's rules for new connections are removed, so that these
    /// pass as if sidetrack did not run. With `on_crash = "closed"` they are refused. Waits for the keeper.
    pub(super) fn stop_accepting(&self) {
        let mut served = lock(&self.served);
        self.leaving.store(true, Relaxed);
        self.shared.leave();
        let has_let_go = self.let_new_pass(&served).unwrap_or_else(|error| {
            tracing::warn!(
                "new connections are refused until the end: cannot take back the rules that lead them here: {error:#}"
            );
            false
        });
        // First the rules, then the listeners: a redirected connection without a listener is reset. Listeners that rules
        // redirect to stay open, so that handshakes under way can end; no new connection reaches them.
        // UDP has one socket for all clients of a listener: it stays open for the associations that go on, and begins no other.
        served.retain(|served| {
            served.listener.protocol == Protocol::Udp || has_let_go && is_led_to(&served.listener)
        });
    }

    /// Removes the kernel's rules for new connections, if there are any and `on_crash` lets connections pass without us.
    fn let_new_pass(&self, served: &[Served]) -> anyhow::Result<bool> {
        let config = self.shared.config.load();
        let leads = served.iter().any(|served| is_led_to(&served.listener));
        if !leads || config.on_crash == OnCrash::Closed || self.steered.keeper.is_none() {
            return Ok(false);
        }
        let serving = served.iter().flat_map(|served| &served.serving);
        let addresses = addresses(serving.clone().map(|serving| &*serving.listening));
        let proofs: Vec<_> = serving.filter_map(Serving::proof).collect();
        self.steer_anew(&config, &addresses, &proofs, Steer::without_new)?;
        Ok(true)
    }

    pub(super) fn steer_anew(
        &self,
        config: &Config,
        addresses: &[(Arc<str>, SocketAddr)],
        listeners: &[Proof<'_>],
        change: impl FnOnce(Steer) -> Steer,
    ) -> anyhow::Result<()> {
        let mut paths = self.kernel.paths();
        let host = Host::here();
        let steer = Steer::new(config, addresses, paths.next(), &host)?;
        let steer = change(hold::put(self.shared.hold(), config, steer, addresses));
        if self.steered.keeper.is_none() {
            anyhow::ensure!(
                steer.steering.redirects.is_empty() && steer.steering.tproxies.is_empty(),
                "listeners of kind redirect and tproxy need root (CAP_NET_ADMIN) when sidetrack starts: restart it with \
                 sudo"
            );
            return Ok(());
        }
        let since = SystemTime::now();
        let events = self.steered.steer(&steer, listeners)?;
        paths.learn(&steer, config, since);
        drop(paths);
        // Subscribe once: the subscription also serves all later configurations.
        if let Some(events) = events.filter(|_| !self.subscribed.swap(true, Relaxed)) {
            *lock(&self.events) = Some(events);
            self.record_kernel_flows();
        }
        Ok(())
    }
}

/// Whether kernel rules redirect connections for other addresses to this listener.
const fn is_led_to(listener: &Listener) -> bool {
    matches!(listener.kind, ListenerKind::Redirect(_) | ListenerKind::Tproxy(_))
}

/// Removes rules that blocked traffic after a crash (`on_crash = "closed"`): this configuration has no use for them.
pub(super) fn remove_orphan() {
    match OwnedTable::adopt(Family::Inet, TABLE).map(OwnedTable::delete) {
        Ok(Ok(())) => tracing::info!("the rules that kept traffic blocked after a crash are removed"),
        // Mostly there are none. Those of a running sidetrack must not be touched.
        Err(OwnError::NoOrphan { .. } | OwnError::OwnedByAnother { .. }) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot look for rules left by a crash"),
        Err(error) => tracing::warn!(%error, "cannot look for rules left by a crash"),
    }
}

/// Whether a listener serves on with its new settings: they are the same, or only trust more peers.
fn is_kept(old: &Listener, new: &Listener) -> bool {
    old == new || old.grows_into(new)
}
