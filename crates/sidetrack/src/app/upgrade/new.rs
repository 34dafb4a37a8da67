//! The process that takes over.
//!
//! ```text
//! CHECKING --Checked-->        the configuration is good; nothing has moved
//! PREPARING --Offered, Ready-->  sockets are here, files and the keeper are not used yet
//! WAITING --Go-->              the old process accepts and writes nothing any more
//! STARTING --Serving-->        connections are accepted here
//! UNCONFIRMED --Stay--> node   --Back--> gives everything back, and ends with its flows
//! any before Stay --failure--> Failed, and the end: the old process goes on
//! ```

use super::channel::{Came, Channel};
use super::heritage::{Go, Heritage};
use super::obstacles::obstacle;
use super::parts::{Checked, ServingPart};
use crate::config::Config;
use anyhow::{Context, bail};
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::process;
use sidetrack_sys::sync::lock;
use std::os::fd::AsFd;
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
            Go::read(channel.expect(Kind::Go, PATIENCE)?)
        })
    }

    /// Says why this process ends.
    pub(crate) fn failed(&self, error: &anyhow::Error) {
        // The old process sees our end in any case.
        let _ = self.with(|channel| channel.send(Kind::Failed, &format!("{error:#}"), &[]));
    }

    /// Says that connections are accepted here, and waits for the verdict on a thread of its own. `give_back` is called before
    /// the old process goes on, and `adopt` with each flow that it hands over.
    ///
    /// # Errors
    /// The old process is gone, or there is no thread.
    pub(crate) fn serving(
        &self,
        steered: bool,
        give_back: impl FnOnce() + Send + 'static,
        adopt: impl Fn(Came) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<oneshot::Receiver<Verdict>> {
        let mut channel = lock(&self.channel).take().context("the hand-over is over")?;
        channel.send(Kind::Serving, &ServingPart { steered }, &[])?;
        let (tell, told) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let follow = move || {
            let _entered = runtime.enter();
            let verdict = match channel.next(DECIDED_WITHIN) {
                Ok(Some(came)) if came.kind == Kind::Back => Verdict::Back,
                Ok(Some(_)) => Verdict::Stay,
                // It was killed, so nothing can be given back.
                Ok(None) | Err(_) => {
                    tracing::warn!("the old process has ended before the upgrade was final");
                    Verdict::Stay
                }
            };
            if verdict == Verdict::Back {
                give_back();
                // It may have ended.
                let _ = channel.send(Kind::Returned, &(), &[]);
            }
            // The receiver is gone if this process is told to stop.
            let _ = tell.send(verdict);
            // Flows follow, if this process stays.
            while verdict == Verdict::Stay
                && let Ok(Some(came)) = channel.next(PATIENCE)
                && came.kind == Kind::Flow
            {
                if let Err(error) = adopt(came) {
                    tracing::error!("a flow of the process before this one is lost: {error:#}");
                }
            }
        };
        std::thread::Builder::new().name("upgrade".to_owned()).spawn(follow).context("a thread")?;
        Ok(told)
    }
}
