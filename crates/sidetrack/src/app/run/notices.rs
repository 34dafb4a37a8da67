//! Our own lines while a command runs: to standard error, or to a file.
//!
//! A program that draws on the terminal, such as an editor, would not know of a line between. So lines wait until it has ended:
//!
//! ```text
//!   [written at once] -- a line comes, and a program draws --> [held]
//!          ^                                                     |
//!          `-- nothing draws any more, or the command has ended -'
//! ```

use anyhow::Context;
use sidetrack_sys::sync::lock;
use sidetrack_sys::terminal;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::{Mutex, OnceLock};

/// Most bytes of lines that are held.
const HELD_MAX_BYTES: usize = 64 * 1024;

/// Where lines go once a command runs. Before, to standard error.
static PLACE: OnceLock<Place> = OnceLock::new();

/// Where lines go.
enum Place {
    /// A file.
    File(File),
    /// The terminal that the command with this id has, too.
    Terminal { command: u32, held: Mutex<Held> },
}

/// Lines that wait.
#[derive(Debug, Default)]
struct Held {
    lines: String,
    /// How many lines there was no room for.
    left_out: u64,
    /// The command has ended: nothing waits any more.
    over: bool,
}

impl Held {
    /// Takes lines. Returns what is to be written now.
    fn take(&mut self, lines: &str, is_drawn_on: bool) -> String {
        if is_drawn_on && !self.over {
            if self.lines.len() + lines.len() <= HELD_MAX_BYTES {
                self.lines.push_str(lines);
            } else {
                self.left_out += lines.matches('\n').count() as u64;
            }
            return String::new();
        }
        let mut all = std::mem::take(&mut self.lines);
        if self.left_out > 0 {
            all.push_str(&format!("sidetrack: {} more lines were left out\n", self.left_out));
            self.left_out = 0;
        }
        all + lines
    }
}

/// Opens the file of `--log`.
///
/// # Errors
/// It cannot be written.
pub(super) fn open(path: &Path) -> anyhow::Result<File> {
    let file = File::options().append(true).create(true).open(path);
    file.with_context(|| format!("cannot write --log {}", path.display()))
}

/// Says where lines go while the command with this id runs.
pub(super) fn begin(log: Option<File>, command: u32) {
    let place = match log {
        Some(file) => Place::File(file),
        None if std::io::stderr().is_terminal() => Place::Terminal { command, held: Mutex::default() },
        None => return,
    };
    // There is one command in the life of this process.
    if PLACE.set(place).is_ok() {
        crate::log::divert(write);
    }
}

/// Writes lines in one call, so that the command's output does not come between them, now or when no program draws any more.
pub(super) fn write(lines: &str) {
    // If the reader is gone, only the command is affected.
    let _ = match PLACE.get() {
        Some(Place::File(file)) => (&*file).write_all(lines.as_bytes()),
        Some(Place::Terminal { command, held }) => {
            let mut held = lock(held);
            if lines.is_empty() && held.lines.is_empty() && held.left_out == 0 {
                return;
            }
            let error = std::io::stderr();
            let now = held.take(lines, terminal::is_drawn_on(&error, *command));
            (&error).write_all(now.as_bytes())
        }
        None => std::io::stderr().write_all(lines.as_bytes()),
    };
}

/// The command has ended: writes what is held, and holds nothing any more.
pub(super) fn end() {
    if let Some(Place::Terminal { held, .. }) = PLACE.get() {
        lock(held).over = true;
        write("");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_wait_while_a_program_draws() {
        let mut held = Held::default();
        assert_eq!(held.take("a\n", false), "a\n");
        assert_eq!(held.take("b\n", true), "");
        assert_eq!(held.take("c\n", true), "");
        assert_eq!(held.take("", false), "b\nc\n");
        held.take("d\n", true);
        held.over = true;
        assert_eq!(held.take("", true), "d\n");
    }

    #[test]
    fn what_waits_is_bounded_and_the_rest_is_counted() {
        let mut held = Held::default();
        let line = format!("{}\n", "x".repeat(999));
        for _ in 0..100 {
            held.take(&line, true);
        }
        let all = held.take("", false);
        assert_eq!(all.matches('x').count(), 65 * 999);
        assert!(all.ends_with("sidetrack: 35 more lines were left out\n"));
    }
}
