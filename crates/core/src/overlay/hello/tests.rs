use super::*;

const ONE_WAY: Duration = Duration::from_millis(10);

/// Two ends joined by wires that `passes` may cut, for `ms` milliseconds. Returns what each end announced.
fn pair(ms: u64, passes: impl Fn(bool, u64) -> bool) -> ([Detector; 2], [Vec<(u64, Output)>; 2]) {
    let mut ends =
        [Detector::new(Config::default(), Instant::ZERO), Detector::new(Config::default(), Instant::ZERO)];
    let mut wires: [VecDeque<(Instant, Hello)>; 2] = Default::default();
    let mut said: [Vec<(u64, Output)>; 2] = Default::default();
    for at in 0..ms {
        let now = Instant::from_millis(at);
        for end in 0..2 {
            while let Some((_, hello)) = wires[end].pop_front_if(|(due, _)| *due <= now) {
                ends[end].handle(now, Input::Hello(hello, Lane::Stream));
            }
            ends[end].handle(now, Input::Tick);
            while let Some(output) = ends[end].poll() {
                match output {
                    Output::Send(hello, _) if passes(end == 0, at) => {
                        wires[1 - end].push_back((now + ONE_WAY, hello))
                    }
                    Output::Send(..) => {}
                    other => said[end].push((at, other)),
                }
            }
        }
    }
    (ends, said)
}

#[test]
fn both_ends_come_up_and_measure_the_round_trip() {
    let (ends, said) = pair(2000, |_, _| true);
    for end in 0..2 {
        assert_eq!(said[end].len(), 1, "{said:?}");
        assert_eq!(said[end][0].1, Output::Up);
        assert_eq!(
            ends[end].quality(),
            Quality { rtt_us: 20_000, jitter_us: ends[end].quality().jitter_us, loss_ppm: 0 }
        );
        assert!(ends[end].quality().jitter_us < 1000);
    }
}

#[test]
fn silence_is_noticed_in_time_and_a_one_way_link_never_comes_up() {
    let (_, said) = pair(2000, |_, at| at < 1000);
    for end in said {
        let (at, output) = end[1];
        assert_eq!(output, Output::Down);
        assert!((1000..1000 + 10 + 161).contains(&at), "{at}");
    }
    let (ends, said) = pair(2000, |from_first, _| from_first);
    assert_eq!(said, [vec![], vec![]]);
    assert!(!ends[0].is_up() && !ends[1].is_up());
    // One direction fails: both ends notice it.
    let (_, said) = pair(2000, |from_first, at| from_first || at < 1000);
    assert!(said.iter().all(|end| end.len() == 2 && end[1].1 == Output::Down), "{said:?}");
}

/// One end that hears a hello at each of these times. Returns the end, which is up.
fn heard_until(ms: u64) -> Detector {
    let mut end = Detector::new(Config::default(), Instant::ZERO);
    for (sequence, at) in (0..=ms).step_by(40).enumerate() {
        let sequence = u32::try_from(sequence).expect("few");
        let hello = Hello { state: LinkState::Up, sequence, interval_ms: 40, echo: None };
        let hello = if sequence < 3 { Hello { state: LinkState::Init, ..hello } } else { hello };
        end.handle(Instant::from_millis(at), Input::Hello(hello, Lane::Stream));
        end.handle(Instant::from_millis(at), Input::Tick);
    }
    assert!(end.is_up());
    end
}

#[test]
fn who_slept_does_not_take_it_for_the_silence_of_others() {
    // The process sleeps for any time, and the tick comes before the waiting hellos are read: the link stays up.
    for slept in [1, 50, 159, 160, 161, 500, 1000, 100_000] {
        let mut end = heard_until(1000);
        let woken = Instant::from_millis(1000 + slept);
        end.handle(woken, Input::Tick);
        assert!(end.is_up(), "after {slept} ms");
        // But a neighbour that has fallen silent is noticed, even if this process sleeps again and again.
        let late = Duration::from_millis(300);
        let mut now = woken;
        for _ in 0..100 {
            end.handle(now, Input::Tick);
            now = end.deadline() + late * u32::from(slept > 500);
        }
        assert!(!end.is_up(), "nobody spoke after {slept} ms");
    }
}

