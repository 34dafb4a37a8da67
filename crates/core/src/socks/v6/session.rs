//! Sessions and idempotence tokens: the table of a server, and the state of a client.
//!
//! A session replaces the credentials that it was begun with, so its id is a secret. Tokens are numbers modulo 2^32.
//! Each is spent at most once, so that a replayed request (TCP Fast Open, TLS early data) is refused.

use crate::engine::siphash::{Key, siphash24};
use crate::secret;
use crate::time::Instant;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// An opaque session id: a multiple of 4 bytes, not empty.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(Box<[u8]>);

impl SessionId {
    /// Makes an id of these bytes. `None` if they are empty or not a multiple of 4 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        (!bytes.is_empty() && bytes.len().is_multiple_of(4)).then(|| Self(bytes.into()))
    }

    /// Returns the bytes of the id.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for SessionId {
    /// Does not print the id: a client that knows it needs no password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({} bytes)", self.0.len())
    }
}

/// A contiguous range of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenWindow {
    /// The first token.
    pub base: u32,
    /// The number of tokens, 1 to 2^31 - 1.
    pub size: u32,
}

impl TokenWindow {
    /// Makes a window. `None` if the size is out of range.
    pub const fn checked(base: u32, size: u32) -> Option<Self> {
        if size > 0 && size < 1 << 31 { Some(Self { base, size }) } else { None }
    }

    const fn contains(self, token: u32) -> bool {
        token.wrapping_sub(self.base) < self.size
    }
}

/// Whether token `x` is less than `y` (0 < y - x < 2^31, modulo 2^32).
const fn precedes(x: u32, y: u32) -> bool {
    let distance = y.wrapping_sub(x);
    distance > 0 && distance < 1 << 31
}

/// What a request asks of the session table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionQuery {
    /// The action on the session.
    pub action: SessionAction,
    /// The requested window size.
    pub token_request: Option<u32>,
    /// The token to spend.
    pub token_spend: Option<u32>,
}

/// What a request does with a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionAction {
    /// Begin a session for this user (`None`: without credentials).
    Begin(Option<String>),
    /// Resume this session.
    Resume(SessionId),
    /// End this session.
    TearDown(SessionId),
}

/// The answer of the session table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionAnswer {
    /// No session was begun, because of a limit. The request continues without one.
    Declined,
    /// The request belongs to a session.
    Active {
        /// The id of the session.
        id: SessionId,
        /// The user that began it.
        user: Option<String>,
        /// Its token window, if one was issued.
        window: Option<TokenWindow>,
        /// Whether the token was spent. `None`: no token was sent.
        token_accepted: Option<bool>,
    },
    /// The session is unknown.
    Invalid,
    /// The session has ended. The request counts as outside of a session.
    TornDown,
}

/// Limits of a [`SessionTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Most sessions in total. When all are in use, new ones are declined. Default: 4,096.
    pub max_sessions: usize,
    /// Most sessions of one user, or of one address without credentials. Default: 64.
    pub max_per_owner: usize,
    /// Largest token window. Each session stores one bit per token. Default: 1,024.
    pub max_window_size: u32,
    /// A session expires if it is unused for this time. Default: 300 s.
    pub idle_timeout: Duration,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_sessions: 4096,
            max_per_owner: 64,
            max_window_size: 1024,
            idle_timeout: Duration::from_secs(300),
        }
    }
}

/// The user or address that a session counts for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    /// A user that authenticated.
    User(String),
    /// An address without credentials.
    Address(IpAddr),
}

/// The key of a session in the table: a keyed hash of its id. A peer cannot predict hashes, so the time of a search
/// reveals nothing about ids.
type Place = [u64; 2];

#[derive(Debug)]
struct Session {
    id: SessionId,
    owner: Owner,
    used: Instant,
    /// The number of flows that belong to it now. A session with flows does not expire.
    flows: u32,
    tokens: Option<Tokens>,
}

/// The sessions of a server, limited in number, time and tokens. One table may serve many connections. Each of them
/// asks with [`super::super::server::Output::Session`].
#[derive(Debug)]
pub struct SessionTable {
    limits: SessionLimits,
    /// The key of the hashes.
    key: Key,
    sessions: BTreeMap<Place, Session>,
    /// When each session without flows was last used, oldest first.
    by_use: std::collections::BTreeSet<(Instant, SessionId)>,
    per_owner: BTreeMap<Owner, usize>,
}

impl SessionTable {
    /// Makes an empty table. `key` are random bytes from the operating system, which must stay secret.
    pub fn new(limits: SessionLimits, key: [u8; 16]) -> Self {
        let [low, high] = halves(key);
        let key = [u64::from_le_bytes(low), u64::from_le_bytes(high)];
        Self {
            limits,
            key,
            sessions: BTreeMap::new(),
            by_use: Default::default(),
            per_owner: BTreeMap::new(),
        }
    }

