//! Flows on the wire in a hand-over: descriptors of their memory. Packets are passed on meanwhile; no flow waits.

use super::channel::{Came, Channel};
use super::old::Ours;
use super::parts::{StayPart, WireOnPart, WirePart};
use crate::worker::{Given, LetGo, Wires};
use anyhow::{Context, ensure};
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::bpf::WireMemory;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// How long flows may take that are on their way to the wire.
const JOINED_WITHIN: Duration = Duration::from_secs(1);

/// Descriptors of the maps.
const MAPS: usize = 3;

/// Offers the memory of the wire. This process goes on with it.
pub(super) fn offer(wires: &Wires, to: &mut Channel) -> anyhow::Result<()> {
    let Given { pins, maps, on } = wires.given().context("the memory of flows on the wire")?;
    let (folder, pins_lock) = pins.unzip();
    let part = WirePart { format: WireMemory::FORMAT, pins: folder };
    let fds: Vec<_> = maps.iter().chain(&pins_lock).map(AsFd::as_fd).collect();
    to.send(Kind::Wire, &part, &fds)?;
    on.iter().try_for_each(|(index, links)| {
        let fds = links.each_ref().map(AsFd::as_fd);
        to.send(Kind::WireOn, &WireOnPart { index: *index }, &fds)
    })
}

/// Reads the memory of another process.
pub(super) fn memory(came: Came) -> anyhow::Result<Given> {
    let WirePart { format, pins } = came.body()?;
    ensure!(
        format == WireMemory::FORMAT,
        "the flows on the wire have format {format}, and this program has format {}: restart instead of an upgrade",
        WireMemory::FORMAT
    );
    let mut fds = came.fds;
    ensure!(fds.len() >= MAPS, "the maps of the wire are missing");
    let pins_lock = fds.split_off(MAPS).pop();
    let maps = <[OwnedFd; MAPS]>::try_from(fds).ok().context("the maps of the wire are missing")?;
    Ok(Given { pins: pins.zip(pins_lock), maps, on: Vec::new() })
}

/// Reads the programs of another process on an interface: its index, and the attachments.
pub(super) fn on(came: Came) -> anyhow::Result<(u32, [OwnedFd; 2])> {
    let WireOnPart { index } = came.body()?;
    let links = <[OwnedFd; 2]>::try_from(came.fds).ok();
    Ok((index, links.context("the programs of an interface are missing")?))
}

impl Ours {
    /// Leaves the flows on the wire to the new process. Returns how many, and what the new process is told.
    pub(super) fn let_go_of_wires(&self) -> (usize, StayPart) {
        let wires = self.node.shared.wires();
        let LetGo { flows, kept } = wires.map(|wires| wires.let_go(JOINED_WITHIN)).unwrap_or_default();
        (flows, StayPart { kept })
    }
}
