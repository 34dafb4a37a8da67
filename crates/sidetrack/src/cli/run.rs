//! `sidetrack run`.

use super::ca;
use crate::app::{self, RunCommand, TapCommand};
use crate::intercept::run::{Mode, RunOptions};
use clap::{Args, ValueEnum};
use sidetrack_core::carrier::Hop;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of the sub-command.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// A hop: socks5://host:port, socks6://…, http://…; several times: one behind the other
    #[arg(long, value_name = "HOP")]
    pub via: Vec<Hop>,
    /// A configuration whose rules decide (its listeners are not started)
    #[arg(short, long, value_name = "FILE", conflicts_with = "via")]
    pub config: Option<PathBuf>,
    /// How the command's connections are caught
    #[arg(long, value_enum, default_value_t)]
    pub mode: ModeArg,
    /// Appends a JSON line for each flow to this file
    #[arg(long, value_name = "FILE")]
    pub records: Option<PathBuf>,
    /// Opens the command's TLS connections, which trusts the authority of `sidetrack ca init` then, alone with its children
    #[arg(long)]
    pub tap: bool,
    /// The folder of that authority [default: that of `sidetrack ca init`, or `ca` of [tap] in the configuration]
    #[arg(long, value_name = "DIR", requires = "tap")]
    pub ca: Option<PathBuf>,
    /// Appends the secrets of opened connections to this file, for Wireshark and others
    #[arg(long, value_name = "FILE", requires = "tap")]
    pub keylog: Option<PathBuf>,
    /// Writes the command's requests into this file as an HTTP Archive, without content and with secrets masked
    #[arg(long, value_name = "FILE", requires = "tap")]
    pub har: Option<PathBuf>,
    /// Tells about every flow at the end, not only about those that failed
    #[arg(short, long)]
    pub verbose: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// How the command's connections are caught.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ModeArg {
    /// In a network namespace of its own: needs no rights, leaves nothing on the host
    #[default]
    Isolated,
    /// By control group in the host's network: needs root
    Cgroup,
}

/// How the command's TLS connections are opened, if they are.
fn tap(args: &RunArgs) -> anyhow::Result<Option<TapCommand>> {
    if !args.tap {
        return Ok(None);
    }
    // A configuration says where its authority is.
    let ca = match (&args.ca, &args.config) {
        (None, Some(_)) => None,
        (given, _) => Some(ca::folder(given.as_deref())?),
    };
    Ok(Some(TapCommand { ca, keylog: args.keylog.clone(), har: args.har.clone() }))
}

/// Runs the sub-command; exits with the command's code.
///
/// # Errors
/// What could not be set up.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let mode = match args.mode {
        ModeArg::Isolated => Mode::Isolated,
        ModeArg::Cgroup => Mode::Cgroup,
    };
    let command = RunCommand {
        options: RunOptions { mode, ..RunOptions::new(args.command.clone()) },
        via: args.via.clone(),
        config: args.config.clone(),
        records: args.records.clone(),
        tap: tap(args)?,
        verbose: args.verbose,
    };
    app::run(command).map(ExitCode::from)
}
