//! Captures: the packets of flows, as pcapng files that Wireshark opens.
//!
//! One thread reads copies of the packets of our network from the kernel ([`sidetrack_sys::capture`]), finds the flow of each, and
//! keeps the latest if a ring is configured. Viewers get those of the flows that match their filters. The data
//! path only notes the connections of flows ([`crate::live::legs`]), and only while a capture runs.

mod collect;
mod comment;
mod file;
mod packets;
mod viewer;

pub use file::{PacketFile, Stop};

use crate::live::{Ledger, keys, legs};
use bytes::Bytes;
use collect::Collector;
use sidetrack_core::filter::Filter;
use sidetrack_sys::capture::{CaptureSocket, Ring};
use sidetrack_sys::sync::lock;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;
use viewer::Viewer;

/// Most viewers at a time.
pub const VIEWERS_MAX: usize = 16;

/// Most pieces of a file that wait for one viewer, each of about 64 KiB. While all places are taken, packets are dropped and counted.
const PIECES_MAX: usize = 64;

/// What is kept of packets before a capture is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of the latest packets that are kept. 0: none.
    pub ring_bytes: u64,
    /// Bytes of each packet that are kept.
    pub snap_bytes: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ring_bytes: 0, snap_bytes: SNAP_BYTES }
    }
}

/// Longest packet that is captured whole: the kernel joins segments up to this.
pub const SNAP_BYTES: u32 = 256 << 10;

/// Why there is no capture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CaptureError {
    /// The process had no right to read packets when it started.
    #[error("this sidetrack cannot read packets: {0}")]
    NoPackets(String),
    /// No packets are kept.
    #[error("no packets of the past are kept")]
    NoRing,
    /// There are [`VIEWERS_MAX`] viewers.
    #[error("{VIEWERS_MAX} captures run already")]
    TooMany,
    /// The thread could not be started, or the kernel gave no memory.
    #[error("cannot capture: {0}")]
    Failed(String),
}

impl CaptureError {
    /// What a person can do about it.
    pub const fn help(&self) -> &'static str {
        match self {
            Self::NoPackets(_) => {
                "start it as root, or with CAP_NET_RAW (AmbientCapabilities=CAP_NET_RAW in its unit), and without `[capture] packets = false`"
            }
            Self::NoRing => "set `ring_bytes` in [capture] and restart, or leave --last out",
            Self::TooMany => "end one of them",
            Self::Failed(_) => "the log of the running sidetrack may say more",
        }
    }
}

/// Captures of this process.
#[derive(Debug)]
pub struct Captures {
    /// Each in one network. Never changed after the start.
    sockets: Result<Vec<CaptureSocket>, String>,
    settings: Settings,
    ledgers: OnceLock<Vec<Arc<Ledger>>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Viewers that the thread has not taken yet.
    arrived: Vec<Viewer>,
    /// The viewers of the thread.
    viewing: usize,
    is_running: bool,
}

/// One capture: pieces of a file as they come. It ends when this is dropped.
#[derive(Debug)]
pub struct Capture {
    pieces: mpsc::Receiver<Bytes>,
    is_finishing: Arc<AtomicBool>,
}

/// Ends a capture in order: what has been captured still comes.
#[derive(Clone, Debug)]
pub struct Finish(Arc<AtomicBool>);

impl Finish {
    /// Ends it.
    pub fn now(&self) {
        self.0.store(true, Relaxed);
    }
}

impl Capture {
    /// The pieces of the file.
    pub const fn pieces(&mut self) -> &mut mpsc::Receiver<Bytes> {
        &mut self.pieces
    }

    /// Ends the capture in order.
    pub fn finish(&self) -> Finish {
        Finish(self.is_finishing.clone())
    }
}

