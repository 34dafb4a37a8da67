//! The resolver of a node, for clients of this host and of others. Rules decide which names exist. In name mode, a name gets an
//! address that represents it; in resolve mode, name servers answer. What they say is kept for as long as they allow.
//!
//! ```text
//!   from a stranger, too often -> no answer, or "come by TCP"
//!   no flow to the name passes -> NXDOMAIN
//!   name mode    A             -> an address of 198.18.0.0/15; NXDOMAIN if this host resolves the name and it does not exist
//!                AAAA, HTTPS   -> no data
//!                other types   -> name servers, if this host resolves the name; otherwise no data
//!   resolve mode               -> name servers
//! ```

use super::answer::{self, Asked, Kind, Known, Transport};
use super::cache::{Cache, Key};
use super::counts::{Counts, Source, Unanswered};
use super::rates::{Rates, Treated};
use super::resolver::{Asker, Mode};
use super::{Answers, SharedNames, forward};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, RecordType};
use sidetrack_core::flow::HostName;
use sidetrack_core::limit::SourceLimit;
use sidetrack_core::time::Instant;
use sidetrack_sys::random;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::timeout;

/// Most queries at name servers at a time; each takes a descriptor.
pub const ASKED_MAX: usize = 256;
/// Most queries at name servers at a time for one client.
const ASKED_PER_CLIENT: u32 = 64;
/// How long name servers may take, all together. Most clients give up after 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait whether a name exists before it gets an address without that.
const EXISTENCE_PATIENCE: Duration = Duration::from_secs(2);
/// Length of datagrams that we take from name servers, bytes (DNS flag day 2020).
const PAYLOAD_BYTES: u16 = 1232;
/// Entries of ended queries that may stay before they are removed.
const ENDED_MAX: usize = 1024;
/// RFC 8914 Sec. 4.16: the operator of the server has blocked the name.
const BLOCKED: (u16, &str) = (15, "the rules of this gateway deny this name");

/// What the rules say of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No flow to it passes.
    Denied,
    /// This host resolves it for every flow that passes.
    ResolvedHere,
    /// A hop or another node resolves it for some flows. This host's name servers must not learn of it.
    ResolvedElsewhere,
}

/// The settings in force, and what the rules say.
pub trait Rules: Send + Sync + 'static {
    /// How queries are answered.
    fn mode(&self) -> Mode;
    /// Whether this client may ask.
    fn may_ask(&self, client: IpAddr) -> bool;
    /// The name servers, at least one.
    fn servers(&self) -> Arc<[SocketAddr]>;
    /// How many datagrams of one client are answered in a second.
    fn queries_per_s(&self) -> u32;
    /// What the rules say of a name.
    fn standing(&self, name: &HostName) -> Standing;
    /// Whether this process itself asks: its own look-ups need real addresses.
    fn is_ours(&self, asker: Asker) -> bool;
    /// Is told that a name is denied to a client.
    fn denied(&self, name: &HostName, client: Option<IpAddr>);
    /// The time, on the clock that ages names.
    fn now(&self) -> Instant;
}

/// What name servers have said.
struct Found {
    message: Arc<Message>,
    age_s: u32,
    was_kept: bool,
}

/// A query at name servers that several clients may wait for.
type Asking = OnceCell<Option<Arc<Message>>>;

/// The resolver of a node.
pub struct Gateway {
    names: SharedNames,
    rules: Arc<dyn Rules>,
    mark: Option<u32>,
    cache: Mutex<Cache>,
    asking: Mutex<BTreeMap<Key, Weak<Asking>>>,
    asked: Semaphore,
    per_client: Mutex<SourceLimit>,
    rates: Mutex<Rates>,
    /// The number of the server that has last answered.
    good: AtomicUsize,
    /// What it has done.
    pub counts: Counts,
}

impl std::fmt::Debug for Gateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gateway").field("counts", &self.counts).finish_non_exhaustive()
    }
}

impl Gateway {
    /// A resolver with these names and rules. `mark`: for our own packets to name servers.
    pub fn new(names: SharedNames, rules: Arc<dyn Rules>, mark: Option<u32>) -> Self {
        Self {
            names,
            rules,
            mark,
            cache: Mutex::default(),
            asking: Mutex::default(),
            asked: Semaphore::new(ASKED_MAX),
            per_client: Mutex::new(SourceLimit::new(ASKED_PER_CLIENT, ASKED_MAX)),
            rates: Mutex::default(),
            good: AtomicUsize::new(0),
            counts: Counts::default(),
        }
    }

