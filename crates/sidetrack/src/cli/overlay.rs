//! `sidetrack overlay`: makes keys, and shows links, paths and round trips.

mod groups;

use super::Printed;
use super::flows::which;
use super::invite::overlay as invite;
use crate::admin::Client;
use crate::overlay::{
    BenchView, DatagramsView, LegView, LinkSettingView, LinkView, PacedView, PacketBenchView, PathView,
    PingView, RealTimeView, ServiceCountView, ServiceView, SessionPathsView, SpreadView, Status, WayView,
    identity,
};
use anyhow::Context as _;
use clap::{Args, Subcommand};
use hyper::Method;
use sidetrack_core::overlay::key::SecretKey;
use sidetrack_core::overlay::service::LinkKind;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Makes keys, and shows and changes links and paths of the overlay
#[derive(Debug, Args)]
pub struct OverlayArgs {
    #[command(subcommand)]
    command: OverlayCommand,
    /// Admin socket of the running sidetrack
    #[arg(long, value_name = "PATH", global = true)]
    admin: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum OverlayCommand {
    /// Makes this node's key, unless the file exists, and prints the public key for [overlay.node] of all nodes
    Key {
        /// File of the secret key
        file: PathBuf,
    },
    Invite(invite::InviteArgs),
    Join(invite::JoinArgs),
    Table(invite::TableArgs),
    Update(invite::UpdateArgs),
    /// Shows links, paths and sessions
    Status {
        /// Prints one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Shows the path that flows take to a node, or the links that packets of a service use
    Path {
        /// The node's name
        node: String,
        #[command(flatten)]
        service: PacketService,
    },
    /// Measures the round trip to a node over the path that flows take
    Ping {
        /// The node's name
        node: String,
        /// Number of pings
        #[arg(short, long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100_000))]
        count: u32,
        #[command(flatten)]
        service: PacketService,
    },
    /// Floods a session to a node and shows the rate that arrives; with --kind, sends packets and shows what is lost
    Bench {
        /// The node's name
        node: String,
        /// Duration in seconds, 0.1 to 60
        #[arg(short, long, default_value_t = 5.0)]
        seconds: f64,
        /// Maximum rate in Mb/s
        #[arg(short, long, value_name = "MBIT")]
        rate: Option<f64>,
        /// Packets per second with --kind best-effort or real-time, 1 to 500 [default: 50]
        #[arg(long, value_name = "N", requires = "kind")]
        packets: Option<u32>,
        #[command(flatten)]
        service: PacketService,
        /// Prints one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Shows groups, and joins or leaves one
    Group {
        #[command(subcommand)]
        command: groups::GroupCommand,
    },
    /// Changes one link of this node until it restarts
    Link {
        #[command(subcommand)]
        command: LinkCommand,
    },
}

/// How packets travel, as in [[overlay.packets]].
#[derive(Debug, Args)]
struct PacketService {
    /// Kind of links: reliable (the path of flows), best-effort or real-time
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
    /// Links that packets use: shortest, duplicate, graph or flood
    #[arg(long, value_name = "WAY", requires = "kind")]
    dissemination: Option<String>,
    /// Milliseconds that a packet may travel
    #[arg(long, value_name = "MS", requires = "kind")]
    deadline: Option<u32>,
}

impl PacketService {
    /// Returns the parameters of a request for this service.
    fn query(&self) -> Vec<(&'static str, String)> {
        let Self { kind, dissemination, deadline } = self;
        let deadline = deadline.map(|ms| ms.to_string());
        let wishes = [("kind", kind), ("dissemination", dissemination), ("deadline_ms", &deadline)];
        wishes.into_iter().filter_map(|(key, value)| Some((key, value.clone()?))).collect()
    }

    /// Whether it names datagrams: flows have the other kind.
    fn is_of_datagrams(&self) -> bool {
        self.kind.as_deref().is_some_and(|kind| kind != LinkKind::Reliable.name())
    }
}

/// Returns the parameters as a request takes them.
fn borrowed<'q>(query: &'q [(&'static str, String)]) -> Vec<(&'static str, &'q str)> {
    query.iter().map(|(key, value)| (*key, value.as_str())).collect()
}

#[derive(Debug, Subcommand)]
enum LinkCommand {
    /// Sets the given values; the others do not change
    Set(LinkSetArgs),
}

#[derive(Debug, Args)]
struct LinkSetArgs {
    /// The neighbour's name
    neighbour: String,
    /// Takes the link down and keeps it down
    #[arg(long, conflicts_with = "up")]
    down: bool,
    /// Lets the link come up again
    #[arg(long)]
    up: bool,
    /// Cost in milliseconds, instead of the measured one; the higher value of both ends counts; 0: the measured cost
    #[arg(long, value_name = "MS")]
    cost: Option<f64>,
    /// Maximum rate of all flows that this node sends on it, in Mb/s; 0: no limit
    #[arg(long, value_name = "MBIT")]
    rate: Option<f64>,
    /// Percentage of the neighbour's datagrams to drop here, for tests
    #[arg(long, value_name = "PERCENT")]
    loss: Option<f64>,
}

/// Time between pings.
const PING_INTERVAL: Duration = Duration::from_millis(200);

/// Runs the command.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &OverlayArgs) -> anyhow::Result<ExitCode> {
    if let OverlayCommand::Key { file } = &args.command {
        let printed = Printed { out: format!("{}\n", key(file)?), ..Printed::default() };
        return Ok(printed.print());
    }
    match &args.command {
        OverlayCommand::Invite(args) => return invite::invite(args),
        OverlayCommand::Join(args) => return invite::join(args),
        OverlayCommand::Table(args) => return invite::table(args),
        OverlayCommand::Update(args) => return invite::update(args),
        _ => {}
    }
    let socket = which::socket(args.admin.as_deref(), None)?;
    let client = Client::new(socket);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let out = match &args.command {
            OverlayCommand::Ping { node, count, service } => {
                return ping(&client, node, *count, service).await;
            }
            OverlayCommand::Path { node, service } if service.is_of_datagrams() => {
                way(&client, node, service).await?
            }
            OverlayCommand::Path { node, .. } => path(&status(&client).await?, node)?,
            OverlayCommand::Bench { node, seconds, rate, packets, service, json } => {
                let mut query = service.query();
                query.push(("seconds", seconds.to_string()));
                query.extend(rate.map(|rate| ("rate_mbit", rate.to_string())));
                query.extend(packets.map(|packets| ("packets_per_second", packets.to_string())));
                bench(&client, node, &query, service.is_of_datagrams(), *json).await?
            }
            OverlayCommand::Group { command } => groups::run(&client, command).await?,
            OverlayCommand::Link { command: LinkCommand::Set(set) } => set_link(&client, set).await?,
            OverlayCommand::Status { json: true } => serde_json::to_string(&status(&client).await?)? + "\n",
            _ => table(&status(&client).await?),
        };
        Ok(Printed { out, ..Printed::default() }.print())
    })
}

async fn status(client: &Client) -> anyhow::Result<Status> {
    Ok(client.ask(Method::GET, "/v1/overlay", &[]).await?)
}

/// Returns the public key of the file's secret key; makes the file if it does not exist.
pub(super) fn key(file: &Path) -> anyhow::Result<String> {
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
    let mut out = format!("{}  ({:.1} ms)\n", found.path.join(" -> "), found.cost_ms);
    found.services.iter().for_each(|service| out += &service_line(service));
    found.sessions.iter().for_each(|sessions| out += &sessions_line(sessions));
    Ok(out)
}

/// Shows the links that packets of a service would use now.
async fn way(client: &Client, node: &str, service: &PacketService) -> anyhow::Result<String> {
    let query = service.query();
    let way: WayView = client.ask(Method::GET, &format!("/v1/overlay/way/{node}"), &borrowed(&query)).await?;
    let WayView { kind, dissemination, named, links } = way;
    let named = if named == dissemination {
        String::new()
    } else {
        format!(" (its packets name {named}, because an old node on the way does not know {dissemination})")
    };
    Ok(format!("{kind}, {dissemination}: {}{named}\n", arrows(&links)))
}

async fn bench(
    client: &Client,
    node: &str,
    query: &[(&'static str, String)],
    of_packets: bool,
    json: bool,
) -> anyhow::Result<String> {
    let (request, query) = (format!("/v1/overlay/bench/{node}"), borrowed(query));
    if of_packets {
        let bench: PacketBenchView = client.ask(Method::POST, &request, &query).await?;
        if json {
            return Ok(serde_json::to_string(&bench)? + "\n");
        }
        let PacketBenchView { packets, lost_percent, rtt_ms: [median, tail, most], links } = bench;
        return Ok(format!(
            "{packets} packets over {links:.1} links: {lost_percent:.2} % without an answer; round trip {median:.1} ms in \
             the median, {tail:.1} ms at most for 99 of 100, {most:.1} ms at most\n"
        ));
    }
    let bench: BenchView = client.ask(Method::POST, &request, &query).await?;
    if json {
        return Ok(serde_json::to_string(&bench)? + "\n");
    }
    let BenchView { bytes, seconds, mbit, answer_ms: [median, tail] } = bench;
    Ok(format!(
        "{bytes} bytes arrived in {seconds:.2} s: {mbit:.1} Mb/s; a write was there and told after {median:.1} ms in the \
         median, {tail:.1} ms at most for 99 of 100\n"
    ))
}

async fn set_link(client: &Client, set: &LinkSetArgs) -> anyhow::Result<String> {
    let up = (set.up || set.down).then(|| set.up.to_string());
    let number = |value: Option<f64>| value.map(|value| value.to_string());
    let wishes = [
        ("up", up),
        ("cost_ms", number(set.cost)),
        ("rate_mbit", number(set.rate)),
        ("loss_percent", number(set.loss)),
    ];
    let query: Vec<_> = wishes.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?))).collect();
    anyhow::ensure!(!query.is_empty(), "nothing to set: name --down, --up, --cost, --rate or --loss");
    let path = format!("/v1/overlay/link/{}", set.neighbour);
    let view: LinkSettingView = client.ask(Method::POST, &path, &query).await?;
    Ok(setting(&view) + "\n")
}

