//! The numbers of two new sockets for a flow that comes back from the wire (ADR 45).
//!
//! The kernel passes no packet on any more when these numbers are read. Each new socket stands at what the hosts have acknowledged
//! to each other. So every byte has one who sends it again: a byte that a host has acknowledged is delivered, and every other byte
//! is still in the queue of the host that has sent it. That host sends it again, to the new socket.
//!
//! A host may have received bytes that it has not acknowledged yet, or whose acknowledgement was lost. It acknowledges them to the
//! new socket, which has not sent them yet. Linux drops such an acknowledgement, so `bpf/wire.bpf.c` shows the socket at most
//! what the socket has sent. This is over when the socket has sent all that was passed on before ([`Begin::passed`]).

use super::Options;
use crate::engine::Standing;

/// Most bytes of a window that a socket begins with: the largest that TCP can say (RFC 7323 Sec. 2.3).
const WINDOW_MAX: u32 = 1 << 30;

/// One side of a flow on the wire, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stands {
    /// Its numbers so far.
    pub standing: Standing,
    /// What is added to its sequence numbers, modulo 2^32.
    pub add: u32,
    /// Largest payload it accepts, TCP options included, bytes.
    pub mss: u16,
    /// Scale of the windows it sends, 0 to 14.
    pub shift: u8,
    /// Scale of the windows it is shown, 0 to 14.
    pub shown_shift: u8,
    /// Our time stamps towards it before the flow was on the wire: the monotonic clock in milliseconds plus this.
    pub clock: u32,
    /// What is added to the time stamps of its packets. `None`: no packet of it had one.
    pub stamp_add: Option<u32>,
}

/// The state of a new socket towards one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Sequence number of the next byte that it sends.
    pub sends: u32,
    /// Sequence number that it expects next.
    pub expects: u32,
    /// The window that its peer offers, bytes.
    pub window: u32,
    /// The window that its peer was told, bytes.
    pub told: u32,
    /// Largest payload that its peer accepts, TCP options included, bytes.
    pub mss: u16,
    /// Scale of the windows that its peer sends, 0 to 14.
    pub peer_shift: u8,
    /// Scale of the windows that it sends, 0 to 14.
    pub own_shift: u8,
    /// Its time stamp now. `None`: it sends none.
    pub stamp: Option<u32>,
    /// Both send selective acknowledgements.
    pub sack: bool,
    /// Sequence number after the last byte that was passed on to its peer: the peer may acknowledge up to it.
    pub passed: u32,
}

/// Returns whether both hosts have acknowledged all that was passed on to them: then no byte is sent again.
pub const fn is_quiet(sides: &[Stands; 2]) -> bool {
    let [client, server] = sides;
    has_all(client, server) && has_all(server, client)
}

/// Whether `to` has acknowledged all of `from`.
const fn has_all(from: &Stands, to: &Stands) -> bool {
    from.standing.sent.wrapping_add(from.add) == to.standing.acknowledged
}

/// Returns the sequence numbers of RSTs that both hosts (client, server) take: those after the last byte that was passed on to each. A
/// host may have got bytes whose acknowledgement was lost: a RST at what it has acknowledged would be too old for it. A host that
/// is missing bytes answers a RST beyond them (RFC 5961 Sec. 3.2), and gets another one at the right number for that.
pub fn reset_at(sides: &[Stands; 2]) -> [u32; 2] {
    [0, 1].map(|at| {
        let acknowledged = sides[at].standing.acknowledged;
        let passed = sides[at ^ 1].standing.sent.wrapping_add(sides[at ^ 1].add);
        if passed.wrapping_sub(acknowledged).cast_signed() > 0 { passed } else { acknowledged }
    })
}

/// Returns the state of new sockets towards both sides (client, server). `now_ms` is the monotonic clock in milliseconds.
pub fn back(sides: &[Stands; 2], options: Options, now_ms: u32) -> [Begin; 2] {
    let [client, server] = sides;
    [begin(client, server, options, now_ms), begin(server, client, options, now_ms)]
}

fn begin(own: &Stands, other: &Stands, options: Options, now_ms: u32) -> Begin {
    let expects = other.standing.acknowledged.wrapping_sub(own.add);
    Begin {
        sends: own.standing.acknowledged,
        expects,
        window: window(own.standing.edge, own.standing.acknowledged),
        told: window(other.standing.edge.wrapping_sub(own.add), expects),
        mss: own.mss,
        peer_shift: own.shift,
        own_shift: own.shown_shift,
        stamp: options.stamps.then(|| stamp(own, other, now_ms)),
        sack: options.sack,
        passed: other.standing.sent.wrapping_add(other.add),
    }
}

/// Bytes from `from` up to `edge`; 0 if the edge lies before.
fn window(edge: u32, from: u32) -> u32 {
    let window = edge.wrapping_sub(from);
    if window.cast_signed() < 0 { 0 } else { window.min(WINDOW_MAX) }
}

