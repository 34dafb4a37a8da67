//! Converts between conntrack's types and those of `core::shunt`.

use sidetrack_core::shunt::{
    Both, Connection, Identity, Mark, Phase, Traffic, Transport, Tuple as FlowTuple,
};
use sidetrack_sys::conntrack::{Change, Counters, Entry, Tuple, status};
use sidetrack_sys::nft::MarkBits;
use sidetrack_sys::sysctl;
use std::time::Duration;

/// `TCP_CONNTRACK_*`: the states before data may flow.
const OPENING: [u8; 3] = [1, 2, 9];
const ESTABLISHED: u8 = 3;
const CLOSE: u8 = 8;

/// How long conntrack keeps a shunted connection without a packet, seconds: two refreshes in a row may fail.
pub(super) const KEEP: Duration = Duration::from_secs(600);

/// Connections for which the rules have set both ports: only these concern the shunt.
pub(super) const WITH_PORTS: MarkBits = MarkBits {
    value: Mark::INGRESS_KNOWN | Mark::EGRESS_KNOWN,
    mask: Mark::INGRESS_KNOWN | Mark::EGRESS_KNOWN,
};

/// Converts a conntrack entry; none if it is neither TCP nor UDP.
pub(super) fn connection(entry: &Entry) -> Option<Connection> {
    let transport = Transport::of_number(entry.original.protocol)?;
    let tcp = transport == Transport::Tcp;
    let both_ways = if tcp { status::SEEN_REPLY | status::ASSURED } else { status::SEEN_REPLY };
    let phase = entry.tcp_state.filter(|_| tcp).map(|state| match state {
        ESTABLISHED => Phase::Open,
        CLOSE => Phase::Reset,
        state if OPENING.contains(&state) => Phase::Opening,
        _ => Phase::Closing,
    });
    let traffic = |counters: Counters| Traffic { packets: counters.packets, bytes: counters.bytes };
    Some(Connection {
        tuple: FlowTuple::new(entry.original.source, entry.original.destination, transport, entry.zone),
        identity: Identity::new(entry.id.unwrap_or(0), entry.start_ns),
        mark: Mark(entry.mark),
        phase,
        both_ways: entry.status & both_ways == both_ways,
        translated: entry.reply.source != entry.original.destination
            || entry.reply.destination != entry.original.source,
        inspected: entry.helped,
        traffic: entry.client_to_server.zip(entry.server_to_client).map(|(to_server, to_client)| Both {
            to_server: traffic(to_server),
            to_client: traffic(to_client),
        }),
    })
}

/// Returns the addresses in conntrack's form.
pub(super) const fn original(tuple: &FlowTuple) -> Tuple {
    Tuple { source: tuple.client(), destination: tuple.server(), protocol: tuple.transport.number() }
}

/// Returns the change for a connection whose packets conntrack is about to miss: accept the packets that come after them. Its FIN
/// may be one of these before [`keep`] is done.
pub(super) fn soon_unseen() -> Change {
    Change { liberal: true, ..Change::default() }
}

/// Returns the change for a connection whose packets conntrack will not see: accept the packets that come, and keep the
/// entry.
///
/// `judged`: only a RST that fits the connection reaches conntrack. Conntrack must accept it then, although the
/// acknowledgement that it would check it by is old. Otherwise conntrack would keep the connection for 300 s, and would
/// take the next one on the same ports for a part of it.
pub(super) fn keep(judged: bool) -> Change {
    Change {
        liberal: true,
        forget_acknowledged: judged,
        timeout_s: u32::try_from(KEEP.as_secs()).ok(),
        ..Change::default()
    }
}

/// How long conntrack keeps a TCP connection that ends, seconds: as this network namespace had it set at the start.
#[derive(Debug)]
pub(super) struct Endings([u32; 5]);

impl Endings {
    /// The settings for the states from `FIN_WAIT` (4) to `CLOSE` (8), and Linux's defaults.
    const SETTINGS: [(&str, u32); 5] =
        [("fin_wait", 120), ("close_wait", 60), ("last_ack", 30), ("time_wait", 120), ("close", 10)];

