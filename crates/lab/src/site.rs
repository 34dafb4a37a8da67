//! The network in which relays are compared: client, proxy and server, a link between each pair, and a real nginx as
//! the origin.
//!
//! ```text
//!   client --1-- proxy --2-- server        the client's way to the server's address on link 2 leads
//!     |                        |           through the proxy; link 3 is the direct way
//!     +-----------3------------+
//! ```
//! Client and server share the first CPU; the proxy has the second alone. The proxy forwards no packets unless a peer
//! needs it ([`Forwarding`]). So everything that reaches the origin has passed a program, and a redirection that does
//! not work is a failure, not a very fast row.

use std::cell::{Cell, OnceCell};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result};

use crate::launch::{self, Placement};
use crate::link::{Conditions, Network, Wire};
use crate::load::{Generator, Spec};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{self, Link, Node};

/// Port of the origin.
pub const ORIGIN_PORT: u16 = 80;
/// First of the further ports of the origin, see [`Site::use_origin_of_row`].
const FIRST_ROW_PORT: u16 = 8001;
/// How many of them there are.
const ROW_PORTS: u16 = 64;
/// Port of the server's sshd, if a test starts one.
pub const SSH_PORT: u16 = 22;
/// The origin's name, which only the proxy knows.
pub const ORIGIN_NAME: &str = "origin.lab";
/// The origin's name with an IPv6 address only.
pub const ORIGIN_NAME_V6: &str = "origin6.lab";
/// The file for small answers: 130 bytes.
pub const SMALL_FILE: &str = "/small";
/// The file for bulk transfers: 1 GiB of holes on a memory file system.
pub const BIG_FILE: &str = "/big";

const SMALL_BYTES: usize = 130;
const BIG_BYTES: u64 = 1 << 30;
/// Nice value of all measured programs.
const NICE: i32 = -19;

/// What our program does with the records of its flows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Records {
    /// No lines; the latest flows are kept, as with the default of `recent`. For all rows except those about records.
    #[default]
    Recent,
    /// No lines, and no flow is kept (`to = "none"`, `recent = 0`).
    Off,
    /// A line for each flow in a file on disk, and the latest flows are kept.
    File,
}

/// Client, proxy, server and origin, ready for use.
#[derive(Debug)]
pub struct Site {
    origin: Service,
    origin_port: Cell<u16>,
    records: Cell<Records>,
    on_disk: OnceCell<Scratch>,
    /// The node that sends the load.
    pub client: Node,
    /// The node of the measured program.
    pub proxy: Node,
    /// The node of the origin.
    pub server: Node,
    /// Link 1, `a` is the client.
    pub client_proxy: Link,
    /// Link 2, `a` is the proxy.
    pub proxy_server: Link,
    /// Link 3, `a` is the client.
    pub client_server: Link,
    /// Scratch space on a memory file system, removed with the site.
    pub directory: Scratch,
    /// The lab's own program.
    pub launcher: PathBuf,
}

impl Site {
    /// Builds nodes and links and starts the origin.
    ///
    /// # Errors Not root, or `ip`, `unshare` or `nginx` is missing; the message names it.
    pub fn new() -> Result<Self> {
        Self::joined(&mut topology::link)
    }

    /// As [`Self::new`], with emulated links in the order of their numbers.
    ///
    /// # Errors As [`Self::new`], or this machine cannot make such links.
    pub fn emulated(network: &Network) -> Result<(Self, Vec<Wire>)> {
        let mut wires = Vec::new();
        let site = Self::joined(&mut |a, b, subnet| {
            let wire = network.join(a, b, subnet, [Conditions::default(); 2])?;
            let link = wire.link.clone();
            wires.push(wire);
            Ok(link)
        })?;
        Ok((site, wires))
    }

