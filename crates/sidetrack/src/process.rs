//! Finds the local process behind a connection, for rules that need it.

use sidetrack_core::flow::{Flow, Intercept, Process, Protocol};
use sidetrack_sys::process as system;
use sidetrack_sys::sockdiag::SockDiag;
use sidetrack_sys::sync::lock;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

/// Returns the owner of a socket from its protocol, its own address and its peer's address.
pub type Lookup = dyn Fn(Protocol, SocketAddr, SocketAddr) -> Process + Send + Sync;

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
    /// not visible. `peer` and `listener` are the two ends of the client's connection.
    pub fn of(&self, flow: &Flow, peer: SocketAddr, listener: SocketAddr) -> Process {
        let remote = match flow.intercept {
            // The client's socket has the original destination as its peer. If that stands for a name, the caller has the address.
            Intercept::Run => Some(flow.orig_dst.socket_addr().unwrap_or(listener)),
            Intercept::Redirect => flow.orig_dst.socket_addr(),
            Intercept::Socks | Intercept::Http | Intercept::Reverse => Some(listener),
            // Their clients are on other hosts.
            Intercept::Tproxy | Intercept::Tunnel | Intercept::Engine | Intercept::Kernel => None,
        };
        match (self, remote) {
            (_, None) => Process::default(),
            (Self::Ourselves, Some(remote)) => on_this_host(Protocol::Tcp, flow.client, remote),
            (Self::Asked(lookup), Some(remote)) => lookup(Protocol::Tcp, flow.client, remote),
            (Self::Within(pid, diag), Some(remote)) => within((*pid, diag.as_deref()), peer, remote),
        }
    }
}

impl Owners {
    /// Returns the process that sent a datagram from this address to that one. Unknown as for [`Self::of`].
    pub fn of_datagram(&self, client: SocketAddr, asked: SocketAddr) -> Process {
        match self {
            Self::Within(pid, _) => holder(system::udp_socket_inode(*pid, client, asked), Some(*pid)),
            Self::Ourselves => on_this_host(Protocol::Udp, client, asked),
            Self::Asked(lookup) => lookup(Protocol::Udp, client, asked),
        }
    }
}

impl Owners {
    /// Whether this process itself has sent a datagram from this address to that one.
    pub fn are_we(&self, client: SocketAddr, asked: SocketAddr) -> bool {
        system::udp_socket_inode(std::process::id(), client, asked).is_some_and(system::is_own_socket)
    }
}

/// Returns the owner of a socket in this network namespace.
pub fn on_this_host(protocol: Protocol, local: SocketAddr, remote: SocketAddr) -> Process {
    let own = std::process::id();
    let inode = match protocol {
        Protocol::Tcp => system::tcp_socket_inode(own, local, remote),
        Protocol::Udp => system::udp_socket_inode(own, local, remote),
    };
    holder(inode, None)
}

/// Returns the owner of a socket in any network namespace of this host, including those of containers.
pub fn in_any_network(local: SocketAddr, remote: SocketAddr) -> Process {
    let mut networks = system::in_each_network().into_iter();
    holder(networks.find_map(|pid| system::tcp_socket_inode(pid, local, remote)), None)
}

fn within((root, diag): (u32, Option<&Mutex<SockDiag>>), local: SocketAddr, remote: SocketAddr) -> Process {
    let found = diag.map(|diag| lock(diag).owner(local, remote));
    let inode = match found {
        Some(Ok(owner)) => owner.map(|owner| owner.inode).filter(|inode| *inode != 0),
        Some(Err(_)) | None => system::tcp_socket_inode(root, local, remote),
    };
    holder(inode, Some(root))
}

/// Returns the process that holds the socket with this inode. With `root`, only `root` and its descendants are
/// searched.
fn holder(inode: Option<u64>, root: Option<u32>) -> Process {
    let pid = inode.and_then(|inode| system::pid_of_socket(inode, root));
    pid.map_or_else(Process::default, described)
}

/// Returns what is known of a process.
pub fn described(pid: u32) -> Process {
    match system::process_info(pid) {
        Ok(info) => Process { pid: Some(pid), name: Some(info.name), uid: Some(info.uid) },
        Err(_) => Process { pid: Some(pid), ..Process::default() },
    }
}
