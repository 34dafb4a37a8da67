//! A flow comes back from the wire into two sockets, while bytes go both ways (ADR 45).
//!
//! ```text
//! PASSED ON --wanted back-----------------------------> WAITING (for an instant at which nothing is under way)
//! WAITING --such an instant, or PATIENCE is over------> HELD (its packets are dropped; their senders send them again)
//! HELD --it cannot come back--------------------------> PASSED ON (says why)
//! HELD --two sockets stand where the hosts stand------> LEAVING (they have the flow; the kernel bounds acknowledgements)
//! LEAVING --the sockets have sent all that was passed on before, or BOUNDED_FOR is over--> removed
//! any --SIGKILL---------------------------------------> HELD: PASSED ON again, LEAVING: ended with its sockets
//! ```

use super::given::Joins;
use super::noted::Bounds;
use super::watch::now;
use super::wired::{Wired, counted};
use super::{Stays, Wires};
use crate::live::{Ledger, LiveFlow, Slot, Step};
use sidetrack_core::flow::{FlowId, Intercept};
use sidetrack_core::time::Instant;
use sidetrack_core::wire::{self, Begin, Note};
use sidetrack_sys::bpf::{WireId, monotonic_ns};
use sidetrack_sys::conntrack::{Change, Conntrack, Entry, Tuple};
use sidetrack_sys::repair::{Again, Between};
use sidetrack_sys::sync::lock;
use std::any::Any;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How long an instant is waited for at which nothing is under way. After that, bytes under way are sent again.
const PATIENCE: Duration = Duration::from_millis(50);

/// Time between two looks for such an instant.
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// How long the kernel bounds acknowledgements at most: bytes that are under way for longer are lost.
const BOUNDED_FOR: Duration = Duration::from_secs(60);

/// `IPPROTO_TCP`.
const TCP: u8 = 6;

/// Why a flow cannot come back. It goes on as before.
#[derive(Debug)]
pub enum Obstacle {
    /// A running flow with this number is not on the wire.
    NotThere,
    /// A host has closed, or both have: the new sockets could not know that.
    Closing,
    /// Its hosts use congestion marks, which a new socket cannot be told.
    Marks,
    /// An earlier release has put it there, and has not said which TCP options were agreed on.
    Unknown,
    /// One process of the node replaces another.
    Upgrade,
    /// conntrack has forgotten how the client's packets were redirected.
    Forgotten,
    /// The kernel has refused a step.
    Refused(io::Error),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotThere => f.write_str("it is not on the wire"),
            Self::Closing => f.write_str("a host has closed its side"),
            Self::Marks => {
                f.write_str("its hosts use congestion marks (ECN), which a new socket cannot be told")
            }
            Self::Unknown => {
                f.write_str("an earlier release has put it there, and its TCP options are not known")
            }
            Self::Upgrade => f.write_str("an upgrade is under way: try again when it is over"),
            Self::Forgotten => {
                f.write_str("conntrack has forgotten how the client's packets were redirected")
            }
            Self::Refused(error) => write!(f, "the kernel has refused a step: {error}"),
        }
    }
}

impl std::error::Error for Obstacle {}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Self {
        Self::Refused(error)
    }
}

/// A flow with two sockets again, for the worker in whose ledger it is.
pub struct Returned {
    /// The sockets to the client and to the server, until [`Again::begin`].
    pub sockets: [Again; 2],
    /// The flow, with its counts.
    pub live: Arc<LiveFlow>,
    /// Where it is among the running flows.
    pub home: (Arc<Ledger>, Slot),
    /// It ends after this time without a byte.
    pub idle: Option<Duration>,
    /// It ends this long after its capture.
    pub lifetime: Option<Duration>,
    /// What is given back at its end.
    pub kept: Vec<Box<dyn Any + Send>>,
    /// A text for the record.
    pub detail: Option<String>,
}

/// A flow whose packets go to new sockets, until these need no help any more.
#[derive(Debug)]
pub(super) struct Leaving {
    id: WireId,
    /// Sequence numbers after the last bytes that were passed on to the client and to the server.
    passed: [u32; 2],
    until: Instant,
    _joins: Joins,
}

/// The ends of both connections, as their sockets know them.
fn between(
    note: &Note,
    ends: [(SocketAddr, SocketAddr); 2],
    mark: Option<u32>,
) -> Result<[Between; 2], Obstacle> {
    let [(client, asked), (server, local)] = ends;
    // Without conntrack, nothing is redirected.
    let entry = |source, destination| {
        let tuple = Tuple { source, destination, protocol: TCP };
        let mut conntrack = Conntrack::open().ok()?;
        let entry: Entry = conntrack.find(&tuple, 0).ok().flatten()?;
        // It has not seen the packets on the wire, and cannot judge those that come now.
        let _ = conntrack.update(&tuple, 0, Change { liberal: true, ..Change::default() });
        Some(entry)
    };
    let of_client = entry(client, asked);
    if of_client.is_none() && note.flow.intercept == Intercept::Redirect {
        return Err(Obstacle::Forgotten);
    }
    let _ = entry(local, server);
    let at = of_client.map_or(asked, |entry| entry.reply.source);
    let (is_caught, is_clients) = (note.flow.intercept == Intercept::Tproxy, local.ip() == client.ip());
    Ok([
        Between { remote: client, local: at, mark, is_foreign: is_caught },
        Between { remote: server, local, mark, is_foreign: is_clients },
    ])
}

