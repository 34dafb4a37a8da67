//! The arguments that `run` and `attach` have in common: by what rules connections are carried, and what is written about them.

use super::hop;
use clap::Args;
use sidetrack_core::carrier::Hop;
use sidetrack_core::policy::Connect;
use std::path::PathBuf;

/// How connections are carried, and what is written about them.
#[derive(Args, Clone, Debug)]
pub struct SharedArgs {
    /// A hop: socks5://host:port, socks6://…, http://…; several times: one behind the other [env: SIDETRACK_VIA, hops
    /// with spaces between]
    #[arg(long, value_name = "HOP", value_parser = hop)]
    pub via: Vec<Hop>,
    /// A file with one hop a line, which other users cannot read with `ps`
    #[arg(long, value_name = "FILE", conflicts_with = "via")]
    pub via_file: Option<PathBuf>,
    /// A configuration whose rules decide (its listeners are not started)
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["via", "via_file"])]
    pub config: Option<PathBuf>,
    /// Accepts a connection only when the far side has: what is refused or unreachable there is so for the program. This is the
    /// default where it is possible; with this option it is said if this kernel cannot do it
    #[arg(long, conflicts_with_all = ["config", "tap", "early"])]
    pub faithful: bool,
    /// Accepts each connection at once, before the far side has
    #[arg(long)]
    pub early: bool,
    /// Appends a JSON line for each flow to this file
    #[arg(long, value_name = "FILE")]
    pub records: Option<PathBuf>,
    /// Appends the lines of sidetrack itself (refusals, failures) to this file instead of printing them
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Tells about every flow at the end
    #[arg(short, long)]
    pub verbose: bool,
    /// Prints neither failures of connections, which are printed as they happen otherwise, nor what is caught
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
}

impl SharedArgs {
    /// When connections are accepted.
    pub(super) const fn connect(&self) -> Connect {
        match (self.faithful, self.early) {
            (true, _) => Connect::Faithful,
            (_, true) => Connect::Early,
            _ => Connect::Auto,
        }
    }
}
