//! What is kept of a flow on the wire besides its numbers: written once into the kernel's memory, read when a list or a record is made.

use super::Wires;
use crate::live::{Decided, LiveFlow, Taken, Trace, Transport};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::policy::{Action, Carry, Policy, Verdict};
use sidetrack_core::splice;
use sidetrack_core::wire::Note;
use sidetrack_sys::bpf::WireId;
use sidetrack_sys::sync::lock;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, UNIX_EPOCH};

/// What the flows of one rule have in common.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    /// Without the agreement's decision, which is each flow's own.
    pub verdict: Verdict,
    pub policy: Weak<Policy>,
    pub bounds: Bounds,
}

/// When a flow ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub idle: Option<Duration>,
    pub lifetime: Option<Duration>,
}

impl Bounds {
    pub(super) fn of_note(note: &Note) -> Self {
        let millis = |ms: Option<u64>| ms.map(Duration::from_millis);
        Self { idle: millis(note.idle_ms), lifetime: millis(note.lifetime_ms) }
    }
}

impl Kind {
    pub(super) fn of(decided: Option<&Decided>, bounds: Bounds) -> Self {
        let policy = decided.map(|decided| decided.policy.clone()).unwrap_or_default();
        let verdict = decided.and_then(|decided| decided.verdict.clone()).unwrap_or_else(|| Verdict {
            rule: None,
            index: None,
            action: Action::Deny,
            why: "policy was not asked".into(),
            agreement: None,
        });
        Self { verdict: Verdict { agreement: None, ..verdict }, policy, bounds }
    }

    /// That of a flow whose rule is not in force any more.
    pub(super) fn of_note(note: &Note) -> Self {
        let hops = note.carrier.as_deref().filter(|carrier| *carrier != "direct");
        let hops =
            hops.and_then(|hops| hops.split(" -> ").map(|hop| hop.parse().ok()).collect::<Option<Vec<_>>>());
        let carry = Carry { carrier: hops.map_or(Carrier::Direct, Carrier::Hops), ..Carry::default() };
        let verdict = Verdict {
            rule: note.rule.as_deref().map(Into::into),
            index: None,
            action: Action::Carry(Arc::new(carry)),
            why: "decided by an earlier process".into(),
            agreement: None,
        };
        Self { verdict, policy: Weak::new(), bounds: Bounds::of_note(note) }
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.policy.ptr_eq(&other.policy) && self.bounds == other.bounds && self.verdict == other.verdict
    }
}

fn micros(time: Option<Duration>) -> Option<u64> {
    time.and_then(|time| u64::try_from(time.as_micros()).ok())
}

fn millis(time: Option<Duration>) -> Option<u64> {
    time.and_then(|time| u64::try_from(time.as_millis()).ok())
}

/// How a flow is carried, without credentials.
pub(super) fn carrier(action: &Action) -> Option<String> {
    match action {
        Action::Carry(carry) => Some(carry.carrier.to_string()),
        Action::Deny => None,
    }
}

fn of(live: &LiveFlow, base: [u64; 2], config: &splice::Config) -> Option<Note> {
    let decided = live.decided()?;
    let since = live.since.duration_since(UNIX_EPOCH).ok();
    let path = live.taken().and_then(|taken| {
        let transport = Transport::ALL.iter().position(|one| *one == taken.transport)?;
        Some((u8::try_from(transport).ok()?, taken.address))
    });
    Some(Note {
        number: live.id,
        since_us: micros(since).unwrap_or(0),
        base,
        connect_us: micros(live.connect_time()),
        first_byte_us: micros(live.first_byte_time()),
        sniff_us: micros(live.sniff_wait()),
        held_us: micros(live.held_wait()),
        idle_ms: millis(config.idle),
        lifetime_ms: millis(config.lifetime),
        flow: decided.flow.clone(),
        rule: decided.rule().map(|rule| rule.to_string()),
        carrier: decided.action().and_then(carrier),
        agreement: decided.agreement().map(str::to_owned),
        tls_name: live.tls_name().cloned(),
        path,
        detail: None,
        trace: live.trace().to_bytes(),
    })
}

/// Puts a flow together. It began `age` before now.
pub(super) fn put_together(note: &Note, kind: &Kind, age: Duration) -> LiveFlow {
    let since = UNIX_EPOCH + Duration::from_micros(note.since_us);
    let now = std::time::Instant::now();
    let flow = LiveFlow::caught(note.number, since, now.checked_sub(age).unwrap_or(now));
    let agreement = note.agreement.as_deref().map(Into::into);
    let verdict = Some(Verdict { agreement, ..kind.verdict.clone() });
    flow.decide(Decided { flow: note.flow.clone(), verdict, policy: kind.policy.clone() });
    let after =
        |us: Option<u64>, set: &dyn Fn(Duration)| us.map(Duration::from_micros).into_iter().for_each(set);
    after(note.connect_us, &|time| flow.connected(time));
    after(note.first_byte_us, &|time| flow.first_byte(time));
    after(note.sniff_us, &|time| flow.sniffed(time));
    after(note.held_us, &|time| flow.held(time));
    flow.carried_by(note.path.and_then(|(transport, address)| {
        Some(Taken { transport: *Transport::ALL.get(usize::from(transport))?, address })
    }));
    note.tls_name.clone().into_iter().for_each(|name| flow.greeted(name));
    flow.traced(|trace| *trace = Trace::from_bytes(&note.trace));
    flow.shunted();
    flow
}

impl Wires {
    /// Stores what is known of a flow beside its numbers. `base`: what is added to the kernel's counts to get payload bytes.
    ///
    /// # Errors
    /// Policy was not asked about it; the kernel has no memory.
    pub fn note(
        &self,
        id: WireId,
        live: &LiveFlow,
        base: [u64; 2],
        config: &splice::Config,
    ) -> io::Result<()> {
        let note = of(live, base, config).ok_or(io::ErrorKind::InvalidInput)?;
        self.memory().note(id, &note.encode())
    }

    /// Returns the one kind of all flows that are alike.
    pub(super) fn kind(&self, kind: Kind) -> Arc<Kind> {
        let mut kinds = lock(&self.kinds);
        if let Some(found) = kinds.iter().find(|known| known.is_same(&kind)) {
            return found.clone();
        }
        kinds.retain(|kind| Arc::strong_count(kind) > 1);
        let kind = Arc::new(kind);
        kinds.push(kind.clone());
        kind
    }

    /// Reads what is known of a flow.
    pub(super) fn noted(&self, id: WireId) -> Option<Note> {
        Note::parse(&self.memory().noted(id).ok()??).ok()
    }

    /// Changes what is known of a flow.
    pub(super) fn note_anew(&self, id: WireId, change: impl FnOnce(&mut Note)) {
        if let Some(mut note) = self.noted(id) {
            change(&mut note);
            if let Err(error) = self.memory().note(id, &note.encode()) {
                tracing::debug!(flow = %note.number, %error, "cannot note what is known of a flow of the wire");
            }
        }
    }
}
