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
//! CHECKING, PREPARING --the old process is killed--> a start like any other
//! WAITING, STARTING, UNCONFIRMED --the old process is killed--> node
//! ```

use super::channel::Channel;
use super::heritage::{Go, Heritage, State};
use super::obstacles::obstacle;
use super::old::Ours;
use super::parts::{Checked, GoPart, ServingPart, StayPart};
use super::steps::Side;
use crate::config::Config;
use anyhow::{Context, bail};
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::sync::lock;
use sidetrack_sys::{process, scm};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;

/// How long the old process may take for a step.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long the old process may wait for a confirmation, and longer.
const DECIDED_WITHIN: Duration = Duration::from_secs(3 * 24 * 3600);

/// How long the end of the old process may take after its end of the channel is closed.
pub(super) const END_SEEN_WITHIN: Duration = Duration::from_secs(2);

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
    before: Before,
    /// Where to go on if the old process is killed.
    numbers: Mutex<Option<GoPart>>,
}

/// The old process: a descriptor that shows its end, if it can be watched.
#[derive(Clone)]
struct Before(Option<Arc<OwnedFd>>);

impl Before {
    /// Finds the old process: it has started the starter, which has started this process.
    fn find() -> Self {
        let starter = u32::try_from(process::parent()).ok();
        let node = starter.and_then(|pid| process::process_info(pid).ok()).map(|info| info.parent_pid);
        Self(node.and_then(|pid| process::watch(pid).ok()).map(Arc::new))
    }

    /// Whether it has ended, or ends within `patience`. A closed channel alone does not say so: the old process closes it when it
    /// has changed its mind.
    fn is_over(&self, patience: Duration) -> bool {
        self.0.as_ref().is_some_and(|end| scm::wait(&**end, Some(patience)).unwrap_or(false))
    }
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
        let channel = Mutex::new(Some(Channel::new(end, Side::New)));
        Ok(Self { channel, before: Before::find(), numbers: Mutex::default() })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Channel) -> anyhow::Result<T>) -> anyhow::Result<T> {
        work(lock(&self.channel).as_mut().context("the hand-over is over")?)
    }

    /// Says that the configuration is good, and takes what the old process offers. `None`: the old process was killed, and this
    /// one starts like any other.
    ///
    /// # Errors
    /// What is in the way of the hand-over.
    pub(crate) fn checked(&self, config: &Config) -> anyhow::Result<Option<Arc<Heritage>>> {
        if let Some(why) = obstacle(config) {
            bail!("{why}");
        }
        let heritage = Heritage::default();
        let offered = self.with(|channel| {
            let version = env!("CARGO_PKG_VERSION").to_owned();
            channel.send(Kind::Checked, &Checked { version, pid: std::process::id() }, &[])?;
            loop {
                let came = channel.next(PATIENCE)?.context("the old process has ended")?;
                if !heritage.add(came)? {
                    return Ok(());
                }
            }
        });
        if let Err(error) = offered {
            if self.before.is_over(END_SEEN_WITHIN) {
                tracing::warn!(
                    "the old process was killed before its offer was complete; this one starts anew"
                );
                return Ok(None);
            }
            return Err(error);
        }
        heritage.check(config)?;
        *lock(&self.numbers) = heritage.numbers();
        Ok(Some(Arc::new(heritage)))
    }

    /// Says that all is prepared, and waits until the old process accepts nothing any more.
    ///
    /// # Errors
    /// The old process has changed its mind, or is gone and has not said where to go on.
    pub(crate) fn ready(&self) -> anyhow::Result<Go> {
        let mut state = Vec::new();
        // What comes when the old process accepts nothing any more.
        let [one, two, three, four] = State::KINDS;
        let expected = [one, two, three, four, Kind::Go];
        let go = self.with(|channel| {
            channel.send(Kind::Ready, &(), &[])?;
            loop {
                let came = channel.expect_one_of(&expected, PATIENCE)?;
                if came.kind == Kind::Go {
                    return Ok(came);
                }
                state.push(came);
            }
        });
        let error = match go {
            Ok(came) => return Go::read(came, state),
            Err(error) => error,
        };
        match lock(&self.numbers).take() {
            Some(numbers) if self.before.is_over(END_SEEN_WITHIN) => {
                tracing::warn!("the old process was killed; this one goes on with its sockets");
                Go::alone(numbers, state)
            }
            _ => Err(error),
        }
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
        let before = self.before.clone();
        let part = ServingPart { steered, settles: true, associations: true };
        if let Err(error) = channel.send(Kind::Serving, &part, &[]) {
            // A killed process gets nothing. Its part is over, and this process goes on.
            anyhow::ensure!(before.is_over(END_SEEN_WITHIN), error);
        }
        let (tell, told) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let follow = move || {
            let _entered = runtime.enter();
            let verdict = decided(&mut channel, &before, (&ours, &pipe));
            // The receiver is gone if this process is told to stop.
            let _ = tell.send(verdict);
            if verdict == Verdict::Stay {
                take_flows(&mut channel, &ours);
            }
        };
        std::thread::Builder::new().name("upgrade".to_owned()).spawn(follow).context("a thread")?;
        Ok(told)
    }
}

/// Waits for what the old process decides, and does it.
fn decided(channel: &mut Channel, before: &Before, (ours, pipe): (&Ours, &OwnedFd)) -> Verdict {
    loop {
        match channel.next(DECIDED_WITHIN) {
            Ok(Some(came))
                if came.kind == Kind::Back
                    && ours.give_back(pipe, channel, |patience| before.is_over(patience)) =>
            {
                return Verdict::Back;
            }
            Ok(Some(mut came)) if came.kind != Kind::Back => {
                // First, because nothing else can fail. Its sessions follow.
                if let Err(error) = ours.node.begin_overlay(true, came.fds.pop()) {
                    tracing::error!("the overlay does not start: {error:#}");
                    // The old process takes everything back.
                    let _ = channel.send(Kind::Failed, &format!("{error:#}"), &[]);
                    continue;
                }
                // The release before this one sends nothing beside it.
                let StayPart { kept } = came.body::<Option<_>>().ok().flatten().unwrap_or_default();
                ours.node.take_over_wires(&kept, false);
                ours.end_associations_without_socket();
                // It may have been killed.
                let _ = channel.send(Kind::Settled, &(), &[]);
            }
            // It was killed, so nothing can be given back.
            _ => {
                tracing::warn!("the old process has ended before the upgrade was final");
                if let Err(error) = ours.node.begin_overlay(false, None) {
                    tracing::error!("the overlay does not start: {error:#}; restart sidetrack");
                }
                ours.node.take_over_wires(&[], true);
                ours.end_associations_without_socket();
            }
        }
        return Verdict::Stay;
    }
}

/// Goes on with the sessions and flows that follow.
fn take_flows(channel: &mut Channel, ours: &Ours) {
    while let Ok(Some(came)) = channel.next(PATIENCE) {
        let taken = match came.kind {
            Kind::Flow => ours.node.adopt(came).context("a flow"),
            Kind::Session => ours.node.adopt_session(came).context("a session of the overlay"),
            Kind::SessionsDone => {
                ours.node.all_sessions_came();
                Ok(())
            }
            _ => break,
        };
        if let Err(error) = taken {
            tracing::error!("lost on its way from the process before this one: {error:#}");
        }
    }
    // It may have been killed in between.
    ours.node.all_sessions_came();
    ours.node.links().into_iter().for_each(crate::overlay::Overlay::forget_spreads);
}
