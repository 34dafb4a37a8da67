//! Sidetrack in every role: `sidetrack up -c FILE` with a generated configuration.

use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::anyhow;

use super::{RELAY_PORT, Running, Start, Unavailable, relay, running};
use crate::launch;
use crate::load::Via;
use crate::service::Service;
use crate::site::{self, Forwarding, Site};
use crate::topology::Node;

const REDIRECT_PORT: u16 = 42090;
/// How long a hop waits for initial data, in milliseconds; HTTP clients send at once.
pub(super) const INITIAL_DATA_WAIT_MS: u32 = 50;
/// Time limit for the firewall rules: they come after the listener. It is a hundred times what that takes.
const STEERS_WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A port that leads to the origin through user space, even if the kernel could carry it alone.
pub fn reverse(site: &Site) -> Start<'_> {
    reverse_with(site, "")
}

/// As [`reverse`], with further keys of the listener.
pub fn reverse_with<'s>(site: &'s Site, keys: &str) -> Start<'s> {
    let rule = rule("carrier = \"direct\"\nkernel = \"never\"");
    let config = format!("{}{keys}{rule}", reverse_listener(site));
    let service = start(site, &site.proxy, "reverse", &config, RELAY_PORT)?;
    Ok(relay(site, service))
}

/// A UDP port that leads to the origin.
pub fn datagrams(site: &Site) -> Start<'_> {
    let listener = format!("{}protocol = \"udp\"\n", reverse_listener(site));
    let limits = "[limits]\nmax_associations = 20000\nudp_idle_timeout_ms = 60000\n";
    let config = format!(
        "{listener}{limits}{}",
        rule("match = { protocol = \"udp\" }\ncarrier = \"direct\"\nkernel = \"never\"")
    );
    let mut service = spawn(site, &site.proxy, "datagrams", &config)?;
    service.wait_bound(&site.proxy, RELAY_PORT)?;
    Ok(relay(site, service))
}

/// A UDP port beside the client that leads to the origin by this carrier. `tables` is further configuration for it.
pub(super) fn near_datagrams(site: &Site, carrier: &str, tables: &str) -> Result<Service, Unavailable> {
    let listener = format!(
        "[[listen]]\nkind = \"reverse\"\naddress = \"{}\"\nto = \"{}\"\nprotocol = \"udp\"\n",
        near_address(),
        site.origin()
    );
    let rule = rule(&format!("match = {{ protocol = \"udp\" }}\ncarrier = \"{carrier}\""));
    let mut service = spawn(site, &site.client, "near", &format!("{listener}{tables}{rule}"))?;
    service.wait_bound(&site.client, RELAY_PORT)?;
    Ok(service)
}

fn near_address() -> SocketAddr {
    ([127, 0, 0, 1], RELAY_PORT).into()
}

/// The client dials the port of [`near_datagrams`].
pub(super) fn by_near(site: &Site, services: Vec<Service>) -> Running<'_> {
    running(site, services, (near_address(), Via::Plain))
}

/// The same port with a rule that needs no bytes, function or proxy: the kernel forwards and Sidetrack records.
pub fn kernel_path(site: &Site) -> Start<'_> {
    let config = format!("{}{}", reverse_listener(site), rule("carrier = \"direct\"\nkernel = \"auto\""));
    // For the kernel path, the operator has to switch packet forwarding on. Otherwise Sidetrack keeps the flows in
    // user space.
    let forwarding = Forwarding::in_proxy(site)?;
    let service = start(site, &site.proxy, "kernel", &config, RELAY_PORT)?;
    require_rule(&site.proxy, "dnat")?;
    let mut running = relay(site, service);
    running._forwarding = Some(forwarding);
    Ok(running)
}

/// A port that leads to the origin packet by packet, without sockets. `keys` follow those of `engine`.
pub fn engine<'s>(site: &'s Site, io: &str, keys: &str) -> Start<'s> {
    let (service, _) = packet_engine(site, (io, keys), site.origin(), &rule("carrier = \"direct\""))?;
    Ok(relay(site, service))
}

