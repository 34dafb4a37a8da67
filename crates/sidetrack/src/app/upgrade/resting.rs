//! A node that accepts nothing for a while: another process has its listeners, and may give them back.

use super::super::dns::Resolving;
use super::super::node::{Node, Served};
use super::super::sockets::Bound;
use super::parts::WindowPart;
use crate::config::Listener;
use sidetrack_core::flow::Protocol;
use sidetrack_sys::sync::lock;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How long the workers may take to stop accepting.
const PATIENCE: Duration = Duration::from_secs(5);

/// A listener whose connections wait.
pub(super) struct Rested {
    listener: Listener,
    bound: Vec<Bound>,
}

/// Copies of the sockets of one listener and address.
pub(super) struct Copies {
    pub listener: Listener,
    pub address: std::net::SocketAddr,
    pub protocol: Protocol,
    pub fds: Vec<OwnedFd>,
}

impl Node {
    /// Copies of all listening sockets.
    pub(super) fn listening_copies(&self) -> std::io::Result<Vec<Copies>> {
        let mut copies = Vec::new();
        for served in lock(&self.served).iter() {
            for serving in &served.serving {
                let (listener, address) = (served.listener.clone(), serving.listening.address);
                let (sockets, datagrams) = serving.sockets();
                let tcp = sockets.iter().map(|socket| socket.as_fd().try_clone_to_owned());
                let udp = datagrams.iter().map(|socket| socket.as_fd().try_clone_to_owned());
                for (protocol, fds) in [
                    (Protocol::Tcp, tcp.collect::<std::io::Result<Vec<_>>>()?),
                    (Protocol::Udp, udp.collect::<std::io::Result<Vec<_>>>()?),
                ] {
                    if !fds.is_empty() {
                        copies.push(Copies { listener: listener.clone(), address, protocol, fds });
                    }
                }
            }
        }
        Ok(copies)
    }

    /// Copies of the sockets that no listener has: those of the resolver, and those by which caches ask their siblings.
    pub(super) fn offered_windows(&self) -> std::io::Result<Vec<(WindowPart, OwnedFd)>> {
        let resolver = lock(&self.resolver);
        let mut offered = resolver.as_ref().map(Resolving::offered).transpose()?.unwrap_or_default();
        for (_, proxy) in self.proxies() {
            if let Some((address, socket)) = proxy.htcp_socket()? {
                offered.push((WindowPart::Htcp(address), socket.into()));
            }
        }
        Ok(offered)
    }

    /// Stops accepting, and keeps the listeners: connections wait in them. The rules that lead to them stay.
    pub(super) fn rest(&self) -> Vec<Rested> {
        // Caches let go of their folders, so that the other process can use them.
        self.proxies().iter().for_each(|(_, proxy)| proxy.rest());
        let served = std::mem::take(&mut *lock(&self.served));
        *lock(&self.resting_resolver) = lock(&self.resolver).take().map(Resolving::rest);
        self.leaving.store(true, Relaxed);
        self.shared.leave();
        self.shared.resting().set(true);
        // The process that goes on sees the ends of the kernel's flows.
        if let Some(recording) = lock(&self.recording).take() {
            recording.abort();
        }
        let rested = served.into_iter().map(|Served { listener, serving }| {
            let bound = serving.into_iter().map(|serving| serving.rest(PATIENCE)).collect();
            Rested { listener, bound }
        });
        rested.collect()
    }

    /// Goes on where [`Node::rest`] has stopped.
    pub(super) fn resume(&self, rested: Vec<Rested>) {
        let fleet = lock(&self.fleet);
        let Some(fleet) = fleet.as_ref() else { return };
        let mut served = lock(&self.served);
        self.shared.stay();
        self.shared.resting().set(false);
        self.leaving.store(false, Relaxed);
        for Rested { listener, bound } in rested {
            let serving = bound.into_iter().map(|bound| fleet.serve(bound)).collect();
            served.push(Served { listener, serving });
        }
        self.set_dialing(&served);
        let proxies = served.iter().filter_map(|served| served.serving.first()?.proxy.clone());
        proxies.for_each(|proxy| proxy.resume());
        let resolver = lock(&self.resting_resolver).take();
        match resolver.map(|bound| bound.serve(self, &self.shared.config)).transpose() {
            Ok(resolver) => *lock(&self.resolver) = resolver,
            Err(error) => tracing::error!("the resolver answers nothing until a restart: {error:#}"),
        }
        let listening = served.iter().flat_map(|served| &served.serving);
        let addresses = super::super::node::addresses(listening.clone().map(|serving| &*serving.listening));
        let proofs: Vec<_> = listening.filter_map(super::super::threads::Serving::proof).collect();
        // The other process may have changed the rules, and has the events of the kernel's flows.
        self.subscribed.store(false, Relaxed);
        let config = self.shared.config.load();
        let Some(keeper) = self.steered.keeper.as_ref().filter(|_| self.steered.used.load(Relaxed)) else {
            return;
        };
        let settled = keeper.settle().map_err(anyhow::Error::from);
        let steered = settled.and_then(|()| self.steer_anew(&config, &addresses, &proofs, |steer| steer));
        if let Err(error) = steered {
            tracing::error!(
                "the kernel's rules are not those of this configuration: {error:#}; reload to try again"
            );
        }
    }
}
