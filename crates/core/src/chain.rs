//! Function chains: a flow's bytes pass several [`Stage`]s, in order from the client to the server, and back in the
//! opposite order. Each stage has a bounded buffer.
//!
//! The driver offers the bytes that it reads ([`Chain::handle`], [`Chain::end`]). It calls [`Chain::advance`] at the
//! deadline and whenever it wakes, and takes the output ([`Chain::take`]). While bytes of a direction wait in the
//! chain, the driver must not offer more ([`Chain::is_open`]). That is the back-pressure.
//!
//! A chain is a line at every moment, but a flow's way may branch: a [`crate::function::Branch`] is one stage until it
//! has chosen, and is then replaced by the stages of the arm that it chose ([`Step::Become`]):
//!
//! ```text
//!   client - audit - [branch] ----------- count - server       until the first bytes have shown the arm
//!                       |
//!                       v Become
//!   client - audit - words - slow ------- count - server       the arm "web"; all arms merge in front of `count`
//! ```
//!
//! Bytes that need no change pass where they lie, before and after the replacement.

use crate::flow::{EndReason, Side};
use crate::function::{Interest, STAGE_OUT_MAX, Stage, Step, Stop, Successors};
use crate::time::Instant;
use std::sync::Arc;

/// Most bytes that [`Chain::handle`] takes at once.
pub const OFFER_MAX: usize = 64 * 1024;

/// The result of offering bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// The bytes pass unchanged, and nothing was copied: the driver sends them itself.
    Unchanged,
    /// The chain has taken the bytes. Its output, now or later, comes from [`Chain::take`].
    Inside,
}

/// A stage with the name of its function.
struct Link {
    name: Arc<str>,
    stage: Box<dyn Stage>,
    /// By side: bytes that the stage was offered and has not taken yet. At most what the stages before it append in
    /// one call.
    waiting: [Vec<u8>; 2],
}

/// What a link made of the bytes that it was offered.
enum Eaten {
    /// Its output.
    Out(Vec<u8>),
    /// It is to be replaced, and its successors get these bytes.
    Become(Vec<u8>),
}

#[derive(Default)]
struct Direction {
    /// Output that was not taken yet.
    out: Vec<u8>,
    taken: usize,
    /// The side has ended. The number of stages that were told, in the order of the direction.
    ended: Option<usize>,
}

/// The functions of one flow.
pub struct Chain {
    /// From the client to the server.
    links: Vec<Link>,
    up: Direction,
    down: Direction,
}

impl Chain {
    /// Makes a chain of named stages, in order from the client to the server. It already contains what the stages
    /// send before the first byte.
    ///
    /// # Errors
    /// Fails if a stage ends the flow at once.
    pub fn new(stages: Vec<(Arc<str>, Box<dyn Stage>)>, now: Instant) -> Result<Self, Stop> {
        let link = |(name, stage)| Link { name, stage, waiting: [Vec::new(), Vec::new()] };
        let links: Vec<_> = stages.into_iter().map(link).collect();
        let mut chain = Self { links, up: Direction::default(), down: Direction::default() };
        for from in [Side::Client, Side::Server] {
            for at in 0..chain.links.len() {
                let mut said = Vec::new();
                let index = chain.index(from, at);
                chain.links[index].stage.start(now, from, &mut said);
                if !said.is_empty() {
                    chain.run(now, from, at + 1, said)?;
                }
            }
        }
        Ok(chain)
    }

    /// Joins this chain and another behind it. The output of the first chain towards the server must have been taken
    /// before, and offered to the second chain.
    ///
    /// # Errors
    /// Fails if a stage of the first chain ends the flow because of what a stage of the second sends first.
    pub fn followed_by(mut self, now: Instant, next: Self) -> Result<Self, Stop> {
        let Self { links, mut up, mut down } = next;
        let behind = links.len();
        self.links.extend(links);
        self.put(Side::Client, up.out.split_off(up.taken));
        let said = down.out.split_off(down.taken);
        if !said.is_empty() {
            // Towards the client, the stages of the second chain come first.
            self.run(now, Side::Server, behind, said)?;
        }
        Ok(self)
    }

    /// Returns what the stages must see of the bytes from this side.
    pub fn interest(&self, from: Side) -> Interest {
        self.links.iter().map(|link| link.stage.interest(from)).max().unwrap_or(Interest::Nothing)
    }

