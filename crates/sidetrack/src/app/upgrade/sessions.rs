//! The overlay in a hand-over. Its links have one end in one process, so it changes hands at the last step, as the wire does; its
//! sessions follow when the change is final, as other flows do ([ADR 47](../../../../../docs/adr/0047-sessions-go-along.md)).

use super::channel::{Came, Channel};
use super::flows::{FlowFacts, VerdictFacts, facts};
use super::old::Ours;
use super::parts::{OverlayPart, StayPart};
use crate::app::node::Node;
use crate::live::{Ended, LiveFlow, Spared};
use crate::overlay::{MovedSession, Offered, QueueSockets, STATE_MAX, SessionFacts};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::{EndReason, FlowId, Protocol};
use sidetrack_core::overlay::packet::KNOWN_MAX;
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::scm;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A session. The socket of its application comes with it, then the state of its end. A field that is added must have a default:
/// the release before does not send it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SessionPart {
    session: SessionFacts,
    /// The flow, if its record is written at this end.
    flow: Option<DeliveredPart>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct DeliveredPart {
    id: u64,
    spared: Spared,
    flow: FlowFacts,
    verdict: Option<VerdictFacts>,
}

impl SessionPart {
    fn of(moved: &MovedSession) -> anyhow::Result<Self> {
        let delivered = |flow: &Arc<LiveFlow>| {
            let decided = flow.decided().context("nothing is decided about it")?;
            let (facts, verdict) = facts(&decided).context("it is not carried")?;
            anyhow::Ok(DeliveredPart { id: flow.id.0, spared: flow.spared(), flow: facts, verdict })
        };
        Ok(Self { session: moved.facts(), flow: moved.flow().map(delivered).transpose()? })
    }
}

impl Ours {
    /// Offers the sockets of the overlay, and a way to the overlay of this process.
    pub(super) fn offer_overlay(&self, to: &mut Channel) -> anyhow::Result<()> {
        let Some(overlay) = self.node.links() else { return Ok(()) };
        let Offered { listeners, datagrams, packets, door } = overlay.offered()?;
        let listeners = listeners.into_iter().map(|(address, fd)| (OverlayPart::Listener(address), fd));
        let datagrams = datagrams.into_iter().map(|(address, fd)| (OverlayPart::Datagrams(address), fd));
        for (part, fd) in listeners.chain(datagrams) {
            to.send(Kind::Overlay, &part, &[fd.as_fd()])?;
        }
        if let Some(QueueSockets { number, queue, table }) = packets {
            to.send(Kind::Overlay, &OverlayPart::Packets(number), &[queue.as_fd(), table.as_fd()])?;
        }
        to.send(Kind::Overlay, &OverlayPart::Door, &[door.as_fd()])
    }

    /// Ends the links here, for the new process. Sessions wait. Returns how many.
    pub(super) fn let_go_of_overlay(&self) -> usize {
        self.node.links().map_or(0, |overlay| overlay.let_go())
    }

    /// Makes the change final. Conversations of whole packets come with it.
    pub(super) fn say_stay(&self, to: &mut Channel, part: &StayPart) -> anyhow::Result<()> {
        let conversations = self.node.links().and_then(crate::overlay::Overlay::conversations);
        let conversations = conversations.map(|known| scm::attach(&known)).transpose()?;
        let fds: Vec<_> = conversations.iter().map(AsFd::as_fd).collect();
        to.send(Kind::Stay, part, &fds)
    }

    /// The new process has not got the overlay: it goes on here, with its sessions.
    pub(super) fn overlay_goes_on(&self) {
        if let Some(Err(error)) = self.node.links().map(|overlay| overlay.go_on()) {
            tracing::error!("the overlay does not start again: {error:#}; restart sidetrack");
        }
    }

    /// Hands the sessions over. The change is final.
    pub(super) fn move_sessions(&self, to: &mut Channel) {
        let Some(overlay) = self.node.links() else { return };
        overlay.leave();
        for moved in overlay.take_moved() {
            match send(&moved, to) {
                Ok(()) => moved.forget(),
                // Its application sees a reset, and it has a record.
                Err(error) => tracing::error!("a session of the overlay is lost on its way: {error:#}"),
            }
        }
        if let Err(error) = to.send(Kind::SessionsDone, &(), &[]) {
            tracing::warn!("the new process has ended: {error:#}");
        }
    }
}

fn send(moved: &MovedSession, to: &mut Channel) -> anyhow::Result<()> {
    let part = SessionPart::of(moved)?;
    let (state, socket) = moved.state();
    let state = scm::attach(state)?;
    to.send(Kind::Session, &part, &[socket.as_fd(), state.as_fd()])
}

impl Node {
    /// Starts the overlay with the sockets of the process before this one. `comes`: its sessions follow. `conversations`: those of
    /// whole packets.
    ///
    /// # Errors
    /// As [`crate::overlay::Overlay::begin`].
    pub(super) fn begin_overlay(&self, comes: bool, conversations: Option<OwnedFd>) -> anyhow::Result<()> {
        let Some(overlay) = self.links() else { return Ok(()) };
        match conversations.map(|fd| scm::attached(fd, KNOWN_MAX)).transpose() {
            Ok(known) => known.into_iter().for_each(|known| overlay.set_conversations(known)),
            Err(error) => tracing::error!(%error, "connections of whole packets may have to begin anew"),
        }
        overlay.take_over(comes)
    }

    /// No more sessions come.
    pub(super) fn all_sessions_came(&self) {
        self.links().into_iter().for_each(|overlay| overlay.all_came());
    }

    /// Continues a session of the process before this one.
    ///
    /// # Errors
    /// The part has not what a session needs, or this node has no overlay any more.
    pub(super) fn adopt_session(&self, came: Came) -> anyhow::Result<()> {
        let SessionPart { session, flow } = came.body()?;
        let mut fds = came.fds.into_iter();
        let socket = fds.next().map(TcpStream::from).context("its socket is missing")?;
        let state = scm::attached(fds.next().context("its state is missing")?, STATE_MAX)?;
        let config = self.shared.config.load();
        let decided = |part: DeliveredPart| {
            let decided = part.flow.decided(Protocol::Tcp, part.verdict.as_ref(), &config)?;
            anyhow::Ok((part.id, part.spared, decided))
        };
        let flow = flow.map(decided).transpose()?;
        let Some(overlay) = self.links() else {
            if let (Some((id, spared, decided)), Some(ledger)) = (flow, self.worker_ledgers().first()) {
                let flow = Arc::new(LiveFlow::again(FlowId(id), &spared));
                flow.decide(decided);
                let duration = flow.age();
                ledger.note(Ended { flow, reason: EndReason::Shutdown, detail: None, duration });
            }
            anyhow::bail!("the configuration has no [overlay] any more");
        };
        overlay.adopt(MovedSession::again(&session, (state, socket), flow, overlay.ledger())?);
        Ok(())
    }
}