    fn joined(join: &mut dyn FnMut(&Node, &Node, u8) -> Result<Link>) -> Result<Self> {
        let launcher = launch::launcher()?;
        let directory = Scratch::new()?;
        let client = Node::new("client", &launcher)?;
        let proxy = Node::new("proxy", &launcher)?;
        let server = Node::new("server", &launcher)?;
        let client_proxy = join(&client, &proxy, 1)?;
        let proxy_server = join(&proxy, &server, 2)?;
        let client_server = join(&client, &server, 3)?;
        for node in [&client, &proxy, &server] {
            tune(node)?;
        }
        // A new namespace may inherit forwarding from the host.
        drop(Forwarding { node: &proxy });
        route(&client, 2, client_proxy.b)?;
        route(&server, 1, proxy_server.a)?;
        let hosts = directory.path().join("hosts");
        let (v4, v6) = (proxy_server.b.v4, proxy_server.b.v6);
        std::fs::write(&hosts, format!("127.0.0.1 localhost\n{v4} {ORIGIN_NAME}\n{v6} {ORIGIN_NAME_V6}\n"))?;
        let origin = start_origin(&server, &directory)?;
        let site = Self {
            origin,
            origin_port: Cell::new(ORIGIN_PORT),
            records: Cell::default(),
            on_disk: OnceCell::new(),
            client,
            proxy,
            server,
            client_proxy,
            proxy_server,
            client_server,
            directory,
            launcher,
        };
        Ok(site)
    }

    /// Gives the origin a port that only row number `row` of a table uses.
    ///
    /// A relay and a masquerading kernel reach the server from the same address, with different clocks and sequence
    /// numbers. With one port for all rows, a row would meet TIME_WAIT sockets of the row before. The server would
    /// refuse its SYNs, and the kernel would retransmit them (RFC 6191): a cost that the row did not cause.
    pub fn use_origin_of_row(&self, row: usize) {
        let offset = u16::try_from(row).unwrap_or(0) % ROW_PORTS;
        self.origin_port.set(FIRST_ROW_PORT + offset);
    }

    /// Runs `start`. Sidetrack processes that it starts handle records as `records` says.
    pub fn with_records<T>(&self, records: Records, start: impl FnOnce() -> T) -> T {
        let before = self.records.replace(records);
        let started = start();
        self.records.set(before);
        started
    }

    /// Returns the table `[record]` for a Sidetrack process that starts now. It starts with a new file for lines.
    ///
    /// # Errors
    /// There is no folder for the file.
    pub fn record_table(&self) -> Result<String> {
        let keys = match self.records.get() {
            Records::Recent => "to = \"none\"".to_owned(),
            Records::Off => "to = \"none\"\nrecent = 0".to_owned(),
            Records::File => {
                if self.on_disk.get().is_none() {
                    let _ = self.on_disk.set(Scratch::on_disk()?);
                }
                let folder = self.on_disk.get().context("the folder was made just now")?;
                let file = folder.path().join("records.jsonl");
                // The file does not exist before the first program starts.
                let _ = std::fs::remove_file(&file);
                format!("to = \"{}\"", file.display())
            }
        };
        Ok(format!("[record]\n{keys}\n"))
    }

    /// Returns the origin's address as the proxy reaches it.
    #[must_use]
    pub fn origin(&self) -> SocketAddr {
        (self.proxy_server.b.v4, self.origin_port.get()).into()
    }

    /// Returns the origin's address over the direct link.
    #[must_use]
    pub fn origin_direct(&self) -> SocketAddr {
        (self.client_server.b.v4, self.origin_port.get()).into()
    }

    /// Returns an address of the proxy as the client reaches it.
    #[must_use]
    pub fn proxy_address(&self, port: u16) -> SocketAddr {
        (self.client_proxy.b.v4, port).into()
    }

    /// Returns the placement of clients: the first CPU.
    #[must_use]
    pub fn client_placement(&self) -> Placement {
        Placement { netns: None, cpu: Some(0), nice: Some(NICE) }
    }

    /// Returns the placement of proxies: the second CPU.
    #[must_use]
    pub fn proxy_placement(&self) -> Placement {
        Placement { netns: None, cpu: Some(proxy_cpu()), nice: Some(NICE) }
    }

    /// Returns a command in the proxy's node and placement, where the origin's names resolve.
    #[must_use]
    pub fn proxy_command(&self, program: &str) -> Command {
        const WITH_HOSTS: &str = "mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"";
        let mut command = self.proxy.command_at("unshare", &self.proxy_placement());
        command.args(["--mount", "--", "sh", "-c", WITH_HOSTS, "-"]).arg(self.directory.path().join("hosts"));
        command.arg(program);
        command
    }

    /// Starts a load generator in the client.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn generate(&self, spec: &Spec) -> Result<Generator> {
        let program = self.launcher.to_str().context("the path of sidetrack-lab is not UTF-8")?;
        Generator::start(self.client.command_at(program, &self.client_placement()), spec)
    }

    /// Returns true if the origin still runs; a figure without it is invalid.
    pub fn origin_is_running(&mut self) -> bool {
        self.origin.is_running()
    }
}

