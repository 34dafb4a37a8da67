//! The load of datagrams: flows of UDP whose server sends each datagram back. The generator is one pinned process in the
//! client's node, the echo another one in the server's, so that their cost is never counted for the relay.
//!
//! The parent passes a [`Spec`] and reads two lines: `window` when the measured time begins, and the [`Report`] as JSON when
//! it ends.

mod echo;
mod flows;
mod quic;

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::generator::Process;

pub use echo::{Options as EchoOptions, run as echo};
pub use quic::{Options as QuicOptions, serve as serve_quic};

/// The line that the generator writes when its window begins.
const WINDOW_LINE: &str = "window";

/// What the flows do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Each flow has this number of datagrams under way; one that came back is sent again.
    Echo {
        /// Datagrams of one flow.
        under_way: u32,
    },
    /// New flows of one datagram, this number per second. A flow ends with its answer.
    New {
        /// Flows per second.
        per_second: u32,
    },
    /// This number of datagrams per second over all flows, whether they come back or not.
    Rate {
        /// Datagrams per second.
        per_second: u32,
    },
    /// One datagram on each flow, then nothing until the window ends.
    Idle,
    /// One QUIC connection that takes as many bytes as come (RFC 9000).
    Quic,
}

/// How datagrams reach the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    /// The dialled address takes them as they are.
    Plain,
    /// UDP ASSOCIATE at the dialled address, without authentication (RFC 1928 Sec. 4 and 7).
    Socks5,
}

/// A job for the generator.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Spec {
    /// What the flows do.
    pub work: Work,
    /// Flows at a time.
    pub flows: u32,
    /// Bytes of a datagram's payload, at least 8.
    pub bytes: usize,
    /// The address that the client uses.
    pub dial: SocketAddr,
    /// What it says there.
    pub via: Via,
    /// The server.
    pub destination: SocketAddr,
    /// Time before the window, milliseconds.
    pub warmup_ms: u64,
    /// Measured time, milliseconds.
    pub window_ms: u64,
}

/// What the generator saw within the window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Datagrams that came back.
    pub answers: u64,
    /// Datagrams that did not.
    pub lost: u64,
    /// Flows that had an answer at the end.
    pub open: u32,
    /// Bytes of a QUIC stream.
    pub bytes: u64,
    /// Duration, nanoseconds.
    pub window_ns: u64,
}

impl Report {
    /// Returns answers per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.answers as f64 * 1e9 / self.window_ns.max(1) as f64
    }

    /// Returns bytes of the QUIC stream per second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 * 1e9 / self.window_ns.max(1) as f64
    }

    /// Returns the share that did not come back, percent.
    #[must_use]
    pub fn lost_percent(&self) -> f64 {
        100.0 * self.lost as f64 / (self.answers + self.lost).max(1) as f64
    }
}

/// A running generator.
#[derive(Debug)]
pub struct Generator(Process);

impl Generator {
    /// Starts it; `command` runs this program in the client's node.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(mut command: Command, spec: &Spec) -> Result<Self> {
        command.arg("datagrams").arg(serde_json::to_string(spec)?).stdin(Stdio::null());
        Ok(Self(Process::start("generator of datagrams", command)?))
    }

    /// Returns the number of its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Waits until the window begins.
    ///
    /// # Errors
    /// It ended before; it wrote the reason on standard error.
    pub fn wait_window(&mut self) -> Result<()> {
        self.0.wait(WINDOW_LINE)
    }

    /// Waits for the report.
    ///
    /// # Errors
    /// As [`Generator::wait_window`].
    pub fn report(self) -> Result<Report> {
        self.0.report()
    }

    /// Waits for the report, and calls `look` while its process is still known to the system.
    ///
    /// # Errors
    /// As [`Generator::wait_window`].
    pub fn report_with<T>(self, look: impl FnOnce() -> T) -> Result<(Report, T)> {
        self.0.report_with(look)
    }
}

/// The generator's own part.
///
/// # Errors
/// The job is not one, or no flow can be opened.
pub fn main(spec: &str) -> Result<()> {
    crate::launch::raise_file_limit();
    let spec: Spec = serde_json::from_str(spec).context("the job of the generator")?;
    let begin = || {
        let mut out = std::io::stdout();
        writeln!(out, "{WINDOW_LINE}").and_then(|()| out.flush()).context("standard output")
    };
    let report = match spec.work {
        Work::Quic => quic::take(&spec, begin)?,
        _ => flows::run(&spec, begin)?,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