#[test]
fn a_neighbour_whose_kernel_answers_may_be_silent_for_longer_not_for_ever() {
    let mut end = heard_until(1000);
    let mut last_up = 0;
    for at in (1001..8000).step_by(10) {
        end.handle(Instant::from_millis(at), Input::Alive(Duration::ZERO));
        end.handle(Instant::from_millis(at), Input::Tick);
        if end.is_up() {
            last_up = at;
        }
    }
    assert!((2980..3010).contains(&last_up), "{last_up}");
    end.handle(Instant::from_millis(9000), Input::Alive(Duration::ZERO));
    assert!(!end.is_up(), "an acknowledgement alone brings no link up");
}

#[test]
fn lost_hellos_are_counted_and_cost() {
    let (ends, said) = pair(8000, |_, at| at % 400 >= 40);
    assert_eq!(said[0].len(), 1, "one lost in ten takes no link down: {said:?}");
    let quality = ends[0].quality();
    assert!((60_000..150_000).contains(&quality.loss_ppm), "{quality:?}");
    assert!(quality.cost_us() > Quality { loss_ppm: 0, ..quality }.cost_us() + 10_000);
}

#[test]
fn a_neighbour_that_restarts_and_counts_anew_is_heard_again() {
    let hello = |sequence| Hello { state: LinkState::Init, sequence, interval_ms: 40, echo: None };
    let mut detector = Detector::new(Config::default(), Instant::ZERO);
    for sequence in 400..410 {
        detector.handle(
            Instant::from_millis(u64::from(sequence) * 40),
            Input::Hello(hello(sequence), Lane::Stream),
        );
    }
    assert!(detector.is_up());
    for sequence in 1..20 {
        detector.handle(
            Instant::from_millis(16_400 + u64::from(sequence) * 40),
            Input::Hello(hello(sequence), Lane::Stream),
        );
    }
    let changes: Vec<_> =
        std::iter::from_fn(|| detector.poll()).filter(|output| !matches!(output, Output::Send(..))).collect();
    assert_eq!(changes, [Output::Up, Output::Down, Output::Up]);
}

#[test]
fn what_makes_no_sense_is_survived() {
    let mut detector = Detector::new(Config::default(), Instant::ZERO);
    for sequence in [u32::MAX, 0, 7, 7, 3, u32::MAX / 2, 1] {
        let hello =
            Hello { state: LinkState::Up, sequence, interval_ms: 0, echo: Some((sequence, u32::MAX)) };
        detector.handle(Instant::from_millis(1), Input::Hello(hello, Lane::Stream));
    }
    detector.handle(Instant::ZERO, Input::Loss(u32::MAX));
    assert!(detector.quality().cost_us() <= Quality::COST_MAX_US);
    assert!(!detector.is_up(), "up needs both ends to say that they hear");
}

/// A link with streams and datagrams in both directions, and what the ends announced, with the times.
struct TwoLanes {
    ends: [Detector; 2],
    wires: [VecDeque<(Instant, Hello, Lane)>; 2],
    said: [Vec<(u64, Output)>; 2],
    hellos: [usize; 2],
    now_ms: u64,
}

const BOTH_LANES: Config = Config {
    stream: Pace { interval: Duration::from_millis(65), missed: 8 },
    datagrams: Some(Pace { interval: Duration::from_millis(30), missed: 4 }),
    starved: Duration::from_secs(2),
    up_after: 2,
};

impl TwoLanes {
    fn new() -> Self {
        let ends = [(); 2].map(|()| Detector::new(BOTH_LANES, Instant::ZERO));
        Self { ends, wires: Default::default(), said: Default::default(), hellos: [0; 2], now_ms: 0 }
    }

    /// Runs for `ms` milliseconds. `passes` gets each hello (from the first end, its lane, its number) and returns
    /// whether it arrives. On the stream hellos stay in order.
    fn run(&mut self, ms: u64, mut passes: impl FnMut(bool, Lane, u32) -> bool) {
        for _ in 0..ms {
            self.now_ms += 1;
            let now = Instant::from_millis(self.now_ms);
            for end in 0..2 {
                while let Some((_, hello, lane)) = self.wires[end].pop_front_if(|(due, ..)| *due <= now) {
                    self.ends[end].handle(now, Input::Hello(hello, lane));
                }
                self.ends[end].handle(now, Input::Tick);
                while let Some(output) = self.ends[end].poll() {
                    let Output::Send(hello, lanes) = output else {
                        self.said[end].push((self.now_ms, output));
                        continue;
                    };
                    self.hellos[end] += 1;
                    for lane in [Lane::Stream, Lane::Datagram] {
                        if lanes.has(lane) && passes(end == 0, lane, hello.sequence) {
                            self.wires[1 - end].push_back((now + ONE_WAY, hello, lane));
                        }
                    }
                }
            }
        }
    }

