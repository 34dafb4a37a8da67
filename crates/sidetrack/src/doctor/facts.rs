//! Gathers all that the checks need, as plain data.

use super::Check;
use super::collectors::{self, CollectorUse};
use super::uses::{self, DnsUse, EngineUse, OverlayUse, ShuntUse, WireUse};
use crate::config::{Config, Limits, RunAs};
use sidetrack_core::pressure::Memory;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::cgroup::Hierarchy;
use sidetrack_sys::exec::{LaunchError, user_namespace_obstacle};
use sidetrack_sys::memory::Groups;
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{self, ListedChain, Probe};
use sidetrack_sys::{confine, landlock, probe, sysctl};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The kernel settings that are read, by their names under /proc/sys.
pub const SETTINGS: [&str; 16] = [
    "fs/pipe-max-size",
    "fs/pipe-user-pages-soft",
    "net/bridge/bridge-nf-call-iptables",
    "net/core/rmem_max",
    "net/core/somaxconn",
    "net/core/wmem_max",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/ip_forward",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/tcp_available_congestion_control",
    "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_fastopen",
    "net/ipv6/conf/all/forwarding",
    "net/netfilter/nf_conntrack_acct",
    "net/netfilter/nf_conntrack_events",
    "net/netfilter/nf_conntrack_max",
];

/// The result of running a command in its own network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// It was not tried.
    NotTried,
    /// It worked, and took this time.
    Works(Duration),
    /// It failed.
    Failed {
        /// The step that failed, and the kernel's error.
        why: String,
        /// What the user can do about it.
        remedy: Option<String>,
    },
}

/// What is known about nftables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nftables {
    /// Its features, and the programs that use it.
    Known {
        /// Its features.
        probe: Probe,
        /// The base chains of all tables.
        chains: Vec<ListedChain>,
    },
    /// Not known: CAP_NET_ADMIN is needed.
    NotAllowed,
    /// It does not exist, or does not answer.
    Absent(String),
}

/// Another program on this machine that handles packets or names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Neighbour {
    /// dockerd.
    Docker,
    /// podman with netavark.
    Podman,
    /// firewalld.
    Firewalld,
    /// tailscaled.
    Tailscale,
    /// systemd-resolved, if /etc/resolv.conf uses it.
    Resolved,
}

/// All that the checks need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The kernel release, as printed by `uname -r`.
    pub kernel: String,
    /// The effective user.
    pub uid: u32,
    /// The process has CAP_NET_ADMIN.
    pub net_admin: bool,
    /// The process has CAP_NET_RAW.
    pub net_raw: bool,
    /// The process has CAP_SYS_ADMIN.
    pub sys_admin: bool,
    /// The process has CAP_SYS_RESOURCE.
    pub sys_resource: bool,
    /// Whether `run` works without root.
    pub isolation: Isolation,
    /// nftables.
    pub nftables: Nftables,
    /// The soft and the hard RLIMIT_NOFILE.
    pub nofile: (u64, u64),
    /// The mount point of the cgroup2 hierarchy.
    pub cgroup2: Option<PathBuf>,
    /// The memory of the control group, if it has a limit.
    pub memory: Option<Memory>,
    /// The share of it from which flows are refused, in percent.
    pub memory_percent: u8,
    /// The values of those [`SETTINGS`] that this kernel has.
    pub settings: BTreeMap<&'static str, String>,
    /// The rp_filter value of each interface.
    pub rp_filter: BTreeMap<String, u8>,
    /// IPv6 sockets can be made.
    pub ipv6: bool,
    /// MPTCP sockets can be made.
    pub mptcp: bool,
    /// The version of Landlock in this kernel; `None` without Landlock.
    pub landlock: Option<u32>,
    /// The kernel has seccomp filters.
    pub seccomp: bool,
    /// The first of the data plane's default users that exists on this machine.
    pub data_user: Option<String>,
    /// Other programs found on this machine.
    pub neighbours: Vec<Neighbour>,
    /// What the engine listeners use.
    pub engines: Vec<EngineUse>,
    /// What the shunt uses.
    pub shunt: Option<ShuntUse>,
    /// What the wire uses, if flows go there.
    pub wire: Option<WireUse>,
    /// What the overlay uses.
    pub overlay: Option<OverlayUse>,
    /// The address of the page (`page` of `[admin]`).
    pub page: Option<SocketAddr>,
    /// What the resolver uses.
    pub dns: Option<DnsUse>,
    /// The collectors of `[export]`.
    pub collectors: Vec<CollectorUse>,
    /// What a running sidetrack with this configuration says of itself.
    pub running: Vec<Check>,
}

impl Facts {
    /// The number of ports that the kernel picks from, if it is known.
    pub fn local_ports(&self) -> Option<u64> {
        let (first, last) = self.setting("net/ipv4/ip_local_port_range")?.split_once(char::is_whitespace)?;
        let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        Some(u64::from(last.saturating_sub(first)) + 1)
    }

