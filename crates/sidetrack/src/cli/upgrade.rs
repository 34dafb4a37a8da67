//! `sidetrack upgrade`: another version of the program goes on with a running node.

use crate::admin::default_socket;
use crate::app::{DRAINS, Said, Wish, upgrade_socket};
use anyhow::{Context, bail};
use clap::Args;
use sidetrack_common::wire;
use sidetrack_sys::scm;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// The longest time to wait for a confirmation, seconds: a day.
const CONFIRM_MAX_S: u64 = 24 * 3600;

/// Lets another version of the program go on with a running node, without a refused connection
///
/// The new program reads the configuration file that the node was started with, checks it, and takes over the listeners, the
/// kernel's rules and the counters. Flows of the old process go on there for up to `limits.drain_ms`. If anything fails, the old
/// process goes on as before.
#[derive(Clone, Debug, Args)]
pub struct UpgradeArgs {
    /// The program [default: this one]
    #[arg(value_name = "BINARY", conflicts_with = "confirmed")]
    binary: Option<PathBuf>,
    /// Take everything back unless it is confirmed within this time: by Enter here, or by `sidetrack upgrade --confirmed`
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "confirmed")]
    confirm: Option<Duration>,
    /// End as soon as the new program goes on, while flows drain in the old process
    #[arg(long, conflicts_with = "confirmed")]
    no_wait: bool,
    /// Confirm the upgrade that waits for it
    #[arg(long)]
    confirmed: bool,
    /// The admin socket of the running sidetrack
    #[arg(long, value_name = "PATH")]
    admin: Option<PathBuf>,
}

/// Reads `60s`, `500ms` or `2m`.
///
/// # Errors
/// What the text must look like, or that it is out of range.
pub fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is not a time: write 60s, 500ms or 2m");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let time = match &text[digits..] {
        "ms" => Duration::from_millis(number),
        "s" => Duration::from_secs(number),
        "m" => Duration::from_secs(number.saturating_mul(60)),
        _ => return Err(wrong()),
    };
    if time.is_zero() || time > Duration::from_secs(CONFIRM_MAX_S) {
        return Err(format!("'{text}' is out of range: from 1ms to 1440m"));
    }
    Ok(time)
}

/// Runs the subcommand.
///
/// # Errors
/// The node cannot be reached, or goes on as before, with the reason.
pub fn run(args: &UpgradeArgs) -> anyhow::Result<ExitCode> {
    let socket = upgrade_socket(&args.admin.clone().unwrap_or_else(default_socket));
    let node = Arc::new(connect(&socket)?);
    if args.confirmed {
        wire::send(&*node, &Wish::Confirm, &[])?;
    } else {
        let path =
            args.binary.clone().map_or_else(std::env::current_exe, Ok).context("the path of this program")?;
        let program = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let confirm_ms = args.confirm.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        wire::send(&*node, &Wish::Upgrade { confirm_ms }, &[program.as_fd()])?;
    }
    follow(&node, args)
}

fn connect(socket: &Path) -> anyhow::Result<OwnedFd> {
    scm::connect(socket).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => anyhow::anyhow!(
            "no sidetrack waits for upgrades at {}: name its admin socket with --admin PATH",
            socket.display()
        ),
        io::ErrorKind::PermissionDenied => {
            anyhow::anyhow!("{}: only root and the user of the node may upgrade it", socket.display())
        }
        _ => anyhow::Error::from(error).context(socket.display().to_string()),
    })
}

/// Prints what the node says, until it has ended.
fn follow(node: &Arc<OwnedFd>, args: &UpgradeArgs) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout();
    loop {
        match wire::receive::<Said>(&**node) {
            // A closed reader does not end the upgrade.
            Ok(Some((Said::Line(text), _))) => {
                drop(writeln!(out, "{text}").and_then(|()| out.flush()));
                if args.no_wait && text.contains(DRAINS) {
                    return Ok(ExitCode::SUCCESS);
                }
            }
            Ok(Some((Said::Waiting, _))) => wait_for_enter(node, args.confirm),
            Ok(Some((Said::Done(text), _))) => {
                drop(writeln!(out, "{text}"));
                return Ok(ExitCode::SUCCESS);
            }
            Ok(Some((Said::Failed(why), _))) => bail!("not upgraded: {why}"),
            Ok(None) | Err(_) => {
                bail!(
                    "the node has not said how the upgrade has ended; its log and `sidetrack flows` show it"
                )
            }
        }
    }
}

/// Says that a confirmation is missing. At a terminal, Enter gives it.
fn wait_for_enter(node: &Arc<OwnedFd>, confirm: Option<Duration>) {
    let within = confirm.map(|time| format!(" within {} s", time.as_secs_f64())).unwrap_or_default();
    let is_terminal = io::stdin().is_terminal();
    let how = if is_terminal { "press Enter, or run" } else { "run" };
    let mut err = io::stderr();
    // Without standard error the command waits all the same.
    let _ = writeln!(err, "to confirm{within}, {how} `sidetrack upgrade --confirmed`");
    if is_terminal {
        let node = node.clone();
        std::thread::spawn(move || {
            if io::stdin().read_line(&mut String::new()).is_ok_and(|bytes| bytes > 0) {
                let _ = wire::send(&*node, &Wish::Confirm, &[]);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::time;
    use std::time::Duration;

    #[test]
    fn times_have_a_unit_and_a_bound() {
        assert_eq!(time("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["", "60", "s", "-1s", "1h", "0s", "1441m", "99999999999999999999s", "1 s"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }
}
