//! The process that takes over.
//!
//! ```text
//! CHECKING --Checked-->        the configuration is good; nothing has moved
//! PREPARING --Offered, Ready-->  sockets are here, files and the keeper are not used yet
//! WAITING --Go-->              the old process accepts and writes nothing any more
//! STARTING --Serving-->        connections are accepted here
//! UNCONFIRMED --Stay--> takes over what only one process can have --Settled--> node
//! UNCONFIRMED --Back--> gives everything back, and ends with its flows
//! any before Stay --failure--> Failed, and the end: the old process goes on
//! ```

use super::channel::Channel;
use super::heritage::{Go, Heritage};
use super::obstacles::obstacle;
use super::old::Ours;
use super::parts::{Checked, ServingPart, StayPart};
use crate::config::Config;
use anyhow::{Context, bail};
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::process;
use sidetrack_sys::sync::lock;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;

/// How long the old process may take for a step.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long the old process may wait for a confirmation, and longer.
const DECIDED_WITHIN: Duration = Duration::from_secs(3 * 24 * 3600);

/// What the old process has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// This process goes on.
    Stay,
    /// Everything was given back.
    Back,
}

/// The connection to the old process.
pub(crate) struct Heir {
    channel: Mutex<Option<Channel>>,
}

impl Heir {
    /// Begins with the channel at standard input.
    ///
    /// # Errors
    /// Standard input is not such a channel.
    pub(crate) fn begin() -> anyhow::Result<Self> {
        // It was started by way of a descriptor, whose number would be its name in `ps`.
        let _ = process::set_name(c"sidetrack");
        let end = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
        Ok(Self { channel: Mutex::new(Some(Channel::new(end))) })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Channel) -> anyhow::Result<T>) -> anyhow::Result<T> {
        work(lock(&self.channel).as_mut().context("the hand-over is over")?)
    }

    /// Says that the configuration is good, and takes what the old process offers.
    ///
    /// # Errors
    /// What is in the way of the hand-over.
    pub(crate) fn checked(&self, config: &Config) -> anyhow::Result<Arc<Heritage>> {
        if let Some(why) = obstacle(config) {
            bail!("{why}");
        }
        let heritage = Heritage::default();
        self.with(|channel| {
            let version = env!("CARGO_PKG_VERSION").to_owned();
            channel.send(Kind::Checked, &Checked { version, pid: std::process::id() }, &[])?;
            loop {
                let came = channel.next(PATIENCE)?.context("the old process has ended")?;
                if !heritage.add(came)? {
                    return Ok(());
                }
            }
        })?;
        heritage.check(config)?;
        Ok(Arc::new(heritage))
    }

    /// Says that all is prepared, and waits until the old process accepts nothing any more.
    ///
    /// # Errors
    /// The old process has changed its mind, or is gone.
    pub(crate) fn ready(&self) -> anyhow::Result<Go> {
        self.with(|channel| {
            channel.send(Kind::Ready, &(), &[])?;
            let mut associations = Vec::new();
            loop {
                let came = channel.expect_one_of(&[Kind::Association, Kind::Go], PATIENCE)?;
                match came.kind {
                    Kind::Association => associations.push(came),
                    _ => return Go::read(came, associations),
                }
            }
        })
    }

    /// Says why this process ends.
    pub(crate) fn failed(&self, error: &anyhow::Error) {
        // The old process sees our end in any case.
        let _ = self.with(|channel| channel.send(Kind::Failed, &format!("{error:#}"), &[]));
    }

    /// Says that connections are accepted here, and waits for the verdict on a thread of its own. `pipe`: for records after
    /// everything was given back.
    ///
    /// # Errors
    /// The old process is gone, or there is no thread.
    pub(crate) fn serving(
        &self,
        steered: bool,
        (ours, pipe): (Ours, OwnedFd),
    ) -> anyhow::Result<oneshot::Receiver<Verdict>> {
        let mut channel = lock(&self.channel).take().context("the hand-over is over")?;
        channel.send(Kind::Serving, &ServingPart { steered, settles: true, associations: true }, &[])?;
        let (tell, told) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let follow = move || {
            let _entered = runtime.enter();
            let verdict = match channel.next(DECIDED_WITHIN) {
                Ok(Some(came)) if came.kind == Kind::Back => {
                    ours.give_back(&pipe);
                    if let Err(error) = ours.send_associations(&mut channel) {
                        tracing::warn!("associations of UDP are not given back: {error:#}");
                    }
                    ours.leave_associations(true);
                    // It may have ended.
                    let _ = channel.send(Kind::Returned, &(), &[]);
                    Verdict::Back
                }
                Ok(Some(came)) => {
                    // The release before this one sends nothing beside it.
                    let StayPart { kept } = came.body::<Option<_>>().ok().flatten().unwrap_or_default();
                    ours.node.take_over_wires(&kept, false);
                    ours.end_associations_without_socket();
                    // It may have been killed.
                    let _ = channel.send(Kind::Settled, &(), &[]);
                    Verdict::Stay
                }
                // It was killed, so nothing can be given back.
                Ok(None) | Err(_) => {
                    tracing::warn!("the old process has ended before the upgrade was final");
                    ours.node.take_over_wires(&[], true);
                    ours.end_associations_without_socket();
                    Verdict::Stay
                }
            };
            // The receiver is gone if this process is told to stop.
            let _ = tell.send(verdict);
            // Flows follow, if this process stays.
            while verdict == Verdict::Stay
                && let Ok(Some(came)) = channel.next(PATIENCE)
                && came.kind == Kind::Flow
            {
                if let Err(error) = ours.node.adopt(came) {
                    tracing::error!("a flow of the process before this one is lost: {error:#}");
                }
            }
        };
        std::thread::Builder::new().name("upgrade".to_owned()).spawn(follow).context("a thread")?;
        Ok(told)
    }
}
