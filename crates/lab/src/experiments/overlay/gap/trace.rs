//! Seeded traces of trouble. Most of the time nothing happens. Trouble begins at random times, at a node or on a link, and its
//! losses change from second to second.

use super::network::{DIRECTED, NODES, State, ends};
use crate::link::random::Random;

/// Troubles per hour and node, and per hour and link (both directions).
const NODE_HOUR: f64 = 0.08;
const LINK_HOUR: f64 = 0.05;

/// Average and shortest duration of a trouble, seconds.
const LASTS: f64 = 60.0;
const LASTS_AT_LEAST: f64 = 5.0;

/// A link of a node in trouble takes part with this probability, and is bad in a second with the next one.
const TAKES_PART: f64 = 0.8;
const IS_BAD: f64 = 0.5;

/// Share of bad seconds in which the link passes nothing, and of those in which it is slow as well.
const IS_DEAD: f64 = 0.1;
const IS_SLOW: f64 = 0.2;

/// A trouble: the directed links that take part.
#[derive(Debug, Clone)]
struct Trouble {
    begins: u64,
    ends: u64,
    links: Vec<usize>,
}

/// All troubles of one trace.
#[derive(Debug)]
pub(super) struct Trace {
    troubles: Vec<Trouble>,
    random: Random,
}

impl Trace {
    /// Draws the troubles of this number of seconds.
    pub(super) fn new(seed: u64, seconds: u64) -> Self {
        let mut random = Random::new(seed);
        let mut troubles = Vec::new();
        for node in 0..NODES {
            let touches = |link: &usize| ends(*link).0 == node || ends(*link).1 == node;
            let links: Vec<_> = (0..DIRECTED).filter(touches).collect();
            draw(&mut random, seconds, NODE_HOUR, &links, TAKES_PART, &mut troubles);
        }
        for link in 0..DIRECTED / 2 {
            draw(&mut random, seconds, LINK_HOUR, &[2 * link, 2 * link + 1], 1.0, &mut troubles);
        }
        Self { troubles, random }
    }

    /// True if a trouble is there in this second.
    pub(super) fn is_troubled(&self, second: u64) -> bool {
        self.troubles.iter().any(|trouble| (trouble.begins..trouble.ends).contains(&second))
    }

    /// Draws the states of all links in this second.
    pub(super) fn states(&mut self, second: u64) -> [State; DIRECTED] {
        let mut states = [State::default(); DIRECTED];
        for trouble in self.troubles.iter().filter(|trouble| (trouble.begins..trouble.ends).contains(&second))
        {
            for link in &trouble.links {
                if self.random.happens(IS_BAD) {
                    let loss =
                        if self.random.happens(IS_DEAD) { 1.0 } else { 0.05 + 0.55 * self.random.unit() };
                    let more_us = if self.random.happens(IS_SLOW) { 20_000 } else { 0 };
                    states[*link] = State { loss: loss.max(states[*link].loss), more_us };
                }
            }
        }
        states
    }
}

fn draw(
    random: &mut Random,
    seconds: u64,
    per_hour: f64,
    links: &[usize],
    takes_part: f64,
    troubles: &mut Vec<Trouble>,
) {
    let exponential = |mean: f64, random: &mut Random| -> f64 { -mean * f64::ln(1.0 - random.unit()) };
    let mut at = 0.0_f64;
    loop {
        at += exponential(3600.0 / per_hour, random);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds of some hours")]
        let begins = at as u64;
        if begins >= seconds {
            return;
        }
        let lasts = exponential(LASTS, random).max(LASTS_AT_LEAST);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds of some hours")]
        let ends = (begins + lasts as u64).min(seconds);
        let links = links.iter().copied().filter(|_| random.happens(takes_part)).collect();
        troubles.push(Trouble { begins, ends, links });
        at += lasts;
    }
}