    pub(super) fn read() -> Self {
        Self(Self::SETTINGS.map(|(state, default)| {
            let name = format!("net/netfilter/nf_conntrack_tcp_timeout_{state}");
            sysctl::read(&name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
        }))
    }

    /// Returns the change that takes [`keep`] back. `None`: the connection is open.
    pub(super) fn over(&self, state: u8) -> Option<Change> {
        let seconds = self.0.get(usize::from(state.checked_sub(ESTABLISHED + 1)?))?;
        Some(Change { timeout_s: Some(*seconds), ..Change::default() })
    }
}

/// Returns the change for a blocked connection. Its packets are dropped before conntrack sees them. Conntrack must keep
/// it while they come; otherwise the next packet would look like a new connection.
pub(super) fn keep_blocked() -> Change {
    Change { timeout_s: u32::try_from(KEEP.as_secs()).ok(), ..Change::default() }
}

/// Returns the change that writes the number of an action into the mark of a connection.
pub(super) fn mark_decision(number: u8) -> Change {
    let value = Mark::DECIDED | u32::from(number) << 16;
    Change { mark: Some(MarkBits { value, mask: Mark::DECIDED | 0x000f_0000 }), ..Change::default() }
}

/// Returns the change that lets the rules decide again.
pub(super) fn ask_again() -> Change {
    Change { mark: Some(MarkBits { value: 0, mask: Mark::DECIDED }), ..Change::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        let (client, server) = ("192.0.2.1:4000".parse().unwrap(), "198.51.100.2:80".parse().unwrap());
        Entry {
            id: Some(7),
            original: Tuple { source: client, destination: server, protocol: 6 },
            reply: Tuple { source: server, destination: client, protocol: 6 },
            status: status::SEEN_REPLY | status::ASSURED | status::CONFIRMED,
            mark: 0x7121_1234,
            timeout_s: Some(300),
            tcp_state: Some(ESTABLISHED),
            client_to_server: None,
            server_to_client: None,
            start_ns: Some(5),
            stop_ns: None,
            zone: 0,
            helped: false,
        }
    }

    #[test]
    fn states_and_flags_are_read_as_they_are_meant() {
        let open = connection(&entry()).unwrap();
        assert_eq!((open.phase, open.both_ways, open.translated), (Some(Phase::Open), true, false));
        assert_eq!(open.identity, Identity::new(7, Some(5)));
        let of_state = |state| connection(&Entry { tcp_state: state, ..entry() }).unwrap().phase;
        assert_eq!(of_state(None), None, "a report that says nothing of it");
        assert_eq!([1, 2, 9].map(|s| of_state(Some(s))), [Some(Phase::Opening); 3]);
        assert_eq!([4, 5, 6, 7].map(|s| of_state(Some(s))), [Some(Phase::Closing); 4]);
        assert_eq!(of_state(Some(8)), Some(Phase::Reset));
        let one_way = Entry { status: status::SEEN_REPLY, ..entry() };
        assert!(!connection(&one_way).unwrap().both_ways, "TCP is to be assured");
        let mut udp = one_way;
        udp.original.protocol = 17;
        assert!(connection(&udp).unwrap().both_ways);
        assert_eq!(
            connection(&Entry { original: Tuple { protocol: 132, ..entry().original }, ..entry() }),
            None
        );
    }

    #[test]
    fn what_ends_is_kept_as_long_as_conntrack_does() {
        let endings = Endings([1, 2, 3, 4, 5]);
        let seconds = |state| endings.over(state).and_then(|change| change.timeout_s);
        assert_eq!([4, 5, 6, 7, 8].map(seconds), [1, 2, 3, 4, 5].map(Some));
        assert_eq!([0, 1, 2, ESTABLISHED, 9, 255].map(seconds), [None; 6]);
    }

    #[test]
    fn rewritten_addresses_are_seen() {
        let mut nat = entry();
        nat.reply.destination.set_port(1);
        assert!(connection(&nat).unwrap().translated);
    }
}
