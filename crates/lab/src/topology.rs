//! Hosts made of network namespaces, joined by veth pairs.
//!
//! A node is an anonymous namespace, held open by a process that waits for the end of its standard input. Nothing has
//! a name in the host's namespace, and no interface is created there, so there is nothing to clean up. When the lab
//! ends in any way, the pipe closes, the holder ends, and the kernel removes the rest.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::launch::{self, Placement};

/// One host: a network namespace and the process that holds it.
#[derive(Debug)]
pub struct Node {
    name: String,
    launcher: PathBuf,
    holder: Child,
    /// Closing it ends the holder.
    _stdin: ChildStdin,
}

/// One end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// IPv4 address, in a /24.
    pub v4: Ipv4Addr,
    /// IPv6 address, in a /64.
    pub v6: Ipv6Addr,
}

/// A veth pair between two nodes with its addresses.
#[derive(Debug, Clone)]
pub struct Link {
    /// Address at the first node.
    pub a: End,
    /// Address at the second node.
    pub b: End,
    /// Interface name, the same at both ends.
    pub interface: String,
}

impl Node {
    /// Makes an empty host whose loopback interface is up.
    ///
    /// # Errors
    /// No right to make a namespace (root is needed), or `unshare` and `ip` are not installed.
    pub fn new(name: &str, launcher: &Path) -> Result<Self> {
        let mut command = launch::command(launcher, &Placement::default(), "unshare");
        command.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut holder = command.spawn().with_context(|| format!("cannot start {}", launcher.display()))?;
        let mut stdin = holder.stdin.take().context("the holder has no standard input")?;
        // `cat` answers only once `unshare` has succeeded, so the echo is the readiness signal.
        let answered = stdin.write_all(b"\n").and_then(|()| {
            let mut echo = [0u8; 1];
            holder.stdout.as_mut().map_or(Ok(()), |out| out.read_exact(&mut echo))
        });
        if answered.is_err() {
            drop(stdin);
            let output = holder.wait_with_output()?;
            bail!(
                "cannot make the namespace of {name}: {}",
                String::from_utf8_lossy(&output.stderr).trim().to_owned()
            );
        }
        let node = Self { name: name.to_owned(), launcher: launcher.to_owned(), holder, _stdin: stdin };
        node.run("ip", &["link", "set", "lo", "up"])?;
        node.sysctl("net/ipv6/conf/all/accept_dad", "0")?;
        node.sysctl("net/ipv6/conf/default/accept_dad", "0")?;
        Ok(node)
    }

    /// Returns the name given at creation.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the lab's own program, which starts others in nodes.
    #[must_use]
    pub fn launcher(&self) -> &Path {
        &self.launcher
    }

