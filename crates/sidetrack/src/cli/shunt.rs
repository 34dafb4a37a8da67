//! `sidetrack shunt`: shows which flows are on the fast path and why, and changes that.

use crate::admin::{Client, Done, SYSTEM_SOCKET, ShuntFlows};
use crate::config::Config;
use crate::shunt::{Counts, FlowView};
use anyhow::Context;
use clap::{Args, Subcommand};
use hyper::Method;
use sidetrack_core::shunt::{FastPathKind, Mark, Obstacle, ShuntAction, Transport};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

/// Shows and changes which flows take the fast path
#[derive(Debug, Args)]
pub struct ShuntArgs {
    #[command(subcommand)]
    command: ShuntCommand,
    /// The admin socket of the running sidetrack
    #[arg(long, value_name = "PATH", global = true)]
    admin: Option<PathBuf>,
}

/// A flow on the command line.
#[derive(Clone, Debug, Args)]
struct FlowArgs {
    /// The address that opened the connection, such as 10.0.0.1:4000
    client: SocketAddr,
    /// Its destination, such as 10.0.0.2:5000
    server: SocketAddr,
    /// The flow is UDP, not TCP
    #[arg(long)]
    udp: bool,
}

#[derive(Debug, Subcommand)]
enum ShuntCommand {
    /// Lists the flows
    Ls {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Moves a flow to the fast path, whatever policy says
    Add(FlowArgs),
    /// Drops a flow on the fast path, whatever policy says
    Drop(FlowArgs),
    /// Keeps a flow on the slow path until it ends
    Release(FlowArgs),
    /// Undoes add, drop or release, or withdraws an entry: the packet filter decides again
    Rm(FlowArgs),
    /// Says on which path a flow is, and what keeps it off the fast path
    Why(FlowArgs),
    /// Prints the packet filter rules that a configuration needs; loads none
    Rules {
        /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
        #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
        config: PathBuf,
        /// Print them for iptables-restore and ip6tables-restore instead of nft
        #[arg(long)]
        iptables: bool,
    },
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &ShuntArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let text = runtime.block_on(report(args))?;
    Ok(super::Printed { out: text, ..super::Printed::default() }.print())
}

/// Returns the output of the subcommand.
///
/// # Errors
/// As [`run`].
pub async fn report(args: &ShuntArgs) -> anyhow::Result<String> {
    let client = Client::new(args.admin.clone().unwrap_or_else(socket));
    match &args.command {
        ShuntCommand::Rules { config, iptables } => rules(config, *iptables),
        ShuntCommand::Ls { json } => {
            let flows = client.ask::<ShuntFlows>(Method::GET, "/v1/shunt", &[]).await?.flows;
            if *json { lines(&flows) } else { Ok(table(&flows)) }
        }
        ShuntCommand::Why(flow) => {
            let flows = client.ask::<ShuntFlows>(Method::GET, "/v1/shunt", &[]).await?.flows;
            let transport = flow.transport();
            let found = flows.iter().find(|view| {
                (view.client, view.server, view.transport) == (flow.client, flow.server, transport)
            });
            Ok(found.map_or_else(|| unknown(flow), why))
        }
        ShuntCommand::Add(flow) => change(&client, flow, Some(ShuntAction::Shunt), "to the fast path").await,
        ShuntCommand::Drop(flow) => change(&client, flow, Some(ShuntAction::Block), "dropped").await,
        ShuntCommand::Release(flow) => {
            change(&client, flow, Some(ShuntAction::Ignore), "on the slow path until it ends").await
        }
        ShuntCommand::Rm(flow) => change(&client, flow, None, "the packet filter is asked again").await,
    }
}

/// The default admin socket: `$SIDETRACK_ADMIN`, otherwise that of root, because only root has a shunt.
fn socket() -> PathBuf {
    let named = sidetrack_sys::process::environment("SIDETRACK_ADMIN").filter(|path| !path.is_empty());
    named.map_or_else(|| SYSTEM_SOCKET.into(), PathBuf::from)
}

impl FlowArgs {
    const fn transport(&self) -> Transport {
        if self.udp { Transport::Udp } else { Transport::Tcp }
    }
}

async fn change(
    client: &Client,
    flow: &FlowArgs,
    action: Option<ShuntAction>,
    what: &str,
) -> anyhow::Result<String> {
    let (from, to) = (flow.client.to_string(), flow.server.to_string());
    let mut query =
        vec![("client", from.as_str()), ("server", &to), ("transport", flow.transport().as_str())];
    query.extend(action.map(|action| ("action", action.as_str())));
    let method = if action.is_some() { Method::POST } else { Method::DELETE };
    let done: Done = client.ask(method, "/v1/shunt", &query).await?;
    Ok(format!("{} -> {}: {what}\n", done.client, done.server))
}

fn rules(path: &PathBuf, iptables: bool) -> anyhow::Result<String> {
    let config = Config::load(path).map_err(crate::config::BadConfiguration::from)?;
    let shunt =
        config.shunt.with_context(|| format!("{} has no [shunt]: see docs/shunt.md", path.display()))?;
    anyhow::ensure!(
        !shunt.ports.is_empty(),
        "the ports in {} have no interface: give each [[shunt.port]] one; NFShunt's own configuration goes with its own rule set",
        path.display()
    );
    Ok(shunt.with_rules(|rules| if iptables { rules.iptables() } else { rules.nft() }))
}

fn lines(flows: &[FlowView]) -> anyhow::Result<String> {
    flows.iter().try_fold(String::new(), |mut text, flow| {
        text += &serde_json::to_string(flow)?;
        text.push('\n');
        Ok(text)
    })
}

fn table(flows: &[FlowView]) -> String {
    let mut text = format!(
        "{:<10} {:<7} {:<11} {:<5} {:<48} {:>14} {:>14} {:>14} {:>12} {:>5}  {}\n",
        "STATE",
        "ACTION",
        "PATH",
        "PROTO",
        "FLOW",
        "FAST BYTES",
        "SLOW BYTES",
        "DROPPED",
        "BYTES/S",
        "TIMES",
        "LAST LEFT"
    );
    for flow in flows {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<10} {:<7} {:<11} {:<5} {:<48} {:>14} {:>14} {:>14} {:>12} {:>5}  {}",
            flow.state,
            flow.action.as_str(),
            flow.fast_path.map_or("-", FastPathKind::as_str),
            flow.transport.as_str(),
            format!("{} -> {}", flow.client, flow.server),
            sum(flow.fast),
            sum(flow.slow),
            sum(flow.dropped),
            flow.bytes_per_s.map_or_else(|| "-".to_owned(), |rate| rate.to_string()),
            flow.installs,
            flow.cause.map_or("-", sidetrack_core::shunt::Cause::as_str)
        );
    }
    text
}

