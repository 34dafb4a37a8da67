//! The interfaces of this machine that the configuration uses, for the packet engine and the shunt.

use crate::config::{Config, EngineIo, ListenerKind, PinnedAt, ShuntPath};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::overlay::service::Trust;
use sidetrack_core::policy::Action;
use sidetrack_core::shunt::FastPathKind;
use sidetrack_sys::bpf::{default_pins, pins_obstacle};
use sidetrack_sys::driver::{self, Offloads, Xdp};
use sidetrack_sys::ports::{self, PortKind};
use sidetrack_sys::{link, udp, xsk};
use std::io::ErrorKind;
use std::net::SocketAddr;

/// An interface that the configuration names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// The largest IP packet in bytes; `None` if the interface does not exist.
    pub mtu: Option<u32>,
    /// It is up and has a carrier.
    pub running: bool,
    /// The XDP features of its driver; `None` if this kernel does not report them.
    pub xdp: Option<Xdp>,
    /// The number of its receive queues.
    pub queues: u32,
    /// The offloads that are switched on.
    pub offloads: Offloads,
    /// The bridge to which it belongs.
    pub bridge: Option<String>,
}

impl Interface {
    /// Gathers the state of the interface with this name.
    fn look(name: &str) -> Self {
        let Ok(found) = link::interface(name) else {
            return Self { name: name.to_owned(), ..Self::default() };
        };
        let bridge = std::fs::read_link(format!("/sys/class/net/{name}/brport/bridge")).ok();
        let bridge = bridge.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        Self {
            name: name.to_owned(),
            mtu: Some(found.mtu),
            running: found.running,
            xdp: driver::xdp(found.index).ok().flatten(),
            queues: xsk::queues(name),
            offloads: Offloads::of(name),
            bridge,
        }
    }
}

/// What the resolver (`[dns]`) uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsUse {
    /// The addresses that another program has, with its name if it may be seen.
    pub taken: Vec<(SocketAddr, Option<String>)>,
}

/// Gathers what the resolver uses, if there is one.
pub(super) fn dns(config: &Config) -> Option<DnsUse> {
    let dns = config.dns.as_ref()?;
    let taken = |address: &SocketAddr| {
        let error = udp::bind_first(*address).err()?;
        let holder = ports::holder(PortKind::Udp, *address).map(|holder| holder.name);
        // A running Sidetrack has the port itself.
        let is_taken = error.kind() == ErrorKind::AddrInUse && holder.as_deref() != Some("sidetrack");
        is_taken.then_some((*address, holder))
    };
    Some(DnsUse { taken: dns.addresses.iter().filter_map(taken).collect() })
}

/// What an engine listener uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineUse {
    /// Its name.
    pub listener: String,
    /// It receives packets by AF_XDP.
    pub xdp: bool,
    /// The kernel may translate packets of its connections.
    pub offload: bool,
    /// Its interfaces.
    pub interfaces: Vec<Interface>,
}

/// A switch that the shunt controls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// The addresses it connects to.
    pub listen: Vec<SocketAddr>,
    /// A socket listens there now.
    pub is_served: bool,
    /// The switches that are connected now.
    pub connected: Vec<SocketAddr>,
}

/// What the shunt uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShuntUse {
    /// Its fast paths.
    pub fast_paths: Vec<FastPathKind>,
    /// Its ports belong to a bridge.
    pub bridged: bool,
    /// Its interfaces.
    pub ports: Vec<Interface>,
    /// The switch, if it has one.
    pub switch: Option<Switch>,
}

/// What a node of the overlay uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayUse {
    /// Congestion control of its links.
    pub congestion: String,
    /// For each neighbour that it dials: its name, and the MTU of the route to it; `None` without a route.
    pub mtus: Vec<(String, Option<u32>)>,
    /// For each neighbour: its name, and what it lacks. Or why that is not known.
    pub lacking: Result<Vec<(String, Vec<String>)>, String>,
    /// For each group of the configuration: its name, and its members. `None`: they are not known.
    pub groups: Vec<(String, Option<Vec<String>>)>,
    /// What it does among members that lie, if any of its packets are intrusion-tolerant.
    pub tolerant: Option<TolerantUse>,
}

/// What a node needs whose packets are intrusion-tolerant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TolerantUse {
    /// The links of the topology.
    pub links: usize,
    /// Links in records that the topology does not allow, or allows only at a higher cost. `None`: not known.
    pub beyond: Option<u64>,
}

/// Returns what the overlay of a configuration uses.
pub(super) fn overlay(config: &Config) -> Option<OverlayUse> {
    let overlay = config.overlay.as_ref()?;
    let dialled =
        overlay.nodes.iter().filter_map(|node| Some((node.name.to_string(), *node.addresses.first()?)));
    let of_packets = overlay.packets.iter().map(|packets| packets.service.trust);
    let of_groups = overlay.groups.iter().map(|group| group.trust);
    let of_rules = config.policy.rules().iter().filter_map(|rule| match &rule.action {
        Action::Carry(carry) => match &carry.carrier {
            Carrier::Overlay(carrier) => Some(carrier.service.trust),
            _ => None,
        },
        Action::Deny => None,
    });
    let mut all = of_packets.chain(of_groups).chain(of_rules).chain([overlay.trust]);
    let is_tolerant = all.any(|trust| trust == Trust::Tolerant);
    Some(OverlayUse {
        congestion: overlay.congestion.to_string(),
        mtus: dialled.map(|(name, address)| (name, udp::route_mtu(address).ok())).collect(),
        lacking: Err("no running sidetrack was asked".to_owned()),
        groups: overlay.groups.iter().map(|group| (group.name.to_string(), None)).collect(),
        tolerant: is_tolerant.then_some(TolerantUse { links: overlay.edges.len(), beyond: None }),
    })
}

