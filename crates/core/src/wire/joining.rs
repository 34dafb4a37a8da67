//! Leads a flow of two sockets to the wire.
//!
//! ```text
//! QUIETING --nothing unread, held or unsent----------------------> JOINED
//! QUIETING --1 ms is over, and that is at most 256 KiB-----------> JOINED
//! QUIETING --the patience is over--------------------------------> given up (the flow goes on as before)
//! JOINED   --no packet is on its way to a socket, all is written-> OWING
//! OWING    --both hosts have acknowledged all that was written---> WIRED
//! WIRED    --no copy is on its way to a socket-------------------> gone
//! OWING, WIRED --a packet came late to a socket------------------> JOINED
//! JOINED, OWING, WIRED --both hosts know that it is over---------> gone
//! ```
//!
//! QUIETING asks for an instant in which the sockets have nothing to pass on. Both offer a small window meanwhile, and bytes
//! go on. A busy flow has no such instant: then it is enough that they have little to pass on. The far hosts get that after bytes that
//! the kernel passes on, so it is bounded: they have to keep these bytes until then. From JOINED on the kernel passes packets on; it is not left again, except by the end of the flow. In OWING a socket
//! that still waits gets copies of acknowledgements. It is settled once its peer has acknowledged all that was written into it,
//! whichever way that came: the other host may have sent it again, past the socket.
//!
//! A processor may stand still between the look at a packet and its way to a socket, as those of virtual machines do. The socket
//! acknowledges it then, so it is not sent again: its bytes have to be copied, however late they come. A packet that comes later
//! still finds no socket, is not acknowledged, and is sent again.

use crate::time::Instant;
use std::time::Duration;

/// How long a packet may be on its way to a socket that the kernel passes on from now on.
const ARRIVES: Duration = Duration::from_millis(2);

/// How long a copy of an acknowledgement may be on its way to a socket. Nothing waits for this.
const LINGERS: Duration = Duration::from_millis(20);

/// How long an instant is waited for in which the sockets have nothing to pass on.
const QUIET_WITHIN: Duration = Duration::from_millis(1);

/// What the sockets may have to pass on in one direction after that, bytes. Hosts can keep as much for each connection
/// (`net.ipv4.tcp_rmem` begins at 128 KiB, and grows for flows that are as busy).
const LITTLE_BYTES: usize = 256 * 1024;

/// What is seen of both sockets (client, server) and of what lies between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Bytes that each socket has received and that were not read; a FIN is one.
    pub unread: [u32; 2],
    /// Bytes that were read from each socket and not yet written into the other.
    pub held: [usize; 2],
    /// Bytes that were written into each socket and not yet sent.
    pub unsent: [u32; 2],
    /// Sequence number up to which each peer has acknowledged, once the kernel passes packets on.
    pub acknowledged: [u32; 2],
    /// The kernel has passed on a RST, or both FINs and their acknowledgements: no host says anything more.
    pub is_over: bool,
}

impl Look {
    /// Whether little is to be passed on in each direction.
    fn is_little(&self) -> bool {
        [0, 1].into_iter().all(|from| {
            let waits = self.unread[from] as usize + self.unsent[from ^ 1] as usize;
            waits.saturating_add(self.held[from]) <= LITTLE_BYTES
        })
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Go on copying between the sockets, and look again.
    Copy,
    /// Let the kernel pass packets on from now on ([`super::sides`]). Call [`Joining::joined`] then.
    Join,
    /// Nothing comes to the sockets any more: read what they expect, and call [`Joining::owing`] with what was written.
    Read,
    /// A packet came late: let copies go to both sockets again, and go on copying.
    Again,
    /// This socket (0: the client's) has no acknowledgement to wait for any more.
    Settled(usize),
    /// Neither socket owes anything: no copies from now on. Look again later.
    Wire,
    /// Look again at this time.
    Wait(Instant),
    /// Close both sockets without a packet. It is done.
    Forget,
    /// It took too long: offer the usual windows again and go on copying. Try again later.
    GiveUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Quieting { since: Instant, until: Instant },
    Joined { since: Instant },
    Owing { written: [u32; 2], settled: [bool; 2] },
    Wired { since: Instant },
}

/// The way of one flow to the wire; see the diagram of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joining {
    state: State,
}

impl Joining {
    /// Begins. It is given up if no quiet instant comes for `patience`.
    pub fn new(now: Instant, patience: Duration) -> Self {
        Self { state: State::Quieting { since: now, until: now + patience } }
    }

    /// The kernel passes packets on.
    pub const fn joined(&mut self, now: Instant) {
        if let State::Quieting { .. } = self.state {
            self.state = State::Joined { since: now };
        }
    }

    /// The sequence numbers after the last byte that was written into each socket; no more will be.
    pub const fn owing(&mut self, written: [u32; 2]) {
        if let State::Joined { .. } = self.state {
            self.state = State::Owing { written, settled: [false; 2] };
        }
    }

