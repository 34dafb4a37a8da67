//! The arguments of `run` that limit what the command may reach.

use crate::app::Report;
use crate::intercept::run::{Mode, UnixSockets};
use anyhow::Context;
use clap::Args;
use sidetrack_core::jail::{Jail, Lists};
use std::path::PathBuf;

/// What the command may reach.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "What the command may reach")]
pub struct JailArgs {
    /// Reaches only these: HOST, *.HOST, ADDRESS or NETWORK, with :PORT or :PORT-PORT, and udp: before it for UDP.
    /// Several: with commas, or by several options
    #[arg(long, value_name = "LIST")]
    pub allow: Vec<String>,
    /// Refuses these, even if they are allowed
    #[arg(long, value_name = "LIST")]
    pub deny: Vec<String>,
    /// Reads the list from a file: one entry a line, `deny` before what is refused, `#` before a comment
    #[arg(long, value_name = "FILE")]
    pub profile: Vec<PathBuf>,
    /// Refuses all that is not allowed, also without a list
    #[arg(long)]
    pub jail: bool,
    /// Carries what would be refused, and says so
    #[arg(long)]
    pub audit: bool,
    /// Unix sockets that it may use: own (its own, the default in a jail), all (also those of this host), abstract (only its
    /// own without a path), deny (none), or own and these PATHs, with commas
    #[arg(long, value_name = "WHICH")]
    pub unix: Option<String>,
    /// Lets it use `sidetrack run` itself, whose limits then count beside these
    #[arg(long)]
    pub nested: bool,
    /// Writes a profile that allows what it has reached
    #[arg(long, value_name = "FILE")]
    pub learn: Option<PathBuf>,
    /// Summary at the end: hosts, bytes, programs; into FILE, or else printed
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub report: Option<PathBuf>,
    /// The summary as JSON
    #[arg(long, requires = "report")]
    pub json: bool,
    /// Exits with 120 if something was refused
    #[arg(long)]
    pub fail_on_deny: bool,
}

impl JailArgs {
    /// Returns the lists. `None`: nothing limits the command but its rules.
    ///
    /// # Errors
    /// A list or a profile is wrong; says where.
    pub fn jail(&self, mode: Mode) -> anyhow::Result<Option<Jail>> {
        let mut lists = Lists::default();
        for text in &self.allow {
            lists.allow(text).with_context(|| format!("--allow {text}"))?;
        }
        for text in &self.deny {
            lists.deny(text).with_context(|| format!("--deny {text}"))?;
        }
        for path in &self.profile {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read --profile {}", path.display()))?;
            lists.profile(&text).with_context(|| format!("--profile {}", path.display()))?;
        }
        let closed = self.jail
            || self.audit && self.deny.is_empty()
            || !self.allow.is_empty()
            || !self.profile.is_empty();
        if !closed && lists.is_empty() {
            anyhow::ensure!(self.unix.is_none(), "--unix is for a jail: add --jail, --allow or --profile");
            return Ok(None);
        }
        anyhow::ensure!(
            !closed || self.audit || mode == Mode::Isolated,
            "--mode cgroup cannot hold a command that must not get out, because it is root in the network of this host: leave --mode out"
        );
        anyhow::ensure!(
            !(self.nested && self.unix.as_deref() == Some("abstract")),
            "--unix abstract does not go with --nested: the kernel then lets no command mount, which an inner `run` must"
        );
        Ok(Some(Jail { lists, closed, audit: self.audit, ..Jail::default() }))
    }

    /// Returns where the summary goes.
    pub fn report(&self) -> Option<Report> {
        let to = self.report.as_ref()?;
        Some(Report { to: (to.as_os_str() != "-").then(|| to.clone()), json: self.json })
    }

    /// Returns which unix sockets the command may use. `None`: it is not confined but by its network.
    pub fn unix_sockets(&self, jail: &Jail) -> Option<UnixSockets> {
        (jail.closed && !jail.audit).then(|| match self.unix.as_deref() {
            None | Some("own") => UnixSockets::Own(Vec::new()),
            Some("all") => UnixSockets::All,
            Some("deny") => UnixSockets::None,
            Some("abstract") => UnixSockets::Abstract,
            Some(paths) => UnixSockets::Own(paths.split(',').map(PathBuf::from).collect()),
        })
    }
}
