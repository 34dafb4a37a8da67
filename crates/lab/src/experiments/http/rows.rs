//! The rows: other proxies and caches, and ours, in the compared roles.

use std::net::SocketAddr;

use super::cells::{Cell, Part};
use super::origin::{self, Origin};
use super::programs;
use crate::load::{Spec, Via};
use crate::peers::Unavailable;
use crate::service::Service;
use crate::site::{ORIGIN_NAME, Records, Site};

/// Port of every measured program.
pub(super) const PROXY_PORT: u16 = 9080;
/// Port of a second proxy beside it.
pub(super) const SIBLING_PORT: u16 = 9081;

/// The network: hosts, links, origin.
#[derive(Debug)]
pub(super) struct Scene<'s> {
    /// Hosts and links.
    pub site: &'s Site,
    /// The origin of the requested content.
    pub origin: Origin,
}

/// How clients send requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// The origin itself, over the direct link.
    Direct,
    /// A reverse proxy of the origin.
    Origin,
    /// A forward proxy, by the whole URL, or by CONNECT in the part about tunnels.
    Proxy,
}

/// One program in one role.
#[derive(Debug)]
pub(super) struct Row {
    /// Name in tables and for `--only`.
    pub name: &'static str,
    /// Whether it is Sidetrack.
    pub is_ours: bool,
    /// The parts in which it has figures.
    pub parts: &'static [Part],
    /// How clients use it.
    pub ask: Ask,
    /// Whether it has a cache.
    pub caches: bool,
    /// Whether a quick run has it, too.
    pub is_quick: bool,
    /// Starts its programs; they listen when this returns.
    pub start: fn(&Scene<'_>) -> Result<Vec<Service>, Unavailable>,
}

const CACHING: &[Part] = &[Part::Hit, Part::Miss];
const COMPARED: &[Part] = &[Part::Hit, Part::Miss, Part::Records];

/// Returns all rows, in the order of the tables.
pub(super) static ROWS: &[Row] = &[
    Row { caches: false, ..row("direct", &Part::ALL, Ask::Direct, |_| Ok(Vec::new())) },
    Row {
        caches: false,
        is_quick: false,
        ..row("limit", &[Part::Miss, Part::Tunnel], Ask::Origin, programs::limit)
    },
    row("nginx", COMPARED, Ask::Origin, programs::nginx),
    row("HAProxy", COMPARED, Ask::Origin, programs::haproxy),
    Row { is_quick: false, ..row("Varnish", CACHING, Ask::Origin, programs::varnish) },
    Row { is_quick: false, ..row("Traffic Server", CACHING, Ask::Origin, programs::traffic_server) },
    row("Squid", &[Part::Hit, Part::Miss, Part::Tunnel], Ask::Proxy, programs::squid),
    row("Squid ssl_bump", &[Part::Tls], Ask::Proxy, programs::squid_bumping),
    Row { caches: false, is_quick: false, ..row("mitmproxy", &[Part::Tls], Ask::Proxy, programs::mitmproxy) },
    ours("ours", &[Part::Hit, Part::Miss, Part::Tunnel], Ask::Proxy, programs::ours),
    ours("ours, for the origin", CACHING, Ask::Origin, programs::ours_for_origin),
    Row {
        caches: false,
        is_quick: false,
        ..ours("ours, no cache", &[Part::Miss], Ask::Proxy, programs::ours_without_cache)
    },
    ours("ours, records", &[Part::Records], Ask::Origin, |scene| {
        scene.site.with_records(Records::File, || programs::ours_for_origin(scene))
    }),
    ours("ours, recent flows", &[Part::Records], Ask::Origin, programs::ours_for_origin),
    ours("ours, no records", &[Part::Records], Ask::Origin, |scene| {
        scene.site.with_records(Records::Off, || programs::ours_for_origin(scene))
    }),
    ours("ours, opening", &[Part::Tls], Ask::Proxy, programs::ours_opening),
];

const fn row(
    name: &'static str,
    parts: &'static [Part],
    ask: Ask,
    start: fn(&Scene<'_>) -> Result<Vec<Service>, Unavailable>,
) -> Row {
    Row { name, is_ours: false, parts, ask, caches: true, is_quick: true, start }
}

const fn ours(
    name: &'static str,
    parts: &'static [Part],
    ask: Ask,
    start: fn(&Scene<'_>) -> Result<Vec<Service>, Unavailable>,
) -> Row {
    Row { is_ours: true, ..row(name, parts, ask, start) }
}

impl Row {
    /// Returns the rows of a part.
    pub(super) fn of(part: Part, quick: bool) -> impl Iterator<Item = &'static Self> {
        ROWS.iter().filter(move |row| row.parts.contains(&part) && (row.is_quick || !quick))
    }

    /// Returns the row of this name.
    #[must_use]
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        ROWS.iter().find(|row| row.name == name)
    }

    /// Returns true if a column's requests must reach the origin.
    #[must_use]
    pub(super) fn asks_origin(&self, cell: &Cell) -> bool {
        !self.caches || !cell.is_hit()
    }

    /// Returns the job of the load generator.
    #[must_use]
    pub(super) fn load(&self, scene: &Scene<'_>, cell: &Cell) -> Spec {
        let tls = cell.part == Part::Tls;
        let port = if tls { origin::TLS_PORT } else { origin::PORT };
        let destination = SocketAddr::from((scene.site.proxy_server.b.v4, port));
        let proxy = scene.site.proxy_address(PROXY_PORT);
        let authority = format!("{ORIGIN_NAME}:{port}");
        let (dial, via, path) = match (self.ask, cell.part) {
            (Ask::Direct, _) => {
                let origin = SocketAddr::from((scene.site.client_server.b.v4, port));
                (origin, Via::Plain, cell.path.to_owned())
            }
            (Ask::Origin, _) => (proxy, Via::Plain, cell.path.to_owned()),
            (Ask::Proxy, Part::Tunnel | Part::Tls) => (proxy, Via::HttpConnect, cell.path.to_owned()),
            (Ask::Proxy, _) => (proxy, Via::Plain, format!("http://{authority}{}", cell.path)),
        };
        Spec {
            work: cell.work,
            connections: cell.connections,
            dial,
            via,
            destination,
            authority: Some(authority),
            tls,
            path,
            fast_open: false,
            warmup_ms: 0,
            window_ms: 0,
            max_requests: u64::MAX,
            per_second: None,
        }
    }
}