    /// True from [`Joining::joined`] on: it cannot be given up any more.
    pub const fn is_joined(&self) -> bool {
        !matches!(self.state, State::Quieting { .. })
    }

    /// Says what is to be done next.
    pub fn next(&mut self, now: Instant, look: &Look) -> Step {
        let is_written = look.unread == [0; 2] && look.held == [0; 2];
        let is_sent = is_written && look.unsent == [0; 2];
        if look.is_over && self.is_joined() {
            // A host that was reset acknowledges nothing that it still owes, and a socket may not have heard of it.
            return Step::Forget;
        }
        match &mut self.state {
            State::Quieting { .. } if is_sent => Step::Join,
            State::Quieting { since, .. } if now >= *since + QUIET_WITHIN && look.is_little() => Step::Join,
            State::Quieting { until, .. } if now >= *until => Step::GiveUp,
            State::Quieting { .. } => Step::Copy,
            State::Joined { since } if is_written => {
                let arrived = *since + ARRIVES;
                if now >= arrived { Step::Read } else { Step::Wait(arrived) }
            }
            State::Joined { .. } => Step::Copy,
            State::Owing { .. } | State::Wired { .. } if !is_written => {
                self.state = State::Joined { since: now };
                Step::Again
            }
            State::Owing { written, settled } => {
                for side in [0, 1] {
                    let is_behind = written[side].wrapping_sub(look.acknowledged[side]).cast_signed() > 0;
                    if !settled[side] && !is_behind {
                        settled[side] = true;
                        return Step::Settled(side);
                    }
                }
                if *settled == [true; 2] {
                    self.state = State::Wired { since: now };
                    return Step::Wire;
                }
                Step::Wait(now + ARRIVES)
            }
            State::Wired { since } => {
                let gone = *since + LINGERS;
                if now >= gone { Step::Forget } else { Step::Wait(gone) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);
    const QUIET: Look =
        Look { unread: [0; 2], held: [0; 2], unsent: [0; 2], acknowledged: [100, 200], is_over: false };

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    #[test]
    fn it_goes_the_whole_way() {
        let mut joining = Joining::new(at(0), PATIENCE);
        assert_eq!(joining.next(at(0), &Look { unread: [1, 0], ..QUIET }), Step::Copy);
        assert_eq!(joining.next(at(2), &QUIET), Step::Join);
        joining.joined(at(2));
        assert!(joining.is_joined());
        assert_eq!(joining.next(at(3), &Look { held: [0, 7], ..QUIET }), Step::Copy);
        assert_eq!(joining.next(at(3), &QUIET), Step::Wait(at(4)));
        // A packet that was under way comes to a socket.
        assert_eq!(joining.next(at(4), &Look { unread: [9, 0], ..QUIET }), Step::Copy);
        assert_eq!(joining.next(at(6), &Look { unsent: [0, 9], ..QUIET }), Step::Read);
        joining.owing([100, 209]);
        assert_eq!(joining.next(at(6), &QUIET), Step::Settled(0));
        assert_eq!(joining.next(at(6), &QUIET), Step::Wait(at(8)));
        let acknowledged = Look { acknowledged: [100, 209], ..QUIET };
        assert_eq!(joining.next(at(8), &acknowledged), Step::Settled(1));
        assert_eq!(joining.next(at(8), &acknowledged), Step::Wire);
        assert_eq!(joining.next(at(9), &acknowledged), Step::Wait(at(28)));
        assert_eq!(joining.next(at(28), &acknowledged), Step::Forget);
    }

    #[test]
    fn a_packet_that_comes_late_is_copied() {
        let late = Look { unread: [0, 5], ..QUIET };
        for is_wired in [false, true] {
            let mut joining = Joining::new(at(0), PATIENCE);
            joining.joined(at(0));
            assert_eq!(joining.next(at(3), &QUIET), Step::Read);
            joining.owing([100, 200]);
            if is_wired {
                assert_eq!(joining.next(at(3), &QUIET), Step::Settled(0));
                assert_eq!(joining.next(at(3), &QUIET), Step::Settled(1));
                assert_eq!(joining.next(at(3), &QUIET), Step::Wire);
            }
            assert_eq!(joining.next(at(30), &late), Step::Again);
            assert_eq!(joining.next(at(30), &late), Step::Copy);
            assert_eq!(joining.next(at(40), &QUIET), Step::Read);
            joining.owing([105, 200]);
            // Five bytes more have to be acknowledged.
            assert_eq!(joining.next(at(40), &QUIET), Step::Settled(1));
            assert_eq!(joining.next(at(40), &QUIET), Step::Wait(at(42)));
            assert_eq!(joining.next(at(50), &Look { acknowledged: [105, 200], ..QUIET }), Step::Settled(0));
        }
    }

    #[test]
    fn a_busy_flow_joins_when_little_is_to_be_passed_on() {
        let most = LITTLE_BYTES as u32;
        let mut joining = Joining::new(at(0), PATIENCE);
        let little = Look { unread: [most - 7, 0], held: [4, 9], unsent: [0, 3], ..QUIET };
        let now = Instant::from_nanos(999_999);
        assert_eq!(joining.next(now, &little), Step::Copy, "the first millisecond asks for none");
        let more = Look { unsent: [0, 4], ..little };
        assert_eq!(joining.next(at(1), &more), Step::Copy, "client to server");
        let back = Look { unread: [0, most], held: [0, 0], unsent: [1, 0], ..QUIET };
        assert_eq!(joining.next(at(1), &back), Step::Copy, "server to client");
        assert_eq!(joining.next(at(1), &little), Step::Join);
    }

    #[test]
    fn a_flow_that_always_has_much_to_pass_on_stays() {
        let mut joining = Joining::new(at(0), PATIENCE);
        let busy = Look { unsent: [1 << 20, 0], ..QUIET };
        assert_eq!(joining.next(at(999), &busy), Step::Copy);
        assert_eq!(joining.next(at(1000), &busy), Step::GiveUp);
        // Quiet at the last moment is quiet.
        assert_eq!(joining.next(at(1000), &QUIET), Step::Join);
    }

    #[test]
    fn a_flow_that_both_hosts_have_ended_owes_nothing() {
        let over = Look { unread: [3, 0], acknowledged: [99, 200], is_over: true, ..QUIET };
        let mut joining = Joining::new(at(0), PATIENCE);
        assert_eq!(joining.next(at(0), &over), Step::Copy, "the kernel does not know it yet");
        joining.joined(at(0));
        assert_eq!(joining.next(at(0), &over), Step::Forget);
        assert_eq!(joining.next(at(3), &QUIET), Step::Read);
        joining.owing([100, 200]);
        // The client was reset before it had everything.
        let owed = Look { acknowledged: [99, 200], ..QUIET };
        assert_eq!(joining.next(at(3), &owed), Step::Settled(1));
        assert_eq!(joining.next(at(3), &owed), Step::Wait(at(5)));
        assert_eq!(joining.next(at(5), &Look { is_over: true, ..owed }), Step::Forget);
    }

    #[test]
    fn numbers_may_wrap() {
        let mut joining = Joining::new(at(0), PATIENCE);
        joining.joined(at(0));
        joining.owing([5, 0xffff_fff0]);
        let behind = Look { acknowledged: [0xffff_fff0, 0xffff_ffef], ..QUIET };
        assert_eq!(joining.next(at(1), &behind), Step::Wait(at(3)));
        let beyond = Look { acknowledged: [5, 3], ..QUIET };
        assert_eq!(joining.next(at(1), &beyond), Step::Settled(0));
        assert_eq!(joining.next(at(1), &beyond), Step::Settled(1));
    }

    /// All sequences of six looks out of a few: steps come in their order, and no socket is closed before it is acknowledged or both
    /// hosts have ended the flow.
    #[test]
    fn steps_keep_their_order() {
        let looks = [
            QUIET,
            Look { unread: [1, 0], ..QUIET },
            Look { acknowledged: [100, 199], ..QUIET },
            Look { unread: [1, 0], acknowledged: [99, 199], is_over: true, ..QUIET },
        ];
        for sequence in 0..(looks.len() * 2).pow(6) {
            let (mut rest, mut now) = (sequence, at(0));
            let mut joining = Joining::new(now, PATIENCE);
            let (mut stage, mut settled) = (0, [false; 2]);
            for _ in 0..6 {
                let look = &looks[rest % looks.len()];
                rest /= looks.len();
                now = now + Duration::from_millis(if rest % 2 == 0 { 1 } else { 30 });
                rest /= 2;
                match joining.next(now, look) {
                    Step::Copy => assert!(stage < 2 && look.unread != [0; 2]),
                    Step::Wait(until) => assert!(until > now && stage > 0),
                    Step::Join => {
                        assert!(stage == 0 && look.is_little());
                        joining.joined(now);
                        stage = 1;
                    }
                    Step::Read => {
                        assert_eq!((stage, look.unread), (1, [0; 2]));
                        joining.owing([100, 200]);
                        stage = 2;
                    }
                    Step::Settled(side) => {
                        assert!(stage == 2 && look.acknowledged[side] == [100, 200][side]);
                        assert!(!std::mem::replace(&mut settled[side], true));
                    }
                    Step::Wire => {
                        assert_eq!((stage, settled), (2, [true; 2]));
                        stage = 3;
                    }
                    Step::Again => {
                        assert!(stage > 1 && look.unread != [0; 2]);
                        (stage, settled) = (1, [false; 2]);
                    }
                    Step::Forget => {
                        assert!((stage, look.unread) == (3, [0; 2]) || stage > 0 && look.is_over);
                        break;
                    }
                    Step::GiveUp => panic!("it was patient"),
                }
                assert_eq!(joining.is_joined(), stage > 0);
            }
        }
    }
}
