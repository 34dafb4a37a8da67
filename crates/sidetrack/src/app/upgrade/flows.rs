//! Running flows in a hand-over.

use super::channel::{Came, Channel};
use super::old::Ours;
use crate::app::node::Node;
use crate::config::Config;
use crate::live::{Decided, Spared};
use crate::worker::Moved;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Flow, Intercept, Process, Protocol};
use sidetrack_core::policy::{Action, Carry, Verdict};
use sidetrack_core::splice;
use sidetrack_core::upgrade::{BODY_MAX, Kind};
use sidetrack_sys::scm;
use sidetrack_sys::sync::lock;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long flows are waited for that cannot answer yet, because their path is still set up.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Pause between two looks whether all have answered.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// A flow. Its sockets come with it, then what was read from the client and from the server, if there is anything.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FlowPart {
    id: u64,
    spared: Spared,
    /// Whether bytes of the client, and of the server, come with it.
    held: [bool; 2],
    limit_bytes: u32,
    idle_ms: Option<u64>,
    lifetime_ms: Option<u64>,
    linger_ms: u64,
    flow: FlowFacts,
    verdict: Option<VerdictFacts>,
    note: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FlowFacts {
    intercept: Intercept,
    listener: String,
    client: SocketAddr,
    orig_dst: String,
    host: Option<String>,
    /// Process id, name and user.
    process: Option<(Option<u32>, Option<String>, Option<u32>)>,
    user: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct VerdictFacts {
    rule: Option<String>,
    /// As in records, without credentials.
    carrier: String,
    why: String,
    agreement: Option<String>,
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl FlowPart {
    fn of(moved: &Moved) -> Option<Self> {
        let (flow, verdict) = facts(&moved.decided)?;
        Some(Self {
            id: moved.id,
            spared: moved.spared.clone(),
            held: [0, 1].map(|side| !moved.held[side].is_empty()),
            limit_bytes: moved.config.limit,
            idle_ms: moved.config.idle.map(millis),
            lifetime_ms: moved.config.lifetime.map(millis),
            linger_ms: millis(moved.config.linger),
            flow,
            verdict,
            note: moved.note.as_ref().map(ToString::to_string),
        })
    }

    /// What was decided.
    pub(super) fn decided(&self, config: &Config) -> anyhow::Result<Decided> {
        self.flow.decided(Protocol::Tcp, self.verdict.as_ref(), config)
    }
}

/// What is known of a flow, and decided about it. `None`: it is not carried.
pub(super) fn facts(decided: &Decided) -> Option<(FlowFacts, Option<VerdictFacts>)> {
    let Decided { flow, verdict, .. } = decided;
    let verdict = match verdict {
        None => None,
        Some(Verdict { rule, action: Action::Carry(carry), why, agreement, .. }) => Some(VerdictFacts {
            rule: rule.as_ref().map(ToString::to_string),
            carrier: carry.carrier.to_string(),
            why: why.to_string(),
            agreement: agreement.as_ref().map(ToString::to_string),
        }),
        Some(_) => return None,
    };
    let process = flow.process.as_ref();
    let flow = FlowFacts {
        intercept: flow.intercept,
        listener: flow.listener.to_string(),
        client: flow.client,
        orig_dst: flow.orig_dst.to_string(),
        host: flow.host.as_ref().map(ToString::to_string),
        process: process.map(|process| (process.pid, process.name.clone(), process.uid)),
        user: flow.user.clone(),
    };
    Some((flow, verdict))
}

impl FlowFacts {
    /// What was decided, with the rule of this configuration if it still has it.
    pub(super) fn decided(
        &self,
        protocol: Protocol,
        verdict: Option<&VerdictFacts>,
        config: &Config,
    ) -> anyhow::Result<Decided> {
        let process =
            self.process.clone().map(|(pid, name, uid)| Process { pid, name, uid, is_hidden: false });
        let flow = Flow {
            protocol,
            intercept: self.intercept,
            listener: self.listener.as_str().into(),
            client: self.client,
            orig_dst: self.orig_dst.parse().context("a destination")?,
            host: self.host.as_deref().and_then(|host| host.parse().ok()),
            process,
            user: self.user.clone(),
        };
        let Some(facts) = verdict else { return Ok(Decided::new(flow, None)) };
        let named = config.policy.rules().iter().enumerate().find(|(_, rule)| {
            facts.rule.as_deref() == Some(&*rule.name)
                && matches!(&rule.action, Action::Carry(carry) if carry.carrier.to_string() == facts.carrier)
        });
        let action = match named {
            Some((_, rule)) => rule.action.clone(),
            None => Action::Carry(Arc::new(Carry { carrier: carrier(&facts.carrier), ..Carry::default() })),
        };
        let verdict = Verdict {
            rule: facts.rule.as_deref().map(Into::into),
            index: named.map(|(index, _)| index),
            action,
            why: facts.why.as_str().into(),
            agreement: facts.agreement.as_deref().map(Into::into),
        };
        Ok(Decided::new(flow, Some(verdict)).by(&config.policy))
    }
}

/// Reads a carrier as records write it. It is only shown: the flow has its connection.
fn carrier(text: &str) -> Carrier {
    if let Some(tunnel) = text.strip_prefix("tunnel:") {
        return Carrier::Tunnel(tunnel.into());
    }
    let hops: Option<Vec<_>> = text.split(" -> ").map(|hop| hop.parse().ok()).collect();
    hops.filter(|hops| !hops.is_empty()).map_or(Carrier::Direct, Carrier::Hops)
}

impl Ours {
    /// Hands over the flows that can be moved. Returns how many.
    pub(super) fn move_flows(&self, to: &mut Channel) -> usize {
        let (sender, receiver) = channel();
        self.node.shared.exit().set(Some(sender));
        let flows: Vec<_> = self.node.worker_ledgers().iter().flat_map(|ledger| ledger.snapshot()).collect();
        flows.iter().for_each(|flow| flow.wants_to_leave());
        let until = Instant::now() + ANSWER_WITHIN;
        let mut moved = 0;
        while flows.iter().any(|flow| flow.is_asked_to_leave()) && Instant::now() < until {
            moved += send_all(&receiver, to);
            std::thread::sleep(LOOK_AGAIN);
        }
        self.node.shared.exit().set(None);
        moved += send_all(&receiver, to);
        if let Err(error) = to.send(Kind::FlowsDone, &(), &[]) {
            tracing::warn!("the new process has ended: {error:#}");
        }
        moved
    }
}

fn send_all(from: &Receiver<Moved>, to: &mut Channel) -> usize {
    let sent = |moved: Moved| match send(&moved, to) {
        Ok(()) => 1,
        Err(error) => {
            tracing::error!(flow = moved.id, "a flow is lost on its way to the new process: {error:#}");
            0
        }
    };
    from.try_iter().map(sent).sum()
}

fn send(moved: &Moved, to: &mut Channel) -> anyhow::Result<()> {
    let part = FlowPart::of(moved).context("no flow that is carried")?;
    let held = moved.held.iter().filter(|bytes| !bytes.is_empty());
    let held = held.map(|bytes| scm::attach(bytes)).collect::<std::io::Result<Vec<_>>>()?;
    let fds: Vec<_> = moved.sockets.iter().map(AsFd::as_fd).chain(held.iter().map(AsFd::as_fd)).collect();
    to.send(Kind::Flow, &part, &fds)
}

impl Node {
    /// Goes on with a flow of the process before this one.
    ///
    /// # Errors
    /// The part has not what a flow needs.
    pub(in crate::app) fn adopt(&self, came: Came) -> anyhow::Result<()> {
        let part: FlowPart = came.body()?;
        let mut fds = came.fds.into_iter();
        let mut socket = || fds.next().map(TcpStream::from).context("a socket is missing");
        let sockets = [socket()?, socket()?];
        let mut held = [Vec::new(), Vec::new()];
        for (bytes, _) in held.iter_mut().zip(part.held).filter(|(_, comes)| *comes) {
            let fd: OwnedFd = fds.next().context("bytes are missing")?;
            *bytes = scm::attached(fd, BODY_MAX)?;
        }
        let config = splice::Config {
            limit: part.limit_bytes,
            idle: part.idle_ms.map(Duration::from_millis),
            lifetime: part.lifetime_ms.map(Duration::from_millis),
            linger: Duration::from_millis(part.linger_ms),
        };
        let decided = Arc::new(part.decided(&self.shared.config.load())?);
        let note = part.note.map(String::into_boxed_str);
        let near = sockets[1].local_addr().ok();
        let spread = self.links().zip(near).and_then(|(overlay, near)| overlay.take_spread(near));
        let (id, spared) = (part.id, part.spared);
        let moved = Moved { sockets, held, config, id, spared, decided, note, spread };
        let fleet = lock(&self.fleet);
        fleet.as_ref().context("sidetrack is shutting down")?.adopt(moved);
        Ok(())
    }
}
