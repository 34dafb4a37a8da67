//! The service manager: its watchdog, answered while every worker runs, and listening sockets that come from it and that it keeps.

use super::node::Served;
use super::ports;
use super::threads::Serving;
use crate::config::Config;
use crate::live::Ledger;
use sidetrack_common::systemd::Systemd;
use sidetrack_common::systemd::passed::{Passed, kept_name};
use sidetrack_core::flow::Protocol;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The service manager that has started this process, if one has.
#[derive(Default)]
pub(super) struct Parent {
    pub systemd: Option<Arc<Systemd>>,
    /// What it has passed.
    pub passed: Passed,
}

impl Parent {
    /// Takes what the service manager has passed. Call it before the process opens anything.
    ///
    /// # Errors
    /// The environment promises more than there is.
    pub(super) fn from_environment() -> anyhow::Result<Self> {
        let passed = Passed::from_environment()?;
        let systemd = Systemd::from_environment().map(Arc::new);
        systemd.iter().for_each(|systemd| systemd.keeps_already(passed.kept()));
        Ok(Self { systemd, passed })
    }

    /// Closes kept sockets that this configuration has no use for, so that others may have their addresses, and warns of sockets of units
    /// that nothing would accept on.
    pub(super) fn check(&self, config: &Config) {
        let wanted = ports::wanted(config);
        let wants = |protocol, address| {
            wanted.iter().any(|(_, kind, wanted)| (ports::protocol(*kind), *wanted) == (protocol, address))
        };
        self.passed.close_kept(wants);
        let left = self.passed.kept();
        self.systemd.iter().for_each(|systemd| systemd.forget(|name| !left.iter().any(|left| left == name)));
        for (protocol, address, name) in self.passed.unused() {
            if !wants(protocol, address) {
                let protocol = protocol.as_str();
                tracing::warn!(
                    "'{name}' of systemd has {protocol} {address}, and no listener of the configuration has this address: connections \
                     to it hang. Add the listener, or remove the address from the socket unit"
                );
            }
        }
    }

    /// Lets the service manager keep the sockets of these listeners, for the process after a crash of this one, and nothing else. Those of
    /// socket units it has anyway.
    pub(super) fn keep(&self, served: &[Served]) {
        let Some(systemd) = &self.systemd else { return };
        let mut wanted = BTreeMap::new();
        for Served { listener, serving } in served {
            // A port that the kernel chose may be another one next time.
            let lasting = serving.iter().filter(|one| listener.addresses.contains(&one.listening.address));
            wanted.extend(lasting.flat_map(Self::sockets));
        }
        systemd.forget(|name| !wanted.values().any(|(known, _)| known == name));
        for ((protocol, address), (name, sockets)) in &wanted {
            if !self.passed.is_of_unit(*protocol, *address) {
                systemd.keep(name, sockets);
            }
        }
    }

    /// The listeners are about to be closed: the service manager closes its copies of their sockets first.
    pub(super) fn let_go(&self, going: &[&Serving]) {
        let names: Vec<_> =
            going.iter().flat_map(|one| Self::sockets(one)).map(|(_, (name, _))| name).collect();
        self.systemd.iter().for_each(|systemd| systemd.forget(|name| names.iter().any(|gone| gone == name)));
    }

    /// The sockets of a listener for each protocol, with the name under which they are kept.
    fn sockets(serving: &Serving) -> impl Iterator<Item = Sockets<'_>> {
        let (accept, receive) = serving.sockets();
        let address = serving.listening.address;
        let tcp = (Protocol::Tcp, accept.iter().map(AsFd::as_fd).collect::<Vec<_>>());
        let udp = (Protocol::Udp, receive.iter().map(AsFd::as_fd).collect());
        let some = [tcp, udp].into_iter().filter(|(_, sockets)| !sockets.is_empty());
        some.map(move |(protocol, sockets)| ((protocol, address), (kept_name(protocol, address), sockets)))
    }
}

/// The protocol and address of sockets, the name under which they are kept, and the sockets.
type Sockets<'a> = ((Protocol, SocketAddr), (String, Vec<BorrowedFd<'a>>));

/// Says that the node runs while every worker checks its flows. Never ends; without a watchdog nothing is sent.
pub(super) async fn watch(systemd: &Systemd, workers: &[Arc<Ledger>]) -> Infallible {
    let Some(beat) = systemd.beat() else { return std::future::pending().await };
    let mut seen: Vec<u64> = vec![0; workers.len()];
    loop {
        tokio::time::sleep(beat).await;
        let now: Vec<u64> = workers.iter().map(|ledger| ledger.sweeps()).collect();
        match now.iter().zip(&seen).position(|(now, seen)| now == seen) {
            None => systemd.alive(),
            Some(at) => tracing::error!(
                "worker {at} has not checked its flows for {beat:?}; the service manager's watchdog is not answered"
            ),
        }
        seen = now;
    }
}