    /// Gathers everything, with trials that do no harm. The interfaces are those in the configuration, if there is one.
    ///
    /// # Panics
    /// The process has more than one thread: gathering starts a command.
    pub fn gather(config: Option<&Config>) -> Self {
        Self {
            isolation: isolation(),
            nftables: nftables(),
            engines: config.map(uses::engines).unwrap_or_default(),
            shunt: config.and_then(uses::shunt),
            wire: config.and_then(uses::wire),
            overlay: config.and_then(uses::overlay),
            dns: config.and_then(uses::dns),
            collectors: config.map(collectors::look).unwrap_or_default(),
            ..Self::look(config)
        }
    }

    /// Gathers what a running process may look at: it starts nothing, opens no netlink socket, and takes some milliseconds.
    pub fn look(config: Option<&Config>) -> Self {
        let has = |capability| caps::holds(capability);
        Self {
            kernel: probe::kernel_release(),
            uid: probe::uid(),
            net_admin: has(CapabilitySet::NET_ADMIN),
            net_raw: has(CapabilitySet::NET_RAW),
            sys_admin: has(CapabilitySet::SYS_ADMIN),
            sys_resource: has(CapabilitySet::SYS_RESOURCE),
            isolation: Isolation::NotTried,
            nftables: Nftables::NotAllowed,
            nofile: caps::open_files_limit(),
            memory: memory(),
            memory_percent: config.map_or(Limits::MEMORY_PERCENT, |config| config.limits.memory_percent),
            cgroup2: Hierarchy::find().ok().map(|hierarchy| hierarchy.mount),
            settings: SETTINGS.iter().filter_map(|name| Some((*name, sysctl::read(name).ok()?))).collect(),
            rp_filter: rp_filter(),
            ipv6: probe::has_ipv6(),
            mptcp: probe::has_mptcp(),
            landlock: landlock::version(),
            seccomp: confine::is_available(),
            data_user: data_user(),
            neighbours: neighbours(),
            engines: Vec::new(),
            shunt: None,
            overlay: None,
            wire: None,
            page: config.and_then(|config| config.admin.page),
            dns: None,
            collectors: Vec::new(),
            running: Vec::new(),
        }
    }

    /// The value of a setting.
    pub(crate) fn setting(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str)
    }

    /// The value of a setting as a number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.setting(name)?.parse().ok()
    }

    /// Whether this process may change rules and move commands to other cgroups.
    pub(super) const fn is_network_root(&self) -> bool {
        self.net_admin && self.sys_admin
    }
}

fn data_user() -> Option<String> {
    let is_here = |name: &&str| nix::unistd::User::from_name(name).is_ok_and(|user| user.is_some());
    RunAs::DEFAULTS.into_iter().find(is_here).map(str::to_owned)
}

/// The control group of this process may differ from that of a service: a running node says its own.
fn memory() -> Option<Memory> {
    let groups = Groups::open().ok()?;
    let (found, _) = groups.look()?;
    Some(Memory { used_bytes: found.used_bytes, limit_bytes: found.limit_bytes })
}

fn isolation() -> Isolation {
    match probe::try_isolation() {
        Ok(time) => Isolation::Works(time),
        Err(LaunchError::Setup { step, text, remedy, .. }) => {
            let remedy = remedy.or_else(user_namespace_obstacle);
            Isolation::Failed { why: format!("cannot {step}: {text}"), remedy }
        }
        Err(error) => Isolation::Failed { why: error.to_string(), remedy: user_namespace_obstacle() },
    }
}

fn nftables() -> Nftables {
    let look = || {
        let mut socket = Socket::open(Protocol::Netfilter)?;
        Ok(Nftables::Known { probe: nft::probe(&mut socket)?, chains: nft::list_base_chains(&mut socket)? })
    };
    let result: Result<_, sidetrack_sys::netlink::Error> = look();
    result.unwrap_or_else(|error| match error.errno() {
        Some(libc::EPERM) => Nftables::NotAllowed,
        _ => Nftables::Absent(error.to_string()),
    })
}

/// The rp_filter value of each interface; `all` and `default` are not interfaces.
fn rp_filter() -> BTreeMap<String, u8> {
    let Ok(entries) = std::fs::read_dir("/proc/sys/net/ipv4/conf") else { return BTreeMap::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| name != "all" && name != "default")
        .filter_map(|name| {
            let value = sysctl::read(&format!("net/ipv4/conf/{name}/rp_filter")).ok()?;
            Some((name, value.parse().ok()?))
        })
        .collect()
}

fn neighbours() -> Vec<Neighbour> {
    let traces = [
        (Neighbour::Docker, &["/run/docker.sock", "/run/docker.pid"][..]),
        (Neighbour::Podman, &["/run/netavark-dhcp", "/run/containers/networks", "/run/podman/podman.sock"]),
        (Neighbour::Firewalld, &["/run/firewalld.pid", "/run/firewalld"]),
        (Neighbour::Tailscale, &["/run/tailscale/tailscaled.sock", "/var/run/tailscale/tailscaled.sock"]),
    ];
    let here = traces.iter().filter(|(_, paths)| paths.iter().any(|path| Path::new(path).exists()));
    let mut found: Vec<_> = here.map(|(neighbour, _)| *neighbour).collect();
    if std::fs::read_to_string("/etc/resolv.conf").is_ok_and(|text| text.contains("nameserver 127.0.0.53")) {
        found.push(Neighbour::Resolved);
    }
    found
}