    /// How many names have an address now, and how many answers are kept.
    pub fn held(&self) -> (usize, usize) {
        (lock(&self.names).len(), lock(&self.cache).len())
    }

    async fn reply(
        &self,
        question: &[u8],
        transport: Transport,
        asker: Option<Asker>,
    ) -> (Option<Vec<u8>>, Source) {
        let Some(asked) = answer::asked(question) else {
            return self.reply_to_unusual(question, transport, asker).await;
        };
        let Asked { host, kind } = asked;
        let client = asker.map(|(client, _)| client.ip());
        let is_ours = asker.is_some_and(|asker| self.rules.is_ours(asker));
        let standing = if is_ours { Standing::ResolvedHere } else { self.rules.standing(&host) };
        if standing == Standing::Denied {
            self.rules.denied(&host, client);
            return (answer::coded(question, ResponseCode::NXDomain, Some(BLOCKED)), Source::Denied);
        }
        if is_ours || self.rules.mode() == Mode::Resolve {
            return self.relayed(question, transport, (client, false)).await;
        }
        let is_here = standing == Standing::ResolvedHere;
        match kind {
            Kind::Address if is_here && self.is_missing(question, client).await => {
                (answer::coded(question, ResponseCode::NXDomain, None), Source::Server)
            }
            Kind::Address => (self.own(question, transport), Source::Name),
            Kind::Other if is_here => self.relayed(question, transport, (client, true)).await,
            Kind::Other | Kind::Service => (self.own(question, transport), Source::Own),
        }
    }

    /// Answers what does not ask for an ordinary name.
    async fn reply_to_unusual(
        &self,
        question: &[u8],
        transport: Transport,
        asker: Option<Asker>,
    ) -> (Option<Vec<u8>>, Source) {
        let client = asker.map(|(client, _)| client.ip());
        let asks_others = self.rules.mode() == Mode::Resolve
            && Message::from_vec(question)
                .is_ok_and(|request| answer::is_reverse_of_others(&request, &lock(&self.names)));
        if asks_others {
            return self.relayed(question, transport, (client, false)).await;
        }
        (self.own(question, transport), Source::Own)
    }

    fn own(&self, question: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let now = self.rules.now();
        answer::answer(question, transport, &mut lock(&self.names), now, &Known::Nothing)
    }

    /// Whether name servers say that the name does not exist. If they say nothing, it may.
    async fn is_missing(&self, question: &[u8], client: Option<IpAddr>) -> bool {
        let Some(key) = key_of(question) else { return false };
        let key = Key { kind: RecordType::A.into(), ..key };
        let found = timeout(EXISTENCE_PATIENCE, self.find(key, client)).await;
        matches!(found, Ok(Some(found)) if found.message.metadata.response_code == ResponseCode::NXDomain)
    }

    /// Answers with what name servers say.
    async fn relayed(
        &self,
        question: &[u8],
        transport: Transport,
        (client, is_bare): (Option<IpAddr>, bool),
    ) -> (Option<Vec<u8>>, Source) {
        let Some(key) = key_of(question) else {
            return (answer::coded(question, ResponseCode::Refused, None), Source::Own);
        };
        let found = timeout(PATIENCE, self.find(key, client)).await.ok().flatten();
        let Some(Found { message, age_s, was_kept }) = found else {
            return (answer::failed(question), Source::Failed);
        };
        let source = match (was_kept, message.metadata.response_code) {
            (_, ResponseCode::ServFail) => Source::Failed,
            (true, _) => Source::Cache,
            (false, _) => Source::Server,
        };
        (answer::relayed(question, transport, &message, (age_s, is_bare)), source)
    }

    /// Finds an answer among those that are kept, or at name servers. Clients that ask the same wait together.
    async fn find(&self, key: Key, client: Option<IpAddr>) -> Option<Found> {
        if let Some((message, age_s)) = lock(&self.cache).get(&key, self.rules.now()) {
            return Some(Found { message, age_s, was_kept: true });
        }
        let asking = self.asking(&key);
        let found = asking.get_or_init(|| self.ask(&key, client)).await.clone();
        found.map(|message| Found { message, age_s: 0, was_kept: false })
    }

