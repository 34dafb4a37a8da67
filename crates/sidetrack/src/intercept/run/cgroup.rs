//! The command in the host's network: a control group, an nft table for its sockets, listeners on loopback.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};

use crate::intercept::hold;
use sidetrack_sys::caps;
use sidetrack_sys::cgroup::{Hierarchy, Leaf};
use sidetrack_sys::connects::Questions;
use sidetrack_sys::exec::{ChildProcess, PrivateFiles, Program, spawn_in_cgroup};
use sidetrack_sys::netlink;
use sidetrack_sys::nfqueue::{HOLD_NUMBERS, HoldSockets};
use sidetrack_sys::nft::{
    Chain, ChainKind, Family, Field, HoldQueue, Hook, Lifetime, OwnError, OwnedTable, RTN_LOCAL, Rule,
    Statement, TCP, Table, Value, Verdict, priority,
};
use sidetrack_sys::sockopt::{self, ListenOptions};
use sidetrack_sys::udp;
use sidetrack_sys::undo::{Action, Guard};

use super::RunError;
use super::cgroup_datagrams::{self, Datagrams};
use crate::dns;

/// Attempts to find a port that is free on both 127.0.0.1 and ::1, and a free address in 127.18.53.0/24.
const ATTEMPTS: u8 = 100;

/// What was installed on the host for one command.
#[derive(Debug)]
pub(super) struct CgroupNetwork {
    leaf: Leaf,
    table: Option<OwnedTable>,
    /// Does the work of [`CgroupNetwork::remove`] if this process is killed.
    guard: Option<Guard>,
}

/// The sockets that serve the command.
pub(super) struct Sockets {
    pub(super) listeners: Vec<TcpListener>,
    pub(super) datagrams: Datagrams,
    pub(super) dns: UdpSocket,
    pub(super) resolver: SocketAddr,
    pub(super) hold: Option<HoldSockets>,
}

impl CgroupNetwork {
    /// Opens the sockets, creates the control group, and installs the rules for it.
    pub(super) fn build(hold: bool) -> Result<(Self, Sockets), RunError> {
        if !caps::is_network_root() {
            return Err(RunError::NotRoot);
        }
        let mut sockets = Sockets::open()?;
        // Without queues in the kernel, nothing is held.
        sockets.hold = if hold { open_hold().ok() } else { None };
        let port = |error| RunError::host("read the listener's port", error);
        let ports = (sockets.port().map_err(port)?, sockets.datagrams.port().map_err(port)?);
        let routes = |error| RunError::host("route the command's datagrams", error);
        let group = |error| RunError::host("make a control group for the command", error);
        let hierarchy = Hierarchy::find().map_err(group)?;
        let name = unique_name();
        let directory = hierarchy.mount.join(&hierarchy.own).join(&name);
        // The guard works from the last action to the first: all processes must end before the rules go.
        let mut actions = vec![Action::DeleteTable { family: Family::Inet, name: name.clone() }];
        actions.extend(cgroup_datagrams::undoing().map_err(routes)?);
        actions.push(Action::EndCgroup(directory));
        let guard = Guard::spawn(&actions)
            .map_err(|error| RunError::host("start the process that cleans up after a crash", error))?;
        let leaf = hierarchy.create_leaf(&name).map_err(group)?;
        // From here on, dropping `network` removes the group after an error.
        let mut network = Self { leaf, table: None, guard: Some(guard) };
        cgroup_datagrams::add_routes().map_err(routes)?;
        let queue = sockets.hold.as_ref().and_then(|hold| hold.queues.numbers().first().copied());
        let owned = own(&table(&network.leaf, ports, queue))
            .map_err(|error| RunError::host("put the command's nftables rules in force", error))?;
        network.table = Some(owned);
        Ok((network, sockets))
    }

    /// Starts the command in the control group.
    pub(super) fn spawn(
        &self,
        program: &Program,
        files: &PrivateFiles,
    ) -> Result<(ChildProcess, Option<Questions>), RunError> {
        Ok(spawn_in_cgroup(program, files, &self.leaf)?)
    }

    /// Ends remaining processes, then removes the control group and the rules. This order matters: without the
    /// rules, processes would bypass us. The guard does it because this process has given up its capabilities.
    pub(super) fn remove(mut self) -> Result<(), RunError> {
        self.release()
            .map_err(|error| RunError::host("remove what was put on the host for the command", error))?;
        if self.leaf.pids().is_ok() {
            return Err(RunError::host(
                "remove the command's control group",
                io::Error::other("it is in use"),
            ));
        }
        Ok(())
    }