    /// Whether bytes from this side may be offered: none of them wait in the chain, and the side has not ended.
    pub fn is_open(&self, from: Side) -> bool {
        self.is_empty(from) && self.direction(from).ended.is_none()
    }

    /// Whether no bytes of this direction wait in the chain.
    fn is_empty(&self, from: Side) -> bool {
        self.ready(from) == 0 && self.links.iter().all(|link| link.waiting[from as usize].is_empty())
    }

    /// Whether this side has ended, every stage was told, and all output was taken.
    pub fn is_over(&self, from: Side) -> bool {
        self.direction(from).ended == Some(self.links.len()) && self.is_empty(from)
    }

    /// Returns the number of bytes that can be taken now.
    pub fn ready(&self, from: Side) -> usize {
        let direction = self.direction(from);
        direction.out.len() - direction.taken
    }

    /// Returns when to call [`Chain::advance`]. `None` if the chain only waits for bytes of the peers.
    pub fn deadline(&self) -> Option<Instant> {
        let both = [Side::Client, Side::Server];
        self.links.iter().flat_map(|link| both.map(|from| link.stage.deadline(from))).flatten().min()
    }

    /// Returns how many bytes from this side may move past stages that only count. The driver moves them, and reports
    /// them with [`Chain::count`].
    pub fn allowance(&mut self, now: Instant, from: Side) -> usize {
        self.counting(from).map(|link| link.stage.allowance(now, from)).min().unwrap_or(usize::MAX)
    }

    /// Notes that this number of bytes from this side moved past all stages.
    pub fn count(&mut self, now: Instant, from: Side, bytes: usize) {
        self.counting(from).for_each(|link| link.stage.count(now, from, bytes));
    }

    /// Offers bytes from this side, at most [`OFFER_MAX`], if [`Chain::is_open`].
    ///
    /// # Errors
    /// Fails if a stage ends the flow.
    pub fn handle(&mut self, now: Instant, from: Side, bytes: &[u8]) -> Result<Offered, Stop> {
        // Often the first stages pass the bytes unchanged. Up to the first stage that does not, nothing is copied.
        let mut at = 0;
        while at < self.links.len() {
            let index = self.index(from, at);
            let link = &mut self.links[index];
            if link.stage.interest(from) == Interest::Nothing {
                at += 1;
                continue;
            }
            let mut out = Vec::new();
            match link.stage.handle(now, from, bytes, &mut out) {
                Step::Pass(n) if n >= bytes.len() && out.is_empty() => at += 1,
                Step::Become => {
                    self.replace(now, index)?;
                    // Bytes that the branch held, and those that its successors send first, must leave before these.
                    if !self.is_empty(from) {
                        self.run(now, from, at, bytes.to_vec())?;
                        self.advance(now, from)?;
                        return Ok(Offered::Inside);
                    }
                }
                step => {
                    let taken = outcome(step, bytes, &mut out).map_err(|stop| link.blame(stop))?;
                    self.feed(now, from, at, &bytes[taken..], out, taken == 0)?;
                    self.advance(now, from)?;
                    return Ok(Offered::Inside);
                }
            }
        }
        Ok(Offered::Unchanged)
    }

    /// Notes that this side has sent its last byte.
    ///
    /// # Errors
    /// Fails if a stage ends the flow.
    pub fn end(&mut self, now: Instant, from: Side) -> Result<(), Stop> {
        self.direction_mut(from).ended.get_or_insert(0);
        self.advance(now, from)
    }

    /// Does what has become possible: calls due stages, offers waiting bytes, and passes the end of the side on.
    ///
    /// # Errors
    /// Fails if a stage ends the flow.
    pub fn advance(&mut self, now: Instant, from: Side) -> Result<(), Stop> {
        if self.ready(from) >= STAGE_OUT_MAX {
            return Ok(());
        }
        self.due(now, from)?;
        // Start at the last stage: its waiting bytes must leave before there is room for more.
        for at in (0..self.links.len()).rev() {
            let index = self.index(from, at);
            let waiting = std::mem::take(&mut self.links[index].waiting[from as usize]);
            if !waiting.is_empty() {
                self.run(now, from, at, waiting)?;
            }
            if self.waits(from, at) {
                return Ok(());
            }
        }
        self.finish(now, from)
    }

