//! `sidetrack reload`: loads the configuration of a running node, or tries another one that must be confirmed.

use super::prepared::{Prepared, read};
use crate::admin::{Client, ConfigStatus, ConfirmedConfig, TriedConfig, default_socket};
use anyhow::Context;
use clap::Args;
use hyper::Method;
use sidetrack_sys::scm;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Loads the configuration of a running node again, or tries another one
///
/// With --confirm the node takes the configuration FILE, and takes it back unless you confirm it within the time: a mistake
/// that cuts your own connection ends by itself. Its own configuration file changes only when you confirm.
#[derive(Clone, Debug, Args)]
pub struct ReloadArgs {
    /// The configuration to try
    #[arg(value_name = "FILE", requires = "confirm", conflicts_with = "confirmed")]
    file: Option<PathBuf>,
    /// Take FILE back unless it is confirmed within this time: by Enter here, or by `sidetrack reload --confirmed`
    #[arg(long, value_name = "TIME", value_parser = super::upgrade::time, requires = "file", conflicts_with = "confirmed")]
    confirm: Option<Duration>,
    /// Confirm the configuration that is tried, and write it into the configuration file
    #[arg(long)]
    confirmed: bool,
    /// The admin socket of the running sidetrack
    #[arg(long, value_name = "PATH")]
    admin: Option<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// The node cannot be reached, or rejects the configuration, with the reason.
pub fn run(args: &ReloadArgs) -> anyhow::Result<ExitCode> {
    let client = Client::new(args.admin.clone().unwrap_or_else(default_socket));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut out = io::stdout();
    if args.confirmed {
        writeln!(out, "{}", runtime.block_on(confirm(&client))?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some((file, within)) = args.file.as_ref().zip(args.confirm) else {
        let status: ConfigStatus = runtime.block_on(client.ask(Method::POST, "/v1/reload", &[]))?;
        writeln!(out, "configuration {} is in force", status.generation)?;
        status.waiting_for_restart.iter().try_for_each(|line| writeln!(out, "needs a restart: {line}"))?;
        return Ok(ExitCode::SUCCESS);
    };
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let confirm_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
    let body = serde_json::to_vec(&TriedConfig { text, confirm_ms })?;
    let tried = runtime.block_on(client.send::<ConfigStatus>(Method::POST, "/v1/reload", &[], body))?;
    writeln!(out, "configuration {} is in force for {} s", tried.generation, within.as_secs_f64())?;
    out.flush()?;
    let is_terminal = io::stdin().is_terminal();
    let how = if is_terminal { "press Enter, or run" } else { "run" };
    eprintln!("to confirm, {how} `sidetrack reload --confirmed`");
    if !is_terminal {
        return Ok(ExitCode::SUCCESS);
    }
    if is_entered(within)? {
        writeln!(out, "{}", runtime.block_on(confirm(&client))?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let now: ConfigStatus = runtime.block_on(client.ask(Method::GET, "/v1/config", &[]))?;
    anyhow::ensure!(
        now.generation == tried.generation && now.unconfirmed_ms.is_none(),
        "not confirmed: the configuration before it is in force again"
    );
    writeln!(out, "it was confirmed from elsewhere")?;
    Ok(ExitCode::SUCCESS)
}

/// Waits for Enter at this terminal.
fn is_entered(within: Duration) -> io::Result<bool> {
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if scm::wait(io::stdin(), Some(left))? {
            return Ok(io::stdin().read_line(&mut String::new())? > 0);
        }
        if left.is_zero() {
            return Ok(false);
        }
    }
}

/// Confirms what is tried, and writes it into the configuration file.
async fn confirm(client: &Client) -> anyhow::Result<String> {
    let ConfirmedConfig { path, text } = client.ask(Method::POST, "/v1/reload/confirm", &[]).await?;
    let Some((path, text)) = path.zip(text) else {
        return Ok("the configuration is confirmed".to_owned());
    };
    let written = read(&path).and_then(|before| Prepared::of_checked(&path, before, &text)?.commit());
    written.with_context(|| {
        format!(
            "the configuration is confirmed and in force, but not in {}: write it there yourself",
            path.display()
        )
    })?;
    Ok(format!("the configuration is confirmed, and {} has it", path.display()))
}