/// The bytes of both directions.
const fn sum(counts: Counts) -> u64 {
    counts.bytes_up + counts.bytes_down
}

fn unknown(flow: &FlowArgs) -> String {
    format!(
        "{} -> {}: on the slow path.\nThe packet filter has not decided about it: the bit {:#x} of its connection's mark is not \
         set, or there is no such connection.\nhelp: `sidetrack shunt rules` prints the rules that ask the policy\n",
        flow.client,
        flow.server,
        Mark::DECIDED
    )
}

fn why(flow: &FlowView) -> String {
    let place = match flow.state.as_str() {
        "installed" if flow.action == ShuntAction::Block => "dropped on the fast path",
        "installed" => "on the fast path",
        "requested" => "on the slow path; the fast path has been asked and has not confirmed",
        "leaving" => "on its way back to the slow path",
        _ => "on the slow path",
    };
    let mut text = format!("{} -> {}: {place}.\n", flow.client, flow.server);
    let mut line = |what: &str, value: String| {
        let _ = writeln!(text, "  {what:<12} {value}");
    };
    line("state", flow.state.clone());
    line("action", flow.action.as_str().to_owned());
    line("mark", format!("{} ({})", Mark(flow.mark), marked(Mark(flow.mark))));
    if let Some(pinned) = flow.pinned {
        line("pinned", format!("{}, whatever the mark says", pinned.as_str()));
    }
    if let Some(rule) = &flow.rule {
        line("rule", format!("'{rule}', to which the mark leaves it"));
    }
    line("bytes", format!("{} fast, {} slow, {} dropped", sum(flow.fast), sum(flow.slow), sum(flow.dropped)));
    if let Some(rate) = flow.bytes_per_s {
        line("rate", format!("{rate} bytes per second on both paths"));
    }
    if let Some(path) = flow.fast_path {
        line("fast path", path.as_str().to_owned());
    }
    if let Some(obstacle) = flow.obstacle {
        line("obstacle", obstacle.as_str().to_owned());
        if obstacle == Obstacle::Full {
            line(
                "next",
                "with when_full = \"fastest\" it gets the entry of a flow that is less than half as fast"
                    .into(),
            );
        }
    }
    if let Some(cause) = flow.cause {
        line("last left", format!("{}, {:.1} s ago", cause.as_str(), flow.gone_seconds.unwrap_or(0.0)));
    }
    if let Some(seconds) = flow.installed_seconds {
        line("installed", format!("{} times, last {seconds:.1} s ago", flow.installs));
    }
    text
}

fn marked(mark: Mark) -> String {
    let port = |port: Option<sidetrack_core::shunt::PortNumber>| {
        port.map_or_else(|| "?".to_owned(), |port| port.to_string())
    };
    let action = mark.action().map_or_else(|| "undecided".to_owned(), |number| format!("action {number}"));
    format!("in by port {}, out by {}, {action}", port(mark.ingress()), port(mark.egress()))
}