    /// Takes at most `max` bytes of output. Empty if there are none.
    pub fn take(&mut self, from: Side, max: usize) -> &[u8] {
        let direction = self.direction_mut(from);
        if direction.taken == direction.out.len() {
            direction.out.clear();
            direction.taken = 0;
        }
        let start = direction.taken;
        direction.taken = (start + max).min(direction.out.len());
        &direction.out[start..direction.taken]
    }

    /// Takes all output without a copy, if it fits into `max` and no part of it was taken before.
    pub fn take_whole(&mut self, from: Side, max: usize) -> Option<Vec<u8>> {
        let direction = self.direction_mut(from);
        let is_whole = direction.taken == 0 && (1..=max).contains(&direction.out.len());
        is_whole.then(|| std::mem::take(&mut direction.out))
    }

    /// Calls the stages whose deadline has passed.
    fn due(&mut self, now: Instant, from: Side) -> Result<(), Stop> {
        let mut at = 0;
        while at < self.links.len() {
            let index = self.index(from, at);
            let link = &mut self.links[index];
            at += 1;
            if link.stage.deadline(from).is_some_and(|due| due <= now) {
                let mut out = Vec::new();
                link.stage.tick(now, from, &mut out);
                if link.stage.has_chosen() {
                    self.replace(now, index)?;
                    at -= 1;
                } else if !out.is_empty() {
                    self.run(now, from, at, out)?;
                }
            }
        }
        Ok(())
    }

    /// Replaces a link by the stages that it has become, starts them, and offers them what the link held.
    fn replace(&mut self, now: Instant, index: usize) -> Result<(), Stop> {
        let link = &mut self.links[index];
        let Successors { stages, held } = link.stage.successors().map_err(|stop| link.blame(stop))?;
        let [up, down] = std::mem::take(&mut link.waiting);
        let count = stages.len();
        let link = |(name, stage)| Link { name, stage, waiting: [Vec::new(), Vec::new()] };
        self.links.splice(index..=index, stages.into_iter().map(link));
        for from in [Side::Client, Side::Server] {
            let first = match from {
                Side::Client => index,
                Side::Server => self.links.len() - index - count,
            };
            for at in first..first + count {
                let mut said = Vec::new();
                let index = self.index(from, at);
                self.links[index].stage.start(now, from, &mut said);
                if !said.is_empty() {
                    self.run(now, from, at + 1, said)?;
                }
            }
            let bytes = match from {
                Side::Client => [&held[..], &up[..]].concat(),
                Side::Server => down.clone(),
            };
            if !bytes.is_empty() {
                self.run(now, from, first, bytes)?;
            }
        }
        Ok(())
    }

