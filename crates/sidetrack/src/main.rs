//! The one binary: sub-commands only.

use clap::{Parser, Subcommand};
use sidetrack::app::{self, UpOptions};
use std::path::PathBuf;
use std::process::ExitCode;

/// Catches the TCP traffic of unmodified programs, decides by policy, carries it.
#[derive(Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Keeps the rights that the data path gives up; started by `up`, not by people
    #[command(hide = true)]
    Keeper,
    /// Runs a node: listeners and interceptors of a configuration file
    Up {
        /// The configuration file
        #[arg(short, long, default_value = "sidetrack.toml")]
        config: PathBuf,
    },
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("SIDETRACK_LOG"))
        .init();
    let result = match Cli::parse().command {
        Command::Keeper => app::keep().map(|()| ExitCode::SUCCESS),
        Command::Up { config } => app::up(&UpOptions { config }).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("sidetrack: {error:#}");
        ExitCode::FAILURE
    })
}
