//! Sessions and idempotence tokens: the table a server keeps, and what a client holds.
//!
//! A session stands for the credentials it was begun with; its id is a secret. Tokens are numbers modulo 2^32, spent
//! once each, so that a replayed request (TCP Fast Open, TLS early data) is refused.

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
    /// Takes an id; `None` if it is empty or no multiple of 4 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        (!bytes.is_empty() && bytes.len().is_multiple_of(4)).then(|| Self(bytes.into()))
    }

    /// The id's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for SessionId {
    /// Not the id itself: who knows it needs no password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({} bytes)", self.0.len())
    }
}

/// A contiguous range of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenWindow {
    /// The first token.
    pub base: u32,
    /// How many; 1 to 2^31 - 1.
    pub size: u32,
}

impl TokenWindow {
    /// A window; `None` if the size is out of range.
    pub const fn checked(base: u32, size: u32) -> Option<Self> {
        if size > 0 && size < 1 << 31 { Some(Self { base, size }) } else { None }
    }

    const fn contains(self, token: u32) -> bool {
        token.wrapping_sub(self.base) < self.size
    }
}

/// Is token `x` less than `y`? (0 < y - x < 2^31, modulo 2^32.)
const fn precedes(x: u32, y: u32) -> bool {
    let distance = y.wrapping_sub(x);
    distance > 0 && distance < 1 << 31
}

/// What a request wants of the session table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionQuery {
    /// What about the session.
    pub action: SessionAction,
    /// A window of this size is asked for.
    pub token_request: Option<u32>,
    /// This token is to be spent.
    pub token_spend: Option<u32>,
}

/// What a request does with a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionAction {
    /// Begin one for this user (`None`: without credentials).
    Begin(Option<String>),
    /// Be part of it.
    Resume(SessionId),
    /// End it.
    TearDown(SessionId),
}

/// What the session table says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionAnswer {
    /// No session was begun (limits); the request goes on without.
    Declined,
    /// The request is part of a session.
    Active {
        /// Its id.
        id: SessionId,
        /// Who began it.
        user: Option<String>,
        /// Its window, if one was issued.
        window: Option<TokenWindow>,
        /// Was the token spent? `None`: no token was sent.
        token_accepted: Option<bool>,
    },
    /// There is no such session.
    Invalid,
    /// It is gone now; the request counts as outside any session.
    TornDown,
}

/// Bounds of a [`SessionTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Most sessions at all; when all are in use, no further one is begun.
    pub max_sessions: usize,
    /// Most sessions of one user, or, without credentials, of one address.
    pub max_per_owner: usize,
    /// Largest token window issued (each session keeps a bit per token).
    pub max_window_size: u32,
    /// A session unused for this long is forgotten.
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

/// Whom a session counts against.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    /// A user that authenticated.
    User(String),
    /// An address without credentials.
    Address(IpAddr),
}

/// Where a session is in the table: a keyed hash of its id. The search compares places, which no peer can foresee, so the time it
/// takes says nothing about ids.
type Place = [u64; 2];

#[derive(Debug)]
struct Session {
    id: SessionId,
    owner: Owner,
    used: Instant,
    /// Flows that are part of it now. While there are any it does not fall idle.
    flows: u32,
    tokens: Option<Tokens>,
}

/// The sessions of a server, bounded in number, time and tokens. One table may serve many connections: each asks with
/// [`super::super::server::Output::Session`].
#[derive(Debug)]
pub struct SessionTable {
    limits: SessionLimits,
    /// What places are hashed with.
    key: Key,
    sessions: BTreeMap<Place, Session>,
    /// When each session without flows was used last, oldest first.
    by_use: std::collections::BTreeSet<(Instant, SessionId)>,
    per_owner: BTreeMap<Owner, usize>,
}

impl SessionTable {
    /// An empty table. `key` are random bytes from the operating system, which stay secret.
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
            // Ids are multiples of 4 bytes.
            words.extend(id.0.chunks_exact(4).map(|four| match four {
                &[a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
                _ => 0,
            }));
            siphash24(self.key, &words)
        })
    }

    /// Answers a query. `client` is where the request came from. `random` are fresh random bytes from the operating
    /// system: sixteen become the id of a new session, four the base of a new window.
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

    /// A flow of this session begins: until it ends the session does not fall idle.
    pub fn flow_began(&mut self, id: &SessionId) {
        let place = self.place(id);
        if let Some(session) = found(&mut self.sessions, place, id) {
            self.by_use.remove(&(session.used, id.clone()));
            session.flows = session.flows.saturating_add(1);
        }
    }

    /// A flow of this session ended: it counts as used now. Nothing happens if the session was torn down meanwhile.
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

    /// Forgets sessions that are idle; also done by every [`SessionTable::answer`].
    pub fn expire(&mut self, now: Instant) {
        while let Some((used, id)) = self.by_use.first().cloned() {
            if now < used + self.limits.idle_timeout {
                break;
            }
            self.remove(&id);
        }
    }

    /// When the next session falls idle: call [`SessionTable::expire`] then to free its memory.
    pub fn deadline(&self) -> Option<Instant> {
        self.by_use.first().map(|(used, _)| *used + self.limits.idle_timeout)
    }

    /// How many sessions there are.
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Is there no session?
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
        // Spent first: a token of a window that this same request asks for cannot be known yet.
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

/// The session with this id, if it is at this place.
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

/// A window and which of its tokens are spent, as a ring of bits: token `t` is bit `t % size` while it is inside.
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

    /// Spends a token, if it can be. The window then slides past spent tokens at its low end; and if a token of its
    /// upper quarter was spent, on until that token is in the middle, so that a client that lost low ones can go on.
    /// Never past the highest unspent token.
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
            // All are spent: a whole new window.
            _ => size,
        };
        self.spent.drain(..slide);
        self.spent.resize(size, false);
        self.window.base = self.window.base.wrapping_add(u32::try_from(slide).unwrap_or(0));
        true
    }
}

/// What a proxy told a client about session and tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionReport {
    /// A session was begun: its id.
    pub id: Option<SessionId>,
    /// The session is known and the request part of it.
    pub ok: bool,
    /// The proxy does not know the session: forget it.
    pub invalid: bool,
    /// The window as the proxy has it.
    pub window: Option<TokenWindow>,
    /// Was the token spent? `None`: not said.
    pub token_accepted: Option<bool>,
}

/// A session a client holds with one proxy: its id and which token to spend next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldSession {
    /// The id to send.
    pub id: SessionId,
    window: Option<TokenWindow>,
    next_token: u32,
}

impl HeldSession {
    /// What a report that began a session leads to; `None` if none was begun.
    pub fn from_report(report: &SessionReport) -> Option<Self> {
        let id = report.id.clone()?;
        let next_token = report.window.map_or(0, |window| window.base);
        Some(Self { id, window: report.window, next_token })
    }

    /// Takes in a later report. A window with a lower base than the known one is old news and ignored.
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

    /// The smallest token not used yet; `None` when the window is used up (ask by a NOOP for a new look at it) or
    /// there is none. Every token is given out once.
    pub fn take_token(&mut self) -> Option<u32> {
        let token = self.next_token;
        let window = self.window.filter(|window| window.contains(token))?;
        debug_assert!(window.size > 0);
        self.next_token = token.wrapping_add(1);
        Some(token)
    }
}