    fn downs(&self) -> usize {
        self.said.iter().flatten().filter(|(_, output)| *output == Output::Down).count()
    }
}

#[test]
fn datagrams_that_arrive_quicken_the_pace_and_a_cut_is_noticed_after_four() {
    let mut link = TwoLanes::new();
    link.run(2000, |_, _, _| true);
    assert!(link.ends.iter().all(|end| end.is_up() && end.reaches_by_datagram(Instant::from_millis(2000))));
    link.hellos = [0; 2];
    link.run(3000, |_, _, _| true);
    assert!(link.hellos.iter().all(|count| (98..=102).contains(count)), "{:?}", link.hellos);
    link.said = Default::default();
    link.run(1000, |_, _, _| false);
    for end in &link.said {
        assert_eq!(end.len(), 1, "{:?}", link.said);
        assert!((5080..=5000 + 10 + 121).contains(&end[0].0), "{:?}", link.said);
    }
}

#[test]
fn a_neighbour_that_slept_is_asked_on_the_stream_before_it_is_given_up() {
    let mut link = TwoLanes::new();
    link.run(2000, |_, _, _| true);
    // The first end sends nothing any more. Its kernel still acknowledges stream data, 40 ms later.
    let (end, mut asked) = (&mut link.ends[1], VecDeque::new());
    for at in 2000..3500 {
        let now = Instant::from_millis(at);
        let acked = asked.iter().rev().find(|asked| **asked + 40 <= at);
        if let Some(asked) = acked.filter(|_| end.is_suspect(now)) {
            end.handle(now, Input::Alive(Duration::from_millis(at - asked - 40)));
        }
        end.handle(now, Input::Tick);
        while let Some(output) = end.poll() {
            match output {
                Output::Send(_, lanes) if lanes.has(Lane::Stream) => asked.push_back(at),
                Output::Send(..) => {}
                other => panic!("{other:?} at {at}"),
            }
        }
    }
}

#[test]
fn where_no_datagram_passes_the_stream_serves_alone_one_way_too() {
    for (from_first, from_second) in [(false, false), (true, false), (false, true)] {
        let mut link = TwoLanes::new();
        link.run(6000, |is_first, lane, _| {
            lane == Lane::Stream || if is_first { from_first } else { from_second }
        });
        assert_eq!(link.downs(), 0, "{:?}", link.said);
        assert!(link.ends.iter().all(Detector::is_up));
        let reached = link.ends.map(|end| end.reaches_by_datagram(Instant::from_millis(6000)));
        assert_eq!(reached, [from_first, from_second]);
    }
}

#[test]
fn datagrams_that_are_blocked_one_day_cost_no_link() {
    let mut link = TwoLanes::new();
    link.run(3000, |_, _, _| true);
    link.run(6000, |_, lane, _| lane == Lane::Stream);
    assert_eq!(link.downs(), 0, "{:?}", link.said);
    link.run(3000, |_, _, _| true);
    assert!(link.ends.iter().all(|end| end.reaches_by_datagram(Instant::from_millis(12_000))));
}

#[test]
fn the_loss_of_datagrams_is_the_loss_of_the_link_and_hellos_bear_it() {
    let mut link = TwoLanes::new();
    let mut dice = 12_345_u32;
    let mut one_in_twenty = move || {
        dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (dice >> 16).is_multiple_of(20)
    };
    link.run(60_000, |_, lane, _| lane == Lane::Stream || !one_in_twenty());
    assert_eq!(link.downs(), 0, "{:?}", link.said);
    for end in &link.ends {
        let loss = end.quality().loss_ppm;
        assert!((20_000..90_000).contains(&loss), "{loss}");
    }
}

#[test]
fn what_came_late_on_the_stream_takes_nothing_back() {
    let mut link = TwoLanes::new();
    link.run(2000, |_, _, _| true);
    let old = Hello { state: LinkState::Down, sequence: 1, interval_ms: 65, echo: None };
    link.ends[0].handle(Instant::from_millis(2000), Input::Hello(old, Lane::Stream));
    assert!(link.ends[0].is_up());
}
