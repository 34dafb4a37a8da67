//! The packets of a command: a capture into a file while the command runs, and those that others ask for.

use super::{Launched, RunCommand, notices};
use crate::capture::{Captures, Finish, PacketFile, Settings};
use crate::live::Ledger;
use anyhow::Context;
use sidetrack_core::filter::Filter;
use sidetrack_sys::capture::CaptureSocket;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Opens what reads packets, while the process has the right to: those of the command's own network, and as root those of the
/// host's, where the connections to servers are.
pub(super) fn open(launched: &mut Launched) -> Arc<Captures> {
    let own = launched.packets.take();
    let sockets: Vec<_> = own.into_iter().chain(CaptureSocket::open().ok()).collect();
    let why = "the kernel has no packet sockets here, or the command runs in the network of the host and not as root";
    Captures::of(if sockets.is_empty() { Err(why.to_owned()) } else { Ok(sockets) }, Settings::default())
}

/// A capture into a file.
pub(super) struct Writing {
    finish: Finish,
    thread: JoinHandle<anyhow::Result<String>>,
}

/// Starts the capture that the command line asks for. Call it before the command is served.
pub(super) fn begin(
    captures: &Arc<Captures>,
    ledgers: &[Arc<Ledger>],
    command: &RunCommand,
) -> anyhow::Result<Option<Writing>> {
    let captures = captures.clone().begin(ledgers.to_vec());
    command.pcapng.as_deref().map(|path| Writing::start(&captures, path)).transpose()
}

impl Writing {
    fn start(captures: &Arc<Captures>, path: &Path) -> anyhow::Result<Self> {
        let mut capture = captures
            .view(Filter::everything(), None)
            .map_err(|error| anyhow::anyhow!("--pcapng: {error}\nhelp: {}", error.help()))?;
        let mut file = PacketFile::create(path, None).context("--pcapng")?;
        let finish = capture.finish();
        let write = move || {
            while let Some(piece) = capture.pieces().blocking_recv() {
                file.write(&piece).context("--pcapng")?;
            }
            Ok(file.told())
        };
        let thread = std::thread::Builder::new().name("packets".to_owned()).spawn(write)?;
        Ok(Self { finish, thread })
    }

    /// Writes the last packets; returns what the file has.
    async fn end(self) -> anyhow::Result<String> {
        self.finish.now();
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await?;
        joined.unwrap_or_else(|_| Err(anyhow::anyhow!("--pcapng: the thread that writes ended by a panic")))
    }
}

/// Ends the capture into a file, and says what the file has.
pub(super) async fn end(writing: Option<Writing>, is_quiet: bool) {
    let Some(writing) = writing else { return };
    match writing.end().await {
        Ok(_) if is_quiet => {}
        Ok(told) => notices::write(&format!("sidetrack: {told}\n")),
        Err(error) => notices::write(&format!("sidetrack: {error:#}\n")),
    }
}
