//! Subcommands: each takes arguments and gives text and an exit code.

#![allow(
    rustdoc::broken_intra_doc_links,
    rustdoc::bare_urls,
    reason = "these comments are the texts of help: [name] is a table of the configuration there"
)]

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

/// The output of a subcommand: data for standard output, and the rest for standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Printed {
    /// For standard output.
    pub out: String,
    /// For standard error.
    pub err: String,
    /// The exit code: 0 success, 1 failure while running, 2 wrong arguments or configuration.
    pub code: u8,
}

impl Printed {
    /// Writes both texts. A closed reader (`| head`) is not a failure.
    pub fn print(&self) -> ExitCode {
        let written = io::stdout().write_all(self.out.as_bytes()).and_then(|()| io::stdout().flush());
        let told = io::stderr().write_all(self.err.as_bytes());
        match written.and(told) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
            _ => ExitCode::from(self.code),
        }
    }
}

/// Whether messages may be coloured: standard error is a terminal and `NO_COLOR` is not set.
pub fn colours() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
