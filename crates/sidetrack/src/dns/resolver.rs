//! Decides how a query is answered: by the table of names alone, or by the host's resolver for names that this
//! host resolves anyway.

use sidetrack_sys::sync::lock;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use sidetrack_core::flow::HostName;
use sidetrack_core::time::Instant;
use sidetrack_sys::lookup::{self, NoAddress};
use tokio::sync::Semaphore;

use super::answer::{Asked, Kind, Known, Transport, answer, asked, failed};
use super::{Answers, SharedNames, forward};

/// Most look-ups in the system's resolver at a time. Each takes a thread while it waits.
const LOOKUPS_MAX: usize = 64;
/// Most queries at other servers at a time.
const FORWARDED_MAX: usize = 256;

/// How a command's resolver answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// A name gets an address of ours, so that the name is sent to the proxy. The host's resolver is asked only
    /// about names that this host resolves itself.
    #[default]
    Name,
    /// The host's resolver answers all queries.
    Resolve,
}

/// Returns whether this host itself resolves a name when a connection to it comes.
pub type ResolvesHere = Arc<dyn Fn(&HostName) -> bool + Send + Sync>;

/// Is told of a name that does not exist.
type NoSuchName = Arc<dyn Fn(&HostName) + Send + Sync>;

/// The client's address and the address that it asked.
pub type Asker = (SocketAddr, SocketAddr);

/// What may be asked of other resolvers about a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Everything.
    Fully,
    /// Its addresses.
    AddressesOnly,
    /// Nothing, for this reason: to the command, the name does not exist.
    Refused(&'static str),
}

/// Decides about each question before any other resolver can learn of it.
pub trait Admits: Send + Sync {
    /// Decides about a question for this name.
    fn admit(&self, name: &HostName, now: Instant) -> Admission;

    /// Is told that a question was refused. It may block; the answer waits for it, so the client's socket is still open.
    fn refused(&self, name: &HostName, why: &'static str, asker: Option<Asker>);
}

/// Looks up a name; blocks.
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
    no_such_name: Option<NoSuchName>,
    admits: Option<Arc<dyn Admits>>,
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
    /// A resolver that asks no other resolver.
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
            no_such_name: None,
            admits: None,
        }
    }

    /// Asks `admits` about each question first.
    #[must_use]
    pub fn admitting(self, admits: Arc<dyn Admits>) -> Self {
        Self { admits: Some(admits), ..self }
    }

    /// Tells `no_such_name` of each question about a name that does not exist. It may block.
    #[must_use]
    pub fn telling(self, no_such_name: NoSuchName) -> Self {
        Self { no_such_name: Some(no_such_name), ..self }
    }

    /// Replaces the look-up function.
    #[cfg(test)]
    pub(super) fn looking_up(self, look_up: LookUp) -> Self {
        Self { look_up, ..self }
    }

    /// Returns the answer to one message, or `None` if it gets none. `now` ages names.
    pub async fn answer(&self, question: &[u8], transport: Transport, now: Instant) -> Option<Vec<u8>> {
        self.answer_to(question, transport, now, None).await
    }

    async fn refuse(&self, host: HostName, why: &'static str, asker: Option<Asker>) {
        let Some(admits) = self.admits.clone() else { return };
        // If the task panicked, the refusal is only not printed.
        let _ = tokio::task::spawn_blocking(move || admits.refused(&host, why, asker)).await;
    }
    async fn known(&self, host: &HostName) -> Known {
        let Ok(permit) = Arc::clone(&self.lookups).try_acquire_owned() else { return self.unknown() };
        let (name, look_up) = (host.clone(), Arc::clone(&self.look_up));
        let no_such_name = self.no_such_name.clone();
        let looked_up = tokio::task::spawn_blocking(move || {
            let found = look_up(name.as_str());
            if let (Err(NoAddress::NoName), Some(tell)) = (&found, no_such_name) {
                tell(&name);
            }
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

    /// For a name that no server knows about for certain. In `Name` mode it still gets an address of ours, and
    /// the connection then says why it fails.
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

impl Answers for Resolver {
    async fn answer_to(
        &self,
        question: &[u8],
        transport: Transport,
        now: Instant,
        asker: Option<Asker>,
    ) -> Option<Vec<u8>> {
        let asked = asked(question);
        let admission = match (&self.admits, &asked) {
            (Some(admits), Some(Asked { host, .. })) => admits.admit(host, now),
            _ => Admission::Fully,
        };
        let known = match asked {
            Some(Asked { host, .. }) if let Admission::Refused(why) = admission => {
                self.refuse(host, why, asker).await;
                Known::NoName
            }
            Some(Asked { host, kind }) if self.mode == Mode::Resolve || (self.here)(&host) => match kind {
                Kind::Address => self.known(&host).await,
                Kind::Other if admission == Admission::Fully => {
                    return self.forwarded(question, transport).await;
                }
                Kind::Other if self.mode == Mode::Resolve => Known::Addresses(Vec::new()),
                Kind::Other | Kind::Service => Known::Nothing,
            },
            _ => Known::Nothing,
        };
        // A panic elsewhere cannot leave the table in an inconsistent state, so a poisoned lock is fine.
        let mut names = lock(&self.names);
        answer(question, transport, &mut names, now, &known)
    }
}
