//! Links, addresses, routes and policy rules (RTNETLINK, RFC 3549 section 3), each with its inverse.
//!
//! Everything is idempotent: adding what is there and removing what is gone are not errors. Routes and rules carry the protocol
//! tag [`PROTOCOL`], by which [`ours`] finds what a crash left behind.

use std::net::IpAddr;

use crate::netlink::{
    AttributeWriter, Error, Message, Protocol, Received, Refusal, Requests, Socket, attributes, flag,
};
use crate::sysctl;

/// `rtm_protocol` and `FRA_PROTOCOL` of everything we add (linux/rtnetlink.h leaves 5 to 255 to user programs).
pub const PROTOCOL: u8 = 201;

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;

/// The high byte of the marks, and of the routing tables, of `sidetrack run --mode cgroup`. Its process id follows, which is below
/// 2^22: commands do not share a mark.
pub const RUN_MARKS: u32 = 0x5c00_0000;
/// The bits of the process id in them.
pub const RUN_PID_BITS: u32 = 0x00ff_ffff;

/// IP version, as routing netlink wants to have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpVersion {
    /// Both, IPv4 first.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    const fn number(self) -> u8 {
        match self {
            Self::V4 => 2,
            Self::V6 => 10,
        }
    }

    fn of(number: u8) -> Option<Self> {
        Self::BOTH.into_iter().find(|version| version.number() == number)
    }
}

impl std::fmt::Display for IpVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Self::V4 { "IPv4" } else { "IPv6" })
    }
}

/// A policy rule: packets with this mark are routed by this table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MarkRule {
    /// IP version.
    pub version: IpVersion,
    /// The mark.
    pub mark: u32,
    /// Bits of the mark looked at.
    pub mask: u32,
    /// The routing table's number.
    pub table: u32,
    /// The rule's place; lower is asked earlier. The local table has 0, main 32766.
    pub priority: u32,
}

/// What of ours is in the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ours {
    /// Policy rules with our protocol tag.
    pub rules: Vec<MarkRule>,
    /// Local default routes with our protocol tag: IP version, interface index, table.
    pub local_defaults: Vec<(IpVersion, u32, u32)>,
}

/// Number of the local routing table (`RT_TABLE_LOCAL`).
pub const TABLE_LOCAL: u32 = 255;

/// Brings a link up.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN.
pub fn link_up(name: &str) -> Result<(), Error> {
    set_link(name, true)
}

/// Takes a link down.
///
/// # Errors
/// As [`link_up`].
pub fn link_down(name: &str) -> Result<(), Error> {
    set_link(name, false)
}

fn set_link(name: &str, up: bool) -> Result<(), Error> {
    const IFF_UP: u32 = 1;
    let index = interface_index(name)?;
    let mut header = vec![0; 4];
    header.extend_from_slice(&index.to_ne_bytes());
    header.extend_from_slice(&if up { IFF_UP } else { 0 }.to_ne_bytes()); // ifi_flags
    header.extend_from_slice(&IFF_UP.to_ne_bytes()); // ifi_change
    let mut requests = Requests::new();
    let word = if up { "up" } else { "down" };
    requests.push(format!("bring interface {name} {word}"), RTM_NEWLINK, flag::ACK, &header, |_| {});
    transact(&requests)
}

/// Sets the MTU of a link, in bytes.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN; EINVAL if the interface cannot have it.
pub fn set_mtu(name: &str, mtu_bytes: u32) -> Result<(), Error> {
    let index = interface_index(name)?;
    let mut header = vec![0; 4];
    header.extend_from_slice(&index.to_ne_bytes());
    header.resize(16, 0); // no flag changes
    let mut requests = Requests::new();
    let asked = format!("set the MTU of interface {name} to {mtu_bytes}");
    requests.push(asked, RTM_NEWLINK, flag::ACK, &header, |w| w.u32_ne(4, mtu_bytes)); // IFLA_MTU
    transact(&requests)
}

