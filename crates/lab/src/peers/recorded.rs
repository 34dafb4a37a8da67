//! Our listeners with and without a record line for each flow: the cost of records for a new connection.

use super::{Class, Peer, RELAY_PORT, Running, Start, ours, relay};
use crate::load::Via;
use crate::service::Service;
use crate::site::{Records, Site};

/// Port of the SOCKS listener.
const SOCKS_PORT: u16 = 1090;

const fn with(name: &'static str, start: for<'s> fn(&'s Site) -> Start<'s>) -> Peer {
    Peer { name, class: Class::OneHop, is_ours: true, start }
}

/// Each kind of listener, first with lines in a file, then without records.
pub const RECORDED: &[Peer] = &[
    with("reverse, records", |site| site.with_records(Records::File, || ours::reverse(site))),
    with("reverse, no records", |site| site.with_records(Records::Off, || ours::reverse(site))),
    with("SOCKS5, records", |site| site.with_records(Records::File, || socks(site))),
    with("SOCKS5, no records", |site| site.with_records(Records::Off, || socks(site))),
    with("CONNECT, records", |site| site.with_records(Records::File, || connect(site))),
    with("CONNECT, no records", |site| site.with_records(Records::Off, || connect(site))),
    with("redirect, records", |site| site.with_records(Records::File, || redirect(site))),
    with("redirect, no records", |site| site.with_records(Records::Off, || redirect(site))),
];

fn socks(site: &Site) -> Start<'_> {
    let service = ours::socks(site, SOCKS_PORT)?;
    Ok(asked(site, service, SOCKS_PORT, Via::Socks5))
}

fn connect(site: &Site) -> Start<'_> {
    let service = ours::http(site, RELAY_PORT)?;
    Ok(asked(site, service, RELAY_PORT, Via::HttpConnect))
}

fn redirect(site: &Site) -> Start<'_> {
    Ok(Running { dial: site.origin(), ..relay(site, ours::redirect_on_the_way(site)?) })
}

/// A proxy whose clients name the origin by `via`.
fn asked(site: &Site, service: Service, port: u16, via: Via) -> Running<'_> {
    Running { dial: site.proxy_address(port), via, ..relay(site, service) }
}
