//! A network without a way out: all addresses become local, as in the network that `run` makes.

use std::sync::Arc;

use sidetrack_sys::exec::{HoldWish, catch_network};
use sidetrack_sys::netns::NetNs;
use sidetrack_sys::nfqueue::HOLD_NUMBERS;
use sidetrack_sys::nft::Family;
use sidetrack_sys::route::{self, IpVersion, TABLE_LOCAL};
use sidetrack_sys::sockdiag::SockDiag;
use sidetrack_sys::undo::Action;
use sidetrack_sys::{link, netlink};

use super::super::{REDIRECT_PORT, RunError};
use super::Caught;
use crate::intercept::hold;

/// The table that `run` makes in its own network, too.
pub(super) const TABLE: &str = "sidetrack";

/// What takes [`install`] back.
pub(super) fn undoing(network: &NetNs) -> std::io::Result<Vec<Action>> {
    network.run(|| {
        let lo = link::interface("lo").map_err(other)?;
        let route = |version| Action::RemoveLocalDefault { version, interface: lo.index, table: TABLE_LOCAL };
        let versions = IpVersion::BOTH.into_iter();
        let versions = versions.filter(|version| *version == IpVersion::V4 || route::has_ipv6("lo"));
        let lo_again = Action::RestoreLoopback { mtu_bytes: lo.mtu, up: lo.running };
        let table = Action::DeleteTable { family: Family::Inet, name: TABLE.to_owned() };
        Ok([lo_again].into_iter().chain(versions.map(route)).chain([table]).collect())
    })
}

fn other(error: netlink::Error) -> std::io::Error {
    std::io::Error::other(error)
}

/// Catches everything in the network of the calling thread.
pub(super) fn install(hold: bool) -> Result<Caught, RunError> {
    let wish = HoldWish { queue: *HOLD_NUMBERS.start(), packets_max: hold::PACKETS_MAX, fail_open: true };
    let caught = catch_network(REDIRECT_PORT, hold.then_some(wish))?;
    Ok(Caught {
        listeners: vec![caught.listener],
        datagrams: caught.datagrams,
        answers: Arc::new(caught.answers),
        dns: vec![caught.dns],
        hold: caught.hold,
        owners: SockDiag::open().ok(),
        table: None,
    })
}
