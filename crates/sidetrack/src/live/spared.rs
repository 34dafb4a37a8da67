//! Times and counts of a flow, for another process of this node that goes on with it.

use super::{LiveFlow, Taken, Transport, UNSET, now};
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::{FlowId, Side};
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, UNIX_EPOCH};

/// Times and counts. A field that is added must have a default: the release before does not send it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spared {
    since_us: u64,
    age_us: u64,
    bytes_up: u64,
    bytes_down: u64,
    #[serde(default)]
    connect_us: Option<u64>,
    #[serde(default)]
    first_byte_us: Option<u64>,
    #[serde(default)]
    sniff_us: Option<u64>,
    #[serde(default)]
    held_us: Option<u64>,
    #[serde(default)]
    active_ms: u64,
    #[serde(default)]
    tls_name: Option<String>,
    #[serde(default)]
    taken: Option<(String, SocketAddr)>,
    #[serde(default)]
    shunted: bool,
    /// Multipath TCP towards the client, and towards the server.
    #[serde(default)]
    multipath: [bool; 2],
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(UNSET - 1)
}

impl LiveFlow {
    /// Asks the owner to let the flow go to another process.
    pub fn wants_to_leave(&self) {
        self.elsewhere.iter().for_each(|one| one.store(true, Relaxed));
        self.wake();
    }

    /// Whether such a wish waits. It is taken with this call, which only the owner makes.
    pub fn takes_wish_to_leave(&self) -> bool {
        self.elsewhere[0].load(Relaxed) && self.elsewhere[0].swap(false, Relaxed)
    }

    /// The owner has let it go, or goes on with it.
    pub fn has_answered(&self) {
        self.elsewhere[1].store(false, Relaxed);
    }

    /// Whether the owner has not answered yet.
    pub fn is_asked_to_leave(&self) -> bool {
        self.elsewhere[1].load(Relaxed)
    }

    /// Its times and counts until now.
    pub fn spared(&self) -> Spared {
        let (bytes_up, bytes_down) = self.bytes();
        let multipath = self.multipath();
        Spared {
            since_us: micros(self.since.duration_since(UNIX_EPOCH).unwrap_or_default()),
            age_us: micros(self.age()),
            bytes_up,
            bytes_down,
            connect_us: self.connect_time().map(micros),
            first_byte_us: self.first_byte_time().map(micros),
            sniff_us: self.sniff_wait().map(micros),
            held_us: self.held_wait().map(micros),
            active_ms: self.active_ms.load(Relaxed),
            tls_name: self.tls_name().map(ToString::to_string),
            taken: self.taken().map(|taken| (taken.transport.as_str().to_owned(), taken.address)),
            shunted: self.was_shunted(),
            multipath: [multipath.client, multipath.server],
        }
    }

    /// A flow that another process has begun, with this number.
    pub fn again(id: FlowId, spared: &Spared) -> Self {
        let since = UNIX_EPOCH + Duration::from_micros(spared.since_us);
        let opened = now().checked_sub(Duration::from_micros(spared.age_us)).unwrap_or_else(now);
        let flow = Self::caught(id, since, opened);
        flow.count(spared.bytes_up, spared.bytes_down);
        for (place, value) in [
            (&flow.connect_us, spared.connect_us),
            (&flow.first_byte_us, spared.first_byte_us),
            (&flow.sniff_us, spared.sniff_us),
            (&flow.held_us, spared.held_us),
        ] {
            place.store(value.unwrap_or(UNSET), Relaxed);
        }
        flow.active_ms.store(spared.active_ms, Relaxed);
        if let Some(name) = spared.tls_name.as_deref().and_then(|name| name.parse().ok()) {
            flow.greeted(name);
        }
        let transport = |word: &str| Transport::ALL.into_iter().find(|one| one.as_str() == word);
        let taken = spared.taken.as_ref();
        flow.carried_by(
            taken.and_then(|(word, address)| Some(Taken { transport: transport(word)?, address: *address })),
        );
        if spared.shunted {
            flow.shunted();
        }
        flow.speaks_multipath(Side::Client, spared.multipath[0]);
        flow.speaks_multipath(Side::Server, spared.multipath[1]);
        flow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_goes_on_with_its_times_and_counts() {
        let first = LiveFlow::new(FlowId(7));
        first.count(1000, 20);
        first.connected(Duration::from_millis(3));
        first.first_byte(Duration::from_millis(5));
        first.greeted("a.example".parse().unwrap());
        let address = "192.0.2.1:443".parse().unwrap();
        first.carried_by(Some(Taken { transport: Transport::Warm, address }));
        let spared = first.spared();
        let text = serde_json::to_string(&spared).unwrap();
        let second = LiveFlow::again(FlowId(7), &serde_json::from_str(&text).unwrap());
        assert!(second.age() >= Duration::from_micros(spared.age_us));
        assert_eq!(Spared { age_us: spared.age_us, ..second.spared() }, spared);
    }
}
