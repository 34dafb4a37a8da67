//! Records of flows that end in a process which writes no file any more: they go through a pipe to the process that goes on.

use crate::metrics::{Carried, Metrics};
use crate::record::Switch;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Begins the last line: all metrics of the process that ends. A record never begins like this.
const COUNTERS: &[u8] = b"#counters ";

/// Most bytes of one line.
const LINE_MAX: u64 = 16 << 20;

/// How long the other process may take to read the last line.
const LAST_LINE: Duration = Duration::from_secs(5);

/// Whose records come through a pipe.
pub(in super::super) enum Returning {
    /// Those of the process before this one.
    Earlier,
    /// Those of a process that gave everything back. It had these metrics from us.
    Back(Carried),
}

impl Returning {
    /// Writes what comes through the pipe, on a thread of its own, until its other end is closed.
    pub(in super::super) fn follow(self, pipe: OwnedFd, switch: Switch, metrics: Arc<Metrics>) {
        let follow = move || {
            let mut reader = BufReader::new(File::from(pipe));
            let mut line = Vec::new();
            loop {
                line.clear();
                match std::io::Read::take(&mut reader, LINE_MAX).read_until(b'\n', &mut line) {
                    Ok(1..) if line.ends_with(b"\n") => {}
                    // A line that a killed process has torn is left out.
                    _ => return,
                }
                match line.strip_prefix(COUNTERS) {
                    None => switch.add(&line),
                    Some(text) => {
                        let Ok(text) = serde_json::from_slice::<String>(text) else { continue };
                        let counted = Carried::of(&text);
                        match &self {
                            Self::Earlier => metrics.carry(counted),
                            Self::Back(given) => metrics.carry_back(&counted.since(given)),
                        }
                    }
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("records-in".to_owned()).spawn(follow) {
            tracing::error!(%error, "the other process's records are lost");
        }
    }
}

/// Tells the process that goes on all our metrics, as the last line. The writer of records must be closed.
pub(in super::super) fn say_counters(pipe: &OwnedFd, text: &str) {
    let Ok(pipe) = pipe.try_clone() else { return };
    let Ok(json) = serde_json::to_vec(text) else { return };
    let (done, finished) = std::sync::mpsc::channel();
    let write = move || {
        // The other process may be gone.
        let _ = File::from(pipe).write_all(&[COUNTERS, &json, b"\n"].concat());
        let _ = done.send(());
    };
    if std::thread::Builder::new().name("counters".to_owned()).spawn(write).is_ok() {
        // It may hang: then the thread ends with this process.
        let _ = finished.recv_timeout(LAST_LINE);
    }
}
