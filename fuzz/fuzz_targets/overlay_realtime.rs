//! A real-time link: two ends, between them a network that delays, reorders and loses frames, and, if the input says so, a
//! third party that invents frames. No panic, bounded memory and traffic, no request for a transmission that came, and no
//! repetition that cannot be in time.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{
    Frame, Mark, Protocol, RESEND_MAX, Repeats, Resend, Spread, Subgraph, Timed,
};
use sidetrack_core::overlay::realtime::{Input, KEPT_MAX, MISSING_MAX, REPETITIONS_MAX, Recovery};
use sidetrack_core::overlay::service::{LinkKind, Service};
use sidetrack_core::overlay::spread::Source;
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Most frames that one event can cause: answers to a request, requests for all that is missing, and the newest number.
const OUTPUTS_MAX: usize = RESEND_MAX + MISSING_MAX / RESEND_MAX + 3;

/// One end, and what the other end and the network know of it.
struct End {
    machine: Recovery,
    source: Source,
    /// For each packet: until when it is of use, and how often it was sent.
    sent: BTreeMap<u64, (Instant, u8)>,
    /// The number of the next transmission, and the latest request.
    next: u64,
    request: u32,
    /// Numbers that came, or whose packets came by a repetition.
    have: BTreeSet<u64>,
    /// Frames on their way to the other end.
    way: VecDeque<Frame>,
}

struct Link {
    now: Instant,
    round_trip: Duration,
    ends: [End; 2],
    /// No frame was invented so far.
    is_honest: bool,
}

impl End {
    fn new() -> Self {
        let (machine, source) = (Recovery::default(), Source::new(1));
        let (sent, have, way) = (BTreeMap::new(), BTreeSet::new(), VecDeque::new());
        Self { machine, source, sent, next: 0, request: 0, have, way }
    }
}

impl Link {
    /// Gives one end an event, and checks what it does.
    fn tell(&mut self, at: usize, input: Input) {
        let (now, half) = (self.now, self.round_trip / 2);
        let asked = if let Input::Requested(resend) = &input { resend.numbers.len() } else { 0 };
        let end = &mut self.ends[at];
        end.machine.handle(now, input);
        let (mut outputs, mut repetitions) = (0, 0);
        while let Some(frame) = end.machine.poll() {
            outputs += 1;
            match &frame {
                Frame::Timed(Timed { mark, packet }) => {
                    assert_eq!(mark.number, end.next, "numbers rise by one");
                    end.next += 1;
                    let (until, times) = end.sent.get_mut(&packet.sequence).expect("it was sent here");
                    *times += 1;
                    assert_eq!(mark.repeats.is_none(), *times == 1);
                    assert!(*times <= 1 + REPETITIONS_MAX);
                    if let Some(Repeats { first, lost }) = mark.repeats {
                        repetitions += 1;
                        assert!(first <= lost && lost < mark.number);
                        assert!(now + half <= *until, "a repetition that comes too late");
                    }
                }
                Frame::Resend(Resend { request, numbers }) => {
                    assert!(*request > end.request || *request == u32::MAX);
                    end.request = *request;
                    assert!((1..=RESEND_MAX).contains(&numbers.len()));
                    assert!(numbers.windows(2).all(|two| two[0] < two[1]));
                    if self.is_honest {
                        assert!(
                            numbers.iter().all(|number| !end.have.contains(number)),
                            "it has {numbers:?}"
                        );
                    }
                }
                Frame::Newest(newest) => assert_eq!(Some(newest.number), end.next.checked_sub(1)),
                other => panic!("{other:?}"),
            }
            end.way.push_back(frame);
        }
        assert!(outputs <= OUTPUTS_MAX && repetitions <= asked);
        let (kept, missing) = end.machine.held();
        assert!(kept <= KEPT_MAX && missing <= MISSING_MAX);
        assert!(end.machine.deadline().is_none_or(|deadline| deadline > now), "nothing is overdue");
    }

    fn send(&mut self, at: usize, left: Duration) {
        let service = Service { deadline: Some(left), ..Service::new(LinkKind::RealTime) };
        let ends = (NodeId(1), NodeId(2));
        let Some(subgraph) = Subgraph::new(ends.0, ends.1, [ends]) else { return };
        let packet = self.ends[at].source.packet(&service, subgraph, Protocol::Ip, Vec::new());
        self.ends[at].sent.insert(packet.sequence, (self.now + left, 0));
        self.tell(at, Input::Send(Box::new(packet), left));
    }

    /// A frame comes to an end.
    fn arrive(&mut self, at: usize, frame: Frame) {
        let input = match frame {
            Frame::Timed(Timed { mark, packet }) => {
                let Mark { number, repeats, .. } = mark;
                self.ends[at].have.insert(number);
                self.ends[at]
                    .have
                    .extend(repeats.into_iter().flat_map(|repeats| [repeats.first, repeats.lost]));
                Input::Came(mark, packet.left().unwrap_or(Duration::from_secs(1)))
            }
            Frame::Resend(resend) => Input::Requested(resend),
            Frame::Newest(newest) => Input::Newest(newest),
            _ => return,
        };
        self.tell(at, input);
    }

    /// Takes a frame off the way from an end, not always the oldest.
    fn take(&mut self, from: usize, index: u8) -> Option<Frame> {
        let way = &mut self.ends[from].way;
        way.remove(usize::from(index) % way.len().max(1))
    }

    fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        for at in [0, 1] {
            if self.ends[at].machine.deadline().is_some_and(|deadline| deadline <= self.now) {
                self.tell(at, Input::Tick);
            }
        }
    }

    fn set_round_trip(&mut self, time: Duration) {
        self.round_trip = time;
        for at in [0, 1] {
            self.tell(at, Input::RoundTrip(time));
        }
    }
}

/// Makes the age of what comes plausible: half of the round trip.
fn aged(mut frame: Frame, round_trip: Duration) -> Frame {
    if let Frame::Timed(Timed { packet, .. }) = &mut frame {
        let packet: &mut Spread = packet;
        packet.grow_older(u32::try_from(round_trip.as_micros() / 2).unwrap_or(u32::MAX));
    }
    frame
}

fuzz_target!(|bytes: &[u8]| {
    let mut link = Link {
        now: Instant::from_millis(1000),
        round_trip: Duration::ZERO,
        ends: [End::new(), End::new()],
        is_honest: true,
    };
    let mut rest = bytes;
    while let [kind, value, tail @ ..] = rest {
        rest = tail;
        // The highest bit of the first byte says which end.
        let (at, value) = (usize::from(kind >> 7), *value);
        match kind & 0x7f {
            0 => link.send(at, Duration::from_millis(value.into())),
            1 => link.wait(Duration::from_micros(250 * u64::from(value))),
            2 => {
                if let Some(frame) = link.take(1 - at, value) {
                    let frame = aged(frame, link.round_trip);
                    link.arrive(at, frame);
                }
            }
            // Lost on the way.
            3 => drop(link.take(1 - at, value)),
            4 => link.set_round_trip(Duration::from_millis(value.into())),
            5 => (0..value).for_each(|_| link.send(at, Duration::from_millis(200))),
            6 => (0..value).for_each(|_| drop(link.take(1 - at, 0))),
            // An invented frame.
            _ => {
                let (frame, after) = rest.split_at(usize::from(value).min(rest.len()));
                rest = after;
                if let Ok(Some(frame)) = Frame::from_datagram(frame) {
                    link.is_honest = false;
                    link.arrive(at, frame);
                }
            }
        }
    }
});
