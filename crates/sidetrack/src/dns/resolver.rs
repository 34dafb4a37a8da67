//! Who answers a question: the table of names alone, or the host's resolver where that learns nothing new.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError};

use sidetrack_core::flow::HostName;
use sidetrack_core::time::Instant;
use sidetrack_sys::lookup::{self, NoAddress};
use tokio::sync::Semaphore;

use super::answer::{Asked, Kind, Known, Transport, answer, asked, failed};
use super::{SharedNames, forward};

/// Most look-ups by the system's resolver at a time; each takes a thread while it waits.
const LOOKUPS_MAX: usize = 64;
/// Most questions at other servers at a time.
const FORWARDED_MAX: usize = 256;

/// What a command's resolver says of names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// A name gets an address that stands for it, so that it travels to the proxy. The host is asked only about names
    /// that it resolves itself.
    #[default]
    Name,
    /// The host's resolver answers everything.
    Resolve,
}

/// Whether this host resolves a name itself when a connection goes there.
pub type ResolvesHere = Arc<dyn Fn(&HostName) -> bool + Send + Sync>;

/// Looks a name up; blocks.
type LookUp = Arc<dyn Fn(&str) -> Result<Vec<IpAddr>, NoAddress> + Send + Sync>;

/// The resolver of one command.
pub struct Resolver {
    names: SharedNames,
    mode: Mode,
    here: ResolvesHere,
    look_up: LookUp,
    servers: Vec<SocketAddr>,
    lookups: Arc<Semaphore>,
    forwarded: Semaphore,
}

impl std::fmt::Debug for Resolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolver")
            .field("mode", &self.mode)
            .field("servers", &self.servers)
            .finish_non_exhaustive()
    }
}

impl Resolver {
    /// A resolver that asks nobody.
    pub fn of_names(names: SharedNames) -> Self {
        Self::new(names, Mode::Name, Arc::new(|_| false), Vec::new())
    }

    /// A resolver that asks the system's resolver for addresses, and `servers` for everything else.
    pub fn new(names: SharedNames, mode: Mode, here: ResolvesHere, servers: Vec<SocketAddr>) -> Self {
        Self {
            names,
            mode,
            here,
            look_up: Arc::new(lookup::addresses),
            servers,
            lookups: Arc::new(Semaphore::new(LOOKUPS_MAX)),
            forwarded: Semaphore::new(FORWARDED_MAX),
        }
    }

    /// The same with another way to look names up.
    #[cfg(test)]
    pub(super) fn looking_up(self, look_up: LookUp) -> Self {
        Self { look_up, ..self }
    }

    /// The answer to one message; `None` if it deserves none. `now` ages names.
    pub async fn answer(&self, question: &[u8], transport: Transport, now: Instant) -> Option<Vec<u8>> {
        let known = match asked(question) {
            Some(Asked { host, kind }) if self.mode == Mode::Resolve || (self.here)(&host) => match kind {
                Kind::Address => self.known(&host).await,
                Kind::Other => return self.forwarded(question, transport).await,
                Kind::Service => Known::Nothing,
            },
            _ => Known::Nothing,
        };
        // The table holds no invariant across calls that a panic elsewhere could have broken.
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        answer(question, transport, &mut names, now, &known)
    }

    async fn known(&self, host: &HostName) -> Known {
        let Ok(permit) = Arc::clone(&self.lookups).try_acquire_owned() else { return self.unknown() };
        let (name, look_up) = (host.clone(), Arc::clone(&self.look_up));
        let looked_up = tokio::task::spawn_blocking(move || {
            let found = look_up(name.as_str());
            drop(permit);
            found
        });
        match (looked_up.await, self.mode) {
            (Ok(Ok(addresses)), Mode::Resolve) => Known::Addresses(addresses),
            (Ok(Ok(_)), Mode::Name) => Known::Nothing,
            (Ok(Err(NoAddress::NoName)), _) => Known::NoName,
            (Ok(Err(NoAddress::NoData)), _) => Known::Addresses(Vec::new()),
            (Ok(Err(NoAddress::Unknown)) | Err(_), _) => self.unknown(),
        }
    }

    /// No server could say whether the name exists. With an address that stands for it, the connection says why it fails.
    fn unknown(&self) -> Known {
        match self.mode {
            Mode::Name => Known::Nothing,
            Mode::Resolve => Known::Failed,
        }
    }

    async fn forwarded(&self, question: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let answered = match self.forwarded.try_acquire() {
            Ok(_permit) => forward::ask(&self.servers, question, transport).await,
            Err(_) => None,
        };
        answered.or_else(|| failed(question))
    }
}
