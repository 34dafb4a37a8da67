//! `sidetrack run`: runs one command and intercepts its connections.

pub(super) mod jail;
mod publish;
mod secret;
mod shared;

use super::ca;
use super::login::Login;
use crate::app::{self, Publish, RunCommand, TapCommand};
use crate::config::Tap;
use crate::config::tap::exact_host;
use crate::config::{RunDns, numbered};
use crate::intercept::run::{Mode, RunOptions};
use crate::tls::{Roots, certificates_in};
use anyhow::Context;
use clap::{ArgGroup, Args, ValueEnum};
use jail::JailArgs;
pub use shared::SharedArgs;
use sidetrack_core::carrier::{Carrier, Hop};
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::placeholder::Secrets;
use sidetrack_sys::exec::Ended;
use sidetrack_sys::process::end_by;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// The exit code if `run` itself fails and not the command, as in env(1) and timeout(1).
pub const OWN_FAILURE: u8 = 125;

/// Arguments of the sub-command.
#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("opens").args(["tap", "secret"]).multiple(true))]
pub struct RunArgs {
    /// How connections are carried, and what is written about them
    #[command(flatten)]
    pub shared: SharedArgs,
    /// Who answers the command's questions about names [default: that of [run] in the configuration, or name]
    #[arg(long, value_enum)]
    pub dns: Option<DnsArg>,
    /// How the command's connections are caught
    #[arg(long, value_enum, default_value_t)]
    pub mode: ModeArg,
    /// Runs the command in this network namespace, of which all programs are caught then: a name of `ip netns`, or a path
    #[arg(long, value_name = "PATH", conflicts_with_all = ["mode", "publish"])]
    pub netns: Option<PathBuf>,
    /// Opens the command's TLS connections, which trusts the authority of `sidetrack ca init` then, alone with its children
    #[arg(long)]
    pub tap: bool,
    /// The folder of that authority [default: that of `sidetrack ca init`, or `ca` of [tap] in the configuration]
    #[arg(long, value_name = "DIR", requires = "opens")]
    pub ca: Option<PathBuf>,
    /// Appends the secrets of opened connections to this file, for Wireshark and others
    #[arg(long, value_name = "FILE", requires = "tap")]
    pub keylog: Option<PathBuf>,
    /// Writes the command's requests into this file as an HTTP Archive, with secrets in their heads masked
    #[arg(long, value_name = "FILE", requires = "tap")]
    pub har: Option<PathBuf>,
    /// Has the content of each request and response in it, up to this size, such as 1MiB; at most 64MiB
    #[arg(long, value_name = "SIZE", requires = "har", value_parser = har_bodies)]
    pub har_bodies: Option<usize>,
    /// Writes the command's packets into this file (pcapng), with comments, and with the secrets of opened connections: Wireshark
    /// shows it decrypted
    #[arg(long, value_name = "FILE")]
    pub pcapng: Option<PathBuf>,
    /// A file with certificates in PEM that the command trusts, such as that of a development server; or a host whose
    /// certificates are not verified, HOST or HOST:PORT (port 443 is intercepted, and the ports written here)
    #[arg(long, value_name = "FILE|HOST", requires = "opens")]
    pub trust: Vec<String>,
    /// Gives the command a placeholder in the variable NAME. Requests by https to HOST, and only those, get the secret instead:
    /// NAME=file:PATH@HOST or NAME=env:VARIABLE@HOST; several hosts with commas, a port behind a colon
    #[arg(long, value_name = "NAME=SOURCE@HOST", conflicts_with = "faithful")]
    pub secret: Vec<String>,
    /// A port of this host that leads to a server of the command: [ADDRESS:]PORT[:PORT], such as 8080:80. Without an address,
    /// programs of this host reach it
    #[arg(long, value_name = "PORT[:PORT]", value_parser = publish::read)]
    pub publish: Vec<Publish>,
    /// Shows the command's connections on a screen while it runs (docs/top.md). Its input is empty. Its output is shown when it has
    /// ended or the screen was left with `q`. The exit code is the command's
    #[arg(long)]
    pub top: bool,
    /// What the command may reach
    #[command(flatten)]
    pub jail: JailArgs,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
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

/// Who answers the command's questions about names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DnsArg {
    /// Names travel to the proxy; this host's resolver is asked only about names that this host resolves anyway
    Name,
    /// This host's resolver, for every name
    Resolve,
}

/// Reads `--har-bodies`.
fn har_bodies(text: &str) -> Result<usize, String> {
    let bytes = super::tap::bytes(text)?;
    let fits = usize::try_from(bytes).ok().filter(|_| bytes <= Tap::HAR_BODIES_MAX);
    fits.ok_or_else(|| "at most 64MiB".to_owned())
}

