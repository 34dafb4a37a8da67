//! `sidetrack explain`: says which rule decides about a flow and why, without traffic, and how the containers on its path are.

mod profile_line;

use super::Printed;
use crate::admin::{Functions, default_socket};
use crate::config::{AdminAt, Config, Listener, Question, Surroundings, System, numbered};
use crate::explain::{Answer, CapturedPackets, FunctionHealth, Health, Links, explain};
use crate::overlay::{ServiceView, Status, WayView};
use anyhow::{Context, bail};
use sidetrack_common::admin::ContainersHealth;
use sidetrack_core::flow::{Destination, HostName, Intercept, Process, Protocol};
use sidetrack_core::overlay::service::{LinkKind, Trust};
use sidetrack_sys::process::process_info;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Shows which rule decides about a flow, why, and what happens to the flow. It sends no packet; it asks a running
/// sidetrack about the health of the containers on the path.
#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// A profile of `run --profile`: says whether it allows HOST[:PORT], and by which line. Exit code 1: it does not.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "host", "listener", "intercept", "process", "user", "socks_user", "admin", "json"])]
    pub profile: Option<PathBuf>,
    /// SRC DST, or "SRC -> DST" in quotes: 10.0.0.5 203.0.113.10:22. With a reverse listener, SRC alone is enough; with --attach,
    /// DST alone; with --profile, HOST[:PORT].
    #[arg(value_name = "SRC DST", required = true, num_args = 1..=3)]
    pub flow: Vec<String>,
    /// The host name in the flow's first bytes.
    #[arg(long)]
    pub host: Option<String>,
    /// The listener that catches it. Default: the only one.
    #[arg(long)]
    pub listener: Option<String>,
    /// How it is caught, without a listener: run, redirect, tproxy, socks or reverse.
    #[arg(long)]
    pub intercept: Option<String>,
    /// Its transport protocol, tcp or udp, if no listener says so. Default: tcp.
    #[arg(long)]
    pub protocol: Option<String>,
    /// Base name of the client's executable.
    #[arg(long)]
    pub process: Option<String>,
    /// The flow as `sidetrack attach PID` would catch it: program and user are those of the process that runs, and SRC can be
    /// left out.
    #[arg(long, value_name = "PID", conflicts_with_all = ["listener", "intercept", "process", "user", "socks_user", "profile"])]
    pub attach: Option<u32>,
    /// User (name or id) of the client's process.
    #[arg(long)]
    pub user: Option<String>,
    /// User who authenticated with the socks listener.
    #[arg(long)]
    pub socks_user: Option<String>,
    /// Admin socket of the running sidetrack to ask about containers. Default: that of the configuration.
    #[arg(long, value_name = "PATH")]
    pub admin: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

/// Runs the subcommand. Exit code 0: there is an answer; 2: the file is wrong.
///
/// # Errors
/// An argument is wrong; says which and what to write.
pub fn run(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    Ok(report(args, super::colours())?.print())
}

/// Returns the output of the subcommand.
///
/// # Errors
/// An argument is wrong; says which and what to write.
pub fn report(args: &ExplainArgs, colours: bool) -> anyhow::Result<Printed> {
    if let Some(profile) = &args.profile {
        let protocol = args.protocol.as_deref().map(protocol).transpose()?;
        return profile_line::report(profile, &args.flow, protocol);
    }
    let config = match Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return Ok(Printed { out: String::new(), err: error.render(colours), code: 2 }),
    };
    let question = question(args, &config)?;
    let mut answer = explain(&config, &question).context(
        "the flow has no destination: add DST as host:port, or --listener (and --host) of a reverse listener",
    )?;
    answer.containers = health(args, &config, &answer);
    if let Some(packets) = &mut answer.packets {
        packets.links = links(args, &config, packets).map_or_else(Links::Unknown, Links::Known);
    }
    let out = if args.json { format!("{}\n", serde_json::to_string(&answer)?) } else { answer.to_string() };
    Ok(Printed { out, err: String::new(), code: 0 })
}

