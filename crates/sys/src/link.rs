//! What an interface is like now (RTNETLINK).

use crate::netlink::{Error, Message, Protocol, Requests, Socket, attributes};

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
    /// Its Ethernet address, if it is of Ethernet's kind.
    pub address: Option<[u8; 6]>,
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

fn parse(message: &Message<'_>) -> Option<Interface> {
    const UP: u32 = 1;
    const LOWER_UP: u32 = 1 << 16;
    if message.kind != RTM_NEWLINK {
        return None;
    }
    let word = |at: usize| message.payload.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let mtu = attributes(message.after(16)).first(4)?.u32_ne()?; // IFLA_MTU
    let address = attributes(message.after(16)).first(1).and_then(|value| value.payload.try_into().ok()); // IFLA_ADDRESS
    let running = word(8)? & (UP | LOWER_UP) == UP | LOWER_UP;
    Some(Interface { index: word(4)?, mtu, running, address })
}
