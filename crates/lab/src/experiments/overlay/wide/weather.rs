//! The weather of a wide area: a seeded trace of bursts of losses, outages and cross traffic, and a thread that plays it.
//!
//! | what | how often | how long | what happens |
//! |---|---|---|---|
//! | trouble of a link | once in 20 s for each link | 0.5 to 2 s | loses 2 to 20 % in bursts, both ways |
//! | trouble of a node | once in 60 s for each node | 1 to 3 s | each of its links loses 5 to 30 % in bursts |
//! | outage of a link | once in 60 s for each link | 0.2 to 0.8 s | passes nothing |
//! | cross traffic | always | changes each second | 0 to 30 % of the rate, one way |
//!
//! The rest of the time a link loses 0.05 % in bursts. Real networks have less trouble; so a short run sees some of each kind.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::world::{Map, World};
use crate::link::random::Random;
use crate::link::{Conditions, Loss, Rate};

/// Rate of every link, bits per second: a fifth of what Spines was allowed in the seed, for one machine with two cores.
pub(super) const RATE: u64 = 100_000_000;
/// The queue before it, as time at that rate.
const QUEUE_MS: u64 = 60;
/// Share of frames that is lost without trouble.
const CALM: f64 = 0.0005;
/// Mean length of a burst, frames.
const BURST: f64 = 4.0;
/// Most cross traffic, as a share of the rate.
const CROSS: f64 = 0.3;
/// Payload of a datagram of cross traffic, bytes; and how often some are sent.
const CROSS_BYTES: usize = 1200;
const CROSS_EVERY: Duration = Duration::from_millis(2);

/// What a link does from some time on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Change {
    /// Milliseconds from the beginning of the trace.
    pub at_ms: u64,
    pub link: usize,
    /// Share of frames that is lost, both ways.
    pub loss: f64,
    pub is_up: bool,
}

/// A trace.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Weather {
    /// By time.
    pub changes: Vec<Change>,
    /// For each second and each link: share of the rate that cross traffic takes from the lower end to the higher one, and
    /// back.
    cross: Vec<Vec<[f64; 2]>>,
}

/// One event that begins and ends.
struct Event {
    from_ms: u64,
    to_ms: u64,
    link: usize,
    /// Share that is lost; 1: an outage.
    loss: f64,
}

impl Weather {
    /// Draws a trace of this length. The same seed gives the same trace.
    pub(super) fn draw(seed: u64, map: &Map, length: Duration) -> Self {
        let mut random = Random::new(seed);
        let (links, nodes) = (map.links.len(), map.names.len());
        let length_ms = u64::try_from(length.as_millis()).unwrap_or(u64::MAX);
        let mut events = Vec::new();
        for link in 0..links {
            draw(
                &mut random,
                length_ms,
                20_000.0,
                [500.0, 2000.0],
                |random| vec![(link, 0.02 + 0.18 * random.unit())],
                &mut events,
            );
            draw(&mut random, length_ms, 60_000.0, [200.0, 800.0], |_| vec![(link, 1.0)], &mut events);
        }
        for node in 0..nodes {
            let of = |(_, (a, b, _)): &(usize, &(usize, usize, u64))| *a == node || *b == node;
            let touching: Vec<_> = map.links.iter().enumerate().filter(of).map(|(link, _)| link).collect();
            draw(
                &mut random,
                length_ms,
                60_000.0,
                [1000.0, 3000.0],
                |random| touching.iter().map(|link| (*link, 0.05 + 0.25 * random.unit())).collect(),
                &mut events,
            );
        }
        let seconds = length_ms.div_ceil(1000);
        let mut level = || CROSS * random.unit();
        let cross = (0..seconds).map(|_| (0..links).map(|_| [level(), level()]).collect()).collect();
        Self { changes: changes(&events, links), cross }
    }

    /// Sets all links as they are without trouble.
    ///
    /// # Errors
    /// The emulator has ended.
    pub(super) fn calm(world: &World) -> Result<()> {
        (0..world.wires.len()).try_for_each(|link| set(world, link, CALM, true))
    }

    /// Pulls a link out.
    ///
    /// # Errors
    /// The emulator has ended.
    pub(super) fn pull(world: &World, link: usize) -> Result<()> {
        set(world, link, CALM, false)
    }

    /// Plays the trace while `work` is done, with cross traffic on these links.
    ///
    /// # Errors
    /// The emulator has ended, or the work fails.
    pub(super) fn play<T: Send>(
        &self,
        world: &World,
        cross: &[usize],
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        Self::calm(world)?;
        let sockets = Crossing::open(world, cross)?;
        let is_over = AtomicBool::new(false);
        let done = std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let done = work();
                is_over.store(true, Relaxed);
                done
            });
            let began = Instant::now();
            let mut next = self.changes.iter().peekable();
            while !is_over.load(Relaxed) {
                let elapsed = began.elapsed();
                while let Some(change) =
                    next.next_if(|change| u128::from(change.at_ms) <= elapsed.as_millis())
                {
                    set(world, change.link, change.loss, change.is_up)?;
                }
                let levels = self.cross.get(usize::try_from(elapsed.as_secs())?);
                sockets.iter().for_each(|socket| socket.send(elapsed, levels));
                std::thread::sleep(CROSS_EVERY);
            }
            worker.join().map_err(|_| anyhow!("the work panicked"))?
        });
        Self::calm(world)?;
        done
    }
}

fn set(world: &World, link: usize, loss: f64, is_up: bool) -> Result<()> {
    let leave = 1.0 / BURST;
    let loss = Loss::Burst { enter: leave * loss / (1.0 - loss.min(0.99)), leave };
    let rate = Some(Rate { bits_per_second: RATE, queue_bytes: RATE / 8 * QUEUE_MS / 1000 });
    world.wires[link].set_both(Conditions { loss, rate, is_up, ..Conditions::delayed(world.delay(link)) })
}