/// Returns the health of the containers on the path; `None` if there are none.
fn health(args: &ExplainArgs, config: &Config, answer: &Answer) -> Option<Health> {
    let is_container = |name: &&String| {
        config.functions.iter().any(|spec| *spec.name == ***name && spec.kind.is_container())
    };
    let names: Vec<_> =
        answer.carry.iter().flat_map(|carry| &carry.chain).filter(is_container).cloned().collect();
    if names.is_empty() {
        return None;
    }
    let known = admin_socket(args, config).and_then(|socket| asked(&socket, &names));
    Some(known.map_or_else(Health::Unknown, Health::Known))
}

/// Returns the links that captured packets use in the running sidetrack.
fn links(args: &ExplainArgs, config: &Config, packets: &CapturedPackets) -> Result<Vec<[String; 2]>, String> {
    let Some(node) = &packets.node else {
        return Err("they depend on the members; 'sidetrack overlay group ls' shows these".to_owned());
    };
    let socket = admin_socket(args, config)?;
    if packets.trust == Trust::Tolerant.name() {
        let status: Status = super::ask_once(&socket, "/v1/overlay", &[])?;
        let services =
            status.paths.into_iter().filter(|path| path.to == *node).flat_map(|path| path.services);
        let is_this = |of: &ServiceView| of.kind == packets.link && of.dissemination == packets.dissemination;
        let links = services.filter(is_this).map(|of| of.links).next().unwrap_or_default();
        return if links.is_empty() {
            Err(format!("no nodes that know proofs lead to {node}"))
        } else {
            Ok(links)
        };
    }
    if packets.link == LinkKind::Reliable.name() {
        let status: Status = super::ask_once(&socket, "/v1/overlay", &[])?;
        let path = status.paths.into_iter().find(|path| path.to == *node).unwrap_or_default().path;
        let links: Vec<_> = path.windows(2).map(|link| [link[0].clone(), link[1].clone()]).collect();
        return if links.is_empty() { Err(format!("there is no path to {node}")) } else { Ok(links) };
    }
    let deadline = packets.deadline_ms.map(|ms| ms.to_string());
    let mut query = vec![("kind", packets.link), ("dissemination", packets.dissemination)];
    query.extend(deadline.as_deref().map(|ms| ("deadline_ms", ms)));
    let way: WayView = super::ask_once(&socket, &format!("/v1/overlay/way/{node}"), &query)?;
    Ok(way.links)
}

/// Returns the admin socket of the running sidetrack, or why there is none.
fn admin_socket(args: &ExplainArgs, config: &Config) -> Result<PathBuf, String> {
    match (&args.admin, &config.admin.socket) {
        (Some(path), _) | (None, AdminAt::Path(path)) => Ok(path.clone()),
        (None, AdminAt::Default) => Ok(default_socket()),
        (None, AdminAt::None) => Err("the configuration has no admin socket ([admin])".to_owned()),
    }
}

/// Asks the sidetrack at this socket about these functions.
fn asked(socket: &Path, names: &[String]) -> Result<Vec<FunctionHealth>, String> {
    let functions = super::ask_once::<Functions>(socket, "/v1/functions", &[])?.functions;
    let of = |name: &String| {
        let known = functions.iter().find(|function| function.name == *name);
        let health = known.and_then(|function| function.containers.clone());
        let unlike =
            || format!("what runs at {} has no such function in a container: {name}", socket.display());
        let ContainersHealth { wanted, well, falls, trouble, .. } = health.ok_or_else(unlike)?;
        Ok(FunctionHealth { function: name.clone(), wanted, well, falls, trouble })
    };
    names.iter().map(of).collect()
}