/// Formats the values that were set for a link, in words.
fn setting(view: &LinkSettingView) -> String {
    let number = |name: &str, value: f64, unit: &str| (value > 0.0).then(|| format!("{name} {value} {unit}"));
    let words = [
        view.down.then(|| "kept down".to_owned()),
        number("cost", view.cost_ms, "ms"),
        number("rate", view.rate_mbit, "Mb/s"),
        number("loss", view.loss_percent, "%"),
    ];
    let words: Vec<_> = words.into_iter().flatten().collect();
    let words = if words.is_empty() { "as it is by itself".to_owned() } else { words.join(", ") };
    format!("link to {}: {words}", view.neighbour)
}

async fn ping(client: &Client, node: &str, count: u32, service: &PacketService) -> anyhow::Result<ExitCode> {
    let query = service.query();
    let query = borrowed(&query);
    let mut failed = 0;
    for number in 1..=count {
        let request = format!("/v1/overlay/ping/{node}");
        match client.ask::<PingView>(Method::GET, &request, &query).await {
            Ok(ping) if ping.links.is_empty() => {
                println!("{number}: {:.2} ms over {}", ping.rtt_ms, ping.path.join(" -> "));
            }
            Ok(ping) => println!("{number}: {:.2} ms over {}", ping.rtt_ms, arrows(&ping.links)),
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

/// Formats links.
fn arrows(links: &[[String; 2]]) -> String {
    links.iter().map(|[from, to]| format!("{from} -> {to}")).collect::<Vec<_>>().join(", ")
}

/// Returns the line about the links that packets of one service use.
fn service_line(service: &ServiceView) -> String {
    let state = if service.arrives { "" } else { " (nothing arrives; packets take one path)" };
    let best_effort = match &service.unrecovered[..] {
        [] => String::new(),
        links => format!(" (best effort on {}: an old node does not recover losses)", arrows(links)),
    };
    format!("{}, {}: {}{best_effort}{state}\n", service.kind, service.dissemination, arrows(&service.links))
}

/// Returns the line about sessions that use several paths.
fn sessions_line(view: &SessionPathsView) -> String {
    let paths = view.paths.iter().zip(&view.sent_bytes);
    let paths: Vec<_> = paths.map(|(path, sent)| format!("{} ({sent} bytes)", path.join(" -> "))).collect();
    format!("{} sessions, {}: {}\n", view.sessions, view.dissemination, paths.join(", "))
}

/// Returns the line about packets on several paths, if this node has seen any.
fn spread_line(spread: &SpreadView) -> String {
    let mut out = String::new();
    if *spread != SpreadView::default() {
        let delivered = spread.delivered;
        let _ = writeln!(
            out,
            "spread packets {} copies sent, {} relayed; delivered: {} over one path, {} by duplicate, {} by graph, {} by \
             flood; dropped: {} duplicates, {} late, {} off graph",
            spread.copies,
            spread.relayed,
            delivered.shortest,
            delivered.duplicate,
            delivered.graph,
            delivered.flood,
            spread.duplicates,
            spread.late,
            spread.off_graph
        );
    }
    let RealTimeView { sent, repeated, requested, recovered, given_up } = spread.real_time;
    if spread.real_time != RealTimeView::default() {
        let _ = writeln!(
            out,
            "real-time links {sent} sent, {repeated} sent again; {requested} requested, {recovered} recovered, {given_up} \
             given up"
        );
    }
    out
}

/// Returns the line about the paced part of a link, if one of its ends declares it.
fn paced_line(link: &LinkView) -> String {
    let Some(paced) = &link.paced else { return String::new() };
    let PacedView { state, rate_mbit, peer_rate_mbit, .. } = paced;
    let fix = match &**state {
        "agreed" => {
            return format!(
                "paced link to {}: {rate_mbit} Mb/s there, {peer_rate_mbit} Mb/s back; {} flows, {} bytes queued ({:.1} ms), \
                 {} bytes sent, {} sent again, {:.2} % lost\n",
                link.neighbour,
                paced.streams,
                paced.queued_bytes,
                paced.pacing_delay_ms,
                paced.bytes,
                paced.bytes_again,
                paced.loss_percent
            );
        }
        "not declared here" => "write an [[overlay.link]] with bought = true into this node's file",
        "not declared there" => "write the same [[overlay.link]] into its file, and let its UDP pass",
        "not known there" => "install this version there",
        _ => "flows use TCP meanwhile",
    };
    format!("paced link to {}: {state}; {fix}\n", link.neighbour)
}

/// Returns the line about the packets of one service.
fn counts_line(counts: &ServiceCountView) -> String {
    let ServiceCountView { kind, dissemination, copies, delivered, late } = counts;
    format!(
        "packets by {kind}, {dissemination}: {copies} copies sent, {delivered} delivered here, {late} late\n"
    )
}

/// Returns the line about a neighbour of an older version.
fn lacks_line(link: &LinkView) -> String {
    match &link.lacks[..] {
        [] => String::new(),
        lacks => format!("older version: {} does not know {}\n", link.neighbour, lacks.join(", ")),
    }
}

/// Returns the line about one leg of a link.
fn leg_line(leg: &LegView) -> String {
    let up = if leg.up { "up" } else { "down" };
    let used = if leg.used { ", used" } else { "" };
    let (rtt, loss) = (leg.rtt_ms, leg.loss_percent);
    format!("  leg {} -> {}: {up}{used}, {rtt:.2} ms, {loss:.2} % lost\n", leg.from, leg.to)
}

fn paths_table(paths: &[PathView]) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "\n{:<20} {:>9}  PATH", "NODE", "COST ms");
    for path in paths {
        if path.path.is_empty() {
            let _ = writeln!(out, "{:<20} {:>9}  none", path.to, "-");
        } else {
            let _ = writeln!(out, "{:<20} {:>9.2}  {}", path.to, path.cost_ms, path.path.join(" -> "));
        }
        path.services.iter().for_each(|service| out += &format!("{:<32}{}", "", service_line(service)));
        path.sessions.iter().for_each(|sessions| out += &format!("{:<32}{}", "", sessions_line(sessions)));
    }
    out
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
    let DatagramsView { received, sent, unknown, forged, replayed, unreadable, .. } = status.datagrams;
    let dropped = unknown + forged + replayed + unreadable;
    let _ = writeln!(
        out,
        "datagrams {sent} sent, {received} received; {dropped} dropped ({forged} forged, {replayed} replayed)"
    );
    if let Some(caught) = &status.caught {
        let _ = writeln!(
            out,
            "packets {} sent ({} in datagrams), {} dropped, {} without a way; {} delivered, {} refused, {} denied by \
             rules, {} failed",
            caught.sent,
            caught.by_datagram,
            caught.dropped,
            caught.without_way,
            caught.delivered,
            caught.refused,
            caught.denied,
            caught.failed
        );
    }
    out += &spread_line(&status.spread);
    status.services.iter().for_each(|service| out += &counts_line(service));
    out += &status.spread.tolerant.line();
    status.groups.iter().for_each(|group| out += &groups::line(group));
    let _ = writeln!(
        out,
        "\n{:<20} {:<5} {:>9} {:>9} {:>7} {:>9} {:>9} {:>5}",
        "NEIGHBOUR", "LINK", "RTT ms", "JITTER ms", "LOSS %", "COST ms", "DATAGRAM", "IDLE"
    );
    for link in &status.links {
        let up = if link.up { "up" } else { "down" };
        let datagram = if link.datagrams { link.datagram_bytes.to_string() } else { "none".to_owned() };
        let _ = writeln!(
            out,
            "{:<20} {up:<5} {:>9.2} {:>9.2} {:>7.2} {:>9.2} {datagram:>9} {:>5}",
            link.neighbour,
            link.rtt_ms,
            link.jitter_ms,
            link.loss_percent,
            link.cost_ms,
            link.idle_connections
        );
        link.legs.iter().for_each(|leg| out += &leg_line(leg));
    }
    status.links.iter().for_each(|link| out += &paced_line(link));
    status.links.iter().for_each(|link| out += &lacks_line(link));
    for view in &status.settings {
        let _ = writeln!(out, "by hand: {}", setting(view));
    }
    out += &paths_table(&status.paths);
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