impl Captures {
    /// Captures of the network of the calling thread. Call it while the process has its rights.
    pub fn of_this_network(settings: Settings) -> Arc<Self> {
        let cannot = |error: io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied => "it has no CAP_NET_RAW".to_owned(),
            _ if error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error()) => {
                "it may not use AF_PACKET".to_owned()
            }
            _ => error.to_string(),
        };
        let socket = CaptureSocket::open().map_err(cannot);
        Self::of(socket.map(|socket| vec![socket]), settings)
    }

    /// Captures by these sockets, or the reason why there are none.
    pub fn of(sockets: Result<Vec<CaptureSocket>, String>, settings: Settings) -> Arc<Self> {
        let (ledgers, state) = (OnceLock::new(), Mutex::default());
        Arc::new(Self { sockets, settings, ledgers, state })
    }

    /// No captures, for this reason.
    pub fn none(why: &str) -> Arc<Self> {
        Self::of(Err(why.to_owned()), Settings::default())
    }

    /// Sets where flows are found. If a ring is configured, keeps packets from now on.
    #[must_use]
    pub fn begin(self: Arc<Self>, ledgers: Vec<Arc<Ledger>>) -> Arc<Self> {
        let _ = self.ledgers.set(ledgers);
        if self.settings.ring_bytes == 0 {
            return self;
        }
        let begun = self.sockets().and_then(|_| self.run(&mut lock(&self.state)));
        if let Err(error) = begun {
            tracing::warn!("[capture] ring_bytes: no packets are kept: {error}; {}", error.help());
        }
        self
    }

    fn sockets(&self) -> Result<&[CaptureSocket], CaptureError> {
        match &self.sockets {
            Ok(sockets) => Ok(sockets),
            Err(why) => Err(CaptureError::NoPackets(why.clone())),
        }
    }

    /// Captures packets of flows that match a filter. With `last`, only those of this time before now, which have been kept.
    ///
    /// # Errors
    /// There is no right to, no packets are kept, or there are too many viewers.
    pub fn view(self: &Arc<Self>, filter: Filter, last: Option<Duration>) -> Result<Capture, CaptureError> {
        self.sockets()?;
        if last.is_some() && self.settings.ring_bytes == 0 {
            return Err(CaptureError::NoRing);
        }
        let mut state = lock(&self.state);
        if state.viewing + state.arrived.len() >= VIEWERS_MAX {
            return Err(CaptureError::TooMany);
        }
        let (sender, pieces) = mpsc::channel(PIECES_MAX);
        let is_finishing = Arc::new(AtomicBool::new(last.is_some()));
        let snap_bytes = self.settings.snap_bytes;
        state.arrived.push(Viewer::new(filter, last, snap_bytes, sender, is_finishing.clone()));
        if let Err(error) = self.run(&mut state) {
            state.arrived.clear();
            return Err(error);
        }
        Ok(Capture { pieces, is_finishing })
    }

    /// Starts the thread if it does not run.
    fn run(self: &Arc<Self>, state: &mut State) -> Result<(), CaptureError> {
        if state.is_running {
            return Ok(());
        }
        let failed = |error: io::Error| CaptureError::Failed(error.to_string());
        let rings: io::Result<Vec<_>> = self.sockets()?.iter().map(CaptureSocket::read).collect();
        let rings = rings.map_err(failed)?;
        legs::want(true);
        keys::want(true);
        let (this, ledgers) = (self.clone(), self.ledgers.get().cloned().unwrap_or_default());
        let thread = std::thread::Builder::new().name("capture".to_owned());
        let run = move || Collector::new(rings, ledgers, this.settings).run(&this);
        thread.spawn(run).map_err(failed)?;
        state.is_running = true;
        Ok(())
    }

    /// Called by the thread: takes new viewers. Returns false if it must end, because there is nothing to do. The rings are gone then.
    fn serve(&self, viewers: &mut Vec<Viewer>, rings: &mut Vec<Ring>) -> bool {
        let mut state = lock(&self.state);
        viewers.append(&mut state.arrived);
        state.viewing = viewers.len();
        state.is_running = !viewers.is_empty() || self.settings.ring_bytes > 0;
        if !state.is_running {
            legs::want(false);
            keys::want(false);
            // Before another thread may read the sockets.
            rings.clear();
        }
        state.is_running
    }
}