/// The time stamp that goes on from what this side was shown last: by the earlier socket, or by the other host.
fn stamp(own: &Stands, other: &Stands, now_ms: u32) -> u32 {
    let ours = now_ms.wrapping_add(own.clock);
    let shown = other.stamp_add.map_or(ours, |add| other.standing.stamp.wrapping_add(add));
    if shown.wrapping_sub(ours).cast_signed() > 0 { shown } else { ours }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: Options = Options { stamps: true, sack: true, ecn: false };

    /// The client has sent up to 0x0000_0020 (it has wrapped) and the server has acknowledged 0x30 bytes less. The server has sent
    /// up to 7000, and the client has acknowledged all of it.
    fn sides() -> [Stands; 2] {
        let add = 1000_u32.wrapping_sub(0xffff_ff00);
        let client = Stands {
            standing: Standing { sent: 0x20, acknowledged: 107_000, edge: 107_500, stamp: 5 },
            add,
            mss: 1460,
            shift: 7,
            shown_shift: 9,
            clock: 40,
            stamp_add: Some(90),
        };
        let server = Stands {
            standing: Standing {
                sent: 7000,
                acknowledged: 0x20_u32.wrapping_add(add) - 0x30,
                edge: 0x20_u32.wrapping_add(add) + 0x1000,
                stamp: 700,
            },
            add: 100_000,
            mss: 1400,
            shift: 8,
            shown_shift: 6,
            clock: 50,
            stamp_add: Some(1),
        };
        [client, server]
    }

    #[test]
    fn sockets_stand_at_what_was_acknowledged_end_to_end() {
        let [client, server] = back(&sides(), OPTIONS, 1000);
        // The server sends again from 7000 on: nothing. The client sends 0x30 bytes again.
        assert_eq!((client.sends, server.expects), (107_000, 7000));
        assert_eq!((client.expects, server.sends), (0xffff_fff0, 0x20 + 0x100 + 1000 - 0x30));
        assert_eq!((client.passed, server.passed), (107_000, 0x20 + 0x100 + 1000));
        assert_eq!((client.mss, client.peer_shift, client.own_shift), (1460, 7, 9));
        assert_eq!((server.mss, server.peer_shift, server.own_shift), (1400, 8, 6));
        assert!(client.sack && server.sack);
    }

    #[test]
    fn windows_are_what_hosts_have_offered_and_were_told() {
        let [client, server] = back(&sides(), OPTIONS, 1000);
        assert_eq!((client.window, server.told), (500, 500));
        assert_eq!((server.window, client.told), (0x1030, 0x1030));
        let mut closed = sides();
        closed[0].standing.edge -= 600;
        assert_eq!(back(&closed, OPTIONS, 0)[0].window, 0, "an edge that lies before");
        closed[0].standing.edge = closed[0].standing.acknowledged.wrapping_add(1 << 31) - 1;
        assert_eq!(back(&closed, OPTIONS, 0)[0].window, 1 << 30);
    }

    #[test]
    fn time_stamps_never_go_back() {
        // Towards the client: the clock says 1040, the server's last stamp was shown as 701.
        assert_eq!(back(&sides(), OPTIONS, 1000)[0].stamp, Some(1040));
        assert_eq!(back(&sides(), OPTIONS, 600)[0].stamp, Some(701));
        let mut silent = sides();
        silent[1].stamp_add = None;
        assert_eq!(back(&silent, OPTIONS, 600)[0].stamp, Some(640), "the server has sent none");
        let without = back(&sides(), Options { stamps: false, ..OPTIONS }, 0);
        assert_eq!(without.map(|one| one.stamp), [None; 2]);
        // They may wrap.
        let mut late = sides();
        late[0].clock = u32::MAX;
        assert_eq!(back(&late, OPTIONS, 0)[0].stamp, Some(701));
    }

    #[test]
    fn a_reset_stands_after_all_that_a_host_may_have_got() {
        let mut sides = sides();
        let passed = 0x20_u32.wrapping_add(sides[0].add);
        assert_eq!(reset_at(&sides), [107_000, passed]);
        // While sockets still send, too, a host may have acknowledged more than the kernel has passed on.
        sides[0].standing.acknowledged += 7;
        sides[1].standing.acknowledged = passed;
        assert_eq!(reset_at(&sides), [107_007, passed]);
    }

    #[test]
    fn it_is_quiet_when_all_is_acknowledged() {
        let mut sides = sides();
        assert!(!is_quiet(&sides));
        sides[1].standing.acknowledged += 0x30;
        assert!(is_quiet(&sides));
        let [client, server] = back(&sides, OPTIONS, 0);
        assert_eq!((client.sends, server.sends), (client.passed, server.passed), "nothing is sent again");
        sides[0].standing.acknowledged -= 1;
        assert!(!is_quiet(&sides));
    }

    /// Whatever numbers there are: a byte belongs to exactly one, and nothing panics.
    #[test]
    fn every_byte_has_one_who_sends_it_again() {
        let mut seed = 1_u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed
        };
        for _ in 0..10_000 {
            let mut sides = sides();
            for side in &mut sides {
                side.standing.sent = next();
                side.add = next();
            }
            let flight = [next() % 100_000, next() % 100_000];
            for at in [0, 1] {
                let passed = sides[at ^ 1].standing.sent.wrapping_add(sides[at ^ 1].add);
                sides[at].standing.acknowledged = passed.wrapping_sub(flight[at]);
                sides[at].standing.edge = next();
            }
            let begin = back(&sides, OPTIONS, next());
            for at in [0, 1] {
                // What this side sends again is what its socket expects; what its socket sends is what the other side sends again.
                let again = sides[at].standing.sent.wrapping_sub(begin[at].expects);
                assert_eq!(again, flight[at ^ 1]);
                assert_eq!(begin[at].expects.wrapping_add(sides[at].add), begin[at ^ 1].sends);
                assert_eq!(begin[at].passed.wrapping_sub(begin[at].sends), flight[at]);
            }
        }
    }
}