/// How the command's TLS connections are intercepted, if they are.
fn tap(args: &RunArgs, secrets: Option<Arc<Secrets>>) -> anyhow::Result<Option<TapCommand>> {
    if !args.tap && secrets.is_none() {
        return Ok(None);
    }
    // With a configuration, the authority's folder is named there.
    let ca = match (&args.ca, &args.shared.config) {
        (None, Some(_)) => None,
        // For secrets alone, an authority is made that ends with the command.
        (None, None) if !args.tap => None,
        (given, _) => Some(ca::folder(given.as_deref())?),
    };
    let mut command = TapCommand {
        ca,
        keylog: args.keylog.clone(),
        har: args.har.clone(),
        har_bodies_max: args.har_bodies,
        trust_pem: String::new(),
        unverified_hosts: Vec::new(),
        ports: Vec::new(),
        secrets,
        opens_all: args.tap,
    };
    args.trust.iter().try_for_each(|text| trust(text, &mut command))?;
    if !command.unverified_hosts.is_empty() {
        let hosts: Vec<_> = command.unverified_hosts.iter().map(Host::to_string).collect();
        let _ = writeln!(
            io::stderr(),
            "sidetrack: warning: certificates of {} are not verified (--trust): anyone on the path can pose as that server; \
             --trust with the file of its certificate is safe",
            hosts.join(", ")
        );
    }
    Ok(Some(command))
}

/// Adds the value of one `--trust`: a file if one of that name exists, otherwise a host.
fn trust(text: &str, command: &mut TapCommand) -> anyhow::Result<()> {
    let path = Path::new(text);
    if path.exists() || text.contains('/') {
        let pem = std::fs::read_to_string(path).with_context(|| format!("cannot read --trust {text}"))?;
        let found = certificates_in(&pem);
        anyhow::ensure!(!found.is_empty(), "--trust {text}: there is no CERTIFICATE in PEM in this file");
        command.trust_pem.push_str(&format!("{pem}\n"));
        return Ok(());
    }
    let (host, port) = match (exact_host(text), text.parse::<Destination>()) {
        (Ok(host), _) => (host, None),
        (Err(_), Ok(to)) if !text.contains('*') => (to.host, Some(to.port)),
        (Err(error), _) => anyhow::bail!(
            "--trust: there is no file of this name, and it is no host ({error}): write FILE, HOST or HOST:PORT"
        ),
    };
    command.unverified_hosts.push(host);
    command.ports.extend(port);
    Ok(())
}

/// Runs the subcommand; returns the command's exit code, or [`OWN_FAILURE`] if something else failed. If a signal ended the command,
/// the same signal ends this process.
///
/// # Errors
/// None: failures are printed.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    Ok(finish(started(args, None)))
}

/// Runs the user's real shell as a login shell.
pub(super) fn run_as_login(args: &RunArgs, login: Login) -> ExitCode {
    finish(started(args, Some(login)))
}

/// Ends as the command has ended.
pub(in crate::cli) fn finish(ended: anyhow::Result<Ended>) -> ExitCode {
    let ended = ended.unwrap_or_else(|error| {
        // Standard error may be closed, which must not cause a panic.
        let _ = writeln!(io::stderr(), "sidetrack: {error:#}");
        Ended::Exit(OWN_FAILURE)
    });
    if let Ended::Signal(signal) = ended {
        // A shell that runs us in a loop ends with Ctrl-C only if we end by the signal, too.
        end_by(signal);
    }
    ExitCode::from(ended.code())
}

/// The environment variable with the hops in their order, separated by white space.
const VIA: &str = "SIDETRACK_VIA";

/// The hops with the authorities that they name.
fn hops(args: &SharedArgs, has_environment: bool) -> anyhow::Result<Vec<Hop>> {
    let mut hops = named(args, has_environment)?;
    if let Some((index, why)) = Carrier::Hops(hops.clone()).http3_obstacle() {
        let hop = &hops[index];
        anyhow::bail!("the hops before {hop} cannot carry its datagrams: {why}");
    }
    for hop in &mut hops {
        let Some(file) = &hop.ca_file else { continue };
        let read = std::fs::read_to_string(&**file)
            .with_context(|| format!("cannot read the authorities of hop {hop}: {file}"))?;
        Roots::of(&read).map_err(|error| anyhow::anyhow!("the authorities of hop {hop}, {file}: {error}"))?;
        hop.ca_pem = Some(read.into());
    }
    Ok(hops)
}

