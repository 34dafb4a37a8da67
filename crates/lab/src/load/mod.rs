//! The load generator: one pinned thread with epoll and non-blocking sockets. It is a separate process inside the
//! client's namespace, so that its cost is never counted for the proxy.
//!
//! The parent passes a [`Spec`] and reads two lines: `window` when the warm-up is over (the moment to read the
//! proxy's counters), and the [`Report`] as JSON when the window ends.

mod connection;
mod engine;
mod histogram;
mod script;
mod tls;
mod wire;

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::generator::Process;

pub use engine::run;
pub use histogram::Histogram;
pub use script::Script;
pub(crate) use tls::Believing;
pub use wire::{Expect, Malformed};

/// The line that the generator writes when its window begins.
const WINDOW_LINE: &str = "window";

/// What the connections do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// One request per connection (`Connection: close`), then a new connection; a slot is free again at the end of
    /// the stream.
    NewConnection,
    /// Requests one after the other on connections that stay open.
    KeepAlive,
    /// A large file repeatedly; the bytes are counted and discarded in the kernel (`MSG_TRUNC`).
    Bulk,
    /// One request on each connection, then nothing until the window ends.
    Idle,
}

/// The protocol of a connection with the dialled address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    /// The server's own protocol.
    Plain,
    /// SOCKS5 without authentication; the client waits for every step (RFC 1928).
    Socks5,
    /// SOCKS6 in the draft's layout; the request is sent as initial data or after the Operation Reply.
    Socks6Draft {
        /// Send the HTTP request in the same write as the SOCKS request.
        initial_data: bool,
    },
    /// SOCKS6 in the layout of the socksx crate.
    Socks6Socksx {
        /// As above; announced in option kind 2.
        initial_data: bool,
    },
    /// HTTP CONNECT (RFC 9110 Sec. 9.3.6), then the server's own protocol.
    HttpConnect,
}

/// One job for the generator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// What the connections do.
    pub work: Work,
    /// Number of connections at a time.
    pub connections: u32,
    /// The address they dial.
    pub dial: SocketAddr,
    /// The protocol they use there.
    pub via: Via,
    /// The destination server, named inside SOCKS requests.
    pub destination: SocketAddr,
    /// The same as a name and a port, for CONNECT and the field Host; none: `destination`.
    #[serde(default)]
    pub authority: Option<String>,
    /// Whether the connection uses TLS with the server, or with the program that intercepts it. No session is
    /// resumed, and every certificate is accepted, because the client's own work is not measured.
    #[serde(default)]
    pub tls: bool,
    /// Path of the requested file, or its full URL for a proxy.
    pub path: String,
    /// Send the first bytes in the SYN (TCP Fast Open, RFC 7413) if a cookie is known.
    pub fast_open: bool,
    /// Time before counting starts, in milliseconds.
    pub warmup_ms: u64,
    /// Time counted, in milliseconds.
    pub window_ms: u64,
    /// Stop after this number of requests, warm-up included; `u64::MAX`: by time only.
    pub max_requests: u64,
    /// Open at most this number of connections per second, evenly; absent: as fast as they end.
    #[serde(default)]
    pub per_second: Option<u32>,
}

/// The result of a job, without the warm-up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Complete, correct answers.
    pub requests: u64,
    /// Connections that failed, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Bytes of answers, heads included, SOCKS replies excluded.
    pub bytes: u64,
    /// Actual length of the window, in nanoseconds.
    pub window_ns: u64,
    /// Median time from connect (or request, when kept alive) to the last byte, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the same.
    pub p99_ns: u64,
    /// Connections open at the end of the window.
    pub open: u32,
}

impl Report {
    /// Returns the requests per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        per(self.requests as f64, self.window_ns as f64 / 1e9)
    }

    /// Returns the gigabits of answers per second.
    #[must_use]
    pub fn gbit_per_second(&self) -> f64 {
        per(self.bytes as f64 * 8.0, self.window_ns as f64)
    }

    /// Returns the number of failed connections.
    #[must_use]
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }
}

fn per(amount: f64, time: f64) -> f64 {
    if time > 0.0 { amount / time } else { 0.0 }
}

/// A running generator process.
#[derive(Debug)]
pub struct Generator(Process);

impl Generator {
    /// Starts the generator; `command` runs the lab's own program in the client's node.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(mut command: Command, spec: &Spec) -> Result<Self> {
        command.arg("load").arg(serde_json::to_string(spec)?).stdin(Stdio::null());
        Process::start("load generator", command).map(Self)
    }

    /// Waits for the end of the warm-up.
    ///
    /// # Errors
    /// The generator ended before that.
    pub fn wait_window(&mut self) -> Result<()> {
        self.0.wait(WINDOW_LINE)
    }

    /// Waits for the report.
    ///
    /// # Errors The generator failed; it wrote the reason on standard error.
    pub fn report(self) -> Result<Report> {
        self.0.report()
    }
}

/// `sidetrack-lab load SPEC`: the child's side of [`Generator`].
///
/// # Errors The specification is invalid, or epoll cannot be used.
pub fn main(spec: &str) -> Result<()> {
    let spec: Spec = serde_json::from_str(spec).context("the load specification is not valid")?;
    let report = run(&spec, || {
        // If the pipe has no reader, the parent has ended; the death signal then ends this process, too.
        let mut out = std::io::stdout();
        let _ = writeln!(out, "{WINDOW_LINE}").and_then(|()| out.flush());
    })?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Returns the path of the lab's own program, for [`Generator::start`].
///
/// # Errors
/// It does not exist.
pub fn program(launcher: &Path) -> Result<&str> {
    launcher.to_str().context("the path of sidetrack-lab is not UTF-8")
}
