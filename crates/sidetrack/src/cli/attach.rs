//! `sidetrack attach`: catches the connections of programs that run already.

use super::run::jail::JailArgs;
use super::run::{self, DnsArg, ModeArg, RunArgs, SharedArgs};
use crate::app;
use crate::intercept::run::{Attach, AttachTo, plan_attach};
use clap::Args;
use sidetrack_sys::exec::Ended;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Catches new connections and datagrams of a process, a container, a unit or a network, from now until Ctrl-C, SIGTERM,
/// --for, or its end. Needs root. Nothing is left.
#[derive(Args, Clone, Debug)]
pub struct AttachArgs {
    /// A process id; [podman:|docker:]NAME or id of a container; [unit:]NAME of a unit of systemd; cgroup:PATH
    #[arg(value_name = "PID|NAME", required_unless_present = "netns", conflicts_with = "netns")]
    pub subject: Option<String>,
    /// All programs of this network namespace: a name of `ip netns`, or a path such as /proc/PID/ns/net
    #[arg(long, value_name = "PATH")]
    pub netns: Option<PathBuf>,
    /// Says what would be done and how it is undone, and does nothing
    #[arg(long)]
    pub plan: bool,
    /// Detaches after this time: 30s, 10m, 2h
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    pub ends_after: Option<Duration>,
    /// Attaches also to a process that has started this one, such as your shell or ssh login
    #[arg(long)]
    pub force: bool,
    /// How connections are carried, and what is written about them
    #[command(flatten)]
    pub shared: SharedArgs,
    /// Who answers questions about names, as for `run`; keep: the servers that are asked, so that names are not seen
    #[arg(long, value_enum)]
    pub dns: Option<AttachDns>,
    /// Cannot be: a process that runs has its trust store already
    #[arg(long, hide = true)]
    pub tap: bool,
    /// What may be reached
    #[command(flatten)]
    pub jail: JailArgs,
}

/// Who answers questions about names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AttachDns {
    /// Names travel to the proxy
    Name,
    /// This host's resolver
    Resolve,
    /// The servers that are asked
    Keep,
}

/// Why a time cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}': write a number and s, m or h, such as 30s, 10m or 2h")]
struct TimeError(String);

fn time(text: &str) -> Result<Duration, TimeError> {
    let wrong = || TimeError(text.to_owned());
    let digits = text.trim_end_matches(['s', 'm', 'h']);
    let unit_s = match &text[digits.len()..] {
        "s" | "" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(unit_s).filter(|time| *time > 0).map(Duration::from_secs).ok_or_else(wrong)
}

/// Runs the subcommand; returns 0 after it has detached, or [`run::OWN_FAILURE`] if something failed.
///
/// # Errors
/// None: failures are printed.
pub fn run(args: &AttachArgs) -> anyhow::Result<ExitCode> {
    Ok(run::finish(started(args)))
}

fn started(args: &AttachArgs) -> anyhow::Result<Ended> {
    anyhow::ensure!(
        !args.tap,
        "--tap is not for a process that runs: it has read its trust store already. Start it by `sidetrack run --tap`"
    );
    anyhow::ensure!(
        args.jail.unix.is_none(),
        "--unix is not for a process that runs: only `run` can limit unix sockets"
    );
    anyhow::ensure!(
        !args.jail.nested,
        "--nested is not for a process that runs: it is not confined by a filter"
    );
    let mut command = run::prepared(&as_of_run(args), None)?;
    let attach = Attach {
        subject: subject(args)?,
        ends_after: args.ends_after,
        keeps_dns: args.dns == Some(AttachDns::Keep),
        force: args.force,
    };
    if args.plan {
        // A closed reader is not a failure.
        let _ = io::stdout().write_all(plan_attach(&attach)?.as_bytes());
        return Ok(Ended::Exit(0));
    }
    command.options.attach = Some(attach);
    app::run(command)
}

fn subject(args: &AttachArgs) -> anyhow::Result<AttachTo> {
    let pid = |text: &str| text.parse().map_err(|_| anyhow::anyhow!("'{text}' is not a process id"));
    match (&args.netns, args.subject.as_deref()) {
        (Some(path), _) => Ok(AttachTo::Network(path.clone())),
        (None, Some(text)) => match text.strip_prefix("pid:") {
            Some(text) => Ok(AttachTo::Process(pid(text)?)),
            None if text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(AttachTo::Process(pid(text)?)),
            None => Ok(AttachTo::Name(text.to_owned())),
        },
        (None, None) => anyhow::bail!("write what to attach to: PID, NAME or --netns PATH"),
    }
}

/// The same as arguments of `run`, without a command.
fn as_of_run(args: &AttachArgs) -> RunArgs {
    RunArgs {
        shared: args.shared.clone(),
        dns: args.dns.and_then(|dns| match dns {
            AttachDns::Name => Some(DnsArg::Name),
            AttachDns::Resolve => Some(DnsArg::Resolve),
            AttachDns::Keep => None,
        }),
        mode: ModeArg::Isolated,
        netns: None,
        tap: false,
        ca: None,
        keylog: None,
        har: None,
        har_bodies: None,
        pcapng: None,
        trust: Vec::new(),
        secret: Vec::new(),
        publish: Vec::new(),
        top: false,
        jail: args.jail.clone(),
        command: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        for (text, seconds) in [("30", 30), ("30s", 30), ("10m", 600), ("2h", 7200)] {
            assert_eq!(time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "s", "0s", "1d", "10ms", "-1s", "1.5m", "99999999999999999999h"] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
