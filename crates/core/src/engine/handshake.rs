//! Offloads the handshake with a server: an XDP program handles the SYN-ACK. The engine sends the SYN itself and tells the
//! program beforehand which SYN-ACK to expect and which packet to send then ([`Handshake`]).
//! When the SYN-ACK comes, the program sends the held first bytes, and translates packets from then on. The engine learns
//! of it later. Its state is then the same as if the SYN-ACK had come to user space.
//!
//! While the program waits for the SYN-ACK, nothing changes here. The first packet or time-out in user space takes the
//! connection back. Then the SYN-ACK has either come, or the engine handles it.

use super::bind::{Answer, DELAYED_ACK};
use super::config::Callbacks;
use super::connection::{Hot, Phase};
use super::machine::Engine;
use super::narrow::{length, low_half};
use super::offload::{Standing, Translation};
use super::options::{Offer, Written};
use super::outbox::Segment;
use super::packet::flags;
use super::seq::Seq;
use super::slot::{Pair, Slot};
use crate::flow::Side;
use crate::time::Instant;

/// The SYN-ACK that is expected from a server that was sent a SYN, and the packet that the program sends then.
#[derive(Clone, Copy, Debug)]
pub struct Handshake<'a> {
    /// The number that the SYN-ACK must acknowledge.
    pub acknowledges: u32,
    /// `add` of the server is this minus the number of its SYN.
    pub shown: u32,
    /// Our clock is the engine's time in milliseconds plus this, modulo 2^32. `stamp_add` of either side is the clock
    /// when the SYN-ACK comes, minus that side's stamp at that time.
    pub clock: u32,
    /// The SYN-ACK must accept the offered time stamps.
    pub timestamps: bool,
    /// The SYN-ACK must accept the offered SACK.
    pub sack: bool,
    /// The SYN-ACK must accept the offered window scale.
    pub window_scale: bool,
    /// The smallest MSS and window of the SYN-ACK, bytes.
    pub needs: u16,
    /// The IP packet with the first bytes. Fields that depend on the answer are zero, also for its checksum: the
    /// acknowledgement, and both time stamps in its only option, if it has one.
    pub packet: &'a [u8],
}

/// The SYN-ACK of a server, as the program read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SynAck {
    /// The number of its SYN.
    pub number: u32,
    /// Largest payload it takes, bytes.
    pub mss: u16,
    /// Shift of its windows, if they are scaled.
    pub shift: u8,
    /// Its time stamp, if it uses time stamps.
    pub stamp: u32,
    /// Our clock at that time, see [`Handshake::clock`].
    pub clock: u32,
    /// When it came.
    pub at: Instant,
}

/// Returns how a side's packets are translated, as far as that is known before the SYN-ACK.
fn before_syn_ack(hot: &Hot, at: Side) -> Translation {
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
    pub(super) fn offload_handshake(&mut self, now: Instant, slot: Slot) {
        let hot = self.tables.hot.at(slot);
        let own_mss = self.mss(hot.tuple[Side::Server].remote);
        let [.., secret] = self.config.seed;
        let slow = self.tables.slow.at(hot.slow);
        let held = slow.held();
        let Offer { window_scale, sack, timestamps, .. } = slow.offer;
        let mut options = Written::default();
        if timestamps.is_some() {
            options.add_timestamps(0, 0);
        }
        let needs =
            u16::try_from(held.len() + options.words().len() * 4).ok().filter(|needs| *needs <= own_mss);
        let same_family = hot.tuple[Side::Client].remote.is_v4() == hot.tuple[Side::Server].remote.is_v4();
        let is_plain = same_family && slow.inspect == Pair([false; 2]) && !slow.fin;
        let Some(needs) = needs.filter(|_| is_plain && !held.is_empty()) else { return };
        let Pair([client, server]) = &hot.leg;
        let shown_shift = if window_scale.is_some() { client.shift } else { 0 };
        let number = slow.isn[Side::Server] + 1;
        let window = (client.edge.since(client.acked) >> shown_shift).min(0xffff) as u16;
        let segment = Segment {
            to: hot.tuple[Side::Server],
            hop: server.hop,
            seq: number,
            ack: Seq(0),
            flags: flags::ACK | flags::PSH,
            window,
            options: options.words(),
            payload: held,
        };
        let Some(packet) = self.outbox.draft(&segment) else { return };
        let first = client.next - length(held.len());
        let standing = Standing { acknowledged: number.0, ..Standing::default() };
        let sides = [
            Translation { add: number - first, ..before_syn_ack(hot, Side::Client) },
            Translation {
                mss: own_mss,
                shift: 0,
                shown_shift,
                standing,
                ..before_syn_ack(hot, Side::Server)
            },
        ];
        let handshake = Handshake {
            acknowledges: number.0,
            shown: (slow.first_to_client() - 1).0,
            clock: low_half(secret),
            timestamps: timestamps.is_some(),
            sack,
            window_scale: window_scale.is_some(),
            needs,
            packet,
        };
        let offloaded = self.callbacks.offload_handshake(slot, &sides, &handshake);
        if let Some(offloaded) = offloaded {
            self.offload(slot, offloaded);
            // By this time the client needs an acknowledgement, and the packet that the kernel sent may be lost.
            self.wheel.arm(slot, now + DELAYED_ACK);
        }
    }

    /// Binds the connection after the kernel handled the SYN-ACK and sent the held bytes.
    pub(super) fn bound_elsewhere(&mut self, slot: Slot, syn_ack: &SynAck) {
        let slow = self.slow_at(slot);
        // The kernel's clock may be coarse: never take a time before the SYN was sent.
        let at = syn_ack.at.max(slow.syn_sent);
        let Offer { window_scale, sack, timestamps, .. } = slow.offer;
        let offer = Offer {
            mss: Some(syn_ack.mss),
            window_scale: window_scale.map(|_| syn_ack.shift),
            sack,
            timestamps: timestamps.map(|_| (syn_ack.stamp, 0)),
        };
        // The kernel reports the server's current window separately, so the window of the SYN-ACK is not needed.
        let answer = Answer { seq: Seq(syn_ack.number), ack: slow.isn[Side::Server] + 1, window: 0, offer };
        let due = self.agreed(at, slot, &answer, syn_ack.clock);
        let hot = self.tables.hot.at(slot);
        let next = hot.leg[Side::Client].next;
        let slow = self.slow_at(slot);
        let len = length(slow.held().len());
        let edits = &mut slow.edits[Side::Client];
        edits.own(next - len, len, false);
        slow.sent = next + edits.base();
        self.arm_owned(at, slot);
        self.wheel.arm(slot, due);
    }

    /// Copies the connection's state back from the kernel. If the kernel still waits for the SYN-ACK, takes the
    /// connection back. The SYN-ACK may have come in between, so the state is copied once more.
    pub(super) fn recall(&mut self, now: Instant, slot: Slot) {
        self.catch_up(now, slot);
        let hot = self.tables.hot.at(slot);
        if let Some(offloaded) = hot.offloaded.filter(|_| hot.phase == Phase::Connecting) {
            self.callbacks.closing(offloaded);
            self.catch_up(now, slot);
        }
    }
}