/// Starts the packet engine in front of a server; returns its address. `tables` is the rest of its configuration.
///
/// # Errors Our program is absent or does not start, or no answer comes.
pub fn packet_engine(
    site: &Site,
    (io, keys): (&str, &str),
    server: SocketAddr,
    tables: &str,
) -> Result<(Service, SocketAddr), Unavailable> {
    let address = site.proxy_address(RELAY_PORT);
    let interfaces = format!("\"{}\", \"{}\"", site.client_proxy.interface, site.proxy_server.interface);
    let config = format!(
        "[[listen]]\nkind = \"engine\"\naddress = \"{address}\"\ninterfaces = [{interfaces}]\nto = \"{server}\"\n\
         engine = {{ io = \"{io}\", sources = [\"{}\"], source_ports = \"20000-65535\"{keys} }}\n{tables}",
        site.proxy_server.a.v4
    );
    let mut service = spawn(site, &site.proxy, "engine", &config)?;
    // It has no listening socket: it is ready when a connection succeeds.
    let began = Instant::now();
    while !site.client.enter(|| Ok(TcpStream::connect_timeout(&address, LOOK_AGAIN * 100).is_ok()))? {
        if began.elapsed() > STEERS_WITHIN || !service.is_running() {
            return Err(Unavailable::Failed(anyhow!("the packet engine does not answer: {}", service.log())));
        }
    }
    Ok((service, address))
}

/// A SOCKS listener of both versions and all dialects.
pub fn socks(site: &Site, port: u16) -> Result<Service, Unavailable> {
    let address = site.proxy_address(port);
    let listener = format!("[[listen]]\nkind = \"socks\"\naddress = \"{address}\"\n");
    let config = format!("{listener}{}", rule("carrier = \"direct\""));
    start(site, &site.proxy, "socks", &config, port)
}

/// A redirector of connections to the origin, through `hops` such as `socks6://10.77.1.2:1090?tfo=true`.
///
/// # Errors
/// Our program is absent or does not start.
pub fn redirector(site: &Site, hops: &[String]) -> Result<Service, Unavailable> {
    // If the first bytes may travel with the request, the redirector waits for them.
    let waits = hops.iter().any(|hop| hop.starts_with("socks6") || hop.contains('?'));
    redirect(site, hops, if waits { INITIAL_DATA_WAIT_MS } else { 0 }, "")
}

/// As [`redirector`], but the client's bytes never travel with a request.
///
/// # Errors
/// As [`redirector`].
pub fn plain_redirector(site: &Site, hops: &[String]) -> Result<Service, Unavailable> {
    redirect(site, hops, 0, "")
}

/// A redirector whose rule waits `wait_ms` for first bytes; `tables` is further configuration for its carrier, in
/// TOML.
pub(super) fn redirect(
    site: &Site,
    hops: &[String],
    wait_ms: u32,
    tables: &str,
) -> Result<Service, Unavailable> {
    let wait = format!("\ninitial_data_wait_ms = {wait_ms}");
    let carrier: Vec<String> = hops.iter().map(|hop| format!("\"{hop}\"")).collect();
    let rule = rule(&format!("carrier = [{}]{wait}", carrier.join(", ")));
    redirect_by(site, tables, &rule)
}

/// A redirector on the path: the proxy's node catches the client's connections to the origin, and dials the origin
/// itself.
///
/// # Errors
/// As [`redirector`].
pub(super) fn redirect_on_the_way(site: &Site) -> Result<Service, Unavailable> {
    let origin = site.origin();
    let config = format!(
        "[[listen]]\nkind = \"redirect\"\naddress = \"0.0.0.0:{REDIRECT_PORT}\"\nlocal = false\nforwarded = true\ndst = \"{}\"\n\
         ports = {}\n{}",
        origin.ip(),
        origin.port(),
        rule("carrier = \"direct\"\nkernel = \"never\"")
    );
    let service = start(site, &site.proxy, "redirect", &config, REDIRECT_PORT)?;
    require_rule(&site.proxy, "redirect")?;
    Ok(service)
}

/// A listener for HTTP; the client uses CONNECT.
pub(super) fn http(site: &Site, port: u16) -> Result<Service, Unavailable> {
    let address = site.proxy_address(port);
    let listener = format!("[[listen]]\nkind = \"http\"\naddress = \"{address}\"\n");
    start(site, &site.proxy, "http", &format!("{listener}{}", rule("carrier = \"direct\"")), port)
}