/// The hops, from the arguments, otherwise from the file, otherwise from the environment, if that counts.
fn named(args: &SharedArgs, has_environment: bool) -> anyhow::Result<Vec<Hop>> {
    if args.via.iter().any(|hop| hop.credentials.is_some()) {
        let _ = writeln!(
            io::stderr(),
            "sidetrack: warning: until it was overwritten, every user could see the password in --via, and your shell \
             may keep it in its history: use --via-file or {VIA} instead"
        );
    }
    if let Some(path) = &args.via_file {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the hops of --via-file {}", path.display()))?;
        return hops_of_file(&text).with_context(|| format!("--via-file {}", path.display()));
    }
    if !args.via.is_empty() || args.config.is_some() || !has_environment {
        return Ok(args.via.clone());
    }
    match sidetrack_sys::process::environment(VIA).map(OsString::into_string).transpose() {
        Ok(Some(text)) => hops_of_words(text.split_whitespace()).context(VIA),
        Ok(None) => Ok(Vec::new()),
        Err(_) => anyhow::bail!("{VIA} is not valid UTF-8"),
    }
}

/// Parses one hop per line; skips empty lines and lines that begin with `#`.
fn hops_of_file(text: &str) -> anyhow::Result<Vec<Hop>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let hops = hops_of_words(lines)?;
    anyhow::ensure!(!hops.is_empty(), "no hop in it: write one a line, such as socks5://host:1080");
    Ok(hops)
}

/// Parses hops. Errors give the number of a hop, not its text, which may contain a password.
fn hops_of_words<'a>(words: impl Iterator<Item = &'a str>) -> anyhow::Result<Vec<Hop>> {
    let numbered = |(index, word): (usize, &str)| {
        hop(word).map_err(|_| {
            anyhow::anyhow!(
                "hop {} is not valid: write socks5://user:password@host:port, or socks6:// or http://",
                index + 1
            )
        })
    };
    words.enumerate().map(numbered).collect()
}

/// Parses a hop. The zone of its address may be the name of an interface.
pub(super) fn hop(text: &str) -> anyhow::Result<Hop> {
    Ok(numbered(text)?.parse()?)
}

fn started(args: &RunArgs, login: Option<Login>) -> anyhow::Result<Ended> {
    app::run(prepared(args, login)?)
}

/// Returns what `run` does with these arguments.
///
/// # Errors
/// An argument is wrong, or a file that it names.
pub(super) fn prepared(args: &RunArgs, login: Option<Login>) -> anyhow::Result<RunCommand> {
    let mode = match args.mode {
        ModeArg::Isolated => Mode::Isolated,
        ModeArg::Cgroup => Mode::Cgroup,
    };
    let jail = args.jail.jail(mode)?;
    let secrets = secret::read(&args.secret, mode)?;
    anyhow::ensure!(
        args.publish.is_empty() || mode == Mode::Isolated,
        "--publish is not needed with --mode cgroup: servers of the command listen in the network of this host"
    );
    // The variable of hops may contain passwords, which the command does not need.
    let mut env = vec![(VIA.into(), None)];
    // Programs that start the user's shell, such as editors, are inside already.
    env.extend(login.iter().map(|login| ("SHELL".into(), Some(login.shell.clone().into_os_string()))));
    let (mut covered_files, mut held) = (Vec::new(), None);
    if let Some(read) = secrets {
        env.extend(read.env);
        covered_files = read.covered_files;
        held = Some(read.secrets);
    }
    Ok(RunCommand {
        options: RunOptions {
            mode,
            jail: jail.as_ref().and_then(|jail| args.jail.unix_sockets(jail)),
            nested: args.jail.nested,
            env,
            covered_files,
            publishes: !args.publish.is_empty(),
            captures: args.pcapng.is_some(),
            name: login.as_ref().map(|login| login.name.clone()),
            netns: args.netns.clone(),
            ..RunOptions::new(args.command.clone())
        },
        // The user may choose the environment of a login shell.
        via: hops(&args.shared, login.is_none())?,
        config: args.shared.config.clone(),
        connect: args.shared.connect(),
        jail,
        fail_on_deny: args.jail.fail_on_deny,
        report: args.jail.report(),
        learn: args.jail.learn.clone(),
        dns: args.dns.map(|dns| match dns {
            DnsArg::Name => RunDns::Name,
            DnsArg::Resolve => RunDns::Resolve,
        }),
        publish: args.publish.clone(),
        pcapng: args.pcapng.clone(),
        records: args.shared.records.clone(),
        log: args.shared.log.clone(),
        tap: tap(args, held)?,
        verbose: args.shared.verbose,
        quiet: args.shared.quiet,
    })
}