/// Draws events with this mean time between them, each of a length in this range.
fn draw(
    random: &mut Random,
    length_ms: u64,
    apart_ms: f64,
    lasts_ms: [f64; 2],
    mut what: impl FnMut(&mut Random) -> Vec<(usize, f64)>,
    events: &mut Vec<Event>,
) {
    let mut at = 0.0_f64;
    loop {
        at -= apart_ms * f64::ln(1.0 - random.unit());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "milliseconds of some minutes"
        )]
        let from_ms = at as u64;
        if from_ms >= length_ms {
            return;
        }
        at += lasts_ms[0] + (lasts_ms[1] - lasts_ms[0]) * random.unit();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "milliseconds of some minutes"
        )]
        let to_ms = at as u64;
        events.extend(what(random).into_iter().map(|(link, loss)| Event { from_ms, to_ms, link, loss }));
    }
}

/// What each link does over time: where events overlap, the worst one counts.
fn changes(events: &[Event], links: usize) -> Vec<Change> {
    let mut all = Vec::new();
    for link in 0..links {
        let here: Vec<_> = events.iter().filter(|event| event.link == link).collect();
        let mut times: Vec<_> = here.iter().flat_map(|event| [event.from_ms, event.to_ms]).collect();
        times.sort_unstable();
        times.dedup();
        all.extend(times.into_iter().map(|at_ms| {
            let now = here.iter().filter(|event| (event.from_ms..event.to_ms).contains(&at_ms));
            let loss = now.map(|event| event.loss).fold(CALM, f64::max);
            Change { at_ms, link, loss: if loss < 1.0 { loss } else { CALM }, is_up: loss < 1.0 }
        }));
    }
    all.sort_by_key(|change| (change.at_ms, change.link));
    all
}

/// Cross traffic on a link, one way.
struct Crossing {
    socket: UdpSocket,
    link: usize,
    way: usize,
    /// Takes what arrives, and is never read.
    _sink: UdpSocket,
}

impl Crossing {
    fn open(world: &World, links: &[usize]) -> Result<Vec<Self>> {
        let bind = |node: usize, address: Ipv4Addr| {
            world.nodes[node].enter(|| {
                let socket = UdpSocket::bind((address, 0))?;
                socket.set_nonblocking(true)?;
                Ok(socket)
            })
        };
        let mut all = Vec::new();
        for link in links {
            let ((a, b, _), wire) = (world.map.links[*link], &world.wires[*link].link);
            for (way, (from, to)) in
                [((a, wire.a.v4), (b, wire.b.v4)), ((b, wire.b.v4), (a, wire.a.v4))].into_iter().enumerate()
            {
                let (socket, sink) = (bind(from.0, from.1)?, bind(to.0, to.1)?);
                let to: SocketAddr = sink.local_addr()?;
                socket.connect(to)?;
                all.push(Self { socket, link: *link, way, _sink: sink });
            }
        }
        Ok(all)
    }

    /// Sends what is due in one interval. What the system does not take is not sent.
    fn send(&self, elapsed: Duration, levels: Option<&Vec<[f64; 2]>>) {
        let Some(level) = levels.and_then(|levels| levels.get(self.link)) else { return };
        // Datagrams of the second so far, with and without this interval.
        let per_second = RATE as f64 * level[self.way] / 8.0 / CROSS_BYTES as f64;
        let into = Duration::from_nanos(elapsed.subsec_nanos().into());
        let until = (per_second * into.as_secs_f64()).floor();
        let before = (per_second * into.saturating_sub(CROSS_EVERY).as_secs_f64()).floor();
        for _ in 0..(until - before) as u32 {
            let _ = self.socket.send(&[0x5a; CROSS_BYTES]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> Map {
        let links = vec![(0, 1, 5), (1, 2, 7), (0, 2, 9)];
        Map { names: &["a", "b", "c"], links, ends: [0, 2], services: Vec::new() }
    }

    #[test]
    fn the_same_seed_gives_the_same_trace_and_another_one_another() {
        let draw = |seed| Weather::draw(seed, &map(), Duration::from_secs(120));
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn trouble_begins_and_ends_and_outages_are_among_it() {
        let weather = Weather::draw(3, &map(), Duration::from_secs(600));
        assert!(weather.changes.is_sorted_by_key(|change| change.at_ms));
        assert!(weather.changes.iter().any(|change| !change.is_up));
        assert!(weather.changes.iter().all(|change| (CALM..=0.31).contains(&change.loss)));
        for link in 0..3 {
            let last = weather.changes.iter().rfind(|change| change.link == link).expect("some trouble");
            assert!(last.is_up && last.loss == CALM, "in the end all is well: {last:?}");
        }
        assert!(weather.cross.iter().flatten().flatten().all(|level| (0.0..CROSS).contains(level)));
    }

    #[test]
    fn of_two_events_at_a_time_the_worse_one_counts() {
        let event = |from_ms, to_ms, loss| Event { from_ms, to_ms, link: 0, loss };
        let all = changes(&[event(10, 30, 0.1), event(20, 40, 1.0), event(35, 50, 0.2)], 1);
        let told: Vec<_> = all.iter().map(|change| (change.at_ms, change.loss, change.is_up)).collect();
        let (calm, down) = (CALM, CALM);
        let wanted = [
            (10, 0.1, true),
            (20, down, false),
            (30, down, false),
            (35, down, false),
            (40, 0.2, true),
            (50, calm, true),
        ];
        assert_eq!(told, wanted);
    }
}