    fn place(&self, id: &SessionId) -> Place {
        [0, 1].map(|half| {
            let mut words = vec![half, id.0.len() as u64];
            // The length of an id is a multiple of 4 bytes.
            words.extend(id.0.chunks_exact(4).map(|four| match four {
                &[a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
                _ => 0,
            }));
            siphash24(self.key, &words)
        })
    }

    /// Answers a query. `client` is the address that the request came from. `random` are fresh random bytes from the
    /// operating system: sixteen become the id of a new session, and four the base of a new window.
    pub fn answer(
        &mut self,
        now: Instant,
        client: IpAddr,
        query: &SessionQuery,
        random: [u8; 20],
    ) -> SessionAnswer {
        self.expire(now);
        match &query.action {
            SessionAction::Begin(user) => self.begin(now, client, user.as_deref(), query, random),
            SessionAction::Resume(id) => self.resume(now, id, query, random),
            SessionAction::TearDown(id) if self.remove(id) => SessionAnswer::TornDown,
            SessionAction::TearDown(_) => SessionAnswer::Invalid,
        }
    }

    /// Notes that a flow of this session began. The session does not expire until the flow ends.
    pub fn flow_began(&mut self, id: &SessionId) {
        let place = self.place(id);
        if let Some(session) = found(&mut self.sessions, place, id) {
            self.by_use.remove(&(session.used, id.clone()));
            session.flows = session.flows.saturating_add(1);
        }
    }

    /// Notes that a flow of this session ended. The session counts as used now. Does nothing if the session was ended
    /// meanwhile.
    pub fn flow_ended(&mut self, now: Instant, id: &SessionId) {
        let place = self.place(id);
        if let Some(session) = found(&mut self.sessions, place, id) {
            session.flows = session.flows.saturating_sub(1);
            self.touch(now, id);
        }
    }

    fn touch(&mut self, now: Instant, id: &SessionId) {
        let place = self.place(id);
        if let Some(session) = found(&mut self.sessions, place, id) {
            self.by_use.remove(&(session.used, id.clone()));
            session.used = session.used.max(now);
            if session.flows == 0 {
                self.by_use.insert((session.used, id.clone()));
            }
        }
    }

    /// Removes expired sessions. [`SessionTable::answer`] does this, too.
    pub fn expire(&mut self, now: Instant) {
        while let Some((used, id)) = self.by_use.first().cloned() {
            if now < used + self.limits.idle_timeout {
                break;
            }
            self.remove(&id);
        }
    }

    /// Returns when the next session expires. Call [`SessionTable::expire`] then to free its memory.
    pub fn deadline(&self) -> Option<Instant> {
        self.by_use.first().map(|(used, _)| *used + self.limits.idle_timeout)
    }

    /// Returns the number of sessions.
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether there are no sessions.
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    fn remove(&mut self, id: &SessionId) -> bool {
        let place = self.place(id);
        if found(&mut self.sessions, place, id).is_none() {
            return false;
        }
        let Some(session) = self.sessions.remove(&place) else { return false };
        self.by_use.remove(&(session.used, id.clone()));
        if let Some(count) = self.per_owner.get_mut(&session.owner) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.per_owner.remove(&session.owner);
            }
        }
        true
    }

    fn begin(
        &mut self,
        now: Instant,
        client: IpAddr,
        user: Option<&str>,
        query: &SessionQuery,
        random: [u8; 20],
    ) -> SessionAnswer {
        let owner = user.map_or(Owner::Address(client), |user| Owner::User(user.to_owned()));
        let owned = self.per_owner.get(&owner).copied().unwrap_or(0);
        let [id @ .., _, _, _, _] = random;
        let Some(id) = SessionId::from_bytes(&id).filter(|id| !self.sessions.contains_key(&self.place(id)))
        else {
            return SessionAnswer::Declined;
        };
        if self.sessions.len() >= self.limits.max_sessions || owned >= self.limits.max_per_owner {
            return SessionAnswer::Declined;
        }
        self.per_owner.insert(owner.clone(), owned + 1);
        self.by_use.insert((now, id.clone()));
        let session = Session { id: id.clone(), owner, used: now, flows: 0, tokens: None };
        self.sessions.insert(self.place(&id), session);
        self.resume(now, &id, query, random)
    }

    fn resume(
        &mut self,
        now: Instant,
        id: &SessionId,
        query: &SessionQuery,
        random: [u8; 20],
    ) -> SessionAnswer {
        self.touch(now, id);
        let place = self.place(id);
        let Some(session) = found(&mut self.sessions, place, id) else { return SessionAnswer::Invalid };
        // Spend the token first: it cannot belong to a window that only this request asks for.
        let token_accepted =
            query.token_spend.map(|token| session.tokens.as_mut().is_some_and(|tokens| tokens.spend(token)));
        if let (Some(size), None, true) =
            (query.token_request, &session.tokens, token_accepted != Some(false))
        {
            let [.., a, b, c, d] = random;
            let size = size.min(self.limits.max_window_size);
            session.tokens = TokenWindow::checked(u32::from_be_bytes([a, b, c, d]), size).map(Tokens::new);
        }
        SessionAnswer::Active {
            id: id.clone(),
            user: match &session.owner {
                Owner::User(user) => Some(user.clone()),
                Owner::Address(_) => None,
            },
            window: session.tokens.as_ref().map(|tokens| tokens.window),
            token_accepted,
        }
    }
}

