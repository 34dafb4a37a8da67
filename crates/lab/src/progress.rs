//! What a long run says on standard error.

use std::io::{IsTerminal, stderr};

/// Lines that stay, and on a terminal one line that changes.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    is_terminal: bool,
}

impl Progress {
    /// For standard error.
    #[must_use]
    pub fn new() -> Self {
        Self { is_terminal: stderr().is_terminal() }
    }

    /// What is being done now; only a terminal shows it.
    pub fn now(&self, text: &str) {
        if self.is_terminal {
            eprint!("\r\x1b[K{text}");
        }
    }

    /// A line that stays.
    pub fn say(&self, text: &str) {
        let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
        eprintln!("{clear}{text}");
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}
