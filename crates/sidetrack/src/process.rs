//! Finds the local process behind a connection, for rules that need it.

use serde::{Deserialize, Serialize};
use sidetrack_core::flow::{Flow, Intercept, Process, Protocol};
use sidetrack_sys::conntrack::behind_redirect;
use sidetrack_sys::process as system;
use sidetrack_sys::sockdiag::{SockDiag, SocketOwner};
use sidetrack_sys::sockopt::{self, Ends};
use sidetrack_sys::sync::lock;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

/// Finds the owner of a socket.
pub type Lookup = dyn Fn(ClientSocket) -> Process + Send + Sync;

/// The socket of a program on this host, by its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientSocket {
    /// Its transport protocol.
    pub protocol: Protocol,
    /// Its own address, as we see it.
    pub local: SocketAddr,
    /// The address that it is connected to, or sends to.
    pub remote: SocketAddr,
    /// Our end, if the kernel has redirected the connection. If `local` is then the end of another connection to us, too, the kernel
    /// shows us another port than the socket has.
    pub redirected_to: Option<SocketAddr>,
}

/// How owners of sockets are found.
#[derive(Clone, Default)]
pub enum Owners {
    /// This process searches. It finds processes of its own user, and with CAP_SYS_PTRACE all processes.
    #[default]
    Ourselves,
    /// The keeper searches. It may see all processes of this host.
    Asked(Arc<Lookup>),
    /// Only this process and its descendants are searched, in its network namespace, to which the socket belongs.
    Within(u32, Option<Arc<Mutex<SockDiag>>>),
}

impl fmt::Debug for Owners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ourselves => "Ourselves",
            Self::Asked(_) => "Asked",
            Self::Within(..) => "Within",
        })
    }
}

impl Owners {
    /// Returns the process that opened this flow. Unknown if the flow is from another host, or if the process is
    /// not visible.
    pub fn of(&self, flow: &Flow, ends: Ends) -> Process {
        let remote = match flow.intercept {
            Intercept::Run | Intercept::Redirect => {
                ends.asked.or_else(|| flow.orig_dst.socket_addr()).unwrap_or(ends.ours)
            }
            Intercept::Socks | Intercept::Http | Intercept::Reverse => ends.ours,
            // Their clients are on other hosts.
            Intercept::Tproxy | Intercept::Tunnel | Intercept::Engine | Intercept::Kernel => {
                return Process::default();
            }
        };
        let redirected_to = (flow.intercept == Intercept::Redirect).then_some(ends.ours);
        let local = if matches!(self, Self::Within(..)) { ends.peer } else { flow.client };
        self.socket(ClientSocket { protocol: Protocol::Tcp, local, remote, redirected_to })
    }

    /// Returns the process that sent a datagram from this address to that one. Unknown as for [`Self::of`].
    pub fn of_datagram(&self, client: SocketAddr, asked: SocketAddr) -> Process {
        self.socket(ClientSocket {
            protocol: Protocol::Udp,
            local: client,
            remote: asked,
            redirected_to: None,
        })
    }

    fn socket(&self, socket: ClientSocket) -> Process {
        match (self, socket.protocol) {
            (Self::Ourselves, _) => on_this_host(socket),
            (Self::Asked(lookup), _) => lookup(socket),
            (Self::Within(pid, diag), Protocol::Tcp) => {
                within((*pid, diag.as_deref()), socket.local, socket.remote)
            }
            (Self::Within(pid, _), Protocol::Udp) => {
                here(holder(system::udp_socket(*pid, socket.local, socket.remote), Some(*pid)), || true)
            }
        }
    }

    /// Whether this process itself has sent a datagram from this address to that one.
    pub fn are_we(&self, client: SocketAddr, asked: SocketAddr) -> bool {
        let socket = system::udp_socket(std::process::id(), client, asked);
        socket.is_some_and(|socket| system::is_own_socket(socket.inode))
    }
}

/// Returns the owner of a socket in this network namespace.
pub fn on_this_host(socket: ClientSocket) -> Process {
    let own = std::process::id();
    let owner = match socket.protocol {
        Protocol::Tcp => {
            let owner = |local| system::tcp_socket(own, local, socket.remote);
            owner(socket.local).or_else(|| owner(behind_redirect(socket.redirected_to?, socket.local)?))
        }
        Protocol::Udp => system::udp_socket(own, socket.local, socket.remote),
    };
    here(holder(owner, None), || owner.is_some() || sockopt::is_of_this_host(socket.local.ip()))
}

/// Returns the owner of a socket in any network namespace of this host, including those of containers.
pub fn in_any_network(local: SocketAddr, remote: SocketAddr) -> Process {
    let mut networks = system::in_each_network().into_iter();
    holder(networks.find_map(|pid| system::tcp_socket(pid, local, remote)), None)
}

fn within((root, diag): (u32, Option<&Mutex<SockDiag>>), local: SocketAddr, remote: SocketAddr) -> Process {
    let found = diag.map(|diag| lock(diag).owner(local, remote));
    let owner = match found {
        Some(Ok(owner)) => owner,
        Some(Err(_)) | None => system::tcp_socket(root, local, remote),
    };
    here(holder(owner, Some(root)), || true)
}

/// Returns the process that holds this socket. With `root`, only `root` and its descendants are searched.
fn holder(owner: Option<SocketOwner>, root: Option<u32>) -> Process {
    let Some(owner) = owner else { return Process::default() };
    let pid = (owner.inode != 0).then(|| system::pid_of_socket(owner.inode, root)).flatten();
    let process = pid.map_or_else(Process::default, described);
    // A closed socket keeps its user only on new kernels; others say 0.
    let uid = (owner.inode != 0 || owner.uid != 0).then_some(owner.uid);
    Process { uid: process.uid.or(uid), ..process }
}

/// The process of a client that may be on this host: hidden if it is there, and something of it was not found.
fn here(process: Process, is_here: impl FnOnce() -> bool) -> Process {
    let is_hidden = (process.name.is_none() || process.uid.is_none()) && is_here();
    Process { is_hidden, ..process }
}

/// Returns what is known of a process.
pub fn described(pid: u32) -> Process {
    match system::process_info(pid) {
        Ok(info) => Process { pid: Some(pid), name: Some(info.name), uid: Some(info.uid), is_hidden: false },
        Err(_) => Process { pid: Some(pid), ..Process::default() },
    }
}
