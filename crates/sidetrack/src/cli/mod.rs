//! Subcommands: each takes arguments and gives text and an exit code.

#![allow(
    rustdoc::broken_intra_doc_links,
    rustdoc::bare_urls,
    reason = "these comments are the texts of help: [name] is a table of the configuration there"
)]

pub mod attach;
pub mod bugreport;
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
pub mod graph;
pub mod invite;
pub mod jobs;
pub mod login;
mod mend;
#[cfg(feature = "control")]
pub mod orchestrate;
pub mod overlay;
pub mod pages;
pub mod plan;
#[cfg(feature = "control")]
pub mod policy;
mod prepared;
pub mod profile;
pub mod reload;
pub mod run;
pub mod schema;
pub mod shunt;
pub mod tap;
pub mod top;
pub mod tunnel;
pub mod upgrade;
pub mod wrap;

use crate::admin::Client;
use hyper::Method;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tokio::time::timeout;

/// How long a running sidetrack may take to answer a command that can do without.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks the sidetrack at this socket once. Returns the first line of the reason if it does not answer.
fn ask_once<T: serde::de::DeserializeOwned>(
    socket: &Path,
    request: &str,
    query: &[(&str, &str)],
) -> Result<T, String> {
    let first_line = |error: String| error.lines().next().unwrap_or_default().to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let client = Client::new(socket);
    let answer = runtime.block_on(async { timeout(PATIENCE, client.ask(Method::GET, request, query)).await });
    let answer = answer.map_err(|_| format!("{} does not answer", socket.display()))?;
    answer.map_err(|error| first_line(error.to_string()))
}

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
