//! The arguments of `run` that limit what the command may reach.

use crate::intercept::run::Mode;
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
    #[arg(long, value_name = "LIST", conflicts_with = "config")]
    pub allow: Vec<String>,
    /// Refuses these, even if they are allowed
    #[arg(long, value_name = "LIST", conflicts_with = "config")]
    pub deny: Vec<String>,
    /// Reads the list from a file: one entry a line, `deny` before what is refused, `#` before a comment
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub profile: Vec<PathBuf>,
    /// Refuses all that is not allowed, also without a list
    #[arg(long, conflicts_with = "config")]
    pub jail: bool,
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
        let closed = self.jail || !self.allow.is_empty() || !self.profile.is_empty();
        if !closed && lists.is_empty() {
            return Ok(None);
        }
        anyhow::ensure!(
            !closed || mode == Mode::Isolated,
            "--mode cgroup cannot hold a command that must not get out: leave --mode out"
        );
        Ok(Some(Jail { lists, closed, ..Jail::default() }))
    }
}