    /// Tells the stages about the end, each after all bytes before it have passed.
    fn finish(&mut self, now: Instant, from: Side) -> Result<(), Stop> {
        while let Some(at) = self.direction(from).ended.filter(|at| *at < self.links.len()) {
            let index = self.index(from, at);
            let link = &mut self.links[index];
            let mut out = Vec::new();
            let is_done = link.stage.finish(now, from, &mut out).map_err(|stop| link.blame(stop))?;
            if link.stage.has_chosen() {
                self.replace(now, index)?;
                if (at..self.links.len()).any(|later| self.waits(from, later)) {
                    return Ok(());
                }
                continue;
            }
            if is_done {
                self.direction_mut(from).ended = Some(at + 1);
            }
            if !out.is_empty() {
                self.run(now, from, at + 1, out)?;
            }
            if !is_done || (at + 1..self.links.len()).any(|later| self.waits(from, later)) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Passes bytes through the stages from position `at` on. The output of the last one can then be taken.
    fn run(&mut self, now: Instant, from: Side, at: usize, mut bytes: Vec<u8>) -> Result<(), Stop> {
        let mut at = at;
        while at < self.links.len() {
            let index = self.index(from, at);
            let link = &mut self.links[index];
            if link.stage.interest(from) == Interest::Nothing && link.waiting[from as usize].is_empty() {
                at += 1;
                continue;
            }
            let waiting = &mut link.waiting[from as usize];
            if !waiting.is_empty() {
                waiting.extend_from_slice(&bytes);
                return Ok(());
            }
            bytes = match link.eat(now, from, bytes)? {
                Eaten::Out(out) => out,
                Eaten::Become(rest) => {
                    self.replace(now, index)?;
                    bytes = rest;
                    continue;
                }
            };
            if bytes.is_empty() {
                return Ok(());
            }
            at += 1;
        }
        self.put(from, bytes);
        Ok(())
    }

    /// As [`Chain::run`], if the first stage has already taken some bytes. `out` is its output, and `rest` are the
    /// bytes that it has not taken.
    fn feed(
        &mut self,
        now: Instant,
        from: Side,
        at: usize,
        rest: &[u8],
        out: Vec<u8>,
        is_blocked: bool,
    ) -> Result<(), Stop> {
        let index = self.index(from, at);
        if is_blocked {
            self.links[index].waiting[from as usize].extend_from_slice(rest);
        }
        if !out.is_empty() {
            self.run(now, from, at + 1, out)?;
        }
        if !is_blocked && !rest.is_empty() {
            // If bytes wait at a later stage, the output of this stage would have to wait behind them.
            let room = (at + 1..self.links.len()).all(|later| !self.waits(from, later));
            if room && self.ready(from) < STAGE_OUT_MAX {
                return self.run(now, from, at, rest.to_vec());
            }
            self.links[index].waiting[from as usize].extend_from_slice(rest);
        }
        Ok(())
    }

    fn put(&mut self, from: Side, bytes: Vec<u8>) {
        let direction = self.direction_mut(from);
        if direction.taken == direction.out.len() {
            direction.out = bytes;
            direction.taken = 0;
        } else {
            direction.out.extend_from_slice(&bytes);
        }
    }

    fn waits(&self, from: Side, at: usize) -> bool {
        !self.links[self.index(from, at)].waiting[from as usize].is_empty()
    }

    fn counting(&mut self, from: Side) -> impl Iterator<Item = &mut Link> {
        self.links.iter_mut().filter(move |link| link.stage.interest(from) == Interest::Count)
    }

    /// Returns the index of the link at a position in the order of the direction.
    fn index(&self, from: Side, at: usize) -> usize {
        match from {
            Side::Client => at,
            Side::Server => self.links.len() - 1 - at,
        }
    }

    const fn direction(&self, from: Side) -> &Direction {
        match from {
            Side::Client => &self.up,
            Side::Server => &self.down,
        }
    }

    const fn direction_mut(&mut self, from: Side) -> &mut Direction {
        match from {
            Side::Client => &mut self.up,
            Side::Server => &mut self.down,
        }
    }
}

impl Link {
    /// Offers all bytes to the stage, and returns its output. Bytes that it does not take, or for which there is no
    /// room, wait.
    fn eat(&mut self, now: Instant, from: Side, bytes: Vec<u8>) -> Result<Eaten, Stop> {
        let mut out = Vec::new();
        let mut at = 0;
        while at < bytes.len() && out.len() < STAGE_OUT_MAX {
            let offered = &bytes[at..bytes.len().min(at + STAGE_OUT_MAX)];
            let step = self.stage.handle(now, from, offered, &mut out);
            if out.is_empty() && matches!(step, Step::Pass(n) if n >= bytes.len()) {
                return Ok(Eaten::Out(bytes));
            }
            if step == Step::Become {
                return Ok(Eaten::Become(bytes[at..].to_vec()));
            }
            let taken = outcome(step, offered, &mut out).map_err(|stop| self.blame(stop))?;
            if taken == 0 {
                break;
            }
            at += taken;
        }
        self.waiting[from as usize].extend_from_slice(&bytes[at..]);
        Ok(Eaten::Out(out))
    }

    fn blame(&self, stop: Stop) -> Stop {
        if matches!(stop.reason, EndReason::PolicyDenied | EndReason::SecretRefused) {
            // Policy, or the search for placeholders, has said so, and not a function.
            return stop;
        }
        Stop { detail: format!("function '{}': {}", self.name, stop.detail), ..stop }
    }
}

/// Returns how many of the offered bytes a stage took. Bytes that pass are appended.
fn outcome(step: Step, offered: &[u8], out: &mut Vec<u8>) -> Result<usize, Stop> {
    match step {
        Step::Pass(n) => {
            let n = n.min(offered.len());
            out.extend_from_slice(&offered[..n]);
            Ok(n)
        }
        Step::Taken(n) => Ok(n.min(offered.len())),
        // Only a branch becomes other stages, and the chain has replaced it before.
        Step::Become => Ok(0),
        Step::Stop(stop) => Err(stop),
    }
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.links.iter().map(|link| &link.name)).finish()
    }
}
