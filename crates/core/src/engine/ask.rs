//! Servers whose answers somebody nearer to the interfaces may take. The engine sends the SYN itself and says what the answer has to
//! be; whoever took that upon himself sends the held first bytes when it comes, and translates from then on. The engine hears of it
//! late, and stands then where it would stand had the answer come here.
//!
//! While somebody else waits for the answer nothing changes here: whatever comes here first, a packet or a time-out, calls the
//! connection back, and then the answer is either there or the engine's to take.

use super::bind::{Answer, DELAYED_ACK};
use super::config::Callbacks;
use super::connection::{CLIENT, Hot, Phase, SERVER};
use super::lend::{Standing, Translation};
use super::machine::Engine;
use super::options::{Offer, Written};
use super::outbox::Segment;
use super::packet::flags;
use super::seq::Seq;
use crate::time::Instant;

/// A server that was asked, and what is to be done when it answers: this translation begins, and the packet is sent.
#[derive(Debug)]
pub struct Asked<'a> {
    /// Both sides, the client first. What follows from the answer is zero: of the server its MSS is the most that we take, and its time
    /// stamps, numbers and windows are missing; of the client `stamp_add`.
    pub sides: [Translation; 2],
    /// The number that the answer has to acknowledge.
    pub acknowledges: u32,
    /// `add` of the server's numbers is this less the number of its SYN.
    pub shown: u32,
    /// Our clock: milliseconds of the engine's time and this, modulo 2^32. `stamp_add` of either side is the clock when the answer comes
    /// less that side's stamp then.
    pub clock: u32,
    /// The answer has to agree to what was offered: time stamps.
    pub timestamps: bool,
    /// Likewise: SACK.
    pub sack: bool,
    /// Likewise: windows that are scaled.
    pub window_scale: bool,
    /// The least that the answer's MSS and its window may be, bytes.
    pub needs: u16,
    /// The IP packet with the first bytes. What follows from the answer is zero in it, and so the checksum counts it: the
    /// acknowledgement, and in its only option, if there is one, both time stamps.
    pub packet: &'a [u8],
}

/// The SYN-ACK of a server, as the kernel's program read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The number of its SYN.
    pub number: u32,
    /// Largest payload it takes, bytes.
    pub mss: u16,
    /// Shift of its windows, where they are scaled.
    pub shift: u8,
    /// Its time stamp, where there are some.
    pub stamp: u32,
    /// Our clock then, see [`Asked::clock`].
    pub clock: u32,
    /// When it came.
    pub at: Instant,
}

/// How a side's packets are translated, as far as that is known before the answer.
fn untold(hot: &Hot, at: usize) -> Translation {
    let (leg, tuple) = (&hot.leg[at], &hot.tuple[at]);
    Translation {
        remote: tuple.remote_addr(),
        local: tuple.local_addr(),
        hop: leg.hop,
        add: 0,
        stamp_add: 0,
        stamp_first: leg.stamp,
        mss: leg.mss,
        shift: leg.shift,
        shown_shift: leg.shown_shift,
        finished: false,
        standing: leg.standing(),
    }
}

impl<C: Callbacks> Engine<C> {
    /// Lets the kernel handle the server's SYN-ACK, if only the first bytes are to be sent after it.
    pub(super) fn ask_elsewhere(&mut self, now: Instant, slot: usize) {
        let Some(hot) = self.hot.get(slot) else { return };
        let own_mss = self.mss(hot.tuple[SERVER].remote);
        let [.., secret] = self.config.seed;
        let Some(slow) = self.slow.get(hot.slow as usize) else { return };
        let held = slow.held();
        let Offer { window_scale, sack, timestamps, .. } = slow.offer;
        let mut options = Written::default();
        if timestamps.is_some() {
            options.add_timestamps(0, 0);
        }
        let needs = held.len() + options.words().len() * 4;
        let same_family = hot.tuple[CLIENT].remote.is_v4() == hot.tuple[SERVER].remote.is_v4();
        let is_plain = same_family && slow.inspect == [false; 2] && !slow.fin;
        if held.is_empty() || needs > usize::from(own_mss) || !is_plain {
            return;
        }
        let [client, server] = &hot.leg;
        let shown_shift = if window_scale.is_some() { client.shift } else { 0 };
        let number = slow.isn[SERVER] + 1;
        let window = (client.edge.since(client.acked) >> shown_shift).min(0xffff) as u16;
        let segment = Segment {
            to: hot.tuple[SERVER],
            hop: server.hop,
            seq: number,
            ack: Seq(0),
            flags: flags::ACK | flags::PSH,
            window,
            options: options.words(),
            payload: held,
        };
        let Some(packet) = self.outbox.draft(&segment) else { return };
        let first = client.next - held.len() as u32;
        let standing = Standing { acknowledged: number.0, ..Standing::default() };
        let asked = Asked {
            sides: [
                Translation { add: number - first, ..untold(hot, CLIENT) },
                Translation { mss: own_mss, shift: 0, shown_shift, standing, ..untold(hot, SERVER) },
            ],
            acknowledges: number.0,
            shown: (slow.first_to_client() - 1).0,
            clock: secret as u32,
            timestamps: timestamps.is_some(),
            sack,
            window_scale: window_scale.is_some(),
            needs: needs as u16,
            packet,
        };
        let lent = self.callbacks.ask(slot as u32, &asked);
        if let (Some(lent), Some(hot)) = (lent, self.hot.get_mut(slot)) {
            hot.lent = Some(lent);
            if let Some(cold) = self.cold.get_mut(slot) {
                cold.was_lent = true;
            }
            // Then the client waits for an acknowledgement, and what was sent elsewhere may be lost.
            self.wheel.arm(slot as u32, now + DELAYED_ACK);
        }
    }

    /// The answer came elsewhere, and what was held was sent there.
    pub(super) fn bound_elsewhere(&mut self, slot: usize, answered: &Answered) {
        let Some(slow) = self.slow_of(slot) else { return };
        // The other's clock may be a coarse one.
        let at = answered.at.max(slow.asked);
        let Offer { window_scale, sack, timestamps, .. } = slow.offer;
        let offer = Offer {
            mss: Some(answered.mss),
            window_scale: window_scale.map(|_| answered.shift),
            sack,
            timestamps: timestamps.map(|_| (answered.stamp, 0)),
        };
        // Of its window the borrower tells more than the answer did.
        let answer = Answer { seq: Seq(answered.number), ack: slow.isn[SERVER] + 1, window: 0, offer };
        let Some(due) = self.agreed(at, slot, &answer, answered.clock) else { return };
        let Some(hot) = self.hot.get(slot) else { return };
        let next = hot.leg[CLIENT].next;
        let Some(slow) = self.slow_of(slot) else { return };
        let len = slow.held().len() as u32;
        let edits = &mut slow.edits[CLIENT];
        edits.own(next - len, len, false);
        slow.sent = next + edits.base();
        self.arm_owned(at, slot);
        self.wheel.arm(slot as u32, due);
    }

    /// Learns what became of a connection while it was lent, and calls it back if somebody else waits for its server's answer still;
    /// that may have come by then.
    pub(super) fn recall(&mut self, now: Instant, slot: usize) {
        self.catch_up(now, slot);
        let waits = self.hot.get(slot).filter(|hot| hot.phase == Phase::Connecting);
        if let Some(lent) = waits.and_then(|hot| hot.lent) {
            self.callbacks.closing(lent);
            self.catch_up(now, slot);
        }
    }
}
