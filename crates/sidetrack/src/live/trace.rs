//! The decision trace of a flow: when each step of its set-up was done, to which addresses its names led, and what TCP
//! measured at both sides. Policy is not asked again for it: which rules were tried follows from what is kept in
//! [`Decided`](super::Decided).

use super::batch::{Reader, put_address, put_ip, put_text};
use sidetrack_core::flow::Side;
use sidetrack_sys::sockopt::TcpInfo;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A step of a flow's set-up, when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// The client's first bytes were read, because a rule needed them, or the wait for them was over.
    FirstBytes,
    /// Policy has decided, and the agreement, if the rule asks it.
    Decided,
    /// The function in a container with this index on the way, from 0, has taken the flow.
    Container(u8),
    /// The name of the server, or of the first hop, was resolved.
    Resolved,
    /// TCP to the server or to the first hop is connected; with an index, to the hop with this index that is dialled itself.
    Connected,
    /// TLS (or QUIC) with the hop of this index, from 0, is set up.
    HopSecured(u8),
    /// The hop of this index, from 0, has answered that it leads on.
    HopAnswered(u8),
    /// A tunnel or the overlay has answered that it leads to the server.
    FarSide,
    /// TLS with the server is set up, where Sidetrack speaks it itself.
    ServerSecured,
    /// A connection to the server that was open before serves the flow.
    Reused,
    /// The kernel has taken its packets over: no socket of ours is left.
    Wired,
    /// It has two sockets of ours again.
    Back,
}

impl Step {
    /// A number for it, and its index.
    const fn code(self) -> (u8, u8) {
        match self {
            Self::FirstBytes => (0, 0),
            Self::Decided => (1, 0),
            Self::Container(at) => (2, at),
            Self::Resolved => (3, 0),
            Self::Connected => (4, 0),
            Self::HopSecured(at) => (5, at),
            Self::HopAnswered(at) => (6, at),
            Self::FarSide => (7, 0),
            Self::ServerSecured => (8, 0),
            Self::Reused => (9, 0),
            Self::Wired => (10, 0),
            Self::Back => (11, 0),
        }
    }

    const fn of_code((code, at): (u8, u8)) -> Option<Self> {
        Some(match code {
            0 => Self::FirstBytes,
            1 => Self::Decided,
            2 => Self::Container(at),
            3 => Self::Resolved,
            4 => Self::Connected,
            5 => Self::HopSecured(at),
            6 => Self::HopAnswered(at),
            7 => Self::FarSide,
            8 => Self::ServerSecured,
            9 => Self::Reused,
            10 => Self::Wired,
            11 => Self::Back,
            _ => return None,
        })
    }
}

/// Most steps that are kept of a flow. A chain of eight hops with TLS has about twenty; the last place is for the last step.
const STEPS_MAX: usize = 12;

/// Most addresses of a name that are kept.
const RESOLVED_MAX: usize = 4;

/// What TCP has measured at one side of a flow (`TCP_INFO` of Linux).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpSeen {
    /// When it was asked, microseconds after the capture.
    pub at_us: u32,
    /// Smoothed round-trip time, microseconds.
    pub rtt_us: u32,
    /// Least round-trip time seen, microseconds. 0: none was measured.
    pub min_rtt_us: u32,
    /// Segments that we sent again since the connection began.
    pub retransmitted: u32,
    /// Segments of ours that count as lost at this moment.
    pub lost: u32,
    /// Latest rate at which the peer took our bytes, bytes per second. 0: none was measured.
    pub delivery_rate: u64,
}

impl TcpSeen {
    /// Takes what a record shows of the kernel's answer, `after` the capture.
    pub fn new(info: &TcpInfo, after: Duration) -> Self {
        let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        // The kernel says u32::MAX if there was no measurement.
        let min_rtt_us = Some(micros(info.min_rtt)).filter(|us| *us != u32::MAX).unwrap_or(0);
        Self {
            at_us: micros(after),
            rtt_us: micros(info.rtt),
            min_rtt_us,
            retransmitted: info.retransmitted_segments,
            lost: info.lost_segments,
            delivery_rate: info.delivery_rate_bytes,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        for number in [self.at_us, self.rtt_us, self.min_rtt_us, self.retransmitted, self.lost] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.delivery_rate.to_le_bytes());
    }

    fn read(from: &mut Reader<'_>) -> Self {
        let [at_us, rtt_us, min_rtt_us, retransmitted, lost] = [(); 5].map(|()| from.u32());
        let delivery_rate = u64::from_le_bytes(from.array());
        Self { at_us, rtt_us, min_rtt_us, retransmitted, lost, delivery_rate }
    }
}

/// The decision trace of one flow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    steps: Vec<(Step, u32)>,
    /// The first addresses to which the name of the server or of the first hop led, at most four.
    pub resolved: Vec<IpAddr>,
    /// How many addresses there were.
    pub resolved_count: u32,
    /// The address that answered: the server's or the first hop's.
    pub dialled: Option<SocketAddr>,
    /// What TCP has measured at the client's side, and at the server's.
    pub tcp: [Option<TcpSeen>; 2],
    /// The URL that rules were asked about, if they ask for one. It may hold secrets: never shown.
    pub url: Option<Box<str>>,
}

impl Trace {
    /// Notes that a step is done, `after` the capture. A flow that tries another way may do a step again.
    pub fn step(&mut self, step: Step, after: Duration) {
        let at_us = u32::try_from(after.as_micros()).unwrap_or(u32::MAX);
        if self.steps.len() == STEPS_MAX {
            self.steps.pop();
        }
        if self.steps.capacity() == 0 {
            // A plain flow has three.
            self.steps.reserve_exact(4);
        }
        self.steps.push((step, at_us));
    }