impl Wires {
    /// Brings a flow back into two sockets, whose packets have this mark. It takes some milliseconds, and up to 50 more if bytes are
    /// under way all the time.
    ///
    /// # Errors
    /// Says why it cannot come back. It goes on as before then.
    pub fn bring_back(self: &Arc<Self>, number: FlowId, mark: Option<u32>) -> Result<Returned, Obstacle> {
        let wired = self.watched(number).ok_or(Obstacle::NotThere)?;
        let joins = self.may_join().map_err(|_: Stays| Obstacle::Upgrade)?;
        let until = std::time::Instant::now() + PATIENCE;
        while !wire::is_quiet(&self.memory().stands(wired.id())) && std::time::Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        wired.come_back(mark, joins)
    }

    /// Looks at flows that have left. Returns whether one is still on its way.
    pub(super) fn look_at_leaving(&self) -> bool {
        let mut leaving = lock(&self.leaving);
        let now = now();
        leaving.retain(|one| {
            let is_over = self.memory().has_left(one.id, one.passed) || now >= one.until;
            if is_over {
                self.remove(one.id);
            }
            !is_over
        });
        !leaving.is_empty()
    }

    /// Removes all of them.
    pub(super) fn remove_leaving(&self) {
        for one in std::mem::take(&mut *lock(&self.leaving)) {
            self.remove(one.id);
        }
    }
}

impl Wired {
    /// Makes two sockets of it.
    fn come_back(&self, mark: Option<u32>, joins: Joins) -> Result<Returned, Obstacle> {
        let (id, wires) = (self.id(), self.wires());
        let options = wires.memory().options(id).ok_or(Obstacle::Unknown)?;
        if options.ecn {
            return Err(Obstacle::Marks);
        }
        // Held to the end: its thread looks at it later, and so does one that ends it.
        let mut rest = lock(self.rest());
        if rest.home.is_none() || rest.ending.is_some() {
            return Err(Obstacle::NotThere);
        }
        let note = wires.noted(id).ok_or(Obstacle::NotThere)?;
        let between = between(&note, wires.memory().ends(id), mark)?;
        if !wires.memory().hold(id)? {
            return Err(Obstacle::Closing);
        }
        let made = self.sockets(&between, options);
        let (sockets, begin) = made.inspect_err(|_| wires.memory().go_on(id))?;
        let bytes = counted(wires, (id, self.base()), begin.map(|one| one.expects));
        wires.memory().leave(id, &begin);
        let passed = begin.map(|one| one.passed);
        let until = now() + BOUNDED_FOR;
        lock(&wires.leaving).push(Leaving { id, passed, until, _joins: joins });
        wires.back.fetch_add(1, Relaxed);
        let live = Arc::new(self.put_together(&note, (bytes, rest.active), now()));
        live.step(Step::Back);
        let home = rest.home.take().ok_or(Obstacle::NotThere)?;
        // At once: lists show it at any time.
        home.0.come_back(home.1, live.clone());
        (rest.port, rest.bytes) = (None, bytes);
        let kept = std::mem::take(&mut rest.kept);
        drop(rest);
        wires.forget(id);
        if let Err(error) = wires.memory().forget_note(id) {
            tracing::debug!(flow = %live.id, %error, "cannot forget what is known of a flow");
        }
        wires.look_soon(id.place());
        let Bounds { idle, lifetime } = self.bounds();
        Ok(Returned { sockets, live, home, idle, lifetime, kept, detail: note.detail })
    }

    /// Makes two sockets that stand where the hosts stand. Its packets are dropped meanwhile.
    fn sockets(
        &self,
        between: &[Between; 2],
        options: wire::Options,
    ) -> Result<([Again; 2], [Begin; 2]), Obstacle> {
        let memory = self.wires().memory();
        if memory.look(self.id()).iter().any(|side| side.finished) {
            return Err(Obstacle::Closing);
        }
        let stands = memory.stands(self.id());
        let begin = wire::back(&stands, options, (monotonic_ns() / 1_000_000) as u32);
        let [client, server] = [0, 1].map(|at| Again::new(&between[at], &begin[at]));
        Ok(([client?, server?], begin))
    }
}
