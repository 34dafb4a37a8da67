//! The local process behind a connection, for rules that ask.

use sidetrack_core::flow::{Flow, Intercept, Process};
use sidetrack_sys::process as system;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// From a socket's own address and that of its peer to its owner.
pub type Lookup = dyn Fn(SocketAddr, SocketAddr) -> Process + Send + Sync;

/// Who can be asked.
#[derive(Clone, Default)]
pub enum Owners {
    /// We look ourselves: finds the processes of our own user, and all with CAP_SYS_PTRACE.
    #[default]
    Ourselves,
    /// Somebody with the right to see all processes of this host looks: the keeper.
    Asked(Arc<Lookup>),
    /// Only this process and its descendants, in the network namespace it lives in.
    Within(u32),
}

impl fmt::Debug for Owners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ourselves => "Ourselves",
            Self::Asked(_) => "Asked",
            Self::Within(_) => "Within",
        })
    }
}

impl Owners {
    /// Who opened this flow; all unknown if it did not come from this host or cannot be seen. `peer` and `listener` are the
    /// two ends of the client's connection.
    pub fn of(&self, flow: &Flow, peer: SocketAddr, listener: SocketAddr) -> Process {
        let remote = match flow.intercept {
            // The client sees the destination it asked the kernel for.
            Intercept::Run | Intercept::Redirect => flow.orig_dst.socket_addr(),
            Intercept::Socks | Intercept::Http | Intercept::Reverse => Some(listener),
            // Clients of other hosts.
            Intercept::Tproxy | Intercept::Tunnel | Intercept::Engine | Intercept::Kernel => None,
        };
        match (self, remote) {
            (_, None) => Process::default(),
            (Self::Ourselves, Some(remote)) => on_this_host(flow.client, remote),
            (Self::Asked(lookup), Some(remote)) => lookup(flow.client, remote),
            (Self::Within(pid), Some(remote)) => within(*pid, peer, remote),
        }
    }
}

/// The owner of a socket of this network namespace.
pub fn on_this_host(local: SocketAddr, remote: SocketAddr) -> Process {
    holder(system::tcp_socket_inode(std::process::id(), local, remote), None)
}

/// The owner of a socket of whichever network namespace of this host: a container's program, too.
pub fn in_any_network(local: SocketAddr, remote: SocketAddr) -> Process {
    let mut networks = system::in_each_network().into_iter();
    holder(networks.find_map(|pid| system::tcp_socket_inode(pid, local, remote)), None)
}

fn within(root: u32, local: SocketAddr, remote: SocketAddr) -> Process {
    holder(system::tcp_socket_inode(root, local, remote), Some(root))
}

/// Who holds the socket with this inode; only `root` and its descendants are asked if given.
fn holder(inode: Option<u64>, root: Option<u32>) -> Process {
    let pid = inode.and_then(|inode| system::pid_of_socket(inode, root));
    pid.map_or_else(Process::default, described)
}

fn described(pid: u32) -> Process {
    match system::process_info(pid) {
        Ok(info) => Process { pid: Some(pid), name: Some(info.name), uid: Some(info.uid) },
        Err(_) => Process { pid: Some(pid), ..Process::default() },
    }
}