fn question<'a>(args: &ExplainArgs, config: &'a Config) -> anyhow::Result<Question<'a>> {
    let (src, dst) = if args.attach.is_some() { of_attached(&args.flow)? } else { ends(&args.flow)? };
    let user = |name: &String| {
        let known = name.parse().ok().or_else(|| System::new(Path::new("")).uid_of(name));
        known.with_context(|| format!("--user: there is no user '{name}' on this machine"))
    };
    Ok(Question {
        // `attach` starts no listener of the configuration, and catches as `run` does.
        listener: match args.attach {
            Some(_) => None,
            None => listener(args.listener.as_deref(), config)?,
        },
        intercept: match args.attach {
            Some(_) => Some(Intercept::Run),
            None => args.intercept.as_deref().map(intercept).transpose()?,
        },
        protocol: args.protocol.as_deref().map(protocol).transpose()?,
        client: source(&src)?,
        orig_dst: dst.map(|dst| anyhow::Ok(numbered(&dst)?.parse::<Destination>()?)).transpose()?,
        host: args.host.as_deref().map(str::parse::<HostName>).transpose().context("--host")?,
        process: match args.attach {
            Some(pid) => running(pid)?,
            None => Process {
                name: args.process.clone(),
                uid: args.user.as_ref().map(user).transpose()?,
                ..Process::default()
            },
        },
        socks_user: args.socks_user.clone(),
    })
}

/// Parses the ends of a flow of a process on this host: DST alone is enough.
fn of_attached(flow: &[String]) -> anyhow::Result<(String, Option<String>)> {
    match ends(flow)? {
        (dst, None) => Ok(("127.0.0.1".to_owned(), Some(dst))),
        both => Ok(both),
    }
}

/// Returns the program and the user of a process that runs.
fn running(pid: u32) -> anyhow::Result<Process> {
    let info = process_info(pid).with_context(|| format!("--attach: there is no process {pid}"))?;
    Ok(Process { pid: Some(pid), name: Some(info.name), uid: Some(info.uid), is_hidden: false })
}

/// Parses `SRC DST`, `SRC to DST`, `SRC -> DST` in one argument or in three.
fn ends(flow: &[String]) -> anyhow::Result<(String, Option<String>)> {
    let joined = flow.join(" ");
    let words: Vec<&str> =
        joined.split_whitespace().flat_map(|word| word.split("->")).filter(|word| !word.is_empty()).collect();
    match words.as_slice() {
        [_, "-"] => bail!(
            "the shell took '>' as a redirection of the output: write SRC DST without the arrow, or \"SRC -> DST\" in quotes"
        ),
        [src] => Ok(((*src).to_owned(), None)),
        [src, dst] | [src, "to", dst] => Ok(((*src).to_owned(), Some((*dst).to_owned()))),
        _ => bail!("'{joined}' is no flow: write SRC DST, as in 10.0.0.5 203.0.113.10:22"),
    }
}

fn source(text: &str) -> anyhow::Result<SocketAddr> {
    let text = &*numbered(text)?;
    let address = text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, 0)));
    address
        .with_context(|| format!("'{text}' is no address of a client: write 10.0.0.5, or [2001:db8::1]:4711"))
}

fn listener<'a>(name: Option<&str>, config: &'a Config) -> anyhow::Result<Option<&'a Listener>> {
    let Some(name) = name else {
        return Ok(match config.listeners.as_slice() {
            [only] => Some(only),
            _ => None,
        });
    };
    let names = || config.listeners.iter().map(|listener| &*listener.name).collect::<Vec<_>>().join(", ");
    let found = config.listener(name);
    Ok(Some(
        found.with_context(|| format!("--listener: there is no '{name}'; the listeners are: {}", names()))?,
    ))
}

fn protocol(word: &str) -> anyhow::Result<Protocol> {
    let found = Protocol::ALL.into_iter().find(|protocol| protocol.as_str() == word);
    found.with_context(|| format!("--protocol: '{word}' is neither tcp nor udp"))
}

fn intercept(word: &str) -> anyhow::Result<Intercept> {
    // `kernel` is not accepted: a flow in the kernel was intercepted by a listener of another kind.
    let kinds = || Intercept::ALL.into_iter().filter(|kind| *kind != Intercept::Kernel);
    kinds().find(|kind| kind.as_str() == word).with_context(|| {
        let words: Vec<_> = kinds().map(Intercept::as_str).collect();
        format!("--intercept: '{word}' is none of {}", words.join(", "))
    })
}