/// Gives an interface an address.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN.
pub fn add_address(name: &str, address: IpAddr, prefix_length: u8) -> Result<(), Error> {
    const NO_DUPLICATE_DETECTION: u8 = 2;
    let index = interface_index(name)?;
    let version = if address.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
    let mut header = vec![version.number(), prefix_length, NO_DUPLICATE_DETECTION, 0];
    header.extend_from_slice(&index.to_ne_bytes());
    let mut requests = Requests::new();
    let asked = format!("add address {address}/{prefix_length} to interface {name}");
    requests.push(asked, RTM_NEWADDR, flag::ACK | flag::CREATE | flag::EXCLUSIVE, &header, |w| {
        w.address(2, address); // IFA_LOCAL
        w.address(1, address); // IFA_ADDRESS
    });
    forgive(transact(&requests), libc::EEXIST)
}

/// Takes an address from an interface.
///
/// # Errors
/// As [`add_address`]; an address that is not there is fine.
pub fn remove_address(name: &str, address: IpAddr, prefix_length: u8) -> Result<(), Error> {
    let index = interface_index(name)?;
    let version = if address.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 };
    let mut header = vec![version.number(), prefix_length, 0, 0];
    header.extend_from_slice(&index.to_ne_bytes());
    let mut requests = Requests::new();
    let asked = format!("remove address {address}/{prefix_length} from interface {name}");
    requests.push(asked, RTM_DELADDR, flag::ACK, &header, |w| w.address(2, address)); // IFA_LOCAL
    forgive(transact(&requests), libc::EADDRNOTAVAIL)
}

/// Makes every address, IPv4 and IPv6, an address of this host: `ip route add local default dev NAME` (AnyIP). Where IPv6 is
/// switched off, only IPv4: no IPv6 connection can begin there either.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN.
pub fn add_local_default(name: &str) -> Result<(), Error> {
    add_local_default_in(name, IpVersion::V4, TABLE_LOCAL)?;
    if !has_ipv6(name) {
        return Ok(());
    }
    add_local_default_in(name, IpVersion::V6, TABLE_LOCAL)
}

/// Whether IPv6 is there (boot parameter `ipv6.disable`) and on for this interface (`disable_ipv6`).
pub fn has_ipv6(name: &str) -> bool {
    sysctl::read(&format!("net/ipv6/conf/{name}/disable_ipv6")).is_ok_and(|value| value == "0")
}

/// Takes [`add_local_default`] back.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN.
pub fn remove_local_default(name: &str) -> Result<(), Error> {
    remove_local_default_in(name, IpVersion::V4, TABLE_LOCAL)?;
    if !has_ipv6(name) {
        return Ok(());
    }
    remove_local_default_in(name, IpVersion::V6, TABLE_LOCAL)
}

/// Makes every address of one IP version local for packets that routing table `table` decides on.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN.
pub fn add_local_default_in(name: &str, version: IpVersion, table: u32) -> Result<(), Error> {
    let index = interface_index(name)?;
    let mut requests = Requests::new();
    let asked = format!("add the local {version} default route of interface {name} to table {table}");
    let flags = flag::ACK | flag::CREATE | flag::REPLACE;
    requests.push(asked, RTM_NEWROUTE, flags, &route_header(version), |w| route_attributes(w, index, table));
    transact(&requests)
}

/// Restores a policy rule and the local default route of its table if another program removed them. What is
/// there stays as it is, without a notification of a change.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN.
pub fn restore_mark_rule(name: &str, rule: &MarkRule) -> Result<(), Error> {
    let index = interface_index(name)?;
    let mut requests = Requests::new();
    let asked = format!("restore the local {} default route in table {}", rule.version, rule.table);
    let flags = flag::ACK | flag::CREATE | flag::EXCLUSIVE;
    requests.push(asked, RTM_NEWROUTE, flags, &route_header(rule.version), |w| {
        route_attributes(w, index, rule.table);
    });
    forgive(transact(&requests), libc::EEXIST)?;
    add_mark_rule(rule)
}

/// Takes [`add_local_default_in`] back.
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN.
pub fn remove_local_default_in(name: &str, version: IpVersion, table: u32) -> Result<(), Error> {
    remove_local_default_of(interface_index(name)?, version, table)
}

/// The same by interface index, as [`ours`] gives it.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN.
pub fn remove_local_default_of(index: u32, version: IpVersion, table: u32) -> Result<(), Error> {
    let mut requests = Requests::new();
    let asked = format!("remove the local {version} default route from table {table}");
    requests
        .push(asked, RTM_DELROUTE, flag::ACK, &route_header(version), |w| route_attributes(w, index, table));
    forgive(transact(&requests), libc::ESRCH)
}