    /// Returns the namespace as a path; valid while the node exists.
    #[must_use]
    pub fn netns(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.holder.id()))
    }

    /// Returns the namespace itself.
    ///
    /// # Errors
    /// The node is gone.
    pub fn namespace(&self) -> std::io::Result<sidetrack_sys::netns::NetNs> {
        sidetrack_sys::netns::NetNs::of_process(self.holder.id())
    }

    /// Returns a command that will run in this node; add arguments and spawn it.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        self.command_at(program, &Placement::default())
    }

    /// Returns a command that will run in this node on the CPU and with the nice value of `placement`.
    #[must_use]
    pub fn command_at(&self, program: &str, placement: &Placement) -> Command {
        let placement = Placement { netns: Some(self.netns()), ..placement.clone() };
        launch::command(&self.launcher, &placement, program)
    }

    /// Runs a short command to its end and returns its standard output.
    ///
    /// # Errors It cannot be started or fails; the message has its standard error.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        self.run_with_input(program, arguments, "")
    }

    /// As [`Self::run`], with text on standard input.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_with_input(&self, program: &str, arguments: &[&str], input: &str) -> Result<String> {
        let mut command = self.command(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).or_else(ignore_broken_pipe)?;
        }
        let output = child.wait_with_output()?;
        ensure!(
            output.status.success(),
            "{program} {} in {} failed: {}",
            arguments.join(" "),
            self.name,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `work` on a thread that has entered this node. Sockets made there belong to the node.
    ///
    /// # Errors
    /// The namespace cannot be entered, or `work` failed.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let netns = self.netns();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                launch::join_netns(&netns)?;
                work()
            });
            thread.join().map_err(|_| anyhow!("the thread inside {} panicked", self.name))?
        })
    }

    /// Sets a kernel parameter of this node; `key` is the path below `/proc/sys`.
    ///
    /// # Errors The parameter does not exist in a namespace, or the kernel rejects the value.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = Path::new("/proc/sys").join(key);
        self.enter(|| {
            std::fs::write(&path, value)
                .with_context(|| format!("cannot set {key} = {value} in {}", self.name))
        })
    }

    /// Loads an nft ruleset; it is removed with the node, or by [`Self::delete_table`].
    ///
    /// # Errors
    /// `nft` refuses it.
    pub fn nft(&self, ruleset: &str) -> Result<()> {
        self.run_with_input("nft", &["-f", "-"], ruleset).map(|_| ())
    }

    /// Deletes a table, such as `ip lab`, with all its rules.
    ///
    /// # Errors
    /// There is no such table.
    pub fn delete_table(&self, table: &str) -> Result<()> {
        self.nft(&format!("delete table {table}\n"))
    }

    /// Returns true if a socket in this node listens on TCP `port`, on any address and family.
    ///
    /// # Errors
    /// The socket table cannot be read.
    pub fn listens_on(&self, port: u16) -> Result<bool> {
        self.enter(|| {
            let v4 = std::fs::read_to_string("/proc/thread-self/net/tcp")?;
            let v6 = std::fs::read_to_string("/proc/thread-self/net/tcp6").unwrap_or_default();
            Ok(is_listening(&v4, port) || is_listening(&v6, port))
        })
    }

    /// Returns true if a socket in the node takes datagrams at this port.
    ///
    /// # Errors
    /// The node's tables cannot be read.
    pub fn takes_datagrams(&self, port: u16) -> Result<bool> {
        self.enter(|| {
            let v4 = std::fs::read_to_string("/proc/thread-self/net/udp")?;
            let v6 = std::fs::read_to_string("/proc/thread-self/net/udp6").unwrap_or_default();
            // proc_net_udp has the columns of proc_net_tcp(5): the second one is the local address.
            let suffix = format!(":{port:04X}");
            let is_bound =
                |line: &str| line.split_whitespace().nth(1).is_some_and(|address| address.ends_with(&suffix));
            Ok(v4.lines().chain(v6.lines()).any(is_bound))
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Joins two nodes; `subnet` (1 to 254) numbers the link: 10.77.SUBNET.0/24 and fd77:SUBNET::/64, `a` gets .1.
///
/// # Errors
/// `ip` refuses, for example because the same link exists already.
pub fn link(a: &Node, b: &Node, subnet: u8) -> Result<Link> {
    let interface = format!("link{subnet}");
    veth(a, &interface, b, &interface)?;
    address(a, b, &interface, subnet)
}

/// Makes a veth pair: `name_a` in `a`, `name_b` in `b`, both without address and down.
///
/// # Errors
/// `ip` refuses.
pub fn veth(a: &Node, name_a: &str, b: &Node, name_b: &str) -> Result<()> {
    let (pid_a, pid_b) = (a.holder.id().to_string(), b.holder.id().to_string());
    let pair = ["link", "add", name_a, "netns", &pid_a, "type", "veth", "peer", "name", name_b];
    a.run("ip", &[&pair[..], &["netns", &pid_b]].concat()).map(|_| ())
}

/// As [`link`], with one queue in each direction, as one AF_XDP socket needs. Returns the interface's name at both
/// ends.
///
/// # Errors
/// As [`link`].
pub fn one_queue_link(a: &Node, b: &Node, subnet: u8) -> Result<String> {
    let interface = format!("link{subnet}");
    let (pid_a, pid_b) = (a.holder.id().to_string(), b.holder.id().to_string());
    let queues = ["numtxqueues", "1", "numrxqueues", "1"];
    let own = ["link", "add", &interface, "netns", &pid_a];
    let other = ["type", "veth", "peer", "name", &interface, "netns", &pid_b];
    a.run("ip", &[&own[..], &queues, &other, &queues].concat())?;
    address(a, b, &interface, subnet)?;
    Ok(interface)
}

/// Gives the interfaces `interface` of two nodes the addresses of [`link`] and brings them up.
///
/// # Errors
/// `ip` refuses.
pub fn address(a: &Node, b: &Node, interface: &str, subnet: u8) -> Result<Link> {
    let end = |host: u8| End {
        v4: Ipv4Addr::new(10, 77, subnet, host),
        v6: Ipv6Addr::new(0xfd77, subnet.into(), 0, 0, 0, 0, 0, host.into()),
    };
    let link = Link { a: end(1), b: end(2), interface: interface.to_owned() };
    for (node, end) in [(a, link.a), (b, link.b)] {
        let (v4, v6) = (format!("{}/24", end.v4), format!("{}/64", end.v6));
        node.run("ip", &["addr", "add", &v4, "dev", interface])?;
        node.run("ip", &["addr", "add", &v6, "dev", interface, "nodad"])?;
        node.run("ip", &["link", "set", interface, "up"])?;
    }
    Ok(link)
}

/// Adds a default route, of the family of `via`.
///
/// # Errors
/// `ip` refuses.
pub fn default_route(node: &Node, via: IpAddr) -> Result<()> {
    let family = if via.is_ipv4() { "-4" } else { "-6" };
    node.run("ip", &[family, "route", "add", "default", "via", &via.to_string()]).map(|_| ())
}

fn ignore_broken_pipe(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) }
}

/// Searches the text of `/proc/net/tcp` or `tcp6` for `port` in state LISTEN (0A).
fn is_listening(table: &str, port: u16) -> bool {
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let local = fields.next().and_then(|address| address.rsplit(':').next());
        local.and_then(|hex| u16::from_str_radix(hex, 16).ok()) == Some(port) && fields.nth(1) == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::is_listening;

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue\n   \
        0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n   \
        1: 0100007F:0050 0100007F:C350 01 00000000:00000000\n";

    #[test]
    fn a_listener_is_told_from_a_connection() {
        assert!(is_listening(TABLE, 8080));
        assert!(!is_listening(TABLE, 80), "port 80 is connected, not listening");
        assert!(!is_listening(TABLE, 50000), "the remote port is not ours");
    }
}
