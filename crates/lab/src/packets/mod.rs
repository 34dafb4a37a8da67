//! The packet generator: both ends of many short TCP connections, as packets over AF_XDP, without a kernel's TCP. It
//! has the role of the traffic engine of ProxyEngine, as a separate process on its own CPU.
//!
//! It is a closed loop: a fixed number of connections is always open. Each has seven packets towards the engine: SYN,
//! ACK and request of the client; the server's SYN-ACK, and its FIN, which acknowledges the request; the client's
//! FIN, and its acknowledgement. When one connection ends, the next begins from another port.
//!
//! | file | does |
//! |---|---|
//! | `segment` | writes and reads frames with its own code: it must not share a codec with the measured program |
//! | `ends` | what both ends answer: no I/O, no clock |
//! | `flood` | SYNs of clients that do not exist |
//! | `kept` | clients that stay and ask again and again, to see what the others cost them |
//! | `peer` | the same as an XDP program, for decided connections, which are too fast for a process |
//! | `rings` | an AF_XDP socket and its frames |
//! | `wire` | the loop around it |
//! | `least` | the smallest program on the path, as a limit for the engine |

mod ends;
mod flood;
mod kept;
mod least;
mod peer;
mod rings;
mod segment;
mod wire;

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::generator::Process;

pub use ends::{Ends, Tally};
pub use kept::KeptReport;
pub use least::{By, Least, Side};
pub use peer::{KernelPeer, REQUEST, Shakes};
pub use segment::{ACK, FIN, PSH, RST, SYN, Segment};

/// The line that the generator writes when its window begins.
const WINDOW_LINE: &str = "window";
/// The line that it writes when it stops counting and lets open connections end.
const DRAIN_LINE: &str = "drain";

/// One job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The interface in the generator's own network namespace, with one receive queue.
    pub interface: String,
    /// The link-layer address of the engine.
    pub engine: [u8; 6],
    /// The address that clients connect to.
    pub front: SocketAddrV4,
    /// The server's address; the namespace's kernel answers ARP for it.
    pub server: SocketAddrV4,
    /// The first of the clients' addresses.
    pub clients: Ipv4Addr,
    /// Connections open at a time, at most 65,536.
    pub connections: u32,
    /// Time before counting starts, in milliseconds.
    pub warmup_ms: u64,
    /// Time counted, in milliseconds.
    pub window_ms: u64,
    /// Connections that stay and are measured one question at a time, besides the others.
    #[serde(default)]
    pub kept: u32,
    /// Clients are impatient: one that has waited for this time gives up, and another begins, in milliseconds. 0: after
    /// a second.
    #[serde(default)]
    pub patience_ms: u64,
    /// Time between two questions of a connection that stays, in microseconds. `None`: 5 ms. 0: the next follows at once.
    #[serde(default)]
    pub every_us: Option<u64>,
    /// SYNs of clients that never answer, per second.
    #[serde(default)]
    pub flood_per_s: u32,
}

/// The result of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Connections that both ends have closed within the window.
    pub completed: u64,
    /// Connections begun within the window.
    #[serde(default)]
    pub begun: u64,
    /// Frames that came from the engine within the window.
    pub received: u64,
    /// Frames sent to it within the window.
    pub sent: u64,
    /// Actual length of the window, in nanoseconds.
    pub window_ns: u64,
    /// Median time from SYN to the last acknowledgement, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the same.
    pub p99_ns: u64,
    /// 99.9th percentile of the same.
    pub p999_ns: u64,
    /// Counts of the whole run, including the warm-up and the end.
    pub whole: Tally,
    /// Frames whose checksums were checked: every 64th.
    pub checked: u64,
    /// Connections still open at the end.
    pub open: u64,
    /// Frames from the engine that the generator's queue could not hold.
    pub lost: u64,
    /// What the connections that stay have seen within the window.
    #[serde(default)]
    pub kept: KeptReport,
    /// SYNs of the flood sent within the window.
    #[serde(default)]
    pub flooded: u64,
}

impl Report {
    /// Returns the completed connections per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        if self.window_ns == 0 { 0.0 } else { self.completed as f64 * 1e9 / self.window_ns as f64 }
    }

    /// Returns the frames per second, both directions together.
    #[must_use]
    pub fn packet_rate(&self) -> f64 {
        let packets = (self.received + self.sent) as f64;
        if self.window_ns == 0 { 0.0 } else { packets * 1e9 / self.window_ns as f64 }
    }
}

/// A running generator process. It ends with its input.
#[derive(Debug)]
pub struct Generator(Process);

impl Generator {
    /// Starts it; `command` runs the lab's own program in the generator's node.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(mut command: Command, spec: &Spec) -> Result<Self> {
        command.arg("packets").arg(serde_json::to_string(spec)?).stdin(Stdio::piped());
        Process::start("packet generator", command).map(Self)
    }

    /// Waits for the end of the warm-up.
    ///
    /// # Errors
    /// The generator ended before that.
    pub fn wait_window(&mut self) -> Result<()> {
        self.0.wait(WINDOW_LINE)
    }

    /// Waits for the end of the window.
    ///
    /// # Errors
    /// As [`Self::wait_window`].
    pub fn wait_drain(&mut self) -> Result<()> {
        self.0.wait(DRAIN_LINE)
    }

    /// Waits for the report.
    ///
    /// # Errors The generator failed; it wrote the reason on standard error.
    pub fn report(self) -> Result<Report> {
        self.0.report()
    }
}

/// `sidetrack-lab packets SPEC`: the child's side of [`Generator`].
///
/// # Errors The specification is invalid, or the interface has no AF_XDP.
pub fn main(spec: &str) -> Result<()> {
    let spec: Spec = serde_json::from_str(spec).context("the specification is not valid")?;
    let say = |line: &str| {
        let mut out = std::io::stdout();
        // If the pipe has no reader, the parent has ended; the death signal then ends this process, too.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    };
    let report = wire::run(&spec, || say(WINDOW_LINE), || say(DRAIN_LINE))?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}
