//! One point: the program is started, killed at a random time of a phase, and started again.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Signal;
use sidetrack_sys::process::process_tree;

use super::stand::{End, READY, RELOADED, Stand};

/// When in its life it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(super) enum Phase {
    /// From its execution until it says that it is ready.
    Start,
    /// From SIGHUP until it says that it has reloaded, with a flow.
    Reload,
    /// From SIGTERM until it has ended, with a flow.
    Stop,
}

impl Phase {
    /// All of them, in the order of tables.
    pub(super) const ALL: [Self; 3] = [Self::Start, Self::Reload, Self::Stop];

    /// Returns its name in tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Reload => "reload",
            Self::Stop => "stop",
        }
    }
}

/// How long the phases take if the program is left alone.
#[derive(Debug, Clone, Copy, Default, serde::Serialize)]
pub(super) struct Lengths([Duration; 3]);

impl Lengths {
    /// Returns the length of a phase.
    pub(super) const fn of(&self, phase: Phase) -> Duration {
        self.0[phase as usize]
    }

    /// Measures them, the longest of several runs each, and says what is in force while the program serves a flow.
    ///
    /// # Errors
    /// The program does not do what it should, or something is left after its orderly end.
    pub(super) fn measure(stand: &Stand, runs: u32) -> Result<(Self, String)> {
        let (mut lengths, mut in_force) = (Self::default(), String::new());
        for _ in 0..runs {
            stand.write(0)?;
            let mut up = stand.start("measured")?;
            let mut took = [Duration::ZERO; 3];
            let begun = Instant::now();
            up.wait_said(READY)?;
            took[Phase::Start as usize] = begun.elapsed();
            let flow = stand.hold().with_context(|| up.log())?;
            in_force = stand.in_force()?;
            stand.write(1)?;
            let begun = Instant::now();
            up.signal(Signal::HUP)?;
            up.wait_said(RELOADED)?;
            took[Phase::Reload as usize] = begun.elapsed();
            let begun = Instant::now();
            up.signal(Signal::TERM)?;
            up.wait_ended()?;
            took[Phase::Stop as usize] = begun.elapsed();
            drop(flow);
            let left = stand.settle(&[up.pid()], Instant::now(), End::Orderly)?.err().unwrap_or_default();
            anyhow::ensure!(left.is_empty(), "after an orderly end: {}", left.join("; "));
            lengths.0 = std::array::from_fn(|at| lengths.0[at].max(took[at]));
        }
        Ok((lengths, in_force))
    }
}

/// What came of a point.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Outcome {
    /// Whether the program still ran when it was killed.
    pub was_running: bool,
    /// When everything was as before, or blocked as configured, after SIGKILL, in milliseconds.
    pub settled_ms: Option<f64>,
    /// Whether traffic was blocked then.
    pub was_blocked: bool,
    /// What was left behind, or not as it should be.
    pub left: Vec<String>,
    /// Why a start after it did not succeed or did not serve.
    pub failed: Option<String>,
}

impl Outcome {
    /// Returns true if everything was as it should be.
    pub(super) fn is_well(&self) -> bool {
        self.left.is_empty() && self.failed.is_none()
    }
}

/// Makes one. `cleans`: a block is removed by `sidetrack cleanup`, and not by the start after it.
///
/// # Errors
/// The program does not get to the phase, or the host cannot be read.
pub(super) fn make(
    stand: &Stand,
    phase: Phase,
    delay: Duration,
    must_block: bool,
    cleans: bool,
) -> Result<Outcome> {
    stand.write(0)?;
    let mut up = stand.start("killed")?;
    let flow = match phase {
        Phase::Start => None,
        Phase::Reload | Phase::Stop => {
            up.wait_said(READY)?;
            Some(stand.hold().with_context(|| up.log())?)
        }
    };
    match phase {
        Phase::Start => {}
        Phase::Reload => {
            stand.write(1)?;
            up.signal(Signal::HUP)?;
        }
        Phase::Stop => up.signal(Signal::TERM)?,
    }
    std::thread::sleep(delay);
    let family = process_tree(up.pid());
    let mut outcome = Outcome { was_running: up.is_running(), ..Outcome::default() };
    let since = Instant::now();
    // Without it, the process id may already be that of another process.
    if outcome.was_running {
        up.signal(Signal::KILL)?;
    }
    up.wait_ended()?;
    drop(flow);
    let is_pinned;
    match stand.settle(&family, since, End::Killed)? {
        Ok(settled) => {
            outcome.settled_ms = Some(settled.after.as_secs_f64() * 1000.0);
            outcome.was_blocked = settled.is_blocked;
            is_pinned = settled.is_pinned;
        }
        // Nothing that comes after it could be told from it.
        Err(left) => return Ok(Outcome { left, ..outcome }),
    }
    // The processes of its session are ended with it: not before they had the time to do it themselves.
    drop(up);
    let reached = if outcome.was_blocked { stand.is_blocked() } else { stand.passes() };
    outcome.left.extend(reached.err().map(|error| format!("{error:#}")));
    if must_block && !outcome.was_blocked {
        outcome.left.push("traffic is not blocked".to_owned());
    }
    if (outcome.was_blocked || is_pinned) && cleans {
        stand.cleanup()?;
        match stand.settle(&family, Instant::now(), End::Orderly)? {
            Ok(settled) if settled.is_blocked => outcome.left.push("the block, after cleanup".to_owned()),
            Ok(_) => {}
            Err(left) => outcome.left.extend(left),
        }
    }
    outcome.failed = stand.again().err().map(|error| format!("{error:#}"));
    Ok(outcome)
}