/// Makes the proxy's node forward packets while it exists.
#[derive(Debug)]
pub struct Forwarding<'s> {
    node: &'s Node,
}

impl<'s> Forwarding<'s> {
    const KEYS: [&'static str; 2] = ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"];

    /// Switches it on, for both families.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn in_proxy(site: &'s Site) -> Result<Self> {
        Self::KEYS.iter().try_for_each(|key| site.proxy.sysctl(key, "1"))?;
        Ok(Self { node: &site.proxy })
    }
}

impl Drop for Forwarding<'_> {
    fn drop(&mut self) {
        for key in Self::KEYS {
            let _ = self.node.sysctl(key, "0");
        }
    }
}

/// Returns the CPU of proxies.
pub(crate) fn proxy_cpu() -> usize {
    available_parallelism().map_or(0, |count| count.get() - 1).min(1)
}

/// Sets the kernel parameters for all figures: enough ports, long queues, Fast Open in both directions.
fn tune(node: &Node) -> Result<()> {
    for (key, value) in [
        ("net/ipv4/ip_local_port_range", "1024 65535"),
        // Without this, programs without SO_REUSEADDR could not listen on a port from which an earlier program
        // dialled.
        ("net/ipv4/ip_local_reserved_ports", "1070-1099,9080,12345,42000-42099"),
        ("net/ipv4/tcp_tw_reuse", "1"),
        ("net/ipv4/tcp_fastopen", "3"),
        ("net/ipv4/tcp_max_syn_backlog", "8192"),
        ("net/core/somaxconn", "8192"),
        ("net/ipv4/conf/all/rp_filter", "0"),
    ] {
        node.sysctl(key, value)?;
    }
    // Without this, entries of ended connections would fill the conntrack table within seconds.
    let _ = node.sysctl("net/netfilter/nf_conntrack_tcp_timeout_time_wait", "1");
    Ok(())
}

fn route(node: &Node, subnet: u8, via: topology::End) -> Result<()> {
    for (network, gateway) in [
        (format!("10.77.{subnet}.0/24"), IpAddr::V4(via.v4)),
        (format!("fd77:{subnet}::/64"), IpAddr::V6(via.v6)),
    ] {
        node.run("ip", &["route", "add", &network, "via", &gateway.to_string()])?;
    }
    Ok(())
}

fn start_origin(server: &Node, directory: &Scratch) -> Result<Service> {
    let root = directory.path().join("www");
    std::fs::create_dir(&root)?;
    std::fs::write(root.join(SMALL_FILE.trim_start_matches('/')), "x".repeat(SMALL_BYTES))?;
    std::fs::File::create(root.join(BIG_FILE.trim_start_matches('/')))?.set_len(BIG_BYTES)?;
    let config = directory.path().join("origin.conf");
    std::fs::write(&config, origin_config(&directory.path().display().to_string()))?;
    launch::find_program("nginx").context("the origin needs nginx; bench/peers.sh installs it")?;
    let placement = Placement { netns: None, cpu: Some(0), nice: Some(NICE) };
    let mut command = server.command_at("nginx", &placement);
    command.arg("-e").arg("stderr").arg("-c").arg(&config);
    let mut origin = Service::start("origin", command, directory.path())?;
    origin.wait_listening(server, ORIGIN_PORT)?;
    Ok(origin)
}

fn origin_config(directory: &str) -> String {
    let ports = (FIRST_ROW_PORT..FIRST_ROW_PORT + ROW_PORTS).chain([ORIGIN_PORT]);
    let listen: String = ports
        .map(|port| {
            let options = "backlog=8192 fastopen=256";
            format!("    listen {port} {options};\n    listen [::]:{port} {options};\n")
        })
        .collect();
    format!(
        "daemon off; user root; worker_processes 1; worker_rlimit_nofile 65536;
pid {directory}/origin.pid; error_log {directory}/origin-error.log warn;
events {{ worker_connections 16000; multi_accept on; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000000; keepalive_timeout 3600;
  open_file_cache max=16 inactive=1h; default_type application/octet-stream;
  client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi; uwsgi_temp_path {directory}/uwsgi; scgi_temp_path {directory}/scgi;
  server {{
{listen}    root {directory}/www;
  }}
}}
"
    )
}
