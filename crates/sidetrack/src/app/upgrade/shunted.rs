//! The shunt in a hand-over. Its process stays, with its entries; both processes of the node have a connection to it, and one at a
//! time asks it. Numbers of its flows move with it.

use super::channel::{Came, Channel};
use super::heritage::Go;
use super::old::Ours;
use super::parts::{ShuntPart, ShuntedPart};
use crate::app::shunt::ShuntFlows;
use crate::config::Config;
use crate::shunt::{PROTOCOL, Shunter};
use anyhow::{Context, ensure};
use sidetrack_core::upgrade::Kind;
use std::os::fd::{AsFd, OwnedFd};

/// Rows of one part.
const ROWS: usize = 10_000;

/// Sends the connection to the process of the shunt.
pub(super) fn offer(shunt: &ShuntFlows, to: &mut Channel) -> anyhow::Result<()> {
    let copies = shunt.copies().context("the connection to the shunt")?;
    let (name, text) = shunt.started_with();
    let part = ShuntPart { protocol: PROTOCOL, name: name.to_owned(), text: text.to_owned() };
    to.send(Kind::Shunt, &part, &copies.each_ref().map(AsFd::as_fd))
}

/// The connection to the process of the shunt as it came.
pub(super) fn came(came: Came) -> anyhow::Result<(ShuntPart, [OwnedFd; 2])> {
    let part = came.body()?;
    let fds = <[OwnedFd; 2]>::try_from(came.fds).ok();
    Ok((part, fds.context("the connection to the shunt is missing")?))
}

impl ShuntPart {
    /// Fails if a process with this configuration cannot go on with the shunt.
    pub(super) fn check(&self, config: &Config) -> anyhow::Result<()> {
        ensure!(
            self.protocol == PROTOCOL,
            "the shunt's process speaks version {} of its requests and this program version {PROTOCOL}: restart instead of an \
             upgrade",
            self.protocol
        );
        // What this program makes of the file that it was started with.
        let before = Config::from_text(&self.name, &self.text).ok().and_then(|config| config.shunt);
        ensure!(
            before == config.shunt,
            "[shunt] has changed, which takes a restart instead of an upgrade (flows go on, on the slow path meanwhile)"
        );
        Ok(())
    }

    /// Goes on with the shunt.
    pub(super) fn taken(self, fds: [OwnedFd; 2]) -> (Shunter, [String; 2]) {
        (Shunter::taken(fds), [self.name, self.text])
    }
}

impl Ours {
    /// Sends the numbers of the shunt's flows. They stay here as well, until it is certain who goes on.
    pub(super) fn send_shunted(&self, to: &mut Channel) -> anyhow::Result<()> {
        let rows = self.shunt.as_ref().map(|shunt| shunt.numbers()).unwrap_or_default();
        for rows in rows.chunks(ROWS) {
            to.send_optional(Kind::Shunted, &ShuntedPart { rows: rows.to_vec() }, &[])?;
        }
        Ok(())
    }
}

impl Go {
    /// Asks the shunt from now on, instead of the process before this one.
    pub(in super::super) fn ask_shunt(&self, shunt: Option<&ShuntFlows>) {
        let Some(shunt) = shunt else { return };
        take_shunted(Some(shunt), &self.shunted);
        shunt.resume();
    }
}

/// Keeps the numbers that another process has given to flows of the shunt.
pub(super) fn take_shunted(shunt: Option<&ShuntFlows>, came: &[Came]) {
    let Some(shunt) = shunt else { return };
    let parts = came.iter().filter_map(|came| came.body::<ShuntedPart>().ok());
    shunt.keep_numbers(parts.flat_map(|part| part.rows));
}
