//! Opens the memory of the wire: new, or that of a process that is gone.

use crate::config::{self, PinnedAt};
use sidetrack_sys::bpf::{Adopted, BpfError, Pins, WireMemory, WireOn, default_pins, remove_orphans};
use std::io;

/// The memory, and what is in it.
pub(super) struct Opened {
    pub memory: WireMemory,
    pub pins: Option<Pins>,
    /// The interfaces whose programs are there already.
    pub on: Vec<WireOn>,
    /// Flows that an earlier process has left.
    pub left: Vec<Adopted>,
}

impl Opened {
    /// Opens it as the configuration says. Without pins flows end with this process.
    pub(super) fn new(config: &config::Wire) -> Result<Self, BpfError> {
        let ends_with_us = |error: io::Error| {
            tracing::warn!("flows on the wire end with this process, also after a crash: {error}");
        };
        let pins = locked(&config.pins).unwrap_or_else(|error| {
            ends_with_us(error);
            None
        });
        if let Some(pins) = pins {
            if let Some((memory, on, left)) = earlier(&pins) {
                return Ok(Self { memory, pins: Some(pins), on, left });
            }
            let memory = WireMemory::new(config.flows_max)?;
            let pins = match pins.clear().and_then(|()| memory.pin(&pins)) {
                Ok(()) => Some(pins),
                Err(error) => {
                    ends_with_us(error);
                    None
                }
            };
            return Ok(Self { memory, pins, on: Vec::new(), left: Vec::new() });
        }
        let memory = WireMemory::new(config.flows_max)?;
        Ok(Self { memory, pins: None, on: Vec::new(), left: Vec::new() })
    }
}

/// The folder of this instance; none if it is not wanted.
fn locked(at: &PinnedAt) -> io::Result<Option<Pins>> {
    let folder = match at {
        PinnedAt::None => return Ok(None),
        PinnedAt::Default => default_pins()?,
        PinnedAt::Folder(folder) => folder.clone(),
    };
    let in_use = |error: io::Error| {
        let text = match error.kind() {
            io::ErrorKind::WouldBlock => {
                format!("another process has {}: name another folder in [wire] pins", folder.display())
            }
            _ => format!("{}: {error}", folder.display()),
        };
        io::Error::new(error.kind(), text)
    };
    let pins = Pins::open(&folder).map_err(in_use)?;
    if *at == PinnedAt::Default {
        remove_orphans();
    }
    Ok(Some(pins))
}

/// What an earlier process has left there, if flows are among it.
fn earlier(pins: &Pins) -> Option<(WireMemory, Vec<WireOn>, Vec<Adopted>)> {
    let folder = pins.folder().display();
    for format in pins.other_formats() {
        tracing::error!(
            "{folder} has flows in format {format}, which this program does not know: they end, and their hosts get a reset when they send"
        );
    }
    if !pins.is_used() {
        return None;
    }
    match WireMemory::adopt(pins) {
        Ok((_, _, left)) if left.is_empty() => None,
        Ok(earlier) => Some(earlier),
        Err(error) => {
            tracing::error!(%error, "cannot take over the flows in {folder}: they end, and their hosts get a reset when they send");
            None
        }
    }
}
