//! `sidetrack overlay`: keys, links, paths, pings.

use super::Printed;
use super::flows::which;
use crate::admin::Client;
use crate::overlay::{PingView, Status, identity};
use anyhow::Context as _;
use clap::{Args, Subcommand};
use hyper::Method;
use sidetrack_core::overlay::key::SecretKey;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Keys, links and paths of the overlay
#[derive(Debug, Args)]
pub struct OverlayArgs {
    #[command(subcommand)]
    command: OverlayCommand,
    /// The socket of the sidetrack that is asked
    #[arg(long, value_name = "PATH", global = true)]
    admin: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum OverlayCommand {
    /// Makes this node's key, if the file is not there yet, and prints the public one for everybody's [overlay.node]
    Key {
        /// Where the secret key is, or is to be
        file: PathBuf,
    },
    /// Shows links, paths and sessions
    Status {
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Shows the path that flows take to a node
    Path {
        /// The node's name
        node: String,
    },
    /// Measures the round trip to a node over the path that flows take
    Ping {
        /// The node's name
        node: String,
        /// How many times
        #[arg(short, long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100_000))]
        count: u32,
    },
}

/// Time between pings.
const PING_INTERVAL: Duration = Duration::from_millis(200);

/// Runs the command.
///
/// # Errors
/// What a person can do something about, in words.
pub fn run(args: &OverlayArgs) -> anyhow::Result<ExitCode> {
    if let OverlayCommand::Key { file } = &args.command {
        let printed = Printed { out: format!("{}\n", key(file)?), ..Printed::default() };
        return Ok(printed.print());
    }
    let socket = which::socket(args.admin.as_deref(), None)?;
    let client = Client::new(socket);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let out = match &args.command {
            OverlayCommand::Ping { node, count } => return ping(&client, node, *count).await,
            OverlayCommand::Path { node } => path(&status(&client).await?, node)?,
            OverlayCommand::Status { json: true } => serde_json::to_string(&status(&client).await?)? + "\n",
            _ => table(&status(&client).await?),
        };
        Ok(Printed { out, ..Printed::default() }.print())
    })
}

async fn status(client: &Client) -> anyhow::Result<Status> {
    Ok(client.ask(Method::GET, "/v1/overlay", &[]).await?)
}

/// The public key of the file's secret one, which is made if it is not there.
fn key(file: &Path) -> anyhow::Result<String> {
    let named = || file.display().to_string();
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    let public = match made {
        Ok(mut made) => {
            let (secret, public) = identity::generate()?;
            made.write_all(secret.to_text().as_bytes()).with_context(named)?;
            public
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let text = std::fs::read_to_string(file).with_context(named)?;
            identity::public_of(&text.parse::<SecretKey>().with_context(named)?)?
        }
        Err(error) => return Err(error).with_context(named),
    };
    Ok(public.to_string())
}

fn path(status: &Status, node: &str) -> anyhow::Result<String> {
    let found = status.paths.iter().find(|path| path.to == node);
    let found = found.with_context(|| format!("the overlay has no other node '{node}'"))?;
    anyhow::ensure!(!found.path.is_empty(), "there is no path to {node} now");
    Ok(format!("{}  ({:.1} ms)\n", found.path.join(" -> "), found.cost_ms))
}

async fn ping(client: &Client, node: &str, count: u32) -> anyhow::Result<ExitCode> {
    let mut failed = 0;
    for number in 1..=count {
        let request = format!("/v1/overlay/ping/{node}");
        match client.ask::<PingView>(Method::GET, &request, &[]).await {
            Ok(ping) => println!("{number}: {:.2} ms over {}", ping.rtt_ms, ping.path.join(" -> ")),
            Err(error) => {
                failed += 1;
                eprintln!("{number}: {error}");
            }
        }
        if number < count {
            tokio::time::sleep(PING_INTERVAL).await;
        }
    }
    Ok(ExitCode::from(u8::from(failed == count)))
}

fn table(status: &Status) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "node {}, up {} s", status.node, status.uptime_seconds);
    let _ = writeln!(
        out,
        "sessions {} now, {} begun here, {} delivered here, {} moved to another path, {} refused",
        status.sessions,
        status.sessions_opened,
        status.sessions_delivered,
        status.sessions_resumed,
        status.sessions_refused
    );
    let _ = writeln!(out, "relayed {} flows, {} bytes", status.relayed, status.relayed_bytes);
    if let Some(caught) = &status.caught {
        let _ = writeln!(
            out,
            "packets {} sent, {} dropped, {} without a way; {} delivered, {} refused, {} failed",
            caught.sent, caught.dropped, caught.without_way, caught.delivered, caught.refused, caught.failed
        );
    }
    let _ = writeln!(
        out,
        "\n{:<20} {:<5} {:>9} {:>9} {:>9} {:>5}",
        "NEIGHBOUR", "LINK", "RTT ms", "JITTER ms", "COST ms", "IDLE"
    );
    for link in &status.links {
        let up = if link.up { "up" } else { "down" };
        let _ = writeln!(
            out,
            "{:<20} {up:<5} {:>9.2} {:>9.2} {:>9.2} {:>5}",
            link.neighbour, link.rtt_ms, link.jitter_ms, link.cost_ms, link.idle_connections
        );
    }
    let _ = writeln!(out, "\n{:<20} {:>9}  PATH", "NODE", "COST ms");
    for path in &status.paths {
        if path.path.is_empty() {
            let _ = writeln!(out, "{:<20} {:>9}  none", path.to, "-");
        } else {
            let _ = writeln!(out, "{:<20} {:>9.2}  {}", path.to, path.cost_ms, path.path.join(" -> "));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_made_once_and_for_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("node.key");
        let first = key(&file).unwrap();
        assert_eq!(key(&file).unwrap(), first);
        assert!(first.starts_with("ed25519:"));
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&file, "something else").unwrap();
        assert!(format!("{:#}", key(&file).unwrap_err()).contains("ed25519-secret:"));
    }
}
