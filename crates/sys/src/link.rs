//! What an interface is like now (RTNETLINK).

use crate::netlink::{Attribute, Error, Message, Protocol, Requests, Socket, attributes, flag};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;

/// An interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its index.
    pub index: u32,
    /// Largest IP packet it takes, bytes.
    pub mtu: u32,
    /// It is up and has a carrier.
    pub running: bool,
    /// It leads to this host only.
    pub loopback: bool,
    /// Its Ethernet address, if it is of Ethernet's kind.
    pub address: Option<[u8; 6]>,
    /// It is an end of a pair (veth, netkit) whose other end is in another network namespace, and no queueing discipline
    /// waits at its egress.
    pub peer_elsewhere: bool,
}

impl Interface {
    /// It has Ethernet addresses, and leads to other hosts.
    pub const fn is_ethernet(&self) -> bool {
        self.address.is_some() && !self.loopback
    }
}

/// The interface of this name, in this thread's network namespace.
///
/// # Errors
/// ENODEV if there is none.
pub fn interface(name: &str) -> Result<Interface, Error> {
    let mut request = Requests::new();
    // `struct ifinfomsg`, all zero: the name decides.
    request.push(format!("find interface {name}"), RTM_GETLINK, 0, &[0; 16], |w| {
        w.text(3, name); // IFLA_IFNAME
    });
    let found = Socket::open(Protocol::Route)?.ask(&request, parse)?;
    found.ok_or(Error::NoAnswer(0))
}

/// All interfaces of this thread's network namespace.
///
/// # Errors
/// What the kernel says.
pub fn interfaces() -> Result<Vec<Interface>, Error> {
    let mut request = Requests::new();
    request.push("list interfaces".to_owned(), RTM_GETLINK, flag::DUMP, &[0; 16], |_| {});
    Socket::open(Protocol::Route)?.dump(&request, parse)
}

fn parse(message: &Message<'_>) -> Option<Interface> {
    const UP: u32 = 1;
    const LOOPBACK: u32 = 1 << 3;
    const LOWER_UP: u32 = 1 << 16;
    if message.kind != RTM_NEWLINK {
        return None;
    }
    let word = |at: usize| message.payload.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let mtu = attributes(message.after(16)).first(4)?.u32_ne()?; // IFLA_MTU
    let address = attributes(message.after(16)).first(1).and_then(|value| value.payload.try_into().ok()); // IFLA_ADDRESS
    let text = |value: Attribute<'_>| value.payload.strip_suffix(&[0]).unwrap_or(value.payload).to_vec();
    let all = || attributes(message.after(16));
    let kind = all().first(18).and_then(|info| attributes(info.payload).first(1)).map(text); // IFLA_LINKINFO, IFLA_INFO_KIND
    let is_pair = kind.is_some_and(|kind| matches!(kind.as_slice(), b"veth" | b"netkit"));
    let elsewhere = all().first(37).is_some(); // IFLA_LINK_NETNSID
    let unqueued = all().first(6).map(text).is_some_and(|name| name == b"noqueue"); // IFLA_QDISC
    let peer_elsewhere = is_pair && elsewhere && unqueued;
    let flags = word(8)?;
    let (running, loopback) = (flags & (UP | LOWER_UP) == UP | LOWER_UP, flags & LOOPBACK != 0);
    Some(Interface { index: word(4)?, mtu, running, loopback, address, peer_elsewhere })
}