    fn release(&mut self) -> io::Result<()> {
        let Some(guard) = self.guard.take() else { return Ok(()) };
        // On some kernels the rules vanish when our socket closes, so all processes must have ended before.
        let cleared = self.leaf.clear();
        self.table = None;
        guard.finish()?;
        match cleared {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for CgroupNetwork {
    fn drop(&mut self) {
        // After `remove` nothing is left to do. On error paths an error here cannot be handled.
        let _ = self.release();
    }
}

impl Sockets {
    fn open() -> Result<Self, RunError> {
        let listeners = listeners().map_err(|error| RunError::host("listen on 127.0.0.1 and ::1", error))?;
        let datagrams = Datagrams::open().map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => RunError::NoRights,
            _ => RunError::host("open sockets for datagrams", error),
        })?;
        let (dns, resolver) = resolver()
            .map_err(|error| RunError::host("open port 53 of an address of 127.18.53.0/24", error))?;
        Ok(Self { listeners, datagrams, dns, resolver, hold: None })
    }

    fn port(&self) -> io::Result<u16> {
        port(&self.listeners)
    }
}

/// The port of all these listeners.
pub(super) fn port(listeners: &[TcpListener]) -> io::Result<u16> {
    let first = listeners.first().ok_or(io::ErrorKind::NotFound)?;
    Ok(first.local_addr()?.port())
}

/// REDIRECT sends connections to 127.0.0.1 or ::1, on one port for both. A host without IPv6 has only the first.
pub(super) fn listeners() -> io::Result<Vec<TcpListener>> {
    let options = ListenOptions { reset_if_killed: true, ..ListenOptions::default() };
    for _ in 0..ATTEMPTS {
        let first = sockopt::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &options)?;
        let second = SocketAddr::from((Ipv6Addr::LOCALHOST, first.local_addr()?.port()));
        match sockopt::listen(second, &options) {
            Ok(second) => return Ok(vec![first, second]),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => return Ok(vec![first]),
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

/// Finds an address for the resolver. Each running command needs its own, because resolv.conf has no ports.
fn resolver() -> io::Result<(UdpSocket, SocketAddr)> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for number in 1..=ATTEMPTS {
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 18, 53, number)), dns::PORT);
        match udp::bind(address) {
            Ok(socket) => return Ok((socket, address)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Name of the table and the control group. Unique, because other commands may run at the same time.
fn unique_name() -> String {
    format!("sidetrack-run-{}", std::process::id())
}

/// Creates the table with this process as owner. On Linux 6.9 and later it stays after a kill until the guard
/// has ended the command. On older kernels it vanishes with this process, shortly before the command's last
/// process ends.
pub(super) fn own(table: &Table) -> Result<OwnedTable, OwnError> {
    match OwnedTable::create(table, Lifetime::SocketThenOrphan) {
        Err(OwnError::PersistUnsupported) => OwnedTable::create(table, Lifetime::Socket),
        done => done,
    }
}

/// Opens a queue for the group's opening segments.
pub(super) fn open_hold() -> Result<HoldSockets, netlink::Error> {
    HoldSockets::open(HOLD_NUMBERS, 1, (hold::PACKETS_MAX, true), 0)
}

/// Leads the group's connections and datagrams to us. Drops its other traffic that leaves the host.
fn table(leaf: &Leaf, (port, datagrams): (u16, u16), queue: Option<u16>) -> Table {
    let of_group = || Statement::is(Field::SocketCgroup { level: leaf.level() }, Value::Cgroup(leaf.id()));
    let redirect = Rule::new([Statement::is(Field::L4Proto, TCP), of_group(), Statement::Redirect { port }]);
    let elsewhere = Statement::is_not(Field::DestinationType, Value::AddressType(RTN_LOCAL));
    let drop = Rule::new([of_group(), elsewhere, Statement::Verdict(Verdict::Drop)]);
    let [out, back] = cgroup_datagrams::chains(&of_group(), datagrams);
    let mut table = Table::new(Family::Inet, unique_name());
    let queue = queue.map(|number| HoldQueue { number, bypass: true });
    table.chains.extend(queue.map(|queue| queue.output_chain([of_group()])));
    table
        .with_chain(out)
        .with_chain(back)
        .with_chain(Chain::base("connections", ChainKind::Nat, Hook::Output, priority::DSTNAT).with(redirect))
        .with_chain(
            Chain::base("rest", ChainKind::Filter, Hook::Output, priority::FILTER)
                .with(cgroup_datagrams::pass())
                .with(drop),
        )
}
