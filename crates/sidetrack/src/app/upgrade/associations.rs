//! Associations of UDP in a hand-over. Their clients send to a socket that both processes have, and only one reads: so they go
//! with the listeners, and come back with them.

use super::channel::{Came, Channel};
use super::flows::{FlowFacts, VerdictFacts, facts, millis};
use super::old::Ours;
use crate::live::{Ended, LiveFlow, Spared};
use crate::worker::{MovedDatagrams, Shared};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use sidetrack_core::association::{Again, Counts};
use sidetrack_core::flow::{EndReason, FlowId, Protocol, Side};
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::sockopt;
use sidetrack_sys::udp::batch::Target;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

/// An association. Its sockets come with it. A field that is added must have a default: the release before does not send it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AssociationPart {
    /// The number of the clients' socket.
    socket_cookie: u64,
    id: u64,
    spared: Spared,
    flow: FlowFacts,
    verdict: Option<VerdictFacts>,
    note: Option<String>,
    client: SocketAddr,
    destination: String,
    is_servers: bool,
    remote: Option<SocketAddr>,
    idle_ms: u64,
    lifetime_ms: Option<u64>,
    age_ms: u64,
    unused_ms: u64,
    /// Datagrams up and down, bytes up and down.
    counts: [u64; 4],
    answer_to: SocketAddr,
    answer_from: Option<IpAddr>,
    asked: Option<SocketAddr>,
    is_own: bool,
}

impl AssociationPart {
    fn of(moved: &MovedDatagrams) -> Option<Self> {
        let (flow, verdict) = facts(&moved.decided)?;
        let again = &moved.again;
        let Counts { packets_up, packets_down, bytes_up, bytes_down } = again.counts;
        Some(Self {
            socket_cookie: moved.socket_cookie,
            id: moved.id,
            spared: moved.spared.clone(),
            flow,
            verdict,
            note: moved.note.as_ref().map(ToString::to_string),
            client: again.client,
            destination: again.destination.to_string(),
            is_servers: again.from == Side::Server,
            remote: again.remote,
            idle_ms: millis(again.idle),
            lifetime_ms: again.lifetime.map(millis),
            age_ms: millis(again.age),
            unused_ms: millis(again.unused),
            counts: [packets_up, packets_down, bytes_up, bytes_down],
            answer_to: moved.client.to,
            answer_from: moved.client.from,
            asked: moved.asked,
            is_own: moved.is_own,
        })
    }

    fn again(&self) -> anyhow::Result<Again> {
        let [packets_up, packets_down, bytes_up, bytes_down] = self.counts;
        Ok(Again {
            client: self.client,
            destination: self.destination.parse().context("a destination")?,
            from: if self.is_servers { Side::Server } else { Side::Client },
            remote: self.remote,
            idle: Duration::from_millis(self.idle_ms),
            lifetime: self.lifetime_ms.map(Duration::from_millis),
            age: Duration::from_millis(self.age_ms),
            unused: Duration::from_millis(self.unused_ms),
            counts: Counts { packets_up, packets_down, bytes_up, bytes_down },
        })
    }
}

impl Ours {
    /// Offers the associations that wait here. They stay here as well, until it is certain who goes on. Returns how many.
    pub(super) fn send_associations(&self, to: &mut Channel) -> anyhow::Result<usize> {
        self.node.shared.resting().look(|all| {
            for moved in all {
                let Some(part) = AssociationPart::of(moved) else { continue };
                let fds: Vec<_> = moved.sockets.iter().map(AsFd::as_fd).collect();
                to.send_optional(Kind::Association, &part, &fds)?;
            }
            Ok(all.len())
        })
    }

    /// The other process has the associations that wait here, or has left them out (`!is_taken`): then they end.
    pub(super) fn leave_associations(&self, is_taken: bool) {
        let left = self.node.shared.resting().take_all();
        if !is_taken {
            self.end_associations(left);
        }
    }

    /// Ends the associations that wait for a socket which this process does not serve.
    pub(super) fn end_associations_without_socket(&self) {
        let Ok(served) = self.node.listening_copies() else { return };
        let served: Vec<_> =
            served.iter().flat_map(|copies| &copies.fds).filter_map(|fd| sockopt::cookie(fd).ok()).collect();
        self.end_associations(self.node.shared.resting().take_but(&served));
    }

    fn end_associations(&self, all: Vec<MovedDatagrams>) {
        let Some(ledger) = self.node.worker_ledgers().first() else { return };
        for MovedDatagrams { id, spared, decided, note, .. } in all {
            let flow = Arc::new(LiveFlow::again(FlowId(id), &spared));
            flow.decide((*decided).clone());
            let duration = flow.age();
            ledger.note(Ended { flow, reason: EndReason::Shutdown, detail: note, duration });
        }
    }

    /// Goes on with these associations instead of those that wait here.
    pub(super) fn take_associations(&self, came: Vec<Came>) {
        drop(self.node.shared.resting().take_all());
        take_associations(&self.node.shared, came);
    }
}

/// Lets associations of another process wait until their socket is served.
pub(in super::super) fn take_associations(shared: &Shared, came: Vec<Came>) {
    for came in came {
        match read(shared, came) {
            Ok(moved) => shared.resting().put([moved]),
            Err(error) => tracing::error!("an association of the other process is lost: {error:#}"),
        }
    }
}

fn read(shared: &Shared, came: Came) -> anyhow::Result<MovedDatagrams> {
    let part: AssociationPart = came.body()?;
    let decided = part.flow.decided(Protocol::Udp, part.verdict.as_ref(), &shared.config.load())?;
    Ok(MovedDatagrams {
        socket_cookie: part.socket_cookie,
        id: part.id,
        again: part.again()?,
        spared: part.spared,
        decided: Arc::new(decided),
        note: part.note.map(String::into_boxed_str),
        client: Target { to: part.answer_to, from: part.answer_from },
        asked: part.asked,
        is_own: part.is_own,
        sockets: came.fds,
    })
}