/// `struct rtmsg` of a local default route.
const fn route_header(version: IpVersion) -> [u8; 12] {
    const RT_SCOPE_HOST: u8 = 254;
    const RTN_LOCAL: u8 = 2;
    // family, dst_len, src_len, tos, table (in RTA_TABLE), protocol, scope, type, flags
    [version.number(), 0, 0, 0, 0, PROTOCOL, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0]
}

fn route_attributes(w: &mut AttributeWriter<'_>, interface: u32, table: u32) {
    w.u32_ne(4, interface); // RTA_OIF
    w.u32_ne(15, table); // RTA_TABLE
}

/// Adds a policy rule: `ip rule add fwmark MARK/MASK lookup TABLE`.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN.
pub fn add_mark_rule(rule: &MarkRule) -> Result<(), Error> {
    let mut requests = Requests::new();
    let asked = format!("route {} packets with mark {:#x} by table {}", rule.version, rule.mark, rule.table);
    let flags = flag::ACK | flag::CREATE | flag::EXCLUSIVE;
    requests.push(asked, RTM_NEWRULE, flags, &rule_header(rule.version), |w| rule_attributes(w, rule));
    forgive(transact(&requests), libc::EEXIST)
}

/// Takes [`add_mark_rule`] back.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN.
pub fn remove_mark_rule(rule: &MarkRule) -> Result<(), Error> {
    let mut requests = Requests::new();
    let asked = format!(
        "no longer route {} packets with mark {:#x} by table {}",
        rule.version, rule.mark, rule.table
    );
    requests.push(asked, RTM_DELRULE, flag::ACK, &rule_header(rule.version), |w| rule_attributes(w, rule));
    forgive(transact(&requests), libc::ENOENT)
}

/// `struct fib_rule_hdr` of a rule that looks a table up.
const fn rule_header(version: IpVersion) -> [u8; 12] {
    const FR_ACT_TO_TBL: u8 = 1;
    [version.number(), 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0]
}

fn rule_attributes(w: &mut AttributeWriter<'_>, rule: &MarkRule) {
    w.u32_ne(6, rule.priority); // FRA_PRIORITY
    w.u32_ne(10, rule.mark); // FRA_FWMARK
    w.u32_ne(16, rule.mask); // FRA_FWMASK
    w.u32_ne(15, rule.table); // FRA_TABLE
    w.u8(21, PROTOCOL); // FRA_PROTOCOL
}

