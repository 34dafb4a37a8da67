//! The progress lines of a long run, on standard error.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

/// Cells of the bar.
const WIDTH: usize = 24;

/// Writes permanent lines, and on a terminal one line that changes.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    is_terminal: bool,
    since: Instant,
}

impl Progress {
    /// Writes to standard error.
    #[must_use]
    pub fn new() -> Self {
        Self { is_terminal: stderr().is_terminal(), since: Instant::now() }
    }

    /// Shows the current step; on a terminal only.
    pub fn now(&self, text: &str) {
        if self.is_terminal {
            eprint!("\r\x1b[K{text}");
        }
    }

    /// Shows a bar with `done` of `total` steps, the time left and the current step; on a terminal only.
    pub fn bar(&self, done: usize, total: usize, text: &str) {
        if self.is_terminal {
            eprint!("\r\x1b[K{}", bar(done, total, self.since.elapsed(), text));
        }
    }

    /// Writes a permanent line.
    pub fn say(&self, text: &str) {
        let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
        eprintln!("{clear}{text}");
    }

    /// Removes the changing line.
    pub fn end(&self) {
        if self.is_terminal {
            eprint!("\r\x1b[K");
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

fn bar(done: usize, total: usize, elapsed: Duration, text: &str) -> String {
    let total = total.max(1);
    let done = done.min(total);
    let filled = WIDTH * done / total;
    let left = match done {
        0 => String::new(),
        _ => format!(", {} left", time(elapsed.mul_f64((total - done) as f64 / done as f64))),
    };
    let (full, empty) = ("#".repeat(filled), ".".repeat(WIDTH - filled));
    format!("[{full}{empty}] {:3} %{left}  {text}", 100 * done / total)
}

/// Formats a duration for people: `42 s` or `3 min 5 s`.
#[must_use]
pub fn time(duration: Duration) -> String {
    let seconds = duration.as_secs_f64().round() as u64;
    if seconds < 60 { format!("{seconds} s") } else { format!("{} min {} s", seconds / 60, seconds % 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_fills_and_says_what_is_left() {
        let at = |done| bar(done, 4, Duration::from_secs(60), "x");
        assert_eq!(at(0), "[........................]   0 %  x");
        assert_eq!(at(1), "[######..................]  25 %, 3 min 0 s left  x");
        assert_eq!(at(4), "[########################] 100 %, 0 s left  x");
        assert_eq!(bar(9, 4, Duration::ZERO, "x"), "[########################] 100 %, 0 s left  x");
        assert_eq!(bar(0, 0, Duration::ZERO, "x"), "[........................]   0 %  x");
    }
}