    /// The steps in their order, each with its time, microseconds after the capture.
    pub fn steps(&self) -> &[(Step, u32)] {
        &self.steps
    }

    /// Notes the addresses of a name.
    pub fn resolved_to(&mut self, addresses: impl ExactSizeIterator<Item = IpAddr>) {
        self.resolved_count = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        self.resolved = addresses.take(RESOLVED_MAX).collect();
    }

    /// What TCP has measured at this side.
    pub const fn tcp_of(&self, side: Side) -> Option<TcpSeen> {
        let [client, server] = self.tcp;
        match side {
            Side::Client => client,
            Side::Server => server,
        }
    }

    /// Notes what TCP has measured at this side.
    pub fn tcp_at(&mut self, side: Side, seen: TcpSeen) {
        let [client, server] = &mut self.tcp;
        *(if side == Side::Client { client } else { server }) = Some(seen);
    }

    fn is_empty(&self) -> bool {
        self == &Self::default()
    }

    /// Returns its compact form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.put(&mut bytes);
        bytes
    }

    /// Reads its compact form. Other bytes read as something else.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self::read(&mut Reader::new(bytes))
    }

    /// Appends its compact form: nothing, if nothing is known.
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        if self.is_empty() {
            return;
        }
        out.push(u8::try_from(self.steps.len()).unwrap_or(u8::MAX));
        for (step, at_us) in &self.steps {
            let (code, index) = step.code();
            out.extend_from_slice(&[code, index]);
            out.extend_from_slice(&at_us.to_le_bytes());
        }
        out.extend_from_slice(&self.resolved_count.to_le_bytes());
        out.push(u8::try_from(self.resolved.len()).unwrap_or(u8::MAX));
        self.resolved.iter().for_each(|ip| put_ip(out, *ip));
        let [client, server] = &self.tcp;
        let there = [self.dialled.is_some(), client.is_some(), server.is_some(), self.url.is_some()];
        out.push(there.into_iter().rev().fold(0, |bits, is| bits << 1 | u8::from(is)));
        self.dialled.iter().for_each(|address| put_address(out, *address));
        [client, server].into_iter().flatten().for_each(|seen| seen.put(out));
        self.url.iter().for_each(|url| put_text(out, url));
    }

    /// Reads what [`Trace::put`] wrote; the end of the bytes reads as nothing.
    pub(super) fn read(from: &mut Reader<'_>) -> Self {
        let mut trace = Self::default();
        if from.is_empty() {
            return trace;
        }
        let [count] = from.array::<1>();
        for _ in 0..count {
            let [code, index] = from.array::<2>();
            let at_us = from.u32();
            trace.steps.extend(Step::of_code((code, index)).map(|step| (step, at_us)));
        }
        trace.resolved_count = from.u32();
        let [count] = from.array::<1>();
        trace.resolved = (0..count).map(|_| from.ip()).collect();
        let [there] = from.array::<1>();
        let is = |bit: u8| there >> bit & 1 == 1;
        trace.dialled = is(0).then(|| from.address());
        trace.tcp = [is(1).then(|| TcpSeen::read(from)), is(2).then(|| TcpSeen::read(from))];
        trace.url = is(3).then(|| from.text().into());
        trace
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn steps() -> impl Strategy<Value = Vec<(u8, u8, u32)>> {
        prop::collection::vec((0..10_u8, any::<u8>(), any::<u32>()), 0..20)
    }

    fn tcp() -> impl Strategy<Value = Option<TcpSeen>> {
        prop::option::of((any::<[u32; 5]>(), any::<u64>()).prop_map(|(numbers, delivery_rate)| {
            let [at_us, rtt_us, min_rtt_us, retransmitted, lost] = numbers;
            TcpSeen { at_us, rtt_us, min_rtt_us, retransmitted, lost, delivery_rate }
        }))
    }

    proptest! {
        #[test]
        fn the_compact_form_says_the_same(
            steps in steps(),
            ips in prop::collection::vec(any::<IpAddr>(), 0..6),
            dialled in prop::option::of((any::<IpAddr>(), any::<u16>())),
            tcp in [tcp(), tcp()],
            url in prop::option::of("[a-z:/.?=]{0,40}"),
        ) {
            let mut trace = Trace::default();
            for (code, index, at_us) in steps {
                let step = Step::of_code((code, index)).expect("all are known");
                trace.step(step, Duration::from_micros(at_us.into()));
            }
            trace.resolved_to(ips.iter().copied());
            trace.dialled = dialled.map(SocketAddr::from);
            trace.tcp = tcp;
            trace.url = url.map(Into::into);
            let mut bytes = Vec::new();
            trace.put(&mut bytes);
            let mut reader = Reader::new(&bytes);
            prop_assert_eq!(&Trace::read(&mut reader), &trace);
            prop_assert!(reader.is_empty());
            // Cut bytes read as something, and do not panic.
            for end in 0..bytes.len() {
                let _ = Trace::read(&mut Reader::new(&bytes[..end]));
            }
        }
    }

    #[test]
    fn the_last_step_is_kept_when_there_are_too_many() {
        let mut trace = Trace::default();
        for hop in 0..40 {
            trace.step(Step::HopAnswered(hop), Duration::from_micros(hop.into()));
        }
        assert_eq!(trace.steps().len(), STEPS_MAX);
        assert_eq!(trace.steps().first(), Some(&(Step::HopAnswered(0), 0)));
        assert_eq!(trace.steps().last(), Some(&(Step::HopAnswered(39), 39)));
    }
}
