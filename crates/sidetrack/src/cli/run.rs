//! `sidetrack run`.

use crate::app::{self, RunCommand};
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
        verbose: args.verbose,
    };
    app::run(command).map(ExitCode::from)
}
