//! How long the kernel lets frames gather before it takes them (NAPI; generic netlink, family `netdev`).
//!
//! After it has taken frames, an instance of NAPI waits for `gro-flush-timeout` before it looks again and lets itself be woken
//! only if nothing came meanwhile, `defer-hard-irqs` times in a row: what a card's `rx-usecs` does, for every driver, and for a
//! pair of veth. A frame after a rest is taken at once. `Documentation/networking/napi.rst`; linux/netdev.h. Linux 6.13.

use crate::netlink::{Error, Message, Protocol, Requests, Socket, attributes, flag};

/// `GENL_ID_CTRL`, which knows the families (linux/genetlink.h).
const CONTROL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

const NETDEV_CMD_DEV_GET: u8 = 1;
const DEV_IFINDEX: u16 = 1; // NETDEV_A_DEV_IFINDEX
const DEV_XDP_FEATURES: u16 = 3; // NETDEV_A_DEV_XDP_FEATURES

const NETDEV_CMD_NAPI_GET: u8 = 11;
const NETDEV_CMD_NAPI_SET: u8 = 14;
const IFINDEX: u16 = 1; // NETDEV_A_NAPI_IFINDEX
const ID: u16 = 2; // NETDEV_A_NAPI_ID
const DEFER_HARD_IRQS: u16 = 5; // NETDEV_A_NAPI_DEFER_HARD_IRQS
const GRO_FLUSH_TIMEOUT: u16 = 6; // NETDEV_A_NAPI_GRO_FLUSH_TIMEOUT

/// Bytes of `struct genlmsghdr`.
pub(crate) const GENERIC_HEADER: usize = 4;

/// An instance of NAPI and how long frames gather in it. It lives as long as a queue of a card does; on a pair of veth as long
/// as an XDP program or GRO wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Napi {
    /// Its number, which no other has in this namespace.
    pub id: u32,
    /// How often in a row nothing may have come before it lets itself be woken.
    pub defer_hard_irqs: u32,
    /// How long frames gather, nanoseconds; 0: not at all.
    pub gro_flush_timeout_ns: u64,
}

/// A message of generic netlink.
pub(crate) fn generic(command: u8) -> [u8; GENERIC_HEADER] {
    [command, 1, 0, 0]
}

/// The number that the family `netdev` has in this boot.
pub(crate) fn family(socket: &mut Socket) -> Result<u16, Error> {
    let mut request = Requests::new();
    let asked = "find netdev among the families of generic netlink (Linux 6.3)";
    request
        .push(asked, CONTROL, 0, &generic(CTRL_CMD_GETFAMILY), |w| w.text(CTRL_ATTR_FAMILY_NAME, "netdev"));
    let id = |message: &Message<'_>| {
        let id = attributes(message.after(GENERIC_HEADER)).first(CTRL_ATTR_FAMILY_ID)?;
        id.payload.try_into().ok().map(u16::from_ne_bytes)
    };
    socket.ask(&request, id)?.ok_or(Error::NoAnswer(0))
}

fn parse(message: &Message<'_>) -> Option<Napi> {
    let all = || attributes(message.after(GENERIC_HEADER));
    let number = |kind| {
        let value = all().first(kind)?.payload;
        let short = || value.try_into().ok().map(u32::from_ne_bytes).map(u64::from);
        value.try_into().ok().map(u64::from_ne_bytes).or_else(short)
    };
    Some(Napi {
        id: all().first(ID)?.u32_ne()?,
        defer_hard_irqs: u32::try_from(number(DEFER_HARD_IRQS)?).ok()?,
        gro_flush_timeout_ns: number(GRO_FLUSH_TIMEOUT)?,
    })
}

/// The instances of an interface that is in this thread's network namespace; none where it has no use for them, and where this
/// kernel cannot set them (before Linux 6.13).
///
/// # Errors
/// ENOENT before Linux 6.3, EOPNOTSUPP before 6.7.
pub fn of(interface: u32) -> Result<Vec<Napi>, Error> {
    let mut socket = Socket::open(Protocol::Generic)?;
    let family = family(&mut socket)?;
    let mut request = Requests::new();
    let asked = "list the instances of NAPI (Linux 6.7)";
    request.push(asked, family, flag::DUMP, &generic(NETDEV_CMD_NAPI_GET), |w| w.u32_ne(IFINDEX, interface));
    socket.dump(&request, |message| (message.kind == family).then(|| parse(message)).flatten())
}

/// The bits of `enum netdev_xdp_act` that the driver of an interface has; none if it does not say.
///
/// # Errors
/// ENOENT before Linux 6.3.
pub(crate) fn xdp_features(interface: u32) -> Result<Option<u64>, Error> {
    let mut socket = Socket::open(Protocol::Generic)?;
    let family = family(&mut socket)?;
    let mut request = Requests::new();
    let asked = "ask what a driver can do for XDP (Linux 6.3)";
    request.push(asked, family, 0, &generic(NETDEV_CMD_DEV_GET), |w| w.u32_ne(DEV_IFINDEX, interface));
    let bits = |message: &Message<'_>| {
        let value = attributes(message.after(GENERIC_HEADER)).first(DEV_XDP_FEATURES)?.payload;
        value.try_into().ok().map(u64::from_ne_bytes)
    };
    socket.ask(&request, bits)
}

/// Has frames gather in an instance as it says.
///
/// # Errors
/// ENOENT where it is gone, EPERM without CAP_NET_ADMIN, EOPNOTSUPP before Linux 6.13.
pub fn set(napi: &Napi) -> Result<(), Error> {
    let mut socket = Socket::open(Protocol::Generic)?;
    let family = family(&mut socket)?;
    let mut request = Requests::new();
    let asked = "let frames gather in an instance of NAPI (Linux 6.13)";
    let index = request.push(asked, family, 0, &generic(NETDEV_CMD_NAPI_SET), |w| {
        w.u32_ne(ID, napi.id);
        w.u32_ne(DEFER_HARD_IRQS, napi.defer_hard_irqs);
        match u32::try_from(napi.gro_flush_timeout_ns) {
            Ok(short) => w.u32_ne(GRO_FLUSH_TIMEOUT, short),
            Err(_) => w.bytes(GRO_FLUSH_TIMEOUT, &napi.gro_flush_timeout_ns.to_ne_bytes()),
        }
    });
    request.acknowledge(index);
    socket.transact(&request)
}
