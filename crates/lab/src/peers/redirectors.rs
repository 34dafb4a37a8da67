//! Redirectors: they catch the client's connections to the origin and send them through a SOCKS proxy. The client is
//! not changed.

use std::net::SocketAddr;

use super::proxies::Proxy;
use super::{Running, Start, Table, Unavailable, installed, ours, running, socksx};
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;

const REDSOCKS_PORT: u16 = 12345;

/// A redirector in the client's node. It runs on the proxy's CPU, so its cost counts for the pair, not for the
/// client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Redirector {
    /// redsocks, SOCKS5, IPv4.
    Redsocks,
    /// The `redirector` example of socksx, speaking SOCKS `5` or `6`, IPv4.
    Socksx(socksx::Version, u8),
    /// Ours with a carrier such as `socks6` and options such as `?tfo=true`.
    Ours {
        /// Scheme of the hop.
        scheme: &'static str,
        /// Options behind its address.
        options: &'static str,
        /// Whether it waits for first bytes that may travel with the request, if the hop allows that.
        waits: bool,
    },
}

/// A started redirector; dropping it ends the program and removes its rule.
#[derive(Debug)]
pub struct Redirecting<'s> {
    /// The program.
    pub service: Service,
    /// Its rule, if it does not set one itself.
    table: Option<Table<'s>>,
}

impl Redirecting<'_> {
    /// A program that sets its rules itself.
    #[must_use]
    pub fn by_itself(service: Service) -> Self {
        Self { service, table: None }
    }
}

impl Redirector {
    /// Starts it in front of the proxy at `gateway` and redirects connections to the origin's ports.
    ///
    /// # Errors
    /// It is absent or does not start.
    pub fn start(self, site: &Site, gateway: SocketAddr) -> Result<Redirecting<'_>, Unavailable> {
        let (service, port) = match self {
            Self::Redsocks => (redsocks(site, gateway)?, REDSOCKS_PORT),
            Self::Socksx(version, socks) => {
                (socksx::redirector(site, version, socks, gateway)?, socksx::REDIRECTOR_PORT)
            }
            Self::Ours { scheme, options, waits } => {
                let hops = [format!("{scheme}://{gateway}{options}")];
                let service =
                    if waits { ours::redirector(site, &hops)? } else { ours::plain_redirector(site, &hops)? };
                return Ok(Redirecting::by_itself(service));
            }
        };
        let table = Some(Table::redirect(site, port)?);
        Ok(Redirecting { service, table })
    }
}

/// Redirector and proxy as a row.
pub(super) fn pair(site: &Site, redirector: Redirector, proxy: Proxy) -> Start<'_> {
    let service = proxy.start(site)?;
    let redirecting = redirector.start(site, site.proxy_address(proxy.port()))?;
    let tables = redirecting.table.into_iter().collect();
    let services = vec![redirecting.service, service];
    Ok(Running { _tables: tables, ..running(site, services, (site.origin(), Via::Plain)) })
}

fn redsocks(site: &Site, gateway: SocketAddr) -> Result<Service, Unavailable> {
    installed("redsocks")?;
    let config = site.directory.path().join("redsocks.conf");
    let text = format!(
        "base {{ log_debug = off; log_info = off; log = stderr; daemon = off; redirector = iptables; \
         redsocks_conn_max = 9000; }}
redsocks {{ local_ip = 127.0.0.1; local_port = {REDSOCKS_PORT}; listenq = 8192; ip = {}; port = {}; type = socks5; }}
",
        gateway.ip(),
        gateway.port()
    );
    std::fs::write(&config, text)?;
    let mut command = site.client.command_at("redsocks", &site.proxy_placement());
    command.arg("-c").arg(&config);
    let mut service = Service::start("redsocks", command, site.directory.path())?;
    service.wait_listening(&site.client, REDSOCKS_PORT)?;
    Ok(service)
}