/// Returns what the engine listeners of a configuration use.
pub(super) fn engines(config: &Config) -> Vec<EngineUse> {
    let of = |listener: &crate::config::Listener| match &listener.kind {
        ListenerKind::Engine(engine) => Some(EngineUse {
            listener: listener.name.to_string(),
            xdp: engine.io == EngineIo::Xdp,
            offload: engine.offload_max > 0,
            interfaces: engine.interfaces.iter().map(|name| Interface::look(name)).collect(),
        }),
        _ => None,
    };
    config.listeners.iter().filter_map(of).collect()
}

/// Returns what the shunt of a configuration uses.
pub(super) fn shunt(config: &Config) -> Option<ShuntUse> {
    let shunt = config.shunt.as_ref()?;
    let switch = shunt.fast_paths.iter().find_map(|path| match path {
        ShuntPath::OpenFlow(switch) => Some(switch.listen.clone()),
        _ => None,
    });
    Some(ShuntUse {
        fast_paths: shunt.fast_paths.iter().map(ShuntPath::kind).collect(),
        bridged: shunt.bridged,
        ports: shunt.ports.values().map(|name| Interface::look(name)).collect(),
        switch: switch.map(look_for_switch),
    })
}

/// What the wire uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WireUse {
    /// The number of interfaces with Ethernet addresses.
    pub interfaces: usize,
    /// Why flows end with the process, although the configuration does not say so.
    pub unpinned: Option<String>,
}

/// Looks at what the wire uses, if a configuration wants flows to go there.
pub(super) fn wire(config: &Config) -> Option<WireUse> {
    let wire = config.wire.as_ref()?;
    let interfaces = link::interfaces().unwrap_or_default();
    let unpinned = match &wire.pins {
        PinnedAt::None => None,
        PinnedAt::Default => match default_pins() {
            Ok(folder) => pins_obstacle(&folder),
            Err(error) => Some(error.to_string()),
        },
        PinnedAt::Folder(folder) => pins_obstacle(folder),
    };
    Some(WireUse {
        interfaces: interfaces.iter().filter(|interface| interface.is_ethernet()).count(),
        unpinned,
    })
}

fn look_for_switch(listen: Vec<SocketAddr>) -> Switch {
    let text =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let sockets: Vec<_> = text.iter().flat_map(|text| sockets(text)).collect();
    let is_ours = |local: &SocketAddr| {
        let fits = |listen: &&SocketAddr| listen.ip().is_unspecified() || listen.ip() == local.ip();
        listen.iter().filter(|listen| listen.port() == local.port()).any(|listen| fits(&listen))
    };
    let in_state =
        |wanted: u8| sockets.iter().filter(move |socket| socket.state == wanted && is_ours(&socket.local));
    let is_served = in_state(LISTENING).next().is_some();
    let connected = in_state(ESTABLISHED).map(|socket| socket.remote).collect();
    Switch { is_served, connected, listen }
}

/// TCP states in /proc/net/tcp.
const ESTABLISHED: u8 = 1;
const LISTENING: u8 = 10;

struct Socket {
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
}

/// Parses the sockets in the text of /proc/net/tcp or tcp6.
fn sockets(text: &str) -> impl Iterator<Item = Socket> {
    text.lines().skip(1).filter_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (local, remote) = (address(words.next()?)?, address(words.next()?)?);
        Some(Socket { local, remote, state: u8::from_str_radix(words.next()?, 16).ok()? })
    })
}

/// Parses `0100007F:1F90`: words of four bytes in this machine's byte order, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| Some(u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok()?.to_ne_bytes());
    let port = u16::from_str_radix(port, 16).ok()?;
    match ip.len() {
        8 => Some(SocketAddr::from((word(0)?, port))),
        32 => {
            let bytes: [u8; 16] = [word(0)?, word(1)?, word(2)?, word(3)?].concat().try_into().ok()?;
            Some(SocketAddr::new(std::net::Ipv6Addr::from(bytes).to_canonical(), port))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_found_in_the_kernels_lists() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let switch = look_for_switch(vec![at]);
        assert!(switch.is_served && switch.connected.is_empty(), "{switch:?}");
        let client = std::net::TcpStream::connect(at).unwrap();
        let switch = look_for_switch(vec![SocketAddr::from(([0, 0, 0, 0], at.port()))]);
        assert_eq!(switch.connected, [client.local_addr().unwrap()]);
        assert!(sockets("nonsense\n 1: x y z\n 2: 0100007F:1F90\n").next().is_none());
    }
}