/// Returns the session with this id, if it is stored under this key.
fn found<'s>(
    sessions: &'s mut BTreeMap<Place, Session>,
    place: Place,
    id: &SessionId,
) -> Option<&'s mut Session> {
    sessions.get_mut(&place).filter(|session| secret::same(session.id.as_bytes(), id.as_bytes()))
}

fn halves(key: [u8; 16]) -> [[u8; 8]; 2] {
    let mut halves = [[0; 8]; 2];
    halves.as_flattened_mut().copy_from_slice(&key);
    halves
}

/// A window and which of its tokens are spent. The first entry of `spent` belongs to the base of the window.
#[derive(Debug)]
struct Tokens {
    window: TokenWindow,
    spent: std::collections::VecDeque<bool>,
}

impl Tokens {
    fn new(window: TokenWindow) -> Self {
        let size = usize::try_from(window.size).unwrap_or(0);
        Self { window, spent: std::iter::repeat_n(false, size).collect() }
    }

    /// Spends a token if it is in the window and unspent. Then the window slides past the spent tokens at its low
    /// end. If the token is in the upper quarter, the window slides on until the token is in the middle, so that a
    /// client that lost low tokens can continue. It never slides past the highest unspent token.
    fn spend(&mut self, token: u32) -> bool {
        if !self.window.contains(token) {
            return false;
        }
        let size = self.spent.len();
        let offset = usize::try_from(token.wrapping_sub(self.window.base)).unwrap_or(usize::MAX);
        match self.spent.get_mut(offset) {
            Some(spent) if !*spent => *spent = true,
            _ => return false,
        }
        let is_high = offset >= size - size / 4;
        let lowest_wanted = if is_high { offset.saturating_sub(size / 2) } else { 0 };
        let highest_unspent = self.spent.iter().rposition(|spent| !spent);
        let lowest_unspent = self.spent.iter().position(|spent| !spent);
        let slide = match (lowest_unspent, highest_unspent) {
            (Some(lowest), Some(highest)) => lowest.max(lowest_wanted).min(highest),
            // All tokens are spent: start a whole new window.
            _ => size,
        };
        self.spent.drain(..slide);
        self.spent.resize(size, false);
        self.window.base = self.window.base.wrapping_add(u32::try_from(slide).unwrap_or(0));
        true
    }
}

/// What a proxy reported to a client about session and tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionReport {
    /// The id of a session that was begun.
    pub id: Option<SessionId>,
    /// The session is known, and the request belongs to it.
    pub ok: bool,
    /// The proxy does not know the session. The client should forget it.
    pub invalid: bool,
    /// The window as the proxy reported it.
    pub window: Option<TokenWindow>,
    /// Whether the token was spent. `None`: not reported.
    pub token_accepted: Option<bool>,
}

/// A client's session with one proxy: its id, and the token to spend next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldSession {
    /// The id to send.
    pub id: SessionId,
    window: Option<TokenWindow>,
    next_token: u32,
}

impl HeldSession {
    /// Makes the state of a session from the report that began it. `None` if no session was begun.
    pub fn from_report(report: &SessionReport) -> Option<Self> {
        let id = report.id.clone()?;
        let next_token = report.window.map_or(0, |window| window.base);
        Some(Self { id, window: report.window, next_token })
    }

    /// Applies a later report. A window with a lower base than the known one is outdated and ignored.
    pub fn update(&mut self, report: &SessionReport) {
        let Some(window) = report.window else { return };
        match self.window {
            Some(known) if precedes(window.base, known.base) => {}
            Some(_) => {
                self.window = Some(window);
                if precedes(self.next_token, window.base) {
                    self.next_token = window.base;
                }
            }
            None => {
                self.window = Some(window);
                self.next_token = window.base;
            }
        }
    }

    /// Returns the smallest unused token. `None` if the window is used up (request it anew with a NOOP), or if there
    /// is no window. Each token is returned once.
    pub fn take_token(&mut self) -> Option<u32> {
        let token = self.next_token;
        let window = self.window.filter(|window| window.contains(token))?;
        debug_assert!(window.size > 0);
        self.next_token = token.wrapping_add(1);
        Some(token)
    }
}
