//! Which process holds a port. Best effort, for messages: /proc shows it to the owner of that process and to root.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, SocketAddr};

use crate::process::{ProcessInfo, pid_of_socket, proc_address, process_info};

/// `TCP_LISTEN` of `tcp_states.h`, as /proc writes it.
const LISTEN: &str = "0A";

/// The kind of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// A TCP listener.
    Tcp,
    /// A UDP socket without a fixed peer.
    Udp,
}

impl PortKind {
    const fn tables(self) -> [&'static str; 2] {
        match self {
            Self::Tcp => ["tcp", "tcp6"],
            Self::Udp => ["udp", "udp6"],
        }
    }
}

/// The process that keeps others from `address` in the network namespace of the calling thread; none if there is none or it may
/// not be seen.
pub fn holder(kind: PortKind, address: SocketAddr) -> Option<ProcessInfo> {
    let mut found: Vec<(u8, u64)> =
        kind.tables().iter().flat_map(|table| sockets(kind, table, address)).collect();
    found.sort_unstable();
    let pid = found.into_iter().find_map(|(_, inode)| pid_of_socket(inode, None))?;
    process_info(pid).ok()
}

/// Sockets of a table that overlap with `address`: how far from equal, and the inode.
fn sockets(kind: PortKind, table: &str, address: SocketAddr) -> Vec<(u8, u64)> {
    let Ok(file) = File::open(format!("/proc/thread-self/net/{table}")) else { return Vec::new() };
    let lines = BufReader::new(file).lines().skip(1).map_while(Result::ok);
    lines.filter_map(|line| socket(kind, &line, address)).collect()
}

fn socket(kind: PortKind, line: &str, address: SocketAddr) -> Option<(u8, u64)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (local, remote) = (proc_address(fields.get(1)?)?, proc_address(fields.get(2)?)?);
    let waits = match kind {
        PortKind::Tcp => *fields.get(3)? == LISTEN,
        PortKind::Udp => remote.port() == 0,
    };
    let inode = fields.get(9)?.parse().ok().filter(|inode| *inode != 0)?;
    (waits && local.port() == address.port()).then_some(())?;
    Some((distance(local.ip(), address.ip().to_canonical())?, inode))
}

/// 0 for equal addresses, more for those that only overlap; none for those that do not. An IPv6 wildcard may take IPv4, too.
fn distance(held: IpAddr, wanted: IpAddr) -> Option<u8> {
    match (held, wanted) {
        _ if held == wanted => Some(0),
        _ if held.is_ipv4() == wanted.is_ipv4() && (held.is_unspecified() || wanted.is_unspecified()) => {
            Some(1)
        }
        (IpAddr::V6(any), IpAddr::V4(_)) | (IpAddr::V4(_), IpAddr::V6(any)) if any.is_unspecified() => {
            Some(2)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};

    /// Another test of this process may be starting a child, which holds a copy of every descriptor until it execs.
    fn is_ours(found: Option<ProcessInfo>) -> bool {
        let own = std::process::id();
        found.is_some_and(|found| found.pid == own || found.parent_pid == own)
    }

    #[test]
    fn the_holder_of_a_port_is_found() {
        for any in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"] {
            let (tcp, udp) = (TcpListener::bind(any).unwrap(), UdpSocket::bind(any).unwrap());
            let (tcp, udp) = ((tcp.local_addr().unwrap(), tcp), (udp.local_addr().unwrap(), udp));
            assert!(is_ours(holder(PortKind::Tcp, tcp.0)), "{any}");
            assert!(is_ours(holder(PortKind::Udp, udp.0)), "{any}");
        }
        let wide = TcpListener::bind("0.0.0.0:0").unwrap();
        let narrow = SocketAddr::from(([127, 0, 0, 1], wide.local_addr().unwrap().port()));
        assert!(is_ours(holder(PortKind::Tcp, narrow)));
    }

    #[test]
    fn connections_and_other_addresses_hold_nothing() {
        let address: SocketAddr = "127.0.0.1:80".parse().unwrap();
        let line = |local: &str, remote: &str, state: &str| {
            format!(
                "   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000     0        0 77 1"
            )
        };
        if cfg!(target_endian = "little") {
            let (here, none) = ("0100007F:0050", "00000000:0000");
            assert_eq!(socket(PortKind::Tcp, &line(here, none, "0A"), address), Some((0, 77)));
            assert_eq!(socket(PortKind::Tcp, &line("00000000:0050", none, "0A"), address), Some((1, 77)));
            assert_eq!(socket(PortKind::Tcp, &line(here, "0100007F:1234", "01"), address), None);
            assert_eq!(socket(PortKind::Tcp, &line("0200007F:0050", none, "0A"), address), None);
            assert_eq!(socket(PortKind::Tcp, &line("0100007F:0051", none, "0A"), address), None);
            assert_eq!(socket(PortKind::Udp, &line(here, none, "07"), address), Some((0, 77)));
            assert_eq!(socket(PortKind::Udp, &line(here, "0100007F:1234", "01"), address), None);
        }
        assert_eq!(socket(PortKind::Tcp, "", address), None);
        assert_eq!(socket(PortKind::Tcp, "0: x y 0A", address), None);
    }
}