/// A redirector with this rule.
fn redirect_by(site: &Site, tables: &str, rule: &str) -> Result<Service, Unavailable> {
    let server = &site.proxy_server.b;
    let listener = format!(
        "[[listen]]\nkind = \"redirect\"\naddress = [\"127.0.0.1:{REDIRECT_PORT}\", \"[::1]:{REDIRECT_PORT}\"]\n\
         local = true\ndst = [\"{}\", \"{}\"]\nports = [{}, {}]\n",
        server.v4,
        server.v6,
        site::SSH_PORT,
        site.origin().port()
    );
    let config = format!("{listener}{tables}{rule}");
    let service = start(site, &site.client, "redirect", &config, REDIRECT_PORT)?;
    require_rule(&site.client, "redirect")?;
    Ok(service)
}

fn reverse_listener(site: &Site) -> String {
    let (address, origin) = (site.proxy_address(RELAY_PORT), site.origin());
    format!("[[listen]]\nkind = \"reverse\"\naddress = \"{address}\"\nto = \"{origin}\"\n")
}

pub(crate) fn rule(keys: &str) -> String {
    format!("[[rule]]\nname = \"all\"\n{keys}\n")
}

/// Waits until nft on a node has our program's rule with this word: before that, flows bypass it.
fn require_rule(node: &Node, word: &str) -> Result<(), Unavailable> {
    let began = Instant::now();
    while began.elapsed() < STEERS_WITHIN {
        if node.run("nft", &["list", "ruleset"])?.contains(word) {
            return Ok(());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    Err(Unavailable::Failed(anyhow!("sidetrack has put no {word} into nft: the flows would pass it by")))
}

/// Returns the path of our program: `SIDETRACK_BIN`, or the one built beside the lab.
///
/// # Errors It does not exist, or is another program.
pub fn program() -> Result<PathBuf, Unavailable> {
    let named = std::env::var_os("SIDETRACK_BIN").map(PathBuf::from);
    let beside = || launch::sibling_program(&std::env::current_exe().ok()?, "sidetrack");
    let absent =
        |what: &str| Unavailable::Absent(format!("{what}; cargo build --release, or set SIDETRACK_BIN"));
    let program = named.or_else(beside).filter(|path| path.is_file());
    let program = program.ok_or_else(|| absent("sidetrack is not built beside sidetrack-lab"))?;
    let version = std::process::Command::new(&program).arg("--version").output()?;
    if version.stdout.starts_with(b"sidetrack ") {
        return Ok(program);
    }
    Err(absent(&format!("{} does not say that it is sidetrack", program.display())))
}

/// Returns [`program`] if it has the sub-command `run`.
///
/// # Errors
/// As [`program`], or this build has no `run`.
pub fn program_with_run() -> Result<PathBuf, Unavailable> {
    let program = program()?;
    if std::process::Command::new(&program).args(["help", "run"]).output()?.status.success() {
        return Ok(program);
    }
    Err(Unavailable::Absent(format!("{} has no sub-command run", program.display())))
}

pub(crate) fn start(
    site: &Site,
    node: &Node,
    role: &str,
    config: &str,
    port: u16,
) -> Result<Service, Unavailable> {
    let mut service = spawn(site, node, role, config)?;
    service.wait_listening(node, port)?;
    Ok(service)
}

/// Starts it without waiting.
pub(super) fn spawn(site: &Site, node: &Node, role: &str, config: &str) -> Result<Service, Unavailable> {
    let program = program()?;
    let directory = site.directory.path();
    let path = directory.join(format!("sidetrack-{role}.toml"));
    // One worker and no log, like the other programs, unless the row is about records.
    let head = format!(
        "version = 1\nworkers = 1\ndefault = \"deny\"\n[admin]\nsocket = \"none\"\n{}",
        site.record_table()?
    );
    std::fs::write(&path, format!("{head}{config}"))?;
    let program = program.to_string_lossy();
    let is_proxy = node.name() == site.proxy.name();
    let mut command = if is_proxy {
        site.proxy_command(&program)
    } else {
        node.command_at(&program, &site.proxy_placement())
    };
    command.args(["up", "-c"]).arg(&path);
    Ok(Service::start(&format!("sidetrack-{role}"), command, directory)?)
}