    fn asking(&self, key: &Key) -> Arc<Asking> {
        let mut asking = lock(&self.asking);
        if let Some(open) = asking.get(key).and_then(Weak::upgrade) {
            return open;
        }
        if asking.len() >= ENDED_MAX {
            asking.retain(|_, open| open.strong_count() > 0);
        }
        let open = Arc::new(Asking::new());
        asking.insert(key.clone(), Arc::downgrade(&open));
        open
    }

    /// Asks name servers, and keeps what they say. `None`: there is no room to ask.
    async fn ask(&self, key: &Key, client: Option<IpAddr>) -> Option<Arc<Message>> {
        let _room = self.asked.try_acquire().ok()?;
        let client = client.unwrap_or(Ipv4Addr::LOCALHOST.into());
        let _share = Share::take(&self.per_client, client)?;
        let servers = self.rules.servers();
        let query = query_for(key);
        let first = self.good.load(Relaxed);
        let answered = match forward::fetch(&servers, first, &query, self.mark).await {
            Some((message, bytes, number)) => {
                self.good.store(number, Relaxed);
                (message, bytes)
            }
            None => {
                let mut failed = Message::response(0, OpCode::Query);
                failed.metadata.response_code = ResponseCode::ServFail;
                (failed, 0)
            }
        };
        let message = Arc::new(answered.0);
        lock(&self.cache).put(key, &message, answered.1, self.rules.now());
        Some(message)
    }
}

impl Answers for Gateway {
    async fn answer_to(
        &self,
        question: &[u8],
        transport: Transport,
        _now: Instant,
        asker: Option<Asker>,
    ) -> Option<Vec<u8>> {
        self.counts.query(transport);
        let (reply, source) = self.reply(question, transport, asker).await;
        match reply {
            Some(_) => self.counts.answer(source),
            None => self.counts.unanswered(Unanswered::NoQuery),
        }
        reply
    }

    fn treat(&self, client: IpAddr) -> Treated {
        if !self.rules.may_ask(client) {
            self.counts.unanswered(Unanswered::Stranger);
            return Treated::Dropped;
        }
        let treated = lock(&self.rates).treat(client, self.rules.queries_per_s(), self.rules.now());
        match treated {
            Treated::Answered => {}
            Treated::Slowed => self.counts.unanswered(Unanswered::Slowed),
            Treated::Dropped => self.counts.unanswered(Unanswered::Rate),
        }
        treated
    }

    fn may_connect(&self, client: IpAddr) -> bool {
        let may = self.rules.may_ask(client);
        if !may {
            self.counts.unanswered(Unanswered::Stranger);
        }
        may
    }

    fn crowded(&self) {
        self.counts.unanswered(Unanswered::Connections);
    }
}

/// A client's share of the queries at name servers; given back on drop.
struct Share<'a>(&'a Mutex<SourceLimit>, IpAddr);

impl<'a> Share<'a> {
    fn take(limit: &'a Mutex<SourceLimit>, client: IpAddr) -> Option<Self> {
        // Made only then: its drop takes the lock, too.
        lock(limit).admit(client).then(|| Self(limit, client))
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        lock(self.0).release(self.1);
    }
}

/// Returns what a query asks of name servers. `None`: they are not asked such things, as transfers of zones.
fn key_of(question: &[u8]) -> Option<Key> {
    let request = Message::from_vec(question).ok()?;
    let [query] = request.queries.as_slice() else { return None };
    if matches!(query.query_type(), RecordType::AXFR | RecordType::IXFR) {
        return None;
    }
    Some(Key {
        name: query.name().to_lowercase(),
        kind: query.query_type().into(),
        dnssec: request.edns.as_ref().is_some_and(|edns| edns.flags().dnssec_ok),
        unchecked: request.metadata.checking_disabled,
    })
}

/// Returns our own query. Nothing in it tells who has asked us.
fn query_for(key: &Key) -> Message {
    let id = u16::from_be_bytes(random::bytes::<2>());
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.metadata.checking_disabled = key.unchecked;
    let mut query = Query::query(key.name.clone(), key.kind.into());
    query.set_query_class(DNSClass::IN);
    message.add_query(query);
    let mut edns = Edns::new();
    edns.set_max_payload(PAYLOAD_BYTES).set_dnssec_ok(key.dnssec);
    message.set_edns(edns);
    message
}

#[cfg(test)]
mod tests;
