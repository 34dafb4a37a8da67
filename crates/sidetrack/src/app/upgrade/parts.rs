//! The contents of parts. A field that is added must have a default: the release before does not send it.

use crate::shunt::Which;
use serde::{Deserialize, Serialize};
use sidetrack_core::flow::Protocol;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// What the new process says first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Checked {
    /// Its version of the program.
    pub version: String,
    /// Its process id.
    pub pid: u32,
}

/// Sockets of one listener and address. Several parts of one address follow each other if it has more descriptors than one part may
/// have.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ListenerPart {
    /// The listener's name.
    pub name: String,
    /// The address it is bound to.
    pub address: SocketAddr,
    /// Whether these sockets get datagrams instead of connections.
    pub protocol: Protocol,
    /// Whether they accept connections to any address (`tproxy`).
    #[serde(default)]
    pub transparent: bool,
    /// Whether they speak Multipath TCP.
    #[serde(default)]
    pub mptcp: bool,
}

/// Where users connect to the program itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WindowPart {
    /// The admin socket.
    Admin { path: PathBuf, with_directory: bool },
    /// The address of the metrics.
    Metrics(SocketAddr),
    /// The address of the page.
    Page(SocketAddr),
    /// The socket on which upgrades are asked for.
    Upgrades(PathBuf),
    /// Where services ask for paths.
    Outgoing(SocketAddr),
    /// A socket of the resolver: that for datagrams, or the listening one.
    Resolver { address: SocketAddr, datagrams: bool },
    /// Where a cache asks its siblings and answers them, by HTCP.
    Htcp(SocketAddr),
}

/// The process that holds the rights: its connection and its process descriptor come with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct KeeperPart {
    /// The version of its requests.
    pub protocol: u32,
    /// What it may be asked for.
    pub begin: crate::keeper::Begin,
    /// Whether it has changed the kernel.
    pub used: bool,
}

/// The process of the shunt: its connection and its process descriptor come with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ShuntPart {
    /// The version of its requests.
    pub protocol: u32,
    /// The name of the configuration file that it was started with.
    pub name: String,
    /// The text of that file.
    pub text: String,
}

/// Running flows of the shunt and their numbers. Several parts may follow each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in super::super) struct ShuntedPart {
    pub rows: Vec<ShuntedRow>,
}

/// A running flow of the shunt.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in super::super) struct ShuntedRow {
    /// Its addresses.
    pub which: Which,
    /// When conntrack says that it began, nanoseconds since 1970.
    pub start_ns: Option<u64>,
    /// Its number.
    pub id: u64,
}

/// What the new process says when it accepts connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct ServingPart {
    /// Whether it has changed the kernel's rules.
    #[serde(default)]
    pub steered: bool,
    /// Whether it says [`sidetrack_core::upgrade::Kind::Settled`]. The release before this one does not.
    #[serde(default)]
    pub settles: bool,
    /// Whether it goes on with associations of UDP.
    #[serde(default)]
    pub associations: bool,
}

/// Where to go on. The pipes come with it: records that the old process still writes, and records that the new one gives back.
/// It is sent without pipes when everything was offered, for a new process whose old one is killed then.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GoPart {
    /// The number of the next flow.
    pub next_flow: u64,
    /// The number of the next path of the kernel.
    pub first_path: usize,
    /// All metrics, as text.
    #[serde(default)]
    pub metrics: String,
}

/// The memory of flows on the wire. Descriptors: its three maps, then the lock of the folder of pins if there is one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WirePart {
    /// The number of the format of maps and programs.
    pub format: u32,
    /// The folder of pins.
    pub pins: Option<PathBuf>,
}

/// The programs of the wire on one interface. Descriptors: that for packets that go out, that for packets that come in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WireOnPart {
    /// The interface's index.
    pub index: u32,
}

/// The change is final. Descriptor, if packets are caught whole: their conversations. The release before this one sends nothing beside it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct StayPart {
    /// Places of flows on the wire that the old process keeps: they are still on their way there.
    #[serde(default)]
    pub kept: Vec<u32>,
}

/// A socket of the overlay, with what it is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum OverlayPart {
    /// Where neighbours dial.
    Listener(SocketAddr),
    /// For datagrams of links.
    Datagrams(SocketAddr),
    /// Reads the packet queue with this number. The socket that owns the rules that lead there comes with it.
    Packets(u16),
    /// Leads to the overlay of the old process until it lets go of it. The last one.
    Door,
}

/// What addresses of the resolver represent, in the order of the addresses. Several parts may follow each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct NamesPart {
    /// The address, the name, and for how long it is kept at least, milliseconds.
    pub rows: Vec<(Ipv4Addr, String, u64)>,
}

/// A path that a service asked for. Its listening sockets come with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in super::super) struct PathPart {
    /// Where it listens.
    pub address: SocketAddr,
    /// What the service asked for, as JSON.
    pub wanted: serde_json::Value,
    /// For how long no flow has begun, milliseconds.
    pub unused_ms: u64,
}

/// What the starter tells the running node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Wanted {
    /// A new process was started. Descriptors: the connection of the command, and the channel to the new process.
    Upgrade { confirm_ms: Option<u64>, pid: u32 },
    /// The change is good. Descriptor: the connection of the command.
    Confirm,
}

/// What the running node tells the starter.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// First: the configuration that a new process gets. Descriptor: the listening socket.
    Listen { config: PathBuf, path: PathBuf },
    /// End the process that was started last.
    Kill,
    /// The process that was started last ends by itself, or stays.
    Done,
    /// Another process listens for upgrades from now on: leave the file where it is.
    Leave,
}

/// Part of the line that says how many flows are left in the old process: the change is final.
pub const DRAINS: &str = "in the old process";

/// What the command asks for. With an upgrade the program comes as a descriptor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Wish {
    /// Replace the process.
    Upgrade {
        /// How long the old process waits for the confirmation, milliseconds. `None`: the change is final at once.
        confirm_ms: Option<u64>,
    },
    /// The change is good.
    Confirm,
}

/// What the command is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Said {
    /// A line for the user.
    Line(String),
    /// It waits for the confirmation.
    Waiting,
    /// All is done.
    Done(String),
    /// It was not done, with the reason. The node goes on as before.
    Failed(String),
}