/// Lists what of ours is in the kernel, for `cleanup` and `plan`.
///
/// # Errors
/// If netlink fails.
pub fn ours() -> Result<Ours, Error> {
    let mut socket = Socket::open(Protocol::Route)?;
    let mut found = Ours::default();
    for version in IpVersion::BOTH {
        let mut request = Requests::new();
        request.push("list the policy rules", RTM_GETRULE, flag::DUMP, &rule_header(version), |_| {});
        found.rules.extend(socket.dump(&request, our_rule)?);
        let mut request = Requests::new();
        let header = [version.number(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        request.push("list the routes", RTM_GETROUTE, flag::DUMP, &header, |_| {});
        found.local_defaults.extend(socket.dump(&request, our_local_default)?);
    }
    Ok(found)
}

fn our_rule(message: &Message<'_>) -> Option<MarkRule> {
    let version = IpVersion::of(*message.payload.first()?)?;
    let attribute = |kind| attributes(message.after(12)).first(kind);
    if message.kind != RTM_NEWRULE || attribute(21)?.u8()? != PROTOCOL {
        return None;
    }
    let word = |kind| attribute(kind).and_then(|a| a.u32_ne());
    Some(MarkRule {
        version,
        mark: word(10)?,
        mask: word(16).unwrap_or(u32::MAX),
        table: word(15)?,
        priority: word(6).unwrap_or(0),
    })
}

fn our_local_default(message: &Message<'_>) -> Option<(IpVersion, u32, u32)> {
    let [family, destination_bits, .., protocol, _scope, _kind] = message.payload.first_chunk::<8>()?;
    if message.kind != RTM_NEWROUTE || *protocol != PROTOCOL || *destination_bits != 0 {
        return None;
    }
    let word = |kind| attributes(message.after(12)).first(kind).and_then(|a| a.u32_ne());
    Some((IpVersion::of(*family)?, word(4)?, word(15)?))
}

/// Removes everything [`ours`] finds; returns how many things.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN.
pub fn remove_ours() -> Result<usize, Error> {
    let found = ours()?;
    found.rules.iter().try_for_each(remove_mark_rule)?;
    for (version, index, table) in &found.local_defaults {
        remove_local_default_of(*index, *version, *table)?;
    }
    Ok(found.rules.len() + found.local_defaults.len())
}

fn transact(requests: &Requests) -> Result<(), Error> {
    Socket::open(Protocol::Route)?.transact(requests)
}

/// A refusal with this error number means: it is already so.
fn forgive(result: Result<(), Error>, errno: i32) -> Result<(), Error> {
    match result {
        Err(error) if error.errno() == Some(errno) => Ok(()),
        other => other,
    }
}

/// The way that packets take to `to`: the index of the interface they leave by, or `None` if they stay on this host. No packet is
/// sent. They come from `from`, if that is an address of this host.
///
/// # Errors
/// ENETUNREACH or EHOSTUNREACH if there is no route.
pub fn way(from: IpAddr, to: IpAddr) -> Result<Option<u32>, Error> {
    match way_from(Some(from), to) {
        // Not an address of this host: it was caught on its way.
        Err(error) if [libc::EINVAL, libc::ENETUNREACH].map(Some).contains(&error.errno()) => {
            way_from(None, to)
        }
        found => found,
    }
}

fn way_from(from: Option<IpAddr>, to: IpAddr) -> Result<Option<u32>, Error> {
    const RTN_LOCAL: u8 = 2;
    let (version, bits) = if to.is_ipv4() { (IpVersion::V4, 32) } else { (IpVersion::V6, 128) };
    let source_bits = if from.is_some() { bits } else { 0 };
    let header = [version.number(), bits, source_bits, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut request = Requests::new();
    request.push(format!("find the route to {to}"), RTM_GETROUTE, 0, &header, |w| {
        w.address(1, to); // RTA_DST
        if let Some(from) = from {
            w.address(2, from); // RTA_SRC
        }
    });
    let found = Socket::open(Protocol::Route)?.ask(&request, |message| {
        let kind = *message.payload.get(7)?;
        let index = attributes(message.after(12)).first(4)?.u32_ne()?; // RTA_OIF
        Some((kind != RTN_LOCAL).then_some(index))
    })?;
    Ok(found.flatten())
}

/// Tells that interfaces, addresses or routes of this network namespace have changed.
#[derive(Debug)]
pub struct Changes {
    socket: Socket,
}

impl Changes {
    /// Begins to listen.
    ///
    /// # Errors
    /// What socket(2) says.
    pub fn watch() -> Result<Self, Error> {
        // RTNLGRP_LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV4_RULE, _IPV6_IFADDR, _IPV6_ROUTE, _IPV6_RULE.
        const GROUPS: [u32; 7] = [1, 5, 7, 8, 9, 11, 19];
        let socket = Socket::open(Protocol::Route)?;
        socket.set_nonblocking()?;
        GROUPS.iter().try_for_each(|group| socket.join(*group))?;
        Ok(Self { socket })
    }

    /// Whether anything has changed since the last call.
    ///
    /// # Errors
    /// Only if the socket itself fails.
    pub fn any(&mut self) -> Result<bool, Error> {
        let mut any = false;
        while !matches!(self.socket.receive()?, Received::Nothing) {
            any = true;
        }
        Ok(any)
    }
}

/// The index of an interface of this namespace.
///
/// # Errors
/// ENODEV if there is none of this name.
pub fn interface_index(name: &str) -> Result<u32, Error> {
    let missing = |errno| Refusal {
        asked: format!("find an interface named {name:?}").into(),
        errno,
        explanation: None,
    };
    if name.contains('\0') {
        return Err(missing(libc::EINVAL).into());
    }
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM, None)
        .map_err(|e| Error::Socket { doing: "open", source: e.into() })?;
    rustix::net::netdevice::name_to_index(&socket, name).map_err(|e| missing(e.raw_os_error()).into())
}
