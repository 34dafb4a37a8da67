//! Sub-commands: arguments in, text and an exit code out.

pub mod ca;
pub mod cache;
pub mod check;
pub mod cleanup;
pub mod doctor;
#[cfg(feature = "control")]
pub mod domain;
pub mod explain;
pub mod flows;
pub mod functions;
#[cfg(feature = "control")]
pub mod orchestrate;
pub mod overlay;
pub mod plan;
#[cfg(feature = "control")]
pub mod policy;
pub mod run;
pub mod schema;
pub mod shunt;
pub mod tunnel;
pub mod wrap;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

/// What a sub-command has to say: data for standard output, the rest for standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Printed {
    /// For standard output.
    pub out: String,
    /// For standard error.
    pub err: String,
    /// The exit code: 0 right, 1 failed while running, 2 wrong arguments or configuration.
    pub code: u8,
}

impl Printed {
    /// Writes both texts. A reader that went away (`| head`) is no failure.
    pub fn print(&self) -> ExitCode {
        let written = io::stdout().write_all(self.out.as_bytes()).and_then(|()| io::stdout().flush());
        let told = io::stderr().write_all(self.err.as_bytes());
        match written.and(told) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
            _ => ExitCode::from(self.code),
        }
    }
}

/// Whether messages may have colours: a terminal reads them and `NO_COLOR` is not set.
pub fn colours() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
